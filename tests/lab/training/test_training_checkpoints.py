"""Damaged, hostile and missing checkpoints; metrics that were cut off; a full disk."""

import hashlib
import io
import json
import os
import shutil

import pytest
import torch
import training_runs
from training_runs import PER_EPOCH, RICH, TINY, assert_same_run, checkpoints

from gdeq.lab.tasks.images import Images
from gdeq.lab.training import checkpoint, folder, loop
from gdeq.lab.training import config as configs


@pytest.fixture
def stopped(tmp_path, reference):
    """A copy of the reference run as it stood before its last step and its end."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "summary.json").unlink()
    (run / "weights.safetensors").unlink()
    return run


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def foreign(path):
    path.write_bytes(b"something else\n" * 100)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, empty, foreign])
def test_a_damaged_newest_falls_back_and_says_so(stopped, reference, few_images, gdeq, damage):
    before, newest = checkpoints(stopped)
    damage(newest)
    code, said = gdeq("train", "--resume", stopped)
    assert code == 0, said
    assert f"warning: {newest.name}" in said
    assert f"going back to {before.name}" in said
    assert_same_run(stopped, reference)
    aside = f"{newest.name}.damaged"
    assert f"the damaged checkpoint is now {aside}" in said
    assert (stopped / "checkpoints" / aside).is_file()
    assert checkpoint.read(newest)["step"] == 2 * PER_EPOCH  # made again


def test_a_damaged_one_is_not_the_last_good_one(stopped, few_images, gdeq, monkeypatch):
    before, newest = checkpoints(stopped)
    cut(newest)
    real = Images.loss
    with monkeypatch.context() as patch:
        patch.setattr(Images, "loss", lambda *a: real(*a) * float("nan"))
        code, said = gdeq("train", "--resume", stopped)
    assert code == 1
    assert f"the last good checkpoint is {before.name}" in said
    assert checkpoints(stopped) == [before]


def test_a_damaged_one_takes_no_place_of_a_good_one(tmp_path):
    for step in (1, 2, 8):
        checkpoint.save(tmp_path, step, {"step": step})
    newest = checkpoints(tmp_path)[-1]
    cut(newest)
    (renamed,) = checkpoint.set_aside(tmp_path, newer_than=2)
    assert renamed.name == f"{newest.name}.damaged"
    for step in (3, 4):
        checkpoint.save(tmp_path, step, {"step": step})
    assert [checkpoint.read(p)["step"] for p in checkpoints(tmp_path)] == [3, 4]
    assert checkpoint.set_aside(tmp_path, newer_than=0) == []  # these are whole
    assert len(checkpoints(tmp_path)) == 2


def test_all_damaged(stopped, few_images, gdeq):
    for path in checkpoints(stopped):
        cut(path)
    metrics = (stopped / "metrics.jsonl").read_bytes()
    code, said = gdeq("train", "--resume", stopped)
    assert code == 1
    assert f"error: no checkpoint in {stopped} is whole" in said
    assert len(checkpoints(stopped)) == 2
    assert all(f"{p.name} is damaged or cut short" in said for p in checkpoints(stopped))
    assert "Start again" in said
    assert (stopped / "metrics.jsonl").read_bytes() == metrics  # nothing was thrown away


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "step 6 of 6 is done: only the end of the run is left\n"),
        (["epochs=3"], "continuing at step 6 of 9 (epoch 3)\n"),
    ],
)
def test_a_resumed_run_says_where_it_goes_on(stopped, few_images, gdeq, settings, line):
    code, said = gdeq("train", "--resume", stopped, *settings)
    assert code == 0, said
    assert said.startswith(line)


def test_a_resumed_run_says_what_changed(stopped, few_images, gdeq):
    rate = configs.load(str(stopped / "config.yaml")).optimizer.lr
    change = f"optimizer.lr: {rate} -> 0.5"
    for options in (["--dry-run"], []):
        given = ("train", "--resume", stopped, "epochs=3", "optimizer.lr=0.5", *options)
        code, said = gdeq(*given)
        assert code == 0, said
        assert f"\nfrom here on with epochs: 2 -> 3, {change}\n" in said
    code, said = gdeq("train", "--resume", stopped, "optimizer.lr=0.25")
    assert code == 0, said
    assert "from here on" not in said
    assert "\nnot used, as no step is left: optimizer.lr: 0.5 -> 0.25\n" in said
    assert "not used" not in gdeq("train", "--resume", stopped)[1]


def test_the_first_epoch_is_saved_in_a_short_run(tmp_path, few_images, gdeq, monkeypatch):
    """Whatever checkpoint_seconds says; the later ones are not, until the end."""
    saved, real = [], checkpoint.save

    def noting(run, step, state):
        saved.append(step)
        return real(run, step, state)

    monkeypatch.setattr(checkpoint, "save", noting)
    settings = [*TINY, "epochs=4", "checkpoint_seconds=1000"]
    code, said = gdeq("train", *settings, "--run", tmp_path / "run")
    assert code == 0, said
    assert saved == [PER_EPOCH, 4 * PER_EPOCH]


def test_none_at_all_begins_anew(stopped, reference, few_images, gdeq):
    shutil.rmtree(stopped / "checkpoints")
    code, said = gdeq("train", "--resume", stopped)
    assert code == 0, said
    assert said.startswith("no checkpoint yet: starting from the beginning\n")
    assert_same_run(stopped, reference)


def test_a_finished_run_without_its_checkpoints_is_not_begun_anew(
    tmp_path, reference, few_images, gdeq
):
    """As it comes from a repository: its metrics are all there is of it."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "checkpoints")
    (run / "weights.safetensors").unlink()
    before = (run / "metrics.jsonl").read_text()
    for args in (["train", "--resume", run], ["train", "--resume", run, "--dry-run"]):
        code, said = gdeq(*args)
        assert code == 1
        assert "was finished, and its checkpoints are not here" in said
        assert f"`gdeq train {run / 'config.yaml'} --run ANOTHER_FOLDER`" in said
    code, said = gdeq("evaluate", run)
    assert code == 1
    assert "is finished, but its weights.safetensors is not here: make it again with" in said
    assert (run / "metrics.jsonl").read_text() == before


