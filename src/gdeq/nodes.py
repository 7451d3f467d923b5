"""f with gradients at its fixed point: the nodes that are put around one evaluation of it.

    z* --> [input] --> f --> [output] --> z* again, now with gradients

In the backward pass the output node turns v = ∂ℓ/∂z* into w (`gdeq.gradients`) and hands w to that
evaluation of f, from where PyTorch takes it to everything that f closes over.  On the way the pass
also brings Jᵀw to the input node, where the output node has left v and w:

    r = v − w + Jᵀw = v − (I − Jᵀ) w

is the residual of the adjoint equation, so the error of the gradient is measured in passing.  A w
that needs no product with J (JFB, plain GDEQ) needs no input node.

Both nodes are in the user's terms (`DirectEvaluation`): only what a gradient method works on, v, w
and the products, are batched vectors (and not even these where `JFB` is refined in half precision
on a GPU, `gdeq.kernels.refinement_parts`).  For second derivatives (`Implicit`) r itself is needed:
there the nodes are between batched vectors (`TwiceEvaluation`), and the output node sends v − w to
a node of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdeq.gradients import JFB, Gradient, Implicit, refinement, relative, relative_norm
from gdeq.kernels import choice
from gdeq.operators import residual_norm, safe_norms
from gdeq.recording import recording
from gdeq.solution import BackwardRecord, Cotangent, Solution
from gdeq.solvers.base import Solver
from gdeq.state import State, StateSpace, Vectorized, VectorMap, full_precision


@dataclass
class _Link:
    """What the nodes around one evaluation of f share.  Must not hold z: that would be a cycle."""

    gradient: Gradient
    solution: Solution = field(init=False)
    in_remainder: bool = False  # r is made by autograd, and measured in `_Remainder`
    v: Tensor | None = None  # (batch, d) of the backward pass under way
    w: Tensor | None = None  # (batch, d)
    size: Tensor | None = None  # (batch,) ‖v‖
    unit: Tensor | None = None  # (batch,) of v, w and ‖v‖, where they are not as they came
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None  # of v and w, not in units
    noise: Tensor | None = None  # (batch,) the residual norm that its w leaves behind
    twice: bool = False  # a backward pass was itself differentiated

    @property
    def awaits_product(self) -> bool:
        joined = self.v is not None and self.w is not None
        return (joined or self.tensors is not None) and self.size is not None

    def measure(self, product: Tensor) -> None:  # (batch, d)
        """Record the residual that Jᵀw says w has, once."""
        assert self.v is not None
        assert self.w is not None
        self._measured(residual_norm(self.v, self.w, product))

    def measure_tensors(self, product: Sequence[Tensor], space: StateSpace) -> None:
        """The same where v and w are tensors."""
        from gdeq.kernels import refinement_parts as fused  # noqa: PLC0415 (needs Triton)

        assert self.tensors is not None
        assert self.unit is not None
        self._measured(fused.residual_norms(*self.tensors, product, space, 1 / self.unit))

    def _measured(self, residual: Tensor) -> None:  # (batch,)
        assert self.size is not None
        _record(self.solution, relative(residual, self.size))
        self.forget()

    def forget(self) -> None:
        self.v = self.w = self.size = self.unit = self.tensors = None


class _Given(torch.autograd.Function):
    """z as f sees it.  Takes gradients but passes none on: z* does not depend on z0."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, link: _Link, space: StateSpace, *z: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.space = link, space
        # As .data: views of one function could not be changed in place, and f is told that it may
        # not by `VectorMap.leaves`.
        return tuple(leaf.data for leaf in z)

    @staticmethod
    def backward(ctx: Any, *products: Tensor) -> tuple[None, ...]:
        link: _Link = ctx.link
        if link.awaits_product:
            with full_precision(products[0].device):
                assert link.unit is not None
                if link.tensors is None:
                    link.measure(ctx.space.join_scaled(products, 1 / link.unit))
                else:
                    link.measure_tensors(products, ctx.space)
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
        ctx.dtypes = [leaf.dtype for leaf in tensors[: len(z)]]
        if len(tensors) > len(z):
            ctx.save_for_backward(*tensors)
        return tuple(z)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        link: _Link = ctx.link
        if torch.is_grad_enabled():  # the caller asked for create_graph=True
            _check_second_order(link.gradient)
        count, tensors = len(incoming), ctx.saved_tensors
        with full_precision(incoming[0].device):
            if not tensors:
                v = ctx.space.join(incoming, _dtype_of_v(ctx, incoming))
                found = link.gradient.cotangent(v, _no_vjp, link.solution)
                given = _to_tensors(ctx, found.w)
            else:
                with torch.no_grad():
                    product = _Product(ctx, tensors[:count], tensors[count:])
                    refined = _refined_in_parts(ctx, incoming, product)
                    if refined is not None:
                        found, given = refined
                    else:
                        size, unit, v = _in_units(ctx.space, incoming)
                        found = link.gradient.cotangent(v, product, link.solution)
                        given = _to_tensors(ctx, found.w, unit)
                        link.v, link.w, link.size, link.unit = v, found.w, size / unit, unit
                # A pass that was asked for some gradients alone may never come to the input node.
                _at_the_end_of_this_pass(link.forget)
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
    from gdeq.kernels import refinement_parts as fused  # noqa: PLC0415 (needs Triton)

    dtypes = [leaf.dtype for leaf in (*v, *product.out, *product.z_in)]
    if not fused.takes(space, dtypes, gradient.refine):
        return None
    size = space.norms(v)
    if size is None:
        (size,) = safe_norms(space.join(v))
    unit = _unit_of(size)
    how = refinement(gradient.refine, link.solution.precision)
    w, error = fused.refined(v, product.of_tensors, space, unit, how)
    given = space.in_parts(w)
    link.tensors, link.size, link.unit = (v, given), size / unit, unit
    return Cotangent(w, gradient.refine, error=error), given


