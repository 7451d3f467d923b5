"""z in bfloat16, and inner products of steps in 8 bits four at once.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gdeq
from gdeq.fast import product as plain_form
from gdeq.fast.anderson_steps import AndersonSweep
from gdeq.fast.eight_bits import rounded_to_eight_bits
from gdeq.fast.kernels import choice
from gdeq.fast.product import PlainSweep
from gdeq.solution import Status

pytest.importorskip("triton")
import triton
import triton.language as tl

from gdeq.fast.kernels import product, words
from gdeq.fast.kernels.words import in_two_words, products_of_words, words_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
HALF = torch.finfo(BF16).eps
ROUNDS_DOWN = DEVICE.type == "cpu"  # the interpreter, from float32 to bfloat16
BLOCK = 64
SIZES = {"any size": [70, 3, 33], "multiples of 16": [80, 16]}
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(product, "tuning", replace(product.tuning, block=BLOCK))
    monkeypatch.setattr(PlainSweep, "block", BLOCK)


# --- z --------------------------------------------------------------------------------------------


def drive(kind, solver, sizes, steps, lost=False):
    """By hand.  lost: f of the last sample is NaN from the fourth evaluation on."""
    batch, d = 4, sum(sizes)
    make = torch.Generator().manual_seed(0)
    matrix = (torch.randn(d, d, generator=make) / d**0.5).to(DEVICE)
    shift = torch.randn(batch, d, generator=make).to(DEVICE)
    z0 = torch.randn(batch, d, generator=make).to(BF16).float().to(DEVICE)
    sweep = kind(z0.clone(), sizes, BF16, solver, HALF, steps, None)
    seen = []
    for t in range(steps + 1):
        seen.append(rows_of(sweep.parts, sizes))
        fz = torch.tanh(0.8 * (seen[-1].float() @ matrix.T) + shift).to(BF16)
        if lost and t >= 3:
            fz[-1] = torch.nan
        sweep.take(t, torch.cat([part.reshape(-1) for part in fz.split(sizes, dim=1)]))
    return sweep, seen


def rows_of(parts, sizes):  # -> (batch, d)
    lengths = [4 * size for size in sizes]
    return torch.cat([part.view(4, -1) for part in parts.split(lengths)], dim=1).clone()


SOLVERS = {
    "16 bits": (gdeq.Broyden(7, 0.0), PlainSweep),
    "8 bits": (gdeq.Broyden(7, 0.0, step_bits=8), PlainSweep),
    "Anderson": (gdeq.Anderson(7, 0.0), AndersonSweep),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_kernels_round_z_as_the_plain_form(name, sizes):
    solver, kind = SOLVERS[name]
    found, seen = drive(product.Sweep, solver, sizes, 7)
    plain, expected = drive(kind, solver, sizes, 7)
    assert found.rounded
    assert plain.rounded
    settled = found.settle(7)
    assert settled.z is None
    assert torch.equal(rows_of(settled.parts, sizes), seen[-1])
    for a, b in zip(seen, expected, strict=True):
        assert b.dtype == BF16
        if not ROUNDS_DOWN:  # but for sums in another order: here and there the next number
            assert (a != b).float().mean() < 0.2
        torch.testing.assert_close(a.float(), b.float(), rtol=4 * HALF, atol=8 * HALF)
    assert torch.equal(plain.settle(7).z, expected[-1].float())
    assert found.keep[:, :7].sum() > 15
    if not ROUNDS_DOWN:
        assert torch.equal(found.keep[:, :7] != 0, plain.keep[:, :7])
    # It comes to where the noise of such numbers lets it.
    assert plain.settle(7).residual.max() < 0.05


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_a_sample_that_is_lost_goes_back_to_the_bits_of_its_iterate(form):
    solver, kind = SOLVERS["8 bits"]
    sizes = SIZES["any size"]
    sweep, seen = drive(product.Sweep if form == "triton" else kind, solver, sizes, 7, lost=True)
    settled = sweep.settle(7)
    at = settled.z.to(BF16) if settled.z is not None else rows_of(settled.parts, sizes)
    assert settled.codes.tolist()[-1] == Status.NONFINITE
    assert torch.equal(at[-1], seen[2][-1])
    assert torch.equal(at[:-1], seen[-1][:-1])


def test_not_with_a_tolerance_nor_damped_nor_in_another_precision():
    for solver, dtype, rounded in [
        (gdeq.Anderson(3, 0.0), BF16, True),
        (gdeq.Anderson(3, 0.0, mixing=0.5), BF16, False),
        (gdeq.Broyden(3, 0.0), BF16, True),
        (gdeq.Broyden(3, 1e-3), BF16, False),
        (gdeq.Broyden(3, 0.0), torch.float16, False),
        (gdeq.Broyden(3, 0.0), torch.float32, False),
    ]:
        z = torch.zeros(2, 8, device=DEVICE)
        for kind in (product.Sweep, PlainSweep):
            assert kind(z, [8], dtype, solver, HALF, 3, None).rounded is rounded
        assert plain_form.rounds_z(solver, dtype) is rounded


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_damped_steps_add_up_though_each_is_below_the_rounding_of_z(form):
    torch.manual_seed(0)
    matrix = 0.5 * torch.randn(64, 64, device=DEVICE) / 8
    x = torch.randn(4, 64, device=DEVICE)

    def f(z):
        return (torch.tanh(z.float() @ matrix.T) + x + 5).to(BF16)

    z0 = torch.zeros(4, 64, device=DEVICE, dtype=BF16)
    with choice.use(form):
        found = gdeq.solve(f, z0, gdeq.Anderson(40, 0.0, memory=1, mixing=0.1))
    z = found.z.float()
    away = (f(found.z).float() - z).norm(dim=1) / z.norm(dim=1)
    assert away.max() < 0.005


def slow_map(bits, kind, steps=8):
    """Whose g hardly changes: whether a step's change is seen is a close decision."""
    make = torch.Generator().manual_seed(0)
    matrix = 0.97 * torch.eye(512) + 0.09 * torch.randn(512, 512, generator=make) / 512**0.5
    matrix, shift = matrix.to(DEVICE), torch.randn(8, 512, generator=make).to(DEVICE)
    solver = gdeq.Broyden(steps, 0.0, step_bits=bits)
    sweep = kind(torch.zeros_like(shift), [512], torch.float32, solver, HALF, steps, None)
    for t in range(steps + 1):
        fz = (sweep.parts.view(8, 512) @ matrix.T + shift).to(BF16).float()
        sweep.take(t, fz.view(-1))
    return sweep.keep[:, :steps] != 0


