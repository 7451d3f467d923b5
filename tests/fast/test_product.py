"""The product form of Broyden's method, plain and as Triton kernels, against the paper's form.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq.fast.kernels import choice
from gdeq.fast.product import ProductInverse
from gdeq.solution import Status
from gdeq.solve import iterate
from gdeq.state import VectorMap
from pairs import pairs
from problems import (
    Dense,
    Image,
    Multiscale,
    Named,
    Wide,
    assert_near,
    leaves,
    pack,
)
from sweeps import ledger_of

pytest.importorskip("triton")
from gdeq.fast.kernels import product as fused

FORMS = ["plain", "triton"]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def both(form, work):
    with choice.use("off"):
        expected = work()
    with choice.use(form):
        found = work()
    return expected, found


def assert_same_solution(expected, found, tolerance):
    for a, b in zip(leaves(expected.z), leaves(found.z), strict=True):
        assert_near(b, a, tolerance)
    assert expected.codes.tolist() == found.codes.tolist()
    assert expected.steps.tolist() == found.steps.tolist()
    assert expected.evals == found.evals
    assert expected.trace.shape == found.trace.shape


@pytest.mark.parametrize(
    ("kind", "radius", "tol"),
    pairs([Dense, Image, Multiscale, Named], [0.5, 0.9], [0.0, 1e-5]),
)
def test_iterates_verdicts_and_inverse_are_those_of_the_paper_s_form(form, kind, radius, tol):
    problem = kind(radius=radius).to(DEVICE)
    # Few enough steps that what is compared is not yet the rounding of a solved problem.
    solver = gdeq.Broyden(14 if tol else 6, tol)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert_same_solution(expected, found, 1e-9)
    assert_near(found.trace, expected.trace, 1e-8)
    if expected.parts is not None:
        assert_near(found.parts, expected.parts, 1e-8)
    assert isinstance(found.inverse.vectors, ProductInverse)
    assert_near(found.inverse.as_matrix(), expected.inverse.as_matrix(), 1e-8)
    x = torch.randn_like(pack(problem.z0))
    assert_near(found.inverse.matvec(x), expected.inverse.matvec(x), 1e-9)
    assert_near(found.inverse.rmatvec(x), expected.inverse.rmatvec(x), 1e-9)


@pytest.mark.parametrize(
    "gradient",
    [
        gdeq.GDEQ(),
        gdeq.GDEQ(refine=1),
        gdeq.GDEQ(refine=3),
        gdeq.GDEQ(tolerance=1e-4),
        gdeq.Implicit(gdeq.Broyden(9, 1e-10)),
        gdeq.Implicit(gdeq.Broyden(6, 1e-6), precondition=True),
        gdeq.JFB(),
    ],
    ids=repr,
)
def test_gradients_are_those_of_the_paper_s_form(form, gradient):
    def work():
        problem = Multiscale(radius=0.7).to(DEVICE)
        solution = gdeq.fixed_point(problem, problem.z0, gdeq.Broyden(7, 0.0), gradient)
        sum((leaf**2).sum() for leaf in leaves(solution.z)).backward()
        return [p.grad for p in problem.parameters()]

    for expected, found in zip(*both(form, work), strict=True):
        assert_near(found, expected, 1e-8)


@pytest.mark.parametrize(
    "solver",
    [gdeq.Broyden(20, 1e-4), gdeq.Broyden(14, 0.0), gdeq.Anderson(20, 1e-4), gdeq.Anderson(3, 0.0)],
    ids=repr,
)
def test_secants_are_those_of_the_plain_loop(form, solver):
    """Of samples that end at different times: some have fewer than are kept, some more."""

    def work():
        problem = Wide(batch=5, radius=0.8).to(DEVICE)
        with torch.no_grad():
            problem.x *= torch.logspace(-2, 1, 5, dtype=torch.float64, device=DEVICE)[:, None]
            problem.x[0] = problem.shift[0] = 0.0  # solved at the start
        solution = gdeq.fixed_point(problem, problem.z0, solver, gdeq.GDEQ(refine=1))
        return solution.steps, solution.secants.inverse().as_matrix()

    (steps, expected), (_, found) = both(form, work)
    assert steps.min() == 0 or solver.tol == 0
    assert len(set(steps.tolist())) > 1 or solver.tol == 0
    # Differences of g are known to fewer digits than g; at the end of a solve, to very few.
    assert_near(found, expected, 1e-6 if solver.tol else 1e-4)
    assert (expected + torch.eye(24, device=DEVICE)).norm() > 0.1


class Rows:
    """One scalar map after another on the samples of a batch, all of one length."""

    def __init__(self, *maps):
        self.maps = maps

    def __call__(self, z: Tensor) -> Tensor:
        return torch.stack([m(row) for m, row in zip(self.maps, z, strict=True)])


def awkward(dtype):
    """Solved at the start, converging, f = z + c, NaN after a while, diverging, NaN at once."""
    maps = Rows(
        lambda z: z,
        lambda z: 0.5 * torch.cos(z + torch.arange(5, dtype=z.dtype, device=z.device)),
        lambda z: z + 1,
        lambda z: torch.where(z.abs() > 3, torch.nan, 1.7 * z + torch.tanh(z) + 1),
        lambda z: z**3 * torch.arange(1, 6, dtype=z.dtype, device=z.device) + 2,
        lambda z: z * torch.nan,
    )
    start = torch.linspace(0.1, 0.6, 6, dtype=dtype).unsqueeze(1) * torch.ones(6, 5, dtype=dtype)
    return maps, start.to(DEVICE)


@pytest.mark.parametrize("tol", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_way_to_end(form, tol, dtype):
    f, z0 = awkward(dtype)
    solver = gdeq.Broyden(9, tol)
    expected, found = both(form, lambda: gdeq.solve(f, z0, solver))
    sound = [0, 1, 2, 3, 5]  # of the diverging one, rounding decides how it ends
    assert expected.codes[sound].tolist() == found.codes[sound].tolist()
    assert expected.steps[sound].tolist() == found.steps[sound].tolist()
    assert not found.converged[4]
    sound = [0, 1, 2, 5]
    eps = torch.finfo(dtype).eps
    assert_near(found.z[sound], expected.z[sound], 1e3 * eps)
    assert found.z.isfinite().all()
    x = torch.randn(6, 5, dtype=dtype, device=DEVICE)
    assert found.inverse.matvec(x).isfinite().all()
    assert found.inverse.rmatvec(x).isfinite().all()


def test_a_solve_that_ends_at_rounding(form):
    # So many numbers that some of them are never exact.
    source = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 200, dtype=torch.float64, generator=source).to(DEVICE) / 150

    def f(z):
        return torch.tanh(z @ matrix.T) + 0.3

    z0 = torch.zeros(2, 200, dtype=torch.float64, device=DEVICE)
    expected, found = both(form, lambda: gdeq.solve(f, z0, gdeq.Broyden(40, 1e-17)))
    assert expected.codes.tolist() == [int(gdeq.Status.ROUNDING)] * 2
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.max() < 40


@pytest.mark.parametrize("solver", [gdeq.Broyden(30, 1e-4), gdeq.Anderson(40, 1e-4)], ids=str)
def test_a_linear_solve_claims_no_less_than_the_rounding_at_its_z(form, solver):
    """I − A has the smallest singular value 0, 1e-6, 1e-5 or 0.5."""
    source = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(8, 4, 4, generator=source, dtype=torch.float64))
    S = torch.tensor([1.3, 1.0, 0.8, 0.0], dtype=torch.float64).repeat(8, 1)
    S[:, -1] = torch.tensor([0, 0, 1e-6, 1e-6, 1e-5, 1e-5, 0.5, 0.5])
    A = (torch.eye(4).double() - 0.9 * U @ torch.diag_embed(S) @ U.mT).float().to(DEVICE)
    right = torch.randn(8, 4, generator=source).to(DEVICE)

    def f(z):
        return right + torch.einsum("bij,bj->bi", A, z)

    def work():
        return iterate(f, right, solver, precision=2.0**-23, right=right)

    expected, found = both(form, work)
    exact = (
        right.double() - found.z.double() + torch.einsum("bij,bj->bi", A.double(), found.z.double())
    )
    exact = exact.norm(dim=1) / right.double().norm(dim=1)
    assert expected.converged.tolist() == found.converged.tolist()
    assert found.converged[6:].all()
    assert not found.converged[:4].any()
    assert (found.residual > 0.25 * exact).all()


def test_the_rounding_of_f_at_a_far_start_hides_no_residual(form):
    def f(z):
        return 0.7 * torch.tanh(z) + torch.linspace(0.5, 1, 24, device=DEVICE).to(z.dtype)

    z0 = torch.full((2, 24), 1e4, dtype=torch.bfloat16, device=DEVICE)
    with choice.use(form):
        found = gdeq.solve(f, z0, gdeq.Broyden(20, 1e-2))
    z = found.z.double()
    true = (f(z) - z).norm(dim=1) / z.norm(dim=1)
    assert found.converged.all(), str(found)
    assert (true < 1.5e-2).all()


@pytest.mark.parametrize("tol", [0.0, 1e-2])
@pytest.mark.parametrize("bits", [16, 8])
def test_the_estimated_error_of_a_solve_in_half_precision(form, bits, tol):
    """The next step is the one that is in the store, rounded."""
    problem = Multiscale(radius=0.9).to(DEVICE).to(torch.bfloat16)
    z0 = tuple(part.to(torch.bfloat16) for part in problem.z0)
    with choice.use(form):
        found = gdeq.solve(problem, z0, gdeq.Broyden(3, tol, step_bits=bits))
        z = pack(found.z).float()
        step = found.inverse.matvec(pack(problem(found.z)).float() - z)
    ratio = found.error * z.norm(dim=1) / step.norm(dim=1)
    assert (ratio - 1).abs().max() < 0.1


@pytest.mark.parametrize("stop", ["relative", "whole"])
@pytest.mark.parametrize("tol", [0.0, 1e-3, 1e-12])
def test_parts_are_judged_one_by_one(form, stop, tol):
    """Five, of different sizes in every sense, one of several chunks and one zero in the end."""
    sizes, slopes = [3, 1100, 40, 16, 5], [0.9, 0.1, 0.5, 0.7, 0.3]
    scales = [1e-4, 1.0, 1e-2, 1.0, 0.0]

    def f(z):
        return tuple(
            a * part + scale * torch.linspace(0.5, 1, part.shape[1], device=DEVICE)
            for part, a, scale in zip(z, slopes, scales, strict=True)
        )

    z0 = tuple(torch.ones(2, size, dtype=torch.float64, device=DEVICE) for size in sizes)
    solver = gdeq.Broyden(9, tol, stop=stop)
    expected, found = both(form, lambda: gdeq.solve(f, z0, solver))
    assert_same_solution(expected, found, 1e-8)
    assert_near(found.trace, expected.trace, 1e-6)
    assert_near(found.residual, expected.residual, 1e-6)
    if stop == "whole":
        assert found.parts is None
        return
    assert found.parts.shape == (2, 5)
    assert_near(found.parts, expected.parts, 1e-6)
    assert_near(found.parts.amax(1), found.residual, 1e-6)


def test_products_with_the_inverse_are_differentiable(form):
    problem = Dense(radius=0.7).to(DEVICE)
    z = torch.zeros_like(problem.x)
    with choice.use(form):
        inverse = gdeq.solve(problem, z, gdeq.Broyden(9, 1e-9)).inverse
        x = torch.randn_like(z).requires_grad_()
        v = torch.randn_like(z)
        (found,) = torch.autograd.grad(inverse.matvec(x), x, v)
        assert_near(found, inverse.rmatvec(v), 1e-10)


def test_a_sample_that_misses_the_tolerance_gets_its_best_iterate_and_that_inverse(form):
    """The residual of this map goes up again before it is out of steps."""
    matrix = torch.tensor([[0.0, 4.0], [-4.0, 0.0]], dtype=torch.float64, device=DEVICE)

    def f(z):
        return torch.tanh(z @ matrix.T) + torch.tensor([0.3, -0.2], dtype=z.dtype, device=DEVICE)

    z0 = torch.tensor([[0.1, 0.2], [2.0, -1.0]], dtype=torch.float64, device=DEVICE)
    for steps in range(1, 9):
        solver = gdeq.Broyden(steps, 1e-14)
        expected, found = both(form, lambda solver=solver: gdeq.solve(f, z0, solver))
        assert_near(found.z, expected.z, 1e-9)
        assert_near(found.residual, expected.residual, 1e-9)
        assert_near(found.inverse.as_matrix(), expected.inverse.as_matrix(), 1e-7)
        for solution in (expected, found):
            step = solution.inverse.matvec(f(solution.z) - solution.z)
            assert_near(solution.error, step.norm(dim=1) / solution.z.norm(dim=1), 1e-8)


@pytest.mark.parametrize(
    "shapes",
    [[(300,), (2, 19, 31), (3,)], [(304,), (4, 17, 16), (1024,), (16,)]],
    ids=["any size", "multiples of 16"],
)
def test_vectors_longer_than_a_chunk_and_parts_that_do_not_fill_one(form, shapes):
    torch.manual_seed(1)
    n = shapes[0][0]
    matrix = torch.randn(n, n, dtype=torch.float64, device=DEVICE) * 0.02

    def f(z):
        joined = torch.cat([part.flatten(1) for part in z], dim=1)
        out = torch.tanh(joined[:, :n] @ matrix.T) * 0.9
        rest = 0.5 * torch.cos(joined[:, n:])
        flat = torch.cat([out, rest], dim=1)
        sizes = [part[0].numel() for part in z]
        parts = flat.split(sizes, dim=1)
        return tuple(p.reshape(q.shape) + 0.1 for p, q in zip(parts, z, strict=True))

    z0 = tuple(torch.zeros(2, *shape, dtype=torch.float64, device=DEVICE) for shape in shapes)
    expected, found = both(form, lambda: gdeq.solve(f, z0, gdeq.Broyden(10, 1e-9)))
    assert_same_solution(expected, found, 1e-10)


def test_a_channels_last_state_is_handed_to_f_as_it_lies(form):
    seen = []
    conv = torch.nn.Conv2d(3, 3, 3, padding=1).double().to(DEVICE)
    with torch.no_grad():
        conv.weight.mul_(0.5)

    def f(z):
        seen.append(all(p.is_contiguous(memory_format=torch.channels_last) for p in z))
        return tuple(torch.tanh(conv(part)) for part in z)

    z0 = tuple(torch.zeros(2, 3, n, n).double().to(DEVICE) for n in (4, 2))
    last = tuple(part.to(memory_format=torch.channels_last) for part in z0)
    with choice.use("off"), torch.no_grad():
        expected = gdeq.solve(f, z0, gdeq.Broyden(12, 1e-8))
    seen.clear()
    with choice.use(form), torch.no_grad():
        found = gdeq.solve(f, last, gdeq.Broyden(12, 1e-8))
    assert all(seen)
    for a, b in zip(expected.z, found.z, strict=True):
        assert_near(b, a, 1e-9)


def test_half_precision_steps_do_not_spoil_the_gradient(form):
    """Under bf16 autocast steps are rounded as well: as good as the plain form's gradient."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64).to(DEVICE)
    with torch.no_grad():
        layer.weight.mul_(0.8)
    x = torch.randn(8, 64, device=DEVICE)

    def gradient(kernels, autocast):
        layer.zero_grad()
        with choice.use(kernels), torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            solution = gdeq.fixed_point(
                lambda z: torch.tanh(layer(z) + x),
                torch.zeros_like(x),
                gdeq.Broyden(9, 0.0),
                gdeq.GDEQ(),
            )
            (solution.z * torch.linspace(-1, 1, 64, device=DEVICE)).sum().backward()
        if kernels != "off" and autocast:
            assert solution.inverse.vectors.steps.dtype == torch.bfloat16
        return layer.weight.grad.flatten().clone()

    exact = gradient("off", False)
    plain, found = gradient("off", True), gradient(form, True)

    def angle(a):
        return 1 - torch.nn.functional.cosine_similarity(a, exact, dim=0)

    assert angle(found) < 2 * angle(plain) + 1e-4


