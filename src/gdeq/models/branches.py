"""Branches of one computation: in turn, or side by side on CUDA streams of their own.

branches = Parallel(device, 2, torch.is_grad_enabled()) if x.is_cuda else Serial()
with branches.on(1):
    branches.reads(x)        # made outside, or on another branch
    y = f(x)
    branches.mark("y")
with branches.on(0):
    z = g(x)
    branches.await_("y")     # before the first operation that reads it
    branches.reads(y)
    total = y + z
branches.join([total])       # y and z are kept until here

A branch begins by waiting for the stream on which it was opened: memory that was freed there is not
written before all that read it is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gdeq.fast import streams


class Serial:
    """Everything on the current stream."""

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        """What is inside runs on this branch."""
        yield

    def mark(self, name: Hashable) -> None:
        """What this branch has done so far can be waited for by this name."""

    def await_(self, name: Hashable) -> None:
        """This branch goes on after what was marked so."""

    def reads(self, *values: Any) -> None:
        """Tensors in these, made on other branches, are read on this one."""

    def join(self, results: Sequence[Tensor]) -> None:
        """The current stream goes on after all branches, and reads these results of theirs."""


_streams: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}


class Parallel(Serial):
    """Branch 0 on the current stream, each other one on its own.

    What is allocated on a stream is free for that stream's next work as soon as nothing refers to
    it, although another one may still read it.  So the caller keeps all of it until `join`; the
    next evaluation starts after that.  One from another current stream might not, and has other
    streams.

    grad: autograd keeps tensors longer, and frees them one by one in its backward pass, where each
    operation runs on the stream of its forward one.  Autograd itself lets streams wait for each
    other's gradients and guards those; what forward operations read from another stream is told to
    the allocator here (`reads`), which then does not give the memory away too early.
    """

    def __init__(self, device: torch.device, branches: int, grad: bool) -> None:
        self.grad = grad
        self.main = torch.cuda.current_stream(device)
        kept = _streams.setdefault((device, self.main.cuda_stream), [])
        while len(kept) < branches - 1:
            kept.append(streams.beside(self.main, device))
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
            seen = {
                tensor.untyped_storage().data_ptr(): tensor for tensor in streams.tensors_in(values)
            }
            for tensor in seen.values():
                tensor.record_stream(stream)

    def join(self, results: Sequence[Tensor]) -> None:
        for side in self.sides:
            self.main.wait_event(side.record_event())
        self.reads(*results)
