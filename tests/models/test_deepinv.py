"""Algorithms of deepinv as equilibrium layers: the same images, gradients checked against ours."""

import doctest

import pytest
import torch

import gdeq
import gdeq.models.deepinv
from gdeq.models.deepinv import from_deepinv

dinv = pytest.importorskip("deepinv")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
SOLVER = gdeq.Anderson(max_iter=200, tol=1e-6)


@pytest.fixture
def physics():
    kernel = torch.zeros(1, 1, 3, 3)
    kernel[..., 1, 1], kernel[..., 1, 2] = 0.8, 0.2
    return dinv.physics.BlurFFT(img_size=(1, 12, 12), filter=kernel)


@pytest.fixture
def y(physics):
    torch.manual_seed(0)
    return physics(torch.rand(2, 1, 12, 12))


def algorithm(name, **options):
    return getattr(dinv.optim, name)(
        prior=dinv.optim.L1Prior(),
        data_fidelity=dinv.optim.L2(),
        lambda_reg=0.02,
        stepsize=0.8,
        max_iter=200,
        **options,
    )


@pytest.mark.parametrize(("name", "parts"), [("PGD", 1), ("HQS", 1), ("ADMM", 2), ("DRS", 2)])
def test_the_image_is_that_of_the_algorithm(name, parts, physics, y):
    wanted = algorithm(name)(y, physics)
    with torch.no_grad():
        found = from_deepinv(algorithm(name), SOLVER)(y, physics)
    assert isinstance(found, torch.Tensor) == (parts == 1)
    image = found if parts == 1 else found[0]
    torch.testing.assert_close(image, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["PGD", "ADMM"])
def test_step_sizes_and_networks_are_trained(name, physics, y):
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.look = torch.nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, v, sigma):
            return 0.5 * v + 0.1 * torch.tanh(self.look(v))

    torch.manual_seed(0)
    made = getattr(dinv.optim, name)(
        prior=dinv.optim.PnP(denoiser=Network()),
        data_fidelity=dinv.optim.L2(),
        stepsize=0.5,
        unfold=True,
        trainable_params=["stepsize"],
    )
    deq = from_deepinv(made, SOLVER, gdeq.Implicit())
    names = {name for name, _ in deq.named_parameters()}
    assert any("look.weight" in name for name in names)

    def loss():
        found = deq(y, physics)
        return (found if isinstance(found, torch.Tensor) else found[0]).square().sum()

    loss().backward()
    weight = next(p for name, p in deq.named_parameters() if name.endswith("look.bias"))
    slope, step = weight.grad.item(), 1e-2
    with torch.no_grad():
        weight += step
        more = loss()
        weight -= 2 * step
        less = loss()
    assert slope == pytest.approx(((more - less) / (2 * step)).item(), rel=1e-2)
    assert any("stepsize" in name and p.grad is not None for name, p in deq.named_parameters())


def test_what_is_no_fixed_map_is_refused():
    with pytest.raises(ValueError, match="FISTA changes from step to step"):
        from_deepinv(algorithm("FISTA"))
    with pytest.raises(ValueError, match="stepsize of this algorithm differs"):
        from_deepinv(
            dinv.optim.PGD(
                prior=dinv.optim.L1Prior(), data_fidelity=dinv.optim.L2(),
                stepsize=[0.5, 0.4], max_iter=2,
            )
        )  # fmt: skip
    with pytest.raises(TypeError, match="takes an algorithm of deepinv"):
        from_deepinv(torch.nn.Identity())


def test_the_example_runs():
    assert doctest.testmod(gdeq.models.deepinv).failed == 0
