"""batch_norms: batch normalisation over all samples and pixels, of one map or of the sum of two.

    out = act(Σ_j w_j x̂_j + b_j),  j = 1, or j = 1, 2

A channels-last map is rows × channels numbers without gaps.  It is read as if a row had
L = lcm(channels, 64) numbers, and a program takes 64 columns of these: whole lines of memory, 16
bytes for each thread, for 14 channels as well as for 64.  Column k holds the channel k mod channels
alone, so that sums stay within columns until a second kernel joins the columns of each channel.

    forward    moments   Σ (x − p) and Σ (x − p)² of the columns of each program
               joined    mean and ρ of each channel; running statistics
               applied   act(Σ (x − mean) ρ w + b)
    backward   sums      Σ g and Σ g (x − mean), g = act′ dout, of the columns of each program
               joined    those of each channel; gradients of scales and shifts
               applied   dx = ρ w (g − mean(g) − x̂ mean(g x̂))

The pivot p of a channel is its first number.  (mean − p)² is about the variance then, so that the
difference of the sums loses few digits.  The order of all sums is fixed: results repeat bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional

from gdeq.fast.kernels.autograd import differentiable, differentiates
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.affine import Vector
from gdeq.fast.kernels.norms.pieces import rectify
from gdeq.fast.kernels.norms.tensors import at_least_float32, deliver, empty_channels_last, runs

COLUMNS = 64  # of a program: 8 threads, 16 bytes of half precision each
LANES = 16  # rows that the other threads of 4 warps take at once
WARPS = 4
MOST_SOURCES = 2
JOINED = 1024  # partial sums that are read at once


@dataclass
class Tuning:
    """rows: of a thread in one tile; it reads all of them before it uses the first.
    programs: at most so many; an SM of an H200 has registers for 1 / 132 of them.
    """

    rows: int
    programs: int


# One entry for each kernel and number of maps.
TUNING = {
    ("moments", 1): Tuning(rows=4, programs=10 * 132),
    ("apply", 1): Tuning(rows=4, programs=10 * 132),
    ("apply", 2): Tuning(rows=2, programs=8 * 132),
    ("sums", 1): Tuning(rows=2, programs=7 * 132),
    ("sums", 2): Tuning(rows=2, programs=4 * 132),
    ("apply_backward", 1): Tuning(rows=2, programs=8 * 132),
    ("apply_backward", 2): Tuning(rows=2, programs=4 * 132),
}


@dataclass(frozen=True)
class Running:
    """The buffers of an nn.BatchNorm2d in training, which each evaluation moves.

    Of the first channels, if they are shorter: the others are zeros without a norm of their own.
    """

    mean: Tensor  # (channels,)
    var: Tensor  # (channels,), unbiased
    batches: Tensor | None  # (), how many so far
    momentum: float | None  # None: the mean of all batches

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.mean, self.var, self.batches) if t is not None]


@dataclass(frozen=True)
class BatchSource:
    """A map before its norm.  x: (batch, channels, height, width); weight, bias: (channels,)."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running: Running | None = None
    eps: float = 1e-5


def batch_norms_plain(sources: Sequence[BatchSource], relu: bool = False) -> Tensor:
    total: Any = 0
    for source in sources:
        wide = at_least_float32(source.x)
        scale = None if source.weight is None else source.weight.to(wide.dtype)
        shift = None if source.bias is None else source.bias.to(wide.dtype)
        running, share = source.running, 0.0
        if running is not None:
            if running.batches is not None:
                running.batches.add_(1)
            if running.momentum is not None:
                share = running.momentum
            elif running.batches is not None:
                share = 1.0 / float(running.batches)
        mean, var = (None, None) if running is None else (running.mean, running.var)
        known = wide if mean is None else wide[:, : len(mean)]
        norm = functional.batch_norm(known, mean, var, scale, shift, True, share, source.eps)
        if norm.shape != wide.shape:
            norm = functional.pad(norm, (0, 0, 0, 0, 0, wide.shape[1] - norm.shape[1]))
        total = total + norm
    return deliver(torch.relu(total) if relu else total, None, sources[0].x.dtype)


def batch_norms(sources: Sequence[BatchSource], relu: bool = False) -> Tensor:
    """The sum of one or two batch norms in training, then ReLU where asked.

    The result has the dtype of the first map.
    """
    tensors = [t for source in sources for t in (source.x, source.weight, source.bias)]
    if not _takes(sources, tensors):
        return batch_norms_plain(sources, relu)
    if differentiates(*tensors):
        return _Differentiated.apply(sources, relu, *tensors)
    return _forward(sources, relu)[0]


