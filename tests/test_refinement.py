"""The first estimate of w, its refinement by a few VJPs, and what keeps it from running away."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

import gdeq
from cells import dense_residual, differentiate
from gdeq import GDEQ, GMRES, JFB, Anderson, Broyden, Implicit, Measured, Picard
from gdeq.operators import LowRankInverse
from gdeq.refinement import Refinement, first_step, least_combination, minus_identity, refine
from gdeq.solvers.base import Point
from problems import (
    Multiscale,
    Wide,
    adjoint_residual,
    assert_near,
    identity,
    refined_cotangent,
    secant_inverse,
    times,
    transposed_system,
    watched,
)


def uneven(**settings) -> Wide:
    """Samples of very different difficulty: from nearly linear to saturated."""
    problem = Wide(**settings)
    with torch.no_grad():
        scale = torch.logspace(-2, 1, len(problem.x), dtype=torch.float64)
        problem.x.mul_(scale[:, None])
    return problem


# --- the first estimate ---------------------------------------------------------------------------


def test_secants_of_a_wild_excursion_hardly_count():
    """On the way to this fixed point z goes to 80 and comes back; near it I − J is benign."""
    W = [[0.5009843301586205, -0.20382741850049024], [0.22197629585682843, -0.9747749444485354]]
    W = torch.tensor(W, dtype=torch.float64)
    c = [[0.8610437202157494, 1.459394469225289]]
    c = torch.tensor(c, dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[-0.24722581978665756, -0.3965471046901368]], dtype=torch.float64)

    def f(z):
        return 2 * torch.exp(-((z @ W.T + c) ** 2))

    def gradient(method):
        z0 = torch.zeros(1, 2, dtype=torch.float64)
        solution = gdeq.fixed_point(f, z0, Broyden(100, 1e-6), method)
        assert solution.converged.all()
        return torch.autograd.grad((solution.z * v).sum(), c)[0], solution

    exact, _ = gradient(Implicit(GMRES(10, 1e-12)))
    found, solution = gradient(GDEQ(refine=1))
    assert solution.secants.s.norm(dim=2).max() > 10 * solution.z.norm()
    assert (found - exact).norm() < 0.1 * exact.norm()


def test_secants_of_later_steps_say_nothing_of_the_iterate_that_is_returned():
    """The best of a solve that diverges: its gradient begins as JFB's."""
    problem = Wide(batch=4, radius=3.0)
    solution = gdeq.fixed_point(problem, problem.z0, Picard(12, 1e-6), GDEQ(refine=1))
    assert not solution.converged.any()
    v = problem.cotangent()
    assert_near(first_step(v, solution)[0], v, 1e-12)


@pytest.mark.parametrize(
    ("gradient", "keeps"),
    [(GDEQ(refine=1), True), (GDEQ(tolerance=0.1), True), (Implicit(precondition=True), True),
     (GDEQ(), False), (JFB(refine=1), False), (Implicit(), False)], ids=str
)  # fmt: skip
def test_a_solve_keeps_secants_for_those_who_start_from_them(gradient, keeps):
    problem = Wide(radius=0.5)
    solution = gdeq.fixed_point(problem, problem.z0, Broyden(5, 0.0), gradient)
    assert (solution.secants is not None) == keeps


def test_secants_that_are_rounding_are_not_kept():
    """Long after the solution is found, steps and changes of g are rounding."""
    problem = Wide(radius=0.5, activation=identity)
    solution = gdeq.fixed_point(problem, problem.z0, Picard(90, 0.0), GDEQ(refine=1))
    s, y = solution.secants.s, solution.secants.y
    used = s.norm(dim=2) > 0
    assert (used.sum(1) == 15).all()
    expected = torch.einsum("bij,bkj->bki", problem.dense_jacobian(problem.z0), s) - s
    length = s[used].norm(dim=1, keepdim=True)
    assert_near(y[used] / length, expected[used] / length, 0.2)


def test_a_projection_towards_the_exact_gradient():
    """Of an affine map −Hᵀv is no further from the exact w than v is, up to the ridge."""
    problem = Wide(batch=8, radius=0.95, activation=identity)
    v = problem.cotangent()
    for solver in (Broyden(60, 1e-8), Anderson(60, 1e-8), Picard(60, 0.0)):
        z = gdeq.fixed_point(problem, problem.z0, solver, GDEQ(refine=1))
        first, inverse = first_step(v, z)
        exact = torch.linalg.solve(transposed_system(problem.dense_jacobian(z.z)), v)
        assert ((first - exact).norm(dim=1) <= (v - exact).norm(dim=1)).all()
        assert_near(first, -inverse.matvec(v), 1e-12)


