"""The loop and its ledger: stopping, freezing, the best iterate, and what is said of samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdeq
from cells import (
    F64,
    SOLVERS,
    Network,
    contraction,
    draw,
    every_solver,
    iterate_at,
    relative_residual,
)
from engines import ORACLE, using
from gdeq import Anderson, Broyden, Picard, Status
from gdeq.engine import REFERENCE
from gdeq.loop import Ledger, Norms, least_part
from gdeq.solvers.base import System

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
both_engines = pytest.mark.parametrize("engine", ["reference", "oracle"])


# --- stopping -------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("stop", ["relative", "absolute"])
def test_stops_at_the_first_iterate_within_the_tolerance(solver, stop, device):
    f = Network([0.05, 0.6, 0.9], device=device, size=100.0)  # the two residuals differ by far
    solver = replace(solver, max_iter=300, tol=1e-5, stop=stop)
    solution = gdeq.solve(f, f.z0, solver)
    steps = solution.steps.tolist()
    assert solution.converged.all()
    assert solution.evals == f.calls == max(steps) + 1
    assert len(set(steps)) > 1
    assert solution.trace.shape == (max(steps), 3)

    def residual(z):
        return (f(z) - z).norm(dim=1) if stop == "absolute" else relative_residual(f, z)

    torch.testing.assert_close(solution.residual, residual(solution.z), rtol=1e-6, atol=1e-12)
    for i, last in enumerate(steps):
        assert (solution.trace[: last - 1, i] > 1e-5).all()
        assert solution.residual[i] <= 1e-5
        assert (solution.trace[last - 1 :, i] == solution.residual[i]).all()  # once frozen
        for t in (1, last):
            expected = residual(iterate_at(f, f.z0, solver, t))[i]
            torch.testing.assert_close(solution.trace[t - 1, i], expected, rtol=1e-5, atol=1e-9)


@every_solver
def test_a_start_within_the_tolerance_is_returned_as_it_is(solver):
    f = Network([0.3, 0.5])
    z0 = gdeq.solve(f, f.z0, Broyden(tol=1e-12)).z
    solution = gdeq.solve(f, z0, replace(solver, tol=1e-6))
    assert solution.converged.all()
    assert solution.evals == 1
    assert solution.trace.shape == (0, 2)
    assert solution.steps.tolist() == [0, 0]
    assert torch.equal(solution.z, z0)
    assert solution.z.data_ptr() != z0.data_ptr()


@every_solver
@pytest.mark.parametrize("max_iter", [1, 40])
def test_tolerance_zero_runs_exactly_max_iter_steps(solver, max_iter, device):
    f = Network([0.01, 0.5, 2.0], device=device)  # at 40 steps the first is long exact
    solution = gdeq.solve(f, f.z0, replace(solver, max_iter=max_iter, tol=0.0))
    assert solution.steps.tolist() == [max_iter] * 3
    assert solution.evals == f.calls == max_iter + 1
    assert solution.trace.shape == (max_iter, 3)
    assert not solution.converged.any()
    assert torch.isfinite(solution.z).all()
    # At an exact solution, whatever the status says, it cannot be that there is none.
    exact = gdeq.solve(lambda z: 0.5 * z, torch.zeros(2, 3), replace(solver, max_iter=3, tol=0))
    assert exact.status == [Status.FIXED_STEPS] * 2


@every_solver
@pytest.mark.parametrize("every", [2, 5, 1000])
def test_checking_less_often_changes_nothing_but_evals(solver, every, device):
    f = Network([0.2, 0.5, 0.8], device=device)
    solver = replace(solver, max_iter=203, tol=1e-8)
    often = gdeq.solve(f, f.z0, solver)
    seldom = gdeq.solve(f, f.z0, replace(solver, check_every=every))
    needed = int(often.steps.max())
    assert seldom.evals == min(-(-needed // every) * every, 203) + 1
    for name in ("z", "residual", "steps", "trace", "codes", "converged"):
        assert torch.equal(getattr(often, name), getattr(seldom, name)), name
    if often.inverse is not None:
        ours, theirs = often.inverse.as_matrix(), seldom.inverse.as_matrix()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_host_synchronisation_without_a_tolerance():
    f = Network([0.5, 0.9], device="cuda")
    for solver in [*SOLVERS.values(), Broyden(memory=3), Broyden(max_step=0.5)]:
        z0, steps = f.z0, replace(solver, max_iter=8, tol=0.0)
        gdeq.solve(f, z0, steps)  # tables that depend on the shape alone are made once
        torch.cuda.set_sync_debug_mode("error")
        try:
            gdeq.solve(f, z0, steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- freezing, best-so-far ------------------------------------------------------------------------


@every_solver
def test_f_is_given_a_frozen_sample_where_it_is(solver, device):
    f, seen = Network([0.05, 0.9], device=device), []
    solver = replace(solver, max_iter=100, tol=1e-6)
    solution = gdeq.solve(lambda z: seen.append(z) or f(z), f.z0, solver)
    first = int(solution.steps[0])
    assert len(seen) > first + 2
    assert all(torch.equal(z[0], solution.z[0]) for z in seen[first:])


@every_solver
def test_without_convergence_the_best_iterate_is_returned(solver, device):
    f = Network([20.0] * 4, d=20, device=device)
    solver = replace(solver, max_iter=15, tol=1e-9)
    solution = gdeq.solve(f, f.z0, solver)
    assert not solution.converged.any()
    history = torch.cat([relative_residual(f, f.z0)[None], solution.trace])
    # The best is the one of smallest ‖g‖, which an absolute trace shows.
    absolute = gdeq.solve(f, f.z0, replace(solver, stop="absolute")).trace
    start = (f(f.z0) - f.z0).norm(dim=1)[None]
    best = torch.cat([start, absolute]).argmin(dim=0)
    assert (best < 15).any()  # or the last would be the best anyway
    for i, steps in enumerate(best.tolist()):
        assert solution.residual[i] == history[steps, i]
        stopped = gdeq.solve(f, f.z0, replace(solver, max_iter=steps, tol=0.0)) if steps else None
        expected = stopped.z[i] if stopped else f.z0[i]
        torch.testing.assert_close(solution.z[i], expected, rtol=1e-12, atol=1e-12)
        if solution.inverse is not None:
            found, expected = solution.inverse.as_matrix()[i], stopped.inverse.as_matrix()[i]
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_best_iterate_can_be_the_first(device):
    """A start next to a repelling fixed point: all that follows is worse."""
    f = lambda z: 3 * z - 2  # noqa: E731
    z0 = 1 + 1e-3 * draw(2, 3, seed=1, device=device)
    solution = gdeq.solve(f, z0, Picard(max_iter=5, tol=1e-6))
    assert torch.equal(solution.z, z0)
    torch.testing.assert_close(solution.residual, relative_residual(f, z0))


# --- status ---------------------------------------------------------------------------------------

ZEROS, ONES = torch.zeros(2, 3, dtype=F64), torch.ones(2, 3, dtype=F64)
ENDS = {
    "converged": (torch.cos, ONES, Broyden(), Status.CONVERGED, "converged: the residual is"),
    "out of steps": (
        lambda z: 0.9 * z + 1, ZEROS, Picard(5), Status.MAX_STEPS, "the solver ran out of steps",
    ),
    # A contraction: with so few steps it has moved little, but it has not stalled.
    "slow": (lambda z: 0.999 * z + 1, ZEROS, Picard(5), Status.MAX_STEPS, "raise max_iter or tol"),
    "diverged from zeros": (
        lambda z: 2 * z + 1, ZEROS, Picard(30), Status.DIVERGED, "diverged: f(z) - z is larger",
    ),
    "diverged": (
        lambda z: 2 * z + 1, ONES, Picard(30, stop="absolute"), Status.DIVERGED, "line_search=3",
    ),
    "fixed": (torch.cos, ONES, Broyden(3, 0.0), Status.FIXED_STEPS, "convergence was not asked"),
    "diverged, fixed": (
        lambda z: 2 * z + 1, ONES, Picard(9, 0.0), Status.DIVERGED, "gdeq.jacobian_penalty",
    ),
    "NaN": (
        lambda z: z * math.nan, ONES, Broyden(), Status.NONFINITE_START, "at the first call; z0 is",
    ),
    "overflow": (lambda z: z.exp() + 1, ONES, Picard(), Status.NONFINITE, "an earlier iterate is"),
}  # fmt: skip


@pytest.mark.parametrize(("f", "z0", "solver", "status", "words"), ENDS.values(), ids=ENDS)
def test_how_solves_end(f, z0, solver, status, words, device):
    solution = gdeq.solve(f, z0.to(device), solver)
    assert solution.status == [status] * 2
    assert words in str(status)
    assert solution.converged.tolist() == [status is Status.CONVERGED] * 2
    assert torch.isfinite(solution.z).all()


@every_solver
def test_a_tolerance_below_rounding_ends_there_and_claims_nothing(solver, device):
    f = Network([0.3, 0.5, 0.3], d=40, device=device, dtype=F32)
    solution = gdeq.solve(f, f.z0, replace(solver, max_iter=1000, tol=1e-12))
    # A residual of exactly zero is within any tolerance.
    assert set(solution.status) <= {Status.ROUNDING, Status.CONVERGED}
    assert ((solution.residual == 0) == solution.converged).all()
    assert int(solution.steps.max()) < 100
    assert (solution.residual < 1e-7).all()
    if solution.inverse is not None:
        assert torch.isfinite(solution.inverse.as_matrix()).all()


def test_a_sample_at_the_rounding_level_goes_on_while_it_improves():
    def norms(g):
        return Norms(torch.tensor([g]), torch.ones(1), torch.ones(1))

    ledger = Ledger(Picard(10, 1e-12), torch.finfo(F32).eps, norms(1.0))
    for step, (g, active) in enumerate([(5e-8, True), (3e-8, True), (4e-8, False)], 1):
        ledger.note(step, ledger.accepts(norms(g)), norms(g))
        assert ledger.active.item() is active
    codes, residual, _, at = ledger.finish()
    assert (codes.item(), at.item()) == (Status.ROUNDING, 2)  # the best of them
    assert residual.item() == pytest.approx(3e-8)


ADD_A_CONSTANT = [
    *SOLVERS.values(),
    *(Broyden(memory=2), Broyden(line_search=3), Broyden(max_step=0.5)),
]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("tol", [1e-6, 0.0])
@pytest.mark.parametrize("solver", ADD_A_CONSTANT, ids=str)
def test_no_fixed_point_is_said_and_never_called_converged(solver, tol, dtype, device):
    """f(z) = z + c.  Rounding makes g = c look as if it changed with z: that must fool nobody."""
    for d, max_iter, scale in [(1, 3, 1.0), (1, 50, 1e6), (5, 50, 1e-3), (5, 150, 1.0)]:
        c = scale * draw(50, d, seed=1, device=device).to(dtype)
        z0 = scale * draw(50, d, seed=2, device=device).to(dtype)
        solution = gdeq.solve(lambda z, c=c: z + c, z0, replace(solver, max_iter=max_iter, tol=tol))
        assert not solution.converged.any()
        assert solution.status == [Status.STALLED] * 50
        for values in (solution.z, solution.residual, solution.trace):
            assert torch.isfinite(values).all()
        # Nothing can be learned from it, so no step is longer than c.
        moved = (solution.z - z0).norm(dim=1)
        assert (moved <= 1.01 * max_iter * c.norm(dim=1)).all()
        if solution.inverse is not None:
            assert torch.isfinite(solution.inverse.as_matrix()).all()


def test_no_fixed_point_where_the_tolerance_is_loose():
    """Beside z the constant is within it after two steps."""
    assert gdeq.solve(lambda z: z + 1, ZEROS, Picard(8, 0.4)).status == [Status.STALLED] * 2


ROOTLESS = {
    "cos": lambda z: z + torch.cos(z) + 2,
    "sin": lambda z: z + 1 + 0.5 * torch.sin(3 * z),
    "bump": lambda z: z + 1 / (1 + z**2) + 0.1,
}


@pytest.mark.parametrize("name", ROOTLESS)
@pytest.mark.parametrize("solver", [Broyden(18, 1e-3), Broyden(50, 1e-6), Anderson(50, 1e-3)])
def test_a_map_without_a_fixed_point_is_never_converged(name, solver):
    z0 = torch.linspace(-5, 5, 40, dtype=F64).unsqueeze(1)
    solution = gdeq.solve(ROOTLESS[name], z0, solver)
    assert not solution.converged.any(), str(solution)
    assert torch.isfinite(solution.z).all()


@pytest.mark.parametrize("d", [1, 3])
@every_solver
def test_a_runaway_is_not_converged(solver, d, device):
    """g is bounded: after a step to 1e14 the residual is small, but relative to that z alone."""
    z0 = torch.tensor([[5.0, 3.0, -7.0], [9.0, 2.0, 4.0]], dtype=F64, device=device)
    f = lambda z: z - 10 * torch.atan(z - 1)  # noqa: E731
    solution = gdeq.solve(f, z0[:, :d], replace(solver, max_iter=100, tol=1e-10))
    gap = (solution.z - 1).norm(dim=1)
    assert (gap[solution.converged] < 1e-6).all(), str(solution)


def test_growth_from_a_tiny_start_is_no_reason_to_deny_convergence():
    z0 = torch.full((1, 3), 1e-8)
    solution = gdeq.solve(lambda z: torch.tanh(3 * z), z0, Picard(200, 1e-6))
    assert solution.converged.all(), str(solution)


@pytest.mark.parametrize(("slope", "tol"), [(0.95, 1e-2), (0.97, 2e-2)])
def test_a_bf16_solve_that_ends_far_from_its_start_is_called_converged(slope, tol):
    c = torch.linspace(0.5, 1.5, 64, dtype=BF16)
    found = gdeq.solve(lambda z: slope * z + c, torch.zeros(3, 64, dtype=BF16), Broyden(40, tol))
    assert found.converged.all(), str(found)


def test_a_diverging_iteration_is_not_converged_when_its_norm_overflows(device):
    """f(z) = 1.3 z + 1 by Picard in float32: ‖f(z)‖ is infinite before ‖f(z) − z‖ is."""
    z0 = torch.ones(1, 20, device=device)
    solution = gdeq.solve(lambda z: 1.3 * z + 1, z0, Picard(max_iter=400))
    assert solution.status == [Status.NONFINITE], str(solution)
    assert torch.isfinite(solution.z).all()


@pytest.mark.parametrize("radius", [20, 100])
def test_a_stiff_map_that_overflows_is_solved_by_what_its_status_names(radius):
    Q = torch.linalg.qr(draw(20, 20, seed=0))[0]
    A = Q @ torch.diag(torch.linspace(1, radius, 20, dtype=F64)) @ Q.T
    b = draw(4, 20, seed=1)

    def f(z):
        return b - z @ A - z**3

    plain = gdeq.solve(f, torch.zeros_like(b), Broyden(100, 1e-8))
    assert plain.status == [Status.NONFINITE] * 4
    for name in ("line_search=3", "max_step=1", "gdeq.jacobian_penalty"):
        assert name in str(Status.NONFINITE)
    for remedy in ({"line_search": 3}, {"max_step": 1.0}):
        assert gdeq.solve(f, torch.zeros_like(b), Broyden(100, 1e-8, **remedy)).converged.all()


# --- NaN ------------------------------------------------------------------------------------------


class Failing(Network):
    """Returns ``bad`` for one sample from a given call of f on (1 is the first)."""

    def __init__(self, *args, sample: int, call: int, bad: float = math.nan, **kwargs):
        super().__init__(*args, **kwargs)
        self.sample, self.call, self.bad = sample, call, bad

    def __call__(self, z: Tensor) -> Tensor:
        out = super().__call__(z)
        if self.calls >= self.call:
            out[self.sample] = self.bad
        return out


@every_solver
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("tol", [1e-8, 0.0])
def test_a_sample_that_fails_gets_its_last_good_iterate(solver, bad, call, tol, device):
    norms, sick, others = [0.3, 0.6, 0.9, 0.5], 2, [0, 1, 3]
    solver = replace(solver, max_iter=60, tol=tol)
    f = Failing(norms, sample=sick, call=call, bad=bad, device=device)
    healthy = Network(norms, device=device)
    z0 = 0.1 * draw(4, 6, seed=5, device=device)
    solution, clean = gdeq.solve(f, z0, solver), gdeq.solve(healthy, z0, solver)
    # Call n + 1 belongs to step n; the last good iterate is that of the step before.
    good = max(0, call - 2)
    at_once = call == 1
    assert solution.status[sick] is (Status.NONFINITE_START if at_once else Status.NONFINITE)
    assert solution.steps[sick] == (0 if at_once else good + 1)
    expected = iterate_at(healthy, z0, solver, good)
    torch.testing.assert_close(solution.z[sick], expected[sick], rtol=1e-12, atol=1e-12)
    if not at_once:
        residual = relative_residual(healthy, solution.z)[sick]
        torch.testing.assert_close(solution.residual[sick], residual, rtol=1e-9, atol=1e-12)
        assert (solution.trace[good:, sick] == solution.residual[sick]).all()
    # The others are bit for bit what they are with a good neighbour.
    for name in ("z", "residual", "steps", "codes"):
        assert torch.equal(getattr(solution, name)[others], getattr(clean, name)[others]), name
    rows = min(len(solution.trace), len(clean.trace))
    assert torch.equal(solution.trace[:rows, others], clean.trace[:rows, others])
    if solution.inverse is not None:
        ours, theirs = solution.inverse.as_matrix(), clean.inverse.as_matrix()
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours[others], theirs[others], rtol=1e-12, atol=1e-12)
        if at_once:
            assert torch.equal(ours[sick], -torch.eye(6, dtype=F64, device=device))


# --- residuals that mislead -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tol", "size"), [(F64, 1e-6, 1e-15), (F32, 1e-6, 1e-7), (BF16, 1e-2, 1e-7),
                               (F16, 1e-2, 1e-7)], ids=str
)  # fmt: skip
@pytest.mark.parametrize("solver", [Broyden(60), Anderson(200), Picard(400)], ids=str)
def test_a_fixed_point_at_zero_is_found(solver, dtype, tol, size):
    """Beside z → 0 no g is ever small; neither may an early iterate be taken for the best."""
    W = contraction(20, 0.8, dtype=dtype)
    z0 = draw(4, 20, seed=1).to(dtype)
    solution = gdeq.solve(lambda z: torch.tanh(z @ W.T), z0, replace(solver, tol=tol))
    assert solution.converged.all(), str(solution)
    assert (solution.z.double().norm(dim=1) < size).all()


@both_engines
@pytest.mark.parametrize("scale", [1e2, 1e6])
@pytest.mark.parametrize("solver", [Broyden(40, 1e-2), Anderson(40, 1e-2), Picard(40, 1e-2)])
def test_a_start_far_from_a_small_fixed_point_does_not_hide_its_residual(solver, scale, engine):
    """In bf16 the rounding of f at z0 is far larger than z*."""
    W, x = contraction(20, 0.8, dtype=BF16), draw(5, 20, seed=1).to(BF16)
    fixed = torch.linalg.solve(torch.eye(20) - W.float(), x.float().T).T

    def f(z):
        return z @ W.to(z.dtype).T + x.to(z.dtype)

    with using(engine):
        found = gdeq.solve(f, (scale * fixed).to(BF16), solver)
    true = relative_residual(f, found.z.double())
    assert found.converged.all(), str(found)
    assert (true < 1.5e-2).all()
    assert (true < 2 * found.residual).all()


@pytest.mark.parametrize("solver", [Broyden(50, 1e-4), Anderson(50, 1e-4)], ids=str)
def test_a_state_whose_squares_overflow_is_solved(solver):
    """In float32 inner products leave the range from some 1e19 on; f itself is finite there."""
    make = torch.Generator().manual_seed(0)
    scale = torch.logspace(17, 21, 200).unsqueeze(1)  # of each sample
    weight, x = 0.2 * torch.randn(16, 16, generator=make), torch.randn(200, 16, generator=make)
    f = lambda z: scale * (torch.tanh(z / scale @ weight) + x)  # noqa: E731
    found = gdeq.solve(f, torch.zeros(200, 16), solver)
    assert found.converged.all(), found


@both_engines
def test_a_float16_f_is_solved_as_far_as_its_digits_go(engine):
    """A guard against noise as coarse as bfloat16's would stop the learning at a hundredth."""
    torch.manual_seed(1)
    batch, d = 4, 400
    first, second = 1.3 * torch.randn(d, d) / d**0.5, 1.6 * torch.randn(d, d) / d**0.5
    b = torch.randn(batch, d)

    def half(x):
        return x.half().float()

    def f(z):
        h = half(torch.tanh(half(z) @ first.T + b))
        return half(torch.relu(h @ second.T + 0.3 * b))

    engine = ORACLE if engine == "oracle" else REFERENCE
    system = System(torch.finfo(F16).eps)
    with torch.no_grad():
        found = engine.iterate(f, torch.zeros(batch, d), Broyden(60, 6e-4), system)
    assert found.converged.sum() >= batch - 1