class Malicious:
    def __reduce__(self):
        return os.mkdir, (self.target,)

    def __init__(self, target):
        self.target = target


def test_a_pickle_with_code_is_refused_and_runs_nothing(stopped, reference, few_images, gdeq):
    _, newest = checkpoints(stopped)
    target = stopped.parent / "pwned"
    payload = io.BytesIO()
    torch.save({"step": Malicious(str(target))}, payload)
    data = payload.getvalue()
    digest = hashlib.sha256(data).hexdigest().encode()
    newest.write_bytes(checkpoint.MAGIC + digest + b"\n" + data)  # its sum is right
    with pytest.raises(checkpoint.CheckpointError, match=r"refused"):
        checkpoint.read(newest)
    code, said = gdeq("train", "--resume", stopped)
    assert code == 0, said
    assert f"{newest.name} holds something else than data and was refused" in said
    assert not target.exists()
    assert_same_run(stopped, reference)


def test_something_else_than_a_state(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"step": 1})
    data = io.BytesIO()
    torch.save([1, 2], data)
    digest = hashlib.sha256(data.getvalue()).hexdigest().encode()
    path.write_bytes(checkpoint.MAGIC + digest + b"\n" + data.getvalue())
    with pytest.raises(checkpoint.CheckpointError, match="no state"):
        checkpoint.read(path)


def test_a_checkpoint_of_another_model(stopped, few_images, gdeq):
    text = (stopped / "config.yaml").read_text()
    (stopped / "config.yaml").write_text(text.replace("size: small", "size: tiny"))
    metrics = (stopped / "metrics.jsonl").read_bytes()
    code, said = gdeq("train", "--resume", stopped)
    assert code == 1
    assert "does not fit its config.yaml" in said
    assert (stopped / "metrics.jsonl").read_bytes() == metrics


def test_two_are_kept_and_halves_are_cleared(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000000.part").write_bytes(b"half")
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, {"step": step, "x": torch.ones(3)})
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000003.ckpt", "step-000000010.ckpt"]
    assert checkpoint.latest(tmp_path)["step"] == 10


def test_a_torn_last_line_of_metrics(stopped, reference, few_images, gdeq):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert len(folder.read_metrics(stopped / "metrics.jsonl")) == 2 * PER_EPOCH + 2
    code, said = gdeq("train", "--resume", stopped)
    assert code == 0, said
    assert_same_run(stopped, reference)


def test_metrics_shorter_than_the_checkpoint_thinks_get_no_zeros(stopped, few_images, gdeq):
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:2]))
    code, said = gdeq("train", "--resume", stopped, "epochs=3")
    assert code == 0, said
    assert len(training_runs.metrics(stopped)) == 2 + PER_EPOCH + 1


