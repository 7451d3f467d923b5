"""Products with the inverse of a sweep, against dense products of its factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gdeq
from gdeq.fast import product
from gdeq.fast.eight_bits import Scales
from gdeq.fast.product import ProductInverse
from problems import assert_near

pytest.importorskip("triton")
from oracles.rounding import rounded_to_eight_bits
from sweeps import DEVICE, FORMS, use

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
BLOCK, SIZES = 64, (70, 3, 33)
TRANSPOSED = pytest.mark.parametrize("transposed", [False, True])


def drawn(steps=6, dtype=F64, bits=64, batch=3, sizes=SIZES):
    """An inverse of steps that no solve made; some factors are not kept."""
    torch.manual_seed(0)
    stored = torch.randn(batch, steps + 1, sum(sizes), dtype=dtype) / sum(sizes) ** 0.5
    scales = None
    if bits == 8:
        made = [rounded_to_eight_bits(stored[:, j], sizes, BLOCK) for j in range(steps + 1)]
        stored = torch.stack([whole for whole, _ in made], 1)
        values = torch.stack([scale for _, scale in made], 1)
        scales = Scales(values.to(DEVICE), sizes, BLOCK)
    elif bits == 16:
        stored = stored.to(BF16)
    stored = stored.to(DEVICE)
    wide = stored.to(dtype) * (scales.spread().to(dtype) if scales else 1)
    gram = torch.einsum("bid,bjd->bij", wide, wide)
    keep = torch.ones(batch, steps + 1, dtype=torch.bool, device=DEVICE)
    keep[1, 2] = keep[2, :2] = False
    return ProductInverse(stored, gram, keep, scales=scales), wide


def dense(inverse, wide):
    """−Π (I + s_{j+1}s_jᵀ/‖s_j‖²)."""
    batch, n, d = wide.shape
    found = -torch.eye(d, dtype=wide.dtype, device=DEVICE).repeat(batch, 1, 1)
    for j in range(n - 1):
        s, after = wide[:, j], wide[:, j + 1]
        factor = after.unsqueeze(2) * s.unsqueeze(1) / (s * s).sum(1).view(-1, 1, 1)
        kept = inverse.keep[:, j].view(-1, 1, 1)
        found = found + torch.where(kept, factor, 0.0) @ found
    return found


@pytest.mark.parametrize("bits", [64, 8])
@pytest.mark.parametrize("differentiable", [False, True])
def test_the_inverse_is_the_product_of_its_factors(form, bits, differentiable):
    inverse, wide = drawn(bits=bits)
    matrix = dense(inverse, wide)
    x = torch.randn(3, sum(SIZES), dtype=F64, device=DEVICE, requires_grad=differentiable)
    with use(form):
        forth, back = inverse.matvec(x), inverse.rmatvec(x)
        assert torch.equal(inverse.T.negative_matvec(x), -back)
        assert torch.equal(inverse.negative_matvec(x), -forth)
        assert inverse.T.T.scales is inverse.scales
        if differentiable:
            v = torch.randn_like(forth)
            assert_near(torch.autograd.grad(forth, x, v)[0], (v.unsqueeze(1) @ matrix)[:, 0], 1e-6)
    assert_near(forth, (matrix @ x.unsqueeze(2))[:, :, 0], 1e-6)
    assert_near(back, (matrix.mT @ x.unsqueeze(2))[:, :, 0], 1e-6)


@TRANSPOSED
def test_a_step_that_no_factor_uses_may_hold_anything(form, transposed):
    lost, results = 3, []
    for value in [1.0, torch.inf]:
        inverse, _ = drawn(bits=8)
        inverse.keep[:, lost - 1 : lost + 1] = False
        inverse.scales.values[:, lost, 1] = value
        x = torch.ones(3, sum(SIZES), dtype=F64, device=DEVICE)
        with use(form):
            results.append((inverse.T if transposed else inverse).matvec(x))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@TRANSPOSED
def test_what_no_weight_needs_may_hold_anything(transposed):
    """Inner products that are not formed, and rows of the Gram matrix of skipped factors."""
    steps, skipped = 12, 4  # more than are under way from memory at once
    inverse, wide = drawn(steps)
    inverse.keep[:, skipped - 1 : skipped + 1] = False
    inverse = inverse.T if transposed else inverse
    x = torch.randn(3, sum(SIZES), dtype=F64, device=DEVICE)
    gram = inverse.gram.clone()
    for place in (skipped, steps):
        gram[:, place] = gram[:, :, place] = torch.nan
    with use("fast"):
        found = replace(inverse, gram=gram).matvec(x)
        assert torch.equal(found, inverse.matvec(x))
    with use("oracle"):
        assert_near(found, inverse.matvec(x), 1e-10)
    # s_0ᵀx is not asked for in the transposed product, that of the last step not in the other.
    dots = torch.einsum("bjd,bd->bj", wide, x)
    dots[:, 0 if transposed else -1] = torch.nan
    weigh = product.transposed_weights if transposed else product.weights
    weight = weigh(dots, inverse.gram, inverse.keep)
    assert_near(found, -(x + torch.einsum("bj,bjd->bd", weight, wide)), 1e-10)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_product_with_half_precision_is_that_of_float32_rounded(dtype, bits):
    inverse, _ = drawn(dtype=F32, bits=bits)
    x = torch.randn(3, sum(SIZES), device=DEVICE, dtype=dtype)
    with use("fast"), torch.no_grad():
        wide, found = inverse.T.negative_matvec(x.float()), inverse.T.negative_matvec(x)
    assert wide.dtype == F32
    assert found.dtype == dtype
    # The interpreter cuts off where a GPU rounds.
    allowed = torch.finfo(dtype).eps * (1.0 if DEVICE.type == "cpu" else 0.51)
    assert ((found.float() - wide).abs() <= allowed * wide.abs() + 1e-7).all()
    assert not torch.equal(wide, x.float())


@pytest.mark.parametrize("dtype", [F64, F32])
def test_an_inverse_is_trusted_where_it_is_not_too_long(form, dtype):
    """For the others it is −I, and what it makes of x is x."""
    batch, d = 6, 1040
    torch.manual_seed(3)
    steps = (torch.randn(batch, 5, d, dtype=dtype) / d**0.5).to(DEVICE)
    steps[1, 3] *= 50.0
    steps[4, 0] *= 0.01
    gram = torch.einsum("bid,bjd->bij", steps, steps)
    keep = torch.ones(batch, 5, dtype=torch.bool, device=DEVICE)
    keep[4, 0] = False
    inverse = ProductInverse(steps, gram, keep, transposed=True)
    x = torch.randn(batch, d, dtype=dtype, device=DEVICE)
    x[1] += 30 * d**0.5 * steps[1, 3] / steps[1, 3].norm()  # along the long step
    x[5] = 0.0
    with use("oracle"), torch.no_grad():
        plain = inverse.negative_matvec(x)
    lengths = (plain.norm(dim=1) / x.norm(dim=1)).nan_to_num(0.0)
    accuracy = 1e-12 if dtype == F64 else 1e-4
    for longest in (0.99 * lengths.max().item(), 1.01 * lengths.max().item()):
        with use(form), torch.no_grad():
            found, trusted = inverse.trusted(x, longest)
            after = trusted.negative_matvec(x)
        short = (lengths <= longest).unsqueeze(1)
        assert_near(found, torch.where(short, plain, x), accuracy)
        assert_near(after, found, accuracy)


def test_the_length_of_the_next_step_is_that_of_the_stored_one():
    for bits in (64, 8):
        inverse, wide = drawn(bits=bits)
        assert inverse.step_length() is None
        at = torch.tensor([2, 6, 0], device=DEVICE)
        expected = wide[torch.arange(3), at].norm(dim=1)
        assert_near(replace(inverse, at=at).step_length(), expected, 1e-9)


def test_kernels_are_used_where_the_fast_engine_runs(monkeypatch):
    from gdeq.fast.kernels import inverse as kernels  # noqa: PLC0415

    calls, given = [], kernels.apply
    monkeypatch.setattr(kernels, "apply", lambda *args: calls.append(1) or given(*args))
    inverse, _ = drawn()
    x = torch.randn(3, sum(SIZES), dtype=F64, device=DEVICE)
    for form in ("reference", *FORMS):
        with use(form):
            gdeq.operators.StateInverse(inverse, gdeq.state.StateSpace(x)).matvec(x)
            assert len(calls) == (form == "fast")
