"""`fixed_point` and `solve`: find z = f(z), with gradients or without.

Choose an engine, solve without autograd, attach gradients (`gdeq.engine`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from gdeq import functional
from gdeq.context import (
    blind,
    is_exporting,
    is_transformed,
    process_groups,
    together,
    uncompiled,
    without_values,
)
from gdeq.engine import REFERENCE, Engine, Found, attach, choose
from gdeq.gradients import DEFAULT, Gradient, Implicit, Unrolled
from gdeq.loop import Measure
from gdeq.options import count_of, describe
from gdeq.second_order import attach_twice
from gdeq.solution import BackwardRecord, Solution, Status
from gdeq.solvers.base import Point, Solver, System, check_solver
from gdeq.solvers.broyden import Broyden
from gdeq.solvers.picard import Picard
from gdeq.state import State, StateMap, StateSpace, full_precision


@uncompiled
def fixed_point(
    f: Callable[[State], State],
    z0: State,
    solver: Solver | None = Broyden(),  # noqa: B008 (frozen)
    gradient: Gradient = DEFAULT,
) -> Solution:
    """Find z = f(z) from ``z0``, with gradients.

    Returns a `Solution`.  Its ``z`` carries gradients to everything that f closes over.

    f: takes and returns a state, a tensor ``(batch, ...)`` or any nesting of tuples, lists and
        dicts of them.  It must be the same function at every call (see `gdeq.hold` for dropout)
        and treat the samples of the batch independently.
    solver: finds the fixed point.  None, for `Unrolled` only, skips the solve and starts at z0.
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
    with together(process_groups(f)):
        z, solution = find(f, z0, solver, gradient)
    return replace(solution, z=z)


@uncompiled
def solve(f: Callable[[State], State], z0: State, solver: Solver | None = None) -> Solution:
    """Find z = f(z) from ``z0``, without autograd; return a `Solution`.

    f: takes and returns a state, a tensor ``(batch, ...)`` or any nesting of tuples, lists and
        dicts of them.  It must treat the samples of the batch independently.
    solver: `Broyden` (the default), `Anderson` or `Picard`.

    Examples:
        >>> import torch, gdeq
        >>> solution = gdeq.solve(torch.cos, torch.zeros(2, 3), gdeq.Anderson(tol=1e-5))
        >>> bool(solution.converged.all()), f"{solution.z[0, 0]:.3f}"
        (True, '0.739')
    """
    solver = Broyden() if solver is None else check_solver(solver)
    with together(process_groups(f)), _on_state(f, z0) as on_state:
        return _solver_of(on_state)(on_state, z0, solver, None).solution


@uncompiled
def trajectory(
    f: Callable[[State], State],
    z0: State,
    at: Sequence[int],
    solver: Solver = Broyden(),  # noqa: B008 (frozen)
    gradient: Gradient = DEFAULT,
) -> list[State]:
    """Return the states after the solver steps ``at`` and the fixed point, each with gradients.

    Use it for losses on intermediate states (fixed-point correction).  Each state has the gradient
    it would have if the solve had ended there; `GDEQ` uses what the whole solve learned.  A sample
    that has converged keeps its state.  On a GPU this runs the reference engine, which is slower.

    at: step numbers from 1 to the solver's ``max_iter``.

    Examples:
        >>> import torch, gdeq
        >>> picard = gdeq.Picard(max_iter=3, tol=0)
        >>> states = gdeq.trajectory(lambda z: 0.5 * z + 1, torch.zeros(1, 1), [1, 2], picard)
        >>> [z.item() for z in states]
        [1.0, 1.5, 1.75]
    """
    with together(process_groups(f)):
        return find_all(f, z0, solver, gradient, at)[0]


def find(
    f: Callable[[State], State], z0: State, solver: Solver | None, gradient: Gradient
) -> tuple[State, Solution]:
    """`fixed_point`: z with its gradients, and the solution.

    The solution's own z is this z where that has no gradients or is unrolled.  Else it is without
    gradients, in memory that f's graph reads: it must not be changed in place.
    """
    check_pair(solver, gradient)
    wanted = gradient if torch.is_grad_enabled() and not is_exporting() else None
    with _on_state(f, z0) as on_state:
        if torch.compiler.is_dynamo_compiling():
            # Unrolled steps are part of the value too.
            used = gradient if isinstance(gradient, Unrolled) else wanted
            z = functional.compiled(on_state, z0, solver, used)
            return z, cast(Solution, None)  # there are no values to record
        if isinstance(gradient, Unrolled):
            solution = _unrolled(on_state, z0, solver, gradient)
            return solution.z, solution
        assert solver is not None
        found = _solver_of(on_state)(on_state, z0, solver, wanted)
        z = found.solution.z if wanted is None else _attached(on_state, found, wanted)
        return z, found.solution


