"""What is claimed is so: cases in which a residual, a status or a gradient once was not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gdeq
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Implicit, Picard, Status, Unrolled
from gdeq.fast.kernels import choice

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


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


@pytest.mark.parametrize(("dtype", "tol"), [(F32, 1e-6), (BF16, 1e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("solver", [Broyden, Anderson, Picard])
def test_a_fixed_point_at_zero_is_found_in_other_dtypes(solver, dtype, tol):
    W = contraction(20, 0.8).to(dtype)
    z0 = torch.randn(4, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    solution = gdeq.solve(lambda z: torch.tanh(z @ W.T), z0, solver(60, tol))
    assert solution.converged.all(), str(solution)
    assert (solution.z.double().norm(dim=1) < 1e-7).all()


@pytest.mark.parametrize("form", ["off", "plain"])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("solver", [Broyden(40, 1e-2), Anderson(40, 1e-2), Picard(40, 1e-2)])
def test_a_start_far_from_a_small_fixed_point_does_not_hide_its_residual(solver, scale, form):
    """In bf16 the rounding of f at z0 is far larger than z*."""
    W = contraction(20, 0.8).to(BF16)
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(1)).to(BF16)
    fixed = torch.linalg.solve(torch.eye(20) - W.float(), x.float().T).T

    def f(z):
        return z @ W.to(z.dtype).T + x.to(z.dtype)

    with choice.use(form):
        found = gdeq.solve(f, (scale * fixed).to(BF16), solver)
    z = found.z.double()
    true = (f(z) - z).norm(dim=1) / torch.maximum(f(z).norm(dim=1), z.norm(dim=1))
    assert found.converged.all(), str(found)
    assert (true < 1.5e-2).all()
    assert (true < 2 * found.residual).all()


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
    Implicit(GMRES(20, 1e-6)),
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


@pytest.mark.parametrize("stop", ["relative", "absolute"])
def test_claims_of_unrolled_steps_are_about_the_z_that_is_returned(stop):
    """Where f spreads what is left of the last step, its residual is larger than the one before."""
    W = contraction(6, 30.0)
    W = torch.triu(W, 1)  # nilpotent: the steps converge, but not monotonically
    x = torch.randn(40, 6, dtype=F64, generator=torch.Generator().manual_seed(1))

    def f(z):
        return z @ W.T + x

    solver = Broyden(50, 1e-2, stop=stop)
    calls = []
    found = gdeq.fixed_point(
        lambda z: (calls.append(1), f(z))[1], torch.zeros_like(x), solver, Unrolled(1)
    )
    fz = f(found.z)
    true = (fz - found.z).norm(dim=1)
    if stop == "relative":
        true = true / torch.maximum(fz.norm(dim=1), found.z.norm(dim=1))
    torch.testing.assert_close(found.residual, true, rtol=1e-3, atol=1e-12)
    assert found.converged.tolist() == (true <= 1e-2).tolist()
    assert found.converged.any()
    assert not found.converged.all()
    assert found.evals == len(calls)


def test_implicit_wants_a_tolerance_relative_to_v():
    with pytest.raises(ValueError, match="relative"):
        Implicit(Broyden(20, 1e-6, stop="absolute"))


def test_measuring_lifts_no_sample_into_the_tolerance():
    """In bf16 rounding may move a residual: that excuses, and does not promote."""
    record = gdeq.BackwardRecord(tolerance=1e-2, floor=torch.full((4,), 5e-3))
    record.converged = torch.tensor([True, False, False, True])
    record.measured(torch.tensor([0.014, 0.014, 5e-4, 0.016]))
    assert record.converged.tolist() == [True, False, True, False]
    assert record.residual.tolist() == pytest.approx([0.014, 0.014, 5e-3, 0.016])


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


@pytest.mark.parametrize("radius", [20, 100])
def test_a_stiff_map_that_overflows_is_solved_by_what_its_status_names(radius):
    make = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(20, 20, generator=make, dtype=F64))[0]
    A = Q @ torch.diag(torch.linspace(1, radius, 20, dtype=F64)) @ Q.T
    b = torch.randn(4, 20, generator=make, dtype=F64)

    def f(z):
        return b - z @ A - z**3

    z0 = torch.zeros_like(b)
    plain = gdeq.solve(f, z0, Broyden(100, 1e-8))
    assert plain.status == [Status.NONFINITE] * 4
    for name in ("line_search=3", "max_step=1", "gdeq.jacobian_penalty"):
        assert name in str(Status.NONFINITE)
        assert name in str(Status.DIVERGED)
    for remedy in ({"line_search": 3}, {"max_step": 1.0}):
        assert gdeq.solve(f, z0, Broyden(100, 1e-8, **remedy)).converged.all()


def jacobians(smallest: float, batch: int = 100, d: int = 4):
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


ADJOINT = [
    Implicit(Anderson(200, 1e-4)),
    Implicit(Anderson(200, 1e-4), double_backward=False),
    Implicit(Broyden(100, 1e-4)),
    Implicit(Broyden(60, 1e-4), precondition=True),
    Implicit(Picard(100, 1e-4)),
    Implicit(GMRES(20, 1e-4)),
    GDEQ(tolerance=1e-4, max_refine=60),
]


@pytest.mark.parametrize("form", ["off", "plain"])
@pytest.mark.parametrize("smallest", [1e-5, 0.0])
@pytest.mark.parametrize("gradient", ADJOINT, ids=lambda g: str(g)[:30])
def test_no_adjoint_residual_below_the_rounding_at_its_w_is_claimed(gradient, smallest, form):
    """Beside a w of 10⁴ ‖v‖ and more, v − w + Jᵀw in float32 may vanish without being small."""
    with choice.use(form):
        record, true = adjoint_solve(gradient, jacobians(smallest).to(F32))
    assert (true[record.converged] <= 2e-4).all()
    assert (record.residual > 0.25 * true).all()


@pytest.mark.parametrize("form", ["off", "plain"])
@pytest.mark.parametrize(("dtype", "smallest"), [(F32, 0.2), (F64, 1e-5)], ids=str)
@pytest.mark.parametrize("gradient", ADJOINT[:4] + ADJOINT[5:], ids=lambda g: str(g)[:30])
def test_an_adjoint_equation_that_is_solved_is_called_so(gradient, dtype, smallest, form):
    with choice.use(form):
        record, true = adjoint_solve(gradient, jacobians(smallest).to(dtype))
    assert (true <= 1.01e-4).all()
    assert record.converged.all()
    torch.testing.assert_close(record.residual.double(), true, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-6])
def test_the_estimated_error_is_about_the_error(tol):
    ratios = []
    for seed in range(9):
        d, radius = (8, 20, 50)[seed % 3], (0.6, 0.9, 1.5)[seed // 3]
        inner, outer = 1.5 * contraction(d, 1.0, seed), contraction(d, radius, seed + 100)
        x = torch.randn(20, d, generator=torch.Generator().manual_seed(seed), dtype=F64)

        def f(z, inner=inner, outer=outer, x=x):
            return torch.tanh(z @ inner.T) @ outer.T + x

        found = gdeq.solve(f, torch.zeros_like(x), Broyden(100, tol))
        fixed = gdeq.solve(f, found.z, Broyden(200, 1e-13)).z
        assert found.converged.all()
        true = (found.z - fixed).norm(dim=1) / found.z.norm(dim=1)
        ratios.append(true / found.error)
    ratio = torch.cat(ratios)
    assert ((ratio > 0.8) & (ratio < 1.3)).double().mean() > 0.9
    assert ratio.max() < 4


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["root", "softplus", "hyperbola"])
def test_a_map_that_only_tends_to_its_argument_has_a_large_estimated_error(name, tol):
    """f(z) − z tends to zero as z runs away: the residual is small, and there is no fixed point."""
    f = {
        "root": lambda z: (z * z + 1).sqrt(),
        "softplus": lambda z: z + torch.nn.functional.softplus(-z),
        "hyperbola": lambda z: z + 1 / (1 + z.abs()),
    }[name]
    z0 = 3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = gdeq.solve(f, z0, Broyden(60, tol))
    claimed = found.error[found.converged]
    assert len(claimed) > 30
    assert (claimed > 3 * tol).double().mean() > 0.9
    assert (claimed > 0.05).double().mean() > 0.8


def test_who_has_no_inverse_estimates_no_error():
    def f(z):
        return 0.5 * torch.cos(z)

    z0 = torch.zeros(3, 4)
    assert gdeq.solve(f, z0, Anderson(20, 1e-4)).error is None
    assert gdeq.solve(f, z0, Picard(20, 1e-4)).error is None
    assert gdeq.fixed_point(f, z0, Broyden(20, 1e-4), Unrolled(2)).error is None
    found = gdeq.solve(f, z0, Broyden(20, 1e-4))
    assert f"estimated error at most {found.error.max().item():.1e}" in str(found)


def test_the_estimated_error_of_a_sample_without_an_f_is_not_a_number():
    z0 = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    for form in ("off", "plain"):
        with choice.use(form):
            error = gdeq.solve(lambda z: 0.5 * z + 1, z0, Broyden(5, 1e-3)).error
        assert error.isnan().tolist() == [False, True]


def small_slow_part(ratio: float, dtype=F64, batch: int = 160):
    """A state of a large tensor that is solved at once and a slow one, this much smaller."""
    make = torch.Generator().manual_seed(0)
    fast, slow = contraction(20, 0.3).to(dtype), contraction(8, 0.95, 1).to(dtype)
    x = torch.randn(batch, 20, generator=make, dtype=F64).to(dtype)
    y = ratio * torch.randn(batch, 8, generator=make, dtype=F64).to(dtype)

    def f(z):
        return torch.tanh(z[0] @ fast.T + x), z[1] @ slow.T + y

    fixed = torch.linalg.solve(torch.eye(8, dtype=F64) - slow.double(), y.double().T).T
    return f, (torch.zeros_like(x), torch.zeros_like(y)), fixed


def part_errors(found, fixed):  # -> (batch,) of the small part
    return (found.z[1].double() - fixed).norm(dim=1) / fixed.norm(dim=1)


PART_SOLVERS = [Broyden(60, 1e-2), Anderson(60, 1e-2), Picard(200, 1e-2)]


@pytest.mark.parametrize("form", ["off", "plain"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("ratio", [1e-2, 1e-4])
@pytest.mark.parametrize("solver", PART_SOLVERS, ids=lambda s: type(s).__name__)
def test_a_state_in_parts_is_converged_when_every_part_is(solver, ratio, dtype, form):
    f, z0, fixed = small_slow_part(ratio, dtype)
    with choice.use(form):
        found = gdeq.solve(f, z0, solver)
        whole = gdeq.solve(f, z0, replace(solver, stop="whole"))
    assert found.converged.all(), str(found)
    assert (part_errors(found, fixed) < 0.2).all()
    g = [(a - b).norm(dim=1) for a, b in zip(f(found.z), found.z, strict=True)]
    size = [part.norm(dim=1) for part in found.z]
    expected = torch.stack([a / b for a, b in zip(g, size, strict=True)], 1)
    torch.testing.assert_close(found.parts, expected, rtol=2e-2, atol=1e-5)
    torch.testing.assert_close(found.residual, found.parts.amax(1))
    assert whole.converged.all()
    assert whole.parts is None
    assert (part_errors(whole, fixed) > 0.1).double().mean() > 0.5  # what was claimed before


@pytest.mark.parametrize("form", ["off", "plain"])
@pytest.mark.parametrize(
    ("dtype", "tol"), [(F64, 1e-3), (F64, 1e-8), (F32, 1e-3), (F32, 1e-6), (BF16, 1e-2)], ids=str
)
def test_a_part_that_is_zero_at_the_fixed_point_does_not_prevent_convergence(dtype, tol, form):
    f, z0, _ = small_slow_part(0.0, dtype, batch=20)
    z0 = z0[0], torch.ones_like(z0[1])
    with choice.use(form):
        found = gdeq.solve(f, z0, Anderson(80, tol))
    assert found.converged.all(), str(found)
    assert (found.z[1].double().norm(dim=1) < 10 * tol * found.z[0].double().norm(dim=1)).all()


def test_a_sample_that_fails_in_one_part_says_in_which():
    f, z0, _ = small_slow_part(1e-2, batch=3)
    found = gdeq.solve(f, z0, Broyden(3, 1e-6))
    assert not found.converged.any()
    assert found.parts.argmax(1).tolist() == [1, 1, 1]
    assert "largest in tensor 1 of the state" in str(found)
    assert gdeq.solve(lambda z: 0.5 * z, z0[0], Broyden(3, 1e-6)).parts is None


def test_parts_after_unrolled_steps_are_those_of_the_z_returned():
    f, z0, _ = small_slow_part(1e-2, batch=3)
    found = gdeq.fixed_point(f, z0, Broyden(30, 1e-4), Unrolled(2))
    g = [(a - b).norm(dim=1) for a, b in zip(f(found.z), found.z, strict=True)]
    expected = torch.stack([a / b.norm(dim=1) for a, b in zip(g, found.z, strict=True)], 1)
    torch.testing.assert_close(found.parts, expected, rtol=1e-2, atol=1e-9)
    torch.testing.assert_close(found.residual, expected.amax(1), rtol=1e-2, atol=1e-9)


def test_more_parts_than_a_kernel_judges():
    z0 = tuple(torch.zeros(3, 2, dtype=F64) for _ in range(20))
    for form in ("off", "plain"):
        with choice.use(form):
            found = gdeq.solve(
                lambda z: tuple(0.3 * torch.cos(part + i) for i, part in enumerate(z)),
                z0,
                Broyden(20, 1e-8),
            )
        assert found.converged.all()
        assert found.parts.shape == (3, 20)
