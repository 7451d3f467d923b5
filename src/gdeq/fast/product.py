"""Broyden's method from its steps alone: `gdeq.solvers.broyden` in half the memory.

(And Anderson's, in the same store and by the same passes: `gdeq.fast.anderson_steps`.)

Read `gdeq.solvers.broyden` and `gdeq.solve` first; this computes the same iterates, verdicts and
inverse up to rounding (tests/test_product.py holds the two together; what a solve learns from its
last steps at the rounding level is rounding in both).  It is used on a GPU, where the time of a
solver is that of its passes over memory.

With full steps s_t = −B_t⁻¹g_t, write q = −B_t⁻¹g_{t+1}.  Then B_t⁻¹y = s_t − q, the update is

    B_{t+1}⁻¹ = (I + q s_tᵀ / (‖s_t‖² − s_tᵀq)) B_t⁻¹,

and the next step is s_{t+1} = −B_{t+1}⁻¹g_{t+1} = q ‖s_t‖² / (‖s_t‖² − s_tᵀq), a multiple of q.  So

    B_{t+1}⁻¹ = (I + s_{t+1}s_tᵀ / ‖s_t‖²) B_t⁻¹:

the steps are all that must be kept.  Applied one factor after the other that would read the store
once for each; but the inner products that the factors need follow from those of the vector with
the steps, a_j = s_jᵀx, and from the Gram matrix G of the steps:

    −B_t⁻¹x  = x + Σ_j d_{j+1} s_{j+1},   d_{j+1} = (a_j + Σ_{l≤j} G_{jl} d_l) / G_jj,   d_0 = 0
    −B_t⁻ᵀx = x + Σ_j e_j s_j,           e_j = (a_{j+1} + Σ_{l>j} G_{j+1,l} e_l) / G_jj

One pass over the store gives all a_j, and the new row of G with them; a recurrence over a few
numbers gives the weights; a second pass combines.  A factor that was skipped (a denominator or a
change of g that is only rounding) has ``keep`` false and weight 0.

Where f computes in half precision, steps are rounded before they are kept (`store_dtype`), to 8
bits where the solver says so (`gdeq.fast.eight_bits`).  The step that is taken is the rounded one,
so z and the store belong together; the inverse meets its newest secant equation B⁻¹y = s up to what
was rounded off, s' − s, over the factor by which s is longer than q.

Where f takes and returns bfloat16 and the number of steps is fixed (tol=0), z itself is kept as f
is given it (`rounds_z`): a float32 z of which f sees eight bits makes g no better known.  Then z
moves by the step and a rounding of z, up to 2⁻⁹ of it: y has that much more noise, about a sixth of
what counts as seen (`noise_level`).

Limits: full steps, and a store of all of them.  A bounded memory drops the oldest *term* of a sum,
for which there is no counterpart in a product, so there the plain form is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gdeq.fast.eight_bits import BLOCK, Scales, chunks_of, in_full, rounded_to_eight_bits
from gdeq.fast.kernels import choice
from gdeq.fast.recording import current, recording, rehearsing
from gdeq.ledger import Ledger, Norms, judged_sizes, least_part, norms_of
from gdeq.narrowing import Samples, first_active
from gdeq.operators import Inverse, Refinement, norm, safe_norms
from gdeq.secants import Secants
from gdeq.solution import Status
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import Solver, noise_level
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, Vectorized, VectorMap

if TYPE_CHECKING:
    from gdeq.nodes import LastEvaluation

MOST_DIFFERENCES = 16  # of Anderson's method, whose system one program holds in registers
MOST_PARTS = 16  # that are judged one by one
MOST_STEPS = 127  # what the recurrence of one program holds in registers
MOST_SAMPLES = 65535  # of a grid's second dimension


@dataclass(frozen=True)
class ProductInverse(Inverse):
    """B⁻¹ = −Π_j (I + s_{j+1}s_jᵀ/‖s_j‖²) over the factors that are kept, the newest leftmost."""

    steps: Tensor  # (batch, rank + 1, d)
    gram: Tensor  # (batch, places, places), places > rank
    keep: Tensor  # (batch, places) bool
    transposed: bool = False
    scales: Scales | None = None  # of a store in 8 bits
    at: Tensor | None = None  # (batch,) which of the steps is the next one from z

    @property
    def rank(self) -> int:
        return self.steps.shape[1] - 1

    @property
    def T(self) -> ProductInverse:
        return replace(self, transposed=not self.transposed)

    def matvec(self, x: Tensor) -> Tensor:
        return self._apply(x, negative=False)

    def negative_matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """−B⁻¹x, the sign at no cost: w = −B⁻ᵀv is ``inverse.T.negative_matvec(v)``."""
        return self._apply(x, negative=True)

    def trusted(self, x: Tensor, longest: float) -> tuple[Tensor, Inverse]:
        if not _in_kernels(x) or not self.transposed or torch.is_grad_enabled():
            return super().trusted(x, longest)
        from gdeq.fast.kernels import product_apply as fused  # noqa: PLC0415 (needs Triton)

        product, mask = fused.trusted(self.steps, self.gram, self.keep, x, self.scales, longest)
        return product, self.only(mask)

    def only(self, mask: Tensor) -> ProductInverse:
        return replace(self, keep=self.keep & mask.unsqueeze(1))

    def step_length(self) -> Tensor | None:
        if self.at is None:
            return None
        rows, scales = torch.arange(len(self.steps), device=self.at.device), self.scales
        if scales is not None:
            scales = replace(scales, values=scales.values[rows, self.at].unsqueeze(1))
        step = in_full(self.steps[rows, self.at].unsqueeze(1), scales, self.gram.dtype)
        return safe_norms(step.squeeze(1))[0]

    def widens(self, x: Tensor) -> bool:
        return _in_kernels(x) and not torch.is_grad_enabled()

    def refined(
        self, w: Tensor, v: Tensor, vjp: Vectorized, how: Refinement
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        # The kernels are of the one form that GDEQ asks for, and have no derivative.
        of_the_kind = self.transposed and v.dtype == w.dtype == self.gram.dtype
        if not _in_kernels(v) or not of_the_kind or torch.is_grad_enabled():
            return None
        from gdeq.fast.kernels import refinement as fused  # noqa: PLC0415 (needs Triton)

        if self.steps.shape[1] + how.times > fused.MOST_VECTORS:
            return None
        return fused.refined(self.steps, self.gram, self.keep, self.scales, w, v, vjp, how)

    def _apply(self, x: Tensor, negative: bool) -> Tensor:
        differentiable = x.requires_grad and torch.is_grad_enabled()
        if _in_kernels(x) and not differentiable:
            from gdeq.fast.kernels import product_apply as fused  # noqa: PLC0415 (needs Triton)

            return fused.apply(
                self.steps, self.gram, self.keep, x, self.transposed, negative, self.scales
            )
        steps = in_full(self.steps, self.scales, x.dtype)
        # A step that no factor uses may hold anything, infinity too.
        used = self.keep[:, : self.rank]
        of_one = torch.nn.functional.pad(used, (0, 1)) | torch.nn.functional.pad(used, (1, 0))
        steps = steps.masked_fill(~of_one.unsqueeze(2), 0.0)
        dots = torch.einsum("bjd,bd->bj", steps, x)
        weigh = transposed_weights if self.transposed else weights
        coefficients = weigh(dots, self.gram, self.keep)
        product = x + torch.einsum("bj,bjd->bd", coefficients, steps)
        return product if negative else -product

    def as_matrix(self) -> Tensor:
        batch, _, d = self.steps.shape
        eye = torch.eye(d, dtype=self.gram.dtype, device=self.gram.device)
        columns = [self.matvec(column.expand(batch, d).contiguous()) for column in eye]
        return torch.stack(columns, dim=2)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (self.steps,) if self.scales is None else (self.steps, self.scales.values)


def no_inverse(x: Tensor) -> ProductInverse:  # (batch, d)
    """−I for vectors like this one: no factor, and the one step that a store must have is zero."""
    batch, d = x.shape
    keep = torch.zeros(batch, 1, dtype=torch.bool, device=x.device)
    step = x.new_zeros(1, 1, d, dtype=torch.bfloat16).expand(batch, 1, d)  # one for all
    return ProductInverse(step, x.new_zeros(batch, 1, 1), keep)


class Settled(NamedTuple):
    """What a sweep has found for each sample."""

    z: Tensor | None  # (batch, d); None where it is in parts alone
    parts: Tensor | None  # (batch·d,) the same in parts, where that is at hand
    residual: Tensor  # (batch,)
    steps: Tensor  # (batch,)
    codes: Tensor  # (batch,)
    inverse: ProductInverse | None  # as it was at z, if the method has one
    of_parts: Tensor | None  # (batch, parts) residuals, where they are judged one by one
    secants: Secants | None = None  # if asked for


def weights(dots: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """d of −B⁻¹x = x + Σ d_j s_j.  dots: (batch, n), gram: (batch, ≥n, ≥n) -> (batch, n)"""
    found = torch.zeros_like(dots)
    for j in range(dots.shape[1] - 1):
        inner = dots[:, j] + _sum_used(gram[:, j, : j + 1], found[:, : j + 1])
        found[:, j + 1] = _over_used(inner, gram[:, j, j], keep[:, j])
    return found


def transposed_weights(dots: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """e of −B⁻ᵀx = x + Σ e_j s_j.  dots: (batch, n), gram: (batch, ≥n, ≥n) -> (batch, n)"""
    found = torch.zeros_like(dots)
    n = dots.shape[1]
    for j in range(n - 2, -1, -1):
        inner = dots[:, j + 1] + _sum_used(gram[:, j + 1, j + 1 : n], found[:, j + 1 :])
        found[:, j] = _over_used(inner, gram[:, j, j], keep[:, j])
    return found


def _sum_used(row: Tensor, weight: Tensor) -> Tensor:  # (batch, n), (batch, n) -> (batch,)
    return torch.where(weight != 0, row * weight, 0.0).sum(1)


def _over_used(inner: Tensor, squared: Tensor, kept: Tensor) -> Tensor:  # (batch,) each
    # Not divided by a 0 that is not used: autograd would make a NaN of it.
    return torch.where(kept, inner / torch.where(kept, squared, 1.0), 0.0)


def _in_kernels(x: Tensor) -> bool:  # (batch, d)
    return choice.chosen(x) == "triton" and len(x) <= MOST_SAMPLES


def applies(solver: Solver, z: Tensor, max_steps: int, inverse: Inverse | None) -> bool:
    """Whether `iterate` here can stand in for the one in `gdeq.solve`."""
    return (
        inverse is None
        and takes(solver, max_steps)
        and max_steps <= MOST_STEPS
        and z.numel() > 0
        and choice.chosen(z) != "off"
        and (choice.chosen(z) != "triton" or _in_kernels(z))
    )


def judges(f: Vectorized, sizes: list[int]) -> bool:
    """Whether it can also judge parts of these sizes one by one: few, in an order of their own."""
    in_parts = isinstance(f, VectorMap) and f.parts_dtype is not None
    return len(sizes) == 1 or (in_parts and len(sizes) <= MOST_PARTS)


def takes(solver: Solver, max_steps: int) -> bool:
    """Whether the method can be told by its steps."""
    return _whole_broyden(solver, max_steps) or short_anderson(solver)


def _whole_broyden(solver: Solver, max_steps: int) -> bool:
    return (
        type(solver) is Broyden
        and solver.max_step is None
        and solver.line_search == 0
        and (solver.memory is None or solver.memory >= max_steps)
    )


def short_anderson(solver: Solver) -> bool:
    return type(solver) is Anderson and solver.memory <= MOST_DIFFERENCES


def in_eight_bits(solver: Solver) -> bool:
    return isinstance(solver, Broyden) and solver.step_bits == 8


def store_dtype(z: Tensor, precision: float, eight_bits: bool = False) -> torch.dtype:
    """For an f in half precision bfloat16, which has the range of z.

    Steps of a bfloat16 f are known to no more digits.  Those of a float16 f are, to three bits
    more, which neither the solve nor the gradient missed on tanh maps (tests/test_product.py).
    """
    if z.dtype != torch.float32 or precision < torch.finfo(torch.float16).eps:
        return z.dtype
    return torch.int8 if eight_bits else torch.bfloat16


def rounds_z(solver: Solver, dtype: torch.dtype) -> bool:
    """Whether each z is rounded to the dtype that f is given.

    Not with a tolerance: that may be below the rounding of two bfloat16, z and f(z).  Nor where
    steps are damped: those below the rounding of z would be lost, which else add up.
    """
    damped = isinstance(solver, Anderson) and solver.mixing != 1
    return solver.tol == 0 and dtype == torch.bfloat16 and not damped


def nowhere(batch: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(batch, d) without memory, for a z that is in parts alone."""
    return torch.empty((), dtype=dtype, device=device).expand(batch, d)


