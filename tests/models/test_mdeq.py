"""The multiscale DEQ: its published figures, its shapes, its equilibrium and its gradients."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gdeq
from gdeq import GDEQ, JFB, Broyden, Implicit, Unrolled, hold
from gdeq.fast.kernels import available, classifier, norms, weights
from gdeq.fast.streams import tensors_in
from gdeq.models import MDEQ, MDEQCell, MDEQConfig, layers, mdeq_fused, mdeq_weights
from gdeq.models import mdeq as model_file
from gdeq.models.branches import Serial
from gdeq.models.mdeq import average, mdeq
from gdeq.models.mdeq_cell import Down, Up
from gdeq.models.mdeq_config import SIZES, named

# Small enough for finite differences, with every kind of path: two ups, two downs, two blocks.
MINIMAL = MDEQConfig(
    channels=(4, 4, 6),
    blocks=2,
    expansion=2,
    groups=2,
    head_channels=(2, 2, 3),
    final_channels=5,
    classes=3,
    image_channels=2,
    dropout=0.0,
    outer_norm="group",
)


def minimal(solver=Broyden(max_iter=40, tol=1e-5), gradient=GDEQ(), **overrides):  # noqa: B008
    return MDEQ(replace(MINIMAL, **overrides), solver, gradient)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


# ---- the published figures


def test_large_has_the_published_size():
    model = mdeq("large", classes=10, image_shape=(3, 32, 32))
    assert parameters(model) == 11_094_974
    assert [parameters(MDEQ(SIZES[size])) for size in ("small", "tiny")] == [91_514, 158_626]
    assert model.config.state_size(32, 32) == 61_440
    state = model.deq.cell.initial_state(torch.zeros(1, 32, 32, 32))
    assert sum(part.numel() for part in state) == 61_440
    groups = {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {8, 4}  # 4 in the post-fusion
    assert model.head.classify.in_features == 1680
    assert [widen.body[-1].num_features for widen in model.head.widen] == [56, 112, 224, 448]


def test_published_initialisation_is_one_option_away():
    published = mdeq("tiny", feedback=1.0)
    norms = [m for m in published.modules() if isinstance(m, nn.GroupNorm) and m.affine]
    assert all(bool((m.weight == 1).all()) for m in norms)
    convs = [m for m in published.modules() if isinstance(m, nn.Conv2d)]
    weights = torch.cat([m.weight.flatten() for m in convs])
    assert weights.std().item() == pytest.approx(0.01, rel=0.02)


# ---- shapes


@pytest.mark.parametrize("edge", [8, 28, 32])
@pytest.mark.parametrize("size", list(SIZES))
def test_any_size_takes_any_image(size, edge):
    model = mdeq(size, classes=7, image_shape=(1, edge, edge), solver=Broyden(max_iter=1, tol=0.0))
    assert model(torch.randn(2, 1, edge, edge)).shape == (2, 7)
    state = model.deq.solution.z
    assert isinstance(state, tuple)
    assert tuple(part.shape[1:] for part in state) == model.config.state_shapes(edge, edge)


@pytest.mark.parametrize("shape", [(7, 7), (9, 13), (1, 5), (28, 28)])
@pytest.mark.parametrize("downsample", [0, 1, 3])
def test_odd_and_oblong_images_fuse(shape, downsample):
    model = minimal(downsample=downsample, solver=Broyden(max_iter=2, tol=0.0))
    assert model(torch.randn(2, 2, *shape)).shape == (2, 3)
    z = model.deq.solution.z
    assert tuple(part.shape[1:] for part in z) == model.config.state_shapes(*shape)
    out = model.deq.cell(z, model.stem(torch.randn(2, 2, *shape)))
    assert isinstance(out, tuple)
    assert [part.shape for part in out] == [part.shape for part in z]


@pytest.mark.parametrize("edge", [5, 6, 7, 8])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_up_lays_a_pixel_where_down_took_it(levels, edge):
    # Down with the identity as its kernels samples pixels 2ˡ·k; Up must lay them over 2ˡ·k again.
    down, up = Down(1, 1, levels, 1, 1.0), Up(1, 1, levels, 1, 1.0)
    for module in [*down.modules(), *up.modules()]:
        if isinstance(module, nn.Conv2d):
            nn.init.dirac_(module.weight)
    steps = [module for module in down if isinstance(module, nn.Conv2d)]
    image = torch.arange(edge).float().expand(1, 1, edge, edge)
    low = image
    for step in steps:
        low = step(low)
    up.norm = nn.Identity()
    expected = torch.arange(edge) // 2**levels * 2**levels
    assert torch.equal(up(low, edge, edge)[0, 0, 0], expected.float())


# ---- the equilibrium


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize(
    ("size", "edge"), [("small", 8), ("small", 28), ("tiny", 32), ("large", 32)]
)
def test_the_first_solve_converges(size, edge, weight_norm):
    model = mdeq(size, image_shape=(3, edge, edge), weight_norm=weight_norm)
    with torch.no_grad():
        model(torch.randn(2, 3, edge, edge))
    solution = model.deq.solution
    assert bool(solution.converged.all()), str(solution)
    assert solution.residual.max() < 1e-3
    assert solution.steps.max() <= 18


def test_the_cell_knows_nothing_of_solvers():
    cell = MDEQCell(MINIMAL)
    injection = torch.randn(2, 4, 8, 8)
    solution = gdeq.solve(
        lambda z: cell(z, injection), cell.initial_state(injection), gdeq.Anderson(tol=1e-5)
    )
    assert bool(solution.converged.all())
    for part, again in zip(solution.z, cell(solution.z, injection), strict=True):
        torch.testing.assert_close(part, again, atol=1e-3, rtol=0)
        assert (part[0] - part[1]).norm() > 0.1 * part[0].norm()  # the image decides


def test_weights_are_normalised_once_a_solve():
    model = minimal(solver=Broyden(max_iter=5, tol=0.0), weight_norm=True)
    normed = [m for m in model.deq.cell.modules() if parametrize.is_parametrized(m)]
    assert len(normed) == 3 * (2 * 2 + 1)  # scales × (blocks × convolutions + post-fusion)
    used = []
    normed[0].register_forward_pre_hook(lambda conv, _: used.append(conv.weight))
    model(torch.randn(2, 2, 8, 8))
    assert len(used) == 7  # the start, five steps, and once with autograd
    assert all(weight is used[0] for weight in used)


def test_dropout_holds_its_mask_during_a_solve():
    model = minimal(dropout=0.5)
    cell, injection = model.deq.cell, torch.randn(2, 4, 8, 8)
    z = tuple(torch.randn_like(part) for part in cell.initial_state(injection))
    with hold(cell):
        once, again = cell(z, injection), cell(z, injection)
    other = cell(z, injection)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    model(torch.randn(4, 2, 8, 8))  # a mask that moved would not let the solve converge
    assert bool(model.deq.solution.converged.all())


# ---- gradients


METHODS = {
    "GDEQ": GDEQ(),
    "refined": GDEQ(refine=1),
    "Implicit": Implicit(),
    "JFB": JFB(),
    "pre-training": Unrolled(3),
}


@pytest.mark.parametrize(
    ("size", "method"),
    [
        *((size, name) for size in ("minimal", "small", "tiny") for name in METHODS),
        ("large", "GDEQ"),
    ],
)
def test_gradients_reach_every_parameter(size, method):
    config = MINIMAL if size == "minimal" else named(size, image_channels=2)
    solver = None if method == "pre-training" else Broyden(max_iter=6, tol=1e-3)
    model = MDEQ(config, solver, METHODS[method])
    logits = model(torch.randn(4, 2, 12, 12))
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("weight_norm", [True, False])
def test_the_implicit_gradient_equals_finite_differences(weight_norm):
    exact = Broyden(max_iter=200, tol=1e-13)
    model = minimal(exact, Implicit(exact), weight_norm=weight_norm).double()
    images = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    target = torch.tensor([0, 2])

    def loss():
        value = nn.functional.cross_entropy(model(images), target)
        assert model.deq.solution.residual.max() < 1e-12
        return value

    loss().backward()
    directions = [torch.randn_like(p) * p.detach().abs().mean() for p in model.parameters()]
    slope = sum(
        float((p.grad * d).sum()) for p, d in zip(model.parameters(), directions, strict=True)
    )
    values, h = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2):  # to +h, then from there to −h
            for p, d in zip(model.parameters(), directions, strict=True):
                p.add_(d, alpha=sign * h)
            values.append(float(loss()))
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-5)


def test_pre_training_then_equilibrium():
    model = minimal()
    images = torch.randn(4, 2, 8, 8)
    model.deq.solver, model.deq.gradient = None, Unrolled(3)
    model(images).sum().backward()
    assert model.deq.solution.evals == 3
    model.deq.solver, model.deq.gradient = Broyden(max_iter=18, tol=1e-3), GDEQ()
    model(images).sum().backward()
    assert bool(model.deq.solution.converged.all())


def test_eval_repeats_itself_and_train_does_not():
    model = minimal(dropout=0.5)
    images = torch.randn(3, 2, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize(("norm", "mode"), [("group", "train"), ("batch", "eval")])
def test_a_sample_does_not_depend_on_its_batch(norm, mode):
    model = minimal(solver=Broyden(max_iter=60, tol=1e-6), outer_norm=norm)
    images = torch.randn(3, 2, 8, 8)
    for _ in range(30):
        model.stem(images)  # gives batch norm its running statistics
    model.train(mode == "train")
    together = model(images)
    alone = torch.cat([model(image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_copies_and_state_dicts_carry_the_model():
    model = minimal(outer_norm="batch", dropout=0.2)
    images = torch.randn(3, 2, 8, 8)
    model(images)  # moves the running statistics
    model.eval()
    expected = model(images)
    assert torch.equal(copy.deepcopy(model)(images), expected)
    other = minimal(outer_norm="batch", dropout=0.2).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), expected)


def test_channels_last_gives_the_same():
    model = minimal().eval()
    images = torch.randn(3, 2, 9, 9)
    expected = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        model(images.to(memory_format=torch.channels_last)), expected, atol=1e-4, rtol=1e-4
    )
    cell, injection = model.deq.cell, model.stem(images)
    z = tuple(p.to(memory_format=torch.channels_last) for p in cell.initial_state(injection))
    for part in cell(z, injection.to(memory_format=torch.channels_last)):
        assert part.is_contiguous(memory_format=torch.channels_last)


TWO_SCALES = {"channels": (4, 4), "head_channels": (2, 2), "blocks": 1}  # compiles in less time


def test_the_compiled_cell_computes_the_same():
    model = minimal(**TWO_SCALES).eval()
    images = torch.randn(2, 2, 8, 8)
    expected = model(images)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.deq.cell.compile(backend="aot_eager")
    found = model(images)
    found.sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-3, rtol=1e-3)


def test_the_cell_compiles_into_one_graph():
    cell = MDEQCell(replace(MINIMAL, **TWO_SCALES))
    injection = torch.randn(2, 4, 7, 7)
    z = tuple(torch.randn_like(part) for part in cell.initial_state(injection))
    compiled = torch.compile(cell, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), hold(cell):
        expected = cell(z, injection)  # and the weights are made
        for found, part in zip(compiled(z, injection), expected, strict=True):
            torch.testing.assert_close(found, part)


def test_bf16_autocast_trains():
    model = mdeq("small", image_shape=(1, 8, 8), solver=Broyden(max_iter=12, tol=1e-2))
    images = torch.randn(4, 1, 8, 8)
    full = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
        nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 3])).backward()
    assert bool(model.deq.solution.converged.all())
    assert {part.dtype for part in model.deq.solution.z} == {torch.float32}
    assert (logits - full).norm() < 0.1 * full.norm()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_wrong_size_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'large'"):
        mdeq("LARGER")
    with pytest.raises(ValueError, match="image_shape is"):
        mdeq("tiny", image_shape=(32, 32))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chanels": (8,)}, TypeError, "did you mean 'channels'"),
        ({"channels": (8, 16)}, ValueError, "one entry for each scale: 2 channels, 4 head"),
        ({"channels": (8, 0, 1, 1)}, ValueError, "at least one integer above 0"),
        ({"channels": "32"}, TypeError, "tuple of integers"),
        ({"blocks": 0}, ValueError, "blocks must be at least 1"),
        ({"dropout": 1.0}, ValueError, "dropout must be below 1"),
        ({"outer_norm": "layer"}, ValueError, "'batch' or 'group'"),
        ({"feedback": 0.0}, ValueError, "feedback must be above 0 and at most 1"),
    ],
)
def test_wrong_options_say_what_is_right(options, error, message):
    with pytest.raises(error, match=message):
        MDEQConfig(**options)


def test_lists_become_tuples_and_groups_shrink_to_divide():
    config = replace(MINIMAL, channels=[6, 10, 9], groups=4)
    assert config.channels == (6, 10, 9)
    assert MDEQ(config)(torch.randn(2, 2, 8, 8)).shape == (2, 3)


# ---- stem and head in few kernels


class Watched(Serial):
    """Branches in turn that complain where streams of their own would read too early."""

    def __init__(self, device, branches, grad):
        self.branch, self.used, self.joined = 0, [], False
        self.marked, self.awaited, self.branches = {}, {0}, branches

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
        # The way down reads what every branch made, each after waiting for it.
        assert self.awaited == set(range(self.branches))
        self.joined = True


def few_programs(monkeypatch):
    """The interpreter's time goes by programs."""
    for module in (norms, weights):
        for name, tuning in module.TUNING.items():
            few = {"run_bytes": 1 << 20} if module is norms else {"rows": 64}
            monkeypatch.setitem(module.TUNING, name, replace(tuning, **few))


