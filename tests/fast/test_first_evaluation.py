"""The first evaluation of a solve, which a cell may have a cheaper way to (`at_initial_state`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gdeq import DEQ, GDEQ, JFB, Anderson, Broyden, Implicit, Picard, Unrolled
from gdeq.fast import product
from gdeq.fast.kernels import choice
from gdeq.state import StateError
from played import Event, Played
from problems import assert_near

pytest.importorskip("triton")
from gdeq.fast.kernels import product as fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter


@pytest.fixture(autouse=True)
def compared(monkeypatch):
    """As after the first call, in which both ways are taken."""
    monkeypatch.setattr(DEQ, "_first_known", True)


class Plain(nn.Module):
    """tanh(Wz + x) from zeros; tells how it was called."""

    def __init__(self, dtypes=(F64, F64)):
        super().__init__()
        matrix = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
        self.matrix = nn.Parameter(0.7 * matrix / torch.linalg.matrix_norm(matrix, 2))
        self.dtypes, self.calls = dtypes, []

    def initial_state(self, x, *, gain=1.0):
        parts = x.new_zeros(len(x), 2), x.new_zeros(len(x), 4)
        return tuple(part.to(dtype) for part, dtype in zip(parts, self.dtypes, strict=True))

    def forward(self, z, x, *, gain=1.0):
        self.calls.append("forward")
        flat = torch.cat([part.to(F64) for part in z], dim=1)
        return self._parts(torch.tanh(flat @ self.matrix.T + gain * x))

    def _parts(self, flat):
        parts = flat.split([2, 4], dim=1)
        return tuple(part.to(dtype) for part, dtype in zip(parts, self.dtypes, strict=True))


class Cheap(Plain):
    def at_initial_state(self, x, *, gain=1.0):
        assert not torch.is_grad_enabled()
        self.calls.append("at start")
        return self._parts(torch.tanh(gain * x))


class Unsure(Plain):
    def at_initial_state(self, x):
        self.calls.append("asked")


class OtherForward(Cheap):
    def forward(self, z, x, *, gain=1.0):
        return super().forward(z, 2 * x, gain=gain)


class OtherStart(Cheap):
    def initial_state(self, x, *, gain=1.0):
        return tuple(part + 1 for part in super().initial_state(x))


class OtherCall(Cheap):
    def __call__(self, z, x, *, gain=1.0):
        return super().__call__(z, 3 * x, gain=gain)


class OtherAll(OtherForward):
    def at_initial_state(self, x, *, gain=1.0):
        return super().at_initial_state(2 * x, gain=gain)


class Neither(nn.Module):
    """Zeros like x are no state of the cell's own."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, z, x):
        self.calls.append("forward")
        return torch.tanh(0.5 * z + x)

    def at_initial_state(self, x):
        self.calls.append("at start")
        return torch.tanh(x)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, dtype=F64, generator=generator).to(DEVICE)


def called(cell, *given, solver=Broyden(3, 0.0), **options):  # noqa: B008 (frozen)
    with torch.no_grad():
        DEQ(cell.to(DEVICE), solver)(*given, **options)
    return cell.calls


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
@pytest.mark.parametrize("solver", [Broyden(5, 0.0), Anderson(5, 0.0), Picard(5, 0.0)], ids=str)
@pytest.mark.parametrize("gradient", [JFB(), GDEQ(refine=1), Implicit(), Unrolled(2)], ids=str)
@pytest.mark.parametrize("dtypes", [(F64, F64), (torch.float32, F64)], ids=["one", "two"])
def test_a_solve_is_the_same(form, solver, gradient, dtypes):
    if form == "triton" and (not isinstance(solver, Broyden) or isinstance(gradient, Implicit)):
        pytest.skip("slow in the interpreter")
    results, solutions = [], []
    for kind in (Plain, Cheap):
        cell, x = kind(dtypes).to(DEVICE), inputs().requires_grad_()
        deq = DEQ(cell, solver, gradient)
        with choice.use(form):
            z = deq(x, gain=0.5)
            loss = sum(part.double().square().sum() for part in z)
            results.append([*z, *torch.autograd.grad(loss, [x, cell.matrix])])
        solutions.append((deq.solution, cell.calls))
    (expected, before), (found, calls) = solutions
    assert before[0] == "forward"
    assert calls == ["at start", *before[1:]]
    assert found.evals == expected.evals
    assert found.codes.tolist() == expected.codes.tolist()
    for a, b in zip(*results, strict=True):
        assert_near(b, a, 1e-6 if torch.float32 in dtypes else 1e-9)


def test_a_cell_may_have_no_cheaper_way_today():
    assert called(Unsure(), inputs()) == ["asked", *["forward"] * 4]


@pytest.mark.parametrize(
    ("kind", "used"),
    [(OtherForward, False), (OtherStart, False), (OtherCall, False), (OtherAll, True)],
)
def test_it_must_speak_of_the_same_function(kind, used):
    assert ("at start" in called(kind(), inputs())) == used


def test_a_forward_of_this_cell_alone():
    cell = Cheap()
    of_class = cell.forward
    cell.forward = lambda z, x: of_class(z, 2 * x)
    assert "at start" not in called(cell, inputs())
    cell = Cheap()
    of_its_class = cell.initial_state
    cell.initial_state = lambda x: tuple(part + 1 for part in of_its_class(x))
    assert "at start" not in called(cell, inputs())


