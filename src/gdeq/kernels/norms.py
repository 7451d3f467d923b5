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
order is fixed, so the results repeat bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.kernels import available

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
    "fuse": Tuning(tile=8192, per_thread=32, max_warps=8),
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
def _affine(weight, bias, channel, valid, AFFINE: tl.constexpr):
    if AFFINE:
        scale = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
        shift = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    else:
        scale = tl.full(channel.shape, 1.0, tl.float32)
        shift = tl.zeros(channel.shape, tl.float32)
    return scale, shift


@jit
def _normalise(x, mean, rho, scale, shift):
    """Centred before it is scaled: x · scale + shift would cancel where |mean| is large."""
    return (x - mean[None, :]) * (rho * scale)[None, :] + shift[None, :]


@jit
def _norm_kernel(
    x,
    x_sample,
    x_pixel,
    weight,
    bias,
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
    scale, shift = _affine(weight, bias, channel, valid, AFFINE)
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
    scale, shift = _affine(weight, bias, channel, valid, AFFINE)
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
    out,
    out_sample,
    out_pixel,
    eps,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, _, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    y += sample * y_sample
    injection += sample * injection_sample
    z += sample * z_sample
    out += sample * out_sample
    keep = tl.full((GROUP_BLOCK * LANES,), 1.0, tl.float32)
    if DROPOUT:
        where = keeps + sample * (GROUPS * CPG) + channel
        keep = tl.load(where, mask=valid, other=0.0).to(tl.float32)
    scale1, shift1 = _affine(weight1, bias1, channel, valid, True)
    scale2, shift2 = _affine(weight2, bias2, channel, valid, True)
    if ROWS >= PIXELS:
        pixel = tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        tile = _branch(
            y, y_pixel, keep, injection, injection_pixel, pixel, channel, mask, DROPOUT, INJECTED
        )
        mean, squares = _moments(tile, mask, PIXELS * CPG, GROUP_BLOCK, LANES)
        rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
        tile = _residual(tile, z, z_pixel, mean, rho, scale1, shift1, pixel, channel, mask)
        mean, squares = _moments(tile, mask, PIXELS * CPG, GROUP_BLOCK, LANES)
        rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
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
def _source_norm(
    raw,
    raw_pixel,
    weight,
    bias,
    eps,
    channel,
    valid,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """mean, ρ, scale, shift of a source's norm."""
    mean, squares = _statistics(
        raw, raw_pixel, channel, valid, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
    )
    rho = tl.rsqrt(squares / (PIXELS * CPG) + eps)
    scale, shift = _affine(weight, bias, channel, valid, True)
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
    out, out_sample, out_pixel,
    eps,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS0: tl.constexpr, WIDTH0: tl.constexpr, LEVELS0: tl.constexpr, ROWS0: tl.constexpr,
    PIXELS1: tl.constexpr, WIDTH1: tl.constexpr, LEVELS1: tl.constexpr, ROWS1: tl.constexpr,
    PIXELS2: tl.constexpr, WIDTH2: tl.constexpr, LEVELS2: tl.constexpr, ROWS2: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    RELU: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel, _, valid = _columns(tl.program_id(0) % BLOCKS, GROUPS, CPG, GROUP_BLOCK, LANES)
    own += sample * own_sample
    out += sample * out_sample
    raw0 += sample * raw0_sample
    mean0, rho0, scale0, shift0 = _source_norm(
        raw0, raw0_pixel, weight0, bias0, eps, channel, valid, PIXELS0, ROWS0, CPG, GROUP_BLOCK,
        LANES,
    )  # fmt: skip
    if COUNT > 1:
        raw1 += sample * raw1_sample
        mean1, rho1, scale1, shift1 = _source_norm(
            raw1, raw1_pixel, weight1, bias1, eps, channel, valid, PIXELS1, ROWS1, CPG,
            GROUP_BLOCK, LANES,
        )  # fmt: skip
    if COUNT > 2:
        raw2 += sample * raw2_sample
        mean2, rho2, scale2, shift2 = _source_norm(
            raw2, raw2_pixel, weight2, bias2, eps, channel, valid, PIXELS2, ROWS2, CPG,
            GROUP_BLOCK, LANES,
        )  # fmt: skip
    for start in range(0, PIXELS, ROWS):
        pixel = start + tl.arange(0, ROWS)
        mask = (pixel < PIXELS)[:, None] & valid[None, :]
        row = pixel // WIDTH
        column = pixel % WIDTH
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


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


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
    # PyTorch 2.13 dies on the CPU for the gradient of the scale alone of a channels-last tensor.
    y = functional.group_norm(wide.contiguous(), groups, scale, shift, eps)
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
    with _on_device(x):
        _norm_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            x,
            x_sample,
            x_pixel,
            weight,
            bias,
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
        if torch.is_grad_enabled():  # second derivatives are wanted: PyTorch has them
            wanted = [t for t, w in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if w]
            y = norm_act_plain(x, groups, weight, bias, eps, relu, dtype=dtype)
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return *(next(found) if w else None for w in ctx.needs_input_grad[:3]), *(None,) * 4
        partials = any(ctx.needs_input_grad[1:3])
        dx, dweight, dbias = _launch_norm_backward(
            x, dy, groups, weight, bias, relu, means, rhos, partials
        )
        if partials:
            dweight = dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None
            dbias = dbias.to(bias.dtype) if ctx.needs_input_grad[2] else None
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
) -> tuple[Tensor, Any, Any]:
    x, x_sample, x_pixel = _channels_last(x)
    dy, dy_sample, dy_pixel = _channels_last(dy)
    batch, channels, height, width = x.shape
    dx = empty_channels_last(x.shape, x.dtype, x.device)
    dx_strides = _strides(dx)
    assert dx_strides is not None
    sums = torch.empty(2, batch, channels, device=x.device) if partials else None
    tile = choose_tile(TUNING["norm_backward"], height * width, channels, groups, x.element_size())
    with _on_device(x):
        _norm_backward_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            x,
            x_sample,
            x_pixel,
            dy,
            dy_sample,
            dy_pixel,
            weight,
            bias,
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
    return dx, *((None, None) if sums is None else sums.sum(1).unbind())


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

    mask: (batch, channels), of whole channels.  With autograd composed of `norm_act` and others.
    """
    tensors = (y, mask, injection, z, weight1, bias1, weight2, bias2)
    norms = (weight1, bias1, weight2, bias2)
    if not _runs(*tensors):
        return block_end_plain(y, mask, injection, z, *norms, groups, eps, out, dtype)
    if _differentiates(*tensors):
        return _block_end_composed(
            norm_act, y, mask, injection, z, *norms, groups, eps, out, dtype or y.dtype
        )
    out = _destination(y, out, dtype)
    out_strides = _strides(out)
    assert out_strides is not None
    batch, channels, height, width = y.shape
    tile = choose_tile(TUNING["block_end"], height * width, channels, groups, y.element_size())
    if mask is not None:
        mask = mask.contiguous()
    injected = (y, 0, 0) if injection is None else _channels_last(injection)
    with _on_device(y):
        _block_end_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *_channels_last(y),
            mask,
            *injected,
            *_channels_last(z),
            *norms,
            out,
            *out_strides,
            eps,
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return out


# ---- fuse


@dataclass(frozen=True)
class Source:
    """A stream on its way to another scale, before its norm.

    levels: how often the target's resolution halves to this one's; 0, the same resolution.
    """

    raw: Tensor
    weight: Tensor
    bias: Tensor
    levels: int = 0


def repeat(y: Tensor, levels: int, height: int, width: int) -> Tensor:
    """Each pixel 2^levels times along both edges, then cut to size."""
    if levels:
        y = functional.interpolate(y, scale_factor=float(2**levels))
    return y[..., :height, :width] if y.shape[-2:] != (height, width) else y


def _fuse_composed(
    norm: Any,
    own: Tensor,
    sources: Sequence[Source],
    groups: int,
    eps: float,
    relu: bool,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    total = own
    for source in sources:
        y = norm(source.raw, groups, source.weight, source.bias, eps)
        total = total + repeat(y, source.levels, *own.shape[-2:])
    return _deliver(torch.relu(total) if relu else total, out, dtype)


def fuse_plain(
    own: Tensor,
    sources: Sequence[Source],
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wide = [Source(_at_least_float32(s.raw), s.weight, s.bias, s.levels) for s in sources]
    return _fuse_composed(
        norm_act_plain, _at_least_float32(own), wide, groups, eps, relu, out, dtype or own.dtype
    )


def fuse(
    own: Tensor,
    sources: Sequence[Source],
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A scale's own stream plus the others, each normalised at its resolution and then repeated.

    With autograd composed of `norm_act` and others.
    """
    tensors = [own, *(t for s in sources for t in (s.raw, s.weight, s.bias))]
    if not sources or not _runs(*tensors):
        return fuse_plain(own, sources, groups, eps, relu, out, dtype)
    if _differentiates(*tensors):
        return _fuse_composed(norm_act, own, sources, groups, eps, relu, out, dtype or own.dtype)
    while len(sources) > MAX_SOURCES:
        own = fuse(own, sources[:MAX_SOURCES], groups, eps, relu=False, dtype=torch.float32)
        sources = sources[MAX_SOURCES:]
        dtype = dtype or tensors[0].dtype
    out = _destination(own, out, dtype)
    out_strides = _strides(out)
    assert out_strides is not None
    batch, channels, height, width = own.shape
    tuning = TUNING["fuse"]
    tile = choose_tile(tuning, height * width, channels, groups, own.element_size())
    tensors_of: list[Any] = []
    sizes_of: dict[str, int] = {}
    for i in range(MAX_SOURCES):
        source = sources[min(i, len(sources) - 1)]  # beyond the count: not looked at
        low, wide = source.raw.shape[-2:]
        rows = choose_tile(tuning, low * wide, channels, groups, own.element_size()).pixels
        tensors_of += [*_channels_last(source.raw), source.weight, source.bias]
        sizes_of |= {f"PIXELS{i}": low * wide, f"WIDTH{i}": wide}
        sizes_of |= {f"LEVELS{i}": source.levels, f"ROWS{i}": rows}
    with _on_device(own):
        _fuse_kernel[(batch * triton.cdiv(groups, tile.group_block),)](
            *_channels_last(own),
            *tensors_of,
            out,
            *out_strides,
            eps,
            PIXELS=height * width,
            WIDTH=width,
            **sizes_of,
            COUNT=len(sources),
            GROUPS=groups,
            CPG=channels // groups,
            RELU=relu,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
    return out