@pytest.mark.parametrize("steps", [8, 30])
def test_steps_of_a_float16_f_may_be_rounded_further(steps, monkeypatch):
    """In bfloat16 they lead as far, and leave as good an inverse, as in float32."""
    d, batch = 10, 64
    weight = 0.9 * torch.randn(batch, d, d) / d**0.5
    x, v = torch.randn(2, batch, d)

    def inner(z):
        return torch.einsum("bij,bj->bi", weight, z) + x

    def f(z):
        return torch.tanh(inner(z.half().float())).half().float()

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(gdeq.fast.product, "store_dtype", lambda *_, kept=dtype: kept)
        with choice.use("plain"):
            found[dtype] = iterate(
                f,
                torch.zeros(batch, d),
                gdeq.Broyden(steps, 0.0),
                precision=torch.finfo(torch.float16).eps,
            )
        assert found[dtype].inverse.steps.dtype == dtype
    exactly, rounded = found.values()
    assert rounded.residual.median() < 1.2 * exactly.residual.median() + 1e-5
    slope = 1 - torch.tanh(inner(exactly.z)) ** 2
    matrix = torch.eye(d) - slope[:, :, None] * weight  # I − J
    exact = torch.linalg.solve(matrix.mT.double(), v.double())

    def error(w):
        return ((w.double() - exact).norm(dim=1) / exact.norm(dim=1)).median()

    errors = [error(it.inverse.T.negative_matvec(v)) for it in (exactly, rounded)]
    assert errors[0] < 0.9 * error(v)  # the inverse is worth something here: v is JFB's w
    assert abs(errors[1] - errors[0]) < 0.03 * error(v)


