"""CUDA streams that are not each other.

PyTorch has 32 and gives them in turn, to each who asks, over and over.  Two branches of one
computation that were given the same one run one after the other, and in a recorded graph for ever.
So a stream is taken here, apart from all that were taken for the same main stream, or for all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

POOL = 32
_families: dict[tuple[torch.device, int], set[int]] = {}
_of_all: dict[torch.device, set[int]] = {}


def new_main(device: torch.device) -> torch.cuda.Stream:
    """For a computation of its own."""
    return _apart(device, _of_all.setdefault(device, set()))


def beside(main: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """For a branch of what runs on this one; its own branches are of the same family."""
    family = _families.setdefault((device, main.cuda_stream), {main.cuda_stream})
    side = _apart(device, family | _of_all.setdefault(device, set()))
    family.add(side.cuda_stream)
    return side


def for_all(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """For work that every computation hands over."""
    taken = _of_all.setdefault(device, set())
    families = set().union(*(family for (of, _), family in _families.items() if of == device))
    found = []
    for _ in range(count):
        found.append(_apart(device, taken | families))
        taken.add(found[-1].cuda_stream)
    return found


def _apart(device: torch.device, others: set[int]) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)
    for _ in range(POOL):
        if stream.cuda_stream not in others:
            break
        stream = torch.cuda.Stream(device)
    return stream  # of too many, one twice


def tensors_in(value: Any) -> list[Tensor]:
    """In nested tuples, lists, dicts and dataclasses: what one stream reads of another."""
    if isinstance(value, Tensor):
        return [value]
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [tensor for part in parts for tensor in tensors_in(part)]
