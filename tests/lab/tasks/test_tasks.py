"""Tasks: characters, and one from outside the package with all that the package's own have."""

import json
import shutil
import signal

import pytest
import torch
from training_runs import assert_same_run, metrics, run_all, steps_seen, wait_until

from gdeq import Picard
from gdeq.lab.tasks import registry
from gdeq.lab.training import config as configs
from gdeq.lab.training import learner
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.process import Process
from gdeq.lab.training.similarity import METHODS, Problem

MY_TASK = '''
"""Points on two circles: which one, by a small DEQ."""

from dataclasses import dataclass

import torch
from torch import nn

from gdeq import DEQ
from gdeq.lab.tasks import Config, Data, Metric, Task


@dataclass(frozen=True)
class Settings(Config):
    width: int = 8  # features of the state
    noise: float = 0.1  # of the points


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + x)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.read, self.judge = nn.Linear(2, width), nn.Linear(width, 1)
        self.deq = DEQ(Cell(width))

    def forward(self, points):
        return self.judge(self.deq(self.read(points)))[:, 0]


class Circles(Task[Settings]):
    settings = Settings
    presets = {"circles": {"epochs": 3, "batch_size": 8, "optimizer": {"lr": 0.02}}}
    metric = Metric("share_right", digits=4)
    samples = "points"

    def load(self):
        source = torch.Generator().manual_seed(0)
        angle = 6.28 * torch.rand(60, generator=source)
        outer = torch.arange(60) % 2
        points = (1 + outer)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        points += self.config.noise * torch.randn(60, 2, generator=source)
        both = points.to(self.device), outer.float().to(self.device)
        return Data(tuple(t[:40] for t in both), tuple(t[40:] for t in both))

    def model(self):
        return Model(self.config.width)

    def losses(self, output, outer):
        return nn.functional.binary_cross_entropy_with_logits(output, outer, reduction="none")

    def score(self, output, outer):
        return ((output > 0) == (outer > 0.5)).float()
'''
SMALL = ["epochs=3", "log_every=1", "checkpoint_seconds=0", "snapshots=[1]", "device=cpu"]
PER_EPOCH = 5  # 40 points, 8 at a time


