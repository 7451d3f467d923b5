"""The seam: an engine finds fixed points and solves their adjoint equations.

The map, the solver and the gradient say what is computed; an engine says how.  `Reference` runs the
solvers' own code, and `gdeq.fast` makes fewer passes over memory where it can.  States cross this
seam as the user's tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gdeq import loop
from gdeq.context import is_blind, is_traced, together
from gdeq.gradients import Gradient
from gdeq.operators import StateInverse, relative, safe_norms
from gdeq.options import describe
from gdeq.solution import Cotangent, Solution
from gdeq.solvers.base import Solver, System
from gdeq.state import State, StateMap, StateSpace, Vectorized, full_precision


@dataclass
class Found:
    """A solution, and what else its engine knows about it."""

    solution: Solution
    space: StateSpace
    vector: Any = None  # (batch, d) z, where it has more digits than the user's tensors
    inside: Tensor | None = None  # (batch, 1) where f can be given z; None: everywhere
    output: list[Tensor] | None = None  # the tensors of z for the user, if they need no copy
    evaluation: Any = None  # `gdeq.adjoint.Evaluation` at z, if it was made during the solve


class TensorVJP(Protocol):
    """u ↦ Jᵀu at the solution, from tensors like those of f(z) to tensors like those of z."""

    dtypes: list[torch.dtype]  # of the tensors of f(z)
    usable: bool  # False for gradients that ask for no VJP

    def __call__(self, u: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass
class Adjoint:
    """What a gradient made of v in one backward pass."""

    w: list[Tensor]  # like the tensors of f(z)
    report: Cotangent

    def residual(self, product: Sequence[Tensor]) -> Tensor:  # -> (batch,)
        """‖v − (I − Jᵀ)w‖/‖v‖, given Jᵀw; of gradients that ask for VJPs."""
        raise NotImplementedError

    def length(self) -> Tensor:  # -> (batch,)
        """‖w‖, or ‖v‖ where w is 0; of gradients that ask for VJPs."""
        raise NotImplementedError


class Engine(Protocol):
    """How solves and adjoint equations are computed."""

    def solve(self, f: StateMap, z0: State, solver: Solver, gradient: Gradient | None) -> Found:
        """Find z = f(z) without autograd, and keep what ``gradient`` will need, if there is one."""

    def iterate(self, f: Vectorized, z: Tensor, solver: Solver, system: System) -> loop.Iterates:
        """`gdeq.loop.iterate`, for the adjoint equation.  z: (batch, d)."""

    def adjoint(
        self, gradient: Gradient, v: Sequence[Tensor], vjp: TensorVJP, found: Found
    ) -> Adjoint:
        """What the gradient makes of v = ∂ℓ/∂z."""


@dataclass
class VectorAdjoint(Adjoint):
    """w as a batched vector, in units of about ‖v‖, so that losses may come in all sizes."""

    engine: Reference
    space: StateSpace
    v: Tensor  # (batch, d) in units
    size: Tensor  # (batch,) ‖v‖ in units
    unit: Tensor  # (batch,)

    def residual(self, product: Sequence[Tensor]) -> Tensor:  # -> (batch,)
        of_w = self.space.join(product, factor=1 / self.unit)
        return relative(self.engine.residual_norm(self.v, self.report.w, of_w), self.size)

    def length(self) -> Tensor:  # -> (batch,)
        if self.report.w is self.v:
            return self.size * self.unit
        (length,) = safe_norms(self.report.w)
        # A sample whose w is 0 lacks all of its gradient: it weighs as much as JFB's would.
        return torch.where(length > 0, length, self.size) * self.unit

    def shortfall(self) -> Tensor:  # -> (batch, d)
        """v − w, not in units."""
        return (self.v - self.report.w) * self.unit.unsqueeze(1)


class Reference:
    """The solvers and gradients as they are written."""

    def solve(self, f: StateMap, z0: State, solver: Solver, gradient: Gradient | None) -> Found:
        space = f.space
        system = System(f.precision, space.sizes)
        keep = wants_secants(gradient, system.precision)
        with torch.no_grad(), full_precision(space.device):
            found = loop.iterate(f, space.pack(z0).detach(), solver, system, keep)
            inside = f.inside(found.z)
        return Found(self.solution(found, space.unpack(found.z), f), space, found.z, inside)

    def solution(self, found: loop.Iterates, z: State, f: StateMap) -> Solution:
        """The outcome of a loop in the user's terms."""
        return Solution(
            z=z,
            converged=found.converged,
            residual=found.residual,
            steps=found.steps,
            trace=found.trace,
            evals=found.evals,
            inverse=StateInverse(found.inverse, f.space) if found.inverse else None,
            codes=found.codes,
            precision=f.precision,
            parts=found.of_parts,
            secants=found.secants,
            engine=self,
        )

    def iterate(self, f: Vectorized, z: Tensor, solver: Solver, system: System) -> loop.Iterates:
        return loop.iterate(f, z, solver, system)

    def adjoint(
        self, gradient: Gradient, v: Sequence[Tensor], vjp: TensorVJP, found: Found
    ) -> Adjoint:
        space = found.space
        if not vjp.usable:
            flat = space.join(v)
            report = gradient.cotangent(flat, _no_vjp, found.solution)
            return Adjoint(_tensors(report.w, vjp, found), report)
        size = self.norm(v, space)
        unit = power_of_two(size)
        flat = space.join(v, factor=1 / unit)

        def product(u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
            return space.join(vjp(_tensors(u, vjp, found)))

        report = gradient.cotangent(flat, product, found.solution)
        if report.length is not None:
            report.length = report.length * unit
        w = _tensors(report.w, vjp, found, unit)
        return VectorAdjoint(w, report, self, space, flat, size / unit, unit)

    def norm(self, v: Sequence[Tensor], space: StateSpace) -> Tensor:  # -> (batch,)
        """Of the tensors of a state, for each sample."""
        return safe_norms(space.join(v))[0]

    def residual_norm(self, v: Tensor, w: Tensor, product: Tensor) -> Tensor:  # (batch, d) each
        """‖v − w + Jᵀw‖ for each sample."""
        return safe_norms(v - w + product)[0]


class Together(Reference):
    """For a cell that is sharded over processes: they evaluate f together, equally often."""

    def __init__(self, groups: tuple[Any, ...]) -> None:
        self.groups = groups

    def solve(self, f: StateMap, z0: State, solver: Solver, gradient: Gradient | None) -> Found:
        with together(self.groups):
            return super().solve(f, z0, solver, gradient)

    def adjoint(
        self, gradient: Gradient, v: Sequence[Tensor], vjp: TensorVJP, found: Found
    ) -> Adjoint:
        with together(self.groups):
            return super().adjoint(gradient, v, vjp, found)


def _checked(engine: str | Engine, who: str) -> str | Engine:
    if isinstance(engine, str) and engine not in ("auto", "fast", "reference"):
        raise ValueError(f"{who} must be 'auto', 'fast' or 'reference', got {engine!r}")
    if isinstance(engine, type) or not (isinstance(engine, str) or hasattr(engine, "adjoint")):
        raise TypeError(f"{who} must be a name or an Engine object, got {describe(engine)}")
    return engine


REFERENCE = Reference()
_choice = [_checked(os.environ.get("GDEQ_ENGINE", "auto"), "the environment's GDEQ_ENGINE")]


def choose(f: StateMap) -> Engine:
    """The engine for this map: the only place that chooses."""
    chosen = _choice[-1]
    if not isinstance(chosen, str):
        return chosen
    if groups := getattr(f.f, "groups", ()):
        return Together(groups)
    if is_blind() or not runs_fast(f.space.device):
        return REFERENCE
    from gdeq.fast.engine import FAST  # noqa: PLC0415 (loaded where it is used)

    return FAST


def runs_fast(device: torch.device) -> bool:
    """Whether work on this device is done by `gdeq.fast`."""
    chosen = _choice[-1]
    if chosen == "reference" or not isinstance(chosen, str):
        return False
    if chosen == "auto" and device.type == "cpu":
        return False
    from gdeq import fast  # noqa: PLC0415 (loaded where it is used)

    if chosen == "fast" and not fast.available(device):
        raise ValueError(f"engine 'fast' needs {fast.REQUIRES}; the state is on {device}")
    return fast.available(device)


def faster(model: str, module: Any, *inputs: Any) -> Callable[[], Any] | None:
    """A faster way to what a model or its cell returns for these inputs; None where there is none.

    ``module.config.fused`` says whether to look for one: True, False, or "auto" where work is done
    by `gdeq.fast`, whose ``gdeq.fast.NAME`` has a ``runner`` for the model of this name.
    """
    wanted = module.config.fused
    if wanted is False or is_traced() or not (wanted is True or runs_fast(inputs[-1].device)):
        return None
    found: Any = importlib.import_module(f"gdeq.fast.{model}")
    return found.runner(module, *inputs)


@contextlib.contextmanager
def use(engine: str | Engine) -> Iterator[None]:
    """Use this engine inside the context: "reference", "fast", "auto" or an object of your own.

    Examples:
        >>> import torch, gdeq
        >>> with gdeq.engine.use("reference"):
        ...     solution = gdeq.solve(torch.cos, torch.zeros(1, 1))
        >>> type(solution.engine).__name__
        'Reference'
    """
    _choice.append(_checked(engine, "engine"))
    try:
        yield
    finally:
        _choice.pop()


def wants_secants(gradient: Gradient | None, precision: float) -> bool:
    """Whether a solve keeps its last secants; in half precision they are mostly rounding."""
    wanted = gradient is not None and gradient.needs.secants
    return wanted and precision < torch.finfo(torch.float16).eps


def power_of_two(size: Tensor) -> Tensor:  # (batch,) -> (batch,)
    """Of about this size, and such that its inverse is a normal number too."""
    size = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    most = math.frexp(torch.finfo(size.dtype).max)[1] - 2
    # One below the exponent: 2¹²⁸ is not a float32.
    exponent = (size.frexp().exponent - 1).clamp(-most, most)
    return torch.ldexp(torch.ones_like(size), exponent)


def _tensors(
    w: Tensor,  # (batch, d)
    vjp: TensorVJP,
    found: Found,
    unit: Tensor | None = None,  # (batch,)
) -> list[Tensor]:
    """A cotangent of f(z) in the user's tensors; zero where f could not be given z."""
    w = w if found.inside is None else torch.where(found.inside, w, 0.0)
    return found.space.split(w, vjp.dtypes, factor=unit)


def _no_vjp(u: Tensor) -> Tensor:
    raise RuntimeError("this gradient method asked for a VJP although its needs.vjp is False")
