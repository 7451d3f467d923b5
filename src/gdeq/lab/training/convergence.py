"""Whether the forward solves of a run with fixed budgets still end near a fixed point."""

from __future__ import annotations

from gdeq.lab.training.settings import Config
from gdeq.options import count


class ConvergenceWatch:
    """Warns when they do not: at most once an epoch, and once alone of a fixed number of steps.

    An adaptive run is silent here: its controller tells which target it cannot reach.
    """

    def __init__(self, config: Config) -> None:
        # An unrolled gradient does not need convergence.
        self.silent = config.adapt.enabled or config.gradient.name == "unrolled"
        self.steps = None if config.solver.tol > 0 else config.solver.max_iter
        # A fixed number of steps is small on purpose: one warning, if they lead nowhere near.
        self.limit = 0.3 if self.steps else max(0.1, 10 * config.solver.tol)
        self.told: int | None = None  # the epoch of the last warning

    def warning(self, epoch: int, step: int, residual: float) -> str | None:
        told_before = self.told is not None if self.steps else epoch == self.told
        if self.silent or told_before or not residual > self.limit:
            return None
        self.told = epoch
        said = f"the solver no longer converges (mean residual {residual:.1e} at step {step})"
        if self.steps:
            said = (
                f"after {count(self.steps, 'solver step')} the mean residual is {residual:.1e} "
                f"(step {step}): f is trained as a network of that depth, with no equilibrium that "
                "the solver can reach"
            )
        return (
            f"warning: {said}: raise solver.max_iter, penalise the residual (residual_weight=5), "
            "or lower optimizer.lr"
        )
