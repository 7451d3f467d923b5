"""The paper in one file: ways to turn v = ∂ℓ/∂z* into w, exactly or nearly.

Differentiating z* = f(z*, θ) gives ∂ℓ/∂θ = (∂f/∂θ)ᵀ w with

    (I − J)ᵀ w = v,        J = ∂f/∂z at z*.                                    (paper, Eq. 2)

A gradient method is an object whose `cotangent` returns w.  What follows from w, the pass through f
to the parameters, is the same for all (`gdeq.engine`).  All vectors here are ``(batch, d)``.

The residual of w is r = v − (I − Jᵀ)w: one product with Jᵀ measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from gdeq.operators import relative, safe_norms
from gdeq.options import check_flag, check_integer, check_real, check_type, options
from gdeq.refinement import Refinement, first_step, minus_identity, refine
from gdeq.solution import Cotangent, Solution
from gdeq.solvers.base import Solver, System, check_solver, select
from gdeq.solvers.gmres import GMRES
from gdeq.state import Vectorized


class Needs(NamedTuple):
    """What a gradient method asks for."""

    vjp: bool = True  # products with Jᵀ
    inverse: bool = False  # the inverse that the forward solver built, where it did
    secants: bool = False  # the last secants of the forward solve
    broyden: bool = False  # cannot do without that inverse


class Gradient:
    """Base class of gradient methods.  Subclass it to write your own.

    Examples:
        >>> import torch, gdeq
        >>> from gdeq.solution import Cotangent
        >>> class TwoTerms(gdeq.Gradient):
        ...     def cotangent(self, v, vjp, solution):
        ...         return Cotangent(v + vjp(v), vjps=1)
        >>> deq = gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=TwoTerms())
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> deq(x).sum().backward()
        >>> x.grad.item()  # 1 + ½; the exact value is 2
        1.5
    """

    needs: Needs = Needs()
    second_order: bool = False  # has a derivative itself (double backward)

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        """Return w and what is known about it.

        v: ∂ℓ/∂z*, (batch, d).  vjp: u ↦ Jᵀu.  solution: of the forward solve.
        """
        raise NotImplementedError


@options
class JFB(Gradient):
    """Jacobian-free backpropagation (Fung et al. 2021): w = v, as if J were zero.

    refine: improve w with this many VJPs, as `GDEQ` does after a solver that leaves no inverse.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=gdeq.JFB())(x).sum().backward()
        >>> x.grad.item()  # the exact value is 2
        1.0
    """

    refine: int = 0

    def __post_init__(self) -> None:
        check_integer(self, "refine", 0)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(vjp=self.refine > 0)

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return not self.refine  # that of f, with z* held constant

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        if self.refine:
            how = Refinement(self.refine, solution.precision)
            return refine(v, v, vjp, minus_identity(v), how)
        return Cotangent(v, 0)


@options
class NPG(Gradient):
    """Neumann-series phantom gradient (Geng et al. 2021), in the paper's notation.

        w = λ Σ_{i=0}^{k−1} (Mᵀ)ⁱ v,        M = λJ + (1 − λ)I

    steps: k, the number of terms; costs k − 1 VJPs.
    damping: λ in (0, 1].  λ = 1 is the plain Neumann series.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> npg = gdeq.NPG(steps=3, damping=1.0)
        >>> gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=npg)(x).sum().backward()
        >>> x.grad.item()  # 1 + ½ + ¼
        1.75
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

    Exact to the solver's tolerance, where its steps suffice.  If ``solution.backward.converged`` is
    not true of all samples, raise ``max_iter``.

    solver: any solver; its ``tol`` bounds ‖(I − Jᵀ)w − v‖/‖v‖.  `GMRES` needs the fewest VJPs
        (benchmarks/gradients.py); the paper uses ``Broyden(max_iter=20, tol=1e-6)``.
    precondition: start from what the forward solve learned about the inverse, as `GDEQ` with
        ``refine`` does, and give it to the solver (`Broyden`, `GMRES`) in place of the identity.
        A sample whose residual ends above 1, which is that of w = 0, gets w = 0.
    double_backward: allow second derivatives.  They need one more evaluation of f, with its
        activations, in every forward pass.  Set it to False to save both.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=gdeq.Implicit())(x).sum().backward()
        >>> x.grad.item()  # 1 / (1 − ½)
        2.0
    """

    solver: Solver = field(default_factory=lambda: GMRES(max_iter=20, tol=1e-6))
    precondition: bool = field(default=False, kw_only=True)
    double_backward: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_type(self, "solver", Solver, "a solver such as gdeq.Broyden(max_iter=20, tol=1e-6)")
        check_solver(self.solver, linear=True)
        if self.solver.stop == "absolute":
            raise ValueError("Implicit cannot use stop='absolute': its residual is relative to ‖v‖")
        check_flag(self, "precondition")
        check_flag(self, "double_backward")

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(inverse=self.precondition, secants=self.precondition)

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return self.double_backward

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        w, inverse = first_step(v, solution) if self.precondition else (v, None)
        system = System(solution.precision, right=v, inverse=inverse)
        found = solution.engine.iterate(lambda w: v + vjp(w), w, self.solver, system)
        w, residual = found.z, found.residual
        if self.precondition:  # the residual of 0 is 1
            worse = ~(residual <= 1)  # also where it is no number
            w = select(worse, torch.zeros_like(w), w)
            residual = torch.where(worse, 1.0, residual)
        floor = rounding_floor(w, v, solution.precision)
        return Cotangent(w, found.evals, residual, self.solver.tol or None, floor=floor)


@options
class GDEQ(Gradient):
    """Reuse Broyden's inverse of the forward pass: w = −B_T⁻ᵀ v, without any VJP.

    B_T⁻¹ ≈ (J − I)⁻¹ = −(I − J)⁻¹, so (I − J)⁻ᵀ v ≈ −B_T⁻ᵀ v.

    Without options this is the paper's gradient.  After a short solve it is good in the directions
    that the forward iterates explored, and close to JFB elsewhere.  After a long solve it can be
    off by a factor of 10⁵, because B_T⁻ᵀ has large entries in directions that no step explored.
    ``Measured(GDEQ())`` shows that as a backward residual far above 1.

    With ``refine`` or ``tolerance``, Broyden's method continues on the adjoint equation for a few
    VJPs, starting from the last secants of the solve (`gdeq.refinement`), which are safe after long
    solves too.  The error is rarely above twice the larger of 0.5 and that of ``JFB(refine=k)``: in
    none of 18,968 cases on maps of many fields, but in 16 of 1,088 on GRU cells
    (benchmarks/gradients.py).  The median is smaller than JFB's, though not on LASSO or GRU cells.

    refine: spend exactly this many VJPs.  The record's ``error`` is how far the last of them moved
        w, ‖Δw‖/‖w‖.  That is about the relative error before the last step, and so mostly more
        than the error of the result (see `BackwardRecord`).  If the residual is not the smallest
        at the end, the last step starts from the combination of all w with the smallest residual.
        In half precision, if the residual doubled and w became five times as long, the result is
        the w with the smallest residual, and its error is not known (infinite).
    tolerance: measure ‖(I − Jᵀ)w − v‖/‖v‖ with one VJP, and refine the samples above this
        tolerance.  A sample keeps the first w within the tolerance.  One that never gets there ends
        as with ``refine=max_refine + 1`` (in half precision, with a plain step from the combination
        of smallest residual).  Under `gdeq.capture` all these VJPs are spent; the result is the
        same.
    max_refine: with a tolerance, the largest number of VJPs after the first; 10 by default.

    Examples:
        >>> import torch, gdeq
        >>> linear = torch.nn.Linear(8, 8)
        >>> cell = lambda z, x: torch.tanh(0.5 * linear(z) + x)
        >>> deq = gdeq.DEQ(cell, gradient=gdeq.GDEQ(refine=2))
        >>> deq(torch.randn(4, 8)).sum().backward()
        >>> deq.solution.backward.vjps
        2
        >>> bool(deq.solution.backward.batch_error < 0.5)
        True
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

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        refines = self.refine > 0 or self.tolerance is not None
        return Needs(vjp=refines, inverse=True, secants=refines, broyden=not refines)

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        if not self.needs.vjp:
            if solution.inverse is None:
                raise ValueError(
                    "the forward solver left no inverse to reuse; solve with gdeq.Broyden"
                )
            return Cotangent(solution.inverse.vectors.T.negative_matvec(v), 0)
        w, inverse = first_step(v, solution)
        times = self.refine if self.max_refine is None else self.max_refine + 1
        how = Refinement(
            times, solution.precision, secants=solution.secants, tolerance=self.tolerance
        )
        found = refine(w, v, vjp, inverse, how)
        if self.tolerance is not None:
            found.tolerance = self.tolerance
            found.floor = rounding_floor(found.w, v, solution.precision)
        return found


