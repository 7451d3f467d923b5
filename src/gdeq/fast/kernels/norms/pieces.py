"""Pieces of kernels.  A tile is (pixels of one sample) × (channels of some groups), in float32.

A tile's columns are channels: GROUP_BLOCK groups of LANES columns, LANES the next power of two of
the group's channels, CPG; of 20 channels 12 columns stay masked.  Its rows are all PIXELS, or a
chunk of ROWS of them.
"""

from __future__ import annotations

from gdeq.fast.kernels.jit import jit, tl

# ---- what a program works on


@jit
def place(GROUPS: tl.constexpr, CPG: tl.constexpr, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The program's sample, and for each column of its tiles the channel, the group, and whether
    there is such a channel."""
    BLOCKS: tl.constexpr = (GROUPS + GROUP_BLOCK - 1) // GROUP_BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    column = tl.arange(0, GROUP_BLOCK * LANES)
    group = block * GROUP_BLOCK + column // LANES
    valid = column >= 0
    if LANES != CPG:
        valid = valid & (column % LANES < CPG)
    if GROUPS % GROUP_BLOCK != 0:
        valid = valid & (group < GROUPS)
    channel = block * (GROUP_BLOCK * CPG) + column
    if LANES != CPG:
        channel = group * CPG + column % LANES
    return sample, channel, group, valid


@jit
def rows_from(start, valid, PIXELS: tl.constexpr, ROWS: tl.constexpr):
    """The pixels of a tile's rows, and the mask of the tile."""
    pixel = start + tl.arange(0, ROWS)
    return pixel, (pixel < PIXELS)[:, None] & valid[None, :]


@jit
def read(base, pixel, pixel_stride, channel, mask):
    where = base + pixel[:, None] * pixel_stride + channel[None, :]
    return tl.load(where, mask=mask, other=0.0).to(tl.float32)


@jit
def write(base, pixel, pixel_stride, channel, mask, value):
    where = base + pixel[:, None] * pixel_stride + channel[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=mask)


@jit
def beside(
    channel, group, valid,
    GROUPS: tl.constexpr, CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """`place`, where ROOM channels of zeros follow those of the groups: the columns that have no
    channel stand for these; and which columns are written."""
    written = valid
    if ROOM > 0:
        at = group * (LANES - CPG) + tl.arange(0, GROUP_BLOCK * LANES) % LANES - CPG
        channel = tl.where(valid, channel, GROUPS * CPG + at)
        written = valid | ((at < ROOM) & (group < GROUPS))
    return channel, written


@jit
def write_beside(
    base, pixel, pixel_stride, channel, mask, written, value,
    PIXELS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """`write`, with zeros in the columns of `beside`."""
    if ROOM > 0:
        value = tl.where(mask, value, 0.0)
        mask = (pixel < PIXELS)[:, None] & written[None, :]
    write(base, pixel, pixel_stride, channel, mask, value)


@jit
def keep_pair(planes, number: tl.constexpr, plane, at, one, other, mask):
    """Two numbers of the norm of this number: its mean and ρ, or gradients of scale and shift."""
    tl.store(planes + 2 * number * plane + at, one, mask=mask)
    tl.store(planes + (2 * number + 1) * plane + at, other, mask=mask)


@jit
def kept_pair(planes, number: tl.constexpr, plane, at, mask):
    one = tl.load(planes + 2 * number * plane + at, mask=mask, other=0.0)
    other = tl.load(planes + (2 * number + 1) * plane + at, mask=mask, other=0.0)
    return one, other


@jit
def first_of_group(valid, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    return valid & (tl.arange(0, GROUP_BLOCK * LANES) % LANES == 0)


# ---- forward


@jit
def over_group(sums, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Sums of channels to the sum of their group, in the column of each of its channels."""
    total = tl.sum(tl.reshape(sums, (GROUP_BLOCK, LANES)), axis=1)
    spread = tl.broadcast_to(total[:, None], (GROUP_BLOCK, LANES))
    return tl.reshape(spread, (GROUP_BLOCK * LANES,))


@jit
def moments(x, mask, count, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Of one tile: mean and Σ(x − mean)² of each column's group."""
    mean = over_group(tl.sum(x, axis=0), GROUP_BLOCK, LANES) / count
    off = tl.where(mask, x - mean[None, :], 0.0)
    return mean, over_group(tl.sum(off * off, axis=0), GROUP_BLOCK, LANES)


@jit
def join_moments(
    mean, squares, x, mask, start,
    PIXELS: tl.constexpr, ROWS: tl.constexpr, CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Those of the pixels before `start`, joined by the tile that starts there."""
    count = tl.minimum(PIXELS - start, ROWS).to(tl.float32) * CPG
    mean_new, squares_new = moments(x, mask, count, GROUP_BLOCK, LANES)
    seen = start * CPG * 1.0
    total = seen + count
    delta = mean_new - mean
    squares += squares_new + delta * delta * (seen * count / total)
    return mean + delta * (count / total), squares


@jit
def statistics(
    base, pixel_stride, channel, valid,
    PIXELS: tl.constexpr, ROWS: tl.constexpr, CPG: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of all pixels of one sample, in chunks of ROWS: mean and Σ(x − mean)² of each group."""
    mean = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    squares = tl.zeros((GROUP_BLOCK * LANES,), tl.float32)
    for start in range(0, PIXELS, ROWS):
        pixel, mask = rows_from(start, valid, PIXELS, ROWS)
        x = read(base, pixel, pixel_stride, channel, mask)
        mean, squares = join_moments(
            mean, squares, x, mask, start, PIXELS, ROWS, CPG, GROUP_BLOCK, LANES
        )
    return mean, squares


@jit
def inverse_deviation(squares, count, eps):
    """ρ."""
    return tl.rsqrt(squares / count + eps)


@jit
def scale_and_shift(weight, bias, offset, channel, valid, AFFINE: tl.constexpr):
    if AFFINE:
        scale = tl.load(weight + offset + channel, mask=valid, other=0.0).to(tl.float32)
        shift = tl.load(bias + offset + channel, mask=valid, other=0.0).to(tl.float32)
    else:
        scale = tl.full(channel.shape, 1.0, tl.float32)
        shift = tl.zeros(channel.shape, tl.float32)
    return scale, shift


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
def unit_of(x, mean, rho, mask):
    """x̂; 0 where masked."""
    return tl.where(mask, (x - mean[None, :]) * rho[None, :], 0.0)


@jit
def means_along(dweight, dbias, scale, count, GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr):
    """mean(w g) and mean(w g x̂) of each group."""
    along_unit = over_group(dweight * scale, GROUP_BLOCK, LANES) / count
    along_one = over_group(dbias * scale, GROUP_BLOCK, LANES) / count
    return along_one, along_unit


@jit
def norm_gradient(g, unit, scale, rho, along_one, along_unit):
    value = g * scale[None, :] - along_one[None, :] - unit * along_unit[None, :]
    return value * rho[None, :]
