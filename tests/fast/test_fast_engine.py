"""What the fast engine does beside its kernels: first and last evaluation of a solve, memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gdeq
from gdeq import DEQ, GDEQ, JFB, NPG, Anderson, Broyden, Implicit, Measured, Picard, Unrolled
from gdeq.engine import Product
from gdeq.fast.maps import FastMap
from gdeq.fixed_point import find
from gdeq.solution import Cotangent, Status
from gdeq.state import StateError, StateSpace
from pairs import pairs
from problems import Dense, Image, Multiscale, Named, assert_near, leaves, pack

pytest.importorskip("triton")
from gdeq.fast.kernels import inverse
from gdeq.fast.kernels import sweep as fused
from played import Played, nobody_looks
from sweeps import DEVICE, use

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# --- the first evaluation -------------------------------------------------------------------------


class Watched(nn.Module):
    """tanh(Wz + x) of two tensors from zeros, and its value there; tells how it was called."""

    def __init__(self, dtypes=(F64, F64), scale=1.0):
        super().__init__()
        matrix = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
        self.matrix = nn.Parameter(0.7 * matrix / torch.linalg.matrix_norm(matrix, 2))
        x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        x[:2] *= scale
        self.x = nn.Parameter(x)
        self.dtypes, self.calls = dtypes, []
        self.to(DEVICE)

    @property
    def z0(self):
        return self._parts(torch.zeros(4, 6, dtype=F64, device=DEVICE))

    def forward(self, z):
        self.calls.append("f")
        flat = torch.cat([part.to(F64) for part in z], dim=1)
        return self._parts(torch.tanh(flat @ self.matrix.T + self.x))

    def at_start(self, z):
        assert not torch.is_grad_enabled()
        assert all(not part.any() for part in z)
        self.calls.append(f"start{' under autocast' * torch.is_autocast_enabled(DEVICE.type)}")
        return self._parts(torch.tanh(self.x))

    def _parts(self, flat):
        parts = flat.split([2, 4], dim=1)
        return tuple(part.to(dtype) for part, dtype in zip(parts, self.dtypes, strict=True))


@pytest.mark.parametrize(
    ("form", "solver", "gradient", "dtypes"),
    [
        *pairs(
            ["reference", "oracle"],
            [Broyden(5, 0.0), Anderson(5, 0.0), Picard(5, 0.0), Broyden(12, 1e-8)],
            [JFB(), GDEQ(refine=1), Implicit(), Unrolled(2)],
            [(F64, F64), (F32, F64)],
        ),
        ("fast", Broyden(5, 0.0), JFB(), (F64, F64)),
        ("fast", Broyden(5, 0.0), GDEQ(refine=1), (F32, F64)),
        ("fast", Broyden(12, 1e-8), Unrolled(2), (F64, F64)),
    ],
)
def test_a_solve_whose_first_value_comes_from_elsewhere(form, solver, gradient, dtypes):
    results, solutions = [], []
    for cheap in (False, True):
        f = Watched(dtypes, scale=0.0)  # two samples are done at the start
        known = FastMap(f, f.at_start) if cheap else f
        with use(form):
            z, solution = find(known, f.z0, solver, gradient)
            loss = sum(part.double().square().sum() for part in z)
            results.append([*z, *torch.autograd.grad(loss, [f.x, f.matrix])])
        solutions.append((solution, f.calls))
    (expected, before), (found, calls) = solutions
    swept = form != "reference" and not isinstance(solver, Picard)
    # Tensors of two kinds are judged one by one in the reference alone.
    swept &= dtypes[0] == dtypes[1]
    assert calls == ["start" if swept else "f", *before[1:]]
    assert found.evals == expected.evals
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.codes.tolist() == expected.codes.tolist()
    if solver.tol:
        assert found.steps[:2].tolist() == [0, 0]
    for a, b in zip(*results, strict=True):
        assert_near(b, a, 1e-6 if F32 in dtypes else 1e-9)


def test_it_runs_under_the_autocast_of_the_call_and_is_looked_at(form):
    f = Watched((F32, F32))
    with use(form), torch.no_grad():
        with torch.autocast(DEVICE.type, BF16):
            found = gdeq.solve(FastMap(f, f.at_start), f.z0, Broyden(2, 0.0))
        assert f.calls == ["start under autocast", "f", "f"]
        assert found.precision == torch.finfo(BF16).eps
        wrong = FastMap(f, lambda z: (z[0], z[1][:, :3]))
        with pytest.raises(StateError, match=r"f\(z\)\[1\] has shape \(4, 3\)"):
            gdeq.solve(wrong, f.z0, Broyden(2, 0.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is recorded")
def test_a_recorded_solve_ends_early(monkeypatch):
    """The first evaluation is before what is repeated."""
    with use("fast"), torch.no_grad():
        f = Watched()
        expected = gdeq.solve(f, f.z0, Broyden(14, 1e-6))
    for cheap in (False, True):
        f = Watched()
        with monkeypatch.context() as patch, use("fast"), torch.no_grad():
            played = Played(patch)
            known = FastMap(f, f.at_start) if cheap else f
            found = gdeq.solve(known, f.z0, Broyden(14, 1e-6))
        assert len(f.calls) == played.log.count("judge") + 1 == int(expected.steps.max()) + 1
        assert (f.calls[0] == "start") == cheap
        assert "start" not in f.calls[1:]
        assert found.steps.tolist() == expected.steps.tolist()
        assert found.codes.tolist() == expected.codes.tolist()
        for a, b in zip(found.z, expected.z, strict=True):
            assert_near(a, b, 1e-9)


# --- the last evaluation --------------------------------------------------------------------------


STEPS = 6
GRADIENTS = [
    JFB(),
    GDEQ(),
    Measured(GDEQ()),
    GDEQ(refine=2),
    GDEQ(tolerance=0.1),
    NPG(),
    Implicit(Broyden(8, 1e-6), double_backward=False),
]


def differentiated(problem, gradient, solver=Broyden(STEPS, 0.0)):  # noqa: B008 (frozen)
    """The solution, its gradients, and whether each call of f had autograd."""
    calls = []

    def f(z):
        calls.append(torch.is_grad_enabled())
        return problem(z)

    problem.zero_grad()
    solution = gdeq.fixed_point(f, problem.z0, solver, gradient)
    (pack(solution.z) * problem.cotangent()).sum().backward()
    gradients = [parameter.grad.clone() for parameter in problem.parameters()]
    return solution, gradients, calls


LAST = [("oracle", *row) for row in pairs([Dense, Image, Multiscale, Named], GRADIENTS)]
LAST += [("fast", (Dense, Multiscale)[i % 2], gradient) for i, gradient in enumerate(GRADIENTS)]


@pytest.mark.parametrize(("form", "kind", "gradient"), LAST)
def test_f_is_differentiated_at_the_last_iterate_of_a_recorded_solve(
    form, kind, gradient, monkeypatch
):
    problem = kind(batch=2, radius=0.9).to(DEVICE)
    with use(form):
        expected, wanted, before = differentiated(problem, gradient)
        nobody_looks(monkeypatch)
        found, gradients, calls = differentiated(problem, gradient)
    assert before == [False] * (STEPS + 1) + [True]
    assert calls == [False] * STEPS + [True]
    for a, b in zip(leaves(found.z), leaves(expected.z), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients, wanted, strict=True):
        assert_near(a, b, 1e-12)
    assert torch.equal(found.residual, expected.residual)
    assert torch.equal(found.trace, expected.trace)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.evals == expected.evals
    assert found.backward.vjps == expected.backward.vjps
    if expected.backward.residual is not None:
        assert_near(found.backward.residual, expected.backward.residual, 1e-9)


@pytest.mark.parametrize(
    ("gradient", "solver", "saved"),
    [
        (JFB(), Anderson(STEPS, 0.0, memory=3), 1),
        (GDEQ(), Broyden(STEPS, 1e-8), 0),  # the last iterate is not known beforehand
        (Implicit(Broyden(8, 1e-6)), Broyden(STEPS, 0.0), 0),  # f's graph is needed twice
        (JFB(), Picard(STEPS, 0.0), 0),  # in the reference's loop
    ],
    ids=["Anderson", "tolerance", "second derivatives", "Picard"],
)
def test_with_other_solvers_and_gradients(gradient, solver, saved, monkeypatch):
    problem = Dense(radius=0.9).to(DEVICE)
    with use("oracle"):
        _, wanted, before = differentiated(problem, gradient, solver)
        monkeypatch.setattr("gdeq.fast.engine.host_may_look", lambda device: False)
        _, gradients, calls = differentiated(problem, gradient, solver)
        assert calls == before[saved:]
        for a, b in zip(gradients, wanted, strict=True):
            assert_near(a, b, 1e-12)
        with torch.no_grad():  # nor without autograd
            f = Watched()
            gdeq.fixed_point(f, f.z0, Broyden(STEPS, 0.0), GDEQ())
            assert len(f.calls) == STEPS + 1


def failing(kind, when):
    """Not finite for the second sample at one evaluation."""

    class Failing(kind):
        calls = 0

        def forward(self, z):
            self.calls += 1
            out = super().forward(z)
            if self.calls == when + 1:
                for leaf in leaves(out):
                    leaf[1] = torch.nan
            return out

    return Failing(batch=2, radius=0.9).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "gradient", "when"),
    [
        (Dense, JFB(), 1),
        (Multiscale, GDEQ(refine=1), 3),
        (Dense, GDEQ(refine=1), STEPS - 1),
        (Multiscale, JFB(), STEPS),
    ],
)
def test_a_sample_that_stopped_is_differentiated_where_it_is_returned(
    kind, gradient, when, form, monkeypatch
):
    """Where f is not finite at the very last iterate, neither is its gradient."""
    with use(form):
        expected, wanted, _ = differentiated(failing(kind, when), gradient)
        nobody_looks(monkeypatch)
        found, gradients, _ = differentiated(failing(kind, when), gradient)
        if when == STEPS:
            before = kind(batch=2, radius=0.9).to(DEVICE)
            before = gdeq.solve(before, before.z0, Broyden(STEPS - 1, 0.0))
            assert_near(pack(found.z)[1], pack(before.z)[1], 1e-12)
    assert found.codes[1] == Status.NONFINITE
    assert found.codes.tolist() == expected.codes.tolist()
    for a, b in zip(leaves(found.z), leaves(expected.z), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients, wanted, strict=True):
        assert b.isfinite().all()
        if when < STEPS:
            assert_near(a, b, 1e-10)


@pytest.mark.parametrize("gradient", [JFB(), GDEQ(refine=1)], ids=str)
def test_a_constant_f_has_no_gradient(gradient, form, monkeypatch):
    nobody_looks(monkeypatch)
    z0 = torch.zeros(2, 3, device=DEVICE)
    with use(form):
        solution = gdeq.fixed_point(torch.ones_like, z0, Broyden(STEPS, 0.0), gradient)
    assert not solution.z.requires_grad


# --- z0 and z in the memory of the user's tensors -------------------------------------------------


def start(adjacent=True, channels_last=False):
    """A z0 of two tensors, in one piece of memory or not."""
    torch.manual_seed(0)
    batch, shapes = 3, [(6, 5, 5), (40,)]
    sizes = [batch * torch.Size(shape).numel() for shape in shapes]
    buffer = torch.randn(sum(sizes), device=DEVICE).to(BF16)
    parts = buffer.split(sizes) if adjacent else [part.clone() for part in buffer.split(sizes)]
    found = [part.view(batch, *shape) for part, shape in zip(parts, shapes, strict=True)]
    if channels_last:  # the same memory, in another order
        found[0] = found[0].view(batch, 5, 5, 6).permute(0, 3, 1, 2)
    return tuple(found)


def cosines(z):
    image, row = z
    return torch.cos(image) * 0.5 + row.mean(), torch.sin(row) + image.mean()


@pytest.mark.parametrize(
    ("solver", "adjacent", "channels_last"),
    [
        (Broyden(4, 0.0), True, False),
        (Broyden(4, 0.0, step_bits=8), False, True),
        (Anderson(4, 0.0, memory=3), False, True),
    ],
)
def test_wherever_z0_lies_it_is_the_same_solve_and_z0_stays(solver, adjacent, channels_last):
    z0 = start(adjacent, channels_last)
    before = [part.clone() for part in z0]
    apart = tuple(part.clone() for part in start(not adjacent, channels_last))
    with use("fast"):
        found, expected = (gdeq.fixed_point(cosines, z, solver, JFB()) for z in (z0, apart))
    for a, b in zip(found.z, expected.z, strict=True):
        assert torch.equal(a, b)
        assert not any(a.data_ptr() == part.data_ptr() for part in z0)
        assert a.is_contiguous(memory_format=torch.channels_last) == (channels_last and a.dim() > 2)
    assert torch.equal(found.trace, expected.trace)
    for part, was in zip(z0, before, strict=True):
        assert torch.equal(part, was)


def test_no_vector_is_made_of_z0_and_a_lent_one_is_not_copied(monkeypatch):
    monkeypatch.setattr(StateSpace, "pack", None)
    sweeps, build = [], fused.Sweep.__init__

    def built(made, *arguments, **more):
        build(made, *arguments, **more)
        sweeps.append((made.z.untyped_storage().nbytes(), made.first.data_ptr()))

    monkeypatch.setattr(fused.Sweep, "__init__", built)
    z0 = start()
    with use("fast"):
        gdeq.fixed_point(cosines, z0, Broyden(3, 0.0), JFB())
        assert sweeps[0][0] == 4
        assert sweeps[0][1] != z0[0].data_ptr()  # f might write there
        gdeq.fixed_point(FastMap(cosines, lends=True), z0, Broyden(3, 0.0), JFB())
        assert sweeps[1] == (4, z0[0].data_ptr())
        for tensor in z0:
            tensor.requires_grad_()
        found = gdeq.fixed_point(cosines, z0, Broyden(3, 0.0), JFB())
        assert not any(part.requires_grad for part in found.z)  # f has no parameters


def test_an_f_may_write_where_the_solve_began_but_not_into_z(form):
    buffer = torch.zeros(2, 32, dtype=BF16, device=DEVICE)
    solver = Broyden(5, 0.0)
    with use(form):
        expected = gdeq.solve(torch.cos, buffer.clone(), solver)
        found = gdeq.fixed_point(lambda z: torch.cos(z, out=buffer), buffer, solver, JFB())
        assert torch.equal(found.trace, expected.trace)
        buffer.zero_()
        with pytest.raises(StateError, match="in place"):
            gdeq.fixed_point(lambda z: z.add_(1), buffer, solver, JFB())
    assert not buffer.any()


@pytest.mark.parametrize(
    ("solver", "dtypes"),
    [
        (Broyden(4, 1e-3), (BF16, BF16)),  # with a tolerance z has more digits
        (Broyden(4, 0.0), (F32, F32)),
        (Broyden(4, 0.0, stop="whole"), (BF16, F32)),
        (Broyden(4, 0.0, memory=2), (BF16, BF16)),  # by the reference
        (Anderson(4, 0.0, mixing=0.5), (BF16, BF16)),
    ],
)
def test_where_z_is_a_vector(solver, dtypes, monkeypatch):
    begun, given = [], StateSpace.pack
    monkeypatch.setattr(StateSpace, "pack", lambda *args: begun.append(1) or given(*args))
    z0 = tuple(part.to(dtype) for part, dtype in zip(start(), dtypes, strict=True))
    with use("fast"):
        assert gdeq.fixed_point(cosines, z0, solver, JFB()).residual.isfinite().all()
    assert begun == [1]


@pytest.mark.parametrize(
    ("form", "when", "bits"), [("fast", 0, 16), ("fast", 2, 8), ("oracle", 2, 8)]
)
def test_a_sample_that_is_lost_goes_back_to_the_bits_of_its_iterate(form, when, bits):
    """Also to z0 itself, which the first step leaves as it is."""
    calls, seen = [], []

    def f(z):
        seen.append([part.clone() for part in z])
        calls.append(0)
        image, row = cosines(z)
        if len(calls) > when + 1:
            image = image.index_fill(0, torch.tensor([1], device=DEVICE), torch.nan)
        return image, row

    z0 = start()
    with use(form):
        found = gdeq.solve(f, z0, Broyden(4, 0.0, step_bits=bits))
    assert found.codes.tolist()[1] == Status.NONFINITE
    for a, was, begin in zip(found.z, seen[when], z0, strict=True):
        assert torch.equal(a[1], was[1])
        assert torch.equal(a[1], begin[1]) == (when == 0)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(12, 12).to(DEVICE, BF16)

    def forward(self, z, x):
        return torch.tanh(0.4 * self.linear(z) + x)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("gradient", [JFB(), GDEQ(), GDEQ(refine=1)], ids=str)
def test_what_is_lent_and_what_is_made_of_it(gradient, recorded, monkeypatch):
    """A recorded solve makes no inverse that nobody uses."""
    if recorded:
        nobody_looks(monkeypatch)
    moves, move = [], fused.Sweep._make_room
    monkeypatch.setattr(fused.Sweep, "_make_room", lambda *a: moves.append(a[1]) or move(*a))
    x = torch.randn(2, 12, device=DEVICE).to(BF16)
    deq, results = DEQ(Cell(), Broyden(4, 0.0), gradient), []
    for lends in (False, True):
        deq.cell.zero_grad()
        moves.clear()
        with use("fast"):
            f = FastMap(lambda z: deq.cell(z, x), lends=lends)
            z = deq.equilibrium(f, torch.zeros_like(x))
            z.square().sum().backward()
        assert (z.data_ptr() == deq.solution.z.data_ptr()) == lends
        assert not deq.solution.z.requires_grad
        results.append((z, deq.cell.linear.weight.grad.clone()))
        inverted = gradient.needs.inverse or not recorded
        assert moves == ([0, 1, 2, 3, 4] if inverted else [0, 1, 2, 3])
        assert (deq.solution.inverse is not None) == inverted
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- v and Jᵀu in half precision ------------------------------------------------------------------


class Pair(nn.Module):
    """Two tensors of one precision or two."""

    def __init__(self, *dtypes):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 32)
        nn.init.normal_(self.a.weight, std=0.15)
        nn.init.normal_(self.b.weight, std=0.15)
        self.to(DEVICE)
        self.x = torch.randn(3, 32).to(DEVICE)
        sizes = zip((32, 48), dtypes, strict=True)
        self.z0 = tuple(torch.zeros(3, size, device=DEVICE, dtype=dtype) for size, dtype in sizes)

    def forward(self, z):
        a = torch.tanh(self.b(z[1].float()) + self.x)
        return a.to(z[0].dtype), torch.tanh(self.a(z[0].float())).to(z[1].dtype)

    def gradients(self, gradient, form="fast", solver=Broyden(4, 0.0)):  # noqa: B008 (frozen)
        self.zero_grad()
        with use(form):
            z = gdeq.fixed_point(self, self.z0, solver, gradient).z
            (z[0].float().square().sum() + z[1].float().sum()).backward()
        return [p.grad.clone() for p in self.parameters()]


class Own(gdeq.Gradient):
    needs = gdeq.gradients.Needs(inverse=True)

    def cotangent(self, v, vjp, solution):
        assert v.dtype == F32  # it may take norms, which overflow in float16
        return Cotangent(solution.inverse.vectors.T.negative_matvec(v), 0)


class Derived(GDEQ):
    def cotangent(self, v, vjp, solution):
        assert v.dtype == F32
        return super().cotangent(v, vjp, solution)


@pytest.mark.parametrize(
    ("gradient", "dtypes", "expected"),
    [
        (GDEQ(), (BF16, BF16), BF16),
        (GDEQ(), (F32, F32), F32),
        (Own(), (BF16, BF16), F32),
        (Derived(), (BF16, BF16), F32),
    ],
    ids=["half", "float32", "someone else's", "derived"],
)
def test_v_is_in_half_precision_where_w_is_rounded_to_it_anyway(
    gradient, dtypes, expected, monkeypatch
):
    seen, given = [], inverse.apply
    monkeypatch.setattr(inverse, "apply", lambda *args: seen.append(args[1].dtype) or given(*args))
    problem = Pair(*dtypes)
    found = problem.gradients(gradient)
    assert seen == [expected]
    for a, b in zip(found, problem.gradients(gradient, "oracle"), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * b.abs().max().item())


@pytest.mark.parametrize("refine", [1, 2])
def test_a_product_in_the_precision_of_f_gives_the_same_w(refine, monkeypatch):
    """The refinement's kernels read it as it is; the reference has it in float32."""
    problem, product = Pair(BF16, BF16), Product.__call__
    found = problem.gradients(GDEQ(refine=refine))
    monkeypatch.setattr(
        Product, "__call__", lambda self, u: [part.float() for part in product(self, u)]
    )
    for a, b in zip(found, problem.gradients(GDEQ(refine=refine)), strict=True):
        assert torch.equal(a, b)


AFTER = [
    GDEQ(),
    GDEQ(refine=1),
    Implicit(Broyden(8, 0.0), double_backward=False),
    Implicit(Broyden(8, 0.0)),
    Unrolled(2),
]


@pytest.mark.parametrize(
    ("gradient", "dtype"),
    [*((gradient, BF16) for gradient in AFTER), (AFTER[0], F16), (AFTER[1], F16)],
)
def test_all_that_follows_a_solve_takes_a_z_in_half_precision(form, gradient, dtype):
    problem = Pair(dtype, dtype)
    found, expected = (problem.gradients(gradient, engine) for engine in (form, "reference"))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < (0.2 if DEVICE.type == "cpu" else 0.05) * b.norm()
