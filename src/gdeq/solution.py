"""What a solve returns, and what a backward pass adds to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gdeq.operators import Secants, StateInverse
from gdeq.options import count
from gdeq.state import State


class Status(IntEnum):
    """How a sample's solve ended; prints as a sentence.

    Examples:
        >>> import torch, gdeq
        >>> solution = gdeq.solve(lambda z: z + 1, torch.zeros(1, 2))
        >>> solution.status[0].name
        'STALLED'
        >>> print(str(solution.status[0])[:38])
        not converged: f(z) - z stays the same
    """

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


_TRY = (
    "(f may not be contractive: try line_search=3 or max_step=1 of Broyden, or "
    "gdeq.jacobian_penalty)"
)
_SENTENCES = {
    Status.RUNNING: "still running",
    Status.CONVERGED: "converged: the residual is within the tolerance",
    Status.MAX_STEPS: "not converged: the solver ran out of steps (raise max_iter or tol; if "
    "the residual stays level, f may draw random numbers, as dropout does)",
    Status.ROUNDING: "stopped at the rounding level of the dtype, above the tolerance or with z "
    "far from where it began (raise tol, start nearer, or compute f in a wider dtype)",
    Status.STALLED: "not converged: f(z) - z stays the same however z moves; f seems to have no "
    "fixed point (is it z plus a constant?)",
    Status.DIVERGED: f"diverged: f(z) - z is larger after the last step than at the start {_TRY}",
    Status.NONFINITE: f"stopped: f returned NaN or infinity; an earlier iterate is returned {_TRY}",
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
    error: Tensor | None = None  # (batch,) an estimate of ‖w − w*‖/‖w*‖
    floor: Tensor | None = None  # (batch,) what rounding alone may make of the residual
    length: Tensor | None = None  # (batch,) ‖w‖ where it is at hand
    sensitivity: Tensor | None = None  # (batch,) how many times the residual the error may be


@dataclass
class BackwardRecord:
    """The record of the last backward pass through this solution.

    `sample_error` estimates the relative error of w, and `batch_error` is its mean.  Neither is a
    bound.  Samples for which it is not finite, because f has failed, are left out of the mean.

    On the maps of benchmarks/gradients.py, fewer than one in a thousand gradients of
    ``GDEQ(refine=k)`` for k = 1, 2 and 4 had an error of more than twice `sample_error`.  If f has
    a single slow mode, the estimate is far too large.  In half precision, and for `JFB`, there is
    no ``sensitivity``: if f has a broad range of slow modes, the true error can then be ten times
    the estimate.

    ``loss.backward()`` measures the residual.  After `torch.autograd.grad` of some inputs, which
    does not come to z, it is the solver's own: where rounding is all that is left, the true one can
    be several times as large after `GMRES`.

    In a step under `gdeq.capture`, the tensors hold the values of the last replay.

    Examples:
        >>> import torch, gdeq
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> deq = gdeq.DEQ(lambda z, x: 0.5 * z + x, gradient=gdeq.Implicit())
        >>> deq(x).sum().backward()
        >>> record = deq.solution.backward
        >>> record.gradient, bool(record.converged.all())
        ('Implicit', True)
    """

    gradient: str = ""
    vjps: int = 0  # products with Jᵀ spent on w; the pass through f to the parameters not counted
    residual: Tensor | None = None  # (batch,) ‖(I − Jᵀ)w − v‖/‖v‖ where measured
    converged: Tensor | None = None  # (batch,), where there was a tolerance
    tolerance: float | None = None
    # (batch,) how far the last step of a refinement moved w, ‖Δw‖/‖w‖; infinite where not known
    error: Tensor | None = None
    floor: Tensor | None = None  # (batch,) what rounding of Jᵀw alone may make of the residual
    length: Tensor | None = None  # (batch,) ‖w‖ (‖v‖ where w is 0), if error or residual are known
    # (batch,) ‖v‖/‖w‖ times the largest ‖Δz‖/‖Δg‖ of the forward solve, which is about ‖(I − J)⁻¹‖
    sensitivity: Tensor | None = None
    done: bool = False

    def write(self, gradient: object, found: Cotangent) -> None:
        """Take over what a gradient method reports."""
        inner = getattr(gradient, "gradient", None)  # of Measured
        own = type(gradient).__name__
        self.gradient = own if inner is None else f"{own} {type(inner).__name__}"
        for name in ("vjps", "tolerance", "error", "floor", "length", "sensitivity"):
            setattr(self, name, getattr(found, name))
        self.residual, self.converged = None, None
        if found.residual is not None:
            self.measured(found.residual)
        self.done = True

    def measured(self, residual: Tensor) -> None:  # (batch,)
        """Take over a residual.

        A sample that was within the tolerance stays so if only rounding has moved it out.
        """
        if self.residual is not None:  # Jᵀ0 is NaN where J is infinite
            residual = torch.where(residual.isnan(), self.residual, residual)
        floor = torch.zeros_like(residual) if self.floor is None else self.floor
        self.residual = torch.maximum(residual, floor)
        if self.tolerance is None:
            return
        within = self.residual <= self.tolerance
        if self.converged is not None:
            within = within | (self.converged & (self.residual <= self.tolerance + floor))
        self.converged = within

    @property
    def sample_error(self) -> Tensor | None:  # (batch,)
        """The larger of ``error`` and ``sensitivity`` × ``residual``, of those that are known."""
        if self.residual is None:
            return self.error
        found = self.residual if self.sensitivity is None else self.sensitivity * self.residual
        if self.error is None:
            return found
        return torch.where(torch.isinf(self.error), found, torch.maximum(self.error, found))

    @property
    def batch_error(self) -> Tensor | None:  # ()
        """The estimated error of the batch's gradient: the mean of `sample_error`.

        Each sample is weighted by the length of its w, which is its share in the gradient.  Those
        for which nothing is known are left out; NaN if these are all.
        """
        found = self.sample_error
        return None if found is None else mean_by_share(found, self.length)

    @property
    def unknown(self) -> int:
        """The number of samples whose `sample_error` is not finite.  Waits for the device."""
        found = self.sample_error
        return 0 if found is None else int((~found.isfinite()).sum())

    def __str__(self) -> str:
        if not self.done:
            return "no backward pass yet"
        text = f"{self.gradient}: {count(self.vjps, 'VJP')}"
        what = "residual" if self.error is None else "error"
        if (each := self.sample_error) is None:
            text += ", residual not measured"
        elif len(known := each[each.isfinite()]):
            about = "" if self.error is None else " about"
            text += f", {what}{about} {self.batch_error:.1e} (largest {known.max():.1e})"
        if unknown := self.unknown:
            text += f", {what} unknown for {count(unknown, 'sample')}"
        if self.converged is not None:
            text += f", {count(int((~self.converged).sum()), 'sample')} above the tolerance"
        return text


def mean_by_share(values: Tensor, length: Tensor | None) -> Tensor:  # (batch,) -> ()
    """The mean of the finite values, over samples whose w are so long.

    0 where no w has a length, and NaN where none of those that have one has a finite value.
    """
    share = (torch.ones_like(values) if length is None else length).double()  # sums may overflow
    known = values.isfinite() & share.isfinite()
    lost = (~known & (share != 0)).any()
    share = torch.where(known, share, 0.0)
    weight = share.sum()
    mean = torch.where(known, share * values, 0.0).sum() / weight.clamp(min=1e-300)
    return torch.where(lost & (weight == 0), torch.nan, mean)


def largest(values: Tensor) -> float:  # (batch,)
    """The largest that is a number; NaN if there is none."""
    known = values[~values.isnan()]
    return known.max().item() if len(known) else math.nan


@dataclass(repr=False)
class Solution:
    """A fixed point and how it was found.  Per-sample fields are tensors on the state's device.

    A sample that does not meet its tolerance gets the z with the smallest ‖f(z) − z‖ seen, which
    may be z0.

    Examples:
        >>> import torch, gdeq
        >>> solution = gdeq.solve(torch.cos, torch.zeros(1, 1))
        >>> print(str(solution).split(",")[0])
        1 of 1 sample converged in at most 5 steps
        >>> solution.trace.shape[0] == solution.steps.max()
        tensor(True)
    """

    z: State
    converged: Tensor  # (batch,) bool: the residual is within the tolerance
    residual: Tensor  # (batch,) of the returned z (unrolled without a tolerance: of the last z
    # that f was given), relative or absolute as the solver says
    steps: Tensor  # (batch,) solver steps taken before the sample was frozen
    trace: Tensor  # (steps, batch) residual after each step; constant once frozen
    evals: int  # calls of f to find z; one more with autograd follows where gradients are wanted
    inverse: StateInverse | None  # estimate of (∂f/∂z − I)⁻¹ that belongs to z
    codes: Tensor  # (batch,) Status values
    precision: float = 0.0  # spacing of the numbers that f computes with
    parts: Tensor | None = None  # (batch, parts) relative residual of each tensor of the returned
    # z, in the order of z0, where the largest of them is the residual
    secants: Secants | None = None  # the last ones, for gradients that ask for them
    engine: Any = None  # the `gdeq.engine.Engine` that found it, and solves its adjoint equation
    batched: bool = True  # False: z is one system, without a batch dimension
    record: BackwardRecord = field(default_factory=BackwardRecord)

    @property
    def status(self) -> list[Status]:
        """How each sample's solve ended; prints as a sentence.  Waits for the device."""
        return [Status(code) for code in self.codes.tolist()]

    @property
    def error(self) -> Tensor | None:  # (batch,)
        """An estimate of ‖z − z*‖/‖z‖: the length of Broyden's next step, relative to ‖z‖.

        None for a solver that builds no inverse.  It is not a bound: B⁻¹ is accurate only in the
        directions in which the solve has moved.  On random linear maps the error was at most about
        5 times the estimate for 90 % of samples, and up to 6,000 times where I − ∂f/∂z was nearly
        singular (benchmarks/gradients.py).  If the residual is small and the estimate is large, z
        is not near a fixed point yet, and f may not have one.
        """
        if self.inverse is None:
            return None
        z = self.z if self.batched else pytree.tree_map(lambda leaf: leaf.unsqueeze(0), self.z)
        found = self.inverse.step_beside(z)
        return None if found is None else torch.where(self.residual.isfinite(), found, torch.nan)

    def summary(self) -> dict[str, float]:
        """Return the main figures as plain numbers, for a logger.  Waits for the device.

        Those of a failed sample, which are NaN, are left out: see ``converged``, the share of
        samples that did, and ``backward_unknown``, the number without an estimated error.
        """
        found = {"samples": float(len(self.codes)), "evals": float(self.evals)}
        if len(self.codes):
            found["converged"] = self.converged.double().mean().item()
            found["steps"] = self.steps.double().mean().item()
            found["residual"] = self.residual.double().nanmean().item()
            found["largest_residual"] = largest(self.residual)
        if (backward := self.backward) is not None:
            found["backward_vjps"] = float(backward.vjps)
            if (error := backward.batch_error) is not None:
                found["backward_error"] = error.item()
                found["backward_unknown"] = float(backward.unknown)
        return found

    @property
    def backward(self) -> BackwardRecord | None:
        """The record of the last backward pass; None before the first one, and for `Unrolled`."""
        return self.record if self.record.done else None

    def __repr__(self) -> str:
        return f"<Solution: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        batch = len(self.codes)
        if batch == 0:
            return "an empty batch; nothing to solve"
        most, evals = count(int(self.steps.max()), "step"), count(self.evals, "evaluation")
        at_most, of_all = ("at most ", "largest ") if self.batched else ("", "")
        outcome = f"{at_most}{most}, {evals} of f, {of_all}residual {largest(self.residual):.1e}"
        if (error := self.error) is not None:
            outcome += f", {of_all}estimated error {largest(error):.1e}"
        ends = self.status
        if not self.batched:
            return f"one system, {ends[0]}: {outcome}"
        samples, lost = count(batch, "sample"), batch - ends.count(Status.FIXED_STEPS)
        if set(ends) <= {Status.UNROLLED, Status.FIXED_STEPS}:
            return f"{samples}, not asked to converge: {outcome}"
        if lost < batch:
            lines = [f"{samples}, not asked to converge, {lost} lost: {outcome}"]
        else:
            lines = [f"{int(self.converged.sum())} of {samples} converged in {outcome}"]
        failed = [i for i in range(batch) if ends[i] not in (Status.CONVERGED, Status.FIXED_STEPS)]
        for before, i in zip([None, *failed], failed[:6], strict=False):
            residual, steps = self.residual[i].item(), int(self.steps[i])
            told = f"step {steps}, residual {residual:.1e}"
            if ends[i] is Status.DIVERGED and residual != (last := self.trace[-1, i].item()):
                told = f"step {steps}, residual {last:.1e}; the z with the smallest "
                told += f"‖f(z) - z‖ is returned, residual {residual:.1e}"
            if self.parts is not None:
                told += f", largest in tensor {int(self.parts[i].argmax())} of the state"
            same = before is not None and ends[before] is ends[i]
            lines.append(f"  sample {i}: {'the same' if same else ends[i]} [{told}]")
        if failed[6:]:
            lines.append(f"  and {count(len(failed) - 6, 'more sample')}")
        return "\n".join(lines)
