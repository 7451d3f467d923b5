"""f with gradients at its fixed point: the two nodes that are put around one evaluation of it.

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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gdeq.engine import Adjoint, Engine, Found
from gdeq.gradients import Gradient, Implicit
from gdeq.state import State, StateMap, StateSpace, full_precision, versions
from gdeq.tracing import blind, row_by_row, without_values

THIRD = (
    "gdeq: a fixed point has first and second derivatives only; gdeq.Unrolled() and JFB(), "
    "which are approximate, have all"
)
CHANGED = (
    "gdeq: solution.z was changed in place before the backward pass, which needs it; change a "
    "copy, solution.z.clone()"
)


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
        if unseen:
            return made.w
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
    evaluation: Evaluation | None = found.evaluation
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
