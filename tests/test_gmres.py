"""GMRES with what the forward solve learned, where numbers are short of digits."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq import GMRES, Broyden, Implicit


@pytest.mark.parametrize("d", [4, 16, 40])
def test_a_preconditioned_solve_in_float32_converges_where_a_plain_one_does(d):
    """One direction is shortened a thousandfold, and all preconditioned ones are long in it."""
    make = torch.Generator().manual_seed(d + 1)
    drawn = torch.randn(100, d, d, generator=make, dtype=torch.float64) / d**0.5
    left, values, right = torch.linalg.svd(torch.eye(d) - 0.6 * drawn)
    values[:, -1] = 1e-3
    jacobian = (torch.eye(d) - left @ torch.diag_embed(values) @ right).float()
    x = torch.randn(100, d, generator=make).requires_grad_()
    v = torch.randn(100, d, generator=make)
    converged = []
    for flag in (False, True):
        gradient = Implicit(GMRES(50, 1e-4), precondition=flag)
        solution = gdeq.fixed_point(
            lambda z: torch.einsum("bij,bj->bi", jacobian, z) + x,
            torch.zeros(100, d),
            Broyden(60, 1e-6),
            gradient,
        )
        solution.z.backward(v)
        converged.append(int(solution.backward.converged.sum()))
    assert min(converged) >= 95