# -- a full disk: /dev/full answers every write as one does ----------------------------------------


@pytest.fixture
def full(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    return "/dev/full"


def test_disk_full_at_a_checkpoint(stopped, reference, few_images, gdeq, full):
    before = {p.name: p.read_bytes() for p in checkpoints(stopped)}
    newest = sorted(before)[-1]
    (stopped / "checkpoints" / f"step-{2 * PER_EPOCH + 1:09d}.part").symlink_to(full)
    code, said = gdeq("train", "--resume", stopped, "epochs=3")
    assert code == 1
    assert "error: could not write checkpoint" in said
    assert "No space left on device" in said
    assert f"the last good one is {newest}" in said
    assert "The disk is full: free some space, then resume." in said
    assert {p.name: p.read_bytes() for p in checkpoints(stopped)} == before
    code, said = gdeq("train", "--resume", stopped)  # there is space again; epochs=3 was kept
    assert code == 0, said
    assert training_runs.metrics(stopped)[-1]["epoch"] == 3


def test_disk_full_at_the_metrics(stopped, few_images, gdeq, full):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to(full)
    before = {p.name: p.read_bytes() for p in checkpoints(stopped)}
    code, said = gdeq("train", "--resume", stopped, "epochs=3")
    assert code == 1
    assert f"error: could not write to {stopped}: No space left on device" in said
    assert "The disk is full" in said
    assert f"the last good checkpoint is {max(before)}" in said
    assert f"gdeq train --resume {stopped}" in said
    assert {p.name: p.read_bytes() for p in checkpoints(stopped)} == before


def test_disk_full_at_the_weights(stopped, few_images, gdeq, full):
    (stopped / "weights.safetensors.part").symlink_to(full)
    code, said = gdeq("train", "--resume", stopped)
    assert code == 1
    assert "No space left on device" in said
    assert not (stopped / "weights.safetensors").exists()


# -- numbers that are none -------------------------------------------------------------------------


def test_spoilt_weights_are_not_saved(tmp_path, few_images, gdeq, monkeypatch):
    run = tmp_path / "run"
    code, said = gdeq("train", *TINY, "epochs=1", "--run", run)
    assert code == 0, said
    good = {p.name: p.read_bytes() for p in checkpoints(run)}
    real = loop.Trainer.one_step

    def spoilt(trainer, *batch):
        real(trainer, *batch)  # its loss is from before its update, and still a number
        next(trainer.model.parameters()).data.view(-1)[0] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "one_step", spoilt)
        code, said = gdeq("train", "--resume", run, "epochs=2")
    assert code == 1
    assert f"the loss became NaN or infinite at or before step {PER_EPOCH + 1}" in said
    assert f"the last good checkpoint is {max(good)}" in said
    assert "lower optimizer.lr" in said
    assert {p.name: p.read_bytes() for p in checkpoints(run)} == good
    state = checkpoint.latest(run)
    assert all(v.isfinite().all() for v in state["model"].values() if v.is_floating_point())
    code, said = gdeq("train", "--resume", run, "optimizer.lr=1e-3")
    assert code == 0, said
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2


def test_a_rate_that_is_too_high(tmp_path, few_images, gdeq):
    run = tmp_path / "run"
    code, said = gdeq("train", *TINY, "optimizer.lr=1e37", "--run", run)
    assert code == 1
    assert "the loss became NaN or infinite" in said
    assert "Try a lower optimizer.lr" in said
    last = checkpoints(run)[-1]
    assert f"the last good checkpoint is {last.name}" in said
    state = checkpoint.read(last)
    assert all(v.isfinite().all() for v in state["model"].values() if v.is_floating_point())


def test_nan_in_the_loss(tmp_path, few_images, gdeq, monkeypatch):
    real, count = Images.loss, iter(range(100))

    def spoilt(*args):
        return real(*args) * (float("nan") if next(count) >= 2 else 1)

    monkeypatch.setattr(Images, "loss", spoilt)
    run = tmp_path / "run"
    code, said = gdeq("train", *RICH, "--run", run)
    assert code == 1
    assert "the loss became NaN or infinite at or before step 3" in said
    assert "the last good checkpoint is step-000000002.ckpt" in said
    assert [r["step"] for r in training_runs.metrics(run)] == [1, 2]  # no NaN in the file
    assert checkpoint.latest(run)["step"] == 2
