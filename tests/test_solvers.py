"""Each solver and the loop they share: stopping, freezing, best-so-far, status, trace."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import gmres
from torch import Tensor

import gdeq
from gdeq import Status

SOLVERS = [gdeq.Broyden(), gdeq.Anderson(), gdeq.Picard()]
by_name = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)


def draw(*shape: int, seed: int, device: torch.device | None = None) -> Tensor:
    """The same numbers on every device."""
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make, dtype=torch.float64).to(device)


def with_norm(A: Tensor, norm: float) -> Tensor:
    return norm * A / torch.linalg.matrix_norm(A, 2)[..., None, None]


class Network:
    """f(z) = size tanh((W z + x) / size), with its own W for every sample; counts its calls.

    norms: ‖W‖ of each sample, which bounds the contraction factor.
    """

    def __init__(self, norms, d=6, seed=0, device=None, dtype=torch.float64, size=1.0):
        self.W = with_norm(draw(len(norms), d, d, seed=seed), 1.0)
        self.W = (self.W * torch.tensor(norms).double()[:, None, None]).to(device, dtype)
        self.x = size * draw(len(norms), d, seed=seed + 1, device=device).to(dtype)
        self.size = size
        self.calls = 0

    @property
    def z0(self) -> Tensor:
        return torch.zeros_like(self.x)

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.size * torch.tanh((torch.einsum("bij,bj->bi", self.W, z) + self.x) / self.size)


def iterate_at(f, z0: Tensor, solver: gdeq.Solver, t: int) -> Tensor:
    return z0 if t == 0 else gdeq.solve(f, z0, replace(solver, max_iter=t, tol=0.0)).z


def relative_residual(f, z: Tensor) -> Tensor:
    fz = f(z)
    return (fz - z).norm(dim=1) / torch.maximum(fz.norm(dim=1), z.norm(dim=1))


# --- stopping -------------------------------------------------------------------------------------


@by_name
@pytest.mark.parametrize("stop", ["relative", "absolute"])
def test_stops_at_the_first_iterate_within_the_tolerance(solver, stop, device):
    f = Network([0.3, 0.6, 0.9], device=device, size=100.0)  # the two residuals differ by far
    solver = replace(solver, max_iter=300, tol=1e-5, stop=stop)
    solution = gdeq.solve(f, f.z0, solver)
    assert solution.converged.all()
    assert solution.evals == f.calls == int(solution.steps.max()) + 1
    recomputed = relative_residual(f, solution.z)
    if stop == "absolute":
        recomputed = (f(solution.z) - solution.z).norm(dim=1)
    torch.testing.assert_close(solution.residual, recomputed, rtol=1e-6, atol=1e-12)
    assert (recomputed <= 1.0001e-5).all()
    for i, steps in enumerate(solution.steps.tolist()):
        assert solution.trace[steps - 1, i] <= 1e-5
        assert (solution.trace[: steps - 1, i] > 1e-5).all()


@by_name
def test_relative_and_absolute_are_different_questions(solver):
    f = Network([0.6, 0.6], size=1000.0)
    relative = gdeq.solve(f, f.z0, replace(solver, max_iter=300, tol=1e-6))
    absolute = gdeq.solve(f, f.z0, replace(solver, max_iter=300, tol=1e-6, stop="absolute"))
    assert relative.converged.all()
    assert absolute.converged.all()
    assert (absolute.steps > relative.steps).all()


@by_name
def test_a_start_within_the_tolerance_is_returned_as_it_is(solver):
    f = Network([0.3, 0.5])
    z0 = gdeq.solve(f, f.z0, gdeq.Broyden(tol=1e-12)).z
    solution = gdeq.solve(f, z0, replace(solver, tol=1e-6))
    assert solution.converged.all()
    assert solution.evals == 1
    assert solution.trace.shape == (0, 2)
    assert solution.steps.tolist() == [0, 0]
    assert torch.equal(solution.z, z0)


@by_name
@pytest.mark.parametrize("max_iter", [1, 7, 40])
def test_tolerance_zero_runs_exactly_max_iter_steps(solver, max_iter, device):
    f = Network([0.01, 0.5, 2.0], device=device)  # at 40 steps the first is long exact
    solution = gdeq.solve(f, f.z0, replace(solver, max_iter=max_iter, tol=0.0))
    assert solution.steps.tolist() == [max_iter] * 3
    assert solution.evals == f.calls == max_iter + 1
    assert solution.trace.shape == (max_iter, 3)
    assert not solution.converged.any()
    assert torch.isfinite(solution.z).all()


def test_tolerance_zero_returns_the_last_iterate_not_the_best(device):
    f = Network([0.5, 20.0], d=20, device=device)
    z = f.z0
    for _ in range(9):
        z = f(z)
    solution = gdeq.solve(f, f.z0, gdeq.Picard(max_iter=9, tol=0.0))
    torch.testing.assert_close(solution.z, z, rtol=1e-13, atol=1e-13)
    assert solution.trace[-1, 1] > solution.trace[:, 1].min()  # the last is not the best
    torch.testing.assert_close(solution.residual, solution.trace[-1])


@by_name
def test_tolerance_zero_at_an_exact_solution_claims_no_failure_of_f(solver):
    """z0 is the fixed point: whatever the status says, it cannot be that there is none."""
    solution = gdeq.solve(lambda z: 0.5 * z, torch.zeros(2, 3), replace(solver, max_iter=3, tol=0))
    assert Status.STALLED not in solution.status
    assert Status.DIVERGED not in solution.status


@by_name
@pytest.mark.parametrize("every", [2, 5, 1000])
def test_checking_less_often_changes_nothing_but_evals(solver, every, device):
    f = Network([0.2, 0.5, 0.8], device=device)
    solver = replace(solver, max_iter=203, tol=1e-8)
    often = gdeq.solve(f, f.z0, solver)
    seldom = gdeq.solve(f, f.z0, replace(solver, check_every=every))
    needed = int(often.steps.max())
    assert seldom.evals == min(-(-needed // every) * every, 203) + 1
    for name in ("z", "residual", "steps", "trace", "codes", "converged"):
        assert torch.equal(getattr(often, name), getattr(seldom, name)), name
    if often.inverse is not None:
        ours, theirs = often.inverse.as_matrix(), seldom.inverse.as_matrix()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_host_synchronisation_without_a_tolerance():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    f = Network([0.5, 0.9], device="cuda")
    for solver in [*SOLVERS, gdeq.Broyden(memory=3), gdeq.Broyden(max_step=0.5)]:
        z0 = f.z0
        torch.cuda.set_sync_debug_mode("error")
        try:
            gdeq.solve(f, z0, replace(solver, max_iter=8, tol=0.0))
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- Broyden --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1, 3, 8])
def test_broyden_with_little_memory_converges(memory, device):
    f = Network([0.3, 0.6, 0.9], d=20, device=device)
    solution = gdeq.solve(f, f.z0, gdeq.Broyden(max_iter=300, tol=1e-10, memory=memory))
    assert solution.converged.all(), str(solution)
    assert int(solution.steps.max()) > memory  # so that something was dropped
    assert solution.inverse.rank <= memory
    spectrum = torch.linalg.matrix_rank(solution.inverse.as_matrix() + torch.eye(20).to(device))
    assert (spectrum <= memory).all()
    assert (relative_residual(f, solution.z) < 2e-10).all()


@pytest.mark.parametrize("memory", [None, 1, 2, 5])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 9])
def test_the_newest_secant_condition_holds(memory, steps, device):
    """B⁻¹y = s, also where the newest update took the place of the oldest."""
    f = Network([0.5, 0.9, 1.3], d=12, device=device)
    solver = gdeq.Broyden(max_iter=steps, tol=0.0, memory=memory)
    solution = gdeq.solve(f, f.z0, solver)
    before = iterate_at(f, f.z0, solver, steps - 1)
    s = solution.z - before
    y = (f(solution.z) - solution.z) - (f(before) - before)
    torch.testing.assert_close(solution.inverse.matvec(y), s, rtol=1e-8, atol=1e-10)
    assert solution.inverse.rank == min(steps, memory or steps)


def overshooting(z: Tensor) -> Tensor:
    """One fixed point, near 0.526; exponential growth away from it."""
    return z - torch.sinh(2 * z - 1) + 0.1 * z.roll(1, 1)


@pytest.mark.parametrize(
    "help_", [{"line_search": 5}, {"max_step": 0.1}, {"max_step": 0.5}], ids=str
)
def test_line_search_and_step_bound_rescue_a_map_that_overshoots(help_, device):
    z0 = torch.tensor([[2.0, -2.0, 3.0], [0.5, 0.4, 0.6]], dtype=torch.float64, device=device)
    solver = gdeq.Broyden(max_iter=100, tol=1e-10)
    plain = gdeq.solve(overshooting, z0, solver)
    assert plain.converged.tolist() == [False, True]
    rescued = gdeq.solve(overshooting, z0, replace(solver, **help_))
    assert rescued.converged.all(), str(rescued)
    torch.testing.assert_close(rescued.z[0], rescued.z[1], rtol=1e-8, atol=1e-8)
    # The sample that needed no help is not hampered by it.
    torch.testing.assert_close(rescued.z[1], plain.z[1], rtol=1e-9, atol=1e-9)


def test_the_step_bound_bounds_every_step():
    f = Network([0.9, 0.9], d=8, size=50.0)
    solver = gdeq.Broyden(max_step=0.2)
    path = [iterate_at(f, f.z0, solver, t) for t in range(12)]
    for before, after in itertools.pairwise(path):
        bound = 0.2 * before.norm(dim=1).clamp(min=1.0)
        assert ((after - before).norm(dim=1) <= bound * (1 + 1e-12)).all()
    # The first ones reach the bound: it is this that shortened them.
    assert (path[1].norm(dim=1) > 0.2 * (1 - 1e-12)).all()


def test_a_line_search_lowers_the_residual_at_every_step():
    z0 = torch.tensor([[2.0, -2.0, 3.0]], dtype=torch.float64)
    solver = gdeq.Broyden(max_iter=12, tol=0.0, stop="absolute", line_search=20)
    trace = gdeq.solve(overshooting, z0, solver).trace.squeeze(1)
    start = (overshooting(z0) - z0).norm()
    assert (torch.cat([start[None], trace]).diff() < 0).all()
    without = gdeq.solve(overshooting, z0, replace(solver, max_iter=1, line_search=0)).trace
    assert without[0, 0] > start


# --- Anderson, Picard -----------------------------------------------------------------------------


def anderson_reference(f, z: np.ndarray, memory: int, mixing: float, steps: int) -> np.ndarray:
    """Walker & Ni, SIAM J. Numer. Anal. 49 (2011), unregularised, one sample."""
    g = f(z) - z
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
    return z


@pytest.mark.parametrize("memory", [1, 2, 4])
@pytest.mark.parametrize("mixing", [1.0, 0.4])
def test_anderson_equals_its_definition(memory, mixing, device):
    f = Network([0.5, 0.95, 1.2], d=8, device=device)
    for steps in range(1, 9):
        solver = gdeq.Anderson(
            max_iter=steps, tol=0.0, memory=memory, mixing=mixing, regularization=0.0
        )
        z = gdeq.solve(f, f.z0, solver).z
        for i in range(3):
            W, x = f.W[i].cpu().numpy(), f.x[i].cpu().numpy()
            expected = anderson_reference(
                lambda z, W=W, x=x: np.tanh(W @ z + x), np.zeros(8), memory, mixing, steps
            )
            np.testing.assert_allclose(z[i].cpu().numpy(), expected, rtol=1e-7, atol=1e-8)


def test_anderson_with_full_memory_solves_a_linear_map_in_d_plus_one_steps(device):
    """It is then essentially GMRES (Walker & Ni 2011), whose space is full after d steps."""
    A, b = with_norm(draw(3, 5, 5, seed=4, device=device), 0.9), draw(3, 5, seed=5, device=device)
    solver = gdeq.Anderson(max_iter=6, tol=1e-8, memory=6, regularization=0.0)
    solution = gdeq.solve(
        lambda z: torch.einsum("bij,bj->bi", A, z) + b, torch.zeros_like(b), solver
    )
    assert solution.converged.all(), str(solution)


def test_more_regularisation_takes_anderson_back_to_the_plain_iteration():
    f = Network([0.9, 0.9])
    plain = iterate_at(f, f.z0, gdeq.Picard(damping=0.7), 6)
    some = iterate_at(f, f.z0, gdeq.Anderson(mixing=0.7, regularization=1e-3), 6)
    much = iterate_at(f, f.z0, gdeq.Anderson(mixing=0.7, regularization=1e12), 6)
    torch.testing.assert_close(much, plain, rtol=1e-9, atol=1e-9)
    assert (some - plain).norm() > 1e-2


@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_picard_is_the_damped_iteration(damping, device):
    f = Network([0.5, 2.0], device=device)
    z = f.z0
    for _ in range(7):
        z = (1 - damping) * z + damping * f(z)
    found = iterate_at(f, f.z0, gdeq.Picard(damping=damping), 7)
    torch.testing.assert_close(found, z, rtol=1e-12, atol=1e-12)


def test_damping_rescues_an_oscillating_map():
    f = lambda z: 1 - 1.5 * z  # noqa: E731
    z0 = torch.zeros(1, 2, dtype=torch.float64)
    assert not gdeq.solve(f, z0, gdeq.Picard(max_iter=200)).converged.any()
    damped = gdeq.solve(f, z0, gdeq.Picard(max_iter=200, damping=0.5))
    assert damped.converged.all()
    torch.testing.assert_close(damped.z, torch.full_like(z0, 0.4), rtol=1e-5, atol=1e-5)


# --- GMRES ----------------------------------------------------------------------------------------


def adjoint_problem(device, norm=0.9, steps=None):
    """v, the product with Jᵀ, the dense Jᵀ, and a forward solution with its inverse."""
    f = Network([norm] * 3, d=10, device=device)
    forward = gdeq.Broyden(max_iter=steps or 100, tol=0.0 if steps else 1e-12)
    solution = gdeq.solve(f, f.z0, forward)
    z = solution.z
    slope = 1 - torch.tanh(torch.einsum("bij,bj->bi", f.W, z) + f.x) ** 2
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


def test_gmres_has_scipys_residual_history(device):
    v, vjp, Jt, solution = adjoint_problem(device)
    histories, answers = [], []
    for i in range(3):
        history, x = scipy_gmres(np.eye(10) - Jt[i].cpu().numpy(), v[i].cpu().numpy())
        histories.append(history)
        answers.append(x)
    for steps in range(1, 9):
        gradient = gdeq.Implicit(gdeq.GMRES(max_iter=steps, tol=0.0))
        found = gradient.cotangent(v, vjp, solution)
        for i in range(3):
            # After equally many products with the matrix.
            expected = histories[i][found.vjps - 1]
            assert found.residual[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
        left = (v - found.w + vjp(found.w)).norm(dim=1) / v.norm(dim=1)
        torch.testing.assert_close(found.residual, left, rtol=1e-6, atol=1e-12)
    full = gdeq.Implicit(gdeq.GMRES(max_iter=10, tol=1e-12)).cotangent(v, vjp, solution)
    np.testing.assert_allclose(full.w.cpu().numpy(), np.stack(answers), rtol=1e-8, atol=1e-8)


def test_preconditioned_gmres_is_gmres_on_the_preconditioned_system(device):
    """From the right, with the transposed forward inverse: the residual stays the true one."""
    v, vjp, Jt, solution = adjoint_problem(device, steps=6)
    A = torch.eye(10).to(Jt) - Jt
    AP = (A @ -solution.inverse.as_matrix().transpose(1, 2)).cpu().numpy()
    gradient = gdeq.Implicit(gdeq.GMRES(max_iter=4, tol=0.0), precondition=True)
    found = gradient.cotangent(v, vjp, solution)
    for i in range(3):
        history, _ = scipy_gmres(AP[i], v[i].cpu().numpy())
        expected = history[found.vjps - 1]
        assert found.residual[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "solver", [gdeq.GMRES(max_iter=30, tol=1e-8), gdeq.Broyden(max_iter=60, tol=1e-8)], ids=repr
)
def test_the_forward_inverse_as_preconditioner_saves_vjps(solver, device):
    v, vjp, Jt, solution = adjoint_problem(device)
    plain = gdeq.Implicit(solver).cotangent(v, vjp, solution)
    helped = gdeq.Implicit(solver, precondition=True).cotangent(v, vjp, solution)
    assert plain.converged.all()
    assert helped.converged.all()
    assert helped.vjps < plain.vjps
    exact = torch.linalg.solve(torch.eye(10).to(Jt) - Jt, v)
    for found in (plain, helped):
        torch.testing.assert_close(found.w, exact, rtol=1e-6, atol=1e-6)


def test_gmres_needs_no_more_vjps_than_broyden(device):
    v, vjp, _, solution = adjoint_problem(device)
    few = gdeq.Implicit(gdeq.GMRES(max_iter=30, tol=1e-6)).cotangent(v, vjp, solution)
    more = gdeq.Implicit(gdeq.Broyden(max_iter=60, tol=1e-6)).cotangent(v, vjp, solution)
    assert few.converged.all()
    assert few.vjps <= more.vjps


@pytest.mark.parametrize("call", [gdeq.solve, gdeq.fixed_point])
def test_gmres_is_refused_as_a_forward_solver(call):
    with pytest.raises(ValueError, match=r"GMRES solves linear systems only.*gdeq\.Implicit"):
        call(torch.cos, torch.zeros(1, 1), gdeq.GMRES())


@pytest.mark.parametrize("wrong", [gdeq.Broyden, "broyden", gdeq.GDEQ(), 3])
def test_what_is_no_solver_is_refused(wrong):
    with pytest.raises(TypeError, match=r"solver must be a solver such as gdeq.Broyden\(\)"):
        gdeq.solve(torch.cos, torch.zeros(1, 1), wrong)


# --- freezing, best-so-far ------------------------------------------------------------------------


@by_name
def test_a_converged_sample_is_frozen_however_long_the_others_run(solver, device):
    f = Network([0.1, 20.0, 0.3], d=20, device=device)
    solver = replace(solver, tol=1e-7)
    short, long = (
        gdeq.solve(f, f.z0, replace(solver, max_iter=n, check_every=k))
        for n, k in [(20, 1), (60, 7)]
    )
    done = [0, 2]
    assert short.converged.tolist() == [True, False, True]
    assert int(short.steps[done].max()) < 12
    assert long.steps[1] > 40
    for name in ("z", "residual", "steps", "codes"):
        assert torch.equal(getattr(short, name)[done], getattr(long, name)[done]), name
    assert torch.equal(short.trace[:, done], long.trace[:20, done])
    for i in done:
        last = int(long.steps[i]) - 1
        assert (long.trace[last:, i] == long.residual[i]).all()
    if short.inverse is not None:
        # And it is the inverse of a run that ends where the sample did.
        for i in done:
            alone = gdeq.solve(f, f.z0, replace(solver, max_iter=int(short.steps[i]))).inverse
            expected = alone.as_matrix()[i]
            for solution in (short, long):
                found = solution.inverse.as_matrix()[i]
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@by_name
def test_without_convergence_the_best_iterate_is_returned(solver, device):
    f = Network([20.0] * 4, d=20, device=device)
    solver = replace(solver, max_iter=15, tol=1e-9)
    solution = gdeq.solve(f, f.z0, solver)
    assert not solution.converged.any()
    history = torch.cat([relative_residual(f, f.z0)[None], solution.trace])
    # The best is the one of smallest ‖g‖, which an absolute trace shows.
    absolute = gdeq.solve(f, f.z0, replace(solver, stop="absolute")).trace
    start = (f(f.z0) - f.z0).norm(dim=1)[None]
    best = torch.cat([start, absolute]).argmin(dim=0)
    assert (best < 15).any()  # or the last would be the best anyway
    for i, steps in enumerate(best.tolist()):
        assert solution.residual[i] == history[steps, i]
        expected = iterate_at(f, f.z0, solver, steps)[i]
        torch.testing.assert_close(solution.z[i], expected, rtol=1e-12, atol=1e-12)
        if solution.inverse is not None:
            stopped = gdeq.solve(f, f.z0, replace(solver, max_iter=steps, tol=0.0)).inverse
            found, expected = solution.inverse.as_matrix()[i], stopped.as_matrix()[i]
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_best_iterate_can_be_the_first(device):
    """A start next to a repelling fixed point: all that follows is worse."""
    f = lambda z: 3 * z - 2  # noqa: E731
    z0 = 1 + 1e-3 * draw(2, 3, seed=1, device=device)
    solution = gdeq.solve(f, z0, gdeq.Picard(max_iter=5, tol=1e-6))
    assert torch.equal(solution.z, z0)
    torch.testing.assert_close(solution.residual, relative_residual(f, z0))


@pytest.mark.parametrize("memory", [2, 4])
def test_with_little_memory_no_later_update_is_left_in_the_best_inverse(memory, device):
    """What later updates displaced cannot come back, but what they brought must go."""
    f = Network([20.0] * 4, d=20, device=device)
    solver = gdeq.Broyden(max_iter=15, tol=1e-9, memory=memory)
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


# --- status ---------------------------------------------------------------------------------------


def test_with_tol_0_nothing_is_said_about_convergence(device):
    f = Network([0.5] * 3, d=4, device=device)
    solution = gdeq.solve(f, f.z0, gdeq.Broyden(3, tol=0.0))
    assert solution.status == [Status.FIXED_STEPS] * 3
    assert str(solution).startswith("3 samples, not asked to converge: at most 3 steps")


def test_those_that_were_lost_among_a_fixed_number_of_steps_are_told(device):
    def f(z):
        out = 0.5 * torch.tanh(z) + 1
        lost = torch.tensor([False, True, False], device=device).unsqueeze(1) & (z > 0.5)
        return torch.where(lost, torch.nan, out)

    solution = gdeq.solve(f, torch.zeros(3, 4, device=device), gdeq.Broyden(5, 0.0))
    first, second = str(solution).splitlines()
    assert first.startswith("3 samples, not asked to converge, 1 lost: at most 5 steps")
    assert second.startswith("  sample 1: stopped: f returned NaN")


def ended(solution: gdeq.Solution) -> Status:
    assert len(set(solution.status)) == 1
    return solution.status[0]


def test_status_converged():
    solution = gdeq.solve(torch.cos, torch.ones(2, 1), gdeq.Broyden())
    assert ended(solution) is Status.CONVERGED
    assert str(solution.status[0]).startswith("converged")
    assert solution.converged.all()


def test_status_out_of_steps():
    f = lambda z: 0.9 * z + 1  # noqa: E731
    solution = gdeq.solve(f, torch.zeros(2, 1), gdeq.Picard(max_iter=5))
    assert ended(solution) is Status.MAX_STEPS
    assert "not converged: the solver ran out of steps" in str(solution.status[0])


@by_name
def test_status_rounding(solver, device):
    """A tolerance below float32's reach stops at the rounding level, long before max_iter."""
    f = Network([0.3, 0.5, 0.3], d=40, device=device, dtype=torch.float32)
    solution = gdeq.solve(f, f.z0, replace(solver, max_iter=1000, tol=1e-12))
    # A residual of exactly zero is within any tolerance.
    assert set(solution.status) <= {Status.ROUNDING, Status.CONVERGED}
    assert ((solution.residual == 0) == solution.converged).all()
    assert int(solution.steps.max()) < 100
    assert (solution.residual < 1e-7).all()
    sentence = str(Status.ROUNDING)
    assert "rounding level of the dtype" in sentence
    assert "raise tol" in sentence


