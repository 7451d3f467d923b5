"""From run folders to the rows of the paper's Table 2."""

import json
import statistics

import pytest
from report_runs import changed_summary, config, make_run

from gdeq.lab import report
from gdeq.lab.report import figures, methods, tables
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import read_run, read_runs


def rows_of(*paths):
    return {row.label: row for row in make_rows(read_runs(paths))}


def only_row(*paths):
    (row,) = rows_of(*paths).values()
    return row


def final(path):
    return json.loads((path / "summary.json").read_text())["test_accuracy"]


def test_seeds_share_a_row_and_give_mean_and_spread(tmp_path):
    paths = [make_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    row, values = only_row(*paths), [final(path) for path in paths]
    assert row.without.mean == pytest.approx(statistics.fmean(values))
    assert row.without.spread == pytest.approx(statistics.stdev(values))
    assert row.pretrained.mean is None
    text = report.table(paths)
    assert "(3 seeds)" in text
    assert "deviation over seeds" in text
    alone = only_row(paths[0]).without.cell()
    assert alone.note == "1 run"
    assert "±" not in alone.text
    twice = report.table([paths[0], make_run(tmp_path / "again")])
    assert "(2 runs, 1 seed)" in twice
    assert "deviation over runs, some of the same seed" in twice


def test_an_adaptive_run_has_a_row_and_a_name_of_its_own(tmp_path):
    off, on = ({"enabled": flag, "forward": 0.1} for flag in (False, True))
    paths = [
        make_run(tmp_path / "plain", adapt={**off, "forward": 0.2}),  # which it does not read
        make_run(tmp_path / "plain2", adapt=off, seed=1),
        make_run(tmp_path / "adaptive", adapt=on),
        make_run(tmp_path / "r", gradient__refine=1, solver__max_iter=5, adapt=on, seed=1),
        make_run(tmp_path / "other", adapt={**on, "forward": 0.3}),
    ]
    found = rows_of(*paths)
    assert found["GDEQ"].without.seeds == 2
    assert set(found) == {"GDEQ", "GDEQ adaptive", "GDEQ adaptive · adapt.forward=0.3"}
    assert found["GDEQ adaptive"].without.seeds == 2  # refine and max_iter are not read


def test_unfinished_runs_are_marked_and_count_only_alone(tmp_path):
    done, half = make_run(tmp_path / "a"), make_run(tmp_path / "half", seed=1, until=3)
    assert only_row(done, half).without.mean == final(done)
    text = report.table([done, half])
    assert "(1 run, 1 unfinished†)" in text
    assert "† unfinished, the latest figure: half (epoch 3 of 12, not counted)" in text
    row = only_row(half)
    assert row.without.cell().text.endswith("†")
    assert row.without.cell().note == "epoch 3 of 12"
    assert row.seconds == pytest.approx(3 * 22 * 0.1)
    (half / "failed.json").write_text('{"steps": 44}')
    assert "the loss became NaN after step 44" in report.table([half])
    for name in ("metrics.jsonl", "environment.json", "failed.json"):
        (half / name).unlink()
    text = report.table([half])
    assert "† (not started)" in text
    assert not any(wrong in text for wrong in ("–†", "epoch 0"))


def test_speedup_is_the_ratio_of_seconds_per_step(tmp_path):
    """Not timed in turns: of the whole training, with one slow step in a hundred."""
    slow, fast = make_run(tmp_path / "i", "implicit", seconds=0.1), make_run(tmp_path / "g")
    changed_summary(slow, train_seconds=1.5 * 0.1 * 12 * 22)
    rows = rows_of(slow, fast)
    assert (rows["Implicit"].speedup, rows["GDEQ"].speedup) == pytest.approx((1, 1.5))
    assert rows["Implicit"].ms_per_step == rows["GDEQ"].ms_per_step
    text = report.table([slow, fast])
    assert "mean time per step in training divided by the method's" in text
    assert "ms / step is the median" in text
    assert only_row(fast).speed_cell(False).text == "–"  # without Implicit


def test_times_taken_in_turns_come_before_those_of_the_trainings(tmp_path):
    turns = {"implicit": [20.0, 44.0, 21.0, 20.0], "gdeq": [10.0, 20.0, 10.0, 10.0]}
    paths = [make_run(tmp_path / n, n, turns=some) for n, some in turns.items()]
    gdeq = rows_of(*paths)["GDEQ"]
    assert gdeq.ratios == pytest.approx([2.0, 2.2, 2.1, 2.0])  # the busy turn is in both
    assert gdeq.speed_cell(True) == ("2.05×", "2.00 to 2.12", True)
    assert (gdeq.ms_per_step, gdeq.evals, gdeq.vjps) == (10.0, 9.5, "3")
    text = report.table(paths)
    assert text.splitlines()[0].split()[-8:] == [
        "f",
        "/",
        "step",
        "VJPs",
        "/",
        "step",
        "Training",
        "time",
    ]
    assert "timed in turns" in text
    assert "busy" not in text
    timing = json.loads((paths[0] / "timing.json").read_text())
    (paths[0] / "timing.json").write_text(json.dumps(timing | {"waited": 0.4}))
    assert "The machine was busy: 40% of the timing was spent waiting" in report.table(paths)
    (paths[0] / "timing.json").write_text(json.dumps(timing | {"session": "another"}))
    assert rows_of(*paths)["GDEQ"].ratios == pytest.approx([2.16])
    (paths[0] / "timing.json").write_text('{"ms": ["x", null]}')  # damaged: as if not timed
    assert rows_of(*paths)["Implicit"].ms_per_step == pytest.approx(216)


@pytest.mark.parametrize(("epochs", "told"), [(4, "2.16× (88 steps timed)"), (5, "2.16×  ")])
def test_few_timed_steps_stand_beside_the_speed_up(tmp_path, epochs, told):
    paths = [make_run(tmp_path / n, n, epochs=epochs) for n in ("implicit", "gdeq")]
    assert told in report.table(paths)


@pytest.mark.parametrize(
    "other",
    [{"device": "H200"}, {"batch_size": 32}, {"precision": "bf16"}, {"model__size": "large"}],
)
def test_no_speedup_against_another_workload(tmp_path, other):
    rows = rows_of(make_run(tmp_path / "i", "implicit"), make_run(tmp_path / "g", **other))
    (gdeq,) = (row for label, row in rows.items() if label.startswith("GDEQ"))
    assert gdeq.speedup is None


def test_speedups_are_within_a_recipe_or_against_the_only_implicit(tmp_path):
    rows = rows_of(
        make_run(tmp_path / "i", "implicit", seconds=0.4),
        make_run(tmp_path / "j", "jfb"),
        make_run(tmp_path / "g", solver__max_iter=7, seconds=0.1),
    )
    assert set(rows) == {"Implicit", "JFB", "GDEQ · solver.max_iter=7"}
    assert rows["GDEQ · solver.max_iter=7"].speedup == pytest.approx(4)
    rows = rows_of(
        *(make_run(tmp_path / f"i{n}", "implicit", solver__max_iter=n, seconds=s)
          for n, s in ((9, 0.2), (18, 0.4))),
        *(make_run(tmp_path / f"g{n}", solver__max_iter=n, seconds=0.1) for n in (9, 18)),
    )  # fmt: skip
    assert rows["GDEQ · solver.max_iter=9"].speedup == pytest.approx(2)
    assert rows["GDEQ · solver.max_iter=18"].speedup == pytest.approx(4)


def test_different_experiments_are_not_averaged(tmp_path):
    changes = [
        *({}, {"optimizer__lr": 0.1}, {"gradient__refine": 2}, {"gradient__tolerance": 0.1}),
        *({"gradient": "implicit"}, {"gradient": "implicit", "gradient__tol": 1e-2}),
        *({"pretrain_steps": 50}, {"pretrain_steps": 70}),
    ]
    rows = rows_of(*(make_run(tmp_path / str(n), **own) for n, own in enumerate(changes)))
    assert all(len(some.runs) <= 1 for row in rows.values() for some in row.scores)
    # What a method does not read makes no new row.
    only_row(make_run(tmp_path / "a"), make_run(tmp_path / "b", gradient__steps=9, log_every=3))


@pytest.mark.parametrize(
    ("gradient", "label", "vjps"),
    [
        ({"name": "implicit"}, "Implicit", "≤ 21"),
        ({"name": "implicit", "solver": "gmres"}, "Implicit (gmres, 20 steps)", "≤ 21"),
        ({"name": "implicit", "max_iter": 9}, "Implicit (broyden, 9 steps)", "≤ 10"),
        ({"name": "jfb"}, "JFB", "0"),
        ({"name": "jfb", "refine": 1}, "JFB refine 1", "1"),
        ({"name": "npg"}, "NPG", "4"),
        ({"name": "npg", "steps": 3}, "NPG (3 steps, damping 0.5)", "2"),
        ({"name": "gdeq"}, "GDEQ", "0"),
        ({"name": "gdeq", "refine": 2}, "GDEQ refine 2", "2"),
        ({"name": "gdeq", "tolerance": 0.1}, "GDEQ tolerance 0.1", "≤ 11"),
        ({"name": "unrolled"}, "Unrolled", "–"),
        ({"name": "new"}, "new", "–"),
    ],
)  # fmt: skip
def test_methods_are_named_and_counted(gradient, label, vjps):
    settings = config()["gradient"] | gradient
    assert methods.label(settings) == methods.label(gradient) == label
    assert methods.vjps(settings) == vjps


def test_rows_stand_in_the_order_of_the_paper(tmp_path):
    names = ("gdeq", "npg", "unrolled", "jfb", "implicit")
    paths = [make_run(tmp_path / name, name) for name in names]
    paths += [make_run(tmp_path / f"r{n}", gradient__refine=n) for n in (10, 2)]
    order = ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ refine 2", "GDEQ refine 10", "Unrolled"]
    assert list(rows_of(*paths)) == order


def test_each_method_keeps_its_look_whoever_else_is_there():
    many = methods.looks(["GDEQ refine 2", *reversed(methods.LOOKS)], ["GDEQ tolerance 0.1"])
    assert {name: many[name] for name in methods.LOOKS} == methods.LOOKS
    assert len(set(many.values())) == len(many) == 6
    assert methods.looks(["GDEQ refine 1"])["GDEQ refine 1"] == methods.LOOKS["GDEQ"]


def test_a_torn_line_is_passed_over_and_a_damaged_one_is_told(tmp_path):
    torn = read_run(make_run(tmp_path / "a", until=5, torn=True))
    assert torn.problems == []
    assert 0 < torn.epochs_done < 5
    path = make_run(tmp_path / "b")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0][:20], *lines[1:], lines[5]]))
    (path / "summary.json").write_text('{"test_acc')
    run = read_run(path)
    assert run.problems == [
        "1 damaged lines in metrics.jsonl were passed over",
        "summary.json is damaged and was passed over",
    ]
    assert not run.finished
    assert [r["step"] for r in run.steps] == list(range(4, 12 * 22 + 1, 2))


