"""Damaged, hostile and missing checkpoints; metrics that were cut off; a full disk."""

import errno
import hashlib
import io
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import training_runs
import yaml
from training_runs import PER_EPOCH, RICH, TINY, assert_same_run, checkpoints

from gdeq.lab import files
from gdeq.lab.tasks.images import Images
from gdeq.lab.training import checkpoint, folder, loop, runs
from gdeq.lab.training import config as configs
from gdeq.lab.training.stopping import unwritten


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
    said = gdeq.ok("train", "--resume", stopped)
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
        said = gdeq.refused("train", "--resume", stopped)
    assert f"the last good checkpoint is {before.name}" in said
    assert checkpoints(stopped) == [before]


def test_two_good_ones_are_kept_and_halves_are_cleared(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000000.part").write_bytes(b"half")
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, {"step": step})
    names = ["step-000000002.ckpt", "step-000000010.ckpt"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names
    newest = checkpoints(tmp_path)[-1]
    cut(newest)
    for aside in (False, True):  # set aside, a damaged one takes no place of a good one
        assert newest in checkpoints(tmp_path)
        assert checkpoint.latest(tmp_path, aside=aside)["step"] == 2
    assert newest.with_name(f"{newest.name}.damaged").is_file()
    for step in (3, 4):
        checkpoint.save(tmp_path, step, {"step": step})
    assert [checkpoint.read(p)["step"] for p in checkpoints(tmp_path)] == [3, 4]


def test_all_damaged(stopped, few_images, gdeq):
    for path in checkpoints(stopped):
        cut(path)
    metrics = (stopped / "metrics.jsonl").read_bytes()
    said = gdeq.refused("train", "--resume", stopped)
    assert f"error: no checkpoint in {stopped} is whole" in said
    assert len(checkpoints(stopped)) == 2
    assert all(f"{p.name} is damaged or cut short" in said for p in checkpoints(stopped))
    assert "Start again" in said
    assert (stopped / "metrics.jsonl").read_bytes() == metrics  # nothing was thrown away


def test_a_resumed_run_says_what_changed(stopped, few_images, gdeq):
    rate = configs.load(str(stopped / "config.yaml")).optimizer.lr
    change = f"optimizer.lr: {rate} -> 0.5"
    for options in (["--dry-run"], []):
        given = ("train", "--resume", stopped, "epochs=3", "optimizer.lr=0.5", *options)
        said = gdeq.ok(*given)
        assert f"\nfrom here on with epochs: 2 -> 3, {change}\n" in said
    said = gdeq.ok("train", "--resume", stopped, "optimizer.lr=0.25")
    assert "from here on" not in said
    assert "\nnot used, as no step is left: optimizer.lr: 0.5 -> 0.25\n" in said
    assert "not used" not in gdeq("train", "--resume", stopped)[1]


def test_the_first_epoch_is_saved_in_a_short_run(tmp_path, few_images, gdeq, monkeypatch):
    """Whatever checkpoint_seconds says; the later ones are not, until the end."""
    saved, real = [], checkpoint.save

    def noting(run, step, *rest):
        saved.append(step)
        return real(run, step, *rest)

    monkeypatch.setattr(checkpoint, "save", noting)
    settings = [*TINY, "epochs=4", "checkpoint_seconds=1000"]
    gdeq.ok("train", *settings, "--out", tmp_path / "run")
    assert saved == [PER_EPOCH, 4 * PER_EPOCH]


def test_none_at_all_begins_anew(stopped, reference, few_images, gdeq):
    shutil.rmtree(stopped / "checkpoints")
    said = gdeq.ok("train", "--resume", stopped)
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
        said = gdeq.refused(*args)
        assert "was finished, and its checkpoints are not here" in said
        assert f"`gdeq train {run / 'config.yaml'} --out ANOTHER_FOLDER`" in said
    said = gdeq.refused("evaluate", run)
    assert "is finished, but its weights.safetensors is not here: make it again with" in said
    assert (run / "metrics.jsonl").read_text() == before


class Malicious:
    def __reduce__(self):
        return os.mkdir, (self.target,)

    def __init__(self, target):
        self.target = target


def sealed(data):
    """With a checksum that is right."""
    at = data.index(checkpoint.SUM) + len(checkpoint.SUM)
    data = data[:at] + checkpoint.ZEROS + data[at + 64 :]
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def pickled(target):
    payload = io.BytesIO()
    torch.save({"step": Malicious(str(target))}, payload)
    return payload.getvalue()


def headed(target):
    """A header of ours, and then a pickle."""
    return sealed(checkpoint.pack({}, {}) + pickled(target))


def deep(target):
    text = json.dumps({"gdeq": '{"sha256": "' + "0" * 64 + '", "about": ' + "[" * 10**5})
    head = f'{{"__metadata__":{text}}}'.encode()
    return sealed(len(head).to_bytes(8, "little") + head)


@pytest.mark.parametrize("made", [pickled, headed, deep])
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(
    stopped, reference, few_images, gdeq, made
):
    _, newest = checkpoints(stopped)
    target = stopped.parent / "pwned"
    newest.write_bytes(made(target))
    said = gdeq.ok("train", "--resume", stopped)
    assert f"warning: {newest.name} " in said
    assert not target.exists()
    assert_same_run(stopped, reference)


@pytest.mark.parametrize("task", ["run/evil.py", "{run}/evil.py"])
def test_code_that_came_with_a_run_is_not_run(tmp_path, gdeq, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    run, kept = training_runs.begun(tmp_path / "run"), tmp_path / "pwned"
    (run / "evil.py").write_text(f"open({str(kept)!r}, 'w')")
    task = task.format(run=run)
    config = {**configs.to_dict(configs.load("digits")), "task": task}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for command in (["evaluate"], ["train", "--resume"]):
        assert f"config.yaml names the task {task}" in gdeq.refused(*command, run)
    folder.RunFolder(run).write_weights("weights.safetensors", {}, {"config": config})
    folder.RunFolder(run).write_config(configs.load("digits", ["device=cpu"]))
    assert f"weights.safetensors names the task {task}" in gdeq.refused("evaluate", run)
    assert not kept.exists()


@pytest.mark.parametrize("about", [None, [1], {"state": []}, {"state": {"tensor": "9"}}, {}])
def test_something_else_than_a_state(tmp_path, about):
    path = tmp_path / "step-000000001.ckpt"
    path.write_bytes(checkpoint.pack({}, about))
    with pytest.raises(checkpoint.CheckpointError, match="no state"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    "value", [None, True, 1.5, math.inf, "text", [1, [2]], {0: {"a": 1}, "b": []}]
)
def test_a_state_comes_back_as_it_was(tmp_path, value):
    tensors = {n: torch.arange(6).to(d) for n, d in enumerate((torch.uint8, torch.bfloat16))}
    tensors[2] = torch.ones(2, 3).T  # safetensors wants whole memory of its own
    tensors[3] = tensors[2][:1]
    state = checkpoint.read(checkpoint.save(tmp_path, 1, {"step": 1, "x": value, "t": tensors}))
    assert (state["step"], state["x"]) == (1, value)
    assert all(torch.equal(state["t"][n], tensors[n]) for n in tensors)
    assert all(state["t"][n].dtype == tensors[n].dtype for n in tensors)


def test_a_checkpoint_that_claims_more_than_the_memory_holds(tmp_path):
    for step in (1, 2):
        newest = checkpoint.save(tmp_path, step, {"step": step})
    try:
        os.truncate(newest, 2**43)  # it takes no place on the disk
    except OSError:
        pytest.skip("this disk holds no file of that size")
    said = []
    assert checkpoint.latest(tmp_path, said.append)["step"] == 1
    assert f"{newest.name} cannot be read: it does not fit into the memory" in said[0]


# -- config.yaml -----------------------------------------------------------------------------------


def other_run(text):
    return yaml.safe_dump(configs.to_dict(configs.load("digits", ["seed=5"])))


EDITS = {
    "is missing": lambda text: None,
    "is empty or cut short": lambda text: "",
    "is not complete": lambda text: text[: text.index("solver:")],
    "cannot be used": lambda text: "\0\0" + text,
    "(seed: 0 -> 1)": lambda text: text.replace("seed: 0", "seed: 1"),
    "(optimizer.lr: 0.001 -> 0.5)": lambda text: text.replace("lr: 0.001", "lr: 0.5", 1),
    "(epochs: 2 -> 40)": lambda text: text.replace("epochs: 2", "epochs: 40"),
    "(model.size: small -> tiny)": lambda text: text.replace("size: small", "size: tiny"),
    "says something else (": other_run,
    "aliases (*name) are not allowed": lambda text: text + "x: &a [1]\ny: *a\n",
}


@pytest.mark.parametrize("said_of_it", EDITS)
def test_a_config_that_is_not_the_runs_is_restored(
    stopped, reference, few_images, gdeq, said_of_it
):
    place = stopped / "config.yaml"
    whole = place.read_text()
    edited = EDITS[said_of_it](whole)
    place.unlink() if edited is None else place.write_text(edited)
    checkpoints(stopped)[-1].unlink()  # there is a step to be made
    said = gdeq.ok("train", "--resume", stopped)
    assert "warning: config.yaml" in said
    assert said_of_it in said
    assert "it was restored from the checkpoint" in said
    assert place.read_text() == whole
    assert_same_run(stopped, reference)


def test_an_edited_config_of_a_finished_run_is_told(reference, few_images, gdeq, tmp_path):
    run = tmp_path / "finished"
    shutil.copytree(reference, run)
    assert "config.yaml" not in gdeq.ok("train", "--resume", run)
    edited = (run / "config.yaml").read_text().replace("epochs: 2", "epochs: 40")
    (run / "config.yaml").write_text(edited)
    said = gdeq.ok("train", "--resume", run)
    assert "warning: config.yaml says something else (epochs: 2 -> 40); it is not used" in said
    assert (run / "config.yaml").read_text() == edited


@pytest.mark.parametrize("said_of_it", ["is empty or cut short", "is not complete"])
def test_a_config_that_nothing_can_restore(stopped, few_images, gdeq, said_of_it):
    shutil.rmtree(stopped / "checkpoints")
    place = stopped / "config.yaml"
    place.write_text(EDITS[said_of_it](place.read_text()))
    said = gdeq.refused("train", "--resume", stopped)
    assert f"config.yaml {said_of_it}, and there is no checkpoint to restore it from" in said


def test_a_change_lasts_even_if_no_checkpoint_follows(stopped, few_images, gdeq, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "fit", lambda self: sys.exit(9))
        assert gdeq("train", "--resume", stopped, "epochs=3")[0] == 9
    said = gdeq.ok("train", "--resume", stopped)
    assert "restored" not in said
    assert training_runs.metrics(stopped)[-1]["epoch"] == 3


def test_every_file_waits_for_the_disk(tmp_path, few_images, gdeq, monkeypatch):
    """A power cut leaves whole files: each is flushed before it gets its name."""
    flushed, named, real, rename = set(), [], os.fsync, Path.replace

    def sync(handle):
        flushed.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    def replace(part, place):
        assert str(part) in flushed
        named.append(str(place))
        return rename(part, place)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    run = tmp_path / "run"
    gdeq.ok("train", *TINY, "--out", run)
    for path in run.rglob("*"):
        if path.is_dir():
            assert str(path) in flushed, path  # the renames in it
        elif path.name not in ("lock", "metrics.jsonl") and "tfevents" not in path.name:
            assert str(path) in named, path
    assert str(run / "metrics.jsonl") in flushed


@pytest.mark.parametrize("settings", [["epochs=1"], ["epochs=1", "--dry-run"]])
def test_fewer_epochs_than_there_were(stopped, few_images, gdeq, settings):
    (stopped / "lock").unlink()
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    code, said = gdeq("train", "--resume", stopped, *settings)
    (stopped / "lock").unlink(missing_ok=True)
    assert code == 1
    told = "is at step 6, beyond the 3 steps of epochs=1: leave that out, or give epochs=2 or more"
    assert told in said
    assert before == {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}


# -- weights ---------------------------------------------------------------------------------------


def test_a_flipped_bit_of_the_weights_is_seen(tmp_path, reference):
    whole = (reference / "weights.safetensors").read_bytes()
    place, chance = tmp_path / "weights.safetensors", random.Random(3)
    spread = [chance.randrange(len(whole)) for _ in range(60)]
    for at in [*range(12), *spread]:
        place.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(checkpoint.CheckpointError, match=r"damaged|not a file of gdeq"):
            checkpoint.read_tensors(place)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.to(torch.int8), "is torch.int8, that of the model is torch.float32"),
        (lambda x: x > 0, "is torch.bool, that of the model is torch.float32"),
        (lambda x: x.double(), "is torch.float64, that of the model is torch.float32"),
        (lambda x: x * math.nan, "holds numbers that are not finite"),
        (lambda x: x[..., :1], "size mismatch"),
    ],
)
def test_weights_of_another_kind(tmp_path, reference, few_images, gdeq, spoil, message):
    shutil.copytree(reference, tmp_path / "run")
    place = tmp_path / "run" / "weights.safetensors"
    tensors, about = checkpoint.read_tensors(place)
    name = next(name for name, tensor in tensors.items() if tensor.shape[-1:] > (1,))
    place.write_bytes(checkpoint.pack({**tensors, name: spoil(tensors[name])}, about))
    said = gdeq.refused("evaluate", tmp_path / "run")
    assert message in said
    assert "is of another model" in said


