"""gdeq: deep equilibrium models whose gradients are fast and whose error is known."""

from gdeq.fast.capture import CaptureWarning, capture
from gdeq.fixed_point import fixed_point
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured, Unrolled
from gdeq.layer import DEQ, UnsteadyCellWarning
from gdeq.narrowing import NarrowError
from gdeq.regularize import (
    VariationalDropout,
    hold,
    jacobian_penalty,
    residual_penalty,
    spectral_radius,
    weight_norm,
)
from gdeq.solution import BackwardRecord, Solution, Status
from gdeq.solve import solve
from gdeq.solvers import GMRES, Anderson, Broyden, Picard, Solver
from gdeq.start import fit_start
from gdeq.state import StateError

__version__ = "0.1.0"

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
    "Gradient",
    "Implicit",
    "Measured",
    "NarrowError",
    "Picard",
    "Solution",
    "Solver",
    "StateError",
    "Status",
    "Unrolled",
    "UnsteadyCellWarning",
    "VariationalDropout",
    "capture",
    "fit_start",
    "fixed_point",
    "hold",
    "jacobian_penalty",
    "residual_penalty",
    "solve",
    "spectral_radius",
    "weight_norm",
]
