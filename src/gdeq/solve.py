"""The one loop: every solver's steps, with stopping, freezing and the best iterate kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gdeq.fast import product
from gdeq.fast.recording import recording
from gdeq.ledger import Ledger, Norms, judged_sizes, least_part, norms_of
from gdeq.operators import Inverse, StateInverse, norm, safe_norms
from gdeq.options import describe
from gdeq.secants import Secants
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, noise_level, select
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
    of_parts: Tensor | None = None  # (batch, parts) residuals, where they are judged one by one
    parts: Tensor | None = None  # z as `VectorMap.on_parts` takes it, if at hand
    secants: Secants | None = None
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
    keep_secants: bool = False,
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
    parts: where it begins, of `gdeq.fast.product.start_in_parts`.
    keep_secants: return the last secants of each sample.
    """
    max_steps = solver.max_iter if max_steps is None else max_steps
    sizes = f.space.sizes if isinstance(f, VectorMap) else [z.shape[1]]
    sizes = judged_sizes(solver.stop, sizes, linear=right is not None)
    if product.applies(solver, z, max_steps, inverse) and product.judges(f, sizes):
        # The same, in fewer passes over memory.
        found = product.iterate(
            f, z, solver, precision, max_steps, right, last, first, parts, keep_secants
        )
        return Iterates(*found)
    scale = None if right is None else safe_norms(right)[0]
    least, floor = least_part(solver.tol, precision, z.dtype), z.new_zeros(())

    def evaluate(z: Tensor, f: Vectorized = f) -> tuple[Tensor, Norms]:  # -> (batch, d)
        fz = f(z)
        g = fz - z
        if scale is None:
            return g, norms_of(g, fz, z, sizes, least, floor)
        absolute, of_z = safe_norms(g, z)
        return g, Norms(absolute, scale, of_z)

    g, norms = evaluate(z, first or f)
    evals = 1
    if scale is None:
        # Where z* = 0 nothing is ever small beside z; it is beside the rounding of where z began.
        # That of z, not of f: what f rounds at z0 says nothing about a z that is far smaller.
        floor = torch.finfo(z.dtype).eps * norms.size
    ledger = Ledger(solver, precision, norms, linear=scale is not None)
    state = solver.init(z, g, steps=max_steps, precision=precision, inverse=inverse, right=right)
    secants = Secants.empty(z, max_steps) if keep_secants else None
    trace: list[Tensor] = []
    best_z = z
    looks = ledger.watch and not recording(z.device)

    for step in range(1, max_steps + 1):
        if looks and (step - 1) % solver.check_every == 0 and not bool(ledger.active.any()):
            break
        active = ledger.active
        z_try = select(active, solver.propose(z, g, state), z)
        g_try, norms = evaluate(z_try)
        evals += 1
        for _ in range(solver.line_search):
            # NaN counts as worse.
            worse = active & ~(norms.absolute < (1 - 1e-4) * ledger.absolute)
            if not bool(worse.any()):
                break
            z_try = select(worse, (z + z_try) / 2, z_try)
            g_try, norms = evaluate(z_try)
            evals += 1

        good = ledger.accepts(norms)
        if secants is not None:
            y = g_try - g
            seen = good & (norm(y) > noise_level(precision) * (norms.of_z + norms.absolute))
            secants.note(z_try - z, y, seen)
        z, g, state = solver.learn(z, g, z_try, g_try, good, state)
        if solver.linear_only:  # of the iterate, where f was not evaluated
            absolute, of_z = safe_norms(g, z)
            norms = Norms(absolute, norms.size, of_z)
        better = ledger.note(step, good, norms)
        if ledger.watch:
            best_z = select(better, z, best_z)
        trace.append(ledger.residual)

    codes, residual, of_parts, at = ledger.finish()
    steps = ledger.steps
    if ledger.watch:
        z = select(at == steps, z, best_z)
    if looks:
        trace = trace[: int(steps.max())] if len(steps) else []
    history = torch.stack(trace) if trace else residual.new_zeros(0, len(z))
    inverse = solver.inverse(state, at if ledger.watch else None)
    if secants is not None:
        secants.close(z, at == steps)
    return Iterates(
        z, residual, steps, codes, history, evals, inverse, of_parts, secants=secants, state=state
    )


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
    keep_secants: bool = False,
) -> tuple[Tensor | None, Solution]:
    """`iterate` without autograd and outside autocast: z as a vector, and all in the user's terms.

    The vector is None where z is known to no more digits than the user's tensors have.
    """
    precision = space.precision()
    # Of an f in half precision they are mostly rounding.
    keep_secants = keep_secants and precision < torch.finfo(torch.float16).eps
    with torch.no_grad(), full_precision(space.device):
        found = iterate(
            f,
            z,
            solver,
            precision=precision,
            last=last,
            first=first,
            parts=parts,
            keep_secants=keep_secants,
        )
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
        secants=found.secants,
        parts=found.of_parts,
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
