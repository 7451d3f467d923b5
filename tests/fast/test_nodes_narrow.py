"""v in half precision where w = −B⁻ᵀv is rounded to it anyway: the same w, half the bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gdeq
from gdeq import nodes
from gdeq.fast.kernels import choice
from gdeq.fast.product import ProductInverse

# What kernels have not written yet may be anything: the interpreter's arithmetic warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(choice, "chosen", lambda x: "triton")


class Cell(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 32)
        nn.init.normal_(self.a.weight, std=0.15)
        nn.init.normal_(self.b.weight, std=0.15)
        self.to(DEVICE, dtype)

    def forward(self, z, x):
        return torch.tanh(self.b(z[1]) + x), torch.tanh(self.a(z[0]))


def inverse_of(bits):
    torch.manual_seed(1)
    cell = Cell(BF16)
    x = torch.randn(5, 32, device=DEVICE, dtype=BF16)
    z0 = x.new_zeros(5, 32), x.new_zeros(5, 48)
    solution = gdeq.solve(lambda z: cell(z, x), z0, gdeq.Broyden(6, tol=0, step_bits=bits))
    found = solution.inverse.vectors
    assert isinstance(found, ProductInverse)
    assert found.keep.any()
    return found


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_product_with_half_precision_is_that_of_float32_rounded(dtype, bits):
    inverse = inverse_of(bits).T
    x = torch.randn(5, 80, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        assert inverse.widens(x)
        wide = inverse.negative_matvec(x.float())
        found = inverse.negative_matvec(x)
    assert wide.dtype == torch.float32
    assert found.dtype == dtype
    # The interpreter cuts off where a GPU rounds.
    allowed = torch.finfo(dtype).eps * (1.0 if DEVICE.type == "cpu" else 0.51)
    assert ((found.float() - wide).abs() <= allowed * wide.abs() + 1e-7).all()
    assert not torch.equal(wide, x.float())


def gradients(cell, x, narrow, monkeypatch, **options):
    seen = []
    given = nodes._dtype_of_v

    def dtype_of_v(ctx, v):
        found = given(ctx, v) if narrow else None
        seen.append(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(nodes, "_dtype_of_v", dtype_of_v)
        z0 = x.new_zeros(5, 32), x.new_zeros(5, 48)
        deq = gdeq.DEQ(cell, solver=gdeq.Broyden(6, tol=0), gradient=gdeq.GDEQ())
        z = deq(x, z0=z0)
        loss = z[0].float().square().sum() + z[1].float().sum()
        found = torch.autograd.grad(loss, list(cell.parameters()), **options)
    return found, seen


def test_the_gradients_are_the_same(monkeypatch):
    cell = Cell(BF16)
    x = torch.randn(5, 32, device=DEVICE, dtype=BF16)
    wide, seen = gradients(cell, x, False, monkeypatch)
    assert seen == [None]
    found, seen = gradients(cell, x, True, monkeypatch)
    assert seen == [BF16]
    for a, b in zip(found, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())
    assert any(e.abs().max() > 0 for e in found)


def dtypes_of_v(cell, z0, gradient, monkeypatch, autocast=False):
    """That of each backward pass, and that in which a gradient method was given it."""
    seen, given = [], []
    look, cotangent = nodes._dtype_of_v, type(gradient).cotangent
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "_dtype_of_v", lambda *args: seen.append(look(*args)) or seen[-1])
        patch.setattr(
            type(gradient),
            "cotangent",
            lambda self, v, *rest: given.append(v.dtype) or cotangent(self, v, *rest),
        )
        deq = gdeq.DEQ(cell, solver=gdeq.Broyden(4, tol=0), gradient=gradient)
        x = torch.randn(5, 32, device=DEVICE).to(z0[0].dtype)
        with torch.autocast(DEVICE.type, BF16, enabled=autocast):
            z = deq(x, z0=z0)
        sum(part.float().square().sum() for part in z).backward()
    return seen, given


def start(*dtypes):
    sizes = zip((32, 48), dtypes, strict=True)
    return tuple(torch.zeros(5, size, device=DEVICE, dtype=dtype) for size, dtype in sizes)


def test_only_where_all_tensors_are_of_one_precision(monkeypatch):
    class Mixed(Cell):
        def forward(self, z, x):
            a, b = super().forward((z[0].float(), z[1]), x.float())
            return a.to(z[0].dtype), b

    assert dtypes_of_v(Cell(BF16), start(BF16, BF16), gdeq.GDEQ(), monkeypatch) == ([BF16], [BF16])
    mixed = dtypes_of_v(Mixed(torch.float32), start(BF16, torch.float32), gdeq.GDEQ(), monkeypatch)
    assert mixed == ([None], [torch.float32])
    # Under autocast z is in float32, and so are v and w.
    whole = torch.float32
    found = dtypes_of_v(Cell(whole), start(whole, whole), gdeq.GDEQ(), monkeypatch, autocast=True)
    assert found[1] == [whole]


def test_a_method_of_someone_elses_is_given_float32(monkeypatch):
    """It may take norms, which overflow in float16."""

    class Own(gdeq.Gradient):
        uses_vjp, uses_inverse = False, True

        def cotangent(self, v, vjp, solution):
            w = solution.inverse.vectors.T.negative_matvec(v)
            return gdeq.solution.Cotangent(w, 0)

    class Derived(gdeq.GDEQ):
        def cotangent(self, v, vjp, solution):
            return super().cotangent(v, vjp, solution)

    for gradient in (Own(), Derived()):
        found = dtypes_of_v(Cell(BF16), start(BF16, BF16), gradient, monkeypatch)
        assert found == ([None], [torch.float32])


def test_the_plain_form_does_not_widen(monkeypatch):
    inverse = inverse_of(16)
    x = torch.randn(5, 80, device=DEVICE, dtype=BF16)
    assert not inverse.widens(x)  # with autograd
    with torch.no_grad():
        assert inverse.widens(x)
        monkeypatch.setattr(choice, "chosen", lambda x: "off")
        assert not inverse.widens(x)


def test_float32_stays_float32(monkeypatch):
    cell = Cell(torch.float32)
    x = torch.randn(5, 32, device=DEVICE)
    _found, seen = gradients(cell, x, True, monkeypatch)
    assert seen == [torch.float32]
