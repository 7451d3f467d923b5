"""`gdeq.JFB(refine=k)` on the tensors of a state as they lie: no batched vector is made.

Read `gdeq.refinement.refine` first.  Without an inverse all its vectors are sums of

    e_0 = v,   e_j = Jᵀw_{j−1},

so all that it decides follows from the Gram matrix of these.  After each product with Jᵀ one pass
takes the inner products of the newest with all of them, `_decide` makes every decision from the
first on once more (it keeps the Gram matrix alone), and a second pass sums up w as it says.

Inner products are those of float32 numbers in units of about ‖v‖, with errors of some 1e-7: what
the e_i leave of each other is seen down to 3e-4 of their length.  That is less than the rounding of
half precision, and more than that of float32, for which this is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.kernels import state
from gdeq.fast.kernels.chunks import INFINITY
from gdeq.fast.kernels.device import on_device
from gdeq.fast.layout import FastSpace
from gdeq.refinement import Refinement
from gdeq.solution import Cotangent
from gdeq.solvers.base import noise_level

BLOCK = 2048  # numbers in a chunk
WARPS = 4
VECTORS = 8  # at most: e_0, …, e_7
LANES = 32  # of vectors of weights: one warp sums up no fewer
CHUNKS = 16  # partial sums that a program reads at once


@triton.jit
def _scaled(x, where, inside, factor):
    return tl.load(x + where, mask=inside, other=0.0).to(tl.float32) * factor


@triton.jit(do_not_specialize=["first_chunk", "chunks"])
def _inner_products(
    newest, older, per_unit, partial, size, first_chunk, chunks,
    COUNT: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the newest e with the COUNT before it, and itself: one chunk of one part.

    With the first of them, those of v with itself too.
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, where = at < size, b * size + at
    factor = tl.load(per_unit + b)
    out = partial + (b * chunks + first_chunk + chunk) * VECTORS
    e = _scaled(newest, where, inside, factor)
    tl.store(out + COUNT, tl.sum(e * e, 0))
    for i in tl.static_range(COUNT):
        x = _scaled(older[i], where, inside, factor)
        tl.store(out + i, tl.sum(e * x, 0))
        if COUNT == 1:
            tl.store(out + 2, tl.sum(x * x, 0))


# A vector below is its weights of the e_i, and beside it its inner products with all e_i, which
# are sums of those of the e_i in the same way: xᵀy is then one sum over a few numbers.


@triton.jit
def _dot(x, with_y):
    """xᵀy.  An e_i that x does not use may hold anything."""
    return tl.sum(tl.where(x != 0, x * with_y, 0.0), 0)


@triton.jit
def _norm(x, with_x):
    """Where all but rounding has cancelled, that: it is 0 only if x is."""
    return tl.sqrt(tl.abs(_dot(x, with_x)))


@triton.jit
def _at(x, p, place):
    return tl.sum(tl.where(p == place, x, 0.0), 0)


@triton.jit
def _row(x, rows, i):
    return tl.sum(tl.where(rows == i, x, 0.0), 0)


@triton.jit
def _with(of_b, i, of_newest, p, newest, VECTORS: tl.constexpr):
    """The inner products of e_i with all: those of the newest are not in memory yet."""
    stored = tl.load(of_b + i * VECTORS + p, mask=p < tl.where(i < newest, newest, 0), other=0.0)
    found = tl.where(p == newest, _at(of_newest, p, i), stored)
    return tl.where(i == newest, of_newest, found)


@triton.jit(do_not_specialize=["chunks", "newest"])
def _decide(
    partial, gram, weight, error, of_result, chunks, newest, eps, noise,
    amplification, overshoot, setback, growth,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    VECTORS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The weights of w after so many products, in float64: one sample.

    The lines of `refine`, in their order, but that w moves at the beginning of a turn: the first
    goes from 0 by v.
    """
    b = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, LANES)
    of_b = gram + b * VECTORS * VECTORS
    filled = newest + 1  # numbers of each chunk
    if FIRST:
        filled += 1
    row = tl.zeros((LANES,), tl.float64)
    for start in range(0, chunks, CHUNKS):
        c = start + tl.arange(0, CHUNKS)
        known = (c < chunks)[:, None] & (p < filled)[None, :]
        at = partial + ((b * chunks + c) * VECTORS)[:, None] + p[None, :]
        row += tl.sum(tl.load(at, mask=known, other=0.0).to(tl.float64), 0)
    of_newest = tl.where(p <= newest, row, 0.0)
    with_v = _with(of_b, 0, of_newest, p, newest, VECTORS)
    if FIRST:
        with_v = tl.where(p == 0, _at(row, p, 2), with_v)
    if not LAST:
        if FIRST:
            tl.store(of_b + p, with_v, mask=p < 1)
        tl.store(of_b + newest * VECTORS + p, of_newest, mask=p <= newest)
        tl.store(of_b + p * VECTORS + newest, of_newest, mask=p < newest)

    v = tl.where(p == 0, 1.0, 0.0).to(tl.float64)
    w, with_w = tl.zeros_like(v), tl.zeros_like(v)
    kept, with_kept = v, with_v
    after, with_after = v, with_v
    r, with_r = v, with_v
    of_v = _norm(v, with_v)
    size, of_w, least = of_v, of_v, tl.full((), INFINITY, tl.float64)
    good = least > 0
    rows = tl.arange(0, VECTORS)[:, None]
    steps = tl.zeros((VECTORS, LANES), tl.float64)
    with_steps = tl.zeros((VECTORS, LANES), tl.float64)
    shares = tl.zeros_like(v)
    for count in range(1, newest + 1):
        w, with_w = tl.where(good, w + after, kept), tl.where(good, with_w + with_after, with_kept)
        step, with_step = after, with_after
        steps = tl.where(rows == count - 1, step[None, :], steps)
        with_steps = tl.where(rows == count - 1, with_step[None, :], with_steps)
        before, with_before = r, with_r
        r = v + tl.where(p == count, 1.0, 0.0) - w
        with_r = with_v + _with(of_b, count, of_newest, p, newest, VECTORS) - with_w
        size, of_w = _norm(r, with_r), _norm(w, with_w)
        good = good & (size < INFINITY)
        better = good & (size < least)
        kept, with_kept = tl.where(better, w, kept), tl.where(better, with_w, with_kept)
        least = tl.where(better, size, least)
        q, with_q = r, with_r
        for i in range(0, count - 1):
            share = _at(shares, p, i) * _dot(_row(steps, rows, i), with_q)
            q += share * _row(steps, rows, i + 1)
            with_q += share * _row(with_steps, rows, i + 1)
        squared = _dot(step, with_step)
        denominator = squared - _dot(step, with_q)
        limit = 1e3 * eps * tl.sqrt(squared) * _norm(step - q, with_step - with_q)
        change = _norm(r - before, with_r - with_before)
        sound = (tl.abs(denominator) > limit) & (change > noise * (of_w + size))
        longer = tl.where(sound, squared / denominator, 1.0)
        if LAST:
            best = tl.abs(_dot(before, with_r - with_before)) / (change * change)
            most = overshoot * tl.where((best > 1) & (best < INFINITY), best, 1.0)
            limited = tl.where(sound, tl.minimum(tl.maximum(longer, -most), most), 1.0)
            share = amplification * size * (of_w / of_v) / _norm(q, with_q)
            share = tl.where(share < 1, share, 1.0)  # 0/0: no step
            longer = tl.where(count == newest, limited * share, longer)
            none = (count == newest) & (share == 0)  # q may not be finite
            q, with_q = tl.where(none, 0.0, q), tl.where(none, 0.0, with_q)
        after, with_after = q * longer, with_q * longer
        shares = tl.where(p == count - 1, tl.where(sound, 1 / squared, 0.0), shares)
    if LAST:
        # Cancelled below zero it is not a number, and short of nothing.
        length = tl.sqrt(_dot(w + after, with_w + with_after))
        moved = _norm(after, with_after)
        of_kept = _norm(kept, with_kept)
        good = good & ((size <= setback * least) | (length <= growth * of_kept))
        known = good & (moved > 0) & (length > 0) & (length < INFINITY)
        nothing = tl.where(size == 0, 0.0, INFINITY)
        tl.store(error + b, tl.where(known, moved / length, nothing))
        tl.store(of_result + b, tl.where(good, tl.where(length > 0, length, 0.0), of_kept))
    w = tl.where(good, w + after, kept)
    tl.store(weight + b * VECTORS + p, w, mask=p < VECTORS)


