"""The paper in one file: ways to turn v = ∂ℓ/∂z* into w, exactly or nearly.

Differentiating z* = f(z*, θ) gives ∂ℓ/∂θ = (∂f/∂θ)ᵀ w with

    (I − J)ᵀ w = v,        J = ∂f/∂z at z*.                                    (paper, Eq. 2)

A gradient method is an object with `cotangent(v, vjp, solution)`: given v, the product u ↦ Jᵀu and
the forward solution, it returns w.  What follows from w, the pass through f to the parameters, is
the same for all of them and done by `gdeq.fixed_point`.  All vectors here are ``(batch, d)``.

How good a w is can be told from its residual r = v − (I − Jᵀ)w: one product with Jᵀ measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from gdeq.fast.product import no_inverse
from gdeq.fast.recording import recording
from gdeq.operators import Inverse, Refinement, dot, norm, safe_norms
from gdeq.options import check_flag, check_integer, check_real, check_type, options
from gdeq.solution import Cotangent, Solution
from gdeq.solve import check_solver, iterate
from gdeq.solvers.base import Solver, change_seen, select
from gdeq.solvers.broyden import Broyden
from gdeq.solvers.gmres import GMRES
from gdeq.state import Vectorized

# Broyden's inverse is trusted where it makes v at most so many times as long: after a long solve it
# can be too long by orders of magnitude.
LONGEST = 3.0
# Nothing measures where the last step of a refinement leads, so it is bounded twice.  What the
# inverse makes of the residual may be so many times as long beside it as w is beside v.
AMPLIFICATION = 3.0
# And Broyden's factor for it, which may divide by next to nothing, may be so many times as large as
# 1, or as the factor of smallest residual, which cannot.
OVERSHOOT = 1.5
# Where the last residual is so many times the smallest that was seen, and w would be so many times
# as long as the w of that one, that one is the result.  Either alone says too little: a good w can
# have a larger residual than JFB's, and be far longer (benchmarks/vjps.py).
SETBACK, GROWTH = 2.0, 5.0


class Gradient:
    """Base of all gradient methods."""

    uses_vjp: ClassVar[bool] = True  # asks for products with Jᵀ
    uses_inverse: ClassVar[bool] = False  # asks for the inverse that the forward solver built
    uses_secants: ClassVar[bool] = False  # asks for the last secants of the forward solve
    second_order: ClassVar[bool] = False  # has a derivative itself (double backward)
    # All that is done to v is one product with the inverse: it may be given in half precision.
    takes_half: ClassVar[bool] = False

    @property
    def needs_inverse(self) -> bool:
        """Whether it cannot do without."""
        return self.uses_inverse

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        raise NotImplementedError


@options
class JFB(Gradient):
    """Jacobian-free backpropagation (Fung et al. 2021): w = v, as if J were zero.

    refine: go on from there with so many VJPs, as `GDEQ` does after a solver that leaves no
        inverse, whatever the solver.
    """

    refine: int = 0

    def __post_init__(self) -> None:
        check_integer(self, "refine", 0)

    @property
    def uses_vjp(self) -> bool:  # type: ignore[override]
        return self.refine > 0

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return not self.refine  # that of f, with z* held constant

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        if self.refine:
            return _refined(v, v, vjp, no_inverse(v).T, refinement(self.refine, solution.precision))
        return Cotangent(v, 0)


@options
class NPG(Gradient):
    """Neumann-series phantom gradient (Geng et al. 2021), as the paper writes it.

        w = λ Σ_{i=0}^{k−1} (Mᵀ)ⁱ v,        M = λJ + (1 − λ)I

    steps: k, which costs k − 1 VJPs.
    damping: λ in (0, 1].  λ = 1 is the plain Neumann series.
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_integer(self, "steps", 1)
        check_real(self, "damping", 0.0, 1.0, open_low=True)

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        term, total = v, v
        for _ in range(self.steps - 1):
            term = self.damping * vjp(term) + (1 - self.damping) * term
            total = total + term
        return Cotangent(self.damping * total, self.steps - 1)


