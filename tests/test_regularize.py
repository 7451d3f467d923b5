"""The Jacobian penalty, the spectral radius, and what holds still during a solve."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import gdeq
from problems import assert_near

F64 = torch.float64
EXACT = gdeq.Implicit(gdeq.Broyden(max_iter=60, tol=1e-13))
SOLVER = gdeq.Broyden(max_iter=60, tol=1e-12)


def data(device, *shape):
    return torch.randn(*shape, dtype=F64, device=device)


def dense_jacobians(f, z):
    """∂f/∂z of each sample of a map on (batch, d): (batch, d, d)."""
    return torch.stack(
        [
            torch.autograd.functional.jacobian(lambda u: f(u.unsqueeze(0)).squeeze(0), sample)
            for sample in z
        ]
    )


def pieces(z):
    """(a, b) with b an image, as one vector; and back."""
    return torch.cat([z[0], z[1].flatten(1)], dim=1)


def split(flat):
    return flat[:, :2], flat[:, 2:].reshape(-1, 1, 2, 2)


# --- Jacobian penalty ----------------------------------------------------------------------------


def test_penalty_is_the_mean_squared_jacobian(device):
    w, x = 0.4 * data(device, 5, 5), data(device, 2, 5)
    z = data(device, 2, 5)

    def f(u):  # every sample has its own Jacobian
        return torch.tanh(u @ w + x[: len(u)])

    jacobians = dense_jacobians(lambda u: torch.tanh(u @ w + x[:1]), z[:1])
    jacobians = torch.cat([jacobians, dense_jacobians(lambda u: torch.tanh(u @ w + x[1:]), z[1:])])
    expected = jacobians.square().sum(dim=(1, 2)).mean() / 5
    generator = torch.Generator(device).manual_seed(0)
    found = gdeq.jacobian_penalty(f, z, samples=4000, generator=generator)
    # The relative spread of one probe is at most √2, of 4000 of them 0.022.
    torch.testing.assert_close(found, expected, rtol=0.07, atol=0)


def test_penalty_by_differences_is_the_mean_squared_jacobian(device):
    """Against dense Jacobians, for each sample its own; f of two tensors."""
    w, x = 0.4 * data(device, 6, 6), data(device, 2, 6)
    z = data(device, 2, 6)

    def f(u):
        return split(torch.tanh(pieces(u) @ w + x))

    jacobians = torch.cat(
        [
            dense_jacobians(lambda u, i=i: torch.tanh(u @ w + x[i : i + 1]), z[i : i + 1])
            for i in range(2)
        ]
    )
    expected = jacobians.square().sum(dim=(1, 2)).mean() / 6
    generator = torch.Generator(device).manual_seed(0)
    found = gdeq.jacobian_penalty(f, split(z), 4000, generator, step=1e-4)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_penalty_by_differences_has_the_gradient_of_the_exact_one(device):
    """‖Jε‖²/‖ε‖² by a forward derivative along the same ε, and its gradient."""
    w = (0.4 * data(device, 5, 5)).requires_grad_()
    z = data(device, 3, 5)
    generator = torch.Generator(device).manual_seed(3)
    found = gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w), z, 1, generator, step=1e-3)
    noise = torch.empty_like(z).normal_(generator=generator.manual_seed(3))
    slope = 1 - torch.tanh(z @ w).square()
    along = slope * (noise @ w)
    exact = (along.square().sum(1) / noise.square().sum(1)).mean()
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)
    (mine,), (wanted,) = (torch.autograd.grad(value, w) for value in (found, exact))
    assert_near(mine, wanted, 1e-4)


def test_penalty_by_differences_at_zero_and_with_a_step_that_is_rounded_away(device):
    zero = gdeq.jacobian_penalty(lambda u: 0.5 * u, torch.zeros(2, 3, device=device), step=0.1)
    torch.testing.assert_close(zero.item(), 0.25, rtol=1e-3, atol=0)
    # Measured by the step as it was rounded.
    coarse = torch.full((2, 300), 3.0, device=device, dtype=torch.bfloat16)
    found = gdeq.jacobian_penalty(lambda u: 0.5 * u, coarse, step=0.003)
    torch.testing.assert_close(found.item(), 0.25, rtol=1e-3, atol=0)
    half = torch.ones(2, 3, device=device, dtype=torch.bfloat16)
    assert gdeq.jacobian_penalty(lambda u: 0.5 * u, half, step=1e-9).item() == 0


@pytest.mark.parametrize("step", [0, -1.0, True, "small", float("nan")])
def test_penalty_refuses_a_step_that_is_none(step):
    with pytest.raises(ValueError, match="step must be a positive number or None"):
        gdeq.jacobian_penalty(lambda u: u, torch.ones(1, 2), step=step)


def test_penalty_of_several_samples_is_the_mean_of_single_ones(device):
    w, z = 0.4 * data(device, 3, 3), data(device, 4, 3)
    generator = torch.Generator(device).manual_seed(7)
    together = gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w), z, 3, generator)
    generator.manual_seed(7)
    single = [gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w), z, 1, generator) for _ in range(3)]
    torch.testing.assert_close(together, sum(single) / 3, rtol=1e-12, atol=0)


def test_penalty_of_a_multiple_of_the_identity_needs_no_luck(device):
    # ‖(cI)ᵀε‖² / d = c² ‖ε‖² / d: the same for the two scales together.
    z = (data(device, 3, 2), data(device, 3, 1, 2, 2))
    generator = torch.Generator(device).manual_seed(0)
    found = gdeq.jacobian_penalty(
        lambda u: (0.5 * u[0], 0.5 * u[1]), z, samples=2000, generator=generator
    )
    torch.testing.assert_close(
        found, torch.tensor(0.25, dtype=F64, device=device), rtol=0.05, atol=0
    )


def test_penalty_of_two_scales_is_that_of_the_joined_state(device):
    w = 0.3 * data(device, 6, 6)
    z = data(device, 2, 6)
    generator = torch.Generator(device)
    joined = gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w), z, 2, generator.manual_seed(1))
    apart = gdeq.jacobian_penalty(
        lambda u: split(torch.tanh(pieces(u) @ w)), split(z), 2, generator.manual_seed(1)
    )
    torch.testing.assert_close(apart, joined, rtol=1e-12, atol=0)


def test_penalty_gradient_by_finite_differences(device):
    w = (0.4 * data(device, 3, 3)).requires_grad_()
    b = data(device, 3).requires_grad_()
    z = data(device, 2, 3)
    generator = torch.Generator(device)

    def penalty(w, b):
        return gdeq.jacobian_penalty(
            lambda u: torch.tanh(u @ w + b), z, 2, generator.manual_seed(5)
        )

    assert torch.autograd.gradcheck(penalty, (w, b))


def test_penalty_takes_z_as_given(device):
    x, z = data(device, 2, 3).requires_grad_(), data(device, 2, 3).requires_grad_()
    penalty = gdeq.jacobian_penalty(lambda u: torch.tanh(0.5 * u + x), z)
    assert torch.autograd.grad(penalty, z, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(penalty, x)[0].abs().sum() > 0


def test_penalty_without_autograd_is_a_plain_number(device):
    w = (0.4 * data(device, 3, 3)).requires_grad_()
    z = data(device, 2, 3)
    with torch.no_grad():
        found = gdeq.jacobian_penalty(lambda u: torch.tanh(u @ w), z)
    assert not found.requires_grad
    assert found > 0


def test_penalty_in_training_lowers_the_spectral_radius(device):
    w = nn.Parameter(0.5 * data(device, 8, 8))
    x = data(device, 4, 8)

    def f(z):
        return torch.tanh(z @ w + x)

    def radius():
        z = gdeq.solve(f, torch.zeros_like(x), SOLVER).z
        return gdeq.spectral_radius(f, z, generator=torch.Generator(device).manual_seed(0)).mean()

    before = radius()
    optimiser = torch.optim.SGD([w], lr=1.0)
    for _ in range(20):
        z = gdeq.fixed_point(f, torch.zeros_like(x), SOLVER).z
        optimiser.zero_grad()
        gdeq.jacobian_penalty(f, z).backward()
        optimiser.step()
    assert radius() < 0.8 * before


@pytest.mark.parametrize("function", [gdeq.jacobian_penalty, gdeq.spectral_radius])
def test_map_that_ignores_z_has_a_zero_jacobian(device, function):
    w, z = data(device, 2, 3).requires_grad_(), data(device, 2, 3)
    assert (function(lambda u: torch.tanh(w), z) == 0).all()


@pytest.mark.parametrize("function", [gdeq.jacobian_penalty, gdeq.spectral_radius])
def test_map_cut_off_from_autograd_is_a_clear_error(device, function):
    # A zero would be a wrong answer: z does matter, autograd just cannot see it.
    with pytest.raises(ValueError, match="does not depend on z through autograd"):
        function(lambda u: torch.tanh(u).detach(), data(device, 2, 3))


@pytest.mark.parametrize("function", [gdeq.jacobian_penalty, gdeq.spectral_radius])
def test_a_state_from_inference_mode_can_be_measured(device, function):
    with torch.inference_mode():
        z = torch.zeros(2, 3, dtype=F64, device=device)
    found = function(lambda u: 0.5 * torch.tanh(u), z)
    assert (found > 0).all()


@pytest.mark.parametrize("function", [gdeq.jacobian_penalty, gdeq.spectral_radius])
def test_inference_mode_gives_no_silent_zero(device, function):
    # There is no autograd inside it, so no Jacobian: right or refused, but not zero.
    z = torch.zeros(2, 3, dtype=F64, device=device)
    with torch.inference_mode():
        try:
            right = bool((function(lambda u: 0.5 * torch.tanh(u), z) > 0).all())
        except (RuntimeError, ValueError) as error:
            right = "inference" in str(error) or "autograd" in str(error)
    assert right


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_number_of_probes_is_checked(device, bad):
    with pytest.raises(ValueError, match="samples must be an integer"):
        gdeq.jacobian_penalty(torch.tanh, data(device, 2, 3), samples=bad)
    with pytest.raises(ValueError, match="iterations must be an integer"):
        gdeq.spectral_radius(torch.tanh, data(device, 2, 3), iterations=bad)


# --- residual penalty ----------------------------------------------------------------------------


def test_residual_penalty_is_the_mean_squared_relative_residual(device):
    """Of a state of two tensors; its gradient in w against that of the formula."""
    w, x, z = data(device, 6, 6), data(device, 3, 6), data(device, 3, 6)
    w.requires_grad_()
    found = gdeq.residual_penalty(lambda u: split(torch.tanh(pieces(u) @ w + x)), split(z))
    fz = torch.tanh(z @ w + x)
    expected = ((fz - z).norm(dim=1) / z.norm(dim=1)).square().mean()
    torch.testing.assert_close(found, expected)
    here, there = (torch.autograd.grad(value, w)[0] for value in (found, expected))
    torch.testing.assert_close(here, there)
    assert there.norm() > 0.1


def test_residual_penalty_of_a_state_from_inference_mode(device):
    w = data(device, 3, 3).requires_grad_()
    with torch.inference_mode():
        z = torch.ones(2, 3, dtype=F64, device=device)
    gdeq.residual_penalty(lambda u: u @ w, z).backward()
    assert w.grad.norm() > 0


def test_residual_penalty_takes_z_as_given(device):
    w, z = data(device, 3, 3).requires_grad_(), data(device, 2, 3).requires_grad_()
    gdeq.residual_penalty(lambda u: u @ w, z).backward()
    assert w.grad is not None
    assert z.grad is None


def test_residual_penalty_of_what_is_solved_or_zero_or_empty(device):
    x = data(device, 2, 3)
    solved = gdeq.solve(lambda u: 0.5 * torch.tanh(u) + x, torch.zeros_like(x), SOLVER).z
    assert gdeq.residual_penalty(lambda u: 0.5 * torch.tanh(u) + x, solved).item() < 1e-9
    assert gdeq.residual_penalty(lambda u: 0.5 * u, torch.zeros_like(x)).item() == 0
    assert gdeq.residual_penalty(lambda u: 0.5 * u, x[:0]).item() == 0


# --- spectral radius -----------------------------------------------------------------------------


def test_radius_against_dense_eigenvalues(device):
    w = 0.3 * data(device, 6, 6)
    w = w + w.T  # real eigenvalues, so power iteration converges at the rate of their ratio
    z = data(device, 4, 6)
    expected = torch.linalg.eigvals(dense_jacobians(lambda u: torch.tanh(u @ w), z)).abs().amax(1)
    generator = torch.Generator(device).manual_seed(0)
    found = gdeq.spectral_radius(lambda u: torch.tanh(u @ w), z, 400, generator)
    assert found.shape == (4,)
    assert len(set(found.tolist())) == 4  # each sample its own
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("scale", [0.3, 1.7])
def test_radius_of_a_rotation(device, scale):
    # Both eigenvalues are scale·e^{±iφ}: single steps keep the length, whatever the probe.
    c, s = math.cos(0.7), math.sin(0.7)
    rotation = scale * torch.tensor([[c, -s], [s, c]], dtype=F64, device=device)
    found = gdeq.spectral_radius(lambda u: u @ rotation, data(device, 3, 2), 20)
    torch.testing.assert_close(found, torch.full_like(found, scale), rtol=1e-10, atol=0)


def test_radius_where_a_complex_pair_dominates(device):
    # In a skewed basis the growth of single steps swings for ever; its mean does not.
    c, s = math.cos(1.1), math.sin(1.1)
    block = torch.zeros(4, 4, dtype=F64, device=device)
    block[:2, :2] = 0.9 * torch.tensor([[c, -s], [s, c]], dtype=F64)
    block[2, 2], block[3, 3] = 0.5, -0.3
    basis = torch.eye(4, dtype=F64, device=device) + 0.5 * torch.ones(4, 4, device=device).triu(1)
    j = torch.linalg.solve(basis, block @ basis)
    expected = torch.linalg.eigvals(j).abs().max().item()
    assert expected == pytest.approx(0.9)
    found = gdeq.spectral_radius(
        lambda u: u @ j.T, data(device, 3, 4), 400, torch.Generator(device).manual_seed(0)
    )
    torch.testing.assert_close(found, torch.full_like(found, 0.9), rtol=0.02, atol=0)


def test_radius_of_a_nilpotent_map_is_zero(device):
    j = torch.diag(torch.ones(3, dtype=F64, device=device), 1)
    found = gdeq.spectral_radius(lambda u: 5 * u @ j, data(device, 3, 4))
    assert (found == 0).all()


def test_radius_of_nilpotent_and_other_samples_in_one_batch(device):
    gain = torch.tensor([[0.0], [0.6], [0.0], [2.0]], dtype=F64, device=device)
    found = gdeq.spectral_radius(lambda u: gain * u, data(device, 4, 3))
    torch.testing.assert_close(found, gain.squeeze(1), rtol=1e-10, atol=0)


def test_radius_of_two_scales_is_that_of_the_joined_state(device):
    w = 0.3 * data(device, 6, 6)
    z = data(device, 2, 6)
    generator = torch.Generator(device)
    joined = gdeq.spectral_radius(lambda u: torch.tanh(u @ w), z, 50, generator.manual_seed(1))
    apart = gdeq.spectral_radius(
        lambda u: split(torch.tanh(pieces(u) @ w)), split(z), 50, generator.manual_seed(1)
    )
    torch.testing.assert_close(apart, joined, rtol=1e-10, atol=0)


def test_radius_needs_no_autograd_around_it(device):
    w, z = 0.3 * data(device, 3, 3), data(device, 2, 3)
    generator = torch.Generator(device)
    expected = gdeq.spectral_radius(lambda u: u @ w, z, generator=generator.manual_seed(0))
    with torch.no_grad():
        found = gdeq.spectral_radius(lambda u: u @ w, z, generator=generator.manual_seed(0))
    assert torch.equal(found, expected)
    assert not found.requires_grad


# --- dropout -------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Records the mask of every evaluation."""

    def __init__(self, p=0.5, channelwise=False):
        super().__init__()
        self.drop = gdeq.VariationalDropout(p, channelwise)
        self.gain = nn.Parameter(torch.tensor(0.4, dtype=F64))
        self.masks = []

    def forward(self, z, x):
        self.masks.append(self.drop(torch.ones_like(z)).detach())
        return self.gain * self.drop(torch.tanh(z + x)) + x