# --- states judged part by part -------------------------------------------------------------------


def small_slow_part(ratio: float, dtype=F64, batch: int = 40):
    """A state of a large tensor that is solved at once and a slow one, this much smaller."""
    fast, slow = contraction(20, 0.3, dtype=dtype), contraction(8, 0.95, 1, dtype)
    x, y = draw(batch, 20, seed=0).to(dtype), ratio * draw(batch, 8, seed=1).to(dtype)

    def f(z):
        return torch.tanh(z[0] @ fast.T + x), z[1] @ slow.T + y

    fixed = torch.linalg.solve(torch.eye(8, dtype=F64) - slow.double(), y.double().T).T
    return f, (torch.zeros_like(x), torch.zeros_like(y)), fixed


def part_residuals(f, z) -> Tensor:  # -> (batch, 2)
    pairs = zip(f(z), z, strict=True)
    return torch.stack([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs], 1)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("ratio", [1e-2, 1e-4])
@pytest.mark.parametrize(
    ("solver", "engine"),
    [
        (Broyden(60, 1e-2), "reference"),
        (Anderson(60, 1e-2), "reference"),
        (Picard(200, 1e-2), "reference"),
        (Broyden(60, 1e-2), "oracle"),
        (Anderson(60, 1e-2), "oracle"),
    ],
)
def test_a_state_in_parts_is_converged_when_every_part_is(solver, ratio, dtype, engine):
    f, z0, fixed = small_slow_part(ratio, dtype)

    def errors(found):  # -> (batch,) of the small part
        return (found.z[1].double() - fixed).norm(dim=1) / fixed.norm(dim=1)

    with using(engine):
        found = gdeq.solve(f, z0, solver)
        whole = gdeq.solve(f, z0, replace(solver, stop="whole"))
    assert found.converged.all(), str(found)
    assert (errors(found) < 0.2).all()
    torch.testing.assert_close(found.parts, part_residuals(f, found.z), rtol=2e-2, atol=1e-5)
    torch.testing.assert_close(found.residual, found.parts.amax(1))
    assert whole.converged.all()
    assert whole.parts is None
    assert (errors(whole) > 0.1).double().mean() > 0.5  # what taking it as one vector hides


