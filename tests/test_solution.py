"""Records: what a solution says of itself, and what a backward pass adds to it."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

import gdeq
from cells import F64, Network, contraction, data, every_gradient, layer
from engines import using
from gdeq import GDEQ, JFB, Broyden, Picard, Status
from gdeq.solution import BackwardRecord

# --- forwards -------------------------------------------------------------------------------------


def test_the_record_is_on_the_device_of_the_state_and_without_autograd(device):
    f = Network([0.5, 0.5], device=device)
    z0, seen = f.z0.requires_grad_(), []
    f.x.requires_grad_()
    solution = gdeq.solve(lambda z: seen.append(torch.is_grad_enabled()) or f(z), z0, Broyden())
    for name in ("z", "converged", "residual", "steps", "trace", "codes"):
        assert getattr(solution, name).device.type == device.type, name
        assert not getattr(solution, name).requires_grad
    assert not any(seen)
    assert solution.converged.dtype == torch.bool
    assert isinstance(solution.evals, int)
    assert all(isinstance(status, Status) for status in solution.status)


def test_every_status_is_a_sentence_of_its_own():
    sentences = [str(status) for status in Status]
    assert len(set(sentences)) == len(Status)
    assert all(len(sentence) > 10 and "Status" not in sentence for sentence in sentences)


def failing(at: int, sample: int = 1):
    """cos, with a sample that becomes NaN at a call."""
    calls = []

    def f(z):
        calls.append(1)
        lost = (torch.arange(len(z)) == sample).unsqueeze(1) & (len(calls) >= at)
        return torch.where(lost.to(z.device), torch.nan, torch.cos(z))

    return f


def test_a_solution_prints_what_happened():
    solution = gdeq.solve(failing(4), torch.zeros(4, 3), Broyden(tol=1e-6))
    first, second = str(solution).splitlines()
    assert re.fullmatch(
        rf"3 of 4 samples converged in at most {int(solution.steps.max())} steps, "
        rf"{solution.evals} evaluations of f, largest residual \d\.\de-\d\d, "
        r"largest estimated error \d\.\de-\d\d",
        first,
    )
    assert second.startswith(f"  sample 1: {Status.NONFINITE} [step 3, residual ")
    assert repr(solution) == f"<Solution: {first}>"
    lost = str(gdeq.solve(failing(3), torch.zeros(3, 4), Broyden(5, 0.0))).splitlines()
    assert lost[0].startswith("3 samples, not asked to converge, 1 lost: at most 5 steps")
    assert lost[1].startswith("  sample 1: stopped: f returned NaN")
    many = gdeq.solve(lambda z: z * float("nan"), torch.ones(100, 2))
    lines = str(many).splitlines()
    assert lines[0].startswith("0 of 100 samples converged")
    assert lines[1].startswith(f"  sample 0: {Status.NONFINITE_START} [")
    assert lines[2].startswith("  sample 1: the same [")
    assert lines[-1] == "  and 94 more samples"
    assert len(lines) == 8
    few = gdeq.solve(lambda z: z * float("nan"), torch.ones(6, 2))
    assert str(few).splitlines()[-1].startswith("  sample 5:")


def test_diverged_after_a_good_iterate_says_which_residual_is_which():
    """f is good near 1 until its last call, which throws z far away."""
    calls = []

    def f(z):
        calls.append(z)
        return 0.5 * z + 1 if len(calls) < 6 else 1e3 * z

    solution = gdeq.solve(f, torch.zeros(1, 2), Picard(max_iter=5))
    assert solution.status == [Status.DIVERGED]
    best, last = solution.residual.item(), solution.trace[-1, 0].item()
    assert best < 0.1 < last
    shown = f"[step 5, residual {last:.1e}; the z with the smallest ‖f(z) - z‖ is returned, "
    assert shown + f"residual {best:.1e}]" in str(solution)
    calls.clear()  # without a tolerance the last z is returned: there is one residual to show
    solution = gdeq.solve(f, torch.zeros(1, 2), Picard(max_iter=5, tol=0))
    assert f"[step 5, residual {last:.1e}]" in str(solution)


def test_what_was_not_asked_to_converge_does_not_speak_of_failure(device):
    x = data(device, 5, 4)
    unrolled = layer(device, gdeq.Unrolled(steps=3), solver=None)
    unrolled(x)
    text = str(unrolled.solution)
    start = "5 samples, not asked to converge: at most 3 steps, 3 evaluations of f, "
    residual = unrolled.solution.residual.max().item()
    assert text == start + f"largest residual {residual:.1e}"
    one = layer(device, GDEQ(refine=1), Broyden(1, 0.0))
    one(x[:1]).sum().backward()
    assert str(one.solution).startswith("1 sample, not asked to converge: at most 1 step, ")
    assert ": 1 VJP, " in str(one.solution.backward)


def test_solutions_can_be_pickled_and_copied(device):
    deq = layer(device, GDEQ(refine=1))
    deq(data(device, 3, 4)).sum().backward()
    for same in (pickle.loads(pickle.dumps(deq.solution)), copy.deepcopy(deq.solution)):
        assert torch.equal(same.z, deq.solution.z)
        assert same.backward.vjps == deq.solution.backward.vjps == 1
        assert torch.equal(same.backward.residual, deq.solution.backward.residual)
        v = data(device, 3, 4)
        assert torch.equal(same.inverse.rmatvec(v), deq.solution.inverse.rmatvec(v))


# --- the estimated error --------------------------------------------------------------------------


@pytest.mark.parametrize("tol", [1e-2, 1e-6])
def test_the_estimated_error_is_about_the_error(tol):
    ratios = []
    for seed in range(6):
        d, radius = (8, 20, 50)[seed % 3], (0.6, 1.5)[seed // 3]
        inner, outer = 1.5 * contraction(d, 1.0, seed), contraction(d, radius, seed + 100)
        x = torch.randn(20, d, generator=torch.Generator().manual_seed(seed), dtype=F64)

        def f(z, inner=inner, outer=outer, x=x):
            return torch.tanh(z @ inner.T) @ outer.T + x

        found = gdeq.solve(f, torch.zeros_like(x), Broyden(100, tol))
        fixed = gdeq.solve(f, found.z, Broyden(200, 1e-13)).z
        assert found.converged.all()
        true = (found.z - fixed).norm(dim=1) / found.z.norm(dim=1)
        ratios.append(true / found.error)
    ratio = torch.cat(ratios)
    assert ((ratio > 0.8) & (ratio < 1.3)).double().mean() > 0.9
    assert ratio.max() < 4


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["root", "softplus", "hyperbola"])
def test_a_map_that_only_tends_to_its_argument_has_a_large_estimated_error(name, tol):
    """f(z) − z tends to zero as z runs away: the residual is small, and there is no fixed point."""
    f = {
        "root": lambda z: (z * z + 1).sqrt(),
        "softplus": lambda z: z + torch.nn.functional.softplus(-z),
        "hyperbola": lambda z: z + 1 / (1 + z.abs()),
    }[name]
    z0 = 3 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = gdeq.solve(f, z0, Broyden(60, tol))
    claimed = found.error[found.converged]
    assert len(claimed) > 30
    assert (claimed > 3 * tol).double().mean() > 0.9
    assert (claimed > 0.05).double().mean() > 0.8


def test_who_has_no_inverse_estimates_no_error():
    z0 = torch.zeros(3, 4)
    assert gdeq.solve(torch.cos, z0, gdeq.Anderson(20, 1e-4)).error is None
    assert gdeq.solve(torch.cos, z0, Picard(20, 1e-4)).error is None
    assert gdeq.fixed_point(torch.cos, z0, Broyden(20, 1e-4), gdeq.Unrolled(2)).error is None
    found = gdeq.solve(torch.cos, z0, Broyden(20, 1e-4))
    assert f"largest estimated error {found.error.max().item():.1e}" in str(found)
    bad = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    for engine in ("reference", "oracle"):
        with using(engine):
            error = gdeq.solve(lambda z: 0.5 * z + 1, bad, Broyden(5, 1e-3)).error
        assert error.isnan().tolist() == [False, True]


# --- backwards ------------------------------------------------------------------------------------


@every_gradient
def test_the_backward_record_is_none_before_and_filled_after(device, gradient):
    deq = layer(device, gradient)
    assert str(BackwardRecord()) == "no backward pass yet"
    loss = deq(data(device, 3, 4)).square().sum()
    solution = deq.solution
    assert solution.backward is None
    loss.backward()
    record = solution.backward
    if isinstance(gradient, gdeq.Unrolled):
        assert record is None  # plain autograd: there is no adjoint equation
        return
    kinds = [gradient, *([gradient.gradient] if isinstance(gradient, gdeq.Measured) else [])]
    assert record.gradient == " ".join(type(kind).__name__ for kind in kinds)
    assert record.gradient in str(record)
    assert (record.vjps == 0) == (gradient in (JFB(), GDEQ(), gdeq.Measured(GDEQ())))
    assert (record.residual is None) == (gradient in (JFB(), GDEQ()))
    if record.residual is not None:
        assert record.residual.shape == (3,)
        assert not record.residual.requires_grad
    deq(data(device, 3, 4))
    assert deq.solution.backward is None


FIGURES = {
    "GDEQ-1": GDEQ(refine=1),
    "GDEQ-3": GDEQ(refine=3),
    "JFB-2": JFB(refine=2),
    "tolerance": GDEQ(tolerance=1e-2, max_refine=3),
    "NPG": gdeq.NPG(),
    "Implicit": gdeq.Implicit(),
    "measured": gdeq.Measured(JFB()),
    "measured-GDEQ": gdeq.Measured(GDEQ()),
}


def record_of(gradient, engine, device, dtype=F64, scales=(1.0, 1e-3, 10.0, 1.0)):
    """A backward pass whose samples have very different losses, and its w.

    Because x is added after all, its gradient is w.
    """
    matrix = contraction(12, 0.8, dtype=dtype).to(device)
    x = torch.randn(4, 12, dtype=dtype, device=device).requires_grad_()
    v = torch.randn(4, 12, dtype=dtype) * torch.tensor(scales, dtype=dtype).unsqueeze(1)
    with using(engine):
        solution = gdeq.fixed_point(
            lambda z: torch.tanh(z) @ matrix.T + x, torch.zeros_like(x), Broyden(6, 0.0), gradient
        )
        solution.z.backward(v.to(device))
    return solution.backward, x.grad


@pytest.mark.parametrize("engine", ["reference", "oracle"])
@pytest.mark.parametrize("gradient", FIGURES.values(), ids=FIGURES)
def test_the_figure_of_the_batch_by_hand(gradient, engine, device):
    """The larger of error and sensitivity × residual, weighted by ‖w‖."""
    record, w = record_of(gradient, engine, device)
    residual = record.residual
    if record.sensitivity is not None:
        assert (record.sensitivity >= 1).all()
        residual = record.sensitivity * residual
    torch.testing.assert_close(record.length, w.norm(dim=1), rtol=1e-6, atol=0)
    total = weights = largest = 0.0
    for i in range(4):
        known = [x[i].item() for x in (record.error, residual) if x is not None]
        weight = w[i].norm().item()
        total, weights = total + weight * max(known), weights + weight
        largest = max(largest, *known)
    assert record.batch_error.item() == pytest.approx(total / weights)
    assert f"{total / weights:.1e} (largest {largest:.1e})" in str(record)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("gradient", FIGURES.values(), ids=FIGURES)
def test_the_length_of_a_w_whose_square_is_out_of_range(gradient, scale, device):
    scales = (scale, 1.0, scale, 0.0)
    record, w = record_of(gradient, "reference", device, torch.float32, scales)
    assert record.length[3] == 0
    torch.testing.assert_close(record.length, w.double().norm(dim=1).float(), rtol=1e-5, atol=0)
    assert torch.isfinite(record.batch_error)


@pytest.mark.parametrize("gradient", [JFB(), GDEQ()], ids=str)
def test_nothing_is_known_of_a_w_that_needs_no_product(gradient, device):
    record, _ = record_of(gradient, "reference", device)
    assert record.sample_error is record.batch_error is None
    assert record.length is None  # nobody asks for it: no pass over w
    assert "not measured" in str(record)


def made(error, residual, length):
    given = (None if x is None else torch.tensor(x) for x in (error, residual, length))
    return BackwardRecord(**dict(zip(("error", "residual", "length"), given, strict=True)))


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("error", "residual", "length", "expected"),
    [
        ([0.1, 0.4], [0.3, 0.2], [1.0, 3.0], 0.375),
        ([0.1, 0.4], None, [1.0, 3.0], 0.325),
        (None, [0.3, 0.2], [1.0, 3.0], 0.225),
        ([0.1, 0.4], [0.3, 0.2], None, 0.35),
        ([INFINITY, 0.4], [0.9, 0.2], [1.0, 3.0], 0.525),  # the residual says what is known
        ([INFINITY, 0.4], None, [1.0, 3.0], 0.4),  # of the first nothing is known
        ([NAN, 0.4, 0.2], [NAN, 0.2, 0.1], [NAN, 3.0, 1.0], 0.35),
        ([0.1, 0.4], [NAN, 0.2], [1.0, 3.0], 0.4),
        ([INFINITY, NAN], None, [1.0, 3.0], NAN),
        ([INFINITY, 0.4], None, [1.0, 0.0], NAN),  # what is known has no share in the gradient
        ([INFINITY, 0.4], None, [0.0, 3.0], 0.4),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.5, 0.5], None, [3e38, 3e38], 0.5),
        ([], [], [], 0.0),
        # Two of nine have long w and a large error: the median says that all is well.
        (
            [0.2] * 7 + [0.9] * 2,
            [0.1] * 7 + [40.0, 60.0],
            [1.0] * 7 + [300.0, 200.0],
            24001.4 / 507,
        ),
    ],
)
def test_figures_of_a_batch(error, residual, length, expected):
    record = made(error, residual, length)
    assert record.batch_error.item() == pytest.approx(expected, nan_ok=True)
    record.done = True
    if len(error or ()) == 9:
        assert "error about 4.7e+01 (largest 6.0e+01)" in str(record)


@pytest.mark.parametrize("gradient", FIGURES.values(), ids=FIGURES)
def test_a_sample_that_failed_is_left_out_of_the_figures_of_its_batch(gradient):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    x[1, 0] = NAN
    others = []
    for rows in ([0, 1, 2, 3], [0, 2, 3]):
        deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z.flip(1) + x), Broyden(5, 0.0), gradient)
        deq.warns = False
        deq(x[rows].requires_grad_()).sum().backward()
        others.append(deq.solution)
    all_four, three = others
    told, expected = all_four.summary(), three.summary()
    for name in ("residual", "largest_residual", "backward_error"):
        assert told[name] == pytest.approx(expected[name], rel=1e-4)
    assert (told["backward_unknown"], expected["backward_unknown"]) == (1, 0)
    assert "nan" not in str(all_four).splitlines()[0] + str(all_four.backward)
    assert "unknown for 1 sample" in str(all_four.backward)
    assert "unknown" not in str(three.backward)
    all_failed = gdeq.DEQ(lambda z, x: z * NAN + x, Broyden(5, 0.0), gradient)
    all_failed.warns = False
    all_failed(x.requires_grad_()).sum().backward()
    assert all_failed.solution.backward.batch_error.isnan()
    assert "unknown for 4 samples" in str(all_failed.solution.backward)


def test_a_slow_direction_makes_more_of_a_residual():
    record = made([0.1, 0.4, INFINITY], [0.3, 0.2, 0.1], None)
    record.sensitivity = torch.tensor([5.0, 1.5, 7.0])
    assert record.sample_error.tolist() == pytest.approx([1.5, 0.4, 0.7])


def test_measuring_lifts_no_sample_into_the_tolerance():
    """In bf16 rounding may move a residual: that excuses, and does not promote."""
    record = BackwardRecord(tolerance=1e-2, floor=torch.full((4,), 5e-3))
    record.converged = torch.tensor([True, False, False, True])
    record.measured(torch.tensor([0.014, 0.014, 5e-4, 0.016]))
    assert record.converged.tolist() == [True, False, True, False]
    assert record.residual.tolist() == pytest.approx([0.014, 0.014, 5e-3, 0.016])