@pytest.mark.parametrize(
    ("slope", "tol"), [(0.5, 1e-4), (0.99, 0.0), (0.995, 0.0), (0.995, 1e-4), (2.0, 1e-4)]
)
def test_a_float16_state_is_handed_over_as_parts_and_stays_in_its_range(
    form, slope, tol, monkeypatch
):
    """Kept in float32, z may leave what float16 can hold; a bounded f does not show it."""
    c = torch.tensor([[3.0], [100.1], [500.0], [2000.0]]).half().to(DEVICE)
    z0 = (torch.zeros(4, 1).half().to(DEVICE), torch.zeros(4, 2).half().to(DEVICE))

    def f(z):
        assert all(part.dtype == torch.float16 for part in z)
        return (slope * z[0] + c).clamp(-1000, 1000), (0.5 * z[1] + 0.1 * z[0]).clamp(-1000, 1000)

    seen = set()
    # One is lost at the second step: before, there, and after it.
    lost = slope == 0.995 and not tol
    for max_iter in (1, 2, 3, 7) if lost or CUDA or form == "plain" else (7,):
        solver = gdeq.Broyden(max_iter, tol, stop="whole")
        with choice.use(form):
            found = gdeq.solve(f, z0, solver)
            with monkeypatch.context() as patch:
                patch.setattr(VectorMap, "parts_dtype", None)  # by `VectorMap.inside` instead
                expected = gdeq.solve(f, z0, solver)
        assert isinstance(found.inverse.vectors, ProductInverse)
        assert all(torch.isfinite(part).all() for part in found.z)
        assert_same_solution(expected, found, 1e-3)
        seen.update(found.status)
    assert (Status.NONFINITE in seen) == (slope == 0.995)  # that one leaves the range


