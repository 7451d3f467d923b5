"""From run folders to the rows of the paper's Table 2."""

import html
import json
import statistics

import pytest
from report_runs import config, make_run

from gdeq.lab import report
from gdeq.lab.report import figures, formats, methods, tables
from gdeq.lab.report.rows import levels_reached, make_rows, moments
from gdeq.lab.report.runs import read_run, read_runs


def rows_of(paths):
    return {row.label: row for row in make_rows(read_runs(paths))}


def final(path):
    return json.loads((path / "summary.json").read_text())["test_accuracy"]


def test_seeds_share_a_row_and_give_mean_and_spread(tmp_path):
    paths = [make_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    (row,) = rows_of(paths).values()
    values = [final(path) for path in paths]
    assert row.without.mean == pytest.approx(statistics.fmean(values))
    assert row.without.spread == pytest.approx(statistics.stdev(values))
    assert row.without.seeds == 3
    assert row.pretrained.mean is None
    assert formats.seeds(row.without) == "3 seeds"
    assert "±" in formats.accuracy(row.without)


def test_an_adaptive_run_has_a_row_and_a_name_of_its_own(tmp_path):
    off, on = ({"enabled": flag, "forward": 0.1} for flag in (False, True))
    paths = [
        make_run(tmp_path / "plain", adapt={**off, "forward": 0.2}),  # which it does not read
        make_run(tmp_path / "plain2", adapt=off, seed=1),
        make_run(tmp_path / "adaptive", adapt=on),
        make_run(tmp_path / "refined", gradient__refine=1, adapt=on, seed=1),
        make_run(tmp_path / "other", adapt={**on, "forward": 0.3}),
    ]
    found = rows_of(paths)
    assert found["GDEQ"].without.seeds == 2
    assert set(found) == {"GDEQ", "GDEQ adaptive", "GDEQ adaptive · adapt.forward=0.3"}
    assert found["GDEQ adaptive"].without.seeds == 2  # gradient.refine is not read
    assert "2 methods" in report.write(paths, tmp_path / "page").read_text()


def test_one_seed_has_no_spread(tmp_path):
    (row,) = rows_of([make_run(tmp_path / "a")]).values()
    assert row.without.spread is None
    assert "±" not in formats.accuracy(row.without)


def test_a_seed_that_ran_twice_is_one_seed(tmp_path):
    (row,) = rows_of([make_run(tmp_path / "a"), make_run(tmp_path / "b")]).values()
    assert formats.seeds(row.without) == "2 runs, 1 seed"
    text = report.table([tmp_path / "a", tmp_path / "b"])
    assert "(2 runs, 1 seed)" in text
    assert "deviation over runs, some of the same seed" in text
    assert "over seeds" not in text


def test_different_seeds_are_called_seeds(tmp_path):
    text = report.table([make_run(tmp_path / str(seed), seed=seed) for seed in range(3)])
    assert "(3 seeds)" in text
    assert "deviation over seeds" in text
    assert "(1 run)" in report.table([tmp_path / "0"])


def test_an_unfinished_run_in_a_row_is_marked_and_named(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "half", seed=1, until=3)]
    text = report.table(paths)
    assert "(1 run, 1†)" in text
    assert "† unfinished, the latest figure: half (epoch 3 of 12, not counted)" in text


def test_a_run_that_did_not_start_says_so(tmp_path):
    path = make_run(tmp_path / "a", epochs=1, until=1)
    (path / "metrics.jsonl").unlink()
    text = report.table([path])
    assert "† (not started)" in text
    assert "0/1" not in text
    assert "–†" not in text
    assert "epoch 0" not in text


def test_few_timed_steps_stand_beside_the_speed_up(tmp_path):
    few = [make_run(tmp_path / name, name, epochs=4) for name in ("implicit", "gdeq")]
    assert "2.16× (88 steps)" in report.table(few)
    assert "fewer than 100 were timed" in report.table(few)
    many = [make_run(tmp_path / f"{name}5", name, epochs=5) for name in ("implicit", "gdeq")]
    assert "steps" not in report.table(many)


def test_speedup_is_the_ratio_of_seconds_per_step(tmp_path):
    rows = rows_of(
        [
            make_run(tmp_path / "i", "implicit", seconds=0.3),
            make_run(tmp_path / "g", "gdeq", seconds=0.1),
        ]
    )
    assert rows["Implicit"].speedup == pytest.approx(1)
    assert rows["GDEQ"].speedup == pytest.approx(3)