def test_one_mask_per_solve_and_a_new_one_in_the_next(device):
    deq = gdeq.DEQ(Dropped().to(device), SOLVER)
    x = data(device, 3, 8)
    solves = []
    for _ in range(2):
        deq.cell.masks.clear()
        deq(x)
        assert deq.solution.converged.all()
        assert len(deq.cell.masks) > 3
        assert all(torch.equal(mask, deq.cell.masks[0]) for mask in deq.cell.masks)
        assert set(deq.cell.masks[0].flatten().tolist()) == {0.0, 2.0}
        solves.append(deq.cell.masks[0])
    assert not torch.equal(*solves)
    assert not torch.equal(solves[0][0], solves[0][1])  # samples have their own


@pytest.mark.parametrize("gradient", [EXACT, gdeq.GDEQ(refine=2), gdeq.JFB(), gdeq.Unrolled(3)])
def test_dropout_gradients_are_those_of_the_explicit_mask(device, gradient):
    deq = gdeq.DEQ(Dropped().to(device), SOLVER, gradient)
    x = data(device, 3, 8).requires_grad_()
    z = deq(x)
    found = torch.autograd.grad(z.square().sum(), [x, deq.cell.gain])
    mask = deq.cell.masks[0]
    gain = deq.cell.gain.detach().requires_grad_()
    explicit = gdeq.DEQ(lambda z, x: gain * (mask * torch.tanh(z + x)) + x, SOLVER, gradient)
    expected = torch.autograd.grad(explicit(x).square().sum(), [x, gain])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_is_the_identity_in_eval_and_at_zero(device, p):
    drop = gdeq.VariationalDropout(p)
    x = data(device, 3, 8)
    drop.train(p == 0)
    assert torch.equal(drop(x), x)


