"""The Sudoku task: it learns, goes on where it stopped, and takes every gradient."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "data"))
from sudoku_grids import grids, table

from gdeq.lab.tasks.sudoku import Puzzles, right_cells
from gdeq.lab.training import config as configs
from gdeq.lab.training import recordings, runs, similarity
from gdeq.lab.training.folder import read_metrics
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.process import Process

TINY = [
    *("epochs=1", "batch_size=16", "revealed=[0,2]", "test_puzzles=12", "log_every=1"),
    *("model.width=12", "model.heads=3", "model.blocks=1", "model.segments=2", "device=cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables of one's own: 64 puzzles with 60 givens to learn from."""
    made = tmp_path_factory.mktemp("tables")
    (made / "train.csv").write_text(table(grids(64, givens=60)))
    (made / "test.csv").write_text(table(grids(12, givens=60, seed=1)))
    return made


def config(folder, *settings):
    return configs.load("sudoku-easy", [*TINY, f"data={folder}", *settings])


def trained(path, wanted):
    """What is recorded of its epochs."""
    runs.train(path, wanted)
    return [record for record in read_metrics(path / "metrics.jsonl") if record["kind"] == "epoch"]


@pytest.mark.parametrize(
    "gradient",
    [
        *(
            ["gradient=gdeq", "gradient.refine=0", "solver=broyden"],
            ["gradient=gdeq", "gradient.refine=2"],
        ),
        *(["gradient=jfb"], ["gradient=npg"], ["gradient=implicit"], ["gradient=unrolled"]),
    ],
    ids=lambda settings: "-".join(s.split("=")[1] for s in settings),
)
def test_every_gradient_trains_it(folder, tmp_path, gradient):
    first, *_, last = trained(tmp_path / "run", config(folder, "epochs=2", *gradient))
    assert last["step"] == 8
    assert last["train_loss"] < first["train_loss"] < 2.4


def test_it_learns(folder, tmp_path):
    """The givens at once, then the cells that a unit leaves no choice."""
    more = ["epochs=12", "model.width=24", "optimizer.lr=1e-2", "symmetries=false"]
    told = trained(tmp_path / "run", config(folder, *more))
    assert told[-1]["test_loss"] < 0.8  # 2.2 by chance


def test_it_learns_with_a_carried_state(folder, tmp_path):
    more = ["model.mix=mixing", "model.segments=1", "model.patience=4", "optimizer.lr=1e-2"]
    told = trained(tmp_path / "run", config(folder, "epochs=12", "model.width=24", *more))
    assert told[-1]["test_loss"] < 1.5
    assert told[-1]["train_loss"] < told[0]["train_loss"]


CARRIED = ["epochs=2", "model.mix=mixing", "model.segments=1", "model.patience=3"]


def test_interrupted_with_a_carried_state_it_is_the_same_to_the_bit(folder, tmp_path, monkeypatch):
    """In the middle of an epoch: the same puzzles stay, and go on from where they were."""
    wanted = config(folder, *CARRIED, "checkpoint_seconds=0")
    runs.train(tmp_path / "whole", wanted)
    steps = []

    def stopped(self, model):
        steps.append(model.training)
        if sum(steps) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Puzzles, "advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "half", wanted)
    monkeypatch.undo()
    runs.resume(tmp_path / "half")
    whole, half = (runs.trained(tmp_path / name).model for name in ("whole", "half"))
    for mine, theirs in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Recorded:
    """In place of a captured step."""

    reason, recording_seconds = None, 0.0

    def __init__(self, work):
        self.graph, self.work = None, work

    def __call__(self, *inputs):
        self.graph = self.work(*inputs) or self.work


def test_rehearsals_leave_the_carried_state_as_it_was(folder, monkeypatch):
    monkeypatch.setattr(recordings, "Captured", lambda work, *_options: Recorded(work))
    made = {}
    for enabled in (False, True):
        learner = Learner(config(folder, *CARRIED), Process(torch.device("cpu")), None)
        learner.recordings.enabled = enabled
        for _, batch in learner.train_batches.epoch():
            learner.one_step(*batch)
        made[enabled] = [*learner.model.parameters(), *learner.task.state()]
    assert all(map(torch.equal, made[False], made[True]))


def test_a_sample_counts_as_solved_where_all_its_segments_are(folder, monkeypatch):
    """In gdeq similarity: the last of three segments converges, and the first does not."""
    learner = Learner(config(folder, "model.segments=3"), Process(torch.device("cpu")), None)
    learner.model.eval()
    batch = next(learner.task.train_batches(8, plain=True).epoch())[1]
    solved = []
    for steps in (6, 200):
        monkeypatch.setattr(similarity, "EQUILIBRIUM_STEPS", steps)
        solved.append(int(similarity.Problem(learner, batch).truth(1e-4).taken.sum()))
    assert solved == [0, 8]


def test_resumed_it_is_the_same(folder, tmp_path):
    steady = ["optimizer.schedule=constant", "optimizer.warmup=0"]
    trained(tmp_path / "whole", config(folder, "epochs=2", *steady))
    trained(tmp_path / "half", config(folder, *steady))
    runs.resume(tmp_path / "half", overrides=["epochs=2"])
    whole, half = (runs.trained(tmp_path / name).model for name in ("whole", "half"))
    for mine, theirs in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_solved_is_all_cells_of_the_last_segment():
    digits = torch.randint(0, 9, (3, 81))
    output = torch.nn.functional.one_hot(digits, 9)[:, None].repeat(1, 2, 1, 1).float()
    output[1, 0, 5] = 0  # in the first segment alone
    output[2, 1, 5] = -output[2, 1, 5]
    assert right_cells(output, digits).all(1).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("revealed=[3]", "revealed must be two numbers such as"),
        ("model.heads=5", "must be a multiple of heads"),
        ("test=all", "test must be"),
        ("model.mix=mlp", "mix must be"),
        ("model.patience=-1", "patience must be"),
    ],
)
def test_wrong_settings_are_named(setting, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.load("sudoku", [setting])
