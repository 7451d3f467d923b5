"""A sweep driven by hand: each thing that its kernels note, against the oracle and the ledger."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import gdeq
from gdeq import Anderson, Broyden, Status
from gdeq.fast.eight_bits import Scales
from gdeq.fast.product import Start
from problems import Dense, assert_near

pytest.importorskip("triton")
from gdeq.fast.kernels import inverse, refinement, state
from gdeq.fast.kernels import sweep as fused
from gdeq.fast.kernels.verdict import BEST_STEP, CODE
from gdeq.refinement import Refinement, refine
from oracles import sweep as oracle
from sweeps import DEVICE, FORMS, drive, kept, ledger_of, rows_of, start_at, sweep, use

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HALF = torch.finfo(BF16).eps
ROUNDS_DOWN = DEVICE.type == "cpu"  # the interpreter, from float32 to bfloat16
BLOCK = 64
ANY_SIZES, ROUND_SIZES = [70, 3, 33], [80, 16]  # a full chunk, and some that are not
BOTH = pytest.mark.parametrize(
    "sizes", [ANY_SIZES, ROUND_SIZES], ids=["any size", "multiples of 16"]
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", BLOCK)
    monkeypatch.setattr(oracle.PlainSweep, "block", BLOCK)


@pytest.fixture
def in_eight_bits(monkeypatch):
    """In float64 too, where the two forms differ by no more than a rare rounding."""
    monkeypatch.setattr(Start, "store_dtype", torch.int8)


def eight(steps, tol):
    return Broyden(steps, tol, step_bits=8)


class Bumpy:
    """Samples differ in difficulty; the first is solved soon, the last lost at the fourth call."""

    def __init__(self, d, dtype, batch=4, lost=3):
        make = torch.Generator().manual_seed(0)
        matrix = torch.randn(d, d, dtype=F64, generator=make) / d**0.5
        shift = torch.randn(batch, d, dtype=F64, generator=make)
        strength = torch.linspace(0.3, 1.5, batch, dtype=F64).unsqueeze(1)
        made = (x.to(DEVICE, dtype) for x in (matrix, shift, strength))
        (self.matrix, self.shift, self.strength), self.lost = made, lost

    @property
    def z0(self):
        return torch.zeros_like(self.shift)

    def __call__(self, t, z):
        fz = torch.tanh(self.strength * (z.to(self.shift.dtype) @ self.matrix.T) + self.shift)
        fz[0] = 0.5
        if t >= self.lost:
            fz[-1] = torch.nan
        return fz.to(z.dtype)


def driven(form, dtype, solver, sizes, precision=HALF, given=None, repeated=False, lost=3):
    """A sweep after all its evaluations, and the iterates that f was given."""
    f = Bumpy(sum(sizes), dtype, lost=lost)
    made = sweep(form, f.z0, solver, precision=precision, sizes=sizes, given=given)
    return made, drive(made, f, solver.max_iter + 1, repeated)


def scales_of(made):
    return made.scales.values if isinstance(made.scales, Scales) else made.scales


# --- the oracle and the kernels -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "solver", "sizes", "stored"),
    [
        (F64, eight(9, 1e-3), ANY_SIZES, torch.int8),
        (F64, eight(9, 0.0), ROUND_SIZES, torch.int8),
        (F64, Broyden(12, 0.0), [150], F64),
        (F32, eight(6, 0.0), ANY_SIZES, None),
        (F32, eight(6, 0.0), ROUND_SIZES, None),
        (F32, Broyden(6, 1e-3), ANY_SIZES, F32),
        (F32, Anderson(6, 0.0), ROUND_SIZES, F32),
    ],
    ids=str,
)
def test_the_kernels_do_as_the_oracle(dtype, solver, sizes, stored, monkeypatch):
    """With samples that are solved or lost, and (by the noise guard of bf16) factors skipped."""
    if stored is not None:
        monkeypatch.setattr(Start, "store_dtype", stored)
    steps, n = solver.max_iter, solver.max_iter + 1
    (plain, _), (found, _) = (driven(form, dtype, solver, sizes) for form in FORMS)
    assert found.steps.dtype == plain.steps.dtype
    assert found.steps.shape[1] >= n or solver.tol  # with a tolerance it grows
    assert torch.equal(kept(found)[:, :steps], kept(plain)[:, :steps])
    if steps > 6:
        assert len(kept(plain)[:, :steps].sum(1).unique()) > 2
    made = torch.arange(n, device=DEVICE) <= plain.ledger.steps.unsqueeze(1)
    made[:, -1] &= found.inverts  # else nobody takes that step
    accuracy = 1e-5 if dtype == F64 else 2e-2
    steps_of, expected = found.steps[:, :n][made], plain.steps[made]
    if found.steps.dtype == torch.int8:
        apart = (steps_of.int() - expected.int()).abs()
        assert apart.max() <= 1  # of two numbers that are equally near, either
        assert (apart != 0).sum() <= 2 or dtype == F32
        assert_near(scales_of(found)[:, :n][made], scales_of(plain)[made], accuracy)
    else:
        assert_near(steps_of.double(), expected.double(), accuracy)
    if isinstance(solver, Broyden):
        gram, expected = found.samples.gram[:, :steps, :steps], plain.gram[:, :steps, :steps]
        assert_near(gram.tril()[made[:, 1:]], expected.tril()[made[:, 1:]], accuracy)
    settled, expected = found.settle(steps), plain.settle(steps)
    assert settled.codes.tolist() == expected.codes.tolist()
    assert settled.steps.tolist() == expected.steps.tolist()
    for a, b in [
        (settled.residual, expected.residual),
        (settled.z, expected.z),
        (settled.trace, expected.trace),
    ]:
        assert_near(a, b, accuracy)
    if settled.inverse is None:
        return
    assert torch.equal(settled.inverse.keep[:, :steps], expected.inverse.keep[:, :steps])
    x = torch.randn_like(settled.z)
    for a, b in [
        (settled.inverse, expected.inverse),
        (settled.inverse.T, expected.inverse.T),
    ]:
        with use("fast"):
            one = a.matvec(x)
        with use("oracle"):
            assert_near(one, b.matvec(x), 10 * accuracy)
            assert_near(one, a.matvec(x), 1e-10 if dtype == F64 else 1e-4)  # the same store


@pytest.mark.parametrize(
    ("stop", "parts", "tol"),
    [("relative", 3, 0.0), ("relative", 3, 1e-3), ("relative", 1, 1e-3), ("absolute", 3, 1e-3)],
)
def test_what_is_settled_is_what_the_ledger_says(stop, parts, tol):
    """Every code beside every kind of residual, where the first was 1."""
    codes = [Status.RUNNING, Status.CONVERGED, Status.ROUNDING]
    codes += [Status.NONFINITE, Status.NONFINITE_START]
    sizes = [0.0, 0.5, 0.9995, 1.0005, 1.5, torch.inf, torch.nan]
    noted = torch.tensor([*itertools.product(map(int, codes), sizes, [1e-17, 0.1])])
    batch, steps, last = len(noted), 5, 4
    z = torch.zeros(batch, 3, dtype=F64, device=DEVICE)
    solver = Broyden(steps, tol, stop=stop)
    made = sweep("fast", z, solver, precision=1e-16, sizes=[1, 1, 1] if parts == 3 else [3])
    judged = parts == 3 and stop == "relative"
    made.z = torch.full_like(z, 100.0)
    made.parts = made.z.view(-1) if parts == 1 else made.parts
    made.steps = torch.ones(batch, steps + 1, 3, dtype=F64, device=DEVICE)
    made.store = made.store._replace(steps=made.steps, words=made.steps)
    samples = made.samples
    samples.keep.fill_(1)
    samples.trace.fill_(7.0)
    code, absolute, relative = noted.to(DEVICE, F64).T
    one = torch.ones_like(relative)
    rows = [absolute, relative, one, one, one, 0.25 * one, 0.125 * one]
    if judged:  # parts and those of the best iterate, with room for four
        rows += [i * one for i in range(8)]
    samples.real.copy_(torch.stack(rows))
    samples.whole.copy_(torch.stack([0 * one, code, last * one, 2 * one]))
    ledger = ledger_of(made)
    codes, residual, of_parts, at = ledger.finish()
    found = made.settle(steps)
    assert (found.of_parts is not None) == judged
    if judged:
        assert torch.equal(found.of_parts, of_parts)
    assert torch.equal(found.codes, codes)
    assert len(codes.unique()) >= 7
    assert torch.equal(found.residual.nan_to_num(-1), residual.nan_to_num(-1))
    assert torch.equal(found.steps, ledger.steps)
    back = at < last
    assert back.any()
    assert not back.all()
    assert torch.equal(found.z, torch.where(back, at, 100).unsqueeze(1).expand_as(z).double())
    place = torch.arange(made.places, device=DEVICE)
    assert torch.equal(found.inverse.keep, place < at.unsqueeze(1))
    assert (samples.trace[:last] == 7).all()
    assert torch.equal(samples.trace[last].nan_to_num(-1), ledger.residual.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.usefixtures("in_eight_bits")
def test_going_back_gives_the_bits_of_the_iterate(form, dtype):
    """By the additions of the solve: what is stored is what was added."""
    made, seen = driven(form, dtype, eight(6, 1e-30), ANY_SIZES)
    for at in [[0, 1, 2, 2], [5, 4, 3, 1]]:
        one, best = copy.deepcopy(made), torch.tensor(at, device=DEVICE)
        if form == "oracle":
            one.ledger.best_step, one.ledger.codes = best, torch.zeros_like(best) + Status.RUNNING
        else:
            one.samples.whole[CODE], one.samples.whole[BEST_STEP] = int(Status.RUNNING), best.int()
        found = one.settle(6)
        for sample, step in enumerate(at):
            assert torch.equal(found.z[sample], seen[step][sample])
            assert not found.inverse.keep[sample, step:].any()


@pytest.mark.parametrize("solver", [Broyden(9, 1e-5), Broyden(9, 1e-14), Anderson(9, 1e-3)])
def test_repeated_steps_are_the_counted_ones(solver):
    """What a recording repeats, played by hand: the number of the iterate is on the device."""
    problem = Dense(radius=0.9).to(DEVICE)
    z = torch.zeros_like(problem.x)
    with use("fast"), torch.no_grad():
        expected = gdeq.solve(problem, z, solver)
        with pytest.MonkeyPatch.context() as patch:  # as in a recording
            patch.setattr(fused, "host_may_look", lambda device: False)
            made = sweep("fast", z, solver)
        made.take(0, problem(made.z).reshape(-1))
        made.prepare_repetition()
        played = 0
        while played < 9 and made.unfinished.item():
            made.judge_next(problem(made.z).reshape(-1))
            made.go_on()
            played += 1
        found = made.settle(9)
        assert found.codes.tolist() == expected.codes.tolist()
        assert found.steps.tolist() == expected.steps.tolist()
        assert played == int(expected.steps.max())
        assert_near(found.z, expected.z, 1e-12)
        assert_near(found.residual, expected.residual, 1e-12)
        assert_near(found.trace[:played], expected.trace, 1e-12)
        assert not z.any()  # the first iterate is left as it was
        if found.inverse is not None:
            x = torch.randn_like(z)
            assert_near(found.inverse.rmatvec(x), expected.inverse.rmatvec(x), 1e-10)


def test_repeated_steps_in_eight_bits_are_the_counted_ones():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "host_may_look", lambda device: False)
        (a, _), (b, _) = (
            driven("fast", F32, eight(5, 1e-3), ANY_SIZES, repeated=r) for r in (False, True)
        )
    assert torch.equal(a.z, b.z)
    made = torch.arange(6, device=DEVICE) <= ledger_of(a).steps.unsqueeze(1)
    assert torch.equal(a.steps[made], b.steps[made])
    assert torch.equal(a.scales[made], b.scales[made])
    assert a.left() == b.left() == 2
    one, other = a.settle(5), b.settle(5)
    for name in ("z", "residual", "steps", "codes", "trace"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_of_a_sample_that_is_done_no_steps_are_read():
    z = torch.zeros(2, 5, dtype=F64, device=DEVICE)
    shift = torch.linspace(-1, 1, 5, dtype=F64, device=DEVICE)
    made = sweep("fast", z, Broyden(7, 1e-9))
    for t in range(6):
        if t == 3:
            made.steps[0] = torch.nan
        fz = torch.cos(made.z + shift)
        fz[0] = 0.5  # found by the first step
        made.take(t, fz.reshape(-1))
    assert made.samples.gram.isfinite().all()
    assert not made.arrived.any()
    assert ledger_of(made).codes.tolist() == [Status.CONVERGED, Status.RUNNING]
    assert ledger_of(made).steps.tolist() == [1, 5]
    assert made.left() == 1
    assert (made.z[0] == 0.5).all()
    assert made.steps[0].isnan().all()  # nor written
    assert (made.settle(5).trace[:5, 0] == 0).all()
    assert (made.z[0] == 0.5).all()


def test_a_lost_step_in_the_store_does_not_reach_the_next():
    """Its weight is 0, and 0 times infinity is not."""
    steps, lost, found = 5, 3, {}
    for value in [0.25, torch.inf]:
        f = Bumpy(sum(ANY_SIZES), F32)
        made = sweep("fast", f.z0, eight(steps, 0.0), precision=HALF, sizes=ANY_SIZES)
        for t in range(steps + 1):
            drive_one(made, f, t)
            made.samples.keep[:, lost - 1 : lost + 1] = 0
            if t > lost:  # it has been judged
                made.scales[:, lost, 1] = value
        found[value] = made.samples.weight[:, lost], made.z
    assert not found[torch.inf][0].any()
    assert torch.equal(found[0.25][1], found[torch.inf][1])
    assert found[torch.inf][1].isfinite().all()


def drive_one(made, f, t):
    sizes = made.start.sizes
    fz = f(t, rows_of(made.parts, sizes))
    made.take(t, torch.cat([part.reshape(-1) for part in fz.split(sizes, dim=1)]))


# --- the change of g ------------------------------------------------------------------------------


def test_the_change_of_g_is_measured_only_where_steps_are_not_rounded():
    for precision, measured in [(HALF, False), (2.0**-23, True)]:
        made, _ = driven("fast", F32, Broyden(2, 1e-9), [8, 8], precision)
        assert made.measured is measured
        assert (made.last_fz is not made.parts) == measured  # else nothing is kept of f


@pytest.mark.parametrize("measured", [True, False])
def test_the_change_of_g_to_six_digits(monkeypatch, measured):
    """A noise guard just below it keeps the factor, one just above does not."""
    sample, seen = 2, []
    learn = oracle.PlainSweep._learn

    def watched(self, t, g, fz, good, absolute, of_z):
        seen.append(((g - self.last_g).norm(dim=1) / (of_z + absolute))[sample].item())
        return learn(self, t, g, fz, good, absolute, of_z)

    monkeypatch.setattr(oracle.PlainSweep, "_learn", watched)
    driven("oracle", F64, Broyden(6, 0.0), [150], 2.2e-16)
    assert seen == sorted(seen, reverse=True)
    build = fused.Sweep.__init__

    def built(made, *args, **more):
        build(made, *args, **more)
        made.measured = measured
        made.kind = made.kind._replace(MEASURED=measured)

    monkeypatch.setattr(fused.Sweep, "__init__", built)
    for factor in [1 if measured else 4]:
        for side, count in [(1 - 1e-6, factor + 1), (1 + 1e-6, factor)]:
            monkeypatch.setattr(fused, "noise_level", lambda _, at=seen[factor] * side: at)
            made, _ = driven("fast", F64, Broyden(factor + 1, 0.0), [150], 2.2e-16)
            assert kept(made)[sample, : factor + 1].sum() == count


def test_the_change_of_g_is_known_from_all_steps(monkeypatch):
    """‖y‖ by inner products that are at hand; of a map whose g hardly changes, a close decision."""
    monkeypatch.setattr(fused, "BLOCK", 512)
    monkeypatch.setattr(oracle.PlainSweep, "block", 512)
    make = torch.Generator().manual_seed(0)
    matrix = 0.97 * torch.eye(512) + 0.09 * torch.randn(512, 512, generator=make) / 512**0.5
    matrix, shift = matrix.to(DEVICE), torch.randn(8, 512, generator=make).to(DEVICE)
    found = []
    for form in FORMS:
        made = sweep(form, torch.zeros_like(shift), eight(8, 0.0), precision=HALF)
        drive(made, lambda t, z: (z @ matrix.T + shift).to(BF16).float(), 9)
        found.append(kept(made)[:, :8])
    assert 0 < found[0].sum() < found[0].numel()
    assert (found[1] != found[0]).sum() <= 1


# --- z in bfloat16 --------------------------------------------------------------------------------


SOLVERS = {"16 bits": Broyden(5, 0.0), "8 bits": eight(5, 0.0), "Anderson": Anderson(5, 0.0)}


@BOTH
@pytest.mark.parametrize("name", SOLVERS)
def test_the_kernels_round_z_as_the_oracle(name, sizes):
    solver = SOLVERS[name]
    (plain, expected), (found, seen) = (
        driven(form, F32, solver, sizes, given=BF16, lost=99) for form in FORMS
    )
    settled = found.settle(5)
    assert settled.z is None
    assert torch.equal(rows_of(settled.parts, sizes), seen[-1])
    for a, b in zip(seen, expected, strict=True):
        assert b.dtype == BF16
        if not ROUNDS_DOWN:  # but for sums in another order: here and there the next number
            assert (a != b).float().mean() < 0.2
        torch.testing.assert_close(a.float(), b.float(), rtol=4 * HALF, atol=12 * HALF)
    last = plain.settle(5)
    assert torch.equal(last.z, expected[-1].float())
    assert kept(found)[:, :5].sum() > 8
    if not ROUNDS_DOWN:
        assert torch.equal(kept(found)[:, :5], kept(plain)[:, :5])
    assert last.residual[:2].max() < 0.1  # as far as the noise of such numbers lets it


@pytest.mark.parametrize(
    ("solver", "given", "precision", "rounds", "stored"),
    [
        (Anderson(3, 0.0), BF16, HALF, True, BF16),
        (Anderson(3, 0.0, mixing=0.5), BF16, HALF, False, BF16),
        (Broyden(3, 0.0), BF16, HALF, True, BF16),
        (eight(3, 0.0), BF16, HALF, True, torch.int8),
        (Broyden(3, 1e-3), BF16, HALF, False, BF16),
        (eight(3, 1e-3), F32, HALF, False, torch.int8),
        (Broyden(3, 0.0), F16, 2.0**-10, False, BF16),
        (eight(3, 0.0), F32, 2.0**-23, False, F32),
        (eight(3, 0.0), F64, 2.0**-52, False, F64),
    ],
)
def test_what_is_rounded(solver, given, precision, rounds, stored):
    """z not with a tolerance, nor damped, nor in another precision; steps where f rounds."""
    z = torch.zeros(2, 8, device=DEVICE, dtype=F64 if given == F64 else F32)
    start = start_at(z, solver, precision=precision, given=given)
    assert start.rounds_z is rounds
    for form in FORMS:
        assert sweep(form, z, solver, precision=precision, given=given).steps.dtype == stored


def test_damped_steps_add_up_though_each_is_below_the_rounding_of_z(form):
    torch.manual_seed(0)
    matrix = 0.5 * torch.randn(64, 64, device=DEVICE) / 8
    x = torch.randn(2, 64, device=DEVICE)

    def f(z):
        return (torch.tanh(z.float() @ matrix.T) + x + 5).to(BF16)

    z0 = torch.zeros(2, 64, device=DEVICE, dtype=BF16)
    with use(form):
        found = gdeq.solve(f, z0, Anderson(40, 0.0, memory=1, mixing=0.1))
    z = found.z.float()
    away = (f(found.z).float() - z).norm(dim=1) / z.norm(dim=1)
    assert away.max() < 0.005


# --- how kernels are launched ---------------------------------------------------------------------


class Watched(TorchDispatchMode):
    """The kernels, and those operations that are more than a view or room for numbers."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = []
        for name in ("_dots", "_step", "_dots_and_step", "_settle"):
            monkeypatch.setattr(fused, name, self.kernel(getattr(fused, name), name))
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