def test_rounding_is_judged_by_what_f_computes_in():
    """A bfloat16 state cannot do better than bfloat16, though the algebra is in float32."""
    x = draw(3, 40, seed=2).bfloat16()
    solution = gdeq.solve(lambda z: torch.cos(0.5 * z + x), torch.zeros_like(x), gdeq.Picard(200))
    assert set(solution.status) <= {Status.ROUNDING, Status.CONVERGED}
    assert (solution.residual < 4e-3).all()


ADD_A_CONSTANT = {
    "broyden": gdeq.Broyden(),
    "broyden-memory": gdeq.Broyden(memory=2),
    "broyden-line-search": gdeq.Broyden(line_search=3),
    "broyden-max-step": gdeq.Broyden(max_step=0.5),
    "anderson": gdeq.Anderson(),
    "picard": gdeq.Picard(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ADD_A_CONSTANT)
def test_no_fixed_point_is_said_and_never_called_converged(name, dtype, device):
    """f(z) = z + c.  Rounding makes g = c look as if it changed with z: that must fool nobody."""
    for d, max_iter in [(1, 3), (1, 50), (5, 50), (5, 300)]:
        c = draw(50, d, seed=1, device=device).to(dtype)
        z0 = draw(50, d, seed=2, device=device).to(dtype)
        solver = replace(ADD_A_CONSTANT[name], max_iter=max_iter)
        solution = gdeq.solve(lambda z, c=c: z + c, z0, solver)
        assert not solution.converged.any()
        assert ended(solution) is Status.STALLED
        assert "no fixed point" in str(solution.status[0])
        assert torch.isfinite(solution.z).all()
        assert torch.isfinite(solution.residual).all()
        assert torch.isfinite(solution.trace).all()
        # Nothing can be learned from it, so no step is longer than c.
        moved = (solution.z - z0).norm(dim=1)
        assert (moved <= 1.01 * max_iter * c.norm(dim=1)).all()
        if solution.inverse is not None:
            assert torch.isfinite(solution.inverse.as_matrix()).all()


@pytest.mark.parametrize("d", [1, 3])
@by_name
def test_a_runaway_is_not_converged(solver, d, device):
    """g is bounded: after a step to 1e14 the residual is small, but relative to that z alone."""
    z0 = torch.tensor([[5.0, 3.0, -7.0], [9.0, 2.0, 4.0]], dtype=torch.float64, device=device)
    f = lambda z: z - 10 * torch.atan(z - 1)  # noqa: E731
    solution = gdeq.solve(f, z0[:, :d], replace(solver, max_iter=100, tol=1e-10))
    gap = (solution.z - 1).norm(dim=1)
    assert (gap[solution.converged] < 1e-6).all(), str(solution)


def test_status_diverged():
    f = lambda z: 2 * z + 1  # noqa: E731
    for z0 in (torch.zeros(2, 3), torch.ones(2, 3)):  # zeros are what a layer starts from
        for stop in ("relative", "absolute"):
            solution = gdeq.solve(f, z0, gdeq.Picard(max_iter=30, stop=stop))
            assert ended(solution) is Status.DIVERGED
            assert str(solution.status[0]).startswith("diverged")


def test_diverged_after_a_good_iterate_says_which_residual_is_which():
    """f is good near 1 until its last call, which throws z far away."""
    calls = []

    def f(z):
        calls.append(z)
        return 0.5 * z + 1 if len(calls) < 6 else 1e3 * z

    solution = gdeq.solve(f, torch.zeros(1, 2), gdeq.Picard(max_iter=5))
    assert ended(solution) is Status.DIVERGED
    best, last = solution.residual.item(), solution.trace[-1, 0].item()
    assert best < 0.1 < last
    assert "f(z) - z is larger after the last step than at the start" in str(solution.status[0])
    shown = f"[step 5, residual {last:.1e}; returned is the z with the least ‖f(z) - z‖, residual "
    shown += f"{best:.1e}]"
    assert shown in str(solution)
    calls.clear()  # without a tolerance the last z is returned: there is one residual to show
    solution = gdeq.solve(f, torch.zeros(1, 2), gdeq.Picard(max_iter=5, tol=0))
    assert f"[step 5, residual {last:.1e}]" in str(solution)


def test_slow_progress_is_not_taken_for_no_fixed_point():
    """0.999 is a contraction: with so few steps it has moved little, but it has not stalled."""
    f = lambda z: 0.999 * z + 1  # noqa: E731
    solution = gdeq.solve(f, torch.zeros(1, 2, dtype=torch.float64), gdeq.Picard(max_iter=5))
    assert ended(solution) is Status.MAX_STEPS


def test_status_unrolled():
    solution = gdeq.fixed_point(
        torch.cos, torch.zeros(2, 1), solver=None, gradient=gdeq.Unrolled(steps=3)
    )
    assert ended(solution) is Status.UNROLLED
    assert "unrolled for a fixed number of steps" in str(solution.status[0])


def test_every_status_is_a_sentence_of_its_own():
    sentences = [str(status) for status in Status]
    assert len(set(sentences)) == len(Status)
    assert all(len(sentence) > 10 and "Status" not in sentence for sentence in sentences)


# --- NaN ------------------------------------------------------------------------------------------


class Failing(Network):
    """Returns ``bad`` for one sample from a given call of f on (1 is the first)."""

    def __init__(self, *args, sample: int, call: int, bad: float = float("nan"), **kwargs):
        super().__init__(*args, **kwargs)
        self.sample, self.call, self.bad = sample, call, bad

    def __call__(self, z: Tensor) -> Tensor:
        out = super().__call__(z)
        if self.calls >= self.call:
            out[self.sample] = self.bad
        return out


NORMS = [0.3, 0.6, 0.9, 0.5]
BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)


