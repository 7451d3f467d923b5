"""The switches of `gdeq.fast.kernels.product`: how the kernels go about it, not what they compute.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import gdeq
from gdeq import gradients
from gdeq.fast.kernels import choice
from gdeq.fast.product import PlainSweep
from gdeq.operators import Refinement
from gdeq.solution import Status
from problems import assert_near
from sweeps import ledger_of

pytest.importorskip("triton")
from gdeq.fast.kernels import product, product_apply, refinement, state
from gdeq.fast.kernels.product_judge import STEPS

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
            solution = gdeq.solve(f, z0, gdeq.Broyden(6, 0.0))
            inverse = solution.inverse
            found[backwards] = solution.z, inverse.matvec(x), inverse.rmatvec(x)
    for a, b in zip(found[True], found[False], strict=True):
        assert_near(a, b, 1e-9)
    assert not torch.equal(found[True][0], found[False][0])  # the switch does something


def test_more_chunks_than_are_summed_at_once(monkeypatch):
    """Verdicts, products with the inverse and refinements take the sums of 32 chunks at a time."""
    monkeypatch.setattr(product, "tuning", replace(product.tuning, block=16))
    for module in (product_apply, refinement):
        monkeypatch.setattr(module, "BLOCK", 16)
    f, z0 = bumpy(torch.float64, batch=1, d=33 * 16 + 2)
    x = torch.randn_like(z0)

    def vjp(u):
        return 0.5 * u.roll(7, dims=1)

    found = {}
    for form in ("plain", "triton"):
        with choice.use(form), torch.no_grad():
            solution = gdeq.solve(f, z0, gdeq.Broyden(3, 0.0))
            inverse = solution.inverse.vectors
            reused = inverse.T.negative_matvec(x)
            how = Refinement(2, 1e-16, 3.0, 1.5, 2.0, 3.0)
            w = inverse.T.refined(reused, x, vjp, how)
            assert (w is None) == (form == "plain")
            if w is None:
                w = gradients._refine(reused, x, vjp, inverse.T, how)
            found[form] = solution.z, solution.trace, inverse.matvec(x), reused, w
    for a, b in zip(found["triton"], found["plain"], strict=True):
        assert_near(a, b, 1e-9)


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
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
        weigh = gdeq.fast.product.transposed_weights if transposed else gdeq.fast.product.weights
        weight = weigh(dots, inverse.gram, inverse.keep)
        assert_near(expected, -(x + torch.einsum("bj,bjd->bd", weight, inverse.steps)), 1e-10)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_no_weight_needs_of_the_gram_matrix_may_hold_anything(transposed):
    """Products of the last step, which are not known yet, and those of a factor that is skipped."""
    f, z0 = bumpy(torch.float64)
    x = torch.randn_like(z0)
    steps, skipped = 12, 4  # more than are under way from memory at once
    with choice.use("triton"):
        inverse = gdeq.solve(f, z0, gdeq.Broyden(steps, 0.0)).inverse.vectors
        inverse.keep[:, skipped - 1 : skipped + 1] = False
        inverse = inverse.T if transposed else inverse
        gram = inverse.gram.clone()
        for place in (skipped, steps):
            gram[:, place] = gram[:, :, place] = torch.nan
        found = replace(inverse, gram=gram).matvec(x)
        assert torch.equal(found, inverse.matvec(x))
    with choice.use("plain"):
        assert_near(found, inverse.matvec(x), 1e-10)


HALF = torch.finfo(torch.bfloat16).eps


def drive(kind, dtype, solver, precision, steps, **fields):
    """A sweep by hand; at the fourth call the last sample is lost, and the first is solved soon."""
    f, z0 = bumpy(dtype, batch=4)
    parts = torch.bfloat16 if precision == HALF and dtype == torch.float32 else dtype
    sweep = kind(z0, [z0.shape[1]], parts, solver, precision, steps, None)
    for name, value in fields.items():
        setattr(sweep, name, value)
    for t in range(steps + 1):
        fz = f(sweep.parts.view_as(z0).to(dtype)).to(parts)
        fz[0] = 0.5
        if t >= 3:
            fz[-1] = torch.nan
        sweep.take(t, fz.reshape(-1))
    return sweep


def noted(sweep):
    known = sweep.gram, sweep.keep, sweep.weight, sweep.lead, sweep.moves
    made = torch.arange(sweep.steps.shape[1], device=DEVICE) <= sweep.whole[STEPS].unsqueeze(1)
    settled = sweep.settle(sweep.max_steps)[:5]  # and with it the trace
    known = *known, sweep.real, sweep.whole, sweep.trace, sweep.arrived, sweep.unfinished
    return sweep.steps[made], *known, *(x for x in settled if x is not None)


def assert_same_bits(a, b):
    for x, y in zip(noted(a), noted(b), strict=True):
        assert torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0))


class Counted:
    """A kernel, and how often it was launched."""

    def __init__(self, kernel):
        self.kernel, self.launched = kernel, 0

    def __getitem__(self, grid):
        self.launched += 1
        return self.kernel[grid]


class Watched(TorchDispatchMode):
    """The kernels, and those operations that are more than a view or room for numbers."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = []
        for module, name in [(product, "_dots"), (product, "_step"), (product, "_settle")]:
            monkeypatch.setattr(module, name, self.kernel(getattr(module, name), name))
        monkeypatch.setattr(state, "_move", self.kernel(state._move, "_move"))

    def kernel(self, kernel, name):
        watched = self

        class Launched:
            def __getitem__(self, grid):
                def launch(*args, **kwargs):
                    watched.seen.append(name)
                    with _disable_current_modes():  # the interpreter has operations of its own
                        kernel[grid](*args, **kwargs)

                return launch

        return Launched()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

    def lately(self):
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_an_iterate_is_two_kernels_and_the_end_is_one(monkeypatch, tol):
    z, sizes, solver = torch.zeros(2, 150, device=DEVICE), [100, 50], gdeq.Broyden(4, tol)
    f = torch.linspace(0, 1, 300, device=DEVICE).bfloat16()
    table = product.table(tuple(sizes), product.tuning.block, z.device)  # kept for ever
    state.split_buffer(z, sizes, torch.bfloat16)  # its table too
    with Watched(monkeypatch) as watched:
        sweep = product.Sweep(z, sizes, torch.bfloat16, solver, HALF, 4, None)
        assert watched.lately() == ["_move", "zeros"] + ["full"] * (tol > 0)
        assert sweep.table is table
        for t in range(2):
            sweep.take(t, f * t)
            assert watched.lately() == ["mul", "_dots", "_step"]
        sweep.prepare_repetition()
        sweep.judge_next(f)
        sweep.go_on()
        assert watched.lately() == ["_dots", "_step"]
        sweep.go_back()
        assert watched.lately() == ["_settle"]
        found = sweep.settle(2)
        assert watched.lately() == ["_settle"]
    assert found.parts is sweep.parts
    assert (found.z is None) == (tol == 0)  # in parts alone
    if found.z is not None:
        assert torch.equal(found.parts, state.split_buffer(found.z, sizes, torch.bfloat16))
    assert not z.any()


