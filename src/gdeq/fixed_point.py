"""`fixed_point` and `solve`: find z = f(z), with gradients or without.

Choose an engine, solve without autograd, attach gradients (`gdeq.adjoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gdeq import second_order
from gdeq.adjoint import attach
from gdeq.engine import choose
from gdeq.gradients import DEFAULT, Gradient, Implicit, Unrolled
from gdeq.ledger import Measure
from gdeq.options import describe
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, System, check_solver
from gdeq.solvers.broyden import Broyden
from gdeq.solvers.picard import Picard
from gdeq.state import State, StateMap, StateSpace, full_precision
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

    Examples:
        >>> import torch, gdeq
        >>> x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        >>> f = lambda z: torch.cos(z) + x
        >>> found = gdeq.fixed_point(f, x.detach(), gradient=gdeq.Implicit())
        >>> found.z.sum().backward()
        >>> z, slope = found.z.item(), x.grad.item()  # by hand: 1 / (1 + sin z)
        >>> f"{z:.4f} {slope:.4f}"
        '0.7391 0.5975'
    """
    z, solution = find(f, z0, solver, gradient)
    return replace(solution, z=z)


@uncompiled
def solve(f: Callable[[State], State], z0: State, solver: Solver | None = None) -> Solution:
    """Find z = f(z) from ``z0``, without autograd.

    f: takes and returns a state, a tensor ``(batch, ...)`` or any nesting of tuples, lists and
        dicts of them.  Samples are independent systems and do not influence each other.
    solver: `Broyden` (the default), `Anderson` or `Picard`.

    Examples:
        >>> import torch, gdeq
        >>> solution = gdeq.solve(torch.cos, torch.zeros(2, 3), gdeq.Anderson(tol=1e-5))
        >>> bool(solution.converged.all()), f"{solution.z[0, 0]:.3f}"
        (True, '0.739')
    """
    solver = Broyden() if solver is None else check_solver(solver)
    on_state = StateMap(StateSpace(z0), f)
    return choose(on_state).solve(on_state, z0, solver, None).solution


def find(
    f: Callable[[State], State], z0: State, solver: Solver | None, gradient: Gradient
) -> tuple[State, Solution]:
    """`fixed_point`: z with its gradients, and the solution.

    The solution's own z is the same tensors where z has no gradients or is unrolled.  Else it is
    without gradients, in memory that f's graph reads: it must not be changed in place.
    """
    check_pair(solver, gradient)
    on_state = StateMap(StateSpace(z0), f)
    if isinstance(gradient, Unrolled):
        solution = _unrolled(on_state, z0, solver, gradient)
        return solution.z, solution
    assert solver is not None
    engine = choose(on_state)
    wanted = gradient if torch.is_grad_enabled() else None
    found = engine.solve(on_state, z0, solver, wanted)
    if wanted is None:
        return found.solution.z, found.solution
    if isinstance(gradient, Implicit) and second_order.needed(gradient):
        return second_order.attach_twice(on_state, found, gradient, engine), found.solution
    return attach(on_state, found, gradient, engine), found.solution


def _unrolled(f: StateMap, z0: State, solver: Solver | None, gradient: Unrolled) -> Solution:
    """Steps through autograd, from z0 or from the solution of a solve."""
    space, found, vector = f.space, None, None
    if solver is not None:
        solved = choose(f).solve(f, z0, solver, None)
        found, vector = solved.solution, solved.vector
        torch.clear_autocast_cache()
    judge = solver or Picard(tol=0.0, stop="whole")
    with full_precision(space.device):
        z = space.start(z0 if found is None else found.z) if vector is None else vector
        measure = Measure(judge, System(f.precision, space.sizes), z)
        z, trace = gradient.unroll(f, z, lambda fz, z: measure(fz, z).residual(judge.stop))
        residual, parts, evals = trace[-1], None, gradient.steps
        claims = found is not None and judge.tol > 0
        if claims:  # about where the steps ended, where f has not been evaluated yet
            with torch.no_grad():
                norms = measure(f(z), z)
            residual, parts, evals = norms.residual(judge.stop), norms.parts, evals + 1
    converged = (residual <= judge.tol) & claims
    if found is not None:
        # Beside a z that runs away any g is small: where the solve saw that, nothing is claimed.
        converged &= found.codes != Status.STALLED
    return Solution(
        z=space.unpack(z),
        converged=converged,
        residual=residual,
        steps=torch.full_like(converged, gradient.steps, dtype=torch.long)
        if found is None
        else found.steps,
        trace=torch.stack(trace) if found is None else found.trace,
        evals=evals + (found.evals if found else 0),
        inverse=None,
        codes=torch.where(converged, Status.CONVERGED, Status.UNROLLED),
        precision=f.precision,
        parts=parts,
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
    if gradient.needs.broyden and not solver.keeps_inverse:
        raise ValueError(
            f"{type(gradient).__name__} reuses the inverse that Broyden's method builds, and "
            f"{type(solver).__name__} builds none; use gdeq.Broyden(), or another gradient such as "
            "gdeq.GDEQ(refine=1), which begins without one there"
        )
