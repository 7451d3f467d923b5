"""Tables and figures from whatever part of the runs exists."""

import csv
import json
import shutil
import statistics

import pytest
import report_runs

from gdeq.lab.paper import budget, collecting, plan, reading, similarity, table2


def make(folder, name, accuracy=None, seconds=100.0, **changes):
    """A run of the plan, as if it had been trained."""
    planned = next(run for run in plan.make_plan() if run.name == name)
    gradient = next((s[9:] for s in planned.settings if s.startswith("gradient=")), "gdeq")
    steps = 50 if planned.pretrain else 0
    path = report_runs.make_run(
        folder / name, gradient, seed=planned.seed, pretrain_steps=steps, **changes
    )
    if accuracy is not None:
        summary = json.loads((path / "summary.json").read_text())
        summary |= {"test_accuracy": accuracy, "train_seconds": seconds}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def compared(path, epoch, cosine=0.9, method="GDEQ", batches=3, **changes):
    record = {
        **{"epoch": epoch, "method": method, "vjps": 0, "cosine": cosine},
        **{"relative_error": 0.4, "adjoint_residual": 0.5, "forward_residual": 1e-3},
        **{"exact_residual": 2e-6, "exact_forward_residual": 1e-6},
        **{"spectral_radius": 0.7, "spectral_radius_max": 0.9, **changes},
    }
    with (path / "similarity.jsonl").open("a") as file:
        for batch in range(batches):
            file.write(json.dumps({**record, "batch": batch}) + "\n")


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def row_of(text, label):
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("| ").split("|")]


def some_of_it(folder):
    """Some of everything, and much of it missing."""
    for seed, accuracy in enumerate((93.0, 93.4, 93.5)):
        make(folder, f"gdeq-seed{seed}", accuracy, 100.0 + seed)
    make(folder, "implicit-seed0", 92.5, 220.0)
    make(folder, "gdeq-pretrained-seed0", 94.0, 90.0)
    make(folder, "jfb-seed0", until=3)
    compared(folder / "gdeq-seed0", 1, 0.95)
    compared(folder / "gdeq-seed0", 12, 0.85, exact_residual=3e-3)
    path = make(folder, "steps04-gdeq", 80.0, solver__max_iter=4)
    compared(path, 12, 0.75)
    compared(path, 12, 0.99, method="GDEQ refine 1")
    make(folder, "steps18-gdeq", 85.0, solver__max_iter=18)
    return folder


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = some_of_it(tmp_path_factory.mktemp("collected"))
    files = collecting.collect(folder, folder / "out")
    assert all(file.is_file() for file in files)
    return folder


@pytest.fixture
def partial(tmp_path):
    return some_of_it(tmp_path)


def test_table_2(collected):
    out = collected / "out"
    found = rows_of(out / "table2.csv")
    head = "gradient,pretrain,seed,epochs,test_accuracy,ms_per_step,train_seconds"
    assert (out / "table2.csv").read_text().splitlines()[0] == head
    assert [(r["gradient"], r["pretrain"], r["seed"]) for r in found] == [
        ("implicit", "false", "0"),
        ("gdeq", "false", "0"),
        ("gdeq", "true", "0"),
        ("gdeq", "false", "1"),
        ("gdeq", "false", "2"),
    ]  # the unfinished one is no row
    text = (out / "table2.md").read_text()
    own = row_of(text, "GDEQ")
    spread = statistics.stdev((93.0, 93.4, 93.5))
    assert own[1] == f"93.30 ± {spread:.2f} (3 seeds)"
    assert own[2] == "94.00 (1 of 3 seeds)"
    assert own[4:6] == ["101", "90"]
    assert own[6] == f"{220 / 101:.2f}×"
    assert own[7] == "–"  # no pre-trained Implicit yet
    assert own[8:] == ["92.01 / 93.08", "2.16×"]
    assert row_of(text, "JFB")[1] == "unfinished: epoch 3 of 12"
    assert row_of(text, "NPG")[1:3] == [reading.NOT_YET] * 2
    many = sum(run.group == "table2" for run in plan.make_plan())
    assert f"table2     5 of {many} runs finished" in collecting.progress(collected)


