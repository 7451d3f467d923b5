"""f with gradients at its fixed point: the nodes that are put around one evaluation of it.

    z* --> [input] --> f --> [output] --> z* again, now with gradients

In the backward pass the output node turns v = ∂ℓ/∂z* into w (`gdeq.gradients`) and hands w to that
evaluation of f, from where PyTorch takes it to everything that f closes over.  On the way the pass
also brings Jᵀw to the input node, where the output node has left v and w:

    r = v − w + Jᵀw = v − (I − Jᵀ) w

is the residual of the adjoint equation, so the error of the gradient is measured in passing.  A w
that needs no product with J (JFB, plain GDEQ) needs no input node.

Both nodes are in the user's terms: only what a gradient method works on, v, w and the products,
are batched vectors (and not even these where `JFB` is refined in half precision on a GPU,
`gdeq.fast.kernels.refinement_parts`).

Second derivatives (`Implicit`).  The gradient g = (∂f/∂θ)ᵀw depends on w and on z*, and both are
fixed points that depend on θ.  A pass with create_graph=True gives w its own nodes, as the fixed
point of w = v + Jᵀw.  For z* there are the same two nodes around an evaluation of f of its own:

    z* --> [input] --> f --> [output] --> [input] --> f --> [output] --> z*

What a second pass brings to the input node in the middle goes on to the left; the Jᵀw of a first
pass ends there.  The two come by the same edge, and no number tells them apart, so the second pass
announces itself: w is handed to f through a node (`_Notice`) that runs in such a pass alone, and
before the input node, because it is connected to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels import choice
from gdeq.fast.recording import recording
from gdeq.gradients import JFB, Gradient, Implicit, refinement, relative
from gdeq.operators import residual_norm, safe_norms
from gdeq.solution import BackwardRecord, Cotangent, Solution
from gdeq.solvers.base import Solver
from gdeq.state import State, StateSpace, VectorMap, full_precision


@dataclass
class _Link:
    """What the nodes around one evaluation of f share.  Must not hold z: that would be a cycle."""

    gradient: Gradient
    solution: Solution = field(init=False)
    of_pass: int = -1  # the backward pass that the following are of
    v: Tensor | None = None  # (batch, d), in units
    w: Tensor | None = None  # (batch, d), in units
    size: Tensor | None = None  # (batch,) ‖v‖, in units
    unit: Tensor | None = None  # (batch,)
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None  # of v and w, not in units
    second_pass: int = -1  # a backward pass that differentiates a gradient

    def leave(self, size: Tensor, unit: Tensor) -> None:  # (batch,), (batch,)
        """Beside v and w, for the input node."""
        self.of_pass, self.size, self.unit = _this_pass(), size / unit, unit
        # A pass that was asked for some gradients alone may never come to the input node.
        _at_the_end_of_this_pass(self.forget)

    @property
    def awaits_product(self) -> bool:
        return self.of_pass == _this_pass() and self.size is not None

    def measure(self, product: Sequence[Tensor], space: StateSpace) -> None:
        """Record the residual that Jᵀw, in the user's terms, says w has."""
        assert self.size is not None
        assert self.unit is not None
        per_unit = 1 / self.unit
        if self.tensors is not None:
            from gdeq.fast.kernels import refinement_parts as fused  # noqa: PLC0415 (needs Triton)

            residual = fused.residual_norms(*self.tensors, product, space, per_unit)
        else:
            assert self.v is not None
            assert self.w is not None
            residual = residual_norm(self.v, self.w, space.join_scaled(product, per_unit))
        record = self.solution.record
        record.measured(relative(residual, self.size))
        if record.length is None and self.w is not None:  # a weight for what was just measured
            length = self.size if self.w is self.v else safe_norms(self.w)[0]
            record.length = length * self.unit
        self.forget()

    def without_product(self, sums: Sequence[Tensor], space: StateSpace) -> list[Tensor]:
        """Of sums that may hold Jᵀw, the rest; with r, whose share makes up for what w lacks."""
        flat = space.join(sums)
        if self.awaits_product:
            assert self.v is not None
            assert self.w is not None
            assert self.unit is not None
            flat = flat + (self.v - self.w) * self.unit.unsqueeze(1)
            self.forget()
        return space.split(flat, space.dtypes)

    def forget(self) -> None:
        self.v = self.w = self.size = self.unit = self.tensors = None


