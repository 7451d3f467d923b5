"""Norms in one pass, against NumPy's in float64."""

import numpy as np
import pytest
import torch

from gdeq import operators
from gdeq.fast.kernels import choice

lengths = pytest.importorskip("gdeq.fast.kernels.lengths")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        *(((2, 5000), scale) for scale in (1.0, 1e30, 1e-30)),
        *((shape, 1.0) for shape in [(1, 1), (3, 1000), (2, 1024), (700, 3)]),
    ],
)
def test_norms(shape, scale, monkeypatch):
    monkeypatch.setattr(lengths, "PROGRAMS", 6)  # some take several blocks
    x = (scale * torch.randn(shape)).float()
    assert lengths.takes(x)
    expected = np.sqrt((x.double().numpy() ** 2).sum(1))
    found = lengths.norms(x.to(DEVICE)).cpu()
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_of_residuals(scale):
    v, w, product = (scale * torch.randn(3, 2500) for _ in range(3))
    r = v - w + product
    expected = np.sqrt((r.double().numpy() ** 2).sum(1))
    with choice.use("triton"):
        found = operators.residual_norm(v.to(DEVICE), w.to(DEVICE), product.to(DEVICE)).cpu()
    plain = operators.residual_norm(v, w, product)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(plain.numpy(), expected, rtol=1e-6)


def test_what_is_not_finite_stays_in_its_sample():
    x = torch.ones(4, 2000, device=DEVICE)
    x[1, 1500], x[2, 3] = torch.nan, torch.inf
    found = lengths.norms(x).tolist()
    assert found[0] == found[3] == pytest.approx(2000**0.5)
    assert np.isnan(found[1])
    assert found[2] == np.inf


def test_what_it_does_not_take():
    x = torch.ones(4, 6)
    assert not lengths.takes(x.double())
    assert not lengths.takes(x.t())
    assert not lengths.takes(x[:, :0])
    assert not lengths.takes(x[0])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU has a way of its own")
def test_it_is_used_on_a_gpu(monkeypatch):
    x = torch.randn(5, 4000, device=DEVICE)
    calls = []
    real = lengths.norms
    monkeypatch.setattr(lengths, "norms", lambda a: calls.append(a) or real(a))
    (found,) = operators.safe_norms(x)
    with choice.use("off"):
        (plain,) = operators.safe_norms(x)
    assert len(calls) == 1
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0.0)
    x.requires_grad_()
    operators.safe_norms(x)[0].sum().backward()
    assert x.grad is not None
