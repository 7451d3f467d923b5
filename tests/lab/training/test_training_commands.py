"""The commands around training: evaluate, compare, similarity, report, help."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import training_runs
import typer
from training_runs import RICH, TINY

from gdeq import __version__
from gdeq.gradients import GDEQ, JFB, Implicit, Measured
from gdeq.lab import report
from gdeq.lab.cli import app
from gdeq.lab.tasks import registry
from gdeq.lab.tasks.images import ImageConfig, Images
from gdeq.lab.training import checkpoint, precision, runs, similarity, timing
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import meanings

COMMANDS = ("train", "evaluate", "compare", "similarity", "bench", "report", "data")


@pytest.fixture(autouse=True)
def small(few_images):
    pass


@pytest.fixture
def run(tmp_path, reference):
    """The reference, with room for files of its own."""
    left = shutil.ignore_patterns("checkpoints", "lock")
    return shutil.copytree(reference, tmp_path / "run", ignore=left)


def remade(run, **changes):
    """As if the run had been trained with other settings: its weights carry them."""
    for place in (run / "weights.safetensors", run / "snapshots/epoch-001.safetensors"):
        tensors, about = checkpoint.read_tensors(place)
        config = configs.replace(configs.from_dict(about["config"]), **changes)
        about["config"] = configs.to_dict(config)
        place.write_bytes(checkpoint.pack(tensors, about))


@pytest.mark.parametrize("settings", [RICH, [*TINY, "epochs=1", "pretrain_steps=100"]])
def test_evaluate_finds_what_the_summary_says(gdeq, tmp_path, settings):
    """Also where it never left pre-training: what was evaluated then is evaluated now."""
    run = tmp_path / "run"
    summary = runs.train(run, configs.load("digits", settings))
    found = runs.evaluate(run)
    last = training_runs.metrics(run)[-1]
    assert found["accuracy"] == summary["test_accuracy"] == last["test_accuracy"]
    assert found["loss"] == last["test_loss"]
    assert found["samples"] == training_runs.TEST_IMAGES
    assert (found["solver_steps"] <= 3) == (settings is RICH)  # else the layers of pre-training
    said = gdeq.ok("evaluate", run)
    assert f"test accuracy {summary['test_accuracy']:.2f} %" in said
    assert f"{training_runs.TEST_IMAGES} images" in said
    if settings is not RICH:
        said = gdeq.refused("evaluate", run, "--steps", 4)
        assert "ended unrolled, without a solver: leave --steps out" in said


def test_evaluate_with_other_numbers_of_steps(gdeq, tmp_path):
    run = tmp_path / "run"
    runs.train(run, configs.load("digits", [*TINY, "epochs=1", "solver.tol=0"]))
    found = {n: runs.evaluate(run, steps=n) for n in (1, 6)}
    assert found[6]["residual"] < 0.5 * found[1]["residual"]
    assert (found[1]["solver_steps"], found[6]["solver_steps"]) == (1, 6)
    said = gdeq.ok("evaluate", run, "--steps", 1, "--steps", 6)
    for line, (n, one) in zip(said.splitlines(), found.items(), strict=True):
        assert f"with {n} solver step{'s' * (n > 1)}: test accuracy {one['accuracy']:.2f} %" in line
        assert line.endswith(f"residual {one['residual']:.1e}")


def test_a_finished_run_resumed_is_as_it_was(gdeq, tmp_path, reference):
    run = shutil.copytree(reference, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}
    for setting in ([], ["optimizer.lr=0.5"], ["epochs=1"]):
        said = gdeq.ok("train", "--resume", run, *setting)
        assert f"{run} is already finished: 2 epochs, test accuracy" in said
        assert f"test accuracy {summary['test_accuracy']:.2f} %; nothing is changed" in said
        assert f"`gdeq train --resume {run} epochs=4`" in said
        now = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}
        assert now == before
    training_runs.assert_same_run(run, reference)
    said = gdeq.ok("train", "--resume", run, "epochs=3")
    assert "already finished" not in said
    assert training_runs.metrics(run)[-1]["epoch"] == 3
    # Without its weights it is not finished, whatever its summary says.
    (run / "weights.safetensors").unlink()
    said = gdeq.ok("train", "--resume", run)
    assert "already finished" not in said
    assert (run / "weights.safetensors").is_file()


def records_of(run):
    return [json.loads(x) for x in (run / "similarity.jsonl").read_text().splitlines()]


METHODS = {
    *("Implicit", "JFB", "GDEQ", "GDEQ tolerance 0.1", "NPG"),
    *(f"GDEQ refine {n}" for n in (1, 2, 3, 4)),
}


def test_similarity(gdeq, run):
    remade(run, solver__max_iter=12)
    said = gdeq.ok("similarity", run, "--batches", "2", "--batch-size", "4")
    records = records_of(run)
    assert {r["method"] for r in records} == METHODS
    assert len(records) == 2 * len(METHODS)
    assert {(r["epoch"], r["batch"]) for r in records} == {(1, 0), (1, 1)}
    assert {r["solver"] for r in records} == {"Broyden"}
    assert all(-1 <= r["cosine"] <= 1 + 1e-12 for r in records)
    assert all(r["exact_residual"] < 1e-4 for r in records)
    assert all(r["exact_forward_residual"] < 1e-5 < r["forward_residual"] < 1e-3 for r in records)
    by = {m: [r for r in records if r["method"] == m] for m in METHODS}
    for rough, fine in (("GDEQ", "GDEQ refine 2"), ("GDEQ refine 1", "GDEQ refine 4")):
        for one, other in zip(by[rough], by[fine], strict=True):
            assert other["relative_error"] < one["relative_error"]
    assert all(r["cosine"] > 0.99 for r in by["GDEQ refine 4"])
    assert all(r["cosine"] > 0.998 for r in by["Implicit"])
    assert "Cosine, median" in said
    assert re.search(r"\nGDEQ refine 4 +1 +4 +2 +0\.99\d\d +0\.99\d\d ", said)
    assert all(0.01 < r["spectral_radius"] <= r["spectral_radius_max"] < 1 for r in records)
    assert len({r["spectral_radius"] for r in records}) == 2  # of each mini-batch
    assert "Spectral radius, most" in said
    assert "warning" not in said
    said = gdeq.refused("similarity", run, "--epoch", "7")
    assert "no snapshot of epoch 7; there are [1]" in said


def test_similarity_is_with_the_equilibrium_and_not_with_where_the_solver_stops(gdeq, run):
    """Three steps are too few: an exact backward pass cannot mend that, and it shows."""
    gdeq.ok("similarity", run, "--batches", "1", "--batch-size", "4")
    implicit = next(r for r in records_of(run) if r["method"] == "Implicit")
    assert implicit["adjoint_residual"] < 1e-5
    assert implicit["forward_residual"] > 1e-3
    assert implicit["exact_forward_residual"] < 1e-5
    assert implicit["relative_error"] > 1e-3


def test_similarity_without_an_exact_gradient_says_so_and_keeps_what_there_was(gdeq, run):
    small = ["--batches", "1", "--batch-size", "4"]
    absurd = [*small, "--exact-tol", "1e-12"]
    said = gdeq.refused("similarity", run, *absurd)
    assert "was found to 1.0e-12 (--exact-tol): 4 of 4 after epoch 1." in said
    assert "no sample is left: raise --exact-tol" in said
    assert "Cosine, median" not in said
    for record in records_of(run):
        assert (record["solved"], record["cosine"], record["exact_residual"]) == (0, None, None)
    said = gdeq.ok("similarity", run, *small)
    good = records_of(run)
    said = gdeq.refused("similarity", run, *absurd)
    assert "its earlier records in similarity.jsonl are kept" in said
    assert records_of(run) == good
    code, said = gdeq("similarity", run, *small, "--exact-tol", "0.5")
    assert (code, "is a rough estimate" in said) == (0, True), said


def test_a_partial_loss_is_told(gdeq, run, monkeypatch):
    real = similarity.Problem.truth

    def losing(problem, tol):
        found = real(problem, tol)
        found.taken[0] = False
        return found

    monkeypatch.setattr(similarity.Problem, "truth", losing)
    said = gdeq.ok("similarity", run, "--batches", "1", "--batch-size", "4")
    assert "(--exact-tol): 1 of 4 after epoch 1.  The others are easier" in said
    page = report.write([run], run / "page").read_text()
    assert "and the others are easier: 1 of 4 after epoch 1." in page


def opened(run, count):
    """The run after its first epoch, and images and labels of its data set."""
    trainer = runs.trained(run, epoch=1)
    x, y = (tensor[:count] for tensor in trainer.task.data.train)
    return trainer, x.float() / 255, y


def compared(trainer, own, *batch):
    problem = similarity.Problem(trainer, batch)
    return list(similarity.compare(problem, trainer.config.solver.build(), 1e-4, own))


def test_samples_without_an_equilibrium_are_in_neither_gradient(run, monkeypatch):
    """As if the mini-batch were of the others alone."""
    remade(run, solver__max_iter=12)
    trainer, images, labels = opened(run, 6)
    own = {"GDEQ refine 1": GDEQ(refine=1), "JFB": Measured(JFB())}
    lost = torch.tensor([False, True, False, False, True, False])
    real = Implicit.cotangent

    def some_lost(self, v, vjp, solution):
        found = real(self, v, vjp, solution)
        tight = solution.residual.max() <= 2 * similarity.EQUILIBRIUM_TOL
        if tight and len(v) == 6:
            return replace(found, w=torch.where(lost.unsqueeze(1), 0.0, found.w))
        return found

    monkeypatch.setattr(Implicit, "cotangent", some_lost)
    all_six = compared(trainer, own, images, labels)
    others = compared(trainer, own, images[~lost], labels[~lost])
    for found, expected in zip(all_six, others, strict=True):
        assert (found["samples"], found["solved"]) == (6, 4)
        assert (expected["samples"], expected["solved"]) == (4, 4)
        for key in ("cosine", "relative_error"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3), key
        radius = expected["spectral_radius_max"]  # power steps from other random vectors
        assert found["spectral_radius_max"] == pytest.approx(radius, rel=0.02)
        assert found["exact_residual"] <= 1e-4


def test_an_image_that_is_not_finite_is_left_out_of_the_others_gradients(run):
    trainer, images, labels = opened(run, 4)
    own = {"GDEQ refine 1": GDEQ(refine=1)}
    (expected,) = compared(trainer, own, images[1:], labels[1:])
    images[0] = math.nan
    (found,) = compared(trainer, own, images, labels)
    assert (found["samples"], found["solved"]) == (4, expected["solved"])
    assert found["cosine"] == pytest.approx(expected["cosine"], rel=1e-4)
    images[:] = math.nan
    with pytest.raises(RuntimeError, match="for no image of a mini-batch"):
        compared(trainer, own, images, labels)


@pytest.mark.parametrize("trained_in", ["tf32", "bf16"])
def test_similarity_is_in_float32(run, monkeypatch, trained_in):
    remade(run, precision=trained_in)

    def arithmetic():
        kept = torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cpu")
        return torch.get_float32_matmul_precision(), *kept

    inside, real = set(), Images.losses

    def noting(*args):
        inside.add(arithmetic())
        return real(*args)

    monkeypatch.setattr(Images, "losses", noting)
    with precision.arithmetic("bf16", "cpu"):
        for _ in runs.measure_similarity(run, batches=2, batch_size=4):
            assert arithmetic() == ("high", True, True)  # ours again between the records
    assert inside == {("highest", False, False)}


@pytest.mark.parametrize("solver", ["anderson", "picard"])
def test_similarity_of_a_run_without_an_inverse(gdeq, run, solver):
    remade(run, solver__name=solver, gradient__name="jfb")
    said = gdeq.ok("similarity", run, "--batches", "1", "--batch-size", "4")
    assert f"the run's solver, {solver.title()}, leaves no inverse to reuse: for GDEQ it" in said
    assert "for GDEQ it is solved by Broyden(max_iter=3, tol=0.001" in said
    assert "epoch 1: mini-batch 1 of 1 is solved, " in said
    assert "saved in " in said
    assert "similarity.jsonl" in said
    used = {r["method"]: r["solver"] for r in records_of(run)}
    assert used.keys() == METHODS
    for method, name in used.items():
        assert name == ("Broyden" if method == "GDEQ" else solver.title())  # refined, from JFB


def test_similarity_keeps_the_other_epochs(gdeq, run, monkeypatch):
    first = run / "snapshots/epoch-001.safetensors"
    (run / "snapshots/epoch-002.safetensors").write_bytes(first.read_bytes())
    few = ["--batches", "1", "--batch-size", "4"]
    said = gdeq.ok("similarity", run, *few)
    assert "replaced" not in said
    both = records_of(run)
    assert [r["epoch"] for r in both] == [1] * len(METHODS) + [2] * len(METHODS)
    said = gdeq.ok("similarity", run, "--epoch", "1", "--batches", "2", "--batch-size", "4")
    assert "epoch 1: its earlier records in similarity.jsonl are replaced" in said
    assert "epoch 2" not in said
    now = records_of(run)
    assert [r["epoch"] for r in now] == [1] * 2 * len(METHODS) + [2] * len(METHODS)
    assert now[2 * len(METHODS) :] == both[len(METHODS) :]
    # Stopped within the second epoch: the first is new, the second as it was.
    real = runs.similarity

    def struck(model, source, solver, batches, epoch, *rest):
        for record in real(model, source, solver, batches, epoch, *rest):
            yield record
            if epoch == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(runs, "similarity", struck)
    with pytest.raises(KeyboardInterrupt):
        list(runs.measure_similarity(run, batches=1, batch_size=4))
    assert [r["epoch"] for r in records_of(run)] == [r["epoch"] for r in both]
    assert records_of(run)[len(METHODS) :] == both[len(METHODS) :]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("--exact-tol", tol, f"must be above 0, got {tol}") for tol in ("0", "-1", "nan", "inf")),
        ("--batch-size", "13", "13 is larger than the data set (12 samples): lower it"),
    ],
)
def test_options_of_similarity_that_do_not_fit(gdeq, run, option, value, message):
    assert f"error: {option} {message}" in gdeq.refused("similarity", run, option, value)


def test_compare(gdeq, tmp_path):
    out = tmp_path / "out"
    settings = [*TINY, "epochs=1", "solver.max_iter=2", "gradient.max_iter=3"]
    said = gdeq.ok("compare", *settings, "--out", out)
    expected = {
        f"{g}{p}-seed0" for g in ("implicit", "jfb", "npg", "gdeq") for p in ("", "-pretrained")
    }
    made = {p.parent.name for p in out.glob("*/summary.json")}
    assert made == expected
    for name in made:
        summary = json.loads((out / name / "summary.json").read_text())
        assert summary["gradient"] == name.split("-")[0]
        assert summary["pretrain"] is ("pretrained" in name)
        config = configs.load(str(out / name / "config.yaml"))
        assert config.pretrain_steps == int(summary["pretrain"])  # a fifth of 3, at least 1
        same = configs.replace(config, gradient__name="gdeq", pretrain_steps=0)
        assert same == configs.load("digits", settings, runs.GRADIENTS)
    assert all(word in said for word in ("Implicit", "JFB", "NPG", "GDEQ", "report: "))
    # The four methods were timed in turns, with what a step of each costs.
    timed = {p.parent.name: json.loads(p.read_text()) for p in out.glob("*/timing.json")}
    assert set(timed) == {f"{name}-seed0" for name in runs.GRADIENTS}
    assert len({told["session"] for told in timed.values()}) == 1
    assert all(len(told["ms"]) >= timing.LEAST for told in timed.values())
    assert [timed[f"{name}-seed0"]["vjps"] for name in ("jfb", "npg", "gdeq")] == [0, 4, 0]
    assert 0 < timed["implicit-seed0"]["vjps"] <= 4
    assert all(2 < told["evals"] <= 4 for told in timed.values())
    assert "timed in turns" in said
    pages = list(out.glob("*.html"))
    assert len(pages) == 1
    assert str(pages[0]) in said  # on one line, however long
    assert list(out.rglob("*.csv"))
    # The second call keeps what is finished and goes on with what is not.
    (out / "jfb-seed0" / "summary.json").unlink()
    kept = {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")}
    said = gdeq.ok("compare", *settings, "--out", out)
    assert said.count("finished before, kept") == 7
    assert (out / "jfb-seed0" / "summary.json").exists()
    assert all(p.stat().st_mtime_ns == before for p, before in kept.items())
    said = gdeq.refused("compare", *settings, "seed=0", "optimizer.lr=0.5", "--out", out)
    assert "was made with other settings; choose another --out" in said
    assert "(optimizer.lr: 0.001 -> 0.5)" in said
    said = gdeq.refused("compare", *settings, "epochs=2", "--no-pretraining", "--out", out)
    assert "(epochs: 1 -> 2)" in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, f"gdeq {__version__}\n"),
        (["data", "digits"], 0, "digits comes with scikit-learn"),
        (["data", "cifar11"], 1, "did you mean 'cifar10'?"),
        (["report", "nothing-here"], 1, "error: "),
        (["evaluate", ".", "--steps", "9" * 20], 2, "--steps"),
        *((["--help"], 0, name) for name in COMMANDS),
    ],
)
def test_short_answers(gdeq, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    found, said = gdeq(*arguments)
    assert (found, words in said) == (code, True), said


def test_help_teaches(gdeq, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("evaluate", "similarity"):
        told = "auto, cpu, cuda or cuda:1 (default: that of the run's config.yaml)"
        assert told in gdeq.ok(name, "--help")
    said = gdeq.ok("train", "--help")
    for word in ("--resume", "--dry-run", "torchrun", *registry.presets()):
        assert word in said
    for key, (default, meaning) in meanings(ImageConfig).items():
        assert f"{key}={default}" in said
        assert meaning, f"no comment beside {key}"
        assert meaning in " ".join(said.split())


@pytest.mark.parametrize(
    "words", [(name,) for name in COMMANDS] + [("paper", "run"), ("paper", "collect")]
)
def test_every_option_says_what_it_is_for(gdeq, words):
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    silent = [p.name for p in command.params if not p.help]
    assert silent == []
    assert command.help
    assert len(gdeq.ok(*words, "--help").split()) > 10


def test_help_does_not_wait_for_what_the_commands_need():
    heavy = ["torch._dynamo", "matplotlib", "tensorboard", "sklearn", "gdeq.models"]
    heavy += [f"gdeq.lab.{part}" for part in ("training.loop", "bench", "paper", "report")]
    text = f"import sys, gdeq.lab.cli; sys.exit(' '.join(n for n in {heavy} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""