@triton.jit
def _more(total, x, weight, i, where, at, size):
    share = tl.load(weight + i)
    used = at < tl.where(share != 0, size, 0)  # of what is not used, nothing: it may be infinite
    return total + share * tl.load(x + where, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _combine(
    out, vectors, weight, size, COUNT: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Σ weight_i x_i of COUNT vectors: one chunk."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    where = b * size + at
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COUNT):
        total = _more(total, vectors[i], weight + b * VECTORS, i, where, at, size)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["first_chunk", "chunks"])
def _residuals(
    v, w, product, per_unit, partial, size, first_chunk, chunks, BLOCK: tl.constexpr
):  # fmt: skip
    """Σ (v − w + Jᵀw)² in float64: one chunk of one part."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, where = at < size, b * size + at
    factor = tl.load(per_unit + b)
    r = _scaled(v, where, inside, factor) - _scaled(w, where, inside, factor)
    r = (r + _scaled(product, where, inside, factor)).to(tl.float64)
    tl.store(partial + b * chunks + first_chunk + chunk, tl.sum(r * r, 0))


def takes(space: FastSpace, dtypes: Sequence[torch.dtype], times: int) -> bool:
    """dtypes: of all tensors that are met.  (In float16 products of a small v would be nothing.)"""
    half = all(dtype == torch.bfloat16 for dtype in dtypes)
    fits = state.takes(space.batch, space.dtypes) and min(space.sizes) > 0
    return half and fits and 0 < times < VECTORS


def refined(
    v: Sequence[Tensor],
    vjp: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    space: FastSpace,
    unit: Tensor,  # (batch,) of about ‖v‖
    how: Refinement,
) -> Cotangent:
    """w in parts, (batch·d,), and its length in units."""
    batch, device, times = space.batch, space.device, how.times
    of_parts = _chunks(space)
    chunks = sum(of_parts)
    partial = torch.empty(batch, chunks, VECTORS, dtype=torch.float32, device=device)
    gram = torch.empty(batch, VECTORS, VECTORS, dtype=torch.float64, device=device)
    weight = torch.empty(batch, VECTORS, dtype=torch.float32, device=device)
    error, length = torch.empty(2, batch, dtype=torch.float32, device=device)
    numbers = torch.finfo(space.dtype).eps, noise_level(how.precision)
    rules = how.amplification, how.overshoot, how.setback, how.growth
    first, per_unit = _parts(space, v), 1 / unit
    given = [space.shaped(part, i) for i, part in enumerate(first)]
    vectors = [first]
    for newest in range(1, times + 1):
        vectors.append(_parts(space, vjp(given)))
        first_chunk = 0
        with on_device(weight):
            for size, own, *older, last in zip(space.sizes, of_parts, *vectors, strict=True):
                _inner_products[(own, batch)](
                    last, tuple(older), per_unit, partial, size, first_chunk, chunks,
                    COUNT=newest, VECTORS=VECTORS, BLOCK=BLOCK, num_warps=WARPS,
                )  # fmt: skip
                first_chunk += own
            _decide[(batch,)](
                partial, gram, weight, error, length, chunks, newest, *numbers, *rules,
                FIRST=newest == 1, LAST=newest == times,
                VECTORS=VECTORS, LANES=LANES, CHUNKS=CHUNKS, num_warps=1,
            )  # fmt: skip
        w = _combined(space, vectors, weight)
        given = space.in_parts(w)
    return Cotangent(w, times, error=error, length=length)


def residual_norms(
    v: Sequence[Tensor],
    w: Sequence[Tensor],
    product: Sequence[Tensor],
    space: FastSpace,
    per_unit: Tensor,  # (batch,)
) -> Tensor:  # (batch,)
    """`gdeq.engine.Reference.residual_norm` of tensors, in units."""
    chunks = _chunks(space)
    partial = torch.empty(space.batch, sum(chunks), dtype=torch.float64, device=space.device)
    first_chunk = 0
    given = (_parts(space, tensors) for tensors in (v, w, product))
    with on_device(partial):
        for size, own, *parts in zip(space.sizes, chunks, *given, strict=True):
            _residuals[(own, space.batch)](
                *parts, per_unit, partial, size, first_chunk, sum(chunks), BLOCK=BLOCK,
                num_warps=WARPS,
            )  # fmt: skip
            first_chunk += own
    return partial.sum(1).sqrt_().to(space.dtype)


def _chunks(space: FastSpace) -> list[int]:
    """Of each part."""
    return [triton.cdiv(size, BLOCK) for size in space.sizes]


def _parts(space: FastSpace, tensors: Sequence[Tensor]) -> list[Tensor]:  # (batch, size) each
    return [part.contiguous() for part in space.rows(tensors)]


def _combined(
    space: FastSpace,
    vectors: Sequence[Sequence[Tensor]],  # (batch, size) of each part
    weight: Tensor,  # (batch, VECTORS)
) -> Tensor:  # (batch·d,)
    """In parts."""
    buffer = vectors[0][0].new_empty(space.batch * space.size)
    pieces = buffer.split([space.batch * size for size in space.sizes])
    with on_device(buffer):
        for size, own, piece, *given in zip(
            space.sizes, _chunks(space), pieces, *vectors, strict=True
        ):
            _combine[(own, space.batch)](
                piece, tuple(given), weight, size,
                COUNT=len(given), VECTORS=VECTORS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return buffer