# -- the folder ------------------------------------------------------------------------------------


LINKED = ["metrics.jsonl", "lock", "config.yaml", "config.yaml.part", "weights.safetensors"]
LINKED += ["summary.json", "checkpoints", "snapshots", "weights.safetensors.part"]


@pytest.mark.parametrize("name", LINKED)
def test_no_link_in_a_run_folder_leads_out_of_it(stopped, few_images, gdeq, name):
    place, outside = stopped / name, stopped.parent / "outside"
    if place.is_dir():
        shutil.move(place, outside)
        checkpoint.save(outside.parent, 1, {"step": 1})  # one that would be cleared away
    else:
        outside.write_bytes(place.read_bytes() if place.exists() else b"years of work")
        place.unlink(missing_ok=True)
    place.symlink_to(outside)
    before = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    code, said = gdeq("train", "--resume", stopped, "epochs=3", "snapshots=[3]")
    now = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    assert now == before
    if place.is_symlink():
        assert code == 1
        assert f"{place} is a symbolic link" in said
    else:  # a file took the place of the link
        assert code == 0, said


@pytest.mark.parametrize("deed", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
@pytest.mark.parametrize("at", [2, 3, 6])
def test_a_folder_that_is_taken_away_is_not_made_again(
    tmp_path, few_images, gdeq, monkeypatch, deed, at
):
    run, real = tmp_path / "run", loop.Trainer.one_step

    def struck(trainer, *batch):
        real(trainer, *batch)
        if trainer.step == at:
            deed(run)

    monkeypatch.setattr(loop.Trainer, "one_step", struck)
    said = gdeq.refused("train", *TINY, "--out", run)
    assert f"{run} was moved or deleted while it was being trained" in said
    assert not run.exists()


def summary_of(run):
    told = json.loads((run / "summary.json").read_text())
    return {key: told[key] for key in ("test_accuracy", "epochs", "steps", "seed", "task")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"epochs": 9, "metric": 3}',
        '{"epochs": 9, "metric": {"name": "x"}}',
        "[" * 9999,
    ],
)
def test_a_summary_that_is_none_is_made_again(stopped, reference, few_images, gdeq, text):
    shutil.copy(reference / "weights.safetensors", stopped)
    (stopped / "summary.json").write_text(text)
    (stopped / "snapshots" / "epoch-x.safetensors").write_text("")
    assert list(runs.snapshots(stopped)) == [1]
    gdeq.ok("train", "--resume", stopped)
    assert summary_of(stopped) == summary_of(reference)


