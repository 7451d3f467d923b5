"""What each gradient method promises, by dense algebra in float64."""

from __future__ import annotations

import pytest
import torch

import gdeq
from cells import F64, contraction, dense_residual, differentiate, every_gradient
from engines import using
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Implicit, Measured, Picard, Unrolled
from problems import (
    Dense,
    Multiscale,
    Wide,
    assert_near,
    pack,
)

F32 = torch.float32


# --- GDEQ -----------------------------------------------------------------------------------------


def test_gdeq_of_a_solved_start_is_jfb():
    problem = Dense()
    solution = gdeq.fixed_point(problem, problem.equilibrium(), Broyden(20, 1e-8), GDEQ())
    v = problem.cotangent()
    (solution.z * v).sum().backward()
    assert torch.equal(problem.shift.grad, v)


def test_without_the_inverse_that_it_needs_gdeq_says_so():
    solution = gdeq.solve(torch.cos, torch.zeros(1, 2), Picard())
    with pytest.raises(ValueError, match="left no inverse to reuse; solve with"):
        GDEQ().cotangent(torch.ones(1, 2), torch.cos, solution)


# --- Implicit -------------------------------------------------------------------------------------

INNER = {
    "broyden": Broyden(100, 1e-4),
    "anderson": Anderson(100, 1e-4),
    "picard": Picard(200, 1e-4),
    "gmres": GMRES(50, 1e-4),
}


@pytest.mark.parametrize("inner", INNER)
def test_implicit_stops_at_its_tolerance_and_says_so(inner, device):
    problem = Wide(radius=0.6).to(device)
    for precondition in (False, True):
        gradient = Implicit(INNER[inner], precondition=precondition)
        solution, w = differentiate(problem, Broyden(30, 1e-6), gradient)
        dense = dense_residual(problem, solution, w)
        assert_near(solution.backward.residual, dense, 1e-12)
        assert (dense <= 1e-4).all()
        assert (dense > 1e-9).any()  # it did stop there
        assert solution.backward.converged.all()
    few = Implicit(type(INNER[inner])(max_iter=2, tol=1e-8))
    solution, w = differentiate(problem, Broyden(30, 1e-6), few)
    assert not solution.backward.converged.any()
    assert_near(solution.backward.residual, dense_residual(problem, solution, w), 1e-10)
    assert solution.backward.vjps == 3


@pytest.mark.parametrize("inner", [Picard(3, 0.0), Broyden(3, 0.0), Picard(3, 1e-3)], ids=str)
def test_a_preconditioned_solve_never_ends_further_off_than_zero(inner, device):
    """Of maps that are far from contractive: the residual of w = 0 is 1."""
    problem = Wide(batch=24, radius=2.0).to(device)
    with torch.no_grad():
        problem.x.mul_(torch.logspace(-1, 1, 24, dtype=F64, device=device)[:, None])
    solution, w = differentiate(problem, Broyden(6, 0.0), Implicit(inner, precondition=True))
    dense, zero = dense_residual(problem, solution, w), ~w.any(dim=1)
    assert 0 < int(zero.sum()) < 24
    assert (dense <= 1).all()
    assert_near(solution.backward.residual, dense, 1e-12)


def jacobians(smallest: float, batch: int = 60, d: int = 4):
    """Such that I − J has this smallest singular value.  (batch, d, d)"""
    make = torch.Generator().manual_seed(0)
    J = 0.5 * torch.randn(batch, d, d, generator=make, dtype=F64) / d**0.5
    U, S, V = torch.linalg.svd(torch.eye(d, dtype=F64) - J)
    S[:, -1] = smallest
    return torch.eye(d, dtype=F64) - U @ torch.diag_embed(S) @ V