def _takes(sources: Sequence[BatchSource], tensors: Sequence[Vector]) -> bool:
    first, runnings = sources[0].x, [s.running for s in sources if s.running is not None]
    channels, buffers = first.shape[1], [t for r in runnings for t in (r.mean, r.var)]
    return (
        len(sources) <= MOST_SOURCES
        and len({source.x.shape for source in sources}) == 1
        and first.numel() > channels  # else PyTorch's error: one number has no variance
        and runs(*tensors, *buffers)
        and all((s.weight is None) == (s.bias is None) for s in sources)
        and all(t is None or t.shape == (channels,) for t in (*tensors[1::3], *tensors[2::3]))
        and all(t.dim() == 1 and t.is_contiguous() and len(t) <= channels for t in buffers)
        and all(running.momentum is not None for running in runnings)
    )


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sources: Sequence[BatchSource], relu: bool, *tensors: Vector) -> Tensor:
        out, stats = _forward(sources, relu)
        ctx.save_for_backward(stats, *tensors)
        ctx.relu, ctx.eps = relu, [source.eps for source in sources]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        stats, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():

            def plain(*tensors: Any) -> Tensor:
                each = zip(tensors[::3], tensors[1::3], tensors[2::3], ctx.eps, strict=True)
                sources = [BatchSource(x, w, b, None, eps) for x, w, b, eps in each]
                return batch_norms_plain(sources, ctx.relu)

            return None, None, *differentiable(plain, tensors, wanted, dout)
        return None, None, *_backward(stats, tensors, dout, ctx.relu, wanted)


# ---- launches


