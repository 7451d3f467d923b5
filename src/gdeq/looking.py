"""Whether the host may read values from a device now, and for whom it decides."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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


class _Together(threading.local):
    groups: tuple[Any, ...] = ()  # process groups whose members evaluate f at the same time


_together = _Together()


def anywhere(mask: Tensor) -> bool:
    """Whether the mask holds for any sample, here or on a process that evaluates f with us."""
    found = mask.any()
    for group in _together.groups:
        found = found.int()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return bool(found)


@contextlib.contextmanager
def together(groups: tuple[Any, ...]) -> Iterator[None]:
    """While this is open, the members of these process groups decide alike how often f is called.

    Each evaluation of a sharded f is a conversation between them: all must make the same number.
    """
    before, _together.groups = _together.groups, groups
    try:
        yield
    finally:
        _together.groups = before