# Not the paper's plain reuse: on MDEQ and CIFAR-10 that is no better than JFB.  One VJP makes up
# for most of it, and its residual is measured at no extra cost.
DEFAULT = GDEQ(refine=1)


@options
class Measured(Gradient):
    """Another gradient, with its residual measured.  For `JFB` and plain `GDEQ`, which use no J.

    The product with Jᵀ comes with the pass through f that every gradient makes.  That pass then
    also goes down to z, which costs a fraction of one evaluation.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> deq = gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=gdeq.Measured(gdeq.JFB()))
        >>> deq(x).sum().backward()
        >>> deq.solution.backward.residual.item()  # |(1 − ½) · 1 − 1|
        0.5
    """

    gradient: Gradient

    def __post_init__(self) -> None:
        check_type(self, "gradient", Gradient, "a gradient such as gdeq.GDEQ()")
        if isinstance(self.gradient, Unrolled):
            raise ValueError("Unrolled solves no adjoint equation, so it has no residual")

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.gradient.needs._replace(vjp=True)

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        return self.gradient.cotangent(v, vjp, solution)


@options
class Unrolled(Gradient):
    """Weight-tied unrolling through autograd: z ← (1 − λ) z + λ f(z), ``steps`` times.

    After a solve it starts from z*: the unrolled phantom gradient (Geng et al. 2021).  With
    ``solver=None`` it starts from z0: the paper's pre-training.  Memory grows with ``steps``.

    steps: how often f is evaluated with autograd.
    damping: λ in (0, 1]; 1 is the plain iteration.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> deq = gdeq.DEQ(lambda z, x: 0.5 * z + x, solver=None, gradient=gdeq.Unrolled(steps=2))
        >>> deq(x).item()  # from z = 0: 1, then 1.5
        1.5
    """

    steps: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_integer(self, "steps", 1)
        check_real(self, "damping", 0.0, 1.0, open_low=True)

    def unroll(
        self, f: Vectorized, z: Tensor, residual: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The last z with its graph, and the residual, of f(z) and z, at each z f was given."""
        trace = []
        for _ in range(self.steps):
            fz = f(z)
            with torch.no_grad():
                trace.append(residual(fz, z))
            z = fz if self.damping == 1 else z + self.damping * (fz - z)
        return z, trace


def rounding_floor(w: Tensor, v: Tensor, precision: float) -> Tensor:  # (batch, d) -> (batch,)
    """The residual that the rounding of v + Jᵀw may leave or hide (see `gdeq.loop`)."""
    reached, size = safe_norms(w, v)
    return 0.5 * precision * relative(size + reached, size)