def adjoint_solve(gradient, J):
    """The record, and the true residual of the w that it is about.  J: (batch, d, d)"""
    batch, d, _ = J.shape
    make = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, batch, d, generator=make, dtype=J.dtype)
    x.requires_grad_()
    solution = gdeq.fixed_point(
        lambda z: torch.einsum("bij,bj->bi", J, z) + x,
        torch.zeros(batch, d, dtype=J.dtype),
        Broyden(12, 0.0),
        gradient,
    )
    solution.z.backward(v)
    w, v, J = x.grad.double(), v.double(), J.double()
    r = v - w + torch.einsum("bij,bi->bj", J, w)
    return solution.backward, r.norm(dim=1) / v.norm(dim=1)


ADJOINT = {
    "anderson": Implicit(Anderson(200, 1e-4)),
    "first-order": Implicit(Anderson(200, 1e-4), double_backward=False),
    "broyden": Implicit(Broyden(100, 1e-4)),
    "preconditioned": Implicit(Broyden(60, 1e-4), precondition=True),
    "gmres": Implicit(GMRES(20, 1e-4)),
    "gdeq": GDEQ(tolerance=1e-4, max_refine=60),
}


@pytest.mark.parametrize("engine", ["reference", "oracle"])
@pytest.mark.parametrize("gradient", ADJOINT.values(), ids=ADJOINT)
def test_a_residual_of_the_adjoint_equation_is_what_is_claimed(gradient, engine):
    """Beside a w of 10⁴ ‖v‖ and more, v − w + Jᵀw in float32 may vanish without being small."""
    with using(engine):
        for smallest in (1e-5, 0.0):
            record, true = adjoint_solve(gradient, jacobians(smallest).to(F32))
            assert (true[record.converged] <= 2e-4).all()
            assert (record.residual > 0.25 * true).all()
        for dtype, smallest in ((F32, 0.2), (F64, 1e-5)):  # one that is solved is called so
            record, true = adjoint_solve(gradient, jacobians(smallest).to(dtype))
            assert (true <= 1.01e-4).all()
            assert record.converged.all()
            torch.testing.assert_close(record.residual.double(), true, rtol=1e-2, atol=1e-6)


# --- what is counted and measured -----------------------------------------------------------------


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
        *(JFB(), GDEQ(), Measured(JFB()), Measured(GDEQ()), NPG(4), GDEQ(refine=3)),
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


@pytest.mark.parametrize("bare", [JFB(), GDEQ(), NPG(3), GDEQ(refine=2)], ids=str)
def test_measuring_changes_nothing_but_the_record(bare, device):
    problem, solver = Multiscale(radius=0.9).to(device), Broyden(6, 0.0)
    plain, _ = differentiate(problem, solver, bare)
    expected = [parameter.grad.clone() for parameter in problem.parameters()]
    unmeasured = bare in (JFB(), GDEQ())
    assert (plain.backward.residual is None) == unmeasured
    assert ("not measured" in str(plain.backward)) == unmeasured
    solution, w = differentiate(problem, solver, Measured(bare))
    for a, b in zip(problem.parameters(), expected, strict=True):
        assert_near(a.grad, b, 1e-14)
    dense = dense_residual(problem, solution, w)
    assert_near(solution.backward.residual, dense, 1e-12)
    assert (dense > 1e-3).all()
    assert solution.backward.vjps == plain.backward.vjps


def input_gradient(gradient, scale: float):
    W, dtype = contraction(8, 0.7, dtype=F32), F32
    x, v = (torch.randn(3, 8, generator=torch.Generator().manual_seed(s)) for s in (2, 3))
    x.requires_grad_()
    solution = gdeq.fixed_point(
        lambda z: torch.tanh(z @ W.T + x),
        torch.zeros(3, 8, dtype=dtype),
        Broyden(12, 0.0),
        gradient,
    )
    solution.z.backward(scale * v)
    return x.grad, solution.backward


SCALED = [GDEQ(), GDEQ(refine=2), GDEQ(tolerance=0.01), Implicit(), NPG(), JFB(), JFB(refine=2)]