@pytest.mark.parametrize("refine", [0, 1])
def test_a_float16_state_has_gradients(form, refine):
    weight = (0.5 * torch.eye(6)).to(DEVICE)

    def work():
        x = torch.linspace(-1, 1, 18, device=DEVICE).reshape(3, 6).requires_grad_()
        solution = gdeq.fixed_point(
            lambda z: (torch.tanh(z[0].float() @ weight + x).half(),),
            (torch.zeros(3, 6, device=DEVICE).half(),),
            gdeq.Broyden(5, 0.0),
            gdeq.GDEQ(refine=refine),
        )
        solution.z[0].float().square().sum().backward()
        return x.grad

    expected, found = both(form, work)
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)  # steps are bfloat16


def test_an_f_that_writes_into_the_same_memory_at_each_call(form):
    """f(z) = z + c stalls; seen without the last values, y would be −s and anything be learnt."""
    place = torch.empty(3, 5, dtype=torch.float64, device=DEVICE)
    c = torch.linspace(0.1, 1.0, 5, dtype=torch.float64, device=DEVICE)

    def f(z):
        return torch.add(z, c, out=place)

    z0 = torch.zeros_like(place)
    expected, found = both(form, lambda: gdeq.solve(f, z0, gdeq.Broyden(20, 1e-6)))
    assert found.codes.tolist() == expected.codes.tolist()
    assert not found.converged.any()


