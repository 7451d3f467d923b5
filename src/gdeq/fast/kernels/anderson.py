"""Anderson's next step for one sample, from its inner products (`gdeq.fast.product`); one warp."""

from __future__ import annotations

import triton
import triton.language as tl

from gdeq.fast import product
from gdeq.fast.kernels.chunks import INFINITY

LEAST_SHARE = tl.constexpr(product.LEAST_SHARE)
COARSEST = tl.constexpr(product.COARSEST)


@triton.jit
def _block(products, row, column, first, inside, PLACES: tl.constexpr):
    """g_iᵀg_j, i = first + row, j = first + column: (WINDOW, WINDOW)."""
    at = (first + row)[:, None] * PLACES + (first + column)[None, :]
    return tl.load(products + at, mask=inside[:, None] & inside[None, :], other=0.0)


@triton.jit
def _solved(system, right, u, WINDOW: tl.constexpr):
    """x of system · x = right, positive definite, by elimination in all rows."""
    for k in tl.static_range(WINDOW):
        of_row = tl.sum(tl.where(u[:, None] == k, system, 0.0), 0)
        of_column = tl.sum(tl.where(u[None, :] == k, system, 0.0), 1)
        pivot = tl.sum(tl.where(u == k, of_column, 0.0), 0)
        factor = tl.where(u == k, 0.0, of_column / pivot)
        right -= factor * tl.sum(tl.where(u == k, right, 0.0), 0)
        system -= factor[:, None] * of_row[None, :]
    return right / tl.sum(tl.where(u[:, None] == u[None, :], system, 0.0), 1)


@triton.jit
def begin(b, gg, samples, finite, mixing, KIND: tl.constexpr):
    """What is known of a sample at the first iterate, whose step is mixing·g."""
    PLACES: tl.constexpr = KIND.PLACES
    place = tl.arange(0, PLACES)
    at = b * PLACES * PLACES
    tl.store(samples.coordinates + at + place, tl.where(place == 0, 1 / mixing, 0.0).to(tl.float64))
    tl.store(samples.products + at, gg)
    tl.store(samples.lead + b, tl.where(finite, mixing, 0.0).to(samples.lead.dtype.element_ty))


@triton.jit
def next_step(
    b, a, row, gg, of_z, new_absolute, good, count, samples, limits, KIND: tl.constexpr
):  # fmt: skip
    """a: s_jᵀg.  row: s_jᵀs of the newest step.  gg: ‖g‖²."""
    PLACES: tl.constexpr = KIND.PLACES
    kind = samples.lead.dtype.element_ty
    place = tl.arange(0, PLACES)
    u = tl.arange(0, KIND.WINDOW)
    last = count - 1
    differences = tl.minimum(count, KIND.MEMORY)
    first = count - differences
    inside = u < differences
    of_l = samples.coordinates + b * PLACES * PLACES
    of_p = samples.products + b * PLACES * PLACES
    at = (first + u)[:, None] * PLACES + place[None, :]
    known = tl.load(of_l + at, mask=inside[:, None] & (place < count)[None, :], other=0.0)
    keep = samples.keep + b * PLACES + first + u
    kept = tl.load(keep, mask=inside & (first + u < last), other=0) != 0
    # ‖s_j‖², on the diagonal of G, of which nothing else is needed
    at = samples.gram + (b * PLACES + place) * PLACES + place
    lengths = tl.load(at, mask=place < last, other=0.0).to(tl.float64)
    tl.store(at, row, mask=place == last)

    # g_iᵀg_t
    with_g = tl.sum(known * a.to(tl.float64)[None, :], 1)
    tl.store(of_p + count * PLACES + first + u, with_g, mask=inside)
    tl.store(of_p + (first + u) * PLACES + count, with_g, mask=inside)
    tl.store(of_p + count * PLACES + count, gg)
    tl.debug_barrier()  # they are read by other lanes
    of_dg = _block(of_p, u + 1, u + 1, first, inside, PLACES)
    of_dg -= _block(of_p, u + 1, u, first, inside, PLACES)
    of_dg -= _block(of_p, u, u + 1, first, inside, PLACES)
    before = _block(of_p, u, u, first, inside, PLACES)
    of_dg += before
    right = tl.load(of_p + (first + u + 1) * PLACES + count, mask=inside, other=0.0) - with_g

    # The newest difference, and the g before it
    diagonal = u[:, None] == u[None, :]
    size = tl.sqrt(tl.maximum(tl.sum(tl.where(diagonal, of_dg, 0.0), 1), 0.0))
    newest = u == differences - 1
    change = tl.sum(tl.where(newest, size, 0.0), 0)
    squared = tl.sum(tl.where(place == last, row, 0.0), 0).to(tl.float64)
    of_last = tl.sum(tl.where(newest, tl.sum(tl.where(diagonal, before, 0.0), 1), 0.0), 0)
    share = tl.sum(tl.where(place[None, :] == first + u[:, None], known, 0.0), 1)  # L_ii
    share = tl.abs(tl.sum(tl.where(newest, share, 0.0), 0))
    of_last = tl.sqrt(of_last)
    exact = tl.where(limits.coarse * share * tl.sqrt(squared) <= COARSEST * of_last, 1, 0) == 1
    keeps = good & exact & (change > (limits.noise * (of_z + new_absolute)).to(tl.float64))
    terms = tl.sum(tl.where(newest[:, None], tl.abs(known), 0.0), 0)
    terms = tl.sum(terms * tl.sqrt(tl.where(place == last, squared, lengths)), 0)
    keeps = keeps & (change * change > limits.blur * terms * (of_last + tl.sqrt(gg)))
    kept = tl.where(newest, keeps, kept & (exact | (first + u < last - 1)))
    tl.store(keep, kept.to(tl.int8), mask=inside & (first + u >= last - 1))

    used = inside & kept & (size > 0)
    size = tl.where(used, size, 1.0)
    here = tl.where(used, 1.0 / size, 0.0)
    system = of_dg * here[:, None] * here[None, :]
    system += tl.where(diagonal, tl.where(used, limits.ridge, 1.0).to(tl.float64)[:, None], 0.0)
    gamma = _solved(system, right * here, u, KIND.WINDOW) * here

    of_g = 1 - tl.sum(tl.where(newest, gamma, 0.0), 0)
    plain = (tl.abs(of_g) > LEAST_SHARE) == 0
    plain = plain | ((tl.sum(tl.abs(gamma), 0) < INFINITY) == 0)
    gamma = tl.where(plain, 0.0, gamma)
    leads = limits.mixing * tl.where(plain, 1.0, of_g)
    shifted = tl.sum(tl.where(u[None, :] == u[:, None] - 1, gamma[None, :], 0.0), 1)
    of_s = limits.mixing * tl.sum((gamma - shifted)[:, None] * known, 0)
    of_s -= tl.sum(tl.where(place[None, :] == first + u[:, None], gamma[:, None], 0.0), 0)
    of_s = tl.where(place < count, of_s, 0.0)
    now = tl.where(place == count, 1 / leads, -of_s / leads)
    tl.store(of_l + count * PLACES + place, now)
    tl.store(samples.weight + b * PLACES + place, tl.where(good, of_s, 0.0).to(kind))
    tl.store(samples.lead + b, tl.where(good, leads, 0.0).to(kind))
