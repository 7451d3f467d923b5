"""norm_act: group normalisation, then ReLU where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms import held, split, uneven
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.operation import Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    beside,
    first_of_group,
    inverse_deviation,
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
    statistics,
    unit_of,
    write_beside,
)
from gdeq.fast.kernels.norms.slices import gradient_like
from gdeq.fast.kernels.norms.tensors import at_least_float32, channels_last, deliver
from gdeq.fast.kernels.norms.tiles import launch, room_beside


def norm_act_plain(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    room: int = 0,
) -> Tensor:
    wide = at_least_float32(x[:, : x.shape[1] - room])
    scale = None if weight is None else weight.to(wide.dtype)
    shift = None if bias is None else bias.to(wide.dtype)
    each = [vector is not None and vector.dim() == 2 for vector in (scale, shift)]
    # PyTorch 2.13 dies on the CPU for the gradient of the scale alone of a channels-last tensor.
    y = functional.group_norm(
        wide.contiguous(), groups, *((None, None) if any(each) else (scale, shift)), eps
    )
    if any(each):
        assert scale is not None
        assert shift is not None
        y = y * scale[..., None, None] + shift[..., None, None]
    y = torch.relu(y) if relu else y
    y = functional.pad(y, (0, 0, 0, 0, 0, room)) if room else y
    return deliver(y, out, dtype or x.dtype)


def norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    room: int = 0,
) -> Tensor:
    """Group normalisation, then ReLU where asked.

    x: (batch, channels, height, width); a slice over the channels of a channels-last tensor is
        taken as it is, anything else is first copied into that order.
    weight, bias: (channels,), or (batch, channels) for each sample its own.
    out: where the result goes, also such a slice; without autograd alone.
    dtype: of the result; the default is x's.
    room: the last channels of x, which are zeros and of no group, and stay zeros; `room_beside` at
        most, and without scale and shift.
    """
    if room and not (weight is bias is None and room <= room_beside(x.shape[1] - room, groups)):
        raise ValueError(f"there is no room for {room} channels beside {x.shape[1] - room}")
    return NormAct(groups, eps, relu, room)((x,), (weight, bias), out, dtype)


@dataclass(frozen=True)
class NormAct(Operation):
    """maps: x."""

    groups: int
    eps: float
    relu: bool
    room: int = 0
    norms = 1

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        (x,), (weight, bias) = maps, vectors
        options = self.eps, self.relu, out, dtype, self.room
        return norm_act_plain(x, self.groups, weight, bias, *options)

    def launch(self, maps: Maps, vectors: Vectors, out: Tensor, stats: Tensor | None) -> None:
        (x,) = maps
        affine, affine_sample = affine_arguments(vectors)
        if split.takes(x, out, self.groups, affine[0]):
            split.launch(x, self.groups, affine, affine_sample, out, stats, self.eps, self.relu)
            return
        if uneven.takes_one((x, out), self.groups, self.room):
            more = stats, self.eps, self.relu, self.room
            uneven.launch(x, self.groups, affine, affine_sample, out, *more)
            return
        launch(
            _norm_kernel,
            "norm",
            self._of_groups(x),
            self.groups,
            *channels_last(x),
            *affine,
            affine_sample,
            *channels_last(out),
            stats,
            len(x) * self.groups,
            self.eps,
            AFFINE=affine[0] is not None,
            RELU=self.relu,
            KEEP=stats is not None,
            ROOM=self.room,
        )

    def _of_groups(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] - self.room]

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
        (x,) = maps
        dx = gradient_like(x)
        affine, affine_sample = affine_arguments(vectors)
        partials = any(wanted[1:])
        if held.takes(x, dout, dx, self.groups, affine[0]):
            held.launch(
                x, dout, self.groups, affine, affine_sample, stats, dx, sums, self.relu, partials
            )
            return [dx]
        if uneven.takes_one((x, dout, dx), self.groups, self.room):
            more = stats, dx, sums, self.relu, partials, self.room
            uneven.launch_backward(x, dout, self.groups, affine, affine_sample, *more)
            return [dx]
        launch(
            _norm_backward_kernel,
            "norm_backward",
            self._of_groups(x),
            self.groups,
            *channels_last(x),
            *channels_last(dout),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *channels_last(dx),
            sums,
            sums[0].numel(),
            AFFINE=affine[0] is not None,
            RELU=self.relu,
            PARTIALS=partials,
            ROOM=self.room,
        )
        return [dx]


@jit
def _norm_kernel(
    x, x_sample, x_pixel,
    weight, bias, affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    KEEP: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = PIXELS * CPG
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    x += sample * x_sample
    out += sample * out_sample
    if ROWS >= PIXELS:
        pixel, mask = rows_from(0, valid, PIXELS, ROWS)
        tile = read(x, pixel, x_pixel, channel, mask)
        mean, squares = moments(tile, mask, COUNT, GROUP_BLOCK, LANES)
    else:
        mean, squares = statistics(
            x, x_pixel, channel, valid, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
        )
    rho = inverse_deviation(squares, COUNT, eps)
    if KEEP:
        first = first_of_group(valid, GROUP_BLOCK, LANES)
        keep_pair(stats, 0, plane, sample * GROUPS + group, mean, rho, first)
    scale, shift = scale_and_shift(weight, bias, sample * affine_sample, channel, valid, AFFINE)
    channel, written = beside(channel, group, valid, GROUPS, CPG, GROUP_BLOCK, LANES, ROOM)
    if ROWS >= PIXELS:
        y = normalise(tile, mean, rho, scale, shift)
        if RELU:
            y = rectify(y)
        write_beside(out, pixel, out_pixel, channel, mask, written, y, PIXELS, ROOM)
    else:
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            y = normalise(read(x, pixel, x_pixel, channel, mask), mean, rho, scale, shift)
            if RELU:
                y = rectify(y)
            write_beside(out, pixel, out_pixel, channel, mask, written, y, PIXELS, ROOM)


@jit
def _cotangent(
    x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU: tl.constexpr
):
    """x̂ and g of one tile; 0 where masked."""
    unit = unit_of(read(x, pixel, x_pixel, channel, mask), mean, rho, mask)
    g = read(dy, pixel, dy_pixel, channel, mask)
    if RELU:
        g = tl.where(unit * scale[None, :] + shift[None, :] > 0, g, 0.0)
    return unit, g


@jit
def _norm_backward_kernel(
    x, x_sample, x_pixel,
    dy, dy_sample, dy_pixel,
    weight, bias, affine_sample,
    stats, plane,
    dx, dx_sample, dx_pixel,
    sums, sums_plane,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    x += sample * x_sample
    dy += sample * dy_sample
    dx += sample * dx_sample
    mean, rho = kept_pair(stats, 0, plane, sample * GROUPS + group, valid)
    scale, shift = scale_and_shift(weight, bias, sample * affine_sample, channel, valid, AFFINE)
    if ROWS >= PIXELS:
        pixel, mask = rows_from(0, valid, PIXELS, ROWS)
        unit, g = _cotangent(
            x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
        )
        dweight = tl.sum(g * unit, axis=0)
        dbias = tl.sum(g, axis=0)
    else:
        dweight = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        dbias = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            unit, g = _cotangent(
                x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
            )
            dweight += tl.sum(g * unit, axis=0)
            dbias += tl.sum(g, axis=0)
    if PARTIALS:
        keep_pair(sums, 0, sums_plane, sample * (GROUPS * CPG) + channel, dweight, dbias, valid)
    channel, written = beside(channel, group, valid, GROUPS, CPG, GROUP_BLOCK, LANES, ROOM)
    along_one, along_unit = means_along(dweight, dbias, scale, PIXELS * CPG, GROUP_BLOCK, LANES)
    if ROWS >= PIXELS:
        g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
        write_beside(dx, pixel, dx_pixel, channel, mask, written, g, PIXELS, ROOM)
    else:
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            unit, g = _cotangent(
                x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
            )
            g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
            write_beside(dx, pixel, dx_pixel, channel, mask, written, g, PIXELS, ROOM)
