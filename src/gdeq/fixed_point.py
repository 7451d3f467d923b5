"""`fixed_point`: a solve whose result carries gradients.

The solve itself runs without autograd.  Then f is evaluated once more, with autograd, at the
solution, between two nodes that make a gradient method a part of the backward pass (`gdeq.nodes`).

With ``tol=0`` the last iterate is known beforehand.  In a recorded step (`gdeq.capture`) f is then
differentiated right there (`LastEvaluation`), and the solve learns from the same values: one
evaluation less.  A sample for which f was not finite before has been taken back to the iterate that
is returned; where f is not finite at the very last one, neither is its gradient.  Elsewhere f is
evaluated once more, at what is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gdeq.fast import product
from gdeq.gradients import DEFAULT, Gradient, Unrolled
from gdeq.ledger import least_part, residual_of
from gdeq.nodes import (
    DirectEvaluation,
    LastEvaluation,
    differentiates_in_the_solve,
    needs_second_order,
    with_first_derivatives,
)
from gdeq.options import describe
from gdeq.solution import Solution, Status
from gdeq.solve import check_solver, solve_space
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateSpace, Vectorized, VectorMap, full_precision
from gdeq.uncompiled import uncompiled


@uncompiled
def fixed_point(
    f: Callable[[State], State],
    z0: State,
    solver: Solver | None = Broyden(),  # noqa: B008 (frozen)
    gradient: Gradient = DEFAULT,
) -> Solution:
    """Find z = f(z) from ``z0``; ``.z`` of the result carries gradients to all that f closes over.

    f: takes and returns a state, a tensor ``(batch, ...)`` or any nesting of tuples, lists and
        dicts of them.  It must be the same function at every call (see `gdeq.hold` for dropout).
    solver: finds the fixed point; None, for `Unrolled` alone, starts from z0 as it is.
    gradient: how ∂ℓ/∂z becomes a gradient; `Implicit` is exact, `GDEQ` reuses Broyden's inverse.
    """
    z, record = solve_and_attach(f, z0, solver, gradient)
    return replace(record, z=z)


def solve_and_attach(
    f: Callable[[State], State],
    z0: State,
    solver: Solver | None,
    gradient: Gradient,
    first: Callable[[State], State] | None = None,
    lend: bool = False,
) -> tuple[State, Solution]:
    """`fixed_point`: z with its gradients, and the solution.

    first: f as it is computed at z0, without autograd; a solve calls it there in f's place.

    The solution's own z is the same tensors where z has no gradients or is unrolled.  Else it is
    without gradients, in memory of its own that f's graph reads: it must not be changed in place.
    With ``lend`` z itself is in that memory, and no copy is made; nor of z0, where the solve can
    begin with it as it lies.
    """
    check_pair(solver, gradient)
    space = StateSpace(z0)
    on_vectors = space.vectorize(f)
    at_start = None if first is None else space.vectorize(first)
    if isinstance(gradient, Unrolled):
        start = space.start(z0)
        solution = _unrolled(on_vectors, start, space, solver, gradient, at_start)
        return solution.z, solution
    assert solver is not None
    parts = product.start_in_parts(on_vectors, z0, solver, share=lend)
    start = (
        product.nowhere(space.batch, space.size, space.dtype, space.device)
        if parts is not None
        else space.start(z0)
    )
    evaluation = DirectEvaluation(on_vectors, gradient)
    last = None
    if torch.is_grad_enabled() and differentiates_in_the_solve(space, solver, gradient):
        last = LastEvaluation(on_vectors, evaluation)
    keep_secants = gradient.uses_secants and torch.is_grad_enabled()
    z, solution = solve_space(
        on_vectors, start.detach(), space, solver, last, at_start, parts, keep_secants
    )
    if not torch.is_grad_enabled():
        return solution.z, solution
    with full_precision(space.device):
        if last is None or not last.made:
            torch.clear_autocast_cache()  # as in `LastEvaluation`
            if needs_second_order(gradient):
                evaluation.at(with_first_derivatives(on_vectors, z, solution, gradient))
            else:
                evaluation.at(space.leaves(solution.z, "z", cast=False))
        return evaluation.attach(z, solution, lend), solution


def _unrolled(
    f: Vectorized,
    z: Tensor,
    space: StateSpace,
    solver: Solver | None,
    gradient: Unrolled,
    first: VectorMap | None,
) -> Solution:
    solution = None
    if solver is not None:
        found, solution = solve_space(f, z.detach(), space, solver, first=first)
        z = space.pack(solution.z) if found is None else found
        torch.clear_autocast_cache()
    with full_precision(space.device):
        stop, tol = (solver.stop, solver.tol) if solver else ("whole", 0.0)
        least = least_part(tol, space.precision(), space.dtype)
        judge = partial(residual_of, stop=stop, sizes=space.sizes, least=least)
        z, residuals = gradient.unroll(f, z, lambda fz, z: judge(fz, z)[0], watch=solver is None)
    if solution is not None and solver is not None:
        residual, parts, claims = residuals[-1], None, solver.tol > 0
        if claims:  # about where the steps ended, where f has not been evaluated yet
            with torch.no_grad(), full_precision(space.device):
                residual, parts = judge(f(z), z)
        # Beside a z that runs away any g is small: where the solve saw that, nothing is claimed.
        converged = (residual <= solver.tol) & claims & (solution.codes != Status.STALLED)
        return replace(
            solution,
            z=space.unpack(z),
            converged=converged,
            residual=residual,
            codes=torch.where(converged, Status.CONVERGED, Status.UNROLLED),
            evals=solution.evals + gradient.steps + claims,
            inverse=None,
            parts=parts,
        )
    batch = residuals[-1].shape
    steps = torch.full(batch, gradient.steps, device=space.device)
    return Solution(
        z=space.unpack(z),
        converged=torch.zeros(batch, dtype=torch.bool, device=space.device),
        residual=residuals[-1],
        steps=steps,
        trace=torch.stack(residuals),
        evals=gradient.steps,
        inverse=None,
        codes=torch.full_like(steps, Status.UNROLLED),
        precision=space.precision(),
    )


def check_pair(solver: Solver | None, gradient: Gradient) -> None:
    """Raise where this solver and this gradient cannot work together."""
    if not isinstance(gradient, Gradient):
        raise TypeError(
            f"gradient must be a gradient such as gdeq.GDEQ(), got {describe(gradient)}"
        )
    if solver is None:
        if not isinstance(gradient, Unrolled):
            raise ValueError(
                "solver=None (no solve) works with gdeq.Unrolled alone; "
                "give a solver such as gdeq.Broyden()"
            )
        return
    check_solver(solver)
    if gradient.needs_inverse and not solver.keeps_inverse:
        raise ValueError(
            f"{type(gradient).__name__} reuses the inverse that Broyden's method builds, and "
            f"{type(solver).__name__} builds none; use gdeq.Broyden(), or another gradient such as "
            "gdeq.GDEQ(refine=1), which begins without one there"
        )
