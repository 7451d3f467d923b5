"""Vectors in chunks: a program takes one chunk of one sample.

A vector lies either in rows, ``(batch, d)``, or in parts: all samples of the first tensor of the
state, then all of the second, and so on (`gdeq.fast.layout`).  A chunk never crosses a part.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast import eight_bits

ALIGNMENT = 16
INFINITY = tl.constexpr(float("inf"))
LEVELS = tl.constexpr(float(eight_bits.LEVELS))
PER_LEVEL = tl.constexpr(1 / eight_bits.LEVELS)
LEAST = tl.constexpr(eight_bits.LEAST)
NO_FRACTION = tl.constexpr(1.5 * 2**23)  # beside it, float32 holds whole numbers of 22 bits
NO_FRACTION_BITS = tl.constexpr(0x4B400000)
# Triton's interpreter knows no assembly, and is slow with reductions by a function of our own.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def work():
    """The chunk and the sample of this program, from the last to the first.

    What another kernel has just read to its end is best read from there: the last of it is still in
    the cache.
    """
    chunk, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    return chunk, b.to(tl.int64)


@triton.jit
def place(table, b, chunk, batch, d, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Where a chunk of sample b lies: in a batched vector, in parts, and how long it is.

    ALIGNED: all parts are multiples of 16 numbers.  Numbers from a table could be anything; told
    this, the compiler loads 16 bytes at once instead of 2 or 4, with half the registers.
    """
    row = tl.load(table + chunk * 5)
    start = tl.load(table + chunk * 5 + 1)  # of the part, for a batch of one
    size = tl.load(table + chunk * 5 + 2)
    offset = tl.load(table + chunk * 5 + 3)
    length = tl.load(table + chunk * 5 + 4).to(tl.int32)  # compared with each lane
    if ALIGNED:
        row, start = tl.multiple_of(row, 16), tl.multiple_of(start, 16)
        size, offset = tl.multiple_of(size, 16), tl.multiple_of(offset, 16)
        length = tl.multiple_of(length, 16)
    lane = tl.arange(0, BLOCK)
    in_rows = b * d + row + lane
    in_parts = start * batch + b * size + offset + lane
    return lane, row, length, in_rows, in_parts


@triton.jit
def numbers(s, kind: tl.constexpr, SCALED: tl.constexpr):
    """Stored numbers in the type of the computation.

    8 bits are added to the last bits of a float32 without a fraction: instructions that convert
    whole numbers are slower than the memory of an H200.
    """
    if SCALED:
        s = (s.to(tl.int32) + NO_FRACTION_BITS).to(tl.float32, bitcast=True) - NO_FRACTION
    return s.to(kind)


@triton.jit
def weighted_steps(
    total, base, scales, weight, lane, row, length, d, chunks, count,
    SCALED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """total + Σ weight_j s_j over the steps of one sample; scales: of the chunk, in 8 bits."""
    for first in range(0, count, TILE):
        for i in tl.static_range(TILE):
            j = count - 1 - first - i
            known = (j >= 0) & (j < count)
            w = tl.load(weight + j, mask=known, other=0.0)
            # What is not used may hold anything.
            used = lane < tl.where(w != 0, length, 0)
            s = tl.load(base + tl.cast(j, tl.int64) * d + row + lane, mask=used, other=0)
            if SCALED:
                unit = tl.load(scales + j * chunks, mask=known, other=0.0).to(total.dtype)
                w = tl.where(w != 0, w * unit, 0.0)
            total += w * numbers(s, total.dtype, SCALED)
    return total


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x):
    """max |x|; infinity where one is not finite."""
    size = tl.abs(x)
    if INTERPRETED:
        largest = tl.max(tl.where(size < INFINITY, size, INFINITY), 0)
    else:  # one instruction a number instead of three
        largest = tl.reduce(size, 0, _larger)
    return tl.where(largest < INFINITY, largest, INFINITY)  # NaN too


@triton.jit
def rounded_with_bytes(x):
    """A chunk in 8 bits (`eight_bits`): whole numbers, as float32 and int8; the scale.

    The int8 are the last bytes beside NO_FRACTION: an instruction that converts a float32 takes a
    GPU eight times as long as others.
    """
    x = x.to(tl.float32)
    largest = largest_of(x)
    some, finite = largest >= LEAST, largest < INFINITY
    scale = tl.where(some, largest * PER_LEVEL, 0.0)
    per_scale = tl.where(some & finite, tl.div_rn(LEVELS, tl.maximum(largest, LEAST)), 0.0)
    beside = tl.where(finite, x * per_scale + NO_FRACTION, NO_FRACTION)
    return beside - NO_FRACTION, beside.to(tl.int32, bitcast=True).to(tl.int8), scale


@cache
def table(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:  # (chunks, 5)
    """For each chunk: where it is in a row, its part's start and size, where in it, how long."""
    entries = []
    start = 0
    for size in sizes:
        for offset in range(0, size, block):
            length = min(block, size - offset)
            entries.append((start + offset, start, size, offset, length))
        start += size
    return torch.tensor(entries, dtype=torch.int64, device=device)


@cache
def bounds(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """With which chunk each part begins, and the last one ends; for a power of two of parts."""
    ends = [0]
    for chunks in eight_bits.chunks_of(sizes, block):
        ends.append(ends[-1] + chunks)
    ends += [ends[-1]] * (triton.next_power_of_2(len(sizes)) - len(sizes))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def places(count: int) -> int:
    """Room for so many numbers of a sample: a size that a kernel can be compiled for."""
    return max(16, triton.next_power_of_2(count))
