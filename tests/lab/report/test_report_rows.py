"""From run folders to the rows of the paper's Table 2."""

import json
import statistics

import pytest
from report_runs import changed_summary, config, make_run

from gdeq.lab import report
from gdeq.lab.report import figures, methods, tables
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import number, read_run, read_runs

IMPLICIT = {"gradient": "implicit"}
OFF, ON = ({"adapt": {"enabled": flag, "forward": 0.1}} for flag in (False, True))


def rows_of(*paths):
    return {row.label: row for row in make_rows(read_runs(paths))}


def only_row(*paths):
    (row,) = rows_of(*paths).values()
    return row


def made(folder, runs):
    return [make_run(folder / str(n), **changes) for n, changes in enumerate(runs)]


def final(path):
    return json.loads((path / "summary.json").read_text())["test_accuracy"]


def test_seeds_share_a_row_and_give_mean_and_spread(tmp_path):
    paths = made(tmp_path, [{"seed": seed} for seed in range(3)])
    row, values = only_row(*paths), [final(path) for path in paths]
    assert row.without.mean == pytest.approx(statistics.fmean(values))
    assert row.without.spread == pytest.approx(statistics.stdev(values))
    assert row.pretrained.mean is None
    text = report.table(paths)
    assert "(3 seeds)" in text
    assert "deviation over seeds" in text
    alone = only_row(paths[0]).without.cell()
    assert (alone.note, "±" in alone.text) == ("1 run", False)
    twice = report.table([paths[0], make_run(tmp_path / "again")])
    assert "(2 runs, 1 seed)" in twice
    assert "deviation over runs, some of the same seed" in twice


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        # An adaptive run reads other settings, and has a name of its own.
        (
            [
                *({"adapt": {"enabled": False, "forward": 0.2}}, {"seed": 1, **OFF}, ON),
                {"gradient__refine": 1, "solver__max_iter": 5, "seed": 1, **ON},
                {"adapt": {"enabled": True, "forward": 0.3}},
            ],
            {"GDEQ": 2, "GDEQ adaptive": 2, "GDEQ adaptive · adapt.forward=0.3": 1},
        ),
        # What a method does not read makes no new row.
        ([{}, {"gradient__steps": 9, "log_every": 3}], {"GDEQ": 2}),
        (
            [{}, {"optimizer__lr": 0.1}, {"gradient__refine": 2}, {"gradient__tolerance": 0.1}],
            {
                **{"GDEQ": 1, "GDEQ · optimizer.lr=0.1": 1, "GDEQ refine 2": 1},
                **{"GDEQ tolerance 0.1": 1},
            },
        ),
        (
            [IMPLICIT, {"seed": 1, **IMPLICIT}, {"gradient__tol": 1e-2, **IMPLICIT}],
            {"Implicit": 2, "Implicit · gradient.tol=0.01": 1},
        ),
        # Two lengths of pre-training: neither is the usual one.
        (
            [{"pretrain_steps": 50}, {"pretrain_steps": 70}],
            {"GDEQ · pretrain_steps=50": 1, "GDEQ · pretrain_steps=70": 1},
        ),
    ],
)
def test_repeats_share_a_row_and_different_experiments_do_not(tmp_path, runs, labels):
    assert {label: len(row.runs) for label, row in rows_of(*made(tmp_path, runs)).items()} == labels


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
    assert "not counted" not in report.table([half])
    (half / "failed.json").write_text('{"steps": 44}')
    assert "the loss became NaN after step 44" in report.table([half])
    for name in ("metrics.jsonl", "environment.json", "failed.json"):
        (half / name).unlink()
    text = report.table([half])
    assert "† (not started)" in text
    assert not any(wrong in text for wrong in ("–†", "epoch 0"))


NINE, EIGHTEEN = {"solver__max_iter": 9}, {"solver__max_iter": 18}


@pytest.mark.parametrize(
    ("runs", "speeds"),
    [
        ([{}], {"GDEQ": None}),  # without Implicit
        ([{"seconds": 0.3, **IMPLICIT}, {}], {"Implicit": 1, "GDEQ": 3}),
        # Not against another workload, or against one of two budgets that are both others.
        *(
            ([IMPLICIT, other], {"GDEQ": None})
            for other in (
                *({"device": "H200"}, {"batch_size": 32}, {"precision": "bf16"}),
                {"model__size": "large"},
            )
        ),
        ([NINE | IMPLICIT, EIGHTEEN | IMPLICIT, {"solver__max_iter": 12}], {"GDEQ": None}),
        # Within a recipe, or against the only Implicit.
        (
            [{"seconds": 0.4, **IMPLICIT}, {"gradient": "jfb"}, {"solver__max_iter": 7}],
            {"Implicit": 1, "JFB": 0.4 / 0.105, "GDEQ · solver.max_iter=7": 4},
        ),
        (
            [NINE | IMPLICIT | {"seconds": 0.2}, EIGHTEEN | IMPLICIT | {"seconds": 0.4},
             NINE, EIGHTEEN],
            {"GDEQ · solver.max_iter=9": 2, "GDEQ · solver.max_iter=18": 4},
        ),
    ],
)  # fmt: skip
def test_speedups_are_within_a_recipe_or_against_the_only_implicit(tmp_path, runs, speeds):
    found = {label: row.speedup for label, row in rows_of(*made(tmp_path, runs)).items()}
    for label, speed in speeds.items():
        (own,) = {v for name, v in found.items() if name.startswith(label)}
        assert own is None if speed is None else own == pytest.approx(speed)