def test_names_tell_runs_apart_and_no_folder_counts_twice(tmp_path):
    paths = [make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", seed=1)]
    runs = read_runs([*paths, paths[0], tmp_path / "x" / "." / "run"])
    assert [run.name for run in runs] == ["x/run", "y/run"]


def test_runs_that_were_tested_less_often_are_left_out_of_the_figure(tmp_path):
    often = make_run(tmp_path / "often")
    row = only_row(often, make_run(tmp_path / "seldom", seed=1, test_every=10))
    drawn = figures.make_figures([row])[0]
    assert {line.run.name for line in drawn.series} == {"often"}
    assert "tested less often are left out" in drawn.note


def test_the_terminal_table_is_aligned_and_plain(comparison, tmp_path):
    text = report.table(comparison[0])
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["Method", "Speed-up"]
    body = lines[2:7]
    assert [line.split()[0] for line in body] == ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ"]
    assert "2.16×" in body[3]
    assert {line.index("×") for line in body} == {lines[0].index("Speed-up") + len("Speed-up") - 1}
    steering = make_run(tmp_path / "a", "\x1b[2J\nx")
    assert "\x1b" not in report.table([steering])
    nan = changed_summary(make_run(tmp_path / "nan"), test_accuracy=float("nan"))
    assert "accuracy" not in report.table([nan])  # no empty column


SCIENTIFIC = {0.02: "0.02", 3e-7: "3·10⁻⁷", 1e-5: "10⁻⁵", 0: "0", 2.5e4: "2.5·10⁴", 250: "250"}
DURATION = {None: "–", 5.28: "5.28 s", 150: "150 s", 600: "10 min", 24120: "6.7 h"}


def test_numbers_are_short_and_durations_have_a_unit_that_fits():
    assert {value: tables.scientific(value) for value in SCIENTIFIC} == SCIENTIFIC
    assert {value: tables.duration(value) for value in DURATION} == DURATION
    assert [tables.listed("ABC"[:n]) for n in (1, 2, 3)] == ["A", "A and B", "A, B and C"]
