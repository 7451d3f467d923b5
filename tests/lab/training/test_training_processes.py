"""Several processes (gloo): the same curve as one at the same global batch."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from training_runs import (
    PER_EPOCH,
    RICH,
    TINY,
    assert_same_run,
    checkpoints,
    metrics,
    run_all,
    start_all,
    steps_seen,
    wait_until,
)

from gdeq.lab.tasks.images import Images
from gdeq.lab.training import checkpoint, process
from gdeq.lab.training import config as configs

# float32 sums in another order, through a few updates; a small difference feels it more.
CURVE = {"loss": 1e-5, "train_loss": 1e-5, "test_loss": 1e-5, "residual": 1e-3}
COUNTED = ("samples", "accuracy", "train_accuracy", "test_accuracy", "step", "epoch", "lr", "kind")
# What differs between processes by design, the dropout masks and the penalty's noise, is off.  SGD:
# Adam makes a rounding of a tiny gradient as large as any other step.
SETTINGS = [*TINY, "ema=0.9", "pretrain_steps=2", "optimizer.clip=1", "optimizer=sgd"]
SETTINGS += ["augment.crop=1", "augment.flip=true", "augment.alternate=true", "augment.cutmix=0.7"]
SETTINGS += ["label_smoothing=0.1"]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def assert_same_curve(run, alone):
    found, expected = metrics(run), metrics(alone)
    assert [r["kind"] for r in found] == [r["kind"] for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in COUNTED:
            assert one.get(key) == other.get(key), (key, one)
        for key in CURVE.keys() & one.keys():
            assert one[key] == pytest.approx(other[key], rel=CURVE[key]), (key, one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, zygote):
    folder = tmp_path_factory.mktemp("alone")
    zygote.ok(folder / "log", "train", *SETTINGS, "--out", folder / "run")
    return folder / "run"


def test_two_processes_by_torchrun(tmp_path, gdeq):
    """The real thing: `torchrun -m gdeq train` on all of digits."""
    settings = "epochs=1 batch_size=478 solver.max_iter=2 log_every=1 snapshots=[1] device=cpu"
    with tempfile.TemporaryDirectory() as logs:
        done = subprocess.run(
            [*TORCHRUN, "--log-dir", logs, "-m", "gdeq", "train", *settings.split()],
            cwd=tmp_path,  # no --out: the name holds the time, on which both must agree
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count("s of training, ") == 1  # the first process speaks for all
    assert json.loads((run / "summary.json").read_text())["processes"] == 2
    gdeq.ok("train", *settings.split(), "--out", tmp_path / "alone")
    assert_same_curve(run, tmp_path / "alone")


def test_two_processes_with_all_phases(tmp_path, zygote, alone):
    """Images are mixed over the batch of both."""
    run = tmp_path / "run"
    run_all(zygote, tmp_path, 2, "train", *SETTINGS, "--out", run)
    assert_same_curve(run, alone)
    assert (tmp_path / "log1").read_text() == ""


def test_a_number_of_processes_that_divides_nothing(tmp_path, zygote, few_images, gdeq):
    """Three: 256, the evaluation's batch, has to give way; each of 21 images counts once."""
    settings = [*TINY, "epochs=1", "batch_size=6"]
    run_all(zygote, tmp_path, 3, "train", *settings, "--out", tmp_path / "run")
    gdeq.ok("train", *settings, "--out", tmp_path / "alone")
    assert_same_curve(tmp_path / "run", tmp_path / "alone")


def test_stopped_by_a_signal_and_resumed(tmp_path, zygote):
    """With dropout and the penalty on: each process has a random state of its own."""
    settings = [*RICH, "epochs=20", "checkpoint_seconds=1000"]
    runs = [tmp_path / "whole", tmp_path / "broken"]
    run_all(zygote, tmp_path, 2, "train", *settings, "--out", runs[0])
    children = start_all(zygote, tmp_path, 2, "train", *settings, "--out", runs[1])
    assert wait_until(lambda: steps_seen(runs[1]) >= 2, children[0])
    children[1].kill(signal.SIGTERM)  # one hears it, both stop
    assert [c.wait() for c in children] == [143, 143], (tmp_path / "log0").read_text()
    step = int(re.search(r"stopped at step (\d+)", (tmp_path / "log0").read_text())[1])
    assert step < 20 * PER_EPOCH
    state = checkpoint.read(checkpoints(runs[1])[-1])
    assert state["step"] == step
    assert len(state["rng"]) == 2
    assert not torch.equal(*state["rng"])
    run_all(zygote, tmp_path, 2, "train", "--resume", runs[1])
    assert metrics(runs[1]) == metrics(runs[0])


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 100), (signal.SIGSTOP, 10)])
def test_a_lost_process_is_told_and_the_same_command_goes_on(tmp_path, zygote, number, seconds):
    """A process that is killed is missed at once, and one that is frozen after that time."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    again = ["train", *RICH, "epochs=10", f"timeout_seconds={seconds}", "--resume", "auto", "--out"]
    run_all(zygote, tmp_path, 2, *again, whole)
    children = start_all(zygote, tmp_path, 2, *again, broken)
    assert wait_until(lambda: steps_seen(broken) >= 2, children[0])
    children[1].kill(number)
    assert children[0].wait() == 1, (tmp_path / "log0").read_text()
    said = (tmp_path / "log0").read_text()
    assert f"another process of this training was lost, or did not answer for {seconds} se" in said
    assert f"`gdeq train --resume {broken}`" in said
    assert "Traceback" not in said
    if number == signal.SIGSTOP:
        children[1].kill(signal.SIGKILL)
    children[1].wait()
    for said in ("continuing at step", "is already finished: 10 epochs"):
        run_all(zygote, tmp_path, 2, *again, broken)
        assert said in (tmp_path / "log0").read_text()
    assert metrics(broken) == metrics(whole)


DIES = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from training_runs import datasets, few
from gdeq.lab.training.loop import Trainer
from gdeq.__main__ import main

one_step, steps = Trainer.one_step, iter(range(99))

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
victim = os.environ["RANK"] == "0"

def dying(*args):
    if first and victim and next(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the second epoch
    return one_step(*args)

if victim and not first:
    time.sleep(3)  # the other must wait for it, not for the one that is gone
datasets.load, Trainer.one_step = few, dying
main()
"""


