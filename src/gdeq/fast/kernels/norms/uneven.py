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

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.pieces import inverse_deviation, norm_gradient, rectify
from gdeq.fast.kernels.norms.tensors import channels_last, pixel_strides

enabled = True  # for comparisons
VECTOR = 8  # numbers in 16 bytes; the kernels have it as a number
HELD = 16384  # numbers that a program of one norm holds
PER_THREAD = 32  # of these
MOST_COLUMNS = 64


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


def sizes_of(like: Tensor, groups: int, room: int) -> tuple[Columns, dict[str, int]]:
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


def lying(x: Tensor) -> tuple[Tensor, int, int]:
    """x and its strides in vectors."""
    x, sample, pixel = channels_last(x)
    return x, sample // VECTOR, pixel // VECTOR


def warps_of(numbers: int) -> int:
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
    columns, sizes = sizes_of(x, groups, room)
    with on_device(x):
        _uneven_norm_kernel[(len(x) * groups // columns.block,)](
            *lying(x),
            *affine,
            affine_sample,
            *lying(out),
            stats,
            len(x) * groups,
            eps,
            **sizes,
            AFFINE=affine[0] is not None,
            RELU=relu,
            KEEP=stats is not None,
            num_warps=warps_of(sizes["PIXELS"] * columns.columns),
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
    columns, sizes = sizes_of(x, groups, room)
    with on_device(x):
        _uneven_norm_backward_kernel[(len(x) * groups // columns.block,)](
            *lying(x),
            *lying(dy),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *lying(dx),
            sums,
            sums[0].numel(),
            **sizes,
            AFFINE=affine[0] is not None,
            RELU=relu,
            PARTIALS=partials,
            num_warps=warps_of(sizes["PIXELS"] * columns.columns),
        )


# ---- pieces


@jit
def place(
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
def base(x, sample, x_sample, first, CPG: tl.constexpr, BLOCK: tl.constexpr):
    return x + sample * x_sample * 8 + (first // BLOCK) * (BLOCK * CPG)


@jit
def read(
    x, x_pixel, pixel, column, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    where = x + pixel[:, None] * (x_pixel * 8) + column[None, :]
    if WIDTH == COLUMNS:
        value = tl.load(where)
    else:
        value = tl.load(where, mask=inside[None, :], other=0.0)
    return value.to(tl.float32)


@jit
def write(
    x, x_pixel, pixel, column, inside, value, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    where = x + pixel[:, None] * (x_pixel * 8) + column[None, :]
    if WIDTH == COLUMNS:
        tl.store(where, value.to(x.dtype.element_ty))
    else:
        tl.store(where, value.to(x.dtype.element_ty), mask=inside[None, :])


@jit
def over_groups(sums, group, BLOCK: tl.constexpr):
    """Sums of columns to the sum of their group, in each of its columns; 0 in those of none."""
    found = tl.zeros_like(sums)
    for i in tl.static_range(BLOCK):
        mine = group == i
        found = tl.where(mine, tl.sum(tl.where(mine, sums, 0.0), axis=0), found)
    return found


@jit
def mean_of(sums, COUNT: tl.constexpr):
    """Rounded as it should be: what is constant is zeros without it."""
    return tl.div_rn(sums, tl.full(sums.shape, COUNT, tl.float32))


@jit
def scale_and_shift(weight, bias, at, grouped, AFFINE: tl.constexpr):
    scale = tl.where(grouped, 1.0, 0.0)
    shift = tl.zeros_like(scale)
    if AFFINE:
        scale = tl.load(weight + at, mask=grouped, other=0.0).to(tl.float32)
        shift = tl.load(bias + at, mask=grouped, other=0.0).to(tl.float32)
    return scale, shift


@jit
def keep(stats, plane, at, mean, rho, column, grouped, CPG: tl.constexpr):
    first = grouped & (column % CPG == 0)
    tl.store(stats + at, mean, mask=first)
    tl.store(stats + plane + at, rho, mask=first)


@jit
def kept(stats, plane, at, grouped):
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
    sample, first, column, group, inside = place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    pixel = tl.arange(0, PIXELS)
    x = base(x, sample, x_sample, first, CPG, BLOCK)
    out = base(out, sample, out_sample, first, CPG, BLOCK)
    tile = read(x, x_pixel, pixel, column, inside, WIDTH, COLUMNS)
    mean = mean_of(over_groups(tl.sum(tile, axis=0), group, BLOCK), COUNT)
    off = tile - mean[None, :]
    squares = over_groups(tl.sum(off * off, axis=0), group, BLOCK)
    rho = inverse_deviation(squares, COUNT, eps)
    if KEEP:
        keep(stats, plane, sample * GROUPS + first + group, mean, rho, column, grouped, CPG)
    at = sample * affine_sample + first * CPG + column
    scale, shift = scale_and_shift(weight, bias, at, grouped, AFFINE)
    y = off * (rho * scale)[None, :] + shift[None, :]
    if RELU:
        y = rectify(y)
    y = tl.where(grouped[None, :], y, 0.0)
    write(out, out_pixel, pixel, column, inside, y, WIDTH, COLUMNS)


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
    sample, first, column, group, inside = place(GROUPS, CPG, BLOCK, WIDTH, COLUMNS)
    grouped = group < BLOCK
    pixel = tl.arange(0, PIXELS)
    x = base(x, sample, x_sample, first, CPG, BLOCK)
    dy = base(dy, sample, dy_sample, first, CPG, BLOCK)
    dx = base(dx, sample, dx_sample, first, CPG, BLOCK)
    unit = read(x, x_pixel, pixel, column, inside, WIDTH, COLUMNS)
    g = read(dy, dy_pixel, pixel, column, inside, WIDTH, COLUMNS)
    mean, rho = kept(stats, plane, sample * GROUPS + first + group, grouped)
    at = sample * affine_sample + first * CPG + column
    scale, shift = scale_and_shift(weight, bias, at, grouped, AFFINE)
    unit = (unit - mean[None, :]) * rho[None, :]
    if RELU:
        g = tl.where(unit * scale[None, :] + shift[None, :] > 0, g, 0.0)
    dweight, dbias = tl.split(tl.sum(tl.join(g * unit, g), axis=0))  # one pass over the warps
    if PARTIALS:
        into = sums + sample * (GROUPS * CPG) + first * CPG + column
        tl.store(into, dweight, mask=grouped)
        tl.store(into + sums_plane, dbias, mask=grouped)
    along_unit = over_groups(dweight * scale, group, BLOCK) * (1.0 / (PIXELS * CPG))
    along_one = over_groups(dbias * scale, group, BLOCK) * (1.0 / (PIXELS * CPG))
    g = norm_gradient(g, unit, scale, rho, along_one, along_unit)
    g = tl.where(grouped[None, :], g, 0.0)
    write(dx, dx_pixel, pixel, column, inside, g, WIDTH, COLUMNS)