@both_engines
@pytest.mark.parametrize(
    ("dtype", "tol"), [(F64, 1e-3), (F64, 1e-8), (F32, 1e-3), (F32, 1e-6), (BF16, 1e-2)], ids=str
)
def test_a_part_that_is_zero_at_the_fixed_point_does_not_prevent_convergence(dtype, tol, engine):
    f, z0, _ = small_slow_part(0.0, dtype, batch=20)
    z0 = z0[0], torch.ones_like(z0[1])
    with using(engine):
        found = gdeq.solve(f, z0, Anderson(80, tol))
    assert found.converged.all(), str(found)
    assert (found.z[1].double().norm(dim=1) < 10 * tol * found.z[0].double().norm(dim=1)).all()


def test_how_large_a_part_counts_at_least():
    """A share of the whole, the rounding of f, or that of z beside what is allowed."""
    assert least_part(1e-3, torch.finfo(F64).eps, F64) == 1e-5
    assert least_part(1e-2, torch.finfo(BF16).eps, F32) == torch.finfo(BF16).eps
    assert least_part(1e-4, torch.finfo(F32).eps, F32) == 0.5 * torch.finfo(F32).eps / 1e-4
    assert least_part(1e-12, torch.finfo(F32).eps, F32) == 1.0
    assert least_part(0.0, torch.finfo(F32).eps, F32) == 1e-5