def test_a_speedup_that_is_not_the_ratio_of_ms_per_step_says_why(tmp_path):
    """One slow step in a hundred: in the mean, not in the median."""
    paths = [make_run(tmp_path / name, name, seconds=0.1) for name in ("implicit", "gdeq")]
    summary = json.loads((paths[0] / "summary.json").read_text())
    summary["train_seconds"] *= 1.5
    (paths[0] / "summary.json").write_text(json.dumps(summary))
    rows = rows_of(paths)
    assert rows["Implicit"].ms_per_step == rows["GDEQ"].ms_per_step
    assert rows["GDEQ"].speedup == pytest.approx(1.5)
    page = report.write(paths, tmp_path / "out").read_text()
    for text in (report.table(paths), html.unescape(page)):
        assert "time per step, mean over the whole training, divided by the method's" in text
        assert "ms / step is the median" in text


def test_no_speedup_without_implicit(tmp_path):
    (row,) = rows_of([make_run(tmp_path / "g")]).values()
    assert row.speedup is None
    assert formats.speedup(row.speedup) == "–"


@pytest.mark.parametrize(
    "other",
    [{"device": "H200"}, {"batch_size": 32}, {"precision": "bf16"}, {"model__size": "large"}],
)
def test_no_speedup_against_another_workload(tmp_path, other):
    rows = rows_of([make_run(tmp_path / "i", "implicit"), make_run(tmp_path / "g", **other)])
    (gdeq,) = (row for label, row in rows.items() if label.startswith("GDEQ"))
    assert gdeq.speedup is None


def test_fewer_solver_steps_are_compared_with_the_only_implicit(tmp_path):
    rows = rows_of(
        [
            make_run(tmp_path / "i", "implicit", seconds=0.4),
            make_run(tmp_path / "j", "jfb"),
            make_run(tmp_path / "g", solver__max_iter=7, seconds=0.1),
        ]
    )
    assert set(rows) == {"Implicit", "JFB", "GDEQ · solver.max_iter=7"}
    assert rows["GDEQ · solver.max_iter=7"].speedup == pytest.approx(4)


def test_two_implicits_serve_their_own_recipe(tmp_path):
    paths = []
    for limit, slow in ((9, 0.2), (18, 0.4)):
        paths.append(
            make_run(tmp_path / f"i{limit}", "implicit", solver__max_iter=limit, seconds=slow)
        )
        paths.append(make_run(tmp_path / f"g{limit}", solver__max_iter=limit, seconds=0.1))
    rows = rows_of(paths)
    assert rows["GDEQ · solver.max_iter=9"].speedup == pytest.approx(2)
    assert rows["GDEQ · solver.max_iter=18"].speedup == pytest.approx(4)


def test_different_experiments_are_not_averaged(tmp_path):
    rows = rows_of(
        [
            make_run(tmp_path / "a"),
            make_run(tmp_path / "b", optimizer__lr=0.1),
            make_run(tmp_path / "c", gradient__refine=2),
            make_run(tmp_path / "d", gradient__tolerance=0.1),
            make_run(tmp_path / "e", "implicit"),
            make_run(tmp_path / "f", "implicit", gradient__tol=1e-2),
            make_run(tmp_path / "g", pretrain_steps=50),
            make_run(tmp_path / "h", pretrain_steps=70),
        ]
    )
    assert all(len(cell.runs) <= 1 for r in rows.values() for cell in (r.without, r.pretrained))


