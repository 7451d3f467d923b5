"""Parts of a tensor that are made before the rest of it.

A solver's step writes a whole state, while an f of several branches, on streams of their own, can
begin with the parts that are there.  Who makes the state announces for the time of one call of f:

    with announced(buffer, first, event):    # from number `first` on, it is complete at the event
        f(parts of the buffer)

and f asks, for tensors that it was given, whether they lie in that part (`ready`).  What was
computed from them lies elsewhere and is not mistaken for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

_announced: list[tuple[Tensor, int, Any]] = []


@contextlib.contextmanager
def announced(buffer: Tensor, first: int, event: Any) -> Iterator[None]:
    """buffer: contiguous.  event: None if there is nothing to announce."""
    if event is None:
        yield
        return
    _announced.append((buffer, first, event))
    try:
        yield
    finally:
        _announced.pop()


def ready(tensors: Sequence[Tensor]) -> Any:
    """The event at which all of these are complete, if that was announced; else None."""
    if not _announced or not tensors:
        return None
    buffer, first, event = _announced[-1]
    low = buffer.data_ptr() + first * buffer.element_size()
    high = buffer.data_ptr() + buffer.numel() * buffer.element_size()
    inside = all(
        t.device == buffer.device and low <= t.data_ptr() and t.data_ptr() < high for t in tensors
    )
    return event if inside else None
