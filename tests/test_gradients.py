"""What each gradient method promises, by dense algebra in float64."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import gdeq
from gdeq import (
    GDEQ,
    GMRES,
    JFB,
    NPG,
    Anderson,
    Broyden,
    Implicit,
    Measured,
    Picard,
    Unrolled,
    gradients,
)
from gdeq.operators import LowRankInverse
from problems import (
    Dense,
    Multiscale,
    Tiny,
    Wide,
    adaptive_cotangent,
    adjoint_residual,
    assert_near,
    identity,
    limited_broyden,
    pack,
    paper_broyden,
    phantom_matrix,
    refined_cotangent,
    secant_inverse,
    times,
    transposed_system,
    watched,
)


def differentiate(problem, solver, gradient, v=None):
    """-> the solution after backward, and w (batch, d)."""
    problem.zero_grad()
    solution = gdeq.fixed_point(problem, problem.z0, solver, gradient)
    v = problem.cotangent() if v is None else v
    (pack(solution.z) * v).sum().backward()
    return solution, problem.shift.grad.clone()


def parameter_gradients(problem):
    return [parameter.grad.clone() for parameter in problem.parameters()]


def uneven(**settings) -> Wide:
    """Samples of very different difficulty: from nearly linear to saturated."""
    problem = Wide(**settings)
    with torch.no_grad():
        scale = torch.logspace(-2, 1, len(problem.x), dtype=torch.float64)
        problem.x.mul_(scale[:, None])
    return problem


# --- JFB and NPG ----------------------------------------------------------------------------------


def test_jfb_takes_v_through_f(device):
    problem = Multiscale().to(device)
    v = problem.cotangent()
    solution, w = differentiate(problem, Broyden(50, 1e-6), JFB())
    assert torch.equal(w, v)
    out = problem.on_vectors(pack(solution.z).detach())
    expected = torch.autograd.grad(out, list(problem.parameters()), v)
    for a, b in zip(parameter_gradients(problem), expected, strict=True):
        assert_near(a, b, 1e-14)
    assert solution.backward.vjps == 0
    assert solution.backward.residual is None


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
@pytest.mark.parametrize("damping", [0.1, 0.5, 1.0])
def test_npg_is_the_papers_sum(steps, damping, device):
    problem = Dense().to(device)
    solution, w = differentiate(problem, Picard(100, 1e-6), NPG(steps, damping))
    matrix = phantom_matrix(problem.dense_jacobian(solution.z), steps, damping)
    assert_near(w, times(matrix.mT, problem.cotangent()), 1e-12)
    assert solution.backward.vjps == steps - 1


def test_npg_defaults_are_the_papers():
    assert NPG() == NPG(steps=5, damping=0.5)


# --- GDEQ as in the paper -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("memory", [None, 1, 3, 5])
def test_gdeq_is_the_papers_inverse_after_a_fixed_number_of_steps(memory, steps, device):
    problem = Wide(radius=0.9).to(device)
    v = problem.cotangent()
    solution, w = differentiate(problem, Broyden(steps, 0.0, memory), GDEQ())
    assert solution.steps.tolist() == [steps] * 3
    start = pack(problem.z0)
    for i in range(3):
        g = problem.root(i)
        if memory is None:
            z, inverse = paper_broyden(g, start[i], steps)
        else:
            z, inverse = limited_broyden(g, start[i], steps, memory)
        assert_near(pack(solution.z)[i], z, 1e-9)
        assert_near(w[i], -inverse.T @ v[i], 1e-9)
    assert (w - v).norm() > 1e-2 * v.norm()  # not JFB
    assert solution.backward.vjps == 0


@pytest.mark.parametrize("memory", [None, 1, 3, 5])
def test_gdeq_is_the_inverse_of_each_samples_own_last_step(memory, device):
    problem = uneven(batch=6, radius=0.6).to(device)
    v = problem.cotangent()
    solution, w = differentiate(problem, Broyden(60, 1e-5, memory), GDEQ())
    assert solution.converged.all()
    assert len(set(solution.steps.tolist())) > 2  # samples froze at different times
    start = pack(problem.z0)
    for i, steps in enumerate(solution.steps.tolist()):
        _, inverse = limited_broyden(problem.root(i), start[i], steps, memory)
        assert_near(w[i], -inverse.T @ v[i], 1e-9)


def test_gdeq_of_a_solved_start_is_jfb():
    problem = Dense()
    solution = gdeq.fixed_point(problem, problem.equilibrium(), Broyden(20, 1e-8), GDEQ())
    v = problem.cotangent()
    (solution.z * v).sum().backward()
    assert torch.equal(problem.shift.grad, v)


# --- GDEQ(refine=k) -------------------------------------------------------------------------------


@pytest.mark.parametrize("refine", [1, 2, 3, 7])
@pytest.mark.parametrize("memory", [None, 3])
def test_refinement_goes_on_from_the_transposed_inverse_of_the_secants(refine, memory, device):
    problem = Wide(radius=0.9).to(device)
    v = problem.cotangent()
    f, iterates = watched(problem)
    gdeq.solve(f, problem.z0, Broyden(14, 0.0, memory))  # more steps than secants are kept
    solution, w = differentiate(problem, Broyden(14, 0.0, memory), GDEQ(refine=refine))
    systems = transposed_system(problem.dense_jacobian(solution.z))
    for i in range(3):
        inverse = secant_inverse(problem.root(i), [z[i] for z in iterates])
        assert_near(w[i], refined_cotangent(systems[i], -inverse.T, v[i], refine), 1e-7)
    assert solution.backward.vjps == refine


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
        assert (reused[i] @ v[i]).norm() < 3 * v[i].norm() or i == 3
        assert_near(w[i], refined_cotangent(systems[i], P, v[i], refine), 1e-9)
    assert (reused[3] @ v[3]).norm() > 3 * v[3].norm()


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
        solution = gdeq.fixed_point(
            f, torch.zeros(1, 2, dtype=torch.float64), Broyden(100, 1e-6), method
        )
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
    first, _ = gradients.first_step(v, solution)
    assert_near(first, v, 1e-12)


def test_a_projection_towards_the_exact_gradient():
    """Of an affine map −Hᵀv is no further from the exact w than v is, up to the ridge."""
    problem = Wide(batch=8, radius=0.95, activation=identity)
    v = problem.cotangent()
    for solver in (Broyden(60, 1e-8), Anderson(60, 1e-8), Picard(60, 0.0)):
        z = gdeq.fixed_point(problem, problem.z0, solver, GDEQ(refine=1))
        first, inverse = gradients.first_step(v, z)
        exact = torch.linalg.solve(transposed_system(problem.dense_jacobian(z.z)), v)
        assert ((first - exact).norm(dim=1) <= (v - exact).norm(dim=1)).all()
        assert_near(first, -inverse.matvec(v), 1e-12)


@pytest.mark.parametrize("refine", [1, 2])
def test_an_inverse_that_is_far_off_does_not_carry_w_away(refine):
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
    how = gradients.refinement(refine, 1e-16)
    w, *_ = gradients._refine(reused, v, lambda w: w - times(systems, w), inverse, how)

    def error(w):
        return ((w - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    once = reused + inverse.negative_matvec(v - times(systems, reused))  # without an update
    assert error(reused) < 1
    assert error(once) > 100
    assert error(w) < (3 if refine == 1 else 10)


@pytest.mark.parametrize("gradient", [GDEQ(refine=1), GDEQ(refine=2), gdeq.Measured(GDEQ())])
def test_the_residual_is_measured_where_f_ignores_z(gradient, device):
    c = torch.randn(3, 4, device=device, requires_grad=True)
    z0 = torch.zeros(3, 4, device=device)
    solution = gdeq.fixed_point(lambda z: c + 0 * z.detach(), z0, Broyden(3, 0.0), gradient)
    solution.z.sum().backward()
    assert solution.backward.residual.tolist() == [0.0] * 3
    torch.testing.assert_close(c.grad, torch.ones_like(c))


@pytest.mark.parametrize("refine", [1, 4, 12])
def test_measured_residual_of_a_refined_gradient_is_the_dense_one(refine, device):
    problem = Multiscale(radius=0.9).to(device)
    solution, w = differentiate(problem, Broyden(6, 0.0), GDEQ(refine=refine))
    dense = adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())
    assert_near(solution.backward.residual, dense, 1e-12)


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

    def median(gradient, vjps):
        residuals = []
        for seed in range(6):
            solution, _ = differentiate(Wide(batch=8, radius=0.9, seed=seed), solver, gradient)
            residuals.append(solution.backward.residual)
            assert solution.backward.vjps == vjps
        return torch.cat(residuals).median().item()

    counts = (1, 2, 3, 5, 8, 12, 20)
    refined = [median(GDEQ(refine=k), k) for k in counts]
    reused = median(Measured(GDEQ()), 0)
    for before, after in pairwise([reused, *refined]):
        assert after < before
    # 20 VJPs each, and the default tolerance of Implicit.
    assert refined[-1] <= median(Implicit(Broyden(19, 0.0)), 20)
    assert refined[-1] <= 1e-6
    assert reused < median(Measured(JFB()), 0)


# --- GDEQ(tolerance=τ) ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_refine", [1, 2, 4])
@pytest.mark.parametrize("forward_steps", [3, 6])
def test_adaptive_refinement_and_its_fall_back(forward_steps, max_refine, device):
    # Far from contractive and stopped early at whatever comes last, so that the inverse is bad.
    problem = uneven(batch=24, radius=3.0, seed=1).to(device)
    solver, tolerance = Broyden(forward_steps, 0.0), 0.03
    f, iterates = watched(problem)
    jacobian = problem.dense_jacobian(gdeq.solve(f, problem.z0, solver).z)
    # JFB's residual is ‖Jᵀv‖/‖v‖: along left singular vectors of J it is known, and can be small.
    v = problem.cotangent()
    left, values, _ = torch.linalg.svd(jacobian)
    for i in range(len(v)):
        if i % 3 > 0:
            size = 0.1 if i % 3 == 1 else 0.0
            v[i] = left[i, :, (values[i] - size).abs().argmin()]

    gradient = GDEQ(tolerance=tolerance, max_refine=max_refine)
    solution, w = differentiate(problem, solver, gradient, v)
    record = solution.backward
    for i, A in enumerate(transposed_system(jacobian)):
        inverse = secant_inverse(problem.root(i), [z[i] for z in iterates])
        expected, fell_back = adaptive_cotangent(A, -inverse.T, v[i], tolerance, max_refine)
        assert_near(w[i], expected, 1e-7)
        assert record.fell_back[i] == fell_back

    dense = adjoint_residual(jacobian, w, v)
    assert_near(record.residual, dense, 1e-10)
    assert torch.equal(record.converged, dense <= tolerance)
    assert torch.equal(w[record.fell_back], v[record.fell_back])
    of_jfb = adjoint_residual(jacobian, v, v)
    assert (dense <= torch.clamp(of_jfb * (1 + 1e-9), min=tolerance)).all()
    assert record.vjps == 1 + max_refine + 1  # measured, refined, and JFB measured to compare

    # All four ends were met.
    assert (record.converged & record.fell_back).any()
    assert (record.converged & ~record.fell_back).any()
    assert (~record.converged & record.fell_back).any()
    assert (~record.converged & ~record.fell_back).any()
    above, fallen = int((~record.converged).sum()), int(record.fell_back.sum())
    assert f"{above} samples above the tolerance, {fallen} fell back to JFB" in str(record)


def first_estimate(problem, solver):
    """The w that refinements begin with, (batch, d), and its residual, (batch,)."""
    solution = gdeq.fixed_point(problem, problem.z0, solver, GDEQ(refine=1))
    v = problem.cotangent()
    w, _ = gradients.first_step(v, solution)
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
    assert not solution.backward.fell_back.any()
    assert solution.backward.vjps < 20


@pytest.mark.parametrize(("tolerance", "max_refine"), [(0.3, 20), (0.02, 3)])
def test_a_recording_finds_the_same_without_reading(monkeypatch, tolerance, max_refine):
    problem, solver = uneven(batch=16, radius=0.9), Broyden(12, 1e-4)
    gradient = GDEQ(tolerance=tolerance, max_refine=max_refine)
    solution, w = differentiate(problem, solver, gradient)
    monkeypatch.setattr(sys.modules["gdeq.solve"], "recording", lambda device: True)
    monkeypatch.setattr(sys.modules["gdeq.gradients"], "recording", lambda device: True)
    recorded, same = differentiate(problem, solver, gradient)
    assert_near(same, w, 1e-12)
    assert recorded.backward.vjps == max_refine + 2 >= solution.backward.vjps
    assert torch.equal(recorded.backward.fell_back, solution.backward.fell_back)
    assert_near(recorded.backward.residual, solution.backward.residual, 1e-9)


def test_one_vjp_where_no_sample_needs_refinement():
    problem = Wide(radius=0.5)
    first, residual = first_estimate(problem, Broyden(12, 1e-4))
    tolerance = 1.01 * residual.max().item()
    solution, w = differentiate(problem, Broyden(12, 1e-4), GDEQ(tolerance=tolerance))
    assert_near(w, first, 1e-12)
    assert solution.backward.vjps == 1
    assert solution.backward.converged.all()


def test_every_sample_can_be_brought_under_a_tight_tolerance(device):
    problem = Multiscale(radius=0.9).to(device)
    solution, w = differentiate(problem, Broyden(12, 1e-4), GDEQ(tolerance=1e-10, max_refine=100))
    dense = adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())
    assert solution.backward.converged.all()
    assert (dense <= 1e-10).all()


# --- Implicit -------------------------------------------------------------------------------------

INNER = {
    "broyden": Broyden(100, 1e-4),
    "anderson": Anderson(100, 1e-4),
    "picard": Picard(200, 1e-4),
    "gmres": GMRES(50, 1e-4),
}


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_implicit_stops_at_its_tolerance_and_says_so(inner, precondition, device):
    problem = Wide(radius=0.6).to(device)
    gradient = Implicit(INNER[inner], precondition=precondition)
    solution, w = differentiate(problem, Broyden(30, 1e-6), gradient)
    dense = adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())
    assert_near(solution.backward.residual, dense, 1e-12)
    assert (dense <= 1e-4).all()
    assert (dense > 1e-9).any()  # it did stop there
    assert solution.backward.converged.all()


@pytest.mark.parametrize("inner", INNER)
def test_implicit_reports_what_it_could_not_solve(inner):
    problem = Wide(radius=0.9)
    solver = type(INNER[inner])(max_iter=2, tol=1e-8)
    solution, w = differentiate(problem, Broyden(30, 1e-6), Implicit(solver))
    dense = adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())
    assert not solution.backward.converged.any()
    assert_near(solution.backward.residual, dense, 1e-10)
    assert solution.backward.vjps == 3


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
    assert not found.converged


def test_gmres_needs_the_fewest_vjps_and_fewer_when_preconditioned():
    problem = Wide(radius=0.9)

    def vjps(gradient):
        return differentiate(problem, Broyden(40, 1e-8), gradient)[0].backward.vjps

    plain = vjps(Implicit(GMRES(50, 1e-6)))
    assert vjps(Implicit(GMRES(50, 1e-6), precondition=True)) < plain
    for solver in (Broyden(200, 1e-6), Anderson(200, 1e-6), Picard(400, 1e-6)):
        assert plain <= vjps(Implicit(solver))


# --- the number of VJPs is counted, not claimed ---------------------------------------------------


class Counted(torch.autograd.Function):
    passes = 0

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, grad):
        Counted.passes += grad is not None
        return grad


@pytest.mark.parametrize(
    "gradient",
    [
        JFB(),
        GDEQ(),
        Measured(JFB()),
        Measured(GDEQ()),
        NPG(4),
        GDEQ(refine=3),
        GDEQ(tolerance=1e-3, max_refine=50),
        GDEQ(tolerance=1e-3, max_refine=2),
        Implicit(),
        Implicit(GMRES(30, 1e-6), precondition=True),
        Implicit(Picard(7, 0.0), double_backward=False),
    ],
    ids=str,
)
def test_reported_vjps_are_those_spent(gradient):
    problem = Wide(radius=0.9)
    solution = gdeq.fixed_point(
        lambda z: problem(Counted.apply(z)), problem.z0, Broyden(12, 1e-4), gradient
    )
    Counted.passes = 0
    (solution.z * problem.cotangent()).sum().backward()
    # Methods that know J also let the last pass, the one to the parameters, go down to z.
    last = 0 if gradient in (JFB(), GDEQ()) else 1
    assert Counted.passes == solution.backward.vjps + last


# --- Measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [JFB(), GDEQ(), NPG(3), GDEQ(refine=2)], ids=str)
def test_measuring_changes_nothing_but_the_record(bare, device):
    problem = Multiscale(radius=0.9).to(device)
    solver = Broyden(6, 0.0)
    plain, _ = differentiate(problem, solver, bare)
    expected = parameter_gradients(problem)
    solution, w = differentiate(problem, solver, Measured(bare))
    for a, b in zip(parameter_gradients(problem), expected, strict=True):
        assert_near(a, b, 1e-14)
    dense = adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())
    assert_near(solution.backward.residual, dense, 1e-12)
    assert (dense > 1e-3).all()
    assert solution.backward.vjps == plain.backward.vjps


@pytest.mark.parametrize("bare", [JFB(), GDEQ()], ids=str)
def test_without_measuring_there_is_no_residual(bare):
    solution, _ = differentiate(Dense(), Broyden(), bare)
    assert solution.backward.residual is None
    assert "not measured" in str(solution.backward)


# --- Unrolled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1.0, 0.4])
@pytest.mark.parametrize("solver", [None, Broyden(20, 1e-2), Picard(3, 0.0)], ids=str)
def test_unrolled_equals_a_loop_by_hand(solver, damping, device):
    problem = Multiscale().to(device)
    v = problem.cotangent()
    solution = gdeq.fixed_point(problem, problem.z0, solver, Unrolled(4, damping))
    (pack(solution.z) * v).sum().backward()

    z = pack(problem.z0 if solver is None else gdeq.solve(problem, problem.z0, solver).z)
    for _ in range(4):
        z = (1 - damping) * z + damping * problem.on_vectors(z)
    expected = torch.autograd.grad(z, list(problem.parameters()), v)
    assert_near(pack(solution.z), z, 1e-14)
    for a, b in zip(parameter_gradients(problem), expected, strict=True):
        assert_near(a, b, 1e-13)


def test_unrolled_without_a_solver_differentiates_z0():
    problem = Dense()
    z0 = torch.ones_like(problem.x, requires_grad=True)
    solution = gdeq.fixed_point(problem, z0, None, Unrolled(2))
    solution.z.sum().backward()
    again = z0.detach().requires_grad_()
    (expected,) = torch.autograd.grad(problem(problem(again)).sum(), again)
    assert_near(z0.grad, expected, 1e-14)
    assert z0.grad.abs().max() > 1e-3


def test_solved_fixed_points_do_not_depend_on_z0():
    for gradient in (Implicit(), GDEQ(), Unrolled(2)):
        problem = Dense()
        z0 = torch.zeros_like(problem.x, requires_grad=True)
        gdeq.fixed_point(problem, z0, Broyden(), gradient).z.sum().backward()
        assert z0.grad is None


def test_many_unrolled_steps_from_the_solution_are_implicit():
    problem = Dense(radius=0.5)
    solver = Broyden(100, 1e-14)
    _, exact = differentiate(problem, solver, Implicit(GMRES(50, 1e-13)))
    _, unrolled = differentiate(problem, solver, Unrolled(80))
    assert_near(unrolled, exact, 1e-9)


@pytest.mark.parametrize("solver", [None, Broyden(200, 1e-14)], ids=str)
def test_unrolled_passes_gradgradcheck(solver):
    problem = Tiny(batch=2, radius=0.4)
    names = [name for name, _ in problem.named_parameters()]
    # The phantom gradient holds z* constant: finite differences must not move it either.
    start = problem.z0 if solver is None else gdeq.solve(problem, problem.z0, solver).z

    def function(*values):
        given = dict(zip(names, values, strict=True))
        return gdeq.fixed_point(
            lambda z: functional_call(problem, given, (z,)), start, None, Unrolled(3, 0.7)
        ).z

    parameters = tuple(problem.parameters())
    torch.autograd.gradcheck(function, parameters)
    torch.autograd.gradgradcheck(function, parameters)


# --- double backward ------------------------------------------------------------------------------


def hessian_product(z: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(z.pow(3).sum(), parameters, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), parameters)


def test_second_derivative_of_jfb_is_that_of_f_at_a_constant_z(device):
    problem = Multiscale().to(device)
    parameters = list(problem.parameters())
    solution = gdeq.fixed_point(problem, problem.z0, Broyden(100, 1e-14), JFB())
    found = hessian_product(pack(solution.z), parameters)
    expected = hessian_product(problem.on_vectors(pack(solution.z).detach()), parameters)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-10)
    assert any(gradient.abs().max() > 1e-2 for gradient in found)


@pytest.mark.parametrize("solver", [None, Broyden(20, 1e-2)], ids=str)
def test_second_derivative_of_unrolled_is_that_of_the_loop(solver):
    problem = Dense()
    parameters = list(problem.parameters())
    solution = gdeq.fixed_point(problem, problem.z0, solver, Unrolled(4, 0.6))
    z = problem.z0 if solver is None else gdeq.solve(problem, problem.z0, solver).z
    for _ in range(4):
        z = 0.4 * z + 0.6 * problem(z)
    found = hessian_product(solution.z, parameters)
    for a, b in zip(found, hessian_product(z, parameters), strict=True):
        assert_near(a, b, 1e-12)


@pytest.mark.parametrize(
    "gradient",
    [
        NPG(),
        GDEQ(),
        GDEQ(refine=2),
        GDEQ(tolerance=0.1),
        Measured(JFB()),
        Measured(Implicit()),
        Implicit(double_backward=False),
    ],
    ids=str,
)
def test_the_others_have_no_second_derivative_and_say_so(gradient):
    problem = Dense()
    solution = gdeq.fixed_point(problem, problem.z0, Broyden(), gradient)
    with pytest.raises(RuntimeError, match=r"Implicit\(\)"):
        torch.autograd.grad(solution.z.sum(), problem.x, create_graph=True)


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("name", ["x", "shift"])
def test_third_derivatives_of_implicit_raise(power, name):
    problem = Dense()
    of = getattr(problem, name)
    solution = gdeq.fixed_point(problem, problem.z0, Broyden(), Implicit())
    (first,) = torch.autograd.grad(solution.z.pow(power).sum(), of, create_graph=True)
    with pytest.raises(RuntimeError, match="third"):
        torch.autograd.grad(first.pow(2).sum(), of, create_graph=True)


def test_a_loosely_solved_implicit_gradient_has_a_second_derivative():
    # What the inner solver leaves undone in the first pass must not be taken for second order.
    problem = Dense(radius=0.5)
    parameters = list(problem.parameters())
    solver = Broyden(100, 1e-12)
    tight, loose = (
        hessian_product(gdeq.fixed_point(problem, problem.z0, solver, gradient).z, parameters)
        for gradient in (Implicit(GMRES(50, 1e-13)), Implicit(Broyden(50, 1e-3)))
    )
    for a, b in zip(loose, tight, strict=True):
        assert 1e-9 < (a - b).norm() / b.norm() < 1e-2
