"""What one step does: rate, decay, clipping, averaging, the two phases, the residual penalty."""

import copy
import json
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import training_runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from training_runs import PER_EPOCH, TINY

from gdeq.context import hold
from gdeq.gradients import GDEQ, Unrolled
from gdeq.holding import VariationalDropout
from gdeq.lab import report
from gdeq.lab.report.runs import read_run
from gdeq.lab.tasks import Metric
from gdeq.lab.training import config as configs
from gdeq.lab.training import learner, loop, optimization, process, progress, records, runs, timing
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.metrics import Sums
from gdeq.solution import BackwardRecord
from gdeq.solvers import Broyden

CPU = process.Process(torch.device("cpu"))


RATES = {
    "schedule=constant": [2.0] * 4,
    "schedule=cosine": [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)],
    "schedule=onecycle warmup=0.5": [2 / 3, 4 / 3, 2, 1],
    "schedule=cosine warmup=0.5": [2 / 3, 4 / 3, 2, 1],
    "warmup=1": [0.4, 0.8, 1.2, 1.6],
}


@pytest.mark.parametrize("given", RATES)
def test_the_rate_of_each_step(given):
    settings = [f"optimizer.{setting}" for setting in ("lr=2", *given.split())]
    config = configs.load("digits", [*TINY, *settings])
    found = [optimization.learning_rate(config, step, 4) for step in range(4)]
    assert found == pytest.approx(RATES[given])


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
    """And what a batch norm has seen, whose number of batches has no average."""
    made = trainer("ema=0.4", "model.outer_norm=batch")
    kept, expected = made.average.module.state_dict(), made.model.state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    for number, batch in enumerate(batches(made)):
        made.one_step(*batch)
        decay = min(0.4, (1 + number) / (10 + number)) if number else 0.0  # from the first step on
        for name, value in made.model.state_dict().items():
            share = decay if value.is_floating_point() else 0.0
            expected[name] = value + ((expected[name] - value) * share).to(value.dtype)
            torch.testing.assert_close(kept[name], expected[name])
    assert not torch.equal(flat(made.average.module), flat(made.model))
    # They are what is evaluated, and what is written.
    by_average = made.evaluate()
    made.model.load_state_dict(made.average.module.state_dict())
    made.average = None
    assert made.evaluate() == by_average


# -- tensors that a recorded step finds again ------------------------------------------------------


def test_sums_stay_in_one_tensor(trainer):
    made = trainer("epochs=3")
    values = made.sums.values
    made.fit()  # through the ends of epochs
    other = trainer()
    other.one_step(*batches(other)[0])
    made.restore(other.state())
    assert made.sums.values is values
    assert torch.equal(values, other.sums.values)
    assert values[0, 0] == training_runs.BATCH


