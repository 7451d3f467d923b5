"""The product form in plain PyTorch: what the kernels of a sweep are tested against."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gdeq.engine import Reference
from gdeq.fast.eight_bits import BLOCK, Scales, chunks_of, in_full
from gdeq.fast.engine import FastEngine
from gdeq.fast.product import (
    COARSEST,
    LEAST_SHARE,
    ProductInverse,
    Settled,
    Start,
    roundings,
    secants_of_steps,
    weights,
)
from gdeq.loop import Ledger, Measure
from gdeq.operators import norm
from gdeq.solution import Status
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import System, noise_level
from oracles.rounding import rounded_to_eight_bits


class OracleEngine(FastEngine):
    """The fast engine with plain sweeps; `gdeq.engine.use(OracleEngine())`."""

    def sweep(self, start: Start, inverts: bool = True) -> PlainSweep:  # type: ignore[override]
        kind = AndersonSweep if isinstance(start.solver, Anderson) else PlainSweep
        return kind(start, inverts)

    # What follows a solve is the reference's.
    adjoint, norm, residual_norm = Reference.adjoint, Reference.norm, Reference.residual_norm


class PlainSweep:
    """The plain twin of `gdeq.fast.kernels.sweep.Sweep`.

    block: numbers in a chunk of a step in 8 bits.
    """

    block: int = BLOCK

    def __init__(self, start: Start, inverts: bool = True) -> None:
        self.start, self.inverts, self.solver = start, inverts, start.solver
        z = start.z
        if z is None:
            pieces = start.parts.split([start.batch * size for size in start.sizes])
            rows = [piece.view(start.batch, -1) for piece in pieces]
            z = torch.cat(rows, dim=1).to(start.dtype)
        batch, d = z.shape
        self.first, self.z, self.sizes, self.dtype = z, z.clone(), start.sizes, start.given_dtype
        self.precision, self.max_steps, self.scale = start.precision, start.max_steps, start.scale
        dtype = start.store_dtype
        self.steps = z.new_zeros(batch, self.max_steps + 1, d, dtype=dtype)
        self.scales: Scales | None = None
        if dtype == torch.int8:
            chunks = sum(chunks_of(tuple(self.sizes), self.block))
            values = z.new_zeros(batch, self.max_steps + 1, chunks, dtype=torch.float32)
            self.scales = Scales(values, tuple(self.sizes), self.block)
        self.gram = z.new_zeros(batch, self.max_steps + 1, self.max_steps + 1)
        self.keep = torch.zeros(batch, self.max_steps + 1, dtype=torch.bool, device=z.device)
        # g_t = Σ_j coordinates_tj s_j
        self.coordinates = torch.zeros_like(self.gram, dtype=torch.float64)
        self.residuals: list[Tensor] = []
        self.last_fz = self.last_g = z
        self.measure = Measure(self.solver, System(self.precision, self.sizes), z)
        if self.scale is not None:  # f is affine
            self.measure.scale, self.measure.sizes = self.scale, [d]

    @property
    def parts(self) -> Tensor:  # (batch·d,)
        rows = self.z.to(self.dtype).split(self.sizes, dim=1)
        return torch.cat([row.reshape(-1) for row in rows])

    @property
    def trace(self) -> Tensor:  # (steps, batch)
        empty = self.z.new_zeros(0, len(self.z))
        return torch.stack(self.residuals) if self.residuals else empty

    def left(self) -> int:
        """How many samples are still sought."""
        return int(self.ledger.active.sum())

    @property
    def unfinished(self) -> Tensor:  # (1,)
        return self.ledger.active.sum().view(1)

    def take(self, t: int, fz: Tensor) -> None:
        """Judge iterate t by f at it, learn from it, and go on unless it is the last one."""
        batch = len(self.z)
        lengths = [batch * size for size in self.sizes]
        rows = [part.view(batch, -1) for part in fz.to(self.z.dtype).split(lengths)]
        fz = torch.cat(rows, dim=1)
        if self.dtype == torch.float16:  # f was not given z where that is out of range
            fz = torch.where(self.z.abs() <= torch.finfo(self.dtype).max, fz, torch.nan)
        g = fz - self.z
        norms = self.measure(fz, self.z, g)
        if t == 0:
            self.ledger = Ledger(self.solver, self.precision, norms)
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
        return z.to(self.dtype).to(z.dtype) if self.start.rounds_z else z

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
        secants, taken = None, self.ledger.steps
        if self.start.keep_secants:
            stored = self._stored(last + 1)
            secants = secants_of_steps(stored, self.coordinates, self.keep, taken, z, at == taken)
        return Settled(
            z=z,
            residual=residual,
            steps=taken,
            codes=codes,
            trace=self.trace,
            evals=0,
            inverse=inverse if self.inverts else None,
            of_parts=of_parts,
            secants=secants,
        )


class AndersonSweep(PlainSweep):
    """The plain twin of what `gdeq.fast.kernels.anderson` does in a sweep."""

    def __init__(self, start: Start, inverts: bool = True) -> None:
        super().__init__(start, inverts)
        assert isinstance(self.solver, Anderson)
        self.memory, self.mixing = self.solver.memory, self.solver.mixing
        self.ridge = self.solver.ridge(self.z.dtype)
        self.coarse, self.blur = roundings(self.steps.dtype, self.z.dtype, self.z.shape[1])
        self.products = torch.zeros_like(self.coordinates)  # g_iᵀg_j

    def _begin(self, g: Tensor, absolute: Tensor) -> Tensor:
        self.coordinates[:, 0, 0] = 1 / self.mixing
        self.products[:, 0, 0] = absolute.double().square()
        return self.mixing * g

    def _learn(
        self, t: int, g: Tensor, fz: Tensor, good: Tensor, absolute: Tensor, of_z: Tensor
    ) -> Tensor:  # -> (batch, d)
        stored = self._stored(t)
        dots = (stored * g.unsqueeze(1)).sum(2).double()  # in pairs, as a kernel: more exactly
        first = max(0, t - self.memory)
        known = self.coordinates[:, first:t, :t]
        row = torch.einsum("bij,bj->bi", known, dots)
        self.products[:, t, first:t] = row
        self.products[:, first:t, t] = row
        self.products[:, t, t] = absolute.double().square()
        of_g = self.products[:, first : t + 1, first : t + 1]
        of_dg = of_g.diff(dim=1).diff(dim=2)  # Δg_iᵀΔg_j
        right = of_g[:, :, -1].diff(dim=1)  # Δg_iᵀg_t
        size = of_dg.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        self._judge_newest(t, size[:, -1], good, absolute, of_z, stored)
        used = self.keep[:, first:t] & (size > 0)
        size = torch.where(used, size, 1.0)
        both = used.unsqueeze(1) & used.unsqueeze(2)
        system = torch.where(both, of_dg / (size.unsqueeze(1) * size.unsqueeze(2)), 0.0)
        system = system + torch.diag_embed(torch.where(used, self.ridge, 1.0).double())
        scaled, _ = torch.linalg.solve_ex(system, torch.where(used, right / size, 0.0).unsqueeze(2))
        gamma = scaled.squeeze(2) / size
        # Where next to nothing of g_t were left, or nothing is known: without the others.
        lead = 1 - gamma[:, -1]
        plain = ~(lead.abs() > LEAST_SHARE) | ~gamma.isfinite().all(1)
        gamma = torch.where(plain.unsqueeze(1), 0.0, gamma)
        lead = self.mixing * torch.where(plain, 1.0, lead)
        of_each = torch.nn.functional.pad(gamma, (1, 0))[:, :-1]
        weight = self.mixing * torch.einsum("bi,bij->bj", gamma - of_each, known)
        weight[:, first:] -= gamma
        self.coordinates[:, t, t] = 1 / lead
        self.coordinates[:, t, :t] = -weight / lead.unsqueeze(1)
        lead, weight = lead.to(g.dtype), weight.to(g.dtype)
        return lead.unsqueeze(1) * g + torch.einsum("bj,bjd->bd", weight, stored)

    def _judge_newest(
        self,
        t: int,
        change: Tensor,  # (batch,) ‖Δg_{t−1}‖
        good: Tensor,
        absolute: Tensor,
        of_z: Tensor,
        stored: Tensor,  # (batch, t, d)
    ) -> None:
        """Whether Δg_{t−1} is more than noise, and g_{t−1} what its coordinates say.

        They divide by what of g_{t−1} is in s_{t−1}, and so the rounding of the step too.
        """
        share = self.coordinates[:, t - 1, t - 1].abs()
        before = self.products[:, t - 1, t - 1].sqrt()
        length = torch.linalg.vector_norm(stored, dim=2).double()
        exact = self.coarse * share * length[:, -1] <= COARSEST * before
        sound = change > noise_level(self.precision) * (of_z + absolute)
        # ‖Δg‖² is a difference of sums of this size.
        terms = (self.coordinates[:, t - 1, :t].abs() * length).sum(1)
        sound &= change.square() > self.blur * terms * (before + absolute)
        self.keep[:, t - 1] = good & sound & exact
        if t > 1:
            self.keep[:, t - 2] &= exact

    def settle(self, last: int) -> Settled:
        return replace(super().settle(last), inverse=None)
