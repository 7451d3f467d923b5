"""Steps in 8 bits: the kernels against their plain twin and against dense products of factors.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

import gdeq
from gdeq import gradients
from gdeq.fast.eight_bits import Scales, chunks_of, in_full, rounded_to_eight_bits
from gdeq.fast.kernels import choice
from gdeq.fast.product import PlainSweep, ProductInverse, store_dtype
from gdeq.operators import Refinement
from gdeq.solution import Status
from problems import assert_near
from sweeps import ledger_of

pytest.importorskip("triton")
import triton
import triton.language as tl

from gdeq.fast.kernels import product
from gdeq.fast.kernels.chunks import place, rounded, table
from gdeq.fast.kernels.product_judge import BEST_STEP, CODE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.finfo(torch.bfloat16).eps
BLOCK = 64
ANY_SIZES, ROUND_SIZES = [70, 3, 33], [80, 16]  # a full chunk, and some that are not
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class InEightBits(PlainSweep):
    block = BLOCK


def broyden(steps, tol):
    return gdeq.Broyden(steps, tol, step_bits=8)


@pytest.fixture(params=["plain", "triton"])
def form(request):
    return request.param


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(product, "tuning", replace(product.tuning, block=BLOCK))
    monkeypatch.setattr(gdeq.fast.product, "PlainSweep", InEightBits)


@pytest.fixture
def always(monkeypatch):
    """In float64 too, where the two forms differ by no more than a rare rounding."""
    for module in (product, gdeq.fast.product):
        monkeypatch.setattr(module, "store_dtype", lambda *_: torch.int8)


# --- rounding -------------------------------------------------------------------------------------


def awkward_steps():  # (5, 106)
    x = torch.randn(5, sum(ANY_SIZES), device=DEVICE)
    x[0] = 0.0
    x[1] *= 1e-6 ** torch.linspace(0, 1, sum(ANY_SIZES), device=DEVICE)  # small beside large
    x[2, 5], x[2, 75] = torch.inf, torch.nan  # in two chunks of four
    x[3, :64] = torch.arange(64, device=DEVICE) - 31.5  # all in the middle of two numbers
    x[3, 0] = 127.0
    x[4] *= 1e-32
    x[4, 71] = 1e30
    return x


def test_rounding_is_to_the_nearest_of_255_numbers_in_each_chunk():
    x = awkward_steps()
    whole, scale = rounded_to_eight_bits(x, tuple(ANY_SIZES), BLOCK)
    assert whole.dtype == torch.int8
    assert chunks_of(tuple(ANY_SIZES), BLOCK) == [2, 1, 1]
    assert scale.shape == (5, 4)
    scales = Scales(scale.unsqueeze(1), tuple(ANY_SIZES), BLOCK)
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
    lane, _row, length, in_rows, _p = place(chunk_table, b, b, chunk, batch, d, False, BLOCK)
    inside = lane < length
    found, unit = rounded(tl.load(x + in_rows, mask=inside, other=0.0))
    tl.store(whole + in_rows, found.to(tl.int8), mask=inside)
    tl.store(scale + b * chunks + chunk, unit)


def test_the_kernels_round_as_the_plain_form_bit_for_bit():
    x = awkward_steps()
    expected, units = rounded_to_eight_bits(x, tuple(ANY_SIZES), BLOCK)
    chunk_table = table(tuple(ANY_SIZES), BLOCK, DEVICE)
    whole, scale = torch.empty_like(expected), torch.empty_like(units)
    grid = len(chunk_table), len(x)
    _round_all[grid](x, whole, scale, chunk_table, len(x), x.shape[1], len(chunk_table), BLOCK)
    assert torch.equal(whole, expected)
    assert torch.equal(scale, units)


# --- a solve --------------------------------------------------------------------------------------


def drive(kind, dtype, solver, precision, steps, sizes, repeated=False):
    """By hand: the first sample is solved soon, the last one lost at the fourth call.

    Returns the sweep and all its iterates."""
    batch, d = 4, sum(sizes)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(d, d, dtype=torch.float64, generator=generator) / d**0.5
    shift = torch.randn(batch, d, dtype=torch.float64, generator=generator)
    strength = torch.linspace(0.3, 1.5, batch, dtype=torch.float64).unsqueeze(1)
    matrix, shift, strength = (x.to(DEVICE, dtype) for x in (matrix, shift, strength))
    z0 = torch.zeros_like(shift)
    sweep = kind(z0, sizes, dtype, solver, precision, steps, None)
    seen = [sweep.z.clone()]
    for t in range(steps + 1):
        rows = sweep.parts.split([batch * size for size in sizes])
        z = torch.cat([row.view(batch, -1) for row in rows], dim=1)
        fz = torch.tanh(strength * (z @ matrix.T) + shift)
        fz[0] = 0.5
        if t >= 3:
            fz[-1] = torch.nan
        fz = torch.cat([part.reshape(-1) for part in fz.split(sizes, dim=1)])
        if repeated and t:
            sweep.judge_next(fz)
            sweep.go_on()
        else:
            sweep.take(t, fz)
        if repeated and not t:
            sweep.prepare_repetition()
        seen.append(sweep.z.clone())
    return sweep, seen


@cache
def _driven(kind, dtype, steps, sizes):
    return drive(kind, dtype, broyden(steps, 0.0), HALF, steps, list(sizes))


def driven(kind, dtype, steps, sizes):
    """The same of tests that look at it in different ways; each gets a copy."""
    return copy.deepcopy(_driven(kind, dtype, steps, tuple(sizes)))


def with_best(sweep, at):
    """As if, with a tolerance that was not met, these had been the iterates of smallest ‖g‖."""
    sweep.solver = replace(sweep.solver, tol=1e-30)
    at = torch.tensor(at, device=DEVICE)
    if isinstance(sweep, PlainSweep):
        ledger = sweep.ledger
        ledger.watch, ledger.best_step = True, at
        ledger.codes = torch.zeros_like(at) + Status.RUNNING
    else:
        sweep.whole[CODE], sweep.whole[BEST_STEP] = int(Status.RUNNING), at.int()
    return sweep


def values(sweep):
    return sweep.scales.values if isinstance(sweep.scales, Scales) else sweep.scales


@pytest.mark.parametrize(
    ("sizes", "tol"),
    [(ANY_SIZES, 1e-3), (ROUND_SIZES, 0.0)],
    ids=["any size", "multiples of 16"],
)
@pytest.mark.usefixtures("always")
def test_the_kernels_do_as_the_plain_form(sizes, tol):
    """With samples that are solved or lost, and (by the noise guard of bf16) factors skipped."""
    solver, steps = broyden(9, tol), 9
    found, _ = drive(product.Sweep, torch.float64, solver, HALF, steps, sizes)
    plain, _ = drive(InEightBits, torch.float64, solver, HALF, steps, sizes)
    assert found.steps.dtype == plain.steps.dtype == torch.int8
    n = steps + 1
    assert found.steps.shape[1] == n  # with a tolerance it has grown
    keep = plain.keep[:, :steps]
    assert torch.equal(found.keep[:, :steps] != 0, keep)
    assert len(keep.sum(1).unique()) > 2
    made = torch.arange(n, device=DEVICE) <= plain.ledger.steps.unsqueeze(1)
    apart = found.steps[made].int() - plain.steps[made].int()
    assert (apart != 0).sum() <= 2  # two numbers equally near
    assert_near(values(found)[made], values(plain)[made], 1e-5)
    taken = made[:, 1:]
    gram, expected = (sweep.gram[:, :steps, :steps].tril()[taken] for sweep in (found, plain))
    assert_near(gram, expected, 1e-5)
    assert_near(found.z, plain.z, 1e-5)
    settled, expected = found.settle(steps), plain.settle(steps)
    assert settled.codes.tolist() == expected.codes.tolist()
    assert settled.steps.tolist() == expected.steps.tolist()
    assert_near(settled.residual, expected.residual, 1e-5)
    assert_near(settled.z, expected.z, 1e-5)
    assert_near(found.trace, plain.trace, 1e-5)
    inverse, dense = settled.inverse, expected.inverse
    assert torch.equal(inverse.keep[:, :steps], dense.keep[:, :steps])
    x = torch.randn_like(settled.z)
    for a, b in [(inverse, dense), (inverse.T, dense.T)]:
        with choice.use("triton"):
            one = a.matvec(x)
        with choice.use("plain"):
            assert_near(one, b.matvec(x), 1e-4)
            assert_near(one, a.matvec(x), 1e-10)  # the same store read in the other way


@pytest.mark.parametrize("sizes", [ANY_SIZES, ROUND_SIZES], ids=["any size", "multiples of 16"])
def test_in_single_precision_too(sizes):
    steps = 6
    found, _ = driven(product.Sweep, torch.float32, steps, sizes)
    plain, _ = driven(InEightBits, torch.float32, steps, sizes)
    assert found.steps.dtype == torch.int8
    assert torch.equal(found.keep[:, :steps] != 0, plain.keep[:, :steps])
    # Of two numbers that are equally near, either.
    assert (found.steps.int() - plain.steps.int()).abs().max() <= 1
    assert_near(found.z, plain.z, 1e-3)
    assert ledger_of(found).codes.tolist() == plain.ledger.codes.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.usefixtures("always")
def test_going_back_gives_the_bits_of_the_iterate(form, dtype):
    """By the additions of the solve: what is stored is what was added."""
    kind = product.Sweep if form == "triton" else InEightBits
    sweep, seen = driven(kind, dtype, 6, ANY_SIZES)
    for at in [[0, 1, 2, 2], [5, 4, 3, 1]]:
        found = with_best(copy.deepcopy(sweep), at).settle(6)
        for sample, step in enumerate(at):
            assert torch.equal(found.z[sample], seen[step][sample])
            assert not found.inverse.keep[sample, step:].any()


def test_repeated_steps_are_the_counted_ones():
    """In a recording the number of the iterate is on the device."""
    arguments = product.Sweep, torch.float32, broyden(5, 1e-3), HALF, 5, ANY_SIZES
    (a, _), (b, _) = drive(*arguments), drive(*arguments, repeated=True)
    assert torch.equal(a.z, b.z)
    made = torch.arange(6, device=DEVICE) <= ledger_of(a).steps.unsqueeze(1)
    assert torch.equal(a.steps[:, :6][made], b.steps[:, :6][made])
    assert torch.equal(a.scales[:, :6][made], b.scales[:, :6][made])
    assert a.left() == b.left() == 2
    for one, other in zip(a.settle(5)[:5], b.settle(5)[:5], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(a.trace, b.trace)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.usefixtures("always")
def test_the_inverse_is_the_product_of_its_factors(form, differentiable):
    """−Π (I + s_{j+1}s_jᵀ/‖s_j‖²), densely in float64, of the steps as they are stored."""
    kind = product.Sweep if form == "triton" else InEightBits
    steps = 6
    sweep, _ = driven(kind, torch.float64, steps, ANY_SIZES)
    inverse = sweep.settle(steps).inverse
    stored = inverse.steps.double() * inverse.scales.spread().double()
    batch, _, d = stored.shape
    dense = -torch.eye(d, dtype=torch.float64, device=DEVICE).repeat(batch, 1, 1)
    for j in range(steps):
        s, after = stored[:, j], stored[:, j + 1]
        factor = after.unsqueeze(2) * s.unsqueeze(1) / (s * s).sum(1).view(-1, 1, 1)
        kept = inverse.keep[:, j].view(-1, 1, 1)
        dense = dense + torch.where(kept, factor, 0.0) @ dense
    assert inverse.keep[1:3].sum() > 6
    x = torch.randn(batch, d, dtype=torch.float64, device=DEVICE, requires_grad=differentiable)
    with choice.use(form):
        forth, back = inverse.matvec(x), inverse.rmatvec(x)
        minus = inverse.T.negative_matvec(x)
        assert inverse.T.T.scales is inverse.scales
        if differentiable:
            v = torch.randn_like(forth)
            assert_near(torch.autograd.grad(forth, x, v)[0], (v.unsqueeze(1) @ dense)[:, 0], 1e-6)
    # The inner products of the steps were summed in float64, of scales in float32.
    assert_near(forth, (dense @ x.unsqueeze(2))[:, :, 0], 1e-6)
    assert_near(back, (dense.mT @ x.unsqueeze(2))[:, :, 0], 1e-6)
    assert torch.equal(minus, -back)


@pytest.mark.usefixtures("always")
def test_a_step_that_is_not_used_may_hold_anything(form):
    kind = product.Sweep if form == "triton" else InEightBits
    steps, lost = 6, 3
    results = {}
    for value in [1.0, torch.inf]:
        sweep, _ = driven(kind, torch.float64, steps, ANY_SIZES)
        sweep.keep[:, lost - 1 : lost + 1] = 0
        values(sweep)[:, lost, 1] = value
        inverse = with_best(sweep, [steps] * 4).settle(steps).inverse
        x = torch.ones(4, sum(ANY_SIZES), dtype=torch.float64, device=DEVICE)
        with choice.use(form):
            results[value] = inverse.matvec(x), inverse.rmatvec(x)
    for a, b in zip(*results.values(), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_a_lost_step_in_the_store_does_not_reach_the_next(monkeypatch):
    """Its weight is 0, and 0 times infinity is not."""
    steps, lost = 5, 3
    found = {}
    for value in [0.25, torch.inf]:
        grown = product.Sweep.take

        def take(self, t, fz, value=value, grown=grown):
            grown(self, t, fz)
            self.keep[:, lost - 1 : lost + 1] = 0
            if t > lost:  # it has been judged
                self.scales[:, lost, 1] = value

        monkeypatch.setattr(product.Sweep, "take", take)
        solver = broyden(steps, 0.0)
        sweep, _ = drive(product.Sweep, torch.float32, solver, HALF, steps, ANY_SIZES)
        monkeypatch.setattr(product.Sweep, "take", grown)
        found[value] = sweep.weight[:, lost], sweep.z
    assert not found[torch.inf][0].any()
    assert torch.equal(found[0.25][1], found[torch.inf][1])
    assert found[torch.inf][1].isfinite().all()


# --- where it is used -----------------------------------------------------------------------------


def test_only_where_steps_are_rounded_and_the_solver_says_so():
    for dtype in [torch.float64, torch.float32]:
        z = torch.zeros(2, 5, dtype=dtype)
        assert store_dtype(z, torch.finfo(dtype).eps, eight_bits=True) == dtype
    z = torch.zeros(2, 5)
    assert store_dtype(z, HALF) == torch.bfloat16
    assert store_dtype(z, torch.finfo(torch.float16).eps) == torch.bfloat16
    assert store_dtype(z, HALF, eight_bits=True) == torch.int8
    for solver, kept in [(gdeq.Broyden(3), torch.bfloat16), (broyden(3, 1e-3), torch.int8)]:
        arguments = [5], z.dtype, solver, HALF, 3, None
        assert PlainSweep(z, *arguments).steps.dtype == kept
        assert product.Sweep(z.to(DEVICE), *arguments).steps.dtype == kept
    for bits in [7, 32, "8", True]:
        with pytest.raises((TypeError, ValueError), match="step_bits"):
            gdeq.Broyden(3, step_bits=bits)


@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_a_solve_under_autocast(tol):
    """The store grows, samples end at different steps, and the inverse is the plain form's."""
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
    for kind in ["off", "plain", "triton"]:
        with choice.use(kind), torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
            found[kind] = gdeq.solve(f, z0, broyden(11 if tol else 5, tol))
    inverse = found["triton"].inverse.vectors
    assert isinstance(inverse, ProductInverse)
    assert inverse.steps.dtype == torch.int8
    assert [t.dtype for t in inverse.stored] == [torch.int8, torch.float32]
    assert inverse.scales.sizes == (70, 46)
    assert inverse.scales.values.shape == (3, inverse.rank + 1, 2 + 1)
    if tol:
        assert inverse.rank > 8
    with choice.use("triton"):
        kernels = found["triton"].inverse.rmatvec(x)
    with choice.use("plain"):
        assert_near(kernels, found["triton"].inverse.rmatvec(x), 1e-4)
    exact = found["off"]
    for kind in ["plain", "triton"]:
        assert (found[kind].residual <= 2 * exact.residual + HALF).all()
        assert found[kind].converged.tolist() == exact.converged.tolist()


