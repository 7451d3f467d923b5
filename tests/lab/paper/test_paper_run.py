"""Going through the plan: skipping, resuming, stopping in time."""

import json
import os
import signal
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import training_runs
from paper_runs import SETS, SETTINGS, SMALL, only

from gdeq.lab.paper import plan, running, timing
from gdeq.lab.training import config as configs
from gdeq.lab.training import runs
from gdeq.lab.training.loop import Interrupted, Trainer


@pytest.fixture(autouse=True)
def small(few_images, monkeypatch):
    monkeypatch.setattr(timing, "RECORDING", 1)
    monkeypatch.setattr(timing, "TIMED", 2)


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def state_of(said, name):
    """In the table at the end."""
    return said[said.rindex("run      ") :].split(f"\n{name} ")[1].split()[0]


def test_runs_are_made_and_not_made_again(gdeq, tmp_path):
    out, archive = tmp_path / "out", tmp_path / "back.tar.gz"
    chosen = only("gdeq-seed0", "jfb-pretrained-seed0")
    code, said = gdeq("paper", "run", "--out", out, *chosen, *SMALL, "--export", archive)
    assert code == 0, said
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
    with tarfile.open(archive) as back:
        names = back.getnames()
    assert {"gdeq-seed0/metrics.jsonl", "gdeq-seed0/similarity.jsonl"} <= set(names)
    assert {n.rpartition(".")[2] for n in names} == {"yaml", "json", "jsonl"}

    before = contents(out)
    code, said = gdeq("paper", "run", "--out", out, *chosen, *SMALL)
    assert code == 0, said
    assert said == "2 of 2 runs finished\n"
    assert contents(out) == before
    assert training_runs.metrics(out / "gdeq-seed0") == records

    # The same from another place: what came back from a lent machine has no weights.
    place = tmp_path / "back"
    with tarfile.open(archive) as back:
        back.extractall(place, filter="data")
    code, said = gdeq(
        *("paper", "run", "--out", tmp_path / "new", "--finished", place),
        *only("gdeq-seed0"),
        *SMALL,
    )
    assert code == 0, said
    assert said == "1 of 1 run finished\n"
    assert not (tmp_path / "new").exists()


