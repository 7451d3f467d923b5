"""The sum of two norms such as those of `uneven`, at one resolution: `fusion` without an own map.

A sample's maps are more than a program holds.  They go by twice in chunks: for the statistics, or
the sums that a gradient needs, and for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms import uneven
from gdeq.fast.kernels.norms.pieces import inverse_deviation, norm_gradient, normalise, rectify
from gdeq.fast.kernels.norms.uneven import (
    base,
    columns_of,
    keep,
    kept,
    lying,
    mean_of,
    over_groups,
    place,
    read,
    scale_and_shift,
    sizes_of,
    warps_of,
    write,
)

# Numbers of a source that go by at once: as many as a program of 8 warps has registers for, which
# fills an SM; where there are more programs than SMs, half of that.
CHUNKS = (8192, 4096)
FEW = 160  # programs
MOST_CHUNKS = 32  # more of them are summed with more rounding (`_moments`)


def takes(maps: Sequence[Tensor], groups: int) -> bool:
    """maps: all that are read or written, of one shape."""
    _, channels, height, width = maps[0].shape
    columns = columns_of(channels, groups, 0)
    few = columns is not None and height * width * columns.columns <= MOST_CHUNKS * min(CHUNKS)
    return few and uneven.takes(maps, groups)


def _in_chunks(sizes: dict[str, int], programs: int) -> dict[str, int]:
    chunk = CHUNKS[programs > FEW]
    rows = max(1, min(sizes["PIXELS"], chunk // sizes["COLUMNS"]))
    return {**sizes, "ROWS": rows, "num_warps": warps_of(rows * sizes["COLUMNS"])}


def launch(
    raws: Sequence[Tensor],
    groups: int,
    affine: Sequence[Any],
    affine_sample: int,
    out: Tensor,
    stats: Tensor | None,
    eps: float,
    relu: bool,
) -> None:
    """`fusion._fuse_kernel` of two sources at the result's resolution."""
    columns, sizes = sizes_of(out, groups, 0)
    programs = len(out) * groups // columns.block
    with on_device(out):
        _uneven_sum_kernel[(programs,)](
            *lying(raws[0]),
            *affine[:2],
            *lying(raws[1]),
            *affine[2:],
            affine_sample,
            *lying(out),
            stats,
            len(out) * groups,
            eps,
            **_in_chunks(sizes, programs),
            AFFINE0=affine[0] is not None,
            AFFINE1=affine[2] is not None,
            RELU=relu,
            KEEP=stats is not None,
        )


def launch_backward(
    dout: Tensor,
    out: Tensor,
    raws: Sequence[Tensor],
    groups: int,
    scales: Sequence[Any],
    affine_sample: int,
    stats: Tensor,
    draws: Sequence[Tensor],
    sums: Tensor,
    relu: bool,
) -> None:
    """`fusion._fuse_backward_kernel` of the same."""
    columns, sizes = sizes_of(out, groups, 0)
    programs = len(out) * groups // columns.block
    with on_device(out):
        _uneven_sum_backward_kernel[(programs,)](
            *lying(dout),
            *lying(out),
            *lying(raws[0]),
            scales[0],
            *lying(draws[0]),
            *lying(raws[1]),
            scales[1],
            *lying(draws[1]),
            affine_sample,
            stats,
            stats[0].numel(),
            sums,
            sums[0].numel(),
            **_in_chunks(sizes, programs),
            AFFINE0=scales[0] is not None,
            AFFINE1=scales[1] is not None,
            RELU=relu,
        )


@jit
def _moments(pivot, sums, squares, group, COUNT: tl.constexpr, BLOCK: tl.constexpr, eps):
    """Mean and ρ from Σ(x − pivot) and Σ(x − pivot)² of each column.

    With the mean of a share p of the numbers as pivot, here of the first of 1/p chunks,
    (mean − pivot)² is at most 1/p of the variance: the difference below is of numbers 1/p as large
    as itself.  The sums over chunks go in order, which is another 1/p of roundings at most.
    """
    delta = over_groups(sums, group, BLOCK) * (1.0 / COUNT)
    around = over_groups(squares, group, BLOCK) - COUNT * delta * delta
    return pivot + delta, inverse_deviation(tl.where(around < 0, 0.0, around), COUNT, eps)


