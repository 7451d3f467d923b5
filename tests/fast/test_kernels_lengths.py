"""Norms in one pass, against NumPy's in float64."""

import numpy as np
import pytest
import torch

from gdeq.engine import REFERENCE
from gdeq.state import StateSpace

pytest.importorskip("triton")
from gdeq.fast.engine import FAST
from gdeq.fast.kernels import lengths
from gdeq.fast.layout import FastSpace

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
    found = FAST.residual_norm(v.to(DEVICE), w.to(DEVICE), product.to(DEVICE)).cpu()
    plain = REFERENCE.residual_norm(v, w, product)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2])
def test_the_fast_engine_takes_norms_so(dtype, count, monkeypatch):
    """Of one tensor by this kernel, of several by that of `state`; float64 as it is."""
    z = tuple(torch.randn(5, 400, device=DEVICE).to(dtype) for _ in range(count))
    calls, given = [], lengths.norms
    monkeypatch.setattr(lengths, "norms", lambda x: calls.append(x) or given(x))
    found = FAST.norm(z, FastSpace(z))
    assert len(calls) == (count == 1 and dtype != torch.float64)
    torch.testing.assert_close(found, REFERENCE.norm(z, StateSpace(z)), rtol=1e-6, atol=0.0)