def test_a_killed_run_goes_on_to_the_same_end(gdeq, zygote, tmp_path):
    args = ["paper", "run", *only("gdeq-seed1"), *SETS, "--set", "epochs=4"]
    child = zygote.start(tmp_path / "log", *args, "--out", tmp_path / "out")
    run = tmp_path / "out" / "gdeq-seed1"
    assert training_runs.wait_until(lambda: training_runs.steps_seen(run) >= 6, child)
    child.kill(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    assert training_runs.checkpoints(run)
    code, said = gdeq(*args, "--out", tmp_path / "out")
    assert code == 0, said
    assert "continuing at step" in said
    code, said = gdeq(*args, "--out", tmp_path / "whole")
    assert code == 0, said
    whole = tmp_path / "whole" / "gdeq-seed1"
    assert training_runs.metrics(run) == training_runs.metrics(whole)
    name = "weights.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_without_time_nothing_is_begun(gdeq, tmp_path):
    out = tmp_path / "out"
    code, said = gdeq("paper", "run", "--out", out, *only("jfb-*"), *SMALL, "--minutes", "0")
    assert code == 0, said
    names = [run.name for run in plan.chosen(["jfb-*"])]
    assert names[0] == "jfb-seed0"
    head, following = said.splitlines()
    assert head == f"0 of {len(names)} runs finished, {len(names)} missing"
    assert following == f"next: {', '.join(f'{name} (no time left)' for name in names)}"
    assert not out.exists()


def test_without_time_the_whole_plan_is_told_in_two_lines(gdeq, tmp_path):
    runs.train(tmp_path / "gdeq-seed0", plan.chosen(["gdeq-seed0"])[0].config(SETTINGS))
    code, said = gdeq("paper", "run", "--out", tmp_path, *SMALL, "--minutes", "0")
    assert code == 0, said
    planned = len(plan.make_plan())
    head, following = said.splitlines()
    assert head == f"1 of {planned} runs finished, {planned - 1} missing"
    assert following.startswith("next: npg-seed0 (no time left), ")
    assert following.endswith(f", and {planned - 1 - running.NEXT} more (--dry-run lists all)")


class Late(running.Clock):
    """Time enough to begin, and none after the first step."""

    def __init__(self, minutes):
        self.until = 0.0

    left = 1e6


def test_time_that_is_up_saves_and_the_rest_follows(gdeq, tmp_path, monkeypatch):
    out = tmp_path / "out"
    args = ("paper", "run", "--out", out, *only("jfb-seed0"), *SMALL)
    with monkeypatch.context() as short:
        short.setattr(running, "Clock", Late)
        code, said = gdeq(*args, "--minutes", "5")
    assert code == 0, said
    assert state_of(said, "jfb-seed0") == "begun"
    assert "stopped when the time was up, saved" in said
    assert [p.name for p in training_runs.checkpoints(out / "jfb-seed0")] == ["step-000000001.ckpt"]
    code, said = gdeq(*args)
    assert code == 0, said
    assert "continuing at step 1 of 6" in said
    whole = runs.train(tmp_path / "whole", plan.chosen(["jfb-seed0"])[0].config(SETTINGS))
    assert training_runs.metrics(out / "jfb-seed0") == training_runs.metrics(tmp_path / "whole")
    assert whole["test_accuracy"] == json.loads(
        (out / "jfb-seed0" / "summary.json").read_text()
    )["test_accuracy"]  # fmt: skip


def test_a_deadline_is_told_from_a_signal(tmp_path):
    config = plan.chosen(["jfb-seed0"])[0].config(SETTINGS)
    with pytest.raises(Interrupted) as stop:
        runs.train(tmp_path / "run", config, until=time.monotonic())
    assert stop.value.number == signal.SIGALRM
    assert "stopped at step 1; continue with" in str(stop.value)


def test_one_who_stops_it_is_told_the_same_command(gdeq, tmp_path, monkeypatch):
    real = Trainer.one_step

    def struck(trainer, *batch):
        if trainer.run.path == out / "jfb-seed0":  # not while its time is estimated
            os.kill(os.getpid(), signal.SIGTERM)
        real(trainer, *batch)

    out = tmp_path / "out"
    monkeypatch.setattr(Trainer, "one_step", struck)
    for step in (1, 2):
        code, said = gdeq("paper", "run", "--out", out, *only("jfb-seed0"), *SMALL)
        assert code == 128 + signal.SIGTERM, said
        told = f"stopped at step {step}; continue with the same command: `gdeq paper run ... "
        assert f"{told}--out {out}`" in said


def test_what_cannot_end_is_not_begun_but_the_next_may_be(gdeq, tmp_path, monkeypatch):
    """A long run, and one that was begun, may be: another call goes on with them."""
    needs = {"jfb": 1e6, "npg": 1.0, "gdeq": 1e6}
    monkeypatch.setattr(
        timing.Estimates, "probe", lambda self, config, done=0: needs[config.gradient.name]
    )
    out = tmp_path / "out"
    runs.train(out / "gdeq-seed1", plan.chosen(["gdeq-seed1"])[0].config(SETTINGS))
    (out / "gdeq-seed1" / "summary.json").unlink()
    names = ("jfb-seed0", "npg-seed0", "gdeq-seed1", "record-7steps")
    code, said = gdeq(
        *("paper", "run", "--out", out, *only(*names), "--minutes", "60"),
        *SMALL,
    )
    assert code == 0, said
    assert {state_of(said, name) for name in names[1:]} == {"finished"}
    assert "3 of 4 runs finished, 1 missing\nnext: jfb-seed0 (needs about 16666.7 min, " in said
    assert not (out / "jfb-seed0").exists()


def test_time_is_estimated_from_finished_runs_and_by_trying(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = plan.chosen(["jfb-seed0"])[0]
    config = run.config(SETTINGS)
    summary = runs.train(tmp_path / "runs" / run.name, config)
    estimates = timing.Estimates(None)
    estimates.learn([tmp_path / "runs" / run.name, tmp_path / "not there"])
    pace = summary["train_seconds"] / 6
    assert estimates.known(config) == pytest.approx(6 * pace * timing.EVALUATION + timing.START)
    assert estimates.known(config, 4) == pytest.approx(2 * pace * timing.EVALUATION + timing.START)
    longer = plan.chosen(["jfb-seed0"])[0].config([*SETTINGS, "epochs=20", "seed=5"])
    assert estimates.known(longer) == pytest.approx(60 * pace * timing.EVALUATION + timing.START)
    other = plan.chosen(["npg-seed0"])[0].config(SETTINGS)
    assert estimates.known(other) is None
    assert estimates.at_most(other) is None  # which has more to do in a step than what is known
    estimates.probed[timing.kind_of(other)] = (timing.Speed(50 * pace, pace, 0.0), 3)
    slowest = 2 * 50 * pace * timing.EVALUATION + timing.START + timing.COMPILATION
    assert estimates.at_most(config, 4) == pytest.approx(slowest)
    assert estimates.at_most(configs.replace(config, model__size="tiny")) is None
    speed, per_epoch = timing.probe(other)
    assert per_epoch == 3
    assert speed.step > 0
    assert speed.test > 0
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]  # trying leaves nothing behind


def test_what_is_not_timed_is_not_tried_where_a_run_of_the_model_is_known(
    gdeq, tmp_path, monkeypatch
):
    tried, real = [], timing.Estimates.probe

    def noting(self, config, done=0):
        tried.append(config.gradient.name)
        return real(self, config, done)

    monkeypatch.setattr(timing.Estimates, "probe", noting)
    names = ("npg-seed0", "steps04-gdeq", "steps04-npg")
    code, said = gdeq("paper", "run", "--out", tmp_path / "out", *only(*names), *SMALL)
    assert code == 0, said
    assert {state_of(said, name) for name in names} == {"finished"}
    assert tried == ["npg"]


def test_an_adaptive_run_is_tried_on_all_its_rungs(monkeypatch):
    config = plan.chosen(["adaptive-seed0"])[0].config([*SETTINGS, "adapt.steps=[2,3,5]"])
    seen = []
    real = timing.Trainer.one_step

    def noting(trainer, images, labels):
        real(trainer, images, labels)
        choice = trainer.controller.choice
        assert trainer.model.deq.solver.max_iter == choice.steps
        seen.append((choice.steps, choice.refine, trainer.penalised, trainer.measured))

    monkeypatch.setattr(timing.Trainer, "one_step", noting)
    speed, _ = timing.probe(config)
    refinements = config.adapt.refine
    first = refinements[(len(refinements) - 1) // 2]
    kinds = [((), True), ((), False), (("residual",), True), (("residual",), False)]
    wanted = {(steps, k, *kind) for steps in (2, 3, 5) for k in refinements for kind in kinds}
    assert set(seen) == wanted
    timed = [way[:3] for way in seen[-timing.TIMED :]]
    assert timed == [(3, first, ())] * timing.TIMED  # four of five have no penalty
    assert speed.step > 0


def test_a_step_is_timed_with_its_share_of_penalties(monkeypatch):
    settings = [*SETTINGS, "residual_weight=1", "residual_every=3"]
    settings += ["jacobian_weight=1", "jacobian_every=2"]
    config = plan.chosen(["gdeq-seed0"])[0].config(settings)
    costs = {(): 1.0, ("residual",): 2.0, ("jacobian",): 3.0, ("jacobian", "residual"): 4.0}

    def seconds(trainer, step):
        trainer._prepare(step)
        return costs[trainer.penalised]

    monkeypatch.setattr(timing, "_step_seconds", seconds)
    speed, _ = timing.probe(config)
    # Of six steps, one has both, two the one, one the other, two none.
    assert speed.step == pytest.approx((4 + 2 * 3 + 2 + 2 * 1) / 6)


def test_seconds_of_what_is_left():
    speed = timing.Speed(step=2.0, unrolled_step=1.0, test=10.0)
    config = plan.chosen(["gdeq-seed0"])[0].config(["epochs=4", "pretrain_steps=3"])
    whole = 3 * 1.0 + 17 * 2.0 + 4 * 10.0
    assert speed.seconds(config, per_epoch=5) == whole + timing.START
    assert speed.seconds(config, 5, done=6) == 14 * 2.0 + 3 * 10.0 + timing.START
    seldom = replace(config, test_every=3)  # after the third and the last
    assert speed.seconds(seldom, 5) == whole - 2 * 10.0 + timing.START
    assert speed.seconds(seldom, 5, done=15) == 5 * 2.0 + 10.0 + timing.START


def test_a_run_that_diverges_is_noted_and_the_next_begun(gdeq, tmp_path):
    out = tmp_path / "out"
    wild = ["--set", "optimizer.lr=1e30", "--set", "optimizer.clip=null"]
    args = ("paper", "run", "--out", out, *only("jfb-seed0", "npg-seed0"), *SMALL, *wild)
    code, said = gdeq(*args)
    assert code == 0, said
    for name in ("jfb-seed0", "npg-seed0"):
        assert state_of(said, name) == "failed"
        assert "NaN" in json.loads((out / name / "failed.json").read_text())["reason"]
    before = contents(out)
    code, said = gdeq(*args)
    assert code == 0, said
    told = "failed before: npg-seed0, jfb-seed0; delete a folder to try that again\n"
    assert said == f"0 of 2 runs finished, 2 failed\n{told}"
    assert contents(out) == before


def test_other_settings_are_refused_before_anything_is_trained(gdeq, tmp_path):
    out = tmp_path / "out"
    args = ("paper", "run", "--out", out, *SMALL)
    assert gdeq(*args, *only("jfb-seed0"))[0] == 0
    code, said = gdeq(*args, *only("gdeq-seed0", "jfb-seed0"), "--set", "optimizer.lr=0.5")
    assert code == 1
    assert "jfb-seed0 was made with other settings (optimizer.lr: 0.02 -> 0.5)" in said
    assert not (out / "gdeq-seed0").exists()
    # Housekeeping is no other experiment.
    assert gdeq(*args, *only("jfb-seed0"), "--set", "log_every=7")[0] == 0


def test_the_bound_of_what_is_exact(gdeq, tmp_path):
    args = ("paper", "run", "--out", tmp_path / "out", *only("gdeq-seed0"), *SMALL)
    code, said = gdeq(*args, "--exact-tol", "0")
    assert code == 1
    assert "--exact-tol must be above 0, got 0" in said
    assert not (tmp_path / "out").exists()
    assert gdeq(*args, "--exact-tol", "0.01")[0] == 0
    text = (tmp_path / "out" / "gdeq-seed0" / "similarity.jsonl").read_text()
    assert {json.loads(line)["exact_tol"] for line in text.splitlines()} == {0.01}


def test_a_dry_run_lists_all_and_writes_nothing(gdeq, tmp_path):
    out = tmp_path / "out"
    code, said = gdeq("paper", "run", "--out", out, *SMALL, "--dry-run")
    assert code == 0, said
    assert len(said.splitlines()) == len(plan.make_plan())
    assert all(run.name in said for run in plan.make_plan())
    assert not out.exists()


def test_a_dry_run_without_the_data_lists_all_and_says_what_is_missing(gdeq, tmp_path):
    code, said = gdeq("paper", "run", "--data", tmp_path, "--dry-run")
    assert code == 0, said
    assert "implicit-pretrained-seed2" in said
    assert "nothing can be begun: CIFAR-10 is not in" in " ".join(said.split())


def test_finished_runs_with_steps_in_other_bits(gdeq, tmp_path):
    """The table names them: no reason to make a run again."""
    args = ("paper", "run", *only("jfb-seed0"), *SMALL)
    done = tmp_path / "done"
    assert gdeq(*args, "--out", done, "--set", "solver.step_bits=16")[0] == 0
    code, said = gdeq(*args, "--out", tmp_path / "new", "--finished", done)
    assert (code, said) == (0, "1 of 1 run finished\n")
    other = ("--set", "optimizer.lr=0.3")
    code, said = gdeq(*args, "--out", tmp_path / "new", "--finished", done, *other)
    assert code == 1
    assert "was made with other settings" in said


def test_the_results_of_record_are_finished_runs_of_the_plan(tmp_path):
    """So that `--finished results/cifar10` leaves them out."""
    shipped = Path(__file__).parents[3] / "results" / "cifar10"
    journey = running.Journey(tmp_path, finished=[shipped])
    for run in plan.make_plan():
        assert journey.state(run) == running.DONE, run.name
        if not run.pretrain:  # how long that is depends on the data
            journey.check([run])


def test_finished_runs_in_a_folder_that_is_not_there(gdeq, tmp_path):
    code, said = gdeq(
        "paper", "run", "--out", tmp_path / "out", *SMALL, "--finished", tmp_path / "nowhere"
    )
    assert code == 1
    assert "there is no such folder" in " ".join(said.split())
    code, said = gdeq("paper", "collect", tmp_path / "nowhere")
    assert code == 1
    assert "there is no folder" in said
