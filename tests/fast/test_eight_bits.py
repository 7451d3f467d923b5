"""Steps in 8 bits: how they are rounded, four in a word, and how good an inverse they make."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq.fast.eight_bits import Scales, chunks_of, in_full
from gdeq.fast.product import ProductInverse, Start
from problems import assert_near

pytest.importorskip("triton")
import triton
import triton.language as tl

from gdeq.fast.kernels import sweep as fused
from gdeq.fast.kernels import words
from gdeq.fast.kernels.chunks import place, rounded_with_bytes, table
from gdeq.fast.kernels.words import in_two_words, products_of_words, words_of
from oracles import sweep as oracle
from oracles.rounding import rounded_to_eight_bits
from sweeps import DEVICE, use

BF16 = torch.bfloat16
HALF = torch.finfo(BF16).eps
BLOCK = 64
SIZES = [70, 3, 33]  # a full chunk, and some that are not


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", BLOCK)
    monkeypatch.setattr(oracle.PlainSweep, "block", BLOCK)


def awkward_steps():  # (5, 106)
    x = torch.randn(5, sum(SIZES), device=DEVICE)
    x[0] = 0.0
    x[1] *= 1e-6 ** torch.linspace(0, 1, sum(SIZES), device=DEVICE)  # small beside large
    x[2, 5], x[2, 75] = torch.inf, torch.nan  # in two chunks of four
    x[3, :64] = torch.arange(64, device=DEVICE) - 31.5  # all in the middle of two numbers
    x[3, 0] = 127.0
    x[4] *= 1e-32
    x[4, 71] = 1e30
    return x


def test_rounding_is_to_the_nearest_of_255_numbers_in_each_chunk():
    x = awkward_steps()
    whole, scale = rounded_to_eight_bits(x, tuple(SIZES), BLOCK)
    assert whole.dtype == torch.int8
    assert chunks_of(tuple(SIZES), BLOCK) == [2, 1, 1]
    assert scale.shape == (5, 4)
    scales = Scales(scale.unsqueeze(1), tuple(SIZES), BLOCK)
    found = in_full(whole.unsqueeze(1), scales, x.dtype).squeeze(1)
    chunks = [slice(0, 64), slice(64, 70), slice(70, 73), slice(73, 106)]
    for row in range(5):
        for c, at in enumerate(chunks):
            largest = x[row, at].abs().max()
            if not largest.isfinite():
                assert found[row, at].isnan().all()
            elif largest < 1e-30:
                assert not found[row, at].any()
                assert scale[row, c] == 0
            else:
                assert_near(scale[row, c], largest / 127, 1e-6 * largest.item())
                assert ((found - x)[row, at].abs() <= largest * (0.5001 / 127)).all()
                assert whole[row, at].abs().max() == 127
    assert found[2].isnan().sum() == 64 + 33  # no other chunk is touched
    assert (whole[3, 1:64] % 2 == 0).all()


@triton.jit
def _round_all(x, whole, scale, chunk_table, batch, d, chunks, BLOCK: tl.constexpr):
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, _row, length, in_rows, _p = place(chunk_table, b, chunk, batch, d, False, BLOCK)
    inside = lane < length
    _numbers, found, unit = rounded_with_bytes(tl.load(x + in_rows, mask=inside, other=0.0))
    tl.store(whole + in_rows, found, mask=inside)
    tl.store(scale + b * chunks + chunk, unit)


def test_the_kernels_round_as_plain_pytorch_bit_for_bit():
    x = awkward_steps()
    expected, units = rounded_to_eight_bits(x, tuple(SIZES), BLOCK)
    chunk_table = table(tuple(SIZES), BLOCK, DEVICE)
    whole, scale = torch.empty_like(expected), torch.empty_like(units)
    grid = len(chunk_table), len(x)
    _round_all[grid](x, whole, scale, chunk_table, len(x), x.shape[1], len(chunk_table), BLOCK)
    assert torch.equal(whole, expected)
    assert torch.equal(scale, units)


# --- four in a word -------------------------------------------------------------------------------


@triton.jit
def _two_words(x, first, second, unit, N: tl.constexpr, COARSE: tl.constexpr = False):
    a, b, u = in_two_words(tl.load(x + tl.arange(0, N)), N // 4, COARSE)
    tl.store(first + tl.arange(0, N // 4), a)
    tl.store(second + tl.arange(0, N // 4), b)
    tl.store(unit, u)


def numbers_in(words):  # int32 (n,) -> (4n,)
    return words.cpu().view(torch.int8).to(torch.float64)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_a_chunk_is_two_whole_numbers_for_each_of_its_own(size):
    torch.manual_seed(0)
    x = size * torch.randn(BLOCK, device=DEVICE)
    x[3], x[7], x[11] = 0.0, -4 * size, 4 * size
    first, second = torch.empty(2, BLOCK // 4, dtype=torch.int32, device=DEVICE)
    unit = torch.empty(1, device=DEVICE)
    _two_words[(1,)](x, first, second, unit, BLOCK)
    assert numbers_in(first).abs().max() == 127
    assert numbers_in(second).abs().max() <= 32
    value = (numbers_in(first) + numbers_in(second) / 64) * unit.item()
    assert (value - x.cpu().double()).abs().max() <= 1.01 * unit.item() / 128
    assert value[3] == 0
    coarse = torch.empty_like(first)
    _two_words[(1,)](x, coarse, second, unit, BLOCK, COARSE=True)
    assert torch.equal(coarse, first)
    value = numbers_in(coarse) * unit.item()
    assert (value - x.cpu().double()).abs().max() <= 1.01 * unit.item() / 2


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 0.0])
def test_a_chunk_without_finite_size_is_zeros(bad):
    x = torch.full((BLOCK,), bad, device=DEVICE)
    first, second = torch.ones(2, BLOCK // 4, dtype=torch.int32, device=DEVICE)
    unit = torch.ones(1, device=DEVICE)
    _two_words[(1,)](x, first, second, unit, BLOCK)
    assert not first.any()
    assert not second.any()
    assert unit == 0


@triton.jit
def _products(
    words, units, g, out, d, length, chunks, count,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, COARSE: tl.constexpr = False,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    values = tl.load(g + lane, mask=lane < length, other=0.0)
    unit = tl.load(units + (count - 1) * chunks)
    some = words_of(words, count, length, d, BLOCK, TILE)
    newest = words_of(words + (count - 1) * (d // 4), 1, length, d, BLOCK, 1)
    products_of_words(
        some, newest[0], words, units, values, unit, out, d, length, chunks, count,
        BLOCK, TILE, PLACES, COARSE,
    )  # fmt: skip


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("length", "count", "tile"), [(BLOCK, 1, 2), (48, 2, 4), (BLOCK, 5, 4), (48, 9, 2), (48, 9, 4)]
)
def test_inner_products_of_words(length, count, tile, coarse):
    torch.manual_seed(0)
    steps = torch.randn(count, length) * torch.logspace(0, -6, count).unsqueeze(1)
    whole, scale = rounded_to_eight_bits(steps, (length,), BLOCK)
    whole[0, :4] = torch.tensor([-127, 127, -1, 0], dtype=torch.int8)
    g = torch.randn(length)
    out = torch.full((2, 16), -7.0, device=DEVICE)
    in_words = whole.contiguous().view(torch.int32).to(DEVICE)
    _products[(1,)](
        in_words, scale.to(DEVICE), g.to(DEVICE), out, length, length, 1, count,
        BLOCK=BLOCK, TILE=tile, PLACES=16, COARSE=coarse,
    )  # fmt: skip
    exact = whole.double() * scale.double()
    with_g, with_newest = exact @ g.double(), exact @ exact[-1]
    sizes = exact.norm(dim=1)
    found = out.cpu().double()
    # As the module says, to five standard deviations.
    spread = float(g.abs().max() / g.square().mean().sqrt()) / (440 * length**0.5)
    limit = 5 * spread if coarse else 1e-4
    assert ((found[0, :count] - with_g).abs() <= limit * sizes * g.double().norm()).all()
    assert ((found[1, :count] - with_newest).abs() <= 1e-6 * sizes * sizes[-1]).all()
    assert (found[:, count:] == -7.0).all()


def test_the_largest_sums_are_whole_numbers_of_32_bits():
    count, length = 2, fused.BLOCK
    whole = torch.full((count, length), 127, dtype=torch.int8)
    whole[1] = -127
    scale, g = torch.full((count, 1), 0.5), torch.full((length,), 3.0)
    out = torch.zeros(2, 16, device=DEVICE)
    _products[(1,)](
        whole.view(torch.int32).to(DEVICE), scale.to(DEVICE), g.to(DEVICE), out,
        length, length, 1, count, BLOCK=length, TILE=2, PLACES=16,
    )  # fmt: skip
    expected = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 127 * 0.5 * length
    expected *= torch.tensor([[3.0], [127 * 0.5]])
    torch.testing.assert_close(out[:, :2].cpu(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("size", [1024, words.COARSE_FROM, 1020])
def test_which_samples_are_multiplied_in_words_and_which_have_g_in_8_bits(size, monkeypatch):
    """The inner products differ, and the solve goes as far."""
    torch.manual_seed(0)
    scale = torch.linspace(-0.8, 0.8, size, device=DEVICE)
    x = torch.randn(1, size, device=DEVICE)

    def solved(**change):
        for name, value in change.items():
            monkeypatch.setattr(fused, name, value)
        z0 = torch.zeros(1, size, dtype=BF16, device=DEVICE)
        with use("fast"):
            solution = gdeq.solve(
                lambda z: torch.tanh(scale * z.float() + x).to(BF16),
                z0,
                gdeq.Broyden(4, 0.0, step_bits=8),
            )
        return solution.inverse.vectors.gram[:, :4, :4]

    found, fine = solved(), solved(COARSE_FROM=size + 1)
    single = solved(COMPILES=False)
    assert torch.equal(found, fine) == (size < words.COARSE_FROM)
    assert torch.equal(fine, single) == (size % 16 != 0)
    close = {"rtol": 1e-3, "atol": 1e-3 * single.max().item()}
    torch.testing.assert_close(found, fine, **close)
    torch.testing.assert_close(fine, single, **close)


# --- how good it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("tol", [0.0, 1e-3])
@pytest.mark.usefixtures("small_chunks")
def test_a_solve_under_autocast(tol):
    """The store grows, samples end at different steps, and the inverse is that of plain PyTorch."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(116, size) for size in (70, 46)).to(DEVICE)
    x = torch.randn(3, 116, device=DEVICE) * torch.linspace(0.1, 2, 3, device=DEVICE).unsqueeze(1)

    def f(z):
        joined = torch.cat(z, dim=1)
        return tuple(
            torch.tanh(2.2 * layer(joined) + part)
            for layer, part in zip(layers, x.split([70, 46], dim=1), strict=True)
        )

    z0 = tuple(torch.zeros_like(part) for part in x.split([70, 46], dim=1))
    found = {}
    solver = gdeq.Broyden(11 if tol else 5, tol, step_bits=8)
    for form in ["reference", "oracle", "fast"]:
        with use(form), torch.autocast(DEVICE.type, BF16), torch.no_grad():
            found[form] = gdeq.solve(f, z0, solver)
    inverse = found["fast"].inverse.vectors
    assert isinstance(inverse, ProductInverse)
    assert [t.dtype for t in inverse.stored] == [torch.int8, torch.float32]
    assert inverse.scales.sizes == (70, 46)
    assert inverse.scales.values.shape == (3, inverse.rank + 1, 2 + 1)
    if tol:
        assert inverse.rank > 8
    with use("fast"):
        kernels = found["fast"].inverse.rmatvec(x)
    assert_near(kernels, found["fast"].inverse.rmatvec(x), 1e-4)
    exact = found["reference"]
    for form in ["oracle", "fast"]:
        assert (found[form].residual <= 2 * exact.residual + HALF).all()
        assert found[form].converged.tolist() == exact.converged.tolist()


