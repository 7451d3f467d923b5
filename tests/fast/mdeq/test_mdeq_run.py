"""The accelerated model is the plain model, and leaves to it what a user has changed."""

import contextlib
from dataclasses import replace

import pytest
import torch
from mdeq_cases import FEW, LITTLE, close, shifted
from torch import nn
from torch.nn.utils import parametrize

import gdeq
from gdeq import DEQ, GDEQ, JFB, Broyden, Picard, Unrolled
from gdeq.fast.mdeq import as_built, run, stem_and_head
from gdeq.fast.mdeq import weights as weights_file
from gdeq.fast.streams import Serial, tensors_in
from gdeq.models import MDEQ, MDEQCell
from gdeq.models.mdeq import Head, mdeq, named

ONE_STEP = Broyden(max_iter=1, tol=0.0)


def models(config, device, solver=ONE_STEP, gradient=JFB()):  # noqa: B008 (frozen)
    """The plain model and the accelerated one."""
    plain = shifted(MDEQ(replace(config, fused=False), solver, gradient))
    fast = MDEQ(replace(config, fused=True), solver, gradient)
    fast.load_state_dict(plain.state_dict())
    return plain.to(device), fast.to(device)


def outcome(model, images):
    logits = model(images)
    weight = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    leaves = list(model.parameters())
    return [logits, *torch.autograd.grad((logits * weight).sum(), leaves), *model.buffers()]


@pytest.fixture
def taken(monkeypatch):
    """Which parts were run in another way than by their modules."""
    calls = []

    def watched(owner, name, told):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(told) or real(*args))

    watched(run, "run_stem", "stem")
    watched(run, "_equilibrium", "solve")
    watched(run, "evaluate", "f")
    watched(run, "run_head", "head")
    return calls


# ---- the same function


@pytest.mark.parametrize(
    ("changes", "train"),
    [
        ({"downsample": 1}, True),
        ({"channels": (4, 4, 8), "head_channels": (1, 1, 2), "image_channels": 5}, True),
        ({"outer_norm": "batch", "downsample": 1, "head_channels": (3, 8, 6)}, True),
        ({"outer_norm": "batch", "channels": (4, 8), "head_channels": (1, 3)}, True),
        ({"outer_norm": "batch"}, False),
    ],
    ids=["shortcuts", "identities", "batch norms", "one shortcut", "no batch's statistics"],
)
def test_values_gradients_and_statistics(changes, train, device):
    plain, fast = models(replace(FEW, blocks=1, dropout=0.0, **changes), device)
    torch.manual_seed(2)  # with others, rounding may move a number past a ReLU's corner
    images = torch.randn(3, plain.config.image_channels, 9, 7, device=device)
    names = list(fast.state_dict())
    expected = outcome(plain.train(train), images)
    close(outcome(fast.train(train), images), expected, 1e-3)
    assert list(fast.state_dict()) == names


@pytest.mark.parametrize(
    ("kept", "autocast", "state"),
    [
        (torch.float32, True, torch.bfloat16),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float64, False, torch.float64),
    ],
)
def test_other_precisions(kept, autocast, state, device, taken):
    plain, fast = models(LITTLE, device)
    images = torch.randn(2, 2, 8, 8, device=device)
    with torch.no_grad():
        expected = plain(images)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found = fast.to(kept)(images.to(kept))
    assert {part.dtype for part in fast.deq.solution.z} == {state}
    assert bool(taken) == (kept != torch.float64)
    close([found], [expected], 0.05)