TEARS = [
    (lambda data: data + b'{"kind": "step", "st', "", 0),  # after the checkpoint: made again
    (lambda data: data[:700], "the last line of metrics.jsonl was torn", 1),
    (lambda data: data[: data.index(b"\n", 700) + 1], "bytes that were written before", 0),
    (lambda data: b"\xff\x00[1]\n[1]\n" + data[12:], "", 0),
    (lambda data: b"", "metrics.jsonl had 0 of the", 0),
]


@pytest.mark.parametrize(("tear", "told", "aside"), TEARS)
def test_the_summary_does_not_depend_on_the_metrics(
    stopped, reference, few_images, gdeq, tear, told, aside
):
    place = stopped / "metrics.jsonl"
    place.write_bytes(tear(place.read_bytes()))
    said = gdeq.ok("train", "--resume", stopped)
    assert told in said
    assert summary_of(stopped) == summary_of(reference)
    assert (stopped / "metrics.torn").exists() == bool(aside)
    assert place.read_bytes().endswith(b"\n") or not place.stat().st_size
    assert all(isinstance(record, dict) for record in folder.read_metrics(place))
    assert not said.startswith("{")


# -- a full disk -----------------------------------------------------------------------------------


FULL = [
    f"step-{2 * PER_EPOCH + 1:09d}.ckpt",
    "metrics.jsonl",
    "weights.safetensors",
    "summary.json",
]