def test_dropout_outside_a_solve_draws_every_time(device):
    drop = gdeq.VariationalDropout(0.5)
    x = torch.ones(4, 16, device=device)
    assert not torch.equal(drop(x), drop(x))


def test_dropout_keeps_the_expectation(device):
    drop = gdeq.VariationalDropout(0.3)
    x = torch.ones(1, 40000, dtype=F64, device=device)
    out = drop(x)
    dropped = (out == 0).double().mean().item()
    assert dropped == pytest.approx(0.3, abs=0.02)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7), rtol=1e-6, atol=0)


def test_channelwise_dropout(device):
    drop = gdeq.VariationalDropout(0.5, channelwise=True)
    out = drop(torch.ones(6, 20, 3, 2, device=device))
    flat = out.flatten(2)
    assert (flat == flat[:, :, :1]).all()  # a channel is dropped as a whole
    channels = flat[:, :, 0]
    assert set(channels.flatten().tolist()) == {0.0, 2.0}
    assert not torch.equal(channels[0], channels[1])
    with pytest.raises(ValueError, match=r"\(batch, channels, ...\)"):
        drop(torch.ones(5, device=device))


def test_channelwise_dropout_in_a_solve(device):
    deq = gdeq.DEQ(Dropped(channelwise=True).to(device), SOLVER)
    deq(data(device, 2, 6, 3, 3))
    assert deq.solution.converged.all()
    first = deq.cell.masks[0]
    assert all(torch.equal(mask, first) for mask in deq.cell.masks)
    assert (first.flatten(2) == first[:, :, :1, 0]).all()


