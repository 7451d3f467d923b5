"""Inner products of steps in 8 bits, four numbers at once: one instruction for a word of four.

Memory brings such steps faster than a program can turn each number into a float32 and multiply.
g has no 8 bits; it is taken as two whole numbers for each of its own, the second for what the first
left, of which there are 64 to one: 14 bits beside the largest of the chunk.  Where a sample has
many numbers (`COARSE_FROM`) the first alone will do: roundings add up as √d, an inner product as d.
With numbers of g up to m times their root mean square, and roundings that know nothing of s_j,
s_jᵀg is off by about m / (440 √d) of ‖s_j‖‖g‖: 1e-4 for m = 4 and d = 8192.  (Where one number of
each chunk is far larger than all others, these become 0, and if s_j has one sign there, it is off
by up to a tenth, whatever d is: then the method gets a worse step, not a wrong residual.)  On two
trained MDEQs it is 1e-4 in the median and 1.3e-3 at most, where half precision of z and f(z) alone
is 7e-4 and 1.4e-2, or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdeq.fast.kernels.chunks import (
    INFINITY,
    INTERPRETED,
    LEAST,
    LEVELS,
    NO_FRACTION,
    PER_LEVEL,
    largest_of,
)

FINER = tl.constexpr(64)  # 127² · 64 · 1024, the largest sum of a chunk, fits in 32 bits
PER_FINER = tl.constexpr(1 / 64)
COARSE_FROM = 8192  # numbers in a sample
# Loops here carry tuples, which older versions of Triton cannot compile.
COMPILES = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)


@triton.jit
def _dot4(a, b, c):
    """c + Σ a_i b_i over the four whole numbers in a word."""
    if INTERPRETED:
        for i in tl.static_range(4):
            c += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    else:
        c = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return c


@triton.jit
def _in_words(bits, WORDS: tl.constexpr):
    """The last bytes of so many numbers, four to a word."""
    if INTERPRETED:
        places = tl.arange(0, 4)
        words = tl.sum((tl.reshape(bits, (WORDS, 4)) & 255) << (8 * places)[None, :], 1)
    else:  # three instructions a word instead of eight
        even, odd = tl.split(tl.reshape(bits, (WORDS, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        words = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 $0, low, high, 0x5410;
            }""",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def in_two_words(x, WORDS: tl.constexpr, COARSE: tl.constexpr):
    """A chunk as (first + second / 64) · unit.  One that is not finite has zeros: others see that.

    As `chunks.rounded_with_bytes`; beside NO_FRACTION the last byte is the whole number's.
    COARSE: no second, which is the first again then, and not to be used.
    """
    largest = largest_of(x)
    some = (largest >= LEAST) & (largest < INFINITY)
    unit = tl.where(some, largest * PER_LEVEL, 0.0)
    per_unit = tl.where(some, tl.div_rn(LEVELS, tl.maximum(largest, LEAST)), 0.0)
    x = x * per_unit
    near = x + NO_FRACTION
    first = tl.where(some, _in_words(near.to(tl.int32, bitcast=True), WORDS), 0)
    second = first
    if not COARSE:
        left = (x - (near - NO_FRACTION)) * FINER + NO_FRACTION
        second = tl.where(some, _in_words(left.to(tl.int32, bitcast=True), WORDS), 0)
    return first, second, unit


@triton.jit
def words_of(words, count, length, d, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A chunk of the first steps of so many, at most TILE: a vector each."""
    lane, found = tl.arange(0, BLOCK // 4), ()
    for i in tl.static_range(TILE):
        inside = lane < tl.where(i < count, length >> 2, 0)
        here = tl.load(words + i * (d >> 2) + lane, mask=inside, other=0)
        found += (here,)  # type: ignore[assignment]
    return found


@triton.jit
def _quarters(words):  # (n,)
    """Of each four words beside each other one: four vectors, whose numbers are in one thread."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _dot16(s, x, total):
    """total + Σ s_i x_i over the numbers in each four words, of `_quarters`."""
    for i in tl.static_range(4):
        total = _dot4(s[i], x[i], total)
    return total


@triton.jit
def products_of_words(
    some, newest, words, units, g, unit, out, d, length, chunks, count,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """s_jᵀg and s_jᵀs_{t−1} of a chunk for all steps of a sample, the newest (of this unit) too.

    some: the first of them (`words_of`), and newest, a vector: asked for before g was known.  The
    next ones are asked for while these are multiplied.  Sums are gathered in a vector, a step at
    each place, and multiplied by the units at the end: no step waits for its own.
    """
    place = tl.arange(0, PLACES)
    unit_j = tl.load(units + place * chunks, mask=place < count, other=0.0)
    first, second, unit_of_g = in_two_words(g, BLOCK // 4, COARSE)
    first, second, newest = _quarters(first), _quarters(second), _quarters(newest)
    of_g = tl.zeros((PLACES,), dtype=tl.int32)
    of_newest = of_g
    for begin in range(0, count, TILE):
        words += TILE * (d >> 2)
        following = words_of(words, count - begin - TILE, length, d, BLOCK, TILE)
        for i in tl.static_range(TILE):
            s = _quarters(some[i])
            nothing = tl.zeros_like(s[0])
            found = _dot16(s, first, nothing)
            if not COARSE:
                found = _dot16(s, second, found * FINER)
            found = tl.sum(found, 0)
            of_g = tl.where(place == begin + i, found, of_g)
            found = tl.sum(_dot16(s, newest, nothing), 0)
            of_newest = tl.where(place == begin + i, found, of_newest)
        some = following
    known = place < count
    if not COARSE:
        unit_of_g *= PER_FINER
    tl.store(out + place, of_g.to(tl.float32) * (unit_j * unit_of_g), mask=known)
    tl.store(out + PLACES + place, of_newest.to(tl.float32) * (unit_j * unit), mask=known)
