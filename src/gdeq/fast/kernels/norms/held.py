"""`single._norm_backward_kernel` in bfloat16 for groups of 5·q channels (see `split`).

A program reads x and dy of one or more groups of a sample once and holds both, two numbers in a
register, until dx is written.  It takes as many groups as make its runs of a pixel whole sectors
of 32 bytes, if that many fit the registers: runs of 40 bytes, as one group of 20 channels has,
move 64 through the cache, and allow loads of 8 bytes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl, triton
from gdeq.fast.kernels.norms import split
from gdeq.fast.kernels.norms.tensors import channels_last

enabled = True  # for comparisons
MOST = 40960  # numbers of x that a program holds
PER_THREAD = 80  # of these at most
WARPS = 4  # at least


def takes(x: Tensor, dy: Tensor, dx: Tensor, groups: int, weight: Tensor | None) -> bool:
    if not enabled or x.dtype != torch.bfloat16:
        return False
    return split.takes(x, dx, groups, weight) and split.takes(dy, dx, groups, weight)


def groups_of_program(pixels: int, size: int, groups: int) -> int:
    """size: channels of a group."""
    block = 1
    while size * block * 2 % 32 and groups % (2 * block) == 0 and 2 * block * pixels * size <= MOST:
        block *= 2
    return block


def launch(
    x: Tensor,
    dy: Tensor,
    groups: int,
    affine: list[Any],
    affine_sample: int,
    stats: Tensor,
    dx: Tensor,
    sums: Tensor,
    relu: bool,
    partials: bool,
) -> None:
    batch, channels, height, width = x.shape
    pixels, size = height * width, channels // groups
    block = groups_of_program(pixels, size, groups)
    numbers = pixels * size * block
    warps = min(16, max(WARPS, triton.next_power_of_2(numbers // (32 * PER_THREAD))))
    each = numbers // (32 * warps)
    with on_device(x):
        _held_backward_kernel[(batch * groups // block,)](
            *pairs(x),
            *pairs(dy),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *channels_last(dx),
            sums,
            sums[0].numel(),
            15,
            -65536,
            PIXELS=pixels,
            GROUPS=groups,
            CPG=size,
            GROUP_BLOCK=block,
            RELU=relu,
            PARTIALS=partials,
            num_warps=warps,
            maxnreg=min(128, max(64, 32 + 8 * each // 5)),
        )


def pairs(x: Tensor) -> tuple[Tensor, int, int]:
    _, sample, pixel = channels_last(x)
    return x.permute(0, 2, 3, 1).view(torch.int32), sample // 2, pixel // 2


@jit
def wide(pair, sixteen, upper, PIXELS: tl.constexpr, N: tl.constexpr):
    """Two numbers of each register, in float32."""
    low = (pair << sixteen).to(tl.float32, bitcast=True)
    high = (pair & upper).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (PIXELS, N))


@jit
def _spread(values, group, GROUP_BLOCK: tl.constexpr):
    """For each channel its group's value."""
    spread = tl.broadcast_to(tl.load(values), group.shape)
    for i in tl.static_range(1, GROUP_BLOCK):
        spread = tl.where(group == i, tl.load(values + i), spread)
    return spread


@jit
def through_relu(off, dy, factor, bias, RELU: tl.constexpr):
    if RELU:
        shift = tl.load(bias).to(tl.float32)
        dy = tl.where(off * factor[None, :] + shift[None, :] > 0, dy, 0.0)
    return dy


