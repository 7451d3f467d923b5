"""Broyden's good method with a limited-memory inverse: the paper's forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdeq.context import host_may_look
from gdeq.operators import Inverse, LowRankInverse, dot, norm, safe_norms
from gdeq.options import check_integer, check_real, options
from gdeq.solvers.base import Point, Solver, System, advance, change_seen, select


@dataclass
class BroydenState:
    """The store is written in place: a copy a step would double the memory."""

    u: Tensor  # (batch, places, d)
    v: Tensor  # (batch, places, d)
    count: Tensor  # (batch,) updates made; the newest lies at place (count − 1) mod memory
    bg: Tensor  # (batch, d) B⁻¹g at the current iterate
    counts: list[Tensor]  # count after step 0, 1, ...
    lengths: list[Tensor]  # ‖bg‖ after step 0, 1, ...
    memory: int
    precision: float
    base: Inverse | None

    def estimate(self) -> LowRankInverse:
        used = min(len(self.counts) - 1, self.memory)
        return LowRankInverse(self.u[:, :used], self.v[:, :used], self.base)

    def grow(self, places: int) -> None:
        more = (0, 0, 0, places - self.u.shape[1])
        self.u, self.v = pad(self.u, more), pad(self.v, more)


@options
class Broyden(Solver):
    """Broyden's good method, per sample.

    With g(z) = f(z) − z, s = z_{t+1} − z_t and y = g_{t+1} − g_t:

        z_{t+1} = z_t − B_t⁻¹ g_t
        B_{t+1}⁻¹ = B_t⁻¹ + (s − B_t⁻¹y) sᵀB_t⁻¹ / (sᵀB_t⁻¹y),        B_0⁻¹ = −I

    For a full step B_t⁻¹g_t = −s, so s − B_t⁻¹y = −B_t⁻¹g_{t+1} and the denominator is
    sᵀ(s + B_t⁻¹g_{t+1}): the paper's update.  The form above also holds for a shortened step and
    when an old update was dropped in between, and always gives B_{t+1}⁻¹y = s.

    memory: keep at most this many updates (None: all).  When it is full, the oldest is dropped
        *before* the new one is computed, so that the newest secant condition holds.
    max_step: bound on ‖s‖ / max(‖z‖, 1); longer steps are shortened.
    line_search: how often a step that does not lower ‖g‖ may be halved.  Each halving costs one
        evaluation of f.
    step_bits: on a GPU, if f computes in half precision, keep each step in bfloat16 (16) or in 8
        bits, which takes half the memory and less time.  Use 8 if the numbers in z are of similar
        size, for example if f ends in a norm.  If neighbouring numbers differ by more than about a
        hundredfold, the solve can diverge: look at ``solution.residual``.  Otherwise it has no
        effect.

    Examples:
        >>> import torch, gdeq
        >>> f = lambda z: 3 - 2 * z  # no contraction
        >>> gdeq.solve(f, torch.zeros(1, 1), gdeq.Broyden(max_iter=10)).z.item()
        1.0
    """

    memory: int | None = None
    max_step: float | None = field(default=None, kw_only=True)
    line_search: int = field(default=0, kw_only=True)  # type: ignore[misc]
    step_bits: int = field(default=16, kw_only=True)

    keeps_inverse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        if self.memory is not None:
            check_integer(self, "memory", 1)
        if self.max_step is not None:
            check_real(self, "max_step", 0.0, open_low=True)
        check_integer(self, "line_search", 0)
        check_integer(self, "step_bits")
        if self.step_bits not in (8, 16):
            raise ValueError(f"Broyden.step_bits must be 16 or 8, got {self.step_bits}")

    def init(self, start: Point, system: System) -> BroydenState:
        batch, d = start.z.shape
        memory = min(self.memory or self.max_iter, self.max_iter)
        # With a tolerance most solves end early: the store starts small and grows with the steps.
        shape = batch, memory if self.tol == 0 else min(memory, 8), d
        # As views of one store they would keep the batch size of an ONNX program's example.
        u, v = start.z.new_zeros(shape), start.z.new_zeros(shape)
        count = torch.zeros(batch, dtype=torch.long, device=u.device)
        bg = system.inverse.matvec(start.g) if system.inverse else -start.g
        lengths = [safe_norms(bg)[0]]
        return BroydenState(
            u, v, count, bg, [count], lengths, memory, system.precision, system.inverse
        )

    def propose(self, here: Point, state: BroydenState) -> Tensor:
        if self.max_step is None:
            return here.z - state.bg
        bound = self.max_step * norm(here.z).clamp(min=1.0)
        length = state.lengths[-1]
        shorten = torch.where(length > bound, bound / length, 1.0)
        return here.z - shorten.unsqueeze(1) * state.bg

    def learn(
        self, here: Point, there: Point, accepted: Tensor, state: BroydenState
    ) -> tuple[Point, BroydenState]:
        taken = len(state.counts) - 1
        estimate = state.estimate()
        s, g = there.z - here.z, there.g
        bg, bg_try, v = state.bg, estimate.matvec(g), estimate.T.matvec(s)

        full = taken >= state.memory
        if not full and taken == state.u.shape[1]:
            state.grow(min(state.memory, 2 * taken))
        at = torch.arange(s.shape[0], device=s.device), state.count % state.memory
        u_old = v_old = torch.zeros((), dtype=s.dtype, device=s.device)
        if full:  # drop the oldest (zeros, for a sample that has skipped updates)
            u_old, v_old = state.u[at], state.v[at]
            bg = bg - u_old * dot(v_old, here.g)
            bg_try = bg_try - u_old * dot(v_old, g)
            v = v - v_old * dot(u_old, s)

        by = bg_try - bg  # B⁻¹y
        denominator = dot(s, by)  # (batch, 1)
        # Skip, rather than clip, an update that would divide by rounding errors: a denominator
        # that is zero relative to its factors, or a change of g that may be the rounding of f (at
        # the end of a solve; or f(z) = z + c, where y = 0).
        eps = torch.finfo(s.dtype).eps
        sound = denominator.abs().squeeze(1) > 1e3 * eps * norm(s) * norm(by)
        sound &= change_seen(here.g, there, state.precision)
        accept = accepted & sound
        u = (s - by) / torch.where(accept.unsqueeze(1), denominator, 1.0)
        u, v = select(accept, u, u_old), select(accept, v, v_old)
        state.u[at], state.v[at] = u, v
        state.count = state.count + accept
        state.counts.append(state.count)
        state.bg = select(accepted, torch.addcmul(bg_try, u, dot(v, g)), state.bg)
        if self.tol > 0 or self.max_step is not None:  # else the last one alone is asked for
            state.lengths.append(safe_norms(state.bg)[0])
        return advance(accepted, here, there), state

    def inverse(self, state: BroydenState, at: Tensor | None) -> LowRankInverse:
        """Takes back the updates made after step ``at`` (None: there are none).

        Exact while nothing was dropped.  Otherwise what the later updates displaced is lost, and
        the sample is left with the surviving updates up to ``at``.
        """
        estimate = state.estimate()
        if at is None:
            return replace(estimate, length=safe_norms(state.bg)[0])
        row = at.unsqueeze(0)
        lengths, kept = (torch.stack(of).gather(0, row)[0] for of in (state.lengths, state.counts))
        estimate, last = replace(estimate, length=lengths), state.count
        place = torch.arange(estimate.u.shape[1], device=at.device)
        # The update at a place is the newest number below `last` that is congruent to it.
        number = last.unsqueeze(1) - 1 - (last.unsqueeze(1) - 1 - place) % state.memory
        stale = number >= kept.unsqueeze(1)  # (batch, places)
        if host_may_look(at.device) and not bool(stale.any()):
            return estimate
        # In place: the solve is over, and a copy would double the memory.
        estimate.u.masked_fill_(stale.unsqueeze(2), 0.0)
        estimate.v.masked_fill_(stale.unsqueeze(2), 0.0)
        return estimate
