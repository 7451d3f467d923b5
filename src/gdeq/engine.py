"""The seam: an engine finds fixed points, solves their adjoint equations, and is chosen here.

The map, the solver and the gradient say what is computed; an engine says how.  `Reference` runs the
solvers' own code, and `gdeq.fast` makes fewer passes over memory where it can.  States cross this
seam as the user's tensors.

In autograd a fixed point is two nodes around one evaluation of f at it:

    z* --> [input] --> f --> [output] --> z* again, now with gradients

In the backward pass the output node turns v = ∂ℓ/∂z* into w (`gdeq.gradients`) and hands w to that
evaluation of f, from where PyTorch takes it to everything that f closes over.  The same pass brings
Jᵀw to the input node, and with it the residual of the adjoint equation,

    r = v − w + Jᵀw = v − (I − Jᵀ)w,

so that the error of the gradient is measured at no extra cost.  A w that needs no product with J
(JFB, plain GDEQ) needs no input node.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gdeq import loop
from gdeq.context import blind, here, is_traced, row_by_row, together, without_values
from gdeq.gradients import Gradient, Implicit
from gdeq.operators import StateInverse, relative, safe_norms
from gdeq.options import describe
from gdeq.solution import Cotangent, Solution
from gdeq.solvers.base import Solver, System
from gdeq.state import State, StateMap, StateSpace, Vectorized, full_precision, versions

THIRD = (
    "gdeq: a fixed point has first and second derivatives only; gdeq.Unrolled() and JFB(), "
    "which are approximate, have all"
)
CHANGED = (
    "gdeq: solution.z was changed in place before the backward pass, which needs it; change a "
    "copy, solution.z.clone()"
)

# ---- what crosses the seam


@dataclass
class Found:
    """A solution, and what else its engine knows about it."""

    solution: Solution
    space: StateSpace
    vector: Any = None  # (batch, d) z, where it has more digits than the user's tensors
    inside: Tensor | None = None  # (batch, 1) where f can be given z; None: everywhere
    output: list[Tensor] | None = None  # the tensors of z for the user, if they need no copy
    evaluation: Evaluation | None = None  # of f at z, if it was made during the solve


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


# ---- the reference engine


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
    """The solvers and gradients as they are written.

    groups: of processes that evaluate f together, in backward passes too.
    """

    groups: tuple[Any, ...] = ()  # of a subclass whose __init__ does not come here

    def __init__(self, groups: tuple[Any, ...] = ()) -> None:
        self.groups = groups

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

        with together(self.groups):
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


# ---- the choice


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
    if here.groups:
        return Reference(here.groups)
    if here.blind or not runs_fast(f.space.device):
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


# ---- the nodes around one evaluation of f


@dataclass
class Link:
    """What the nodes around one evaluation of f share.  Holds no z with a graph: a cycle."""

    gradient: Gradient
    engine: Engine
    found: Found = field(init=False)
    versions: list[int | None] = field(init=False)  # of its z, which f's graph reads
    of_pass: int = -1  # the backward pass that `adjoint` belongs to
    adjoint: Adjoint | None = None  # what that pass made of v, until Jᵀw arrives

    def cotangents(self, v: list[Tensor], vjp: Product) -> list[Tensor]:
        """What the output node makes of ∂ℓ/∂z: w, in the tensors of f(z)."""
        if self.versions != self.versions_now():
            raise RuntimeError(CHANGED)
        # Without VJPs w may be differentiated as it is made, if autograd is on.
        unseen = without_values(v)
        with blind(unseen), torch.no_grad() if vjp.usable else contextlib.nullcontext():
            made = self.engine.adjoint(self.gradient, v, vjp, self.found)
        if not unseen:
            self.found.solution.record.write(self.gradient, made.report)
        if vjp.usable:
            self.of_pass, self.adjoint = this_pass(), made
            # A pass that was asked for some gradients alone may never come to the input node.
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        return made.w

    def input_gradients(self, products: Sequence[Tensor]) -> list[Tensor | None]:
        """What the input node makes of Jᵀw.  z* does not depend on z0, so nothing is passed on."""
        if (made := self.awaiting) is not None:
            self.forget()
            if not without_values(products):
                record = self.found.solution.record
                with torch.no_grad():  # a record with a graph would keep this node, and itself
                    record.measured(made.residual(products))
                    if record.length is None:  # the weight of what was just measured
                        record.length = made.length()
        return [None for _ in products]

    def versions_now(self) -> list[int | None]:
        return versions(pytree.tree_leaves(self.found.solution.z))

    @property
    def awaiting(self) -> Adjoint | None:
        """What this pass made of v, if its Jᵀw has not arrived yet."""
        return self.adjoint if self.of_pass == this_pass() else None

    def forget(self) -> None:
        self.adjoint = None


@dataclass
class Evaluation:
    """f, evaluated with autograd at the solution, between the nodes."""

    f: StateMap
    link: Link
    z_in: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)

    def at(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of f(z) for those of z."""
        # Autocast would use its copies of weights from the solve, which have no gradients.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            if self.link.gradient.needs.vjp:
                token = torch.zeros((), device=self.f.space.device, requires_grad=True)
                z = self.z_in = list(_Input.apply(token, self.link, *z))
            self.out = self.f.leaves(z)
        return self.out

    def attach(self, found: Found) -> State:
        """The solution's z, with gradients to all that f closes over."""
        solution, space = found.solution, found.space
        if not any(leaf.requires_grad for leaf in self.out):
            return solution.z  # f is a constant: nothing to differentiate
        # The graph outlives the step that made it, so it holds nothing that it does not use.
        gradient = self.link.gradient
        if not gradient.needs.inverse or solution.secants is not None:
            solution = replace(solution, inverse=None)
        self.link.found = Found(solution, space, inside=found.inside)
        self.link.versions = self.link.versions_now()
        given = found.output
        if given is None:
            given = space.copies(space.leaves(found.solution.z, "z", cast=False))
        with torch.enable_grad():
            made = _Output.apply(self.link, space, given, *self.out, *self.z_in)
        return space.state(made)