def test_dropout_with_two_shapes_in_one_solve_is_a_clear_error(device):
    drop = gdeq.VariationalDropout(0.5)
    with gdeq.hold(drop):
        drop(torch.ones(2, 3, device=device))
        with pytest.raises(RuntimeError, match="one module for each place"):
            drop(torch.ones(2, 4, device=device))
    assert drop(torch.ones(2, 4, device=device)).shape == (2, 4)


@pytest.mark.parametrize("p", [-0.1, 1.0, 2, "0.5", True, None])
def test_dropout_probability_is_checked(p):
    with pytest.raises((ValueError, TypeError), match=r"VariationalDropout.p must be"):
        gdeq.VariationalDropout(p)


def test_dropout_gradient_without_a_record_of_the_mask_in_double_backward(device):
    # Implicit evaluates f twice with autograd; both must see the same mask.
    deq = gdeq.DEQ(Dropped().to(device), SOLVER, EXACT)
    x = data(device, 1, 4).requires_grad_()

    def slope(x):
        torch.manual_seed(11)
        return torch.autograd.grad(deq(x).square().sum(), x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(slope, (x,))


# --- hold ----------------------------------------------------------------------------------------


def test_hold_by_hand_around_fixed_point(device):
    cell = Dropped().to(device)
    x = data(device, 3, 8)
    with gdeq.hold(cell):
        found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER)
    assert found.converged.all()
    assert all(torch.equal(mask, cell.masks[0]) for mask in cell.masks)


