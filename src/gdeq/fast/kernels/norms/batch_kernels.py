"""The six kernels of `gdeq.fast.kernels.norms.batch`, which says what each is for."""

from __future__ import annotations

from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.pieces import rectify

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
def moments_kernel(
    x, partials, batches, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    if COUNTED:  # here, since all programs of the next kernel may read it
        one = tl.program_id(0) == 0
        tl.store(batches, tl.load(batches, mask=one) + 1, mask=one)
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    mean = tl.zeros((LANES, COLUMNS), tl.float32)
    squares = tl.zeros((LANES, COLUMNS), tl.float32)
    seen = tl.zeros((LANES, COLUMNS), tl.float32)
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        tile = _read(x, start, at, mask, EVEN)
        if EVEN:
            share = 1 / (i + 1.0)
            tile_mean = tl.sum(tile, axis=0) * (1.0 / ROWS)
            off = tile - tile_mean[None, :, :]
            delta = tile_mean - mean
            squares += tl.sum(off * off, axis=0) + delta * (delta * (i * ROWS * share))
            mean += delta * share
        else:
            new = _rows_of(total - start, column, L, LANES, ROWS)
            share = new / tl.maximum(seen + new, 1.0)
            tile_mean = tl.sum(tile, axis=0) / tl.maximum(new, 1.0)
            off = tl.where(mask, tile - tile_mean[None, :, :], 0.0)
            delta = tile_mean - mean
            squares += tl.sum(off * off, axis=0) + delta * (delta * (seen * share))
            mean += delta * share
            seen += new
    if EVEN:
        middle = tl.sum(mean, axis=0) * (1.0 / LANES)
        off = mean - middle[None, :]
        spread = tl.sum(squares + off * (off * (count * ROWS * 1.0)), axis=0)
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
def join_moments_kernel(
    partials, weight, bias, running_mean, running_var, batches, known, momentum, eps, stats,
    total, channels, repeats, height, waiting,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr,
    RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
):  # fmt: skip
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
    if SCALED:
        factor = rho * tl.load(weight + channel).to(tl.float32)
    shift = rho * 0.0
    if SHIFTED:
        shift = tl.load(bias + channel).to(tl.float32)
    _repeat(stats, 0, mean, channel, channels, repeats, MOST)
    _repeat(stats, 1, factor, channel, channels, repeats, MOST)
    _repeat(stats, 2, shift, channel, channels, repeats, MOST)
    _repeat(stats, 3, rho, channel, channels, repeats, MOST)
    if RUNNING:
        mine = channel < known
        share = momentum
        if CUMULATIVE:
            share = 1.0 / tl.load(batches).to(tl.float32)
        old = tl.load(running_mean + channel, mask=mine, other=0.0).to(tl.float32)
        new = (1 - share) * old + share * mean
        tl.store(running_mean + channel, new.to(running_mean.dtype.element_ty), mask=mine)
        old = tl.load(running_var + channel, mask=mine, other=0.0).to(tl.float32)
        new = (1 - share) * old + share * (squares / (amount - 1))
        tl.store(running_var + channel, new.to(running_var.dtype.element_ty), mask=mine)


@jit(do_not_specialize=SIZES)
def apply_kernel(
    x, other, stats, out, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    TWO: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    mean, factor = _columns(stats, 0, column, L), _columns(stats, 1, column, L)
    shift = _columns(stats, 2, column, L)
    if TWO:
        other_mean, other_factor = _columns(stats, 4, column, L), _columns(stats, 5, column, L)
        shift += _columns(stats, 6, column, L)
    for i in range(0, count):
        # Backwards: what `moments_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        y = (_read(x, start, at, mask, EVEN) - mean) * factor + shift
        if TWO:
            y += (_read(other, start, at, mask, EVEN) - other_mean) * other_factor
        if RELU:
            y = rectify(y)
        _write(out, start, at, mask, y, EVEN)


@jit(do_not_specialize=SIZES)
def sums_kernel(
    dout, x, other, stats, partials, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    TWO: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    split, column, first, count = _work(tiles, each, L, COLUMNS)
    mean, factor = _columns(stats, 0, column, L), _columns(stats, 1, column, L)
    shift = _columns(stats, 2, column, L)
    ones = tl.zeros((LANES, COLUMNS), tl.float32)
    along = tl.zeros((LANES, COLUMNS), tl.float32)
    if TWO:
        other_mean, other_factor = _columns(stats, 4, column, L), _columns(stats, 5, column, L)
        shift += _columns(stats, 6, column, L)
        other_along = tl.zeros((LANES, COLUMNS), tl.float32)
    for i in range(0, count):
        start, at, mask = _tile(first + i, total, column, L, LANES, ROWS)
        g = _read(dout, start, at, mask, EVEN)
        off = _read(x, start, at, mask, EVEN) - mean
        y = off * factor + shift
        if TWO:
            other_off = _read(other, start, at, mask, EVEN) - other_mean
            y += other_off * other_factor
        if RELU:
            g = tl.where(y <= 0, 0.0, g)
        ones += tl.sum(g, axis=0)
        along += tl.sum(g * off, axis=0)
        if TWO:
            other_along += tl.sum(g * other_off, axis=0)
    where, next_kind = _partial(column, split, channels, L, COLUMNS)
    tl.store(partials + where, tl.sum(ones, axis=0))
    tl.store(partials + next_kind + where, tl.sum(along, axis=0))
    if TWO:
        tl.store(partials + 2 * next_kind + where, tl.sum(other_along, axis=0))


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
def join_sums_kernel(
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
def apply_backward_kernel(
    dout, x, other, stats, slopes, dx, other_dx, total, channels, tiles, each,
    L: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    TWO: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    _, column, first, count = _work(tiles, each, L, COLUMNS)
    mean, factor = _columns(stats, 0, column, L), _columns(stats, 1, column, L)
    shift = _columns(stats, 2, column, L)
    a, b = _columns(slopes, 0, column, L), _columns(slopes, 1, column, L)
    if TWO:
        other_mean, other_factor = _columns(stats, 4, column, L), _columns(stats, 5, column, L)
        shift += _columns(stats, 6, column, L)
        other_a, other_b = _columns(slopes, 2, column, L), _columns(slopes, 3, column, L)
    for i in range(0, count):
        # Backwards: what `sums_kernel` read last is still in the cache.
        start, at, mask = _tile(first + count - 1 - i, total, column, L, LANES, ROWS)
        g = _read(dout, start, at, mask, EVEN)
        off = _read(x, start, at, mask, EVEN) - mean
        y = off * factor + shift
        if TWO:
            other_off = _read(other, start, at, mask, EVEN) - other_mean
            y += other_off * other_factor
        if RELU:
            g = tl.where(y <= 0, 0.0, g)
        _write(dx, start, at, mask, g * factor - a - off * b, EVEN)
        if TWO:
            value = g * other_factor - other_a - other_off * other_b
            _write(other_dx, start, at, mask, value, EVEN)