def assert_others_unharmed(solution, clean, without, sample: int) -> None:
    others = [i for i in range(4) if i != sample]
    for name in ("z", "residual", "steps", "codes"):
        ours = getattr(solution, name)[others]
        # Bit for bit what they are in the same batch with a good neighbour ...
        assert torch.equal(ours, getattr(clean, name)[others]), name
        # ... and to rounding what they are without it.
        torch.testing.assert_close(ours, getattr(without, name), rtol=1e-9, atol=1e-12)
    rows = min(len(solution.trace), len(clean.trace))
    assert torch.equal(solution.trace[:rows, others], clean.trace[:rows, others])
    if solution.inverse is not None:
        ours = solution.inverse.as_matrix()
        assert torch.isfinite(ours).all()
        clean, without = clean.inverse.as_matrix()[others], without.inverse.as_matrix()
        torch.testing.assert_close(ours[others], clean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours[others], without, rtol=1e-7, atol=1e-9)


def clean_runs(solver, sample: int, device):
    """The batch with a good sample in that place, and the batch without that sample."""
    f = Network(NORMS, device=device)
    clean = gdeq.solve(f, f.z0, solver)
    keep = [i for i in range(4) if i != sample]
    f.W, f.x = f.W[keep], f.x[keep]
    return clean, gdeq.solve(f, f.z0, solver)


