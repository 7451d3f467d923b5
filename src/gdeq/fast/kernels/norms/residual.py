"""block_end: the end of a residual block, norm₂(relu(z + norm₁(y · mask + injection))).

The kernels take bfloat16, 4, 8, 16 … channels a group and a power of two of pixels, as many as a
program holds: everything is read once, two numbers to a register, before anything is computed.
Other maps go through `norm_act` and PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.group_norm import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.operation import Call, Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    high,
    low,
    of_sample,
    over_group,
    program_of,
    rectify,
    sums_of,
    wide,
    write,
)
from gdeq.fast.kernels.norms.tensors import (
    Tuning,
    as_map,
    as_pairs,
    at_least_float32,
    empty_like,
    in_pairs,
    power_of_two,
    runs,
)

TUNING = {
    "forward": Tuning(tile=16384, per_thread=64),
    "backward": Tuning(tile=8192, per_thread=32),
}
MOST_READERS = 3  # whose gradients the backward kernel adds


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
    readers: int = 1,
) -> list[Tensor]:
    """norm₂(relu(z + norm₁(y · mask + injection))), once for each of its readers, in one memory.

    Backward adds the gradients from all readers on the way.

    mask: (batch, channels), of whole channels.
    weight1 … bias2: (channels,), or (batch, channels) for each sample its own.
    """
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    grad = differentiates(*maps, *vectors)
    kernel = "backward" if grad else "forward"
    # The kernel has no gradient of the mask.
    taken = readers <= MOST_READERS and not differentiates(mask)
    if taken and runs(*maps, *vectors) and takes(kernel, [y, injection, z], groups):
        found = BlockEnd(groups, eps, readers if grad else 1)(maps, vectors, None, None)
        return list(found) if grad and readers > 1 else [found] * readers
    return [BlockEnd(groups, eps).composed(norm_act, maps, vectors, None, y.dtype)] * readers


@dataclass(frozen=True)
class BlockEnd(Operation):
    """maps: y, mask, injection, z."""

    groups: int
    eps: float
    readers: int = 1
    norms = 2

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.composed(norm_act_plain, maps, vectors, out, dtype)

    def composed(
        self,
        norm: Callable[..., Tensor],
        maps: Maps,
        vectors: Vectors,
        out: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """In float32 at least, with this group norm."""
        wide: list[Any] = [None if x is None else at_least_float32(x) for x in maps]
        branch, mask, injection, z = wide
        if mask is not None:
            branch = branch * mask[:, :, None, None].to(branch.dtype)
        if injection is not None:
            branch = branch + injection
        total = torch.relu(z + norm(branch, self.groups, *vectors[:2], self.eps))
        return norm(total, self.groups, *vectors[2:], self.eps, out=out, dtype=dtype)

    def launch(self, call: Call) -> None:
        (y, mask, injection, z), out = call.maps, call.out
        affine, affine_sample = affine_arguments(call.vectors)
        sizes = sizes_of("forward", y, self.groups)
        each = sizes["PIXELS"] * sizes["CPG"] * sizes["BLOCK"] // (32 * sizes["num_warps"])
        # Two programs share an SM at least.
        registers = min(128 if each > 32 else 72, 1024 // sizes["num_warps"])
        given, place = [as_pairs(x) for x in _present(y, injection, z)], as_map(out)
        with on_device(y):
            _block_end_kernel[(len(y) * self.groups // sizes["BLOCK"],)](
                tuple(x[:2] for x in given), _contiguous(mask), *affine, affine_sample, place[:2],
                call.stats, call.stats[0].numel(), self.eps,
                STRIDES=tuple(x[2] for x in given), OUT_STRIDE=place[2],
                maxnreg=registers, **sizes,
            )  # fmt: skip

    def launch_backward(
        self, call: Call, douts: Sequence[Tensor], sums: Tensor, wanted: Sequence[bool]
    ) -> list[Vector]:
        y, mask, injection, z = call.maps
        _, _, want_injection, want_z, *_ = wanted
        dy = empty_like(y)
        dz = empty_like(z) if want_z else None
        dinjection = None
        if injection is not None and want_injection:
            dinjection = dy if mask is None else empty_like(y)
        # Written beside dy: dz, and the injection's where a mask makes it another.
        more = tuple(as_map(x) for x in (dz, dinjection) if x is not None and x is not dy)
        affine, affine_sample = affine_arguments(call.vectors)
        options = {"WRITE_Z": dz is not None, "WRITE_INJECTION": len(more) > (dz is not None)}
        sizes = sizes_of("backward", y, self.groups)
        branch = tuple(as_pairs(x) for x in _present(y, injection))
        with on_device(y):
            _block_end_backward_kernel[(len(y) * self.groups // sizes["BLOCK"],)](
                branch, _contiguous(mask), as_pairs(z), *affine, affine_sample,
                tuple(as_pairs(_in_pairs(dout)) for dout in douts),
                call.stats, call.stats[0].numel(), sums, sums[0].numel(), as_map(dy), more,
                15, -65536, **options, **sizes, maxnreg=128,
            )  # fmt: skip
        return [dy, None, dinjection, dz]


def _contiguous(mask: Tensor | None) -> tuple[Tensor, ...]:
    """As kernels take it."""
    return () if mask is None else (mask.contiguous(),)


def _present(*maps: Tensor | None) -> list[Tensor]:
    return [x for x in maps if x is not None]


def _in_pairs(dout: Tensor) -> Tensor:
    """A gradient as kernels take it."""
    fits = dout.dtype == torch.bfloat16 and in_pairs(dout)
    return dout if fits else empty_like(dout).to(torch.bfloat16).copy_(dout)


def takes(kernel: str, maps: Sequence[Tensor | None], groups: int) -> bool:
    """maps: y first, all that are read."""
    y, *others = _present(*maps)
    size, pixels = y.shape[1] // groups, y.shape[2] * y.shape[3]
    whole = power_of_two(pixels) == pixels and power_of_two(size) == size and size >= 4
    fits = whole and pixels * size <= TUNING[kernel].tile
    return fits and all(x.dtype == torch.bfloat16 and in_pairs(x) for x in (y, *others))


def sizes_of(kernel: str, y: Tensor, groups: int) -> dict[str, int]:
    """BLOCK: groups of a program, whose runs of a pixel are a sector of 32 bytes if they fit."""
    tuning, size, pixels = TUNING[kernel], y.shape[1] // groups, y.shape[2] * y.shape[3]
    block = 1
    while (
        2 * size * block < tuning.run_bytes
        and groups % (2 * block) == 0
        and 2 * block * pixels * size <= tuning.tile
    ):
        block *= 2
    warps = tuning.warps(pixels * size * block)
    return {"PIXELS": pixels, "GROUPS": groups, "CPG": size, "BLOCK": block, "num_warps": warps}


# ---- kernels


@jit
def _pairs_of(x, sample, block, pixel, stride, BLOCK: tl.constexpr, CPG: tl.constexpr):
    """(pixels, groups, pairs of a group)."""
    pair = block * (BLOCK * CPG // 2) + tl.arange(0, BLOCK * CPG // 2)[None, :]
    found = tl.load(x[0] + sample * x[1] + pixel * stride + pair)
    return tl.reshape(found, (pixel.shape[0], BLOCK, CPG // 2))


@jit
def _even_odd(vector, at, BLOCK: tl.constexpr, CPG: tl.constexpr):
    """Of the first and of the second number of each pair, (1, groups, pairs of a group)."""
    each = tl.load(vector + at + tl.arange(0, BLOCK * CPG)).to(tl.float32)
    even, odd = tl.split(tl.reshape(each, (1, BLOCK, CPG // 2, 2)))
    return even, odd


@jit
def _moments(first, second, eps, COUNT: tl.constexpr):
    """Mean and ρ of each group: first over what a thread has of it."""
    mean = tl.sum(tl.sum(first + second, axis=2), axis=0) * (1.0 / COUNT)
    off0, off1 = first - mean[None, :, None], second - mean[None, :, None]
    squares = tl.sum(tl.sum(off0 * off0 + off1 * off1, axis=2), axis=0) * (1.0 / COUNT)
    return mean, tl.rsqrt(squares + eps)


@jit
def _normalised(first, second, mean, rho, affine, at, BLOCK: tl.constexpr, CPG: tl.constexpr):
    scale0, scale1 = _even_odd(affine[0], at, BLOCK, CPG)
    shift0, shift1 = _even_odd(affine[1], at, BLOCK, CPG)
    mean, rho = mean[None, :, None], rho[None, :, None]
    return (first - mean) * (rho * scale0) + shift0, (second - mean) * (rho * scale1) + shift1


@jit
def _block_end_kernel(
    maps, keeps, affine1, affine2, affine_sample, out, stats, plane, eps,
    STRIDES: tl.constexpr, OUT_STRIDE: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """maps: y, the injection if there is one, and z: memory of pairs, and stride of samples.

    STRIDES, OUT_STRIDE: of pixels, known so that places need no instructions of their own.  Sums
    are over a thread's numbers of a group first, which saves most of the exchanges between threads.
    """
    N: tl.constexpr = CPG * BLOCK
    COUNT: tl.constexpr = PIXELS * CPG
    Z: tl.constexpr = len(STRIDES) - 1
    sample, block = program_of(GROUPS // BLOCK)
    pixel = tl.arange(0, PIXELS)[:, None]
    y = _pairs_of(maps[0], sample, block, pixel, STRIDES[0], BLOCK, CPG)
    injection = y
    if len(STRIDES) > 2:
        injection = _pairs_of(maps[1], sample, block, pixel, STRIDES[1], BLOCK, CPG)
    z = _pairs_of(maps[Z], sample, block, pixel, STRIDES[Z], BLOCK, CPG)
    at = sample * affine_sample + block * N
    first, second = low(y, True), high(y, True)
    if len(keeps) > 0:
        keep0, keep1 = _even_odd(keeps[0], sample * (GROUPS * CPG) + block * N, BLOCK, CPG)
        first, second = first * keep0, second * keep1
    if len(STRIDES) > 2:
        first, second = first + low(injection, True), second + high(injection, True)
    mean1, rho1 = _moments(first, second, eps, COUNT)
    first, second = _normalised(first, second, mean1, rho1, affine1, at, BLOCK, CPG)
    # A NaN stays one.
    first = tl.maximum(first + low(z, True), 0.0, propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(second + high(z, True), 0.0, propagate_nan=tl.PropagateNan.ALL)
    mean2, rho2 = _moments(first, second, eps, COUNT)
    where = stats + sample * GROUPS + block * BLOCK + tl.arange(0, BLOCK)
    tl.store(where, mean1)
    tl.store(where + plane, rho1)
    tl.store(where + 2 * plane, mean2)
    tl.store(where + 3 * plane, rho2)
    first, second = _normalised(first, second, mean2, rho2, affine2, at, BLOCK, CPG)
    # Joined before they are rounded: two at once, the instruction for one is slow.
    value = tl.reshape(tl.join(first, second), (PIXELS, N)).to(out[0].dtype.element_ty)
    channel = block * N + tl.arange(0, N)[None, :]
    tl.store(out[0] + sample * out[1] + pixel * OUT_STRIDE + channel, value)


@jit
def _bits(x):
    """As bfloat16."""
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)


@jit
def _added(x, other):
    """The sum of pairs, rounded."""
    second = _bits(high(x, True) + high(other, True))
    return (second << 16) | (_bits(low(x, True) + low(other, True)) & 65535)


@jit
def _off(maps, sixteen, upper, keep, mean):
    """y · mask + injection − mean."""
    branch = wide(maps[0], sixteen, upper) * keep[None, :]
    if len(maps) > 1:
        branch += wide(maps[1], sixteen, upper)
    return branch - mean[None, :]


@jit
def _block_end_backward_kernel(
    maps, keeps, z, affine1, affine2, affine_sample, douts, stats, plane, sums, sums_plane, dy,
    more, fifteen, upper, WRITE_Z: tl.constexpr, WRITE_INJECTION: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """maps, z, douts: pairs, which a program holds until the gradients are written.

    more: the gradients of z and of the injection, those that are written.
    douts: are added, and rounded as a gradient from one place would be.
    fifteen, upper: 15 and the mask of the upper 16 bits, of which the compiler does not know (see
    `wide`); so it reads 8 bytes at a time, and a thread has 4 channels to sum, not 8.

    With off = x − mean instead of x̂ = ρ off, a norm's gradient is  g ρ w − ρ m − off ρ² m′,
    m the mean of w g and m′ that of w g off.
    """
    N: tl.constexpr = CPG * BLOCK
    SHARE: tl.constexpr = 1.0 / (PIXELS * CPG)
    sample, block = program_of(GROUPS // BLOCK)
    same = 2 * fifteen - 30
    pixel = tl.arange(0, PIXELS)
    pair = block * (N // 2) + same + tl.arange(0, N // 2)
    channel = block * N + tl.arange(0, N)
    held = (_held(maps[0], sample, pixel, pair),)
    zp = _held(z, sample, pixel, pair)
    gp = _held(douts[0], sample, pixel, pair)
    if len(douts) > 1:
        gp = _added(gp, _held(douts[1], sample, pixel, pair))
    if len(douts) > 2:
        gp = _added(gp, _held(douts[2], sample, pixel, pair))
    if len(maps) > 1:
        held += (_held(maps[1], sample, pixel, pair),)  # type: ignore[assignment]
    keep = tl.full((N,), 1.0, tl.float32)
    if len(keeps) > 0:
        keep = tl.load(keeps[0] + sample * (GROUPS * CPG) + channel).to(tl.float32)
    at = sample * affine_sample + channel
    scale1 = tl.load(affine1[0] + at).to(tl.float32)
    shift1 = tl.load(affine1[1] + at).to(tl.float32)
    scale2 = tl.load(affine2[0] + at).to(tl.float32)
    at = stats + sample * GROUPS + channel // CPG
    mean1, rho1 = tl.load(at), tl.load(at + plane)
    mean2, rho2 = tl.load(at + 2 * plane), tl.load(at + 3 * plane)
    factor1, factor2 = rho1 * scale1, rho2 * scale2
    sums += sample * (GROUPS * CPG) + channel

    off1 = _off(held, 16, -65536, keep, mean1)
    total = off1 * factor1[None, :] + shift1[None, :] + wide(zp, 16, -65536)
    off2 = rectify(total) - mean2[None, :]
    g = wide(gp, 16, -65536)
    along, one = sums_of(g * off2, g, True)
    tl.store(sums + 2 * sums_plane, along * rho2)
    tl.store(sums + 3 * sums_plane, one)
    slope2 = over_group(along * scale2, BLOCK, CPG, N) * (rho2 * rho2 * rho2 * SHARE)
    rest2 = over_group(one * scale2, BLOCK, CPG, N) * (rho2 * SHARE)

    sixteen = fifteen + 1
    off1 = _off(held, sixteen, upper, keep, mean1)
    total = off1 * factor1[None, :] + shift1[None, :] + wide(zp, sixteen, upper)
    off2 = rectify(total) - mean2[None, :]
    g = wide(gp, sixteen, upper) * factor2[None, :] - rest2[None, :]
    g = tl.where(total > 0, g - off2 * slope2[None, :], 0.0)
    if WRITE_Z:
        write(of_sample(more[0], sample, 1), pixel, channel, pixel, g, False)
    along, one = sums_of(g * off1, g, True)
    tl.store(sums, along * rho1)
    tl.store(sums + sums_plane, one)
    slope1 = over_group(along * scale1, BLOCK, CPG, N) * (rho1 * rho1 * rho1 * SHARE)
    rest1 = over_group(one * scale1, BLOCK, CPG, N) * (rho1 * SHARE)
    g = g * factor1[None, :] - rest1[None, :] - off1 * slope1[None, :]
    if WRITE_INJECTION:
        to = of_sample(more[len(more) - 1], sample, 1)
        write(to, pixel, channel, pixel, g, False)
    write(of_sample(dy, sample, 1), pixel, channel, pixel, g * keep[None, :], False)


@jit
def _held(x, sample, pixel, pair):
    return tl.load(x[0] + sample * x[1] + pixel[:, None] * x[2] + pair[None, :])
