"""What all operations here share: the choice of kernel or plain function, and autograd."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import add
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiable, differentiates, wanted_now
from gdeq.fast.kernels.norms.affine import Vector, summed
from gdeq.fast.kernels.norms.tensors import destination, empty_channels_last, runs

Maps = Sequence[Any]  # (batch, channels, height, width); None where there is none
Vectors = Sequence[Any]  # scale and shift of the first norm, then of the next, or None


class Operation(ABC):
    """An operation with some norms, and with its options: kernels and the plain function.

    stats: where the forward kernel leaves mean and ρ of each norm, (2 norms, batch, groups).
    sums: where the backward kernel leaves the gradients of scale and shift of each norm, of each
        sample, (2 norms, batch, channels).
    """

    groups: int
    norms: int
    readers: int = 1  # so many times is the result given, in one memory
    backward_reads_out = False

    @abstractmethod
    def plain(
        self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype
    ) -> Tensor: ...

    @abstractmethod
    def launch(self, maps: Maps, vectors: Vectors, out: Tensor, stats: Tensor | None) -> None: ...

    @abstractmethod
    def launch_backward(
        self,
        maps: Maps,
        vectors: Vectors,
        out: Tensor | None,
        stats: Tensor,
        dout: Tensor,
        sums: Tensor,
        wanted: Sequence[bool],
        others: Sequence[Tensor] = (),
    ) -> list[Vector]:
        """The gradients of the maps.  wanted: of which maps, then of which vectors.

        others: to be added to dout, where there is more than one reader.
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
        self.launch(maps, vectors, out, None)
        return out

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
        stats = like.new_empty(
            (2 * operation.norms, len(like), operation.groups), dtype=torch.float32
        )
        operation.launch(maps, vectors, out, stats)
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
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():

            def plain(*tensors: Vector) -> Tensor:
                return operation.plain(*operation.parts(tensors), None, ctx.dtype)

            return None, None, *differentiable(plain, tensors, wanted, functools.reduce(add, douts))
        wanted = wanted_now(ctx, (None, None, *tensors))[2:]
        maps, vectors = operation.parts(tensors)
        batch, channels = _first(maps).shape[:2]
        sums = stats.new_empty((len(vectors), batch, channels))
        more = {"others": douts[1:]} if len(douts) > 1 else {}
        found = operation.launch_backward(maps, vectors, out, stats, douts[0], sums, wanted, **more)
        return None, None, *found, *summed(sums, vectors, wanted[len(maps) :])