@options
class Implicit(Gradient):
    """The exact gradient: solve w = v + Jᵀw, a fixed point in w, started at v.

    solver: any solver; its ``tol`` bounds ‖(I − Jᵀ)w − v‖/‖v‖.  `GMRES` needs the fewest VJPs
        (benchmarks/gradients.py); the paper uses ``Broyden(max_iter=20, tol=1e-6)``.
    precondition: start from what the forward solve learned about the inverse, as `GDEQ` with
        ``refine`` does, and hand it to the solver (`Broyden`, `GMRES`) instead of the identity.
    double_backward: allow second derivatives.  They need f's graph a second time: one more
        evaluation of f, and its activations, in every forward pass.  Switch it off to save both.
    """

    solver: Solver = field(default_factory=lambda: GMRES(max_iter=20, tol=1e-6))
    precondition: bool = field(default=False, kw_only=True)
    double_backward: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_type(self, "solver", Solver, "a solver such as gdeq.Broyden(max_iter=20, tol=1e-6)")
        check_solver(self.solver, linear=True)
        if self.solver.stop == "absolute":
            raise ValueError("Implicit needs a solver with stop='relative': it is relative to ‖v‖")
        check_flag(self, "precondition")
        check_flag(self, "double_backward")

    @property
    def uses_inverse(self) -> bool:  # type: ignore[override]
        return self.precondition

    @property
    def uses_secants(self) -> bool:  # type: ignore[override]
        return self.precondition

    @property
    def needs_inverse(self) -> bool:
        return False

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return self.double_backward

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        w, inverse = first_step(v, solution) if self.precondition else (v, None)
        found = iterate(
            lambda w: v + vjp(w),
            w,
            self.solver,
            precision=solution.precision,
            right=v,
            inverse=inverse,
        )
        floor = rounding_floor(found.z, v, solution.precision)
        return Cotangent(found.z, found.evals, found.residual, self.solver.tol or None, floor=floor)


@options
class GDEQ(Gradient):
    """Reuse Broyden's inverse of the forward pass: w = −B_T⁻ᵀ v, no VJP at all.

    B_T⁻¹ ≈ (J − I)⁻¹ = −(I − J)⁻¹, so (I − J)⁻ᵀ v ≈ −B_T⁻ᵀ v.

    This is the paper's gradient.  It is good in the directions that the forward iterates explored
    and close to JFB elsewhere, if the solve was short.  After a long one it can be off by a factor
    of 10⁵: B_T⁻ᵀ has large entries in directions that no step explored.  ``Measured(GDEQ())`` shows
    that as a backward residual far above 1.

    Beyond the paper, Broyden's method on the adjoint equation can go on from a first estimate that
    is safe after long solves too (`first_step`).  With h(w) = v + Jᵀw its root function h(w) − w
    has the Jacobian Jᵀ − I = (J − I)ᵀ, whose inverse estimate is the *transpose* of what the
    forward solve left.  At 0 the root function is v without any VJP, and the first estimate is the
    step from there: so the first VJP already brings an update.  (Minimising the residual over the
    same VJPs, as GMRES does, gives a smaller residual but a larger error of the gradient:
    benchmarks/vjps.py.)

    refine: spend exactly this many VJPs on it.  How far the last of them moved w, ‖Δw‖/‖w‖, is
        the ``error`` of the record: about the relative error before that step, and so mostly more
        than the one after it.  It is no bound: where I − J is nearly singular, or the inverse far
        off, a short step may be a slow one.  Where w runs away (its residual more than twice the
        smallest on the way, its length more than five times that of the w which had it), that w
        is the result, and the error not known (infinite).
    tolerance: measure ‖(I − Jᵀ)w − v‖/‖v‖ with one VJP and refine only the samples above this,
        with at most ``max_refine`` more (10 unless given).  A sample that stays above it and is
        worse than JFB uses JFB's w (one more VJP, only if a sample stays above).  In a CUDA graph
        all ``max_refine`` + 2 VJPs are spent, on frozen samples too: the result is the same.
    """

    refine: int = 0
    tolerance: float | None = None
    max_refine: int | None = None

    def __post_init__(self) -> None:
        check_integer(self, "refine", 0)
        if self.tolerance is None:
            if self.max_refine is not None:
                raise ValueError("GDEQ.max_refine needs a tolerance; for a fixed number use refine")
            return
        if self.refine:
            raise ValueError("give GDEQ either refine (fixed) or tolerance (adaptive), not both")
        # Above 1, w = 0 would do.
        check_real(self, "tolerance", 0.0, 1.0, open_low=True)
        if self.max_refine is None:
            object.__setattr__(self, "max_refine", 10)
        check_integer(self, "max_refine", 1)

    uses_inverse: ClassVar[bool] = True

    @property
    def uses_vjp(self) -> bool:  # type: ignore[override]
        return self.refine > 0 or self.tolerance is not None

    @property
    def uses_secants(self) -> bool:  # type: ignore[override]
        return self.uses_vjp

    @property
    def needs_inverse(self) -> bool:
        return not self.uses_vjp

    @property
    def takes_half(self) -> bool:  # type: ignore[override]
        return type(self) is GDEQ and not self.uses_vjp  # who derives from it may do more

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        if not self.uses_vjp:
            return Cotangent(forward_inverse(solution).T.negative_matvec(v), 0)
        w, inverse = first_step(v, solution)
        if self.refine:
            return _refined(w, v, vjp, inverse, refinement(self.refine, solution.precision))
        return self._refine_where_needed(w, v, vjp, solution, inverse)

    def _refine_where_needed(
        self, w: Tensor, v: Tensor, vjp: Vectorized, solution: Solution, inverse: Inverse
    ) -> Cotangent:
        assert self.tolerance is not None
        assert self.max_refine is not None
        found = iterate(
            lambda w: v + vjp(w),
            w,
            Broyden(max_iter=self.max_refine, tol=self.tolerance),
            precision=solution.precision,
            right=v,
            inverse=inverse,
        )
        w, vjps, residual = found.z, found.evals, found.residual
        fell_back = torch.zeros_like(found.converged)
        # In a recording nothing can be read: it is computed whether or not a sample needs it.
        if recording(v.device) or not bool(found.converged.all()):
            # JFB's w is v, and its residual v − (I − Jᵀ)v = Jᵀv.
            jfb_residual = relative_norm(vjp(v), v)
            vjps += 1
            fell_back = ~found.converged & ~(residual <= jfb_residual)
            w = select(fell_back, v, w)
            residual = torch.where(fell_back, jfb_residual, residual)
        floor = rounding_floor(w, v, solution.precision)
        return Cotangent(w, vjps, residual, self.tolerance, fell_back, floor=floor)


