"""fuse: a scale's own stream plus those of others, relu(own + Σ_j repeat_j(norm_j(raw_j))).

    kernels               for                                            tile
    _fuse_kernel          all maps                                       aligned, or packed
    _pyramid_backward…    sources of higher levels last, where a         aligned, all pixels
                          program holds all pixels of its channels
    _sum_backward…        sources at the result's resolution             aligned, or packed

Other gradients are those of the same made of `norm_act` and PyTorch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.group_norm import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.operation import Call, Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    keep_pair,
    keep_statistics,
    kept_pair,
    load_map,
    means_along,
    norm_gradient,
    normalise,
    of_sample,
    place,
    read,
    rectify,
    rows_from,
    scale_and_shift,
    statistics,
    sums_of,
    write,
)
from gdeq.fast.kernels.norms.slices import gradient_like
from gdeq.fast.kernels.norms.tensors import (
    Tile,
    Tuning,
    aligned_tile,
    as_map,
    at_least_float32,
    deliver,
    empty_like,
    packed_tile,
    power_of_two,
    runs,
)

TUNING = {
    "forward": Tuning(tile=8192, per_thread=32, max_warps=8),
    # Of the numbers that the first source has.
    "pyramid": Tuning(tile=16384, per_thread=16),
    "sum": Tuning(tile=8192, per_thread=32, max_warps=8),
}
MOST_SOURCES = 3  # of one kernel
FEW_PROGRAMS = 160  # of more than an H200 has SMs, each holds half as much of a packed tile


@dataclass(frozen=True)
class Source:
    """A stream on its way to another scale, before its norm.

    levels: how often the target's resolution halves to this one's; 0, the same resolution.
    """

    raw: Tensor
    weight: Tensor | None
    bias: Tensor | None
    levels: int = 0


def fuse(own: Tensor | None, sources: Sequence[Source], groups: int, eps: float = 1e-5) -> Tensor:
    """A scale's own stream plus the others, each normalised at its resolution and then repeated;
    the ReLU of that.

    own: None, where there is none; the first source has the resolution of the result then.
    """
    raws = [source.raw for source in sources]
    maps: Maps = [own, *raws]
    vectors = [vector for source in sources for vector in (source.weight, source.bias)]
    like: Tensor = raws[0] if own is None else own
    operation = Fuse(groups, eps, tuple(source.levels for source in sources))
    if not sources:
        return operation.plain(maps, vectors, None, like.dtype)
    if runs(*maps, *vectors):
        made = len(sources) <= MOST_SOURCES
        if differentiates(*maps, *vectors):
            made = made and operation.has_gradient(like, raws)
        if not made:
            norm = functools.partial(norm_act, dtype=torch.float32)
            return operation.composed(norm, maps, vectors, None, like.dtype)
    found: Tensor = operation(maps, vectors, None, None)
    return found


@dataclass(frozen=True)
class Fuse(Operation):
    """maps: own, and the sources."""

    groups: int
    eps: float
    levels: tuple[int, ...]
    backward_reads_out = True  # where the ReLU passes

    @property
    def norms(self) -> int:  # type: ignore[override]
        return len(self.levels)

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        wide = [None if x is None else at_least_float32(x) for x in maps]
        return self.composed(norm_act_plain, wide, vectors, out, dtype)

    def composed(
        self,
        norm: Callable[..., Tensor],
        maps: Maps,
        vectors: Vectors,
        out: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        total, *raws = maps
        height, width = (raws[0] if total is None else total).shape[-2:]
        affine = zip(vectors[::2], vectors[1::2], strict=True)
        for raw, vector, levels in zip(raws, affine, self.levels, strict=True):
            y = norm(raw, self.groups, *vector, self.eps)
            if levels:  # each pixel 2^levels times along both edges, then cut to size
                y = functional.interpolate(y, scale_factor=float(2**levels))
            y = y[..., :height, :width]
            total = y if total is None else total + y
        return deliver(torch.relu(total), out, dtype)

    def launch(self, call: Call) -> None:
        (own, *raws), out = call.maps, call.out
        affine, affine_sample = affine_arguments(call.vectors)
        tile = None
        if own is None and not any(self.levels):
            tile = self.packed(*raws, out)
        tile = tile or aligned_tile(TUNING["forward"], raws[0] if own is None else own, self.groups)
        pixels = tuple(raw.shape[2] * raw.shape[3] for raw in raws)
        with on_device(out):
            _fuse_kernel[(tile.programs(len(out)),)](
                () if own is None else (as_map(own),),
                tuple(as_map(raw, tile.unit) for raw in raws), tuple(affine), affine_sample,
                as_map(out, tile.unit), call.stats, call.stats[0].numel(), self.eps,
                WIDTH=out.shape[-1], WIDTHS=tuple(raw.shape[-1] for raw in raws), PIXELS_OF=pixels,
                ROWS_OF=tuple(min(tile.rows, power_of_two(number)) for number in pixels),
                LEVELS=self.levels, **tile.sizes(),
            )  # fmt: skip

    def packed(self, *maps: Tensor) -> Tile | None:
        """A tile for the sum of maps at one resolution."""
        tuning = TUNING["sum"]
        tile = packed_tile(tuning, maps, self.groups)
        if tile is not None and tile.programs(len(maps[0])) > FEW_PROGRAMS:
            half = Tuning(tuning.tile // 2, tuning.per_thread, tuning.max_warps)
            tile = packed_tile(half, maps, self.groups)
        return tile

    def launch_backward(
        self, call: Call, douts: Sequence[Tensor], sums: Tensor, wanted: Sequence[bool]
    ) -> list[Vector]:
        (own, *raws), (dout,), out = call.maps, douts, call.out
        down = empty_like(own) if own is not None and wanted[0] else None
        found = [gradient_like(raw) for raw in raws]
        scales, affine_sample = affine_arguments(call.vectors)
        scale = tuple(pair[:1] for pair in scales)
        tile = self.packed(dout, out, *raws, *found) if own is None else None
        sizes: dict[str, Any] = {}
        if tile is None:
            tile = self.pyramid(out, raws)
        if tile is not None and tile.unit == 1:
            kernel, height, width = _pyramid_backward_kernel, out.shape[2], out.shape[3]
            sizes = {"HEIGHT": height, "WIDTH": width, "LEVELS": self.levels}
            # Three programs of 8 warps fit an SM; those of 16 hold more numbers in each thread.
            sizes["maxnreg"] = 80 if tile.warps <= 8 else 128
        else:
            kernel = _sum_backward_kernel
        tile = tile or aligned_tile(TUNING["sum"], out, self.groups)
        with on_device(out):
            kernel[(tile.programs(len(out)),)](
                as_map(dout, tile.unit), as_map(out, tile.unit),
                () if down is None else (as_map(down),),
                tuple(as_map(raw, tile.unit) for raw in raws), scale, affine_sample,
                tuple(as_map(draw, tile.unit) for draw in found),
                call.stats, call.stats[0].numel(), sums, sums[0].numel(), **sizes, **tile.sizes(),
            )  # fmt: skip
        return [down, *found]

    def has_gradient(self, like: Tensor, raws: Sequence[Tensor]) -> bool:
        """Whether one of the kernels makes it.  like: of the result's shape."""
        return not any(self.levels) or self.pyramid(like, raws) is not None

    def pyramid(self, like: Tensor, raws: Sequence[Tensor]) -> Tile | None:
        """A tile of all pixels of the first source, if its sums give those of the others."""
        tuning, (height, width) = TUNING["pyramid"], like.shape[2:]
        tile = aligned_tile(tuning, like, self.groups)
        whole = power_of_two(height) == height and power_of_two(width) == width
        exact = all(
            (raw.shape[2] << level, raw.shape[3] << level) == (height, width)
            for raw, level in zip(raws, self.levels, strict=True)
        )
        if not (whole and exact and list(self.levels) == sorted(self.levels)):
            return None
        pixels = (height >> self.levels[0]) * (width >> self.levels[0])
        block = tile.block
        while block > 1 and block * tile.lanes * height * width > tuning.tile:
            block //= 2
        columns = block * tile.lanes
        warps = tuning.warps(pixels * columns)
        # No program has threads without a number, of the last source either: PyTorch's operations
        # are as fast for so few.
        least = (height * width * columns) >> (2 * self.levels[-1])
        if height * width * columns > tuning.tile or least < 32 * warps:
            return None
        return Tile(pixels, self.groups, tile.channels, block, tile.lanes, columns, pixels, warps)


