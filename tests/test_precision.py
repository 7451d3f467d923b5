"""float32, float64, half-precision states, and autocast: f in half precision, algebra in full."""

import contextlib

import pytest
import torch
from torch import nn

import cells
import gdeq
from cells import data, every_gradient
from gdeq import Broyden

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Cell(cells.Cell):
    """Records the dtypes it computes in."""

    def __init__(self, gain=0.6):
        super().__init__(16, gain, F32)
        self.seen = []

    def forward(self, z, x):
        hidden = self.inner(z) + self.input(x)
        self.seen.append((z.dtype, hidden.dtype))
        return torch.tanh(hidden)


def autocast(device, enabled=True, dtype=BF16):
    return torch.autocast(device.type, dtype=dtype, enabled=enabled)


def step(deq, x, device, context=None, inside=False):
    """z and the gradients of a training step, its backward pass inside the context or not."""
    deq.zero_grad(set_to_none=True)
    with context or contextlib.nullcontext():
        z = deq(x)
        loss = z.float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    for name, p in deq.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
    return z, torch.cat([p.grad.flatten() for p in deq.parameters()]).double()


def check_algebra(inverse):
    """In float32, whatever its steps are stored in (the GPU's form keeps those of a bf16 f so)."""
    if inverse is not None:
        x = torch.randn(inverse.space.batch, inverse.space.size, device=inverse.space.device)
        found = inverse.matvec(x)
        assert found.dtype == F32
        assert not torch.equal(found, found.to(BF16).float())


@every_gradient
def test_float32_agrees_with_float64(device, gradient):
    cell, x, found = Cell().to(device), data(device, 4, 16), []
    for dtype in (F32, F64):
        # Exactly as many steps, so that both are the same algorithm.
        deq = gdeq.DEQ(cell.to(dtype), Broyden(max_iter=5, tol=0.0), gradient)
        z, gradients = step(deq, x.to(dtype), device)
        assert z.dtype == deq.solution.residual.dtype == cell.inner.weight.grad.dtype == dtype
        assert cell.seen[-1] == (dtype, dtype)
        found.append((z.double(), gradients))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert (found[0][1] - found[1][1]).norm() < 1e-3 * found[1][1].norm()


# --- autocast ------------------------------------------------------------------------------------


@every_gradient
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast_runs_f_in_bf16_and_the_algebra_in_float32(device, gradient, inside):
    deq = gdeq.DEQ(Cell().to(device), Broyden(max_iter=12, tol=5e-3), gradient)
    x = torch.randn(8, 16, device=device)
    _, expected = step(deq, x, device)
    deq.cell.seen.clear()
    with autocast(device), torch.no_grad():
        deq(x)  # leaves casts without history in autocast's cache, which would cut weights off
        z, found = step(deq, x, device, torch.enable_grad(), inside)
        assert torch.is_autocast_enabled(device.type)
    assert set(deq.cell.seen) == {(F32, BF16)}
    assert z.dtype == deq.solution.trace.dtype == deq.solution.residual.dtype == F32
    check_algebra(deq.solution.inverse)
    # An iterate of the float32 algebra has more digits than bf16 holds.
    assert not torch.equal(z, z.to(BF16).float())
    assert all(p.grad.dtype == F32 for p in deq.parameters())
    assert torch.cosine_similarity(found, expected, dim=0) > 0.99


def test_nested_layers_under_autocast(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell(gain=0.4)
            self.inner = gdeq.DEQ(Cell(gain=0.4), Broyden(max_iter=12, tol=5e-3))

        def forward(self, z, x):
            return self.cell(z, x + 0.3 * self.inner(z))

    deq = gdeq.DEQ(Outer().to(device), Broyden(max_iter=12, tol=5e-3), gdeq.NPG())
    step(deq, torch.randn(4, 16, device=device), device, autocast(device))


class Sharp(nn.Module):
    """Its derivative under autocast is another one than in float32, by far more than rounding."""

    def __init__(self, d=6):
        super().__init__()
        self.inner = nn.Linear(d, d)
        with torch.no_grad():
            self.inner.weight *= 0.5 / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z, x):
        hidden = self.inner(z)
        gain = 1.0 if hidden.dtype == BF16 else -0.5
        return torch.tanh(gain * hidden + x)


@pytest.mark.parametrize("where", ["inside", "outside", "other"])
@pytest.mark.parametrize("double_backward", [True, False])
def test_f_is_linearised_under_the_autocast_it_was_solved_in(device, where, double_backward):
    cell = Sharp().to(device)
    gradient = gdeq.Implicit(gdeq.GMRES(max_iter=6, tol=1e-6), double_backward=double_backward)
    deq = gdeq.DEQ(cell, Broyden(max_iter=20, tol=1e-2), gradient)
    x, v = torch.randn(3, 6, device=device), torch.randn(3, 6, device=device)
    with autocast(device):
        z = deq(x)
    # A region with other settings than those of the solve must not matter either.
    dtype = F16 if where == "other" else BF16
    with autocast(device, where != "outside", dtype):
        z.backward(v)

    point = z.detach().requires_grad_()
    torch.clear_autocast_cache()
    with autocast(device):
        out = cell(point, x).float()
    rows = [torch.autograd.grad(o.sum(), point, retain_graph=True)[0] for o in out.T]
    jacobian, eye = torch.stack(rows, dim=1), torch.eye(6, device=device)
    w = torch.linalg.solve((eye - jacobian).mT, v)
    (expected,) = torch.autograd.grad(out, cell.inner.weight, w)
    assert (cell.inner.weight.grad - expected).norm() < 0.02 * expected.norm()
    # The other linearisation is far away, so this test can fail.
    wrong = torch.linalg.solve((eye + 0.5 * jacobian).mT, v)
    assert (wrong - w).norm() > 0.2 * w.norm()


