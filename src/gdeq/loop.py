"""The one loop: every solver's steps, with stopping, freezing and the best iterate kept.

`iterate` is the loop, `Measure` takes the norms of an iterate, and the `Ledger` keeps what is known
of each sample: its residual, its verdict, and which iterate was best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gdeq.context import anywhere, host_may_look, look_is_free
from gdeq.operators import Inverse, Secants, norm, relative, safe_norms
from gdeq.solution import Status
from gdeq.solvers.base import Point, Solver, System, noise_level, select
from gdeq.state import Vectorized

LEAST_PART = 1e-5  # how large a part of a state counts at least, beside the whole


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
    """
    measure = Measure(solver, system, z)
    fz = f(z)
    here, evals = Point(z, fz - z), 1
    norms = measure(fz, *here)
    ledger = Ledger(solver, system.precision, norms)
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
            worse = active & ~(norms.absolute < (1 - 1e-4) * ledger.absolute)  # so NaN is worse
            if sees and not anywhere(worse):
                break
            z = select(worse, (here.z + z) / 2, z)

        good = ledger.accepts(norms)
        if secants is not None:
            y = there.g - here.g
            noise = noise_level(system.precision) * (norms.of_z + norms.absolute)
            secants.note(there.z - here.z, y, good & (norm(y) > noise))
        here, state = solver.learn(here, there, good, state)
        if solver.linear_only:  # f was evaluated at a probe, not at the iterate
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
    return Iterates(z, residual, steps, codes, history, evals, inverse, of_parts, secants)


class Norms(NamedTuple):
    """Of one iterate of each sample."""

    absolute: Tensor  # (batch,) ‖g‖, where f is affine at least ``level``
    size: Tensor  # (batch,) max(‖f(z)‖, ‖z‖), or ‖f(0)‖ where f is affine
    of_z: Tensor  # (batch,) ‖z‖
    parts: Tensor | None = None  # (batch, parts) ‖g‖ of each part beside its size, if so judged
    level: Tensor | None = None  # (batch,) how much of g may be rounding, where f is affine

    def relative(self) -> Tensor:  # -> (batch,)
        whole = relative(self.absolute, self.size)
        return whole if self.parts is None else torch.maximum(whole, self.parts.amax(1))

    def residual(self, stop: str) -> Tensor:  # -> (batch,)
        """What a solver with this ``stop`` judges by."""
        return self.absolute if stop == "absolute" else self.relative()


class Measure:
    """Takes the norms of an iterate that a solver judges it by.

    With ``stop="relative"`` each tensor of the state is judged beside its own size.  Beside a z* of
    0 no g is small, so the whole state counts at least as large as the rounding of the first z.
    """

    def __init__(self, solver: Solver, system: System, z: Tensor) -> None:  # (batch, d)
        right, sizes = system.right, system.sizes or z.shape[1:]
        self.scale = None if right is None else safe_norms(right)[0]
        self.rounding = 0.5 * system.precision
        self.sizes = judged_sizes(solver.stop, sizes, linear=right is not None)
        self.least = least_part(solver.tol, system.precision, z.dtype)
        self.floor: Tensor | None = None  # (batch,) that rounding

    def __call__(self, fz: Tensor, z: Tensor, g: Tensor | None = None) -> Norms:
        """Of f(z), z and g = f(z) − z, (batch, d) each."""
        g = fz - z if g is None else g
        if self.scale is not None:
            absolute, of_z = safe_norms(g, z)
            level = self.rounding * (self.scale + of_z)
            return Norms(torch.maximum(absolute, level), self.scale, of_z, level=level)
        if len(self.sizes) == 1:
            absolute, of_f, of_z = safe_norms(g, fz, z)
            return Norms(absolute, self._size(of_f, of_z), of_z)
        pieces = zip(*(x.split(self.sizes, dim=1) for x in (g, fz, z)), strict=True)
        norms = [safe_norms(*piece) for piece in pieces]
        each_g, each_f, each_z = (torch.stack(of_parts, 1) for of_parts in zip(*norms, strict=True))
        absolute, of_f, of_z = safe_norms(each_g, each_f, each_z)
        size = self._size(of_f, of_z)
        own = torch.maximum(torch.maximum(each_f, each_z), self.least * size.unsqueeze(1))
        return Norms(absolute, size, of_z, relative(each_g, own))

    def _size(self, of_f: Tensor, of_z: Tensor) -> Tensor:  # (batch,) each
        size = torch.maximum(of_f, of_z)
        if self.floor is None:
            self.floor = torch.finfo(size.dtype).eps * size
        return size.clamp(min=self.floor)


def judged_sizes(stop: str, sizes: Sequence[int], linear: bool = False) -> list[int]:
    """Of the parts of a state that are judged one by one; sizes: of its tensors."""
    return list(sizes) if stop == "relative" and not linear else [sum(sizes)]


def least_part(tol: float, precision: float, dtype: torch.dtype) -> float:
    """How large, beside the whole state, a part of it counts at least.

    Beside its own size, a part that is zero at the fixed point would never be solved, nor one that
    the rounding of the others keeps in motion.
    """
    allowed = 0.5 * torch.finfo(dtype).eps / tol if tol else 0.0
    return min(1.0, max(LEAST_PART, precision, allowed))