@pytest.mark.parametrize(
    ("sizes", "kernels"), [([100, 50], ["_dots", "_step"]), ([60], ["_dots_and_step"])]
)
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_an_iterate_is_two_kernels_and_the_end_is_one(monkeypatch, tol, sizes, kernels):
    """Of a sample that is one chunk, one until it is repeated."""
    z = torch.zeros(2, sum(sizes), device=DEVICE)
    f = torch.linspace(0, 1, z.numel(), device=DEVICE).bfloat16()
    table = fused.table(tuple(sizes), BLOCK, z.device)  # kept for ever
    fused.bounds(tuple(sizes), BLOCK, z.device)
    state.split_buffer(z, sizes, BF16)  # its table too
    start = start_at(z, Broyden(4, tol), precision=HALF, sizes=sizes, given=BF16)
    with Watched(monkeypatch) as watched:
        made = fused.Sweep(start)
        assert watched.lately() == ["_move"] * (tol > 0) + ["full", "zeros"]
        assert made.table is table
        for t in range(2):
            made.take(t, f * t)
            assert watched.lately() == ["mul", *kernels]
        made.prepare_repetition()
        made.judge_next(f)
        made.go_on()
        assert watched.lately() == ["_dots", "_step"]
        made.go_back()
        assert watched.lately() == ["_settle"]
        found = made.settle(2)
        assert watched.lately() == ["_settle"]
    assert found.parts is made.parts
    assert (found.z is None) == (tol == 0)  # in parts alone
    if found.z is not None:
        assert torch.equal(found.parts, state.split_buffer(found.z, sizes, BF16))
    assert not z.any()


