"""float32, float64, half-precision states, and autocast: f in half precision, algebra in full."""

import contextlib

import pytest
import torch
from torch import nn

import gdeq
from gdeq.fast import kernels
from gdeq.solve import iterate

GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-2),
    "Implicit": gdeq.Implicit(gdeq.Broyden(max_iter=20, tol=1e-3)),
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=10, tol=1e-3), precondition=True),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(steps=4, damping=0.7),
    "Measured": gdeq.Measured(gdeq.GDEQ()),
}
every_gradient = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
BF16 = torch.bfloat16


class Cell(nn.Module):
    """Records the dtypes it computes in."""

    def __init__(self, d=16, gain=0.6):
        super().__init__()
        self.inner = nn.Linear(d, d)
        self.input = nn.Linear(d, d)
        self.seen = []
        with torch.no_grad():
            self.inner.weight *= gain / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z, x):
        hidden = self.inner(z) + self.input(x)
        self.seen.append((z.dtype, hidden.dtype))
        return torch.tanh(hidden)


def autocast(device, enabled=True):
    return torch.autocast(device.type, dtype=BF16, enabled=enabled)


def check_algebra(inverse):
    """In float32, whatever its steps are stored in (the GPU's form keeps those of a bf16 f so)."""
    x = torch.randn(inverse.space.batch, inverse.space.size, device=inverse.space.device)
    found = inverse.matvec(x)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.to(BF16).float())


def flat_gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()]).double()


# --- float32 and float64 -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [gdeq.Broyden, gdeq.Anderson, gdeq.Picard])
def test_dtype_is_kept_throughout(device, dtype, solver):
    cell = Cell().to(device, dtype)
    x = torch.randn(4, 16, device=device, dtype=dtype)
    found = gdeq.fixed_point(
        lambda z: cell(z, x), torch.zeros_like(x), solver(60, 1e-5), gdeq.Implicit()
    )
    assert found.z.dtype == found.residual.dtype == found.trace.dtype == dtype
    assert found.converged.all()
    assert set(cell.seen) == {(dtype, dtype)}
    found.z.sum().backward()
    assert cell.inner.weight.grad.dtype == dtype
    assert found.backward.residual.dtype == dtype


