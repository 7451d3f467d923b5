"""The end of a recorded solve beside the head: the same numbers, and everyone waits who must."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

import gdeq
from gdeq import GDEQ, JFB, Broyden, Implicit, Measured, aside, nodes, product
from gdeq.kernels import choice
from gdeq.models import mdeq_fused
from gdeq.models.mdeq import mdeq
from gdeq.recording import Memory, Recording

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there are streams")
GRADIENTS = [
    GDEQ(),
    GDEQ(refine=1),
    Measured(JFB()),
    JFB(),
    Implicit(Broyden(6, 0.0), double_backward=False),
]


class Cell(nn.Module):
    """Reads an input in its backward pass too, and a weight that is held."""

    def __init__(self, width=16):
        super().__init__()
        self.inner = gdeq.weight_norm(nn.Linear(width, width))
        self.before, self.after = [], []  # called when it is evaluated with autograd

    def forward(self, z, x):
        grad = torch.is_grad_enabled()
        for call in self.before if grad else ():
            z = call(z)
        z = torch.tanh(0.5 * self.inner(z) * torch.sigmoid(x) + x)
        for call in self.after if grad else ():
            z = call(z)
        return z


# ---- with streams that only remember what they have waited for


class Stream:
    def __init__(self, name, device=torch.device("cpu")):  # noqa: B008 (a constant)
        self.name, self.device, self.cuda_stream = name, device, id(self)
        self.known = set()  # work that is done before what comes next

    def record_event(self):
        return set(self.known)

    def wait_event(self, event):
        self.known |= event


class Pretended:
    """What PyTorch has of streams and graphs; ``open`` is the one that all is recorded on."""

    def __init__(self, monkeypatch):
        self.main, self.others = Stream("main"), []
        self.stack, self.ended, self.told = [self.main], 0, []
        for name, value in {
            "current_stream": lambda device=None: self.stack[-1],
            "stream": self.on,
            "Stream": self.another,
            "CUDAGraph": lambda: self,
            "synchronize": lambda: None,
            "is_current_stream_capturing": lambda: True,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(aside, "_sides", {})
        monkeypatch.setattr(aside, "_tell_allocator", lambda t, stream: self.told.append(t))
        monkeypatch.setattr(nodes, "recording", lambda device: True)
        self.memory = Memory()
        self.memory.stream, self.memory.pool = self.main, None
        self.memory.make_room = lambda: None
        self.recording = Recording(self.memory)

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def another(self, device=None, priority=0):
        self.others.append(Stream("side"))
        return self.others[-1]

    def does(self, work):
        self.stack[-1].known.add(work)

    def capture_begin(self, **_):
        pass

    def capture_end(self):
        self.ended += 1
        for stream in self.others:  # else PyTorch says: unjoined work
            assert stream.known <= self.main.known


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(nodes, "beside_the_head", True)


@pytest.fixture
def pretended(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("pretends that there are streams")
    with choice.use("triton"):
        yield Pretended(monkeypatch)


def layer(gradient=None, solver=None, undisturbed=True):
    torch.manual_seed(0)
    deq = gdeq.DEQ(Cell(), solver or Broyden(3, 0.0), gradient or GDEQ())
    deq.undisturbed = undisturbed
    return deq


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 16, requires_grad=True)


def outcome(deq, x):
    z = deq(x)
    z.sin().sum().backward()
    solution = deq.solution
    backward = solution.record.residual
    numbers = [z.detach(), x.grad, *(p.grad for p in deq.parameters())]
    numbers += [solution.residual, solution.trace, solution.codes, solution.steps, solution.z]
    return [n.clone() for n in [*numbers, *([] if backward is None else [backward])]]


@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_the_numbers_are_the_same_and_w_comes_after_the_solve(gradient, pretended, monkeypatch):
    found = []
    for on in (False, True):
        monkeypatch.setattr(nodes, "beside_the_head", on)
        deq, x = layer(gradient), inputs()
        seen = []
        deq.cell.after.append(lambda z, seen=seen: seen.append(pretended.stack[-1].name) or z)
        deq.cell.after.append(lambda z: pretended.does("f") or z)
        settle, cotangent = product.ProductInverse.__init__, type(gradient).cotangent

        def settled(self, *args, settle=settle, **options):
            pretended.does("settled")
            settle(self, *args, **options)

        def w(self, v, vjp, solution, cotangent=cotangent, seen=seen):
            seen.append(pretended.stack[-1].name)
            done = {"f", "settled"} if self.uses_inverse else {"f"}
            assert done <= pretended.stack[-1].known
            return cotangent(self, v, vjp, solution)

        with monkeypatch.context() as patch, pretended.recording.record():
            patch.setattr(product.ProductInverse, "__init__", settled)
            patch.setattr(type(gradient), "cotangent", w)
            found.append(outcome(deq, x))
        assert seen[0] == ("side" if on else "main")
        assert set(seen[1:]) == {"main"}
        pretended.main.known.clear()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_what_the_solver_holds_is_kept_until_main_has_waited(pretended, monkeypatch):
    deq, x, kept = layer(), inputs(), []
    begin = aside.Aside.begin

    def watched(self, device, values):
        kept.extend(weakref.ref(t) for t in values if isinstance(t, torch.Tensor))
        begin(self, device, values)

    monkeypatch.setattr(aside.Aside, "begin", watched)
    with pretended.recording.record():
        z = deq(x)
        gc.collect()
        assert len(kept) > 10
        assert all(ref() is not None for ref in kept)
        with pretended.on(Stream("third")):
            assert deq.solution is not None
            assert all(ref() is not None for ref in kept)  # main has not waited
        z.sum().backward()
        gc.collect()
        assert sum(ref() is None for ref in kept) > 5
        assert deq._aside.kept is None


def test_the_allocator_hears_of_inputs_and_what_is_held(pretended):
    deq, x = layer(), inputs()
    with pretended.recording.record(), gdeq.hold(deq.cell):
        deq(x).sum()
        weight = deq.cell.inner.weight
        told = {t.data_ptr() for t in pretended.told}
        assert {x.data_ptr(), weight.data_ptr()} <= told


def test_who_reads_the_solution_waits_on_its_own_stream(pretended):
    deq, x = layer(), inputs()
    deq.cell.after.append(lambda z: pretended.does("f") or z)
    third = Stream("third")
    with pretended.recording.record():
        deq(x)
        assert "f" not in pretended.main.known
        with pretended.on(third):
            assert deq.solution is not None
        assert "f" in third.known
        assert "f" not in pretended.main.known
        assert deq.solution is not None
        assert "f" in pretended.main.known
    assert deq.solution.residual.shape == (3,)


@pytest.mark.parametrize("cut", [False, True])
def test_without_a_backward_pass_it_comes_back_where_a_recording_ends(cut, pretended):
    deq, x = layer(), inputs()
    deq.cell.after.append(lambda z: pretended.does("f") or z)
    with pretended.recording.record():
        z = deq(x)
        if cut:
            nothing = torch.zeros(1)
            nothing.pin_memory = lambda: nothing
            with contextlib.suppress(RuntimeError):  # of memory that there is not
                pretended.recording.repeat(lambda: None, lambda: None, nothing, 1, 1)
            assert "f" in pretended.main.known
            pretended.recording.open = pretended
        else:
            assert "f" not in pretended.main.known
    assert "f" in pretended.main.known
    assert deq._aside.over
    pretended.main.known.clear()
    z.sum().backward()  # an event of a recording that is over cannot be waited for
    assert deq.solution is not None
    assert not pretended.main.known


def test_an_error_aside_is_told_and_leaves_the_stream(pretended):
    deq, x = layer(), inputs()

    def fail(z):
        raise ValueError("on purpose")

    deq.cell.after.append(fail)
    with pretended.recording.record():
        with pytest.raises(ValueError, match="on purpose"):
            deq(x)
        assert pretended.stack[-1] is pretended.main
    assert pretended.ended == 1
    assert deq.solution is None
    deq.cell.after.clear()
    with pretended.recording.record():
        assert deq(x).isfinite().all()


def test_the_next_call_comes_after_the_last(pretended):
    deq, x = layer(), inputs()
    works = iter(range(9))
    deq.cell.after.append(lambda z: pretended.does(next(works)) or z)
    with pretended.recording.record():
        first = deq(x)
        second = deq(first)
        assert pretended.main.known == {0}
        second.sum().backward()
        assert pretended.main.known == {0, 1}
        assert x.grad.isfinite().all()


def test_two_layers_and_two_backward_passes(pretended, monkeypatch):
    found = []
    for on in (False, True):
        monkeypatch.setattr(nodes, "beside_the_head", on)
        model, x = nn.Sequential(layer(GDEQ(refine=1)), layer(JFB())), inputs()
        with pretended.recording.record():
            z = model(x)
            z.sum().backward(retain_graph=True)
            z.sin().sum().backward()
        found.append([z.detach(), x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_constant_f_is_waited_for(pretended):
    deq = gdeq.DEQ(lambda z, x: torch.ones_like(z), Broyden(2, 0.0), JFB())
    deq.undisturbed = True
    with pretended.recording.record():
        z = deq(inputs())
        assert (z == 1).all()
        assert not z.requires_grad
        assert not pretended.others or pretended.others[0].known <= pretended.main.known


@pytest.mark.parametrize(
    "why", ["not allowed", "off", "no autograd", "no recording", "tolerance", "plain", "Picard"]
)
def test_where_nothing_goes_aside(why, pretended, monkeypatch):
    solver = {"tolerance": Broyden(2, 1e-9), "Picard": gdeq.Picard(2, 0.0)}.get(why)
    deq = layer(JFB(), solver, undisturbed=why != "not allowed")
    monkeypatch.setattr(nodes, "beside_the_head", why != "off")
    if why == "tolerance":
        monkeypatch.setattr(product, "current", lambda: None)
    with contextlib.ExitStack() as opened:
        if why != "no recording":
            opened.enter_context(pretended.recording.record())
        if why == "plain":
            opened.enter_context(choice.use("plain"))
        with torch.set_grad_enabled(why != "no autograd"):
            assert deq(inputs()).isfinite().all()
    assert deq._aside is None
    assert not pretended.others


@cpu
def test_not_by_the_function(pretended):
    cell, x = Cell(), inputs()
    with pretended.recording.record():
        gdeq.fixed_point(lambda z: cell(z, x), torch.zeros(3, 16), Broyden(2, 0.0), JFB())
    assert not pretended.others


def test_a_layer_is_copied_and_pickled_without_it(pretended):
    deq, x = layer(), inputs()
    deq.cell.inner = nn.Linear(16, 16)  # PyTorch pickles no parametrisations
    with pretended.recording.record():
        deq(x)
        assert deq._aside is not None
        for same in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq)), copy.copy(deq)):
            assert same._aside is None
            assert same.solution is None
            assert same.undisturbed
        deq.solution = None
        assert deq._aside is None
        assert deq.solution is None
    old = layer()
    for name in ("_aside", "undisturbed"):  # a pickle of an older version has neither
        vars(old).pop(name, None)
    assert old.solution is None
    assert not old.undisturbed


def test_a_sample_not_finite_at_the_very_last_is_returned_as_it_was_there(pretended):
    deq, x = layer(JFB()), inputs()

    def spoil(z):
        return torch.where(torch.arange(len(z)).unsqueeze(1) == 1, torch.nan, z)

    with pretended.recording.record():
        expected = deq(x).detach()
        deq.cell.after.append(spoil)
        z = deq(x)
        solution = deq.solution
    assert torch.equal(z, expected)
    assert solution.codes[1] == gdeq.Status.NONFINITE
    assert torch.equal(solution.z[0], z[0])
    assert not torch.equal(solution.z[1], z[1])


def test_models_allow_it():
    assert mdeq("small").deq.undisturbed


# ---- on a GPU


SLEEP = 10_000_000  # cycles: some 5 ms, more than all else takes


def sleep(value):
    torch.cuda._sleep(SLEEP)
    return value


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, gradient):
        return sleep(gradient)


def scribble(*_):
    """Take memory of all sizes that is free on this stream, and write into it."""
    sizes = [*[64] * 60, *[1024] * 60, *[2**14] * 40, *[2**17] * 20, *[2**20] * 8]
    kept = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
    del kept


class Classifier(nn.Module):
    """Linear, one layer or more, linear; ``scribbles`` in both passes where memory may be free."""

    def __init__(self, gradient, layers=1, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))
        cells = [Cell(width) for _ in range(layers)]
        self.deqs = nn.ModuleList(gdeq.DEQ(c, Broyden(6, 0.0), gradient) for c in cells)
        for deq in self.deqs:
            deq.undisturbed = True
        self.head = nn.Linear(width, 3)

    @property
    def cells(self):
        return [deq.cell for deq in self.deqs]

    def forward(self, x):
        z = 1.0 * self.stem(x)  # of which nobody keeps the input
        if z.requires_grad:
            z.register_hook(scribble)
        for deq in self.deqs:
            z = deq(z)
            if z.requires_grad:
                z.register_hook(scribble)
            scribble()
        return self.head(z)


def batches(count, batch=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(batch, 8, generator=generator)
        yield x.to("cuda"), (x[:, 0] > 0).long().to("cuda")


def recorded(model, data, on, monkeypatch, of=lambda model: {}, half=False):
    """What some replays of a step give."""
    monkeypatch.setattr(nodes, "beside_the_head", on)
    deqs = [m for m in model.modules() if isinstance(m, gdeq.DEQ)]

    def step(x, y):
        torch.clear_autocast_cache()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        early = of(model)
        loss.backward()
        return {
            "loss": loss.detach(),
            **early,
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "residuals": [deq.solution.residual for deq in deqs],
            "traces": [deq.solution.trace for deq in deqs],
            "backward": [
                deq.solution.record.residual
                for deq in deqs
                if deq.solution.record.residual is not None
            ],
        }

    captured, found = gdeq.capture(step), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", gdeq.CaptureWarning)
        for x, y in data:
            torch.manual_seed(3)
            found.append(captured(x, y))
    assert captured.graph is not None
    assert all((deq._aside is not None) == on for deq in deqs)
    return found[3:]  # the replays


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in flat(part)]


def assert_same(found, expected, limit):
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a.isfinite().all()
        assert (a - b).double().norm() <= limit * b.double().norm() + 1e-7


def slow_down(cells, where):
    for cell in cells:
        if where == "f":
            cell.before.append(sleep)
            cell.after.append(sleep)
        elif where == "backward":
            cell.before.append(lambda z: SlowBackward.apply(z) if z.requires_grad else z)
            cell.after.append(SlowBackward.apply)


@cuda
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("slow", [None, "f", "backward"])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_a_recorded_step_is_the_same_with_and_without(gradient, slow, layers, monkeypatch):
    torch.manual_seed(0)
    first = Classifier(gradient, layers).cuda()
    outcomes = []
    for on in (False, True):
        model = copy.deepcopy(first)
        slow_down(model.cells, slow if on else None)
        outcomes.append(recorded(model, batches(6), on, monkeypatch))
    assert_same(outcomes[1], outcomes[0], 1e-4)


@cuda
@pytest.mark.parametrize("slow", [None, "f"])
@pytest.mark.parametrize("gradient", [GDEQ(), GDEQ(refine=1)], ids=str)
def test_the_solution_may_be_read_within_the_step(gradient, slow, monkeypatch):
    def early(model):
        solution = model.deqs[0].solution
        v = torch.ones_like(solution.z)
        return {
            "numbers": [solution.residual.clone(), solution.z.clone(), solution.steps.clone()],
            "product": solution.inverse.rmatvec(v),
        }

    torch.manual_seed(0)
    first = Classifier(gradient).cuda()
    outcomes = []
    for on in (False, True):
        model = copy.deepcopy(first)
        slow_down(model.cells, slow if on else None)
        outcomes.append(recorded(model, batches(6), on, monkeypatch, early))
    assert_same(outcomes[1], outcomes[0], 1e-4)


@cuda
@pytest.mark.parametrize("slow", [None, "f"])
def test_a_recorded_function_need_not_go_backward(slow, monkeypatch):
    torch.manual_seed(0)
    first = Classifier(GDEQ(), layers=2).cuda()
    outcomes = []
    for on in (False, True):
        monkeypatch.setattr(nodes, "beside_the_head", on)
        model = copy.deepcopy(first)
        slow_down(model.cells, slow if on else None)
        captured = gdeq.capture(lambda x, model=model: model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error", gdeq.CaptureWarning)
            found = []
            for x, _ in batches(6):
                logits = captured(x)
                found.append([logits, *(deq.solution.residual.clone() for deq in model.deqs)])
        assert captured.graph is not None
        outcomes.append(found[3:])
    assert_same(outcomes[1], outcomes[0], 1e-4)


@cuda
def test_a_solve_with_a_tolerance_cuts_the_recording_after_it(monkeypatch):
    torch.manual_seed(0)
    first = Classifier(GDEQ(refine=1), layers=2).cuda()
    first.deqs[1].solver, first.deqs[1].undisturbed = Broyden(20, 1e-4), False
    outcomes = []
    for on in (False, True):
        monkeypatch.setattr(nodes, "beside_the_head", on)
        model, found = copy.deepcopy(first), []
        slow_down(model.cells[:1], "f" if on else None)

        def step(x, y, model=model):
            model.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return [loss.detach(), *(p.grad for p in model.parameters())]

        captured = gdeq.capture(step)
        with warnings.catch_warnings():
            warnings.simplefilter("error", gdeq.CaptureWarning)
            found = [captured(x, y) for x, y in batches(6)]
        assert len(captured.graph.parts) == 3
        assert (model.deqs[0]._aside is not None) == on
        outcomes.append(found[3:])
    assert_same(outcomes[1], outcomes[0], 1e-3)


@cuda
def test_an_error_in_the_recorded_step_is_told():
    model = Classifier(GDEQ()).cuda()
    calls = []

    def fail(z):
        calls.append(1)
        if len(calls) == 4:  # the one that is recorded
            raise ValueError("on purpose")
        return z

    model.cells[0].after.append(fail)

    def step(x, y):
        return nn.functional.cross_entropy(model(x), y)

    captured = gdeq.capture(step)
    data = list(batches(6))
    for x, y in data[:3]:
        captured(x, y)
    with pytest.warns(gdeq.CaptureWarning, match="could not be recorded"):
        captured(*data[3])
    assert captured(*data[4]).isfinite()


@cuda
@pytest.mark.parametrize(("slow", "dropout"), [(None, 0.0), ("f", 0.1), ("head", 0.0)])
@pytest.mark.parametrize("gradient", [GDEQ(), GDEQ(refine=1), JFB()], ids=str)
def test_a_model_in_half_precision_is_the_same(gradient, slow, dropout, monkeypatch):
    torch.manual_seed(0)
    first = mdeq("small", solver=Broyden(4, 0.0), gradient=gradient, dropout=dropout)
    first = first.cuda().to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(16, 3, 32, 32, generator=generator).cuda(),
            torch.randint(0, 10, (16,), generator=generator).cuda(),
        )
        for _ in range(5)
    ]
    evaluate = mdeq_fused.evaluate

    def slower(*args, **options):
        if not torch.is_grad_enabled():
            return evaluate(*args, **options)
        sleep(None)
        found = evaluate(*args, **options)
        sleep(None)
        return found

    def disturb(head, given):
        if slow == "head":
            sleep(None)
        for part in given[0]:
            if part.requires_grad:
                part.register_hook(scribble)
        scribble()

    outcomes = []
    for on in (False, False, True):
        model = copy.deepcopy(first)
        model.head.register_forward_pre_hook(disturb)
        with monkeypatch.context() as patch:
            if on and slow == "f":
                patch.setattr(mdeq_fused, "evaluate", slower)
            outcomes.append(recorded(model, data, on, monkeypatch, half=True))
    # As far apart as two recordings without it: some of cuDNN's sums go in any order.
    for off, again, found in zip(*outcomes, strict=True):
        for name, values in off.items():
            parts = [flat(values), flat(again[name]), flat(found[name])]
            if not parts[0]:
                continue
            largest = max(a.double().norm() for a in parts[0])
            for a, b, c in zip(*parts, strict=True):
                assert c.isfinite().all(), name
                noise = (a - b).double().norm()
                limit = 3 * noise + 2e-2 * a.double().norm() + 2e-3 * largest
                assert (c - a).double().norm() <= limit, name


@cuda
def test_it_is_beside_the_head(monkeypatch):
    torch.manual_seed(0)
    times = []
    for on in (False, True):
        monkeypatch.setattr(nodes, "beside_the_head", on)
        model = Classifier(GDEQ()).cuda()
        slow_down(model.cells, "f")
        model.head.register_forward_pre_hook(lambda *_: sleep(sleep(None)))

        def step(x, y, model=model):
            model.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        captured = gdeq.capture(step)
        for x, y in batches(5):
            captured(x, y)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            captured(x, y)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert times[1] < 0.75 * times[0]
