"""Group normalisation and what surrounds it in a multiscale cell, on channels-last tensors.

    norm_act   act(norm(x))
    block_end  norm₂(relu(z + norm₁(y · mask + injection)))
    fuse       act(own + Σ_j repeat_j(norm_j(raw_j)))

These are bound by memory, so each reads its input once and writes its output once where a tile of
(all pixels of a sample) × (some groups) fits into registers.  Where it does not, the pixels go by
in chunks, once for the statistics and once more for the result; the second read comes from cache.

Variance is Σ(x − mean)², never E[x²] − mean².  Chunks a, b of n_a, n_b numbers are joined by

    δ = mean_b − mean_a,  mean = mean_a + δ n_b / (n_a + n_b),
    M = M_a + M_b + δ² n_a n_b / (n_a + n_b)          (Chan, Golub, LeVeque 1979).

A tile's columns are channels: GROUP_BLOCK groups of LANES columns, LANES the next power of two of
the group's channels; of 20 channels 12 columns stay masked.  Tensors may be slices over the
channels of a larger channels-last tensor: each comes with the stride of its pixels.

Backward of y = act(w x̂ + b), x̂ = (x − mean) ρ, ρ = 1/√(var + ε), with g = act′ dy and means over
the group:

    dw = Σ g x̂,  db = Σ g,  dx = ρ (w g − mean(w g) − x̂ mean(w g x̂)).

dw and db are summed over the pixels by the program of a sample and over the batch afterwards; the
order is fixed, so the results repeat bit for bit.  Scale and shift may also be given for each
sample, (batch, channels), and so are their gradients then: `per_sample` makes that of many vectors
and sums the gradients of all of them over the batch at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.kernels.choice import available, on_device

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # the plain functions remain

    def jit(function: Any) -> Any:
        return function


KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SOURCES = 3
INDEX_LIMIT = 2**31  # offsets within one sample are 32-bit integers


# ---- sizes of tiles


@dataclass
class Tuning:
    """run_bytes: the least that a program reads of one pixel, if the groups allow it.
    tile: elements held in registers; larger inputs go by in chunks.
    per_thread: elements of a tile for one thread, which sets the number of warps.
    """

    run_bytes: int = 32
    tile: int = 32768
    per_thread: int = 64
    max_warps: int = 16


# One entry for each kernel; the benchmark varies them.
TUNING = {
    "norm": Tuning(),
    "norm_backward": Tuning(tile=16384, per_thread=32),
    "block_end": Tuning(),
    "block_end_backward": Tuning(run_bytes=16, tile=8192, per_thread=32),  # else registers spill
    "fuse": Tuning(tile=8192, per_thread=32, max_warps=8),
    "fuse_backward": Tuning(tile=8192, per_thread=16, max_warps=8),
}


@dataclass(frozen=True)
class Tile:
    group_block: int
    lanes: int
    pixels: int
    warps: int


def _power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()


def choose_tile(tuning: Tuning, pixels: int, channels: int, groups: int, itemsize: int) -> Tile:
    per_group = channels // groups
    lanes = _power_of_two(per_group)
    block = 1
    while block < groups and block * per_group * itemsize < tuning.run_bytes:
        block *= 2
    columns = block * lanes
    rows = _power_of_two(pixels)
    while rows > 1 and rows * columns > tuning.tile:
        rows //= 2
    warps = min(tuning.max_warps, max(1, rows * columns // (32 * tuning.per_thread)))
    return Tile(block, lanes, rows, _power_of_two(warps))


# ---- kernels


@jit
def _columns(
    block,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """For each column of a tile: its channel, its group, and whether there is such a channel."""
    column = tl.arange(0, GROUP_BLOCK * LANES)
    group = block * GROUP_BLOCK + column // LANES
    valid = column >= 0
    if LANES != CPG:
        valid = valid & (column % LANES < CPG)
    if GROUPS % GROUP_BLOCK != 0:
        valid = valid & (group < GROUPS)
    channel = block * (GROUP_BLOCK * CPG) + column
    if LANES != CPG:
        channel = group * CPG + column % LANES
    return channel, group, valid


@jit
def _over_group(sums, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Sums of channels to the sum of their group, in the column of each of its channels."""
    total = tl.sum(tl.reshape(sums, (GROUP_BLOCK, LANES)), axis=1)
    spread = tl.broadcast_to(total[:, None], (GROUP_BLOCK, LANES))
    return tl.reshape(spread, (GROUP_BLOCK * LANES,))


