"""Muon: against an SVD, in stacks of unlike shapes, beside the preset's optimiser, and resumed."""

import copy
import math

import pytest
import torch
from torch import nn
from training_runs import RICH, assert_resumed

from gdeq.fast.graphs import capture
from gdeq.holding import weight_norm
from gdeq.lab.training import config as configs
from gdeq.lab.training import muon, optimization, process, runs
from gdeq.models.mdeq import mdeq

CPU = process.Process(torch.device("cpu"))
MUON = ["optimizer=muon", "optimizer.lr=0.02", "optimizer.momentum=0.8"]


def with_singular_values(values, rows, columns, seed=0):
    source = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, generator=source))
    right, _ = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64, generator=source))
    return left, right, left @ torch.diag(values) @ right.T


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (8, 72), (40, 41)])
def test_newton_schulz_against_an_svd(rows, columns):
    """In float64: the singular vectors stay, all values from 1 to 1/100 come into the band."""
    values = torch.logspace(0, -2, rows, dtype=torch.float64) / rows**0.5
    left, right, matrix = with_singular_values(values, rows, columns)
    found = muon.orthogonalize(3e-5 * matrix[None])[0]  # whatever its size
    inner = left.T @ found @ right  # diagonal, if the vectors are kept
    kept = inner.diagonal()
    torch.testing.assert_close(inner, torch.diag(kept), rtol=0, atol=1e-12)
    torch.testing.assert_close(found @ right @ right.T, found, rtol=0, atol=1e-12)
    assert 0.65 < kept.min() < kept.max() < 1.22
    # And it is the polynomial that was published.
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(kept, expected, rtol=1e-9, atol=0)


def test_bfloat16_is_near():
    """What a GPU computes with."""
    x = torch.randn(1, 24, 96, generator=torch.Generator().manual_seed(3))
    exact, rounded = muon.orthogonalize(x.double())[0], muon.orthogonalize(x.bfloat16())[0]
    cosine = nn.functional.cosine_similarity(exact.flatten(), rounded.double().flatten(), dim=0)
    assert cosine > 0.999
    assert torch.linalg.svdvals(rounded.double()).max() < 1.25


