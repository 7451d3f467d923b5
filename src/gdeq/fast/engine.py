"""The fast engine: solves from their steps, in kernels; refinements in two passes over memory.

It stands in for `gdeq.engine.Reference` where it can and is that engine elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq import second_order
from gdeq.context import held_module, host_may_look
from gdeq.engine import (
    Adjoint,
    Evaluation,
    Found,
    Link,
    Reference,
    TensorVJP,
    VectorAdjoint,
    power_of_two,
    wants_secants,
)
from gdeq.fast import product
from gdeq.fast.half_weights import HalfWeights
from gdeq.fast.kernels import available, inverse, jfb, lengths, refinement
from gdeq.fast.kernels.device import MOST_SAMPLES
from gdeq.fast.kernels.sweep import Sweep
from gdeq.fast.layout import FastSpace, PartsMap
from gdeq.fast.maps import FastMap
from gdeq.fast.product import ProductInverse, Settled, Start
from gdeq.gradients import GDEQ, JFB, Gradient
from gdeq.loop import Iterates, judged_sizes
from gdeq.operators import relative, safe_norms
from gdeq.refinement import LONGEST, Refinement
from gdeq.solution import Cotangent
from gdeq.solvers.base import Solver, System
from gdeq.state import State, StateMap, Vectorized, full_precision

__all__ = ["FAST", "FastEngine", "available"]


class FastEngine(Reference):
    """The same solves and gradients in fewer passes over memory."""

    sweep: Callable[..., product.Sweep] = Sweep

    # ---- the forward solve

    def solve(self, f: StateMap, z0: State, solver: Solver, gradient: Gradient | None) -> Found:
        space = FastSpace(z0)
        known = f.f if isinstance(f.f, FastMap) else FastMap(f.f)
        # Before autocast is switched off: what is made here knows how f is called.
        in_parts = PartsMap(space, f.f)
        at_start = PartsMap(space, known.at_start) if known.at_start else None
        start = self._start(in_parts, solver, gradient)
        if start is None:
            return super().solve(in_parts, z0, solver, gradient)
        with torch.no_grad(), full_precision(space.device):
            self._place(start, z0, space, known.lends)
            found, last = self._sweep(in_parts, at_start, start, gradient)
            inside = None if found.z is None else in_parts.inside(found.z)
            z, output = self._state(found, space), None
            if known.lends:
                output = [leaf.detach() for leaf in space.leaves(z, "z", cast=False)]
        return Found(self.solution(found, z, in_parts), space, found.z, inside, output, last)

    def _start(self, f: PartsMap, solver: Solver, gradient: Gradient | None) -> Start | None:
        """What a sweep is to do; None where it cannot stand in for the loop."""
        space = f.space
        sizes = [space.size] if f.parts_dtype is None else space.sizes
        judged = judged_sizes(solver.stop, space.sizes)
        possible = product.takes(solver, solver.max_iter) and space.size > 0
        possible = possible and 0 < space.batch <= MOST_SAMPLES
        if not possible or len(judged) > min(len(sizes), product.MOST_PARTS):
            return None
        precision = f.precision
        return Start(
            solver=solver,
            precision=precision,
            max_steps=solver.max_iter,
            sizes=sizes,
            batch=space.batch,
            device=space.device,
            dtype=space.dtype,
            given_dtype=f.parts_dtype or space.dtype,
            keep_secants=wants_secants(gradient, precision),
        )

    def _place(self, start: Start, z0: State, space: FastSpace, lends: bool) -> None:
        """z0 as the sweep begins with it, in memory that f does not write to."""
        if not start.rounds_z:
            start.z = space.pack(z0).detach()
            return
        leaves = space.leaves(z0, "z0", cast=False)
        parts = space.as_parts(leaves).detach()
        ours = lends or parts.data_ptr() != leaves[0].data_ptr()
        start.parts = parts if ours else parts.clone()

    def _state(self, found: Settled, space: FastSpace) -> State:
        if found.parts is not None:
            return space.state(space.in_parts(found.parts))
        assert found.z is not None
        return space.unpack(found.z)

    def _sweep(
        self, f: PartsMap, at_start: PartsMap | None, start: Start, gradient: Gradient | None
    ) -> tuple[Settled, Evaluation | None]:
        """What is found, and f's graph at it where that was made on the way."""
        space, in_parts = f.space, f.parts_dtype is not None
        last = None
        if in_parts and gradient is not None and self._differentiates_at_the_end(start, gradient):
            last = Evaluation(f, Link(gradient, self))
        inverts = last is None or last.link.gradient.needs.inverse
        sweep: Any = self.sweep(start, inverts=inverts)
        plain = not isinstance(f.f, FastMap)  # it calls its modules
        weights = HalfWeights(held_module() if plain else None, f.autocast_dtype)

        def evaluate(g: PartsMap = f) -> Tensor:  # -> (batch·d,)
            with weights.used():
                return g.on_parts(sweep.parts) if in_parts else g(sweep.z).reshape(-1)

        def with_graph() -> Tensor:  # -> (batch·d,)
            assert last is not None
            made = last.at(space.in_parts(sweep.parts))
            return space.as_parts([leaf.detach() for leaf in made])

        found = product.iterate(
            sweep,
            evaluate,
            at_start=(lambda: evaluate(at_start)) if at_start else None,
            at_end=with_graph if last else None,
        )
        return found, last

    def _differentiates_at_the_end(self, start: Start, gradient: Gradient) -> bool:
        """Whether f is differentiated at the last iterate, during the solve.

        With ``tol=0`` that is known beforehand, and one evaluation is saved.  A sample for which f
        was not finite before has been taken back to the iterate that is returned; where f is not
        finite at the very last one, neither is its gradient.  Not where the host may look: there f
        is evaluated once more, at what is returned.
        """
        fixed = start.solver.tol == 0 and not host_may_look(start.device)
        return fixed and not second_order.needed(gradient)

    # ---- the adjoint equation

    def iterate(self, f: Vectorized, z: Tensor, solver: Solver, system: System) -> Iterates:
        batch, d = z.shape
        possible = product.takes(solver, solver.max_iter) and z.numel() > 0
        if system.inverse is not None or not possible or batch > MOST_SAMPLES:
            return super().iterate(f, z, solver, system)
        start = Start(
            solver=solver,
            precision=system.precision,
            max_steps=solver.max_iter,
            sizes=[d],
            batch=batch,
            device=z.device,
            dtype=z.dtype,
            given_dtype=z.dtype,
            z=z,
            scale=None if system.right is None else safe_norms(system.right)[0],
        )
        sweep: Any = self.sweep(start)
        return product.iterate(sweep, lambda: f(sweep.z).reshape(-1))

    def adjoint(
        self, gradient: Gradient, v: Sequence[Tensor], vjp: TensorVJP, found: Found
    ) -> Adjoint:
        # By the very class: one that is derived from it may do more.
        fused = FUSED.get(type(gradient))
        if fused is not None and not torch.is_grad_enabled():
            made = fused(self, gradient, v, vjp, found)
            if made is not None:
                return made
        return super().adjoint(gradient, v, vjp, found)

    def norm(self, v: Sequence[Tensor], space: Any) -> Tensor:  # -> (batch,)
        found = space.norms(v) if isinstance(space, FastSpace) else None
        if found is not None:
            return found
        flat = space.join(v)
        return lengths.norms(flat) if lengths.takes(flat) else safe_norms(flat)[0]

    def residual_norm(self, v: Tensor, w: Tensor, product: Tensor) -> Tensor:  # (batch, d) each
        if all(lengths.takes(x) for x in (v, w, product)):
            return lengths.residual_norms(v, w, product)
        return super().residual_norm(v, w, product)