@pytest.mark.parametrize("solver", [Broyden, gdeq.Anderson, gdeq.Picard])
def test_a_tight_tolerance_under_autocast_ends_at_the_rounding(device, solver):
    # bf16 stops at a residual of a few 1e-3: to go on would only spoil the inverse.
    cell, x = Cell().to(device), torch.randn(4, 16, device=device)
    with autocast(device), torch.no_grad():
        found = gdeq.solve(lambda z: cell(z, x), torch.zeros_like(x), solver(200, 1e-9))
    assert (found.residual < 2e-2).all()
    assert (found.converged == (found.residual <= 1e-9)).all()
    assert torch.isfinite(found.z).all()
    assert found.evals < 100


def test_an_encoder_under_autocast_hands_over_half_precision(device):
    # x is bf16 then, and so is the state that is made like it.
    deq = gdeq.DEQ(Cell().to(device), Broyden(max_iter=12, tol=2e-2))
    model = nn.Sequential(nn.Linear(16, 16).to(device), deq, nn.Linear(16, 2).to(device))
    step(model, torch.randn(4, 16, device=device), device, autocast(device))
    assert deq.solution.z.dtype == BF16
    assert deq.solution.trace.dtype == F32


def test_regularisers_under_autocast(device):
    cell, x = Cell().to(device), torch.randn(4, 16, device=device)
    f = lambda u: cell(u, x)  # noqa: E731
    z, generator = gdeq.solve(f, torch.zeros_like(x)).z, torch.Generator(device)
    found = []
    for enabled in (False, True):
        cell.zero_grad(set_to_none=True)
        with autocast(device, enabled=enabled):
            penalties = []
            for function in (
                lambda: gdeq.jacobian_penalty(f, z, generator=generator.manual_seed(1)),
                lambda: gdeq.residual_penalty(f, 2 * z),
                lambda: gdeq.spectral_radius(f, z, generator=generator.manual_seed(1)),
            ):
                with torch.no_grad():
                    cell(z, x)  # leaves casts without history in autocast's cache
                penalties.append(function())
        (penalties[0] + penalties[1]).backward()
        found.append([*(p.detach() for p in penalties), cell.inner.weight.grad])
    for full, half in zip(*found, strict=True):
        assert half.dtype == F32
        assert (half - full).norm() / full.norm() < 0.05


# --- half-precision states -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16])
@every_gradient
def test_half_precision_state(device, dtype, gradient):
    if isinstance(gradient, gdeq.Implicit):
        gradient = gdeq.Implicit(gdeq.GMRES(10, 1e-3), precondition=gradient.precondition)
    cell, x = Cell().to(device), torch.randn(8, 16, device=device)
    deq = gdeq.DEQ(cell, Broyden(max_iter=12, tol=1e-2), gradient)
    full, expected = step(deq, x, device)
    deq.to(dtype)
    cell.seen.clear()
    z, found = step(deq, x.to(dtype), device)
    assert z.dtype == cell.inner.weight.grad.dtype == dtype
    assert set(cell.seen) == {(dtype, dtype)}
    assert deq.solution.trace.dtype == F32
    check_algebra(deq.solution.inverse)
    assert (z.float() - full).norm() / full.norm() < 0.03
    assert torch.cosine_similarity(found, expected, dim=0) > 0.99


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "autocast"])
def test_tensors_of_different_dtypes(device, enabled):
    def f(z):
        wide, short = z
        assert (wide.dtype, short.dtype) == (F32, BF16)
        mean = wide.mean(1, keepdim=True)
        return 0.3 * wide + 0.1 * short.float() + 1, (0.2 * short + 0.1 * mean).to(BF16)

    z0 = (torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device, dtype=BF16))
    with autocast(device, enabled):
        found = gdeq.fixed_point(f, z0, Broyden(max_iter=30, tol=1e-2))
    assert [t.dtype for t in found.z] == [F32, BF16]
    assert found.converged.all()
    wide = (1 / 0.7) / (1 - 1 / 56)  # wide = 1/0.7 + short/7 and short = wide/8
    torch.testing.assert_close(found.z[0], torch.full_like(found.z[0], wide), rtol=0.03, atol=0)


@pytest.mark.parametrize("gradient", [gdeq.JFB(), gdeq.GDEQ(refine=1)], ids=str)
def test_a_sample_whose_z_float16_cannot_hold_has_no_gradient(device, gradient):
    """f was not evaluated there, so it has no derivative either."""
    x = torch.ones(2, 3, device=device, dtype=F16, requires_grad=True)
    z0 = torch.zeros_like(x, requires_grad=False)
    z0[1] = torch.nan
    z = gdeq.fixed_point(lambda z: 0.5 * z.nan_to_num() + x, z0, Broyden(6, 1e-2), gradient).z
    (found,) = torch.autograd.grad(z, x, torch.ones_like(z))
    assert (found[0] > 0.9).all()
    assert (found[1] == 0).all()
