"""Tables and figures from whatever part of the runs exists."""

import csv
import json
import statistics

import pytest
import report_runs

from gdeq.lab.paper import collecting, plan


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
        **{"exact_tol": 1e-4, "exact_residual": 2e-6, "exact_forward_residual": 1e-6},
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


def text_of(folder):
    return collecting.table2_text(collecting.table2(collecting.read_all(folder)))


def some_of_it(folder):
    """Some of everything, and much of it missing."""
    for seed, accuracy in enumerate((93.0, 93.4, 93.5)):
        make(folder, f"gdeq-seed{seed}", accuracy, 100.0 + seed)
    make(folder, "implicit-seed0", 92.5, 220.0)
    make(folder, "gdeq-pretrained-seed0", 94.0, 90.0)
    make(folder, "jfb-seed0", until=3)
    compared(folder / "gdeq-seed0", 1, 0.95)
    compared(folder / "gdeq-seed0", 12, 0.85, exact_residual=3e-3)
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
        *(("gdeq", "false", seed) for seed in "012"),
        ("gdeq", "true", "0"),
    ]  # the unfinished one is no row
    text = (out / "table2.md").read_text()
    own = row_of(text, "GDEQ")
    spread = statistics.stdev((93.0, 93.4, 93.5))
    assert own[1] == f"93.30 ± {spread:.2f} (3 seeds)"
    assert own[2] == "94.00 (1 run of 3)"
    assert own[4:6] == ["101", "90"]
    assert own[6] == f"{220 / 101:.2f}×"
    assert own[7:] == ["92.01 / 93.08", "2.16×"]  # no pre-trained Implicit yet: no such column
    assert row_of(text, "JFB")[1] == "epoch 3 of 12"
    assert row_of(text, "NPG")[1:3] == [collecting.NOT_YET] * 2
    assert "Sprint" not in text  # it has a page of its own
    many = sum(run.group == "table2" for run in plan.make_plan())
    assert f"table2     5 of {many} runs finished" in collecting.progress(collected)


def test_the_speed_up_is_of_the_whole_training(partial):
    """However many steps a training has: a method may need fewer."""
    file = partial / "implicit-seed0" / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "steps": 2 * summary["steps"]}))
    row = row_of(text_of(partial), "GDEQ")
    assert row[6] == f"{220 / 101:.2f}×"


def test_the_speed_up_is_of_one_code_where_there_is_one(partial):
    def made_with(name, revision):
        file = partial / name / "environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "revision": revision}))

    def speed_ups():
        text = text_of(partial)
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


def test_runs_that_diverged_are_told(partial):
    assert row_of(text_of(partial), "GDEQ")[1].endswith("(3 seeds)")
    (partial / "gdeq-seed2" / "summary.json").unlink()
    (partial / "gdeq-seed2" / "failed.json").write_text(json.dumps({"reason": "NaN"}))
    (make(partial, "npg-seed0", until=2) / "failed.json").write_text(json.dumps({"steps": 44}))
    text = text_of(partial)
    assert row_of(text, "GDEQ")[1].endswith("(2 seeds of 3, 1 diverged)")
    assert row_of(text, "NPG")[1] == "failed: the loss became NaN after step 44"


def test_what_is_not_one_recipe_is_named(partial):
    assert "Not the same" not in text_of(partial)
    make(partial, "npg-seed0", 91.0, optimizer__lr=0.5)
    text = text_of(partial)
    assert "Not the same in all rows: optimizer.lr = 0.001 (Implicit / GDEQ); 0.5 (NPG)." in text


def test_a_run_tested_every_tenth_epoch_is_drawn_only_where_no_other_is(collected, partial):
    assert (collected / "out" / "convergence.png").read_bytes().startswith(b"\x89PNG")
    drawn = {"gdeq-seed0", "gdeq-seed1", "gdeq-seed2", "implicit-seed0", "jfb-seed0"}
    assert {r["run"] for r in rows_of(collected / "out" / "convergence.csv")} == drawn
    make(partial, "implicit-seed1", 93.9, 210.0, test_every=10)
    make(partial, "npg-seed0", 93.9, 210.0, test_every=10)
    lines = collecting.convergence(collecting.read_all(partial)).series
    assert {line.run.name for line in lines} == drawn | {"npg-seed0"}


def test_what_is_exact_is_said_when_it_is_measured():
    record = {"exact_tol": 5e-4, "exact_residual": 5e-4, "exact_forward_residual": 1e-6}
    assert collecting.is_exact(record)
    assert not collecting.is_exact({**record, "exact_tol": 4e-4})
    for key in record:
        assert not collecting.is_exact({**record, key: None})


def test_similarity_marks_what_is_not_exact(collected):
    out = collected / "out"
    found = rows_of(out / "similarity.csv")
    assert {(r["epoch"], r["exact"]) for r in found} == {("1", "yes"), ("12", "no")}
    assert {r["spectral_radius"] for r in found} == {"0.7"}
    # Only mini-batches that were compared with something exact are drawn.
    (box,) = collecting.similarity(collecting.read_all(collected))[0].series
    assert box.points == [(1, 0.95)] * 3
    for name in ("cosine", "error"):
        png = out / f"similarity_{name}_gdeq-seed0.png"
        assert png.read_bytes().startswith(b"\x89PNG")


def test_the_pages_come_too(collected, tmp_path):
    """The record has one of its own."""
    page = (collected / "out" / "report" / "report.html").read_text()
    assert "gdeq-pretrained-seed0" in page
    assert not (collected / "table2.csv").exists()  # it went where --out said
    assert not (collected / "out" / "report-record").exists()
    make(tmp_path, "npg-seed0", 91.0, epochs=2)
    make(tmp_path, "record-adaptive", 95.0, epochs=4)
    collecting.collect(tmp_path)
    pages = [(tmp_path / name / "runs.csv").read_text() for name in ("report", "report-record")]
    assert ["npg-seed0" in page for page in pages] == [True, False]
    assert ["record-adaptive" in page for page in pages] == [False, True]


def test_one_run_is_enough(gdeq, tmp_path):
    make(tmp_path, "npg-seed0", 91.0, epochs=2)
    said = gdeq.ok("paper", "collect", tmp_path)
    assert row_of(said, "NPG")[1] == "91.00 (1 run)"
    assert row_of(said, "GDEQ")[1:3] == [collecting.NOT_YET] * 2
    assert len(rows_of(tmp_path / "table2.csv")) == 1
    make(tmp_path, "gdeq-seed0", 92.0, epochs=2)
    assert gdeq("paper", "collect", tmp_path)[0] == 0
    assert len(rows_of(tmp_path / "table2.csv")) == 2  # what was there is replaced


def test_a_folder_without_runs(gdeq, tmp_path):
    said = gdeq.refused("paper", "collect", tmp_path)
    assert "holds none of the paper's runs: make them with `gdeq paper run --out" in said
