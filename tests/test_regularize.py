"""The Jacobian penalty, the residual penalty and the spectral radius."""

import math

import pytest
import torch

import gdeq
from cells import F64, data

SOLVER = gdeq.Broyden(max_iter=60, tol=1e-12)


def dense_jacobians(f, z):
    """∂f/∂z of each sample of a map on (batch, d): (batch, d, d)."""
    point = z.detach().requires_grad_()
    out = f(point)
    return torch.stack(
        [torch.autograd.grad(o.sum(), point, retain_graph=True)[0] for o in out.T], dim=1
    )


def pieces(z):
    """(a, b) with b an image, as one vector; and back."""
    return torch.cat([z[0], z[1].flatten(1)], dim=1)


def split(flat):
    return flat[:, :2], flat[:, 2:].reshape(-1, 1, 2, 2)


def seeded(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


both = pytest.mark.parametrize("function", [gdeq.jacobian_penalty, gdeq.spectral_radius])


# --- Jacobian penalty ----------------------------------------------------------------------------


def test_penalty_is_the_mean_squared_jacobian(device):
    """Of a state of two tensors, every sample with its own Jacobian."""
    w, x, z = 0.4 * data(device, 6, 6), data(device, 200, 6), data(device, 200, 6)

    def f(u):
        return torch.tanh(u @ w + x)

    expected = dense_jacobians(f, z).square().sum(dim=(1, 2)).mean() / 6
    found = gdeq.jacobian_penalty(f, z, 20, seeded(device))
    # The relative spread of one probe is at most √2, of 4000 of them 0.022.
    torch.testing.assert_close(found, expected, rtol=0.07, atol=0)
    apart = gdeq.jacobian_penalty(lambda u: split(f(pieces(u))), split(z), 20, seeded(device))
    torch.testing.assert_close(apart, found, rtol=1e-12, atol=0)
    one = seeded(device)  # that of several probes is the mean of single ones
    single = [gdeq.jacobian_penalty(f, z, 1, one) for _ in range(20)]
    torch.testing.assert_close(found, sum(single) / 20, rtol=1e-12, atol=0)


def test_penalty_gradient_by_finite_differences(device):
    w, b = (0.4 * data(device, 3, 3)).requires_grad_(), data(device, 3).requires_grad_()
    z = data(device, 2, 3).requires_grad_()

    def penalty(w, b):
        return gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w + b), z, 2, seeded(device, 5))

    assert torch.autograd.gradcheck(penalty, (w, b))
    value = penalty(w, b)  # z is taken as given
    assert torch.autograd.grad(value, z, allow_unused=True) == (None,)
    with torch.no_grad():
        plain = penalty(w, b)
    assert not plain.requires_grad
    assert torch.equal(plain, value)


@both
def test_maps_without_a_jacobian(device, function):
    w, z = data(device, 2, 3).requires_grad_(), data(device, 2, 3)
    assert (function(lambda u: torch.tanh(w), z) == 0).all()
    # A zero would be a wrong answer: z does matter, autograd just cannot see it.
    with pytest.raises(ValueError, match="does not depend on z through autograd"):
        function(lambda u: torch.tanh(u).detach(), z)


@both
def test_in_inference_mode_and_after(device, function):
    with torch.inference_mode():
        z = torch.zeros(2, 3, dtype=F64, device=device)
        # There is no autograd inside it, so no Jacobian: right or refused, but not zero.
        try:
            right = bool((function(lambda u: 0.5 * torch.tanh(u), z) > 0).all())
        except (RuntimeError, ValueError) as error:
            right = "inference" in str(error) or "autograd" in str(error)
    assert right
    assert (function(lambda u: 0.5 * torch.tanh(u), z) > 0).all()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_number_of_probes_is_checked(bad):
    z = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="samples must be an integer of at least 1, got"):
        gdeq.jacobian_penalty(torch.tanh, z, samples=bad)
    with pytest.raises(ValueError, match="iterations must be an integer of at least 2, got"):
        gdeq.spectral_radius(torch.tanh, z, iterations=bad)


# --- residual penalty ----------------------------------------------------------------------------