def test_a_sample_that_fails_in_one_part_says_in_which():
    f, z0, _ = small_slow_part(1e-2, batch=3)
    found = gdeq.solve(f, z0, Broyden(3, 1e-6))
    assert not found.converged.any()
    assert found.parts.argmax(1).tolist() == [1, 1, 1]
    assert "largest in tensor 1 of the state" in str(found)
    assert gdeq.solve(lambda z: 0.5 * z, z0[0], Broyden(3, 1e-6)).parts is None
    unrolled = gdeq.fixed_point(f, z0, Broyden(30, 1e-4), gdeq.Unrolled(2))
    expected = part_residuals(f, unrolled.z)  # of the z that is returned
    torch.testing.assert_close(unrolled.parts, expected, rtol=1e-2, atol=1e-9)
    torch.testing.assert_close(unrolled.residual, expected.amax(1), rtol=1e-2, atol=1e-9)


@both_engines
def test_the_parts_are_those_of_the_iterate_that_is_returned(engine):
    """One part runs away while the other converges: the second iterate is the best."""

    def f(z):
        return 1.3 * z[0] + 1, 0.5 * z[1] + 1

    z0 = torch.zeros(2, 3, dtype=F64), torch.zeros(2, 3, dtype=F64)
    with using(engine):
        found = gdeq.solve(f, z0, Picard(6, 1e-6))
    assert (found.residual != found.trace[-1]).all()
    pairs = zip(f(found.z), found.z, strict=True)
    expected = [(a - b).norm(dim=1) / torch.maximum(a, b).norm(dim=1) for a, b in pairs]
    torch.testing.assert_close(found.parts, torch.stack(expected, 1))


@both_engines
def test_more_parts_than_a_kernel_judges(engine):
    z0 = tuple(torch.zeros(3, 2, dtype=F64) for _ in range(20))

    def f(z):
        return tuple(0.3 * torch.cos(part + i) for i, part in enumerate(z))

    with using(engine):
        found = gdeq.solve(f, z0, Broyden(20, 1e-8))
    assert found.converged.all()
    assert found.parts.shape == (3, 20)
