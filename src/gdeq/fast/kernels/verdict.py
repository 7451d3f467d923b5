"""What a sweep decides for a sample between its inner products and its next step.

Each function says which lines of `gdeq.loop` or of the twin in tests/oracles/sweep.py it
computes.  They run in one warp: a second could read a sample's numbers after the first has replaced
them.  ``samples``, ``limits`` and ``KIND`` are described in `sweep`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdeq.fast.kernels import anderson
from gdeq.fast.kernels.chunks import INFINITY
from gdeq.solution import Status

# Rows of the numbers kept for each sample; after them the residuals of its parts, and those of the
# best iterate.
# absolute, relative, first absolute, first size, peak, best absolute, best residual
REALS = tl.constexpr(7)
ACTIVE, CODE, STEPS, BEST_STEP = range(4)  # of the whole numbers
WHOLES = 4
CHUNKS = tl.constexpr(32)  # that are summed at once

RUNNING = tl.constexpr(int(Status.RUNNING))
CONVERGED = tl.constexpr(int(Status.CONVERGED))
ROUNDING = tl.constexpr(int(Status.ROUNDING))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
NONFINITE_START = tl.constexpr(int(Status.NONFINITE_START))
MAX_STEPS = tl.constexpr(int(Status.MAX_STEPS))
FIXED_STEPS = tl.constexpr(int(Status.FIXED_STEPS))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
STALLED = tl.constexpr(int(Status.STALLED))
AHEAD = tl.constexpr(8)  # rows of G that are under way from memory


@triton.jit
def _sums(b, samples, chunks, count, KIND: tl.constexpr):
    """‖g‖², ‖f(z)‖², ‖z‖², ‖y‖² (if MEASURED), a and the new row of G, over the chunks of a sample.

    With them the first three of each part, if there is more than one.
    Past the nearest cache: other programs of the same kernel may have written them.
    """
    PLACES: tl.constexpr = KIND.PLACES
    PARTS: tl.constexpr = KIND.PARTS
    gg = tl.zeros((CHUNKS,), dtype=tl.float64)
    ff, zz, yy = gg, gg, gg
    if PARTS > 1:
        each_g = tl.zeros((PARTS, CHUNKS), dtype=tl.float64)
        each_f, each_z = each_g, each_g
        part = tl.arange(0, PARTS)
        low, high = tl.load(samples.bounds + part), tl.load(samples.bounds + part + 1)
    place = tl.arange(0, PLACES)
    a = tl.zeros((PLACES,), dtype=samples.partial.dtype.element_ty)
    row = a
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        at, known = samples.norms + (b * chunks + c) * 4, c < chunks
        of_g = tl.load(at, mask=known, other=0.0, cache_modifier=".cg")
        of_f = tl.load(at + 1, mask=known, other=0.0, cache_modifier=".cg")
        of_z = tl.load(at + 2, mask=known, other=0.0, cache_modifier=".cg")
        gg += of_g
        ff += of_f
        zz += of_z
        if PARTS > 1:
            inside = (c[None, :] >= low[:, None]) & (c[None, :] < high[:, None])
            each_g += tl.where(inside, of_g[None, :], 0.0)
            each_f += tl.where(inside, of_f[None, :], 0.0)
            each_z += tl.where(inside, of_z[None, :], 0.0)
        if KIND.MEASURED:
            yy += tl.load(at + 3, mask=known, other=0.0, cache_modifier=".cg")
        where = samples.partial + ((b * chunks + c) * 2 * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=known[:, None], other=0.0, cache_modifier=".cg"), 0)
        where += PLACES
        row += tl.sum(tl.load(where, mask=known[:, None], other=0.0, cache_modifier=".cg"), 0)
    # Masked here, not where it is loaded: 16 bytes come at once.
    a, row = tl.where(place < count, a, 0.0), tl.where(place < count, row, 0.0)
    gg, ff, zz, yy = tl.sum(gg, 0), tl.sum(ff, 0), tl.sum(zz, 0), tl.sum(yy, 0)
    if PARTS > 1:
        each_g, each_f, each_z = tl.sum(each_g, 1), tl.sum(each_f, 1), tl.sum(each_z, 1)
    else:
        each_g, each_f, each_z = gg, ff, zz
    return gg, ff, zz, yy, a, row, each_g, each_f, each_z


@triton.jit
def _of_parts(each_g, each_f, each_z, size, least):
    """`Norms.parts`, from ‖g‖², ‖f(z)‖² and ‖z‖² of each."""
    kind = size.dtype
    of_g = tl.sqrt(each_g).to(kind)
    own = tl.maximum(tl.sqrt(each_f).to(kind), tl.sqrt(each_z).to(kind))
    own = tl.maximum(own, least * size)
    return tl.where(of_g > 0, of_g / own, of_g)


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
def _judge_first(b, samples, limits, batch, chunks, count, most, KIND: tl.constexpr):
    """`Ledger.__init__`; the first step is g."""
    PLACES: tl.constexpr = KIND.PLACES
    PARTS: tl.constexpr = KIND.PARTS
    kind = samples.real.dtype.element_ty
    gg, ff, zz, _yy, _a, _row, each_g, each_f, each_z = _sums(b, samples, chunks, 0, KIND)
    absolute = tl.sqrt(gg).to(kind)
    of_z = tl.sqrt(zz).to(kind)
    claimed = absolute
    if KIND.LINEAR:
        size = tl.load(samples.scale + b)
        claimed = tl.maximum(absolute, 0.5 * limits.precision * (size + of_z))
    else:
        size = tl.maximum(tl.sqrt(ff).to(kind), of_z)
    relative = tl.where(claimed > 0, claimed / size, claimed)
    at = samples.real + b
    if PARTS > 1:
        of_parts = _of_parts(each_g, each_f, each_z, size, limits.least)
        # Of a sample without a finite f it stays what it is.
        relative = tl.where(claimed < INFINITY, tl.maximum(relative, tl.max(of_parts, 0)), relative)
        rows = (REALS + tl.arange(0, PARTS)) * batch
        tl.store(at + rows, of_parts)
        tl.store(at + PARTS * batch + rows, of_parts)
    residual = relative if KIND.RELATIVE_STOP else absolute
    finite = (absolute < INFINITY) & (size < INFINITY)
    code = tl.where(finite, RUNNING, NONFINITE_START)
    active = finite
    if KIND.WATCH:
        code = tl.where(finite & (residual <= limits.tol), CONVERGED, code)
        active = finite & (residual > limits.tol)
        tl.atomic_add(samples.unfinished, -1, mask=active == 0, sem="relaxed")
    tl.store(at, absolute)
    tl.store(at + batch, relative)
    tl.store(at + 2 * batch, absolute)
    tl.store(at + 3 * batch, size)
    tl.store(at + 4 * batch, absolute)
    tl.store(at + 5 * batch, claimed)
    tl.store(at + 6 * batch, residual)
    tl.store(samples.whole + b, active.to(tl.int32))
    tl.store(samples.whole + batch + b, code)
    tl.store(samples.whole + 2 * batch + b, 0)
    tl.store(samples.whole + 3 * batch + b, 0)
    place = tl.arange(0, PLACES)
    tl.store(samples.weight + b * PLACES + place, tl.zeros((PLACES,), dtype=kind))
    tl.store(samples.keep + b * PLACES + place, tl.zeros((PLACES,), dtype=tl.int8))
    for j in range(0, PLACES):
        tl.store(
            samples.gram + (b * PLACES + j) * PLACES + place,
            tl.zeros((PLACES,), dtype=kind),
        )
    if KIND.MEMORY:
        anderson.begin(b, gg, samples, finite, limits.mixing, KIND)
    else:
        tl.store(samples.lead + b, tl.where(finite, 1.0, 0.0).to(kind))
        if KIND.SECANTS:
            now = tl.where(place == 0, 1.0, 0.0).to(tl.float64)
            tl.store(samples.coordinates + b * PLACES * PLACES + place, now)
    tl.store(samples.moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def _next_step(
    b, a, row, gg, yy, of_z, new_absolute, last_absolute, of_g, of_s, diagonal, kept, good,
    count, samples, limits, KIND: tl.constexpr,
):  # fmt: skip
    """Factor t − 1 and the weights of the next step (`PlainSweep._learn` in the twin).

    of_g, of_s: what the newest step was made of.  diagonal, kept: of the factors so far.
    """
    PLACES: tl.constexpr = KIND.PLACES
    kind = samples.lead.dtype.element_ty
    place = tl.arange(0, PLACES)
    of_b = samples.gram + b * PLACES * PLACES
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
    sound = tl.abs(denominator) > 1e3 * limits.eps * tl.sqrt(squared) * difference
    if KIND.MEASURED:
        change = tl.sqrt(yy).to(kind)
    else:  # y = g_t − g_{t−1}, and s_{t−1} was made of g_{t−1} and steps whose products are known
        product = of_g_t - tl.sum(tl.where(of_s != 0, of_s * a, 0.0), 0)
        product = tl.where(of_g != 0, product / of_g, 0.0)  # g_{t−1}ᵀg_t
        square = gg.to(kind) - 2 * product + last_absolute * last_absolute
        change = tl.sqrt(tl.maximum(square, 0.0))
    sound = sound & (change > limits.noise * (of_z + new_absolute))
    keeps = good & sound
    tl.store(samples.keep + b * PLACES + last, keeps.to(tl.int8))
    longer = tl.where(keeps, squared / denominator, 1.0)
    tl.store(samples.weight + b * PLACES + place, tl.where(good, longer * d, 0.0))
    tl.store(samples.lead + b, tl.where(good, longer, 0.0))
    if KIND.SECANTS:
        now = tl.where(place == count, 1 / longer, -d).to(tl.float64)
        tl.store(samples.coordinates + (b * PLACES + count) * PLACES + place, now)


@triton.jit
def _judge_next(b, samples, limits, batch, chunks, count, most, KIND: tl.constexpr):
    """`Ledger.accepts` and `Ledger.note`, then the next step of one sample."""
    PLACES: tl.constexpr = KIND.PLACES
    PARTS: tl.constexpr = KIND.PARTS
    kind = samples.real.dtype.element_ty
    place = tl.arange(0, PLACES)
    last = count - 1
    of_b = samples.gram + b * PLACES * PLACES
    # All that is known of the sample is asked for before the first sum: it comes from memory (f has
    # emptied the cache), and nothing waits for one part of it after another.
    at = samples.real + b
    last_absolute = tl.load(at)
    before = tl.load(at + batch)
    first_absolute = tl.load(at + 2 * batch)
    first_size = tl.load(at + 3 * batch)
    was_active = tl.load(samples.whole + b) != 0
    code = tl.load(samples.whole + batch + b)
    steps = tl.load(samples.whole + 2 * batch + b)
    if KIND.WATCH:
        peak = tl.load(at + 4 * batch)
        best = tl.load(at + 5 * batch)
        best_residual = tl.load(at + 6 * batch)
        best_step = tl.load(samples.whole + 3 * batch + b)
    if KIND.LINEAR:
        size = tl.load(samples.scale + b)
    if not KIND.MEMORY:
        of_g = tl.load(samples.lead + b)
        of_s = tl.load(samples.weight + b * PLACES + place, mask=place < last, other=0.0)
        diagonal = tl.load(of_b + place * (PLACES + 1), mask=place < last, other=1.0)
        kept = tl.load(samples.keep + b * PLACES + place, mask=place < last, other=0) != 0

    gg, ff, zz, yy, a, row, each_g, each_f, each_z = _sums(b, samples, chunks, count, KIND)
    new_absolute = tl.sqrt(gg).to(kind)
    of_z = tl.sqrt(zz).to(kind)
    if KIND.LINEAR:
        claimed = tl.maximum(new_absolute, 0.5 * limits.precision * (size + of_z))
    else:
        size = tl.maximum(tl.sqrt(ff).to(kind), of_z)
        size = tl.maximum(size, limits.eps * first_size)
        claimed = new_absolute

    # Ledger
    good = was_active & (new_absolute + size < INFINITY)
    absolute = tl.where(good, new_absolute, last_absolute)
    new_relative = tl.where(claimed > 0, claimed / size, claimed)
    if PARTS > 1:
        of_parts = _of_parts(each_g, each_f, each_z, size, limits.least)
        new_relative = tl.maximum(new_relative, tl.max(of_parts, 0))
        part = tl.arange(0, PARTS)
        rows = (REALS + part) * batch
        tl.store(at + rows, of_parts, mask=part < tl.where(good, PARTS, 0))
    relative = tl.where(good, new_relative, before)
    residual = relative if KIND.RELATIVE_STOP else absolute
    code = tl.where(was_active & (good == 0), NONFINITE, code)
    active = good
    if KIND.WATCH:
        peak = tl.maximum(peak, absolute)
        rounded = (new_absolute < claimed) if KIND.LINEAR else (relative <= 0.5 * limits.precision)
        at_rounding = good & rounded & (relative >= before)
        converged = good & (residual <= limits.tol)
        if KIND.RELATIVE_STOP and not KIND.LINEAR:
            constant = tl.abs(absolute - first_absolute) <= 1e-3 * first_absolute
            hidden = limits.precision * size > limits.flight * peak
            flown = (size > 10 * first_size) & (hidden | (absolute > tl.sqrt(limits.tol) * peak))
            converged = converged & (constant == 0) & (flown == 0)
        at_rounding = at_rounding & (converged == 0)
        code = tl.where(converged, CONVERGED, code)
        code = tl.where(at_rounding, ROUNDING, code)
        active = good & (converged == 0) & (at_rounding == 0)
        better = good & (claimed < best)
        tl.store(at + 4 * batch, peak)
        tl.store(at + 5 * batch, tl.where(better, claimed, best))
        tl.store(at + 6 * batch, tl.where(better, residual, best_residual))
        if PARTS > 1:
            best_rows = at + PARTS * batch + rows
            tl.store(best_rows, of_parts, mask=part < tl.where(better, PARTS, 0))
        tl.store(samples.whole + 3 * batch + b, tl.where(better, count, best_step))
        tl.atomic_add(samples.unfinished, -1, mask=was_active & (active == 0), sem="relaxed")
    tl.store(at, absolute)
    tl.store(at + batch, relative)
    tl.store(samples.trace + (count - 1) * batch + b, residual)
    tl.store(samples.whole + b, active.to(tl.int32))
    tl.store(samples.whole + batch + b, code)
    tl.store(samples.whole + 2 * batch + b, tl.where(was_active, count, steps))

    if KIND.MEMORY:
        anderson.next_step(b, a, row, gg, of_z, new_absolute, good, count, samples, limits, KIND)
    else:
        _next_step(
            b, a, row, gg, yy, of_z, new_absolute, last_absolute, of_g, of_s, diagonal, kept, good,
            count, samples, limits, KIND,
        )  # fmt: skip
    tl.store(samples.moves + b, tl.where(count < most, active.to(tl.int32), 0))


@triton.jit
def finish(b, samples, batch, precision, KIND: tl.constexpr):
    """`Ledger.finish`: code, residual and iterate of what is returned; the last residual, steps.

    With them whether what is returned is the best iterate instead of the last one.
    """
    at = samples.real + b
    absolute = tl.load(at)
    relative = tl.load(at + batch)
    first_absolute = tl.load(at + 2 * batch)
    code = tl.load(samples.whole + batch + b)
    steps = tl.load(samples.whole + 2 * batch + b)
    last_residual = relative if KIND.RELATIVE_STOP else absolute
    residual = last_residual
    unfinished = code == RUNNING
    code = tl.where(unfinished, MAX_STEPS if KIND.WATCH else FIXED_STEPS, code)
    code = tl.where(unfinished & (absolute > first_absolute), DIVERGED, code)
    constant = tl.abs(absolute - first_absolute) <= 1e-3 * first_absolute
    code = tl.where(unfinished & constant & (relative > 0.5 * precision), STALLED, code)
    if KIND.WATCH:
        missed = (code != CONVERGED) & (code != NONFINITE_START)
        residual = tl.where(missed, tl.load(at + 6 * batch), residual)
        wanted = tl.where(missed, tl.load(samples.whole + 3 * batch + b), steps)
    else:  # the step at which f was no longer finite was not taken
        missed = code < 0
        wanted = tl.where(code == NONFINITE, steps - 1, steps)
    return code, residual, wanted, last_residual, steps, missed


@triton.jit
def judge(b, samples, limits, batch, chunks, count, most, KIND: tl.constexpr):
    """What follows for sample b from its inner products."""
    if KIND.FIRST:
        _judge_first(b, samples, limits, batch, chunks, count, most, KIND)
    else:
        _judge_next(b, samples, limits, batch, chunks, count, most, KIND)