def test_a_pipe_that_was_closed_is_not_the_fault_of_the_folder(tmp_path):
    """As of ``gdeq train | head``."""
    said = str(unwritten(BrokenPipeError(errno.EPIPE, "Broken pipe"), tmp_path))
    assert said.startswith("could not write to standard output: Broken pipe; no checkpoint was")


@pytest.mark.parametrize("victim", FULL)
def test_a_full_disk(stopped, few_images, gdeq, monkeypatch, victim):
    real = files.open_file

    def full(place, flags):
        handle = real(place, flags)
        if flags & os.O_CREAT and place.name.removesuffix(".part") == victim:
            os.close(handle)
            return os.open("/dev/full", os.O_WRONLY)
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_file", full)
        patch.setattr(files, "sync", lambda handle: None)  # not a file
        said = gdeq.refused("train", "--resume", stopped, "epochs=3")
    assert f"error: could not write to {stopped}: No space left on device" in said
    assert "The disk is full: free some space" in said
    assert "step-0000000" in said  # the last good one
    assert all(checkpoint.read(path)["step"] for path in checkpoints(stopped))
    assert not list(stopped.rglob("*.part"))
    code, said = gdeq("train", "--resume", stopped)  # there is space again; epochs=3 was kept
    assert code == 0, said
    assert training_runs.metrics(stopped)[-1]["epoch"] == 3