@pytest.mark.parametrize(
    ("stored", "bound"), [(torch.float32, 1e-4), (BF16, 0.01), (torch.int8, 0.05)]
)
@pytest.mark.usefixtures("small_chunks")
def test_the_inverse_meets_its_newest_secant_equation(form, monkeypatch, stored, bound):
    """B⁻¹y = s for the last step, up to the rounding of that step."""
    monkeypatch.setattr(Start, "store_dtype", stored)
    torch.manual_seed(0)
    matrix = 0.6 * torch.randn(144, 144, device=DEVICE) / 12
    x = torch.randn(2, 144, device=DEVICE)
    seen = []

    def f(z):
        seen.append((z.clone(), torch.tanh(z @ matrix.T) + x))
        return seen[-1][1]

    with use(form):
        found = gdeq.solve(f, torch.zeros_like(x), gdeq.Broyden(8, 0.0))
    (z_before, f_before), (z, f_z) = seen[-2:]
    s, y = z - z_before, (f_z - z) - (f_before - z_before)
    assert found.inverse.vectors.keep[:, 7].all()
    missed = (found.inverse.matvec(y) - s).norm(dim=1) / s.norm(dim=1)
    assert missed.max() < bound
    if stored == torch.int8:
        assert missed.max() > 1e-3  # it is this store that was looked at
