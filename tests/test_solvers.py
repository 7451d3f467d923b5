"""Each solver against its definition, and the inverse that Broyden's method leaves behind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import gmres
from torch import Tensor

import gdeq
from cells import Network, contraction, draw, iterate_at
from gdeq import GMRES, Anderson, Broyden, Implicit, Picard
from gdeq.loop import iterate
from gdeq.solvers.base import System
from problems import (
    Dense,
    Image,
    Multiscale,
    Named,
    Nested,
    Wide,
    assert_near,
    limited_broyden,
    pack,
    paper_broyden,
)

STRUCTURES = [Dense, Image, Multiscale, Named, Nested]


# --- Broyden --------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_broyden_is_the_papers_recursion_step_by_step(structure, device):
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
        limited = limited_broyden(g, start, 7, memory)
        for a, b in zip(paper_broyden(g, start, 7), limited, strict=True):
            assert_near(a, b, 1e-11)


@pytest.mark.parametrize("memory", [None, 1, 2, 5])
@pytest.mark.parametrize("steps", [1, 2, 6, 9])
@pytest.mark.parametrize("more", [{}, {"max_step": 0.3}, {"line_search": 3}], ids=str)
def test_the_newest_secant_condition_holds(memory, steps, more, device):
    """B⁻¹y = s, also where the newest update took the place of the oldest."""
    problem = Wide(radius=2.0).to(device)  # overshoots, so that bound and line search do something
    solver = Broyden(steps, 0.0, memory, **more)
    last = gdeq.solve(problem, problem.z0, solver)
    before = iterate_at(problem, problem.z0, solver, steps - 1)
    s = last.z - before
    y = (problem(last.z) - last.z) - (problem(before) - before)
    assert s.norm(dim=1).min() > 1e-4
    assert_near(last.inverse.matvec(y.detach()), s, 1e-10)
    rank = min(steps, memory or steps)
    assert last.inverse.rank == rank
    added = last.inverse.as_matrix() + torch.eye(24).to(s)
    assert torch.linalg.matrix_rank(added).tolist() == [rank] * 3


@pytest.mark.parametrize("memory", [None, 1, 3])
def test_each_sample_keeps_the_inverse_of_its_own_last_step(memory, device):
    problem = Wide(batch=6, radius=0.6).to(device)
    with torch.no_grad():
        problem.x.mul_(torch.logspace(-2, 1, 6, dtype=torch.float64, device=device)[:, None])
    start = problem.z0.clone()
    start[3] = problem.equilibrium()[3]  # solved from the start
    solution = gdeq.solve(problem, start, Broyden(60, 1e-5, memory))
    assert solution.converged.all()
    assert len(set(solution.steps.tolist())) > 2
    assert solution.steps[3] == 0
    for i, steps in enumerate(solution.steps.tolist()):
        z, inverse = limited_broyden(problem.root(i), start[i], steps, memory)
        assert_near(pack(solution.z)[i], z, 1e-9)
        assert_near(solution.inverse.as_matrix()[i], inverse, 1e-9)
    solved = gdeq.solve(problem, problem.equilibrium(), Broyden(60, 1e-5, memory))
    assert solved.inverse.rank == 0


@pytest.mark.parametrize("memory", [2, 4])
def test_with_little_memory_no_later_update_is_left_in_the_best_inverse(memory, device):
    """What later updates displaced cannot come back, but what they brought must go."""
    f = Network([20.0] * 4, d=20, device=device)
    solver = Broyden(max_iter=15, tol=1e-9, memory=memory)
    solution = gdeq.solve(f, f.z0, solver)
    best = solution.trace.argmin(dim=0) + 1
    assert (best < 15).any()
    for i, steps in enumerate(best.tolist()):
        stopped = gdeq.solve(f, f.z0, replace(solver, max_iter=steps, tol=0.0)).inverse.vectors
        found = solution.inverse.vectors
        for u, v in zip(found.u[i], found.v[i], strict=True):
            if u.norm() == 0:
                continue
            same = (stopped.u[i] - u).norm(dim=1) + (stopped.v[i] - v).norm(dim=1)
            assert same.min() < 1e-10 * (u.norm() + v.norm())


def overshooting(z: Tensor) -> Tensor:
    """One fixed point, near 0.526; exponential growth away from it."""
    return z - torch.sinh(2 * z - 1) + 0.1 * z.roll(1, 1)


@pytest.mark.parametrize("remedy", [{"line_search": 5}, {"max_step": 0.1}, {"max_step": 0.5}])
def test_line_search_and_step_bound_rescue_a_map_that_overshoots(remedy, device):
    z0 = torch.tensor([[2.0, -2.0, 3.0], [0.5, 0.4, 0.6]], dtype=torch.float64, device=device)
    solver = Broyden(max_iter=100, tol=1e-10)
    plain = gdeq.solve(overshooting, z0, solver)
    assert plain.converged.tolist() == [False, True]
    rescued = gdeq.solve(overshooting, z0, replace(solver, **remedy))
    assert rescued.converged.all(), str(rescued)
    torch.testing.assert_close(rescued.z[0], rescued.z[1], rtol=1e-8, atol=1e-8)
    # The sample that needed no help is not hampered by it.
    torch.testing.assert_close(rescued.z[1], plain.z[1], rtol=1e-9, atol=1e-9)
    if "max_step" in remedy:
        assert rescued.steps[1] == plain.steps[1]


def test_the_step_bound_bounds_every_step():
    f = Network([0.9, 0.9], d=8, size=50.0)
    solver = Broyden(max_step=0.2)
    path = [iterate_at(f, f.z0, solver, t) for t in range(12)]
    for before, after in itertools.pairwise(path):
        bound = 0.2 * before.norm(dim=1).clamp(min=1.0)
        assert ((after - before).norm(dim=1) <= bound * (1 + 1e-12)).all()
    # The first ones reach the bound: it is this that shortened them.
    assert (path[1].norm(dim=1) > 0.2 * (1 - 1e-12)).all()


def test_a_line_search_lowers_the_residual_at_every_step(device):
    z0 = torch.tensor([[2.0, -2.0, 3.0]], dtype=torch.float64, device=device)
    solver = Broyden(max_iter=12, tol=0.0, stop="absolute", line_search=20)
    trace = gdeq.solve(overshooting, z0, solver).trace.squeeze(1)
    start = (overshooting(z0) - z0).norm()
    assert (torch.cat([start[None], trace]).diff() < 0).all()
    without = gdeq.solve(overshooting, z0, replace(solver, max_iter=1, line_search=0)).trace
    assert without[0, 0] > start
    # A step that makes ‖g‖ a little longer is halved, and of that sample alone.
    slope = torch.tensor([[2.05], [0.9]], dtype=torch.float64, device=device)
    zeros = torch.zeros_like(slope)
    halved = gdeq.solve(lambda z: z + 1 - slope * z, zeros, Broyden(1, 0.0, line_search=3))
    assert halved.z.tolist() == [[0.5], [1.0]]
    assert halved.evals == 3
    # It steps back from NaN too: log of a negative number, where half the step is fine.
    z0 = torch.full((2, 1), 3.0, dtype=torch.float64, device=device)
    f = lambda z: z - 4 * torch.log(z)  # noqa: E731
    assert not gdeq.solve(f, z0, Broyden()).converged.any()
    solution = gdeq.solve(f, z0, Broyden(line_search=8))
    assert solution.converged.all(), str(solution)
    torch.testing.assert_close(solution.z, torch.ones_like(z0), rtol=1e-5, atol=1e-5)


# --- Anderson, Picard -----------------------------------------------------------------------------


def anderson_reference(f, z: np.ndarray, memory: int, mixing: float, steps: int) -> list:
    """Walker & Ni, SIAM J. Numer. Anal. 49 (2011), unregularised, one sample: all iterates."""
    g, path = f(z) - z, []
    dz: list[np.ndarray] = []
    dg: list[np.ndarray] = []
    for _ in range(steps):
        step = mixing * g
        if dg:
            G, Z = np.stack(dg, 1), np.stack(dz, 1)
            gamma = np.linalg.lstsq(G, g, rcond=None)[0]
            step = step - (Z + mixing * G) @ gamma
        z_new = z + step
        g_new = f(z_new) - z_new
        dz, dg = [*dz, z_new - z][-memory:], [*dg, g_new - g][-memory:]
        z, g = z_new, g_new
        path.append(z)
    return path


@pytest.mark.parametrize("memory", [1, 2, 4])
@pytest.mark.parametrize("mixing", [1.0, 0.4])
def test_anderson_equals_its_definition(memory, mixing, device):
    f = Network([0.5, 0.95, 1.2], d=8, device=device)
    solver = Anderson(memory=memory, mixing=mixing, regularization=0.0)
    paths = [
        anderson_reference(lambda z, W=W, x=x: np.tanh(W @ z + x), np.zeros(8), memory, mixing, 8)
        for W, x in zip(f.W.cpu().numpy(), f.x.cpu().numpy(), strict=True)
    ]
    for steps in range(1, 9):
        z = iterate_at(f, f.z0, solver, steps).cpu().numpy()
        expected = np.stack([path[steps - 1] for path in paths])
        # Kernels take β in float32, and 0.4 is not one.
        near = 1e-7 if mixing == 1 or device.type == "cpu" else 1e-4
        np.testing.assert_allclose(z, expected, rtol=near, atol=0.1 * near)


def test_more_regularisation_takes_anderson_back_to_the_plain_iteration():
    f = Network([0.9, 0.9])
    plain = iterate_at(f, f.z0, Picard(damping=0.7), 6)
    some = iterate_at(f, f.z0, Anderson(mixing=0.7, regularization=1e-3), 6)
    much = iterate_at(f, f.z0, Anderson(mixing=0.7, regularization=1e12), 6)
    torch.testing.assert_close(much, plain, rtol=1e-9, atol=1e-9)
    assert (some - plain).norm() > 1e-2
    assert Anderson(regularization=0.0).ridge(torch.float64) > 0  # two parallel differences


@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_picard_is_the_damped_iteration(damping, device):
    f = Network([0.5, 2.0], device=device)
    z = f.z0
    for _ in range(7):
        z = (1 - damping) * z + damping * f(z)
    found = iterate_at(f, f.z0, Picard(damping=damping), 7)
    torch.testing.assert_close(found, z, rtol=1e-12, atol=1e-12)


# --- GMRES ----------------------------------------------------------------------------------------


def adjoint_problem(device, steps=None):
    """v, the product with Jᵀ, the dense Jᵀ, and a forward solution with its inverse."""
    f = Network([0.9] * 3, d=10, device=device)
    forward = Broyden(max_iter=steps or 100, tol=0.0 if steps else 1e-12)
    solution = gdeq.solve(f, f.z0, forward)
    slope = 1 - torch.tanh(torch.einsum("bij,bj->bi", f.W, solution.z) + f.x) ** 2
    Jt = (slope.unsqueeze(2) * f.W).transpose(1, 2)
    v = draw(3, 10, seed=7, device=device)
    return v, lambda u: torch.einsum("bij,bj->bi", Jt, u), Jt, solution


def scipy_gmres(A: np.ndarray, b: np.ndarray) -> tuple[list[float], np.ndarray]:
    """The relative residual after each product with A, and the answer."""
    history: list[float] = []
    x, _ = gmres(
        A, b, rtol=1e-13, restart=10, maxiter=1, callback=history.append, callback_type="pr_norm"
    )
    return history, x


@pytest.mark.parametrize("precondition", [False, True])
def test_gmres_has_scipys_residual_history(precondition, device):
    """Preconditioned from the right, by the transposed inverse: the residual is the true one."""
    v, vjp, Jt, solution = adjoint_problem(device, steps=6 if precondition else None)
    A = torch.eye(10).to(Jt) - Jt
    P = -solution.inverse.as_matrix().mT if precondition else torch.eye(10).to(A).expand_as(A)
    pairs = zip((A @ P).cpu().numpy(), v.cpu().numpy(), strict=True)
    histories, answers = zip(*(scipy_gmres(*pair) for pair in pairs), strict=True)
    for steps in range(1, 5 if precondition else 9):
        gradient = Implicit(GMRES(max_iter=steps, tol=0.0), precondition=precondition)
        found = gradient.cotangent(v, vjp, solution)
        for i in range(3):
            # After equally many products with the matrix.
            expected = histories[i][found.vjps - 1]
            assert found.residual[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
        left = (v - found.w + vjp(found.w)).norm(dim=1) / v.norm(dim=1)
        torch.testing.assert_close(found.residual, left, rtol=1e-6, atol=1e-12)
    full = Implicit(GMRES(max_iter=10, tol=1e-12), precondition=precondition)
    w = full.cotangent(v, vjp, solution).w
    expected = (P @ torch.tensor(np.stack(answers)).to(P).unsqueeze(2)).squeeze(2)
    assert_near(w, expected, 1e-8)


@pytest.mark.parametrize("solver", [GMRES(30, 1e-8), Broyden(60, 1e-8)], ids=repr)
def test_the_forward_inverse_as_preconditioner_saves_vjps(solver, device):
    v, vjp, Jt, solution = adjoint_problem(device)
    plain = Implicit(solver).cotangent(v, vjp, solution)
    helped = Implicit(solver, precondition=True).cotangent(v, vjp, solution)
    exact = torch.linalg.solve(torch.eye(10).to(Jt) - Jt, v)
    for found in (plain, helped):
        assert (found.residual <= found.tolerance).all()
        torch.testing.assert_close(found.w, exact, rtol=1e-6, atol=1e-6)
    assert helped.vjps < plain.vjps
    assert plain.vjps >= Implicit(GMRES(30, 1e-8)).cotangent(v, vjp, solution).vjps


def test_gmres_has_no_more_directions_than_the_system(device):
    """Asked for many more steps than dimensions, or of one that is solved, it stays where it is."""
    v, vjp, _, solution = adjoint_problem(device)
    found = Implicit(GMRES(max_iter=40, tol=0.0)).cotangent(v, vjp, solution)
    assert torch.isfinite(found.w).all()
    assert (found.residual < 1e-12).all()
    scaled = Implicit(GMRES(max_iter=5, tol=0.0)).cotangent(v, lambda u: 0.5 * u, solution)
    assert_near(scaled.w, 2 * v, 1e-12)  # one direction is all there is


def test_the_basis_of_gmres_is_orthonormal_and_ends_with_the_krylov_space():
    v, K, seen = draw(2, 12, seed=1), draw(12, 12, seed=2), []

    class Watched(GMRES):
        def inverse(self, state, at):  # called once, when the loop has ended
            seen.append(state)

    def basis(f):
        system = System(torch.finfo(torch.float64).eps, right=v)
        iterate(f, v, Watched(8, 0.0), system)
        kept = seen.pop().basis  # (batch, places, d)
        return kept, kept @ kept.mT

    # Images that are nearly those that are known: most of their digits go in the projection.
    kept, gram = basis(lambda w: v + 1e-5 * w @ K)
    assert_near(gram, torch.eye(kept.shape[1]).to(gram).expand_as(gram), 1e-13)
    # I − J differs from I by rank one: what is left of the third image is rounding.
    kept, gram = basis(lambda w: v + torch.outer(w @ K[0], K[1]) / 9)
    assert (kept.norm(dim=2) > 0).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("radius", [1e-3, 0.5, 0.99])
def test_gmres_takes_memory_for_the_steps_that_it_makes(radius):
    v, K, seen = draw(2, 200, seed=1), contraction(200, radius), []

    class Watched(GMRES):
        def inverse(self, state, at):  # called once, when the loop has ended
            seen.append(state)

    system = System(torch.finfo(torch.float64).eps, right=v)
    found = iterate(lambda w: v + w @ K, v, Watched(99, 1e-10), system)
    assert found.converged.all()
    assert_near(found.z - found.z @ K, v, 1e-8)
    rows = max(8, 2 * int(found.steps.max()))
    for vectors in (seen[0].directions, seen[0].basis[:, 1:], seen[0].hessenberg[:, 1:]):
        assert vectors.shape[1] <= rows < 99


@pytest.mark.parametrize("gap", [1e-4, 1e-6])
def test_gmres_claims_no_more_than_float32_can_hold(gap):
    """Where I − J is nearly singular w is long and f rounds it: the recurrence does not see it."""
    torch.manual_seed(0)
    weight = torch.randn(60, 60, dtype=torch.float64)
    spectrum = torch.linalg.eigvals(weight)
    real = spectrum[spectrum.imag.abs() < 1e-9].real.max()
    J = ((1 - gap) / real * weight).float()
    v = torch.randn(1, 60)
    solution = gdeq.solve(lambda z: z @ J.T, torch.zeros(1, 60), Picard(1))
    found = Implicit(GMRES(300, 1e-6)).cotangent(v, lambda u: u @ J, solution)
    measured = (v + found.w @ J - found.w).norm() / v.norm()
    assert measured > 1e-5
    assert found.residual > 0.1 * measured
    assert found.residual > found.tolerance
    assert found.vjps < 70  # and where rounding is all that is left it spends no more


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