@jit
def _uneven_sum_kernel(
    raw0, raw0_sample, raw0_pixel, weight0, bias0,
    raw1, raw1_sample, raw1_pixel, weight1, bias1,
    affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    AFFINE0: tl.constexpr, AFFINE1: tl.constexpr, RELU: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = PIXELS * CPG
    sample, first, column, group, inside = place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    row = tl.arange(0, ROWS)
    raw0 = base(raw0, sample, raw0_sample, first, CPG, BLOCK)
    raw1 = base(raw1, sample, raw1_sample, first, CPG, BLOCK)
    out = base(out, sample, out_sample, first, CPG, BLOCK)
    x0 = read(raw0, raw0_pixel, row, column, inside, WIDTH, COLUMNS)
    x1 = read(raw1, raw1_pixel, row, column, inside, WIDTH, COLUMNS)
    sums0, sums1 = tl.split(tl.sum(tl.join(x0, x1), axis=0))
    pivot0 = mean_of(over_groups(sums0, group, BLOCK), ROWS * CPG)
    pivot1 = mean_of(over_groups(sums1, group, BLOCK), ROWS * CPG)
    off0, off1 = x0 - pivot0[None, :], x1 - pivot1[None, :]
    square0, square1 = off0 * off0, off1 * off1
    for start in range(ROWS, PIXELS, ROWS):
        x0 = read(raw0, raw0_pixel, start + row, column, inside, WIDTH, COLUMNS)
        x1 = read(raw1, raw1_pixel, start + row, column, inside, WIDTH, COLUMNS)
        x0, x1 = x0 - pivot0[None, :], x1 - pivot1[None, :]
        off0 += x0
        off1 += x1
        square0 += x0 * x0
        square1 += x1 * x1
    sums0, sums1 = tl.split(tl.sum(tl.join(off0, off1), axis=0))
    squares0, squares1 = tl.split(tl.sum(tl.join(square0, square1), axis=0))
    mean0, rho0 = _moments(pivot0, sums0, squares0, group, COUNT, BLOCK, eps)
    mean1, rho1 = _moments(pivot1, sums1, squares1, group, COUNT, BLOCK, eps)
    if KEEP:
        at = sample * GROUPS + first + group
        keep(stats, plane, at, mean0, rho0, column, grouped, CPG)
        keep(stats + 2 * plane, plane, at, mean1, rho1, column, grouped, CPG)
    at = sample * affine_sample + first * CPG + column
    scale0, shift0 = scale_and_shift(weight0, bias0, at, grouped, AFFINE0)
    scale1, shift1 = scale_and_shift(weight1, bias1, at, grouped, AFFINE1)
    for start in range(0, PIXELS, ROWS):
        x0 = read(raw0, raw0_pixel, start + row, column, inside, WIDTH, COLUMNS)
        x1 = read(raw1, raw1_pixel, start + row, column, inside, WIDTH, COLUMNS)
        y = normalise(x0, mean0, rho0, scale0, shift0) + normalise(x1, mean1, rho1, scale1, shift1)
        if RELU:
            y = rectify(y)
        write(out, out_pixel, start + row, column, inside, y, WIDTH, COLUMNS)


@jit
def _cotangent(
    dout, dout_pixel, out, out_pixel, pixel, column, inside,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    g = read(dout, dout_pixel, pixel, column, inside, WIDTH, COLUMNS)
    if RELU:
        y = read(out, out_pixel, pixel, column, inside, WIDTH, COLUMNS)
        g = tl.where(y > 0, g, 0.0)
    return g


@jit
def _uneven_sum_backward_kernel(
    dout, dout_sample, dout_pixel,
    out, out_sample, out_pixel,
    raw0, raw0_sample, raw0_pixel, weight0, draw0, draw0_sample, draw0_pixel,
    raw1, raw1_sample, raw1_pixel, weight1, draw1, draw1_sample, draw1_pixel,
    affine_sample,
    stats, plane,
    sums, sums_plane,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    AFFINE0: tl.constexpr, AFFINE1: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = 1.0 / (PIXELS * CPG)
    sample, first, column, group, inside = place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    row = tl.arange(0, ROWS)
    dout = base(dout, sample, dout_sample, first, CPG, BLOCK)
    out = base(out, sample, out_sample, first, CPG, BLOCK)
    raw0 = base(raw0, sample, raw0_sample, first, CPG, BLOCK)
    raw1 = base(raw1, sample, raw1_sample, first, CPG, BLOCK)
    draw0 = base(draw0, sample, draw0_sample, first, CPG, BLOCK)
    draw1 = base(draw1, sample, draw1_sample, first, CPG, BLOCK)
    at = sample * GROUPS + first + group
    mean0, rho0 = kept(stats, plane, at, grouped)
    mean1, rho1 = kept(stats + 2 * plane, plane, at, grouped)
    at = sample * affine_sample + first * CPG + column
    scale0, _ = scale_and_shift(weight0, weight0, at, grouped, AFFINE0)
    scale1, _ = scale_and_shift(weight1, weight1, at, grouped, AFFINE1)
    of_one = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_unit0 = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_unit1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel = start + row
        g = _cotangent(
            dout, dout_pixel, out, out_pixel, pixel, column, inside, WIDTH, COLUMNS, RELU
        )
        x0 = read(raw0, raw0_pixel, pixel, column, inside, WIDTH, COLUMNS)
        x1 = read(raw1, raw1_pixel, pixel, column, inside, WIDTH, COLUMNS)
        of_one += g
        of_unit0 += g * ((x0 - mean0[None, :]) * rho0[None, :])
        of_unit1 += g * ((x1 - mean1[None, :]) * rho1[None, :])
    dbias = tl.sum(of_one, axis=0)
    dweight0, dweight1 = tl.split(tl.sum(tl.join(of_unit0, of_unit1), axis=0))
    into = sums + sample * (GROUPS * CPG) + first * CPG + column
    if AFFINE0:
        tl.store(into, dweight0, mask=grouped)
        tl.store(into + sums_plane, dbias, mask=grouped)
    if AFFINE1:
        tl.store(into + 2 * sums_plane, dweight1, mask=grouped)
        tl.store(into + 3 * sums_plane, dbias, mask=grouped)
    one0 = over_groups(dbias * scale0, group, BLOCK) * SHARE
    one1 = over_groups(dbias * scale1, group, BLOCK) * SHARE
    along0 = over_groups(dweight0 * scale0, group, BLOCK) * SHARE
    along1 = over_groups(dweight1 * scale1, group, BLOCK) * SHARE
    for start in range(0, PIXELS, ROWS):
        pixel = start + row
        g = _cotangent(
            dout, dout_pixel, out, out_pixel, pixel, column, inside, WIDTH, COLUMNS, RELU
        )
        x0 = read(raw0, raw0_pixel, pixel, column, inside, WIDTH, COLUMNS)
        unit = (x0 - mean0[None, :]) * rho0[None, :]
        dx = norm_gradient(g, unit, scale0, rho0, one0, along0)
        write(draw0, draw0_pixel, pixel, column, inside, dx, WIDTH, COLUMNS)
        x1 = read(raw1, raw1_pixel, pixel, column, inside, WIDTH, COLUMNS)
        unit = (x1 - mean1[None, :]) * rho1[None, :]
        dx = norm_gradient(g, unit, scale1, rho1, one1, along1)
        write(draw1, draw1_pixel, pixel, column, inside, dx, WIDTH, COLUMNS)