# ---- forward


@jit
def _fuse_kernel(
    own, raws, affine, affine_sample, out, stats, plane, eps,
    WIDTH: tl.constexpr, WIDTHS: tl.constexpr, PIXELS_OF: tl.constexpr, ROWS_OF: tl.constexpr,
    LEVELS: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """own: none or one.  raws, affine, WIDTHS …: of each source."""
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    out = of_sample(out, sample, UNIT)
    at = sample * affine_sample + channel
    sources, norms = (), ()
    for i in tl.static_range(len(raws)):
        raw = of_sample(raws[i], sample, UNIT)
        mean, rho = statistics(
            load_map, raw, channel, valid, eps, PIXELS_OF[i], CPG, BLOCK, LANES, COLUMNS,
            ROWS_OF[i], MASKED or PIXELS_OF[i] % ROWS_OF[i] != 0,
        )  # fmt: skip
        scale, shift = scale_and_shift(affine[i], at, valid)
        sources += (raw,)  # type: ignore[assignment]
        norms += ((mean, rho, scale, shift),)  # type: ignore[assignment]
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        row = pixel // WIDTH
        column = pixel % WIDTH
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if len(own) > 0:
            total = read(of_sample(own[0], sample, UNIT), pixel, channel, mask, MASKED)
        for i in tl.static_range(len(raws)):
            there = (row >> LEVELS[i]) * WIDTHS[i] + (column >> LEVELS[i])
            x = read(sources[i], there, channel, mask, MASKED)
            total += normalise(x, norms[i][0], norms[i][1], norms[i][2], norms[i][3])
        write(out, pixel, channel, mask, rectify(total), MASKED)
    at = sample * GROUPS + group
    for i in tl.static_range(len(raws)):
        keep_statistics(stats, i, plane, at, norms[i][0], norms[i][1], valid, LANES, COLUMNS)


# ---- backward


@jit
def _cotangent(dout, out, pixel, channel, mask, MASKED: tl.constexpr):
    g = read(dout, pixel, channel, mask, MASKED)
    return tl.where(read(out, pixel, channel, mask, MASKED) > 0, g, 0.0)


@jit
def _summed(
    g, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """From pixels of the level before to those of the next: sums over squares of them."""
    if LEVELS > BEFORE:
        EDGE: tl.constexpr = 1 << (LEVELS - BEFORE)
        H: tl.constexpr = HEIGHT >> LEVELS
        W: tl.constexpr = WIDTH >> LEVELS
        g = tl.sum(tl.reshape(g, (H * EDGE * W, EDGE, N)), axis=1)
        g = tl.sum(tl.reshape(g, (H, EDGE, W, N)), axis=1)
        g = tl.reshape(g, (H * W, N))
    return g


@jit
def _pyramid_backward_kernel(
    dout, out, down, raws, scales, affine_sample, draws, stats, plane, sums, sums_plane,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """down: none, or the gradient of the scale's own stream.

    The cotangent is read once, in tiles of the first source's resolution.
    """
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    W0: tl.constexpr = WIDTH >> LEVELS[0]
    inside = valid[None, :]
    low = tl.arange(0, PIXELS)
    dout, out = of_sample(dout, sample, 1), of_sample(out, sample, 1)
    g = tl.zeros((PIXELS, COLUMNS), tl.float32)
    for i in tl.static_range(1 << LEVELS[0]):
        for j in tl.static_range(1 << LEVELS[0]):
            at = ((low // W0 << LEVELS[0]) + i) * WIDTH + (low % W0 << LEVELS[0]) + j
            part = _cotangent(dout, out, at, channel, inside, MASKED)
            if len(down) > 0:
                write(of_sample(down[0], sample, 1), at, channel, inside, part, MASKED)
            g += part
    at = sample * GROUPS + group
    for i in tl.static_range(len(raws)):
        g = _summed(g, HEIGHT, WIDTH, COLUMNS, LEVELS[max(i - 1, 0)], LEVELS[i])
        pixel = tl.arange(0, (HEIGHT * WIDTH) >> (2 * LEVELS[i]))
        x = read(of_sample(raws[i], sample, 1), pixel, channel, inside, MASKED)
        mean, rho = kept_pair(stats, i, plane, at, valid)
        scale, _ = scale_and_shift(scales[i], sample * affine_sample + channel, valid)
        unit = (x - mean[None, :]) * rho[None, :]
        dweight, dbias = sums_of(g * unit, g, True)
        keep_pair(sums, i, sums_plane, sample * (GROUPS * CPG) + channel, dweight, dbias, valid)
        one, along = means_along(dweight, dbias, scale, g.shape[0] * CPG, BLOCK, LANES, COLUMNS)
        dx = norm_gradient(g, unit, scale, rho, one, along)
        write(of_sample(draws[i], sample, 1), pixel, channel, inside, dx, MASKED)


@jit
def _sum_backward_kernel(
    dout, out, down, raws, scales, affine_sample, draws, stats, plane, sums, sums_plane,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """down: none, or the gradient of the scale's own stream.

    All maps go by in chunks, once for the sums that the gradients need and once for these.
    """
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    dout, out = of_sample(dout, sample, UNIT), of_sample(out, sample, UNIT)
    sources, norms, alongs = (), (), ()
    for i in tl.static_range(len(raws)):
        sources += (of_sample(raws[i], sample, UNIT),)  # type: ignore[assignment]
        mean, rho = kept_pair(stats, i, plane, sample * GROUPS + group, valid)
        scale, _ = scale_and_shift(scales[i], sample * affine_sample + channel, valid)
        norms += ((mean, rho, scale),)  # type: ignore[assignment]
        alongs += (tl.zeros((ROWS, COLUMNS), tl.float32),)  # type: ignore[assignment]
    ones = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        g = _cotangent(dout, out, pixel, channel, mask, MASKED)
        ones += g
        added = ()
        for i in tl.static_range(len(raws)):
            x = read(sources[i], pixel, channel, mask, MASKED)
            unit = (x - norms[i][0][None, :]) * norms[i][1][None, :]
            added += (alongs[i] + g * unit,)  # type: ignore[assignment]
        alongs = added
    dbias = tl.sum(ones, axis=0)
    slopes = ()
    for i in tl.static_range(len(raws)):
        dweight = tl.sum(alongs[i], axis=0)
        keep_pair(sums, i, sums_plane, sample * (GROUPS * CPG) + channel, dweight, dbias, valid)
        along = means_along(dweight, dbias, norms[i][2], PIXELS * CPG, BLOCK, LANES, COLUMNS)
        slopes += (along,)  # type: ignore[assignment]
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        g = _cotangent(dout, out, pixel, channel, mask, MASKED)
        if len(down) > 0:
            write(of_sample(down[0], sample, UNIT), pixel, channel, mask, g, MASKED)
        for i in tl.static_range(len(raws)):
            x = read(sources[i], pixel, channel, mask, MASKED)
            unit = (x - norms[i][0][None, :]) * norms[i][1][None, :]
            dx = norm_gradient(g, unit, norms[i][2], norms[i][1], slopes[i][0], slopes[i][1])
            write(of_sample(draws[i], sample, UNIT), pixel, channel, mask, dx, MASKED)