@pytest.fixture(scope="module")
def my_task(tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "my_task.py"
    path.write_text(MY_TASK)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, zygote, my_task):
    """A run of it that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    said = zygote.ok(folder / "log", "train", my_task, *SMALL, "--out", folder / "run")
    assert "epoch 3/3: test share right 0." in said
    return folder / "run"


def test_settings_of_ones_own(my_task, gdeq):
    config = configs.load(str(my_task), ["width=4", "solver=picard", "gradient=jfb"])
    assert (config.width, config.noise, config.epochs, config.optimizer.lr) == (4, 0.1, 3, 0.02)
    assert config.task == str(my_task)
    assert configs.from_dict(configs.to_dict(config)) == config
    told = configs.meanings(type(config))
    assert told["width"] == ("8", "features of the state")
    assert told["epochs"][1] == "passes over the training samples"
    for setting, message in {
        "widht=4": "there is no setting 'widht'; did you mean 'width'?",
        "optimzer.lr=1": "did you mean 'optimizer.lr'?",
        "data=digits": "there is no setting 'data'",
        "width=wide": "width must be int, got 'wide'",
    }.items():
        said = gdeq.refused("train", my_task, setting, "--dry-run")
        assert message in said
    said = gdeq.ok("train", my_task, "--dry-run")
    assert "data set: 40 train and 20 test points" in said
    assert "would train into runs/my_task-gdeq-seed0-" in said


@pytest.mark.parametrize("moment", [1, 2 * PER_EPOCH])
def test_killed_and_resumed_it_is_the_same_to_the_bit(tmp_path, zygote, my_task, whole, moment):
    run = tmp_path / "run"
    child = zygote.start(tmp_path / "log", "train", my_task, *SMALL, "--out", run)
    if wait_until(lambda: steps_seen(run) >= moment, child):
        child.kill(signal.SIGKILL)
    child.wait()
    zygote.ok(tmp_path / "log", "train", "--resume", run)
    assert_same_run(run, whole)


def test_interrupted_it_is_saved_first(tmp_path, zygote, my_task, whole):
    run, log = tmp_path / "run", tmp_path / "log"
    child = zygote.start(
        log, "train", my_task, *SMALL, "epochs=500", "checkpoint_seconds=1000", "--out", run
    )
    assert wait_until(lambda: steps_seen(run) >= 3, child)
    child.kill(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM
    assert f"continue with `gdeq train --resume {run}`" in log.read_text()
    config = RunFolder.open(run).config()
    assert (config.task, config.epochs) == (str(my_task), 500)


def test_it_is_evaluated_compared_and_reported(tmp_path, gdeq, my_task, whole):
    summary = json.loads((whole / "summary.json").read_text())
    said = gdeq.ok("evaluate", whole)
    assert f"test share right {summary['test_share_right']:.4f}, loss" in said
    assert "20 points" in said
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    said = gdeq.ok("similarity", run, "--batches", "1", "--batch-size", "8")
    records = [json.loads(line) for line in (run / "similarity.jsonl").read_text().splitlines()]
    assert {r["solved"] for r in records} == {8}
    assert all(r["cosine"] > 0.999 for r in records if r["method"] == "Implicit")
    said = gdeq.ok("report", run, "--out", tmp_path / "page")
    (page,) = (tmp_path / "page").glob("*.html")
    assert "my_task" in page.read_text()


def test_budgets_adapt_and_averages_and_penalties_work(tmp_path, gdeq, my_task):
    settings = [*SMALL, "adapt.enabled=true", "solver.tol=0", "adapt.every=1", "ema=0.5"]
    settings += ["adapt.steps=[2,3]", "adapt.refine=[0,1]", "adapt.forward=1e-9"]
    settings += ["residual_weight=0.1", "residual_every=1", "pretrain_steps=2", "optimizer=muon"]
    gdeq.ok("train", my_task, *settings, "--out", tmp_path / "run")
    changes = [r for r in metrics(tmp_path / "run") if r["kind"] == "adapt"]
    assert changes[-1]["max_iter"] == 3
    assert changes[-1]["residual_weight"] > 0.1


def test_the_penalty_is_on_the_f_of_the_last_solve(tmp_path, monkeypatch):
    """A model that solves twice, and gives its cell an option by name."""
    path = tmp_path / "twice.py"
    twice = "z = self.deq(self.read(points))\n        return self.judge(self.deq(z, far=3.0))"
    changed = MY_TASK.replace("return self.judge(self.deq(self.read(points)))", twice)
    changed = changed.replace("(self, z, x)", "(self, z, x, far=0.0)").replace("+ x)", "+ x + far)")
    path.write_text(changed)
    penalties, penalty = [], learner.residual_penalty

    def watched(f, z):
        penalties.append(penalty(f, z))
        return penalties[-1]

    monkeypatch.setattr(learner, "residual_penalty", watched)
    config = configs.load(str(path), [*SMALL, "residual_weight=1", "solver.tol=1e-5"])
    made = learner.Learner(config, Process(torch.device("cpu")), None)
    batch = next(made.train_batches.epoch())[1]
    made.one_step(*batch)
    assert penalties[0] < 1e-8  # z is the fixed point of this f
    made.model.eval()
    problem = Problem(made, batch)
    assert problem.gradient(Picard(60), METHODS["JFB"], 1.0).gradient.numel() == 96  # no judge
    assert problem.radius().max() < 0.02  # where tanh hardly rises


def test_two_processes_share_it(tmp_path, zygote, my_task, whole):
    run = tmp_path / "run"
    run_all(zygote, tmp_path, 2, "train", my_task, *SMALL, "--out", run)
    for one, other in zip(metrics(run), metrics(whole), strict=True):
        for key in ("loss", "train_loss", "test_loss"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define one subclass of gdeq.lab.tasks.Task, has none"),
        ("import nothing_there", "cannot be imported: ModuleNotFoundError: No module named"),
        ("1 +", "cannot be imported: SyntaxError"),
        (MY_TASK + "\nclass Other(Circles): ...", "has Circles, Other"),
        (
            MY_TASK.replace("def load", "def read").replace("def model", "def net"),
            "bad.py must define load, model",
        ),
        (
            MY_TASK.replace("self.deq", "self.layer"),
            "must have its equilibrium layer, a gdeq.DEQ, as the attribute deq",
        ),
    ],
)
def test_a_file_that_defines_no_task(tmp_path, gdeq, text, message):
    (tmp_path / "bad.py").write_text(text)
    said = gdeq.refused("train", tmp_path / "bad.py", "device=cpu", "--out", tmp_path / "run")
    assert message in said.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_losses_are_one_per_sample(tmp_path, gdeq, my_task):
    path = tmp_path / "mean.py"
    text = my_task.read_text()
    path.write_text(text.replace('reduction="none"', 'reduction="mean"'))
    assert path.read_text() != text
    said = gdeq.refused("train", path, *SMALL, "--out", tmp_path / "run")
    assert "one loss per sample, shape (batch,), got ()" in said


@pytest.mark.parametrize("wrong", [".mean()", "[:, None]"])
def test_scores_are_one_per_sample(tmp_path, gdeq, my_task, wrong):
    path = tmp_path / "scores.py"
    text = my_task.read_text()
    right = "(outer > 0.5)).float()"
    path.write_text(text.replace(right, right + wrong))
    assert path.read_text() != text
    said = gdeq.refused("train", path, *SMALL, "--out", tmp_path / "run")
    assert "score() must return one score per sample, shape (batch,), got (" in said


def test_a_task_that_is_not_there(tmp_path, gdeq):
    said = gdeq.refused("train", tmp_path / "none.py")
    assert f"cannot read the task {tmp_path / 'none.py'}: there is no such file" in said
    said = gdeq.refused("train", "task=sounds")
    assert (
        "there is no task 'sounds': write images, bytes, words, sudoku, imaging, or the path of a "
        ".py file" in said
    )


def test_every_task_has_a_preset_that_fits():
    for name in registry.presets():
        config = configs.load(name)
        assert registry.find(config.task).name == config.task