@by_name
@BAD
@pytest.mark.parametrize("tol", [1e-8, 0.0])
def test_nan_at_the_first_call(solver, bad, tol, device):
    solver = replace(solver, max_iter=60, tol=tol)
    f = Failing(NORMS, sample=2, call=1, bad=bad, device=device)
    z0 = 0.1 * draw(4, 6, seed=5, device=device)
    clean_f = Network(NORMS, device=device)
    clean = gdeq.solve(clean_f, z0, solver)
    keep = [0, 1, 3]
    clean_f.W, clean_f.x = clean_f.W[keep], clean_f.x[keep]
    solution = gdeq.solve(f, z0, solver)
    assert solution.status[2] is Status.NONFINITE_START
    assert "first" in str(solution.status[2])
    assert not solution.converged[2]
    assert torch.equal(solution.z[2], z0[2])
    assert solution.steps[2] == 0
    if solution.inverse is not None:
        eye = torch.eye(6, dtype=torch.float64, device=device)
        assert torch.equal(solution.inverse.as_matrix()[2], -eye)
    assert_others_unharmed(solution, clean, gdeq.solve(clean_f, z0[keep], solver), 2)


@by_name
@BAD
@pytest.mark.parametrize("call", [2, 5])
@pytest.mark.parametrize("tol", [1e-8, 0.0])
def test_nan_at_a_later_call(solver, bad, call, tol, device):
    solver = replace(solver, max_iter=60, tol=tol)
    f = Failing(NORMS, sample=2, call=call, bad=bad, device=device)
    solution = gdeq.solve(f, f.z0, solver)
    clean, without = clean_runs(solver, 2, device)
    assert solution.status[2] is Status.NONFINITE
    assert "NaN or infinity; an earlier iterate is returned" in str(solution.status[2])
    assert not solution.converged[2]
    # Call n + 1 belongs to step n; the last good iterate is that of the step before.
    good = call - 2
    assert solution.steps[2] == good + 1
    clean_f = Network(NORMS, device=device)
    expected = iterate_at(clean_f, clean_f.z0, solver, good)[2]
    torch.testing.assert_close(solution.z[2], expected, rtol=1e-12, atol=1e-12)
    residual = relative_residual(clean_f, solution.z)[2]
    torch.testing.assert_close(solution.residual[2], residual, rtol=1e-9, atol=1e-12)
    assert (solution.trace[good:, 2] == solution.residual[2]).all()
    assert_others_unharmed(solution, clean, without, 2)


