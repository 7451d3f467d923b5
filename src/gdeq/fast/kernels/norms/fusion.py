"""fuse: a scale's own stream plus those of others, act(own + Σ_j repeat_j(norm_j(raw_j)))."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms import fusion_whole, uneven_sum
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.operation import Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    first_of_group,
    inverse_deviation,
    keep_pair,
    kept_pair,
    means_along,
    norm_gradient,
    normalise,
    place,
    read,
    rectify,
    rows_from,
    scale_and_shift,
    statistics,
    unit_of,
    write,
)
from gdeq.fast.kernels.norms.single import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.slices import gradient_like
from gdeq.fast.kernels.norms.tensors import (
    at_least_float32,
    channels_last,
    channels_last_or,
    deliver,
    empty_like,
    runs,
)
from gdeq.fast.kernels.norms.tiles import launch, tile_of

MAX_SOURCES = 3  # of one kernel


@dataclass(frozen=True)
class Source:
    """A stream on its way to another scale, before its norm.

    levels: how often the target's resolution halves to this one's; 0, the same resolution.
    """

    raw: Tensor
    weight: Tensor | None
    bias: Tensor | None
    levels: int = 0


def fuse_plain(
    own: Tensor | None,
    sources: Sequence[Source],
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wide = [Source(at_least_float32(s.raw), s.weight, s.bias, s.levels) for s in sources]
    like = sources[0].raw if own is None else own
    own = None if own is None else at_least_float32(own)
    return _composed(norm_act_plain, own, wide, groups, eps, relu, out, dtype or like.dtype)


def _composed(
    norm: Callable[..., Tensor],
    own: Tensor | None,
    sources: Sequence[Source],
    groups: int,
    eps: float,
    relu: bool,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    total = own
    height, width = (sources[0].raw if own is None else own).shape[-2:]
    for source in sources:
        y = norm(source.raw, groups, source.weight, source.bias, eps)
        y = _repeat(y, source.levels, height, width)
        total = y if total is None else total + y
    assert total is not None
    return deliver(torch.relu(total) if relu else total, out, dtype)


def _repeat(y: Tensor, levels: int, height: int, width: int) -> Tensor:
    """Each pixel 2^levels times along both edges, then cut to size."""
    if levels:
        y = functional.interpolate(y, scale_factor=float(2**levels))
    return y[..., :height, :width] if y.shape[-2:] != (height, width) else y


def fuse(
    own: Tensor | None,
    sources: Sequence[Source],
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A scale's own stream plus the others, each normalised at its resolution and then repeated.

    own: None, where there is none; the first source has the resolution of the result then.
    """
    if not sources:
        return fuse_plain(own, sources, groups, eps, relu, out, dtype)
    maps = (own, *(source.raw for source in sources))
    vectors = [vector for source in sources for vector in (source.weight, source.bias)]
    dtype = dtype or (sources[0].raw if own is None else own).dtype
    if len(sources) > MAX_SOURCES and runs(*maps, *vectors):  # in parts, whose sums are float32
        if differentiates(*maps, *vectors):
            norm = functools.partial(norm_act, dtype=torch.float32)
            return _composed(norm, own, sources, groups, eps, relu, out, dtype)
        some, rest = sources[:MAX_SOURCES], sources[MAX_SOURCES:]
        own = fuse(own, some, groups, eps, relu=False, dtype=torch.float32)
        return fuse(own, rest, groups, eps, relu, out, dtype)
    levels = tuple(source.levels for source in sources)
    return Fuse(groups, eps, relu, levels)(maps, vectors, out, dtype)