def start_in_parts(
    f: VectorMap, z0: State, solver: Solver, share: bool
) -> Tensor | None:  # (batch·d,)
    """z0 as f is given it, where a solve keeps z in no other form: no vector is made of it.

    share: where it can, in the memory of z0, which the solve only reads; f must not write there.
    """
    space, dtype = f.space, f.parts_dtype
    z = nowhere(space.batch, space.size, space.dtype, space.device)
    if choice.chosen(z) != "triton" or not applies(solver, z, solver.max_iter, None):
        return None
    from gdeq.fast.kernels import product as fused  # noqa: PLC0415 (needs Triton)

    if dtype is None or not fused.in_parts_alone(solver, z, dtype, space.precision()):
        return None
    if not judges(f, judged_sizes(solver.stop, space.sizes)):
        return None
    leaves = space.leaves(z0, "z0", cast=False)
    parts = space.as_parts(leaves).detach()
    ours = share or parts.data_ptr() != leaves[0].data_ptr()
    return parts if ours else parts.clone()


def iterate(
    f: Vectorized,
    z: Tensor,  # (batch, d)
    solver: Solver,
    precision: float,
    max_steps: int,
    right: Tensor | None,  # (batch, d)
    last: LastEvaluation | None = None,
    first: VectorMap | None = None,
    parts: Tensor | None = None,  # (batch·d,)
    keep_secants: bool = False,
) -> tuple[Any, ...]:
    """The fields of `gdeq.solve.Iterates`, except the solver's state.  z may be in parts alone.

    parts: where the solve begins, of `start_in_parts`; z is then `nowhere`.
    last: f once more, called in its place at the iterate that is known to be the last (tol=0), and
        with the z that is returned for a sample that stopped before.
    first: f once more, called in its place at the z given.
    """
    in_parts = isinstance(f, VectorMap) and f.parts_dtype is not None
    sizes = f.space.sizes if isinstance(f, VectorMap) and in_parts else [z.shape[1]]
    dtype = f.parts_dtype if isinstance(f, VectorMap) and in_parts else z.dtype
    scale = None if right is None else safe_norms(right)[0]
    kind: Any = PlainSweep
    if choice.chosen(z) == "triton":
        from gdeq.fast.kernels import product as fused  # noqa: PLC0415 (needs Triton)

        wanted = last is None or last.wants_inverse
        kind = partial(fused.Sweep, parts=parts, inverts=wanted)
    elif isinstance(solver, Anderson):
        from gdeq.fast.anderson_steps import AndersonSweep  # noqa: PLC0415 (a `PlainSweep` itself)

        kind = AndersonSweep
    sweep = kind(z, sizes, dtype, solver, precision, max_steps, scale, keep_secants)

    watch = solver.tol > 0
    samples = Samples(f, sweep, solver) if isinstance(f, VectorMap) and in_parts else None

    def evaluate(step: int = 0) -> Tensor:
        if samples is None:
            return f(sweep.z).reshape(-1)
        if last is None or step < max_steps or watch:
            return samples.evaluate()
        sweep.go_back()
        return last.on_parts(sweep.parts)

    def begin() -> Tensor:
        if first is None:
            return evaluate()
        return first(sweep.z).reshape(-1) if samples is None else first.on_parts(sweep.parts)

    sweep.take(0, begin())
    looks, step, cut = watch and not recording(z.device), 0, current() if watch else None
    if cut is not None:  # a recording repeats one step until all samples are done
        sweep.prepare_repetition()
        cut.repeat(
            lambda: sweep.judge_next(evaluate()),
            sweep.go_on,
            sweep.unfinished,
            max_steps,
            solver.check_every,
            [(size, samples.narrow) for size in samples.sizes] if samples else [],
        )
        step = max_steps
    while step < max_steps:
        if looks and step % solver.check_every == 0:
            left = sweep.left()
            if left == 0:
                break
            if samples:
                samples.fit(left)
        step += 1
        sweep.take(step, evaluate(step))
    if samples and rehearsing():
        samples.rehearse()
    found: Settled = sweep.settle(step)
    trace = sweep.trace[: int(found.steps.max()) if looks else step]
    vector, parts, residual, steps, codes, inverse, of_parts, secants = found
    return vector, residual, steps, codes, trace, step + 1, inverse, of_parts, parts, secants