@by_name
def test_a_whole_batch_of_nan(solver, device):
    z0 = draw(3, 4, seed=1, device=device)
    solution = gdeq.solve(lambda z: z * float("nan"), z0, solver)
    assert ended(solution) is Status.NONFINITE_START
    assert torch.equal(solution.z, z0)
    assert solution.evals == 1
    assert solution.trace.shape == (0, 3)


def test_a_line_search_steps_back_from_nan(device):
    """log of a negative number: half the step is fine."""
    z0 = torch.full((2, 1), 3.0, dtype=torch.float64, device=device)
    f = lambda z: z - 4 * torch.log(z)  # noqa: E731
    assert not gdeq.solve(f, z0, gdeq.Broyden()).converged.any()
    solution = gdeq.solve(f, z0, gdeq.Broyden(line_search=8))
    assert solution.converged.all(), str(solution)
    torch.testing.assert_close(solution.z, torch.ones_like(z0), rtol=1e-5, atol=1e-5)


# --- the record -----------------------------------------------------------------------------------


@by_name
def test_trace_is_steps_by_batch_and_constant_once_frozen(solver, device):
    f = Network([0.05, 0.4, 0.8], device=device)
    solution = gdeq.solve(f, f.z0, replace(solver, max_iter=200, tol=1e-7))
    steps = solution.steps.tolist()
    assert len(set(steps)) > 1
    assert solution.trace.shape == (max(steps), 3)
    for i, last in enumerate(steps):
        assert (solution.trace[last - 1 :, i] == solution.residual[i]).all()
        for t in (1, last):
            z = iterate_at(f, f.z0, solver, t)
            expected = relative_residual(f, z)[i]
            torch.testing.assert_close(solution.trace[t - 1, i], expected, rtol=1e-5, atol=1e-12)


