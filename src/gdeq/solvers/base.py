"""What a solver is to the loop in `gdeq.loop`.

A solver is frozen hyperparameters plus three small methods; what it learns is in a state that is
passed in and returned.  The loop owns f, stopping, freezing and bookkeeping: a solver says where to
look next (`propose`) and takes in what was seen there (`learn`).  Both work on batched vectors with
g(z) = f(z) − z, whose root is the fixed point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gdeq.context import look_is_free
from gdeq.operators import Inverse, norm
from gdeq.options import check_choice, check_integer, check_real, describe, options


class Point(NamedTuple):
    """An iterate of every sample."""

    z: Tensor  # (batch, d)
    g: Tensor  # (batch, d) f(z) − z


@dataclass(frozen=True)
class System:
    """What is known of a map beside its values."""

    precision: float  # spacing of the numbers that f computes with; smaller changes of g are noise
    sizes: Sequence[int] = ()  # of the tensors that z consists of; () stands for one
    right: Tensor | None = None  # (batch, d) f(0), which says that f is affine
    inverse: Inverse | None = None  # an estimate of (∂f/∂z − I)⁻¹ to start from


@options
class Solver:
    """Base class of solvers, with the options that all of them have.

    max_iter: the largest number of steps.
    tol: a sample is done when its residual is at most this; 0 runs exactly ``max_iter`` steps.
    stop: what the residual is.  "relative" divides ‖f(z) − z‖ by max(‖f(z)‖, ‖z‖).  If the state
        has several tensors, this is done for each, and the largest counts; a tensor smaller than
        1e-5 of the whole state is taken to be that large, and a z that has become smaller than the
        rounding of the first one as large as that rounding: beside a z* of 0 no ‖f(z) − z‖ is
        small.  "whole" takes the state as one vector, and "absolute" takes ‖f(z) − z‖ as it is.
    check_every: check only every so many steps whether the whole batch is done, since each check
        waits for the device.  Results do not change.

    Examples:
        >>> import torch, gdeq
        >>> from gdeq.options import options
        >>> @options
        ... class Half(gdeq.Solver):  # Picard's iteration with half steps
        ...     def init(self, start, system):
        ...         return None
        ...     def propose(self, here, state):
        ...         return here.z + 0.5 * here.g
        >>> bool(gdeq.solve(torch.cos, torch.zeros(1, 1), Half(max_iter=50)).converged)
        True
    """

    max_iter: int = 50
    tol: float = 1e-6
    stop: str = field(default="relative", kw_only=True)
    check_every: int = field(default=1, kw_only=True)

    line_search: ClassVar[Any] = 0
    linear_only: ClassVar[bool] = False  # solves affine maps only
    keeps_inverse: ClassVar[bool] = False  # leaves an inverse-Jacobian estimate behind

    def __post_init__(self) -> None:
        check_integer(self, "max_iter", 1)
        check_real(self, "tol", 0.0)
        check_choice(self, "stop", ("relative", "whole", "absolute"))
        check_integer(self, "check_every", 1)

    def init(self, start: Point, system: System) -> Any:
        """The state before the first step."""
        raise NotImplementedError

    def propose(self, here: Point, state: Any) -> Tensor:  # -> (batch, d)
        """Where to evaluate f next."""
        raise NotImplementedError

    def learn(self, here: Point, there: Point, accepted: Tensor, state: Any) -> tuple[Point, Any]:
        """The next iterate and the state, from what was seen at the place proposed.

        accepted: (batch,) still running, and f is finite there; others must not change.
        """
        return advance(accepted, here, there), state

    def inverse(self, state: Any, at: Tensor | None) -> Inverse | None:  # at: (batch,)
        """The inverse estimate as it was after step ``at`` of each sample (None: as it is)."""
        return None


def check_solver(solver: object, *, name: str = "solver", linear: bool = False) -> Solver:
    """Raise where this cannot solve for a fixed point; ``linear``: for that of an affine map."""
    if not isinstance(solver, Solver):
        raise TypeError(f"{name} must be a solver such as gdeq.Broyden(), got {describe(solver)}")
    if solver.linear_only and not linear:
        raise ValueError(
            f"{type(solver).__name__} solves linear systems only; use it as "
            f"gdeq.Implicit(solver=gdeq.{type(solver).__name__}()), and gdeq.Broyden() here"
        )
    return solver


# A change of g counts as seen only if it is this many times the rounding of f; what is learned from
# less is noise, and spoils an inverse that was good.  In half precision f rounds its result only,
# not the sums in it, and the roundings of many entries average: little more than one is enough.
SEEN, SEEN_IN_HALF = 10.0, 1.25


def noise_level(precision: float) -> float:
    """The relative change of g up to which it may be the rounding of f."""
    half = precision >= torch.finfo(torch.float16).eps
    return (SEEN_IN_HALF if half else SEEN) * precision


def change_seen(g: Tensor, there: Point, precision: float) -> Tensor:  # (batch, d) -> (batch,)
    """Whether g has changed by more than the rounding of f."""
    return norm(there.g - g) > noise_level(precision) * (norm(there.z) + norm(there.g))


def select(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:  # (batch,), (batch, d), (batch, d)
    """``new`` where the mask holds, ``old`` elsewhere; never mixes in NaN by multiplication."""
    if look_is_free(mask.device) and bool(mask.all()):
        return new  # this saves a pass over the state
    return torch.where(mask.unsqueeze(1), new, old)


def advance(mask: Tensor, here: Point, there: Point) -> Point:  # (batch,)
    """``there`` for the samples of the mask."""
    return Point(select(mask, there.z, here.z), select(mask, there.g, here.g))