def test_speedup_is_the_ratio_of_seconds_per_step(tmp_path):
    """Not timed in turns: of the whole training, with one slow step in a hundred."""
    slow, fast = made(tmp_path, [{"seconds": 0.1, **IMPLICIT}, {}])
    changed_summary(slow, train_seconds=1.5 * 0.1 * 12 * 22)
    rows = rows_of(slow, fast)
    assert (rows["Implicit"].speedup, rows["GDEQ"].speedup) == pytest.approx((1, 1.5))
    assert rows["Implicit"].ms_per_step == rows["GDEQ"].ms_per_step
    text = report.table([slow, fast])
    assert "mean time per step in training divided by the method's" in text
    assert "ms / step is the median" in text


def test_times_taken_in_turns_come_before_those_of_the_trainings(tmp_path):
    turns = {"implicit": [20.0, 44.0, 21.0, 20.0], "gdeq": [10.0, 20.0, 10.0, 10.0]}
    paths = [make_run(tmp_path / n, n, turns=some) for n, some in turns.items()]
    gdeq = rows_of(*paths)["GDEQ"]
    assert gdeq.ratios == pytest.approx([2.0, 2.2, 2.1, 2.0])  # the busy turn is in both
    assert gdeq.speed_cell(True) == ("2.05×", "2.00 to 2.12", True)
    assert (gdeq.ms_per_step, gdeq.evals, gdeq.vjps) == (10.0, 9.5, "3")
    text = report.table(paths)
    assert text.splitlines()[0].endswith("f / step  VJPs / step  Training time")
    assert "timed in turns" in text
    assert "busy" not in text
    timing = json.loads((paths[0] / "timing.json").read_text())
    (paths[0] / "timing.json").write_text(json.dumps(timing | {"waited": 0.4}))
    assert "The machine was busy: 40 % of the timing was spent waiting" in report.table(paths)
    (paths[0] / "timing.json").write_text(json.dumps(timing | {"session": "another"}))
    assert rows_of(*paths)["GDEQ"].ratios == pytest.approx([2.16])
    (paths[0] / "timing.json").write_text('{"ms": ["x", null]}')  # damaged: as if not timed
    assert rows_of(*paths)["Implicit"].ms_per_step == pytest.approx(216)


@pytest.mark.parametrize(("epochs", "told"), [(4, "2.16× (88 steps timed)"), (5, "2.16×  ")])
def test_few_timed_steps_stand_beside_the_speed_up(tmp_path, epochs, told):
    assert told in report.table(
        made(tmp_path, [{"epochs": epochs, **IMPLICIT}, {"epochs": epochs}])
    )


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
)
def test_methods_are_named_and_counted(gradient, label, vjps):
    settings = config()["gradient"] | gradient
    assert methods.label(settings) == methods.label(gradient) == label
    assert methods.vjps(settings) == vjps


def test_rows_stand_in_the_order_of_the_paper(tmp_path):
    runs = [{"gradient": name} for name in ("gdeq", "npg", "unrolled", "jfb", "implicit")]
    paths = made(tmp_path, [*runs, {"gradient__refine": 10}, {"gradient__refine": 2}])
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
    row = only_row(*made(tmp_path, [{}, {"seed": 1, "test_every": 10}]))
    drawn = figures.make_figures([row])[0]
    assert {line.run.name for line in drawn.series} == {"0"}
    assert "tested less often are left out" in drawn.note


def test_the_terminal_table_is_aligned_and_plain(comparison, tmp_path):
    text = report.table(comparison[0])
    lines = text.splitlines()
    body = lines[2:7]
    assert [line.split()[0] for line in body] == ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ"]
    assert "2.16×" in body[3]
    assert {line.index("×") for line in body} == {lines[0].index("Speed-up") + len("Speed-up") - 1}
    assert "\x1b" not in report.table([make_run(tmp_path / "a", "\x1b[2J\nx")])
    nan = changed_summary(make_run(tmp_path / "nan"), test_accuracy=float("nan"))
    assert "accuracy" not in report.table([nan])  # no empty column


def test_what_is_no_finite_number_is_none():
    values = (True, "1", None, float("nan"), float("inf"), [1])
    assert [number(value) for value in values] == [None] * 6
    assert (number(1), number(0.5)) == (1.0, 0.5)


SCIENTIFIC = {0.02: "0.02", 3e-7: "3·10⁻⁷", 1e-5: "10⁻⁵", 0: "0", 2.5e4: "2.5·10⁴", 250: "250"}
DURATION = {None: "–", 5.28: "5.28 s", 150: "150 s", 600: "10 min", 24120: "6.7 h"}


def test_numbers_are_short_and_durations_have_a_unit_that_fits():
    assert {value: tables.scientific(value) for value in SCIENTIFIC} == SCIENTIFIC
    assert {value: tables.duration(value) for value in DURATION} == DURATION
    assert [tables.listed("ABC"[:n]) for n in (1, 2, 3)] == ["A", "A and B", "A, B and C"]
