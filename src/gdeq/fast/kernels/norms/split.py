"""`single._norm_kernel` in half precision for groups of 5·q channels, q a power of two.

These are the expanded maps.  In `single` 20 channels are 32 columns, of which 12 are masked, and a
program of 16 warps fills an SM alone: its loads, sums and stores do not overlap with anybody's.
Here a program takes one group, pixels × 4q and pixels × q numbers, two in a register, without a
masked lane, and two or more programs share an SM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl, triton
from gdeq.fast.kernels.norms.tensors import channels_last, pixel_strides

enabled = True  # for comparisons
MOST = 32768  # numbers of a group
PER_THREAD = 40  # of these
REGISTERS = 64  # so that two programs of 16 warps fit an SM


def takes(x: Tensor, out: Tensor, groups: int, weight: Tensor | None) -> bool:
    _, channels, height, width = x.shape
    q, rest = divmod(channels // groups, 5)
    numbers = height * width * 5 * q
    fits = rest == 0 and q >= 2 and _power_of_two(q) and _power_of_two(height * width)
    if not (enabled and fits and numbers <= MOST and weight is not None):
        return False
    sample, _, row, pixel = x.stride()
    in_pairs = not any(number % 2 for number in (sample, row, pixel, x.storage_offset()))
    half = x.dtype == out.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return half and in_pairs and pixel_strides(x) is not None


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def launch(
    x: Tensor,
    groups: int,
    affine: list[Any],
    affine_sample: int,
    out: Tensor,
    stats: Tensor | None,
    eps: float,
    relu: bool,
) -> None:
    _, sample, pixel = channels_last(x)
    batch, channels, height, width = x.shape
    pixels, size = height * width, channels // groups
    with on_device(x):
        _norm_split_kernel[(batch * groups,)](
            x.permute(0, 2, 3, 1).view(torch.int32),
            sample // 2,
            pixel // 2,
            *affine,
            affine_sample,
            *channels_last(out),
            stats,
            batch * groups,
            eps,
            PIXELS=pixels,
            GROUPS=groups,
            Q=size // 5,
            RELU=relu,
            KEEP=stats is not None,
            num_warps=max(1, min(16, triton.next_power_of_2(pixels * size // (32 * PER_THREAD)))),
            maxnreg=REGISTERS,
        )


@jit
def _low(pair, BRAIN: tl.constexpr):
    if BRAIN:  # the upper half of a float32
        return (pair << 16).to(tl.float32, bitcast=True)
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _high(pair, BRAIN: tl.constexpr):
    if BRAIN:
        return (pair & -65536).to(tl.float32, bitcast=True)
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _even_odd(vector, at, N: tl.constexpr):
    return tl.split(tl.reshape(tl.load(vector + at + tl.arange(0, N)).to(tl.float32), (N // 2, 2)))


@jit
def _finish(
    out, where, pair, mean, rho, weight, bias, at,
    PIXELS: tl.constexpr, N: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    BRAIN: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    scale0, scale1 = _even_odd(weight, at, N)
    shift0, shift1 = _even_odd(bias, at, N)
    low = (_low(pair, BRAIN) - mean) * (rho * scale0)[None, :] + shift0[None, :]
    high = (_high(pair, BRAIN) - mean) * (rho * scale1)[None, :] + shift1[None, :]
    if RELU:  # a NaN stays one
        low = tl.maximum(low, 0.0, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # Joined before they are rounded: two at once, the instruction for one is slow.
    y = tl.reshape(tl.join(low, high), (PIXELS, N))
    tl.store(out + where, y.to(out.dtype.element_ty))


@jit
def _norm_split_kernel(
    x, x_sample, x_pixel,
    weight, bias, affine_sample,
    out, out_sample, out_pixel,
    stats, plane,
    eps,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    Q: tl.constexpr,
    RELU: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """x: pairs of numbers of out's dtype as int32, and its strides in pairs."""
    BRAIN: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    CPG: tl.constexpr = 5 * Q
    COUNT: tl.constexpr = PIXELS * CPG
    # Backwards: what the convolution wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // GROUPS).to(tl.int64)
    group = program % GROUPS
    x += sample * x_sample + group * (CPG // 2)
    out += sample * out_sample + group * CPG
    pixel = tl.arange(0, PIXELS)
    a = tl.load(x + pixel[:, None] * x_pixel + tl.arange(0, 2 * Q)[None, :])
    b = tl.load(x + pixel[:, None] * x_pixel + (2 * Q + tl.arange(0, Q // 2))[None, :])
    sum_a = tl.sum(_low(a, BRAIN) + _high(a, BRAIN))
    mean = (sum_a + tl.sum(_low(b, BRAIN) + _high(b, BRAIN))) * (1.0 / COUNT)
    a0, a1 = _low(a, BRAIN) - mean, _high(a, BRAIN) - mean
    b0, b1 = _low(b, BRAIN) - mean, _high(b, BRAIN) - mean
    squares = tl.sum(a0 * a0 + a1 * a1) + tl.sum(b0 * b0 + b1 * b1)
    rho = tl.rsqrt(squares * (1.0 / COUNT) + eps)
    if KEEP:
        tl.store(stats + sample * GROUPS + group, mean)
        tl.store(stats + plane + sample * GROUPS + group, rho)
    at = sample * affine_sample + group * CPG
    where = pixel[:, None] * out_pixel
    ca, cb = tl.arange(0, 4 * Q), 4 * Q + tl.arange(0, Q)
    _finish(out, where + ca[None, :], a, mean, rho, weight, bias, at, PIXELS, 4 * Q, RELU)
    _finish(out, where + cb[None, :], b, mean, rho, weight, bias, at + 4 * Q, PIXELS, Q, RELU)
