"""batch_norms: batch normalisation over all samples and pixels, of one map or of the sum of two.

    out = act(Σ_j w_j x̂_j + b_j),  j = 1, or j = 1, 2

A channels-last map is rows × channels numbers without gaps.  It is read as if a row had
L = lcm(channels, 64) numbers, and a program takes 64 columns of these: whole lines of memory, 16
bytes for each thread, for 14 channels as well as for 64.  Column k holds the channel k mod channels
alone, so that sums stay within columns until a second kernel joins the columns of each channel.

    forward    moments   mean and Σ(x − mean)² of the columns of each program
               joined    those of each channel (Chan, Golub, LeVeque 1979); running statistics
               applied   act(Σ (x − mean) ρ w + b)
    backward   sums      Σ g and Σ g (x − mean), g = act′ dout, of the columns of each program
               joined    those of each channel; gradients of scales and shifts
               applied   dx = ρ w (g − mean(g) − x̂ mean(g x̂))

The second and third kernels know how many numbers each program saw from the sizes alone.  The order
of all sums is fixed, so the results repeat bit for bit.
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


def batch_norms_plain(
    sources: Sequence[BatchSource], relu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
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
    return deliver(torch.relu(total) if relu else total, None, dtype or sources[0].x.dtype)


def batch_norms(
    sources: Sequence[BatchSource], relu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of one or two batch norms in training, then ReLU where asked.

    dtype: of the result; the default is that of the first map.
    """
    dtype = dtype or sources[0].x.dtype
    tensors = [t for source in sources for t in (source.x, source.weight, source.bias)]
    buffers = [t for s in sources if s.running is not None for t in (s.running.mean, s.running.var)]
    sizes = {source.x.shape for source in sources}
    first = sources[0].x
    taken = (
        len(sources) <= MOST_SOURCES
        and len(sizes) == 1
        and first.numel() > first.shape[1]  # else PyTorch's error: one number has no variance
        and runs(*tensors, *buffers)
        and all(_is_vector(t, first.shape[1]) for t in (*tensors[1::3], *tensors[2::3]))
        and all(_is_vector(t, len(t)) and t.is_contiguous() for t in buffers)
        and all(len(t) <= first.shape[1] for t in buffers)
    )
    if not taken:
        return batch_norms_plain(sources, relu, dtype)
    if differentiates(*tensors):
        return _Differentiated.apply(sources, relu, dtype, *tensors)
    return _forward(sources, relu, dtype)[0]