def test_the_published_head_is_as_exact_as_plain_modules(device):
    """With zeros beside its channels, joined shortcuts and the classifier's own kernel."""
    config = named("large", outer_norm="group")
    head = Head(config).to(device)
    # Not 4: of maps of one pixel oneDNN leaves parts of bf16 weights' gradients unwritten.
    edge, batch = (32, 8) if device.type == "cuda" else (8, 2)
    z = [
        torch.randn(batch, c, e, e, device=device).bfloat16().to(memory_format=torch.channels_last)
        for c, e in ((c, edge >> i) for i, c in enumerate(config.channels))
    ]

    def errors(dtype, forward, truth=None):
        given = [part.to(dtype).requires_grad_() for part in z]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32):
            # Aliases, because gradients of leaves must arrive on the current stream.
            logits = forward([part.view_as(part) for part in given])
        weight = torch.linspace(-1, 1, logits.numel(), device=device).view_as(logits)
        loss = (logits.float() * weight).sum()
        found = [logits, *torch.autograd.grad(loss, [*given, *head.parameters()])]
        if truth is None:
            return found
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]

    def fast(z):
        weights = stem_and_head.prepare(head, batch, torch.bfloat16)
        return stem_and_head.run_head(head, z, weights)

    truth = errors(torch.float32, head)
    plain = errors(torch.bfloat16, head, truth)
    for _ in range(5 if device.type == "cuda" else 1):
        for error, of_plain in zip(errors(torch.bfloat16, fast, truth), plain, strict=True):
            assert error <= 2 * of_plain + 5e-3


@pytest.mark.parametrize(
    ("norm", "training", "rooms"),
    [("batch", True, {3: 8, 6: 8}), ("batch", False, {}), ("group", True, {6: 8})],
)
def test_zeros_beside_the_channels_of_a_head(norm, training, rooms, device):
    """Of one group of 3 channels a kernel's tile has one column to spare; of two groups, two."""
    config = replace(FEW, outer_norm=norm, head_channels=(3, 8, 6))
    head = Head(config).to(device).train(training)
    weights = stem_and_head.prepare(head, 2, torch.bfloat16)
    for block, inner in zip(head.widen, config.head_channels, strict=True):
        room = rooms.get(inner, inner)
        found = [tuple(weights.convs[block.body[at]].shape[:2]) for at in (3, 6)]
        assert found == [(room, room), (4 * inner, room)]
        assert (block in weights.convs) == (norm == "group")


# ---- the solve


@pytest.mark.parametrize(
    ("solver", "gradient", "evaluations"),
    [
        (Broyden(3, 0.0), GDEQ(refine=1), 5),
        (Picard(2, 0.0), JFB(), 4),
        (Picard(2, 0.0), Unrolled(2), 5),
        (None, Unrolled(2), 2),
    ],
    ids=str,
)
def test_a_solve_finds_the_same(solver, gradient, evaluations, device, taken):
    images, results = torch.randn(2, 2, 4, 4, device=device), []
    both = models(replace(LITTLE, dropout=0.3), device, solver, gradient)
    for model in both:
        torch.manual_seed(4)
        results.append([*outcome(model, images), *model.deq.solution.z])
    assert taken == ["stem", "solve", *["f"] * evaluations, "head"]
    assert both[0].deq.solution.evals == both[1].deq.solution.evals
    close(results[1], results[0], 1e-2)  # steps of Broyden's method amplify rounding


class Watched(Serial):
    """Branches in turn that notice where streams of their own would read too early."""

    def __init__(self, branches):
        self.branch, self.branches, self.used = 0, branches, []
        self.marked, self.awaited = {}, {0}

    @contextlib.contextmanager
    def on(self, branch):
        assert branch < self.branches
        self.branch = branch
        self.used.append(branch)
        yield
        self.branch = 0

    def mark(self, name):
        self.marked[name] = self.branch

    def await_(self, name):
        self.awaited.add(self.marked[name])

    def reads(self, *values):
        assert tensors_in(values)

    def join(self, results):
        assert self.awaited == set(range(self.branches))  # each was waited for


