"""The first evaluation of a multiscale DEQ's solve, at zero: the same with less work."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

import gdeq
from gdeq import DEQ, GDEQ, JFB, Broyden, Unrolled, hold, narrowing
from gdeq.fast.kernels import available, choice, norms, weights
from gdeq.fast.kernels.norms import held_block_forward
from gdeq.models import MDEQ, MDEQCell, MDEQConfig, layers, mdeq_fused, mdeq_weights
from gdeq.models import mdeq as model_file
from gdeq.models.branches import Serial

FEW = MDEQConfig(
    channels=(4, 4, 6),
    blocks=2,
    expansion=3,
    groups=2,
    head_channels=(2, 2, 3),
    final_channels=5,
    classes=3,
    image_channels=2,
    dropout=0.3,
    outer_norm="group",
    fused=True,
)
LITTLE = replace(FEW, channels=(4, 6), head_channels=(1, 1), blocks=1, dropout=0.0)
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """All groups in one program: the interpreter's time goes by programs."""
    monkeypatch.setattr(DEQ, "_first_known", True)  # as after the first call
    if not available(device):
        pytest.skip("Triton does not run here")
    if device.type == "cpu":
        for name, tuning in norms.TUNING.items():
            monkeypatch.setitem(norms.TUNING, name, replace(tuning, run_bytes=1 << 20))
        for name, together in weights.TUNING.items():
            monkeypatch.setitem(weights.TUNING, name, replace(together, rows=256))