def test_the_speed_up_is_of_the_whole_training(partial):
    """However many steps a training has: a method may need fewer."""
    file = partial / "implicit-seed0" / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "steps": 2 * summary["steps"]}))
    row = row_of(table2.text(reading.read_all(partial)), "GDEQ")
    assert row[6] == f"{220 / 101:.2f}×"


def test_the_speed_up_is_of_one_code_where_there_is_one(partial):
    def made_with(name, revision):
        file = partial / name / "environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "revision": revision}))

    def speed_ups():
        text = table2.text(reading.read_all(partial))
        return [row_of(text, label)[6] for label in ("Implicit", "GDEQ", "Implicit, dropout 0.2")]

    make(partial, "implicit-dropout-seed0", 92.0, 150.0, optimizer__lr=0.01)
    made_with("implicit-dropout-seed0", "new")
    made_with("gdeq-seed2", "new")  # 102 s; the others have Implicit's code, 100.5 in the mean
    slow, fast = (220 + 150) / 2, (100 + 101 + 102) / 3
    assert speed_ups() == ["1.00×", f"{slow / fast:.2f}×", "1.00×"]
    for seed in (0, 1):
        made_with(f"gdeq-seed{seed}", "older")
    assert speed_ups()[1] == f"{150 / 102:.2f}×"
    made_with("gdeq-seed2", None)
    assert speed_ups()[1] == f"~ {220 / fast:.2f}×"
    made_with("implicit-seed0", None)  # what is not recorded is not the same
    assert speed_ups()[1] == f"~ {220 / fast:.2f}×"


def test_a_seed_that_diverged_is_seen_beside_the_mean_of_the_others(partial):
    before = row_of(table2.text(reading.read_all(partial)), "GDEQ")[1]
    assert before.endswith("(3 seeds)")
    (partial / "gdeq-seed2" / "summary.json").unlink()
    (partial / "gdeq-seed2" / "failed.json").write_text(json.dumps({"reason": "NaN"}))
    after = row_of(table2.text(reading.read_all(partial)), "GDEQ")[1]
    assert after.endswith("(2 of 3 seeds, 1 diverged)")


def test_what_is_not_one_recipe_is_named(partial):
    assert "Not the same" not in table2.text(reading.read_all(partial))
    make(partial, "npg-seed0", 91.0, optimizer__lr=0.5)
    text = table2.text(reading.read_all(partial))
    assert "Not the same in all rows: optimizer.lr = 0.001 (Implicit / GDEQ); 0.5 (NPG)." in text


def test_convergence(collected):
    out = collected / "out"
    assert (out / "convergence.png").read_bytes().startswith(b"\x89PNG")
    runs = {r["run"] for r in rows_of(out / "convergence.csv")}
    assert runs == {"gdeq-seed0", "gdeq-seed1", "gdeq-seed2", "implicit-seed0", "jfb-seed0"}
    moments = rows_of(out / "convergence_moments.csv")
    one = next(m for m in moments if m["method"] == "GDEQ" and m["level"] == "92")
    lines = [
        json.loads(x) for x in (collected / "gdeq-seed0/metrics.jsonl").read_text().splitlines()
    ]
    epochs = [r for r in lines if r["kind"] == "epoch"]
    first = next(e for e in epochs if e["test_accuracy"] >= 92)
    assert (float(one["seconds"]), int(one["epoch"])) == (first["seconds"], first["epoch"])
    text = (out / "convergence.md").read_text()
    assert "50 epochs" not in text  # a longer schedule
    unfinished = "not reached (unfinished: epoch 3 of 12)"
    assert row_of(text, "JFB")[2:] == [unfinished] * 2
    assert row_of(text, "NPG")[1:] == [reading.NOT_YET] * 3
    assert row_of(text, "GDEQ")[2].endswith(" s")


