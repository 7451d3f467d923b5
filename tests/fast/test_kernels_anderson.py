"""Anderson's steps against Walker & Ni 2011; what is learned from differences that are noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq import Anderson, Status
from gdeq.solvers.base import System
from pairs import pairs
from problems import Dense, Wide, assert_near, pack

pytest.importorskip("triton")
from gdeq.fast.kernels import sweep as fused
from sweeps import DEVICE, FORMS, both, engine_of, kept, sweep, use

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def what_is_not_written_is_not_read(monkeypatch):
    build = fused.Sweep.__init__

    def built(made, *arguments, **more):
        build(made, *arguments, **more)
        known = made.samples
        for place in (made.steps, known.coordinates, known.products, known.weight, known.partial):
            place.fill_(torch.nan)

    monkeypatch.setattr(fused.Sweep, "__init__", built)


def near(form, mixing):
    """Kernels are given mixing in float32."""
    return 1e-9 if form == "oracle" or mixing == 1 else 1e-5


def iterated(f, z, solver, precision):
    return engine_of(z).iterate(f, z, solver, System(precision))


def walker_ni(g, z, steps, memory, mixing, without=()):
    """z of one sample after each step: (d,).  Section 2, least squares by QR.

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
    [*(("oracle", *row) for row in pairs([1, 3, 5, 16], [1.0, 0.7])), ("fast", 3, 0.7)],
)
def test_iterates_are_those_of_walker_and_ni(form, memory, mixing):
    problem, steps = Wide(batch=2, radius=0.9).to(DEVICE), 9
    paths = [walker_ni(problem.root(i), pack(problem.z0)[i], steps, memory, mixing) for i in (0, 1)]
    for last in range(1, steps + 1) if form == "oracle" else (6,):
        with use(form):
            solver = Anderson(last, 0.0, memory=memory, mixing=mixing)
            found = gdeq.solve(problem, problem.z0, solver)
        assert_near(found.z, torch.stack([path[last - 1] for path in paths]), near(form, mixing))


def test_the_ridge_is_that_of_the_reference(form):
    problem = Dense(batch=2, radius=0.9).to(DEVICE)
    solver = Anderson(5, 0.0, memory=3, regularization=0.2)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    without = gdeq.solve(problem, problem.z0, replace(solver, regularization=0.0))
    assert (expected.z - without.z).abs().max() > 1e-3
    assert_near(found.z, expected.z, 1e-9 if form == "oracle" else 1e-6)


def test_in_single_precision(form):
    problem = Wide(batch=2, radius=0.9).to(DEVICE).float()
    solver = Anderson(9, 0.0, memory=4)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert_near(found.z, expected.z, 1e-4)
    assert_near(found.trace, expected.trace, 1e-4)


# --- an f in half precision -----------------------------------------------------------------------


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
@pytest.mark.parametrize(("half", "tol"), [(BF16, 5e-3), (F16, 1e-3)])
def test_rounded_steps_lead_as_far_in_as_many(half, tol, radius):
    """Kept in bfloat16, against all in float32; after that, where f is noise, not worse."""
    f, z = rounded_map(24, 64, half, radius)

    def solve(steps, tol):
        return iterated(f, z, Anderson(steps, tol, memory=5), torch.finfo(half).eps)

    expected, found = both("oracle", lambda: solve(60, tol))
    assert (found.codes == Status.CONVERGED).float().mean() > 0.9
    assert found.steps.double().mean() < 1.1 * expected.steps.double().mean()
    expected, found = both("oracle", lambda: solve(120, 0.0))
    assert found.residual.median() < 1.3 * expected.residual.median()
    assert found.residual.max() < 2 * expected.residual.max()


@pytest.mark.parametrize("half", [BF16, F16])
def test_kernels_round_steps_as_the_oracle(half):
    f, z = rounded_map(2, 64, half, 0.9)
    found = {}
    for form in FORMS:
        with use(form):
            solver = Anderson(7, 0.0, memory=3)
            found[form] = iterated(f, z, solver, torch.finfo(half).eps)
    # A sum in another order may round a number of a step to its other neighbour.
    expected, found = found.values()
    assert_near(found.trace, expected.trace, 2e-2 * expected.trace.max().item())
    assert_near(found.z, expected.z, 0.05)