def first_step(v: Tensor, solution: Solution) -> tuple[Tensor, Inverse]:  # (batch, d)
    """The first estimate of w, and the estimate of (Jᵀ − I)⁻¹ that it is made with.

    By the last secants of the solve, where they are known (`gdeq.secants`).  Where f computes in
    half precision they are not: too much of them is rounding.  There, by Broyden's inverse for the
    samples that it is plausible for; for the others, and after a solver that has none, −I.
    """
    if solution.secants is not None:
        inverse: Inverse = solution.secants.inverse().T
        return inverse.negative_matvec(v), inverse
    if solution.inverse is None:
        return v, no_inverse(v).T
    return forward_inverse(solution).T.trusted(v, LONGEST)


def refinement(times: int, precision: float) -> Refinement:
    return Refinement(times, precision, AMPLIFICATION, OVERSHOOT, SETBACK, GROWTH)


def _refined(w: Tensor, v: Tensor, vjp: Vectorized, inverse: Inverse, how: Refinement) -> Cotangent:
    found = inverse.refined(w, v, vjp, how)  # on a GPU
    if found is None:
        found = _refine(w, v, vjp, inverse, how)
    w, error, length = found
    return Cotangent(w, how.times, error=error, length=length)


def _refine(
    w: Tensor, v: Tensor, vjp: Vectorized, inverse: Inverse, how: Refinement
) -> tuple[Tensor, Tensor, Tensor]:  # (batch, d), (batch,), (batch,)
    """Broyden's method from 0, where the residual is v and the first step is ``w``.

    With its result, how far the last step went, and ‖w‖.

    The updates are kept as factors I + s_{t+1}s_tᵀ/‖s_t‖² of the inverse (`gdeq.fast.product`).
    """
    eps = torch.finfo(v.dtype).eps
    step, r, kept = w, v, w
    factors: list[tuple[Tensor, Tensor, Tensor]] = []
    for count in range(1, how.times + 1):
        before, r = r, v + vjp(w) - w
        size = norm(r)  # (batch,)
        if count == 1:
            good, least = torch.isfinite(size), size
        else:
            good = good & torch.isfinite(size)
            better = good & (size < least)
            kept, least = select(better, w, kept), torch.where(better, size, least)
        q = inverse.negative_matvec(r)
        for s, share, after in factors:
            q = q + after * (share * dot(s, q))
        squared = dot(step, step)  # (batch, 1)
        denominator = squared - dot(step, q)
        # As in `Broyden.learn`: no update that would divide by rounding errors.
        limit = 1e3 * eps * squared.sqrt() * norm(step - q).unsqueeze(1)
        sound = denominator.abs() > limit
        sound &= change_seen(before, r, w, how.precision).unsqueeze(1)
        longer = torch.where(sound, squared / denominator, 1.0)
        if count == how.times:
            change = before - r
            best = dot(before, change).abs() / dot(change, change)
            most = how.overshoot * best.nan_to_num(1.0, 1.0).clamp(min=1.0)
            bound = how.amplification * size * (norm(w) / norm(v))
            share = torch.clamp(bound / norm(q), max=1.0).nan_to_num(1.0)  # 0/0: no step
            q = torch.where(share.unsqueeze(1) > 0, q, 0.0)  # it may not be finite
            longer = torch.where(sound, torch.clamp(longer, -most, most), 1.0)
            longer = longer * share.unsqueeze(1)
        after = longer * q
        factors.append((step, torch.where(sound, 1 / squared, 0.0), after))
        if count == how.times:
            length, moved, of_kept = norm(w + after), norm(after), norm(kept)
            good = good & ((size <= how.setback * least) | (length <= how.growth * of_kept))
        w, step = select(good, w + after, kept), after
    # No step, but a residual: nothing is known.
    known = good & (moved > 0) & (length > 0) & torch.isfinite(length)
    error = torch.where(known, moved / length, torch.where(size == 0, 0.0, torch.inf))
    return w, error, torch.where(good, length, of_kept)


