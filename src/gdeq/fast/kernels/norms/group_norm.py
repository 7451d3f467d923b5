"""norm_act: group normalisation, then ReLU where asked.

kernels      for                                                   tile
_norm…       all maps; forward and backward of small groups        aligned
the same     half precision, groups that fill vectors together     packed
_fives…      half precision, groups of 5·2ᵏ channels: the          two without a masked column,
             expanded maps of a residual block                     of 4/5 and 1/5 of the columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.affine import Vector, affine_arguments
from gdeq.fast.kernels.norms.operation import Call, Maps, Operation, Vectors
from gdeq.fast.kernels.norms.pieces import (
    high,
    keep_pair,
    keep_statistics,
    kept_pair,
    load_map,
    low,
    means_along,
    norm_gradient,
    normalise,
    of_sample,
    only,
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
from gdeq.fast.kernels.norms.slices import gradient_like
from gdeq.fast.kernels.norms.tensors import (
    Tile,
    Tuning,
    aligned_tile,
    as_map,
    as_pairs,
    at_least_float32,
    deliver,
    in_pairs,
    packed_tile,
    power_of_two,
    room_beside,
)

TUNING = {
    "forward": Tuning(),
    "backward": Tuning(tile=16384, per_thread=32),
    "packed": Tuning(tile=16384, per_thread=32),
    # tile: the largest group, or, backward, the most that a program holds of several.
    "fives": Tuning(tile=32768, per_thread=40),
    "fives backward": Tuning(tile=40960, per_thread=80),
}
FIVES_REGISTERS = 64  # two programs of 16 warps fit an SM


def norm_act_plain(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    room: int = 0,
) -> Tensor:
    wide = at_least_float32(x[:, : x.shape[1] - room])
    # Contiguous: PyTorch 2.13 dies on the CPU for the gradient of the scale alone of a
    # channels-last tensor.
    y = functional.group_norm(wide.contiguous(), groups, None, None, eps)
    y = y if weight is None else y * weight.to(y.dtype)[..., None, None]
    y = y if bias is None else y + bias.to(y.dtype)[..., None, None]
    y = torch.relu(y) if relu else y
    y = functional.pad(y, (0, 0, 0, 0, 0, room)) if room else y
    return deliver(y, out, dtype or x.dtype)


def norm_act(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    room: int = 0,
) -> Tensor:
    """Group normalisation, then ReLU where asked.

    x: (batch, channels, height, width); a slice over the channels of a channels-last tensor is
        taken as it is, anything else is first copied into that order.
    weight, bias: (channels,), or (batch, channels) for each sample its own.
    out: where the result goes, also such a slice; without autograd alone.
    dtype: of the result; the default is x's.
    room: the last channels of x, which are zeros and of no group, and stay zeros; `room_beside` at
        most, and without scale and shift.
    """
    if room and not (weight is bias is None and room <= room_beside(x.shape[1] - room, groups)):
        raise ValueError(f"there is no room for {room} channels beside {x.shape[1] - room}")
    return NormAct(groups, eps, relu, room)((x,), (weight, bias), out, dtype)


@dataclass(frozen=True)
class NormAct(Operation):
    """maps: x."""

    groups: int
    eps: float
    relu: bool
    room: int = 0
    norms = 1

    def plain(self, maps: Maps, vectors: Vectors, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        (x,), (weight, bias) = maps, vectors
        options = self.eps, self.relu, out, dtype, self.room
        return norm_act_plain(x, self.groups, weight, bias, *options)

    def launch(self, call: Call) -> None:
        (x,), out = call.maps, call.out
        affine, affine_sample = affine_arguments(call.vectors)
        rest = call.stats, call.stats[0].numel(), self.eps
        if in_fives([x], self.groups) and affine[0] and out.dtype == x.dtype:
            pixels, size = x.shape[2] * x.shape[3], x.shape[1] // self.groups
            with on_device(x):
                _fives_kernel[(len(x) * self.groups,)](
                    as_pairs(x), affine[0], affine_sample, as_map(out), *rest,
                    PIXELS=pixels, GROUPS=self.groups, Q=size // 5, RELU=self.relu,
                    num_warps=TUNING["fives"].warps(pixels * size), maxnreg=FIVES_REGISTERS,
                )  # fmt: skip
            return
        tile = self.tile("forward", x, out)
        with on_device(x):
            _norm_kernel[(tile.programs(len(x)),)](
                as_map(x, tile.unit), affine[0], affine_sample, as_map(out, tile.unit), *rest,
                RELU=self.relu, ROOM=tile.room, **tile.sizes(),
            )  # fmt: skip

    def launch_backward(
        self, call: Call, douts: Sequence[Tensor], sums: Tensor, wanted: Sequence[bool]
    ) -> list[Vector]:
        ((x,), (dout,)) = call.maps, douts
        dx = gradient_like(x)
        affine, affine_sample = affine_arguments(call.vectors)
        rest = call.stats, call.stats[0].numel(), sums, sums[0].numel()
        brain = x.dtype == dout.dtype == dx.dtype == torch.bfloat16
        if brain and in_fives([x, dout], self.groups) and affine[0]:
            self._launch_fives_backward(x, dout, dx, affine[0], affine_sample, *rest)
            return [dx]
        tile = self.tile("backward", x, dout, dx)
        with on_device(x):
            _norm_backward_kernel[(tile.programs(len(x)),)](
                as_map(x, tile.unit), as_map(dout, tile.unit), affine[0], affine_sample, *rest,
                as_map(dx, tile.unit), RELU=self.relu, ROOM=tile.room, **tile.sizes(),
            )  # fmt: skip
        return [dx]

    def _launch_fives_backward(
        self, x: Tensor, dout: Tensor, dx: Tensor, affine: Vectors, affine_sample: int, *rest: Any
    ) -> None:
        pixels, size = x.shape[2] * x.shape[3], x.shape[1] // self.groups
        block = groups_in_sectors(pixels, size, self.groups)
        numbers = pixels * size * block
        warps = max(4, TUNING["fives backward"].warps(numbers))
        registers = 32 + 8 * (numbers // (32 * warps)) // 5
        with on_device(x):
            _fives_backward_kernel[(len(x) * self.groups // block,)](
                as_pairs(x), as_pairs(dout), affine, affine_sample, *rest, as_map(dx), 15, -65536,
                PIXELS=pixels, GROUPS=self.groups, CPG=size, BLOCK=block, RELU=self.relu,
                num_warps=warps, maxnreg=min(128, max(64, registers)),
            )  # fmt: skip

    def tile(self, kernel: str, x: Tensor, *others: Tensor) -> Tile:
        found = packed_tile(TUNING["packed"], (x, *others), self.groups, self.room)
        return found or aligned_tile(TUNING[kernel], x, self.groups)


def in_fives(maps: Sequence[Tensor], groups: int) -> bool:
    """Whether the kernels for groups of 5q channels take maps, q a power of two."""
    _, channels, height, width = maps[0].shape
    pixels, (q, rest) = height * width, divmod(channels // groups, 5)
    fits = rest == 0 and q >= 2 and power_of_two(q) == q and power_of_two(pixels) == pixels
    return fits and pixels * 5 * q <= TUNING["fives"].tile and all(map(in_pairs, maps))


def groups_in_sectors(pixels: int, size: int, groups: int) -> int:
    """So many that a program reads whole sectors of 32 bytes, if as many fit: 40 bytes, as one
    group of 20 channels has, move 64 through the cache."""
    block, most = 1, TUNING["fives backward"].tile
    while size * block * 2 % 32 and groups % (2 * block) == 0 and 2 * block * pixels * size <= most:
        block *= 2
    return block


# ---- any groups


@jit
def _beside(channel, valid, GROUPS: tl.constexpr, CPG: tl.constexpr, ROOM: tl.constexpr):
    """The columns in memory: those of groups, and of the zeros beside them."""
    inside = valid
    if ROOM > 0:
        inside = channel < GROUPS * CPG + ROOM
    return inside


@jit
def _norm_kernel(
    x, affine, affine_sample, out, stats, plane, eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr, RELU: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    inside = _beside(channel, valid, GROUPS, CPG, ROOM)
    x, out = of_sample(x, sample, UNIT), of_sample(out, sample, UNIT)
    mean, rho = statistics(
        load_map, x, channel, inside, eps, PIXELS, CPG, BLOCK, LANES, COLUMNS, ROWS, MASKED
    )
    scale, shift = scale_and_shift(affine, sample * affine_sample + channel, valid)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, inside, PIXELS, ROWS)
        y = normalise(read(x, pixel, channel, mask, MASKED), mean, rho, scale, shift)
        if RELU:
            y = rectify(y)
        y = only(y, valid[None, :], ROOM > 0)
        write(out, pixel, channel, mask, y, MASKED)
    keep_statistics(stats, 0, plane, sample * GROUPS + group, mean, rho, valid, LANES, COLUMNS)


@jit
def _cotangent(
    x, dy, mean, rho, scale, shift, pixel, channel, mask, MASKED: tl.constexpr, RELU: tl.constexpr
):
    """x̂ and g of one tile; g is 0 where masked."""
    unit = (read(x, pixel, channel, mask, MASKED) - mean[None, :]) * rho[None, :]
    g = read(dy, pixel, channel, mask, MASKED)
    if RELU:
        g = tl.where(unit * scale[None, :] + shift[None, :] > 0, g, 0.0)
    return unit, g


@jit
def _norm_backward_kernel(
    x, dy, affine, affine_sample, stats, plane, sums, sums_plane, dx,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr, RELU: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    sample, channel, group, valid = place(GROUPS, CPG, BLOCK, LANES, COLUMNS)
    inside = _beside(channel, valid, GROUPS, CPG, ROOM)
    x, dy = of_sample(x, sample, UNIT), of_sample(dy, sample, UNIT)
    dx = of_sample(dx, sample, UNIT)
    mean, rho = kept_pair(stats, 0, plane, sample * GROUPS + group, valid)
    scale, shift = scale_and_shift(affine, sample * affine_sample + channel, valid)
    along = tl.zeros((ROWS, COLUMNS), tl.float32)
    ones = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, inside, PIXELS, ROWS)
        unit, g = _cotangent(x, dy, mean, rho, scale, shift, pixel, channel, mask, MASKED, RELU)
        along += g * unit
        ones += g
    dweight, dbias = sums_of(along, ones, UNIT > 1)
    one, unit_along = means_along(dweight, dbias, scale, PIXELS * CPG, BLOCK, LANES, COLUMNS)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, inside, PIXELS, ROWS)
        unit, g = _cotangent(x, dy, mean, rho, scale, shift, pixel, channel, mask, MASKED, RELU)
        g = only(norm_gradient(g, unit, scale, rho, one, unit_along), valid[None, :], ROOM > 0)
        write(dx, pixel, channel, mask, g, MASKED)
    at = sample * (GROUPS * CPG) + channel
    keep_pair(sums, 0, sums_plane, at, dweight, dbias, valid)


# ---- groups of 5q channels: tiles of 4q and of q columns, two numbers in a register


@jit
def _even_odd(vector, at, N: tl.constexpr):
    return tl.split(tl.reshape(tl.load(vector + at + tl.arange(0, N)).to(tl.float32), (N // 2, 2)))


@jit
def _finish(
    out, where, pair, mean, rho, affine, at,
    PIXELS: tl.constexpr, N: tl.constexpr, BRAIN: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    scale0, scale1 = _even_odd(affine[0], at, N)
    shift0, shift1 = _even_odd(affine[1], at, N)
    first = (low(pair, BRAIN) - mean) * (rho * scale0)[None, :] + shift0[None, :]
    second = (high(pair, BRAIN) - mean) * (rho * scale1)[None, :] + shift1[None, :]
    if RELU:  # a NaN stays one
        first = tl.maximum(first, 0.0, propagate_nan=tl.PropagateNan.ALL)
        second = tl.maximum(second, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # Joined before they are rounded: two at once, the instruction for one is slow.
    y = tl.reshape(tl.join(first, second), (PIXELS, N))
    tl.store(out + where, y.to(out.dtype.element_ty))


@jit
def _fives_kernel(
    x, affine, affine_sample, out, stats, plane, eps,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, Q: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """x: pairs.  One group a program, so that two or more programs share an SM."""
    BRAIN: tl.constexpr = out[0].dtype.element_ty == tl.bfloat16
    CPG: tl.constexpr = 5 * Q
    COUNT: tl.constexpr = PIXELS * CPG
    sample, group = program_of(GROUPS)
    x, out = of_sample(x, sample, 1), of_sample(out, sample, 1)
    pairs = x[0] + group * (CPG // 2)
    pixel = tl.arange(0, PIXELS)[:, None]
    a = tl.load(pairs + pixel * x[1] + tl.arange(0, 2 * Q)[None, :])
    b = tl.load(pairs + pixel * x[1] + (2 * Q + tl.arange(0, Q // 2))[None, :])
    sum_a = tl.sum(low(a, BRAIN) + high(a, BRAIN))
    mean = (sum_a + tl.sum(low(b, BRAIN) + high(b, BRAIN))) * (1.0 / COUNT)
    a0, a1 = low(a, BRAIN) - mean, high(a, BRAIN) - mean
    b0, b1 = low(b, BRAIN) - mean, high(b, BRAIN) - mean
    squares = tl.sum(a0 * a0 + a1 * a1) + tl.sum(b0 * b0 + b1 * b1)
    rho = tl.rsqrt(squares * (1.0 / COUNT) + eps)
    tl.store(stats + sample * GROUPS + group, mean)
    tl.store(stats + plane + sample * GROUPS + group, rho)
    at = sample * affine_sample + group * CPG
    to = out[0] + group * CPG
    where = pixel * out[1] + tl.arange(0, 4 * Q)[None, :]
    _finish(to, where, a, mean, rho, affine, at, PIXELS, 4 * Q, BRAIN, RELU)
    where = pixel * out[1] + (4 * Q + tl.arange(0, Q))[None, :]
    _finish(to, where, b, mean, rho, affine, at + 4 * Q, PIXELS, Q, BRAIN, RELU)


@jit
def _spread(values, group, BLOCK: tl.constexpr):
    """For each channel its group's value."""
    spread = tl.broadcast_to(tl.load(values), group.shape)
    for i in tl.static_range(1, BLOCK):
        spread = tl.where(group == i, tl.load(values + i), spread)
    return spread