def _in_units(space: StateSpace, v: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """‖v‖, (batch,), a unit of about that length, (batch,), and v in these, (batch, d).

    See `_scaled_cotangent`.
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


class _Product:
    """u ↦ Jᵀu, by way of the user's tensors."""

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
            allow_unused=True,
        )
        pairs = zip(found, self.z_in, strict=True)  # f may ignore z
        return [torch.zeros_like(leaf) if part is None else part for part, leaf in pairs]


class _Input(torch.autograd.Function):
    """`_Given` as one batched vector."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, z: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, product: Tensor) -> tuple[None, None, None]:
        link: _Link = ctx.link
        if link.awaits_product:
            with full_precision(product.device):
                link.measure(product)
        return None, None, None


class _Output(torch.autograd.Function):
    """`_Direct` between batched vectors, and with second derivatives."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, out: Tensor, z_in: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        ctx.save_for_backward(out, z_in)
        return z.clone()  # the user may change it in place; f's graph and the record hold z

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        link: _Link = ctx.link
        again = torch.is_grad_enabled()  # the caller asked for create_graph=True
        if again:
            _check_second_order(link.gradient)
            link.twice = True
        out, z_in = ctx.saved_tensors
        with full_precision(v.device):
            with torch.no_grad():
                found = _scaled_cotangent(link, v, _vjp(out, z_in))
            link.solution.record.write(link.gradient, found)
            link.v, w = v.detach(), found.w
            if not link.in_remainder:
                link.w = w
                # A pass that was asked for some gradients alone may never come to the input node.
                _at_the_end_of_this_pass(link.forget)
                return None, w, None, None
            link.noise = _noise(link, found, link.v)
            if again:
                # w solves w = v + Jᵀw, a fixed point too: attach it as one, and it has derivatives.
                assert isinstance(link.gradient, Implicit)
                inner = replace(link.gradient, double_backward=False, precondition=False)
                product = _vjp(out, z_in, create_graph=True)
                unseen = replace(link.solution, inverse=None, record=BackwardRecord())
                adjoint = TwiceEvaluation(lambda u: v + product(u), inner)
                adjoint.at(w)
                w = adjoint.attach(w, unseen)
            return None, w, v - w, None


