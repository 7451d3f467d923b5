"""`residual._block_end_kernel` in bfloat16, where a tile has no masked numbers.

A program reads y, injection and z as pairs, and z before it knows the first norm.  Sums are over a
thread's numbers of a group first: an eighth to a quarter of the exchanges between threads.  With a
third of the instructions less and 128 registers, two programs share an SM also where mean and ρ are
kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms import held_block
from gdeq.fast.kernels.norms.held import pairs
from gdeq.fast.kernels.norms.tensors import channels_last

enabled = True  # for comparisons
MOST = 16384  # numbers of y that a program holds
PER_THREAD = 64  # of these at most


def takes(maps: list[Tensor | None], groups: int) -> bool:
    """maps: y first, all that are read or written."""
    return enabled and held_block.in_whole_pairs(maps, groups, MOST)


def launch(
    y: Tensor,
    mask: Tensor | None,
    injection: Tensor | None,
    z: Tensor,
    groups: int,
    affine: list[Any],
    affine_sample: int,
    out: Tensor,
    stats: Tensor | None,
    eps: float,
) -> None:
    batch, channels, height, width = y.shape
    pixels, size = height * width, channels // groups
    block = held_block.groups_of_program(pixels, size, groups, MOST)
    numbers = pixels * size * block
    warps = max(1, numbers // (32 * PER_THREAD))
    each = numbers // (32 * warps)
    memory = [pairs(x) for x in (y, y if injection is None else injection, z)]
    to = channels_last(out)
    with on_device(y):
        _held_block_end_kernel[(batch * groups // block,)](
            *memory[0][:2],
            None if mask is None else mask.contiguous(),
            *memory[1][:2],
            *memory[2][:2],
            *affine,
            affine_sample,
            *to[:2],
            stats,
            batch * groups,
            eps,
            Y_PIXEL=memory[0][2],
            INJECTION_PIXEL=memory[1][2],
            Z_PIXEL=memory[2][2],
            OUT_PIXEL=to[2],
            PIXELS=pixels,
            GROUPS=groups,
            CPG=size,
            GROUP_BLOCK=block,
            DROPOUT=mask is not None,
            INJECTED=injection is not None,
            KEEP=stats is not None,
            num_warps=warps,
            maxnreg=min(128 if each > 32 else 72, 32768 // (32 * warps)),  # half of an SM at most
        )


@jit
def _even_odd(vector, at, GROUP_BLOCK: tl.constexpr, CPG: tl.constexpr):
    """Of the first and of the second number of each pair, (1, groups, pairs)."""
    each = tl.arange(0, GROUP_BLOCK * CPG)
    even, odd = tl.split(
        tl.reshape(tl.load(vector + at + each).to(tl.float32), (1, GROUP_BLOCK, CPG // 2, 2))
    )
    return even, odd


@jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@jit
def _branch(
    y, injection, keeps, at,
    GROUP_BLOCK: tl.constexpr, CPG: tl.constexpr, DROPOUT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """y · mask + injection."""
    low, high = _low(y), _high(y)
    if DROPOUT:
        keep0, keep1 = _even_odd(keeps, at, GROUP_BLOCK, CPG)
        low, high = low * keep0, high * keep1
    if INJECTED:
        low, high = low + _low(injection), high + _high(injection)
    return low, high


@jit
def _mean(x, COUNT: tl.constexpr):
    """Of each group: first over what a thread has of it."""
    return tl.sum(tl.sum(x, axis=2), axis=0) * (1.0 / COUNT)


@jit
def _each(x):
    return x[None, :, None]


@jit
def _moments(low, high, eps, COUNT: tl.constexpr):
    """Mean and ρ of each group."""
    mean = _mean(low + high, COUNT)
    off0, off1 = low - _each(mean), high - _each(mean)
    return mean, tl.rsqrt(_mean(off0 * off0 + off1 * off1, COUNT) + eps)


@jit
def _rectify(x):
    """A NaN stays one."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _normalised(
    low, high, mean, rho, weight, bias, at, GROUP_BLOCK: tl.constexpr, CPG: tl.constexpr
):
    scale0, scale1 = _even_odd(weight, at, GROUP_BLOCK, CPG)
    shift0, shift1 = _even_odd(bias, at, GROUP_BLOCK, CPG)
    low = (low - _each(mean)) * (_each(rho) * scale0) + shift0
    high = (high - _each(mean)) * (_each(rho) * scale1) + shift1
    return low, high


@jit
def _held_block_end_kernel(
    y, y_sample,
    keeps,
    injection, injection_sample,
    z, z_sample,
    weight1, bias1, weight2, bias2, affine_sample,
    out, out_sample,
    stats, plane,
    eps,
    Y_PIXEL: tl.constexpr,
    INJECTION_PIXEL: tl.constexpr,
    Z_PIXEL: tl.constexpr,
    OUT_PIXEL: tl.constexpr,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DROPOUT: tl.constexpr,
    INJECTED: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """y, injection, z: pairs of bfloat16 as int32, and their strides in pairs.

    Y_PIXEL …: pixels' strides, known so that places need no instructions of their own.
    """
    N: tl.constexpr = CPG * GROUP_BLOCK
    COUNT: tl.constexpr = PIXELS * CPG
    BLOCKS: tl.constexpr = GROUPS // GROUP_BLOCK
    # Backwards: what the convolution wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // BLOCKS).to(tl.int64)
    block = program % BLOCKS
    pixel = tl.arange(0, PIXELS)[:, None]
    pair = block * (N // 2) + tl.arange(0, N // 2)[None, :]
    # Of each pixel: groups, and a group's pairs.
    yp = tl.load(y + sample * y_sample + pixel * Y_PIXEL + pair)
    yp = tl.reshape(yp, (PIXELS, GROUP_BLOCK, CPG // 2))
    ip = yp
    if INJECTED:
        ip = tl.load(injection + sample * injection_sample + pixel * INJECTION_PIXEL + pair)
        ip = tl.reshape(ip, (PIXELS, GROUP_BLOCK, CPG // 2))
    zp = tl.load(z + sample * z_sample + pixel * Z_PIXEL + pair)
    zp = tl.reshape(zp, (PIXELS, GROUP_BLOCK, CPG // 2))
    at = sample * affine_sample + block * N
    kept = sample * (GROUPS * CPG) + block * N

    low, high = _branch(yp, ip, keeps, kept, GROUP_BLOCK, CPG, DROPOUT, INJECTED)
    mean1, rho1 = _moments(low, high, eps, COUNT)
    low, high = _normalised(low, high, mean1, rho1, weight1, bias1, at, GROUP_BLOCK, CPG)
    low, high = _rectify(low + _low(zp)), _rectify(high + _high(zp))
    mean2, rho2 = _moments(low, high, eps, COUNT)
    if KEEP:
        where = stats + sample * GROUPS + block * GROUP_BLOCK + tl.arange(0, GROUP_BLOCK)
        tl.store(where, mean1)
        tl.store(where + plane, rho1)
        tl.store(where + 2 * plane, mean2)
        tl.store(where + 3 * plane, rho2)
    low, high = _normalised(low, high, mean2, rho2, weight2, bias2, at, GROUP_BLOCK, CPG)
    # Joined before they are rounded: two at once, the instruction for one is slow.
    value = tl.reshape(tl.join(low, high), (PIXELS, N)).to(out.dtype.element_ty)
    channel = block * N + tl.arange(0, N)[None, :]
    tl.store(out + sample * out_sample + pixel * OUT_PIXEL + channel, value)
