"""Broyden's and Anderson's methods from their steps alone: half the memory, fewer passes over it.

Read `gdeq.solvers.broyden` and `gdeq.loop` first.  This computes the same iterates, verdicts and
inverse up to rounding, on a GPU, where the time of a solver is that of its passes over memory.

**Broyden's method.**  With full steps s_t = −B_t⁻¹g_t, write q = −B_t⁻¹g_{t+1}.  Then B_t⁻¹y =
s_t − q, the update is

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

**Anderson's method.**  A step is s_t = β g_t − Σ_i γ_i (s_i + β Δg_i) with Δg_i = g_{i+1} − g_i,
over the last few i.  In it g_t has the factor β (1 − γ_{t−1}), so all g are combinations of steps,
g_i = Σ_j L_ij s_j with a triangular L that gains a row with each step.  The inner products
g_iᵀg_t = Σ_j L_ij s_jᵀg_t follow from those of one pass, and with them the small system for γ,
which says what the next step is of g_t and the steps.  Steps are made of these g_i, so errors do
not add up: that of row t is the rounding of s_t.

**Rounding.**  Where f computes in half precision, steps are rounded before they are kept, to 8 bits
where the solver says so (`gdeq.fast.eight_bits`).  The step that is taken is the rounded one,
so z and the store belong together; the inverse meets its newest secant equation B⁻¹y = s up to what
was rounded off, s' − s, over the factor by which s is longer than q.

Where f takes and returns bfloat16 and the number of steps is fixed (tol=0), z itself is kept as f
is given it: a float32 z of which f sees eight bits makes g no better known.  Then z
moves by the step and a rounding of z, up to 2⁻⁹ of it: y has that much more noise, about a sixth of
what counts as seen (`noise_level`).

**Limits**: full steps, and a store of all of them.  A bounded memory drops the oldest *term* of a
sum, for which there is no counterpart in a product, so there the reference runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gdeq.context import host_may_look
from gdeq.engine import runs_fast
from gdeq.fast import graphs
from gdeq.fast.eight_bits import Scales, in_full
from gdeq.fast.kernels.device import MOST_SAMPLES
from gdeq.loop import Iterates
from gdeq.operators import MOST_SECANTS, Inverse, Secants, norm, safe_norms
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden

MOST_DIFFERENCES = 16  # of Anderson's method, whose system one program holds in registers
MOST_PARTS = 16  # tensors of a state that are judged one by one
MOST_STEPS = 127  # whose weights one program holds in registers
LEAST_SHARE = 1e-3  # of the newest g in a step of Anderson's method
COARSEST = 0.1  # relative error of a g that is computed from steps
IN_SUMS = 20.0  # units in the last place that an inner product may be off


def takes(solver: Solver, max_steps: int) -> bool:
    """Whether a sweep can stand in for this solver.

    Looked up by the exact class: one that is derived from it may override anything.
    """
    known = {Broyden: _whole_broyden, Anderson: _short_anderson}.get(type(solver))
    return known is not None and max_steps <= MOST_STEPS and known(solver, max_steps)


def _whole_broyden(solver: Any, max_steps: int) -> bool:
    full_steps = solver.max_step is None and solver.line_search == 0
    return full_steps and (solver.memory is None or solver.memory >= max_steps)


def _short_anderson(solver: Any, max_steps: int) -> bool:
    memory: int = solver.memory
    return memory <= MOST_DIFFERENCES


@dataclass
class Start:
    """Where a solve begins, and what it is to do.

    z is in ``parts`` alone where it is kept as f is given it (`rounds_z`).
    """

    solver: Solver
    precision: float  # spacing of the numbers that f computes with
    max_steps: int
    sizes: list[int]  # of the tensors of the state
    batch: int
    device: torch.device
    dtype: torch.dtype  # of the algebra
    given_dtype: torch.dtype  # of what f is given
    z: Tensor | None = None  # (batch, d)
    parts: Tensor | None = None  # (batch·d,)
    scale: Tensor | None = None  # (batch,) ‖f(0)‖ where f is affine
    keep_secants: bool = False

    @property
    def d(self) -> int:
        return sum(self.sizes)

    @property
    def store_dtype(self) -> torch.dtype:
        """Of the steps.  For an f in half precision bfloat16, which has the range of z.

        Steps of a bfloat16 f are known to no more digits.  Those of a float16 f are known to three
        bits more, but neither solves nor gradients become worse without them.
        """
        if self.dtype != torch.float32 or self.precision < torch.finfo(torch.float16).eps:
            return self.dtype
        in_bytes = isinstance(self.solver, Broyden) and self.solver.step_bits == 8
        return torch.int8 if in_bytes else torch.bfloat16

    @property
    def rounds_z(self) -> bool:
        """Whether each z is rounded to the dtype that f is given.

        Not with a tolerance, which may be below what rounding leaves of f(z) − z.  Nor where steps
        are damped: each may be below the rounding of z, though together they are not.
        """
        solver = self.solver
        damped = isinstance(solver, Anderson) and solver.mixing != 1
        return solver.tol == 0 and self.given_dtype == torch.bfloat16 and not damped


@dataclass
class Settled(Iterates):
    """The outcome of a sweep."""

    z: Tensor | None  # type: ignore[assignment]  # (batch, d); None where it is in parts alone
    parts: Tensor | None = None  # (batch·d,) z in parts, where that is at hand


class Sweep(Protocol):
    """The steps of a solve; `gdeq.fast.kernels.sweep` has the one in use."""

    start: Start
    unfinished: Tensor  # (1,)

    def take(self, t: int, fz: Tensor) -> None: ...
    def left(self) -> int: ...
    def prepare_repetition(self) -> None: ...
    def judge_next(self, fz: Tensor) -> None: ...
    def go_on(self) -> None: ...
    def go_back(self) -> None: ...
    def settle(self, last: int) -> Settled: ...


def iterate(
    sweep: Sweep,
    evaluate: Callable[[], Tensor],
    at_start: Callable[[], Tensor] | None = None,
    at_end: Callable[[], Tensor] | None = None,
) -> Settled:
    """`gdeq.loop.iterate` by a sweep.

    evaluate: f at where the sweep is, (batch·d,).
    at_start: the same at the first iterate, in its place.
    at_end: the same at the iterate that is known to be the last (tol=0), in its place; and at the
        z that is returned for a sample that stopped before.
    """
    start = sweep.start
    solver, max_steps = start.solver, start.max_steps
    watch = solver.tol > 0
    looks, recording = watch and host_may_look(start.device), graphs.current() if watch else None
    step = 0
    sweep.take(0, (at_start or evaluate)())
    if recording is not None:  # it repeats one step until all samples are done
        sweep.prepare_repetition()
        recording.repeat(
            lambda: sweep.judge_next(evaluate()),
            sweep.go_on,
            sweep.unfinished,
            max_steps,
            solver.check_every,
        )
        step = max_steps
    while step < max_steps:
        if looks and step % solver.check_every == 0 and sweep.left() == 0:
            break
        step += 1
        if at_end is not None and step == max_steps and not watch:
            sweep.go_back()
            sweep.take(step, at_end())
        else:
            sweep.take(step, evaluate())
    found = sweep.settle(step)
    steps = int(found.steps.max()) if looks else step
    return replace(found, trace=found.trace[:steps], evals=step + 1)


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
        if not in_kernels(x) or not self.transposed or torch.is_grad_enabled():
            return super().trusted(x, longest)
        from gdeq.fast.kernels import inverse  # noqa: PLC0415 (it imports this module)

        product, mask = inverse.trusted(self, x, longest)
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

    def _apply(self, x: Tensor, negative: bool) -> Tensor:
        differentiable = x.requires_grad and torch.is_grad_enabled()
        if in_kernels(x) and not differentiable:
            from gdeq.fast.kernels import inverse  # noqa: PLC0415 (it imports this module)

            return inverse.apply(self, x, negative)
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


def secants_of_steps(
    steps: Tensor,  # (batch, n, d)
    coordinates: Tensor,  # (batch, ≥n, ≥n)
    keep: Tensor,  # (batch, ≥n) bool: which secants are more than rounding
    taken: Tensor,  # (batch,) steps of each sample, below n
    z: Tensor,  # (batch, d) that is returned
    ended: Tensor,  # (batch,) bool: it is the last iterate
) -> Secants:
    """The last secants of a solve, with g_i = Σ_j coordinates_ij s_j.

    Places of steps that were not taken are set to zero; they may have held anything.
    """
    n = steps.shape[1]
    if n == 1:
        none = Secants.empty(z, 0)
        none.close(z, ended)
        return none
    rows = torch.arange(len(steps), device=steps.device).unsqueeze(1)
    unused = torch.arange(n, device=steps.device) >= taken.unsqueeze(1)
    lengths = torch.linalg.vector_norm(steps, dim=2).masked_fill(unused, 0.0)
    far = lengths.flip(1).cumsum(1).flip(1)
    unused[:, 1:] = unused[:, :-1].clone()  # the last iterate's own step is in its g
    unused[:, 0] = False
    steps.masked_fill_(unused.unsqueeze(2), 0.0)
    number = torch.arange(n - 1, device=steps.device)
    number = torch.where(keep[:, : n - 1] & ~unused[:, 1:], number, -1)
    number = number.topk(min(MOST_SECANTS, n - 1), dim=1).values  # the last ones
    known, number = number >= 0, number.clamp(min=0)
    of_g = coordinates.tril()[:, :n, :n]
    of_y = torch.where(known.unsqueeze(2), of_g[rows, number + 1] - of_g[rows, number], 0.0)
    s = torch.where(known.unsqueeze(2), steps[rows, number], 0.0)
    y = torch.bmm(of_y.to(s.dtype), steps)
    return Secants(s, y, far[rows, number], known.sum(1), torch.where(ended, norm(z), 0.0))


def roundings(kept: torch.dtype, dtype: torch.dtype, d: int) -> tuple[float, float]:
    """The relative error of a stored step, and that of its inner products, where errors average."""
    coarse = torch.finfo(kept).eps
    return coarse, IN_SUMS * torch.finfo(dtype).eps + coarse / d**0.5


def in_kernels(x: Tensor) -> bool:  # (batch, d)
    """Whether products with an inverse of these vectors are computed by kernels."""
    return runs_fast(x.device) and 0 < len(x) <= MOST_SAMPLES and x.shape[1] > 0