# --- refine=k -------------------------------------------------------------------------------------


@pytest.mark.parametrize("refine", [1, 2, 3, 7])
@pytest.mark.parametrize("memory", [None, 3])
def test_refinement_goes_on_from_the_transposed_inverse_of_the_secants(refine, memory, device):
    problem = Wide(radius=0.9).to(device)
    v = problem.cotangent()
    f, iterates = watched(problem)
    gdeq.solve(f, problem.z0, Broyden(20, 0.0, memory))  # more steps than secants are kept
    solution, w = differentiate(problem, Broyden(20, 0.0, memory), GDEQ(refine=refine))
    systems = transposed_system(problem.dense_jacobian(solution.z))
    for i in range(3):
        root, path = problem.root(i), [z[i] for z in iterates]
        P = -secant_inverse(root, path).T
        tested = -secant_inverse(root, path, P @ v[i], systems[i] @ P @ v[i]).T
        assert_near(w[i], refined_cotangent(systems[i], P, v[i], refine, tested), 1e-7)
    assert solution.backward.vjps == refine
    assert_near(solution.backward.residual, dense_residual(problem, solution, w), 1e-12)


@pytest.mark.parametrize("refine", [1, 3])
def test_in_half_precision_refinement_goes_on_from_broyden_s_inverse(refine):
    """Unless that makes v more than three times as long: then from v."""
    problem = Wide(batch=6, radius=0.9)
    v = problem.cotangent()
    solution = gdeq.solve(problem, problem.z0, Broyden(8, 0.0))
    long = torch.randn(24, dtype=torch.float64)
    solution.inverse.vectors.u[3] *= 100.0 / (solution.inverse.vectors.u[3] @ long).norm()
    solution.inverse.vectors.v[3] += long
    reused = -solution.inverse.as_matrix().mT
    systems = transposed_system(problem.dense_jacobian(solution.z))
    w = GDEQ(refine=refine).cotangent(v, lambda u: u - times(systems, u), solution).w
    for i in range(6):
        P = torch.eye(24, dtype=torch.float64) if i == 3 else reused[i]
        assert ((reused[i] @ v[i]).norm() > 3 * v[i].norm()) == (i == 3)
        assert_near(w[i], refined_cotangent(systems[i], P, v[i], refine), 1e-9)
    half = gdeq.fixed_point(lambda z: 0.5 * z, torch.zeros(1, 2).bfloat16(), Broyden(3, 0.0))
    assert half.secants is None  # too much of them would be rounding


