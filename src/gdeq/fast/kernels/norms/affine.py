"""Scales and shifts of norms, (channels,), or (batch, channels) for each sample its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiates

Vector = Tensor | None


def affine_arguments(vectors: Sequence[Vector]) -> tuple[list[tuple[Tensor, ...]], int]:
    """Scale and shift of each norm as kernels take them, none where there is none, and the common
    stride of samples."""
    present = [vector for vector in vectors if vector is not None]
    found, sample = list(vectors), 0
    steps = {(vector.dim(), vector.stride(0), vector.stride(-1)) for vector in present}
    if any(vector.dim() == 2 for vector in present):
        batch, channels = max(vector.shape for vector in present if vector.dim() == 2)
        dim, sample, channel = steps.pop()
        if steps or dim == 1 or (channel != 1 and channels > 1):
            found = [None if v is None else v.expand(batch, channels).contiguous() for v in found]
            sample = channels
    else:
        found = [None if v is None else v.contiguous() for v in found]
    if any(scale is None and shift is not None for scale, shift in _pairs(vectors)):
        raise ValueError("a norm that shifts must scale, too")
    return [tuple(v for v in pair if v is not None) for pair in _pairs(found)], sample


def _pairs(vectors: Sequence[Vector]) -> list[tuple[Vector, Vector]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def summed(sums: Tensor, vectors: Sequence[Vector], wanted: Sequence[bool]) -> list[Vector]:
    """Gradients of scales and shifts from the sums of each sample, (vectors, batch, channels)."""
    asked = [v if w else None for v, w in zip(vectors, wanted, strict=True)]
    over_batch = any(v is not None and v.dim() == 1 for v in asked)
    totals = sums.sum(1) if over_batch else sums
    return [
        None if v is None else (totals if v.dim() == 1 else sums)[i].to(v.dtype)
        for i, v in enumerate(asked)
    ]


def per_sample(vectors: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Each vector once for each sample, (batch, channels), without a copy.

    Backward sums the gradients of all of them over the batch together.
    """
    if not differentiates(*vectors):
        return [vector.expand(batch, -1) for vector in vectors]
    return list(_PerSample.apply(batch, *vectors))


class _PerSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.kinds = [(len(vector), vector.dtype) for vector in vectors]
        return tuple(vector.detach().expand(batch, -1) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sizes = [size for size, _ in ctx.kinds]
        totals = torch.cat(gradients, dim=1).sum(0).split(sizes)
        kinds = zip(totals, ctx.kinds, ctx.needs_input_grad[1:], strict=True)
        return None, *(total.to(dtype) if asked else None for total, (_, dtype), asked in kinds)
