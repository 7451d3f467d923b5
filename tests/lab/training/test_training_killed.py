"""SIGKILL at any moment, SIGTERM, SIGINT: a resumed run equals one that was not stopped."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import training_runs
from training_runs import PER_EPOCH, RICH, TINY, assert_same_run, steps_seen, wait_until

from gdeq.lab import report
from gdeq.lab.training import (
    checkpoint,
    folder,
    learner,
    lock,
    loop,
    process,
    runs,
    stopping,
    timing,
)
from gdeq.lab.training import config as configs

LONG = [*RICH, "epochs=20"]  # so many that no signal comes too late


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory, zygote):
    place = tmp_path_factory.mktemp("long")
    zygote.ok(place / "log", "train", *LONG, "--out", place / "run")
    return place / "run"


def begin(zygote, run):
    """Start it, or go on with it, as its user would."""
    arguments = ["--resume", run] if (run / "config.yaml").exists() else [*LONG, "--out", run]
    return zygote.start(run.with_suffix(".log"), "train", *arguments)


def test_killed_at_ten_random_moments(tmp_path, zygote, long_reference):
    chance = random.Random(7)
    kills, attempt = 0, 0
    while kills < 10:  # a run that outpaces its killer is compared and followed by another
        run = tmp_path / f"run-{attempt}"
        attempt += 1
        while kills < 10:
            child = begin(zygote, run)
            ahead, delay = chance.randrange(4), chance.uniform(0, 0.15)
            target = steps_seen(run) + ahead
            wait_until(lambda: steps_seen(run) >= target, child)  # noqa: B023
            time.sleep(delay)
            if child.alive():
                child.kill(signal.SIGKILL)
            code = child.wait()
            if code == 0:
                break
            assert code == -signal.SIGKILL, run.with_suffix(".log").read_text()
            kills += 1
        child = begin(zygote, run)
        assert child.wait() == 0, run.with_suffix(".log").read_text()
        assert_same_run(run, long_reference)
    assert not list((run / "checkpoints").glob("*.part"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def dying(monkeypatch, owner, name, at, after):
    """The ``at``-th call of owner.name, counted from 0, is the last thing that happens."""
    real, count = getattr(owner, name), iter(range(1000))

    def call(*args, **kwargs):
        last = next(count) == at
        if last and not after:
            raise Killed
        result = real(*args, **kwargs)
        if last:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, call)


MOMENTS = [
    # Around the last step of an epoch: its checkpoint, its record, its snapshot.
    *[(folder.RunFolder, "append", n, after) for n in (2, 3, 4) for after in (False, True)],
    (folder.RunFolder, "append", 2 * PER_EPOCH + 1, True),  # the last record
    *[(checkpoint, "save", n, after) for n in (0, 2, 5) for after in (False, True)],
    (loop.Trainer, "evaluate", 0, False),
    (folder.RunFolder, "write_weights", 0, True),
    (folder.RunFolder, "write_weights", 1, False),  # all is done but the end
    (loop.Trainer, "_finish", 0, True),
]


@pytest.mark.parametrize(("owner", "name", "at", "after"), MOMENTS)
def test_killed_at_a_chosen_moment(
    tmp_path, few_images, reference, monkeypatch, owner, name, at, after
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        dying(patch, owner, name, at, after)
        with pytest.raises(Killed):
            runs.train(run, configs.load("digits", RICH))
    runs.resume(run)
    assert_same_run(run, reference)


@pytest.mark.parametrize("at", [2, PER_EPOCH])  # the second: while it evaluates
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, zygote, long_reference, at):
    run, log = tmp_path / "run", tmp_path / "log"
    child = zygote.start(log, "train", *LONG, "checkpoint_seconds=1000", "--out", run)
    assert wait_until(lambda: steps_seen(run) >= at, child)
    child.kill(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM
    said = re.search(r"stopped at step (\d+); continue with `gdeq (.+)`", log.read_text())
    step, command = int(said[1]), said[2].split()
    assert command == ["train", "--resume", str(run)]
    *first, saved = training_runs.checkpoints(run)
    assert checkpoint.read(saved)["step"] == step
    # That of the first epoch's end, where the signal came late.
    assert [checkpoint.read(p)["step"] for p in first] in ([], [PER_EPOCH])
    records = [r for r in training_runs.metrics(run) if r["kind"] == "step"]
    assert len(records) == step  # the step under way was finished, and none begun after it
    assert not (run / "summary.json").exists()
    zygote.ok(log, *command)
    assert_same_run(run, long_reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("during", [1, 2, PER_EPOCH, 2 * PER_EPOCH])
def test_the_step_under_way_is_the_last(
    tmp_path, few_images, reference, gdeq, monkeypatch, number, during
):
    real = loop.Trainer.one_step
    handler = signal.getsignal(signal.SIGINT)  # none where the tests run in the background

    def struck(trainer, *batch):
        if trainer.step + 1 == during:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # as `timeout` does: the process, then its group
        real(trainer, *batch)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "one_step", struck)
        code, said = gdeq("train", *RICH, "checkpoint_seconds=1000", "--out", run)
    if during == 2 * PER_EPOCH:  # nothing was left to do
        assert code == 0, said
    else:
        assert code == 128 + number, said
        assert f"stopped at step {during}; continue with `gdeq train --resume {run}`" in said
        assert checkpoint.latest(run)["step"] == during
        gdeq("train", "--resume", run)
    assert_same_run(run, reference)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture
def two_methods(monkeypatch):
    """A comparison of two gradients, whose report is not of interest."""
    monkeypatch.setattr(runs, "GRADIENTS", ("implicit", "jfb"))
    monkeypatch.setattr(timing, "time_runs", lambda *args: None)
    monkeypatch.setattr(report, "write", lambda paths, out: out)


def test_a_comparison_stopped_at_the_end_of_a_run_begins_no_other(
    tmp_path, few_images, gdeq, monkeypatch, two_methods
):
    real = loop.Trainer.evaluate

    def struck(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    out = tmp_path / "out"
    settings = [*TINY, "epochs=1", "gradient.max_iter=3", "--no-pretraining", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "evaluate", struck)
        code, said = gdeq("compare", *settings)
        assert code == 128 + signal.SIGTERM, said
        first = out / "implicit-seed0"
        assert f"stopped after {first}, which is finished; the same command goes on" in said
        assert list(out.iterdir()) == [first]
        assert (first / "summary.json").is_file()
        assert (first / "weights.safetensors").is_file()
        said = gdeq.ok("compare", *settings)  # after the last there was nothing left to begin
    assert "report: " in said


def test_a_comparison_stopped_in_a_run_is_continued_by_itself(
    tmp_path, few_images, gdeq, monkeypatch, two_methods
):
    """Not by --resume, which would end that one run; also where that was begun before."""
    real = loop.Trainer.one_step

    def struck(trainer, *batch):
        os.kill(os.getpid(), signal.SIGINT)
        real(trainer, *batch)

    out = tmp_path / "out"
    settings = [*TINY, "epochs=1", "gradient.max_iter=3", "--no-pretraining", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "one_step", struck)
        for step in (1, 2):
            code, said = gdeq("compare", *settings)
            assert code == 128 + signal.SIGINT, said
            told = f"stopped at step {step}; continue with the same command: `gdeq compare ... "
            assert f"{told}--out {out}`" in said
            assert "--resume" not in said
    said = gdeq.ok("compare", *settings)
    assert "report: " in said


def stops_at_once(number):
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        return True
    return False


def test_a_second_signal_stops_at_once():
    with stopping.StopRequest() as stop:
        assert not stops_at_once(signal.SIGTERM)
        assert stop.caught == signal.SIGTERM
        assert stops_at_once(signal.SIGINT)
    assert stop.caught == signal.SIGTERM


def test_an_echo_of_the_signal_does_not_cost_the_save(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    with stopping.StopRequest(patience=20.0) as stop:
        for second in (0.0, 0.1, 5.0, 19.9):
            now[0] = 1000.0 + second
            assert not stops_at_once(signal.SIGINT)
        assert stop.caught == signal.SIGINT
        now[0] = 1020.1
        assert stops_at_once(signal.SIGINT)


@pytest.mark.parametrize(("processes", "patience"), [(1, 2.0), (2, 20.0)])
def test_an_echo_is_expected(trainer, monkeypatch, processes, patience):
    monkeypatch.setattr(learner, "DistributedDataParallel", lambda model, device_ids: model)
    made = trainer(me=process.Process(torch.device("cpu"), 0, processes))
    assert made.stop.patience == patience


# -- two at a time in one folder -------------------------------------------------------------------


def test_a_run_that_is_being_trained_is_left_alone(
    tmp_path, zygote, few_images, gdeq, long_reference
):
    run, log = tmp_path / "run", tmp_path / "log"
    child = zygote.start(log, "train", *LONG, "--out", run)
    assert wait_until(lambda: steps_seen(run) >= 2, child)
    child.kill(signal.SIGSTOP)
    status = Path(f"/proc/{child.pid}/stat")  # the signal takes a moment
    assert wait_until(lambda: status.read_text().rsplit(")", 1)[1].split()[0] == "T", child)
    before = {p.name: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = gdeq.refused("train", "--resume", run)
    assert f"{run} is being trained already, by process {child.pid} on " in said
    assert "wait until it ends, or stop it" in said
    assert f"gdeq train --resume {run}" in said
    assert {p.name: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    child.kill(signal.SIGKILL)  # the lock goes with its holder
    assert child.wait() == -signal.SIGKILL
    said = gdeq.ok("train", "--resume", run)
    assert_same_run(run, long_reference)


def test_the_lock_is_free_after_the_end_and_after_a_failure(tmp_path, few_images, monkeypatch):
    config = configs.load("digits", [*RICH, "epochs=1"])
    runs.train(tmp_path / "run", config)
    monkeypatch.setattr(loop.Trainer, "_restore", lambda self, state: state["nothing"])
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError):
            runs.resume(tmp_path / "run", overrides=["epochs=2"])


def test_one_lock_at_a_time(tmp_path):
    first, second = lock.RunLock(), lock.RunLock()
    assert first.take(tmp_path) is None
    assert second.take(tmp_path).startswith(f"{os.getpid()} on ")
    first.release()
    assert second.take(tmp_path) is None
    second.release()


def test_where_there_are_no_locks_there_is_none(tmp_path, monkeypatch):
    assert lock.RunLock().take(tmp_path / "missing") is None  # nor a folder
    monkeypatch.setattr(lock, "fcntl", None)
    first, second = lock.RunLock(), lock.RunLock()
    assert first.take(tmp_path) is second.take(tmp_path) is None
    assert not list(tmp_path.iterdir())