class _Given(torch.autograd.Function):
    """z as f sees it: the input node.

    z* does not depend on z0: gradients are passed on in a second pass alone, and only where z has
    nodes of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, link: _Link, space: StateSpace, *z: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.space = link, space
        # As .data: views of one function could not be changed in place, and f is told that it may
        # not by `VectorMap.leaves`.
        return tuple(leaf.data for leaf in z)

    @staticmethod
    def backward(ctx: Any, *products: Tensor) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        with full_precision(products[0].device):
            if link.second_pass == _this_pass():
                return None, None, None, *link.without_product(products, ctx.space)
            if link.awaits_product:
                link.measure(products, ctx.space)
        return None, None, None, *(None for _ in products)


class _Direct(torch.autograd.Function):
    """z* as a function of the tensors of f(z*) and, where w needs products with J, of those of z.

    Of these only the graph is used, not the values, so no batched vector of them is made.  Without
    such products v is taken as it is, not scaled first: in float32 those with the inverse overflow
    where |v| is beyond 1e35.
    """

    @staticmethod
    def forward(
        ctx: Any,
        link: _Link,
        space: StateSpace,
        z: list[Tensor],
        inside: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.space, ctx.inside = link, space, inside
        ctx.set_materialize_grads(False)
        ctx.dtypes = [leaf.dtype for leaf in tensors[: len(z)]]
        if len(tensors) > len(z):
            ctx.save_for_backward(*tensors)
        return tuple(z)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        link: _Link = ctx.link
        count, tensors = len(arrived), ctx.saved_tensors
        if all(leaf is None for leaf in arrived):  # a pass that ended at the input node before this
            return None, None, None, None, *(None for _ in tensors or arrived)
        again = torch.is_grad_enabled()  # the caller asked for create_graph=True
        if again:
            _check_second_order(link.gradient)
        incoming = _with_zeros(arrived, ctx.space)
        with full_precision(ctx.space.device):
            if not tensors:
                v = ctx.space.join(incoming, _dtype_of_v(ctx, incoming))
                found = link.gradient.cotangent(v, _no_vjp, link.solution)
                given = _to_tensors(ctx, found.w)
            else:
                product = _Product(ctx, tensors[:count], tensors[count:])
                with torch.no_grad():
                    refined = _refined_in_parts(ctx, incoming, product)
                    if refined is not None:
                        found, given = refined
                    else:
                        size, unit, v = _in_units(ctx.space, incoming)
                        found = link.gradient.cotangent(v, product, link.solution)
                        given = _to_tensors(ctx, found.w, unit)
                        if found.length is not None:
                            found.length = found.length * unit
                        link.v, link.w = v, found.w
                        link.leave(size, unit)
                if again and needs_second_order(link.gradient):
                    given = _differentiable(ctx, incoming, product)
            link.solution.record.write(link.gradient, found)
            return None, None, None, None, *given, *(None for _ in tensors[count:])


def _dtype_of_v(ctx: Any, v: Sequence[Tensor]) -> torch.dtype | None:
    """That of the user's tensors where w = −B⁻ᵀv is rounded to it anyway: half the bytes."""
    link: _Link = ctx.link
    dtype, inverse = v[0].dtype, link.solution.inverse
    alike = all(leaf.dtype == dtype for leaf in v) and all(given == dtype for given in ctx.dtypes)
    widens = inverse is not None and inverse.vectors.widens(v[0])
    return dtype if alike and link.gradient.takes_half and widens else None


def _refined_in_parts(
    ctx: Any, v: Sequence[Tensor], product: _Product
) -> tuple[Cotangent, list[Tensor]] | None:
    """What `JFB` refines by kernels that leave v and w in their tensors; None where it does not."""
    link, space, gradient = ctx.link, ctx.space, ctx.link.gradient
    if type(gradient) is not JFB or ctx.inside is not None or choice.chosen(v[0]) != "triton":
        return None  # who derives from it may do more
    from gdeq.fast.kernels import refinement_parts as fused  # noqa: PLC0415 (needs Triton)

    dtypes = [leaf.dtype for leaf in (*v, *product.out, *product.z_in)]
    if not fused.takes(space, dtypes, gradient.refine):
        return None
    size = space.norms(v)
    if size is None:
        (size,) = safe_norms(space.join(v))
    unit = _unit_of(size)
    how = refinement(gradient.refine, link.solution.precision)
    w, error, length = fused.refined(v, product.of_tensors, space, unit, how)
    given = space.in_parts(w)
    link.tensors = v, given
    link.leave(size, unit)
    return Cotangent(w, gradient.refine, error=error, length=length * unit), given