@pytest.mark.parametrize("tol", [0.0, 1e-12])
def test_no_step_is_made_that_nobody_takes(tol, monkeypatch):
    problem, steps = Dense(batch=2, radius=0.5).to(DEVICE), []
    move = fused.Sweep._make_room
    monkeypatch.setattr(
        fused.Sweep, "_make_room", lambda *args, **k: steps.append(move(*args, **k))
    )
    with use("fast"):
        gdeq.solve(problem, problem.z0, Anderson(3, tol))
        assert len(steps) == 3
        gdeq.solve(problem, problem.z0, Broyden(3, tol))
        assert len(steps) == 3 + 4  # its inverse has one more


def test_more_chunks_than_are_summed_at_once(monkeypatch):
    """Verdicts, products with the inverse and refinements take the sums of 32 chunks at a time."""
    for module in (fused, inverse):
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(oracle.PlainSweep, "block", 16)
    f = Bumpy(33 * 16 + 2, F64, batch=1)
    x = torch.randn_like(f.z0)
    found, how = {}, Refinement(2, 1e-16, growth=3.0)
    for form in FORMS:
        with use(form), torch.no_grad():
            solution = gdeq.solve(lambda z: torch.tanh(0.5 * z + f.shift), f.z0, Broyden(3, 0.0))
            known = solution.inverse.vectors
            w = known.T.negative_matvec(x)
            refined = refine_by(form, known.T, w, x, lambda u: 0.5 * u.roll(7, dims=1), how)
            found[form] = solution.z, solution.trace, known.matvec(x), w, refined.w
    for a, b in zip(*found.values(), strict=True):
        assert_near(a, b, 1e-9)


def refine_by(form, known, w, v, vjp, how):
    if form == "oracle":
        return refine(w, v, vjp, known, how)
    return refinement.refined(known, w, v, vjp, how)
