"""block_end: the end of a residual block, norm₂(relu(z + norm₁(y · mask + injection))).

kernels        for                                                   tile
_block_end…    all maps                                              aligned
_pairs…        bfloat16, 4, 8, 16 … channels a group, a power of     all pixels, two numbers in a
               two of pixels, as many as a program holds             register
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
    keep_pair,
    keep_statistics,
    kept_pair,
    low,
    means_along,
    norm_gradient,
    normalise,
    of_sample,
    only,
    over_group,
    place,
    program_of,
    read,
    rectify,
    rows_from,
    scale_and_shift,
    statistics,
    sums_of,
    wide,
    write,
)
from gdeq.fast.kernels.norms.tensors import (
    Map,
    Tuning,
    aligned_tile,
    as_map,
    as_pairs,
    at_least_float32,
    empty_channels_last,
    empty_like,
    in_pairs,
    power_of_two,
    runs,
)

TUNING = {
    "forward": Tuning(),
    "backward": Tuning(run_bytes=16, tile=8192, per_thread=32),  # with more, registers spill
    "pairs": Tuning(tile=16384, per_thread=64),
    "pairs backward": Tuning(tile=8192, per_thread=32),
}
MOST_READERS = 3  # whose gradients the backward kernel for pairs adds


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
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    # The kernel has no gradient of the mask.
    if out is None and differentiates(mask) and runs(*maps, *vectors):
        return BlockEnd(groups, eps).composed(norm_act, maps, vectors, None, dtype or y.dtype)
    return BlockEnd(groups, eps)(maps, vectors, out, dtype)


def block_end_for(readers: int, *arguments: Any) -> list[Tensor]:
    """`block_end`, once for each of its readers, in one memory.

    Backward adds the gradients from all of them on the way.
    """
    y, mask, injection, z, weight1, bias1, weight2, bias2, groups, eps = arguments
    maps, vectors = (y, mask, injection, z), (weight1, bias1, weight2, bias2)
    fused = differentiates(*maps, *vectors) and not differentiates(mask)
    if readers == 1 or not fused or not runs(*maps, *vectors):
        return [block_end(*arguments)] * readers
    return list(BlockEnd(groups, eps, readers)(maps, vectors, None, None))


@dataclass(frozen=True)
class BlockEnd(Operation):
    """maps: y, mask, injection, z."""

    groups: int
    eps: float
    readers: int = 1
    norms = 2

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        wide = [None if x is None else at_least_float32(x) for x in maps]
        return self.composed(norm_act_plain, wide, vectors, out, dtype)

    def composed(
        self,
        norm: Callable[..., Tensor],
        maps: Maps,
        vectors: Vectors,
        out: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        branch, mask, injection, z = maps
        if mask is not None:
            branch = branch * mask[:, :, None, None].to(branch.dtype)
        if injection is not None:
            branch = branch + injection
        total = torch.relu(z + norm(branch, self.groups, *vectors[:2], self.eps))
        return norm(total, self.groups, *vectors[2:], self.eps, out=out, dtype=dtype)

    def launch(self, call: Call) -> None:
        (y, mask, injection, z), out = call.maps, call.out
        keeps = _contiguous(mask)
        affine, affine_sample = affine_arguments(call.vectors)
        rest = call.stats, call.stats[0].numel(), self.eps
        if takes_pairs("pairs", [y, injection, z, out], self.groups):
            sizes = pair_sizes("pairs", y, self.groups)
            each = sizes["PIXELS"] * sizes["CPG"] * sizes["BLOCK"] // (32 * sizes["num_warps"])
            # Two programs share an SM at least.
            registers = min(128 if each > 32 else 72, 1024 // sizes["num_warps"])
            given, place = [as_pairs(x) for x in _present(y, injection, z)], as_map(out)
            with on_device(y):
                _pairs_kernel[(len(y) * self.groups // sizes["BLOCK"],)](
                    tuple(x[:2] for x in given), keeps, *affine, affine_sample, place[:2], *rest,
                    STRIDES=tuple(x[2] for x in given), OUT_STRIDE=place[2],
                    maxnreg=registers, **sizes,
                )  # fmt: skip
            return
        tile = aligned_tile(TUNING["forward"], y, self.groups)
        with on_device(y):
            _block_end_kernel[(tile.programs(len(y)),)](
                _branch(as_map, y, injection), keeps, as_map(z), *affine, affine_sample,
                as_map(out), *rest, **tile.sizes(),
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
            # Without a mask it is y's gradient.
            same = mask is None and injection.dtype == y.dtype
            dinjection = dy if same else empty_channels_last(y.shape, injection.dtype, y.device)
        found = [dy, None, dinjection, dz]
        # Written beside dy: dz, and the injection's.
        more = tuple(as_map(x) for x in (dz, dinjection) if x is not None and x is not dy)
        affine, affine_sample = affine_arguments(call.vectors)
        rest = call.stats, call.stats[0].numel(), sums, sums[0].numel()
        options = {"WRITE_Z": dz is not None, "WRITE_INJECTION": len(more) > (dz is not None)}
        read = [y, injection, z, *douts, *found]
        if len(douts) <= MOST_READERS and takes_pairs("pairs backward", read, self.groups):
            sizes = pair_sizes("pairs backward", y, self.groups)
            with on_device(y):
                _pairs_backward_kernel[(len(y) * self.groups // sizes["BLOCK"],)](
                    _branch(as_pairs, y, injection), _contiguous(mask), as_pairs(z), *affine,
                    affine_sample, tuple(map(as_pairs, douts)), *rest, as_map(dy), more,
                    15, -65536, **options, **sizes, maxnreg=128,
                )  # fmt: skip
            return found
        dout = sum(douts[1:], start=douts[0])
        tile = aligned_tile(TUNING["backward"], y, self.groups)
        with on_device(y):
            _block_end_backward_kernel[(tile.programs(len(y)),)](
                _branch(as_map, y, injection), _contiguous(mask), as_map(z), *affine,
                affine_sample, as_map(dout), *rest, as_map(dy), more, **options, **tile.sizes(),
            )  # fmt: skip
        return found


def _contiguous(mask: Tensor | None) -> tuple[Tensor, ...]:
    """As kernels take it."""
    return () if mask is None else (mask.contiguous(),)


def _present(*maps: Tensor | None) -> list[Tensor]:
    return [x for x in maps if x is not None]


def _branch(form: Callable[[Tensor], Map], y: Tensor, injection: Tensor | None) -> tuple[Map, ...]:
    return tuple(form(x) for x in _present(y, injection))


def takes_pairs(kernel: str, maps: Sequence[Tensor | None], groups: int) -> bool:
    """maps: y first, all that are read or written."""
    y, *others = _present(*maps)
    size, pixels = y.shape[1] // groups, y.shape[2] * y.shape[3]
    whole = power_of_two(pixels) == pixels and power_of_two(size) == size and size >= 4
    fits = whole and pixels * size <= TUNING[kernel].tile
    return fits and all(x.dtype == torch.bfloat16 and in_pairs(x) for x in (y, *others))


def pair_sizes(kernel: str, y: Tensor, groups: int) -> dict[str, int]:
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


# ---- any groups


@jit
def _kept_channels(keeps, at, valid):
    """What the mask leaves of each channel."""
    keep = tl.full(valid.shape, 1.0, tl.float32)
    if len(keeps) > 0:
        keep = tl.load(keeps[0] + at, mask=valid, other=0.0).to(tl.float32)
    return keep


@jit
def _branch_at(source, pixel, channel, mask, MASKED: tl.constexpr):
    """y · mask + injection of a tile.  source: maps of the sample; what is kept of each channel."""
    maps, keep = source[0], source[1]
    branch = read(maps[0], pixel, channel, mask, MASKED) * keep[None, :]
    if len(maps) > 1:
        branch += read(maps[1], pixel, channel, mask, MASKED)
    return branch


@jit
def _total_at(source, pixel, channel, mask, MASKED: tl.constexpr):
    """relu(z + norm₁(branch)) of a tile.  source: that of the branch; z; mean … shift of norm₁."""
    branch = _branch_at(source[0], pixel, channel, mask, MASKED)
    norm = source[2]
    total = normalise(branch, norm[0], norm[1], norm[2], norm[3])
    return rectify(total + read(source[1], pixel, channel, mask, MASKED))


@jit
def _branch_of(maps, keep, sample, UNIT: tl.constexpr):
    found = (of_sample(maps[0], sample, UNIT),)
    if len(maps) > 1:
        found += (of_sample(maps[1], sample, UNIT),)  # type: ignore[assignment]
    return found, keep


@jit
def _block_end_kernel(
    maps, keeps, z, affine1, affine2, affine_sample, out, stats, plane, eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """maps: y and, if there is one, the injection."""
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    z, out = of_sample(z, sample, UNIT), of_sample(out, sample, UNIT)
    keep = _kept_channels(keeps, sample * (GROUPS * CPG) + channel, valid)
    branch = _branch_of(maps, keep, sample, UNIT)
    at = sample * affine_sample + channel
    scale1, shift1 = scale_and_shift(affine1, at, valid)
    scale2, shift2 = scale_and_shift(affine2, at, valid)
    mean1, rho1 = statistics(
        _branch_at, branch, channel, valid, eps, PIXELS, CPG, BLOCK, LANES, COLUMNS, ROWS, MASKED
    )
    source = (branch, z, (mean1, rho1, scale1, shift1))
    mean2, rho2 = statistics(
        _total_at, source, channel, valid, eps, PIXELS, CPG, BLOCK, LANES, COLUMNS, ROWS, MASKED
    )
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        total = _total_at(source, pixel, channel, mask, MASKED)
        write(out, pixel, channel, mask, normalise(total, mean2, rho2, scale2, shift2), MASKED)
    at = sample * GROUPS + group
    keep_statistics(stats, 0, plane, at, mean1, rho1, valid, LANES, COLUMNS)
    keep_statistics(stats, 1, plane, at, mean2, rho2, valid, LANES, COLUMNS)


@jit
def _cotangent(source, norm2, dout, pixel, channel, mask, MASKED: tl.constexpr):
    """x̂ of both norms; where the ReLU between them passes; and g of the second."""
    norm1 = source[2]
    branch = _branch_at(source[0], pixel, channel, mask, MASKED)
    unit1 = (branch - norm1[0][None, :]) * norm1[1][None, :]
    total = unit1 * norm1[2][None, :] + norm1[3][None, :]
    total += read(source[1], pixel, channel, mask, MASKED)
    unit2 = (rectify(total) - norm2[0][None, :]) * norm2[1][None, :]
    g = read(dout, pixel, channel, mask, MASKED)
    return unit1, unit2, total > 0, g


@jit
def _block_end_backward_kernel(
    maps, keeps, z, affine1, affine2, affine_sample, dout, stats, plane, sums, sums_plane, dy, more,
    WRITE_Z: tl.constexpr, WRITE_INJECTION: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """more: the gradients of z and of the injection, those that are written."""
    COUNT: tl.constexpr = PIXELS * CPG
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    keep = _kept_channels(keeps, sample * (GROUPS * CPG) + channel, valid)
    at = sample * affine_sample + channel
    scale1, shift1 = scale_and_shift(affine1, at, valid)
    scale2, _ = scale_and_shift(affine2, at, valid)
    mean1, rho1 = kept_pair(stats, 0, plane, sample * GROUPS + group, valid)
    norm2 = kept_pair(stats, 1, plane, sample * GROUPS + group, valid)
    branch = _branch_of(maps, keep, sample, UNIT)
    source = (branch, of_sample(z, sample, UNIT), (mean1, rho1, scale1, shift1))
    dout, dy = of_sample(dout, sample, UNIT), of_sample(dy, sample, UNIT)
    along = tl.zeros((ROWS, COLUMNS), tl.float32)
    ones = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        unit1, unit2, passes, g = _cotangent(source, norm2, dout, pixel, channel, mask, MASKED)
        along += g * unit2
        ones += g
    dweight2, dbias2 = sums_of(along, ones, False)
    one2, along2 = means_along(dweight2, dbias2, scale2, COUNT, BLOCK, LANES, COLUMNS)
    along = tl.zeros((ROWS, COLUMNS), tl.float32)
    ones = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        unit1, unit2, passes, g = _cotangent(source, norm2, dout, pixel, channel, mask, MASKED)
        g = tl.where(passes, norm_gradient(g, unit2, scale2, norm2[1], one2, along2), 0.0)
        g = only(g, mask, MASKED)
        along += g * unit1
        ones += g
    dweight1, dbias1 = sums_of(along, ones, False)
    one1, along1 = means_along(dweight1, dbias1, scale1, COUNT, BLOCK, LANES, COLUMNS)
    # Nothing was written so far: of a tile with all pixels, nothing is read or computed again.
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        unit1, unit2, passes, g = _cotangent(source, norm2, dout, pixel, channel, mask, MASKED)
        g = tl.where(passes, norm_gradient(g, unit2, scale2, norm2[1], one2, along2), 0.0)
        dbranch = norm_gradient(g, unit1, scale1, rho1, one1, along1)
        if WRITE_Z:
            write(of_sample(more[0], sample, UNIT), pixel, channel, mask, g, MASKED)
        if WRITE_INJECTION:
            to = of_sample(more[len(more) - 1], sample, UNIT)
            write(to, pixel, channel, mask, dbranch, MASKED)
        write(dy, pixel, channel, mask, dbranch * keep[None, :], MASKED)
    at = sample * (GROUPS * CPG) + channel
    keep_pair(sums, 0, sums_plane, at, dweight1, dbias1, valid)
    keep_pair(sums, 1, sums_plane, at, dweight2, dbias2, valid)


# ---- pairs of bfloat16: everything is read once, before anything is computed


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
def _pairs_kernel(
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
def _pairs_backward_kernel(
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
    keep = _kept_channels(keeps, sample * (GROUPS * CPG) + channel, channel >= 0)
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
