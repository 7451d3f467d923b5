"""Anderson's method from its steps alone, plain and as Triton kernels, against its readable form.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq import narrowing
from gdeq.fast.anderson_steps import AndersonSweep
from gdeq.fast.kernels import choice
from gdeq.solution import Status
from gdeq.solve import iterate
from pairs import pairs
from problems import Dense, Image, Multiscale, Named, Wide, assert_near, leaves, pack
from sweeps import ledger_of

pytest.importorskip("triton")
from gdeq.fast.kernels import product as fused

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["plain", "triton"])
def form(request):
    return request.param


@pytest.fixture(autouse=True)
def what_is_not_written_is_not_read(monkeypatch):
    build = fused.Sweep.__init__

    def built(sweep, *arguments, **more):
        build(sweep, *arguments, **more)
        for kept in (sweep.steps, sweep.coordinates, sweep.products, sweep.weight, sweep.partial):
            kept.fill_(torch.nan)

    monkeypatch.setattr(fused.Sweep, "__init__", built)


def both(form, work):
    with choice.use("off"):
        expected = work()
    with choice.use(form):
        found = work()
    return expected, found


def near(form, solver):
    """A kernel gets mixing and ridge in float32."""
    return 1e-9 if form == "plain" or solver.mixing == 1 else 1e-5


def assert_same(expected, found, accuracy):
    for a, b in zip(leaves(expected.z), leaves(found.z), strict=True):
        assert_near(b, a, accuracy)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.evals == expected.evals
    assert_near(found.trace, expected.trace, accuracy)
    assert_near(found.residual, expected.residual, accuracy)


class Names(Named):
    """More numbers than steps: else what is compared is the rounding of a solved problem."""

    template = {"slow": torch.empty(1, 9), "fast": torch.empty(1, 3, 5)}  # noqa: RUF012


KINDS = [Wide, Image, Multiscale, Names]
ROWS = pairs(KINDS, [1, 3, 5, 8, 16], [0.0, 1e-5], [1.0, 0.7])
INTERPRETED = [  # fewer: it is slow
    (Wide, 1, 0.0, 1.0),
    (Image, 3, 1e-5, 0.7),
    (Multiscale, 5, 0.0, 1.0),
    (Names, 8, 1e-5, 1.0),
    (Wide, 16, 1e-5, 0.7),
]


@pytest.mark.parametrize(
    ("form", "kind", "memory", "tol", "mixing"),
    [("plain", *row) for row in ROWS]
    + [("triton", *row) for row in (ROWS if CUDA else INTERPRETED)],
)
def test_iterates_and_verdicts_are_those_of_the_readable_form(form, kind, memory, tol, mixing):
    problem = kind(batch=2, radius=0.9).to(DEVICE)
    # With a tolerance more steps than the store has room for at first.
    solver = gdeq.Anderson(11 if tol else 8, tol, memory=memory, mixing=mixing)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert found.inverse is None
    assert_same(expected, found, near(form, solver))


def walker_ni(g, z, steps, memory, mixing, without=()):
    """z of one sample after each step: (d,).  Walker & Ni 2011, section 2, least squares by QR.

    without: differences that are not used, by their numbers.
    """
    iterates, values = [z], [g(z)]
    for t in range(steps):
        step = mixing * values[-1]
        if t:
            used = [i for i in range(max(0, t - memory), t) if i not in without]
            dz = torch.stack(iterates).diff(dim=0)[used].T
            dg = torch.stack(values).diff(dim=0)[used].T
            gamma = torch.linalg.lstsq(dg, values[-1].unsqueeze(1)).solution
            step = step - ((dz + mixing * dg) @ gamma).squeeze(1)
        iterates.append(iterates[-1] + step)
        values.append(g(iterates[-1]))
    return iterates[1:]


@pytest.mark.parametrize(
    ("form", "memory", "mixing"),
    [*(("plain", *row) for row in pairs([1, 3, 5, 16], [1.0, 0.7])), ("triton", 3, 0.7)],
)
def test_iterates_are_those_of_walker_and_ni(form, memory, mixing):
    problem = Wide(batch=2, radius=0.9).to(DEVICE)
    steps = 9
    paths = [walker_ni(problem.root(i), pack(problem.z0)[i], steps, memory, mixing) for i in (0, 1)]
    for last in range(1, steps + 1) if form == "plain" or CUDA else (6,):
        solver = gdeq.Anderson(last, 0.0, memory=memory, mixing=mixing)
        with choice.use(form):
            found = gdeq.solve(problem, problem.z0, solver)
        expected = torch.stack([path[last - 1] for path in paths])
        assert_near(found.z, expected, near(form, solver))


def test_the_ridge_is_that_of_the_readable_form(form):
    problem = Dense(batch=2, radius=0.9).to(DEVICE)
    solver = gdeq.Anderson(5, 0.0, memory=3, regularization=0.2)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    without = gdeq.solve(problem, problem.z0, replace(solver, regularization=0.0))
    assert (expected.z - without.z).abs().max() > 1e-3
    assert_same(expected, found, 1e-9 if form == "plain" else 1e-6)


def test_in_single_precision(form):
    problem = Wide(batch=2, radius=0.9).to(DEVICE).float()
    solver = gdeq.Anderson(9, 0.0, memory=4)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert_near(found.z, expected.z, 1e-4)
    assert_near(found.trace, expected.trace, 1e-4)


# --- an f in half precision ----------------------------------------------------------------------


def rounded_map(batch, d, half, radius):
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(batch, d, d, generator=source)
    weight *= radius / torch.linalg.eigvals(weight).abs().amax(1)[:, None, None]
    x = 0.3 * torch.randn(batch, d, generator=source)
    weight, x = weight.to(DEVICE), x.to(DEVICE)

    def f(z):
        inner = torch.einsum("bij,bj->bi", weight, z.to(half).float()) + x
        return torch.tanh(inner).to(half).float()

    return f, torch.zeros_like(x)


@pytest.mark.parametrize("radius", [0.5, 0.95])
@pytest.mark.parametrize(("half", "tol"), [(BF16, 5e-3), (torch.float16, 1e-3)])
def test_rounded_steps_lead_as_far_in_as_many(half, tol, radius):
    """Kept in bfloat16, against all in float32; after that, where f is noise, not worse."""
    f, z = rounded_map(24, 64, half, radius)
    eps = torch.finfo(half).eps

    def solve(steps, tol):
        return iterate(f, z, gdeq.Anderson(steps, tol, memory=5), precision=eps)

    expected, found = both("plain", lambda: solve(60, tol))
    assert (found.codes == Status.CONVERGED).float().mean() > 0.9
    assert found.steps.double().mean() < 1.1 * expected.steps.double().mean()
    expected, found = both("plain", lambda: solve(120, 0.0))
    assert found.residual.median() < 1.3 * expected.residual.median()
    assert found.residual.max() < 2 * expected.residual.max()


@pytest.mark.parametrize("half", [BF16, torch.float16])
def test_rounded_steps_are_the_plain_form_s_in_kernels(half):
    f, z = rounded_map(2, 64, half, 0.9)

    def solve():
        return iterate(f, z, gdeq.Anderson(7, 0.0, memory=3), precision=torch.finfo(half).eps)

    with choice.use("plain"):
        expected = solve()
    with choice.use("triton"):
        found = solve()
    # A sum in another order may round a number of a step to its other neighbour.
    assert_near(found.trace, expected.trace, 2e-2 * expected.trace.max().item())
    assert_near(found.z, expected.z, 0.05)


def test_rounded_steps_are_kept_in_bfloat16(form):
    kind = AndersonSweep if form == "plain" else fused.Sweep
    z = torch.zeros(1, 5, device=DEVICE)
    for precision, kept in ((2.0**-7, BF16), (2.0**-10, BF16), (2.0**-23, F32)):
        sweep = kind(z, [5], F32, gdeq.Anderson(3, 0.0), precision, 3, None)
        assert sweep.steps.dtype == kept


# --- ways to end ---------------------------------------------------------------------------------


class Rows:
    """One map after another on the samples of a batch."""

    def __init__(self, *maps):
        self.maps = maps

    def __call__(self, z: Tensor) -> Tensor:
        return torch.stack([m(row) for m, row in zip(self.maps, z, strict=True)])


@pytest.mark.parametrize(("dtype", "tol"), [(F64, 0.0), (F32, 1e-5)])
def test_every_way_to_end(form, dtype, tol):
    def slope(z):
        return torch.arange(5, dtype=z.dtype, device=z.device)

    f = Rows(
        lambda z: z,  # solved at the start
        lambda z: 0.1 * torch.cos(z + slope(z)),  # done soon
        lambda z: 0.9 * torch.cos(z + slope(z)),  # and later
        lambda z: z + 1,  # g does not change
        lambda z: torch.full_like(z, 0.3),  # found by one step
        lambda z: torch.where(z < -1, torch.nan, 1.1 * z + 1),  # its solution is at −10
        torch.cos,  # starts at a NaN
    )
    z0 = torch.linspace(0.1, 0.6, 7, dtype=dtype).unsqueeze(1) * torch.ones(7, 5, dtype=dtype)
    z0[6, 2] = torch.nan
    z0 = z0.to(DEVICE)

    def solve():
        solver = gdeq.Anderson(7, tol, memory=3)
        return iterate(f, z0, solver, precision=torch.finfo(dtype).eps)

    expected, found = both(form, solve)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.tolist() == expected.steps.tolist()
    last = Status.CONVERGED if tol else Status.FIXED_STEPS
    names = [last, last, last, Status.STALLED, last, Status.NONFINITE, Status.NONFINITE_START]
    assert found.codes[[0, 1, 3, 4, 5, 6]].tolist() == [names[i] for i in (0, 1, 3, 4, 5, 6)]
    assert len(set(found.steps.tolist())) > (3 if tol else 1)
    accuracy = 1e-9 if dtype == F64 else 1e-5
    assert_near(found.z[:6], expected.z[:6], accuracy)
    assert torch.equal(found.z[6].isnan(), z0[6].isnan())
    assert_near(found.trace[:, :6], expected.trace[:, :6], accuracy)


class Prescribed:
    """f(z) = z + g with a g for each evaluation, whatever z is."""

    def __init__(self, values):  # (evaluations, batch, d)
        self.values, self.calls = values.to(DEVICE), 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return z + self.values[self.calls - 1].to(z.dtype)


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
@pytest.mark.parametrize(
    ("memory", "precision", "change"), [(1, 2.0**-52, 1e-15), (2, 1e-3, 1e-4), (4, 2.0**-52, 0.0)]
)
def test_a_change_that_is_noise_takes_a_place_and_says_nothing(form, memory, precision, change):
    """At the rounding of f, or at that of inner products."""
    values = torch.randn(9, 2, 8, dtype=F64)
    values[3], values[4] = values[2] * (1 + change), values[2]
    values[7, 1] = values[6, 1]
    z0 = torch.zeros(2, 8, dtype=F64, device=DEVICE)
    with choice.use(form):
        solver = gdeq.Anderson(8, 0.0, memory=memory)
        found = iterate(Prescribed(values), z0, solver, precision=precision)
    for sample, noise in enumerate([{2, 3}, {2, 3, 6}]):
        of_one = iter(values[:, sample])
        path = walker_ni(lambda _z, g=of_one: next(g), z0[sample].cpu(), 8, memory, 1.0, noise)
        assert_near(found.z[sample].cpu(), path[-1], 1e-7)


@pytest.mark.parametrize("mixing", [1.0, 0.7])
def test_a_step_has_something_of_the_newest_g(form, mixing):
    """Else its coordinates were lost: here γ = 1, and the step of Walker and Ni has none of it."""
    values = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0.3, 0.2, 0.9], [0, 0, 0]], dtype=F64)
    z0 = torch.zeros(1, 3, dtype=F64, device=DEVICE)
    paths = []
    for steps in (2, 3):
        with choice.use(form):
            solver = gdeq.Anderson(steps, 0.0, memory=1, mixing=mixing)
            found = iterate(Prescribed(values.unsqueeze(1)), z0, solver, precision=2.0**-52)
        paths.append(found.z[0].cpu())
    accuracy = near(form, solver)
    assert_near(paths[0], mixing * (values[0] + values[1]), accuracy)
    dg = values[2] - values[1]
    gamma = dg @ values[2] / (dg @ dg)
    step = mixing * values[2] - gamma * mixing * (values[1] + dg)
    assert_near(paths[1] - paths[0], step, accuracy)


@pytest.mark.parametrize(("kept", "precision"), [(F32, 2.0**-23), (BF16, 2.0**-10)])
def test_of_a_step_too_long_for_its_share_of_g_nothing_is_learned(form, kept, precision):
    """g_2 is a small part of a step in bfloat16, so what is left of it in the store is rounding."""
    d = 4096
    along, before, after, other = torch.linalg.qr(torch.randn(d, 4)).Q.T
    values = [along + 0.1 * before, 0.94 * along + 0.1 * before, 5 * along + 0.7 * after]
    values += [other, 0.5 * other + 0.2 * along]
    values = [g.to(BF16).float() for g in values]  # the interpreter cuts off what a GPU rounds
    kind = AndersonSweep if form == "plain" else fused.Sweep
    z0 = torch.zeros(1, d, device=DEVICE)
    sweep = kind(z0, [d], F32, gdeq.Anderson(5, 0.0, memory=3), precision, 5, None)
    for t, g in enumerate(values):
        sweep.take(t, (sweep.z + g.to(DEVICE)).reshape(-1))
        if t == 3:
            seen = sweep.keep[0, :3].tolist()
    assert sweep.steps.dtype == kept
    # Both differences with g_2
    assert seen == ([True, True, True] if kept == F32 else [True, False, False])
    assert sweep.keep[0, :4].tolist() == [*seen, True]


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_which_differences_are_kept_is_the_same_in_kernels(memory):
    values = torch.randn(9, 2, 20, dtype=F64)
    values[3:5] = values[2] + 1e-9 * values[3:5]  # known to no digit
    values[6, 0] = values[5, 0] + 1e-3 * values[6, 0]  # to some
    values[7] *= 0.01
    z0 = torch.zeros(2, 20, dtype=F64, device=DEVICE)
    kinds, solver = (AndersonSweep, fused.Sweep), gdeq.Anderson(9, 0.0, memory=memory)
    made = [kind(z0, [20], F64, solver, 2.0**-52, 9, None) for kind in kinds]
    for t, g in enumerate(values.to(DEVICE)):
        kept = []
        for sweep in made:
            sweep.take(t, (sweep.z + g).reshape(-1))
            kept.append(sweep.keep[:, max(0, t - memory) : t].tolist())
        assert kept[0] == kept[1]
        if t:
            assert [bool(row[-1]) for row in kept[0]] == [t not in (3, 4)] * 2
        assert_near(made[1].steps[:, t], made[0].steps[:, t], 1e-6)
    squares = made[1].gram.diagonal(dim1=1, dim2=2)[:, :8]  # for the size of later sums
    assert_near(squares, made[1].steps[:, :8].square().sum(2), 1e-9)


def test_a_sample_that_misses_the_tolerance_gets_its_best_iterate(form):
    matrix = torch.tensor([[0.0, 4.0], [-4.0, 0.0]], dtype=F64, device=DEVICE)

    def f(z):
        return torch.tanh(z @ matrix.T) + torch.tensor([0.3, -0.2], dtype=z.dtype, device=DEVICE)

    z0 = torch.tensor([[0.1, 0.2], [2.0, -1.0]], dtype=F64, device=DEVICE)
    solver = gdeq.Anderson(7, 1e-14, memory=2)
    expected, found = both(form, lambda: gdeq.solve(f, z0, solver))
    assert (expected.residual < expected.trace[-1]).any()
    assert_same(expected, found, 1e-9)


# --- how kernels are launched --------------------------------------------------------------------


def test_a_judgement_of_its_own_and_vectors_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(fused, "tuning", replace(fused.tuning, judge_in_dots=False))
    shift = torch.linspace(0, 9, 1100, dtype=F64, device=DEVICE)

    def f(z):
        return 0.9 * torch.cos(z + shift)

    z0 = torch.zeros(1, 1100, dtype=F64, device=DEVICE)
    solver = gdeq.Anderson(6, 0.0, memory=3)
    expected, found = both("triton", lambda: gdeq.solve(f, z0, solver))
    assert_same(expected, found, 1e-9)


def test_repeated_steps_are_the_counted_ones():
    """What a recording repeats, played by hand: the number of the iterate is on the device."""
    problem = Dense(batch=2, radius=0.9).to(DEVICE)
    solver, z = gdeq.Anderson(9, 1e-3, memory=3), torch.zeros_like(problem.x)
    with choice.use("off"):
        expected = gdeq.solve(problem, z, solver)
    with torch.no_grad():
        sweep = fused.Sweep(z, [z.shape[1]], F64, solver, torch.finfo(F64).eps, 9, None)
        sweep.steps = sweep.steps.new_full((len(z), 10, z.shape[1]), torch.nan)
        sweep.take(0, problem(sweep.z).reshape(-1))
        sweep.prepare_repetition()
        played = 0
        while played < 9 and sweep.unfinished.item():
            sweep.judge_next(problem(sweep.z).reshape(-1))
            sweep.go_on()
            played += 1
        found = sweep.settle(9)
    assert played == int(expected.steps.max())
    assert expected.steps.min() < played
    assert found.codes.tolist() == expected.codes.tolist()
    assert_near(found.z, expected.z, 1e-9)
    assert_near(sweep.trace[:played], expected.trace, 1e-9)
    assert ledger_of(sweep).steps.tolist() == expected.steps.tolist()


def test_samples_that_are_done_leave(form, monkeypatch):
    monkeypatch.setattr(narrowing, "LEAST", 2)
    given = []

    def cell(z, x, strength):
        given.append(len(z))
        return torch.tanh(strength.unsqueeze(1) * z.roll(1, dims=1) + x)

    x = torch.linspace(-1, 1, 32, dtype=F64, device=DEVICE).reshape(8, 4).sin()
    strength = torch.tensor([2, 1e-7, 0.1, 1e-7, 1e-3, 1e-7, 0.5, 1e-7], dtype=F64, device=DEVICE)

    def solution(narrow):
        solver = gdeq.Anderson(8, 1e-6, memory=2)
        deq = gdeq.DEQ(cell, solver, gdeq.JFB(), narrow=narrow).eval()
        deq(x, strength)
        return deq.solution

    with choice.use(form), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no effect")
        expected = solution(False)
        given.clear()
        found = solution(True)
    assert {8, 4, 2} <= set(given)
    assert_same(expected, found, 1e-9)


# --- as part of a layer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gradient",
    [
        gdeq.JFB(),
        gdeq.NPG(),
        gdeq.Implicit(gdeq.Broyden(5, 0.0)),
        gdeq.GDEQ(refine=2),
        gdeq.GDEQ(tolerance=0.1, max_refine=3),
        gdeq.Implicit(gdeq.Anderson(5, 0.0, memory=3)),
        gdeq.Implicit(gdeq.Anderson(8, 1e-3, memory=3, mixing=0.7)),
    ],
    ids=repr,
)
def test_gradients_are_those_of_the_readable_form(form, gradient):
    kind = Dense if isinstance(gradient, gdeq.Implicit) else Multiscale

    def work():
        problem = kind(batch=2, radius=0.7).to(DEVICE)
        solver = gdeq.Anderson(4, 0.0, memory=2)
        solution = gdeq.fixed_point(problem, problem.z0, solver, gradient)
        (pack(solution.z) * problem.cotangent()).sum().backward()
        return [p.grad for p in problem.parameters()]

    for expected, found in zip(*both(form, work), strict=True):
        assert_near(found, expected, 1e-6 if "0.7" in repr(gradient) else 1e-9)


@pytest.mark.parametrize("tol", [0.0, 1e-12])
def test_no_step_is_made_that_nobody_takes(tol, monkeypatch):
    problem, steps = Dense(batch=2, radius=0.5).to(DEVICE), []
    move = fused.Sweep._move
    monkeypatch.setattr(fused.Sweep, "_move", lambda *args, **k: steps.append(move(*args, **k)))
    with choice.use("triton"):
        gdeq.solve(problem, problem.z0, gdeq.Anderson(3, tol))
        assert len(steps) == 3
        gdeq.solve(problem, problem.z0, gdeq.Broyden(3, tol))
        assert len(steps) == 3 + 4  # its inverse has one more


def test_a_layer_trains_with_it(form):
    def work():
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 4, dtype=F64).to(DEVICE)
        solver = gdeq.Anderson(20, 1e-3)
        deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * linear(z) + x), solver, gdeq.Implicit(solver))
        x = torch.linspace(-1, 1, 8, dtype=F64, device=DEVICE).reshape(2, 4)
        deq(x).square().sum().backward()
        return deq.solution, linear.weight.grad

    (expected, wanted), (found, gradient) = both(form, work)
    assert_same(expected, found, 1e-9)
    assert_near(gradient, wanted, 1e-9)


@pytest.mark.parametrize("solver", [gdeq.Anderson(3, 0.0, memory=17), gdeq.Anderson(200, 1e-3)])
def test_where_it_does_not_apply_the_readable_form_runs(solver, monkeypatch):
    problem = Dense(batch=2, radius=0.5)
    monkeypatch.setattr(AndersonSweep, "take", None)
    with choice.use("plain"):
        assert gdeq.solve(problem, problem.z0, solver).z.isfinite().all()
