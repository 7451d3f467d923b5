"""What is claimed is so: cases in which a residual, a status or a gradient once was not."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq import GDEQ, JFB, NPG, Anderson, Broyden, Implicit, Picard, Status, Unrolled

F64 = torch.float64


def contraction(d: int, radius: float, seed: int = 0):
    make = torch.Generator().manual_seed(seed)
    W = torch.randn(d, d, generator=make, dtype=F64)
    return W * radius / torch.linalg.matrix_norm(W, 2)


@pytest.mark.parametrize("solver", [Broyden(60), Anderson(200), Picard(400)], ids=str)
def test_a_fixed_point_at_zero_is_found(solver):
    """Beside z → 0 no g is ever small; neither may an early iterate be taken for the best."""
    W = contraction(20, 0.8)
    z0 = torch.randn(4, 20, dtype=F64, generator=torch.Generator().manual_seed(1))
    solution = gdeq.solve(lambda z: torch.tanh(z @ W.T), z0, solver)
    assert solution.converged.all(), str(solution)
    assert (solution.z.norm(dim=1) < 1e-15).all()


ROOTLESS = {
    "cos": lambda z: z + torch.cos(z) + 2,
    "sin": lambda z: z + 1 + 0.5 * torch.sin(3 * z),
    "bump": lambda z: z + 1 / (1 + z**2) + 0.1,
}


@pytest.mark.parametrize("name", ROOTLESS)
@pytest.mark.parametrize("solver", [Broyden(18, 1e-3), Broyden(50, 1e-6), Anderson(50, 1e-3)])
def test_a_map_without_a_fixed_point_is_never_converged(name, solver):
    z0 = torch.linspace(-5, 5, 40, dtype=F64).unsqueeze(1)
    solution = gdeq.solve(ROOTLESS[name], z0, solver)
    assert not solution.converged.any(), str(solution)
    assert torch.isfinite(solution.z).all()


def test_growth_from_a_tiny_start_is_no_reason_to_deny_convergence():
    z0 = torch.full((1, 3), 1e-8)
    solution = gdeq.solve(lambda z: torch.tanh(3 * z), z0, Picard(200, 1e-6))
    assert solution.converged.all(), str(solution)


GRADIENTS = [
    GDEQ(),
    GDEQ(refine=2),
    GDEQ(tolerance=0.01),
    Implicit(),
    Implicit(gdeq.GMRES(20, 1e-6)),
    NPG(),
    JFB(),
]


def input_gradient(gradient, scale: float, dtype=torch.float32):
    W = contraction(8, 0.7).to(dtype)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    v = scale * torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    solution = gdeq.fixed_point(
        lambda z: torch.tanh(z @ W.T + x),
        torch.zeros(3, 8, dtype=dtype),
        Broyden(12, 0.0),
        gradient,
    )
    solution.z.backward(v)
    return x.grad, solution.backward


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda g: str(g)[:30])
@pytest.mark.parametrize("scale", [2.0**-80, 2.0**60])
def test_the_gradient_of_a_tiny_or_huge_loss_is_that_of_the_loss(gradient, scale):
    """float32 squares of either are out of range."""
    expected, plain = input_gradient(gradient, 1.0)
    found, record = input_gradient(gradient, scale)
    torch.testing.assert_close(found / scale, expected, rtol=1e-5, atol=1e-7)
    if plain.residual is not None:
        torch.testing.assert_close(record.residual, plain.residual, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda g: str(g)[:30])
def test_a_cotangent_that_is_not_finite_is_not_hidden(gradient):
    """A gradient scaler looks for it."""
    found, _ = input_gradient(gradient, float("inf"))
    assert not torch.isfinite(found).all()


def test_second_derivatives_in_low_precision_are_not_taken_for_third():
    W = contraction(6, 0.5).float().requires_grad_()
    x = torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        solution = gdeq.fixed_point(
            lambda z: torch.tanh(z @ W.T + x),
            torch.zeros(2, 6),
            Broyden(10, 1e-2),
            Implicit(gdeq.GMRES(12, 0.0)),
        )
    (first,) = torch.autograd.grad(solution.z.square().sum(), W, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), W)
    assert torch.isfinite(second).all()
    assert solution.backward.residual.max() > 1e-5  # bf16 products cannot do better, so: not 1e-16


@pytest.mark.parametrize("layer", ["single", "pair"])
def test_f_that_changes_its_argument_is_refused(layer):
    def f(z):
        first = z if layer == "single" else z[0]
        first.mul_(0.5).add_(1)
        return z

    z0 = torch.zeros(2, 3)
    with pytest.raises(gdeq.StateError, match="in place"):
        gdeq.solve(f, z0 if layer == "single" else (z0, z0.clone()))


def test_unrolled_steps_are_judged_where_they_end():
    """They may leave the fixed point that the solver found."""
    f = lambda z: -1.8 * z + 1 + 0.1 * torch.sin(z)  # noqa: E731
    z0 = torch.zeros(2, 3, dtype=F64)
    away = gdeq.fixed_point(f, z0, Broyden(50, 1e-6), Unrolled(30))
    assert gdeq.solve(f, z0, Broyden(50, 1e-6)).converged.all()
    assert not away.converged.any()
    assert away.status == [Status.UNROLLED] * 2
    stays = gdeq.fixed_point(lambda z: 0.5 * z + 1, z0, Broyden(50, 1e-6), Unrolled(3))
    assert stays.converged.all()


def test_implicit_wants_a_tolerance_relative_to_v():
    with pytest.raises(ValueError, match="relative"):
        Implicit(Broyden(20, 1e-6, stop="absolute"))


def test_measuring_lifts_no_sample_into_the_tolerance():
    """In bf16 rounding may move a residual by 8 %: that excuses, and does not promote."""
    record = gdeq.BackwardRecord(tolerance=1e-3)
    record.converged = torch.tensor([True, False, False])
    record.measured(torch.tensor([0.05, 0.05, 5e-4]), slack=0.078)
    assert record.converged.tolist() == [True, False, True]


def test_unrolled_steps_after_a_solve_without_a_tolerance_claim_nothing():
    found = gdeq.fixed_point(
        lambda z: 0 * z + 1, torch.zeros(2, 3), gdeq.Broyden(3, 0.0), gdeq.Unrolled(2)
    )
    assert not found.converged.any()


@pytest.mark.parametrize(("slope", "tol"), [(0.95, 1e-2), (0.97, 2e-2)])
def test_a_bf16_solve_that_ends_far_from_its_start_is_called_converged(slope, tol):
    c = torch.linspace(0.5, 1.5, 64, dtype=torch.bfloat16)
    found = gdeq.solve(
        lambda z: slope * z + c, torch.zeros(3, 64, dtype=torch.bfloat16), gdeq.Broyden(40, tol)
    )
    assert found.converged.all(), str(found)


@pytest.mark.parametrize(("tol", "weight"), [(1e-3, 0.01), (1e-2, 0.1), (3e-2, 0.1)])
def test_first_and_second_order_in_one_pass_are_their_sum(tol, weight):
    """A loss and a penalty on its gradient: the penalty must not be taken for a residual."""
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=torch.float64)
    matrix = (0.7 * matrix / torch.linalg.matrix_norm(matrix, 2)).requires_grad_()
    start = torch.randn(4, 12, dtype=torch.float64)

    def parts():
        x = start.clone().requires_grad_()
        gradient = gdeq.Implicit(gdeq.Broyden(40, tol))
        solver = gdeq.Broyden(60, 1e-12)
        z = gdeq.fixed_point(
            lambda z: torch.tanh(z @ matrix.T + x), torch.zeros_like(start), solver, gradient
        ).z
        loss = z.square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss, weight * slope.square().sum()

    loss, penalty = parts()
    (whole,) = torch.autograd.grad(loss + penalty, matrix)
    loss, penalty = parts()
    (first,) = torch.autograd.grad(loss, matrix, retain_graph=True)
    (second,) = torch.autograd.grad(penalty, matrix)
    assert (whole - first - second).norm() < 3 * tol * (first.norm() + second.norm())


def test_a_refinement_that_turns_nan_keeps_the_last_good_w():
    solution = gdeq.solve(lambda z: 0.5 * z + 1, torch.zeros(1, 2).double(), gdeq.Broyden(3, 0.0))
    v = torch.ones(1, 2, dtype=torch.float64)
    calls = []

    def vjp(w):
        calls.append(w.clone())
        return 0.9 * w if len(calls) < 2 else w * torch.nan

    found = gdeq.GDEQ(refine=2).cotangent(v, vjp, solution)
    assert found.w.isfinite().all()
    assert not torch.equal(found.w, calls[-1])  # the point at which f was not finite