# --- how good it is -------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "bound"), [("f32", 1e-4), ("bf16", 0.01), ("int8", 0.05)])
def test_the_inverse_meets_its_newest_secant_equation(form, monkeypatch, store, bound):
    """B⁻¹y = s for the last step, up to the rounding of that step."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[store]
    for module in (product, gdeq.fast.product):
        monkeypatch.setattr(module, "store_dtype", lambda *_: dtype)
    if store != "int8":
        monkeypatch.setattr(gdeq.fast.product, "PlainSweep", PlainSweep)
    torch.manual_seed(0)
    matrix = 0.6 * torch.randn(144, 144, device=DEVICE) / 12
    x = torch.randn(2, 144, device=DEVICE)
    seen = []

    def f(z):
        seen.append((z.clone(), torch.tanh(z @ matrix.T) + x))
        return seen[-1][1]

    with choice.use(form):
        found = gdeq.solve(f, torch.zeros_like(x), gdeq.Broyden(8, 0.0))
    (z_before, f_before), (z, f_z) = seen[-2:]
    s, y = z - z_before, (f_z - z) - (f_before - z_before)
    assert found.inverse.vectors.keep[:, 7].all()
    missed = (found.inverse.matvec(y) - s).norm(dim=1) / s.norm(dim=1)
    assert missed.max() < bound
    if store == "int8":
        assert missed.max() > 1e-3  # it is this store that was looked at


def test_steps_in_eight_bits_do_not_spoil_the_gradient(form):
    """An f with the rounding of bfloat16: as near to the exact gradient as without this store."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 192).to(DEVICE)
    x = torch.randn(4, 192, device=DEVICE)

    def gradient(kernels):
        layer.zero_grad()
        with (
            choice.use(kernels),
            torch.autocast(DEVICE.type, torch.bfloat16, enabled=kernels != ""),
        ):
            solution = gdeq.fixed_point(
                lambda z: torch.tanh(layer(z) + x), torch.zeros_like(x), broyden(9, 0.0)
            )
            (solution.z * torch.linspace(-1, 1, 192, device=DEVICE)).sum().backward()
        if kernels == form:
            assert solution.inverse.vectors.steps.dtype == torch.int8
        return layer.weight.grad.flatten().clone()

    with choice.use("off"):
        solution = gdeq.fixed_point(
            lambda z: torch.tanh(layer(z) + x),
            torch.zeros_like(x),
            gdeq.Broyden(60, 1e-6),
            gdeq.Implicit(gdeq.Broyden(60, 1e-6)),
        )
        (solution.z * torch.linspace(-1, 1, 192, device=DEVICE)).sum().backward()
        exact = layer.weight.grad.flatten().clone()
    plain, found = gradient("off"), gradient(form)

    def angle(a):
        return 1 - torch.nn.functional.cosine_similarity(a, exact, dim=0)

    assert angle(found) < 1.2 * angle(plain) + 1e-3


@pytest.mark.parametrize("sizes", [ANY_SIZES, ROUND_SIZES], ids=["any size", "multiples of 16"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_refinement_reads_them_too(sizes, times):
    steps, batch, d = 6, 4, sum(sizes)
    sweep, _ = driven(product.Sweep, torch.float32, steps, sizes)
    inverse = sweep.settle(steps).inverse
    assert inverse.scales is not None
    matrix = (0.7 * torch.randn(d, d) / d**0.5).to(DEVICE)
    v = torch.randn(batch, d, device=DEVICE)
    found = []
    for form in ("plain", "triton"):
        with choice.use(form), torch.no_grad():
            w = inverse.T.negative_matvec(v)
            how = Refinement(times, 1e-3, 3.0, 1.5, 2.0, 3.0)
            refined = inverse.T.refined(w, v, lambda u: u @ matrix, how)
            assert (refined is None) == (form == "plain")
            if refined is None:
                refined = gradients._refine(w, v, lambda u: u @ matrix, inverse.T, how)
            found.append(refined[0])
    assert_near(found[1], found[0], 1e-5)
