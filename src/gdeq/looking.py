"""Whether the host may read values from a device now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Not a context variable: backward passes run in threads of their own.
_hidden = [False]


def host_may_look(device: torch.device) -> bool:
    """False while the work under way is recorded to be replayed later: it has no values yet.

    Where this is False, compute both outcomes and select; elsewhere a look may save work.
    """
    if device.type == "cpu":
        return True
    recording = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return not (_hidden[-1] or (recording is not None and recording()))


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """While this is open, work on a device behaves as if it were being recorded."""
    _hidden.append(True)
    try:
        yield
    finally:
        _hidden.pop()
