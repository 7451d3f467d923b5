"""Norms in half precision whose groups do not fill whole vectors of 16 bytes: 7, 14 or 28 channels.

These are the head's.  In `single` and `fusion` each group has columns of its own, a power of two;
so a group begins in the middle of a vector, and its numbers go one by one.  Here the columns of a
program are the channels as they lie, of as many groups as fill whole vectors, and each column knows
its group; strides are given in vectors, so that the compiler knows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gdeq.kernels.choice import on_device
from gdeq.kernels.jit import jit, tl
from gdeq.kernels.norms.pieces import inverse_deviation, norm_gradient, normalise, rectify
from gdeq.kernels.norms.tensors import channels_last, pixel_strides

enabled = True  # for comparisons
VECTOR = 8  # numbers in 16 bytes; the kernels have it as a number
HELD = 16384  # numbers that a program of one norm holds
PER_THREAD = 32  # of these
# Where two norms are added, numbers of a source that go by at once: as many as a program of 8 warps
# has registers for, which fills an SM; where there are more programs than SMs, half of that.
CHUNKS = (8192, 4096)
FEW = 160  # programs
MOST_COLUMNS = 64
MOST_CHUNKS = 32  # of a sum: more of them are summed with more rounding (`_moments`)


@dataclass(frozen=True)
class Columns:
    """block: groups of a program.  width: its channels, with zeros beside them; the rest of its
    columns is masked."""

    block: int
    width: int
    columns: int


def columns_of(channels: int, groups: int, room: int) -> Columns | None:
    """None where whole groups fill vectors by themselves, or never do."""
    size = channels // groups
    if size % VECTOR == 0 or not size & (size - 1):
        return None
    block = 1
    while block < groups and (block * size % VECTOR or groups % block):
        block += 1
    width = block * size + (room if block == groups else 0)
    columns = 1 << (width - 1).bit_length()
    fits = width % VECTOR == 0 and columns <= MOST_COLUMNS and (block == groups or not room)
    return Columns(block, width, columns) if fits else None


def _in_vectors(x: Tensor) -> bool:
    strides = pixel_strides(x)
    whole = strides is not None and not any(stride % VECTOR for stride in strides)
    return whole and x.element_size() == 2 and x.data_ptr() % 16 == 0


def takes(maps: Sequence[Tensor], groups: int, room: int = 0) -> bool:
    """maps: all that are read or written, of one shape, zeros beside the channels included."""
    _, channels, height, width = maps[0].shape
    columns = columns_of(channels - room, groups, room)
    pixels = height * width
    if not enabled or columns is None or pixels & (pixels - 1):
        return False
    whole = pixels * columns.columns >= 32 * VECTOR  # a vector for each thread of a warp
    alike = all(x.shape == maps[0].shape for x in maps)
    return whole and alike and all(map(_in_vectors, maps))


def takes_one(maps: Sequence[Tensor], groups: int, room: int) -> bool:
    """For `launch` and `launch_backward`."""
    _, channels, height, width = maps[0].shape
    columns = columns_of(channels - room, groups, room)
    fits = columns is not None and height * width * columns.columns <= HELD
    return fits and takes(maps, groups, room)


def takes_two(maps: Sequence[Tensor], groups: int) -> bool:
    """For `launch_sum` and `launch_sum_backward`."""
    _, channels, height, width = maps[0].shape
    columns = columns_of(channels, groups, 0)
    few = columns is not None and height * width * columns.columns <= MOST_CHUNKS * min(CHUNKS)
    return few and takes(maps, groups)


def _sizes(like: Tensor, groups: int, room: int) -> tuple[Columns, dict[str, int]]:
    _, channels, height, width = like.shape
    columns = columns_of(channels - room, groups, room)
    assert columns is not None
    return columns, {
        "PIXELS": height * width,
        "GROUPS": groups,
        "CPG": (channels - room) // groups,
        "BLOCK": columns.block,
        "WIDTH": columns.width,
        "COLUMNS": columns.columns,
    }


def _lying(x: Tensor) -> tuple[Tensor, int, int]:
    """x and its strides in vectors."""
    x, sample, pixel = channels_last(x)
    return x, sample // VECTOR, pixel // VECTOR


def _warps(numbers: int) -> int:
    return max(1, min(16, numbers // (32 * PER_THREAD)))


def launch(
    x: Tensor,
    groups: int,
    affine: Sequence[Any],
    affine_sample: int,
    out: Tensor,
    stats: Tensor | None,
    eps: float,
    relu: bool,
    room: int,
) -> None:
    """`single._norm_kernel`."""
    columns, sizes = _sizes(x, groups, room)
    with on_device(x):
        _uneven_norm_kernel[(len(x) * groups // columns.block,)](
            *_lying(x),
            *affine,
            affine_sample,
            *_lying(out),
            stats,
            len(x) * groups,
            eps,
            **sizes,
            AFFINE=affine[0] is not None,
            RELU=relu,
            KEEP=stats is not None,
            num_warps=_warps(sizes["PIXELS"] * columns.columns),
        )


def launch_backward(
    x: Tensor,
    dy: Tensor,
    groups: int,
    affine: Sequence[Any],
    affine_sample: int,
    stats: Tensor,
    dx: Tensor,
    sums: Tensor,
    relu: bool,
    partials: bool,
    room: int,
) -> None:
    """`single._norm_backward_kernel`."""
    columns, sizes = _sizes(x, groups, room)
    with on_device(x):
        _uneven_norm_backward_kernel[(len(x) * groups // columns.block,)](
            *_lying(x),
            *_lying(dy),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *_lying(dx),
            sums,
            sums[0].numel(),
            **sizes,
            AFFINE=affine[0] is not None,
            RELU=relu,
            PARTIALS=partials,
            num_warps=_warps(sizes["PIXELS"] * columns.columns),
        )


def _in_chunks(sizes: dict[str, int], programs: int) -> dict[str, int]:
    chunk = CHUNKS[programs > FEW]
    rows = max(1, min(sizes["PIXELS"], chunk // sizes["COLUMNS"]))
    return {**sizes, "ROWS": rows, "num_warps": _warps(rows * sizes["COLUMNS"])}


def launch_sum(
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
    columns, sizes = _sizes(out, groups, 0)
    programs = len(out) * groups // columns.block
    with on_device(out):
        _uneven_sum_kernel[(programs,)](
            *_lying(raws[0]),
            *affine[:2],
            *_lying(raws[1]),
            *affine[2:],
            affine_sample,
            *_lying(out),
            stats,
            len(out) * groups,
            eps,
            **_in_chunks(sizes, programs),
            AFFINE0=affine[0] is not None,
            AFFINE1=affine[2] is not None,
            RELU=relu,
            KEEP=stats is not None,
        )


def launch_sum_backward(
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
    columns, sizes = _sizes(out, groups, 0)
    programs = len(out) * groups // columns.block
    with on_device(out):
        _uneven_sum_backward_kernel[(programs,)](
            *_lying(dout),
            *_lying(out),
            *_lying(raws[0]),
            scales[0],
            *_lying(draws[0]),
            *_lying(raws[1]),
            scales[1],
            *_lying(draws[1]),
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


# ---- pieces


@jit
def _place(
    GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The program's sample and first group; for each column its number and its group among the
    program's (BLOCK or more: none), and whether it is in memory."""
    # Backwards: what was written last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // (GROUPS // BLOCK)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    return sample, (program % (GROUPS // BLOCK)) * BLOCK, column, column // CPG, column < WIDTH