def uneven(module):
    """Norms that shift, as after some training."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def problem(config, size, device, batch=3):
    cell = uneven(MDEQCell(config)).to(device)
    return cell, torch.randn(batch, config.channels[0], *size).relu().to(device)


@pytest.fixture
def at_zero(monkeypatch):
    """How often f was computed by what all samples share."""
    calls, real = [], mdeq_fused.evaluate

    def evaluate(*args, **kwargs):
        calls.append(kwargs.get("zero") is not None)
        return real(*args, **kwargs)

    monkeypatch.setattr(mdeq_fused, "evaluate", evaluate)
    return calls


def close(found, expected, tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        error = (a.double() - b.double()).norm() / (b.double().norm() + 1e-6)
        assert error <= tolerance, f"off by {error:.1e}"


# ---- the same values


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (FEW, (8, 8)),
        (replace(FEW, blocks=1), (7, 5)),
        (replace(FEW, groups=1), (1, 3)),
        (replace(LITTLE, weight_norm=False, post_affine=True), (2, 6)),
        (replace(FEW, channels=(4,), head_channels=(2,)), (3, 1)),
        (replace(LITTLE, channels=(8, 16), groups=2, expansion=5), (4, 4)),
    ],
    ids=["even", "odd", "thin", "bare", "one scale", "whole pairs"],
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_evaluation(config, size, half, batch, device):
    cell, injection = problem(config, size, device, batch)
    with (
        torch.no_grad(),
        hold(cell),
        torch.autocast(device.type, torch.bfloat16, enabled=half),
    ):
        torch.manual_seed(1)
        found = cell.at_initial_state(injection)
        expected = cell(cell.initial_state(injection), injection)
        assert mdeq_fused.as_buffer(found) is not None
        # Where a norm has few numbers that are nearly equal, half precision is far off in both.
        close(found, expected, 3e-2 if half else 1e-5)
    if half:
        assert found[0].dtype == torch.bfloat16
        with torch.no_grad():
            torch.manual_seed(1)
            with hold(cell):
                exact = cell(cell.initial_state(injection), injection)
        for a, b, truth in zip(found, expected, exact, strict=True):
            assert (a - truth).norm() <= 2 * (b - truth).norm() + 1e-3 * truth.norm()


def test_one_sample_is_read_by_the_kernel_of_pairs_too(device, monkeypatch):
    cell, injection = problem(replace(LITTLE, channels=(8, 16), groups=2), (4, 4), device)
    taken, launch = [], held_block_forward.launch
    monkeypatch.setattr(
        held_block_forward,
        "launch",
        lambda y, *rest: taken.append((y.stride(0), rest[2].stride(0))) or launch(y, *rest),
    )
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        found = cell.at_initial_state(injection)
        assert taken == [(0, 0)] * 2
        close(found, cell(cell.initial_state(injection), injection), 3e-2)


def test_a_norm_without_shift(device):
    cell, injection = problem(LITTLE, (4, 4), device)
    for scale in cell.scales:
        norm = scale.blocks[0].expand_norm
        scale.blocks[0].expand_norm = layers.GroupNorm(
            norm.num_groups, norm.num_channels, affine=False
        ).to(device)
    with torch.no_grad():
        found = cell.at_initial_state(injection)
        close(found, cell(cell.initial_state(injection), injection), 1e-5)


def test_masks_are_drawn_as_by_the_cell(device):
    cell, injection = problem(FEW, (4, 4), device)
    masks = []
    for way in (cell.at_initial_state, lambda x: cell(cell.initial_state(x), x)):
        torch.manual_seed(2)
        with torch.no_grad(), hold(cell):
            way(injection)
            masks.append([block.dropout._value for scale in cell.scales for block in scale.blocks])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_where_there_is_no_cheaper_way(device, monkeypatch):
    cell, injection = problem(LITTLE, (4, 4), device)
    assert cell.at_initial_state(injection) is None  # with autograd
    with torch.no_grad():
        assert cell.at_initial_state(injection) is not None
        assert cell.double().at_initial_state(injection.double()) is None  # not fused
        monkeypatch.setattr(mdeq_fused, "zero_start", False)
        assert cell.float().at_initial_state(injection) is None


# ---- in a solve


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
@pytest.mark.parametrize("half", [False, True])
def test_a_solve_finds_the_same(form, half, device, at_zero, monkeypatch):
    cell, injection = problem(replace(LITTLE, blocks=2, dropout=0.3), (4, 4), device)
    results, solutions = [], []
    solver = Broyden(max_iter=4, tol=0.0)
    for switch in (False, True):
        monkeypatch.setattr(mdeq_fused, "zero_start", switch)
        at_zero.clear()
        deq, x = DEQ(cell, solver, GDEQ(refine=1)), injection.clone().requires_grad_()
        torch.manual_seed(4)
        with choice.use("auto" if form == "off" else form):
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                z = deq(x)
            loss = sum(part.float().square().sum() for part in z)
            gradient = torch.autograd.grad(loss, [x, *cell.parameters()])
        assert at_zero == [switch] + [False] * (4 + 1)
        results.append([*z, *gradient])
        solutions.append(deq.solution)
    assert solutions[0].evals == solutions[1].evals == 5
    # Four steps of Broyden's method, and its inverse, amplify rounding a thousandfold.
    if half:
        close(results[1][:2], results[0][:2], 0.1)
    else:
        close(results[1], results[0], 1e-2)


@pytest.mark.parametrize("gradient", [JFB(), Unrolled(2)], ids=str)
def test_it_is_used_by_each_solve(gradient, device, at_zero):
    cell, injection = problem(LITTLE, (4, 4), device)
    deq = DEQ(cell, gdeq.Picard(2, 0.0), gradient)
    deq(injection)
    assert at_zero == [True] + [False] * (3 if isinstance(gradient, JFB) else 4)
    deq.solver, deq.gradient = None, Unrolled(2)
    at_zero.clear()
    deq(injection)
    assert at_zero == [False] * 2


class OtherForward(MDEQCell):
    def forward(self, z, injection):
        return super().forward(z, 2 * injection)


class OtherStart(MDEQCell):
    def initial_state(self, injection):
        return tuple(part + 1 for part in super().initial_state(injection))


class Named(MDEQCell):
    """Changes nothing."""


@pytest.mark.parametrize(
    ("kind", "used"), [(OtherForward, False), (OtherStart, False), (Named, True)]
)
def test_subclasses(kind, used, device, at_zero):
    cell = kind(LITTLE).to(device)
    injection = torch.randn(2, 4, 4, 4, device=device)
    with torch.no_grad():
        DEQ(cell, Broyden(1, 0.0))(injection)
        assert at_zero == [used, False]
        at_zero.clear()


def test_where_it_is_not_used(device, at_zero):
    cell, injection = problem(LITTLE, (4, 4), device)
    deq = DEQ(cell, Broyden(1, 0.0))
    with torch.no_grad():
        deq(injection, z0=cell.initial_state(injection))
        deq.start = cell.initial_state
        deq(injection)
        deq.start = None
        handle = cell.register_forward_pre_hook(lambda *_: None)
        deq(injection)
        handle.remove()
        assert not any(at_zero)
        deq(injection)
        assert any(at_zero)


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_with_samples_that_leave(form, device, at_zero, monkeypatch):
    monkeypatch.setattr(narrowing, "LEAST", 2)
    cell, injection = problem(LITTLE, (4, 4), device, batch=4)
    injection = injection * torch.logspace(-1, 2, 4, device=device).view(-1, 1, 1, 1)
    found = []
    for switch in (False, True):
        monkeypatch.setattr(mdeq_fused, "zero_start", switch)
        at_zero.clear()
        deq = DEQ(copy.deepcopy(cell), Broyden(12, 1e-3), narrow=True).eval()
        with choice.use(form), torch.no_grad():
            z = deq(injection)
        assert at_zero[0] == switch
        assert not any(at_zero[1:])
        found.append((z, deq.solution))
    close(found[1][0], found[0][0], 5e-3)
    assert found[0][1].evals == found[1][1].evals
    assert found[0][1].converged.any()


# ---- before the solve


def test_what_all_samples_share_is_made_once_and_beside_the_stem(device, at_zero, monkeypatch):
    if device.type != "cpu":
        pytest.skip("the streams of a GPU are set aside here")
    model = uneven(MDEQ(replace(LITTLE, downsample=1), Broyden(1, 0.0), JFB()))
    images = torch.randn(2, 2, 7, 9)
    expected = model(images)
    calls, made, stem = [], mdeq_weights.at_zero, model.stem.forward
    monkeypatch.setattr(
        mdeq_weights, "at_zero", lambda *args: calls.append("at zero") or made(*args)
    )
    monkeypatch.setattr(model.stem, "forward", lambda x: calls.append("stem") or stem(x))
    monkeypatch.setattr(layers, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(model_file, "runs_as_kernels", lambda x, dtype=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float32)
    monkeypatch.setattr(model_file, "Parallel", lambda *_: Serial())

    def order():
        calls.clear()
        at_zero.clear()
        assert torch.allclose(model(images), expected, atol=1e-4)
        return calls

    assert order() == ["at zero", "stem"]
    assert at_zero == [True, False, False]
    monkeypatch.setattr(model_file, "weights_beside", False)
    assert order() == ["stem", "at zero"]
    monkeypatch.setattr(model_file, "weights_beside", True)
    monkeypatch.setattr(mdeq_fused, "zero_start", False)
    assert order() == ["stem"]
    monkeypatch.setattr(mdeq_fused, "zero_start", True)
    model.deq.start = model.deq.cell.initial_state  # what is not used is not made
    assert order() == ["stem"]


def test_another_hold_sees_other_weights(device):
    cell, injection = problem(LITTLE, (4, 4), device)
    with torch.no_grad():
        for _ in range(2):
            with hold(cell):
                found = cell.at_initial_state(injection)
                close(found, cell(cell.initial_state(injection), injection), 1e-5)
                # Of another size in the same solve, too.
                other = injection[:, :, :3, :3]
                found = cell.at_initial_state(other)
                close(found, cell(cell.initial_state(other), other), 1e-5)
            for parameter in cell.parameters():
                parameter.mul_(1.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tol", [0.0, 1e-2])
def test_in_a_recorded_training_step(tol, monkeypatch):
    """Streams and graphs: the published size, whose kernels are those of the benchmark."""
    losses = []
    for switch in (False, True):
        monkeypatch.setattr(mdeq_fused, "zero_start", switch)
        torch.manual_seed(0)
        model = model_file.mdeq("large", solver=Broyden(6, tol), gradient=GDEQ(refine=1))
        model = model.to("cuda", memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(images, labels, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        recorded, of_this = gdeq.capture(step), []
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            images = torch.randn(16, 3, 32, 32, generator=generator).cuda()
            labels = torch.randint(10, (16,), generator=generator).cuda()
            torch.manual_seed(3)
            of_this.append(float(recorded(images, labels)))
        assert recorded.graph is not None
        losses.append(torch.tensor(of_this))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05)