@pytest.mark.parametrize("times_", [1, 2])
def test_an_inverse_that_is_far_off_does_not_carry_w_away(times_):
    """As Broyden leaves one now and then: I + 3000 a bᵀ, with a b that v hardly sees."""
    d, batch = 30, 64
    source = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    systems = torch.eye(d) - 0.6 * draw(batch, d, d) / d**0.5  # (I − J)ᵀ
    v, a, b = draw(3, batch, d)
    b -= 0.9999 * v * (torch.linalg.vecdot(b, v) / torch.linalg.vecdot(v, v))[:, None]
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    inverse = LowRankInverse(-3000 * a[:, None], b[:, None])
    exact = torch.linalg.solve(systems, v)
    reused = inverse.negative_matvec(v)
    vjp = lambda w: w - times(systems, w)  # noqa: E731
    found = refine(reused, v, vjp, inverse, Refinement(times_, 1e-16))

    def error(w):
        return ((w - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    once = reused + inverse.negative_matvec(v - times(systems, reused))  # without an update
    assert error(reused) < 1
    assert error(once) > 100
    assert error(found.w) < (3 if times_ == 1 else 10)
    torch.testing.assert_close(found.length, found.w.norm(dim=1))


@pytest.mark.parametrize(("precision", "times_as_long"), [(2.0**-8, 1.999), (1e-16, 1000.0)])
def test_nothing_is_learned_from_a_change_that_may_be_rounding(precision, times_as_long):
    """J = 0.999 I: what v and w differ by is more than the rounding of float64, not of half."""
    v = torch.randn(2, 30, dtype=torch.float64)
    nothing = v.new_zeros(2, 0, 30)
    how = Refinement(1, precision)
    found = refine(v, v, lambda u: 0.999 * u, LowRankInverse(nothing, nothing), how)
    torch.testing.assert_close(found.w, times_as_long * v)


def test_a_w_that_runs_away_is_taken_back():
    """Its residual has doubled and it is far longer: the w of smallest residual is the result."""
    v = torch.tensor([[1.0, 0.0, 0.0]] * 3, dtype=torch.float64)
    first, second = (torch.zeros(3, 3, dtype=torch.float64) for _ in range(2))
    first[:, 1], second[:, 2] = 0.5, torch.tensor([100.0, 0.3, 1.5])
    residuals = iter((first, second))
    nothing = v.new_zeros(3, 0, 3)
    inverse = LowRankInverse(nothing, nothing)
    vjp = lambda w: next(residuals) + w - v  # noqa: E731 (so that these are the residuals)
    found = refine(v, v, vjp, inverse, Refinement(2, 1e-16))
    ran = torch.tensor([True, False, False])
    assert torch.equal(found.error.isinf(), ran)
    assert_near(found.w, torch.where(ran[:, None], v, v + first + second), 1e-12)
    assert_near(found.length, found.w.norm(dim=1), 1e-12)
    moved = second.norm(dim=1) / found.length
    assert_near(found.error[1:], moved[1:], 1e-12)
    solved = refine(v, v, lambda u: 0 * u, inverse, Refinement(1, 1e-16))
    assert solved.error.tolist() == [0.0] * 3
    assert torch.equal(solved.w, v)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_vjp_that_is_not_finite_ends_the_refinement_of_its_sample(at):
    problem = Wide(radius=0.9)
    v, calls = problem.cotangent(), []
    solution = gdeq.solve(problem, problem.z0, Broyden(8, 0.0))
    systems = transposed_system(problem.dense_jacobian(solution.z))

    def sick(u):
        product = u - times(systems, u)
        if len(calls) == at:
            product[1] = torch.inf
        calls.append(u)
        return product

    w = GDEQ(refine=3).cotangent(v, sick, solution).w
    reused = -solution.inverse.as_matrix().mT  # which is used where no secants are known
    assert len(calls) == 3
    # The last w that was seen whole; the others go on.
    last = refined_cotangent(systems[1], reused[1], v[1], at - 1) if at > 1 else reused[1] @ v[1]
    assert_near(w[1], last, 1e-9)
    assert_near(w[0], refined_cotangent(systems[0], reused[0], v[0], 3), 1e-9)


def test_refinement_lowers_the_median_residual_to_that_of_implicit():
    solver = Broyden(12, 1e-4)

    def median(gradient):
        residuals = []
        for seed in range(4):
            solution, _ = differentiate(Wide(batch=8, radius=0.9, seed=seed), solver, gradient)
            residuals.append(solution.backward.residual)
        return torch.cat(residuals).median().item()

    refined = [median(GDEQ(refine=k)) for k in (1, 2, 3, 5, 8, 20)]
    reused = median(Measured(GDEQ()))
    for before, after in pairwise([reused, *refined]):
        assert after < before
    # 20 VJPs each, and the default tolerance of Implicit.
    assert refined[-1] <= median(Implicit(Broyden(19, 0.0)))
    assert refined[-1] <= 1e-6
    assert reused < median(Measured(JFB()))


# --- tolerance=τ ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_refine", [1, 2, 4])
@pytest.mark.parametrize("forward_steps", [3, 6])
def test_refinement_to_a_tolerance_keeps_the_first_w_that_meets_it(forward_steps, max_refine):
    """A sample that never meets it ends as with so many VJPs; the record says which it is."""
    # Far from contractive and stopped early at whatever comes last: some samples are hard.
    problem = uneven(batch=24, radius=3.0, seed=2)
    solver, tolerance = Broyden(forward_steps, 0.0), 0.3
    solution, w = differentiate(problem, solver, GDEQ(tolerance=tolerance, max_refine=max_refine))
    v, path = problem.cotangent(), []
    jacobian = problem.dense_jacobian(solution.z)

    def vjp(u):
        path.append(u)
        return times(jacobian.mT, u)

    found = gdeq.fixed_point(problem, problem.z0, solver, GDEQ(refine=1))
    expected = GDEQ(refine=max_refine + 1).cotangent(v, vjp, found).w
    residuals = torch.stack([adjoint_residual(jacobian, u, v) for u in path])
    met = residuals <= tolerance
    for i in range(24):
        if met[:, i].any():
            expected[i] = path[int(met[:, i].nonzero()[0])][i]
    assert_near(w, expected, 1e-7)
    record = solution.backward
    assert 0 < int(met.any(0).sum()) < 24
    assert met[0].any()
    assert torch.equal(record.converged, adjoint_residual(jacobian, w, v) <= tolerance)
    assert record.converged[met.any(0)].all()
    assert_near(record.residual, adjoint_residual(jacobian, w, v), 1e-10)
    assert torch.equal(record.error > 0, ~met.any(0))
    assert record.vjps == max_refine + 1
    assert f"{int((~record.converged).sum())} samples above the tolerance" in str(record)


def test_without_secants_too_a_tolerance_that_is_not_met_ends_at_the_best_combination():
    """Where the last residual rose, as in half precision, where no secants are kept."""
    problem = uneven(batch=24, radius=3.0, seed=2)
    v, path = problem.cotangent(), []
    solution = gdeq.solve(problem, problem.z0, Broyden(6, 0.0))
    systems = transposed_system(problem.dense_jacobian(solution.z))

    def vjp(u):
        path.append(u)
        return u - times(systems, u)

    found = GDEQ(tolerance=1e-3, max_refine=3).cotangent(v, vjp, solution)
    seen = [Point(u, v - times(systems, u)) for u in path]
    sizes = torch.stack([point.g.norm(dim=1) for point in seen])
    rose = (sizes[-1] > sizes.amin(0)) & found.residual.isinf()
    assert rose.any()
    best = least_combination(seen, v)
    assert_near(found.w[rose], (best.z + best.g)[rose], 1e-9)


def first_estimate(problem, solver):
    """The w that refinements begin with, (batch, d), and its residual, (batch,)."""
    solution = gdeq.fixed_point(problem, problem.z0, solver, GDEQ(refine=1))
    v = problem.cotangent()
    w, _ = first_step(v, solution)
    return w, adjoint_residual(problem.dense_jacobian(solution.z.detach()), w, v)


def test_samples_under_the_tolerance_keep_the_first_estimate():
    problem = uneven(batch=16, radius=0.9)
    solver, tolerance = Broyden(12, 1e-4), 0.3
    first, residual = first_estimate(problem, solver)
    solution, w = differentiate(problem, solver, GDEQ(tolerance=tolerance, max_refine=20))
    fine = residual <= tolerance
    assert fine.any()
    assert not fine.all()
    assert_near(w[fine], first[fine], 1e-12)
    assert (w[~fine] - first[~fine]).norm(dim=1).min() > 1e-3
    assert solution.backward.converged.all()
    assert solution.backward.vjps < 20
    easy = 1.01 * residual.max().item()  # where no sample needs more, one VJP says so
    solution, w = differentiate(problem, solver, GDEQ(tolerance=min(1.0, easy)))
    assert_near(w, first, 1e-12)
    assert solution.backward.vjps == 1


@pytest.mark.parametrize(("tolerance", "max_refine"), [(0.3, 20), (0.02, 3)])
def test_where_the_host_may_not_look_the_same_is_found(monkeypatch, tolerance, max_refine):
    problem, solver = uneven(batch=16, radius=0.9), Broyden(12, 1e-4)
    gradient = GDEQ(tolerance=tolerance, max_refine=max_refine)
    solution, w = differentiate(problem, solver, gradient)
    for module in ("loop", "refinement", "solvers.broyden"):
        monkeypatch.setattr(sys.modules[f"gdeq.{module}"], "host_may_look", lambda device: False)
    recorded, same = differentiate(problem, solver, gradient)
    assert_near(same, w, 1e-12)
    assert recorded.backward.vjps == max_refine + 1 >= solution.backward.vjps
    assert_near(recorded.backward.residual, solution.backward.residual, 1e-9)


def test_every_sample_can_be_brought_under_a_tight_tolerance(device):
    problem = Multiscale(radius=0.9).to(device)
    solution, w = differentiate(problem, Broyden(12, 1e-4), GDEQ(tolerance=1e-10, max_refine=100))
    assert solution.backward.converged.all()
    assert (dense_residual(problem, solution, w) <= 1e-10).all()


def test_a_sample_that_failed_does_not_make_the_others_wait():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    x[1, 0] = float("nan")
    x.requires_grad_()
    solver, gradient = Broyden(50, 1e-6), GDEQ(tolerance=0.1)
    deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z.flip(1) + x), solver, gradient)
    deq.warns = False
    deq(x).nan_to_num().sum().backward()
    assert deq.solution.backward.vjps < 4


@pytest.mark.parametrize("times_", [16, 20, 40])
def test_the_best_combination_remembers_what_was_seen_long_ago(times_):
    make = torch.Generator().manual_seed(2)
    transposed = 1.2 * torch.randn(12, 12, generator=make) / 12**0.5
    v, calls = torch.randn(1, 12, generator=make), []

    def vjp(u):
        calls.append(u)
        return (u @ transposed) * (torch.inf if len(calls) == 5 else 1.0)

    how = Refinement(times_, 1e-3, tolerance=1e-3)
    w = refine(v, v, vjp, minus_identity(v), how).w
    assert torch.linalg.vector_norm(v - w + w @ transposed) < 0.6 * torch.linalg.vector_norm(v)