# For whoever does not choose.  Not the paper's plain reuse: on MDEQ and CIFAR-10 that is no better
# than JFB, and one VJP makes up for most of it (docs/results.md); the residual is measured too.
DEFAULT = GDEQ(refine=1)


@options
class Measured(Gradient):
    """Another gradient, with its residual measured (for `JFB` and plain `GDEQ`, which need no J).

    The products with Jᵀ come with the pass through f that follows anyway; the cost is that this
    pass goes down to z as well, a fraction of one evaluation.
    """

    gradient: Gradient

    def __post_init__(self) -> None:
        check_type(self, "gradient", Gradient, "a gradient such as gdeq.GDEQ()")
        if isinstance(self.gradient, Unrolled):
            raise ValueError("Unrolled solves no adjoint equation, so it has no residual")

    @property
    def uses_inverse(self) -> bool:  # type: ignore[override]
        return self.gradient.uses_inverse

    @property
    def uses_secants(self) -> bool:  # type: ignore[override]
        return self.gradient.uses_secants

    @property
    def needs_inverse(self) -> bool:
        return self.gradient.needs_inverse

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        return self.gradient.cotangent(v, vjp, solution)


@options
class Unrolled(Gradient):
    """Weight-tied unrolling through autograd: z ← (1 − λ) z + λ f(z), ``steps`` times.

    After a solve, from z*, it is the unrolled phantom gradient of the peers.  With ``solver=None``
    it starts from z0 and is the pre-training of the paper.  Memory grows with ``steps``.

    damping: λ in (0, 1]; 1 is the plain iteration.
    """

    steps: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_integer(self, "steps", 1)
        check_real(self, "damping", 0.0, 1.0, open_low=True)

    def unroll(
        self, f: Vectorized, z: Tensor, residual: Callable[[Tensor, Tensor], Tensor], watch: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The last z with its graph, and the residual at each z f was given, or at the last.

        residual: of f(z) and z.
        """
        trace = []
        for step in range(1, self.steps + 1):
            fz = f(z)
            g = fz - z
            if watch or step == self.steps:
                with torch.no_grad():
                    trace.append(residual(fz, z))
            z = fz if self.damping == 1 else z + self.damping * g
        return z, trace


def forward_inverse(solution: Solution) -> Inverse:
    if solution.inverse is None:
        raise ValueError("the forward solver left no inverse to reuse; solve with gdeq.Broyden")
    return solution.inverse.vectors


def rounding_floor(w: Tensor, v: Tensor, precision: float) -> Tensor:  # (batch, d) -> (batch,)
    """The residual that the rounding of v + Jᵀw may leave or hide (as in `gdeq.ledger`)."""
    reached, size = safe_norms(w, v)
    return 0.5 * precision * relative(size + reached, size)


def relative_norm(r: Tensor, v: Tensor) -> Tensor:  # (batch, d), (batch, d) -> (batch,)
    """‖r‖/‖v‖, and 0 for 0/0: a sample that the loss ignores has no error."""
    return relative(*safe_norms(r, v))


def relative(size: Tensor, reference: Tensor) -> Tensor:  # (batch,), (batch,) -> (batch,)
    return torch.where(size > 0, size / reference, size)
