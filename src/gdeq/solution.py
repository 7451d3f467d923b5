"""What a solve returns, and what a backward pass adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from gdeq.operators import StateInverse
from gdeq.options import count
from gdeq.state import State


class Status(IntEnum):
    """How a sample's solve ended; prints as a sentence."""

    RUNNING = 0
    CONVERGED = 1
    MAX_STEPS = 2
    ROUNDING = 3
    STALLED = 4
    DIVERGED = 5
    NONFINITE = 6
    NONFINITE_START = 7
    UNROLLED = 8
    FIXED_STEPS = 9

    def __str__(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Status.RUNNING: "still running",
    Status.CONVERGED: "converged: the residual is within the tolerance",
    Status.MAX_STEPS: "not converged: the solver ran out of steps (raise max_iter or tol)",
    Status.ROUNDING: "stopped at the rounding level of the dtype, above the tolerance or with z "
    "far from where it began (raise tol, start nearer, or compute f in a wider dtype)",
    Status.STALLED: "not converged: f(z) - z stays the same however z moves; f seems to have no "
    "fixed point (is it z plus a constant?)",
    Status.DIVERGED: "diverged: f(z) - z is larger after the last step than at the start (f may "
    "not be contractive: try line_search=3 or max_step=1 of Broyden, or gdeq.jacobian_penalty)",
    Status.NONFINITE: "stopped: f returned NaN or infinity; an earlier iterate is returned",
    Status.NONFINITE_START: "failed: f returned NaN or infinity at the first call; z0 is returned "
    "(check the inputs and parameters of f for this sample)",
    Status.UNROLLED: "unrolled for a fixed number of steps; convergence was not asked for",
    Status.FIXED_STEPS: "made all its steps, as asked with tol=0; convergence was not asked for",
}


@dataclass
class Cotangent:
    """What a gradient method returns: w, and what is known about it."""

    w: Tensor  # (batch, d)
    vjps: int  # products with Jᵀ spent
    residual: Tensor | None = None  # (batch,) ‖v − (I − Jᵀ)w‖ / ‖v‖ where measured
    tolerance: float | None = None  # what the residual was to be brought under
    fell_back: Tensor | None = None  # (batch,)
    error: Tensor | None = None  # (batch,) an estimate of ‖w − w*‖/‖w*‖

    @property
    def converged(self) -> Tensor | None:  # (batch,)
        """Where the residual is within the tolerance; None without one of them."""
        if self.residual is None or self.tolerance is None:
            return None
        return self.residual <= self.tolerance


@dataclass
class BackwardRecord:
    """What the last backward pass through this solution did.

    ``residual`` is ‖(I − Jᵀ)w − v‖/‖v‖ per sample, None where it was not measured.  ``error``, of
    `GDEQ` and `JFB` with ``refine``, is how far the last VJP moved w, ‖Δw‖/‖w‖: an estimate of the
    relative error of w that costs nothing; infinite where w ran away and an earlier one is used.
    Of a recorded step (`gdeq.capture`) both hold what the last replay left.
    """

    gradient: str = ""
    vjps: int = 0  # products with Jᵀ spent on w; the pass through f to the parameters not counted
    residual: Tensor | None = None  # (batch,)
    converged: Tensor | None = None  # (batch,), where there was a tolerance
    fell_back: Tensor | None = None  # (batch,): used JFB's gradient because their own was worse
    tolerance: float | None = None
    error: Tensor | None = None  # (batch,)
    done: bool = False

    def write(self, gradient: object, found: Cotangent) -> None:
        """Take over what a gradient method reports."""
        inner = getattr(gradient, "gradient", None)  # of Measured
        own = type(gradient).__name__
        self.gradient = own if inner is None else f"{own} {type(inner).__name__}"
        self.vjps, self.fell_back, self.tolerance = found.vjps, found.fell_back, found.tolerance
        self.residual, self.converged, self.error = None, None, found.error
        if found.residual is not None:
            self.measured(found.residual)
        self.done = True

    def measured(self, residual: Tensor, slack: float = 0.0) -> None:  # (batch,)
        """Take over a residual; ``slack`` is how far rounding may have moved it.

        It keeps a sample that was within the tolerance there, and lifts no other one into it.
        """
        self.residual = residual
        if self.tolerance is None:
            return
        within = residual <= self.tolerance
        if self.converged is not None:
            within = within | (self.converged & (residual <= self.tolerance + slack))
        self.converged = within

    def __str__(self) -> str:
        if not self.done:
            return "no backward pass yet"
        text = f"{self.gradient}: {count(self.vjps, 'VJP')}"
        if self.residual is None:
            text += ", residual not measured"
        elif self.residual.numel():
            text += f", residual {_spread(self.residual)}"
        if self.error is not None and self.error.numel():
            text += f", error about {_spread(self.error)}"
        if self.converged is not None:
            text += f", {count(int((~self.converged).sum()), 'sample')} above the tolerance"
        if self.fell_back is not None:
            text += f", {int(self.fell_back.sum())} fell back to JFB"
        return text


