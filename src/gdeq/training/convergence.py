"""Whether the forward solves of a run still end near a fixed point."""

from __future__ import annotations

from gdeq.training.config import Config


class ConvergenceWatch:
    """Finds the words when they do not, once an epoch."""

    def __init__(self, config: Config) -> None:
        tol = config.solver.tol
        # Without a tolerance, or unrolled, convergence is not asked for.
        self.asked = tol > 0 and config.gradient.name != "unrolled"
        self.limit = max(0.1, 10 * tol)
        self.adapt = config.adapt
        self.told: int | None = None  # the epoch of the last warning

    def warning(self, epoch: int, step: int, residual: float) -> str | None:
        if not self.asked or epoch == self.told or not residual > self.limit:
            return None
        self.told = epoch
        return (
            f"warning: the solver no longer converges (mean residual {residual:.1e} "
            f"at step {step}): {self._advice(residual)}"
        )

    def _advice(self, residual: float) -> str:
        adapt = self.adapt
        if not adapt.enabled:
            return (
                "raise solver.max_iter, or hold f down with jacobian_weight=1 or a lower "
                "optimizer.lr"
            )
        if residual <= adapt.forward:  # nobody asks for more steps
            return f"lower adapt.forward={adapt.forward:g}, which allows it"
        return (
            f"adapt.forward={adapt.forward:g} is not reached with the steps in use, of at most "
            f"{adapt.steps[-1]}; if that lasts, add larger numbers to adapt.steps, lower "
            "optimizer.lr, or raise adapt.jacobian_most"
        )