def test_a_run_tested_every_tenth_epoch_has_no_moments(partial):
    make(partial, "implicit-seed1", 93.9, 210.0, test_every=10)
    shown = {run.seed for label, run in table2.without_pretraining(reading.read_all(partial))
             if label == "Implicit"}  # fmt: skip
    assert shown == {0}
    drawn = [run.seed for label, run in table2.drawn(reading.read_all(partial))
             if label == "Implicit"]  # fmt: skip
    assert drawn == [0]
    text = table2.moments_text(reading.read_all(partial))
    assert "≤" not in text  # the seed that is tested often passed it as well
    for name in ("npg-seed0", "jfb-seed0"):
        shutil.rmtree(partial / name, ignore_errors=True)
    make(partial, "jfb-seed0", 93.9, 210.0, test_every=10)
    told = row_of(table2.moments_text(reading.read_all(partial)), "JFB")
    assert all(text.endswith("(1 of 1 run, tested every 10 epochs)") for text in told[1:])
    assert "JFB" in {label for label, _ in table2.drawn(reading.read_all(partial))}
    (late,) = (one.run for one in reading.read_all(partial) if one.planned.name == "jfb-seed0")
    line = ["JFB", 1, 92, None, None]  # a seed that is tested often, and never passed it
    assert table2._moment(92, [line], [], [late]).endswith("(1 of 2 runs, tested every 10 epochs)")
    assert table2._moment(99.99, [line], [], [late]) == "not reached"


def test_what_is_exact_is_said_when_it_is_measured():
    """By --exact-tol; older records do not say it."""
    record = {"exact_residual": 5e-4, "exact_forward_residual": 1e-6}
    assert not similarity.is_exact(record)
    assert similarity.is_exact({**record, "exact_tol": 5e-4})
    assert not similarity.is_exact({**record, "exact_tol": 4e-4})
    assert similarity.is_exact({**record, "exact_residual": 1e-4})


def test_similarity_marks_what_is_not_exact(collected):
    out = collected / "out"
    found = rows_of(out / "similarity.csv")
    assert {(r["epoch"], r["exact"]) for r in found} == {("1", "yes"), ("12", "no")}
    assert {r["spectral_radius"] for r in found} == {"0.7"}
    text = (out / "similarity.md").read_text()
    assert "at most 3.0e-03, at an equilibrium solved to 1.0e-06.  **Not exact in 3 mini" in text
    assert "at most 2.0e-06, at an equilibrium solved to 1.0e-06.  Spectral radius" in text
    assert "trained with GDEQ, 50 epochs\n\nEpochs 1, 10, 20, 50: not yet run." in text
    assert row_of(text, "Method")[1] == "VJPs, median"
    assert "Implicit is here an exact backward solve (GMRES)" in text
    assert "Epochs 10: not yet run." in text  # of gdeq-seed0, which has 12
    # Only mini-batches that were compared with something exact are drawn.
    drawn = rows_of(out / "similarity_cosine_gdeq-seed0.csv")
    assert {(r["epoch"], r["cosine"]) for r in drawn} == {("1", "0.95")}
    for name in ("cosine", "error"):
        png = out / f"similarity_{name}_gdeq-seed0.png"
        assert png.read_bytes().startswith(b"\x89PNG")


def test_samples_without_an_exact_gradient_are_counted(tmp_path):
    path = make(tmp_path, "steps04-gdeq", 80.0, solver__max_iter=4)
    here = {"cosine_here": 0.97, "relative_error_here": 0.2, "samples": 64, "solved_here": 64}
    here["solved_share_of_loss"] = 0.4
    compared(path, 12, 0.75, batches=2, solved=48, **here)
    nothing = dict.fromkeys(("relative_error", "exact_residual", "exact_forward_residual"))
    compared(path, 12, None, batches=1, solved=0, **nothing, **here)  # in no median but "here"
    lines = [
        dict(zip(budget.STEPS_HEAD, line, strict=True))
        for line in budget.steps_lines(reading.read_all(tmp_path))
    ]
    (found,) = (line for line in lines if line["state"] == "finished")
    assert found["solved"] == 0.5
    assert (found["cosine"], found["relative_error"]) == (0.75, 0.4)
    assert (found["cosine_here"], found["relative_error_here"]) == (0.97, 0.2)
    text = budget.steps_text(reading.read_all(tmp_path))
    assert row_of_all(text, "GDEQ").endswith("| 50% | 0.700 | finished |")
    path = make(tmp_path, "gdeq-seed0", 90.0)
    compared(path, 12, 0.75, batches=2, solved=48, **here)
    said = similarity.similarity_text(reading.read_all(tmp_path))
    assert "25 % of the samples have no exact gradient" in said


def row_of_all(text, label):
    return next(line for line in text.splitlines() if line.startswith(f"| {label} |"))


