"""Whether the work under way is, or will be, part of a CUDA graph, where nothing can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Not a context variable: the backward pass runs in a thread of its own.
_rehearsing = [False]


def recording(device: torch.device) -> bool:
    """A solver must then go on to its last step, as it cannot ask whether all samples are done."""
    if device.type != "cuda":
        return False
    return _rehearsing[-1] or torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Behave as in a recording without being one."""
    _rehearsing.append(True)
    try:
        yield
    finally:
        _rehearsing.pop()
