"""gdeq: deep equilibrium models whose gradients are fast and whose error is known."""

from typing import Any

import gdeq._command  # noqa: F401 (first: torch takes a second)
from gdeq.checks import (
    ConvergenceWarning,
    CoupledSamplesWarning,
    DetachedCellWarning,
    UnsteadyCellWarning,
)
from gdeq.context import hold
from gdeq.export import fixed_steps
from gdeq.fixed_point import fixed_point, solve, trajectory
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured, Unrolled
from gdeq.holding import (
    VariationalDropout,
    apply_norm,
    remove_norm,
    spectral_norm,
    steady,
    weight_norm,
)
from gdeq.layer import DEQ, mixed_start
from gdeq.regularize import jacobian_penalty, residual_penalty, spectral_radius
from gdeq.solution import BackwardRecord, Solution, Status
from gdeq.solvers import GMRES, Anderson, Broyden, Picard, Solver
from gdeq.state import StateError

__version__ = "0.2.0"

__all__ = [
    "DEQ",
    "GDEQ",
    "GMRES",
    "JFB",
    "NPG",
    "Anderson",
    "BackwardRecord",
    "Broyden",
    "CaptureWarning",
    "ConvergenceWarning",
    "CoupledSamplesWarning",
    "DetachedCellWarning",
    "Gradient",
    "Implicit",
    "Measured",
    "Picard",
    "Solution",
    "Solver",
    "StateError",
    "Status",
    "Unrolled",
    "UnsteadyCellWarning",
    "VariationalDropout",
    "apply_norm",
    "capture",
    "fixed_point",
    "fixed_steps",
    "hold",
    "jacobian_penalty",
    "mixed_start",
    "remove_norm",
    "residual_penalty",
    "solve",
    "spectral_norm",
    "spectral_radius",
    "steady",
    "trajectory",
    "weight_norm",
]


def __getattr__(name: str) -> Any:
    if name in ("CaptureWarning", "capture"):  # of the fast engine, loaded where it is used
        from gdeq.fast import graphs  # noqa: PLC0415

        return getattr(graphs, name)
    raise AttributeError(f"module 'gdeq' has no attribute {name!r}")
