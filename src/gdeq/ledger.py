"""What the loop knows about each sample: its residual, its verdict, and which iterate was best."""

from __future__ import annotations

import torch
from torch import Tensor

from gdeq.solution import Status
from gdeq.solvers.base import Solver


class Ledger:
    """All fields are ``(batch,)``; of a sample that is no longer active nothing changes.

    absolute, relative: ‖g‖, and ‖g‖ beside ``size``; ``residual`` is the one that the solver stops
        at.
    size: max(‖f(z)‖, ‖z‖), or ‖f(0)‖ where f is affine (``linear``).
    best_step: the iterate of smallest ‖g‖.  Not of smallest relative residual: beside a z that ran
        away, any g is small.
    """

    def __init__(
        self, solver: Solver, precision: float, absolute: Tensor, size: Tensor, linear: bool
    ) -> None:
        self.solver, self.precision, self.linear = solver, precision, linear
        self.watch = solver.tol > 0
        # A relative residual at this level is the rounding of f itself (half a unit in the last
        # place).
        self.rounding = 0.5 * precision
        self.absolute, self.relative = absolute, relate(absolute, size)
        self.first_absolute, self.first_size, self.peak = absolute, size, absolute
        self.residual = self._residual()
        finite = torch.isfinite(absolute) & torch.isfinite(size)
        self.codes = torch.where(finite, Status.RUNNING, Status.NONFINITE_START)
        self.active = finite
        if self.watch:
            within = self.residual <= solver.tol
            self.codes = torch.where(finite & within, Status.CONVERGED, self.codes)
            self.active = finite & ~within
        self.steps = torch.zeros_like(self.codes)
        self.best_step, self.best_absolute, self.best_residual = (
            self.steps,
            absolute,
            self.residual,
        )

    def _residual(self) -> Tensor:
        return self.relative if self.solver.stop == "relative" else self.absolute

    def accepts(self, absolute: Tensor, size: Tensor) -> Tensor:  # -> (batch,)
        """The samples that take the step: still active, and f is finite where it leads."""
        finite = absolute + size < torch.inf  # false for NaN too, in half the operations
        return self.active & finite

    def note(self, step: int, good: Tensor, absolute: Tensor, size: Tensor) -> Tensor:
        """Take in the iterate of a step for the ``good`` samples; says for which it is the best."""
        on_cpu = good.device.type == "cpu"
        all_good = on_cpu and bool(good.all())
        before, relative = self.relative, relate(absolute, size)
        self.absolute = absolute if all_good else torch.where(good, absolute, self.absolute)
        self.relative = relative if all_good else torch.where(good, relative, self.relative)
        self.residual = self._residual()
        self.steps = torch.where(self.active, step, self.steps)
        if not all_good:
            self.codes = torch.where(self.active & ~good, Status.NONFINITE, self.codes)
        self.active = good
        if not self.watch:
            return good
        self.peak = torch.maximum(self.peak, self.absolute)  # of a frozen sample nothing changes
        ends = good & ((self.residual <= self.solver.tol) | (self.relative <= self.rounding))
        if not on_cpu or bool(ends.any()):  # where looking is free, there is seldom more to do
            self._close(good, ends, before, size)
        better = good & (self.absolute < self.best_absolute)
        self.best_absolute = torch.where(better, self.absolute, self.best_absolute)
        self.best_residual = torch.where(better, self.residual, self.best_residual)
        self.best_step = torch.where(better, step, self.best_step)
        return better

    def _close(self, good: Tensor, ends: Tensor, before: Tensor, size: Tensor) -> None:
        tol = self.solver.tol
        converged = good & (self.residual <= tol)
        if self.solver.stop == "relative" and not self.linear:
            # A z that runs away makes any g look small beside it: with f(z) = z + c, slowly and g
            # constant; after a wild step, at once, when g may even vanish in rounding.
            hidden = self.precision * size > flight_limit(tol, self.precision) * self.peak
            flown = hidden | (self.absolute > tol**0.5 * self.peak)
            flown &= size > 10 * self.first_size
            converged = converged & ~self._constant() & ~flown
        at_rounding = ends & ~converged & (self.relative <= self.rounding)
        at_rounding &= self.relative >= before
        self.codes = torch.where(converged, Status.CONVERGED, self.codes)
        self.codes = torch.where(at_rounding, Status.ROUNDING, self.codes)
        self.active = good & ~converged & ~at_rounding

    def _constant(self) -> Tensor:
        return (self.absolute - self.first_absolute).abs() <= 1e-3 * self.first_absolute

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:  # -> (batch,), (batch,), (batch,)
        """Codes and residual of what is returned, and the step it belongs to.

        With a tolerance, a sample that never met it gets its best iterate.
        """
        unfinished = self.codes == Status.RUNNING
        out_of_steps = Status.MAX_STEPS if self.watch else Status.FIXED_STEPS
        codes = torch.where(unfinished, out_of_steps, self.codes)
        worse = unfinished & (self.absolute > self.first_absolute)
        codes = torch.where(worse, Status.DIVERGED, codes)
        stalled = unfinished & self._constant() & (self.relative > self.rounding)
        codes = torch.where(stalled, Status.STALLED, codes)
        if not self.watch:
            # The step at which f was no longer finite was not taken.
            return codes, self.residual, self.steps - (codes == Status.NONFINITE).long()
        missed = (codes != Status.CONVERGED) & (codes != Status.NONFINITE_START)
        residual = torch.where(missed, self.best_residual, self.residual)
        return codes, residual, torch.where(missed, self.best_step, self.steps)


def flight_limit(tol: float, precision: float) -> float:
    """How large the rounding of f may be beside the largest ‖g‖ seen, if a far z is to count."""
    return max(tol**0.5, min(1.0, 100 * precision))


def relate(absolute: Tensor, size: Tensor) -> Tensor:  # -> (batch,)
    return torch.where(absolute > 0, absolute / size, absolute)  # 0/0 is solved