@jit
def _tile_sums(
    x, dy, stats, plane, weight, bias, sums, sums_plane, group,
    GROUP_BLOCK: tl.constexpr, RELU: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Of each channel, over the pixels: Σ w g x̂ and Σ w g.  weight, bias, sums: where its are."""
    rho = _spread(stats + plane, group, GROUP_BLOCK)
    scale = tl.load(weight).to(tl.float32)
    off = x - _spread(stats, group, GROUP_BLOCK)[None, :]
    g = through_relu(off, dy, rho * scale, bias, RELU)
    along_off, one = tl.split(tl.sum(tl.join(g * off, g), axis=0))  # one pass over the warps
    unit = along_off * rho
    if PARTIALS:
        tl.store(sums, unit)
        tl.store(sums + sums_plane, one)
    return unit * scale, one * scale


@jit
def _tile_gradient(
    x, dy, stats, plane, weight, bias, group, along_unit, along_one,
    GROUP_BLOCK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    rho = _spread(stats + plane, group, GROUP_BLOCK)
    factor = rho * tl.load(weight).to(tl.float32)
    off = x - _spread(stats, group, GROUP_BLOCK)[None, :]
    g = through_relu(off, dy, factor, bias, RELU)
    rest, slope = rho * along_one, rho * rho * along_unit
    return g * factor[None, :] - rest[None, :] - off * slope[None, :]


@jit
def _held_backward_kernel(
    x, x_sample, x_pixel,
    dy, dy_sample, dy_pixel,
    weight, bias, affine_sample,
    stats, plane,
    dx, dx_sample, dx_pixel,
    sums, sums_plane,
    fifteen, upper,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    RELU: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """x, dy: pairs of bfloat16 as int32, and their strides in pairs.

    fifteen, upper: 15 and the upper 16 bits, which the compiler does not know.  So it unpacks
    twice; else it keeps all in float32 from the sums to the end, for which there is no room.  And
    it reads 8 bytes at a time: a thread has 4 channels to sum and to keep scales of, not 8.
    """
    N: tl.constexpr = CPG * GROUP_BLOCK
    A: tl.constexpr = N // 5 * 4  # columns of the first tile
    B: tl.constexpr = N // 5
    COUNT: tl.constexpr = PIXELS * CPG
    BLOCKS: tl.constexpr = GROUPS // GROUP_BLOCK
    # Backwards: what the convolution wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // BLOCKS).to(tl.int64)
    block = program % BLOCKS
    same = 2 * fifteen - 30
    x += sample * x_sample + block * (N // 2) + same
    dy += sample * dy_sample + block * (N // 2) + same
    dx += sample * dx_sample + block * N + 2 * same
    sums += sample * (GROUPS * CPG) + block * N
    stats += sample * GROUPS + block * GROUP_BLOCK
    weight += sample * affine_sample + block * N
    bias += sample * affine_sample + block * N
    pixel = tl.arange(0, PIXELS)[:, None]
    pa, pb = tl.arange(0, A // 2)[None, :], A // 2 + tl.arange(0, B // 2)[None, :]
    xa = tl.load(x + pixel * x_pixel + pa)
    ya = tl.load(dy + pixel * dy_pixel + pa)
    xb = tl.load(x + pixel * x_pixel + pb)
    yb = tl.load(dy + pixel * dy_pixel + pb)
    ca, cb = tl.arange(0, A), A + tl.arange(0, B)
    group_a, group_b = ca // CPG, cb // CPG
    along_unit_a, along_one_a = _tile_sums(
        wide(xa, 16, -65536, PIXELS, A), wide(ya, 16, -65536, PIXELS, A),
        stats, plane, weight + ca, bias + ca, sums + ca, sums_plane, group_a,
        GROUP_BLOCK, RELU, PARTIALS,
    )  # fmt: skip
    along_unit_b, along_one_b = _tile_sums(
        wide(xb, 16, -65536, PIXELS, B), wide(yb, 16, -65536, PIXELS, B),
        stats, plane, weight + cb, bias + cb, sums + cb, sums_plane, group_b,
        GROUP_BLOCK, RELU, PARTIALS,
    )  # fmt: skip
    for i in tl.static_range(GROUP_BLOCK):
        in_a, in_b = group_a == i, group_b == i
        unit = tl.sum(tl.where(in_a, along_unit_a, 0.0)) + tl.sum(tl.where(in_b, along_unit_b, 0.0))
        one = tl.sum(tl.where(in_a, along_one_a, 0.0)) + tl.sum(tl.where(in_b, along_one_b, 0.0))
        along_unit_a = tl.where(in_a, unit, along_unit_a)
        along_unit_b = tl.where(in_b, unit, along_unit_b)
        along_one_a = tl.where(in_a, one, along_one_a)
        along_one_b = tl.where(in_b, one, along_one_b)
    ga = _tile_gradient(
        wide(xa, fifteen + 1, upper, PIXELS, A), wide(ya, fifteen + 1, upper, PIXELS, A),
        stats, plane, weight + ca, bias + ca, group_a,
        along_unit_a * (1.0 / COUNT), along_one_a * (1.0 / COUNT), GROUP_BLOCK, RELU,
    )  # fmt: skip
    tl.store(dx + pixel * dx_pixel + ca[None, :], ga.to(dx.dtype.element_ty))
    gb = _tile_gradient(
        wide(xb, fifteen + 1, upper, PIXELS, B), wide(yb, fifteen + 1, upper, PIXELS, B),
        stats, plane, weight + cb, bias + cb, group_b,
        along_unit_b * (1.0 / COUNT), along_one_b * (1.0 / COUNT), GROUP_BLOCK, RELU,
    )  # fmt: skip
    tl.store(dx + pixel * dx_pixel + cb[None, :], gb.to(dx.dtype.element_ty))
