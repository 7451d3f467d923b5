"""The switches of `gdeq.kernels.product`: how the kernels go about it, not what they compute.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gdeq
from gdeq.kernels import choice
from problems import assert_near

pytest.importorskip("triton")
from gdeq.kernels import product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def bumpy(dtype, batch=3, d=150):
    """A map of several chunks (`few`), the last of them not full; samples differ in difficulty."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(d, d, dtype=torch.float64, generator=generator) / d**0.5
    shift = torch.randn(batch, d, dtype=torch.float64, generator=generator)
    strength = torch.linspace(0.3, 1.5, batch, dtype=torch.float64).unsqueeze(1)
    matrix, shift, strength = (x.to(DEVICE, dtype) for x in (matrix, shift, strength))

    def f(z):
        return torch.tanh(strength * (z @ matrix.T) + shift)

    return f, torch.zeros_like(shift)


def few(monkeypatch, **switches):
    monkeypatch.setattr(product, "tuning", replace(product.tuning, block=64, **switches))


def test_backwards_is_forwards_in_another_order(monkeypatch):
    f, z0 = bumpy(torch.float64)
    x = torch.randn_like(z0)
    found = {}
    for backwards in [True, False]:
        few(monkeypatch, backwards=backwards)
        with choice.use("triton"):
            solution = gdeq.solve(f, z0, gdeq.Broyden(9, 0.0))
            inverse = solution.inverse
            found[backwards] = solution.z, inverse.matvec(x), inverse.rmatvec(x)
    for a, b in zip(found[True], found[False], strict=True):
        assert_near(a, b, 1e-9)
    assert not torch.equal(found[True][0], found[False][0])  # the switch does something


@pytest.mark.parametrize("form", ["plain", "triton"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_negative_product_has_the_other_sign(form, transposed):
    f, z0 = bumpy(torch.float64)
    x = torch.randn_like(z0)
    with choice.use(form):
        inverse = gdeq.solve(f, z0, gdeq.Broyden(5, 0.0)).inverse.vectors
        inverse = inverse.T if transposed else inverse
        assert torch.equal(inverse.negative_matvec(x), -inverse.matvec(x))


@pytest.mark.parametrize("transposed", [False, True])
def test_no_factor_asks_for_the_inner_product_that_is_not_formed(transposed):
    """That of s_0 in the transposed product, of the last step in the other."""
    f, z0 = bumpy(torch.float64)
    x = torch.randn_like(z0)
    with choice.use("triton"):
        inverse = gdeq.solve(f, z0, gdeq.Broyden(5, 0.0)).inverse.vectors
        inverse = inverse.T if transposed else inverse
        expected = inverse.matvec(x)
        dots = torch.einsum("bjd,bd->bj", inverse.steps, x)
        dots[:, 0 if transposed else -1] = torch.nan
        weigh = gdeq.product.transposed_weights if transposed else gdeq.product.weights
        weight = weigh(dots, inverse.gram, inverse.keep)
        assert_near(expected, -(x + torch.einsum("bj,bjd->bd", weight, inverse.steps)), 1e-10)
