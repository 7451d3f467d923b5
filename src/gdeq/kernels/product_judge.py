"""What `gdeq.kernels.product` decides for a sample between its inner products and its next step.

Each function says which lines of `gdeq.ledger` and `gdeq.product` it computes.
In one warp: a second could read a sample's numbers after the first has replaced them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdeq.kernels import anderson_judge
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
MAX_STEPS = tl.constexpr(int(Status.MAX_STEPS))
FIXED_STEPS = tl.constexpr(int(Status.FIXED_STEPS))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
STALLED = tl.constexpr(int(Status.STALLED))
INFINITY = tl.constexpr(float("inf"))
AHEAD = tl.constexpr(8)  # rows of G that are under way from memory


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
        where = partial + ((b * chunks + c) * 2 * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=known[:, None], other=0.0, cache_modifier=".cg"), 0)
        where += PLACES
        row += tl.sum(tl.load(where, mask=known[:, None], other=0.0, cache_modifier=".cg"), 0)
    # Masked here, not where it is loaded: 16 bytes come at once.
    a, row = tl.where(place < count, a, 0.0), tl.where(place < count, row, 0.0)
    return tl.sum(gg, 0), tl.sum(ff, 0), tl.sum(zz, 0), tl.sum(yy, 0), a, row


@triton.jit
def one_more(x, inner, diagonal, kept, of_column, place, row, column):
    """The next of the weights x, and a + Gx with it; of_column: G_l,column of all l.

    Weight ``column`` is what the factor makes of row ``row``; ``diagonal`` and ``kept`` are of the
    factor of each row.  What is not used may hold anything.
    """
    newest = tl.sum(tl.where((place == row) & kept, inner / diagonal, 0.0), 0)
    more = tl.where(newest != 0, of_column * newest, 0.0)
    return tl.where(place == column, newest, x), inner + more


@triton.jit
def _judge_first(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, unfinished,
    coordinates, products,
    batch, chunks, count, most, tol, precision, eps, noise, flight, mixing, ridge, coarse, blur,
    MEMORY: tl.constexpr, WINDOW: tl.constexpr,
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
        tl.atomic_add(unfinished, -1, mask=active == 0, sem="relaxed")
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
    for j in range(0, PLACES):
        tl.store(gram + (b * PLACES + j) * PLACES + place, tl.zeros((PLACES,), dtype=kind))
    if MEMORY:
        anderson_judge.begin(b, gg, coordinates, products, lead, finite, mixing, PLACES)
    else:
        tl.store(lead + b, tl.where(finite, 1.0, 0.0).to(kind))
    tl.store(moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def _next_step(
    b, a, row, gg, yy, of_z, new_absolute, last_absolute, of_g, of_s, diagonal, kept, good,
    count, of_b, keep, weight, lead, eps, noise,
    MEASURED: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The factor and the weights of `PlainSweep._learn`.

    of_g, of_s: what the newest step was made of.  diagonal, kept: of the factors so far.
    """
    kind = lead.dtype.element_ty
    place = tl.arange(0, PLACES)
    last = count - 1
    # d, by columns of G: those of all steps but the newest are in memory, as rows
    d = tl.zeros((PLACES,), dtype=kind)
    inner = a  # a + Gd
    for j in tl.range(0, last, num_stages=AHEAD):
        known = tl.where(j + 1 < last, last, 0)
        column = tl.load(of_b + (j + 1) * PLACES + place, mask=place < known, other=0.0)
        column = tl.where(j + 1 < last, column, row)
        d, inner = one_more(d, inner, diagonal, kept, column, place, j, j + 1)
    tl.store(of_b + last * PLACES + place, row, mask=place < count)
    tl.store(of_b + place * PLACES + last, row, mask=place < last)

    # Factor t − 1
    squared = tl.sum(tl.where(place == last, row, 0.0), 0)
    of_g_t = tl.sum(tl.where(place == last, a, 0.0), 0)  # s_{t−1}ᵀg_t
    newest = of_g_t + tl.sum(tl.where(d != 0, row * d, 0.0), 0)  # s_{t−1}ᵀq
    inner = tl.where(place == last, newest, inner)
    of_q = gg.to(kind) + tl.sum(tl.where(d != 0, d * (a + inner), 0.0), 0)  # ‖q‖²
    difference = tl.sqrt(tl.maximum(squared - 2 * newest + of_q, 0.0))  # ‖s − q‖
    denominator = squared - newest
    sound = tl.abs(denominator) > 1e3 * eps * tl.sqrt(squared) * difference
    if MEASURED:
        change = tl.sqrt(yy).to(kind)
    else:  # y = g_t − g_{t−1}, and s_{t−1} was made of g_{t−1} and steps whose products are known
        product = of_g_t - tl.sum(tl.where(of_s != 0, of_s * a, 0.0), 0)
        product = tl.where(of_g != 0, product / of_g, 0.0)  # g_{t−1}ᵀg_t
        square = gg.to(kind) - 2 * product + last_absolute * last_absolute
        change = tl.sqrt(tl.maximum(square, 0.0))
    sound = sound & (change > noise * (of_z + new_absolute))
    keeps = good & sound
    tl.store(keep + b * PLACES + last, keeps.to(tl.int8))
    longer = tl.where(keeps, squared / denominator, 1.0)
    tl.store(weight + b * PLACES + place, tl.where(good, longer * d, 0.0))
    tl.store(lead + b, tl.where(good, longer, 0.0))