@pytest.mark.skipif(not available(torch.device("cpu")), reason="Triton does not run here")
@pytest.mark.parametrize(
    "overrides",
    [{}, {"channels": (4, 4, 8), "head_channels": (1, 1, 2)}, {"outer_norm": "batch"}],
    ids=["shortcuts", "identities", "batch norms"],
)
def test_stem_and_head_in_few_kernels_compute_the_same(overrides, monkeypatch):
    # One step: the cell is in kernels too, and takes the interpreter's time.
    model = minimal(Broyden(max_iter=1, tol=0.0), JFB(), downsample=1, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    torch.manual_seed(2)  # with others, rounding may move a number past a ReLU's corner
    images = torch.randn(3, 2, 9, 7)
    names = list(model.state_dict())

    def outcome():
        logits = model(images)
        weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        return [logits, *torch.autograd.grad((logits * weight).sum(), list(model.parameters()))]

    expected = outcome()
    calls = []
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float32)
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(model_file, "runs_as_kernels", lambda x, dtype=None: True)
    made = []
    monkeypatch.setattr(model_file, "Parallel", lambda *a: made.append(Watched(*a)) or made[-1])
    monkeypatch.setattr(layers, "fuse", lambda *a: calls.append("fuse") or norms.fuse(*a))
    monkeypatch.setattr(layers, "merge", lambda *a: calls.append("merge") or weights.merge(*a))
    batched = lambda *a, **k: calls.append(len(a[0])) or norms.batch_norms(*a, **k)  # noqa: E731
    monkeypatch.setattr(layers, "batch_norms", batched)
    few_programs(monkeypatch)
    found = outcome()
    # Batch norms: three of the stem, three at each scale, two on the way down, the last.
    by_batch = [1] * 3 + [1, 1, 2] * 3 + [1] * 3
    by_group = ["fuse"] * 3
    assert calls == ["merge", "merge", *(by_batch if "outer_norm" in overrides else by_group)]
    sides, branches = made
    assert sides.used == [1, 2]
    assert sides.awaited == {0, 1, 2}
    assert branches.used == [0, 1, 2]
    assert branches.joined
    assert list(model.state_dict()) == names
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-6
    assert all(getattr(module, "ready", None) is None for module in model.modules())


