"""`fusion._fuse_backward_kernel` where a program holds all pixels of its channels at once.

There each source reads the cotangent again, one pixel of those that each of its own was repeated
to after another: 84 reads in a row for sources of 1, 2 and 3 levels.  Here it is read once, in
tiles of the first source's resolution, and the others need sums of what the one before needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import jit, tl
from gdeq.fast.kernels.norms.pieces import over_group
from gdeq.fast.kernels.norms.tensors import channels_last, channels_last_or

enabled = True  # for comparisons
masked = True  # groups whose sizes are no powers of two, too: those of the head
MOST = 16384  # numbers of the cotangent that a program reads
PER_THREAD = 16  # of those that the first source needs
# Of each source at least, for each thread.  With fewer, the GPU's code sums some tiles wrongly, at
# each call, and the interpreter does not (docs/performance.md): they are left to the other kernel.
LEAST = 1
RUN_BYTES = 32  # of a pixel at least, if that many numbers fit
REGISTERS = 80  # so that three programs of 8 warps fit an SM
MOST_REGISTERS = 128  # of 16 warps, which hold more numbers each


def takes(out: Tensor, raws: Sequence[Tensor], levels: Sequence[int], groups: int) -> bool:
    _, channels, height, width = out.shape
    size = channels // groups
    lanes = lanes_of(size)
    whole = _power_of_two(height) and _power_of_two(width) and (masked or lanes == size)
    fits = whole and height * width * lanes <= MOST
    exact = all(
        (raw.shape[2] << level, raw.shape[3] << level) == (height, width)
        for raw, level in zip(raws, levels, strict=True)
    )
    if not (enabled and fits and exact and list(levels) == sorted(levels)):
        return False
    block = groups_of_program(height * width, lanes, groups, out.element_size())
    numbers = height * width * lanes * block
    return numbers >> (2 * levels[-1]) >= LEAST * 32 * warps(numbers >> (2 * levels[0]))


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def lanes_of(size: int) -> int:
    """Columns for the channels of a group: the least power of two that is not below."""
    return 1 << (size - 1).bit_length()


def groups_of_program(pixels: int, lanes: int, groups: int, itemsize: int) -> int:
    block = 1
    while lanes * block * itemsize < RUN_BYTES and groups % (2 * block) == 0:
        if 2 * block * pixels * lanes > MOST:
            break
        block *= 2
    return block


def warps(numbers: int) -> int:
    """numbers: of the first source, in a program."""
    return max(1, min(16, numbers // (32 * PER_THREAD)))


def launch(
    dout: Tensor,
    out: Tensor,
    down: Tensor | None,
    sources: list[Any],
    affine_sample: int,
    stats: Tensor,
    sums: Tensor,
    levels: Sequence[int],
    affine: Sequence[bool],
    groups: int,
    relu: bool,
) -> None:
    """sources: what `fusion._filled` returns.  affine: which have a scale."""
    batch, channels, height, width = out.shape
    size = channels // groups
    lanes = lanes_of(size)
    block = groups_of_program(height * width, lanes, groups, out.element_size())
    together = warps((height * width * lanes * block) >> (2 * levels[0]))
    of_each: dict[str, Any] = {}
    for i in range(3):
        k = min(i, len(levels) - 1)  # as `fusion._filled`
        of_each |= {f"LEVELS{i}": levels[k], f"AFFINE{i}": affine[k]}
    with on_device(out):
        _fuse_backward_whole_kernel[(batch * groups // block,)](
            *channels_last(dout),
            *channels_last(out),
            *channels_last_or(out, down),
            *sources,
            affine_sample,
            stats,
            stats[0].numel(),
            sums,
            sums[0].numel(),
            HEIGHT=height,
            WIDTH=width,
            **of_each,
            COUNT=len(levels),
            GROUPS=groups,
            CPG=size,
            OWN=down is not None,
            RELU=relu,
            GROUP_BLOCK=block,
            LANES=lanes,
            num_warps=together,
            maxnreg=REGISTERS if together <= 8 else MOST_REGISTERS,
        )


@jit
def _summed(g, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr):
    """Over squares of 2^LEVELS pixels a side."""
    if LEVELS > 0:
        EDGE: tl.constexpr = 1 << LEVELS
        g = tl.sum(tl.reshape(g, (HEIGHT * (WIDTH // EDGE), EDGE, N)), axis=1)
        g = tl.sum(tl.reshape(g, (HEIGHT // EDGE, EDGE, WIDTH // EDGE, N)), axis=1)
        g = tl.reshape(g, ((HEIGHT // EDGE) * (WIDTH // EDGE), N))
    return g


@jit
def _read(where, valid, LANES: tl.constexpr, CPG: tl.constexpr):
    if LANES == CPG:  # whole vectors
        value = tl.load(where)
    else:
        value = tl.load(where, mask=valid[None, :], other=0.0)
    return value.to(tl.float32)


@jit
def _write(where, value, valid, LANES: tl.constexpr, CPG: tl.constexpr):
    value = value.to(where.dtype.element_ty)
    if LANES == CPG:
        tl.store(where, value)
    else:
        tl.store(where, value, mask=valid[None, :])


@jit
def _source(
    g, raw, raw_pixel, weight, offset, draw, draw_pixel, stats, plane, sums, sums_plane, channel,
    valid, PIXELS: tl.constexpr, CPG: tl.constexpr, LANES: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, AFFINE: tl.constexpr,
):  # fmt: skip
    """raw, draw: from the first channel on.  stats, sums: where those of each column are."""
    pixel = tl.arange(0, PIXELS)[:, None]
    x = _read(raw + pixel * raw_pixel + channel[None, :], valid, LANES, CPG)
    mean, rho = tl.load(stats), tl.load(stats + plane)
    scale = tl.full(channel.shape, 1.0, tl.float32)
    if AFFINE:
        scale = tl.load(weight + offset + channel, mask=valid, other=0.0).to(tl.float32)
    unit = (x - mean[None, :]) * rho[None, :]
    dweight, dbias = tl.split(tl.sum(tl.join(g * unit, g), axis=0))  # one pass over the warps
    if AFFINE:
        tl.store(sums, dweight, mask=valid)
        tl.store(sums + sums_plane, dbias, mask=valid)
    along = over_group(dweight * scale, GROUP_BLOCK, LANES) * (1.0 / (PIXELS * CPG))
    one = over_group(dbias * scale, GROUP_BLOCK, LANES) * (1.0 / (PIXELS * CPG))
    dx = (g * scale[None, :] - one[None, :] - unit * along[None, :]) * rho[None, :]
    _write(draw + pixel * draw_pixel + channel[None, :], dx, valid, LANES, CPG)


@jit
def _fuse_backward_whole_kernel(
    dout, dout_sample, dout_pixel,
    out, out_sample, out_pixel,
    down, down_sample, down_pixel,
    raw0, raw0_sample, raw0_pixel, weight0, draw0, draw0_sample, draw0_pixel,
    raw1, raw1_sample, raw1_pixel, weight1, draw1, draw1_sample, draw1_pixel,
    raw2, raw2_sample, raw2_pixel, weight2, draw2, draw2_sample, draw2_pixel,
    affine_sample,
    stats, plane,
    sums, sums_plane,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS0: tl.constexpr, LEVELS1: tl.constexpr, LEVELS2: tl.constexpr,
    AFFINE0: tl.constexpr, AFFINE1: tl.constexpr, AFFINE2: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    CPG: tl.constexpr,
    OWN: tl.constexpr,
    RELU: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """down: the gradient of the scale's own stream."""
    N: tl.constexpr = LANES * GROUP_BLOCK
    BLOCKS: tl.constexpr = GROUPS // GROUP_BLOCK
    # Backwards: what was written last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // BLOCKS).to(tl.int64)
    first = (program % BLOCKS) * (CPG * GROUP_BLOCK)
    channel = tl.arange(0, N)
    group = channel // LANES
    valid = channel >= 0
    if LANES != CPG:
        valid = channel % LANES < CPG
        channel = group * CPG + channel % LANES
    H0: tl.constexpr = HEIGHT >> LEVELS0
    W0: tl.constexpr = WIDTH >> LEVELS0
    low = tl.arange(0, H0 * W0)[:, None]
    dout += sample * dout_sample + first
    out += sample * out_sample + first
    down += sample * down_sample + first
    g = tl.zeros((H0 * W0, N), tl.float32)
    for i in tl.static_range(1 << LEVELS0):
        for j in tl.static_range(1 << LEVELS0):
            at = ((low // W0 << LEVELS0) + i) * WIDTH + (low % W0 << LEVELS0) + j
            part = _read(dout + at * dout_pixel + channel[None, :], valid, LANES, CPG)
            if RELU:
                y = _read(out + at * out_pixel + channel[None, :], valid, LANES, CPG)
                part = tl.where(y > 0, part, 0.0)
            if OWN:
                _write(down + at * down_pixel + channel[None, :], part, valid, LANES, CPG)
            g += part
    stats += sample * GROUPS + first // CPG + group
    sums += sample * (GROUPS * CPG) + first + channel
    offset = sample * affine_sample + first
    _source(
        g, raw0 + (sample * raw0_sample + first), raw0_pixel, weight0, offset,
        draw0 + (sample * draw0_sample + first), draw0_pixel, stats, plane, sums, sums_plane,
        channel, valid, H0 * W0, CPG, LANES, GROUP_BLOCK, AFFINE0,
    )  # fmt: skip
    if COUNT > 1:
        H1: tl.constexpr = HEIGHT >> LEVELS1
        W1: tl.constexpr = WIDTH >> LEVELS1
        g = _summed(g, H0, W0, N, LEVELS1 - LEVELS0)
        _source(
            g, raw1 + (sample * raw1_sample + first), raw1_pixel, weight1, offset,
            draw1 + (sample * draw1_sample + first), draw1_pixel, stats + 2 * plane, plane,
            sums + 2 * sums_plane, sums_plane, channel, valid, H1 * W1, CPG, LANES, GROUP_BLOCK,
            AFFINE1,
        )  # fmt: skip
    if COUNT > 2:
        g = _summed(g, H1, W1, N, LEVELS2 - LEVELS1)
        _source(
            g, raw2 + (sample * raw2_sample + first), raw2_pixel, weight2, offset,
            draw2 + (sample * draw2_sample + first), draw2_pixel, stats + 4 * plane, plane,
            sums + 4 * sums_plane, sums_plane, channel, valid,
            (HEIGHT >> LEVELS2) * (WIDTH >> LEVELS2), CPG, LANES, GROUP_BLOCK, AFFINE2,
        )  # fmt: skip
