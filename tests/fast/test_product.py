"""Solves from their steps alone, in plain PyTorch and as kernels, against the reference engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq import Anderson, Broyden, Status
from gdeq.fast import product
from gdeq.fast.product import ProductInverse
from gdeq.solvers.base import System
from pairs import pairs
from problems import Dense, Image, Multiscale, Named, Wide, assert_near, leaves, pack

pytest.importorskip("triton")
from sweeps import DEVICE, both, engine_of, use

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def near(form, solver):
    """How far a solve is from the reference; kernels are given mixing and ridge in float32."""
    exact = form == "oracle" or not isinstance(solver, Anderson) or solver.mixing == 1
    return 1e-9 if exact else 1e-5


def assert_same(expected, found, accuracy):
    for a, b in zip(leaves(expected.z), leaves(found.z), strict=True):
        assert_near(b, a, accuracy)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.evals == expected.evals
    assert_near(found.trace, expected.trace, 10 * accuracy)
    assert_near(found.residual, expected.residual, 10 * accuracy)
    assert (found.parts is None) == (expected.parts is None)
    if expected.parts is not None:
        assert_near(found.parts, expected.parts, 10 * accuracy)


class Names(Named):
    """More numbers than steps: else what is compared is the rounding of a solved problem."""

    template = {"slow": torch.empty(1, 9), "fast": torch.empty(1, 3, 5)}  # noqa: RUF012


@pytest.mark.parametrize(
    ("kind", "radius", "tol"), pairs([Dense, Image, Multiscale, Named], [0.5, 0.9], [0.0, 1e-5])
)
def test_broyden_s_iterates_verdicts_and_inverse(form, kind, radius, tol):
    problem = kind(batch=2, radius=radius).to(DEVICE)
    # Few enough steps that what is compared is not yet the rounding of a solved problem.
    solver = Broyden(14 if tol else 6, tol)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert_same(expected, found, 1e-9)
    assert isinstance(found.inverse.vectors, ProductInverse)
    x = torch.randn_like(pack(problem.z0))
    with use("oracle"):  # in kernels, column by column, it is slow
        assert_near(found.inverse.as_matrix(), expected.inverse.as_matrix(), 1e-8)
    with use(form):
        assert_near(found.inverse.matvec(x), expected.inverse.matvec(x), 1e-9)
        assert_near(found.inverse.rmatvec(x), expected.inverse.rmatvec(x), 1e-9)
        # Its own product with x, differentiated
        x.requires_grad_()
        v = torch.randn_like(x)
        (back,) = torch.autograd.grad(found.inverse.matvec(x), x, v)
        assert_near(back, expected.inverse.rmatvec(v), 1e-9)


ANDERSON = pairs([Wide, Image, Multiscale, Names], [1, 3, 5, 8, 16], [0.0, 1e-5], [1.0, 0.7])
IN_KERNELS = [  # fewer: the interpreter is slow, and each memory is compiled
    (Wide, 1, 0.0, 1.0),
    (Image, 3, 1e-5, 0.7),
    (Multiscale, 5, 0.0, 1.0),
    (Names, 8, 1e-5, 1.0),
    (Wide, 16, 1e-5, 0.7),
]


@pytest.mark.parametrize(
    ("form", "kind", "memory", "tol", "mixing"),
    [("oracle", *row) for row in ANDERSON] + [("fast", *row) for row in IN_KERNELS],
)
def test_anderson_s_iterates_and_verdicts(form, kind, memory, tol, mixing):
    problem = kind(batch=2, radius=0.9).to(DEVICE)
    # With a tolerance more steps than the store has room for at first.
    solver = Anderson(11 if tol else 8, tol, memory=memory, mixing=mixing)
    expected, found = both(form, lambda: gdeq.solve(problem, problem.z0, solver))
    assert found.inverse is None
    assert_same(expected, found, near(form, solver))


BY_BROYDEN, BY_ANDERSON = Broyden(7, 0.0), Anderson(4, 0.0, memory=2)


@pytest.mark.parametrize(
    ("solver", "gradient"),
    [
        (BY_BROYDEN, gdeq.GDEQ()),
        (BY_BROYDEN, gdeq.GDEQ(refine=1)),
        (BY_BROYDEN, gdeq.GDEQ(refine=3)),
        (BY_BROYDEN, gdeq.GDEQ(tolerance=1e-4)),
        (BY_BROYDEN, gdeq.Implicit(Broyden(9, 1e-10))),
        (BY_BROYDEN, gdeq.Implicit(Broyden(6, 1e-6), precondition=True)),
        (BY_BROYDEN, gdeq.JFB()),
        (BY_ANDERSON, gdeq.JFB()),
        (BY_ANDERSON, gdeq.NPG()),
        (BY_ANDERSON, gdeq.GDEQ(refine=2)),
        (BY_ANDERSON, gdeq.GDEQ(tolerance=0.1, max_refine=3)),
        (BY_ANDERSON, gdeq.Implicit(Broyden(5, 0.0))),
        (BY_ANDERSON, gdeq.Implicit(Anderson(5, 0.0, memory=3))),
        (BY_ANDERSON, gdeq.Implicit(Anderson(8, 1e-3, memory=3, mixing=0.7))),
    ],
    ids=repr,
)
def test_gradients(form, solver, gradient):
    small = isinstance(gradient, gdeq.Implicit) and solver is BY_ANDERSON
    kind = Dense if small else Multiscale

    def work():
        problem = kind(batch=2, radius=0.7).to(DEVICE)
        solution = gdeq.fixed_point(problem, problem.z0, solver, gradient)
        (pack(solution.z) * problem.cotangent()).sum().backward()
        return [p.grad for p in problem.parameters()]

    for expected, found in zip(*both(form, work), strict=True):
        assert_near(found, expected, 1e-6 if "0.7" in repr(gradient) else 1e-8)


@pytest.mark.parametrize(
    "solver",
    [Broyden(20, 1e-4), Broyden(12, 0.0), Anderson(20, 1e-4), Anderson(3, 0.0)],
    ids=repr,
)
def test_secants(form, solver):
    """Of samples that end at different times: some have fewer than are kept, some more."""

    def work():
        problem = Wide(batch=5, radius=0.8).to(DEVICE)
        with torch.no_grad():
            problem.x *= torch.logspace(-2, 1, 5, dtype=F64, device=DEVICE)[:, None]
            problem.x[0] = problem.shift[0] = 0.0  # solved at the start
        solution = gdeq.fixed_point(problem, problem.z0, solver, gdeq.GDEQ(refine=1))
        return solution.steps, solution.secants.inverse().as_matrix()

    (steps, expected), (_, found) = both(form, work)
    assert steps.min() == 0 or solver.tol == 0
    assert len(set(steps.tolist())) > 1 or solver.tol == 0
    # Differences of g are known to fewer digits than g; at the end of a solve, to very few.
    assert_near(found, expected, 1e-6 if solver.tol else 1e-4)
    assert (expected + torch.eye(24, device=DEVICE)).norm() > 0.1


# --- ways to end ----------------------------------------------------------------------------------


class Rows:
    """One map after another on the samples of a batch."""

    def __init__(self, *maps):
        self.maps = maps

    def __call__(self, z: Tensor) -> Tensor:
        return torch.stack([m(row) for m, row in zip(self.maps, z, strict=True)])


def numbers(z, first=0):
    return torch.arange(first, first + len(z), dtype=z.dtype, device=z.device)


@pytest.mark.parametrize("tol", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_every_way_to_end_by_broyden(form, tol, dtype):
    f = Rows(
        lambda z: z,  # solved at the start
        lambda z: 0.5 * torch.cos(z + numbers(z)),  # converges
        lambda z: z + 1,  # g does not change
        lambda z: torch.where(z.abs() > 3, torch.nan, 1.7 * z + torch.tanh(z) + 1),  # lost later
        lambda z: z**3 * numbers(z, 1) + 2,  # diverges
        lambda z: z * torch.nan,  # lost at once
    )
    z0 = torch.linspace(0.1, 0.6, 6, dtype=dtype, device=DEVICE)[:, None].repeat(1, 5)
    expected, found = both(form, lambda: gdeq.solve(f, z0, Broyden(9, tol)))
    sound = [0, 1, 2, 3, 5]  # of the diverging one, rounding decides how it ends
    assert expected.codes[sound].tolist() == found.codes[sound].tolist()
    assert expected.steps[sound].tolist() == found.steps[sound].tolist()
    assert not found.converged[4]
    sound = [0, 1, 2, 5]
    assert_near(found.z[sound], expected.z[sound], 1e3 * torch.finfo(dtype).eps)
    assert found.z.isfinite().all()
    x = torch.randn(6, 5, dtype=dtype, device=DEVICE)
    with use(form):
        assert found.inverse.matvec(x).isfinite().all()
        assert found.inverse.rmatvec(x).isfinite().all()


@pytest.mark.parametrize(("dtype", "tol"), [(F64, 0.0), (F32, 1e-5)])
def test_every_way_to_end_by_anderson(form, dtype, tol):
    f = Rows(
        lambda z: z,  # solved at the start
        lambda z: 0.1 * torch.cos(z + numbers(z)),  # done soon
        lambda z: 0.9 * torch.cos(z + numbers(z)),  # and later
        lambda z: z + 1,  # g does not change
        lambda z: torch.full_like(z, 0.3),  # found by one step
        lambda z: torch.where(z < -1, torch.nan, 1.1 * z + 1),  # its solution is at −10
        torch.cos,  # starts at a NaN
    )
    z0 = torch.linspace(0.1, 0.6, 7, dtype=dtype, device=DEVICE)[:, None].repeat(1, 5)
    z0[6, 2] = torch.nan
    expected, found = both(form, lambda: gdeq.solve(f, z0, Anderson(7, tol, memory=3)))
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.tolist() == expected.steps.tolist()
    last = Status.CONVERGED if tol else Status.FIXED_STEPS
    others = [last, last, Status.STALLED, last, Status.NONFINITE, Status.NONFINITE_START]
    assert found.codes[[0, 1, 3, 4, 5, 6]].tolist() == others
    assert len(set(found.steps.tolist())) > (3 if tol else 1)
    accuracy = 1e-9 if dtype == F64 else 1e-5
    assert_near(found.z[:6], expected.z[:6], accuracy)
    assert torch.equal(found.z[6].isnan(), z0[6].isnan())
    assert_near(found.trace[:, :6], expected.trace[:, :6], accuracy)


def test_a_solve_that_ends_at_rounding(form):
    # So many numbers that some of them are never exact.
    source = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 200, dtype=F64, generator=source).to(DEVICE) / 150
    z0 = torch.zeros(2, 200, dtype=F64, device=DEVICE)
    solver = Broyden(40, 1e-17)
    expected, found = both(
        form, lambda: gdeq.solve(lambda z: torch.tanh(z @ matrix.T) + 0.3, z0, solver)
    )
    assert expected.codes.tolist() == [int(Status.ROUNDING)] * 2
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.steps.max() < 40


@pytest.mark.parametrize("solver", [Broyden(15, 1e-4), Anderson(15, 1e-4, memory=3)], ids=str)
def test_a_linear_solve_claims_no_less_than_the_rounding_at_its_z(form, solver):
    """I − A has the smallest singular value 0, 1e-6, 1e-5 or 0.5."""
    source = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(4, 4, 4, generator=source, dtype=F64))
    S = torch.tensor([1.3, 1.0, 0.8, 0.0], dtype=F64).repeat(4, 1)
    S[:, -1] = torch.tensor([0, 1e-6, 1e-5, 0.5])
    A = (torch.eye(4).double() - 0.9 * U @ torch.diag_embed(S) @ U.mT).float().to(DEVICE)
    right = torch.randn(4, 4, generator=source).to(DEVICE)

    def f(z):
        return right.to(z.dtype) + torch.einsum("bij,bj->bi", A.to(z.dtype), z)

    def work():
        return engine_of(right).iterate(f, right, solver, System(2.0**-23, right=right))

    expected, found = both(form, work)
    z = found.z.double()
    exact = (f(z) - z).norm(dim=1) / right.double().norm(dim=1)
    assert expected.converged.tolist() == found.converged.tolist()
    assert found.converged[3]
    assert not found.converged[:2].any()
    assert (found.residual > 0.25 * exact).all()


def test_the_rounding_of_f_at_a_far_start_hides_no_residual(form):
    def f(z):
        return 0.7 * torch.tanh(z) + torch.linspace(0.5, 1, 24, device=DEVICE).to(z.dtype)

    z0 = torch.full((2, 24), 1e4, dtype=BF16, device=DEVICE)
    with use(form):
        found = gdeq.solve(f, z0, Broyden(20, 1e-2))
    z = found.z.double()
    assert found.converged.all(), str(found)
    assert ((f(z) - z).norm(dim=1) < 1.5e-2 * z.norm(dim=1)).all()


@pytest.mark.parametrize(
    ("dtype", "slope", "far"),
    [(F64, 1e-6, 0.5), (F32, 3e-6, 0.0)],
    ids=["g is still large", "g vanishes in rounding"],
)
def test_a_far_iterate_is_not_taken_for_a_solution(form, dtype, slope, far):
    """g = 1 − slope·z near 0, so the second step leads far away, where any g is small beside z."""

    def f(z):
        g = torch.where(z.abs() < 100, 1 - slope * z, far * torch.ones_like(z))
        g[1] = 0.5 * torch.cos(z[1]) - z[1]  # beside a sample that converges
        return z + g

    z0, seen = torch.zeros(2, 5, dtype=dtype, device=DEVICE), []
    expected, found = both(form, lambda: gdeq.solve(f, z0, Broyden(20, 1e-3)))
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.converged.tolist() == [False, True]
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.trace[:, 0].min() <= 1e-3  # it looked converged on the way
    with use(form):
        gdeq.solve(lambda z: seen.append(z[0].abs().min().item()) or f(z), z0, Broyden(3, 1e-3))
    assert max(seen) > 1e4


@pytest.mark.parametrize(
    ("stop", "tol"), [("relative", 0.0), ("relative", 1e-3), ("relative", 1e-12), ("whole", 1e-3)]
)
def test_parts_are_judged_one_by_one(form, stop, tol):
    """Five, of different sizes in every sense, one of several chunks and one zero in the end."""
    sizes, slopes = [3, 1100, 40, 16, 5], [0.9, 0.1, 0.5, 0.7, 0.3]
    scales = [1e-4, 1.0, 1e-2, 1.0, 0.0]

    def f(z):
        return tuple(
            a * part + scale * torch.linspace(0.5, 1, part.shape[1], device=DEVICE)
            for part, a, scale in zip(z, slopes, scales, strict=True)
        )

    z0 = tuple(torch.ones(2, size, dtype=F64, device=DEVICE) for size in sizes)
    expected, found = both(form, lambda: gdeq.solve(f, z0, Broyden(6, tol, stop=stop)))
    assert_same(expected, found, 1e-7)
    if stop == "relative":
        assert found.parts.shape == (2, 5)
        assert_near(found.parts.amax(1), found.residual, 1e-6)


@pytest.mark.parametrize("solver", [Broyden(8, 1e-14), Anderson(7, 1e-14, memory=2)], ids=str)
def test_a_sample_that_misses_the_tolerance_gets_its_best_iterate_and_that_inverse(form, solver):
    """The residual of this map goes up again before it is out of steps."""
    matrix = torch.tensor([[0.0, 4.0], [-4.0, 0.0]], dtype=F64, device=DEVICE)
    shift = torch.tensor([0.3, -0.2], dtype=F64, device=DEVICE)

    def f(z):
        return torch.tanh(z @ matrix.T) + shift

    z0 = torch.tensor([[0.1, 0.2], [2.0, -1.0]], dtype=F64, device=DEVICE)
    went_back = False
    many = range(1, solver.max_iter + 1) if form == "oracle" else (5, 7)
    for steps in many:
        one = replace(solver, max_iter=steps)
        expected, found = both(form, lambda one=one: gdeq.solve(f, z0, one))
        went_back |= bool((expected.residual < expected.trace[-1]).any())
        assert_near(found.z, expected.z, 1e-9)
        assert_near(found.residual, expected.residual, 1e-9)
        if isinstance(solver, Anderson):
            continue
        with use(form):
            assert_near(found.inverse.as_matrix(), expected.inverse.as_matrix(), 1e-7)
        for solution in (expected, found):
            step = solution.inverse.matvec(f(solution.z) - solution.z)
            assert_near(solution.error, step.norm(dim=1) / solution.z.norm(dim=1), 1e-8)
    assert went_back


# --- how states lie in memory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [[(300,), (2, 19, 31), (3,)], [(304,), (4, 17, 16), (1024,), (16,)]],
    ids=["any size", "multiples of 16"],
)
def test_vectors_longer_than_a_chunk_and_parts_that_do_not_fill_one(form, shapes):
    torch.manual_seed(1)
    n = shapes[0][0]
    matrix = torch.randn(n, n, dtype=F64, device=DEVICE) * 0.02

    def f(z):
        first, *others = z
        mixed = torch.tanh(first @ matrix.T) * 0.9 + 0.1
        return mixed, *(0.5 * torch.cos(part) + 0.1 for part in others)

    z0 = tuple(torch.zeros(2, *shape, dtype=F64, device=DEVICE) for shape in shapes)
    expected, found = both(form, lambda: gdeq.solve(f, z0, Broyden(10, 1e-9)))
    assert_same(expected, found, 1e-10)


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
    with use("reference"):
        expected = gdeq.solve(f, z0, Broyden(12, 1e-8))
    seen.clear()
    with use(form):
        found = gdeq.solve(f, last, Broyden(12, 1e-8))
    assert all(seen)
    for a, b in zip(expected.z, found.z, strict=True):
        assert_near(b, a, 1e-9)


def test_an_f_that_writes_into_the_same_memory_at_each_call(form):
    """f(z) = z + c stalls; seen without the last values, y would be −s and anything be learnt."""
    place = torch.empty(3, 5, dtype=F64, device=DEVICE)
    c = torch.linspace(0.1, 1.0, 5, dtype=F64, device=DEVICE)
    z0 = torch.zeros_like(place)
    expected, found = both(
        form, lambda: gdeq.solve(lambda z: torch.add(z, c, out=place), z0, Broyden(8, 1e-6))
    )
    assert found.codes.tolist() == expected.codes.tolist()
    assert not found.converged.any()


# --- an f in half precision -----------------------------------------------------------------------


@pytest.mark.parametrize("tol", [0.0, 1e-2])
@pytest.mark.parametrize("bits", [16, 8])
def test_the_estimated_error_of_a_solve_in_half_precision(form, bits, tol):
    """The next step is the one that is in the store, rounded."""
    problem = Multiscale(radius=0.9).to(DEVICE).to(BF16)
    z0 = tuple(part.to(BF16) for part in problem.z0)
    with use(form):
        found = gdeq.solve(problem, z0, Broyden(3, tol, step_bits=bits))
        z = pack(found.z).float()
        step = found.inverse.matvec(pack(problem(found.z)).float() - z)
    ratio = found.error * z.norm(dim=1) / step.norm(dim=1)
    assert (ratio - 1).abs().max() < 0.1


@pytest.mark.parametrize(("bits", "d"), [(16, 64), (8, 192)])
def test_rounded_steps_do_not_spoil_the_gradient(form, bits, d):
    """Under bf16 autocast: as near to the exact gradient as with the reference."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(d, d).to(DEVICE)
    with torch.no_grad():
        layer.weight.mul_(0.8)
    x = torch.randn(4, d, device=DEVICE)

    def gradient(engine, solver, gradient, autocast=True):
        layer.zero_grad()
        with use(engine), torch.autocast(DEVICE.type, BF16, enabled=autocast):
            solution = gdeq.fixed_point(
                lambda z: torch.tanh(layer(z) + x), torch.zeros_like(x), solver, gradient
            )
            (solution.z * torch.linspace(-1, 1, d, device=DEVICE)).sum().backward()
        if engine == form:
            kept = solution.inverse.vectors.steps.dtype
            assert kept == (BF16 if bits == 16 else torch.int8)
        return layer.weight.grad.flatten().clone()

    long = Broyden(60, 1e-6)
    exact = gradient("reference", long, gdeq.Implicit(long), autocast=False)
    solver, refine = Broyden(9, 0.0, step_bits=bits), gdeq.GDEQ(refine=int(bits == 8))
    plain, found = gradient("reference", solver, refine), gradient(form, solver, refine)

    def angle(a):
        return 1 - torch.nn.functional.cosine_similarity(a, exact, dim=0)

    assert angle(found) < 1.2 * angle(plain) + 1e-3


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
        assert all(part.dtype == F16 for part in z)
        return (slope * z[0] + c).clamp(-1000, 1000), (0.5 * z[1] + 0.1 * z[0]).clamp(-1000, 1000)

    seen = set()
    # One is lost at the second step: before, there, and after it.
    lost = slope == 0.995 and not tol
    for max_iter in (1, 2, 3, 7) if lost or form == "oracle" else (5,):
        solver = Broyden(max_iter, tol, stop="whole")
        with use(form):
            found = gdeq.solve(f, z0, solver)
            with monkeypatch.context() as patch:  # by `StateMap.inside` instead
                patch.setattr(gdeq.fast.layout.PartsMap, "parts_dtype", None)
                expected = gdeq.solve(f, z0, solver)
        assert isinstance(found.inverse.vectors, ProductInverse)
        assert all(torch.isfinite(part).all() for part in found.z)
        assert_same(expected, found, 1e-3)
        seen.update(found.status)
    assert (Status.NONFINITE in seen) == (slope == 0.995)  # that one leaves the range


# --- limits ---------------------------------------------------------------------------------------


class Own(Broyden):
    """It may override anything."""


@pytest.mark.parametrize(
    "solver",
    [
        Broyden(20, memory=3),
        Broyden(20, max_step=0.5),
        Broyden(20, line_search=2),
        Broyden(200),
        Anderson(3, 0.0, memory=17),
        Anderson(200, 1e-3),
        gdeq.Picard(20),
        Own(20),
    ],
    ids=repr,
)
def test_where_the_product_form_does_not_apply_the_reference_runs(form, solver, monkeypatch):
    monkeypatch.setattr(product, "iterate", None)
    problem = Dense(radius=0.5).to(DEVICE)
    with use(form):
        found = gdeq.solve(problem, problem.z0, solver)
    assert found.z.isfinite().all()
    assert found.inverse is None or not isinstance(found.inverse.vectors, ProductInverse)
