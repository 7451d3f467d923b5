"""Slices over the channels of one map, whose gradients need not be put together again.

The backward of `split` copies the gradients of all slices beside each other.  Here each operation
whose input is such a slice writes its gradient where it belongs (`gradient_like`).  A slice that
another operation reads, or two do, has its gradient elsewhere, and then all are copied as ever.

The first to write allocates the memory for all, so all readers must be on the stream that `slices`
was called on.  Or the memory is there from the beginning, for readers on any stream, and is used by
one backward pass after another: for an x whose gradient nobody keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.norms.tensors import empty_channels_last, empty_like


def slices(
    x: Tensor, sizes: Sequence[int], across_streams: bool = False
) -> list[Tensor]:  # (batch, channels, height, width)
    """`x.split(sizes, dim=1)`.

    across_streams: the second way above.
    """
    if not differentiates(x):
        return list(x.split(list(sizes), dim=1))
    home = _Home(x.shape, sizes, empty_like(x) if across_streams else None)
    found = list(_Slices.apply(x, home))
    for i, part in enumerate(found):
        part.gradient_place = home, i
    return found


def gradient_like(x: Tensor) -> Tensor:
    """Memory for the gradient of x, channels-last."""
    home, i = getattr(x, "gradient_place", (None, 0))
    return empty_like(x) if home is None else home.place(i, x)


def _this_pass() -> int:
    """The number of the backward pass that runs here."""
    return torch._C._current_graph_task_id()


class _Home:
    """The memory for the gradients of one backward pass.

    given: for all passes.
    """

    def __init__(self, shape: torch.Size, sizes: Sequence[int], given: Tensor | None) -> None:
        self.shape, self.sizes, self.given = shape, list(sizes), given
        self.forget()

    def forget(self) -> None:
        self.memory = self.given
        self.taken: set[int] = set()
        self.owner: int | None = None  # the pass that has what was given

    def place(self, i: int, like: Tensor) -> Tensor:
        if self.given is not None:
            # Not while another pass has it: one that is under way, or one that ended at the slices,
            # whose gradients stay.
            if self.owner not in (None, _this_pass()) or i in self.taken:
                return empty_like(like)
            self.owner = _this_pass()
            if self.given.is_cuda:  # made on another stream, and not to be free before this one
                self.given.record_stream(torch.cuda.current_stream(self.given.device))
        elif self.memory is None or i in self.taken:
            # Asked again: a pass before this one ended at the slices, and its gradients stay.
            self.forget()
            self.memory = empty_channels_last(self.shape, like.dtype, like.device)
        assert self.memory is not None
        self.taken.add(i)
        return self.memory.split(self.sizes, dim=1)[i]

    def passed(self) -> None:
        """This pass has left the slices behind."""
        if self.given is None or self.owner == _this_pass():
            self.forget()

    def holds(self, gradients: Sequence[Tensor]) -> bool:
        if self.memory is None:
            return False
        places = self.memory.split(self.sizes, dim=1)
        return all(
            e.data_ptr() == place.data_ptr() and e.stride() == place.stride()
            for e, place in zip(gradients, places, strict=True)
        )


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, home: _Home) -> tuple[Tensor, ...]:
        ctx.home = home
        return tuple(part.data for part in x.split(home.sizes, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        memory, whole = ctx.home.memory, ctx.home.holds(gradients)
        ctx.home.passed()
        return (memory if whole else torch.cat(gradients, dim=1)), None
