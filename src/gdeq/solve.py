"""The one loop: every solver's steps, with stopping, freezing and the best iterate kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gdeq import product
from gdeq.ledger import Ledger
from gdeq.operators import Inverse, StateInverse, safe_norms
from gdeq.options import describe
from gdeq.recording import recording
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, select
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateSpace, Vectorized, VectorMap, full_precision
from gdeq.uncompiled import uncompiled

if TYPE_CHECKING:
    from gdeq.nodes import LastEvaluation


@dataclass
class Iterates:
    """The outcome of the loop, on batched vectors."""

    vector: Tensor | None  # (batch, d) z; None where it is in parts alone
    residual: Tensor  # (batch,)
    steps: Tensor  # (batch,)
    codes: Tensor  # (batch,)
    trace: Tensor  # (steps, batch)
    evals: int
    inverse: Inverse | None
    parts: Tensor | None = None  # z as `VectorMap.on_parts` takes it, if at hand
    state: Any = None  # what the solver learned

    @property
    def z(self) -> Tensor:  # (batch, d)
        assert self.vector is not None
        return self.vector

    @property
    def converged(self) -> Tensor:  # (batch,)
        return self.codes == Status.CONVERGED


def iterate(
    f: Vectorized,
    z: Tensor,  # (batch, d)
    solver: Solver,
    *,
    precision: float,
    max_steps: int | None = None,
    right: Tensor | None = None,  # (batch, d)
    inverse: Inverse | None = None,
    last: LastEvaluation | None = None,
    first: VectorMap | None = None,
    parts: Tensor | None = None,  # (batch·d,)
) -> Iterates:
    """Run ``solver`` on f from z; samples are independent systems.

    A sample that has converged, or whose f is no longer finite, is frozen: its z and what the
    solver learned about it stay as they are while the others go on.  With a tolerance, a sample
    that never meets it gets the iterate of smallest ‖g‖ seen, and the inverse estimate of that
    iterate.  With ``tol=0`` exactly ``max_iter`` steps are made, the last iterate is returned, and
    the device is never waited for.

    right: f(0), which says that f is affine; a relative residual is then relative to its norm, as
        for a linear system, instead of to max(‖f(z)‖, ‖z‖).
    last: f, differentiable; with ``tol=0`` it may be called in f's place at the last iterate.
    first: f as it is computed where the solve begins, called there once.
    parts: where it begins, of `gdeq.product.start_in_parts`.
    """
    max_steps = solver.max_iter if max_steps is None else max_steps
    if product.applies(solver, z, max_steps, inverse):  # the same, in fewer passes over memory
        found = product.iterate(f, z, solver, precision, max_steps, right, last, first, parts)
        return Iterates(*found)
    scale = None if right is None else safe_norms(right)[0]
    floor = z.new_zeros(())

    def evaluate(
        z: Tensor, f: Vectorized = f
    ) -> tuple[Tensor, Tensor, Tensor]:  # -> (batch, d), (batch,), (batch,)
        """g, its norm, and what that is relative to."""
        fz = f(z)
        g = fz - z
        if scale is not None:
            return g, safe_norms(g)[0], scale
        absolute, size, other = safe_norms(g, fz, z)
        return g, absolute, torch.maximum(torch.maximum(size, other), floor)

    g, absolute, size = evaluate(z, first or f)
    evals = 1
    if scale is None:
        # Where z* = 0 nothing is ever small beside z; it is beside the rounding of where z began.
        floor = precision * size
    ledger = Ledger(solver, precision, absolute, size, linear=scale is not None)
    state = solver.init(z, g, steps=max_steps, precision=precision, inverse=inverse, right=right)
    trace: list[Tensor] = []
    best_z = z
    looks = ledger.watch and not recording(z.device)

    for step in range(1, max_steps + 1):
        if looks and (step - 1) % solver.check_every == 0 and not bool(ledger.active.any()):
            break
        active = ledger.active
        z_try = select(active, solver.propose(z, g, state), z)
        g_try, absolute, size = evaluate(z_try)
        evals += 1
        for _ in range(solver.line_search):
            # NaN counts as worse.
            worse = active & ~(absolute < (1 - 1e-4) * ledger.absolute)
            if not bool(worse.any()):
                break
            z_try = select(worse, (z + z_try) / 2, z_try)
            g_try, absolute, size = evaluate(z_try)
            evals += 1

        good = ledger.accepts(absolute, size)
        z, g, state = solver.learn(z, g, z_try, g_try, good, state)
        if solver.linear_only:
            # Of the iterate, where f was not evaluated; no better known than f would round there.
            absolute, reached = safe_norms(g, z)
            absolute = torch.maximum(absolute, ledger.rounding * (size + reached))
        better = ledger.note(step, good, absolute, size)
        if ledger.watch:
            best_z = select(better, z, best_z)
        trace.append(ledger.residual)

    codes, residual, at = ledger.finish()
    steps = ledger.steps
    if ledger.watch:
        z = select(at == steps, z, best_z)
    if looks:
        trace = trace[: int(steps.max())] if len(steps) else []
    history = torch.stack(trace) if trace else residual.new_zeros(0, len(z))
    inverse = solver.inverse(state, at if ledger.watch else None)
    return Iterates(z, residual, steps, codes, history, evals, inverse, state=state)


def check_solver(solver: object, *, linear: bool = False) -> Solver:
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a solver such as gdeq.Broyden(), got {describe(solver)}")
    if solver.linear_only and not linear:
        raise ValueError(
            f"{type(solver).__name__} solves linear systems only; use it as "
            f"gdeq.Implicit(solver=gdeq.{type(solver).__name__}()), and gdeq.Broyden() here"
        )
    return solver


def solve_space(
    f: Vectorized,
    z: Tensor,
    space: StateSpace,
    solver: Solver,
    last: LastEvaluation | None = None,
    first: VectorMap | None = None,
    parts: Tensor | None = None,  # (batch·d,)
) -> tuple[Tensor | None, Solution]:
    """`iterate` without autograd and outside autocast: z as a vector, and all in the user's terms.

    The vector is None where z is known to no more digits than the user's tensors have.
    """
    precision = space.precision()
    with torch.no_grad(), full_precision(space.device):
        found = iterate(f, z, solver, precision=precision, last=last, first=first, parts=parts)
    solution = Solution(
        z=_state_of(found, space),
        converged=found.converged,
        residual=found.residual,
        steps=found.steps,
        trace=found.trace,
        evals=found.evals,
        inverse=StateInverse(found.inverse, space) if found.inverse else None,
        codes=found.codes,
        precision=precision,
    )
    return found.vector, solution


def _state_of(found: Iterates, space: StateSpace) -> State:
    if found.parts is not None:
        return space.state(space.in_parts(found.parts))
    return space.unpack(found.z)


@uncompiled
def solve(f: Callable[[State], State], z0: State, solver: Solver | None = None) -> Solution:
    """Find z = f(z) from ``z0``, without autograd.

    f: takes and returns a state, a tensor ``(batch, ...)`` or any nesting of tuples, lists and
        dicts of them.  Samples are independent systems and do not influence each other.
    solver: `Broyden` (the default), `Anderson` or `Picard`.
    """
    solver = Broyden() if solver is None else check_solver(solver)
    space = StateSpace(z0)
    start = space.start(z0).detach()
    return solve_space(space.vectorize(f), start, space, solver)[1]