@pytest.mark.parametrize("gradient", SCALED, ids=str)
def test_the_gradient_of_a_tiny_or_huge_loss_is_that_of_the_loss(gradient):
    """float32 squares of either are out of range."""
    expected, plain = input_gradient(gradient, 1.0)
    for scale in (2.0**-80, 2.0**60):
        found, record = input_gradient(gradient, scale)
        torch.testing.assert_close(found / scale, expected, rtol=1e-5, atol=1e-7)
        if plain.residual is not None:
            torch.testing.assert_close(record.residual, plain.residual, rtol=1e-3, atol=1e-7)
    found, _ = input_gradient(gradient, float("inf"))
    assert not torch.isfinite(found).all()  # a gradient scaler looks for it


@every_gradient
def test_backward_through_z_plus_a_constant_does_not_crash(device, gradient):
    # (I − J)ᵀ w = v has no solution there; what comes back must be finite and reported as it is.
    c = torch.ones(4, device=device, requires_grad=True)
    found = gdeq.fixed_point(lambda z: z + c, torch.zeros(3, 4, device=device), gradient=gradient)
    found.z.sum().backward()
    assert torch.isfinite(c.grad).all()
    if found.backward is not None and found.backward.converged is not None:
        assert not found.backward.converged.any()
        assert (found.backward.residual > 0.5).all()


# --- Unrolled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1.0, 0.4])
@pytest.mark.parametrize("solver", [None, Broyden(20, 1e-2), Picard(3, 0.0)], ids=str)
def test_unrolled_equals_a_loop_by_hand(solver, damping, device):
    problem = Multiscale().to(device)
    v, z0 = problem.cotangent(), pack(problem.z0).requires_grad_()
    f = lambda z: (problem.on_vectors(z[0]),)  # noqa: E731
    solution = gdeq.fixed_point(f, (z0,), solver, Unrolled(4, damping))
    (solution.z[0] * v).sum().backward()
    z = z0.detach().requires_grad_()
    again = z if solver is None else gdeq.solve(f, (z0,), solver).z[0]
    for _ in range(4):
        again = (1 - damping) * again + damping * problem.on_vectors(again)
    assert_near(solution.z[0], again, 1e-14)
    leaves = [*problem.parameters(), *([z] if solver is None else [])]
    expected = torch.autograd.grad(again, leaves, v)
    found = [p.grad for p in problem.parameters()] + ([z0.grad] if solver is None else [])
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-13)
    assert (z0.grad is None) == (solver is not None)  # a solution does not depend on z0


def test_a_sample_whose_jacobian_is_infinite_does_not_spoil_the_others():
    c = torch.tensor([[0.0, 0.0], [0.3, 0.2]], dtype=torch.float64, requires_grad=True)
    p = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    found = gdeq.fixed_point(
        lambda z: p * z.sqrt() + c, torch.zeros_like(c), gradient=gdeq.GDEQ(tolerance=0.1)
    )
    found.z.sum().backward()
    assert c.grad.isfinite().all()
    assert c.grad[1].gt(0).all()


def test_a_gradient_of_zero_counts_as_a_whole_error():
    """Samples whose w is 0 are wrong by all of their gradient: the mean must not leave them out."""
    spread = torch.diag(torch.arange(2.0, 10.0, dtype=torch.float64))
    c = torch.ones(3, 8, dtype=torch.float64, requires_grad=True)
    found = gdeq.fixed_point(
        lambda z: z @ spread + c,
        torch.zeros(3, 8, dtype=torch.float64),
        gradient=gdeq.GDEQ(tolerance=0.1, max_refine=1),
    )
    found.z.square().sum().backward()
    exact = 2 * found.z.detach() @ torch.linalg.inv(torch.eye(8, dtype=torch.float64) - spread)
    error = (c.grad - exact).norm() / exact.norm()
    assert found.backward.batch_error > 0.3 * error