def test_settings_that_a_method_does_not_read_make_no_new_row(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", gradient__steps=9, log_every=3)]
    assert list(rows_of(paths)) == ["GDEQ"]


@pytest.mark.parametrize(
    ("gradient", "label", "vjps"),
    [
        ({"name": "implicit"}, "Implicit", "≤ 21"),
        (
            {"name": "implicit", "solver": "gmres", "max_iter": 9},
            "Implicit (gmres, 9 steps)",
            "≤ 10",
        ),
        ({"name": "jfb"}, "JFB", "0"),
        ({"name": "jfb", "refine": 1}, "JFB refine 1", "1"),
        ({"name": "npg"}, "NPG", "4"),
        ({"name": "npg", "steps": 3}, "NPG (3 steps, damping 0.5)", "2"),
        ({"name": "gdeq"}, "GDEQ", "0"),
        ({"name": "gdeq", "refine": 2}, "GDEQ refine 2", "2"),
        ({"name": "gdeq", "tolerance": 0.1}, "GDEQ tolerance 0.1", "≤ 12"),
        ({"name": "unrolled"}, "Unrolled", "–"),
        ({"name": "new"}, "new", "–"),
    ],
)
def test_methods_are_named_and_counted(gradient, label, vjps):
    settings = config()["gradient"] | gradient
    assert methods.label(settings) == methods.label(gradient) == label
    assert methods.vjps(settings) == vjps


def test_rows_stand_in_the_order_of_the_paper(tmp_path):
    names = ("gdeq", "npg", "unrolled", "jfb", "implicit")
    paths = [make_run(tmp_path / name, name) for name in names]
    paths += [make_run(tmp_path / f"r{n}", gradient__refine=n) for n in (10, 2)]
    order = ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ refine 2", "GDEQ refine 10", "Unrolled"]
    assert list(rows_of(paths)) == order


def test_unfinished_runs_count_only_alone(tmp_path):
    done = make_run(tmp_path / "a")
    half = make_run(tmp_path / "b", seed=1, until=3)
    (row,) = rows_of([done, half]).values()
    assert row.without.mean == final(done)
    (row,) = rows_of([half]).values()
    assert formats.accuracy(row.without).endswith("†")
    assert formats.seeds(row.without) == "epoch 3 of 12"
    assert row.seconds == pytest.approx(3 * 22 * 0.1)


def test_a_run_without_any_metrics_is_shown(tmp_path):
    path = make_run(tmp_path / "a", until=1)
    (path / "metrics.jsonl").unlink()
    (path / "environment.json").unlink()
    (row,) = rows_of([path]).values()
    assert formats.accuracy(row.without) == "†"
    assert "GDEQ" in report.table([path])


def test_a_torn_line_is_passed_over_and_a_damaged_one_is_told(tmp_path):
    torn = read_run(make_run(tmp_path / "a", until=5, torn=True))
    assert torn.problems == ()
    assert 0 < torn.epochs_done < 5
    path = make_run(tmp_path / "b")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0][:20], *lines[1:], lines[5]]))
    (path / "summary.json").write_text('{"test_acc')
    run = read_run(path)
    assert run.problems == (
        "1 damaged lines in metrics.jsonl were passed over",
        "summary.json is damaged and was passed over",
    )
    assert not run.finished
    assert [r["step"] for r in run.steps] == list(range(4, 12 * 22 + 1, 2))


def test_null_and_nan_are_left_out(tmp_path):
    path = make_run(tmp_path / "a")
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"test_accuracy": float("nan")}))
    (row,) = rows_of([path]).values()
    assert formats.accuracy(row.without) == "–"


def test_names_tell_runs_apart_and_no_folder_counts_twice(tmp_path):
    paths = [make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", seed=1)]
    runs = read_runs([*paths, paths[0], tmp_path / "x" / "." / "run"])
    assert [run.name for run in runs] == ["x/run", "y/run"]


def test_moments_at_which_accuracies_are_passed(tmp_path):
    (row,) = rows_of([make_run(tmp_path / "a")]).values()
    levels = levels_reached([row])
    assert levels == [95, 96, 97]
    run = row.runs[0]
    for level in levels:
        (at,) = moments(row.without, level)
        passed = [r["seconds"] for r in run.epochs if r["test_accuracy"] >= level]
        assert at == passed[0]
    assert moments(row.without, 99.9) == []


def test_what_was_tested_seldom_has_moments_only_by_itself(tmp_path):
    often = make_run(tmp_path / "often")
    seldom = make_run(tmp_path / "seldom", seed=1, test_every=10)
    (both,) = rows_of([often, seldom]).values()
    assert [run.name for run in both.without.followed] == ["often"]
    assert len(moments(both.without, 95)) == 1
    drawn = figures.make_figures([both])[0]
    assert {line.run.name for line in drawn.marks} == {"often"}
    assert "tested less often are left out" in drawn.note
    (alone,) = rows_of([seldom]).values()
    assert len(moments(alone.without, 95)) == 1
    shown = str(tables.moments_table([alone], methods.looks([alone.label])))
    assert "≤ " in shown
    assert "tested every 10 epochs" in shown
    short = make_run(tmp_path / "short", until=1)  # never passes it, the other does
    (both,) = rows_of([short, seldom]).values()
    shown = str(tables.moments_table([both], methods.looks([both.label])))
    assert "1 of 2 runs, tested every 10 epochs" in shown


def test_the_terminal_table_is_aligned_and_plain(comparison, tmp_path):
    text = report.table(comparison[0])
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["Method", "Speed-up"]
    body = lines[2:7]
    assert [line.split()[0] for line in body] == ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ"]
    assert "2.16×" in body[3]
    assert {line.index("×") for line in body} == {lines[0].index("Speed-up") + len("Speed-up") - 1}
    assert "† unfinished" in text
    steering = make_run(tmp_path / "a", "\x1b[2J\nx")
    assert "\x1b" not in report.table([steering])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.02, "0.02"), (3e-7, "3·10⁻⁷"), (1e-5, "10⁻⁵"), (0, "0"), (2.5e4, "2.5·10⁴"), (250, "250")],
)
def test_small_numbers_are_short(value, text):
    assert formats.scientific(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (5.28, "5.28 s"), (150, "150 s"), (600, "10 min"), (24120, "6.7 h")],
)
def test_durations_have_a_unit_that_fits(seconds, text):
    assert formats.duration(seconds) == text
