"""`gdeq.refinement.refine` in two passes over memory for each product with Jᵀ.

Read that first; each kernel here says which of its lines it computes.  With t_0 = w and t_{k+1} the
step that follows the k-th product, all that is done to r is to add multiples of the forward solve's
steps s_j and of the t_i:

    q = r + Σ_j x_j s_j + Σ_{0<i≤k} x_{n+i} t_i.

So the inner products of r and of t_k with all of these, taken in the pass that makes r, and the
Gram matrix, which gains the row of t_k, say what x, t_kᵀq and ‖q‖² are, and how long w would be
after the step.  The second pass takes it.  As in a solve (`verdict`), these
numbers are as exact as x is.

Norms are of the dtype of v, and overflow where those of the plain form do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.kernels.chunks import INFINITY, numbers, place, weighted_steps, work
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.inverse import APPLY_WARPS, DOTS_WARPS, laid_out
from gdeq.fast.kernels.verdict import AHEAD, one_more
from gdeq.refinement import Refinement
from gdeq.solution import Cotangent
from gdeq.solvers.base import noise_level
from gdeq.state import Vectorized

if TYPE_CHECKING:
    from gdeq.fast.product import ProductInverse

DOTS_TILE, APPLY_TILE = 2, 4  # stored steps that a program reads at once
NORMS = tl.constexpr(5)  # of each chunk
MOST_VECTORS = 128  # s_j and t_i, whose weights one program holds in registers
SKIPPED, TAKEN, TAKEN_BACK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(-1)  # a step


@triton.jit
def _later(later, i, batch, d, in_rows, inside):
    """t_i, i > 0."""
    at = later + tl.cast(i - 1, tl.int64) * batch * d + in_rows
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["count", "taken", "scale_stride"])
def _look(
    v, product_w, w, before, first, later, r_out, steps, scales, table, norms, partial,
    batch, d, step_stride, scale_stride, chunks, count, taken,
    FIRST: tl.constexpr, LAST: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """r = v + Jᵀw − w; its inner products, and t_k's, with all s_j and t_i: one chunk of each.

    And ‖r‖², ‖v‖², ‖w‖², ‖y‖² and yᵀbefore with y = r − before.  FIRST: t_k is w, and v the
    residual before.  LAST: no other step asks for r.
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind = v.dtype.element_ty
    lane, row, length, in_rows, _in_parts = place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    column, inside = row + lane, lane < length
    right = tl.load(v + in_rows, mask=inside, other=0.0)
    here = tl.load(w + in_rows, mask=inside, other=0.0)
    r = right + tl.load(product_w + in_rows, mask=inside, other=0.0).to(kind) - here
    newest, earlier = here, right
    if not FIRST:
        newest = _later(later, taken, batch, d, in_rows, inside)
        earlier = tl.load(before + in_rows, mask=inside, other=0.0)
    change = r - earlier
    if not LAST:
        tl.store(r_out + in_rows, r, mask=inside)
    at = norms + (b * chunks + chunk) * NORMS
    tl.store(at, tl.sum(r * r, 0))
    tl.store(at + 1, tl.sum(right * right, 0))
    tl.store(at + 2, tl.sum(here * here, 0))
    tl.store(at + 3, tl.sum(change * change, 0))
    tl.store(at + 4, tl.sum(change * earlier, 0))
    out = partial + (b * chunks + chunk) * 2 * PLACES
    of_newest = out + PLACES
    tl.store(out + count + taken, tl.sum(newest * r, 0))
    tl.store(of_newest + count + taken, tl.sum(newest * newest, 0))
    if not FIRST:
        t = tl.load(first + in_rows, mask=inside, other=0.0)
        tl.store(out + count, tl.sum(t * r, 0))
        tl.store(of_newest + count, tl.sum(t * newest, 0))
        for i in range(1, taken):
            t = _later(later, i, batch, d, in_rows, inside)
            tl.store(out + count + i, tl.sum(t * r, 0))
            tl.store(of_newest + count + i, tl.sum(t * newest, 0))
    base = steps + b * step_stride
    units = scales + b * scale_stride + chunk
    for start in range(0, count, TILE):
        j = start + tl.arange(0, TILE)
        known = j < count
        where = j.to(tl.int64)[:, None] * d + column[None, :]
        s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0)
        s = numbers(s, kind, SCALED)
        a, c = tl.sum(s * r[None, :], 1), tl.sum(s * newest[None, :], 1)
        if SCALED:
            unit = tl.load(units + j * chunks, mask=known, other=0.0).to(kind)
            a, c = a * unit, c * unit
        tl.store(out + j, a, mask=known)
        tl.store(of_newest + j, c, mask=known)