def test_nothing_of_the_process_group_outlives_the_training(trainer):
    made = trainer("epochs=1")
    made.wrapped = torch.nn.Sequential(made.model)  # in the place of DistributedDataParallel
    made.fit()
    assert made.wrapped is made.model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_an_update_on_a_gpu_asks_the_host_nothing(trainer, name):
    gpu = process.Process(torch.device("cuda", 0))
    made = trainer("device=cuda", f"optimizer={name}", "ema=0.9", me=gpu)
    _, (images, labels) = next(made.train_batches.epoch(0))
    made.one_step(images, labels)
    rates = [group["lr"] for group in made.optimizer.param_groups]
    assert len({rate.data_ptr() for rate in rates}) == (3 if name == "muon" else 2)
    assert all(rate.is_cuda for rate in rates)
    logits = torch.zeros(len(labels), 10, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        made._prepare(1)
        torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
        made.optimizer.step()
        made._add(made.sums, logits.sum(), logits, (labels,), made.deq)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rates[0].item() == pytest.approx(optimization.learning_rate(made.config, 1, made.total))
    made.restore(made.state())
    assert [group["lr"] for group in made.optimizer.param_groups] == rates
    made.one_step(images, labels)
    assert math.isfinite(made.sums.read(gpu)["loss"])


def test_sums_by_hand():
    sums, record = Sums(CPU.device, Metric("accuracy")), BackwardRecord()
    residual, steps = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([3, 4, 5, 4])
    found = SimpleNamespace(record=record, residual=residual, steps=steps)
    given = torch.tensor(2.0), torch.tensor([100.0, 0.0, 100.0, 100.0]), found
    sums.add(*given)
    expected = torch.tensor([4, 8, 300, 1, 16, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    for values in sums.values:
        torch.testing.assert_close(values, expected)
    record.residual = torch.tensor([0.5, 0.25, 0.125, 2.0])
    record.error = torch.tensor([math.inf, 0.5, 0.1, 0.2])  # the first w was not taken
    record.length = torch.tensor([1.0, 3.0, 1.0, 1.0])
    sums.add(*given)
    # The larger of error and residual, 1 at most, by the length of w; of the first its residual.
    batch_error = (0.5 + 3 * 0.5 + 0.125 + 1) / 6
    backward = [2.875, 4, 1 + 0.5 + 0.1 + 0.2, 4, 4 * batch_error, 4]
    expected = torch.tensor([8, 16, 600, 2, 32, *backward], dtype=torch.float64)
    for values in sums.values:
        torch.testing.assert_close(values, expected)


def test_accuracy_counts_the_class_with_the_largest_share(trainer):
    made = trainer()
    images, labels = batches(made)[0]
    made.one_step(images, labels)
    made.sums.clear()
    shares = torch.tensor([[0.4, 0.6, 0.0], [0.7, 0.0, 0.3], [0.0, 0.0, 1.0], [0.1, 0.9, 0.0]])
    named = torch.nn.functional.one_hot(torch.tensor([1, 2, 2, 0]), 3).float()
    made._add(made.sums, torch.zeros(()), named, (shares,), made.deq)
    assert made.sums.read(CPU)["accuracy"] == 50


def test_the_loss_of_mixed_images_is_the_mixture_of_two(trainer):
    settings = ["label_smoothing=0.2", "batch_size=12", "pretrain_steps=1"]
    ((_, labels),) = batches(trainer(*settings))
    made = trainer(*settings, "augment.cutmix=1")
    ((images, shares),) = batches(made)
    other = labels.roll(-1)
    two = labels != other
    kept = shares.gather(1, labels[:, None])[:, 0]  # 1 where both are of one class
    assert two.sum() > 6
    assert (kept[two] < 1).sum() > 4
    model = copy.deepcopy(made.model).train()
    model.deq.solver, model.deq.gradient = None, Unrolled(made.config.pretrain_layers)
    scores = model(images).detach().log_softmax(1).double()

    def smoothed(named):  # (b,)
        return -0.8 * scores.gather(1, named[:, None])[:, 0] - 0.2 * scores.mean(1)

    expected = (kept * smoothed(labels) + (1 - kept) * smoothed(other)).mean().item()
    made.one_step(images, shares)
    assert made.sums.read(CPU)["loss"] == pytest.approx(expected, rel=1e-6)
    assert abs(smoothed(labels).mean().item() - expected) > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_on_mixed_images_are_recorded(tmp_path):
    gpu, losses = process.Process(torch.device("cuda", 0)), []
    for graph in ("true", "false"):
        settings = ["device=cuda", "epochs=1", "batch_size=128", "label_smoothing=0.1"]
        settings += [f"graph={graph}", "augment.cutmix=0.8", "solver.tol=0"]
        config = configs.load("digits", [*TINY, *settings])
        made = loop.Trainer(config, RunFolder(tmp_path), gpu, progress.Silent(), None)
        for batch in batches(made):
            made.one_step(*batch)
        losses.append(made.sums.read(gpu)["loss"])
        recorded = list(made.recordings.kept.values())
        assert all(one.graph is not None for one in recorded)
        assert bool(recorded) == (graph == "true")
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_first_unrolled_then_in_equilibrium(trainer):
    made = trainer("pretrain_steps=2", "pretrain_layers=3", "gradient.refine=1")
    seen = []
    for batch in batches(made):
        made.one_step(*batch)
        seen.append((made.model.deq.solver, made.model.deq.gradient))
    deep = (None, Unrolled(3))
    assert seen == [deep, deep, (Broyden(3, tol=1e-3, stop="whole"), GDEQ(refine=1))]


def test_tests_can_be_seldom(tmp_path, few_images, monkeypatch):
    settings = [*TINY, "epochs=5", "test_every=2"]
    tested, real = [], loop.Trainer.evaluate
    monkeypatch.setattr(
        loop.Trainer, "evaluate", lambda made: tested.append(made.step // PER_EPOCH) or real(made)
    )
    told = runs.train(tmp_path / "run", configs.load("digits", settings))
    assert tested == [2, 4, 5]  # the last one always
    run = read_run(tmp_path / "run")
    accuracies = [epoch["test_accuracy"] for epoch in run.epochs]
    assert [a is not None for a in accuracies] == [False, True, False, True, True]
    assert told["test_accuracy"] == run.score == accuracies[-1]
    report.write([run.path], tmp_path / "page")
    (run.path / "summary.json").unlink()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    ends = [n for n, line in enumerate(lines) if json.loads(line)["kind"] == "epoch"]
    (run.path / "metrics.jsonl").write_text("\n".join(lines[: ends[2] + 1]) + "\n")
    assert read_run(run.path).score == accuracies[1]  # stopped after the third


def test_residual_penalty_is_in_the_objective(trainer):
    settings = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=1", "solver.max_iter=2"]
    settings += ["optimizer.schedule=constant", "residual_weight=0.7", "residual_every=2"]
    made = trainer(*settings, "solver.tol=0")
    images, labels = batches(made)[0]
    model = copy.deepcopy(made.model).train()
    torch.manual_seed(5)
    loss = cross_entropy(model(images), labels)
    injection, z = model.stem(images), tuple(part.detach() for part in model.deq.solution.z)
    with hold(model.deq.cell):
        fz = model.deq.cell(z, injection)
    apart, size = (
        sum(part.square().flatten(1).sum(1) for part in parts)
        for parts in ([a - b for a, b in zip(fz, z, strict=True)], z)
    )
    penalty = (apart / size).mean()
    (loss + 0.7 * penalty).backward()
    expected = flat(model) - torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.manual_seed(5)
    made.one_step(images, labels)
    torch.testing.assert_close(flat(made.model), expected, rtol=1e-5, atol=1e-6)
    assert penalty.item() > 1e-3
    assert made.sums.read(CPU)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    made._penalty = None  # step 1 of 0, 1, 2 goes without
    made.one_step(images, labels)


def test_residual_penalty_is_on_the_f_that_was_solved(trainer, monkeypatch):
    """One injection, one mask for each dropout: the forward pass and the penalty share them."""
    settings = ["residual_weight=1", "residual_every=1", "model.dropout=0.5", "pretrain_steps=1"]
    made = trainer(*settings)
    masks, injections, seen = [], [], []
    draw, penalty = VariationalDropout._draw, learner.residual_penalty

    def counted(*args):
        masks.append(draw(*args))
        return masks[-1]

    def watched(f, z):
        # At the solver's z its f has the solver's residual, and another f would not.
        with torch.no_grad():
            fz, z_flat = (torch.cat([t.flatten(1) for t in parts], 1) for parts in (f(z), z))
        size = torch.maximum(fz.norm(dim=1), z_flat.norm(dim=1))
        seen.append(((fz - z_flat).norm(dim=1) / size, made.model.deq.solution.residual))
        return penalty(f, z)

    made.one_step(*batches(made)[0])
    assert seen == []  # none while it is unrolled
    monkeypatch.setattr(VariationalDropout, "_draw", counted)
    monkeypatch.setattr(learner, "residual_penalty", watched)
    made.model.stem.register_forward_hook(lambda *_: injections.append(1))
    made.one_step(*batches(made)[1])
    assert len(injections) == 1
    assert len(masks) == sum(isinstance(m, VariationalDropout) for m in made.model.modules())
    ((found, expected),) = seen
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    made.one_step(*batches(made)[2])
    assert not torch.equal(masks[0], masks[len(masks) // 2])  # but each step has its own


def test_summary(tmp_path, few_images):
    config = configs.load("digits", [*TINY, "pretrain_steps=1", "seed=3", "gradient=jfb"])
    told = runs.train(tmp_path / "run", config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told == summary
    lines = training_runs.metrics(tmp_path / "run", timing=True)
    epochs = [r for r in lines if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2]
    right = summary["test_accuracy"] / 100 * training_runs.TEST_IMAGES
    assert right == pytest.approx(round(right))  # per cent of whole images
    assert summary["test_accuracy"] == epochs[-1]["test_accuracy"]
    assert (summary["epochs"], summary["seed"], summary["gradient"]) == (2, 3, "jfb")
    assert summary["pretrain"] is True
    assert summary["steps"] == 2 * PER_EPOCH
    times = sorted(r["ms"] for r in lines if r["kind"] == "step" and r["step"] > 1)
    assert summary["ms_per_step"] == times[len(times) // 2]  # without the one of pre-training
    assert summary["train_seconds"] == epochs[-1]["seconds"] > 0
    assert summary["device"].startswith("CPU")
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    losses = [r["loss"] for r in lines if r["kind"] == "step"]
    assert epochs[0]["train_loss"] == pytest.approx(sum(losses[:PER_EPOCH]) / PER_EPOCH)


def test_milliseconds_are_those_after_pretraining(tmp_path):
    config = configs.load("digits", [*TINY, "batch_size=4", "pretrain_steps=5"])

    def line(step, steps, ms):
        return {"kind": "step", "step": step, "samples": 4 * steps, "ms": ms}

    unrolled = [line(2, 2, 1.0), line(4, 2, 1.0), line(6, 2, 2.0)]  # the last one: half of it
    solved = [line(7, 1, 9.0), line(9, 2, 7.0), line(11, 2, 8.0)]
    epoch = {"kind": "epoch", "step": 11, "seconds": 0.033}

    def middle(lines):
        found, resumed = (records.Records(RunFolder(tmp_path), config) for _ in range(2))
        for one in lines:
            found.add(one)
        resumed.restore(found.state())
        return resumed.ms_per_step()

    assert middle([*unrolled, epoch, *solved]) == 8.0
    assert middle(unrolled) == 1.0  # there is nothing else
    assert middle([epoch]) == 3.0


@pytest.mark.parametrize("gradient", ["gradient=jfb", "gradient=gdeq"])
def test_a_backward_residual_that_is_not_measured_is_null(tmp_path, few_images, gradient):
    runs.train(tmp_path / "run", configs.load("digits", [*TINY, "epochs=1", gradient]))
    lines = training_runs.metrics(tmp_path / "run")
    assert len(lines) == PER_EPOCH + 1
    measured = [line["backward_residual"] is not None for line in lines if line["kind"] == "step"]
    assert measured == [True, False, False]  # one in ten, from the first on
    told = EventAccumulator(str(tmp_path / "run")).Reload()
    steps = {n: len(told.Scalars(f"step/{n}")) for n in ("residual", "backward_residual")}
    assert steps == {"residual": 3, "backward_residual": 1}


def test_a_backward_residual_is_the_mean_of_what_was_measured(tmp_path, few_images):
    """The first step is unrolled: it does not count as an exact one, nor spoil the rest."""
    settings = [*TINY, "epochs=1", "gradient.refine=1", "pretrain_steps=1"]
    runs.train(tmp_path / "run", configs.load("digits", settings))
    *steps, epoch = (line["backward_residual"] for line in training_runs.metrics(tmp_path / "run"))
    assert steps[0] is None
    assert all(value > 0 for value in steps[1:])
    assert epoch == pytest.approx(sum(steps[1:]) / (PER_EPOCH - 1))
    told = EventAccumulator(str(tmp_path / "run")).Reload()
    assert len(told.Scalars("step/backward_residual")) == PER_EPOCH - 1


# -- a solver that no longer converges -------------------------------------------------------------


def warned(trainer, residuals, *settings, samples=training_runs.BATCH):
    """The steps at which it warns, when each line of the log tells this mean residual."""
    made, told = trainer(*settings), []
    made.progress.say = lambda text: told.append(made.step)
    for made.step, residual in enumerate(residuals, start=1):
        epoch = (made.step - 1) // PER_EPOCH
        figures = {"loss": 1.0, "residual": residual, "samples": samples, "ms": 1}
        made._log(epoch, figures)
    return told


@pytest.mark.parametrize(
    ("residuals", "settings", "expected"),
    [
        # Once an epoch.
        ([0.09] * 3, [], []),
        ([0.2] * 9, [], [1, 4, 7]),
        ([0.01, 0.2, 0.3, 0.01, 0.01, 0.11], [], [2, 6]),
        ([0.4] * 3, ["solver.tol=5e-2"], []),
        ([0.6] * 3, ["solver.tol=5e-2"], [1]),
        # A fixed number of steps that leads nowhere: once.
        ([0.29] * 6, ["solver.tol=0"], []),
        ([0.1, 0.2, 0.31, 0.2, 0.9, 0.9, 0.9], ["solver.tol=0"], [3]),
        # Where convergence is not asked for: never.
        ([0.9] * 6, ["gradient=unrolled"], []),
        ([0.9] * 6, ["pretrain_steps=6"], []),
        ([0.9] * 6, ["pretrain_steps=4"], [5]),
        # The controller tells it in another way.
        ([0.9] * 6, ["adapt.enabled=true"], []),
    ],
)
def test_a_solver_that_does_not_converge_is_told(trainer, residuals, settings, expected):
    assert warned(trainer, residuals, *settings) == expected


def test_a_line_about_three_steps_of_which_one_was_unrolled_is_left_alone(trainer):
    three = 3 * training_runs.BATCH
    assert warned(trainer, [0.9] * 6, "pretrain_steps=1", samples=three) == [4]


def test_summary_of_a_run_shorter_than_a_log_window(tmp_path, few_images):
    config = configs.load("digits", [*TINY, "epochs=1", "log_every=100"])
    assert runs.train(tmp_path / "run", config)["ms_per_step"] > 0
    assert [r["kind"] for r in training_runs.metrics(tmp_path / "run")] == ["epoch"]


@pytest.mark.parametrize(
    ("settings", "least", "steps"),
    [
        (["gradient.refine=1", "measure_every=1"], 10, set(range(12))),
        (["gradient.refine=1", "measure_every=2"], 10, {0, 3, 4, 7, 8, 11}),
        # Without VJPs: one in ten.
        (["gradient=jfb", "gradient.refine=0"], 10, {0, 11}),
        (["gradient=gdeq", "gradient.refine=0"], 10, {0, 11}),
    ],
)
def test_the_residual_is_measured_at_some_steps(trainer, monkeypatch, settings, least, steps):
    """What is left out changes nothing else."""
    results = []
    for scarcity in (least, 1, 10**6):
        monkeypatch.setattr(learner, "SELDOM", scarcity)
        made, seen = trainer(*settings, "solver.tol=0"), set()
        batch = batches(made)[0]
        for made.step in range(12):
            made.one_step(*batch)
            if made.model.deq.solution.backward.residual is not None:
                seen.add(made.step - 1)
        assert scarcity != least or seen == steps
        results.append(flat(made.model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_measured_steps_have_all_phases_of_a_penalty(trainer, every):
    made = trainer(f"measure_every={every}", "gradient.refine=1", "solver.tol=0")
    seen = []
    for step in range(300):
        made._prepare(step)
        if made.measured:
            seen.append(step)
    assert len(seen) == pytest.approx(300 / every, abs=2)
    assert max(b - a for a, b in pairwise(seen)) <= every + (every > 1)
    assert {step % 5 for step in seen} == set(range(5))


def test_a_number_that_is_not_finite_is_in_its_own_window_alone():
    sums = Sums(torch.device("cpu"), Metric("accuracy"))
    found = []
    for step in range(12):
        if step % 6 == 0:
            sums.clear()
        backward = math.inf if step == 2 else 0.5
        sums.values[:, :] += torch.tensor([1.0, 1, 1, 0.1, 4, backward, 1, 0.0, 0, 0.5, 1])
        if step % 4 == 3:
            found.append(sums.read_since_look(CPU)["backward_residual"])
            sums.look()
            sums.mark()
    assert found == [math.inf, 0.5, 0.5]
    assert sums.read(CPU)["backward_residual"] == 0.5
    assert sums.read_since_look(CPU) is None  # nothing was measured since


def test_steps_timed_in_turns(monkeypatch):
    """One method after the other, again and again; what the first turn takes is not counted."""
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_waiting", lambda: now[0] / 4)

    def step(name, seconds):
        def work():
            order.append(name)
            now[0] += seconds * (10 if len(order) <= 4 else 1)

        return work

    steps = {"a": step("a", 0.5), "b": step("b", 0.25)}
    found, waited = timing.in_turns(steps, turns=3, each=2)
    assert found == {"a": [500.0] * 3, "b": [250.0] * 3}
    assert waited == pytest.approx(0.25)
    assert "".join(order) == "bbaa" + "aabb" + "bbaa" + "aabb"
    found, _ = timing.in_turns({"slow": step("a", 100.0)}, turns=12)
    assert len(found["slow"]) == timing.LEAST  # no one waits for more