def test_nested_holds_keep_the_outer_value(device):
    drop = gdeq.VariationalDropout(0.5)
    x = torch.ones(4, 16, device=device)
    with gdeq.hold(drop):
        outer = drop(x)
        with gdeq.hold(drop):
            assert torch.equal(drop(x), outer)
        assert torch.equal(drop(x), outer)  # the end of the inner one does not renew it
    assert not torch.equal(drop(x), outer)


def test_hold_opened_inside_another_without_a_value_yet(device):
    drop = gdeq.VariationalDropout(0.5)
    x = torch.ones(4, 16, device=device)
    with gdeq.hold(drop):
        with gdeq.hold(drop):
            inner = drop(x)
        assert torch.equal(drop(x), inner)


def test_dropout_in_nested_layers_holds_for_the_outer_solve(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gdeq.DEQ(Dropped(), SOLVER)

        def forward(self, z, x):
            return 0.3 * torch.tanh(self.inner(z)) + x

    deq = gdeq.DEQ(Outer().to(device), SOLVER, EXACT)
    deq(data(device, 2, 6)).sum().backward()
    assert deq.solution.converged.all()
    masks = deq.cell.inner.cell.masks
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert deq.cell.inner.cell.gain.grad.abs() > 0


@pytest.mark.parametrize("where", ["first call", "later call"])
def test_hold_ends_when_f_raises(device, where):
    class Failing(Dropped):
        def forward(self, z, x):
            out = super().forward(z, x)
            if where == "first call" or len(self.masks) > 2:
                raise ArithmeticError("from the cell")
            return out

    cell = Failing().to(device)
    deq = gdeq.DEQ(cell, SOLVER)
    x = data(device, 3, 8)
    with pytest.raises(ArithmeticError, match="from the cell"):
        deq(x)
    ones = torch.ones(3, 8, device=device)
    assert not torch.equal(cell.drop(ones), cell.drop(ones))  # nothing is held any more


def test_hold_ends_by_exception_of_the_user():
    drop = gdeq.VariationalDropout(0.5)
    with pytest.raises(KeyError), gdeq.hold(drop), gdeq.hold(drop):
        raise KeyError
    x = torch.ones(4, 16)
    assert not torch.equal(drop(x), drop(x))


def test_copies_made_during_a_hold_are_free(device):
    drop = gdeq.VariationalDropout(0.5)
    x = torch.ones(4, 16, device=device)
    with gdeq.hold(drop):
        held = drop(x)
        same = copy.deepcopy(drop)
        assert not torch.equal(same(x), same(x))
        assert torch.equal(drop(x), held)


def test_hold_of_a_function_does_nothing():
    with gdeq.hold(lambda z: z):
        pass


# --- weight normalisation ------------------------------------------------------------------------


def pair(make, **kwargs):
    """The same layer, normalised by us and by PyTorch."""
    ours = make()
    theirs = copy.deepcopy(ours)
    return gdeq.weight_norm(ours, **kwargs), parametrizations.weight_norm(theirs, **kwargs)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3, dtype=F64), (2, 4), {}),
    "linear-dim-1": (lambda: nn.Linear(4, 3, dtype=F64), (2, 4), {"dim": 1}),
    "conv": (lambda: nn.Conv2d(2, 3, 3, dtype=F64), (2, 2, 5, 5), {}),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, dtype=F64), (2, 2, 5, 5), {"dim": 1}),
}


