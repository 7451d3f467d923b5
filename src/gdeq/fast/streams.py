"""CUDA streams that differ from each other, and branches of one computation on them.

PyTorch has a pool of 32 streams and hands them out in turn.  Two branches of one computation that
get the same stream run one after the other, and in a recorded graph they do so at every replay.
So `beside`, `new_main` and `for_all` keep asking until the stream differs from all that are in use
for the same computation.

    branches = side_by_side(x.device, 2)
    with branches.on(1):
        branches.reads(x)        # made outside, or on another branch
        y = f(x)
        branches.mark("y")
    with branches.on(0):
        z = g(x)
        branches.await_("y")     # before the first operation that reads it
        branches.reads(y)
        total = y + z
    branches.join([total])       # the caller keeps y and z until here

A branch begins by waiting for the stream on which it was opened, so that memory that was freed
there is not overwritten while someone still reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

POOL = 32
_families: dict[tuple[torch.device, int], set[int]] = {}
_of_all: dict[torch.device, set[int]] = {}


def new_main(device: torch.device) -> torch.cuda.Stream:
    """A stream for a computation of its own."""
    return _apart(device, _of_all.setdefault(device, set()))


def beside(main: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """A stream for a branch of what runs on ``main``, unlike those of its other branches."""
    family = _families.setdefault((device, main.cuda_stream), {main.cuda_stream})
    side = _apart(device, family | _of_all.setdefault(device, set()))
    family.add(side.cuda_stream)
    return side


def for_all(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams for work that every computation hands over."""
    taken = _of_all.setdefault(device, set())
    families = set().union(*(family for (of, _), family in _families.items() if of == device))
    found = []
    for _ in range(count):
        found.append(_apart(device, taken | families))
        taken.add(found[-1].cuda_stream)
    return found


def _apart(device: torch.device, others: set[int]) -> torch.cuda.Stream:
    """A stream that is none of the others; if those are the whole pool, two share one."""
    stream = torch.cuda.Stream(device)
    for _ in range(POOL):
        if stream.cuda_stream not in others:
            break
        stream = torch.cuda.Stream(device)
    return stream


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
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


# ---- branches


class Serial:
    """Branches in turn: everything on the current stream."""

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        """Run what is inside on this branch."""
        yield

    def mark(self, name: Hashable) -> None:
        """Give what this branch has done so far a name that others can wait for."""

    def await_(self, name: Hashable) -> None:
        """Let this branch go on only after what was marked so."""

    def reads(self, *values: Any) -> None:
        """Say that this branch reads tensors, nested in these values, of other branches."""

    def join(self, results: Sequence[Tensor]) -> None:
        """Let the current stream go on after all branches; it reads these results of theirs."""


_streams: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}


class Parallel(Serial):
    """Branch 0 on the current stream, each other one on a stream of its own.

    What is allocated on a stream is free for that stream's next work as soon as nothing refers to
    it, although another stream may still read it.  So the caller keeps all of it until `join`; the
    next computation on the same main stream starts after that.  One from another main stream might
    not, and has other streams.

    grad: autograd keeps tensors longer, and frees them one by one in its backward pass, where each
    operation runs on the stream of its forward one.  Autograd itself lets streams wait for each
    other's gradients and guards those; what forward operations read from another stream is told to
    the allocator by `reads`, which then does not give the memory away too early.
    """

    def __init__(self, device: torch.device, branches: int, grad: bool) -> None:
        self.grad = grad
        self.main = torch.cuda.current_stream(device)
        kept = _streams.setdefault((device, self.main.cuda_stream), [])
        while len(kept) < branches - 1:
            kept.append(beside(self.main, device))
        self.sides = kept[: branches - 1]
        self.marks: dict[Hashable, torch.cuda.Event] = {}
        start = self.main.record_event()
        for side in self.sides:
            side.wait_event(start)

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        with torch.cuda.stream(self.sides[branch - 1] if branch else self.main):
            yield

    def mark(self, name: Hashable) -> None:
        self.marks[name] = torch.cuda.current_stream(self.main.device).record_event()

    def await_(self, name: Hashable) -> None:
        torch.cuda.current_stream(self.main.device).wait_event(self.marks[name])

    def reads(self, *values: Any) -> None:
        if self.grad:
            stream = torch.cuda.current_stream(self.main.device)
            seen = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(values)}
            for tensor in seen.values():
                tensor.record_stream(stream)

    def join(self, results: Sequence[Tensor]) -> None:
        for side in self.sides:
            self.main.wait_event(side.record_event())
        self.reads(*results)


def side_by_side(device: torch.device, branches: int) -> Serial:
    """So many branches: in parallel on a GPU, in turn elsewhere."""
    if device.type == "cuda":
        return Parallel(device, branches, torch.is_grad_enabled())
    return Serial()