@dataclass(frozen=True)
class Fuse(Operation):
    """maps: own, and the sources."""

    groups: int
    eps: float
    relu: bool
    levels: tuple[int, ...]
    backward_reads_out = True  # where the ReLU passes

    @property
    def norms(self) -> int:  # type: ignore[override]
        return len(self.levels)

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        own, *raws = maps
        parts = zip(raws, vectors[::2], vectors[1::2], self.levels, strict=True)
        sources = [Source(*part) for part in parts]
        return fuse_plain(own, sources, self.groups, self.eps, self.relu, out, dtype)

    def launch(self, maps: Maps, vectors: Vectors, out: Tensor, stats: Tensor | None) -> None:
        own, *raws = maps
        like = raws[0] if own is None else own
        affine, affine_sample = affine_arguments(vectors)
        if own is None and self.levels == (0, 0) and uneven_sum.takes((*raws, out), self.groups):
            more = out, stats, self.eps, self.relu
            uneven_sum.launch(raws, self.groups, affine, affine_sample, *more)
            return
        each = [(*channels_last(raw), *affine[2 * i : 2 * i + 2]) for i, raw in enumerate(raws)]
        launch(
            _fuse_kernel,
            "fuse",
            like,
            self.groups,
            *channels_last_or(out, own),
            *_filled(each),
            affine_sample,
            *channels_last(out),
            stats,
            len(out) * self.groups,
            self.eps,
            WIDTH=out.shape[-1],
            **self._sizes("fuse", raws, vectors),
            OWN=own is not None,
            RELU=self.relu,
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
        assert out is not None
        own, *raws = maps
        down = empty_like(own) if own is not None and wanted[0] else None
        found = [gradient_like(raw) for raw in raws]
        scales, affine_sample = affine_arguments(vectors[::2])
        together = own is None and self.levels == (0, 0)
        if together and uneven_sum.takes((dout, out, *raws, *found), self.groups):
            more = affine_sample, stats, found, sums, self.relu
            uneven_sum.launch_backward(dout, out, raws, self.groups, scales, *more)
            return [None, *found]
        each = [
            (*channels_last(raw), scale, *channels_last(draw))
            for raw, scale, draw in zip(raws, scales, found, strict=True)
        ]
        if fusion_whole.takes(out, raws, self.levels, self.groups):
            fusion_whole.launch(
                *(dout, out, down, _filled(each), affine_sample, stats, sums, self.levels),
                *([scale is not None for scale in scales], self.groups, self.relu),
            )
            return [down, *found]
        launch(
            _fuse_backward_kernel,
            "fuse_backward",
            out,
            self.groups,
            *channels_last(dout),
            *channels_last(out),
            *channels_last_or(out, down),
            *_filled(each),
            affine_sample,
            stats,
            stats[0].numel(),
            sums,
            sums[0].numel(),
            HEIGHT=out.shape[-2],
            WIDTH=out.shape[-1],
            **self._sizes("fuse_backward", raws, vectors),
            OWN=down is not None,
            RELU=self.relu,
        )
        return [down, *found]

    def _sizes(self, kernel: str, raws: Maps, vectors: Vectors) -> dict[str, int]:
        sizes = {"COUNT": len(raws)}
        for i in range(MAX_SOURCES):
            k = min(i, len(raws) - 1)  # as `_filled`
            height, width = raws[k].shape[-2:]
            sizes |= {f"PIXELS{i}": height * width, f"WIDTH{i}": width}
            sizes |= {f"ROWS{i}": tile_of(kernel, raws[k], self.groups).pixels}
            sizes |= {f"LEVELS{i}": self.levels[k], f"AFFINE{i}": vectors[2 * k] is not None}
        return sizes


def _filled(each: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The arguments of all sources a kernel has; the last stands for those that are not there."""
    return [argument for i in range(MAX_SOURCES) for argument in each[min(i, len(each) - 1)]]


@jit
def _source_norm(
    raw, raw_pixel, weight, bias, offset, eps, stats, number: tl.constexpr, plane, at,
    channel, valid,
    PIXELS: tl.constexpr, ROWS: tl.constexpr, CPG: tl.constexpr,
    AFFINE: tl.constexpr, KEEP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """mean, ρ, scale, shift of a source's norm."""
    mean, squares = statistics(
        raw, raw_pixel, channel, valid, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
    )
    rho = inverse_deviation(squares, PIXELS * CPG, eps)
    scale, shift = scale_and_shift(weight, bias, offset, channel, valid, AFFINE)
    if KEEP:
        first = first_of_group(valid, GROUP_BLOCK, LANES)
        keep_pair(stats, number, plane, at, mean, rho, first)
    return mean, rho, scale, shift


@jit
def _source_value(
    raw, raw_pixel, mean, rho, scale, shift, row, column, channel, mask,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """norm(raw), each pixel repeated 2^LEVELS times along both edges."""
    pixel = (row >> LEVELS) * WIDTH + (column >> LEVELS)
    return normalise(read(raw, pixel, raw_pixel, channel, mask), mean, rho, scale, shift)


@jit
def _fuse_kernel(
    own, own_sample, own_pixel,
    raw0, raw0_sample, raw0_pixel, weight0, bias0,
    raw1, raw1_sample, raw1_pixel, weight1, bias1,
    raw2, raw2_sample, raw2_pixel, weight2, bias2,
    affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS0: tl.constexpr, WIDTH0: tl.constexpr, LEVELS0: tl.constexpr, ROWS0: tl.constexpr,
    PIXELS1: tl.constexpr, WIDTH1: tl.constexpr, LEVELS1: tl.constexpr, ROWS1: tl.constexpr,
    PIXELS2: tl.constexpr, WIDTH2: tl.constexpr, LEVELS2: tl.constexpr, ROWS2: tl.constexpr,
    AFFINE0: tl.constexpr, AFFINE1: tl.constexpr, AFFINE2: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    OWN: tl.constexpr,
    RELU: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    at = sample * GROUPS + group
    offset = sample * affine_sample
    own += sample * own_sample
    out += sample * out_sample
    raw0 += sample * raw0_sample
    mean0, rho0, scale0, shift0 = _source_norm(
        raw0, raw0_pixel, weight0, bias0, offset, eps, stats, 0, plane, at, channel, valid,
        PIXELS0, ROWS0, CPG, AFFINE0, KEEP, GROUP_BLOCK, LANES,
    )  # fmt: skip
    if COUNT > 1:
        raw1 += sample * raw1_sample
        mean1, rho1, scale1, shift1 = _source_norm(
            raw1, raw1_pixel, weight1, bias1, offset, eps, stats, 1, plane, at, channel, valid,
            PIXELS1, ROWS1, CPG, AFFINE1, KEEP, GROUP_BLOCK, LANES,
        )  # fmt: skip
    if COUNT > 2:
        raw2 += sample * raw2_sample
        mean2, rho2, scale2, shift2 = _source_norm(
            raw2, raw2_pixel, weight2, bias2, offset, eps, stats, 2, plane, at, channel, valid,
            PIXELS2, ROWS2, CPG, AFFINE2, KEEP, GROUP_BLOCK, LANES,
        )  # fmt: skip
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        row = pixel // WIDTH
        column = pixel % WIDTH
        total = tl.zeros((ROWS, GROUP_BLOCK * LANES), tl.float32)
        if OWN:
            total = read(own, pixel, own_pixel, channel, mask)
        total += _source_value(
            raw0, raw0_pixel, mean0, rho0, scale0, shift0, row, column, channel, mask, WIDTH0,
            LEVELS0,
        )  # fmt: skip
        if COUNT > 1:
            total += _source_value(
                raw1, raw1_pixel, mean1, rho1, scale1, shift1, row, column, channel, mask,
                WIDTH1, LEVELS1,
            )  # fmt: skip
        if COUNT > 2:
            total += _source_value(
                raw2, raw2_pixel, mean2, rho2, scale2, shift2, row, column, channel, mask,
                WIDTH2, LEVELS2,
            )  # fmt: skip
        if RELU:
            total = rectify(total)
        write(out, pixel, out_pixel, channel, mask, total)


@jit
def _through_relu(dout, dout_pixel, out, out_pixel, pixel, channel, mask, RELU: tl.constexpr):
    g = read(dout, pixel, dout_pixel, channel, mask)
    if RELU:
        g = tl.where(read(out, pixel, out_pixel, channel, mask) > 0, g, 0.0)
    return g


@jit
def _source_cotangent(
    dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LOW_WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """x̂ of a source's tile, and Σ g over the pixels that each of its pixels is repeated to."""
    unit = unit_of(read(raw, low, raw_pixel, channel, mask), mean, rho, mask)
    row = (low // LOW_WIDTH) << LEVELS
    column = (low % LOW_WIDTH) << LEVELS
    total = tl.zeros(unit.shape, tl.float32)
    for step in range(0, 1 << (2 * LEVELS)):
        high = row + (step >> LEVELS)
        wide = column + (step & ((1 << LEVELS) - 1))
        inside = mask & ((high < HEIGHT) & (wide < WIDTH))[:, None]
        pixel = high * WIDTH + wide
        total += _through_relu(dout, dout_pixel, out, out_pixel, pixel, channel, inside, RELU)
    return unit, total


@jit
def _source_backward(
    dout, dout_pixel, out, out_pixel, raw, raw_pixel, weight, offset, draw, draw_pixel,
    stats, number: tl.constexpr, plane, at, sums, sums_plane, channel, valid,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS: tl.constexpr, LOW_WIDTH: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    CPG: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    mean, rho = kept_pair(stats, number, plane, at, valid)
    scale, _ = scale_and_shift(weight, weight, offset, channel, valid, AFFINE)
    dweight = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    if ROWS >= PIXELS:
        low, mask = rows_from(0, valid, PIXELS, ROWS)
        unit, g = _source_cotangent(
            dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
            HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
        )  # fmt: skip
        dweight += tl.sum(g * unit, axis=0)
        dbias += tl.sum(g, axis=0)
    else:
        for start in range(0, PIXELS, ROWS):
            low, mask = rows_from(start, valid, PIXELS, ROWS)
            unit, g = _source_cotangent(
                dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
                HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
            )  # fmt: skip
            dweight += tl.sum(g * unit, axis=0)
            dbias += tl.sum(g, axis=0)
    along_one, along_unit = means_along(dweight, dbias, scale, PIXELS * CPG, GROUP_BLOCK, LANES)
    if ROWS >= PIXELS:
        g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
        write(draw, low, draw_pixel, channel, mask, g)
    else:
        for start in range(0, PIXELS, ROWS):
            low, mask = rows_from(start, valid, PIXELS, ROWS)
            unit, g = _source_cotangent(
                dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
                HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
            )  # fmt: skip
            g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
            write(draw, low, draw_pixel, channel, mask, g)
    if AFFINE:
        keep_pair(sums, number, sums_plane, channel, dweight, dbias, valid)


@jit
def _fuse_backward_kernel(
    dout, dout_sample, dout_pixel,
    out, out_sample, out_pixel,
    down, down_sample, down_pixel,
    raw0, raw0_sample, raw0_pixel, weight0, draw0, draw0_sample, draw0_pixel,
    raw1, raw1_sample, raw1_pixel, weight1, draw1, draw1_sample, draw1_pixel,
    raw2, raw2_sample, raw2_pixel, weight2, draw2, draw2_sample, draw2_pixel,
    affine_sample,
    stats, plane,
    sums, sums_plane,
    PIXELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS0: tl.constexpr, WIDTH0: tl.constexpr, LEVELS0: tl.constexpr, ROWS0: tl.constexpr,
    PIXELS1: tl.constexpr, WIDTH1: tl.constexpr, LEVELS1: tl.constexpr, ROWS1: tl.constexpr,
    PIXELS2: tl.constexpr, WIDTH2: tl.constexpr, LEVELS2: tl.constexpr, ROWS2: tl.constexpr,
    AFFINE0: tl.constexpr, AFFINE1: tl.constexpr, AFFINE2: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    OWN: tl.constexpr,
    RELU: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """down: the gradient of the scale's own stream."""
    sample, channel, group, valid = place(GROUPS, CPG, GROUP_BLOCK, LANES)
    at = sample * GROUPS + group
    offset = sample * affine_sample
    dout += sample * dout_sample
    out += sample * out_sample
    sums += sample * (GROUPS * CPG)
    if OWN:
        down += sample * down_sample
        for start in range(0, PIXELS, ROWS):
            pixel, mask = rows_from(start, valid, PIXELS, ROWS)
            g = _through_relu(dout, dout_pixel, out, out_pixel, pixel, channel, mask, RELU)
            write(down, pixel, down_pixel, channel, mask, g)
    _source_backward(
        dout, dout_pixel, out, out_pixel, raw0 + sample * raw0_sample, raw0_pixel, weight0, offset,
        draw0 + sample * draw0_sample, draw0_pixel, stats, 0, plane, at, sums, sums_plane,
        channel, valid, HEIGHT, WIDTH, PIXELS0, WIDTH0, LEVELS0, ROWS0, CPG, RELU, AFFINE0,
        GROUP_BLOCK, LANES,
    )  # fmt: skip
    if COUNT > 1:
        _source_backward(
            dout, dout_pixel, out, out_pixel, raw1 + sample * raw1_sample, raw1_pixel, weight1,
            offset, draw1 + sample * draw1_sample, draw1_pixel, stats, 1, plane, at, sums,
            sums_plane, channel, valid, HEIGHT, WIDTH, PIXELS1, WIDTH1, LEVELS1, ROWS1, CPG, RELU,
            AFFINE1, GROUP_BLOCK, LANES,
        )  # fmt: skip
    if COUNT > 2:
        _source_backward(
            dout, dout_pixel, out, out_pixel, raw2 + sample * raw2_sample, raw2_pixel, weight2,
            offset, draw2 + sample * draw2_sample, draw2_pixel, stats, 2, plane, at, sums,
            sums_plane, channel, valid, HEIGHT, WIDTH, PIXELS2, WIDTH2, LEVELS2, ROWS2, CPG, RELU,
            AFFINE2, GROUP_BLOCK, LANES,
        )  # fmt: skip