def _in_units(space: StateSpace, v: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """‖v‖, (batch,), a unit of about that length, (batch,), and v in these, (batch, d).

    w is linear in v, and losses come in all sizes.
    """
    size = space.norms(v)
    if size is None:
        flat = space.join(v)
        (size,) = safe_norms(flat)
        unit = _unit_of(size)
        return size, unit, flat * (1 / unit).unsqueeze(1)
    unit = _unit_of(size)
    return size, unit, space.join_scaled(v, 1 / unit)


def _to_tensors(ctx: Any, w: Tensor, unit: Tensor | None = None) -> list[Tensor]:  # (batch, d)
    """A cotangent of f(z) in the user's terms; nothing where f could not be given z."""
    w = w if ctx.inside is None else torch.where(ctx.inside, w, 0.0)
    space: StateSpace = ctx.space
    return space.split(w, ctx.dtypes) if unit is None else space.split_scaled(w, ctx.dtypes, unit)


def _with_zeros(v: Sequence[Tensor | None], space: StateSpace) -> list[Tensor]:
    """v of a loss that may not use all of the state."""
    return [
        torch.zeros(shape, dtype=dtype, device=space.device) if leaf is None else leaf
        for leaf, shape, dtype in zip(v, space.shapes, space.dtypes, strict=True)
    ]


def _differentiable(ctx: Any, incoming: Sequence[Tensor], product: _Product) -> list[Tensor]:
    """The w of this pass in the user's terms, with derivatives in v and all that J depends on.

    w solves w = v + Jᵀw, a fixed point too: it is attached as one.
    """
    link: _Link = ctx.link
    w, unit = link.w, link.unit
    assert w is not None
    assert unit is not None
    assert isinstance(link.gradient, Implicit)
    v = ctx.space.join(incoming) / unit.unsqueeze(1)
    inner = replace(link.gradient, double_backward=False, precondition=False)
    adjoint = DirectEvaluation(StateSpace(w).vectorize(lambda u: v + product(u)), inner)
    adjoint.at([w])
    unseen = replace(link.solution, z=w, inverse=None, record=BackwardRecord())
    attached = adjoint.attach(None, unseen) * unit.unsqueeze(1)
    return list(_Notice.apply(link, *_to_tensors(ctx, attached), *product.z_in))


class _Notice(torch.autograd.Function):
    """w as it is; who differentiates it tells the input node, whose z is an input here for that."""

    @staticmethod
    def forward(ctx: Any, link: _Link, *tensors: Tensor) -> tuple[Tensor, ...]:  # of w, then of z
        ctx.link = link
        ctx.set_materialize_grads(False)
        return tensors[: len(tensors) // 2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("gdeq.Implicit has first and second derivatives, no third")
        ctx.link.second_pass = _this_pass()
        return None, *grads, *(None for _ in grads)


class _Product:
    """u ↦ Jᵀu, by way of the user's tensors; with a graph where autograd is on."""

    def __init__(self, ctx: Any, out: Sequence[Tensor], z_in: Sequence[Tensor]) -> None:
        self.ctx, self.out, self.z_in = ctx, out, z_in

    def __call__(self, u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        product: Tensor = self.ctx.space.join(self.of_tensors(_to_tensors(self.ctx, u)))
        return product

    def narrow(self, u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """The same in the dtype of f, where that is one: it is no better known."""
        parts = self.of_tensors(_to_tensors(self.ctx, u))
        alike = all(part.dtype == parts[0].dtype for part in parts)
        product: Tensor = self.ctx.space.join(parts, parts[0].dtype if alike else None)
        return product

    def of_tensors(self, u: Sequence[Tensor]) -> list[Tensor]:
        """The same from tensors like those of f(z) to tensors like those of z."""
        roots = [(leaf, part) for leaf, part in zip(self.out, u, strict=True) if leaf.requires_grad]
        found = torch.autograd.grad(
            [leaf for leaf, _ in roots],
            self.z_in,
            [part for _, part in roots],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        pairs = zip(found, self.z_in, strict=True)  # f may ignore z
        return [torch.zeros_like(leaf) if part is None else part for part, leaf in pairs]


def _no_vjp(u: Tensor) -> Tensor:
    raise RuntimeError("this gradient method asked for a VJP although its uses_vjp is False")


def _unit_of(size: Tensor) -> Tensor:  # (batch,) -> (batch,)
    """A power of two, whose inverse is a normal number too."""
    size = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    most = math.frexp(torch.finfo(size.dtype).max)[1] - 2
    # One below the exponent: 2¹²⁸ is not a float32.
    exponent = (size.frexp().exponent - 1).clamp(-most, most)
    return torch.ldexp(torch.ones_like(size), exponent)


def _this_pass() -> int:
    return torch._C._current_graph_task_id()


def _at_the_end_of_this_pass(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _check_second_order(gradient: Gradient) -> None:
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


class DirectEvaluation:
    """f, evaluated with autograd at the solution, between the nodes."""

    def __init__(self, f: VectorMap, gradient: Gradient) -> None:
        self.f, self.link = f, _Link(gradient)
        self.z_in: list[Tensor] = []
        self.out: list[Tensor] = []

    def at(self, z: Sequence[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            if self.link.gradient.uses_vjp:
                token = torch.zeros((), device=self.f.space.device, requires_grad=True)
                z = self.z_in = list(_Given.apply(token, self.link, self.f.space, *z))
            self.out = self.f.leaves(z)
        return self.out

    def attach(self, z: Tensor | None, solution: Solution, lend: bool = False) -> State:
        """The solution's z, with gradients to all that f closes over.

        z: (batch, d), the same as a vector; None where that has no more digits.
        lend: in the memory that f's graph and the record read, which nobody may change then.
        """
        if not any(leaf.requires_grad for leaf in self.out):
            return solution.z  # f is a constant: nothing to differentiate
        space, link = self.f.space, self.link
        link.solution = _held(link.gradient, solution)
        leaves = space.leaves(solution.z, "z", cast=False)
        given = [leaf.detach() for leaf in leaves] if lend else space.copies(leaves)
        with torch.enable_grad():
            inside = None if z is None else self.f.inside(z)
            made = _Direct.apply(link, space, given, inside, *self.out, *self.z_in)
        return space.state(made)


def with_first_derivatives(
    f: VectorMap, z: Tensor | None, solution: Solution, gradient: Gradient
) -> list[Tensor]:
    """The tensors of the solution's z, by an evaluation of f of their own: see the second pass.

    z: (batch, d), as in `DirectEvaluation.attach`.
    """
    assert isinstance(gradient, Implicit)
    evaluation = DirectEvaluation(f, replace(gradient, double_backward=False))
    evaluation.at(f.space.leaves(solution.z, "z", cast=False))
    unseen = replace(solution, record=BackwardRecord())
    return f.space.leaves(evaluation.attach(z, unseen, lend=True), "z", cast=False)


def _held(gradient: Gradient, solution: Solution) -> Solution:
    # The graph outlives the step in which it was made: it must not hold a store it does not use.
    if gradient.uses_inverse and solution.secants is None:
        return solution
    return replace(solution, inverse=None)


class LastEvaluation(VectorMap):
    """f at the last iterate of a solve: for the solve its values, and kept with its graph."""

    def __init__(self, f: VectorMap, evaluation: DirectEvaluation) -> None:
        vars(self).update(vars(f))
        self.evaluation = evaluation
        self.wants_inverse = evaluation.link.gradient.uses_inverse
        self.made = False

    def leaves(self, z: Sequence[Tensor]) -> list[Tensor]:
        self.made = True
        # Autocast keeps the half-precision copies of weights that it made without autograd in the
        # solve; used again, they would cut the weights off from their gradients.
        torch.clear_autocast_cache()
        return [leaf.detach() for leaf in self.evaluation.at(z)]


def differentiates_in_the_solve(space: StateSpace, solver: Solver, gradient: Gradient) -> bool:
    """Whether `LastEvaluation` may be used."""
    return solver.tol == 0 and not needs_second_order(gradient) and recording(space.device)


def needs_second_order(gradient: Gradient) -> bool:
    """Whether f is evaluated twice with autograd, for second derivatives."""
    return isinstance(gradient, Implicit) and gradient.double_backward
