"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.operators import Inverse
from gdeq.options import check_integer, check_real, options
from gdeq.solvers.base import Solver, change_seen, select


@dataclass
class AndersonState:
    dz: Tensor  # (batch, memory, d) differences of iterates
    dg: Tensor  # (batch, memory, d) differences of g, in the same places
    count: Tensor  # (batch,) steps taken
    precision: float


@options
class Anderson(Solver):
    """Anderson acceleration in difference form, per sample (Walker & Ni 2011).

        γ = argmin ‖g − ΔG γ‖² + λ ‖D γ‖²,      D = diag ‖Δg_i‖
        z ← z + β g − (ΔZ + β ΔG) γ

    memory: the differences of so many steps are used.  On a GPU all steps of a solve are kept, in
        half precision where f computes in it (`gdeq.fast.anderson_steps`).
    mixing: β in (0, 1].
    regularization: λ, relative to the size of each difference, so that it has no unit; never
        taken below the rounding level of the dtype.
    """

    memory: int = 5
    mixing: float = 1.0
    regularization: float = 1e-10

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_integer(self, "memory", 1)
        check_real(self, "mixing", 0.0, 1.0, open_low=True)
        check_real(self, "regularization", 0.0)

    def init(
        self,
        z: Tensor,
        g: Tensor,
        *,
        steps: int,
        precision: float,
        inverse: Inverse | None = None,
        right: Tensor | None = None,
    ) -> AndersonState:
        memory = max(1, min(self.memory, steps))
        empty = z.new_zeros(z.shape[0], memory, z.shape[1])
        count = torch.zeros(z.shape[0], dtype=torch.long, device=z.device)
        return AndersonState(empty, torch.zeros_like(empty), count, precision)

    def ridge(self, dtype: torch.dtype) -> float:
        return max(self.regularization, 10 * torch.finfo(dtype).eps)

    def propose(self, z: Tensor, g: Tensor, state: AndersonState) -> Tensor:
        plain = z + self.mixing * g
        size = torch.linalg.vector_norm(state.dg, dim=2)  # (batch, memory)
        used = size > 0
        size = torch.where(used, size, 1.0)
        # Differences scaled to length one: the conditioning of the small system is then that of
        # their angles alone, and λ has no unit.
        gram = torch.bmm(state.dg, state.dg.transpose(1, 2)) / (
            size.unsqueeze(1) * size.unsqueeze(2)
        )
        right = torch.bmm(state.dg, g.unsqueeze(2)).squeeze(2) / size
        diagonal = torch.where(used, self.ridge(z.dtype), 1.0).double()
        system = gram.double() + torch.diag_embed(diagonal)
        # solve_ex does not read the device to look for errors: the ridge keeps it regular.
        scaled, _ = torch.linalg.solve_ex(system, right.double().unsqueeze(2))
        gamma = scaled.squeeze(2).to(z.dtype) / size  # (batch, memory)
        history = state.dz + self.mixing * state.dg
        return plain - torch.bmm(gamma.unsqueeze(1), history).squeeze(1)

    def learn(
        self,
        z: Tensor,
        g: Tensor,
        z_try: Tensor,
        g_try: Tensor,
        accepted: Tensor,
        state: AndersonState,
    ) -> tuple[Tensor, Tensor, AndersonState]:
        dz, dg = z_try - z, g_try - g
        sound = change_seen(g, g_try, z_try, state.precision).unsqueeze(1)
        rows = torch.arange(len(z), device=z.device)
        place = state.count % state.dz.shape[1]
        store = accepted.unsqueeze(1)
        for kept, new in ((state.dz, dz), (state.dg, dg)):
            seen = torch.where(sound, new, 0.0)  # of noise nothing is learned
            kept[rows, place] = torch.where(store, seen, kept[rows, place])
        state.count = state.count + accepted
        return select(accepted, z_try, z), select(accepted, g_try, g), state