class Ledger:
    """All fields are ``(batch,)``; those of a sample that is no longer active do not change.

    absolute, relative: ‖g‖, and ‖g‖ beside its size, or that of a part if it is larger;
        ``residual`` is the one that the solver stops at.
    parts: (batch, parts), if the state is judged by them.
    best_step: of the iterate of smallest ‖g‖.  Beside a z that ran away, any g is relatively small.
    """

    def __init__(self, solver: Solver, precision: float, norms: Norms) -> None:
        self.solver, self.precision = solver, precision
        self.watch = solver.tol > 0
        # A relative residual at this level is the rounding of f: half a unit in the last place.
        self.rounding = 0.5 * precision
        absolute, size, self.parts = norms.absolute, norms.size, norms.parts
        self.absolute, self.relative = absolute, norms.relative()
        self.first_absolute, self.first_size, self.peak = absolute, size, absolute
        self.residual = self._residual()
        finite = torch.isfinite(absolute) & torch.isfinite(size)
        within = finite & self.watch & (self.residual <= solver.tol)
        self.codes = torch.where(finite, Status.RUNNING, Status.NONFINITE_START)
        self.codes = torch.where(within, Status.CONVERGED, self.codes)
        self.active = finite & ~within
        self.steps = torch.zeros_like(self.codes)
        self.best_step, self.best_absolute = self.steps, absolute
        self.best_residual, self.best_parts = self.residual, self.parts

    def _residual(self) -> Tensor:
        return self.absolute if self.solver.stop == "absolute" else self.relative

    def accepts(self, norms: Norms) -> Tensor:  # -> (batch,)
        """The samples that take the step: still active, and f is finite where it leads."""
        # False for infinity and NaN in either.
        return self.active & (norms.absolute + norms.size < torch.inf)

    def note(self, step: int, good: Tensor, norms: Norms) -> Tensor:
        """Take in the iterate of a step for the ``good`` samples; says for which it is the best."""
        absolute, before = norms.absolute, self.relative
        self.absolute = torch.where(good, absolute, self.absolute)
        self.relative = torch.where(good, norms.relative(), self.relative)
        self.parts = _of_rows(good, norms.parts, self.parts)
        self.residual = self._residual()
        self.steps = torch.where(self.active, step, self.steps)
        self.codes = torch.where(self.active & ~good, Status.NONFINITE, self.codes)
        self.active = good
        if not self.watch:
            return good
        self.peak = torch.maximum(self.peak, self.absolute)  # of a frozen sample nothing changes
        level = norms.level
        rounded = self.relative <= self.rounding if level is None else absolute <= level
        ends = good & (rounded | (self.residual <= self.solver.tol))
        # A look is free on a CPU and mostly saves the work.
        if not look_is_free(good.device) or bool(ends.any()):
            self._close(good, good & rounded, before, norms.size)
        better = good & (absolute < self.best_absolute)
        self.best_absolute = torch.where(better, absolute, self.best_absolute)
        self.best_residual = torch.where(better, self.residual, self.best_residual)
        self.best_parts = _of_rows(better, self.parts, self.best_parts)
        self.best_step = torch.where(better, step, self.best_step)
        return better

    def _close(self, good: Tensor, rounded: Tensor, before: Tensor, size: Tensor) -> None:
        tol = self.solver.tol
        converged = good & (self.residual <= tol)
        if self.solver.stop != "absolute":
            # A z that runs away makes any g look small beside it: slowly with f(z) = z + c, whose
            # g is constant, or at once after a wild step, when g may even vanish in rounding.
            hidden = self.precision * size > flight_limit(tol, self.precision) * self.peak
            flown = hidden | (self.absolute > tol**0.5 * self.peak)
            flown &= size > 10 * self.first_size
            converged = converged & ~self._constant() & ~flown
        at_rounding = rounded & ~converged & (self.relative >= before)
        self.codes = torch.where(converged, Status.CONVERGED, self.codes)
        self.codes = torch.where(at_rounding, Status.ROUNDING, self.codes)
        self.active = good & ~converged & ~at_rounding

    def _constant(self) -> Tensor:
        return (self.absolute - self.first_absolute).abs() <= 1e-3 * self.first_absolute

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Codes, residual and parts of what is returned, and the step it belongs to."""
        unfinished = self.codes.eq(Status.RUNNING)
        out_of_steps = Status.MAX_STEPS if self.watch else Status.FIXED_STEPS
        codes = torch.where(unfinished, out_of_steps, self.codes)
        worse = unfinished & (self.absolute > self.first_absolute)
        codes = torch.where(worse, Status.DIVERGED, codes)
        stalled = unfinished & self._constant() & (self.relative > self.rounding)
        codes = torch.where(stalled, Status.STALLED, codes)
        if not self.watch:
            # The step at which f was no longer finite was not taken.
            at = self.steps - codes.eq(Status.NONFINITE).long()
            return codes, self.residual, self.parts, at
        missed = codes.ne(Status.CONVERGED) & codes.ne(Status.NONFINITE_START)
        residual = torch.where(missed, self.best_residual, self.residual)
        parts = _of_rows(missed, self.best_parts, self.parts)
        return codes, residual, parts, torch.where(missed, self.best_step, self.steps)


def _of_rows(mask: Tensor, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """``new`` where the mask holds.  (batch,), (batch, parts), (batch, parts) -> (batch, parts)"""
    if new is None or old is None:
        return None
    return torch.where(mask.unsqueeze(1), new, old)


def flight_limit(tol: float, precision: float) -> float:
    """How large the rounding of f may be beside the largest ‖g‖ seen, if a far z is to count."""
    return max(tol**0.5, min(1.0, 100 * precision))