def like_pytorch(device) -> dict[str, float]:
    """PyTorch's own fused kernel on CUDA sums norms in float32, even of float64 weights."""
    if device.type == "cuda":
        return {"rtol": 1e-6, "atol": 1e-7}
    return {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize(("make", "shape", "kwargs"), LAYERS.values(), ids=LAYERS)
def test_weight_norm_equals_pytorchs(device, make, shape, kwargs):
    ours, theirs = pair(lambda: make().to(device), **kwargs)
    x = data(device, *shape)
    torch.testing.assert_close(ours(x), theirs(x), **like_pytorch(device))
    with torch.no_grad():  # away from the start, where weight = v
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            step = torch.randn_like(p)
            p.add_(step)
            q.add_(step)
    torch.testing.assert_close(ours(x), theirs(x), **like_pytorch(device))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for (name, p), (other, q) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(p.grad, q.grad, **like_pytorch(device))


def test_weight_norm_leaves_the_function_as_it_was(device):
    layer = nn.Linear(4, 3, dtype=F64, device=device)
    x = data(device, 2, 4)
    expected = layer(x)
    assert gdeq.weight_norm(layer) is layer
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-13)


class Normalised(nn.Module):
    def __init__(self, normalise=gdeq.weight_norm):
        super().__init__()
        self.inner = normalise(nn.Linear(4, 4, dtype=F64))
        with torch.no_grad():
            self.inner.parametrizations.weight.original0.mul_(0.5)
        self.weights = []

    def forward(self, z, x):
        weight = self.inner.weight
        self.weights.append(weight)
        return torch.tanh(self.inner(z) + x)