@jit
def _of_columns(stats, plane, affine, at, group, BLOCK: tl.constexpr):
    """mean, ρ, scale and shift of each column."""
    mean, rho = _spread(stats, group, BLOCK), _spread(stats + plane, group, BLOCK)
    scale, shift = tl.load(affine[0] + at).to(tl.float32), tl.load(affine[1] + at).to(tl.float32)
    return mean, rho, scale, shift


@jit
def _through_relu(off, dy, factor, shift, RELU: tl.constexpr):
    if RELU:
        dy = tl.where(off * factor[None, :] + shift[None, :] > 0, dy, 0.0)
    return dy


@jit
def _tile_sums(x, dy, stats, plane, affine, at, sums, sums_plane, group, BLOCK: tl.constexpr,
               RELU: tl.constexpr):  # fmt: skip
    """Of each column, over the pixels: Σ w g x̂ and Σ w g.  sums: where its own are."""
    mean, rho, scale, shift = _of_columns(stats, plane, affine, at, group, BLOCK)
    off = wide(x, 16, -65536) - mean[None, :]
    g = _through_relu(off, wide(dy, 16, -65536), rho * scale, shift, RELU)
    along_off, one = tl.split(tl.sum(tl.join(g * off, g), axis=0))  # one pass over the warps
    unit = along_off * rho
    tl.store(sums, unit)
    tl.store(sums + sums_plane, one)
    return unit * scale, one * scale


