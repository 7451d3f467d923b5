"""A first estimate of w from what the forward solve learned, and its refinement by a few VJPs.

Broyden's method is run on the adjoint equation, h(w) = v + Jᵀw.  Its root function h(w) − w has the
Jacobian Jᵀ − I = (J − I)ᵀ, so the transpose of what the forward solve learned about (J − I)⁻¹ is an
estimate of its inverse.  At w = 0 the root function is v without any VJP, and the first estimate is
the step from there: the first VJP already brings an update.  (Minimising the residual over the same
VJPs, as GMRES does, gives a smaller residual but a larger error of the gradient.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.context import anywhere, host_may_look, look_is_free
from gdeq.operators import Inverse, LowRankInverse, Secants, dot, norm, relative
from gdeq.solution import Cotangent, Solution
from gdeq.solvers.base import Point, change_seen, select
from gdeq.state import Vectorized

# Broyden's inverse is trusted where it makes v at most this many times as long: after a long solve
# it can be too long by orders of magnitude.
LONGEST = 3.0
MOST = 16  # vectors in a combination


@dataclass(frozen=True)
class Refinement:
    """How far a refinement goes, and what keeps it from running away.

    Nothing measures where its last step leads, so that step is bounded twice: by what the inverse
    makes of the residual, and by Broyden's factor for it, which may divide by next to nothing.
    """

    times: int  # VJPs
    precision: float  # spacing of the numbers that f computes with
    # The last step may be this many times as long beside the residual as w is beside v.
    amplification: float = 3.0
    # Its factor may be this many times as large as 1, or as the factor of smallest residual.
    overshoot: float = 1.5
    # Without secants or a tolerance: where the last residual is ``setback`` times the smallest, and
    # w would be ``growth`` times as long as the w that had it, that w is the result.  Either alone
    # says too little: a good w can have a larger residual than JFB's, and be far longer.
    setback: float = 2.0
    growth: float = 5.0
    secants: Secants | None = None  # what the first w was made of
    tolerance: float | None = None  # the first w with a residual of so many ‖v‖ is the result


def minus_identity(x: Tensor) -> LowRankInverse:  # (batch, d)
    """−I, for vectors like x: what is known before anything is learned."""
    empty = x.new_zeros(x.shape[0], 0, x.shape[1])
    return LowRankInverse(empty, empty)


def first_step(v: Tensor, solution: Solution) -> tuple[Tensor, Inverse]:  # (batch, d)
    """The first estimate of w, and the estimate of (Jᵀ − I)⁻¹ that it is made with.

    By the last secants of the solve (`Secants`).  Where f computes in half precision too much
    of them is rounding, and none are kept: there it is by Broyden's inverse, for samples where that
    is plausible; for the others, and after a solver without one, by −I.
    """
    if solution.secants is not None:
        inverse: Inverse = solution.secants.inverse().T
        return inverse.negative_matvec(v), inverse
    if solution.inverse is None:
        return v, minus_identity(v)
    return solution.inverse.vectors.T.trusted(v, LONGEST)


def borne_out(w: Tensor, v: Tensor, r: Tensor) -> Tensor:  # (batch, d) each -> (batch,)
    """Whether w, with its residual r, is likely no further from w* than 0 is after one more step.

    Where A = I − Jᵀ is symmetric and positive, ‖w − w*‖² in the norm of A is about wᵀAw if that is
    large, and ‖w*‖² is w*ᵀv.  Most of wᵀAw is in directions which A shortens by ‖Aw‖²/wᵀAw; where
    that is below one, a step by r leaves one minus it of w there.  w*ᵀv is not known; wᵀv stands
    for it.  Where wᵀAw is not positive nothing is tested, and w passes.
    """
    image = v - r
    energy = dot(w, image)
    left = energy - dot(image, image)
    return ((left <= 0) | (left**2 <= energy * dot(w, v))).squeeze(1)


def refine(w: Tensor, v: Tensor, vjp: Vectorized, inverse: Inverse, how: Refinement) -> Cotangent:
    """Broyden's method from 0, where the residual is v and the first step is ``w``: (batch, d).

    Updates are kept as factors I + s_{t+1}s_tᵀ/‖s_t‖² of the inverse, which follow from the steps:
    with q = −B_t⁻¹r_{t+1}, the next step is s_{t+1} = q ‖s_t‖² / (‖s_t‖² − s_tᵀq).

    The first VJP tests the secants that w was made of: it raises the ridge of those that do not
    fit, and a sample whose w it does not bear out starts again from 0 without any.

    Where the last residual is not the smallest, Broyden's model of I − Jᵀ has failed.  The last
    step is then a plain one, w + r, from the combination of all w that has the smallest residual.

    With a tolerance, no more VJPs are spent once every sample has met it.
    """
    eps = torch.finfo(v.dtype).eps
    size = norm(v)
    good = torch.ones(len(v), dtype=torch.bool, device=v.device)  # all was finite
    fits, met = good, ~good  # the first w was borne out; some w was within the tolerance
    step, r = w, v
    seen: list[Point] = []  # every w, and its residual
    factors: list[tuple[Tensor, Tensor, Tensor]] = []  # s_t, 1/‖s_t‖² or 0, s_{t+1}
    for count in range(1, how.times + 1):
        before, r = r, v + vjp(w) - w
        good = good & torch.isfinite(norm(r))
        seen.append(Point(w, select(good, r, torch.full_like(r, torch.inf))))
        if how.tolerance is not None:
            met = met | (norm(seen[-1].g) <= how.tolerance * size)
            if host_may_look(v.device) and not anywhere(~met & good):
                break
        if count == 1 and how.secants is not None:
            fits = borne_out(w, v, r)
            inverse = how.secants.inverse(how.secants.misfit(w, v - r)).T.only(fits)
            r = select(fits, r, v)
            step = w = select(fits, w, torch.zeros_like(w))  # from 0, −I steps to v
        q = inverse.negative_matvec(r)
        for s, weight, after in factors:
            q = q + after * (weight * dot(s, q))
        squared = dot(step, step)  # (batch, 1)
        denominator = squared - dot(step, q)
        # As in `Broyden.learn`: no update that would divide by rounding errors.
        limit = 1e3 * eps * squared.sqrt() * norm(step - q).unsqueeze(1)
        sound = denominator.abs() > limit
        sound &= change_seen(before, Point(w, r), how.precision).unsqueeze(1)
        longer = torch.where(sound, squared / denominator, 1.0)
        if count == how.times:
            change = before - r
            best = dot(before, change).abs() / dot(change, change)
            most = how.overshoot * best.nan_to_num(1.0, 1.0).clamp(min=1.0)
            bound = how.amplification * norm(r) * (norm(w) / size)
            share = torch.clamp(bound / norm(q), max=1.0).nan_to_num(1.0)  # 0/0: no step
            q = torch.where(share.unsqueeze(1) > 0, q, 0.0)  # it may not be finite
            longer = torch.where(sound, torch.clamp(longer, -most, most), 1.0)
            longer = longer * share.unsqueeze(1)
        after = longer * q
        factors.append((step, torch.where(sound, 1 / squared, 0.0), after))
        w, step = select(good, w + after, w), after

    ws = [each for each, _ in seen]
    sizes = torch.stack([norm(residual) for _, residual in seen])  # (times, batch)
    moved = norm(step)  # by the last VJP
    slowest = None if how.secants is None else how.secants.slowest()
    if slowest is None and how.tolerance is None:
        other = _rows(ws, sizes.argmin(dim=0))
        short = norm(w) <= how.growth * norm(other)
        good = good & (short | (sizes[-1] <= how.setback * sizes.amin(dim=0)))
        moved = torch.where(good, moved, 0.0)
    else:
        good = good & (sizes[-1] <= sizes.amin(dim=0))
        if how.times == 1:  # one that starts again from 0 has no VJP left
            good = good & fits
        # A look is free on a CPU, and mostly saves the work.
        unused = look_is_free(v.device) and bool((good | met).all())
        start = Point(w, r) if unused else least_combination(seen, v)
        other = start.z + start.g
        # A plain step moves slow modes too little to show how far off they are.
        slow = 1.0 if slowest is None else slowest.clamp(min=1.0)
        moved = torch.where(good, moved, norm(start.g) * slow)
    w = select(good, w, other)
    residual = None
    if how.tolerance is not None:
        first = (sizes <= how.tolerance * size).int().argmax(dim=0)
        w = select(met, _rows(ws, first), w)
        residual = relative(sizes.gather(0, first.unsqueeze(0))[0], size)
        residual = torch.where(met, residual, torch.inf)  # not that of this w, which is not known
    length = norm(w)
    # No step although there is a residual: nothing is known about the error.
    known = (moved > 0) & (length > 0) & torch.isfinite(length)
    error = torch.where(known, moved / length, torch.where(norm(r) == 0, 0.0, torch.inf))
    error = torch.where(met, 0.0, error)  # it is the residual that tells
    sensitivity = None
    if slowest is not None:
        sensitivity = relative(slowest * size, length).clamp(min=1.0)
    return Cotangent(w, len(seen), residual, error=error, length=length, sensitivity=sensitivity)


def least_combination(seen: list[Point], v: Tensor) -> Point:  # (batch, d)
    """The combination Σ cᵢwᵢ of smallest residual ‖v − Σ cᵢ(v − rᵢ)‖, and that residual.

    seen: every w with its r; one that is not finite is left out, and of more than 16 the best and
        the last are taken (a larger system waits for the device, which a recorded step may not).

    Least squares from the best w, or 0: up to rounding, the ridge, which keeps the system regular
    where images are nearly parallel, can then not make the residual larger.
    """
    if len(seen) > MOST:
        at = torch.stack([norm(r) for _, r in seen]).argmin(dim=0)
        of_least_residual = Point(*(_rows(list(each), at) for each in zip(*seen, strict=True)))
        seen = [of_least_residual, *seen[1 - MOST :]]
    points = [Point(torch.zeros_like(v), v), *seen]
    best = torch.stack([norm(r) for _, r in points]).argmin(dim=0)
    w, r = (_rows(list(vectors), best) for vectors in zip(*points, strict=True))
    # In float64: rounding of nearly parallel images would be taken for directions.
    image = (
        v.unsqueeze(1) - torch.stack([r for _, r in seen], dim=1)
    ).double()  # (batch, times, d)
    size = torch.linalg.vector_norm(image, dim=2, keepdim=True)
    usable = (size > 0) & torch.isfinite(size)
    image = torch.where(usable, image / size, 0.0)
    source = torch.where(usable, torch.stack([w for w, _ in seen], dim=1) / size, 0.0)
    gram = torch.bmm(image, image.mT)
    gram.diagonal(dim1=1, dim2=2).add_(1e-10)
    # solve_ex does not read the device to look for errors: the ridge keeps it regular.
    shares, _ = torch.linalg.solve_ex(gram, torch.bmm(image, r.double().unsqueeze(2)))
    move, change = torch.bmm(shares.mT, source), torch.bmm(shares.mT, image)
    return Point(w + move.squeeze(1).to(v.dtype), r - change.squeeze(1).to(v.dtype))


def _rows(vectors: list[Tensor], at: Tensor) -> Tensor:  # (batch, d) each, (batch,) -> (batch, d)
    """Of each sample the vector of this number."""
    return torch.stack(vectors, dim=1)[torch.arange(len(at), device=at.device), at]