def _spread(values: Tensor) -> str:  # (batch,)
    return f"{values.median().item():.1e} (at most {values.max().item():.1e})"


@dataclass(repr=False)
class Solution:
    """A fixed point and how it was found.  Per-sample fields are tensors on the state's device."""

    z: State
    converged: Tensor  # (batch,) bool: the residual is within the tolerance
    residual: Tensor  # (batch,) of the returned z (unrolled: of the last z that f was given),
    # relative or absolute as the solver says
    steps: Tensor  # (batch,) solver steps taken before the sample was frozen
    trace: Tensor  # (steps, batch) residual after each step; constant once frozen
    evals: int  # calls of f to find z; one more with autograd follows where gradients are wanted
    inverse: StateInverse | None  # estimate of (∂f/∂z − I)⁻¹ that belongs to z
    codes: Tensor  # (batch,) Status values
    precision: float = 0.0  # spacing of the numbers that f computes with
    record: BackwardRecord = field(default_factory=BackwardRecord, repr=False)

    @property
    def status(self) -> list[Status]:
        """How each sample ended; `str` of one is a sentence.  Reads the device."""
        return [Status(code) for code in self.codes.tolist()]

    @property
    def backward(self) -> BackwardRecord | None:
        """The record of the last backward pass; None before the first, and with `Unrolled`."""
        return self.record if self.record.done else None

    def __repr__(self) -> str:
        return f"<Solution: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        batch = len(self.codes)
        if batch == 0:
            return "an empty batch; nothing to solve"
        most, evals = count(int(self.steps.max()), "step"), count(self.evals, "evaluation")
        residual = self.residual.max().item()
        outcome = f"at most {most}, {evals} of f, largest residual {residual:.1e}"
        ends = self.status
        if all(status in (Status.UNROLLED, Status.FIXED_STEPS) for status in ends):
            return f"{count(batch, 'sample')}, not asked to converge: {outcome}"
        if any(status is Status.FIXED_STEPS for status in ends):
            lost = sum(status is not Status.FIXED_STEPS for status in ends)
            first = f"{count(batch, 'sample')}, not asked to converge, {lost} lost: {outcome}"
        else:
            converged = int(self.converged.sum())
            first = f"{converged} of {count(batch, 'sample')} converged in {outcome}"
        lines = [first]
        for i, status in enumerate(ends):
            if status not in (Status.CONVERGED, Status.FIXED_STEPS):
                residual, steps = self.residual[i].item(), int(self.steps[i])
                told = f"step {steps}, residual {residual:.1e}"
                if status is Status.DIVERGED and residual != (last := self.trace[-1, i].item()):
                    told = f"step {steps}, residual {last:.1e}; returned is the z with the least "
                    told += f"‖f(z) - z‖, residual {residual:.1e}"
                lines.append(f"  sample {i}: {status} [{told}]")
            if len(lines) > 6:
                lines.append("  ...")
                break
        return "\n".join(lines)