@jit
def _tile_gradient(x, dy, sixteen, upper, stats, plane, affine, at, group, unit, one,
                   BLOCK: tl.constexpr, RELU: tl.constexpr):  # fmt: skip
    mean, rho, scale, shift = _of_columns(stats, plane, affine, at, group, BLOCK)
    factor = rho * scale
    off = wide(x, sixteen, upper) - mean[None, :]
    g = _through_relu(off, wide(dy, sixteen, upper), factor, shift, RELU)
    rest, slope = rho * one, rho * rho * unit
    return g * factor[None, :] - rest[None, :] - off * slope[None, :]


@jit
def _fives_backward_kernel(
    x, dy, affine, affine_sample, stats, plane, sums, sums_plane, dx, fifteen, upper,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """x, dy: pairs of bfloat16, which a program holds from the sums to the end.

    fifteen, upper: 15 and the mask of the upper 16 bits, of which the compiler does not know (see
    `wide`).  So it also reads 8 bytes at a time: a thread has 4 channels to sum and to keep scales
    of, not 8.
    """
    N: tl.constexpr = CPG * BLOCK
    A: tl.constexpr = N // 5 * 4  # columns of the first tile
    B: tl.constexpr = N // 5
    SHARE: tl.constexpr = 1.0 / (PIXELS * CPG)
    sample, block = program_of(GROUPS // BLOCK)
    same = 2 * fifteen - 30
    x, dy, dx = of_sample(x, sample, 1), of_sample(dy, sample, 1), of_sample(dx, sample, 1)
    pixel = tl.arange(0, PIXELS)[:, None]
    pa = block * (N // 2) + same + tl.arange(0, A // 2)[None, :]
    pb = block * (N // 2) + same + A // 2 + tl.arange(0, B // 2)[None, :]
    xa, ya = tl.load(x[0] + pixel * x[1] + pa), tl.load(dy[0] + pixel * dy[1] + pa)
    xb, yb = tl.load(x[0] + pixel * x[1] + pb), tl.load(dy[0] + pixel * dy[1] + pb)
    ca, cb = tl.arange(0, A), A + tl.arange(0, B)
    group_a, group_b = ca // CPG, cb // CPG
    stats += sample * GROUPS + block * BLOCK
    sums += sample * (GROUPS * CPG) + block * N
    at = sample * affine_sample + block * N
    unit_a, one_a = _tile_sums(
        xa, ya, stats, plane, affine, at + ca, sums + ca, sums_plane, group_a, BLOCK, RELU
    )
    unit_b, one_b = _tile_sums(
        xb, yb, stats, plane, affine, at + cb, sums + cb, sums_plane, group_b, BLOCK, RELU
    )
    for i in tl.static_range(BLOCK):
        in_a, in_b = group_a == i, group_b == i
        unit = tl.sum(tl.where(in_a, unit_a, 0.0)) + tl.sum(tl.where(in_b, unit_b, 0.0))
        one = tl.sum(tl.where(in_a, one_a, 0.0)) + tl.sum(tl.where(in_b, one_b, 0.0))
        unit_a, unit_b = tl.where(in_a, unit, unit_a), tl.where(in_b, unit, unit_b)
        one_a, one_b = tl.where(in_a, one, one_a), tl.where(in_b, one, one_b)
    ga = _tile_gradient(
        xa, ya, fifteen + 1, upper, stats, plane, affine, at + ca, group_a,
        unit_a * SHARE, one_a * SHARE, BLOCK, RELU,
    )  # fmt: skip
    to = dx[0] + block * N + 2 * same + pixel * dx[1]
    tl.store(to + ca[None, :], ga.to(dx[0].dtype.element_ty))
    gb = _tile_gradient(
        xb, yb, fifteen + 1, upper, stats, plane, affine, at + cb, group_b,
        unit_b * SHARE, one_b * SHARE, BLOCK, RELU,
    )  # fmt: skip
    tl.store(to + cb[None, :], gb.to(dx[0].dtype.element_ty))