# -- numbers that are none -------------------------------------------------------------------------


def test_spoilt_weights_are_not_saved(tmp_path, few_images, gdeq, monkeypatch):
    run = tmp_path / "run"
    said = gdeq.ok("train", *TINY, "epochs=1", "--out", run)
    good = {p.name for p in checkpoints(run)}
    real = loop.Trainer.one_step

    def spoilt(trainer, *batch):
        real(trainer, *batch)  # its loss is from before its update, and still a number
        next(trainer.model.parameters()).data.view(-1)[0] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "one_step", spoilt)
        said = gdeq.refused("train", "--resume", run, "epochs=2")
    assert f"the loss became NaN or infinite at or before step {PER_EPOCH + 1}" in said
    assert f"the last good checkpoint is {max(good)}" in said
    assert "lower optimizer.lr" in said
    assert {p.name for p in checkpoints(run)} == good
    state = checkpoint.latest(run)
    assert all(v.isfinite().all() for v in state["model"].values() if v.is_floating_point())
    said = gdeq.ok("train", "--resume", run, "optimizer.lr=1e-3")
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2


def test_nan_in_the_loss(tmp_path, few_images, gdeq, monkeypatch):
    real, count = Images.loss, iter(range(100))

    def spoilt(*args):
        return real(*args) * (float("nan") if next(count) >= 2 else 1)

    monkeypatch.setattr(Images, "loss", spoilt)
    run = tmp_path / "run"
    said = gdeq.refused("train", *RICH, "--out", run)
    assert "the loss became NaN or infinite at or before step 3" in said
    assert "Try a lower optimizer.lr" in said
    assert "the last good checkpoint is step-000000002.ckpt" in said
    assert [r["step"] for r in training_runs.metrics(run)] == [1, 2]  # no NaN in the file
    assert checkpoint.latest(run)["step"] == 2
