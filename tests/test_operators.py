"""The inverse-Jacobian estimate as an operator, and norms that do not overflow."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq import Broyden, StateError
from gdeq.operators import LowRankInverse, relative, safe_norms
from problems import (
    Dense,
    Image,
    Multiscale,
    Named,
    Nested,
    assert_near,
    leaves,
    map_leaves,
    pack,
    times,
)


def draw(*shape, seed=0, device=None):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=make).to(device)


def low_rank(batch=2, rank=3, d=5, base=None, seed=0):
    return LowRankInverse(*draw(2, batch, rank, d, seed=seed), base)


@pytest.mark.parametrize("structure", [Dense, Image, Multiscale, Named, Nested])
@pytest.mark.parametrize("memory", [None, 3])
def test_products_agree_with_the_matrix(structure, memory, device):
    problem = structure().to(device)
    inverse = gdeq.solve(problem, problem.z0, Broyden(5, 0.0, memory)).inverse
    matrix = inverse.as_matrix()
    a = draw(3, problem.size, seed=1, device=device)
    assert matrix.shape == (3, problem.size, problem.size)
    assert (matrix - matrix.mT).abs().max() > 1e-3
    state = problem.unpack(a)
    for product, dense in ((inverse.matvec, matrix), (inverse.rmatvec, matrix.mT)):
        assert_near(product(a), times(dense, a), 1e-12)
        out = product(state)  # a state gives a state
        map_leaves(lambda x, y: torch.testing.assert_close(x.shape, y.shape) or x, out, state)
        assert torch.equal(pack(out), product(a))
    assert repr(inverse) == f"<inverse of rank {3 if memory else 5} for 3 samples of {a.shape[1]}>"


def test_the_packed_order_is_that_of_the_leaves_of_z0():
    problem = Named()
    assert list(problem.z0) == ["slow", "fast"]  # a dict is not sorted
    inverse = gdeq.solve(problem, problem.z0, Broyden(4, 0.0)).inverse
    v = {"fast": draw(3, 2, 2, seed=1), "slow": draw(3, 3, seed=2)}
    flat = torch.cat([v["slow"], v["fast"].flatten(1)], dim=1)
    assert torch.equal(pack(inverse.matvec(v)), inverse.matvec(flat))
    assert [leaf.shape for leaf in leaves(inverse.matvec(v))] == [(3, 3), (3, 2, 2)]
    with pytest.raises(StateError):
        inverse.matvec(torch.zeros(3, problem.size + 1, dtype=torch.float64))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("base", [None, low_rank(rank=2, seed=1)], ids=["alone", "upon another"])
def test_low_rank_operators(rank, base):
    operator = low_rank(rank=rank, base=base)
    x, eye = draw(2, 5, seed=3), torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    dense = (base.as_matrix() if base else -eye) + operator.u.mT @ operator.v
    assert operator.rank == rank + (2 if base else 0)
    assert len(operator.stored) == (4 if base else 2)
    assert_near(operator.as_matrix(), dense, 1e-14)
    assert_near(operator.matvec(x), times(dense, x), 1e-13)
    assert_near(operator.negative_matvec(x), -times(dense, x), 1e-13)
    assert_near(operator.rmatvec(x), times(dense.mT, x), 1e-13)
    assert_near(operator.T.as_matrix(), dense.mT, 1e-14)
    assert operator.T.T.u is operator.u  # views, not copies
    only = operator.only(torch.tensor([True, False])).as_matrix()
    assert_near(only, torch.stack([dense[0], -eye[1]]), 1e-14)
    if rank:
        size = times(dense, x).norm(dim=1) / x.norm(dim=1)
        product, inverse = operator.trusted(x, size.mean().item())
        kept = (size <= size.mean())[:, None]
        assert kept.any()
        assert not kept.all()
        assert_near(product, torch.where(kept, -times(dense, x), x), 1e-13)
        assert_near(inverse.as_matrix(), torch.where(kept[:, :, None], dense, -eye), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_that_do_not_overflow(dtype, device):
    exponents = torch.tensor([-300, -30, -20, 0, 20, 30, 300] if dtype.itemsize == 8 else
                             [-40, -30, -20, 0, 18, 20, 37])  # fmt: skip
    unit = (10.0 ** exponents.double()).to(dtype)
    a = unit[:, None] * torch.tensor([3.0, 4.0], dtype=dtype)
    found, plain = safe_norms(a.to(device), torch.ones(len(a), 2, dtype=dtype, device=device))
    torch.testing.assert_close(
        found.cpu(), a.double().abs().amax(1).to(dtype) * 1.25, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(plain, torch.full_like(plain, 2**0.5))
    bad = safe_norms(torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0]], device=device))
    assert bad[0].isfinite().tolist() == [True, False, False]
    zero, one = torch.zeros(2), torch.tensor([0.0, 2.0])
    assert relative(zero, zero).tolist() == [0.0, 0.0]
    assert relative(one, torch.full((2,), 4.0)).tolist() == [0.0, 0.5]