def test_weights_are_made_beside_the_stem_and_once(device, monkeypatch, taken):
    _, fast = models(replace(FEW, downsample=1), device)
    made = []

    def branches(_device, count):
        made.append(Watched(count))
        return made[-1]

    for file in (run, stem_and_head):
        monkeypatch.setattr(file, "side_by_side", branches)
    for owner, name, told in (
        (weights_file, "prepare", "weights"),
        (weights_file, "at_zero", "at zero"),
        (run, "prepare", "outer"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, told=told, real=real: taken.append(told) or real(*a)
        )
    maps, solved = [], DEQ.equilibrium
    monkeypatch.setattr(DEQ, "equilibrium", lambda deq, f, z0: maps.append(f) or solved(deq, f, z0))
    fast(torch.randn(2, 2, 7, 9, device=device))
    assert maps[0].at_start is not None
    early = ["outer", "outer", "weights", *["at zero"] * 3]
    assert taken == [*early, "stem", "solve", "f", "f", "f", "head"]
    of_model, of_head = made
    assert (of_model.used, of_model.awaited) == ([1, 2], {0, 1, 2})
    assert (of_head.used, of_head.awaited) == ([0, 1, 2], {0, 1, 2})
    taken.clear()
    fast.deq.solver, fast.deq.gradient = None, Unrolled(1)  # what is not used is not made
    fast(torch.randn(2, 2, 7, 9, device=device))
    assert taken == [*early[:3], "stem", "solve", "f", "head"]
    fast.head.register_forward_pre_hook(lambda *_: None)  # it might change z in place
    fast(torch.randn(2, 2, 7, 9, device=device))
    assert [f.lends for f in maps] == [True, True, False]


# ---- what a user has changed


class OtherForward(MDEQCell):
    def forward(self, z, injection):
        return super().forward(z, 2 * injection)


class OtherStart(MDEQCell):
    def initial_state(self, injection):
        return tuple(part + 1 for part in super().initial_state(injection))


class OtherLayer(DEQ):
    pass


def other_cell(kind):
    def change(model):
        cell = kind(model.config)
        cell.load_state_dict(model.deq.cell.state_dict())
        model.deq.cell = cell

    return change


def hook(path, kind="forward"):
    def change(model):
        part = model.get_submodule(path)
        getattr(part, f"register_{kind}_hook")(lambda *_: model.seen.append(path))

    return change


def put(path, make):
    return lambda model: model.set_submodule(path, make())


def patch(path, **attributes):
    return lambda model: vars(model.get_submodule(path)).update(attributes)


def own_forward(model):
    forward = model.stem.forward
    model.stem.forward = lambda x: 2 * forward(x)


def own_start(model):
    start = model.deq.cell.initial_state
    model.deq.cell.initial_state = lambda injection: tuple(z + 1 for z in start(injection))


def compiled(model):
    call = model.head._call_impl
    model.head._compiled_call_impl = lambda z: 2 * call(z)


def bare(model):
    block = model.get_submodule("deq.cell.scales.0.blocks.0")
    parametrize.remove_parametrizations(block.expand, "weight")


ALL = {"stem", "solve", "f", "head"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Hooks on a part as a whole see it called; those inside have their part called itself.
        (hook("stem"), ALL),
        (hook("stem", "forward_pre"), ALL),
        (hook("head"), ALL),
        (hook("stem.0"), ALL - {"stem"}),
        (hook("head.classify"), ALL - {"head"}),
        (hook("head.widen.1.shortcut.0"), ALL - {"head"}),
        (hook("deq"), ALL - {"solve"}),
        (hook("deq.cell"), ALL - {"solve"}),
        (hook("deq.cell.fusions.1.post", "full_backward_pre"), {"stem", "head"}),
        # Other modules.
        (put("stem", lambda: nn.Conv2d(2, 4, 1)), ALL - {"stem"}),
        (put("head", lambda: nn.ModuleList([nn.Identity()])), None),
        (put("head.classify", lambda: nn.Linear(5, 7)), ALL),
        (put("head.classify", nn.Identity), ALL - {"head"}),
        (put("head.classify", lambda: nn.Linear(5, 7, bias=False)), ALL - {"head"}),
        (put("stem.1", lambda: nn.GroupNorm(2, 4, eps=0.1)), ALL - {"stem"}),
        (put("stem.2", nn.GELU), ALL - {"stem"}),
        (put("stem.3", lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2)), ALL - {"stem"}),
        (put("deq.cell.fusions.0.post_norm", lambda: nn.GroupNorm(2, 4)), {"stem", "head"}),
        (other_cell(MDEQCell), ALL),
        (other_cell(OtherForward), ALL - {"solve"}),
        (other_cell(OtherStart), ALL - {"solve"}),
        (
            lambda model: setattr(model, "deq", OtherLayer(model.deq.cell, ONE_STEP)),
            ALL - {"solve"},
        ),
        # Other settings and methods.
        (bare, {"stem", "head"}),
        (patch("deq.cell.scales.0.blocks.0.dropout", p=0.5), ALL),
        (patch("deq.cell.scales.0.blocks.0.dropout", channelwise=False), {"stem", "head"}),
        (own_forward, ALL - {"stem"}),
        (own_start, ALL - {"solve"}),
        (compiled, ALL - {"head"}),
    ],
)
def test_what_a_user_has_changed_is_called_itself(change, expected, device, taken):
    torch.manual_seed(7)
    plain, fast = models(replace(LITTLE, dropout=0.2), device)
    images = torch.randn(2, 2, 4, 4, device=device)
    results = []
    for model in (plain, fast):
        model.seen = []
        torch.manual_seed(5)
        change(model)
        model.to(device)
        if expected is None:  # a head that only asks what it is given
            model.head.forward = lambda z: torch.cat([part.flatten(1) for part in z], 1)
        torch.manual_seed(6)
        logits = model(images)
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert set(taken) == (ALL - {"head"} if expected is None else expected)
    close(results[1], results[0], 1e-3)
    assert fast.seen == plain.seen


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_module_with_a_hook_is_watched(hook, everywhere):
    module = nn.Linear(2, 2)
    assert as_built.unwatched(module)
    register = getattr(
        nn.modules.module if everywhere else module,
        f"register_module_{hook}_hook" if everywhere else f"register_{hook}_hook",
    )
    handle = register(lambda *_: None)
    assert not as_built.unwatched(module)
    handle.remove()
    assert as_built.unwatched(module)