@jit
def _base(x, sample, x_sample, first, CPG: tl.constexpr, BLOCK: tl.constexpr):
    return x + sample * x_sample * 8 + (first // BLOCK) * (BLOCK * CPG)


@jit
def _read(
    x, x_pixel, pixel, column, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    where = x + pixel[:, None] * (x_pixel * 8) + column[None, :]
    if WIDTH == COLUMNS:
        value = tl.load(where)
    else:
        value = tl.load(where, mask=inside[None, :], other=0.0)
    return value.to(tl.float32)


@jit
def _write(
    x, x_pixel, pixel, column, inside, value, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    where = x + pixel[:, None] * (x_pixel * 8) + column[None, :]
    if WIDTH == COLUMNS:
        tl.store(where, value.to(x.dtype.element_ty))
    else:
        tl.store(where, value.to(x.dtype.element_ty), mask=inside[None, :])


@jit
def _over_groups(sums, group, BLOCK: tl.constexpr):
    """Sums of columns to the sum of their group, in each of its columns; 0 in those of none."""
    found = tl.zeros_like(sums)
    for i in tl.static_range(BLOCK):
        mine = group == i
        found = tl.where(mine, tl.sum(tl.where(mine, sums, 0.0), axis=0), found)
    return found


@jit
def _mean(sums, COUNT: tl.constexpr):
    """Rounded as it should be: what is constant is zeros without it."""
    return tl.div_rn(sums, tl.full(sums.shape, COUNT, tl.float32))


@jit
def _scale_and_shift(weight, bias, at, grouped, AFFINE: tl.constexpr):
    scale = tl.where(grouped, 1.0, 0.0)
    shift = tl.zeros_like(scale)
    if AFFINE:
        scale = tl.load(weight + at, mask=grouped, other=0.0).to(tl.float32)
        shift = tl.load(bias + at, mask=grouped, other=0.0).to(tl.float32)
    return scale, shift


@jit
def _scale(weight, at, grouped, AFFINE: tl.constexpr):
    scale = tl.where(grouped, 1.0, 0.0)
    if AFFINE:
        scale = tl.load(weight + at, mask=grouped, other=0.0).to(tl.float32)
    return scale


@jit
def _keep(stats, plane, at, mean, rho, column, grouped, CPG: tl.constexpr):
    first = grouped & (column % CPG == 0)
    tl.store(stats + at, mean, mask=first)
    tl.store(stats + plane + at, rho, mask=first)


@jit
def _kept(stats, plane, at, grouped):
    mean = tl.load(stats + at, mask=grouped, other=0.0)
    rho = tl.load(stats + plane + at, mask=grouped, other=0.0)
    return mean, rho


# ---- one norm


@jit
def _uneven_norm_kernel(
    x, x_sample, x_pixel,
    weight, bias, affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    AFFINE: tl.constexpr, RELU: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = PIXELS * CPG
    sample, first, column, group, inside = _place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    pixel = tl.arange(0, PIXELS)
    x = _base(x, sample, x_sample, first, CPG, BLOCK)
    out = _base(out, sample, out_sample, first, CPG, BLOCK)
    tile = _read(x, x_pixel, pixel, column, inside, WIDTH, COLUMNS)
    mean = _mean(_over_groups(tl.sum(tile, axis=0), group, BLOCK), COUNT)
    off = tile - mean[None, :]
    squares = _over_groups(tl.sum(off * off, axis=0), group, BLOCK)
    rho = inverse_deviation(squares, COUNT, eps)
    if KEEP:
        _keep(stats, plane, sample * GROUPS + first + group, mean, rho, column, grouped, CPG)
    at = sample * affine_sample + first * CPG + column
    scale, shift = _scale_and_shift(weight, bias, at, grouped, AFFINE)
    y = off * (rho * scale)[None, :] + shift[None, :]
    if RELU:
        y = rectify(y)
    y = tl.where(grouped[None, :], y, 0.0)
    _write(out, out_pixel, pixel, column, inside, y, WIDTH, COLUMNS)


@jit
def _uneven_norm_backward_kernel(
    x, x_sample, x_pixel,
    dy, dy_sample, dy_pixel,
    weight, bias, affine_sample,
    stats, plane,
    dx, dx_sample, dx_pixel,
    sums, sums_plane,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    AFFINE: tl.constexpr, RELU: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    sample, first, column, group, inside = _place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    pixel = tl.arange(0, PIXELS)
    x = _base(x, sample, x_sample, first, CPG, BLOCK)
    dy = _base(dy, sample, dy_sample, first, CPG, BLOCK)
    dx = _base(dx, sample, dx_sample, first, CPG, BLOCK)
    unit = _read(x, x_pixel, pixel, column, inside, WIDTH, COLUMNS)
    g = _read(dy, dy_pixel, pixel, column, inside, WIDTH, COLUMNS)
    mean, rho = _kept(stats, plane, sample * GROUPS + first + group, grouped)
    at = sample * affine_sample + first * CPG + column
    scale, shift = _scale_and_shift(weight, bias, at, grouped, AFFINE)
    unit = (unit - mean[None, :]) * rho[None, :]
    if RELU:
        g = tl.where(unit * scale[None, :] + shift[None, :] > 0, g, 0.0)
    dweight, dbias = tl.split(tl.sum(tl.join(g * unit, g), axis=0))  # one pass over the warps
    if PARTIALS:
        into = sums + sample * (GROUPS * CPG) + first * CPG + column
        tl.store(into, dweight, mask=grouped)
        tl.store(into + sums_plane, dbias, mask=grouped)
    along_unit = _over_groups(dweight * scale, group, BLOCK) * (1.0 / (PIXELS * CPG))
    along_one = _over_groups(dbias * scale, group, BLOCK) * (1.0 / (PIXELS * CPG))
    g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
    g = tl.where(grouped[None, :], g, 0.0)
    _write(dx, dx_pixel, pixel, column, inside, g, WIDTH, COLUMNS)


# ---- the sum of two


@jit
def _moments(pivot, sums, squares, group, COUNT: tl.constexpr, BLOCK: tl.constexpr, eps):
    """Mean and ρ from Σ(x − pivot) and Σ(x − pivot)² of each column.

    With the mean of a share p of the numbers as pivot, here of the first of 1/p chunks,
    (mean − pivot)² is at most 1/p of the variance: the difference below is of numbers 1/p as large
    as itself.  The sums over chunks go in order, which is another 1/p of roundings at most.
    """
    delta = _over_groups(sums, group, BLOCK) * (1.0 / COUNT)
    around = _over_groups(squares, group, BLOCK) - COUNT * delta * delta
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
    sample, first, column, group, inside = _place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    row = tl.arange(0, ROWS)
    raw0 = _base(raw0, sample, raw0_sample, first, CPG, BLOCK)
    raw1 = _base(raw1, sample, raw1_sample, first, CPG, BLOCK)
    out = _base(out, sample, out_sample, first, CPG, BLOCK)
    x0 = _read(raw0, raw0_pixel, row, column, inside, WIDTH, COLUMNS)
    x1 = _read(raw1, raw1_pixel, row, column, inside, WIDTH, COLUMNS)
    sums0, sums1 = tl.split(tl.sum(tl.join(x0, x1), axis=0))
    pivot0 = _mean(_over_groups(sums0, group, BLOCK), ROWS * CPG)
    pivot1 = _mean(_over_groups(sums1, group, BLOCK), ROWS * CPG)
    off0, off1 = x0 - pivot0[None, :], x1 - pivot1[None, :]
    square0, square1 = off0 * off0, off1 * off1
    for start in range(ROWS, PIXELS, ROWS):
        x0 = _read(raw0, raw0_pixel, start + row, column, inside, WIDTH, COLUMNS)
        x1 = _read(raw1, raw1_pixel, start + row, column, inside, WIDTH, COLUMNS)
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
        _keep(stats, plane, at, mean0, rho0, column, grouped, CPG)
        _keep(stats + 2 * plane, plane, at, mean1, rho1, column, grouped, CPG)
    at = sample * affine_sample + first * CPG + column
    scale0, shift0 = _scale_and_shift(weight0, bias0, at, grouped, AFFINE0)
    scale1, shift1 = _scale_and_shift(weight1, bias1, at, grouped, AFFINE1)
    for start in range(0, PIXELS, ROWS):
        x0 = _read(raw0, raw0_pixel, start + row, column, inside, WIDTH, COLUMNS)
        x1 = _read(raw1, raw1_pixel, start + row, column, inside, WIDTH, COLUMNS)
        y = normalise(x0, mean0, rho0, scale0, shift0) + normalise(x1, mean1, rho1, scale1, shift1)
        if RELU:
            y = rectify(y)
        _write(out, out_pixel, start + row, column, inside, y, WIDTH, COLUMNS)


@jit
def _cotangent(
    dout, dout_pixel, out, out_pixel, pixel, column, inside,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    g = _read(dout, dout_pixel, pixel, column, inside, WIDTH, COLUMNS)
    if RELU:
        y = _read(out, out_pixel, pixel, column, inside, WIDTH, COLUMNS)
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
    sample, first, column, group, inside = _place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    row = tl.arange(0, ROWS)
    dout = _base(dout, sample, dout_sample, first, CPG, BLOCK)
    out = _base(out, sample, out_sample, first, CPG, BLOCK)
    raw0 = _base(raw0, sample, raw0_sample, first, CPG, BLOCK)
    raw1 = _base(raw1, sample, raw1_sample, first, CPG, BLOCK)
    draw0 = _base(draw0, sample, draw0_sample, first, CPG, BLOCK)
    draw1 = _base(draw1, sample, draw1_sample, first, CPG, BLOCK)
    at = sample * GROUPS + first + group
    mean0, rho0 = _kept(stats, plane, at, grouped)
    mean1, rho1 = _kept(stats + 2 * plane, plane, at, grouped)
    at = sample * affine_sample + first * CPG + column
    scale0 = _scale(weight0, at, grouped, AFFINE0)
    scale1 = _scale(weight1, at, grouped, AFFINE1)
    of_one = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_unit0 = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_unit1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel = start + row
        g = _cotangent(
            dout, dout_pixel, out, out_pixel, pixel, column, inside, WIDTH, COLUMNS, RELU
        )
        x0 = _read(raw0, raw0_pixel, pixel, column, inside, WIDTH, COLUMNS)
        x1 = _read(raw1, raw1_pixel, pixel, column, inside, WIDTH, COLUMNS)
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
    one0 = _over_groups(dbias * scale0, group, BLOCK) * SHARE
    one1 = _over_groups(dbias * scale1, group, BLOCK) * SHARE
    along0 = _over_groups(dweight0 * scale0, group, BLOCK) * SHARE
    along1 = _over_groups(dweight1 * scale1, group, BLOCK) * SHARE
    for start in range(0, PIXELS, ROWS):
        pixel = start + row
        g = _cotangent(
            dout, dout_pixel, out, out_pixel, pixel, column, inside, WIDTH, COLUMNS, RELU
        )
        x0 = _read(raw0, raw0_pixel, pixel, column, inside, WIDTH, COLUMNS)
        unit = (x0 - mean0[None, :]) * rho0[None, :]
        dx = norm_gradient(g, unit, scale0, rho0, one0, along0)
        _write(draw0, draw0_pixel, pixel, column, inside, dx, WIDTH, COLUMNS)
        x1 = _read(raw1, raw1_pixel, pixel, column, inside, WIDTH, COLUMNS)
        unit = (x1 - mean1[None, :]) * rho1[None, :]
        dx = norm_gradient(g, unit, scale1, rho1, one1, along1)
        _write(draw1, draw1_pixel, pixel, column, inside, dx, WIDTH, COLUMNS)
