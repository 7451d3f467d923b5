"""Inner products of steps in 8 bits, four numbers at once: one instruction for a word of four.

Memory brings such steps faster than a program can turn each number into a float32 and multiply.
g has no 8 bits; it is taken as two whole numbers for each of its own, the second for what the first
left, of which there are 64 to one: 14 bits beside the largest of the chunk.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from gdeq.kernels.chunks import INFINITY, LEAST, LEVELS, NO_FRACTION, PER_LEVEL

FINER = tl.constexpr(64)  # 127² · 64 · 1024 is a whole number of 32 bits
PER_FINER = tl.constexpr(1 / 64)
MOST_NUMBERS = 1024  # in a chunk
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # which knows no assembly


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
    places = tl.arange(0, 4)
    return tl.sum((tl.reshape(bits, (WORDS, 4)) & 255) << (8 * places)[None, :], 1)


@triton.jit
def in_two_words(x, WORDS: tl.constexpr):
    """A chunk as (first + second / 64) · unit.  One that is not finite has zeros: others see that.

    As `gdeq.kernels.chunks.rounded`; beside NO_FRACTION the last byte is the whole number's.
    """
    size = tl.abs(x)
    largest = tl.max(tl.where(size < INFINITY, size, INFINITY), 0)  # NaN too
    some = (largest >= LEAST) & (largest < INFINITY)
    unit = tl.where(some, largest * PER_LEVEL, 0.0)
    per_unit = tl.where(some, tl.div_rn(LEVELS, tl.maximum(largest, LEAST)), 0.0)
    x = tl.where(some, x, 0.0) * per_unit
    first = x + NO_FRACTION
    second = (x - (first - NO_FRACTION)) * FINER + NO_FRACTION
    first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    return _in_words(first, WORDS), _in_words(second, WORDS), unit


@triton.jit
def words_of(words, begin, length, d, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A chunk of some steps of a sample, (TILE, words), from this one on.  words: of the first."""
    lane, j = tl.arange(0, BLOCK // 4), begin + tl.arange(0, TILE)
    inside = (j < count)[:, None] & (lane < length // 4)[None, :]
    at = j.to(tl.int64)[:, None] * (d // 4) + lane[None, :]
    return tl.load(words + at, mask=inside, other=0)


@triton.jit
def products_of_words(
    s, newest, words, units, g, unit, out, d, length, chunks, count,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """s_jᵀg and s_jᵀs_{t−1} of a chunk for all steps of a sample, the newest (of this unit) too.

    s: the first of them (`words_of`), and newest, (1, words): asked for before g was known.  The
    next ones are asked for while these are multiplied.
    """
    first, second, unit_of_g = in_two_words(g, BLOCK // 4)
    unit_of_g *= PER_FINER
    for begin in range(0, count, TILE):
        j = begin + tl.arange(0, TILE)
        known = j < count
        unit_j = tl.load(units + j * chunks, mask=known, other=0.0)
        following = words_of(words, begin + TILE, length, d, count, BLOCK, TILE)
        nothing = tl.zeros_like(s)
        of_first = _dot4(s, tl.broadcast_to(first[None, :], s.shape), nothing)
        of_g = _dot4(s, tl.broadcast_to(second[None, :], s.shape), of_first * FINER)
        of_newest = _dot4(s, tl.broadcast_to(newest, s.shape), nothing)
        tl.store(out + j, tl.sum(of_g, 1).to(tl.float32) * (unit_j * unit_of_g), mask=known)
        of_newest = tl.sum(of_newest, 1).to(tl.float32) * (unit_j * unit)
        tl.store(out + PLACES + j, of_newest, mask=known)
        s = following
