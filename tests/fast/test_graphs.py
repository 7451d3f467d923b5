"""A captured step does what an eager one does; where it cannot be captured it says so."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import gdeq
from gdeq.fast import graphs
from gdeq.fast.graphs import Captured, Memory, Repeated


class Cell(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inner = gdeq.weight_norm(nn.Linear(width, width))
        self.dropout = gdeq.VariationalDropout(0.0)

    def forward(self, z, x):
        return torch.tanh(self.dropout(self.inner(z)) * 0.3 + x)


class Training:
    def __init__(self, device, gradient, solver=None, lr=0.1):
        torch.manual_seed(0)
        solver = gdeq.Broyden(6, 0.0) if solver is None else solver
        self.model = nn.Sequential(
            nn.Linear(8, 16), gdeq.DEQ(Cell(), solver, gradient), nn.Linear(16, 3)
        ).to(device)
        rate = torch.tensor(lr, device=device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate if cuda else lr, momentum=0.9, fused=cuda or None
        )

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "residual": self.model[1].solution.residual}


def batches(device, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(12, 8, generator=generator)
        yield x.to(device), (x[:, 0] > 0).long().to(device)


GRADIENTS = [
    gdeq.GDEQ(),
    gdeq.GDEQ(refine=2),
    gdeq.GDEQ(tolerance=0.3, max_refine=3),
    gdeq.GDEQ(tolerance=1e-9, max_refine=2),  # no sample comes there
    gdeq.Measured(gdeq.GDEQ()),
    gdeq.JFB(),
    gdeq.NPG(),
    gdeq.Implicit(gdeq.Broyden(10, 1e-5), double_backward=False),
]


@pytest.mark.parametrize(
    ("gradient", "tol"),
    [(gradient, 0.0) for gradient in GRADIENTS]
    + [(gradient, 1e-3) for gradient in (gdeq.GDEQ(), gdeq.GDEQ(refine=2), gdeq.JFB(refine=1))],
    ids=repr,
)
def test_losses_and_weights_are_those_of_the_plain_step(gradient, tol, gpu):
    plain = Training(gpu, gradient, gdeq.Broyden(6, tol))
    graph = Training(gpu, gradient, gdeq.Broyden(6, tol))
    step = gdeq.capture(graph.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gdeq.CaptureWarning)
        for x, y in batches(gpu, 8):
            expected, found = plain.step(x, y), step(x, y)
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                found["residual"], expected["residual"], rtol=1e-2, atol=1e-5
            )
    assert step.graph is not None
    for a, b in zip(plain.model.parameters(), graph.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


def test_a_recorded_solve_ends_when_all_samples_are_done(gpu):
    torch.manual_seed(0)
    deq = gdeq.DEQ(Cell().to(gpu), gdeq.Broyden(40, 1e-4), gdeq.GDEQ())

    @gdeq.capture
    def step(x):
        z = deq(x)
        solution = deq.solution
        return z, solution.steps, solution.codes, solution.trace

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for scale in (1.0, 1.0, 1.0, 1.0, 0.01, 1.0, 3.0):
            x = (scale * torch.randn(12, 16, generator=generator)).to(gpu)
            z, steps, codes, trace = step(x)
            torch.testing.assert_close(z, deq(x), rtol=1e-4, atol=1e-5)
            assert steps.tolist() == deq.solution.steps.tolist()
            assert codes.tolist() == deq.solution.codes.tolist()
            assert trace.isfinite().all()
    assert len(step.graph.parts) == 3


@pytest.mark.parametrize(
    ("needed", "every", "plays"), [(1, 1, 1), (5, 1, 5), (5, 2, 6), (9, 1, 7), (6, 7, 7)]
)
def test_a_repeated_part_is_played_as_often_as_needed(needed, every, plays, monkeypatch):
    class Event:
        def record(self):
            heard.append("record")

        def synchronize(self):
            heard.append("wait")

    class Graph:
        def __init__(self, name):
            self.name = name

        def replay(self):
            heard.append(self.name)
            if self.name == "judge":
                unfinished[0] = max(0, needed - heard.count("judge"))

    heard, unfinished = [], torch.ones(1, dtype=torch.int64)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    Repeated(Graph("judge"), Graph("go on"), unfinished, 7, every).replay()
    assert heard.count("judge") == heard.count("go on") == plays
    if every == 1 and plays < 7:  # the device has work while the host waits
        assert heard == ["judge", "record", "go on", "wait"] * plays


def test_recordings_that_share_their_memory_take_turns(gpu):
    plain, graph = Training(gpu, gdeq.GDEQ()), Training(gpu, gdeq.GDEQ())
    ways = [(gdeq.Broyden(n, 0.0), gdeq.GDEQ(refine=k)) for n, k in ((4, 0), (7, 2), (5, 1))]
    memory = Memory()
    steps = [gdeq.capture(graph.step, warmup=2, memory=memory) for _ in ways]
    order = [0] * 4 + [1] * 4 + [0] * 2 + [2] * 4 + [0, 1, 2, 1, 0, 2]
    kept = []
    for number, (x, y) in zip(order, batches(gpu, len(order)), strict=True):
        for training in (plain, graph):
            training.model[1].solver, training.model[1].gradient = ways[number]
        expected, found = plain.step(x, y), steps[number](x, y)
        kept.append((expected["loss"].detach(), found["loss"]))
    assert all(step.graph is not None for step in steps)
    assert len({step.graph.memory.pool for step in steps}) == 1
    for expected, found in kept:  # results stay, whatever was played after them
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_learning_rate_in_a_tensor_can_be_changed_between_calls(gpu):
    """And results stay when the next call comes."""
    training = Training(gpu, gdeq.GDEQ())
    step = gdeq.capture(training.step)
    data = list(batches(gpu, 6))
    kept = [step(x, y)["loss"] for x, y in data[:5]]
    assert len({loss.item() for loss in kept}) == 5
    training.optimizer.param_groups[0]["lr"].zero_()
    training.optimizer.param_groups[0]["momentum"] = 0.9  # a number: frozen into the recording
    for state in training.optimizer.state.values():
        state["momentum_buffer"].zero_()
    before = copy.deepcopy(training.model.state_dict())
    step(*data[5])
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_other_shapes_run_plain_and_say_so(gpu):
    step = gdeq.capture(Training(gpu, gdeq.GDEQ()).step)
    for x, y in batches(gpu, 5):
        step(x, y)
    with pytest.warns(gdeq.CaptureWarning, match="another shape"):
        loss = step(x[:5], y[:5])["loss"]
    assert loss.isfinite()
    assert step(x, y)["loss"].isfinite()


def test_a_step_that_waits_for_the_device_says_so_and_goes_on(gpu):
    training = Training(gpu, gdeq.GDEQ())

    @gdeq.capture
    def step(x, y):
        assert float(y.sum()) >= 0
        return training.step(x, y)

    data = list(batches(gpu, 6))
    for x, y in data[:2]:
        step(x, y)
    with pytest.warns(gdeq.CaptureWarning, match="waits for the device, first at "):
        step(*data[2])
    for x, y in data[3:]:
        assert step(x, y)["loss"].isfinite()


def test_a_failed_recording_leaves_everything_usable(gpu):
    """What the look before the recording does not see: an allocation that only the host knows."""
    calls = []

    def step(x):
        calls.append(1)
        if len(calls) == 3:  # the one that is recorded
            torch.cuda.synchronize()
        return x * torch.rand_like(x)

    captured = gdeq.capture(step, warmup=2)
    x = torch.ones(4, device=gpu)
    captured(x)
    captured(x)
    with pytest.warns(gdeq.CaptureWarning, match="could not be recorded"):
        captured(x)
    assert captured(x).isfinite().all()
    assert torch.rand(3, device=gpu).isfinite().all()
    again = gdeq.capture(lambda x: x * torch.rand_like(x), warmup=2)
    found = [again(x) for _ in range(4)]
    assert again.graph is not None
    assert not torch.equal(found[2], found[3])


def test_a_way_that_another_has_gone_is_recorded_at_once(gpu):
    plain, graph = Training(gpu, gdeq.GDEQ()), Training(gpu, gdeq.GDEQ())
    plain_step, first = plain.step, gdeq.capture(graph.step, warmup=2, memory=Memory())
    data = list(batches(gpu, 8))
    for x, y in data[:4]:
        plain_step(x, y), first(x, y)
    other = gdeq.Broyden(7, 0.0)
    plain.model[1].solver = graph.model[1].solver = other
    step = Captured(graph.step, 0, first.memory)
    for x, y in data[4:]:
        expected, found = plain_step(x, y), step(x, y)
        assert step.graph is not None
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("fails", "made"),
    [
        ((), ["recorded", "played", "played", "played"]),
        ((1,), ["recorded", "forgotten", "listened to", "recorded", "played", "played"]),
        (
            (1, 2),
            ["recorded", "forgotten", "listened to", "recorded", "forgotten", "plain", "plain"],
        ),
    ],
)
def test_a_try_without_a_step_before_it_is_made_again_after_one(fails, made, monkeypatch):
    """Graphs are stood for: which calls are recorded, played, and made as they are."""
    log, tries = [], []

    def step(x):
        log.append("plain")
        return x

    class Recording:
        def __init__(self, memory):
            pass

        @contextlib.contextmanager
        def record(self):
            tries.append(1)
            yield
            log[-1] = "recorded"
            if len(tries) in fails:
                raise RuntimeError("a kernel was compiled")

        def replay(self):
            log.append("played")

    monkeypatch.setattr(graphs, "Recording", Recording)
    monkeypatch.setattr(graphs, "_forget_failed_capture", lambda: log.append("forgotten"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    captured = Captured(step, 0, Memory())
    heard_as = {True: "listened to", False: "as it is"}
    monkeypatch.setattr(captured, "_beside", lambda inputs, listen: log.append(heard_as[listen]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            call = captured._on_device if captured.reason is None else captured
            call(torch.ones(2))
    assert log == made
    gave_up = [w for w in heard if "could not be recorded" in str(w.message)]
    assert len(gave_up) == (len(fails) == 2) == bool(captured.reason)


def test_a_recording_under_autocast_sees_the_weights_change(gpu):
    """Autocast keeps half-precision copies of weights: none may be frozen into the graph."""
    layer = nn.Linear(4, 4, bias=False, device=gpu)
    x = torch.eye(4, device=gpu)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        step = gdeq.capture(layer, warmup=2)
        for value in range(6):
            layer.weight.fill_(float(value))
            torch.clear_autocast_cache()
            assert (step(x) == value).all()


def test_on_a_cpu_it_is_the_plain_step_with_one_warning():
    device = torch.device("cpu")
    plain, other = Training(device, gdeq.GDEQ()), Training(device, gdeq.GDEQ())
    step = gdeq.capture(other.step)
    first, *others = batches(device, 5)
    expected = plain.step(*first)["loss"]
    with pytest.warns(gdeq.CaptureWarning, match="not on a CUDA device"):
        found = step(*first)["loss"]
    assert torch.equal(found, expected)
    for x, y in others:  # any other warning is an error
        assert torch.equal(plain.step(x, y)["loss"], step(x, y)["loss"])


def test_reset_tries_again():
    """With inputs that can be recorded, say: on a CPU the reason comes again."""
    step = gdeq.capture(lambda x: x + 1)
    for _ in range(2):
        with pytest.warns(gdeq.CaptureWarning, match="not on a CUDA device"):
            step(torch.ones(2))
        assert step.reason is not None
        step.reset()
        assert step.reason is None


def test_it_takes_functions_of_tensors():
    with pytest.raises(TypeError, match="takes a function of tensors, got int"):
        gdeq.capture(3)
    with pytest.raises(ValueError, match="warmup must be an integer of at least 2"):
        gdeq.capture(print, warmup=1)
    with pytest.raises(TypeError, match="takes only tensors"):
        gdeq.capture(print)(3.0)

    @gdeq.capture(warmup=2)
    def step(x):
        """Doubles."""
        return 2 * x

    assert step.__doc__ == "Doubles."
    with pytest.warns(gdeq.CaptureWarning):
        assert step(torch.ones(())) == 2