def test_weight_is_computed_once_per_solve(device):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER, EXACT)
    weights = deq.cell.weights
    firsts = []
    for _ in range(2):
        weights.clear()
        deq(data(device, 3, 4)).sum().backward()
        assert len(weights) > 4
        assert all(weight is weights[0] for weight in weights)
        firsts.append(weights[0])
    assert firsts[0] is not firsts[1]
    outside = [deq.cell.inner.weight for _ in range(2)]
    assert outside[0] is not outside[1]


GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "Implicit": EXACT,
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(3),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_weight_norm_gradients_equal_pytorchs(device, gradient):
    ours = gdeq.DEQ(Normalised().to(device), SOLVER, gradient)
    theirs = gdeq.DEQ(Normalised(parametrizations.weight_norm).to(device), SOLVER, gradient)
    theirs.load_state_dict(ours.state_dict())
    x = data(device, 3, 4)
    for deq in (ours, theirs):
        deq(x).square().sum().backward()
    # The first evaluation in the solve ran without autograd, and yet there are gradients.
    assert not ours.cell.weights[0].is_leaf
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad.abs().sum() > 0
        near = (
            {"rtol": 1e-3, "atol": 1e-5} if device.type == "cuda" else {"rtol": 1e-9, "atol": 1e-11}
        )
        torch.testing.assert_close(p.grad, q.grad, **near)