def layers():
    """A convolution that lies, one that stands, a weight-normalised one, a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 16, 3),
        nn.Conv2d(16, 64, 1),
        weight_norm(nn.Conv2d(64, 6, 1)),
        nn.GroupNorm(2, 6),
        nn.Linear(6, 6),
        nn.Linear(6, 2),
    ).double()


def give_gradients(model, seed):
    source = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=source)


def optimizer_of(model, lr=0.1, decay=0.0, **options):
    inner, outer, rest = muon.split(model)
    groups = [
        {"params": inner, "orthogonal": True, "weight_decay": decay},
        {"params": outer, "weight_decay": decay},
        {"params": rest},
    ]
    return muon.Muon(groups, lr, **options)


def test_who_is_orthogonalised():
    model = layers()
    names = {p: name for name, p in model.named_parameters()}
    inner, outer, rest = ([names[p] for p in part] for part in muon.split(model))
    assert inner == ["1.weight", "2.weight", "3.parametrizations.weight.original1", "5.weight"]
    assert outer == ["0.weight", "6.weight"]
    assert len(rest) == len(names) - 6
    assert "3.parametrizations.weight.original0" in rest


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_two_updates_by_hand(pad, channels_last):
    model = layers()
    if channels_last:
        model = nn.Sequential(*[m.to(memory_format=torch.channels_last) for m in model])
    made = optimizer_of(model, 0.1, 0.5, momentum=0.75, pad=pad)
    inner, _, _ = muon.split(model)
    weights = [p.detach().clone() for p in inner]
    buffers = [torch.zeros_like(p) for p in inner]
    for seed in (1, 2):
        give_gradients(model, seed)
        made.step()
        for weight, buffer, p in zip(weights, buffers, inner, strict=True):
            buffer.mul_(0.75).add_(p.grad, alpha=0.25)
            g = (0.75 * buffer + 0.25 * p.grad).flatten(1)
            weight.mul_(1 - 0.1 * 0.5)
            wide = g if len(g) <= g.shape[1] else g.T
            o = muon.orthogonalize(wide[None])[0]
            o = (o if wide is g else o.T).reshape(weight.shape)
            size = math.sqrt(max(1.0, len(g) / g.shape[1]))
            weight.sub_(o, alpha=0.1 * size)
            torch.testing.assert_close(p.detach(), weight, rtol=1e-9, atol=1e-12)


def test_the_rest_is_adam():
    model = layers()
    twin = copy.deepcopy(model)
    _, outer, rest = muon.split(twin)
    adam = torch.optim.AdamW(
        [{"params": outer, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    made = optimizer_of(model, 0.1, 0.5)
    for seed in (1, 2, 3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        made.step()
        adam.step()
    _, *others = muon.split(model)
    for found, expected in zip(others[0] + others[1], outer + rest, strict=True):
        torch.testing.assert_close(found, expected)


def test_stacks_hold_all_and_each_once():
    inner, _, _ = muon.split(mdeq("large"))
    shapes = [tuple(sorted((p.shape[0], p.shape[1:].numel()))) for p in inner]
    for pad in (False, True):
        found = muon.stacks(shapes, pad)
        assert sorted(n for s in found for n in s.members) == list(range(len(shapes)))
        for stack in found:
            members = [shapes[n] for n in stack.members]
            assert stack.rows == max(rows for rows, _ in members)
            assert stack.columns == max(columns for _, columns in members)
            assert pad or len(set(members)) == 1
    alone = muon.stacks(shapes, False)
    assert len(found) < 12 < len(alone)  # that is what padding is for, and it is cheap
    assert (
        sum(s.flops for s in alone)
        < sum(s.flops for s in found)
        < 1.2 * sum(s.flops for s in alone)
    )


def test_rates_of_the_two_parts(trainer):
    made = trainer(*MUON, "optimizer.adam_lr=0.004")
    assert isinstance(made.optimizer, muon.Muon)
    optimization.set_rate(made.optimizer, 0.01)
    assert [g["lr"] for g in made.optimizer.param_groups] == [0.01, 0.002, 0.002]
    count = sum(len(g["params"]) for g in made.optimizer.param_groups)
    assert count == len(list(made.model.parameters()))
    # As on a GPU, in tensors that stay where they are.
    rates = [torch.tensor(0.0) for _ in range(3)]
    for group, rate in zip(made.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    before = [p.detach().clone() for p in made.model.parameters()]
    for _, batch in made.train_batches.epoch(0):
        made.one_step(*batch)
    optimization.restore_moments(made.optimizer, copy.deepcopy(made.optimizer.state_dict()))
    optimization.set_rate(made.optimizer, 0.01)
    assert [rate.item() for rate in rates] == pytest.approx([0.01, 0.002, 0.002])
    after = made.model.parameters()
    assert not any(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_resumed_bit_for_bit(tmp_path, few_images):
    settings = [*RICH, *MUON, "optimizer.weight_decay=0.1"]
    runs.train(tmp_path / "whole", configs.load("digits", settings))
    assert_resumed(tmp_path / "cut", settings, 4, tmp_path / "whole")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_on_a_gpu():
    """In bf16 and stacks that are filled up; recorded and not, and near the CPU's float32."""
    plain, graph = (layers().float().cuda() for _ in range(2))
    on_cpu = layers().float()
    rate = torch.tensor(0.1, device="cuda")
    makers = [optimizer_of(m, rate, 0.5) for m in (plain, graph)]
    alone = optimizer_of(on_cpu, 0.1, 0.5)

    def update(x):
        for p in graph.parameters():
            p.grad = torch.cos(p.detach() * 100 + x)
        makers[1].step()

    step = capture(update, warmup=2)
    for number in range(6):
        for model in (plain, on_cpu):
            for p in model.parameters():
                p.grad = torch.cos(p.detach() * 100 + number)
        makers[0].step()
        if number == 0:  # later ones drift apart, as gradients follow the weights
            alone.step()
            for found, expected in zip(plain.parameters(), on_cpu.parameters(), strict=True):
                torch.testing.assert_close(found.cpu(), expected, rtol=0.02, atol=0.01)
        step(torch.tensor(float(number), device="cuda"))
    assert step.graph is not None
    for found, expected in zip(graph.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_length_beyond_the_range_makes_no_update():
    assert torch.equal(muon.orthogonalize(torch.full((1, 4, 6), 3.3e38)), torch.zeros(1, 4, 6))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-23, 1e-19, 1e-10, 1.0, 1e18, 1e25, 1e36])
def test_gradients_of_any_size_are_made_orthogonal(size):
    """In float32, whose squares end at 1e-45 and 3e38."""
    x = (size * torch.randn(2, 8, 16)).float()
    found = muon.orthogonalize(x)
    assert found.isfinite().all()
    if size >= 1e-38:
        values = torch.linalg.svdvals(found)
        assert values.max() < 1.3
        assert values.min() > 0.2  # less than usual where only a bound of the length is known


def test_a_matrix_without_gradient_stays_what_it_is():
    """At first, and when its momentum has decayed out of sight."""
    weight = nn.Parameter(3 * torch.randn(8, 16))
    optimizer = muon.Muon([{"params": [weight], "orthogonal": True}], 0.01, 0.9)
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, before)
    weight.grad = 1e-3 * torch.randn_like(weight)
    optimizer.step()
    weight.grad = torch.zeros_like(weight)
    for _ in range(1200):
        optimizer.step()
    assert weight.isfinite().all()