def test_the_record_is_on_the_device_of_the_state(device):
    f = Network([0.5, 0.5], device=device)
    solution = gdeq.solve(f, f.z0, gdeq.Broyden())
    for name in ("z", "converged", "residual", "steps", "trace", "codes"):
        assert getattr(solution, name).device.type == device.type, name
    assert solution.converged.dtype == torch.bool
    assert not solution.z.requires_grad
    assert isinstance(solution.evals, int)
    assert all(isinstance(status, Status) for status in solution.status)


def test_solve_leaves_autograd_alone():
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    z0 = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    seen = []

    def f(z: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.cos(z) * x

    solution = gdeq.solve(f, z0)
    assert not solution.z.requires_grad
    assert not any(seen)


def test_z0_is_not_written_to(device):
    for solver in SOLVERS:
        f = Network([0.5, 0.9], device=device)
        z0 = draw(2, 6, seed=3, device=device)
        kept = z0.clone()
        solution = gdeq.solve(f, z0, solver)
        assert torch.equal(z0, kept)
        assert solution.z.data_ptr() != z0.data_ptr()


def test_a_solution_prints_what_happened():
    f = Failing(NORMS, sample=2, call=4)
    solution = gdeq.solve(f, f.z0, gdeq.Broyden(tol=1e-6))
    lines = str(solution).splitlines()
    assert re.fullmatch(
        rf"3 of 4 samples converged in at most {int(solution.steps.max())} steps, "
        rf"{f.calls} evaluations of f, largest residual \d\.\de-\d\d, "
        r"estimated error at most \d\.\de-\d\d",
        lines[0],
    )
    assert len(lines) == 2
    assert lines[1].startswith(f"  sample 2: {Status.NONFINITE} [step 3, residual ")


def test_a_solution_of_many_failures_prints_a_few():
    solution = gdeq.solve(lambda z: z * float("nan"), torch.ones(100, 2))
    lines = str(solution).splitlines()
    assert lines[0].startswith("0 of 100 samples converged")
    assert lines[-1].strip() == "..."
    assert len(lines) < 10