@every_gradient
def test_float32_agrees_with_float64(device, gradient):
    cell = Cell().to(device)
    x = torch.randn(4, 16, device=device)
    found = []
    for dtype in (torch.float32, torch.float64):
        # Exactly as many steps, so that both are the same algorithm.
        deq = gdeq.DEQ(cell.to(dtype), gdeq.Broyden(max_iter=5, tol=0.0), gradient)
        deq.zero_grad()
        z = deq(x.to(dtype))
        z.square().sum().backward()
        found.append((z.detach().double(), flat_gradient(deq)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    error = (found[0][1] - found[1][1]).norm() / found[1][1].norm()
    assert error < 1e-3


def test_tolerance_below_the_rounding_of_float32_ends_without_claiming_success(device):
    cell = Cell().to(device)
    x = torch.randn(4, 16, device=device)
    with torch.no_grad():
        deq = gdeq.DEQ(cell, gdeq.Broyden(max_iter=200, tol=1e-14))
        deq(x)
    done = deq.solution
    assert (done.residual < 1e-6).all()
    assert (done.converged == (done.residual <= 1e-14)).all()
    assert done.evals < 100
    assert torch.isfinite(done.inverse.as_matrix()).all()


# --- autocast ------------------------------------------------------------------------------------


@every_gradient
def test_autocast_runs_f_in_bf16_and_the_algebra_in_float32(device, gradient):
    deq = gdeq.DEQ(Cell().to(device), gdeq.Broyden(max_iter=20, tol=2e-2), gradient)
    x = torch.randn(4, 16, device=device)
    with autocast(device):
        z = deq(x)
        assert torch.is_autocast_enabled(device.type)
    assert set(deq.cell.seen) == {(torch.float32, BF16)}
    assert z.dtype == torch.float32
    assert deq.solution.trace.dtype == torch.float32
    assert deq.solution.residual.dtype == torch.float32
    if deq.solution.inverse is not None:
        check_algebra(deq.solution.inverse)
    # An iterate of the float32 algebra has more digits than bf16 holds.
    assert not torch.equal(z, z.to(BF16).float())


@every_gradient
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast_gradients_reach_every_weight_and_are_close(device, gradient, inside):
    deq = gdeq.DEQ(Cell().to(device), gdeq.Broyden(max_iter=12, tol=5e-3), gradient)
    x = torch.randn(8, 16, device=device)
    target = torch.randn(8, 16, device=device)
    (deq(x) - target).square().sum().backward()
    expected = flat_gradient(deq)
    deq.zero_grad(set_to_none=True)
    with autocast(device):
        loss = (deq(x) - target).square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    for name, p in deq.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32, name
        assert p.grad.abs().sum() > 0, name
    assert torch.cosine_similarity(flat_gradient(deq), expected, dim=0) > 0.99


def test_weights_get_gradients_after_a_call_without_autograd_in_the_same_region(device):
    # Autocast caches the casts made without autograd; used again they cut the weights off.
    deq = gdeq.DEQ(Cell().to(device), gdeq.Broyden(max_iter=12, tol=5e-3))
    x = torch.randn(8, 16, device=device)
    with autocast(device):
        with torch.no_grad():
            deq(x)
        deq(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in deq.parameters())


def test_weights_get_gradients_in_nested_layers_under_autocast(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell(gain=0.4)
            self.inner = gdeq.DEQ(Cell(gain=0.4), gdeq.Broyden(max_iter=12, tol=5e-3))

        def forward(self, z, x):
            return self.cell(z, x + 0.3 * self.inner(z))

    deq = gdeq.DEQ(Outer().to(device), gdeq.Broyden(max_iter=12, tol=5e-3), gdeq.NPG())
    with autocast(device):
        loss = deq(torch.randn(4, 16, device=device)).square().sum()
    loss.backward()
    for name, p in deq.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def linearised_by_hand(cell, x, z, device):
    """f and its dense Jacobian at z, evaluated under autocast: (out, J) with J (batch, d, d)."""
    z = z.detach().requires_grad_()
    torch.clear_autocast_cache()
    with autocast(device):
        out = cell(z, x).float()
    rows = [
        torch.autograd.grad(out[:, i].sum(), z, retain_graph=True)[0] for i in range(z.shape[1])
    ]
    return out, torch.stack(rows, dim=1)


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
    deq = gdeq.DEQ(cell, gdeq.Broyden(max_iter=20, tol=1e-2), gradient)
    x, v = torch.randn(3, 6, device=device), torch.randn(3, 6, device=device)
    with autocast(device):
        z = deq(x)
        if where == "inside":
            z.backward(v)
    if where == "outside":
        z.backward(v)
    if where == "other":  # a region with other settings than those of the solve
        with torch.autocast(device.type, dtype=torch.float16):
            z.backward(v)
    out, jacobian = linearised_by_hand(cell, x, z, device)
    eye = torch.eye(6, device=device)
    w = torch.linalg.solve((eye - jacobian).transpose(1, 2), v.unsqueeze(2)).squeeze(2)
    (expected,) = torch.autograd.grad(out, cell.inner.weight, w)
    error = (cell.inner.weight.grad - expected).norm() / expected.norm()
    assert error < 0.02
    # The other linearisation is far away, so this test can fail.
    wrong = torch.linalg.solve((eye + 0.5 * jacobian).transpose(1, 2), v.unsqueeze(2)).squeeze(2)
    assert (wrong - w).norm() / w.norm() > 0.2


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_vjps_under_autocast_equal_autograd_through_f(device, where):
    # NPG's formula with products taken by hand through f evaluated under autocast.
    cell = Cell().to(device)
    gradient = gdeq.NPG(steps=3, damping=0.5)
    deq = gdeq.DEQ(cell, gdeq.Broyden(max_iter=10, tol=1e-2), gradient)
    x, v = torch.randn(3, 16, device=device), torch.randn(3, 16, device=device)
    with autocast(device):
        z = deq(x)
        if where == "inside":
            z.backward(v)
    if where == "outside":
        z.backward(v)
    point = z.detach().requires_grad_()
    torch.clear_autocast_cache()
    with autocast(device):
        out = cell(point, x)
    out = out.float()
    term, total = v, v
    for _ in range(2):
        (product,) = torch.autograd.grad(out, point, term, retain_graph=True)
        term = 0.5 * product + 0.5 * term
        total = total + term
    expected = torch.autograd.grad(out, list(cell.parameters()), 0.5 * total)
    for p, e in zip(cell.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=1e-5, atol=1e-6)


def test_autocast_switched_off_inside_the_cell_is_respected(device):
    seen = []

    def cell(z, x):
        with autocast(device, enabled=False):
            out = torch.tanh(0.3 * z @ torch.eye(4, device=device) + x)
        seen.append(out.dtype)
        return out

    with autocast(device):
        z = gdeq.DEQ(cell, gdeq.Broyden(max_iter=40, tol=1e-5))(torch.randn(2, 4, device=device))
    assert set(seen) == {torch.float32}
    assert z.dtype == torch.float32


@pytest.mark.parametrize("solver", [gdeq.Broyden, gdeq.Anderson, gdeq.Picard])
def test_tight_tolerance_under_autocast_ends_at_the_rounding(device, solver):
    # bf16 stops at a residual of a few 1e-3: to go on would only spoil the inverse.
    cell = Cell().to(device)
    x = torch.randn(4, 16, device=device)
    with autocast(device), torch.no_grad():
        found = gdeq.solve(lambda z: cell(z, x), torch.zeros_like(x), solver(200, 1e-9))
    assert (found.residual < 2e-2).all()
    assert (found.converged == (found.residual <= 1e-9)).all()
    assert torch.isfinite(found.z).all()
    assert found.evals < 100


def test_an_encoder_under_autocast_hands_over_half_precision(device):
    # x is bf16 then, and so is the state that is made like it.
    encoder, head = nn.Linear(16, 16).to(device), nn.Linear(16, 2).to(device)
    deq = gdeq.DEQ(Cell().to(device), gdeq.Broyden(max_iter=12, tol=2e-2))
    with autocast(device):
        z = deq(encoder(torch.randn(4, 16, device=device)))
        loss = head(z).float().square().sum()
    assert z.dtype == BF16
    assert deq.solution.trace.dtype == torch.float32
    loss.backward()
    for module in (encoder, deq, head):
        assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_regularisers_under_autocast(device):
    cell = Cell().to(device)
    x = torch.randn(4, 16, device=device)
    z = gdeq.solve(lambda u: cell(u, x), torch.zeros_like(x)).z
    generator = torch.Generator(device)
    found = []
    for enabled in (False, True):
        cell.zero_grad(set_to_none=True)
        with autocast(device, enabled=enabled):
            with torch.no_grad():
                cell(z, x)  # leaves casts without history in autocast's cache
            penalty = gdeq.jacobian_penalty(
                lambda u: cell(u, x), z, generator=generator.manual_seed(1)
            )
            radius = gdeq.spectral_radius(
                lambda u: cell(u, x), z, generator=generator.manual_seed(1)
            )
        penalty.backward()
        found.append((penalty.detach(), radius, cell.inner.weight.grad))
    for full, half in zip(*found, strict=True):
        assert half.dtype == torch.float32
        assert (half - full).norm() / full.norm() < 0.05


# --- half-precision states -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_gradient
def test_half_precision_state(device, dtype, gradient):
    cell = Cell().to(device)
    x = torch.randn(8, 16, device=device)
    deq = gdeq.DEQ(cell, gdeq.Broyden(max_iter=12, tol=1e-2), gradient)
    (deq(x)).square().sum().backward()
    expected, z_full = flat_gradient(deq), deq.solution.z
    deq.zero_grad(set_to_none=True)
    deq.to(dtype)
    cell.seen.clear()
    z = deq(x.to(dtype))
    assert z.dtype == dtype
    assert set(cell.seen) == {(dtype, dtype)}
    assert deq.solution.trace.dtype == torch.float32
    if deq.solution.inverse is not None:
        check_algebra(deq.solution.inverse)
    assert (z.float() - z_full).norm() / z_full.norm() < 0.03
    z.float().square().sum().backward()
    assert cell.inner.weight.grad.dtype == dtype
    assert torch.cosine_similarity(flat_gradient(deq), expected, dim=0) > 0.99


@pytest.mark.parametrize("context", ["plain", "autocast"])
def test_scales_of_different_dtypes(device, context):
    def f(z):
        wide, narrow = z
        assert (wide.dtype, narrow.dtype) == (torch.float32, BF16)
        mean = wide.mean(1, keepdim=True)
        return 0.3 * wide + 0.1 * narrow.float() + 1, (0.2 * narrow + 0.1 * mean).to(BF16)

    z0 = (torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device, dtype=BF16))
    with autocast(device) if context == "autocast" else contextlib.nullcontext():
        found = gdeq.fixed_point(f, z0, gdeq.Broyden(max_iter=30, tol=1e-2))
    assert [t.dtype for t in found.z] == [torch.float32, BF16]
    assert found.converged.all()
    # wide = 1/0.7 + narrow/7 and narrow = wide/8
    wide = (1 / 0.7) / (1 - 1 / 56)
    torch.testing.assert_close(found.z[0], torch.full_like(found.z[0], wide), rtol=0.03, atol=0)
    assert torch.equal(found.z[1], found.z[1].to(BF16))


# --- float16 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["off", "plain"])
def test_a_float16_f_is_solved_as_far_as_its_digits_go(device, form):
    """A guard against noise as coarse as bfloat16's would stop the learning at a hundredth."""
    if device.type != "cpu":
        pytest.skip("float16 by hand, as on the CPU")
    torch.manual_seed(1)
    batch, d = 8, 800
    first = 1.3 * torch.randn(d, d) / d**0.5
    second = 1.6 * torch.randn(d, d) / d**0.5
    b = torch.randn(batch, d)

    def half(x):
        return x.half().float()

    def f(z):
        h = half(torch.tanh(half(z) @ first.T + b))
        return half(torch.relu(h @ second.T + 0.3 * b))

    with kernels.use(form), torch.no_grad():
        found = iterate(
            f, torch.zeros(batch, d), gdeq.Broyden(60, 6e-4), precision=torch.finfo(torch.half).eps
        )
    assert found.converged.sum() >= batch - 1