@triton.jit
def _used(row, x):
    """Σ row_l x_l over what is used: the rest may hold anything."""
    return tl.sum(tl.where(x != 0, row * x, 0.0), 0)


@triton.jit
def _at(x, p, where):
    """x at one place."""
    return tl.sum(tl.where(p == where, x, 0.0), 0)


@triton.jit(do_not_specialize=["count", "taken"])
def _decide(
    norms, partial, gram, keep, weight, lead, verdict, best, least, of_best, error,
    chunks, count, taken, eps, noise, amplification, overshoot, setback, growth,
    FIRST: tl.constexpr, LAST: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """All that `refine` makes of inner products, and x by `transposed_weights`: one sample.

    of_best: ‖w‖ where ‖r‖ was smallest; in the end, that of the result.
    """
    b = tl.program_id(0).to(tl.int64)
    kind = gram.dtype.element_ty
    p = tl.arange(0, PLACES)
    last = count + taken  # the place of t_k
    of_b = gram + b * PLACES * PLACES
    # As in a solve, what is known is asked for before the first sum.  Of row p: the factor to which
    # it leads, s_p to s_{p−1} (transposed) and t_i to t_{i+1}.
    factor = tl.where(p < count, p - 1, p)
    known = (p > 0) & (p < last)
    diagonal = tl.load(of_b + factor * (PLACES + 1), mask=known, other=1.0)
    kept = tl.load(keep + b * PLACES + factor, mask=known, other=0) != 0
    a, row = tl.zeros((PLACES,), dtype=kind), tl.zeros((PLACES,), dtype=kind)  # of r, of t_k
    rr = tl.zeros((CHUNKS,), dtype=kind)
    vv, ww, yy, along = rr, rr, rr, rr
    for start in range(0, chunks, CHUNKS):
        c = start + tl.arange(0, CHUNKS)
        here = c < chunks
        where = partial + ((b * chunks + c) * 2 * PLACES)[:, None] + p[None, :]
        a += tl.sum(tl.load(where, mask=here[:, None], other=0.0), 0)
        row += tl.sum(tl.load(where + PLACES, mask=here[:, None], other=0.0), 0)
        at = norms + (b * chunks + c) * NORMS
        rr += tl.load(at, mask=here, other=0.0)
        vv += tl.load(at + 1, mask=here, other=0.0)
        ww += tl.load(at + 2, mask=here, other=0.0)
        yy += tl.load(at + 3, mask=here, other=0.0)
        along += tl.load(at + 4, mask=here, other=0.0)
    a, row = tl.where(p <= last, a, 0.0), tl.where(p <= last, row, 0.0)
    of_r = tl.sum(rr, 0)  # ‖r‖²
    size, of_v, of_w = tl.sqrt(of_r), tl.sqrt(tl.sum(vv, 0)), tl.sqrt(tl.sum(ww, 0))
    of_y = tl.sum(yy, 0)
    change = tl.sqrt(of_y)
    good = size < INFINITY
    was, smallest, shortest = good, size, of_w  # the smallest ‖r‖, and ‖w‖ there
    if FIRST:
        tl.store(best + b, 0)
        tl.store(least + b, size)
    else:
        was, smallest = tl.load(verdict + b) == TAKEN, tl.load(least + b)
        good = good & was
        better = good & (size < smallest)
        smallest = tl.where(better, size, smallest)
        shortest = tl.where(better, of_w, tl.load(of_best + b))
        tl.store(best + b, tl.where(better, taken, tl.load(best + b)))
        tl.store(least + b, smallest)
    if not LAST:
        tl.store(of_best + b, shortest)

    # x, first of the forward solve's factors, then of those that were made here
    x = tl.zeros((PLACES,), dtype=kind)
    inner = a  # a + Gx
    for i in tl.range(0, count - 1, num_stages=AHEAD):
        column = count - 2 - i
        of_column = tl.load(of_b + column * PLACES + p, mask=p < last, other=0.0)
        x, inner = one_more(x, inner, diagonal, kept, of_column, p, column + 1, column)
    if not FIRST:
        for column in range(count + 1, last + 1):
            stored = p < tl.where(column < last, last, 0)  # t_k's own is not yet
            of_column = tl.load(of_b + column * PLACES + p, mask=stored, other=0.0)
            of_column = tl.where(column < last, of_column, row)
            x, inner = one_more(x, inner, diagonal, kept, of_column, p, column - 1, column)

    # The update, and how far to go
    squared = _at(row, p, last)  # ‖t_k‖²
    newest = _used(row, x) + _at(a, p, last)  # t_kᵀq
    inner = tl.where(p == last, newest, inner)
    of_q = tl.maximum(of_r + _used(a + inner, x), 0.0)
    difference = tl.sqrt(tl.maximum(squared - 2 * newest + of_q, 0.0))
    denominator = squared - newest
    sound = tl.abs(denominator) > 1e3 * eps * tl.sqrt(squared) * difference
    sound = sound & (change > noise * (of_w + size))
    longer = tl.where(sound, squared / denominator, 1.0)
    if LAST:
        best = tl.abs(tl.sum(along, 0)) / of_y
        most = overshoot * tl.where((best > 1) & (best < INFINITY), best, 1.0)
        longer = tl.where(sound, tl.minimum(tl.maximum(longer, -most), most), 1.0)
        share = amplification * size * (of_w / of_v) / tl.sqrt(of_q)
        longer *= tl.where(share < 1, share, 1.0)  # 0/0: no step
        # w is the sum of all t_i, so wᵀq that of their places in `inner`.
        with_q = tl.sum(tl.where((p >= count) & (p <= last), inner, 0.0), 0)
        # Of where it leads.  Cancelled below zero it is not a number, and short of nothing.
        length = tl.sqrt(of_w * of_w + longer * (2 * with_q + longer * of_q))
        moved = tl.abs(longer) * tl.sqrt(of_q)
        good = good & ((size <= setback * smallest) | (length <= growth * shortest))
        known = good & (moved > 0) & (length > 0) & (length < INFINITY)
        nothing = tl.where(size == 0, 0.0, INFINITY)
        tl.store(error + b, tl.where(known, moved / length, nothing))
        tl.store(of_best + b, tl.where(good, tl.where(length > 0, length, 0.0), shortest))
    else:
        tl.store(keep + b * PLACES + last, sound.to(tl.int8))
        tl.store(of_b + last * PLACES + p, row, mask=p <= last)
        tl.store(of_b + p * PLACES + last, row, mask=p < last)
    # Without another w, this one is the result.
    back = TAKEN_BACK if not FIRST else SKIPPED
    tl.store(verdict + b, tl.where(good, TAKEN, tl.where(was, back, SKIPPED)))
    tl.store(weight + b * PLACES + p, tl.where(longer != 0, longer * x, 0.0))  # x may be infinite
    tl.store(lead + b, longer)


@triton.jit(do_not_specialize=["count", "taken", "scale_stride"])
def _go(
    v, product_w, w, first, r_in, later, next_w, steps, scales, table, weight, lead, verdict, best,
    batch, d, step_stride, scale_stride, chunks, count, taken,
    FIRST: tl.constexpr, LAST: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """t_{k+1} = lead·r + Σ weight_j s_j + Σ weight_{n+i} t_i, and w + t_{k+1}: one chunk.

    For a sample whose r is not finite, or whose w runs away, the w of the smallest ‖r‖:
    w_0 + t_1 + ….
    """
    chunk, b = work()
    lane, row, length, in_rows, _in_parts = place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    inside = lane < length
    here = tl.load(w + in_rows, mask=inside, other=0.0)
    now = tl.load(verdict + b)
    if now == TAKEN:
        if LAST:
            more = tl.load(product_w + in_rows, mask=inside, other=0.0).to(here.dtype)
            r = tl.load(v + in_rows, mask=inside, other=0.0) + more - here
        else:
            r = tl.load(r_in + in_rows, mask=inside, other=0.0)
        total = weighted_steps(
            tl.load(lead + b) * r, steps + b * step_stride, scales + b * scale_stride + chunk,
            weight + b * PLACES, lane, row, length, d, chunks, count, SCALED, TILE,
        )  # fmt: skip
        if not FIRST:
            for i in range(1, taken + 1):
                t = _later(later, i, batch, d, in_rows, inside)
                total += tl.load(weight + b * PLACES + count + i) * t
        if not LAST:
            tl.store(later + tl.cast(taken, tl.int64) * batch * d + in_rows, total, mask=inside)
        here += total
    if now == TAKEN_BACK:
        here = tl.load(first + in_rows, mask=inside, other=0.0)
        for i in range(1, tl.load(best + b) + 1):
            here += _later(later, i, batch, d, in_rows, inside)
    tl.store(next_w + in_rows, here, mask=inside)


def refined(
    inverse: ProductInverse, w: Tensor, v: Tensor, vjp: Vectorized, how: Refinement
) -> Cotangent:
    """`gdeq.refinement.refine` with a transposed inverse, from w = −B⁻ᵀv; (batch, d) each.

    vjp: may return half precision.
    """
    steps, times = inverse.steps, how.times
    batch, count, d = steps.shape
    v, w = v.contiguous(), w.contiguous()
    chunk_table, units, gram, kept, common = laid_out(inverse, count + times)
    if gram is inverse.gram and times > 1:
        gram, kept = gram.clone(), kept.clone()  # they gain rows
    chunks, wide = len(chunk_table), gram.shape[1]
    norms, partial = v.new_empty(batch, chunks, NORMS.value), v.new_empty(batch, chunks, 2, wide)
    weight, lead = v.new_empty(batch, wide), v.new_empty(batch)
    verdict = torch.empty(batch, dtype=torch.int32, device=v.device)
    best, least = torch.empty_like(verdict), v.new_empty(batch)  # which t led to the smallest ‖r‖
    of_best, error = v.new_empty(batch), v.new_empty(batch)
    later = v.new_empty(times - 1, batch, d)  # t_1, t_2, …
    residuals = v.new_empty(min(2, times - 1), batch, d)  # this one and the one before
    eps, noise = torch.finfo(v.dtype).eps, noise_level(how.precision)
    strides = steps.stride(0), units.stride(0)
    first = w
    before = r = v
    for taken in range(times):
        product_w = vjp(w).contiguous()
        ends = {"FIRST": taken == 0, "LAST": taken == times - 1}
        if not ends["LAST"]:
            r = residuals[taken % 2]
        next_w = torch.empty_like(w)
        with on_device(v):
            _look[(chunks, batch)](
                v, product_w, w, before, first, later, r, steps, units, chunk_table,
                norms, partial, batch, d, *strides, chunks, count, taken,
                TILE=DOTS_TILE, **ends, **common, num_warps=DOTS_WARPS,
            )  # fmt: skip
            _decide[(batch,)](
                norms, partial, gram, kept, weight, lead, verdict, best, least, of_best, error,
                chunks, count, taken, eps, noise,
                how.amplification, how.overshoot, how.setback, how.growth,
                CHUNKS=32, PLACES=wide, **ends, num_warps=1,
            )  # fmt: skip
            _go[(chunks, batch)](
                v, product_w, w, first, r, later, next_w, steps, units, chunk_table,
                weight, lead, verdict, best, batch, d, *strides, chunks, count, taken,
                TILE=APPLY_TILE, **ends, **common, num_warps=APPLY_WARPS,
            )  # fmt: skip
        before, w = r, next_w
    return Cotangent(w, times, error=error, length=of_best)
