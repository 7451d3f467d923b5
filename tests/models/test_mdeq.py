"""The multiscale DEQ: its published figures, its shapes, its equilibrium and its gradients."""

import copy
import hashlib
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gdeq
import gdeq.fast
from gdeq import GDEQ, JFB, Broyden, Implicit, Unrolled, hold
from gdeq.models import MDEQ, MDEQCell, MDEQConfig
from gdeq.models.mdeq import SIZES, Down, Up, mdeq, named

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


@pytest.mark.parametrize(
    ("size", "names", "total", "first", "last"),
    [
        ("small", "18d571dc12fbd9e3", 611.68540519, 0.0225573052, 0.0338180624),
        ("tiny", "ffc79ee5abc78da2", 1452.38570670, -0.0040583909, -0.0610349886),
        ("large", "c3fe9311b2969410", 13375.40582739, 0.0311461724, -0.0137381749),
    ],
)
def test_names_and_initial_weights_stay_what_results_were_made_with(
    size, names, total, first, last
):
    torch.manual_seed(0)
    model = mdeq(size)
    state = model.state_dict()
    told = "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == names
    assert sum(float(value.double().sum()) for value in state.values()) == pytest.approx(total)
    assert model.stem[0].weight.flatten()[0].item() == pytest.approx(first)
    assert model.head.classify.weight.flatten()[0].item() == pytest.approx(last)


# ---- shapes


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
    model = mdeq(size, classes=7, image_shape=(3, edge, edge), weight_norm=weight_norm)
    with torch.no_grad():
        assert model(torch.randn(2, 3, edge, edge)).shape == (2, 7)
    solution = model.deq.solution
    assert tuple(part.shape[1:] for part in solution.z) == model.config.state_shapes(edge, edge)
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
    assert len(used) == 9  # the start, five steps, once with autograd, twice to check the cell
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


def test_the_compiled_cell_is_one_graph_and_computes_the_same():
    model = minimal(**TWO_SCALES).eval()
    images = torch.randn(2, 2, 7, 7)
    expected = model(images)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.deq.cell.compile(backend="aot_eager", fullgraph=True)
    found = model(images)
    found.sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-3, rtol=1e-3)


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


@pytest.mark.parametrize("fused", ["auto", False])
def test_a_model_on_the_cpu_does_without_its_accelerated_form(fused, monkeypatch):
    monkeypatch.setitem(sys.modules, "gdeq.fast.mdeq", None)
    monkeypatch.delattr(gdeq.fast, "mdeq", raising=False)
    images = torch.randn(2, 2, 6, 6)
    minimal(Broyden(max_iter=1, tol=0.0), fused=fused)(images)
    with pytest.raises(ImportError):
        minimal(Broyden(max_iter=1, tol=0.0), fused=True)(images)


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
        ({"fused": "always"}, ValueError, "fused must be True, False or 'auto'"),
    ],
)
def test_wrong_options_say_what_is_right(options, error, message):
    with pytest.raises(error, match=message):
        MDEQConfig(**options)


def test_lists_become_tuples_and_groups_shrink_to_divide():
    config = replace(MINIMAL, channels=[6, 10, 9], groups=4)
    assert config.channels == (6, 10, 9)
    assert MDEQ(config)(torch.randn(2, 2, 8, 8)).shape == (2, 3)
