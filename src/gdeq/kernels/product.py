"""`gdeq.product` in three kernels an iterate: inner products, decision, combination.

Read `gdeq.product.PlainSweep` first; each kernel here says which lines of it it computes.  Vectors
are cut in chunks, a program takes one chunk of one sample, and sums go over chunks in a fixed
order: the same input gives the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from gdeq.kernels.choice import on_device
from gdeq.ledger import Ledger, flight_limit
from gdeq.product import ProductInverse, store_dtype
from gdeq.recording import recording
from gdeq.solution import Status
from gdeq.solvers.base import Solver, noise_level

# The best of 18 settings tried on an H200, with narrower loads than now (docs/performance.md).
BLOCK = 1024  # numbers in a chunk
TILE = 2  # stored steps that a program reads at once
WARPS = 4
ALIGNMENT = 16

# Rows of the numbers kept for each sample.
ABSOLUTE, RELATIVE, FIRST_ABSOLUTE, FIRST_SIZE, PEAK, BEST_ABSOLUTE, BEST_RESIDUAL = range(7)
REALS = 7
ACTIVE, CODE, STEPS, BEST_STEP = range(4)
WHOLES = 4

RUNNING = tl.constexpr(int(Status.RUNNING))
CONVERGED = tl.constexpr(int(Status.CONVERGED))
ROUNDING = tl.constexpr(int(Status.ROUNDING))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
NONFINITE_START = tl.constexpr(int(Status.NONFINITE_START))
INFINITY = tl.constexpr(float("inf"))
SMALL = tl.constexpr(1e-26)  # a sum of squares below may be missing some


@triton.jit
def _place(table, b, chunk, batch, d, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Where a chunk of sample b lies: in a batched vector, in parts, and how long it is.

    ALIGNED: all parts are multiples of 16 numbers.  Numbers from a table could be anything; told
    this, the compiler loads 16 bytes at once instead of 2 or 4, with half the registers.
    """
    row = tl.load(table + chunk * 5)
    start = tl.load(table + chunk * 5 + 1)  # of the part, for a batch of one
    size = tl.load(table + chunk * 5 + 2)
    offset = tl.load(table + chunk * 5 + 3)
    length = tl.load(table + chunk * 5 + 4)
    if ALIGNED:
        row, start = tl.multiple_of(row, 16), tl.multiple_of(start, 16)
        size, offset = tl.multiple_of(size, 16), tl.multiple_of(offset, 16)
        length = tl.multiple_of(length, 16)
    lane = tl.arange(0, BLOCK)
    in_rows = b * d + row + lane
    in_parts = start * batch + b * size + offset + lane
    return lane, row, length, in_rows, in_parts


@triton.jit
def _store_squares(at, g, there, here, y):
    wide = g.to(tl.float64)
    tl.store(at, tl.sum(wide * wide, 0))
    wide = there.to(tl.float64)
    tl.store(at + 1, tl.sum(wide * wide, 0))
    wide = here.to(tl.float64)
    tl.store(at + 2, tl.sum(wide * wide, 0))
    wide = y.to(tl.float64)
    tl.store(at + 3, tl.sum(wide * wide, 0))


