"""Whether the forward solves of a run still end near a fixed point."""

from __future__ import annotations

from collections.abc import Iterator

from gdeq.lab.training.settings import Config
from gdeq.options import count

ABOVE = 2.0  # a target that still tightens may be exceeded so many times without a warning


class ConvergenceWatch:
    """Warns when they do not, at most once an epoch."""

    def __init__(self, config: Config) -> None:
        tol = config.solver.tol
        self.unrolled = config.gradient.name == "unrolled"  # its gradient does not need convergence
        self.steps = None if tol > 0 or config.adapt.enabled else config.solver.max_iter
        # A fixed number of steps is small on purpose: one warning, if they lead nowhere near.
        self.limit = 0.3 if self.steps else max(0.1, 10 * tol)
        self.adapt = config.adapt
        self.told: int | None = None  # the epoch of the last warning

    def warnings(
        self, epoch: int, step: int, residual: float, target: float | None = None
    ) -> Iterator[str]:
        """target: of an adaptive run, the one that it is held to now."""
        limit = self.limit
        if target is not None and target > self.adapt.forward:  # wider at first, as was asked
            limit = max(limit, ABOVE * target)
        told_before = self.told is not None if self.steps else epoch == self.told
        if self.unrolled or told_before or not residual > limit:
            return
        self.told = epoch
        said = f"the solver no longer converges (mean residual {residual:.1e} at step {step})"
        if self.steps:
            said = (
                f"after {count(self.steps, 'solver step')} the mean residual is {residual:.1e} "
                f"(step {step}): f is trained as a network of that depth, with no equilibrium that "
                "the solver can reach"
            )
        yield f"warning: {said}: {self._advice(residual)}"

    def _advice(self, residual: float) -> str:
        adapt = self.adapt
        if not adapt.enabled:
            return (
                "raise solver.max_iter, penalise the residual (residual_weight=5), or lower "
                "optimizer.lr"
            )
        if residual <= adapt.forward:  # the target asks for no more steps
            return f"lower adapt.forward={adapt.forward:g}, which allows such a residual"
        return (
            f"adapt.forward={adapt.forward:g} is not reached with the steps in use (at most "
            f"{adapt.steps[-1]}); if that lasts, add larger numbers to adapt.steps, lower "
            "optimizer.lr, or raise adapt.penalty_most"
        )