def test_residual_penalty_is_the_mean_squared_relative_residual(device):
    """Of a state of two tensors; its gradient in w against that of the formula."""
    w, x = data(device, 6, 6).requires_grad_(), data(device, 3, 6)
    z = data(device, 3, 6).requires_grad_()
    found = gdeq.residual_penalty(lambda u: split(torch.tanh(pieces(u) @ w + x)), split(z))
    fixed = z.detach()
    fz = torch.tanh(fixed @ w + x)
    expected = ((fz - fixed).norm(dim=1) / fixed.norm(dim=1)).square().mean()
    torch.testing.assert_close(found, expected)
    here, there = (
        torch.autograd.grad(value, w, retain_graph=True)[0] for value in (found, expected)
    )
    torch.testing.assert_close(here, there)
    assert there.norm() > 0.1
    assert torch.autograd.grad(found, z, allow_unused=True) == (None,)  # z is taken as given


def test_residual_penalty_of_what_is_solved_or_zero_or_empty(device):
    x = data(device, 2, 3)
    f = lambda u: 0.5 * torch.tanh(u) + x  # noqa: E731
    solved = gdeq.solve(f, torch.zeros_like(x), SOLVER).z
    assert gdeq.residual_penalty(f, solved).item() < 1e-9
    assert gdeq.residual_penalty(lambda u: 0.5 * u, torch.zeros_like(x)).item() == 0
    assert gdeq.residual_penalty(lambda u: 0.5 * u, x[:0]).item() == 0
    w = data(device, 3, 3).requires_grad_()
    with torch.inference_mode():
        z = torch.ones(2, 3, dtype=F64, device=device)
    gdeq.residual_penalty(lambda u: u @ w, z).backward()
    assert w.grad.norm() > 0


# --- spectral radius -----------------------------------------------------------------------------


def test_radius_against_dense_eigenvalues(device):
    w = 0.3 * data(device, 6, 6)
    w = w + w.T  # real eigenvalues, so power iteration converges at the rate of their ratio
    z = data(device, 4, 6)
    f = lambda u: torch.tanh(u @ w)  # noqa: E731
    expected = torch.linalg.eigvals(dense_jacobians(f, z)).abs().amax(1)
    found = gdeq.spectral_radius(f, z, 400, seeded(device))
    assert len(set(found.tolist())) == 4  # each sample its own
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    with torch.no_grad():  # needs no autograd around it
        apart = gdeq.spectral_radius(lambda u: split(f(pieces(u))), split(z), 400, seeded(device))
    torch.testing.assert_close(apart, found, rtol=1e-10, atol=0)
    assert not apart.requires_grad


def rotation(angle, scale):
    c, s = math.cos(angle), math.sin(angle)
    return scale * torch.tensor([[c, -s], [s, c]], dtype=F64)


@pytest.mark.parametrize("iterations", [2, 3, 20])
@pytest.mark.parametrize("scale", [0.3, 1.7])
def test_radius_of_a_rotation(device, scale, iterations):
    # Both eigenvalues are scale·e^{±iφ}: single steps keep the length, whatever the probe.
    J = rotation(0.7, scale).to(device)
    found = gdeq.spectral_radius(lambda u: u @ J, data(device, 3, 2), iterations)
    torch.testing.assert_close(found, torch.full_like(found, scale), rtol=1e-10, atol=0)


def test_radius_where_a_complex_pair_dominates(device):
    # In a skewed basis the growth of single steps swings for ever; its mean does not.
    block = torch.diag(torch.tensor([0.0, 0.0, 0.5, -0.3], dtype=F64))
    block[:2, :2] = rotation(1.1, 0.9)
    basis = torch.eye(4, dtype=F64) + 0.5 * torch.ones(4, 4).triu(1)
    j = torch.linalg.solve(basis, block @ basis).to(device)
    found = gdeq.spectral_radius(lambda u: u @ j.T, data(device, 3, 4), 400, seeded(device))
    torch.testing.assert_close(found, torch.full_like(found, 0.9), rtol=0.02, atol=0)


def test_radius_of_nilpotent_and_other_samples_in_one_batch(device):
    gain = torch.tensor([[0.0], [0.6], [0.0], [2.0]], dtype=F64, device=device)
    found = gdeq.spectral_radius(lambda u: gain * u, data(device, 4, 3))
    torch.testing.assert_close(found, gain.squeeze(1), rtol=1e-10, atol=0)
    j = torch.diag(torch.ones(3, dtype=F64, device=device), 1)
    assert (gdeq.spectral_radius(lambda u: 5 * u @ j, data(device, 3, 4)) == 0).all()