def test_weight_norm_follows_the_optimiser(device):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER)
    x = data(device, 3, 4)
    optimiser = torch.optim.SGD(deq.parameters(), lr=0.1)
    before = deq(x)
    before.sum().backward()
    optimiser.step()
    after = deq(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, deq.cell(after, x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weight_norm_without_autograd(device, mode):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER)
    x = data(device, 3, 4)
    expected = deq(x)
    with mode():
        z = deq(x)
        assert not deq.cell(z, x).requires_grad
    assert not z.requires_grad
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    deq(x).sum().backward()
    assert deq.cell.inner.parametrizations.weight.original0.grad.abs().sum() > 0


def test_weight_norm_second_derivatives(device):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER, EXACT)
    x = data(device, 1, 4).requires_grad_()
    (slope,) = torch.autograd.grad(deq(x).square().sum(), x, create_graph=True)
    penalty = slope.square().sum()
    g = deq.cell.inner.parametrizations.weight.original0
    (found,) = torch.autograd.grad(penalty, g)
    for i in range(4):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                g[i] += sign * 1e-5
            (slope,) = torch.autograd.grad(deq(x).square().sum(), x)
            values.append(slope.square().sum())
            with torch.no_grad():
                g[i] -= sign * 1e-5
        expected = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(found[i, 0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("when", ["new", "forward", "backward"])
def test_weight_norm_survives_deepcopy(device, when):
    deq = gdeq.DEQ(Normalised().to(device), SOLVER)
    x = data(device, 3, 4)
    if when != "new":
        z = deq(x)
    if when == "backward":
        z.sum().backward()
    deq.cell.weights.clear()  # recorded by the test, and not leaves
    same = copy.deepcopy(deq)
    assert torch.equal(same(x), deq(x))
    with torch.no_grad():
        same.cell.inner.parametrizations.weight.original0 *= 0.1
    assert not torch.allclose(same(x), deq(x))
    same(x).sum().backward()
    assert same.cell.inner.parametrizations.weight.original1.grad.abs().sum() > 0


@pytest.mark.parametrize("to", ["ours", "theirs"])
def test_state_dicts_are_exchanged_with_pytorchs(device, to):
    ours = Normalised().to(device)
    theirs = Normalised(parametrizations.weight_norm).to(device)
    source, target = (theirs, ours) if to == "ours" else (ours, theirs)
    z, x = data(device, 2, 4), data(device, 2, 4)
    assert not torch.allclose(source(z, x), target(z, x))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True, map_location=device))
    torch.testing.assert_close(target(z, x), source(z, x), **like_pytorch(device))


def test_weight_norm_can_be_removed(device):
    cell = Normalised().to(device)
    deq = gdeq.DEQ(cell, SOLVER)
    x = data(device, 3, 4)
    expected = deq(x)
    remove_parametrizations(cell.inner, "weight")
    assert set(dict(cell.named_parameters())) == {"inner.weight", "inner.bias"}
    torch.testing.assert_close(deq(x), expected, rtol=1e-10, atol=1e-11)
    deq(x).sum().backward()
    assert cell.inner.weight.grad.abs().sum() > 0


def test_weight_norm_of_another_name(device):
    layer = nn.RNNCell(3, 4, dtype=F64, device=device)
    gdeq.weight_norm(layer, name="weight_hh")
    assert "parametrizations.weight_hh.original0" in dict(layer.named_parameters())


@pytest.mark.parametrize("name", ["wieght", "in_features"])
def test_weight_norm_of_what_is_not_there_is_a_clear_error(name):
    with pytest.raises(ValueError, match=f"Linear has no tensor '{name}'"):
        gdeq.weight_norm(nn.Linear(2, 2), name=name)


def test_weight_norm_of_a_cell_names_its_layers():
    cell = nn.Module()
    cell.inner = nn.Linear(2, 2)
    cell.blocks = nn.Sequential(nn.Tanh(), nn.Conv1d(2, 2, 1))
    with pytest.raises(ValueError, match="Module has no tensor 'weight'") as error:
        gdeq.weight_norm(cell)
    assert str(error.value).endswith("pass a layer that has one: module.inner, module.blocks[1]")
    with pytest.raises(ValueError, match=r"to normalise$"):
        gdeq.weight_norm(nn.Tanh())
