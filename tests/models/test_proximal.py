"""Inverse imaging: operators by their adjoints, equilibria by the equations that they solve."""

import doctest

import pytest
import torch
from torch.nn.functional import conv2d, pad, softshrink

import gdeq
from gdeq.models import proximal
from gdeq.models.proximal import (
    ADMM,
    Blur,
    Frequencies,
    Operator,
    ProximalGradient,
    Restorer,
    psnr,
    spread_of,
)

SIZES = [(12, 12), (9, 14), (11, 7)]


def operators(size):
    torch.manual_seed(0)
    kernel = torch.rand(5, 5, dtype=torch.float64)
    kernel[2, 2] = 12.0  # no frequency is lost
    mask = (torch.rand(3, 1, *size, dtype=torch.float64) < 0.5).double()
    return {
        "identity": (Operator(), 1),
        "blur": (Blur(spread_of(kernel / kernel.sum(), size)), 1),
        "frequencies": (Frequencies(mask), 2),
    }


@pytest.fixture(params=["identity", "blur", "frequencies"])
def name(request):
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_adjoint(name, size):
    A, channels = operators(size)[name]
    x = torch.randn(3, 1, *size, dtype=torch.float64)
    y = torch.randn(3, channels, *size, dtype=torch.float64)
    torch.testing.assert_close((A(x) * y).sum(), (x * A.adjoint(y)).sum())


@pytest.mark.parametrize("size", SIZES)
def test_nearest_solves_its_normal_equations(name, size):
    A, channels = operators(size)[name]
    v = torch.randn(3, 1, *size, dtype=torch.float64)
    y = torch.randn(3, channels, *size, dtype=torch.float64)
    x = A.nearest(y, v, 0.7)
    torch.testing.assert_close(A.adjoint(A(x) - y) + (x - v) / 0.7, torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(5, 5), (1, 7)])
def test_a_blur_is_a_convolution_with_images_that_go_on(shape):
    kernel, x = torch.rand(shape), torch.randn(2, 1, 9, 12)
    down, right = (edge // 2 for edge in shape)
    around = pad(x, (right, right, down, down), mode="circular")
    wanted = conv2d(around, kernel.flip(0, 1)[None, None])
    torch.testing.assert_close(Blur(spread_of(kernel, (9, 12)))(x), wanted)


def test_a_kernel_must_fit():
    with pytest.raises(ValueError, match="a kernel of 27 × 27 pixels does not fit"):
        spread_of(torch.ones(27, 27), (16, 32))


def shrink(v):
    return softshrink(v, 0.1)


def test_both_methods_solve_the_lasso(name):
    """min ½‖Ax − y‖² + ‖x‖₁ / 5, with η = 0.5: 0 is in Aᵀ(Ax − y) + ∂‖x‖₁ / 5."""
    A, channels = operators((8, 9))[name]
    y = torch.randn(3, channels, 8, 9, dtype=torch.float64)
    solver = gdeq.Anderson(max_iter=500, tol=1e-10)
    with torch.no_grad():
        x = gdeq.DEQ(ProximalGradient(shrink, 0.5).double(), solver)(y, A)
        z, u = gdeq.DEQ(ADMM(shrink, 0.5).double(), solver)(y, A)
    slope = A.adjoint(A(x) - y)
    zero = x.abs() < 1e-8
    assert 0 < zero.sum() < zero.numel()
    torch.testing.assert_close(slope[~zero], -0.2 * x[~zero].sign(), atol=1e-7, rtol=0)
    assert (slope[zero].abs() < 0.2 + 1e-7).all()
    torch.testing.assert_close(A(z), A(x), atol=1e-7, rtol=0)
    torch.testing.assert_close(u, -0.5 * A.adjoint(A(z) - y), atol=1e-7, rtol=0)


def test_noise_alone_has_an_answer_in_one_line():
    y = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    deq = gdeq.DEQ(ADMM(shrink, 0.5).double(), gdeq.Picard(500, 1e-12))
    torch.testing.assert_close(deq(y, Operator())[0].detach(), softshrink(y, 0.2))


@pytest.fixture(params=["denoise", "deblur", "frequencies"])
def kind(request):
    return request.param


class Contracting(torch.nn.Module):
    """So that any measurement has one equilibrium."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, v, *given):
        return 0.8 * self.network(v, *given)


def restorer(kind, method="pgd", **options):
    """A small one, whose network does something."""
    torch.manual_seed(0)
    made = Restorer(kind, method, width=4, scales=2, blocks=1, **options).double()
    for parameter in made.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    made.deq.cell.prox = Contracting(made.deq.cell.prox)
    return made


def measurement(kind, size):
    torch.manual_seed(1)
    image = torch.rand(2, 1, *size, dtype=torch.float64)
    level = torch.full_like(image, 0.1)
    if kind == "denoise":
        return torch.cat([image, level], 1)
    if kind == "deblur":
        spread = spread_of(torch.full((3, 3), 1 / 9, dtype=torch.float64), size)
        return torch.cat([Blur(spread)(image), level, spread.expand_as(image)], 1)
    mask = (torch.rand_like(image) < 0.6).double()
    return torch.cat([Frequencies(mask)(image), level, mask], 1)


@pytest.mark.parametrize("size", [(16, 16), (13, 22)])
def test_a_network_as_prox_has_one_equilibrium_by_both_methods(kind, size):
    solver = gdeq.Anderson(max_iter=300, tol=1e-10, stop="relative")
    x = measurement(kind, size)
    with torch.no_grad():
        model = restorer(kind, solver=solver)
        image = model(x)
        assert image.shape == (2, 1, *size)
        y, A, level, back = model.inputs(x)
        step = model.deq.cell.log_step.exp()
        right = model.deq.cell.prox(image - step * A.adjoint(A(image) - y), level, back)
        torch.testing.assert_close(image, right, atol=1e-8, rtol=0)
        other = restorer(kind, "admm", solver=solver)
        torch.testing.assert_close(other(x), image, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["pgd", "admm"])
def test_gradients_reach_the_network_and_the_step(kind, method):
    model = restorer(kind, method, gradient=gdeq.Implicit())
    model(measurement(kind, (16, 16))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="kind must be one of denoise, deblur, frequencies"):
        Restorer("sharpen")
    with pytest.raises(ValueError, match="a measurement to deblur has 3 channels, got 2"):
        Restorer("deblur", width=4)(torch.zeros(1, 2, 8, 8))


def test_psnr():
    truth = torch.full((2, 1, 8, 8), 100 / 255)
    image = truth.clone()
    image[0] += 10 / 255
    image[1, 0, 0, 0] += 200  # shows as white: 155 grey levels off, in one pixel of 64
    wanted = [10 * torch.tensor(255**2 / e).log10() for e in (100.0, 155**2 / 64)]
    torch.testing.assert_close(psnr(image, truth), torch.stack(wanted))


def test_the_examples_run():
    torch.manual_seed(0)
    assert doctest.testmod(proximal).failed == 0
