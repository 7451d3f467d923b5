"""What one step does: rate, decay, clipping, averaging, the two phases, the Jacobian penalty."""

import copy
import json
import math
from itertools import pairwise

import pytest
import torch
import training_runs
from torch.nn.functional import cross_entropy
from training_runs import PER_EPOCH, TINY

from gdeq.gradients import GDEQ, Unrolled
from gdeq.regularize import hold, jacobian_penalty, spectral_radius
from gdeq.solvers import Broyden
from gdeq.training import config as configs
from gdeq.training import loop, process, progress, runs
from gdeq.training.folder import RunFolder

CPU = process.Process(torch.device("cpu"))


def rates(*settings, total=10):
    config = configs.load("digits", [*TINY, "optimizer.lr=2", *settings])
    return [loop.learning_rate(config, step, total) for step in range(total)]


def test_constant_rate():
    assert rates("optimizer.schedule=constant") == [2.0] * 10


def test_cosine_rate():
    found = rates("optimizer.schedule=cosine", total=4)
    assert found == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])


def test_one_cycle_rate():
    found = rates("optimizer.schedule=onecycle", "optimizer.warmup=0.4")
    rise = [2 * n / 5 for n in (1, 2, 3, 4)]
    fall = [2 * (1 - n / 6) for n in range(6)]
    assert found == pytest.approx(rise + fall)


def test_cosine_after_a_warm_up():
    found = rates("optimizer.schedule=cosine", "optimizer.warmup=0.2")
    assert found[:3] == pytest.approx([2 / 3, 4 / 3, 2])
    assert found[6] == pytest.approx(1)  # half way from 2 to 10
    assert all(a > b > 0 for a, b in pairwise(found[2:]))


def test_all_warm_up():
    assert rates("optimizer.warmup=1", total=4) == pytest.approx([0.4, 0.8, 1.2, 1.6])


@pytest.fixture
def trainer(tmp_path, few_images):
    def make(*settings):
        config = configs.load("digits", [*TINY, *settings])
        return loop.Trainer(config, RunFolder(tmp_path), CPU, progress.Silent(), None)

    return make


def batches(trainer):
    return [batch for _, batch in trainer.train_batches.epoch(0)]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_weight_decay_spares_biases_and_norms(trainer):
    made = trainer(
        "optimizer.weight_decay=0.5", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0"
    )
    assert isinstance(made.optimizer, torch.optim.SGD)
    decayed, spared = made.optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    assert all(p.dim() > 1 for p in decayed["params"])
    assert all(p.dim() == 1 for p in spared["params"])
    count = len(decayed["params"]) + len(spared["params"])
    assert count == len(list(made.model.parameters()))
    before = [p.detach().clone() for p in decayed["params"]]
    for p in made.model.parameters():
        p.grad = torch.zeros_like(p)
    made.optimizer.step()
    for p, old in zip(decayed["params"], before, strict=True):
        torch.testing.assert_close(p.detach(), old * (1 - 0.1 * 0.5))


def test_options_of_the_optimiser_may_change_on_resume(trainer):
    made = trainer("optimizer.weight_decay=0.5")
    made.one_step(*batches(made)[0])
    state = made.state()
    again = trainer("optimizer.weight_decay=0.1")
    again.restore(state)
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.1
    first = next(iter(again.optimizer.state.values()))
    assert first["step"] == 1
    assert first["exp_avg"].abs().sum() > 0


def test_gradients_are_clipped(trainer):
    settings = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.5"]
    settings += ["optimizer.schedule=constant"]
    for clip, expected in (("1e-3", 0.5e-3), ("null", None)):
        made = trainer(*settings, f"optimizer.clip={clip}")
        before = flat(made.model)
        made.one_step(*batches(made)[0])
        moved = (flat(made.model).double() - before.double()).norm().item()
        if expected:
            assert moved == pytest.approx(expected, rel=0.02)  # float32 near 1 takes the rest
        else:
            assert moved > 0.05