def test_where_a_solve_begins_elsewhere():
    x, cell = inputs(), Cheap()
    assert "at start" not in called(cell, x, z0=cell.initial_state(x))
    deq = DEQ(cell.to(DEVICE), Broyden(3, 0.0), start=cell.initial_state)
    deq(x)
    deq.solver, deq.gradient, deq.start = None, Unrolled(2), None
    deq(x)
    assert "at start" not in cell.calls
    assert "at start" not in called(Neither(), x)
    cell = Cheap().to(DEVICE)
    DEQ(cell.forward, Broyden(3, 0.0))(x, z0=cell.initial_state(x))
    assert "at start" not in cell.calls


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
def test_hooks_see_each_evaluation(hook):
    cell, x = Cheap(), inputs()
    handle = getattr(cell, f"register_{hook}_hook")(lambda *_: None)
    assert "at start" not in called(cell, x)
    handle.remove()
    assert "at start" in called(cell, x)


def test_a_callable_that_is_no_module():
    class Function:
        calls: list[str]

        def __init__(self):
            self.calls = []

        def to(self, device):
            return self

        def initial_state(self, x):
            return torch.zeros_like(x)

        def __call__(self, z, x):
            self.calls.append("call")
            return torch.tanh(0.5 * z + x)

        def at_initial_state(self, x):
            self.calls.append("at start")
            return torch.tanh(x)

    assert called(Function(), inputs()) == ["at start", *["call"] * 3]


def test_what_it_returns_is_looked_at():
    class Wrong(Plain):
        def at_initial_state(self, x):
            return x[:, :2], x[:, :3]

    for form in ("off", "plain"):
        with choice.use(form), pytest.raises(StateError, match=r"f\(z\)\[1\] has shape \(8, 3\)"):
            called(Wrong(), inputs())


def test_it_runs_under_the_autocast_of_the_call():
    class Under(Cheap):
        def at_initial_state(self, x):
            self.calls.append(torch.is_autocast_enabled(x.device.type))
            return super().at_initial_state(x)

    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert called(Under(), inputs())[:2] == [True, "at start"]
    assert called(Under(), inputs())[:2] == [False, "at start"]


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
def test_samples_that_are_done_at_the_start(form):
    """With a tolerance: f(0) of x = 0 is 0."""
    x = inputs()
    x[:5] = 0
    solutions = []
    for kind in (Plain, Cheap):
        deq = DEQ(kind().to(DEVICE), Broyden(12, 1e-8), narrow=form != "off").eval()
        with choice.use(form), torch.no_grad():
            deq(x)
        solutions.append(deq.solution)
    expected, found = solutions
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.steps[:5].tolist() == [0] * 5
    assert found.evals == expected.evals


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is recorded")
def test_a_recorded_solve_that_ends_early(monkeypatch):
    """The first evaluation is before what is repeated."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for module in (product, fused):
        monkeypatch.setattr(module, "recording", lambda device: True)
    solutions = []
    for kind in (Plain, Cheap):
        played, cell = Played(), kind()
        monkeypatch.setattr(product, "current", lambda found=played: found)
        deq = DEQ(cell, Broyden(14, 1e-6), narrow=True).eval()
        with choice.use("triton"), torch.no_grad():
            deq(inputs())
        assert len(cell.calls) == played.log.count("judge") + 1
        assert (cell.calls[0] == "at start") == (kind is Cheap)
        assert "at start" not in cell.calls[1:]
        solutions.append(deq.solution)
    expected, found = solutions
    assert found.steps.tolist() == expected.steps.tolist()
    for a, b in zip(found.z, expected.z, strict=True):
        assert_near(a, b, 1e-9)
    assert bool(found.converged.all())


# -- the first call --------------------------------------------------------------------------------


class ReturnsTheState(Cheap):
    def at_initial_state(self, x, *, gain=1.0):
        return self.initial_state(x)


class Fails(Cheap):
    def at_initial_state(self, x, *, gain=1.0):
        raise RuntimeError("no")


def test_both_ways_are_compared_once(monkeypatch):
    monkeypatch.setattr(DEQ, "_first_known", False)
    cell = Cheap().to(DEVICE)
    layer = DEQ(cell, Broyden(1, 0.0))
    with torch.no_grad():
        layer(inputs())
        assert cell.calls == ["at start", "forward", "forward"]
        cell.calls.clear()
        layer(inputs())
        assert cell.calls == ["at start", "forward"]


def test_another_function_is_refused(monkeypatch):
    monkeypatch.setattr(DEQ, "_first_known", False)
    with pytest.raises(StateError, match=r"at_initial_state.*differ by 100%"):
        DEQ(ReturnsTheState().to(DEVICE))(inputs())
    with pytest.raises(RuntimeError, match="no") as caught:
        DEQ(Fails().to(DEVICE))(inputs())
    assert "at_initial_state" in caught.value.__notes__[0]


def test_it_is_not_compared_in_a_recording(monkeypatch):
    monkeypatch.setattr(DEQ, "_first_known", False)
    monkeypatch.setattr("gdeq.layer.recording", lambda device: True)
    layer = DEQ(ReturnsTheState().to(DEVICE), Broyden(1, 0.0))
    with torch.no_grad():
        layer(inputs())
    assert not layer._first_known