def attach(f: StateMap, found: Found, gradient: Gradient) -> State:
    """z of the solution with gradients to all that f closes over, by one more evaluation of f."""
    evaluation = found.evaluation
    with full_precision(found.space.device):
        if evaluation is None:
            evaluation = Evaluation(f, Link(gradient, found.solution.engine))
            evaluation.at(found.space.leaves(found.solution.z, "z", cast=False))
        return evaluation.attach(found)


class _Input(torch.autograd.Function):
    """z as f sees it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, link: Link, *z: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        # As .data: PyTorch has an error of its own for changes of a Function's views in place, and
        # `StateMap.leaves` has a clearer one.
        return tuple(leaf.data for leaf in z)

    @staticmethod
    def backward(ctx: Any, *products: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(products[0].device):
            return None, None, *ctx.link.input_gradients(products)


class _Output(torch.autograd.Function):
    """z* as a function of the tensors of f(z*) and, where w needs products with J, of those of z.

    Only their graph is used, not their values.
    """

    @staticmethod
    def forward(
        ctx: Any, link: Link, space: StateSpace, z: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.space = link, space
        ctx.set_materialize_grads(False)
        ctx.dtypes = [leaf.dtype for leaf in tensors[: len(z)]]
        if len(tensors) > len(z):
            ctx.save_for_backward(*tensors)
        return tuple(z)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        count, tensors, space = len(arrived), ctx.saved_tensors, ctx.space
        if all(leaf is None for leaf in arrived):  # a pass that ended at the input node before this
            return None, None, None, *(None for _ in tensors or arrived)
        if torch.is_grad_enabled():  # the caller asked for create_graph=True
            check_second_order(ctx.link.gradient)
        v = [  # a loss need not use all of the state
            torch.zeros(shape, dtype=dtype, device=space.device) if leaf is None else leaf
            for leaf, shape, dtype in zip(arrived, space.shapes, space.dtypes, strict=True)
        ]
        vjp = Product(ctx.dtypes, tensors[:count], tensors[count:])
        with full_precision(space.device):
            w = row_by_row(lambda v: ctx.link.cotangents(v, vjp), v)
        return None, None, None, *w, *(None for _ in tensors[count:])


# Why PyTorch refused a product with Jᵀ, by what its error says.
NO_PRODUCTS = {
    "use_reentrant=True": (
        "f uses reentrant checkpointing, through which PyTorch computes no VJPs: call "
        "checkpoint(..., use_reentrant=False)"
    ),
    "donated buffers": (
        "torch.compile has compiled f for one backward pass per call, and this gradient needs "
        "VJPs besides: set torch._functorch.config.donated_buffer = False before the first call"
    ),
}


class Product:
    """u ↦ Jᵀu (`gdeq.engine.TensorVJP`); with a graph where autograd is on."""

    def __init__(
        self, dtypes: list[torch.dtype], out: Sequence[Tensor], z_in: Sequence[Tensor]
    ) -> None:
        self.dtypes, self.out, self.z_in = dtypes, out, z_in
        self.usable = bool(z_in)

    def __call__(self, u: Sequence[Tensor]) -> list[Tensor]:
        roots = [(leaf, part) for leaf, part in zip(self.out, u, strict=True) if leaf.requires_grad]
        try:
            found = torch.autograd.grad(
                [leaf for leaf, _ in roots],
                self.z_in,
                [part for _, part in roots],
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        except RuntimeError as problem:
            for sign, remedy in NO_PRODUCTS.items():
                if sign in str(problem):
                    raise RuntimeError(remedy) from problem
            raise
        pairs = zip(found, self.z_in, strict=True)  # f may ignore z
        return [torch.zeros_like(leaf) if part is None else part for part, leaf in pairs]


def this_pass() -> int:
    """Which backward pass is under way."""
    return torch._C._current_graph_task_id()


def check_second_order(gradient: Gradient) -> None:
    if gradient.second_order:
        return
    if isinstance(gradient, Implicit):
        raise RuntimeError(
            "this Implicit was made with double_backward=False; use gdeq.Implicit() for second "
            "derivatives"
        )
    raise RuntimeError(
        f"{type(gradient).__name__} is an approximate gradient without a derivative of its own; "
        "for create_graph=True (double backward) use gdeq.Implicit(), JFB() or Unrolled()"
    )
