"""What `gdeq.kernels.product` decides for a sample between its inner products and its next step.

`_judge_first` and `_judge_next` say which lines of `gdeq.ledger` and `gdeq.product` they compute.
In one warp: a second could read a sample's numbers after the first has replaced them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdeq.solution import Status

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


@triton.jit
def _sums(
    norms, partial, b, chunks, count,
    MEASURED: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """‖g‖², ‖f(z)‖², ‖z‖², ‖y‖² (if MEASURED), a and the new row of G, over the chunks of a sample.

    Past the nearest cache: other programs of the same kernel may have written them.
    """
    gg = tl.zeros((CHUNKS,), dtype=tl.float64)
    ff, zz, yy = gg, gg, gg
    place = tl.arange(0, PLACES)
    a = tl.zeros((PLACES,), dtype=partial.dtype.element_ty)
    row = a
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        at, known = norms + (b * chunks + c) * 4, c < chunks
        gg += tl.load(at, mask=known, other=0.0, cache_modifier=".cg")
        ff += tl.load(at + 1, mask=known, other=0.0, cache_modifier=".cg")
        zz += tl.load(at + 2, mask=known, other=0.0, cache_modifier=".cg")
        if MEASURED:
            yy += tl.load(at + 3, mask=known, other=0.0, cache_modifier=".cg")
        known = known[:, None] & (place < count)[None, :]
        where = partial + ((b * chunks + c) * 2 * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=known, other=0.0, cache_modifier=".cg"), 0)
        where += PLACES
        row += tl.sum(tl.load(where, mask=known, other=0.0, cache_modifier=".cg"), 0)
    return tl.sum(gg, 0), tl.sum(ff, 0), tl.sum(zz, 0), tl.sum(yy, 0), a, row


@triton.jit
def _row(gram, keep, b, j, place, PLACES: tl.constexpr):
    """G_jl for l ≤ j, G_jj, and whether factor j is kept."""
    row = tl.load(gram + j * PLACES + place, mask=place <= j, other=0.0)
    squared = tl.load(gram + j * PLACES + j)
    return row, squared, tl.load(keep + b * PLACES + j) != 0


@triton.jit
def _judge_first(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
    batch, chunks, count, most, tol, precision, eps, noise, flight,
    MEASURED: tl.constexpr, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`Ledger.__init__`; the first step is g."""
    kind = real.dtype.element_ty
    gg, ff, zz, _yy, _a, _row = _sums(norms, partial, b, chunks, 0, False, PLACES, CHUNKS)
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
def _judge_next(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
    batch, chunks, count, most, tol, precision, eps, noise, flight,
    MEASURED: tl.constexpr, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`Ledger.accepts` and `Ledger.note`, then the weights of `PlainSweep._learn`: one sample."""
    kind = real.dtype.element_ty
    gg, ff, zz, yy, a, row = _sums(norms, partial, b, chunks, count, MEASURED, PLACES, CHUNKS)
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
    last_absolute = tl.load(at)
    absolute = tl.where(good, new_absolute, last_absolute)
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
    last = count - 1
    of_b = gram + b * PLACES * PLACES
    tl.store(of_b + last * PLACES + place, row, mask=place < count)
    tl.store(of_b + place * PLACES + last, row, mask=place < last)

    d = tl.zeros((PLACES,), dtype=kind)
    newest_d = tl.sum(d, 0)  # d_j of the j under way
    quadratic = tl.sum(d, 0)  # Σ d_l d_m G_lm over the j so far
    # Each row is loaded while the one before is used: the loop waits for sums, not for memory.
    of_j, squared, kept = _row(of_b, keep, b, 0, place, PLACES)
    for j in range(0, last):
        of_next, squared_next, kept_next = _row(
            of_b, keep, b, tl.minimum(j + 1, tl.maximum(last - 1, 0)), place, PLACES
        )
        inner = tl.sum(tl.where(d != 0, of_j * d, 0.0), 0)
        quadratic += tl.where(newest_d != 0, newest_d * (2 * inner - squared * newest_d), 0.0)
        numerator = inner + tl.sum(tl.where(place == j, a, 0.0), 0)
        newest_d = tl.where(kept, numerator / squared, 0.0)
        d = tl.where(place == j + 1, newest_d, d)
        of_j, squared, kept = of_next, squared_next, kept_next

    # Factor t − 1
    squared = tl.sum(tl.where(place == last, row, 0.0), 0)
    of_newest = tl.sum(tl.where(d != 0, row * d, 0.0), 0)
    inner = of_newest + tl.sum(tl.where(place == last, a, 0.0), 0)
    quadratic += tl.where(newest_d != 0, newest_d * (2 * of_newest - squared * newest_d), 0.0)
    of_q = gg.to(kind) + 2 * tl.sum(tl.where(d != 0, a * d, 0.0), 0) + quadratic
    difference = tl.sqrt(tl.maximum(squared - 2 * inner + of_q, 0.0))  # ‖s − q‖
    denominator = squared - inner
    sound = tl.abs(denominator) > 1e3 * eps * tl.sqrt(squared) * difference
    if MEASURED:
        change = tl.sqrt(yy).to(kind)
    else:  # y = g_t − g_{t−1}, and s_{t−1} was made of g_{t−1} and steps whose products are known
        of_g = tl.load(lead + b)
        of_s = tl.load(weight + b * PLACES + place, mask=place < last, other=0.0)
        product = tl.sum(tl.where(place == last, a, 0.0), 0)
        product -= tl.sum(tl.where(of_s != 0, of_s * a, 0.0), 0)
        product = tl.where(of_g != 0, product / of_g, 0.0)  # g_{t−1}ᵀg_t
        square = gg.to(kind) - 2 * product + last_absolute * last_absolute
        change = tl.sqrt(tl.maximum(square, 0.0))
    sound = sound & (change > noise * (of_z + new_absolute))
    kept = good & sound
    tl.store(keep + b * PLACES + last, kept.to(tl.int8))
    longer = tl.where(kept, squared / denominator, 1.0)
    tl.store(weight + b * PLACES + place, tl.where(good, longer * d, 0.0))
    tl.store(lead + b, tl.where(good, longer, 0.0))
    tl.store(moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def stay(b, lead, real, trace, batch, count, RELATIVE_STOP: tl.constexpr):
    """`_judge_next` of a sample that is done: what it says once more, and takes no step."""
    kept = real + b
    if RELATIVE_STOP:
        kept += batch
    tl.store(trace + (count - 1) * batch + b, tl.load(kept))
    tl.store(lead + b, 0.0)


@triton.jit
def judge(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
    batch, chunks, count, most, tol, precision, eps, noise, flight,
    FIRST: tl.constexpr, MEASURED: tl.constexpr,
    WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What follows for sample b from its inner products."""
    if FIRST:
        _judge_first(
            b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
            batch, chunks, count, most, tol, precision, eps, noise, flight,
            MEASURED, WATCH, RELATIVE_STOP, LINEAR, PLACES, CHUNKS,
        )  # fmt: skip
    else:
        _judge_next(
            b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
            batch, chunks, count, most, tol, precision, eps, noise, flight,
            MEASURED, WATCH, RELATIVE_STOP, LINEAR, PLACES, CHUNKS,
        )  # fmt: skip