@pytest.mark.parametrize("tol", [1e-5, 1e-14])
def test_repeated_steps_are_the_counted_ones(tol):
    """What a recording repeats, played by hand: the number of the iterate is on the device."""
    problem = Dense(radius=0.9).to(DEVICE)
    solver, z = gdeq.Broyden(9, tol), torch.zeros_like(problem.x)
    with choice.use("triton"), torch.no_grad():
        expected = gdeq.solve(problem, z, solver)
        sweep = fused.Sweep(z, [z.shape[1]], z.dtype, solver, torch.finfo(z.dtype).eps, 9, None)
        sweep.steps = sweep.steps.new_empty(len(z), 10, z.shape[1])  # as in a recording
        sweep.take(0, problem(sweep.z).reshape(-1))
        sweep.prepare_repetition()
        played = 0
        while played < 9 and sweep.unfinished.item():
            sweep.judge_next(problem(sweep.z).reshape(-1))
            sweep.go_on()
            played += 1
        found = sweep.settle(9)
        assert found.codes.tolist() == expected.codes.tolist()
        assert played == int(expected.steps.max())
        assert_near(found.z, expected.z, 1e-12)
        assert_near(found.residual, expected.residual, 1e-12)
        assert_near(sweep.trace[:played], expected.trace, 1e-12)
        assert not z.any()  # the first iterate is left as it was
        x = torch.randn_like(z)
        assert_near(found.inverse.rmatvec(x), expected.inverse.rmatvec(x), 1e-10)


