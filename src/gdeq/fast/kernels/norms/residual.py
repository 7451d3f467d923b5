"""block_end: the end of a residual block, norm₂(relu(z + norm₁(y · mask + injection)))."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms import held_block, held_block_forward
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.operation import Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    first_of_group,
    inverse_deviation,
    join_moments,
    keep_pair,
    kept_pair,
    means_along,
    moments,
    norm_gradient,
    normalise,
    place,
    read,
    rectify,
    rows_from,
    scale_and_shift,
    unit_of,
    write,
)
from gdeq.fast.kernels.norms.single import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.tensors import (
    at_least_float32,
    channels_last,
    channels_last_or,
    empty_channels_last,
    empty_like,
    runs,
)
from gdeq.fast.kernels.norms.tiles import launch


def block_end_plain(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    groups: int,
    eps: float = 1e-5,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    return BlockEnd(groups, eps).plain(maps, vectors, out, dtype or y.dtype)


def _composed(
    norm: Callable[..., Tensor],
    maps: Maps,
    vectors: Vectors,
    groups: int,
    eps: float,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    branch, mask, injection, z = maps
    if mask is not None:
        branch = branch * mask[:, :, None, None].to(branch.dtype)
    if injection is not None:
        branch = branch + injection
    total = torch.relu(z + norm(branch, groups, *vectors[:2], eps))
    return norm(total, groups, *vectors[2:], eps, out=out, dtype=dtype)


def block_end(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    groups: int,
    eps: float = 1e-5,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The end of a residual block, norm₂(relu(z + norm₁(y · mask + injection))).

    mask: (batch, channels), of whole channels.
    weight1 … bias2: (channels,), or (batch, channels) for each sample its own.
    """
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    # The kernel has no gradient of the mask.
    if out is None and differentiates(mask) and runs(*maps, *vectors):
        return _composed(norm_act, maps, vectors, groups, eps, None, dtype or y.dtype)
    return BlockEnd(groups, eps)(maps, vectors, out, dtype)


def block_end_for(readers: int, *arguments: Any) -> list[Tensor]:
    """`block_end`, once for each of its readers, in one memory.

    Backward adds the gradients from all of them on the way.
    """
    y, mask, injection, z, weight1, bias1, weight2, bias2, groups, eps = arguments
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    fused = differentiates(*maps, *vectors) and not differentiates(mask)
    if readers == 1 or not fused or not runs(*maps, *vectors):
        return [block_end(*arguments)] * readers
    return list(BlockEnd(groups, eps, readers)(maps, vectors, None, None))


@dataclass(frozen=True)
class BlockEnd(Operation):
    """maps: y, mask, injection, z."""

    groups: int
    eps: float
    readers: int = 1
    norms = 2

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        wide = [None if x is None else at_least_float32(x) for x in maps]
        return _composed(norm_act_plain, wide, vectors, self.groups, self.eps, out, dtype)

    def launch(self, maps: Maps, vectors: Vectors, out: Tensor, stats: Tensor | None) -> None:
        y, mask, injection, z = maps
        affine, affine_sample = affine_arguments(vectors)
        if held_block_forward.takes([y, injection, z, out], self.groups):
            held_block_forward.launch(
                *(y, mask, injection, z, self.groups, affine, affine_sample),
                *(out, stats, self.eps),
            )
            return
        launch(
            _block_end_kernel,
            "block_end",
            y,
            self.groups,
            *channels_last(y),
            None if mask is None else mask.contiguous(),
            *channels_last_or(y, injection),
            *channels_last(z),
            *affine,
            affine_sample,
            *channels_last(out),
            stats,
            len(y) * self.groups,
            self.eps,
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            KEEP=stats is not None,
        )

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
        y, mask, injection, z = maps
        groups = self.groups
        _, _, want_injection, want_z, *_ = wanted
        dy = empty_like(y)
        dz = empty_like(z) if want_z else None
        dinjection = None
        if injection is not None and want_injection:
            # Without a mask it is y's gradient.
            same = mask is None and injection.dtype == y.dtype
            dinjection = dy if same else empty_channels_last(y.shape, injection.dtype, y.device)
        affine, affine_sample = affine_arguments(vectors)
        fits = len(others) < held_block.MOST_DOUTS
        if fits and held_block.takes([y, injection, z, dout, *others, dy, dinjection, dz], groups):
            held_block.launch(
                *(y, mask, injection, z, groups, affine, affine_sample, stats),
                *([dout, *others], dy, dinjection, dz, sums),
            )
            return [dy, None, dinjection, dz]
        for other in others:
            dout = dout + other
        launch(
            _block_end_backward_kernel,
            "block_end_backward",
            y,
            self.groups,
            *channels_last(y),
            None if mask is None else mask.contiguous(),
            *channels_last_or(y, injection),
            *channels_last(z),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *channels_last(dout),
            *channels_last(dy),
            *channels_last_or(dy, dinjection),
            *channels_last_or(dy, dz),
            sums,
            sums[0].numel(),
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            WRITE_INJECTION=dinjection is not None and dinjection is not dy,
            WRITE_Z=dz is not None,
        )
        return [dy, None, dinjection, dz]


