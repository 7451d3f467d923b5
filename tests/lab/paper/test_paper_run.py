"""Going through the plan: skipping, resuming, stopping."""

import json
import os
import signal
from pathlib import Path

import pytest
import training_runs
from paper_runs import SETS, SMALL, only

from gdeq.lab.paper import plan, running
from gdeq.lab.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("few_images")


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def state_of(said, name):
    """In the table at the end."""
    return said[said.rindex("\nrun ") :].split(f"\n{name} ")[1].split()[0]


def test_runs_are_made_and_not_made_again(gdeq, tmp_path):
    out = tmp_path / "out"
    chosen = only("gdeq-seed0", "jfb-pretrained-seed0")
    said = gdeq.ok("paper", "run", "--out", out, *chosen, *SMALL)
    for name in ("gdeq-seed0", "jfb-pretrained-seed0"):
        assert state_of(said, name) == "finished"
        summary = json.loads((out / name / "summary.json").read_text())
        epochs = [r for r in training_runs.metrics(out / name, True) if r["kind"] == "epoch"]
        assert [e["epoch"] for e in epochs] == [1, 2]
        assert epochs[-1]["test_accuracy"] == summary["test_accuracy"] >= 0
        # Only the runs of the convergence figure are tested after each epoch.
        assert (epochs[0]["test_accuracy"] is not None) == (name == "gdeq-seed0")
        assert 0 < epochs[0]["seconds"] < epochs[1]["seconds"] == summary["train_seconds"]
    assert summary["pretrain"] is True
    # Its gradients were compared at once: the weights stay where they are.
    records = training_runs.metrics(out / "gdeq-seed0")
    found = [json.loads(x) for x in (out / "gdeq-seed0/similarity.jsonl").read_text().splitlines()]
    assert {r["epoch"] for r in found} == {1, 2}
    assert all(r["exact_residual"] < 1e-4 and r["relative_error"] >= 0 for r in found)
    assert {"GDEQ", "JFB", "NPG", *(f"GDEQ refine {n}" for n in (1, 2, 3))} <= {
        r["method"] for r in found
    }
    before = contents(out)
    said = gdeq.ok("paper", "run", "--out", out, *chosen, *SMALL)
    assert said == "2 of 2 runs finished\n"
    assert contents(out) == before
    assert training_runs.metrics(out / "gdeq-seed0") == records


def test_a_killed_run_goes_on_to_the_same_end(gdeq, zygote, tmp_path):
    args = ["paper", "run", *only("gdeq-seed1"), *SETS, "--set", "epochs=12"]
    child = zygote.start(tmp_path / "log", *args, "--out", tmp_path / "out")
    run = tmp_path / "out" / "gdeq-seed1"
    assert training_runs.wait_until(lambda: training_runs.steps_seen(run) >= 6, child)
    child.kill(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    assert training_runs.checkpoints(run)
    said = gdeq.ok(*args, "--out", tmp_path / "out")
    assert "continuing at step" in said
    said = gdeq.ok(*args, "--out", tmp_path / "whole")
    whole = tmp_path / "whole" / "gdeq-seed1"
    assert training_runs.metrics(run) == training_runs.metrics(whole)
    name = "weights.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_one_who_stops_it_is_told_the_same_command(gdeq, tmp_path, monkeypatch):
    real = Trainer.one_step

    def struck(trainer, *batch):
        os.kill(os.getpid(), signal.SIGTERM)
        real(trainer, *batch)

    out = tmp_path / "out"
    monkeypatch.setattr(Trainer, "one_step", struck)
    for step in (1, 2):
        code, said = gdeq("paper", "run", "--out", out, *only("jfb-seed0"), *SMALL)
        assert code == 128 + signal.SIGTERM, said
        told = f"stopped at step {step}; continue with the same command: `gdeq paper run ... "
        assert f"{told}--out {out}`" in said


def test_a_run_that_diverges_is_noted_and_the_next_begun(gdeq, tmp_path):
    out = tmp_path / "out"
    wild = ["--set", "optimizer.lr=1e30", "--set", "optimizer.clip=null"]
    args = ("paper", "run", "--out", out, *only("jfb-seed0", "npg-seed0"), *SMALL, *wild)
    said = gdeq.ok(*args)
    for name in ("jfb-seed0", "npg-seed0"):
        assert state_of(said, name) == "failed"
        assert "NaN" in json.loads((out / name / "failed.json").read_text())["reason"]
    before = contents(out)
    said = gdeq.ok(*args)
    told = "failed before: npg-seed0, jfb-seed0; delete a folder to try that again\n"
    assert said == f"0 of 2 runs finished, 2 failed\n{told}"
    assert contents(out) == before


def test_other_settings_are_refused_before_anything_is_trained(gdeq, tmp_path):
    out = tmp_path / "out"
    args = ("paper", "run", "--out", out, *SMALL)
    assert gdeq(*args, *only("jfb-seed0"))[0] == 0
    said = gdeq.refused(*args, *only("gdeq-seed0", "jfb-seed0"), "--set", "optimizer.lr=0.5")
    assert "jfb-seed0 was made with other settings (optimizer.lr: 0.02 -> 0.5)" in said
    assert not (out / "gdeq-seed0").exists()
    # Housekeeping is no other experiment.
    assert gdeq(*args, *only("jfb-seed0"), "--set", "log_every=7")[0] == 0


def test_the_bound_of_what_is_exact(gdeq, tmp_path):
    args = ("paper", "run", "--out", tmp_path / "out", *only("gdeq-seed0"), *SMALL)
    said = gdeq.refused(*args, "--exact-tol", "0")
    assert "--exact-tol must be above 0, got 0" in said
    assert not (tmp_path / "out").exists()
    assert gdeq(*args, "--exact-tol", "0.01")[0] == 0
    text = (tmp_path / "out" / "gdeq-seed0" / "similarity.jsonl").read_text()
    assert {json.loads(line)["exact_tol"] for line in text.splitlines()} == {0.01}


def test_a_dry_run_lists_all_and_writes_nothing(gdeq, tmp_path):
    out = tmp_path / "out"
    said = gdeq.ok("paper", "run", "--out", out, *SMALL, "--dry-run")
    assert len(said.splitlines()) == len(plan.make_plan())
    assert all(run.name in said for run in plan.make_plan())
    assert not out.exists()


def test_a_dry_run_without_the_data_lists_all_and_says_what_is_missing(gdeq, tmp_path):
    said = gdeq.ok("paper", "run", "--data", tmp_path, "--dry-run")
    assert "implicit-pretrained-seed2" in said
    assert "cannot start: CIFAR-10 is not in" in " ".join(said.split())


def test_the_results_of_record_are_finished_runs_of_the_plan():
    shipped = Path(__file__).parents[3] / "results" / "cifar10"
    journey = running.Journey(shipped)
    for run in plan.make_plan():
        assert journey.state(run) == running.DONE, run.name
