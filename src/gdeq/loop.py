"""The one loop: every solver's steps, with stopping, freezing and the best iterate kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq.ledger import Ledger, Measure
from gdeq.operators import Inverse, norm
from gdeq.secants import Secants
from gdeq.solution import Status
from gdeq.solvers.base import Point, Solver, System, noise_level, select
from gdeq.state import Vectorized
from gdeq.together import anywhere
from gdeq.tracing import host_may_look


@dataclass
class Iterates:
    """The outcome of the loop, on batched vectors."""

    z: Tensor  # (batch, d)
    residual: Tensor  # (batch,)
    steps: Tensor  # (batch,)
    codes: Tensor  # (batch,) Status values
    trace: Tensor  # (steps, batch)
    evals: int
    inverse: Inverse | None
    of_parts: Tensor | None = None  # (batch, parts) residuals, where they are judged one by one
    secants: Secants | None = None
    state: Any = None  # what the solver learned

    @property
    def converged(self) -> Tensor:  # (batch,)
        return self.codes.eq(Status.CONVERGED)


def iterate(
    f: Vectorized,
    z: Tensor,  # (batch, d)
    solver: Solver,
    system: System,
    keep_secants: bool = False,
) -> Iterates:
    """Run ``solver`` on f from z; samples are independent systems.

    A sample that has converged, or whose f is no longer finite, is frozen: its z and what the
    solver learned about it stay as they are while the others go on.  With a tolerance, a sample
    that never meets it gets the iterate of smallest ‖g‖ seen, and the inverse estimate of that
    iterate.  With ``tol=0`` exactly ``max_iter`` steps are made, the last iterate is returned, and
    the host never waits for the device.

    Of an affine f the relative residual is relative to ‖f(0)‖, as for a linear system, instead of
    to max(‖f(z)‖, ‖z‖).

    keep_secants: return the last secants of each sample.
    """
    measure = Measure(solver, system, z)
    fz = f(z)
    here, evals = Point(z, fz - z), 1
    norms = measure(fz, *here)
    measure.starts_at(norms)
    ledger = Ledger(solver, system.precision, norms, linear=system.right is not None)
    state = solver.init(here, system)
    secants = Secants.empty(z, solver.max_iter) if keep_secants else None
    trace: list[Tensor] = []
    best_z = z
    sees = host_may_look(z.device)
    looks = ledger.watch and sees

    for step in range(1, solver.max_iter + 1):
        if looks and (step - 1) % solver.check_every == 0 and not anywhere(ledger.active):
            break
        active = ledger.active
        z = select(active, solver.propose(here, state), here.z)
        for tries_left in range(solver.line_search, -1, -1):
            fz = f(z)
            there, evals = Point(z, fz - z), evals + 1
            norms = measure(fz, *there)
            if not tries_left:
                break
            # NaN counts as worse.
            worse = active & ~(norms.absolute < (1 - 1e-4) * ledger.absolute)
            if sees and not anywhere(worse):
                break
            z = select(worse, (here.z + z) / 2, z)

        good = ledger.accepts(norms)
        if secants is not None:
            y = there.g - here.g
            noise = noise_level(system.precision) * (norms.of_z + norms.absolute)
            secants.note(there.z - here.z, y, good & (norm(y) > noise))
        here, state = solver.learn(here, there, good, state)
        if solver.linear_only:  # f was evaluated beside the iterate
            norms = measure(fz, *here)
        better = ledger.note(step, good, norms)
        if ledger.watch:
            best_z = select(better, here.z, best_z)
        trace.append(ledger.residual)

    codes, residual, of_parts, at = ledger.finish()
    steps = ledger.steps
    z = select(at == steps, here.z, best_z) if ledger.watch else here.z
    if looks:
        trace = trace[: int(steps.max())] if len(steps) else []
    history = torch.stack(trace) if trace else residual.new_zeros(0, len(z))
    inverse = solver.inverse(state, at if ledger.watch else None)
    if secants is not None:
        secants.close(z, at == steps)
    return Iterates(z, residual, steps, codes, history, evals, inverse, of_parts, secants, state)