class PlainSweep:
    """The steps and what is known about them; `take` goes from one iterate to the next.

    The plain twin of `kernels.product.Sweep`.  Only the newest z is kept; a sample that must
    go back to an earlier iterate gets it from the first one and the steps, by the same additions.

    block: numbers in a chunk of a step in 8 bits.
    """

    block: int = BLOCK
    rows: Tensor | None = None  # the samples that f is evaluated for, if not all

    def __init__(
        self,
        z: Tensor,  # (batch, d)
        sizes: list[int],
        dtype: torch.dtype,
        solver: Solver,
        precision: float,
        max_steps: int,
        scale: Tensor | None,  # (batch,)
        keep_secants: bool = False,
    ) -> None:
        batch, d = z.shape
        self.keep_secants = keep_secants
        self.first, self.z, self.sizes, self.dtype = z, z.clone(), sizes, dtype
        self.solver, self.precision, self.max_steps, self.scale = (
            solver,
            precision,
            max_steps,
            scale,
        )
        dtype = store_dtype(z, precision, in_eight_bits(solver))
        self.steps = z.new_zeros(batch, max_steps + 1, d, dtype=dtype)
        self.scales: Scales | None = None
        if dtype == torch.int8:
            chunks = sum(chunks_of(tuple(sizes), self.block))
            values = z.new_zeros(batch, max_steps + 1, chunks, dtype=torch.float32)
            self.scales = Scales(values, tuple(sizes), self.block)
        self.gram = z.new_zeros(batch, max_steps + 1, max_steps + 1)
        self.keep = torch.zeros(batch, max_steps + 1, dtype=torch.bool, device=z.device)
        # g_t = Σ_j coordinates_tj s_j
        self.coordinates = torch.zeros_like(self.gram, dtype=torch.float64)
        self.residuals: list[Tensor] = []
        self.rounded = rounds_z(solver, self.dtype)
        self.last_fz = self.last_g = z
        self.judged = judged_sizes(solver.stop, sizes, linear=scale is not None)
        self.least = least_part(solver.tol, precision, z.dtype)
        self.floor = z.new_zeros(())

    @property
    def parts(self) -> Tensor:  # (batch·d,)
        z = self.z if self.rows is None else self.z[self.rows]
        rows = z.to(self.dtype).split(self.sizes, dim=1)
        return torch.cat([row.reshape(-1) for row in rows])

    @property
    def trace(self) -> Tensor:  # (steps, batch)
        empty = self.z.new_zeros(0, len(self.z))
        return torch.stack(self.residuals) if self.residuals else empty

    def left(self) -> int:
        """How many samples are still sought."""
        return int(self.ledger.active.sum())

    def narrow(self, size: int) -> Tensor:  # -> (size,)
        """From here on `take` is given f of so many samples, all active ones among them.

        Returns which ones, of those so far.
        """
        if self.rows is None:
            self.rows = torch.arange(len(self.z), device=self.z.device)
        chosen = first_active(self.ledger.active[self.rows], size)
        self.rows = self.rows[chosen]
        return chosen

    def take(self, t: int, fz: Tensor) -> None:
        """Judge iterate t by f at it, learn from it, and go on unless it is the last one."""
        evaluated = len(self.z) if self.rows is None else len(self.rows)
        lengths = [evaluated * size for size in self.sizes]
        rows = [part.view(evaluated, -1) for part in fz.to(self.z.dtype).split(lengths)]
        fz = torch.cat(rows, dim=1)
        if self.rows is not None:  # of the others, who are frozen, as it was
            fz = self.last_fz.index_copy(0, self.rows, fz)
        if self.dtype == torch.float16:  # f was not given z where that is out of range
            fz = torch.where(self.z.abs() <= torch.finfo(self.dtype).max, fz, torch.nan)
        g = fz - self.z
        if self.scale is None:
            norms = norms_of(g, fz, self.z, self.judged, self.least, self.floor)
        else:
            absolute, of_z = safe_norms(g, self.z)
            norms = Norms(absolute, self.scale, of_z)
        if t == 0:
            self.floor = torch.finfo(self.z.dtype).eps * norms.size
            linear = self.scale is not None
            self.ledger = Ledger(self.solver, self.precision, norms, linear)
            good = torch.isfinite(norms.absolute) & torch.isfinite(norms.size)
            step = self._begin(g, norms.absolute)
        else:
            good = self.ledger.accepts(norms)
            self.ledger.note(t, good, norms)
            self.residuals.append(self.ledger.residual)
            step = self._learn(t, g, fz, good, norms.absolute, norms.of_z)
        self._store(t, torch.where(good.unsqueeze(1), step, 0.0))
        if t < self.max_steps:
            moves = self.ledger.active.unsqueeze(1)
            self.z = torch.where(moves, self._moved(self.z, self._stored(t + 1)[:, t]), self.z)
        self.last_fz, self.last_g = fz, g

    def _moved(self, z: Tensor, step: Tensor) -> Tensor:  # (batch, d) each
        z = z + step
        return z.to(self.dtype).to(z.dtype) if self.rounded else z

    def _store(self, t: int, step: Tensor) -> None:  # (batch, d)
        if self.scales is None:
            self.steps[:, t] = step
        else:
            whole, scale = rounded_to_eight_bits(step, self.scales.sizes, self.scales.block)
            self.steps[:, t], self.scales.values[:, t] = whole, scale

    def _stored(self, count: int) -> Tensor:  # -> (batch, count, d)
        scales = None if self.scales is None else self.scales.first(count)
        return in_full(self.steps[:, :count], scales, self.z.dtype)

    def _begin(self, g: Tensor, absolute: Tensor) -> Tensor:  # (batch, d), (batch,) -> (batch, d)
        """The first step."""
        self.coordinates[:, 0, 0] = 1.0
        return g  # B_0⁻¹ = −I

    def _learn(
        self, t: int, g: Tensor, fz: Tensor, good: Tensor, absolute: Tensor, of_z: Tensor
    ) -> Tensor:  # -> (batch, d)
        """Decide on factor t − 1; the next step."""
        stored = self._stored(t)
        newest = stored[:, -1]
        dots = torch.einsum("bjd,bd->bj", stored, g)
        row = torch.einsum("bjd,bd->bj", stored, newest)
        self.gram[:, t - 1, :t] = row
        self.gram[:, :t, t - 1] = row
        weight = weights(dots, self.gram, self.keep)
        q = g + torch.einsum("bj,bjd->bd", weight, stored)
        squared, inner = row[:, -1], torch.linalg.vecdot(newest, q)
        denominator = squared - inner
        # As in `Broyden.learn`: s − q is B⁻¹y there, and z has moved by the stored step (rounded).
        eps = torch.finfo(g.dtype).eps
        sound = denominator.abs() > 1e3 * eps * squared.sqrt() * norm(newest - q)
        change = norm(g - self.last_g)
        sound &= change > noise_level(self.precision) * (of_z + absolute)
        self.keep[:, t - 1] = good & sound
        longer = torch.where(self.keep[:, t - 1], squared / denominator, 1.0)
        self.coordinates[:, t, :t] = -weight
        self.coordinates[:, t, t] = 1 / longer
        return longer.unsqueeze(1) * q

    def go_back(self) -> None:
        """Samples for which f was not finite return to the iterate before that."""
        stopped = self.ledger.codes == Status.NONFINITE
        before = self._iterate(self.ledger.steps - 1, self.max_steps)
        self.z = torch.where(stopped.unsqueeze(1), before, self.z)

    def _iterate(self, at: Tensor, last: int) -> Tensor:  # (batch,) -> (batch, d)
        z, stored = self.first.clone(), self._stored(last)
        for j in range(last):
            z = torch.where((j < at).unsqueeze(1), self._moved(z, stored[:, j]), z)
        return z

    def settle(self, last: int) -> Settled:
        """The iterate that is returned of each sample, and what belongs to it."""
        codes, residual, of_parts, at = self.ledger.finish()
        z = self._iterate(at, last)
        place = torch.arange(self.keep.shape[1], device=z.device)
        keep = self.keep & (place < at.unsqueeze(1))
        scales = None if self.scales is None else self.scales.first(last + 1)
        inverse = ProductInverse(self.steps[:, : last + 1], self.gram, keep, scales=scales, at=at)
        secants = None
        if self.keep_secants:
            stored, taken = self._stored(last + 1), self.ledger.steps
            secants = Secants.of_steps(stored, self.coordinates, self.keep, taken, z, at == taken)
        return Settled(z, None, residual, self.ledger.steps, codes, inverse, of_parts, secants)
