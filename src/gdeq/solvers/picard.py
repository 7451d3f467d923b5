"""Damped fixed-point iteration."""

from __future__ import annotations

from torch import Tensor

from gdeq.options import check_real, options
from gdeq.solvers.base import Point, Solver, System


@options
class Picard(Solver):
    """Damped fixed-point iteration, z ← (1 − λ) z + λ f(z).  Needs a contraction, stores nothing.

    damping: λ in (0, 1]; 1 is the plain iteration.

    Examples:
        >>> import torch, gdeq
        >>> f = lambda z: 0.5 * z + 1
        >>> gdeq.solve(f, torch.zeros(1, 1), gdeq.Picard(max_iter=3, tol=0)).z.item()  # 1, 1.5, ...
        1.75
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_real(self, "damping", 0.0, 1.0, open_low=True)

    def init(self, start: Point, system: System) -> None:
        return None

    def propose(self, here: Point, state: None) -> Tensor:
        return here.z + self.damping * here.g