@dataclass
class TensorAdjoint(Adjoint):
    """w in the tensors of the state as they lie; no batched vector was made."""

    space: FastSpace
    v: Sequence[Tensor]
    size: Tensor  # (batch,) ‖v‖
    unit: Tensor  # (batch,) of about that

    def residual(self, product: Sequence[Tensor]) -> Tensor:  # -> (batch,)
        per_unit = 1 / self.unit
        found = jfb.residual_norms(self.v, self.w, product, self.space, per_unit)
        return relative(found, self.size * per_unit)

    def length(self) -> Tensor:  # -> (batch,)
        assert self.report.length is not None
        return self.report.length


def _jfb(
    engine: FastEngine, gradient: Any, v: Sequence[Tensor], vjp: TensorVJP, found: Found
) -> Adjoint | None:
    """`JFB(refine=k)` in bfloat16."""
    space, inside = found.space, found.inside
    if not vjp.usable or inside is not None or not isinstance(space, FastSpace):
        return None
    dtypes = [leaf.dtype for leaf in v] + vjp.dtypes + space.dtypes
    if not jfb.takes(space, dtypes, gradient.refine):
        return None
    size = engine.norm(v, space)
    unit = power_of_two(size)
    how = Refinement(gradient.refine, found.solution.precision)
    report = jfb.refined(v, vjp, space, unit, how)
    assert report.length is not None
    report.length = report.length * unit
    return TensorAdjoint(space.in_parts(report.w), report, space, v, size, unit)


def _gdeq(
    engine: FastEngine, gradient: Any, v: Sequence[Tensor], vjp: TensorVJP, found: Found
) -> Adjoint | None:
    """`GDEQ()` and `GDEQ(refine=k)` with the inverse of a sweep."""
    solution, space = found.solution, found.space
    known = None if solution.inverse is None else solution.inverse.vectors
    if not isinstance(known, ProductInverse) or solution.secants is not None:
        return None
    if found.inside is not None or not product.in_kernels(known.gram):
        return None
    if not vjp.usable:
        # In the dtype of the user's tensors, if they have one: w is rounded to it anyway.
        dtypes = {leaf.dtype for leaf in v} | set(vjp.dtypes)
        flat = space.join(v, next(iter(dtypes)) if len(dtypes) == 1 else None)
        report = Cotangent(known.T.negative_matvec(flat), 0)
        return Adjoint(space.split(report.w, vjp.dtypes), report)
    if not gradient.refine or space.dtype != known.gram.dtype:
        return None
    if known.steps.shape[1] + gradient.refine > refinement.MOST_VECTORS:
        return None
    size = engine.norm(v, space)
    unit = power_of_two(size)
    flat = space.join(v, factor=1 / unit)

    def product_with(u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """In the dtype of f, where that is one: it is no better known."""
        made = vjp(space.split(u, vjp.dtypes))
        alike = all(leaf.dtype == made[0].dtype for leaf in made)
        return space.join(made, made[0].dtype if alike else None)

    w, mask = inverse.trusted(known.T, flat, LONGEST)
    how = Refinement(gradient.refine, solution.precision)
    report = refinement.refined(known.T.only(mask), w, flat, product_with, how)
    assert report.length is not None
    report.length = report.length * unit
    tensors = space.split(report.w, vjp.dtypes, factor=unit)
    return VectorAdjoint(tensors, report, engine, space, flat, size / unit, unit)


FUSED: dict[type, Callable[..., Adjoint | None]] = {JFB: _jfb, GDEQ: _gdeq}
FAST = FastEngine()