@triton.jit
def _judge_next(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, unfinished,
    coordinates, products,
    batch, chunks, count, most, tol, precision, eps, noise, flight, mixing, ridge, coarse, blur,
    MEMORY: tl.constexpr, WINDOW: tl.constexpr,
    MEASURED: tl.constexpr, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`Ledger.accepts` and `Ledger.note`, then the next step of one sample."""
    kind = real.dtype.element_ty
    place = tl.arange(0, PLACES)
    last = count - 1
    of_b = gram + b * PLACES * PLACES
    # All that is known of the sample is asked for before the first sum: it comes from memory (f has
    # emptied the cache), and nothing waits for one part of it after another.
    at = real + b
    last_absolute = tl.load(at)
    before = tl.load(at + batch)
    first_absolute = tl.load(at + 2 * batch)
    first_size = tl.load(at + 3 * batch)
    was_active = tl.load(whole + b) != 0
    code = tl.load(whole + batch + b)
    steps = tl.load(whole + 2 * batch + b)
    if WATCH:
        peak = tl.load(at + 4 * batch)
        best = tl.load(at + 5 * batch)
        best_residual = tl.load(at + 6 * batch)
        best_step = tl.load(whole + 3 * batch + b)
    if LINEAR:
        size = tl.load(scale + b)
    if not MEMORY:
        of_g = tl.load(lead + b)
        of_s = tl.load(weight + b * PLACES + place, mask=place < last, other=0.0)
        diagonal = tl.load(of_b + place * (PLACES + 1), mask=place < last, other=1.0)
        kept = tl.load(keep + b * PLACES + place, mask=place < last, other=0) != 0

    gg, ff, zz, yy, a, row = _sums(norms, partial, b, chunks, count, MEASURED, PLACES, CHUNKS)
    new_absolute = tl.sqrt(gg).to(kind)
    of_z = tl.sqrt(zz).to(kind)
    if not LINEAR:
        size = tl.maximum(tl.sqrt(ff).to(kind), of_z)
        size = tl.maximum(size, precision * first_size)

    # Ledger
    good = was_active & (new_absolute + size < INFINITY)
    absolute = tl.where(good, new_absolute, last_absolute)
    new_relative = tl.where(new_absolute > 0, new_absolute / size, new_absolute)
    relative = tl.where(good, new_relative, before)
    residual = relative if RELATIVE_STOP else absolute
    code = tl.where(was_active & (good == 0), NONFINITE, code)
    active = good
    if WATCH:
        peak = tl.maximum(peak, absolute)
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
        better = good & (absolute < best)
        tl.store(at + 4 * batch, peak)
        tl.store(at + 5 * batch, tl.where(better, absolute, best))
        tl.store(at + 6 * batch, tl.where(better, residual, best_residual))
        tl.store(whole + 3 * batch + b, tl.where(better, count, best_step))
        tl.atomic_add(unfinished, -1, mask=was_active & (active == 0), sem="relaxed")
    tl.store(at, absolute)
    tl.store(at + batch, relative)
    tl.store(trace + (count - 1) * batch + b, residual)
    tl.store(whole + b, active.to(tl.int32))
    tl.store(whole + batch + b, code)
    tl.store(whole + 2 * batch + b, tl.where(was_active, count, steps))

    if MEMORY:
        anderson_judge.next_step(
            b, a, row, gg, of_z, new_absolute, good, count,
            gram, keep, weight, lead, coordinates, products, noise, mixing, ridge, coarse, blur,
            MEMORY, WINDOW, PLACES,
        )  # fmt: skip
    else:
        _next_step(
            b, a, row, gg, yy, of_z, new_absolute, last_absolute, of_g, of_s, diagonal, kept, good,
            count, of_b, keep, weight, lead, eps, noise, MEASURED, PLACES,
        )  # fmt: skip
    tl.store(moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def finish(b, real, whole, batch, precision, WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr):
    """`Ledger.finish`: code, residual and iterate of what is returned; the last residual, steps."""
    at = real + b
    absolute = tl.load(at)
    relative = tl.load(at + batch)
    first_absolute = tl.load(at + 2 * batch)
    code = tl.load(whole + batch + b)
    steps = tl.load(whole + 2 * batch + b)
    last_residual = relative if RELATIVE_STOP else absolute
    residual = last_residual
    unfinished = code == RUNNING
    code = tl.where(unfinished, MAX_STEPS if WATCH else FIXED_STEPS, code)
    code = tl.where(unfinished & (absolute > first_absolute), DIVERGED, code)
    constant = tl.abs(absolute - first_absolute) <= 1e-3 * first_absolute
    code = tl.where(unfinished & constant & (relative > 0.5 * precision), STALLED, code)
    if WATCH:
        missed = (code != CONVERGED) & (code != NONFINITE_START)
        residual = tl.where(missed, tl.load(at + 6 * batch), residual)
        wanted = tl.where(missed, tl.load(whole + 3 * batch + b), steps)
    else:  # the step at which f was no longer finite was not taken
        wanted = tl.where(code == NONFINITE, steps - 1, steps)
    return code, residual, wanted, last_residual, steps


@triton.jit
def judge(
    b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, unfinished,
    coordinates, products,
    batch, chunks, count, most, tol, precision, eps, noise, flight, mixing, ridge, coarse, blur,
    MEMORY: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, MEASURED: tl.constexpr,
    WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What follows for sample b from its inner products."""
    if FIRST:
        _judge_first(
            b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
            unfinished, coordinates, products, batch, chunks, count, most, tol, precision, eps,
            noise, flight, mixing, ridge, coarse, blur, MEMORY, WINDOW, MEASURED, WATCH,
            RELATIVE_STOP, LINEAR, PLACES, CHUNKS,
        )  # fmt: skip
    else:
        _judge_next(
            b, norms, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
            unfinished, coordinates, products, batch, chunks, count, most, tol, precision, eps,
            noise, flight, mixing, ridge, coarse, blur, MEMORY, WINDOW, MEASURED, WATCH,
            RELATIVE_STOP, LINEAR, PLACES, CHUNKS,
        )  # fmt: skip