def test_the_change_of_g_is_known_from_all_steps():
    """‖y‖ by inner products that are at hand, those with g of the step before among them."""
    found, plain = slow_map(8, product.Sweep), slow_map(8, PlainSweep)
    assert 0 < plain.sum() < plain.numel()
    assert (found != plain).sum() <= 1


GRADIENTS = {
    "gdeq": gdeq.GDEQ(),
    "refined": gdeq.GDEQ(refine=1),
    "implicit": gdeq.Implicit(gdeq.Broyden(20, 0.0), double_backward=False),
    "implicit twice": gdeq.Implicit(gdeq.Broyden(20, 0.0)),
    "unrolled": gdeq.Unrolled(2),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("form", ["plain", "triton"])
def test_all_that_follows_a_solve_takes_such_a_z(form, name):
    torch.manual_seed(0)
    x = torch.randn(3, 48, device=DEVICE)
    results = {}
    for kernels in ("off", form):
        torch.manual_seed(1)
        layer = torch.nn.Linear(48, 48).to(DEVICE, BF16)

        def f(z, layer=layer):
            return torch.tanh(0.5 * layer(z) + x.to(BF16))

        z0 = torch.zeros(3, 48, device=DEVICE, dtype=BF16)
        with choice.use(kernels):
            solution = gdeq.fixed_point(f, z0, gdeq.Broyden(6, 0.0), GRADIENTS[name])
            assert solution.z.dtype == BF16
            solution.z.float().square().sum().backward()
            results[kernels] = solution.z.float(), layer.weight.grad.float()
    for a, b in zip(*results.values(), strict=True):
        assert (a - b).norm() < (0.2 if ROUNDS_DOWN else 0.05) * b.norm()


# --- four at once ---------------------------------------------------------------------------------


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
@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("length", [BLOCK, 48])
def test_inner_products_of_words(length, count, tile, coarse):
    torch.manual_seed(0)
    steps = torch.randn(count, length) * torch.logspace(0, -6, count).unsqueeze(1)
    whole, scale = rounded_to_eight_bits(steps, (length,), BLOCK)
    whole[0, :4] = torch.tensor([-127, 127, -1, 0], dtype=torch.int8)
    g = torch.randn(length)
    out = torch.full((2, 16), -7.0, device=DEVICE)
    words = whole.contiguous().view(torch.int32).to(DEVICE)
    _products[(1,)](
        words, scale.to(DEVICE), g.to(DEVICE), out, length, length, 1, count,
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
    count, length = 2, words.MOST_NUMBERS
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


def test_longer_chunks_are_taken_one_number_after_another(monkeypatch):
    for block, packed in [(words.MOST_NUMBERS, True), (2 * words.MOST_NUMBERS, False)]:
        monkeypatch.setattr(product, "tuning", replace(product.tuning, block=block))
        z = torch.zeros(2, 16, device=DEVICE)
        sweep = product.Sweep(z, [16], BF16, SOLVERS["8 bits"][0], HALF, 7, None)
        assert sweep._packed() is packed


@pytest.mark.parametrize("size", [1024, words.COARSE_FROM])
def test_long_samples_have_g_in_8_bits(size, monkeypatch):
    """The inner products differ, and the solve goes as far."""
    torch.manual_seed(0)
    solver = SOLVERS["8 bits"][0]
    scale = torch.linspace(-0.8, 0.8, size, device=DEVICE)
    x = torch.randn(2, size, device=DEVICE)

    def f(z):
        return torch.tanh(scale * z.float() + x).to(BF16)

    def solved():
        with choice.use("triton"):
            return gdeq.solve(f, torch.zeros(2, size, dtype=BF16, device=DEVICE), solver)

    found = solved()
    monkeypatch.setattr(product, "COARSE_FROM", size + 1)
    fine = solved()
    assert torch.equal(found.trace, fine.trace) == (size < words.COARSE_FROM)
    torch.testing.assert_close(found.trace, fine.trace, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_with_and_without(sizes, monkeypatch):
    """One number after another and four at once, where parts are multiples of 16."""
    solver, _ = SOLVERS["8 bits"]
    found, _ = drive(product.Sweep, solver, sizes, 7)
    monkeypatch.setattr(product, "tuning", replace(product.tuning, packed=False))
    single, _ = drive(product.Sweep, solver, sizes, 7)
    assert found.steps.dtype == torch.int8
    assert not single._packed()
    packed = sizes == SIZES["multiples of 16"]
    same = torch.equal(found.gram[:, :7, :7], single.gram[:, :7, :7])
    assert same != packed  # it is this form that was looked at
    close = {"rtol": 1e-3, "atol": 1e-3 * single.gram[:, 0, 0].max().item()}
    torch.testing.assert_close(found.gram[:, :7, :7], single.gram[:, :7, :7], **close)
