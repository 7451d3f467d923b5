"""Damped fixed-point iteration."""

from __future__ import annotations

from torch import Tensor

from gdeq.options import check_real, options
from gdeq.solvers.base import Point, Solver, System


@options
class Picard(Solver):
    """z ← (1 − λ) z + λ f(z): needs a contraction, stores nothing.

    damping: λ in (0, 1]; 1 is the plain iteration.
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_real(self, "damping", 0.0, 1.0, open_low=True)

    def init(self, start: Point, system: System) -> None:
        return None

    def propose(self, here: Point, state: None) -> Tensor:
        return here.z + self.damping * here.g