@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_sample_that_is_done_no_steps_are_read(at_once, monkeypatch):
    monkeypatch.setattr(fused, "tuning", replace(fused.tuning, judge_in_dots=at_once))
    z = torch.zeros(2, 5, dtype=torch.float64, device=DEVICE)
    shift = torch.linspace(-1, 1, 5, dtype=z.dtype, device=DEVICE)
    sweep = fused.Sweep(z, [5], z.dtype, gdeq.Broyden(7, 1e-9), 1e-16, 7, None)
    for t in range(6):
        if t == 3:
            sweep.steps[0] = torch.nan
        fz = torch.cos(sweep.z + shift)
        fz[0] = 0.5  # found by the first step
        sweep.take(t, fz.reshape(-1))
    assert sweep.gram.isfinite().all()
    assert ledger_of(sweep).codes.tolist() == [Status.CONVERGED, Status.RUNNING]
    assert ledger_of(sweep).steps.tolist() == [1, 5]
    assert sweep.left() == 1
    assert (sweep.z[0] == 0.5).all()
    assert sweep.steps[0].isnan().all()  # nor written
    sweep.settle(5)
    assert (sweep.trace[:5, 0] == 0).all()
    assert (sweep.z[0] == 0.5).all()


def test_where_the_product_form_does_not_apply_the_plain_one_runs(form):
    problem = Dense().to(DEVICE)
    for solver in [
        gdeq.Broyden(20, memory=3),
        gdeq.Broyden(20, max_step=0.5),
        gdeq.Broyden(20, line_search=2),
        gdeq.Broyden(200),
    ]:
        with choice.use(form):
            found = gdeq.solve(problem, problem.z0, solver)
        assert not isinstance(found.inverse.vectors, ProductInverse)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="kernels are auto, triton, plain, off"), choice.use("gpu"):
        pass
