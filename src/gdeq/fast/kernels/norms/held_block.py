"""`residual._block_end_backward_kernel` in bfloat16, where a tile has no masked numbers.

As in `held`: a program reads y, injection, z and dout once and holds them, two numbers in a
register, until the gradients are written.  Where the block's result goes to several places, it adds
the gradients from there.  In float32 they fill the registers, and a program of 8
warps an SM alone: nobody reads while it sums, or sums while it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.held import pairs, wide
from gdeq.fast.kernels.norms.pieces import over_group
from gdeq.fast.kernels.norms.tensors import channels_last, channels_last_or, pixel_strides

enabled = True  # for comparisons
MOST_DOUTS = 3
MOST = 8192  # numbers of y that a program holds
PER_THREAD = 32  # of these
RUN_BYTES = 32  # of a pixel at least, if that many numbers fit
REGISTERS = 128  # so that two programs of 8 warps fit an SM


def takes(maps: list[Tensor | None], groups: int) -> bool:
    """maps: y first, all that are read or written."""
    return enabled and in_whole_pairs(maps, groups, MOST)


def in_whole_pairs(maps: list[Tensor | None], groups: int, most: int) -> bool:
    """Whether a group of y has no more numbers, none of them masked, and all maps are pairs."""
    present = [x for x in maps if x is not None]
    _, channels, height, width = present[0].shape
    size = channels // groups
    whole = _power_of_two(height * width) and _power_of_two(size) and size >= 4
    fits = whole and height * width * size <= most
    return fits and all(_in_pairs(x) for x in present)


def _in_pairs(x: Tensor) -> bool:
    sample, _, row, pixel = x.stride()
    even = not any(number % 2 for number in (sample, row, pixel, x.storage_offset()))
    return x.dtype == torch.bfloat16 and even and pixel_strides(x) is not None


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def groups_of_program(pixels: int, size: int, groups: int, most: int = MOST) -> int:
    """size: channels of a group."""
    block = 1
    while 2 * size * block < RUN_BYTES and groups % (2 * block) == 0:
        if 2 * block * pixels * size > most:
            break
        block *= 2
    return block


def launch(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    groups: int,
    affine: list[Any],
    affine_sample: int,
    stats: Tensor,
    douts: Sequence[Tensor],
    dy: Tensor,
    dinjection: Tensor | None,
    dz: Tensor | None,
    sums: Tensor,
) -> None:
    batch, channels, height, width = y.shape
    pixels, size = height * width, channels // groups
    block = groups_of_program(pixels, size, groups)
    with on_device(y):
        _held_block_end_backward_kernel[(batch * groups // block,)](
            *pairs(y),
            None if mask is None else mask.contiguous(),
            *pairs(y if injection is None else injection),
            *pairs(z),
            *affine,
            affine_sample,
            stats,
            stats[0].numel(),
            *(argument for i in range(3) for argument in pairs(douts[min(i, len(douts) - 1)])),
            *channels_last(dy),
            *channels_last_or(dy, dinjection),
            *channels_last_or(dy, dz),
            sums,
            sums[0].numel(),
            15,
            -65536,
            PIXELS=pixels,
            GROUPS=groups,
            CPG=size,
            GROUP_BLOCK=block,
            DOUTS=len(douts),
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            WRITE_INJECTION=dinjection is not None and dinjection is not dy,
            WRITE_Z=dz is not None,
            num_warps=max(1, pixels * size * block // (32 * PER_THREAD)),
            maxnreg=REGISTERS,
        )


@jit
def _halves(pair):
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & -65536).to(tl.float32, bitcast=True)


@jit
def _bits(x):
    """As bfloat16."""
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)


@jit
def _off(
    y, injection, sixteen, upper, keep, mean,
    PIXELS: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """y · mask + injection − mean."""
    branch = wide(y, sixteen, upper, PIXELS, N)
    if DROPOUT:
        branch = branch * keep[None, :]
    if INJECTED:
        branch += wide(injection, sixteen, upper, PIXELS, N)
    return branch - mean[None, :]


@jit
def _held_block_end_backward_kernel(
    y, y_sample, y_pixel,
    keeps,
    injection, injection_sample, injection_pixel,
    z, z_sample, z_pixel,
    weight1, bias1, weight2, bias2, affine_sample,
    stats, plane,
    dout0, dout0_sample, dout0_pixel,
    dout1, dout1_sample, dout1_pixel,
    dout2, dout2_sample, dout2_pixel,
    dy, dy_sample, dy_pixel,
    dinjection, dinjection_sample, dinjection_pixel,
    dz, dz_sample, dz_pixel,
    sums, sums_plane,
    fifteen, upper,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DOUTS: tl.constexpr,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
    WRITE_INJECTION: tl.constexpr,
    WRITE_Z: tl.constexpr,
):  # fmt: skip
    """y, injection, z, dout0 …: pairs of bfloat16 as int32, and their strides in pairs.

    DOUTS: so many are added, and rounded as a gradient from one place would be.
    fifteen, upper: as in `held`; the loads are of 8 bytes for the same reason as there.

    With off = x − mean instead of x̂ = ρ off, a norm's gradient is  g ρ w − ρ m − off ρ² m′,
    m the mean of w g and m′ that of w g off.
    """
    N: tl.constexpr = CPG * GROUP_BLOCK
    COUNT: tl.constexpr = PIXELS * CPG
    BLOCKS: tl.constexpr = GROUPS // GROUP_BLOCK
    # Backwards: what was written last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // BLOCKS).to(tl.int64)
    block = program % BLOCKS
    same = 2 * fifteen - 30
    pixel = tl.arange(0, PIXELS)[:, None]
    pair = block * (N // 2) + same + tl.arange(0, N // 2)[None, :]
    channel = block * N + tl.arange(0, N)
    yp = tl.load(y + sample * y_sample + pixel * y_pixel + pair)
    zp = tl.load(z + sample * z_sample + pixel * z_pixel + pair)
    gp = tl.load(dout0 + sample * dout0_sample + pixel * dout0_pixel + pair)
    if DOUTS > 1:
        low, high = _halves(gp)
        other = tl.load(dout1 + sample * dout1_sample + pixel * dout1_pixel + pair)
        more_low, more_high = _halves(other)
        low, high = low + more_low, high + more_high
        if DOUTS > 2:
            other = tl.load(dout2 + sample * dout2_sample + pixel * dout2_pixel + pair)
            more_low, more_high = _halves(other)
            low, high = low + more_low, high + more_high
        gp = (_bits(high) << 16) | (_bits(low) & 65535)
    ip = yp
    if INJECTED:
        ip = tl.load(injection + sample * injection_sample + pixel * injection_pixel + pair)
    keep = tl.full((N,), 1.0, tl.float32)
    if DROPOUT:
        keep = tl.load(keeps + sample * (GROUPS * CPG) + channel).to(tl.float32)
    offset = sample * affine_sample + channel
    scale1 = tl.load(weight1 + offset).to(tl.float32)
    shift1 = tl.load(bias1 + offset).to(tl.float32)
    scale2 = tl.load(weight2 + offset).to(tl.float32)
    at = stats + sample * GROUPS + channel // CPG
    mean1, rho1 = tl.load(at), tl.load(at + plane)
    mean2, rho2 = tl.load(at + 2 * plane), tl.load(at + 3 * plane)
    factor1, factor2 = rho1 * scale1, rho2 * scale2
    sums += sample * (GROUPS * CPG) + channel

    off1 = _off(yp, ip, 16, -65536, keep, mean1, PIXELS, N, DROPOUT, INJECTED)
    total = off1 * factor1[None, :] + shift1[None, :] + wide(zp, 16, -65536, PIXELS, N)
    off2 = tl.where(total < 0, 0.0, total) - mean2[None, :]
    g = wide(gp, 16, -65536, PIXELS, N)
    along, one = tl.split(tl.sum(tl.join(g * off2, g), axis=0))  # one pass over the warps
    tl.store(sums + 2 * sums_plane, along * rho2)
    tl.store(sums + 3 * sums_plane, one)
    slope2 = over_group(along * scale2, GROUP_BLOCK, CPG) * (rho2 * rho2 * rho2 * (1.0 / COUNT))
    rest2 = over_group(one * scale2, GROUP_BLOCK, CPG) * (rho2 * (1.0 / COUNT))

    sixteen = fifteen + 1
    off1 = _off(yp, ip, sixteen, upper, keep, mean1, PIXELS, N, DROPOUT, INJECTED)
    total = off1 * factor1[None, :] + shift1[None, :] + wide(zp, sixteen, upper, PIXELS, N)
    off2 = tl.where(total < 0, 0.0, total) - mean2[None, :]
    g = wide(gp, sixteen, upper, PIXELS, N) * factor2[None, :] - rest2[None, :]
    g = tl.where(total > 0, g - off2 * slope2[None, :], 0.0)
    if WRITE_Z:
        where = dz + sample * dz_sample + pixel * dz_pixel + channel[None, :]
        tl.store(where, g.to(dz.dtype.element_ty))
    along, one = tl.split(tl.sum(tl.join(g * off1, g), axis=0))
    tl.store(sums, along * rho1)
    tl.store(sums + sums_plane, one)
    slope1 = over_group(along * scale1, GROUP_BLOCK, CPG) * (rho1 * rho1 * rho1 * (1.0 / COUNT))
    rest1 = over_group(one * scale1, GROUP_BLOCK, CPG) * (rho1 * (1.0 / COUNT))
    g = g * factor1[None, :] - rest1[None, :] - off1 * slope1[None, :]
    if WRITE_INJECTION:
        where = dinjection + sample * dinjection_sample + pixel * dinjection_pixel
        tl.store(where + channel[None, :], g.to(dinjection.dtype.element_ty))
    where = dy + sample * dy_sample + pixel * dy_pixel + channel[None, :]
    tl.store(where, (g * keep[None, :]).to(dy.dtype.element_ty))
