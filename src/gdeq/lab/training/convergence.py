"""Whether the forward solves of a run still end near a fixed point."""

from __future__ import annotations

from gdeq.lab.training.settings import Config
from gdeq.options import count

ABOVE = 2.0  # times a target that still tightens: below, more steps are taken without a word


class ConvergenceWatch:
    """Finds the words when they do not, once an epoch."""

    def __init__(self, config: Config) -> None:
        tol = config.solver.tol
        self.unrolled = config.gradient.name == "unrolled"  # there convergence is not asked for
        self.steps = None if tol > 0 or config.adapt.enabled else config.solver.max_iter
        # Exactly so many steps are few on purpose: one word, and only when they lead nowhere.
        self.limit = 0.3 if self.steps else max(0.1, 10 * tol)
        self.adapt = config.adapt
        self.told: int | None = None  # the epoch of the last warning

    def warning(
        self, epoch: int, step: int, residual: float, target: float | None = None
    ) -> str | None:
        """target: of an adaptive run, the one that it is held to now."""
        limit = self.limit
        if target is not None and target > self.adapt.forward:  # wider at first, as was asked
            limit = max(limit, ABOVE * target)
        if self.unrolled or epoch == self.told or not residual > limit:
            return None
        if self.steps and self.told is not None:
            return None
        self.told = epoch
        if self.steps:
            return (
                f"warning: after {count(self.steps, 'solver step')} the mean residual is "
                f"{residual:.1e} (step {step}): f is trained as a network of that depth, with no "
                f"equilibrium that the solver can reach: {self._advice(residual)}"
            )
        return (
            f"warning: the solver no longer converges (mean residual {residual:.1e} "
            f"at step {step}): {self._advice(residual)}"
        )

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