@jit
def _moments(x, mask, count, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Of one tile: mean and Σ(x − mean)² of each column's group."""
    mean = _over_group(tl.sum(x, axis=0), GROUP_BLOCK, LANES) / count
    off = tl.where(mask, x - mean[None, :], 0.0)
    return mean, _over_group(tl.sum(off * off, axis=0), GROUP_BLOCK, LANES)


@jit
def _join_moments(mean, squares, seen, mean_new, squares_new, count):
    total = seen + count
    delta = mean_new - mean
    squares += squares_new + delta * delta * (seen * count / total)
    return mean + delta * (count / total), squares


@jit
def _relu(x):
    """A NaN stays one; tl.maximum would hide it."""
    return tl.where(x < 0, 0.0, x)


@jit
def _read(base, pixel, pixel_stride, channel, mask):
    where = base + pixel[:, None] * pixel_stride + channel[None, :]
    return tl.load(where, mask=mask, other=0.0).to(tl.float32)


@jit
def _write(base, pixel, pixel_stride, channel, mask, value):
    where = base + pixel[:, None] * pixel_stride + channel[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=mask)


@jit
def _statistics(
    base,
    pixel_stride,
    channel,
    valid,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Of all pixels of one sample, in chunks of ROWS: mean and Σ(x − mean)² of each group."""
    mean = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel = start + tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        x = _read(base, pixel, pixel_stride, channel, mask)
        count = tl.minimum(PIXELS - start, ROWS).to(tl.float32) * CPG
        mean_new, squares_new = _moments(x, mask, count, GROUP_BLOCK, LANES)
        seen = start * CPG * 1.0
        mean, squares = _join_moments(mean, squares, seen, mean_new, squares_new, count)
    return mean, squares


@jit
def _affine(weight, bias, offset, channel, valid, AFFINE: tl.constexpr):
    if AFFINE:
        scale = tl.load(weight + offset + channel, mask=valid, other=0.0).to(tl.float32)
        shift = tl.load(bias + offset + channel, mask=valid, other=0.0).to(tl.float32)
    else:
        scale = tl.full(channel.shape, 1.0, tl.float32)
        shift = tl.zeros(channel.shape, tl.float32)
    return scale, shift


@jit
def _normalise(x, mean, rho, scale, shift):
    """Centred before it is scaled: x · scale + shift would cancel where |mean| is large."""
    return (x - mean[None, :]) * (rho * scale)[None, :] + shift[None, :]


@jit
def _keep(stats, number: tl.constexpr, plane, at, mean, rho, mask):
    """Mean and ρ of the norm of this number, for the backward pass."""
    tl.store(stats + 2 * number * plane + at, mean, mask=mask)
    tl.store(stats + (2 * number + 1) * plane + at, rho, mask=mask)


@jit
def _kept(stats, number: tl.constexpr, plane, at, mask):
    mean = tl.load(stats + 2 * number * plane + at, mask=mask, other=0.0)
    rho = tl.load(stats + (2 * number + 1) * plane + at, mask=mask, other=0.0)
    return mean, rho


@jit
def _norm_kernel(
    x,
    x_sample,
    x_pixel,
    weight,
    bias,
    affine_sample,
    out,
    out_sample,
    out_pixel,
    means,
    rhos,
    eps,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    x += sample * x_sample
    out += sample * out_sample
    if ROWS >= PIXELS:
        pixel = tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        tile = _read(x, pixel, x_pixel, channel, mask)
        mean, squares = _moments(tile, mask, PIXELS * CPG, GROUP_BLOCK, LANES)
    else:
        mean, squares = _statistics(
            x, x_pixel, channel, valid, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
        )
    rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
    if KEEP:
        first = valid & (tl.arange(0, GROUP_BLOCK * LANES) % LANES == 0)
        tl.store(means + sample * GROUPS + group, mean, mask=first)
        tl.store(rhos + sample * GROUPS + group, rho, mask=first)
    scale, shift = _affine(weight, bias, sample * affine_sample, channel, valid, AFFINE)
    if ROWS >= PIXELS:
        y = _normalise(tile, mean, rho, scale, shift)
        if RELU:
            y = _relu(y)
        _write(out, pixel, out_pixel, channel, mask, y)
    else:
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            y = _normalise(_read(x, pixel, x_pixel, channel, mask), mean, rho, scale, shift)
            if RELU:
                y = _relu(y)
            _write(out, pixel, out_pixel, channel, mask, y)


@jit
def _cotangent(
    x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU: tl.constexpr
):
    """x̂ and g of one tile; 0 where masked."""
    unit = _read(x, pixel, x_pixel, channel, mask)
    unit = tl.where(mask, (unit - mean[None, :]) * rho[None, :], 0.0)
    g = _read(dy, pixel, dy_pixel, channel, mask)
    if RELU:
        g = tl.where(unit * scale[None, :] + shift[None, :] > 0, g, 0.0)
    return unit, g


@jit
def _norm_backward_kernel(
    x,
    x_sample,
    x_pixel,
    dy,
    dy_sample,
    dy_pixel,
    weight,
    bias,
    affine_sample,
    means,
    rhos,
    dx,
    dx_sample,
    dx_pixel,
    dweights,
    dbiases,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    PARTIALS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    x += sample * x_sample
    dy += sample * dy_sample
    dx += sample * dx_sample
    mean = tl.load(means + sample * GROUPS + group, mask=valid, other=0.0)
    rho = tl.load(rhos + sample * GROUPS + group, mask=valid, other=0.0)
    scale, shift = _affine(weight, bias, sample * affine_sample, channel, valid, AFFINE)
    if ROWS >= PIXELS:
        pixel = tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        unit, g = _cotangent(
            x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
        )
        dweight = tl.sum(g * unit, axis=0)
        dbias = tl.sum(g, axis=0)
    else:
        dweight = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        dbias = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            unit, g = _cotangent(
                x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
            )
            dweight += tl.sum(g * unit, axis=0)
            dbias += tl.sum(g, axis=0)
    if PARTIALS:
        tl.store(dweights + sample * (GROUPS * CPG) + channel, dweight, mask=valid)
        tl.store(dbiases + sample * (GROUPS * CPG) + channel, dbias, mask=valid)
    along_unit = _over_group(dweight * scale, GROUP_BLOCK, LANES) / (PIXELS * CPG)
    along_one = _over_group(dbias * scale, GROUP_BLOCK, LANES) / (PIXELS * CPG)
    if ROWS >= PIXELS:
        value = g * scale[None, :] - along_one[None, :] - unit * along_unit[None, :]
        _write(dx, pixel, dx_pixel, channel, mask, value * rho[None, :])
    else:
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            unit, g = _cotangent(
                x, x_pixel, dy, dy_pixel, mean, rho, scale, shift, pixel, channel, mask, RELU
            )
            value = g * scale[None, :] - along_one[None, :] - unit * along_unit[None, :]
            _write(dx, pixel, dx_pixel, channel, mask, value * rho[None, :])


@jit
def _branch(
    y,
    y_pixel,
    keep,
    injection,
    injection_pixel,
    pixel,
    channel,
    mask,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
):
    """y · mask + injection."""
    branch = _read(y, pixel, y_pixel, channel, mask)
    if DROPOUT:
        branch = branch * keep[None, :]
    if INJECTED:
        branch += _read(injection, pixel, injection_pixel, channel, mask)
    return branch


@jit
def _residual(branch, z, z_pixel, mean, rho, scale, shift, pixel, channel, mask):
    """relu(z + norm(branch)); 0 where masked."""
    branch = _normalise(branch, mean, rho, scale, shift)
    total = _relu(branch + _read(z, pixel, z_pixel, channel, mask))
    return tl.where(mask, total, 0.0)


@jit
def _block_end_kernel(
    y,
    y_sample,
    y_pixel,
    keeps,
    injection,
    injection_sample,
    injection_pixel,
    z,
    z_sample,
    z_pixel,
    weight1,
    bias1,
    weight2,
    bias2,
    affine_sample,
    out,
    out_sample,
    out_pixel,
    stats,
    plane,
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
):
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    first = valid & (tl.arange(0, GROUP_BLOCK * LANES) % LANES == 0)
    at = sample * GROUPS + group
    y += sample * y_sample
    injection += sample * injection_sample
    z += sample * z_sample
    out += sample * out_sample
    keep = tl.full((GROUP_BLOCK * LANES,), 1.0, tl.float32)
    if DROPOUT:
        where = keeps + sample * (GROUPS * CPG) + channel
        keep = tl.load(where, mask=valid, other=0.0).to(tl.float32)
    offset = sample * affine_sample
    scale1, shift1 = _affine(weight1, bias1, offset, channel, valid, True)
    scale2, shift2 = _affine(weight2, bias2, offset, channel, valid, True)
    if ROWS >= PIXELS:
        pixel = tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        tile = _branch(
            y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT, INJECTED
        )
        mean, squares = _moments(tile, mask, PIXELS * CPG, GROUP_BLOCK, LANES)
        rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
        if KEEP:
            _keep(stats, 0, plane, at, mean, rho, first)
        tile = _residual(tile, z, z_pixel, mean, rho, scale1, shift1, pixel, channel, mask)
        mean, squares = _moments(tile, mask, PIXELS * CPG, GROUP_BLOCK, LANES)
        rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
        if KEEP:
            _keep(stats, 1, plane, at, mean, rho, first)
        value = _normalise(tile, mean, rho, scale2, shift2)
        _write(out, pixel, out_pixel, channel, mask, value)
    else:
        mean1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            count = tl.minimum(PIXELS - start, ROWS).to(tl.float32) * CPG
            mean_new, squares_new = _moments(tile, mask, count, GROUP_BLOCK, LANES)
            seen = start * CPG * 1.0
            mean1, squares = _join_moments(mean1, squares, seen, mean_new, squares_new, count)
        rho1 = tl.rsqrt(squares / (PIXELS * CPG) + eps)
        mean2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            tile = _residual(tile, z, z_pixel, mean1, rho1, scale1, shift1, pixel, channel, mask)
            count = tl.minimum(PIXELS - start, ROWS).to(tl.float32) * CPG
            mean_new, squares_new = _moments(tile, mask, count, GROUP_BLOCK, LANES)
            seen = start * CPG * 1.0
            mean2, squares = _join_moments(mean2, squares, seen, mean_new, squares_new, count)
        rho2 = tl.rsqrt(squares / (PIXELS * CPG) + eps)
        if KEEP:
            _keep(stats, 0, plane, at, mean1, rho1, first)
            _keep(stats, 1, plane, at, mean2, rho2, first)
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            tile = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            tile = _residual(tile, z, z_pixel, mean1, rho1, scale1, shift1, pixel, channel, mask)
            value = _normalise(tile, mean2, rho2, scale2, shift2)
            _write(out, pixel, out_pixel, channel, mask, value)


@jit
def _norm_gradient(g, unit, scale, rho, along_one, along_unit):
    value = g * scale[None, :] - along_one[None, :] - unit * along_unit[None, :]
    return value * rho[None, :]


@jit
def _block_end_units(
    branch, z, z_pixel, mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask
):
    """x̂ of both norms, 0 where masked, and where the ReLU between them passes."""
    unit1 = tl.where(mask, (branch - mean1[None, :]) * rho1[None, :], 0.0)
    total = unit1 * scale1[None, :] + shift1[None, :] + _read(z, pixel, z_pixel, channel, mask)
    unit2 = tl.where(mask, (_relu(total) - mean2[None, :]) * rho2[None, :], 0.0)
    return unit1, unit2, mask & (total > 0)


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
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    y += sample * y_sample
    injection += sample * injection_sample
    z += sample * z_sample
    dout += sample * dout_sample
    dy += sample * dy_sample
    dinjection += sample * dinjection_sample
    dz += sample * dz_sample
    keep = tl.full((GROUP_BLOCK * LANES,), 1.0, tl.float32)
    if DROPOUT:
        where = keeps + sample * (GROUPS * CPG) + channel
        keep = tl.load(where, mask=valid, other=0.0).to(tl.float32)
    offset = sample * affine_sample
    scale1, shift1 = _affine(weight1, bias1, offset, channel, valid, True)
    scale2, _ = _affine(weight2, bias2, offset, channel, valid, True)
    mean1, rho1 = _kept(stats, 0, plane, sample * GROUPS + group, valid)
    mean2, rho2 = _kept(stats, 1, plane, sample * GROUPS + group, valid)
    COUNT: tl.constexpr = PIXELS * CPG
    dweight1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias1 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dweight2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias2 = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    if ROWS >= PIXELS:
        pixel = tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        branch = _branch(
            y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT, INJECTED
        )
        unit1, unit2, passes = _block_end_units(
            branch, z, z_pixel, mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask
        )
        g = _read(dout, pixel, dout_pixel, channel, mask)
        dweight2 += tl.sum(g * unit2, axis=0)
        dbias2 += tl.sum(g, axis=0)
        along_unit = _over_group(dweight2 * scale2, GROUP_BLOCK, LANES) / COUNT
        along_one = _over_group(dbias2 * scale2, GROUP_BLOCK, LANES) / COUNT
        g = tl.where(passes, _norm_gradient(g, unit2, scale2, rho2, along_one, along_unit), 0.0)
        dweight1 += tl.sum(g * unit1, axis=0)
        dbias1 += tl.sum(g, axis=0)
        if WRITE_Z:
            _write(dz, pixel, dz_pixel, channel, mask, g)
        along_unit = _over_group(dweight1 * scale1, GROUP_BLOCK, LANES) / COUNT
        along_one = _over_group(dbias1 * scale1, GROUP_BLOCK, LANES) / COUNT
        g = _norm_gradient(g, unit1, scale1, rho1, along_one, along_unit)
        if WRITE_INJECTION:
            _write(dinjection, pixel, dinjection_pixel, channel, mask, g)
        _write(dy, pixel, dy_pixel, channel, mask, g * keep[None, :])
    else:
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            branch = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            unit1, unit2, passes = _block_end_units(
                branch, z, z_pixel, mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask
            )
            g = _read(dout, pixel, dout_pixel, channel, mask)
            dweight2 += tl.sum(g * unit2, axis=0)
            dbias2 += tl.sum(g, axis=0)
        along_unit2 = _over_group(dweight2 * scale2, GROUP_BLOCK, LANES) / COUNT
        along_one2 = _over_group(dbias2 * scale2, GROUP_BLOCK, LANES) / COUNT
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            branch = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            unit1, unit2, passes = _block_end_units(
                branch, z, z_pixel, mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask
            )
            g = _read(dout, pixel, dout_pixel, channel, mask)
            g = _norm_gradient(g, unit2, scale2, rho2, along_one2, along_unit2)
            g = tl.where(passes, g, 0.0)
            dweight1 += tl.sum(g * unit1, axis=0)
            dbias1 += tl.sum(g, axis=0)
            if WRITE_Z:
                _write(dz, pixel, dz_pixel, channel, mask, g)
        along_unit1 = _over_group(dweight1 * scale1, GROUP_BLOCK, LANES) / COUNT
        along_one1 = _over_group(dbias1 * scale1, GROUP_BLOCK, LANES) / COUNT
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            branch = _branch(
                y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT,
                INJECTED,
            )  # fmt: skip
            unit1, unit2, passes = _block_end_units(
                branch, z, z_pixel, mean1, rho1, scale1, shift1, mean2, rho2, pixel, channel, mask
            )
            g = _read(dout, pixel, dout_pixel, channel, mask)
            g = _norm_gradient(g, unit2, scale2, rho2, along_one2, along_unit2)
            g = tl.where(passes, g, 0.0)
            g = _norm_gradient(g, unit1, scale1, rho1, along_one1, along_unit1)
            if WRITE_INJECTION:
                _write(dinjection, pixel, dinjection_pixel, channel, mask, g)
            _write(dy, pixel, dy_pixel, channel, mask, g * keep[None, :])
    at = sums + sample * (GROUPS * CPG) + channel
    tl.store(at, dweight1, mask=valid)
    tl.store(at + sums_plane, dbias1, mask=valid)
    tl.store(at + 2 * sums_plane, dweight2, mask=valid)
    tl.store(at + 3 * sums_plane, dbias2, mask=valid)


@jit
def _source_norm(
    raw,
    raw_pixel,
    weight,
    bias,
    offset,
    eps,
    channel,
    valid,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    CPG: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """mean, ρ, scale, shift of a source's norm."""
    mean, squares = _statistics(
        raw, raw_pixel, channel, valid, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
    )
    rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
    scale, shift = _affine(weight, bias, offset, channel, valid, AFFINE)
    return mean, rho, scale, shift


@jit
def _source_value(
    raw, raw_pixel, mean, rho, scale, shift, row, column, channel, mask,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """norm(raw), each pixel repeated 2^LEVELS times along both edges."""
    pixel = (row >> LEVELS) * WIDTH + (column >> LEVELS)
    return _normalise(_read(raw, pixel, raw_pixel, channel, mask), mean, rho, scale, shift)


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
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    first = valid & (tl.arange(0, GROUP_BLOCK * LANES) % LANES == 0)
    at = sample * GROUPS + group
    offset = sample * affine_sample
    own += sample * own_sample
    out += sample * out_sample
    raw0 += sample * raw0_sample
    mean0, rho0, scale0, shift0 = _source_norm(
        raw0, raw0_pixel, weight0, bias0, offset, eps, channel, valid, PIXELS0, ROWS0, CPG,
        AFFINE0, GROUP_BLOCK, LANES,
    )  # fmt: skip
    if KEEP:
        _keep(stats, 0, plane, at, mean0, rho0, first)
    if COUNT > 1:
        raw1 += sample * raw1_sample
        mean1, rho1, scale1, shift1 = _source_norm(
            raw1, raw1_pixel, weight1, bias1, offset, eps, channel, valid, PIXELS1, ROWS1, CPG,
            AFFINE1, GROUP_BLOCK, LANES,
        )  # fmt: skip
        if KEEP:
            _keep(stats, 1, plane, at, mean1, rho1, first)
    if COUNT > 2:
        raw2 += sample * raw2_sample
        mean2, rho2, scale2, shift2 = _source_norm(
            raw2, raw2_pixel, weight2, bias2, offset, eps, channel, valid, PIXELS2, ROWS2, CPG,
            AFFINE2, GROUP_BLOCK, LANES,
        )  # fmt: skip
        if KEEP:
            _keep(stats, 2, plane, at, mean2, rho2, first)
    for start in range(0, PIXELS, ROWS):
        pixel = start + tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        row = pixel // WIDTH
        column = pixel % WIDTH
        total = tl.zeros((ROWS, GROUP_BLOCK * LANES), tl.float32)
        if OWN:
            total = _read(own, pixel, own_pixel, channel, mask)
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
            total = _relu(total)
        _write(out, pixel, out_pixel, channel, mask, total)


@jit
def _through_relu(dout, dout_pixel, out, out_pixel, pixel, channel, mask, RELU: tl.constexpr):
    g = _read(dout, pixel, dout_pixel, channel, mask)
    if RELU:
        g = tl.where(_read(out, pixel, out_pixel, channel, mask) > 0, g, 0.0)
    return g


@jit
def _source_cotangent(
    dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LOW_WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """x̂ of a source's tile, and Σ g over the pixels that each of its pixels is repeated to."""
    unit = _read(raw, low, raw_pixel, channel, mask)
    unit = tl.where(mask, (unit - mean[None, :]) * rho[None, :], 0.0)
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
    mean, rho, channel, valid, dweights, dbiases,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS: tl.constexpr, LOW_WIDTH: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    CPG: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    scale, _ = _affine(weight, weight, offset, channel, valid, AFFINE)
    dweight = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    dbias = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    if ROWS >= PIXELS:
        low = tl.arange(0, ROWS)
        mask = (low < PIXELS)[:, None] & valid[None, :]
        unit, g = _source_cotangent(
            dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
            HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
        )  # fmt: skip
        dweight += tl.sum(g * unit, axis=0)
        dbias += tl.sum(g, axis=0)
    else:
        for start in range(0, PIXELS, ROWS):
            low = start + tl.arange(0, ROWS)
            mask = (low < PIXELS)[:, None] & valid[None, :]
            unit, g = _source_cotangent(
                dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
                HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
            )  # fmt: skip
            dweight += tl.sum(g * unit, axis=0)
            dbias += tl.sum(g, axis=0)
    along_unit = _over_group(dweight * scale, GROUP_BLOCK, LANES) / (PIXELS * CPG)
    along_one = _over_group(dbias * scale, GROUP_BLOCK, LANES) / (PIXELS * CPG)
    if ROWS >= PIXELS:
        g = _norm_gradient(g, unit, scale, rho, along_one, along_unit)
        _write(draw, low, draw_pixel, channel, mask, g)
    else:
        for start in range(0, PIXELS, ROWS):
            low = start + tl.arange(0, ROWS)
            mask = (low < PIXELS)[:, None] & valid[None, :]
            unit, g = _source_cotangent(
                dout, dout_pixel, out, out_pixel, raw, raw_pixel, mean, rho, low, channel, mask,
                HEIGHT, WIDTH, LOW_WIDTH, LEVELS, RELU,
            )  # fmt: skip
            g = _norm_gradient(g, unit, scale, rho, along_one, along_unit)
            _write(draw, low, draw_pixel, channel, mask, g)
    if AFFINE:
        tl.store(dweights + channel, dweight, mask=valid)
        tl.store(dbiases + channel, dbias, mask=valid)


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
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, group, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    at = sample * GROUPS + group
    offset = sample * affine_sample
    dout += sample * dout_sample
    out += sample * out_sample
    sums += sample * (GROUPS * CPG)
    if OWN:
        down += sample * down_sample
        for start in range(0, PIXELS, ROWS):
            pixel = start + tl.arange(0, ROWS)
            mask = (pixel < PIXELS)[:, None] & valid[None, :]
            g = _through_relu(dout, dout_pixel, out, out_pixel, pixel, channel, mask, RELU)
            _write(down, pixel, down_pixel, channel, mask, g)
    mean0, rho0 = _kept(stats, 0, plane, at, valid)
    _source_backward(
        dout, dout_pixel, out, out_pixel, raw0 + sample * raw0_sample, raw0_pixel, weight0, offset,
        draw0 + sample * draw0_sample, draw0_pixel, mean0, rho0, channel, valid,
        sums, sums + sums_plane, HEIGHT, WIDTH, PIXELS0, WIDTH0, LEVELS0, ROWS0, CPG, RELU,
        AFFINE0, GROUP_BLOCK, LANES,
    )  # fmt: skip
    if COUNT > 1:
        mean1, rho1 = _kept(stats, 1, plane, at, valid)
        _source_backward(
            dout, dout_pixel, out, out_pixel, raw1 + sample * raw1_sample, raw1_pixel, weight1,
            offset, draw1 + sample * draw1_sample, draw1_pixel, mean1, rho1, channel, valid,
            sums + 2 * sums_plane, sums + 3 * sums_plane, HEIGHT, WIDTH, PIXELS1, WIDTH1, LEVELS1,
            ROWS1, CPG, RELU, AFFINE1, GROUP_BLOCK, LANES,
        )  # fmt: skip
    if COUNT > 2:
        mean2, rho2 = _kept(stats, 2, plane, at, valid)
        _source_backward(
            dout, dout_pixel, out, out_pixel, raw2 + sample * raw2_sample, raw2_pixel, weight2,
            offset, draw2 + sample * draw2_sample, draw2_pixel, mean2, rho2, channel, valid,
            sums + 4 * sums_plane, sums + 5 * sums_plane, HEIGHT, WIDTH, PIXELS2, WIDTH2, LEVELS2,
            ROWS2, CPG, RELU, AFFINE2, GROUP_BLOCK, LANES,
        )  # fmt: skip


# ---- what the kernels take


def _strides(x: Tensor) -> tuple[int, int] | None:
    """Strides of samples and pixels, if channels are adjacent and pixels evenly spaced."""
    _, channels, height, width = x.shape
    sample, channel, row, column = x.stride()
    pixel = column if width > 1 else row if height > 1 else channels
    even = (width == 1 or column == pixel) and (height == 1 or row == width * pixel)
    return (sample, pixel) if even and (channels == 1 or channel == 1) else None


def _channels_last(x: Tensor) -> tuple[Tensor, int, int]:
    """x, or a copy in channels-last order, with its strides of samples and pixels."""
    strides = _strides(x)
    if strides is None:
        x = empty_channels_last(x.shape, x.dtype, x.device).copy_(x)
        strides = _strides(x)
        assert strides is not None
    return x, *strides


def empty_channels_last(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    batch, channels, height, width = shape
    memory = torch.empty((batch, height, width, channels), dtype=dtype, device=device)
    return memory.permute(0, 3, 1, 2)


def _runs(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors; the plain functions take all."""
    present = [tensor for tensor in tensors if tensor is not None]
    return available(present[0].device) and all(
        tensor.dtype in KERNEL_DTYPES and tensor.numel() > 0 and _extent(tensor) < INDEX_LIMIT
        for tensor in present
    )


def _extent(x: Tensor) -> int:
    """How far the last number of a sample lies behind its first."""
    return sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))


def _differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _destination(like: Tensor, out: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if out is None:
        return empty_channels_last(like.shape, dtype or like.dtype, like.device)
    if out.shape != like.shape or _strides(out) is None:
        raise ValueError(
            f"out must be channels-last of shape {tuple(like.shape)}, got shape "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    return out


def _deliver(y: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    if out is not None:
        return out.copy_(y)
    return y.to(dtype, memory_format=torch.channels_last)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


Vector = Tensor | None


def _differentiable(
    function: Any, inputs: Sequence[Vector], wanted: Sequence[bool], incoming: Tensor
) -> list[Vector]:
    """The gradients that backward returns where second derivatives are wanted: PyTorch's."""
    # Aliases: one input may depend on another, and its gradient must not go that way here.
    aliases = [None if t is None else t.view_as(t) for t in inputs]
    targets = [t for t, asked in zip(aliases, wanted, strict=True) if asked and t is not None]
    found = iter(torch.autograd.grad(function(*aliases), targets, incoming, create_graph=True))
    return [next(found) if asked else None for asked in wanted]


def _affine_arguments(*vectors: Vector) -> tuple[list[Vector], int]:
    """Scales and shifts, (channels,) or (batch, channels), with their common stride of samples."""
    present = [vector for vector in vectors if vector is not None]
    if all(vector.dim() == 1 for vector in present):
        return [None if v is None else v.contiguous() for v in vectors], 0
    steps = {(vector.stride(0), vector.stride(-1)) for vector in present if vector.dim() == 2}
    if len(steps) == 1 and all(vector.dim() == 2 for vector in present):
        ((sample, channel),) = steps
        if channel == 1 or present[0].shape[1] == 1:
            return list(vectors), sample
    batch, channels = max(vector.shape for vector in present if vector.dim() == 2)
    spread = [None if v is None else v.expand(batch, channels).contiguous() for v in vectors]
    return spread, channels


def _summed(sums: Tensor, vectors: Sequence[Vector], wanted: Sequence[bool]) -> list[Vector]:
    """Gradients of scales and shifts from the sums of each sample, (vectors, batch, channels)."""
    over_batch = any(v is not None and v.dim() == 1 for v in vectors)
    totals = sums.sum(1) if over_batch else sums
    found: list[Vector] = []
    for i, (vector, asked) in enumerate(zip(vectors, wanted, strict=True)):
        if vector is None or not asked:
            found.append(None)
        else:
            found.append((totals if vector.dim() == 1 else sums)[i].to(vector.dtype))
    return found


# ---- per_sample


def per_sample_plain(vectors: Sequence[Tensor], batch: int) -> list[Tensor]:
    return [vector.expand(batch, -1) for vector in vectors]


def per_sample(vectors: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Each vector once for each sample, (batch, channels), without a copy.

    Backward sums the gradients of all of them over the batch together.
    """
    if not vectors or not _differentiates(*vectors):
        return per_sample_plain(vectors, batch)
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


# ---- norm_act


def norm_act_plain(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wide = _at_least_float32(x)
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
    return _deliver(torch.relu(y) if relu else y, out, dtype or x.dtype)


def norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Group normalisation, then ReLU where asked.

    x: (batch, channels, height, width); a slice over the channels of a channels-last tensor is
        taken as it is, anything else is first copied into that order.
    weight, bias: (channels,), or (batch, channels) for each sample its own.
    out: where the result goes, also such a slice; without autograd alone.
    dtype: of the result; the default is x's.
    """
    grad = _differentiates(x, weight, bias)
    if out is not None and grad:
        raise ValueError("out= cannot be used where gradients are wanted")
    if not _runs(x, weight, bias, out):
        return norm_act_plain(x, groups, weight, bias, eps, relu, out, dtype)
    if grad:
        return _NormAct.apply(x, weight, bias, groups, eps, relu, dtype or x.dtype)
    return _launch_norm(x, groups, weight, bias, eps, relu, _destination(x, out, dtype))


def _launch_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    out: Tensor,
    means: Tensor | None = None,
    rhos: Tensor | None = None,
) -> Tensor:
    x, x_sample, x_pixel = _channels_last(x)
    batch, channels, height, width = x.shape
    out_strides = _strides(out)
    assert out_strides is not None
    tile = choose_tile(TUNING["norm"], height * width, channels, groups, x.element_size())
    (weight, bias), affine_sample = _affine_arguments(weight, bias)
    with on_device(x):
        _norm_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            x,
            x_sample,
            x_pixel,
            weight,
            bias,
            affine_sample,
            out,
            *out_strides,
            means,
            rhos,
            eps,
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            AFFINE=weight is not None,
            RELU=relu,
            KEEP=means is not None,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return out


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        means, rhos = torch.empty(2, len(x), groups, device=x.device).unbind()
        out = empty_channels_last(x.shape, dtype, x.device)
        _launch_norm(x, groups, weight, bias, eps, relu, out, means, rhos)
        ctx.save_for_backward(x, weight, bias, means, rhos)
        ctx.options = groups, eps, relu, dtype
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, means, rhos = ctx.saved_tensors
        groups, eps, relu, dtype = ctx.options
        if torch.is_grad_enabled():
            wanted = ctx.needs_input_grad[:3]

            def again(x: Tensor, weight: Vector, bias: Vector) -> Tensor:
                return norm_act_plain(x, groups, weight, bias, eps, relu, dtype=dtype)

            return *_differentiable(again, (x, weight, bias), wanted, dy), *(None,) * 4
        partials = any(ctx.needs_input_grad[1:3])
        dx, sums = _launch_norm_backward(x, dy, groups, weight, bias, relu, means, rhos, partials)
        dweight = dbias = None
        if sums is not None:
            dweight, dbias = _summed(sums, (weight, bias), ctx.needs_input_grad[1:3])
        return dx, dweight, dbias, None, None, None, None


def _launch_norm_backward(
    x: Tensor,
    dy: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    means: Tensor,
    rhos: Tensor,
    partials: bool,
) -> tuple[Tensor, Tensor | None]:
    x, x_sample, x_pixel = _channels_last(x)
    dy, dy_sample, dy_pixel = _channels_last(dy)
    batch, channels, height, width = x.shape
    dx = empty_channels_last(x.shape, x.dtype, x.device)
    dx_strides = _strides(dx)
    assert dx_strides is not None
    sums = torch.empty(2, batch, channels, device=x.device) if partials else None
    tile = choose_tile(TUNING["norm_backward"], height * width, channels, groups, x.element_size())
    (weight, bias), affine_sample = _affine_arguments(weight, bias)
    with on_device(x):
        _norm_backward_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            x,
            x_sample,
            x_pixel,
            dy,
            dy_sample,
            dy_pixel,
            weight,
            bias,
            affine_sample,
            means,
            rhos,
            dx,
            *dx_strides,
            None if sums is None else sums[0],
            None if sums is None else sums[1],
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            AFFINE=weight is not None,
            RELU=relu,
            PARTIALS=partials,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return dx, sums


# ---- block_end


def _block_end_composed(
    norm: Any,
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    groups: int,
    eps: float,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    branch = y
    if mask is not None:
        branch = branch * mask[:, :, None, None].to(branch.dtype)
    if injection is not None:
        branch = branch + injection
    total = torch.relu(z + norm(branch, groups, weight1, bias1, eps))
    return norm(total, groups, weight2, bias2, eps, out=out, dtype=dtype)


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
    return _block_end_composed(
        norm_act_plain,
        _at_least_float32(y),
        None if mask is None else _at_least_float32(mask),
        None if injection is None else _at_least_float32(injection),
        _at_least_float32(z),
        weight1,
        bias1,
        weight2,
        bias2,
        groups,
        eps,
        out,
        dtype or y.dtype,
    )


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
    tensors = (y, mask, injection, z, weight1, bias1, weight2, bias2)
    vectors = (weight1, bias1, weight2, bias2)
    if not _runs(*tensors):
        return block_end_plain(y, mask, injection, z, *vectors, groups, eps, out, dtype)
    if _differentiates(*tensors):
        if out is not None:
            raise ValueError("out= cannot be used where gradients are wanted")
        if _differentiates(mask):
            return _block_end_composed(
                norm_act, y, mask, injection, z, *vectors, groups, eps, None, dtype or y.dtype
            )
        return _BlockEnd.apply(y, mask, injection, z, *vectors, groups, eps, dtype or y.dtype)
    out = _destination(y, out, dtype)
    return _launch_block_end(y, mask, injection, z, vectors, groups, eps, out)


def _launch_block_end(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    vectors: Sequence[Tensor],
    groups: int,
    eps: float,
    out: Tensor,
    stats: Tensor | None = None,
) -> Tensor:
    out_strides = _strides(out)
    assert out_strides is not None
    batch, channels, height, width = y.shape
    tile = choose_tile(TUNING["block_end"], height * width, channels, groups, y.element_size())
    if mask is not None:
        mask = mask.contiguous()
    injected = (y, 0, 0) if injection is None else _channels_last(injection)
    affine, affine_sample = _affine_arguments(*vectors)
    with on_device(y):
        _block_end_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *_channels_last(y),
            mask,
            *injected,
            *_channels_last(z),
            *affine,
            affine_sample,
            out,
            *out_strides,
            stats,
            batch * groups,
            eps,
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            KEEP=stats is not None,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return out


class _BlockEnd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        mask: Tensor | None,
        injection: Tensor | None,
        z: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        groups: int,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        stats = torch.empty(4, len(y), groups, device=y.device)
        out = empty_channels_last(y.shape, dtype, y.device)
        vectors = (weight1, bias1, weight2, bias2)
        _launch_block_end(y, mask, injection, z, vectors, groups, eps, out, stats)
        ctx.save_for_backward(y, mask, injection, z, *vectors, stats)
        ctx.options = groups, eps, dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        y, mask, injection, z, w1, b1, w2, b2, stats = ctx.saved_tensors
        inputs, vectors = ctx.saved_tensors[:8], (w1, b1, w2, b2)
        groups, eps, dtype = ctx.options
        wanted = ctx.needs_input_grad[:8]
        if torch.is_grad_enabled():

            def again(*inputs: Any) -> Tensor:
                return block_end_plain(*inputs, groups=groups, eps=eps, dtype=dtype)  # type: ignore[misc]

            return *_differentiable(again, inputs, wanted, dout), None, None, None
        dy, dinjection, dz, sums = _launch_block_end_backward(
            y, mask, injection, z, vectors, groups, stats, dout, wanted[2], wanted[3]
        )
        affine = _summed(sums, vectors, wanted[4:])
        return dy if wanted[0] else None, None, dinjection, dz, *affine, None, None, None


def _launch_block_end_backward(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    vectors: Sequence[Tensor],
    groups: int,
    stats: Tensor,
    dout: Tensor,
    want_injection: bool,
    want_z: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    batch, channels, height, width = y.shape
    dy = empty_channels_last(y.shape, y.dtype, y.device)
    dz = empty_channels_last(z.shape, z.dtype, z.device) if want_z else None
    dinjection = None
    if injection is not None and want_injection:
        # Without a mask it is y's gradient.
        same = mask is None and injection.dtype == y.dtype
        dinjection = dy if same else empty_channels_last(y.shape, injection.dtype, y.device)
    sums = torch.empty(4, batch, channels, device=y.device)
    tuning = TUNING["block_end_backward"]
    tile = choose_tile(tuning, height * width, channels, groups, y.element_size())
    if mask is not None:
        mask = mask.contiguous()
    injected = (y, 0, 0) if injection is None else _channels_last(injection)
    affine, affine_sample = _affine_arguments(*vectors)
    with on_device(y):
        _block_end_backward_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *_channels_last(y),
            mask,
            *injected,
            *_channels_last(z),
            *affine,
            affine_sample,
            stats,
            batch * groups,
            *_channels_last(dout),
            *_channels_last(dy),
            *_channels_last(dy if dinjection is None else dinjection),
            *_channels_last(dy if dz is None else dz),
            sums,
            batch * channels,
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            WRITE_INJECTION=dinjection is not None and dinjection is not dy,
            WRITE_Z=dz is not None,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return dy, dinjection, dz, sums


# ---- fuse


@dataclass(frozen=True)
class Source:
    """A stream on its way to another scale, before its norm.

    levels: how often the target's resolution halves to this one's; 0, the same resolution.
    """

    raw: Tensor
    weight: Tensor | None
    bias: Tensor | None
    levels: int = 0


def repeat(y: Tensor, levels: int, height: int, width: int) -> Tensor:
    """Each pixel 2^levels times along both edges, then cut to size."""
    if levels:
        y = functional.interpolate(y, scale_factor=float(2**levels))
    return y[..., :height, :width] if y.shape[-2:] != (height, width) else y


def _fuse_composed(
    norm: Any,
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
        y = repeat(y, source.levels, height, width)
        total = y if total is None else total + y
    assert total is not None
    return _deliver(torch.relu(total) if relu else total, out, dtype)


def fuse_plain(
    own: Tensor | None,
    sources: Sequence[Source],
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wide = [Source(_at_least_float32(s.raw), s.weight, s.bias, s.levels) for s in sources]
    like = sources[0].raw if own is None else own
    own = None if own is None else _at_least_float32(own)
    return _fuse_composed(norm_act_plain, own, wide, groups, eps, relu, out, dtype or like.dtype)


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
    tensors = [t for s in sources for t in (s.raw, s.weight, s.bias)]
    if not sources or not _runs(own, *tensors):
        return fuse_plain(own, sources, groups, eps, relu, out, dtype)
    like = sources[0].raw if own is None else own
    dtype = dtype or like.dtype
    if _differentiates(own, *tensors):
        if len(sources) > MAX_SOURCES:  # sums in float32, as without autograd
            wide = functools.partial(norm_act, dtype=torch.float32)
            return _fuse_composed(wide, own, sources, groups, eps, relu, out, dtype)
        if out is not None:
            raise ValueError("out= cannot be used where gradients are wanted")
        levels = [source.levels for source in sources]
        return _Fuse.apply(levels, groups, eps, relu, dtype, own, *tensors)
    while len(sources) > MAX_SOURCES:
        own = fuse(own, sources[:MAX_SOURCES], groups, eps, relu=False, dtype=torch.float32)
        sources = sources[MAX_SOURCES:]
    return _launch_fuse(own, sources, groups, eps, relu, _destination(like, out, dtype))


def _source_sizes(
    tuning: Tuning, sources: Sequence[Source], channels: int, groups: int
) -> dict[str, Any]:
    sizes: dict[str, Any] = {"COUNT": len(sources)}
    for i in range(MAX_SOURCES):
        source = sources[min(i, len(sources) - 1)]  # beyond the count: not looked at
        low, wide = source.raw.shape[-2:]
        tile = choose_tile(tuning, low * wide, channels, groups, source.raw.element_size())
        sizes |= {f"PIXELS{i}": low * wide, f"WIDTH{i}": wide, f"ROWS{i}": tile.pixels}
        sizes |= {f"LEVELS{i}": source.levels, f"AFFINE{i}": source.weight is not None}
    return sizes


def _launch_fuse(
    own: Tensor | None,
    sources: Sequence[Source],
    groups: int,
    eps: float,
    relu: bool,
    out: Tensor,
    stats: Tensor | None = None,
) -> Tensor:
    out_strides = _strides(out)
    assert out_strides is not None
    batch, channels, height, width = out.shape
    tuning = TUNING["fuse"]
    itemsize = (sources[0].raw if own is None else own).element_size()
    tile = choose_tile(tuning, height * width, channels, groups, itemsize)
    vectors = [vector for source in sources for vector in (source.weight, source.bias)]
    affine, affine_sample = _affine_arguments(*vectors)
    tensors_of: list[Any] = []
    for i in range(MAX_SOURCES):
        k = min(i, len(sources) - 1)
        tensors_of += [*_channels_last(sources[k].raw), *affine[2 * k : 2 * k + 2]]
    with on_device(out):
        _fuse_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *((out, 0, 0) if own is None else _channels_last(own)),
            *tensors_of,
            affine_sample,
            out,
            *out_strides,
            stats,
            batch * groups,
            eps,
            PIXELS=height * width,
            WIDTH=width,
            **_source_sizes(tuning, sources, channels, groups),
            GROUPS=groups,
            CPG=channels // groups,
            OWN=own is not None,
            RELU=relu,
            KEEP=stats is not None,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return out


def _sources(levels: Sequence[int], tensors: Sequence[Any]) -> list[Source]:
    parts = zip(tensors[::3], tensors[1::3], tensors[2::3], levels, strict=True)
    return [Source(raw, weight, bias, level) for raw, weight, bias, level in parts]


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        levels: list[int],
        groups: int,
        eps: float,
        relu: bool,
        dtype: torch.dtype,
        own: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        sources = _sources(levels, tensors)
        like = sources[0].raw if own is None else own
        out = empty_channels_last(like.shape, dtype, like.device)
        stats = torch.empty(2 * len(levels), len(out), groups, device=out.device)
        _launch_fuse(own, sources, groups, eps, relu, out, stats)
        # Second derivatives alone need own: the first ones find where the ReLU passes in out.
        ctx.save_for_backward(out, stats, own, *tensors)
        ctx.options = levels, groups, eps, relu, dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        out, stats, own, *tensors = ctx.saved_tensors
        levels, groups, eps, relu, dtype = ctx.options
        wanted = ctx.needs_input_grad[5:]
        sources = _sources(levels, tensors)
        nothing = (None,) * 5
        if torch.is_grad_enabled():

            def again(own: Vector, *tensors: Any) -> Tensor:
                return fuse_plain(own, _sources(levels, tensors), groups, eps, relu, dtype=dtype)

            return *nothing, *_differentiable(again, [own, *tensors], wanted, dout)
        down = None
        if own is not None and wanted[0]:
            down = empty_channels_last(own.shape, own.dtype, own.device)
        raws, sums = _launch_fuse_backward(sources, groups, relu, out, stats, dout, down)
        vectors = [vector for source in sources for vector in (source.weight, source.bias)]
        asked = [w for i, w in enumerate(wanted[1:]) if i % 3]
        affine = _summed(sums, vectors, asked)
        found: list[Vector] = []
        for i, raw in enumerate(raws):
            found += [raw, *affine[2 * i : 2 * i + 2]]
        return *nothing, down, *found


def _launch_fuse_backward(
    sources: Sequence[Source],
    groups: int,
    relu: bool,
    out: Tensor,
    stats: Tensor,
    dout: Tensor,
    down: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of all sources, and the sums of each sample for their scales and shifts."""
    batch, channels, height, width = out.shape
    raws = [empty_channels_last(s.raw.shape, s.raw.dtype, out.device) for s in sources]
    sums = torch.empty(2 * len(sources), batch, channels, device=out.device)
    tuning = TUNING["fuse_backward"]
    tile = choose_tile(tuning, height * width, channels, groups, out.element_size())
    scales, affine_sample = _affine_arguments(*(source.weight for source in sources))
    tensors_of: list[Any] = []
    for i in range(MAX_SOURCES):
        k = min(i, len(sources) - 1)
        tensors_of += [*_channels_last(sources[k].raw), scales[k], *_channels_last(raws[k])]
    with on_device(out):
        _fuse_backward_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *_channels_last(dout),
            *_channels_last(out),
            *((out, 0, 0) if down is None else _channels_last(down)),
            *tensors_of,
            affine_sample,
            stats,
            batch * groups,
            sums,
            batch * channels,
            PIXELS=height * width,
            HEIGHT=height,
            WIDTH=width,
            **_source_sizes(tuning, sources, channels, groups),
            GROUPS=groups,
            CPG=channels // groups,
            OWN=down is not None,
            RELU=relu,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return raws, sums