@pytest.mark.skipif(not available(torch.device("cpu")), reason="Triton does not run here")
@pytest.mark.parametrize(
    ("dtype", "training", "norm"),
    [
        (torch.float32, True, "batch"),
        (torch.bfloat16, False, "batch"),
        (torch.float32, True, "group"),
        (torch.bfloat16, False, "group"),
    ],
    ids=str,
)
def test_the_head_with_zeros_beside_its_channels_computes_the_same(
    dtype, training, norm, monkeypatch
):
    torch.manual_seed(0)
    config = replace(MINIMAL, outer_norm=norm, head_channels=(3, 8, 6))
    first = model_file.Head(config).train(training)
    z = [torch.randn(3, c, h, h).to(dtype) for c, h in ((4, 4), (4, 2), (6, 2))]
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: dtype)
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
    few_programs(monkeypatch)
    names = list(first.state_dict())
    outcomes = []
    for multiple in (1, 8):
        monkeypatch.setattr(layers, "MULTIPLE", multiple)
        monkeypatch.setattr(layers, "joined_shortcuts", multiple == 8)
        head = copy.deepcopy(first)
        seen = []

        def watched(forward, seen=seen):
            def call(x):
                y = forward(x)
                seen.append((x.shape[1], y.shape[1]))
                return y

            return call

        for widen in head.widen:
            for layer in list(widen.body)[1:]:
                if isinstance(layer, nn.Conv2d):  # not by a hook, which would see zeros
                    layer.forward = watched(layer.forward)
        inputs = [part.clone().requires_grad_() for part in z]
        with layers.made_ready(head, z[0]):
            joined = norm == "group" and multiple == 8
            assert [widen.ready is not None for widen in head.widen] == [joined] * 3
            y = z[0].new_zeros(())
            for widen, part in zip(head.widen, inputs, strict=True):
                out = widen(part)
                y = y + (out * torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)).sum()
        leaves = [*inputs, *head.widen.parameters()]
        outcomes.append([y, *torch.autograd.grad(y, leaves), *head.buffers()])
        assert list(head.state_dict()) == names
        # Of one group of 3 channels a tile has one column to spare; of two groups, two.
        room = {3: 8, 6: 8} if norm == "batch" and training else {6: 8} if norm == "group" else {}
        room = room if multiple == 8 else {}
        wide = [room.get(inner, inner) for inner in config.head_channels]
        outer = [model_file.HEAD_EXPANSION * inner for inner in config.head_channels]
        assert seen == [
            pair
            for inner, out in zip(wide, outer, strict=True)
            for pair in ((inner, inner), (inner, out))
        ]
        assert all(getattr(m, "room", None) is None for m in head.modules())
    for a, b in zip(*outcomes, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (a - b).double().norm() <= tolerance * b.double().norm() + 1e-5


@pytest.mark.skipif(not available(torch.device("cpu")), reason="Triton does not run here")
def test_weights_are_made_before_the_stem_runs_and_once(monkeypatch):
    model = minimal(Broyden(max_iter=1, tol=0.0), JFB(), fused=True)
    images = torch.randn(2, 2, 8, 8)
    expected = model(images)
    calls, made = [], []
    prepare, stem = mdeq_weights.prepare, model.stem.forward
    monkeypatch.setattr(mdeq_weights, "prepare", lambda *a: calls.append("cell") or prepare(*a))
    monkeypatch.setattr(model.stem, "forward", lambda x: calls.append("stem") or stem(x))
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(model_file, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float32)
    monkeypatch.setattr(model_file, "Parallel", lambda *a: made.append(Watched(*a)) or made[-1])
    few_programs(monkeypatch)
    for beside, order in ((True, ["cell", "stem"]), (False, ["stem", "cell"])):
        monkeypatch.setattr(model_file, "weights_beside", beside)
        calls.clear()
        assert torch.allclose(model(images), expected, atol=1e-4)
        assert calls == order
    assert len(made) == 3  # sides and the head's; the head's


def test_the_published_head_in_half_precision_with_all_switches_on_and_off(device, monkeypatch):
    if not available(device):
        pytest.skip("Triton does not run here")
    config = named("large", outer_norm="group")
    head = model_file.Head(config).to(device)
    # Not 4: of maps of one pixel oneDNN leaves parts of bf16 weights' gradients unwritten.
    edge, batch = (32, 8) if device.type == "cuda" else (8, 2)
    z = [
        torch.randn(batch, c, e, e, device=device).bfloat16().to(memory_format=torch.channels_last)
        for c, e in ((c, edge >> i) for i, c in enumerate(config.channels))
    ]

    def outcome(dtype, autocast):
        given = [part.to(dtype).requires_grad_() for part in z]
        leaves = [*given, *head.parameters()]
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            ready = layers.made_ready(head, z[0]) if autocast else contextlib.nullcontext()
            with ready:
                # Gradients of leaves are to arrive on the current stream.
                logits = head([part.view_as(part) for part in given])
        weight = torch.linspace(-1, 1, logits.numel(), device=device).view_as(logits)
        return [logits, *torch.autograd.grad((logits.float() * weight).sum(), leaves)]

    truth = outcome(torch.float32, False)
    if device.type == "cpu":
        monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
        monkeypatch.setattr(model_file, "runs_as_kernels", lambda x, dtype=None: True)
        monkeypatch.setattr(model_file, "Parallel", Watched)
        few_programs(monkeypatch)
    errors = []
    switches = [(layers, "group_rooms"), (layers, "joined_shortcuts"), (classifier, "enabled")]
    for on in (False, True):
        for place, name in (*switches, (norms.fusion_whole, "masked")):
            monkeypatch.setattr(place, name, on)
        for _ in range(5 if device.type == "cuda" else 1):
            pairs = zip(outcome(torch.bfloat16, True), truth, strict=True)
            errors.append([((a - b).norm() / b.norm()).item() for a, b in pairs])
    names = [
        "logits",
        *(f"z[{i}]" for i in range(len(z))),
        *(n for n, _ in head.named_parameters()),
    ]
    for found in errors[1:]:
        for name, error, off in zip(names, found, errors[0], strict=True):
            assert error <= 2 * off + 5e-3, f"{name}: off by {error:.3f}, without by {off:.3f}"


@pytest.mark.skipif(not available(torch.device("cpu")), reason="Triton does not run here")
def test_hooks_and_other_classifiers_are_called(monkeypatch):
    head = model_file.Head(MINIMAL)
    z = [torch.randn(2, c, h, h) for c, h in ((4, 4), (4, 2), (6, 1))]
    expected = head(z)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float32)
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(model_file, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(model_file, "Parallel", Watched)
    few_programs(monkeypatch)
    seen = []

    def found():
        seen.clear()
        with layers.made_ready(head, z[0]):
            return head(z)

    assert torch.allclose(found(), expected, atol=1e-4)
    watched = [head.classify, head.widen[0].body[0], head.widen[1].shortcut[0]]
    handles = [m.register_forward_hook(lambda m, *_: seen.append(m)) for m in watched]
    assert torch.allclose(found(), expected, atol=1e-4)
    assert set(map(id, seen)) == set(map(id, watched))
    for handle in handles:
        handle.remove()
    head.classify = nn.Identity()
    assert found().shape == (2, MINIMAL.final_channels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_scales_of_the_head_side_by_side_compute_the_same(monkeypatch):
    device = torch.device("cuda")
    model = minimal(channels=(16, 32, 64), head_channels=(4, 8, 16)).to(device)
    images = torch.randn(64, 2, 32, 32, device=device)
    model.deq.solver = Broyden(max_iter=2, tol=0.0)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(images)
        weight = torch.linspace(-1, 1, logits.numel(), device=device).view_as(logits)
        loss = (logits.float() * weight).sum()
        return [logits, *torch.autograd.grad(loss, list(model.parameters()))]

    monkeypatch.setattr(mdeq_fused, "streams_with_grad", False)
    expected = step()
    monkeypatch.setattr(mdeq_fused, "streams_with_grad", True)
    for _ in range(10):
        for a, b in zip(step(), expected, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm() + 1e-6


def test_layers_run_one_by_one_where_kernels_do_not():
    pair = layers.Layers(layers.conv(3, 4, 1), layers.group_norm(2, 4), nn.ReLU())
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(pair(x), nn.Sequential(*pair)(x))
    assert list(pair.state_dict()) == ["0.weight", "1.weight", "1.bias"]


def test_the_head_averages_without_overflow(device):
    """In half precision a sum over the image would leave the range."""
    assert average(torch.full((1, 2, 32, 32), 70.0, dtype=torch.float16, device=device)).max() == 70
    y = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    torch.testing.assert_close(average(y), y.mean(dim=(2, 3)))
    assert torch.autograd.gradcheck(average, y)
    assert torch.autograd.gradgradcheck(average, y)


@pytest.mark.skipif(not available(torch.device("cpu")), reason="Triton does not run here")
def test_float32_states_in_a_head_with_room(monkeypatch):
    """Their convolutions are PyTorch's, without zeros beside the channels."""
    torch.manual_seed(0)
    head = model_file.Head(named("tiny", outer_norm="group", head_channels=(14, 28)))
    z = [torch.randn(2, w, 8 >> i, 8 >> i) for i, w in enumerate(named("tiny").channels)]
    with torch.no_grad():
        truth = head(z)
    half = lambda x, dtype=None: (dtype or x.dtype).itemsize == 2  # noqa: E731
    monkeypatch.setattr(layers, "runs_as_kernels", half)
    monkeypatch.setattr(model_file, "runs_as_kernels", half)
    few_programs(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given = z[0].bfloat16()
        with layers.made_ready(head, given):
            assert any(getattr(m, "room", None) for m in head.modules())
            found = head(z)
    assert (found - truth).norm() < 0.03 * truth.norm()


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_module_with_a_hook_is_watched(hook, everywhere):
    module = torch.nn.Linear(2, 2)
    assert layers.unwatched(module)
    register = getattr(
        torch.nn.modules.module if everywhere else module,
        f"register_module_{hook}_hook" if everywhere else f"register_{hook}_hook",
    )
    handle = register(lambda *_: None)
    assert not layers.unwatched(module)
    handle.remove()
    assert layers.unwatched(module)
