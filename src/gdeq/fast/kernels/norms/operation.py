"""What all operations with group norms share: the choice of kernel or plain function, autograd."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiable, differentiates, wanted_now
from gdeq.fast.kernels.norms.affine import Vector, summed
from gdeq.fast.kernels.norms.tensors import destination, empty_channels_last, runs

Maps = Sequence[Any]  # (batch, channels, height, width); None where there is none
Vectors = Sequence[Any]  # scale and shift of the first norm, then of the next, or None


@dataclass(frozen=True)
class Call:
    """What an operation is given, and makes.

    stats: where the forward kernel leaves mean and ρ of each norm, (2 norms, batch, groups).
    """

    maps: Maps
    vectors: Vectors
    out: Any  # backward None, unless `Operation.backward_reads_out`
    stats: Tensor


class Operation(ABC):
    """An operation with some norms, and with its options: kernels and the plain function."""

    groups: int
    norms: int
    readers: int = 1  # so many times is the result given, in one memory
    backward_reads_out = False

    @abstractmethod
    def plain(
        self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype
    ) -> Tensor: ...

    @abstractmethod
    def launch(self, call: Call) -> None: ...

    @abstractmethod
    def launch_backward(
        self, call: Call, douts: Sequence[Tensor], sums: Tensor, wanted: Sequence[bool]
    ) -> list[Vector]:
        """The gradients of the maps.

        douts: from each reader that has one.
        sums: where the gradients of scale and shift of each norm go, of each sample,
            (2 norms, batch, channels).
        wanted: of which maps, then of which vectors.
        """

    def __call__(
        self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype | None
    ) -> Any:
        like = _first(maps)
        dtype = dtype or like.dtype
        differentiated = differentiates(*maps, *vectors)
        if differentiated and out is not None:
            raise ValueError("out= cannot be used where gradients are wanted")
        if not runs(*maps, *vectors, out):
            return self.plain(maps, vectors, out, dtype)
        if differentiated:
            return _Differentiated.apply(self, dtype, *maps, *vectors)
        out = destination(like, out, dtype)
        self.launch(Call(maps, vectors, out, self.statistics(like)))
        return out

    def statistics(self, like: Tensor) -> Tensor:
        """Memory for them.  Kernels always fill it: that costs next to nothing, and one that did
        not would be another to compile."""
        return like.new_empty((2 * self.norms, len(like), self.groups), dtype=torch.float32)

    def parts(self, tensors: Sequence[Any]) -> tuple[Maps, Vectors]:
        maps = len(tensors) - 2 * self.norms
        return tensors[:maps], tensors[maps:]


def _first(maps: Maps) -> Tensor:
    """The result is like this one."""
    return next(x for x in maps if x is not None)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, dtype: torch.dtype, *tensors: Vector) -> Any:
        maps, vectors = operation.parts(tensors)
        like = _first(maps)
        out = empty_channels_last(like.shape, dtype, like.device)
        stats = operation.statistics(like)
        operation.launch(Call(maps, vectors, out, stats))
        # Some of it for second derivatives alone.
        ctx.save_for_backward(stats, out if operation.backward_reads_out else None, *tensors)
        ctx.operation, ctx.dtype = operation, dtype
        if operation.readers == 1:
            return out
        ctx.set_materialize_grads(False)
        return tuple(out.data for _ in range(operation.readers))

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        stats, out, *tensors = ctx.saved_tensors
        operation: Operation = ctx.operation
        douts = [dout for dout in given if dout is not None]
        if not douts:
            return None, None, *(None for _ in tensors)
        if torch.is_grad_enabled():

            def plain(*tensors: Vector) -> Tensor:
                return operation.plain(*operation.parts(tensors), None, ctx.dtype)

            wanted, total = ctx.needs_input_grad[2:], functools.reduce(add, douts)
            return None, None, *differentiable(plain, tensors, wanted, total)
        wanted = wanted_now(ctx, (None, None, *tensors))[2:]
        maps, vectors = operation.parts(tensors)
        sums = stats.new_empty((len(vectors), *_first(maps).shape[:2]))
        call = Call(maps, vectors, out, stats)
        found = operation.launch_backward(call, douts, sums, wanted)
        return None, None, *found, *summed(sums, vectors, wanted[len(maps) :])