@jit
def _kept_channels(keeps, sample, channel, valid, CHANNELS: tl.constexpr, DROPOUT: tl.constexpr):
    keep = tl.full(channel.shape, 1.0, tl.float32)
    if DROPOUT:
        where = keeps + sample * CHANNELS + channel
        keep = tl.load(where, mask=valid, other=0.0).to(tl.float32)
    return keep


@jit
def _branch(
    y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask,
    DROPOUT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """y · mask + injection."""
    branch = read(y, pixel, y_pixel, channel, mask)
    if DROPOUT:
        branch = branch * keep[None, :]
    if INJECTED:
        branch += read(injection, pixel, injection_pixel, channel, mask)
    return branch


@jit
def _residual(branch, z, z_pixel, mean, rho, scale, shift, pixel, channel, mask):
    """relu(z + norm(branch)); 0 where masked."""
    branch = normalise(branch, mean, rho, scale, shift)
    total = rectify(branch + read(z, pixel, z_pixel, channel, mask))
    return tl.where(mask, total, 0.0)


@jit
def _block_end_kernel(
    y, y_sample, y_pixel,
    keeps,
    injection, injection_sample, injection_pixel,
    z, z_sample, z_pixel,
    weight1, bias1, weight2, bias2, affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = PIXELS * CPG
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    first = first_of_group(valid, GROUP_BLOCK, LANES)
    at = sample * GROUPS + group
    y += sample * y_sample
    injection += sample * injection_sample
    z += sample * z_sample
    out += sample * out_sample
    keep = _kept_channels(keeps, sample, channel, valid, GROUPS * CPG, DROPOUT)
    offset = sample * affine_sample
    scale1, shift1 = scale_and_shift(weight1, bias1, offset, channel, valid, True)
    scale2, shift2 = scale_and_shift(weight2, bias2, offset, channel, valid, True)
    if ROWS >= PIXELS:
        pixel, mask = rows_from(0, valid, PIXELS, ROWS)
        tile = _branch(
            y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT, INJECTED
        )
        mean, squares = moments(tile, mask, COUNT, GROUP_BLOCK, LANES)
        rho = inverse_deviation(squares, COUNT, eps)
        if KEEP:
            keep_pair(stats, 0, plane, at, mean, rho, first)
        tile = _residual(tile, z, z_pixel, mean, rho, scale1, shift1, pixel, channel, mask)
        mean, squares = moments(tile, mask, COUNT, GROUP_BLOCK, LANES)
        rho = inverse_deviation(squares, COUNT, eps)
        if KEEP:
            keep_pair(stats, 1, plane, at, mean, rho, first)
        value = normalise(tile, mean, rho, scale2, shift2)
        write(out, pixel, out_pixel, channel, mask, value)
    else:
        mean1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            mean1, squares = join_moments(
                mean1, squares, tile, mask, start, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
            )
        rho1 = inverse_deviation(squares, COUNT, eps)
        mean2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            tile = _residual(tile, z, z_pixel, mean1, rho1, scale1, shift1, pixel, channel, mask)
            mean2, squares = join_moments(
                mean2, squares, tile, mask, start, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
            )
        rho2 = inverse_deviation(squares, COUNT, eps)
        if KEEP:
            keep_pair(stats, 0, plane, at, mean1, rho1, first)
            keep_pair(stats, 1, plane, at, mean2, rho2, first)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            tile = _residual(tile, z, z_pixel, mean1, rho1, scale1, shift1, pixel, channel, mask)
            value = normalise(tile, mean2, rho2, scale2, shift2)
            write(out, pixel, out_pixel, channel, mask, value)


@jit
def _cotangent(
    y, y_pixel, keep, injection, injection_pixel, z, z_pixel, dout, dout_pixel,
    mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask,
    DROPOUT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """x̂ of both norms, 0 where masked; where the ReLU between them passes; and g of the second."""
    branch = _branch(
        y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT, INJECTED
    )
    unit1 = unit_of(branch, mean1, rho1, mask)
    total = unit1 * scale1[None, :] + shift1[None, :] + read(z, pixel, z_pixel, channel, mask)
    unit2 = unit_of(rectify(total), mean2, rho2, mask)
    return unit1, unit2, mask & (total > 0), read(dout, pixel, dout_pixel, channel, mask)


@jit
def _block_end_backward_kernel(
    y, y_sample, y_pixel,
    keeps,
    injection, injection_sample, injection_pixel,
    z, z_sample, z_pixel,
    weight1, bias1, weight2, bias2, affine_sample,
    stats, plane,
    dout, dout_sample, dout_pixel,
    dy, dy_sample, dy_pixel,
    dinjection, dinjection_sample, dinjection_pixel,
    dz, dz_sample, dz_pixel,
    sums, sums_plane,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
    WRITE_INJECTION: tl.constexpr,
    WRITE_Z: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = PIXELS * CPG
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    y += sample * y_sample
    injection += sample * injection_sample
    z += sample * z_sample
    dout += sample * dout_sample
    dy += sample * dy_sample
    dinjection += sample * dinjection_sample
    dz += sample * dz_sample
    keep = _kept_channels(keeps, sample, channel, valid, GROUPS * CPG, DROPOUT)
    offset = sample * affine_sample
    scale1, shift1 = scale_and_shift(weight1, bias1, offset, channel, valid, True)
    scale2, _ = scale_and_shift(weight2, bias2, offset, channel, valid, True)
    mean1, rho1 = kept_pair(stats, 0, plane, sample * GROUPS + group, valid)
    mean2, rho2 = kept_pair(stats, 1, plane, sample * GROUPS + group, valid)
    dweight1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dweight2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    if ROWS >= PIXELS:
        pixel, mask = rows_from(0, valid, PIXELS, ROWS)
        unit1, unit2, passes, g = _cotangent(
            y, y_pixel, keep, injection, injection_pixel, z, z_pixel, dout, dout_pixel,
            mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask, DROPOUT, INJECTED,
        )  # fmt: skip
        dweight2 += tl.sum(g * unit2, axis=0)
        dbias2 += tl.sum(g, axis=0)
        one, along = means_along(dweight2, dbias2, scale2, COUNT, GROUP_BLOCK, LANES)
        g = tl.where(passes, norm_gradient(g, unit2, scale2, rho2, one, along), 0.0)
        dweight1 += tl.sum(g * unit1, axis=0)
        dbias1 += tl.sum(g, axis=0)
        if WRITE_Z:
            write(dz, pixel, dz_pixel, channel, mask, g)
        one, along = means_along(dweight1, dbias1, scale1, COUNT, GROUP_BLOCK, LANES)
        g = norm_gradient(g, unit1, scale1, rho1, one, along)
        if WRITE_INJECTION:
            write(dinjection, pixel, dinjection_pixel, channel, mask, g)
        write(dy, pixel, dy_pixel, channel, mask, g * keep[None, :])
    else:
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            unit1, unit2, passes, g = _cotangent(
                y, y_pixel, keep, injection, injection_pixel, z, z_pixel, dout, dout_pixel,
                mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask, DROPOUT, INJECTED,
            )  # fmt: skip
            dweight2 += tl.sum(g * unit2, axis=0)
            dbias2 += tl.sum(g, axis=0)
        one2, along2 = means_along(dweight2, dbias2, scale2, COUNT, GROUP_BLOCK, LANES)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            unit1, unit2, passes, g = _cotangent(
                y, y_pixel, keep, injection, injection_pixel, z, z_pixel, dout, dout_pixel,
                mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask, DROPOUT, INJECTED,
            )  # fmt: skip
            g = tl.where(passes, norm_gradient(g, unit2, scale2, rho2, one2, along2), 0.0)
            dweight1 += tl.sum(g * unit1, axis=0)
            dbias1 += tl.sum(g, axis=0)
            if WRITE_Z:
                write(dz, pixel, dz_pixel, channel, mask, g)
        one1, along1 = means_along(dweight1, dbias1, scale1, COUNT, GROUP_BLOCK, LANES)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            unit1, unit2, passes, g = _cotangent(
                y, y_pixel, keep, injection, injection_pixel, z, z_pixel, dout, dout_pixel,
                mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask, DROPOUT, INJECTED,
            )  # fmt: skip
            g = tl.where(passes, norm_gradient(g, unit2, scale2, rho2, one2, along2), 0.0)
            g = norm_gradient(g, unit1, scale1, rho1, one1, along1)
            if WRITE_INJECTION:
                write(dinjection, pixel, dinjection_pixel, channel, mask, g)
            write(dy, pixel, dy_pixel, channel, mask, g * keep[None, :])
    at = sample * (GROUPS * CPG) + channel
    keep_pair(sums, 0, sums_plane, at, dweight1, dbias1, valid)
    keep_pair(sums, 1, sums_plane, at, dweight2, dbias2, valid)
