"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.context import is_exporting
from gdeq.operators import norm
from gdeq.options import check_integer, check_real, options
from gdeq.solvers.base import Point, Solver, System, advance, change_seen


@dataclass
class AndersonState:
    """Differences over their ‖Δg‖, so that no inner product of them leaves the dtype's range."""

    dz: Tensor  # (batch, memory, d) differences of iterates
    dg: Tensor  # (batch, memory, d) differences of g, in the same places; unused ones are zero
    count: Tensor  # (batch,) steps taken
    precision: float


def solve_small(a: Tensor, b: Tensor) -> Tensor:  # (batch, m, m), (batch, m) -> (batch, m)
    """a⁻¹b for positive definite a."""
    if not is_exporting():
        # solve_ex does not read the device to look for errors: the ridge keeps it regular.
        return torch.linalg.solve_ex(a, b.unsqueeze(2))[0].squeeze(2)
    both = torch.cat([a, b.unsqueeze(2)], dim=2)  # by elimination: ONNX has no linear solve
    m = a.shape[1]
    for k in range(m):
        row = both[:, k : k + 1] / both[:, k : k + 1, k : k + 1]
        others = (torch.arange(m, device=a.device) != k).to(a.dtype).view(1, m, 1)
        both = both - others * both[:, :, k : k + 1] * row
    return both[:, :, m] / both[:, :, :m].diagonal(dim1=1, dim2=2)


@options
class Anderson(Solver):
    """Anderson acceleration in difference form, per sample (Walker & Ni 2011).

        γ = argmin ‖g − ΔG γ‖² + λ ‖D γ‖²,      D = diag ‖Δg_i‖
        z ← z + β g − (ΔZ + β ΔG) γ

    memory: how many differences are used.  On a GPU all steps of a solve are kept, in half
        precision if f computes in it.
    mixing: β in (0, 1].
    regularization: λ, relative to the size of each difference.  At least the rounding level of the
        dtype is used.

    Examples:
        >>> import torch, gdeq
        >>> solution = gdeq.solve(torch.cos, torch.zeros(1, 1), gdeq.Anderson(memory=3))
        >>> f"{solution.z.item():.4f}"
        '0.7391'
    """

    memory: int = 5
    mixing: float = 1.0
    regularization: float = 1e-10

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_integer(self, "memory", 1)
        check_real(self, "mixing", 0.0, 1.0, open_low=True)
        check_real(self, "regularization", 0.0)

    def init(self, start: Point, system: System) -> AndersonState:
        batch, d = start.z.shape
        shape = batch, min(self.memory, self.max_iter), d
        # As views of one store they would keep the batch size of an ONNX program's example.
        dz, dg = start.z.new_zeros(shape), start.z.new_zeros(shape)
        count = torch.zeros(batch, dtype=torch.long, device=dz.device)
        return AndersonState(dz, dg, count, system.precision)

    def ridge(self, dtype: torch.dtype) -> float:
        """λ, or the rounding level if that is larger."""
        return max(self.regularization, 10 * torch.finfo(dtype).eps)

    def propose(self, here: Point, state: AndersonState) -> Tensor:
        dz, dg = state.dz, state.dg
        # Of differences of length one the conditioning is that of their angles alone, and λ has no
        # unit.
        gram = torch.bmm(dg, dg.transpose(1, 2)).double()
        right = torch.bmm(dg, here.g.unsqueeze(2)).squeeze(2).double()
        used = gram.diagonal(dim1=1, dim2=2) > 0
        ridge = torch.where(used, self.ridge(here.z.dtype), 1.0)
        gamma = solve_small(gram + torch.diag_embed(ridge), right).to(dg.dtype)  # (batch, memory)
        plain = here.z + self.mixing * here.g
        return plain - torch.bmm(gamma.unsqueeze(1), dz + self.mixing * dg).squeeze(1)

    def learn(
        self, here: Point, there: Point, accepted: Tensor, state: AndersonState
    ) -> tuple[Point, AndersonState]:
        dg, sound = there.g - here.g, change_seen(here.g, there, state.precision)
        size = norm(dg)
        unit = torch.where(sound, 1 / size, 0.0).unsqueeze(1)  # of noise nothing is learned
        rows = torch.arange(accepted.shape[0], device=accepted.device)
        place = state.count % state.dz.shape[1]
        for kept, new in ((state.dz, there.z - here.z), (state.dg, dg)):
            seen = torch.where(sound.unsqueeze(1), new * unit, 0.0)
            kept[rows, place] = torch.where(accepted.unsqueeze(1), seen, kept[rows, place])
        state.count = state.count + accepted
        return advance(accepted, here, there), state
