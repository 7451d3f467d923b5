"""Pieces of the norms' kernels, which work on tiles of (pixels of one sample) × (columns).

The columns are channels of BLOCK groups of CPG channels (`gdeq.fast.kernels.norms.tensors.Tile`).
A map is a tuple: memory, stride of samples, stride of pixels.  All arithmetic is float32.
"""

from __future__ import annotations

from gdeq.fast.kernels.jit import jit, tl

# ---- what a program works on


@jit
def program_of(PROGRAMS: tl.constexpr):
    """The program's sample, and which of so many programs of the sample it is.

    They go backwards: what the operation before wrote last is still in the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return (program // PROGRAMS).to(tl.int64), program % PROGRAMS


@jit
def place(
    GROUPS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The program's sample; of each column the channel, the group, and whether there is one."""
    sample, block = program_of(GROUPS // BLOCK)
    column = tl.arange(0, COLUMNS)
    channel = column
    valid = column < BLOCK * CPG
    if LANES != CPG:
        channel = column // LANES * CPG + column % LANES
        valid = column % LANES < CPG
    return sample, block * (BLOCK * CPG) + channel, block * BLOCK + column // LANES, valid


@jit
def of_sample(x, sample, UNIT: tl.constexpr):
    """A map from this sample on: memory, stride of pixels."""
    return x[0] + sample * (x[1] * UNIT), x[2] * UNIT


@jit
def rows_from(start, inside, PIXELS: tl.constexpr, ROWS: tl.constexpr):
    """The pixels of a tile's rows, and which of its numbers there are."""
    pixel = start + tl.arange(0, ROWS)
    return pixel, (pixel < PIXELS)[:, None] & inside[None, :]


@jit
def read(x, pixel, channel, mask, MASKED: tl.constexpr):
    """x: of `of_sample`.  Without a mask, whole vectors."""
    where = x[0] + pixel[:, None] * x[1] + channel[None, :]
    if MASKED:
        value = tl.load(where, mask=mask, other=0.0)
    else:
        value = tl.load(where)
    return value.to(tl.float32)


@jit
def write(x, pixel, channel, mask, value, MASKED: tl.constexpr):
    where = x[0] + pixel[:, None] * x[1] + channel[None, :]
    value = value.to(x[0].dtype.element_ty)
    if MASKED:
        tl.store(where, value, mask=mask)
    else:
        tl.store(where, value)


@jit
def only(value, mask, MASKED: tl.constexpr):
    """0 where masked."""
    if MASKED:
        value = tl.where(mask, value, 0.0)
    return value


@jit
def keep_pair(planes, number: tl.constexpr, plane, at, one, other, mask):
    """Two numbers of the norm of this number: its mean and ρ, or gradients of scale and shift."""
    tl.store(planes + 2 * number * plane + at, one, mask=mask)
    tl.store(planes + (2 * number + 1) * plane + at, other, mask=mask)


@jit
def keep_statistics(
    stats, number: tl.constexpr, plane, at, mean, rho, valid,
    LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the first column of each group."""
    first = valid & (tl.arange(0, COLUMNS) % LANES == 0)
    keep_pair(stats, number, plane, at, mean, rho, first)


@jit
def kept_pair(planes, number: tl.constexpr, plane, at, mask):
    one = tl.load(planes + 2 * number * plane + at, mask=mask, other=0.0)
    other = tl.load(planes + (2 * number + 1) * plane + at, mask=mask, other=0.0)
    return one, other


@jit
def scale_and_shift(affine, at, valid):
    """affine: the vectors of the scale and, if wanted, of the shift; none, 1 and 0."""
    scale = tl.where(valid, 1.0, 0.0)
    shift = tl.zeros_like(scale)
    if len(affine) > 0:
        scale = tl.load(affine[0] + at, mask=valid, other=0.0).to(tl.float32)
    if len(affine) > 1:
        shift = tl.load(affine[1] + at, mask=valid, other=0.0).to(tl.float32)
    return scale, shift


# ---- forward


@jit
def over_group(sums, BLOCK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of columns to the sum of their group, in each of its columns."""
    if BLOCK * LANES == COLUMNS and (LANES & (LANES - 1)) == 0:
        total = tl.sum(tl.reshape(sums, (BLOCK, LANES)), axis=1)
        spread = tl.broadcast_to(total[:, None], (BLOCK, LANES))
        found = tl.reshape(spread, (COLUMNS,))
    else:
        group = tl.arange(0, COLUMNS) // LANES
        found = tl.zeros_like(sums)
        for i in tl.static_range(BLOCK):
            mine = group == i
            found = tl.where(mine, tl.sum(tl.where(mine, sums, 0.0), axis=0), found)
    return found


@jit
def sums_of(one, other, TOGETHER: tl.constexpr):
    """Of both tiles over the rows.  TOGETHER: in one pass over the warps, for tiles that give each
    thread some numbers."""
    if TOGETHER:
        a, b = tl.split(tl.sum(tl.join(one, other), axis=0))
    else:
        a, b = tl.sum(one, axis=0), tl.sum(other, axis=0)
    return a, b


@jit
def statistics(
    load: tl.constexpr, source, channel, inside, eps,
    PIXELS: tl.constexpr, CPG: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Mean and ρ of each column's group, over all pixels.  load: reads a tile of the source.

    The pivot is the mean of the first of n chunks.  (mean − pivot)² is at most n times the variance
    then, so that the difference below loses few digits; of one chunk it is that of squares and
    about 0.
    """
    FIRST: tl.constexpr = CPG * min(ROWS, PIXELS)
    COUNT: tl.constexpr = CPG * PIXELS
    pixel, mask = rows_from(0, inside, PIXELS, ROWS)
    x = only(load(source, pixel, channel, mask, MASKED), mask, MASKED)
    sums = over_group(tl.sum(x, axis=0), BLOCK, LANES, COLUMNS)
    # Rounded as it should be: else equal numbers would have a variance.
    if (FIRST & (FIRST - 1)) == 0:
        pivot = sums * (1.0 / FIRST)
    else:
        pivot = tl.div_rn(sums, tl.full(sums.shape, FIRST, tl.float32))
    off = only(x - pivot[None, :], mask, MASKED)
    if ROWS >= PIXELS:
        mean = pivot
        squares = over_group(tl.sum(off * off, axis=0), BLOCK, LANES, COLUMNS)
    else:
        square = off * off
        for start in range(ROWS, PIXELS, ROWS):
            pixel, mask = rows_from(start, inside, PIXELS, ROWS)
            x = load(source, pixel, channel, mask, MASKED)
            x = only(x - pivot[None, :], mask, MASKED)
            off += x
            square += x * x
        total, squares = sums_of(off, square, True)
        delta = over_group(total, BLOCK, LANES, COLUMNS) * (1.0 / COUNT)
        squares = over_group(squares, BLOCK, LANES, COLUMNS) - COUNT * delta * delta
        squares = tl.where(squares < 0, 0.0, squares)
        mean = pivot + delta
    return mean, tl.rsqrt(squares * (1.0 / COUNT) + eps)


@jit
def load_map(x, pixel, channel, mask, MASKED: tl.constexpr):
    """For `statistics`."""
    return read(x, pixel, channel, mask, MASKED)


@jit
def normalise(x, mean, rho, scale, shift):
    """Centred before it is scaled: x · scale + shift would cancel where |mean| is large."""
    return (x - mean[None, :]) * (rho * scale)[None, :] + shift[None, :]


@jit
def rectify(x):
    """A NaN stays one; tl.maximum would hide it."""
    return tl.where(x < 0, 0.0, x)


# ---- backward


@jit
def means_along(
    dweight, dbias, scale, count,
    BLOCK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """mean(w g) and mean(w g x̂) of each group."""
    along_unit = over_group(dweight * scale, BLOCK, LANES, COLUMNS) / count
    along_one = over_group(dbias * scale, BLOCK, LANES, COLUMNS) / count
    return along_one, along_unit


@jit
def norm_gradient(g, unit, scale, rho, along_one, along_unit):
    value = g * scale[None, :] - along_one[None, :] - unit * along_unit[None, :]
    return value * rho[None, :]


# ---- two half-precision numbers in an int32


@jit
def low(pair, BRAIN: tl.constexpr):
    """The first number in float32.  BRAIN: of bfloat16, the upper half of a float32; or float16."""
    if BRAIN:
        number = (pair << 16).to(tl.float32, bitcast=True)
    else:
        number = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@jit
def high(pair, BRAIN: tl.constexpr):
    """The second number."""
    if BRAIN:
        number = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        number = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@jit
def wide(pair, sixteen, upper):
    """Tiles of pairs of bfloat16 as tiles of float32, with twice the columns.

    sixteen, upper: 16 and the mask of the upper 16 bits.  Where the compiler does not know them it
    unpacks anew, instead of keeping the float32 from one use to the next in twice the registers.
    """
    first = (pair << sixteen).to(tl.float32, bitcast=True)
    second = (pair & upper).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), (pair.shape[0], 2 * pair.shape[1]))
