"""Anderson's method from its steps alone, in the store and by the passes of `gdeq.fast.product`.

It computes the iterates of `gdeq.Anderson`, up to rounding (tests/test_product_anderson.py).

A step is s_t = β g_t − Σ_i γ_i (s_i + β Δg_i) with Δg_i = g_{i+1} − g_i, over the last few i.
In it g_t has the factor β (1 − γ_{t−1}), so all g are combinations of steps, g_i = Σ_j L_ij s_j
with a triangular L that gains a row with each step.  The inner products g_iᵀg_t =
Σ_j L_ij s_jᵀg_t follow from those of one pass, and with them the small system for γ, which says
what the next step is of g_t and the steps.

Steps are made of these g_i, so errors do not add up: that of row t is the rounding of s_t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdeq.fast.product import PlainSweep, Settled
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import noise_level

LEAST_SHARE = 1e-3  # of g in Anderson's next step
COARSEST = 0.1  # rounding of g, as the steps have it, beside g
IN_SUMS = 20.0  # roundings that an inner product may be off


def roundings(kept: torch.dtype, z: Tensor) -> tuple[float, float]:  # (batch, d)
    """Of a step beside it, and of its inner products, where those of its numbers average out."""
    coarse = torch.finfo(kept).eps
    return coarse, IN_SUMS * torch.finfo(z.dtype).eps + coarse / z.shape[1] ** 0.5


class AndersonSweep(PlainSweep):
    """The plain twin of what `kernels.anderson_judge` does in `kernels.product`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.solver, Anderson)
        self.memory, self.mixing = self.solver.memory, self.solver.mixing
        self.ridge = self.solver.ridge(self.z.dtype)
        self.coarse, self.blur = roundings(self.steps.dtype, self.z)
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
        return super().settle(last)._replace(inverse=None)