@pytest.mark.parametrize("stop", ["relative", "absolute"])
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_what_is_settled_is_what_the_ledger_says(tol, stop):
    """Every code beside every kind of residual, where the first was 1."""
    codes = [Status.RUNNING, Status.CONVERGED, Status.ROUNDING]
    codes += [Status.NONFINITE, Status.NONFINITE_START]
    sizes = [0.0, 0.5, 0.9995, 1.0005, 1.5, torch.inf, torch.nan]
    made = torch.tensor([*itertools.product(map(int, codes), sizes, [1e-17, 0.1])])
    batch, steps, last = len(made), 5, 4
    z = torch.zeros(batch, 3, dtype=torch.float64, device=DEVICE)
    solver, sizes = gdeq.Broyden(steps, tol, stop=stop), [1, 1, 1] if stop == "relative" else [3]
    sweep = product.Sweep(z, sizes, z.dtype, solver, 1e-16, steps, None)
    sweep.z = torch.full_like(z, 100.0)
    sweep.steps = torch.ones(batch, steps + 1, 3, dtype=z.dtype, device=DEVICE)
    sweep.keep.fill_(1)
    sweep.trace.fill_(7.0)
    code, absolute, relative = made.to(DEVICE, z.dtype).T
    one = torch.ones_like(relative)
    rows = [absolute, relative, one, one, one, 0.25 * one, 0.125 * one]
    if stop == "relative":  # parts and those of the best iterate, with room for four
        rows += [i * one for i in range(8)]
    sweep.real = torch.stack(rows)
    sweep.whole = torch.stack([0 * one, code, last * one, 2 * one]).int()
    ledger = ledger_of(sweep)
    codes, residual, parts, at = ledger.finish()
    found = sweep.settle(steps)
    assert (found.of_parts is None) == (stop == "absolute")
    if parts is not None:
        assert torch.equal(found.of_parts, parts)
    assert torch.equal(found.codes, codes)
    assert len(codes.unique()) >= 7
    assert torch.equal(found.residual.nan_to_num(-1), residual.nan_to_num(-1))
    assert torch.equal(found.steps, ledger.steps)
    back = at < last
    assert back.any()
    assert not back.all()
    assert torch.equal(found.z, torch.where(back, at, 100).unsqueeze(1).expand_as(z).double())
    place = torch.arange(sweep.places, device=DEVICE)
    assert torch.equal(found.inverse.keep, place < at.unsqueeze(1))
    assert (sweep.trace[:last] == 7).all()
    assert torch.equal(sweep.trace[last].nan_to_num(-1), ledger.residual.nan_to_num(-1))