def _is_vector(x: Tensor | None, channels: int) -> bool:
    return x is None or x.shape == (channels,)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sources: Sequence[BatchSource], relu: bool, dtype: torch.dtype, *tensors: Vector
    ) -> Tensor:
        out, stats = _forward(sources, relu, dtype)
        ctx.save_for_backward(stats, *tensors)
        ctx.relu, ctx.dtype, ctx.eps = relu, dtype, [source.eps for source in sources]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        stats, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():

            def plain(*tensors: Any) -> Tensor:
                each = zip(tensors[::3], tensors[1::3], tensors[2::3], ctx.eps, strict=True)
                sources = [BatchSource(x, w, b, None, eps) for x, w, b, eps in each]
                return batch_norms_plain(sources, ctx.relu, ctx.dtype)

            return None, None, None, *differentiable(plain, tensors, wanted, dout)
        return None, None, None, *_backward(stats, tensors, dout, ctx.relu, wanted)


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
                *arguments,
                self.total,
                self.channels,
                self.tiles,
                self.each,
                L=self.length,
                EVEN=self.total == self.tiles * self.height * self.length,
                COLUMNS=COLUMNS,
                LANES=LANES,
                ROWS=self.height // LANES,
                **options,
                num_warps=WARPS,
            )

    def join(self, kernel: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        few = self.partials <= 256
        with on_device(like):
            kernel[(self.channels,)](
                *arguments,
                self.total,
                self.channels,
                self.length // self.channels,
                self.each * self.height,
                self.partials,
                MOST=COLUMNS,
                BLOCK=256 if few else 2048,
                **options,
                num_warps=2 if few else 8,
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


def _there(vector: Vector) -> tuple[Tensor, ...]:
    """As kernels take it."""
    return () if vector is None else (vector.contiguous(),)


def _forward(
    sources: Sequence[BatchSource], relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result, and mean, ρ w, shift and ρ of each column of each map, (maps, 4, L)."""
    like = sources[0].x
    maps = [_flat(source.x) for source in sources]
    plan = _plan(like, "moments", 1)
    stats = like.new_empty((len(sources), 4, plan.length), dtype=torch.float32)
    for i, source in enumerate(sources):
        running = source.running
        partials = stats.new_empty((2, plan.channels, plan.partials))
        batches = None if running is None else running.batches
        plan.launch(_moments_kernel, like, maps[i], partials, _there(batches))
        momentum = 0.0 if running is None else running.momentum
        plan.join(
            _join_moments_kernel,
            like,
            partials,
            _there(source.weight),
            _there(source.bias),
            () if running is None else (running.mean, running.var),
            _there(batches if momentum is None else None),
            0 if running is None else len(running.mean),
            0.0 if momentum is None else float(momentum),
            float(source.eps),
            stats[i],
        )
        if running is not None:
            increment_version(running.tensors())
    out = empty_channels_last(like.shape, dtype, like.device)
    plan = _plan(like, "apply", len(sources))
    plan.launch(_apply_kernel, like, tuple(maps), stats, out, RELU=relu)
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
    vectors = stats.new_empty((count, 2, plan.channels))
    slopes = stats.new_empty((count, 2, plan.length))
    plan.launch(_sums_kernel, like, dout, maps, stats, partials, RELU=relu)
    plan.join(_join_sums_kernel, like, partials, stats, vectors, slopes, TWO=count > 1)
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
SIZES = ("channels", "repeats", "tiles", "each", "height", "waiting", "known")


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
def _rows_of(left, column, L: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """How many of its ROWS numbers each lane and column of a tile has, of which ``left`` are left.

    Not the sum of the mask in float32: compiled for an H200 (torch 2.11) that came out too large.
    """
    first = tl.arange(0, LANES)[:, None] * L + column[None, :]
    rows = (tl.maximum(left - first, 0) + (LANES * L - 1)) // (LANES * L)
    return tl.minimum(rows, ROWS).to(tl.float32)


@jit
def _read(base, start, at, mask, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(base + start + at)
    else:
        x = tl.load(base + start + at, mask=mask, other=0.0)
    return x.to(tl.float32)


@jit
def _write(base, start, at, mask, value, EVEN: tl.constexpr):
    value = value.to(base.dtype.element_ty)
    if EVEN:
        tl.store(base + start + at, value)
    else:
        tl.store(base + start + at, value, mask=mask)


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
def _columns(stats, number: tl.constexpr, column, L: tl.constexpr):
    return tl.load(stats + number * L + column)[None, None, :]


@jit(do_not_specialize=SIZES)
def _moments_kernel(
    x, partials, batches, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if len(batches) > 0:  # counted here, since all programs of the next kernel may read it
        one = tl.program_id(0) == 0
        tl.store(batches[0], tl.load(batches[0], mask=one) + 1, mask=one)
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    mean = tl.zeros((LANES, COLUMNS), tl.float32)
    squares = tl.zeros((LANES, COLUMNS), tl.float32)
    seen = tl.zeros((LANES, COLUMNS), tl.float32)
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        tile = _read(x, start, at, mask, EVEN)
        if EVEN:  # the same numbers of rows in all columns
            share = 1 / (i + 1.0)
            before, rows = i * (ROWS * 1.0), ROWS * 1.0
        else:
            new = _rows_of(total - start, column, L, LANES, ROWS)
            share, before = new / tl.maximum(seen + new, 1.0), seen
            rows = tl.maximum(new, 1.0)
            seen += new
        tile_mean = tl.sum(tile, axis=0) / rows
        off = tile - tile_mean[None, :, :]
        if not EVEN:
            off = tl.where(mask, off, 0.0)
        delta = tile_mean - mean
        squares += tl.sum(off * off, axis=0) + delta * (delta * (before * share))
        mean += delta * share
    if EVEN:
        middle = tl.sum(mean, axis=0) * (1.0 / LANES)
        seen += count * ROWS * 1.0
    else:
        middle = tl.sum(seen * mean, axis=0) / tl.maximum(tl.sum(seen, axis=0), 1.0)
    off = mean - middle[None, :]
    spread = tl.sum(squares + off * (off * seen), axis=0)
    where, next_kind = _partial(column, split, channels, L, COLUMNS)
    tl.store(partials + where, middle)
    tl.store(partials + next_kind + where, spread)


@jit
def _counts(number, channel, total, channels, repeats, height, waiting):
    """How many numbers went into the partial sums of these numbers; height: rows of a program."""
    length = channels * repeats
    left = total - (number % repeats * channels + channel)
    rows = tl.where(left > 0, (left - 1) // length + 1, 0)
    rows -= number // repeats * height
    rows = tl.minimum(tl.maximum(rows, 0), height)
    return tl.where(number < waiting, rows, 0).to(tl.float32)


@jit
def _repeat(vector, number: tl.constexpr, value, channel, channels, repeats, MOST: tl.constexpr):
    """A number of a channel, in all its columns of the vector of this number."""
    k = tl.arange(0, MOST)
    where = vector + (number * repeats + k) * channels + channel
    tl.store(where, value + tl.zeros((MOST,), tl.float32), mask=k < repeats)


@jit(do_not_specialize=SIZES)
def _join_moments_kernel(
    partials, weight, bias, running, batches, known, momentum, eps, stats,
    total, channels, repeats, height, waiting,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight, bias, running mean and variance, batches: none or one.  Of more batches, the mean."""
    channel = tl.program_id(0)
    means = partials + channel * waiting
    spreads = means + channels * waiting
    amount = (total // channels).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, waiting, BLOCK):
        i = start + tl.arange(0, BLOCK)
        n = _counts(i, channel, total, channels, repeats, height, waiting)
        part += n * tl.load(means + i, mask=i < waiting, other=0.0)
    mean = tl.sum(part) / amount
    part = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, waiting, BLOCK):
        i = start + tl.arange(0, BLOCK)
        n = _counts(i, channel, total, channels, repeats, height, waiting)
        off = tl.load(means + i, mask=i < waiting, other=0.0) - mean
        spread = tl.load(spreads + i, mask=i < waiting, other=0.0)
        part += spread + tl.where(n > 0, off * (off * n), 0.0)
    squares = tl.sum(part)
    rho = tl.rsqrt(squares / amount + eps)
    factor = rho
    if len(weight) > 0:
        factor = rho * tl.load(weight[0] + channel).to(tl.float32)
    shift = rho * 0.0
    if len(bias) > 0:
        shift = tl.load(bias[0] + channel).to(tl.float32)
    _repeat(stats, 0, mean, channel, channels, repeats, MOST)
    _repeat(stats, 1, factor, channel, channels, repeats, MOST)
    _repeat(stats, 2, shift, channel, channels, repeats, MOST)
    _repeat(stats, 3, rho, channel, channels, repeats, MOST)
    if len(running) > 0:
        share = momentum
        if len(batches) > 0:
            share = 1.0 / tl.load(batches[0]).to(tl.float32)
        _move(running[0] + channel, mean, share, channel < known)
        _move(running[1] + channel, squares / (amount - 1), share, channel < known)


@jit
def _move(where, value, share, mine):
    old = tl.load(where, mask=mine, other=0.0).to(tl.float32)
    new = (1 - share) * old + share * value
    tl.store(where, new.to(where.dtype.element_ty), mask=mine)


@jit
def _norms_of(stats, column, L: tl.constexpr, TWO: tl.constexpr):
    """Of each column: the maps' mean and ρ w, one after the other, and the sum of the shifts."""
    norms = (_columns(stats, 0, column, L), _columns(stats, 1, column, L))
    shift = _columns(stats, 2, column, L)
    if TWO:
        other = (_columns(stats, 4, column, L), _columns(stats, 5, column, L))
        norms += other  # type: ignore[assignment]
        shift += _columns(stats, 6, column, L)
    return norms, shift


@jit
def _offs(maps, norms, shift, start, at, mask, EVEN: tl.constexpr):
    """x − mean of each map, and the sum of the norms."""
    offs = (_read(maps[0], start, at, mask, EVEN) - norms[0],)
    y = offs[0] * norms[1] + shift
    if len(maps) > 1:
        other = _read(maps[1], start, at, mask, EVEN) - norms[2]
        offs += (other,)  # type: ignore[assignment]
        y += other * norms[3]
    return offs, y


@jit(do_not_specialize=SIZES)
def _apply_kernel(
    maps, stats, out, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, L, len(maps) > 1)
    for i in range(0, count):
        # Backwards: what `_moments_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        _offsets, y = _offs(maps, norms, shift, start, at, mask, EVEN)
        if RELU:
            y = rectify(y)
        _write(out, start, at, mask, y, EVEN)


@jit(do_not_specialize=SIZES)
def _sums_kernel(
    dout, maps, stats, partials, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, L, len(maps) > 1)
    ones = tl.zeros((LANES, COLUMNS), tl.float32)
    along = tl.zeros((LANES, COLUMNS), tl.float32)
    other = tl.zeros((LANES, COLUMNS), tl.float32)
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        g = _read(dout, start, at, mask, EVEN)
        offs, y = _offs(maps, norms, shift, start, at, mask, EVEN)
        if RELU:
            g = tl.where(y <= 0, 0.0, g)
        ones += tl.sum(g, axis=0)
        along += tl.sum(g * offs[0], axis=0)
        if len(maps) > 1:
            other += tl.sum(g * offs[1], axis=0)
    where, next_kind = _partial(column, split, channels, L, COLUMNS)
    tl.store(partials + where, tl.sum(ones, axis=0))
    tl.store(partials + next_kind + where, tl.sum(along, axis=0))
    if len(maps) > 1:
        tl.store(partials + 2 * next_kind + where, tl.sum(other, axis=0))


@jit
def _total(base, waiting, BLOCK: tl.constexpr):
    part = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, waiting, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part += tl.load(base + i, mask=i < waiting, other=0.0)
    return tl.sum(part)


@jit
def _gradients(
    ones, along, stats, vectors, slopes, channel, amount, channels, repeats, MOST: tl.constexpr
):
    """Of scale and shift; and a, b of dx = ρ w g − a − (x − mean) b, in all columns."""
    length = channels * repeats
    factor, rho = tl.load(stats + length + channel), tl.load(stats + 3 * length + channel)
    tl.store(vectors + channel, along * rho)
    tl.store(vectors + channels + channel, ones)
    a, b = factor * (ones / amount), factor * (along * rho / amount) * rho
    _repeat(slopes, 0, a, channel, channels, repeats, MOST)
    _repeat(slopes, 1, b, channel, channels, repeats, MOST)


@jit(do_not_specialize=SIZES)
def _join_sums_kernel(
    partials, stats, vectors, slopes, total, channels, repeats, height, waiting,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    amount = (total // channels).to(tl.float32)
    partials += channel * waiting
    ones = _total(partials, waiting, BLOCK)
    along = _total(partials + channels * waiting, waiting, BLOCK)
    _gradients(ones, along, stats, vectors, slopes, channel, amount, channels, repeats, MOST)
    if TWO:
        along = _total(partials + 2 * channels * waiting, waiting, BLOCK)
        stats += 4 * channels * repeats
        vectors += 2 * channels
        slopes += 2 * channels * repeats
        _gradients(ones, along, stats, vectors, slopes, channel, amount, channels, repeats, MOST)


@jit(do_not_specialize=SIZES)
def _apply_backward_kernel(
    dout, maps, stats, slopes, gradients, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    norms, shift = _norms_of(stats, column, L, len(maps) > 1)
    a, b = _columns(slopes, 0, column, L), _columns(slopes, 1, column, L)
    if len(maps) > 1:
        other_a, other_b = _columns(slopes, 2, column, L), _columns(slopes, 3, column, L)
    for i in range(0, count):
        # Backwards: what `_sums_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        g = _read(dout, start, at, mask, EVEN)
        offs, y = _offs(maps, norms, shift, start, at, mask, EVEN)
        if RELU:
            g = tl.where(y <= 0, 0.0, g)
        _write(gradients[0], start, at, mask, g * norms[1] - a - offs[0] * b, EVEN)
        if len(maps) > 1:
            value = g * norms[3] - other_a - offs[1] * other_b
            _write(gradients[1], start, at, mask, value, EVEN)