# --- what is learned ------------------------------------------------------------------------------


class Prescribed:
    """f(z) = z + g with a g for each evaluation, whatever z is."""

    def __init__(self, values):  # (evaluations, batch, d)
        self.values, self.calls = values.to(DEVICE), 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return z + self.values[self.calls - 1].to(z.dtype)


@pytest.mark.parametrize("form", ["reference", *FORMS])
@pytest.mark.parametrize(
    ("memory", "precision", "change"), [(1, 2.0**-52, 1e-15), (2, 1e-3, 1e-4), (4, 2.0**-52, 0.0)]
)
def test_a_change_that_is_noise_takes_a_place_and_says_nothing(form, memory, precision, change):
    """At the rounding of f, or at that of inner products."""
    values = torch.randn(9, 2, 8, dtype=F64)
    values[3], values[4] = values[2] * (1 + change), values[2]
    values[7, 1] = values[6, 1]
    z0 = torch.zeros(2, 8, dtype=F64, device=DEVICE)
    with use(form):
        found = iterated(Prescribed(values), z0, Anderson(8, 0.0, memory=memory), precision)
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
        with use(form):
            solver = Anderson(steps, 0.0, memory=1, mixing=mixing)
            found = iterated(Prescribed(values.unsqueeze(1)), z0, solver, 2.0**-52)
        paths.append(found.z[0].cpu())
    assert_near(paths[0], mixing * (values[0] + values[1]), near(form, mixing))
    dg = values[2] - values[1]
    gamma = dg @ values[2] / (dg @ dg)
    step = mixing * values[2] - gamma * mixing * (values[1] + dg)
    assert_near(paths[1] - paths[0], step, near(form, mixing))


@pytest.mark.parametrize(("stored", "precision"), [(F32, 2.0**-23), (BF16, 2.0**-10)])
def test_of_a_step_too_long_for_its_share_of_g_nothing_is_learned(form, stored, precision):
    """g_2 is a small part of a step in bfloat16, so what is left of it in the store is rounding."""
    d = 4096
    along, before, after, other = torch.linalg.qr(torch.randn(d, 4)).Q.T
    values = [along + 0.1 * before, 0.94 * along + 0.1 * before, 5 * along + 0.7 * after]
    values += [other, 0.5 * other + 0.2 * along]
    values = [g.to(BF16).float() for g in values]  # the interpreter cuts off what a GPU rounds
    z0 = torch.zeros(1, d, device=DEVICE)
    made = sweep(form, z0, Anderson(5, 0.0, memory=3), precision=precision)
    for t, g in enumerate(values):
        made.take(t, (made.z + g.to(DEVICE)).reshape(-1))
        if t == 3:
            seen = kept(made)[0, :3].tolist()
    assert made.steps.dtype == stored
    # Both differences with g_2
    assert seen == ([True, True, True] if stored == F32 else [True, False, False])
    assert kept(made)[0, :4].tolist() == [*seen, True]


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_which_differences_are_kept_is_the_same_in_kernels(memory):
    values = torch.randn(9, 2, 20, dtype=F64)
    values[3:5] = values[2] + 1e-9 * values[3:5]  # known to no digit
    values[6, 0] = values[5, 0] + 1e-3 * values[6, 0]  # to some
    values[7] *= 0.01
    z0 = torch.zeros(2, 20, dtype=F64, device=DEVICE)
    made = [sweep(form, z0, Anderson(9, 0.0, memory=memory)) for form in FORMS]
    for t, g in enumerate(values.to(DEVICE)):
        seen = []
        for one in made:
            one.take(t, (one.z + g).reshape(-1))
            seen.append(kept(one)[:, max(0, t - memory) : t].tolist())
        assert seen[0] == seen[1]
        if t:
            assert [row[-1] for row in seen[0]] == [t not in (3, 4)] * 2
        assert_near(made[1].steps[:, t], made[0].steps[:, t], 1e-6)
    squares = made[1].samples.gram.diagonal(dim1=1, dim2=2)[:, :8]  # for the size of later sums
    assert_near(squares, made[1].steps[:, :8].square().sum(2), 1e-9)