@pytest.mark.parametrize(
    ("dtype", "precision", "tol", "stop"),
    [
        (torch.float64, 2.2e-16, 0.0, "relative"),
        (torch.float64, 2.2e-16, 1e-3, "absolute"),
        (torch.float32, 1.2e-7, 1e-3, "relative"),
        (torch.float32, HALF, 0.0, "relative"),
        (torch.float32, HALF, 1e-3, "absolute"),
    ],
)
def test_who_judges_changes_no_bit(monkeypatch, dtype, precision, tol, stop):
    solver = gdeq.Broyden(5, tol, stop=stop)
    apart = Counted(product._judge)
    monkeypatch.setattr(product, "_judge", apart)
    few(monkeypatch, judge_in_dots=True)
    found = drive(product.Sweep, dtype, solver, precision, 5)
    assert apart.launched == 0
    assert not found.arrived.any()
    few(monkeypatch, judge_in_dots=False)
    expected = drive(product.Sweep, dtype, solver, precision, 5)
    assert apart.launched == 6
    assert_same_bits(found, expected)


def test_more_than_one_warp_does_not_judge(monkeypatch):
    apart = Counted(product._judge)
    monkeypatch.setattr(product, "_judge", apart)
    few(monkeypatch, judge_in_dots=True, dots_warps=2)
    drive(product.Sweep, torch.float64, gdeq.Broyden(3, 0.0), 2.2e-16, 3)
    assert apart.launched == 4


def test_the_change_of_g_from_inner_products_decides_as_the_measured_one(monkeypatch):
    """Then all the rest is the same too; also beside samples that are solved, or lost."""
    solver, steps = gdeq.Broyden(12, 1e-3), 12
    few(monkeypatch, change_from_dots=True)
    found = drive(product.Sweep, torch.float32, solver, HALF, steps)
    assert found.last_fz is found.parts  # nothing is kept of f
    few(monkeypatch, change_from_dots=False)
    measured = drive(product.Sweep, torch.float32, solver, HALF, steps)
    assert measured.last_fz is not measured.parts
    assert_same_bits(found, measured)
    assert_kept_for_a_while(found.keep[:, :steps])