def test_batch_norms_over_several_processes_are_called(device, taken, monkeypatch):
    plain, fast = models(replace(LITTLE, outer_norm="batch"), device)
    images = torch.randn(2, 2, 4, 4, device=device)
    expected = plain(images)
    fast = nn.SyncBatchNorm.convert_sync_batchnorm(fast)
    called = []
    monkeypatch.setattr(  # which needs a GPU, and processes
        nn.SyncBatchNorm,
        "forward",
        lambda norm, x: (
            called.append(norm)
            or nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        ),
    )
    close([fast(images)], [expected], 1e-4)
    assert {"stem", "head"} < set(taken)
    assert len(called) == sum(isinstance(m, nn.SyncBatchNorm) for m in fast.modules())


# ---- streams and graphs


@pytest.mark.parametrize("tol", [0.0, 1e-2])
def test_in_a_recorded_training_step(tol, gpu):
    """The published size, whose kernels are those of the benchmark, beside plain modules."""
    losses = []
    for fused in (False, "auto"):
        torch.manual_seed(0)
        solver, gradient = Broyden(6, tol), GDEQ(refine=1)
        model = mdeq("large", solver=solver, gradient=gradient, dropout=0.0, fused=fused)
        model = model.to(gpu, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(images, labels, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        recorded, of_this = gdeq.capture(step), []
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            images = torch.randn(16, 3, 32, 32, generator=generator).cuda()
            labels = torch.randint(10, (16,), generator=generator).cuda()
            of_this.append(float(recorded(images, labels)))
        assert recorded.graph is not None
        losses.append(torch.tensor(of_this))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05)


def test_streams_change_nothing(gpu, monkeypatch):
    config = replace(FEW, channels=(16, 32, 64), head_channels=(4, 8, 16), dropout=0.0)
    _, model = models(config, gpu, Broyden(max_iter=2, tol=0.0), GDEQ())
    images = torch.randn(64, 2, 32, 32, device=gpu)
    with torch.autocast("cuda", torch.bfloat16):
        with monkeypatch.context() as changed:
            for file in (run, stem_and_head):
                changed.setattr(file, "side_by_side", lambda *_: Serial())
            expected = outcome(model, images)
        for _ in range(10):
            close(outcome(model, images), expected, 2e-2)
