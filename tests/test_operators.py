"""The inverse-Jacobian estimate: its algebra, and what Broyden's method puts there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import gdeq
from gdeq import Broyden, StateError
from gdeq.operators import LowRankInverse
from problems import (
    Dense,
    Image,
    Multiscale,
    Named,
    Nested,
    Wide,
    assert_near,
    identity,
    leaves,
    limited_broyden,
    map_leaves,
    pack,
    paper_broyden,
    times,
)

STRUCTURES = [Dense, Image, Multiscale, Named, Nested]


def random_vector(problem, seed=0):  # -> (batch, d)
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(problem.x.shape, dtype=problem.x.dtype, generator=generator)
    return v.to(problem.x.device)


def low_rank(batch=2, rank=3, d=5, base=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(2, batch, rank, d, dtype=torch.float64, generator=generator)
    return LowRankInverse(u, v, base)


# --- algebra --------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("memory", [None, 3])
def test_products_agree_with_the_matrix(structure, memory, device):
    problem = structure().to(device)
    inverse = gdeq.solve(problem, problem.z0, Broyden(5, 0.0, memory)).inverse
    matrix = inverse.as_matrix()
    a, b = random_vector(problem, 1), random_vector(problem, 2)
    assert matrix.shape == (3, problem.size, problem.size)
    assert_near(inverse.matvec(a), times(matrix, a), 1e-12)
    assert_near(inverse.rmatvec(a), times(matrix.mT, a), 1e-12)
    # ⟨Av, w⟩ = ⟨v, Aᵀw⟩
    assert_near((inverse.matvec(a) * b).sum(1), (a * inverse.rmatvec(b)).sum(1), 1e-12)
    assert (inverse.matvec(a) - inverse.rmatvec(a)).abs().max() > 1e-3  # it is not symmetric


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_state_gives_a_state(structure, device):
    problem = structure().to(device)
    inverse = gdeq.solve(problem, problem.z0, Broyden(4, 0.0)).inverse
    flat = random_vector(problem)
    state = problem.unpack(flat)
    for product in (inverse.matvec, inverse.rmatvec):
        out = product(state)
        map_leaves(lambda a, b: torch.testing.assert_close(a.shape, b.shape) or a, out, state)
        assert torch.equal(pack(out), product(flat))


def test_a_vector_of_another_size_is_refused():
    problem = Named()
    inverse = gdeq.solve(problem, problem.z0, Broyden(4, 0.0)).inverse
    with pytest.raises(StateError):
        inverse.matvec(torch.zeros(3, problem.size + 1, dtype=torch.float64))


def test_rank_is_the_rank_of_what_was_added():
    problem = Wide()
    eye = torch.eye(problem.size, dtype=torch.float64)
    for memory, steps, rank in [(None, 1, 1), (None, 6, 6), (4, 3, 3), (4, 9, 4), (1, 5, 1)]:
        inverse = gdeq.solve(problem, problem.z0, Broyden(steps, 0.0, memory)).inverse
        assert inverse.rank == rank
        added = inverse.as_matrix() + eye
        assert torch.linalg.matrix_rank(added).tolist() == [rank] * 3


def test_transposing_twice_changes_nothing():
    operator = low_rank(base=low_rank(seed=1))
    x = torch.randn(2, 5, dtype=torch.float64)
    assert_near(operator.T.as_matrix(), operator.as_matrix().mT, 1e-14)
    assert torch.equal(operator.T.T.as_matrix(), operator.as_matrix())
    assert torch.equal(operator.T.matvec(x), operator.rmatvec(x))
    assert torch.equal(operator.T.rmatvec(x), operator.matvec(x))
    assert operator.T.T.u is operator.u  # views, not copies


def test_an_operator_upon_another_is_their_sum():
    base = low_rank(rank=2, seed=1)
    operator = low_rank(rank=3, base=base)
    x = torch.randn(2, 5, dtype=torch.float64)
    dense = base.as_matrix() + operator.u.mT @ operator.v
    assert operator.rank == 5
    assert_near(operator.as_matrix(), dense, 1e-14)
    assert_near(operator.matvec(x), times(dense, x), 1e-13)
    assert_near(operator.rmatvec(x), times(dense.mT, x), 1e-13)


def test_without_updates_it_is_minus_the_identity():
    operator = low_rank(rank=0)
    x = torch.randn(2, 5, dtype=torch.float64)
    assert operator.rank == 0
    assert torch.equal(operator.matvec(x), -x)
    assert torch.equal(operator.rmatvec(x), -x)
    assert torch.equal(operator.as_matrix(), -torch.eye(5, dtype=torch.float64).expand(2, 5, 5))


# --- what Broyden's method leaves behind ----------------------------------------------------------


def test_solved_from_the_start_it_is_still_minus_the_identity(device):
    problem = Multiscale().to(device)
    solution = gdeq.solve(problem, problem.equilibrium(), Broyden(20, 1e-8))
    assert solution.steps.tolist() == [0, 0, 0]
    assert solution.inverse.rank == 0
    eye = torch.eye(problem.size, dtype=torch.float64, device=device)
    assert torch.equal(solution.inverse.as_matrix(), -eye.expand(3, -1, -1))


def test_a_sample_solved_from_the_start_keeps_it_while_others_go_on():
    problem = Dense()
    z0 = problem.z0.clone()
    z0[1] = problem.equilibrium()[1]
    solution = gdeq.solve(problem, z0, Broyden(50, 1e-8))
    matrix = solution.inverse.as_matrix()
    eye = torch.eye(problem.size, dtype=torch.float64)
    assert solution.steps[1] == 0
    assert torch.equal(matrix[1], -eye)
    assert (matrix[[0, 2]] + eye).abs().amax((1, 2)).min() > 0.01


@pytest.mark.parametrize("memory", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 6, 9])
@pytest.mark.parametrize(
    "more", [{}, {"max_step": 0.3}, {"line_search": 3}], ids=["plain", "bounded", "line-search"]
)
def test_newest_secant_condition(memory, steps, more, device):
    problem = Wide(radius=2.0).to(device)  # overshoots, so that bound and line search do something
    last = gdeq.solve(problem, problem.z0, Broyden(steps, 0.0, memory, **more))
    z = pack(last.z)
    before = problem.z0
    if steps > 1:
        before = gdeq.solve(problem, problem.z0, Broyden(steps - 1, 0.0, memory, **more)).z
    s = z - before
    y = (problem.on_vectors(z) - z) - (problem.on_vectors(before) - before)
    assert s.norm(dim=1).min() > 1e-4
    assert_near(last.inverse.matvec(y.detach()), s, 1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_the_papers_recursion_step_by_step(structure, device):
    problem = structure(radius=0.8).to(device)
    start = pack(problem.z0)
    for steps in range(1, 7):
        solution = gdeq.solve(problem, problem.z0, Broyden(steps, 0.0))
        assert solution.steps.tolist() == [steps] * 3
        for i in range(3):
            z, inverse = paper_broyden(problem.root(i), start[i], steps)
            assert_near(pack(solution.z)[i], z, 1e-9)
            assert_near(solution.inverse.as_matrix()[i], inverse, 1e-9)


def test_both_references_agree_while_nothing_is_dropped():
    problem = Wide(radius=0.9)
    g, start = problem.root(0), pack(problem.z0)[0]
    for memory in (None, 7):
        for a, b in zip(
            paper_broyden(g, start, 7), limited_broyden(g, start, 7, memory), strict=True
        ):
            assert_near(a, b, 1e-11)


def test_in_one_dimension_it_is_the_secant_method():
    class Scalar(Dense):
        template = torch.empty(1, 1)

    problem = Scalar(radius=0.9)
    solution = gdeq.solve(problem, problem.z0, Broyden(50, 1e-9))
    slope = problem.dense_jacobian(solution.z) - 1
    assert solution.converged.all()
    assert_near(solution.inverse.as_matrix(), 1 / slope, 1e-3)


def test_for_an_affine_map_no_step_makes_the_estimate_worse():
    # Broyden's update is the nearest matrix that obeys the secant condition, and J − I obeys all.
    problem = Dense(radius=0.9, activation=identity)
    eye = torch.eye(problem.size, dtype=torch.float64)
    exact = problem.dense_jacobian(problem.z0) - eye
    errors = [(exact + eye).flatten(1).norm(dim=1)]
    for steps in range(1, 9):
        inverse = gdeq.solve(problem, problem.z0, Broyden(steps, 0.0)).inverse
        errors.append((torch.linalg.inv(inverse.as_matrix()) - exact).flatten(1).norm(dim=1))
    for before, after in pairwise(errors):
        assert (after <= before + 1e-9).all()
    assert (errors[-1] < 0.7 * errors[0]).all()


def test_a_missed_tolerance_returns_the_best_iterate_with_its_own_inverse(device):
    problem = Wide(radius=4.0, batch=8).to(device)
    solution = gdeq.solve(problem, problem.z0, Broyden(9, 1e-10))
    start = pack(problem.z0)
    assert not solution.converged.any()
    best = solution.trace.argmin(0) + 1
    assert 1 < best.min() < best.max() == 9  # some ended at their best, some did not
    assert_near(solution.residual, solution.trace.min(0).values, 0.0)
    for i, steps in enumerate(best.tolist()):
        z, inverse = paper_broyden(problem.root(i), start[i], steps)
        assert_near(pack(solution.z)[i], z, 1e-8)
        assert_near(solution.inverse.as_matrix()[i], inverse, 1e-8)


def test_frozen_samples_keep_their_factors(device):
    problem = Wide(batch=6, radius=0.6).to(device)
    with torch.no_grad():
        problem.x.mul_(torch.logspace(-2, 1, 6, dtype=torch.float64, device=device)[:, None])
    start = pack(problem.z0)
    for memory in (None, 3):
        solution = gdeq.solve(problem, problem.z0, Broyden(60, 1e-5, memory))
        assert solution.converged.all()
        assert len(set(solution.steps.tolist())) > 2
        for i, steps in enumerate(solution.steps.tolist()):
            z, inverse = limited_broyden(problem.root(i), start[i], steps, memory)
            assert_near(pack(solution.z)[i], z, 1e-9)
            assert_near(solution.inverse.as_matrix()[i], inverse, 1e-9)


def test_leaves_of_the_returned_state_stand_where_the_inverse_expects_them():
    # The packed order is that of z0's leaves; a dict is not sorted.
    problem = Named()
    assert list(problem.z0) == ["slow", "fast"]
    solution = gdeq.solve(problem, problem.z0, Broyden(5, 0.0))
    v = {
        "fast": torch.zeros(3, 2, 2, dtype=torch.float64),
        "slow": torch.ones(3, 3, dtype=torch.float64),
    }
    flat = torch.cat([torch.ones(3, 3), torch.zeros(3, 4)], dim=1).double()
    assert torch.equal(pack(solution.inverse.matvec(v)), solution.inverse.matvec(flat))
    assert [leaf.shape for leaf in leaves(solution.inverse.matvec(v))] == [(3, 3), (3, 2, 2)]