@dataclass(frozen=True)
class _Plan:
    """How the maps of this shape are divided.

    length: L.  tiles: of `height` rows of L numbers; each program takes `each` of them, or fewer.
    """

    total: int
    channels: int
    length: int
    height: int
    tiles: int
    each: int

    @property
    def splits(self) -> int:
        return -(-self.tiles // self.each)

    @property
    def partials(self) -> int:
        """Sums of one channel that wait to be joined."""
        return self.splits * (self.length // self.channels)

    def launch(self, kernel: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        with on_device(like):
            kernel[(self.splits * (self.length // COLUMNS),)](
                *arguments, self.total, self.channels, self.tiles, self.each,
                L=self.length, COLUMNS=COLUMNS, LANES=LANES, ROWS=self.height // LANES,
                **options, num_warps=WARPS,
            )  # fmt: skip

    def join(self, kernel: Any, like: Tensor, *arguments: Any) -> None:
        with on_device(like):
            kernel[(self.channels,)](
                *arguments, self.total, self.channels, self.partials, BLOCK=JOINED, num_warps=WARPS
            )


def _plan(like: Tensor, kernel: str, sources: int) -> _Plan:
    tuning = TUNING[kernel, sources]
    channels = like.shape[1]
    length = math.lcm(channels, COLUMNS)
    height = LANES * tuning.rows
    tiles = -(-like.numel() // (length * height))
    each = -(-tiles // max(1, tuning.programs // (length // COLUMNS)))
    return _Plan(like.numel(), channels, length, height, tiles, each)


def _flat(x: Tensor) -> Tensor:  # (batch, height, width, channels)
    return x.permute(0, 2, 3, 1).contiguous()


def _forward(sources: Sequence[BatchSource], relu: bool) -> tuple[Tensor, Tensor]:
    """The result, and mean, ρ w, shift and ρ of each channel of each map, (maps, 4, channels)."""
    like = sources[0].x
    maps = tuple(_flat(source.x) for source in sources)
    plan = _plan(like, "moments", 1)
    stats = like.new_empty((len(sources), 4, plan.channels), dtype=torch.float32)
    for x, source, own in zip(maps, sources, stats, strict=True):
        running = source.running
        partials = stats.new_empty((2, plan.channels, plan.partials))
        plan.launch(_moments_kernel, like, x, partials)
        affine = () if source.weight is None or source.bias is None else (
            source.weight.contiguous(), source.bias.contiguous()
        )  # fmt: skip
        moved = () if running is None else tuple(running.tensors())
        known, momentum = (0, 0.0) if running is None else (len(running.mean), running.momentum)
        plan.join(
            _join_moments_kernel, like, x, partials, affine, moved, known, momentum, source.eps, own
        )
        if running is not None:
            increment_version(running.tensors())
    out = empty_channels_last(like.shape, like.dtype, like.device)
    plan = _plan(like, "apply", len(sources))
    plan.launch(_apply_kernel, like, maps, stats, out, RELU=relu)
    return out, stats


def _backward(
    stats: Tensor, tensors: Sequence[Any], dout: Tensor, relu: bool, wanted: Sequence[bool]
) -> list[Vector]:
    like = tensors[0]
    maps = tuple(_flat(x) for x in tensors[::3])
    dout = _flat(dout)
    count = len(maps)
    plan = _plan(like, "sums", count)
    partials = stats.new_empty((1 + count, plan.channels, plan.partials))
    # Of each map and channel: gradients of scale and shift, and what `_apply_backward_kernel` takes
    vectors, slopes = stats.new_empty((2, count, 2, plan.channels))
    plan.launch(_sums_kernel, like, dout, maps, stats, partials, RELU=relu)
    for i in range(count):
        own = partials[:1], partials[1 + i], stats[i], vectors[i], slopes[i]
        plan.join(_join_sums_kernel, like, *own)
    found: list[Vector] = [None] * len(tensors)
    for i in range(count):
        for k in (1, 2):
            if wanted[3 * i + k]:
                found[3 * i + k] = vectors[i, k - 1].to(tensors[3 * i + k].dtype)
    if any(wanted[::3]):
        made = [empty_channels_last(x.shape, x.dtype, x.device) for x in tensors[::3]]
        plan = _plan(like, "apply_backward", count)
        given = dout, maps, stats, slopes, tuple(made)
        plan.launch(_apply_backward_kernel, like, *given, RELU=relu)
        found[::3] = made
    return found


# ---- kernels

# One kernel for all of them; `total` is one for multiples of 16 and one for the rest.
SIZES = ("channels", "tiles", "each", "waiting", "known")


@jit
def _work(tiles, each, L: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's number among those of the same columns, these, its first tile, how many."""
    BLOCKS: tl.constexpr = L // COLUMNS
    split = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    first = split * each
    return split, column, first, tl.minimum(tiles - first, each)


@jit
def _tile(number, total, column, L: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile starts, its numbers from there, and which of them there are.

    (ROWS, LANES, COLUMNS): a thread has all ROWS of its lane and columns.
    """
    start = number.to(tl.int64) * (ROWS * LANES * L)
    row = tl.arange(0, ROWS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    at = row * L + column[None, None, :]
    return start, at, at < total - start


@jit
def _read(base, start, at, mask):
    return tl.load(base + start + at, mask=mask, other=0.0).to(tl.float32)


@jit
def _write(base, start, at, mask, value):
    tl.store(base + start + at, value.to(base.dtype.element_ty), mask=mask)


@jit
def _partial(column, split, channels, L: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the sum of a column goes, and how far from there those of the next kind are.

    The sums of a channel lie together.
    """
    repeats = L // channels
    waiting = tl.num_programs(0) // (L // COLUMNS) * repeats
    where = (column % channels) * waiting + split * repeats + column // channels
    return where, channels * waiting


@jit
def _total(base, waiting, BLOCK: tl.constexpr):
    part = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, waiting, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part += tl.load(base + i, mask=i < waiting, other=0.0)
    return tl.sum(part)


@jit(do_not_specialize=SIZES)
def _moments_kernel(
    x, partials, total, channels, tiles, each,
    L: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    pivot = tl.load(x + column % channels).to(tl.float32)[None, None, :]
    one = tl.zeros((LANES, COLUMNS), tl.float32)
    two = tl.zeros((LANES, COLUMNS), tl.float32)
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        off = tl.where(mask, _read(x, start, at, mask) - pivot, 0.0)
        one += tl.sum(off, axis=0)
        two += tl.sum(off * off, axis=0)
    where, next_kind = _partial(column, split, channels, L, COLUMNS)
    tl.store(partials + where, tl.sum(one, axis=0))
    tl.store(partials + next_kind + where, tl.sum(two, axis=0))


@jit(do_not_specialize=SIZES)
def _join_moments_kernel(
    x, partials, affine, running, known, momentum, eps, stats, total, channels, waiting,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """affine: none, or scale and shift.  running: none, or mean, variance and maybe a count."""
    channel = tl.program_id(0)
    amount = (total // channels).to(tl.float32)
    delta = _total(partials + channel * waiting, waiting, BLOCK) / amount
    squares = _total(partials + (channels + channel) * waiting, waiting, BLOCK) / amount
    mean = tl.load(x + channel).to(tl.float32) + delta
    variance = squares - delta * delta
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays
    rho = tl.rsqrt(variance + eps)
    factor, shift = rho, rho * 0.0
    if len(affine) > 0:
        factor = rho * tl.load(affine[0] + channel).to(tl.float32)
        shift = tl.load(affine[1] + channel).to(tl.float32)
    tl.store(stats + channel, mean)
    tl.store(stats + channels + channel, factor)
    tl.store(stats + 2 * channels + channel, shift)
    tl.store(stats + 3 * channels + channel, rho)
    if len(running) > 0:
        _move(running[0] + channel, mean, momentum, channel < known)
        _move(running[1] + channel, variance * (amount / (amount - 1)), momentum, channel < known)
    if len(running) > 2:
        one = channel == 0
        tl.store(running[2], tl.load(running[2], mask=one) + 1, mask=one)


@jit
def _move(where, value, share, mine):
    old = tl.load(where, mask=mine, other=0.0).to(tl.float32)
    new = (1 - share) * old + share * value
    tl.store(where, new.to(where.dtype.element_ty), mask=mine)


@jit
def _norms_of(stats, column, channels, MAPS: tl.constexpr):
    """Of each column: mean and ρ w of each map, and the sum of the shifts."""
    norms, shift = (), tl.zeros_like(column).to(tl.float32)
    for j in tl.static_range(MAPS):
        own = stats + j * 4 * channels + column % channels
        mean, factor = tl.load(own)[None, None, :], tl.load(own + channels)[None, None, :]
        norms += ((mean, factor),)  # type: ignore[assignment]
        shift += tl.load(own + 2 * channels)
    return norms, shift[None, None, :]


@jit
def _offs(maps, norms, shift, start, at, mask):
    """x − mean of each map, and the sum of the norms."""
    offs, y = (), shift
    for j in tl.static_range(len(maps)):
        off = _read(maps[j], start, at, mask) - norms[j][0]
        offs += (off,)  # type: ignore[assignment]
        y = y + off * norms[j][1]
    return offs, y


@jit(do_not_specialize=SIZES)
def _apply_kernel(
    maps, stats, out, total, channels, tiles, each,
    L: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, channels, len(maps))
    for i in range(0, count):
        # Backwards: what `_moments_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        _offsets, y = _offs(maps, norms, shift, start, at, mask)
        if RELU:
            y = rectify(y)
        _write(out, start, at, mask, y)


@jit
def _cotangent(dout, y, start, at, mask, RELU: tl.constexpr):
    g = _read(dout, start, at, mask)
    if RELU:
        g = tl.where(y <= 0, 0.0, g)
    return g


@jit(do_not_specialize=SIZES)
def _sums_kernel(
    dout, maps, stats, partials, total, channels, tiles, each,
    L: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, channels, len(maps))
    sums = (tl.zeros((LANES, COLUMNS), tl.float32),)
    for _ in tl.static_range(len(maps)):
        sums += (tl.zeros((LANES, COLUMNS), tl.float32),)  # type: ignore[assignment]
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        offs, y = _offs(maps, norms, shift, start, at, mask)
        g = _cotangent(dout, y, start, at, mask, RELU)
        added = (sums[0] + tl.sum(g, axis=0),)
        for j in tl.static_range(len(maps)):
            added += (sums[j + 1] + tl.sum(g * offs[j], axis=0),)  # type: ignore[assignment]
        sums = added
    where, next_kind = _partial(column, split, channels, L, COLUMNS)
    for j in tl.static_range(len(maps) + 1):
        tl.store(partials + j * next_kind + where, tl.sum(sums[j], axis=0))


@jit(do_not_specialize=SIZES)
def _join_sums_kernel(
    ones, alongs, stats, vectors, slopes, total, channels, waiting, BLOCK: tl.constexpr
):
    """Gradients of scale and shift; and a, b of dx = ρ w g − a − (x − mean) b: of one map."""
    channel = tl.program_id(0)
    amount = (total // channels).to(tl.float32)
    one = _total(ones + channel * waiting, waiting, BLOCK)
    along = _total(alongs + channel * waiting, waiting, BLOCK)
    factor, rho = tl.load(stats + channels + channel), tl.load(stats + 3 * channels + channel)
    tl.store(vectors + channel, along * rho)
    tl.store(vectors + channels + channel, one)
    tl.store(slopes + channel, factor * (one / amount))
    tl.store(slopes + channels + channel, factor * (along * rho / amount) * rho)


@jit(do_not_specialize=SIZES)
def _apply_backward_kernel(
    dout, maps, stats, slopes, gradients, total, channels, tiles, each,
    L: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, channels, len(maps))
    slope = slopes + column % channels
    for i in range(0, count):
        # Backwards: what `_sums_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        offs, y = _offs(maps, norms, shift, start, at, mask)
        g = _cotangent(dout, y, start, at, mask, RELU)
        for j in tl.static_range(len(maps)):
            a = tl.load(slope + 2 * j * channels)[None, None, :]
            b = tl.load(slope + (2 * j + 1) * channels)[None, None, :]
            _write(gradients[j], start, at, mask, g * norms[j][1] - a - offs[j] * b)
