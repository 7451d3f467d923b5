"""The cell of a multiscale DEQ with few, large operations: the same function, computed faster.

    `MDEQCell.forward`                  here
    one convolution for each pair       those that share their input are one with all outputs
    norm, add, relu, norm ...           one kernel (`gdeq.fast.kernels.norms`)
    weights normalised, cast, ordered   once for each solve (`Prepared`), not at each evaluation
    one scale after another             side by side, on CUDA streams of their own
    one tensor for each scale           views of one buffer, all samples of a scale together

Everything is channels-last.  Convolutions compute in the dtype of autocast, or of z without it;
statistics and sums of the norms in float32; the result has the dtype of z.

Streams j → i > j pass i − j strided convolutions.  Level l of all of them is one convolution: at
l = 1 they share the input; further down each has its own, and the weight is block diagonal.  The
zeros cost little, since these maps are small, and a launch less is worth more:

    level 1 of stream 0 (four scales)    [ →1 | →2 | →3 ]    from C₀
    level 2                              [ →2 | →3 ]         from 2 C₀, block diagonal
    level 3                              [ →3 ]              from C₀

The first part of each level has arrived; the norms of the rest have groups of the same size and
are one call.  Streams j → i < j are 1×1 convolutions at the low resolution, one for all i.

A solve begins at z = 0.  There the first block of each scale makes the same of all samples, of the
weights alone, until the injection comes in: its two convolutions, more than half of f, are left out
(`Prepared.at_zero`).  That supposes finite weights; the next evaluation shows others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdeq.fast.kernels.norms import Source, block_end, fuse, norm_act, slices
from gdeq.fast.mdeq.convolution import convolution
from gdeq.fast.mdeq.weights import Weights
from gdeq.fast.streams import Serial, side_by_side
from gdeq.models.mdeq import MDEQCell, MultiscaleState


def evaluate(
    cell: MDEQCell,
    weights: Weights,
    z: MultiscaleState,
    injection: Tensor,
    masks: dict[nn.Module, Tensor],
    at_zero: Sequence[Tensor] | None = None,
) -> MultiscaleState:
    """f(z, injection) with all its tensors given; makes nothing that a CUDA graph cannot hold.

    masks: of the dropouts that drop, (batch, channels).
    at_zero: where z is zero, `Prepared.at_zero`; without autograd.
    """
    scales, last = range(len(z)), len(z) - 1
    grad = torch.is_grad_enabled()
    if grad:
        weights = weights.per_sample(len(z[0]))
        # Aliases, because gradients of leaves must arrive on the current stream.
        z = tuple(part.view_as(part) for part in z)
    injection = injection.to(weights.dtype, memory_format=torch.channels_last)
    results: Sequence[Any] = [None] * len(z) if grad else in_one_buffer(z)
    # The ways up have branches of their own, beside the longer ones down.
    branches = side_by_side(z[0].device, 2 * len(z) - 1)
    under_way = _Evaluation(cell, weights, masks, branches)  # keeps tensors until `join`
    for j in scales:
        with branches.on(j):
            reduced = None if at_zero is None else at_zero[j]
            branches.reads(z[j], reduced, weights.made, masks)
            readers = 1 + (j < last) + (j > 0)
            y, *same = under_way.blocks(j, z[j], injection if j == 0 else None, reduced, readers)
            branches.mark(j)
            if j < last:
                under_way.ways_down(j, same.pop())
        if j > 0:
            with branches.on(last + j):
                branches.await_(j)
                branches.reads(y, weights.made)
                under_way.ways_up(j, same.pop())
                branches.mark((j, "up"))
    found = []
    for i in scales:
        with branches.on(i):
            for j in scales:
                if j != i:
                    branches.await_((j, i) if j < i else (j, "up"))
            found.append(under_way.fused(i, results[i], z[i].dtype))
    branches.join(found)
    return tuple(found)


class _Evaluation:
    """One evaluation of f: its tensors, and what has arrived at the scales."""

    def __init__(
        self, cell: MDEQCell, weights: Weights, masks: dict[nn.Module, Tensor], branches: Serial
    ) -> None:
        self.scales: list[Any] = list(cell.scales)
        self.fusions: list[Any] = list(cell.fusions)
        self.channels = cell.config.channels
        self.weights, self.masks, self.branches = weights, masks, branches
        self.streams: list[Tensor] = []
        self.arrived: dict[tuple[int, int], Source] = {}
        self.alive: list[Any] = []

    def blocks(
        self, j: int, z: Tensor, injection: Tensor | None, reduced: Tensor | None, readers: int
    ) -> list[Tensor]:
        """The residual blocks of scale j; the result is given once for each of its readers.

        reduced: of one sample, what the convolutions of the first block make of z, where known.
        """
        blocks, norms = self.scales[j].blocks, self.weights.norms
        results = [z.to(self.weights.dtype, memory_format=torch.channels_last)]
        for i, block in enumerate(blocks):
            if i == 0 and reduced is not None:
                reduced = reduced.expand_as(z)  # kernels read the one sample for each
            else:
                expanded = self._convolved(results[0], block.expand, padding=1)
                inner = self._normalised(expanded, block.expand_norm, relu=True)
                reduced = self._convolved(inner, block.reduce, padding=1)
            results = block_end(
                reduced,
                self.masks.get(block.dropout),
                injection if i == 0 else None,
                z,
                *norms[block.reduce_norm].affine,
                *norms[block.sum_norm].affine,
                block.reduce_norm.num_groups,
                block.reduce_norm.eps,
                readers=readers if i == len(blocks) - 1 else 1,
            )
            z = results[0]
            self.alive.append((results, reduced))
        self.streams.append(z)
        return results

    def ways_down(self, j: int, passing: Tensor) -> None:
        """From stream j to all lower resolutions, level by level."""
        for i in range(j + 1, len(self.scales)):
            way, width = ("down", j, i - j), self.channels[i]
            joined = self._convolved(passing, way, stride=2, padding=1)
            here, *rest = self._apart(joined, [width, joined.shape[1] - width])
            norm = self.weights.norms[self.fusions[i].down[j][-1]]
            self.arrived[j, i] = Source(here, *norm.affine, 0)
            self.branches.mark((j, i))
            if rest:
                passing = self._normalised(rest[0], way, relu=True)

    def ways_up(self, j: int, y: Tensor) -> None:
        """From stream j to all higher resolutions, before their pixels are repeated."""
        parts = self._apart(self._convolved(y, ("up", j)), self.channels[:j])
        for i, part in enumerate(parts):
            norm = self.weights.norms[self.fusions[i].up[j - i - 1].norm]
            self.arrived[j, i] = Source(part, *norm.affine, j - i)

    def fused(self, i: int, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The result at scale i."""
        sources = [self.arrived[j, i] for j in range(len(self.scales)) if j != i]
        self.branches.reads(*sources)
        norm = self.scales[i].blocks[0].sum_norm  # all norms of so many channels are alike
        total = fuse(self.streams[i], sources, norm.num_groups, norm.eps)
        self.alive.append(total)
        raw = self._convolved(total, self.fusions[i].post)
        return self._normalised(raw, self.fusions[i].post_norm, out=out, dtype=dtype)

    def _convolved(self, x: Tensor, key: Hashable, stride: int = 1, padding: int = 0) -> Tensor:
        weight, pairs = self.weights.convs[key], self.weights.pairs.get(key)
        y = convolution(x, weight, stride, padding, pairs)
        self.alive.append((x, y))
        return y

    def _normalised(self, x: Tensor, key: Hashable, relu: bool = False, **to: Any) -> Tensor:
        norm = self.weights.norms[key]
        y = norm_act(x, norm.groups, *norm.affine, norm.eps, relu, **to)
        self.alive.append(y)
        return y

    def _apart(self, joined: Tensor, channels: Sequence[int]) -> list[Tensor]:
        """Each part goes to another scale, and its gradient comes back on that one's stream."""
        channels = [width for width in channels if width > 0]
        return slices(joined, channels, across_streams=True) if len(channels) > 1 else [joined]


def in_one_buffer(like: MultiscaleState) -> MultiscaleState:
    """Uninitialised memory for such tensors: channels-last, one after another."""
    size = sum(part.numel() for part in like)
    buffer = torch.empty(size, dtype=like[0].dtype, device=like[0].device)
    return _views(buffer, [tuple(part.shape) for part in like])


def zeros(shapes: Sequence[tuple[int, ...]], like: Tensor) -> MultiscaleState:
    """Zeros of these shapes in such memory, where a solve can begin as they lie."""
    return _views(like.new_zeros(sum(map(math.prod, shapes))), shapes)


def _views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> MultiscaleState:
    parts = buffer.split([math.prod(shape) for shape in shapes])
    return tuple(
        part.data.view(n, h, w, c).permute(0, 3, 1, 2)
        for part, (n, c, h, w) in zip(parts, shapes, strict=True)
    )
