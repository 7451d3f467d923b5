"""The one loop: stopping, best-so-far, per-sample freezing, trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq.operators import LowRankInverse, StateInverse, safe_norms
from gdeq.options import describe
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, select
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateSpace, Vectorized, full_precision


@dataclass
class Iterates:
    """The outcome of the loop, on batched vectors."""

    z: Tensor  # (batch, d)
    g: Tensor  # (batch, d) f(z) − z
    residual: Tensor  # (batch,)
    steps: Tensor  # (batch,)
    codes: Tensor  # (batch,)
    trace: Tensor  # (steps, batch)
    evals: int
    inverse: LowRankInverse | None
    state: Any  # what the solver learned

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
    inverse: LowRankInverse | None = None,
) -> Iterates:
    """Run ``solver`` on f from z; samples are independent systems.

    A sample that has converged, or whose f is no longer finite, is frozen: its z and what the
    solver learned about it stay as they are while the others go on.  With a tolerance, a sample
    that never meets it gets the iterate of smallest ‖g‖ seen, and the inverse estimate of that
    iterate.  With ``tol=0`` exactly ``max_iter`` steps are made, the last iterate is returned, and
    the device is never waited for.

    right: f(0), which says that f is affine; a relative residual is then relative to its norm, as
        for a linear system, instead of to max(‖f(z)‖, ‖z‖).
    """
    max_steps = solver.max_iter if max_steps is None else max_steps
    watch, on_cpu = solver.tol > 0, z.device.type == "cpu"
    # A relative residual at this level is the rounding of f itself (half a unit in the last place).
    rounding = 0.5 * precision
    scale = None if right is None else safe_norms(right)[0]
    floor = z.new_zeros(())

    def evaluate(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # -> (batch, d), (batch,), (batch,)
        """g, its norm, and what that is relative to."""
        fz = f(z)
        g = fz - z
        if scale is not None:
            return g, safe_norms(g)[0], scale
        absolute, size, other = safe_norms(g, fz, z)
        return g, absolute, torch.maximum(torch.maximum(size, other), floor)

    def relate(absolute: Tensor, size: Tensor) -> Tensor:  # -> (batch,)
        return torch.where(absolute > 0, absolute / size, absolute)  # 0/0 is solved

    g, absolute, size = evaluate(z)
    evals = 1
    if scale is None:
        # Where z* = 0 nothing is ever small beside z; it is beside the rounding of where z began.
        floor = precision * size
    relative = relate(absolute, size)
    residual = relative if solver.stop == "relative" else absolute
    within = residual <= solver.tol
    first_absolute, first_size, peak = absolute, size, absolute
    finite = torch.isfinite(absolute) & torch.isfinite(size)
    codes = torch.where(finite, Status.RUNNING, Status.NONFINITE_START)
    active = finite
    if watch:
        codes = torch.where(finite & within, Status.CONVERGED, codes)
        active = finite & ~within
    steps = torch.zeros_like(codes)
    state = solver.init(z, g, steps=max_steps, precision=precision, inverse=inverse, right=right)
    trace: list[Tensor] = []
    # The best is that of smallest ‖g‖: relative to a z that ran away, any g is small.
    best_z, best_g, best_absolute, best_residual, best_step = z, g, absolute, residual, steps

    for step in range(1, max_steps + 1):
        if watch and (step - 1) % solver.check_every == 0 and not bool(active.any()):
            break
        z_try = select(active, solver.propose(z, g, state), z)
        g_try, new_absolute, size = evaluate(z_try)
        evals += 1
        for _ in range(solver.line_search):
            worse = active & ~(new_absolute < (1 - 1e-4) * absolute)  # NaN counts as worse
            if not bool(worse.any()):
                break
            z_try = select(worse, (z + z_try) / 2, z_try)
            g_try, new_absolute, size = evaluate(z_try)
            evals += 1

        finite = new_absolute + size < torch.inf  # false for NaN too, in half the operations
        good = active & finite
        all_good = on_cpu and bool(good.all())
        z, g, state = solver.learn(z, g, z_try, g_try, good, state)
        if solver.linear_only:
            # Of the iterate, which is not where f was evaluated; no better known than f rounds.
            new_absolute = torch.maximum(safe_norms(g)[0], rounding * size)
        before = relative
        new_relative = relate(new_absolute, size)
        absolute = new_absolute if all_good else torch.where(good, new_absolute, absolute)
        relative = new_relative if all_good else torch.where(good, new_relative, relative)
        residual = relative if solver.stop == "relative" else absolute
        steps = torch.where(active, step, steps)
        if not all_good:
            codes = torch.where(active & ~finite, Status.NONFINITE, codes)
        active = good
        if watch:
            peak = torch.maximum(peak, absolute)  # of a frozen sample nothing changes
            ends = good & ((residual <= solver.tol) | (relative <= rounding))
            if not on_cpu or bool(ends.any()):  # where looking is free, there is seldom more to do
                converged = good & (residual <= solver.tol)
                if solver.stop == "relative" and scale is None:
                    # A z that runs away makes any g look small beside it: with f(z) = z + c,
                    # slowly and g constant; after a wild step, at once, when g may even vanish in
                    # rounding.
                    constant = (absolute - first_absolute).abs() <= 1e-3 * first_absolute
                    seen = torch.maximum(absolute, precision * size)
                    flown = (size > 10 * first_size) & (seen > solver.tol**0.5 * peak)
                    converged = converged & ~constant & ~flown
                at_rounding = ends & ~converged & (relative <= rounding) & (relative >= before)
                codes = torch.where(converged, Status.CONVERGED, codes)
                codes = torch.where(at_rounding, Status.ROUNDING, codes)
                active = good & ~converged & ~at_rounding
            better = good & (absolute < best_absolute)
            best_z, best_g = select(better, z, best_z), select(better, g, best_g)
            best_absolute = torch.where(better, absolute, best_absolute)
            best_residual = torch.where(better, residual, best_residual)
            best_step = torch.where(better, step, best_step)
        trace.append(residual)

    unfinished = codes == Status.RUNNING
    still = (absolute - first_absolute).abs() <= 1e-3 * first_absolute
    codes = torch.where(unfinished, Status.MAX_STEPS, codes)
    codes = torch.where(unfinished & (absolute > first_absolute), Status.DIVERGED, codes)
    codes = torch.where(unfinished & still & (relative > rounding), Status.STALLED, codes)
    settled = None
    if watch:
        missed = (codes != Status.CONVERGED) & (codes != Status.NONFINITE_START)
        z, g = select(~missed, z, best_z), select(~missed, g, best_g)
        residual = torch.where(missed, best_residual, residual)
        settled = torch.where(missed, best_step, steps)
        trace = trace[: int(steps.max())] if len(steps) else []
    history = torch.stack(trace) if trace else residual.new_zeros(0, len(z))
    return Iterates(
        z, g, residual, steps, codes, history, evals, solver.inverse(state, settled), state
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
    f: Vectorized, z: Tensor, space: StateSpace, solver: Solver
) -> tuple[Tensor, Solution]:
    """`iterate` without autograd and outside autocast: the vector, and all in the user's terms."""
    precision = space.precision()
    with torch.no_grad(), full_precision(space.device):
        found = iterate(f, z, solver, precision=precision)
    return found.z, Solution(
        z=space.unpack(found.z),
        converged=found.converged,
        residual=found.residual,
        steps=found.steps,
        trace=found.trace,
        evals=found.evals,
        inverse=StateInverse(found.inverse, space) if found.inverse else None,
        codes=found.codes,
        precision=precision,
    )


@torch.compiler.disable
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