@triton.jit(do_not_specialize=["count"])
def _dots(
    z, fz, last_fz, steps, table, partial, norms, counter, batch, d, step_stride, chunks, count,
    COUNTED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """a_j = s_jᵀg, the new row s_jᵀs_{t−1} of G, and ‖g‖², ‖f(z)‖², ‖z‖², ‖y‖²: one chunk of each.

    Where squares may have overflowed or vanished, they are summed again in float64.
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if COUNTED:
        count = tl.load(counter)
    kind = z.dtype.element_ty
    lane, row, length, in_rows, in_parts = _place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    column, inside = row + lane, lane < length
    here = tl.load(z + in_rows, mask=inside, other=0.0)
    there = tl.load(fz + in_parts, mask=inside, other=0.0).to(kind)
    g = there - here
    newest = tl.zeros_like(g)
    y = tl.zeros_like(g)
    base = steps + b * step_stride
    if count > 0:
        before = tl.load(last_fz + in_parts, mask=inside, other=0.0).to(kind)
        newest = tl.load(
            base + tl.cast(count - 1, tl.int64) * d + column, mask=inside, other=0.0
        ).to(kind)
        y = there - before - newest
    at = norms + (b * chunks + chunk) * 4
    gg, ff, zz, yy = (
        tl.sum(g * g, 0),
        tl.sum(there * there, 0),
        tl.sum(here * here, 0),
        tl.sum(y * y, 0),
    )
    largest = tl.maximum(tl.maximum(gg, ff), tl.maximum(zz, yy))
    least = tl.minimum(tl.minimum(gg, ff), tl.minimum(zz, yy))
    tl.store(at, gg.to(tl.float64))
    tl.store(at + 1, ff.to(tl.float64))
    tl.store(at + 2, zz.to(tl.float64))
    tl.store(at + 3, yy.to(tl.float64))
    if (least < SMALL) | ((largest <= 1 / SMALL) == 0):  # NaN too
        _store_squares(at, g, there, here, y)
    out = partial + (b * chunks + chunk) * 2 * PLACES
    for first in range(0, count, TILE):
        j = first + tl.arange(0, TILE)
        known = j < count
        where = j.to(tl.int64)[:, None] * d + column[None, :]
        s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0.0).to(kind)
        tl.store(out + j, tl.sum(s * g[None, :], 1), mask=known)
        tl.store(out + PLACES + j, tl.sum(s * newest[None, :], 1), mask=known)


@triton.jit(do_not_specialize=["count"])
def _judge_first(
    norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, counter,
    batch, chunks, count, most, tol, precision, eps, noise, flight,
    COUNTED: tl.constexpr, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`Ledger.__init__`; the first step is g."""
    b = tl.program_id(0).to(tl.int64)
    kind = real.dtype.element_ty
    gg, ff, zz, _yy = _summed_norms(norms, b, chunks, CHUNKS)
    absolute = tl.sqrt(gg).to(kind)
    if LINEAR:
        size = tl.load(scale + b)
    else:
        size = tl.maximum(tl.sqrt(ff).to(kind), tl.sqrt(zz).to(kind))
    relative = tl.where(absolute > 0, absolute / size, absolute)
    residual = relative if RELATIVE_STOP else absolute
    finite = (absolute < INFINITY) & (size < INFINITY)
    code = tl.where(finite, RUNNING, NONFINITE_START)
    active = finite
    if WATCH:
        code = tl.where(finite & (residual <= tol), CONVERGED, code)
        active = finite & (residual > tol)
    at = real + b
    tl.store(at, absolute)
    tl.store(at + batch, relative)
    tl.store(at + 2 * batch, absolute)
    tl.store(at + 3 * batch, size)
    tl.store(at + 4 * batch, absolute)
    tl.store(at + 5 * batch, absolute)
    tl.store(at + 6 * batch, residual)
    tl.store(whole + b, active.to(tl.int32))
    tl.store(whole + batch + b, code)
    tl.store(whole + 2 * batch + b, 0)
    tl.store(whole + 3 * batch + b, 0)
    place = tl.arange(0, PLACES)
    tl.store(weight + b * PLACES + place, tl.zeros((PLACES,), dtype=kind))
    tl.store(keep + b * PLACES + place, tl.zeros((PLACES,), dtype=tl.int8))
    tl.store(lead + b, tl.where(finite, 1.0, 0.0).to(kind))
    tl.store(moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def _summed_norms(norms, b, chunks, CHUNKS: tl.constexpr):
    """‖g‖², ‖f(z)‖², ‖z‖², ‖y‖² of a sample."""
    gg = tl.zeros((CHUNKS,), dtype=tl.float64)
    ff, zz, yy = gg, gg, gg
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        at, known = norms + (b * chunks + c) * 4, c < chunks
        gg += tl.load(at, mask=known, other=0.0)
        ff += tl.load(at + 1, mask=known, other=0.0)
        zz += tl.load(at + 2, mask=known, other=0.0)
        yy += tl.load(at + 3, mask=known, other=0.0)
    return tl.sum(gg, 0), tl.sum(ff, 0), tl.sum(zz, 0), tl.sum(yy, 0)


@triton.jit(do_not_specialize=["count"])
def _judge(
    norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, counter,
    batch, chunks, count, most, tol, precision, eps, noise, flight,
    COUNTED: tl.constexpr, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`Ledger.accepts` and `Ledger.note`, then the weights of `PlainSweep._learn`: one sample.

    In one warp: a second could read a sample's numbers after the first has replaced them.
    """
    b = tl.program_id(0).to(tl.int64)
    if COUNTED:
        count = tl.load(counter)
    kind = real.dtype.element_ty
    gg, ff, zz, yy = _summed_norms(norms, b, chunks, CHUNKS)
    new_absolute = tl.sqrt(gg).to(kind)
    of_z = tl.sqrt(zz).to(kind)
    at = real + b
    first_absolute = tl.load(at + 2 * batch)
    first_size = tl.load(at + 3 * batch)
    if LINEAR:
        size = tl.load(scale + b)
    else:
        size = tl.maximum(tl.sqrt(ff).to(kind), of_z)
        size = tl.maximum(size, precision * first_size)

    # Ledger
    was_active = tl.load(whole + b) != 0
    good = was_active & (new_absolute + size < INFINITY)
    before = tl.load(at + batch)
    absolute = tl.where(good, new_absolute, tl.load(at))
    new_relative = tl.where(new_absolute > 0, new_absolute / size, new_absolute)
    relative = tl.where(good, new_relative, before)
    residual = relative if RELATIVE_STOP else absolute
    code = tl.load(whole + batch + b)
    code = tl.where(was_active & (good == 0), NONFINITE, code)
    active = good
    if WATCH:
        peak = tl.maximum(tl.load(at + 4 * batch), absolute)
        tl.store(at + 4 * batch, peak)
        at_rounding = good & (relative <= 0.5 * precision) & (relative >= before)
        converged = good & (residual <= tol)
        if RELATIVE_STOP and not LINEAR:
            constant = tl.abs(absolute - first_absolute) <= 1e-3 * first_absolute
            hidden = precision * size > flight * peak
            flown = (size > 10 * first_size) & (hidden | (absolute > tl.sqrt(tol) * peak))
            converged = converged & (constant == 0) & (flown == 0)
        at_rounding = at_rounding & (converged == 0)
        code = tl.where(converged, CONVERGED, code)
        code = tl.where(at_rounding, ROUNDING, code)
        active = good & (converged == 0) & (at_rounding == 0)
        best = tl.load(at + 5 * batch)
        better = good & (absolute < best)
        tl.store(at + 5 * batch, tl.where(better, absolute, best))
        tl.store(at + 6 * batch, tl.where(better, residual, tl.load(at + 6 * batch)))
        best_step = tl.load(whole + 3 * batch + b)
        tl.store(whole + 3 * batch + b, tl.where(better, count, best_step))
    tl.store(at, absolute)
    tl.store(at + batch, relative)
    tl.store(trace + (count - 1) * batch + b, residual)
    tl.store(whole + b, active.to(tl.int32))
    tl.store(whole + batch + b, code)
    tl.store(whole + 2 * batch + b, tl.where(was_active, count, tl.load(whole + 2 * batch + b)))

    # The new row of G, and d
    place = tl.arange(0, PLACES)
    a = tl.zeros((PLACES,), dtype=kind)
    row = tl.zeros((PLACES,), dtype=kind)
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        known = (c < chunks)[:, None] & (place < count)[None, :]
        where = partial + ((b * chunks + c) * 2 * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=known, other=0.0), 0)
        row += tl.sum(tl.load(where + PLACES, mask=known, other=0.0), 0)
    last = count - 1
    of_b = gram + b * PLACES * PLACES
    tl.store(of_b + last * PLACES + place, row, mask=place < count)
    tl.store(of_b + place * PLACES + last, row, mask=place < last)

    d = tl.zeros((PLACES,), dtype=kind)
    newest_d = tl.sum(d, 0)  # d_j of the j under way
    quadratic = tl.sum(d, 0)  # Σ d_l d_m G_lm over the j so far
    for j in range(0, last):
        of_j = tl.load(of_b + j * PLACES + place, mask=place <= j, other=0.0)
        squared = tl.load(of_b + j * PLACES + j)
        inner = tl.sum(tl.where(d != 0, of_j * d, 0.0), 0)
        quadratic += tl.where(newest_d != 0, newest_d * (2 * inner - squared * newest_d), 0.0)
        numerator = inner + tl.sum(tl.where(place == j, a, 0.0), 0)
        kept = tl.load(keep + b * PLACES + j) != 0
        newest_d = tl.where(kept, numerator / squared, 0.0)
        d = tl.where(place == j + 1, newest_d, d)

    # Factor t − 1
    squared = tl.sum(tl.where(place == last, row, 0.0), 0)
    of_newest = tl.sum(tl.where(d != 0, row * d, 0.0), 0)
    inner = of_newest + tl.sum(tl.where(place == last, a, 0.0), 0)
    quadratic += tl.where(newest_d != 0, newest_d * (2 * of_newest - squared * newest_d), 0.0)
    of_q = gg.to(kind) + 2 * tl.sum(tl.where(d != 0, a * d, 0.0), 0) + quadratic
    difference = tl.sqrt(tl.maximum(squared - 2 * inner + of_q, 0.0))  # ‖s − q‖
    denominator = squared - inner
    sound = tl.abs(denominator) > 1e3 * eps * tl.sqrt(squared) * difference
    change = tl.sqrt(yy).to(kind)
    sound = sound & (change > noise * (of_z + new_absolute))
    kept = good & sound
    tl.store(keep + b * PLACES + last, kept.to(tl.int8))
    longer = tl.where(kept, squared / denominator, 1.0)
    tl.store(weight + b * PLACES + place, tl.where(good, longer * d, 0.0))
    tl.store(lead + b, tl.where(good, longer, 0.0))
    tl.store(moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def _weighted_steps(total, base, weight, lane, row, length, d, count, TILE: tl.constexpr):
    """total + Σ weight_j s_j over the steps of one sample."""
    for first in range(0, count, TILE):
        for i in tl.static_range(TILE):
            j = first + i
            w = tl.load(weight + j, mask=j < count, other=0.0)
            # What is not used may hold anything.
            used = lane < tl.where(w != 0, length, 0)
            s = tl.load(base + tl.cast(j, tl.int64) * d + row + lane, mask=used, other=0.0)
            total += w * s.to(total.dtype)
    return total


@triton.jit(do_not_specialize=["count"])
def _step(
    z, fz, steps, parts, table, weight, lead, moves, counter, batch, d, step_stride, count,
    COUNTED: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """s_t = lead·g + Σ weight_j s_j into the store, and z + s_t into z: one chunk."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if COUNTED:
        count = tl.load(counter)
    kind = z.dtype.element_ty
    lane, row, length, in_rows, in_parts = _place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    column, inside = row + lane, lane < length
    here = tl.load(z + in_rows, mask=inside, other=0.0)
    share = tl.load(lead + b)
    base = steps + b * step_stride
    total = tl.zeros_like(here)
    if share != 0:
        there = tl.load(fz + in_parts, mask=inside, other=0.0).to(kind)
        total = share * (there - here)
        total = _weighted_steps(total, base, weight + b * PLACES, lane, row, length, d, count, TILE)
    step = total.to(steps.dtype.element_ty)
    tl.store(base + tl.cast(count, tl.int64) * d + column, step, mask=inside)
    if tl.load(moves + b) != 0:
        here += step.to(kind)
        tl.store(z + in_rows, here, mask=inside)
        if PARTS:
            tl.store(parts + in_parts, here.to(parts.dtype.element_ty), mask=inside)


@triton.jit
def _rebuild(
    first, z, steps, at, taken, table, batch, d, step_stride,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = z_0 + s_0 + … + s_{at−1}, by the additions of the solve, for who must go back."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wanted = tl.load(at + b)
    if wanted < tl.load(taken + b):
        lane, row, length, in_rows, _in_parts = _place(table, b, chunk, batch, d, ALIGNED, BLOCK)
        column, inside = row + lane, lane < length
        total = tl.load(first + in_rows, mask=inside, other=0.0)
        for j in range(0, wanted):
            s = tl.load(steps + b * step_stride + tl.cast(j, tl.int64) * d + column, mask=inside)
            total += s.to(total.dtype)
        tl.store(z + in_rows, total, mask=inside)


@triton.jit
def _dots_of(
    x, steps, table, partial, batch, d, step_stride, chunks, count,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """a_j = s_jᵀx of `ProductInverse.matvec`: one chunk of each."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, row, length, in_rows, _in_parts = _place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    column, inside = row + lane, lane < length
    here = tl.load(x + in_rows, mask=inside, other=0.0)
    base = steps + b * step_stride
    out = partial + (b * chunks + chunk) * PLACES
    for first in range(0, count, TILE):
        j = first + tl.arange(0, TILE)
        known = j < count
        where = j.to(tl.int64)[:, None] * d + column[None, :]
        s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0.0)
        tl.store(out + j, tl.sum(s.to(here.dtype) * here[None, :], 1), mask=known)


@triton.jit
def _weights_of(
    partial, gram, keep, weight, chunks, count,
    TRANSPOSED: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`gdeq.product.weights` or `transposed_weights`: one sample."""
    b = tl.program_id(0).to(tl.int64)
    kind = gram.dtype.element_ty
    place = tl.arange(0, PLACES)
    a = tl.zeros((PLACES,), dtype=kind)
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        known = (c < chunks)[:, None] & (place < count)[None, :]
        where = partial + ((b * chunks + c) * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=known, other=0.0), 0)
    of_b = gram + b * PLACES * PLACES
    found = tl.zeros((PLACES,), dtype=kind)
    for i in range(0, count - 1):
        if TRANSPOSED:
            factor = count - 2 - i
            row = factor + 1
            column = factor
            in_row = (place >= row) & (place < count)
        else:
            factor = i
            row = factor
            column = factor + 1
            in_row = place <= row
        of_row = tl.load(of_b + row * PLACES + place, mask=in_row, other=0.0)
        inner = tl.sum(tl.where(found != 0, of_row * found, 0.0), 0)
        inner += tl.sum(tl.where(place == row, a, 0.0), 0)
        squared = tl.load(of_b + factor * PLACES + factor)
        kept = tl.load(keep + b * PLACES + factor) != 0
        found = tl.where(place == column, tl.where(kept, inner / squared, 0.0), found)
    tl.store(weight + b * PLACES + place, found)


@triton.jit
def _apply(
    x, y, steps, table, weight, batch, d, step_stride, count,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """y = −(x + Σ weight_j s_j): one chunk."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, row, length, in_rows, _in_parts = _place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    inside = lane < length
    total = tl.load(x + in_rows, mask=inside, other=0.0)
    base = steps + b * step_stride
    total = _weighted_steps(total, base, weight + b * PLACES, lane, row, length, d, count, TILE)
    tl.store(y + in_rows, -total, mask=inside)


@cache
def _table(sizes: tuple[int, ...], device: torch.device) -> Tensor:  # (chunks, 5)
    """For each chunk: where it is in a row, its part's start and size, where in it, how long."""
    entries = []
    start = 0
    for size in sizes:
        for offset in range(0, size, BLOCK):
            length = min(BLOCK, size - offset)
            entries.append((start + offset, start, size, offset, length))
        start += size
    return torch.tensor(entries, dtype=torch.int64, device=device)


def _places(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


class Sweep:
    """`gdeq.product.PlainSweep`, fused."""

    def __init__(
        self,
        z: Tensor,  # (batch, d)
        sizes: list[int],
        dtype: torch.dtype,
        solver: Solver,
        precision: float,
        max_steps: int,
        scale: Tensor | None,  # (batch,)
    ) -> None:
        batch, d = z.shape
        device = z.device
        self.first, self.z = z.contiguous(), z.clone(memory_format=torch.contiguous_format)
        self.solver, self.precision, self.max_steps = solver, precision, max_steps
        self.scale = scale
        self.table = _table(tuple(sizes), device)
        self.aligned = all(size % ALIGNMENT == 0 for size in sizes)
        self.in_parts = len(sizes) > 1 or dtype != z.dtype
        self.parts = self.z.view(-1)
        if self.in_parts:
            rows = z.to(dtype).split(sizes, dim=1)
            self.parts = torch.cat([row.reshape(-1) for row in rows])
        # In a captured graph, or with tol=0, all places will be used; else the store grows.
        whole = solver.tol == 0 or recording(device)
        self.steps = z.new_empty(
            batch,
            max_steps + 1 if whole else min(max_steps + 1, 8),
            d,
            dtype=store_dtype(z, precision),
        )
        self.places = _places(max_steps + 1)
        self.gram = z.new_zeros(batch, self.places, self.places)
        self.keep = torch.empty(batch, self.places, dtype=torch.int8, device=device)
        self.weight = z.new_empty(batch, self.places)
        self.lead = z.new_empty(batch)
        self.moves = torch.empty(batch, dtype=torch.int32, device=device)
        self.real = z.new_empty(REALS, batch)
        self.whole = torch.empty(WHOLES, batch, dtype=torch.int32, device=device)
        self.trace = z.new_full((max_steps, batch), torch.nan)
        self.counter = self.moves  # of the iterate; read by repeated steps alone
        chunks = len(self.table)
        self.partial = z.new_empty(batch, chunks, 2, self.places)
        self.norms = torch.empty(batch, chunks, 4, dtype=torch.float64, device=device)
        self.returned = self.last_fz = self.parts

    def any_active(self) -> bool:
        return bool(self.whole[ACTIVE].any())

    def take(self, t: int, fz: Tensor) -> None:
        fz = fz.contiguous()
        if t == self.steps.shape[1]:
            self._grow()
        self._launch(t, fz, counted=False)
        # An f that writes into the same memory at each call would leave no trace of the last one.
        reused = t == 0 or fz.data_ptr() == self.returned.data_ptr()
        self.returned, self.last_fz = fz, fz.clone() if reused else fz

    def prepare_repetition(self) -> None:
        """From here on the number of the iterate is kept on the device, and `take_next` used."""
        device = self.z.device
        self.counter = torch.ones((), dtype=torch.int32, device=device)
        self.unfinished = torch.ones(1, dtype=torch.int64, device=device)
        self.last_fz = self.last_fz.clone()

    def take_next(self, fz: Tensor) -> None:
        fz = fz.contiguous()
        self._launch(1, fz, counted=True)
        self.last_fz.copy_(fz)
        self.counter += 1
        torch.sum(self.whole[ACTIVE], 0, keepdim=True, out=self.unfinished)

    def _launch(self, t: int, fz: Tensor, counted: bool) -> None:
        with on_device(self.z):
            self._launch_here(t, fz, counted)

    def _launch_here(self, t: int, fz: Tensor, counted: bool) -> None:
        batch, d = self.z.shape
        stride, chunks = self.steps.stride(0), len(self.table)
        grid = (chunks, batch)
        _dots[grid](
            self.z, fz, self.last_fz, self.steps, self.table, self.partial, self.norms,
            self.counter, batch, d, stride, chunks, t,
            COUNTED=counted, ALIGNED=self.aligned, BLOCK=BLOCK, TILE=TILE, PLACES=self.places,
            num_warps=WARPS,
        )  # fmt: skip
        solver = self.solver
        judge = _judge_first if t == 0 else _judge
        judge[(batch,)](
            self.norms, self.partial, self.real if self.scale is None else self.scale,
            self.gram, self.keep, self.weight, self.lead, self.moves, self.real, self.whole,
            self.trace, self.counter, batch, chunks, t, self.max_steps,
            float(solver.tol), float(self.precision),
            float(torch.finfo(self.z.dtype).eps), noise_level(self.precision),
            flight_limit(solver.tol, self.precision),
            COUNTED=counted, WATCH=solver.tol > 0, RELATIVE_STOP=solver.stop == "relative",
            LINEAR=self.scale is not None, PLACES=self.places, CHUNKS=32, num_warps=1,
        )  # fmt: skip
        _step[grid](
            self.z, fz, self.steps, self.parts, self.table, self.weight, self.lead, self.moves,
            self.counter, batch, d, stride, t,
            COUNTED=counted, PARTS=self.in_parts, ALIGNED=self.aligned,
            BLOCK=BLOCK, TILE=TILE, PLACES=self.places, num_warps=WARPS,
        )  # fmt: skip

    def _grow(self) -> None:
        batch, places, d = self.steps.shape
        larger = self.steps.new_empty(batch, min(2 * places, self.max_steps + 1), d)
        larger[:, :places] = self.steps
        self.steps = larger

    @property
    def ledger(self) -> Ledger:
        """What the kernels noted, in the loop's terms."""
        ledger = Ledger.__new__(Ledger)
        ledger.solver, ledger.precision = self.solver, self.precision
        ledger.linear, ledger.watch = self.scale is not None, self.solver.tol > 0
        ledger.rounding = 0.5 * self.precision
        real, whole = self.real, self.whole
        ledger.absolute, ledger.relative = real[ABSOLUTE], real[RELATIVE]
        ledger.residual = real[RELATIVE if self.solver.stop == "relative" else ABSOLUTE]
        ledger.first_absolute, ledger.first_size = real[FIRST_ABSOLUTE], real[FIRST_SIZE]
        ledger.peak, ledger.best_absolute = real[PEAK], real[BEST_ABSOLUTE]
        ledger.best_residual = real[BEST_RESIDUAL]
        codes, steps, best = whole[1:].long()
        ledger.active, ledger.codes = whole[ACTIVE] != 0, codes
        ledger.steps, ledger.best_step = steps, best
        return ledger

    def settle(self, at: Tensor, last: int) -> tuple[Tensor, ProductInverse]:  # at: (batch,)
        batch, d = self.z.shape
        taken = self.whole[STEPS].long()
        with on_device(self.z):
            _rebuild[(len(self.table), batch)](
                self.first, self.z, self.steps, at.long(), taken, self.table,
                batch, d, self.steps.stride(0), ALIGNED=self.aligned, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        place = torch.arange(self.places, device=at.device)
        keep = (self.keep != 0) & (place < at.unsqueeze(1))
        return self.z, ProductInverse(self.steps[:, : last + 1], self.gram, keep)


def apply(steps: Tensor, gram: Tensor, keep: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """`ProductInverse.matvec`."""
    with on_device(x):
        return _applied(steps, gram, keep, x, transposed)


def _applied(steps: Tensor, gram: Tensor, keep: Tensor, x: Tensor, transposed: bool) -> Tensor:
    batch, count, d = steps.shape
    x = x.contiguous()
    kind = torch.promote_types(x.dtype, gram.dtype)
    x = x.to(kind)
    table = _table((d,), x.device)
    chunks, places = len(table), _places(gram.shape[1])
    if places != gram.shape[1]:  # made by the plain twin
        more = places - gram.shape[1]
        gram, keep = pad(gram, (0, more, 0, more)), pad(keep, (0, more))
    partial = gram.new_empty(batch, chunks, places)
    weight = gram.new_empty(batch, places)
    kept = keep.to(torch.int8)
    aligned = d % ALIGNMENT == 0
    stride = steps.stride(0)
    _dots_of[(chunks, batch)](
        x, steps, table, partial, batch, d, stride, chunks, count,
        ALIGNED=aligned, BLOCK=BLOCK, TILE=TILE, PLACES=places, num_warps=WARPS,
    )  # fmt: skip
    _weights_of[(batch,)](
        partial, gram, kept, weight, chunks, count,
        TRANSPOSED=transposed, PLACES=places, CHUNKS=32, num_warps=1,
    )  # fmt: skip
    y = torch.empty_like(x)
    _apply[(chunks, batch)](
        x, y, steps, table, weight, batch, d, stride, count,
        ALIGNED=aligned, BLOCK=BLOCK, TILE=TILE, PLACES=places, num_warps=WARPS,
    )  # fmt: skip
    return y
