"""Decisions that several processes take alike: how often f is called.

Each evaluation of a sharded f is a conversation between the processes that hold its parts, so all
of them must make the same number.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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
    """While this is open, `anywhere` asks all members of these process groups."""
    before, _together.groups = _together.groups, groups
    try:
        yield
    finally:
        _together.groups = before