def test_averaged_weights(trainer):
    made = trainer("ema=0.4")
    expected = flat(made.model)
    start = flat(made.averaged)
    assert torch.equal(start, expected)
    for number, batch in enumerate(batches(made), start=1):
        made.one_step(*batch)
        decay = min(0.4, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * flat(made.model)
        torch.testing.assert_close(flat(made.averaged), expected)
    assert not torch.equal(flat(made.averaged), flat(made.model))
    # They are what is evaluated, and what is written.
    by_average = made.evaluate()
    made.model.load_state_dict(made.averaged.state_dict())
    made.averaged = None
    assert made.evaluate() == by_average


def test_first_unrolled_then_in_equilibrium(trainer):
    made = trainer("pretrain_steps=2", "pretrain_layers=3", "gradient.refine=1")
    seen = []
    for batch in batches(made):
        made.one_step(*batch)
        seen.append((made.model.deq.solver, made.model.deq.gradient))
    deep = (None, Unrolled(3))
    assert seen == [deep, deep, (Broyden(max_iter=3, tol=1e-3), GDEQ(refine=1))]


def test_pretraining_is_an_unrolled_network(trainer):
    """The logged loss of the first step is that of the cell applied so many times by hand."""
    made = trainer("pretrain_steps=1", "pretrain_layers=3")
    images, labels = batches(made)[0]
    model = copy.deepcopy(made.model).train()
    model.deq.solver, model.deq.gradient = None, Unrolled(3)
    expected = cross_entropy(model(images), labels).item()
    made.one_step(images, labels)
    assert made.sums.read(CPU)["loss"] == pytest.approx(expected, rel=1e-6)
    other = copy.deepcopy(model)
    other.deq.gradient = Unrolled(1)
    assert abs(cross_entropy(other(images), labels).item() - expected) > 1e-4


def test_jacobian_penalty_is_in_the_objective(trainer):
    settings = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=1"]
    settings += ["optimizer.schedule=constant", "jacobian_weight=0.7", "jacobian_every=2"]
    made = trainer(*settings)
    images, labels = batches(made)[0]
    model = copy.deepcopy(made.model).train()
    torch.manual_seed(5)
    loss = cross_entropy(model(images), labels)
    injection, z = model.stem(images), model.deq.solution.z
    with hold(model.deq.cell):
        penalty = jacobian_penalty(lambda z: model.deq.cell(z, injection), z)
    (loss + 0.7 * penalty).backward()
    expected = flat(model) - torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.manual_seed(5)
    made.one_step(images, labels)
    torch.testing.assert_close(flat(made.model), expected, rtol=1e-5, atol=1e-6)
    assert penalty.item() > 1e-3
    # What is logged is the loss alone; and step 1 of 0, 1, 2 goes without the penalty.
    assert made.sums.read(CPU)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    made._jacobian_penalty = None
    made.one_step(images, labels)


def test_jacobian_penalty_holds_the_spectral_radius_down(trainer):
    def radius(weight):
        made = trainer(f"jacobian_weight={weight}", "jacobian_every=1", "optimizer.lr=1e-2")
        for _ in range(4):
            for batch in batches(made):
                made.one_step(*batch)
        images, _ = batches(made)[0]
        model = made.model.eval()
        with torch.no_grad():
            model(images)
            injection = model.stem(images)
        source = torch.Generator().manual_seed(0)
        found = spectral_radius(
            lambda z: model.deq.cell(z, injection), model.deq.solution.z, 20, source
        )
        return found.mean().item()

    assert radius(20.0) < 0.8 * radius(0.0)


def test_summary(tmp_path, few_images):
    config = configs.load("digits", [*TINY, "pretrain_steps=1", "seed=3", "gradient=jfb"])
    told = runs.train(tmp_path / "run", config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told == summary
    records = training_runs.metrics(tmp_path / "run", timing=True)
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2]
    right = summary["test_accuracy"] / 100 * training_runs.TEST_IMAGES
    assert right == pytest.approx(round(right))  # per cent of whole images
    assert summary["test_accuracy"] == epochs[-1]["test_accuracy"]
    assert (summary["epochs"], summary["seed"], summary["gradient"]) == (2, 3, "jfb")
    assert summary["pretrain"] is True
    assert summary["steps"] == 2 * PER_EPOCH
    times = sorted(r["ms"] for r in records if r["kind"] == "step")
    assert summary["ms_per_step"] in times
    assert summary["train_seconds"] == epochs[-1]["seconds"] > 0
    assert summary["device"].startswith("CPU")
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    assert epochs[0]["train_loss"] == pytest.approx(sum(losses[:PER_EPOCH]) / PER_EPOCH)


def test_summary_of_a_run_shorter_than_a_log_window(tmp_path, few_images):
    config = configs.load("digits", [*TINY, "epochs=1", "log_every=100"])
    assert runs.train(tmp_path / "run", config)["ms_per_step"] > 0
    assert [r["kind"] for r in training_runs.metrics(tmp_path / "run")] == ["epoch"]


def test_bf16_trains(tmp_path, few_images):
    config = configs.load("digits", [*TINY, "epochs=1", "precision=bf16"])
    runs.train(tmp_path / "run", config)
    assert all(math.isfinite(r["train_loss"]) for r in training_runs.metrics(tmp_path / "run")[-1:])