class _Remainder(torch.autograd.Function):
    """z* as f's input when second derivatives are wanted: a fixed point itself.

    What arrives here is the residual of the output node's w plus, in the second of two backward
    passes, the dependence of the first gradient on z*.  Only the latter is passed on, through an
    evaluation of f of its own: the other one's graph may be freed by now.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, out: Tensor, z_in: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        ctx.save_for_backward(out, z_in)
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, r: Tensor) -> tuple[Any, ...]:
        link: _Link = ctx.link
        (noise, v), link.noise, link.v = (link.noise, link.v), None, None
        with full_precision(r.device):
            if noise is not None and v is not None:  # the output node ran in this pass too
                if not link.twice:  # then there is nothing but that residual
                    _measure(link.solution, r, v)
                    return None, None, None, None
                if torch.is_grad_enabled():  # the first of two passes, or a third derivative
                    matters = safe_norms(r)[0] > 10 * noise
                    if not bool(matters.any()):
                        _measure(link.solution, r, v)
                        return None, None, None, None
                # Else all of r goes on: for its residual part that is a refinement of w.
            if torch.is_grad_enabled():
                raise RuntimeError("gdeq.Implicit has first and second derivatives, no third")
            out, z_in = ctx.saved_tensors
            w = _scaled_cotangent(link, r, _vjp(out, z_in)).w
            return None, w, None, None


def _vjp(out: Tensor, z_in: Tensor, create_graph: bool = False) -> Vectorized:
    """u ↦ Jᵀu through the graph that leads from z_in to out."""

    def product(u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        (found,) = torch.autograd.grad(
            out, z_in, u, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return torch.zeros_like(u) if found is None else found  # f may ignore z

    return product


def _no_vjp(u: Tensor) -> Tensor:
    raise RuntimeError("this gradient method asked for a VJP although its uses_vjp is False")


def _scaled_cotangent(link: _Link, v: Tensor, vjp: Vectorized) -> Cotangent:
    """w for v, by way of a v of length about one: w is linear in v, and losses come in all sizes.

    The unit is a power of two, so that nothing is rounded.
    """
    (link.size,) = safe_norms(v)
    unit = _unit_of(link.size).unsqueeze(1)
    found = link.gradient.cotangent(v / unit, vjp, link.solution)
    found.w = found.w * unit
    return found


def _unit_of(size: Tensor) -> Tensor:  # (batch,) -> (batch,)
    """A power of two, whose inverse is a normal number too."""
    size = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    most = math.frexp(torch.finfo(size.dtype).max)[1] - 2
    # One below the exponent: 2¹²⁸ is not a float32.
    exponent = (size.frexp().exponent - 1).clamp(-most, most)
    return torch.ldexp(torch.ones_like(size), exponent)


def _noise(link: _Link, found: Cotangent, v: Tensor) -> Tensor | None:  # -> (batch,)
    """The norm of the residual that this w leaves, rounding included."""
    if found.residual is None:
        return None
    eps = max(torch.finfo(v.dtype).eps, link.solution.precision)
    size, reached = safe_norms(v, found.w)
    return found.residual * size + 10 * eps * (size + reached)


def _measure(solution: Solution, r: Tensor, v: Tensor) -> None:
    """Record what the pass through f says the residual is: r = v − (I − Jᵀ)w."""
    _record(solution, relative_norm(r, v))


def _record(solution: Solution, residual: Tensor) -> None:  # (batch,)
    solution.record.measured(residual, slack=10 * solution.precision)


def _at_the_end_of_this_pass(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _check_second_order(gradient: Gradient) -> None:
    if gradient.second_order:
        return
    if isinstance(gradient, Implicit):
        raise RuntimeError(
            "this Implicit was made with double_backward=False, or a third derivative was asked "
            "for; use gdeq.Implicit() for second derivatives"
        )
    raise RuntimeError(
        f"{type(gradient).__name__} is an approximate gradient without a derivative of its own; "
        "for create_graph=True (double backward) use gdeq.Implicit(), JFB() or Unrolled()"
    )


class TwiceEvaluation:
    """`DirectEvaluation` between batched vectors, for second derivatives."""

    def __init__(self, f: Vectorized, gradient: Gradient) -> None:
        self.f, self.link = f, _Link(gradient)
        self.z_in: Tensor | None = None
        self.out: Tensor | None = None

    def at(self, z: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        with torch.enable_grad():
            token = torch.zeros((), device=z.device, requires_grad=True)
            self.z_in = _Input.apply(token, z, self.link)
            self.out = self.f(self.z_in)
        return self.out

    def attach(self, z: Tensor, solution: Solution) -> Tensor:
        """z, with gradients to all that f closes over.  z: (batch, d), a fixed point of f."""
        link, out, z_in = self.link, self.out, self.z_in
        assert out is not None
        assert z_in is not None
        link.solution = _held(link.gradient, solution)
        if not out.requires_grad:
            return z  # f is a constant: nothing to differentiate
        with torch.enable_grad():
            if needs_second_order(link.gradient):
                link.in_remainder = True
                z_in = _Remainder.apply(z, out, z_in, link)
                out = self.f(z_in)
            return _Output.apply(z, out, z_in, link)


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


def _held(gradient: Gradient, solution: Solution) -> Solution:
    # The graph outlives the step in which it was made: it must not hold a store it does not use.
    return solution if gradient.uses_inverse else replace(solution, inverse=None)


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