def test_forward_steps(collected):
    out = collected / "out"
    made = reading.read_all(collected)
    found = rows_of(out / "steps.csv")
    assert len(found) == 30 + 10
    by = {(r["method"], r["forward_steps"]): r for r in found if r["forward_tolerance"] == "0.001"}
    few = by["GDEQ", "4"]
    assert (few["state"], few["test_accuracy"], few["cosine"]) == ("finished", "80.0", "0.75")
    assert few["spectral_radius"] == "0.7"
    assert by["GDEQ", "18"]["cosine"] == ""  # its gradients were not compared
    assert sum(r["state"] == reading.NOT_YET for r in found) == 38
    figures = {f.name: f for f in budget.steps_figures(made)}
    (line,) = figures["steps_accuracy"].marks
    assert (line.label, line.points) == ("GDEQ", [(4.0, 80.0), (18.0, 85.0)])
    figures = {f.name: f for f in budget.gradients_figures(made)}
    found = {line.label: line.points for line in figures["steps_cosine"].marks}
    assert found == {"GDEQ": [(4.0, 0.75)], "GDEQ refine 1": [(4.0, 0.99)]}
    told = (out / "steps.md").read_text().partition("# All gradients")[2]
    assert row_of(told, "method") == ["method", "4 steps, n = 3"]
    assert row_of(told, "GDEQ") == ["GDEQ", "0.750 (0.4)"]
    assert {r["batches"] for r in rows_of(out / "steps_gradients.csv")} == {"3"}
    assert (out / "steps_accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert row_of((out / "steps.md").read_text(), "NPG")[-1] == reading.NOT_YET


def test_a_run_that_diverged_is_told(partial):
    path = make(partial, "steps06-npg", until=2, solver__max_iter=6)
    (path / "failed.json").write_text(json.dumps({"reason": "NaN", "steps": 44}))
    line = next(
        line
        for line in budget.steps_lines(reading.read_all(partial))
        if line[:2] == ["NPG", 6]
    )  # fmt: skip
    assert "failed: the loss became NaN after step 44" in line


def test_the_page_comes_too(collected):
    page = (collected / "out" / "report" / "report.html").read_text()
    assert "gdeq-pretrained-seed0" in page
    assert "steps04-gdeq" not in page
    assert not (collected / "table2.csv").exists()  # it went where --out said
    assert not (collected / "out" / "report-record").exists()


def test_the_record_has_a_page_of_its_own(tmp_path):
    make(tmp_path, "npg-seed0", 91.0, epochs=2)
    make(tmp_path, "record-adaptive", 95.0, epochs=4)
    collecting.collect(tmp_path)
    pages = [(tmp_path / name / "runs.csv").read_text() for name in ("report", "report-record")]
    assert ["npg-seed0" in page for page in pages] == [True, False]
    assert ["record-adaptive" in page for page in pages] == [False, True]
    assert row_of((tmp_path / "record.md").read_text(), "record-adaptive")[3] == "95.00"


def test_one_run_is_enough(gdeq, tmp_path):
    make(tmp_path, "npg-seed0", 91.0, epochs=2)
    code, said = gdeq("paper", "collect", tmp_path)
    assert code == 0, said
    assert row_of(said, "NPG")[1] == "91.00 (1 seed)"
    assert row_of(said, "GDEQ")[1:3] == [reading.NOT_YET] * 2
    assert len(rows_of(tmp_path / "table2.csv")) == 1
    assert len(rows_of(tmp_path / "steps.csv")) == 40
    make(tmp_path, "gdeq-seed0", 92.0, epochs=2)
    assert gdeq("paper", "collect", tmp_path)[0] == 0
    assert len(rows_of(tmp_path / "table2.csv")) == 2  # what was there is replaced


def test_record_and_sprint(partial):
    text = table2.records_text(reading.read_all(partial))
    assert row_of(text, "record-adaptive")[1] == reading.NOT_YET
    make(partial, "record-adaptive", 95.6, 720.0)
    row = row_of(table2.records_text(reading.read_all(partial)), "record-adaptive")
    assert row[1:5] == ["finished", "12", "95.60", "12.0"]
    assert row[5].endswith(" s")


def test_a_folder_without_runs(gdeq, tmp_path):
    code, said = gdeq("paper", "collect", tmp_path)
    assert code == 1
    assert "holds none of the paper's runs: make them with `gdeq paper run --out" in said