def test_the_change_of_g_from_inner_products_is_that_of_the_plain_form(monkeypatch):
    """In float64, where it could be measured as well, and with the noise guard of bfloat16."""
    solver, steps = gdeq.Broyden(12, 0.0), 12
    few(monkeypatch)
    found = drive(product.Sweep, torch.float64, solver, HALF, steps, measured=False)
    plain = drive(PlainSweep, torch.float64, solver, HALF, steps)
    assert torch.equal(found.keep[:, :steps] != 0, plain.keep[:, :steps])
    assert_kept_for_a_while(plain.keep[:, :steps])
    assert_near(found.z, plain.z, 1e-9)
    assert_near(found.gram[:, :steps, :steps], plain.gram[:, :steps, :steps], 1e-9)
    assert ledger_of(found).codes.tolist() == plain.ledger.codes.tolist()


@pytest.mark.parametrize("measured", [True, False])
def test_the_change_of_g_to_six_digits(monkeypatch, measured):
    """A noise guard just below it keeps the factor, one just above does not."""
    solver, steps, sample, seen = gdeq.Broyden(6, 0.0), 6, 2, []

    class Seen(PlainSweep):
        def _learn(self, t, g, fz, good, absolute, of_z):
            y = fz - self.last_fz - self.steps[:, t - 1]
            seen.append((y.norm(dim=1) / (of_z + absolute))[sample].item())
            return super()._learn(t, g, fz, good, absolute, of_z)

    few(monkeypatch)
    drive(Seen, torch.float64, solver, 2.2e-16, steps)
    assert seen == sorted(seen, reverse=True)
    for factor in [1, 4, 5]:
        for side, kept in [(1 - 1e-6, factor + 1), (1 + 1e-6, factor)]:
            monkeypatch.setattr(product, "noise_level", lambda _, at=seen[factor] * side: at)
            fields = {"measured": measured}
            found = drive(product.Sweep, torch.float64, solver, 2.2e-16, factor + 1, **fields)
            assert found.keep[sample, : factor + 1].sum() == kept


def assert_kept_for_a_while(keep):
    """The noise guard has had its say: each sample learns at first, and then no more."""
    kept = keep.bool().sum(1)
    assert (kept > 0).all()
    assert (kept < keep.shape[1]).all()
    assert len(kept.unique()) > 2


def test_the_change_of_g_is_measured_where_steps_are_not_rounded(monkeypatch):
    few(monkeypatch, change_from_dots=True)
    sweep = drive(product.Sweep, torch.float32, gdeq.Broyden(2, 0.0), 1.2e-7, 2)
    assert sweep.measured
    assert sweep.last_fz is not sweep.parts


def flies_away(dtype, slope, far):
    """g = 1 − slope·z near 0, so the second step leads far away, where g is ``far``."""

    def f(z):
        g = torch.where(z.abs() < 100, 1 - slope * z, far * torch.ones_like(z))
        g[1] = 0.5 * torch.cos(z[1]) - z[1]  # beside a sample that converges
        return z + g

    return f, torch.zeros(2, 5, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("form", ["plain", "triton"])
@pytest.mark.parametrize(
    ("dtype", "slope", "far"),
    [(torch.float64, 1e-6, 0.5), (torch.float32, 3e-6, 0.0)],
    ids=["g is still large", "g vanishes in rounding"],
)
def test_a_far_iterate_is_not_taken_for_a_solution(form, dtype, slope, far):
    """Beside a z that ran away any g is small: one test each for the two signs of it."""
    f, z0 = flies_away(dtype, slope, far)
    precision, tol = torch.finfo(dtype).eps, 1e-3
    solver = gdeq.Broyden(3, tol)
    kind = product.Sweep if form == "triton" else PlainSweep
    sweep = kind(z0, [5], dtype, solver, precision, 3, None)
    for t in range(3):
        sweep.take(t, f(sweep.z).reshape(-1))
    ledger = ledger_of(sweep)
    assert ledger.relative[0] <= tol  # it looks converged
    assert sweep.z[0].abs().min() > 1e4
    assert ledger.codes.tolist() == [int(gdeq.Status.RUNNING)] * 2
    assert ledger.active.all()
    with choice.use("off"):
        expected = gdeq.solve(f, z0, gdeq.Broyden(20, tol))
    with choice.use(form):
        found = gdeq.solve(f, z0, gdeq.Broyden(20, tol))
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.converged.tolist() == [False, True]
    assert found.steps.tolist() == expected.steps.tolist()
