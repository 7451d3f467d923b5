"""Fixed points under `torch.func`, forward mode and `vmap`.

z* is found as a constant; a step of Newton's method, whose value is z* again, gives it derivatives:

    z* ↦ z* + (I − J)⁻¹ (f(z*, θ) − z*),        (I − J)⁻¹ taken as constant.

Backwards the step needs w = (I − J)⁻ᵀv, which is what a gradient method computes; forwards
(I − J)⁻¹ẏ, one solve of the tangent equation.  Two such steps have right second derivatives, if w,
the fixed point of w = v + Jᵀw, is given derivatives in the same way.

A transform hands a rule the inputs of the step as they are at its own level, and no others.  So
what f closes over must be an input too: f is put on a tape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gdeq.context import blind, row_by_row, transforms, without_values
from gdeq.engine import REFERENCE, THIRD, Found, check_second_order
from gdeq.gradients import Gradient, Implicit, Unrolled
from gdeq.loop import iterate
from gdeq.solution import BackwardRecord, Solution
from gdeq.solvers.base import Solver, System
from gdeq.state import (
    State,
    StateMap,
    StateSpace,
    Vectorized,
    autocast_dtype,
    detached,
    full_precision,
)

UNSEEN = (
    "gdeq: f computes in a way that torch.func cannot follow: a torch.jit function, a vmap or grad "
    "of its own, or another fixed point; write that part in plain PyTorch, or use .backward()"
)


def solve(f: StateMap, z0: State, solver: Solver, gradient: Gradient | None) -> Found:
    """The solution as a constant to every transform around this call."""
    space, leaves = f.space, f.space.leaves(z0, "z0", cast=True)
    still = StateMap(space, lambda z: detached(f.f(z)))
    with full_precision(space.device):
        # What f holds still it makes here, with derivatives.
        like = f.leaves([leaf.detach() for leaf in leaves])
        with constant():
            start = [  # under vmap z0 may be one for all, while z is not
                z.detach() + torch.zeros_like(fz, dtype=z.dtype)
                for z, fz in zip(leaves, like, strict=True)
            ]
            found = REFERENCE.solve(still, space.state(start), solver, gradient)
    found.vector = found.vector.detach()
    return replace(found, solution=replace(found.solution, z=detached(found.solution.z)))


def attach(f: StateMap, found: Found, gradient: Gradient) -> State:
    """z of the solution, with derivatives for every transform around this call."""
    # One derivative for each transform, and one for a backward pass around them all.
    order = 1
    if isinstance(gradient, Implicit) and gradient.double_backward:
        order += sum(name in ("Grad", "Jvp") for name in transforms())
    with full_precision(f.space.device):
        tape = Tape(f, found.vector)
        made = attached(tape, found.vector, tape.given, order, gradient, found.solution)
        return f.space.unpack(made)


def compiled(f: StateMap, z0: State, solver: Solver | None, gradient: Gradient | None) -> State:
    """The fixed point and its gradient in plain operations, for `torch.compile`.

    −B⁻¹(f(z) − f(z)), the second f(z) without autograd, is 0 and has the gradient −B⁻ᵀv.
    """
    space = f.space
    with full_precision(space.device):
        z, inverse = space.pack(z0), None
        if solver is not None:
            with torch.no_grad():
                found = iterate(f, z, solver, System(f.precision, space.sizes))
            z, inverse = found.z, found.inverse
        if isinstance(gradient, Unrolled):
            z, _ = gradient.unroll(f, z, lambda fz, z: fz)
        elif gradient is not None:
            fz = f(z)
            zero = fz - fz.detach()
            if gradient.needs.inverse:
                assert inverse is not None
                zero = inverse.negative_matvec(zero)
            z = z + zero
        return space.unpack(z)


def attached(
    f: Callable[..., Tensor],
    z: Tensor,
    given: Sequence[Tensor],
    order: int,
    gradient: Gradient,
    solution: Solution,
) -> Tensor:
    """A fixed point z of f(z, *given), (batch, d), with derivatives up to this order."""
    # The last step alone is differentiated at the innermost level.
    below = [beneath(leaf) for leaf in given]
    for further in range(order):
        use = given if further == order - 1 else below
        z = _Newton.apply(_Rule(f, gradient, solution, further), z, f(z, *use), *use)
    return z


def beneath(leaf: Tensor, stack: list[Any] | None = None) -> Tensor:
    """The same as a constant to the innermost transform of the stack that takes derivatives."""
    stack = functorch.get_interpreter_stack() or [] if stack is None else stack
    leaf = functorch.unwrap_if_dead(leaf)
    if not stack:
        return leaf
    level, around = stack[-1].level(), stack[:-1]
    if stack[-1].key().name != "Vmap":
        return functorch._unwrap_for_grad(leaf, level)
    if functorch.maybe_get_level(leaf) != level:
        return beneath(leaf, around)
    inner, at = functorch.get_unwrapped(leaf), functorch.maybe_get_bdim(leaf)
    return functorch._add_batch_dim(beneath(inner, around), at, level)


@contextlib.contextmanager
def constant() -> Iterator[None]:
    """What is computed here has no derivatives, in no mode."""
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        yield


class Tape(TorchFunctionMode):
    """The calls of PyTorch that f makes at z, to be made again for other tensors.

    given: the tensors that f uses and has not made.
    """

    def __init__(self, f: StateMap, z: Tensor) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.places: dict[int, int] = {}  # of a tensor, by its id
        self.kept: list[Any] = []  # so that no other has its id
        self.given: list[Tensor] = []
        self.device = f.space.device

        def record(z: Tensor) -> Tensor:
            self.level = functorch.maybe_current_level()
            self._place(z)
            with self:
                out = f(z)
            if any(
                functorch.maybe_get_level(g) == self.level and g.requires_grad for g in self.given
            ):
                raise RuntimeError(UNSEEN)
            self.out, self.count = self._place(out), len(self.kept)
            return out

        torch.func.vjp(record, z)  # one level up: what depends on z shows there
        self.places, self.kept = {}, []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if functorch.maybe_current_level() != self.level:  # f has a transform of its own
            raise RuntimeError(UNSEEN)
        before = len(self.kept)
        put = pytree.tree_map_only(Tensor, self._place, (args, kwargs or {}))
        new = list(range(before, len(self.kept)))
        self.given += [self.kept[i] for i in new]
        half = autocast_dtype(self.device.type)
        out = func(*args, **(kwargs or {}))
        outs = [self._place(leaf) for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self.calls.append((func, put, new, outs, half))
        return out

    def _place(self, leaf: Tensor) -> _Place:
        if id(leaf) not in self.places:
            self.places[id(leaf)] = len(self.kept)
            self.kept.append(leaf)
        return _Place(self.places[id(leaf)])

    def __call__(self, z: Tensor, *given: Tensor) -> Tensor:
        tensors, rest = {0: z}, iter(given)
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # f may leave it otherwise
            for func, put, new, outs, half in self.calls:
                tensors.update(zip(new, rest, strict=False))
                args, kwargs = pytree.tree_map_only(_Place, tensors.__getitem__, put)
                how = (
                    torch.autocast(self.device.type, half) if half else full_precision(self.device)
                )
                with how:
                    out = func(*args, **kwargs)
                leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
                tensors.update(zip(outs, leaves, strict=True))
        return tensors[self.out]


class _Place(int):
    """Where a tape keeps a tensor."""


@dataclass
class _Rule:
    """How derivatives pass through z ↦ z + (I − J)⁻¹(f(z) − z) at a fixed point.

    further: how often what they become is differentiated again.
    """

    f: Callable[..., Tensor]
    gradient: Gradient
    solution: Solution
    further: int

    def cotangent(self, v: Tensor, z: Tensor, *given: Tensor) -> Tensor:  # (batch, d) each
        """(I − J)⁻ᵀv, by the gradient method."""
        gradient = self.gradient
        if not gradient.needs.vjp and gradient.second_order:  # JFB
            return v
        with blind(without_values([v])), constant():
            f, space = (lambda z: self.f(z, *given)), StateSpace(v)
            product = _Product(_pullback(f, z.detach()) if gradient.needs.vjp else None, v.dtype)
            made = REFERENCE.adjoint(gradient, [v.detach()], product, Found(self.solution, space))

        def equation(w: Tensor, v: Tensor, z: Tensor, *given: Tensor) -> Tensor:
            return v + _pullback(lambda z: self.f(z, *given), z)(w)

        return self._differentiable(equation, made.w[0].detach(), v, z, *given)

    def tangent(self, y: Tensor, z: Tensor, *given: Tensor) -> Tensor:  # (batch, d) each
        """(I − J)⁻¹y."""
        gradient = self.gradient
        if not isinstance(gradient, Implicit):
            if gradient.second_order:  # JFB
                return y
            raise RuntimeError(
                f"{type(gradient).__name__} is defined for backward passes only; for forward mode "
                "(jvp, jacfwd, hessian) use gradient=gdeq.Implicit()"
            )

        def equation(u: Tensor, y: Tensor, z: Tensor, *given: Tensor) -> Tensor:
            return y + _pushforward(lambda z: self.f(z, *given), z)(u)

        with blind(without_values([y])), constant():
            push, right = _pushforward(lambda z: self.f(z, *given), z), y.detach()
            system = System(self.solution.precision, right=right)
            found = REFERENCE.iterate(
                lambda u: right + push(u).detach(), right, gradient.solver, system
            )
        return self._differentiable(equation, found.z.detach(), y, z, *given)

    def _differentiable(self, f: Callable[..., Tensor], w: Tensor, *given: Tensor) -> Tensor:
        """The fixed point w of f(w, *given), with the derivatives that are still needed."""
        gradient = self.gradient
        if not self.further or not isinstance(gradient, Implicit):
            return _Final.apply(gradient, w, *given)
        plain = replace(gradient, precondition=False)
        bare = replace(self.solution, inverse=None, secants=None, record=BackwardRecord())
        return attached(f, w, given, self.further, plain, bare)


class _Product:
    """u ↦ Jᵀu (`gdeq.engine.TensorVJP`)."""

    def __init__(self, pull: Vectorized | None, dtype: torch.dtype) -> None:
        self.pull, self.dtypes, self.usable = pull, [dtype], pull is not None

    def __call__(self, u: Sequence[Tensor]) -> list[Tensor]:
        assert self.pull is not None
        return [self.pull(*u).detach()]


def _pullback(f: Vectorized, z: Tensor) -> Vectorized:
    """u ↦ Jᵀu."""
    made: Any = torch.func.vjp(f, z)
    return lambda u: made[1](u)[0]


def _pushforward(f: Vectorized, z: Tensor) -> Vectorized:
    """u ↦ Ju, as the transpose of u ↦ Jᵀu: f need not have formulas for forward mode."""
    return _pullback(_pullback(f, z), torch.zeros_like(z))


class _Newton(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rule: _Rule, z: Tensor, fz: Tensor, *given: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rule, saved = inputs[0], (inputs[1], *inputs[3:])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        z, *given = ctx.saved_tensors
        w = ctx.rule.cotangent(v, z, *given)
        return None, v - w, w, *(None for _ in given)

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, dfz: Tensor | None, *__: Any) -> Tensor:
        # Tangents have derivatives of their own in the transforms around this one.
        z, *given = map(beneath, ctx.saved_tensors)
        dz, dfz = (torch.zeros_like(z) if leaf is None else beneath(leaf) for leaf in (dz, dfz))
        with forward_ad._set_fwd_grad_enabled(bool(transforms())):
            (made,) = row_by_row(lambda y: [ctx.rule.tangent(*y, z, *given)], [dfz - dz])
            return dz + made


class _Final(torch.autograd.Function):
    """w, which has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Gradient, w: Tensor, *given: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gradient = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        check_second_order(ctx.gradient)
        raise RuntimeError(THIRD)

    jvp = backward
