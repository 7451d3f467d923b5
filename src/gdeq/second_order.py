"""Second derivatives of a fixed point, for `gdeq.Implicit`.

The gradient (∂f/∂θ)ᵀw depends on w and on z*, and both are fixed points that depend on θ.  A pass
with create_graph=True attaches w as the fixed point of w = v + Jᵀw.  For z* there are the same two
nodes around an evaluation of f of its own (`gdeq.engine`):

    z* --> [input] --> f --> [output] --> [input] --> f --> [output] --> z*

What a second pass brings to the input node in the middle goes on to the left; the Jᵀw of a first
pass ends there.  The two come by the same edge, and no number tells them apart, so the second pass
announces itself: w is handed to f through a node (`_Notice`) that runs in such a pass alone, and
before the input node, because it is connected to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdeq.context import row_by_row
from gdeq.engine import THIRD, Adjoint, Evaluation, Found, Link, Product, VectorAdjoint, this_pass
from gdeq.gradients import Gradient, Implicit
from gdeq.solution import BackwardRecord
from gdeq.state import State, StateMap, StateSpace, full_precision


def needed(gradient: Gradient) -> bool:
    """Whether f is evaluated twice with autograd, for second derivatives."""
    return isinstance(gradient, Implicit) and gradient.double_backward


def attach_twice(f: StateMap, found: Found, gradient: Implicit) -> State:
    """`gdeq.engine.attach`, with second derivatives."""
    first, engine = replace(gradient, double_backward=False), found.solution.engine
    # The user's record is that of the outer evaluation.
    unseen = replace(found.solution, record=BackwardRecord())
    leaves = found.space.leaves(found.solution.z, "z", cast=False)
    shared = [leaf.detach() for leaf in leaves]
    with full_precision(found.space.device):
        inner = Evaluation(f, Link(first, engine))
        inner.at(leaves)
        z = inner.attach(replace(found, solution=unseen, output=shared))
        outer = Evaluation(f, _TwiceLink(gradient, engine))
        outer.at(found.space.leaves(z, "z", cast=False))
        return outer.attach(found)


@dataclass
class _TwiceLink(Link):
    second_pass: int = -1  # a backward pass that differentiates a gradient
    # What this pass made of v: one, or one for each row of a pass that `torch.autograd` batches.
    rows: list[Adjoint] = field(default_factory=list)

    def cotangents(self, v: list[Tensor], vjp: Product) -> list[Tensor]:
        before = self.rows if self.awaiting else []
        w = super().cotangents(v, vjp)
        self.rows = [*before, self.adjoint] if self.adjoint else []
        return self._differentiable(v, vjp) if torch.is_grad_enabled() else w

    def input_gradients(self, products: Sequence[Tensor]) -> list[Tensor | None]:
        if self.second_pass != this_pass():
            return super().input_gradients(products)
        space, rows = self.found.space, itertools.cycle(self.rows if self.awaiting else [None])
        self.forget()

        def continued(products: list[Tensor]) -> Sequence[Tensor]:
            flat = space.join(products)
            if isinstance(made := next(rows), VectorAdjoint):
                # The sum holds the Jᵀw of a first pass too.  Take it out; what is left of
                # v − w + Jᵀw is the residual of w, whose share makes up for what w lacks.
                flat = flat + made.shortfall()
            return space.split(flat, space.dtypes)

        return list(row_by_row(continued, list(products)))

    def forget(self) -> None:
        super().forget()
        self.rows = []

    def _differentiable(self, v: list[Tensor], vjp: Product) -> list[Tensor]:
        """The w of this pass, with derivatives in v and all that J depends on.

        w solves w = v + Jᵀw, a fixed point too: it is attached as one.
        """
        made, gradient, space = self.adjoint, self.gradient, self.found.space
        assert isinstance(made, VectorAdjoint)
        assert isinstance(gradient, Implicit)
        w, unit, inside = made.report.w, made.unit.unsqueeze(1), self.found.inside
        right = space.join(v) / unit

        def equation(u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
            u = u if inside is None else torch.where(inside, u, 0.0)
            return right + space.join(vjp(space.split(u, vjp.dtypes)))

        inner = replace(gradient, double_backward=False, precondition=False)
        of_w = StateSpace(w)
        evaluation = Evaluation(StateMap(of_w, equation), Link(inner, self.engine))
        evaluation.at([w])
        unseen = replace(self.found.solution, z=w, inverse=None, record=BackwardRecord())
        attached = evaluation.attach(Found(unseen, of_w)) * unit
        attached = attached if inside is None else torch.where(inside, attached, 0.0)
        return list(_Notice.apply(self, *space.split(attached, vjp.dtypes), *vjp.z_in))


class _Notice(torch.autograd.Function):
    """w as it is; who differentiates it tells the input node, whose z is an input here for that."""

    @staticmethod
    def forward(ctx: Any, link: _TwiceLink, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)
        return tensors[: len(tensors) // 2]  # those of w; the others are those of z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(THIRD)
        ctx.link.second_pass = this_pass()
        return None, *grads, *(None for _ in grads)