def test_torchrun_restarts_what_was_killed_and_nothing_is_lost(tmp_path, zygote):
    """One restart is enough for one kill."""
    script, whole, broken = (tmp_path / name for name in ("dies.py", "whole", "broken"))
    script.write_text(DIES.format(tests=str(Path(__file__).parent)))
    settings = [*RICH, "timeout_seconds=100"]
    run_all(zygote, tmp_path, 2, "train", *settings, "--out", whole)
    command = ["train", *settings, "--resume", "auto", "--out", broken]
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts=1", script, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "continuing at step" in done.stdout + done.stderr
    assert_same_run(broken, whole)


def test_processes_that_do_not_meet(tmp_path, gdeq, monkeypatch):
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    code, said = gdeq("train", *TINY, "timeout_seconds=1", "--out", tmp_path / "run")
    assert code == 1
    assert "error: the 2 processes of this training did not meet within 1 seconds" in said
    monkeypatch.delenv("MASTER_ADDR")
    code, said = gdeq("train", *TINY, "timeout_seconds=1", "--out", tmp_path / "run")
    assert (code, "start them with torchrun" in said) == (1, True), said


def test_one_command_line_begins_and_goes_on(tmp_path, few_images, gdeq, monkeypatch):
    run = tmp_path / "run"
    command = ["train", *TINY, "--resume", "auto", "--out", run]
    assert f"would train into {run}, a new folder" in gdeq.ok(*command, "--dry-run")
    gdeq.ok(*command)
    (run / "summary.json").unlink()
    assert f"would go on in {run}" in gdeq.ok(*command, "--dry-run")
    assert "only the end of the run is left" in gdeq.ok(*command)
    assert "(optimizer.lr: 0.001 -> 0.5)" in gdeq.refused(*command, "optimizer.lr=0.5")
    # A restart that would begin another run is told so.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    said = gdeq.refused("train", *TINY, "--out", tmp_path / "other")
    assert "add --out DIR --resume auto" in said


@pytest.fixture(scope="module")
def rich_pair(tmp_path_factory, zygote):
    """Two processes, a checkpoint at every step: the last two are those of steps 5 and 6."""
    folder = tmp_path_factory.mktemp("pair")
    run_all(zygote, folder, 2, "train", *RICH, "--out", folder / "run")
    return folder / "run"


def in_the_middle(run, place):
    """A copy that will resume in the middle of the second epoch: its newest is damaged."""
    shutil.copytree(run, place)
    (place / "summary.json").unlink()
    newest = checkpoints(place)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    return newest


def test_resumed_in_the_middle_of_an_epoch(tmp_path, zygote, rich_pair):
    """The epoch's means are those of all processes, and the first one alone sets files aside."""
    newest = in_the_middle(rich_pair, tmp_path / "run")
    run_all(zygote, tmp_path, 2, "train", "--resume", tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(rich_pair)
    said = (tmp_path / "log0").read_text()
    assert f"warning: {newest.name} is damaged" in said
    assert f"the damaged checkpoint is now {newest.name}.damaged" in said
    assert (tmp_path / "log1").read_text() == ""
    assert newest.with_name(f"{newest.name}.damaged").is_file()


@pytest.mark.parametrize("processes", [1, 4])
def test_resumed_by_another_number_of_processes(tmp_path, zygote, rich_pair, processes):
    in_the_middle(rich_pair, tmp_path / "run")
    run_all(zygote, tmp_path, processes, "train", "--resume", tmp_path / "run")
    found, expected = metrics(tmp_path / "run"), metrics(rich_pair)
    *steps, epoch = found[PER_EPOCH + 1 :]
    assert found[:-2] == expected[:-2]
    # The last step has dropout masks of its own; the mean is still one of all three steps.
    assert epoch["train_loss"] == pytest.approx(sum(r["loss"] for r in steps) / PER_EPOCH)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.outer_norm=batch", "use model.outer_norm=group, or a single process"),
        ("batch_size=5", "must be a multiple of their number 2: try 4 or 6"),
    ],
)
def test_what_two_processes_cannot_share(trainer, setting, message):
    with pytest.raises(configs.ConfigError, match=message):
        trainer(setting, me=process.Process(torch.device("cpu"), 0, 2))


@pytest.mark.parametrize(("norm", "processes"), [("batch", 2), ("batch", 1), ("group", 2)])
def test_batch_norms_on_several_gpus_share_their_statistics(few_images, norm, processes):
    config = configs.load("digits", [*TINY, f"model.outer_norm={norm}"])
    names = list(Images(config, process.Process(torch.device("cpu"))).model().state_dict())
    me = process.Process(torch.device("cuda", 0), 0, processes)
    shared = Images(config, me).model()
    kinds = {type(m) for m in shared.modules()}
    assert (torch.nn.SyncBatchNorm in kinds) is (norm == "batch" and processes == 2)
    assert (torch.nn.BatchNorm2d in kinds) is (norm == "batch" and processes == 1)
    assert list(shared.state_dict()) == names