def find_all(
    f: Callable[[State], State],
    z0: State,
    solver: Solver | None,
    gradient: Gradient,
    at: Sequence[int],
) -> tuple[list[State], Solution]:
    """`trajectory`, and the solution."""
    check_pair(solver, gradient)
    if solver is None:
        raise ValueError("a trajectory needs a solver; without one, call f in a loop yourself")
    if isinstance(at, int):
        raise TypeError(f"at must be a list of steps, such as [{at}], got {at}")
    for step in at:
        count_of("a step of a trajectory", step, 1)
        if step > solver.max_iter:
            raise ValueError(f"the solver makes at most {solver.max_iter} steps, not {step}")
    kept: dict[int, Tensor] = {}
    with _on_state(f, z0) as on_state:
        solve = _solver_of(on_state, REFERENCE)
        found = solve(on_state, z0, _watched(solver, kept), gradient)
        torch.clear_autocast_cache()
        made = []
        for step in (*at, 0):  # 0 stands for the end
            vector = kept.get(step, found.vector).detach()
            z = on_state.space.unpack(vector)
            # The record of backward passes is that of the fixed point.
            record = BackwardRecord() if step else found.solution.record
            solution = replace(found.solution, z=z, record=record)
            there = replace(found, solution=solution, vector=vector)
            if isinstance(gradient, Unrolled):
                z = _unrolled(on_state, z, None, gradient).z
            elif torch.is_grad_enabled():
                z = _attached(on_state, there, gradient)
            made.append(z)
    return made, found.solution


def _watched(solver: Solver, kept: dict[int, Tensor]) -> Solver:
    """The same solver, which keeps the iterate of each step."""
    twin = copy.copy(solver)

    def learn(*seen: Any) -> tuple[Point, Any]:
        here, state = solver.learn(*seen)
        kept[len(kept) + 1] = here.z
        return here, state

    object.__setattr__(twin, "learn", learn)  # it is frozen
    return twin


@contextlib.contextmanager
def _on_state(f: Callable[[State], State], z0: State) -> Iterator[StateMap]:
    """f as a map of states like z0; inside, values that do not exist yet are not read."""
    on_state = StateMap(StateSpace(z0), f)
    with blind(without_values(on_state.space.leaves(z0, "z0", cast=True))):
        yield on_state


def _solver_of(f: StateMap, engine: Engine | None = None) -> Callable[..., Found]:
    """`Engine.solve` for this map: of the engine that is chosen for it unless one is given."""
    return functional.solve if is_transformed() else (engine or choose(f)).solve


def _attached(f: StateMap, found: Found, gradient: Gradient) -> State:
    """z of the solution, with gradients."""
    if is_transformed():
        return functional.attach(f, found, gradient)
    if isinstance(gradient, Implicit) and gradient.double_backward:
        return attach_twice(f, found, gradient)
    return attach(f, found, gradient)


def _unrolled(f: StateMap, z0: State, solver: Solver | None, gradient: Unrolled) -> Solution:
    """Steps through autograd, from z0 or from the solution of a solve."""
    space, found, vector = f.space, None, None
    if solver is not None:
        solved = _solver_of(f)(f, z0, solver, None)
        found, vector = solved.solution, solved.vector
        torch.clear_autocast_cache()
    judge = solver or Picard(tol=0.0, stop="whole")
    with full_precision(space.device):
        z = space.pack(z0 if found is None else found.z) if vector is None else vector
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


def check_gradient(gradient: Gradient) -> Gradient:
    """The gradient itself, if it is one."""
    if not isinstance(gradient, Gradient):
        raise TypeError(
            f"gradient must be a gradient such as gdeq.GDEQ(), got {describe(gradient)}"
        )
    return gradient


def check_pair(solver: Solver | None, gradient: Gradient) -> None:
    """Raise where this solver and this gradient cannot work together."""
    check_gradient(gradient)
    if solver is None:
        if not isinstance(gradient, Unrolled):
            raise ValueError(
                "solver=None (no solve) works only with gdeq.Unrolled; "
                "give a solver such as gdeq.Broyden()"
            )
        return
    check_solver(solver)
    if gradient.needs.broyden and not solver.keeps_inverse:
        raise ValueError(
            f"{type(gradient).__name__} reuses the inverse that Broyden's method builds, and "
            f"{type(solver).__name__} builds none; use gdeq.Broyden(), or another gradient such as "
            "gdeq.GDEQ(refine=1), which works without an inverse"
        )
