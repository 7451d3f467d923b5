"""What is plotted, before it is drawn."""

import json
import re
from unittest import mock

import pytest
from report_runs import make_run

from gdeq.lab.metric import Metric
from gdeq.lab.report.figures import Series, draw, floor, make_figures, thinned
from gdeq.lab.report.methods import looks
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import read_runs
from gdeq.lab.report.similarity import similarities

RISING = [10.0, 50.0, 80.0, *([90.0] * 9), 92.0]


def lines(*curves):
    run = mock.Mock(metric=Metric("accuracy", "%"))
    return tuple(Series("GDEQ", run, list(enumerate(curve))) for curve in curves)


def figures_of(*paths):
    return {figure.name: figure for figure in make_figures(make_rows(read_runs(paths)))}


def test_long_lines_are_thinned_to_medians():
    points = [(float(x), 1.0 if x != 500 else 1e9) for x in range(1003)]
    thin = thinned(points, 60)
    assert len(thin) == 60
    assert {y for _, y in thin} == {1.0}  # one wild value does not move a median
    assert thin[0][0] < 20
    assert thin[-1][0] > 980
    assert thinned(points[:60], 60) == points[:60]


@pytest.mark.parametrize(
    ("curves", "low", "high"),
    [
        (([10.0, 50.0, 90.0],), None, None),  # too short to leave anything out
        ((RISING, RISING), 80, 90),
        ((), None, None),
        (([90.0] * 12,), None, None),
        ((RISING, [10.0, 18.0]), 0, 18),  # the end of every run is shown, however low
        ((RISING, [18.0]), 0, 18),
    ],
)
def test_the_accuracy_axis_leaves_out_the_first_epochs_of_long_runs(curves, low, high):
    bottom = floor(lines(*curves))
    assert bottom is None if low is None else bottom is None or low <= bottom < high


def test_a_single_epoch_has_whole_ticks(tmp_path):
    figure = figures_of(make_run(tmp_path / "a", epochs=1))["accuracy_epochs"]
    svg = draw(figure, looks(figure.labels))[1].decode()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert texts[: texts.index("epoch")] == ["1"]


def test_figures_without_data_are_left_out(tmp_path):
    path = make_run(tmp_path / "a", until=2)
    assert set(figures_of(path)) == {
        *("accuracy_time", "accuracy_epochs", "residual", "solver_steps"),
    }
    (path / "metrics.jsonl").write_text("")
    assert figures_of(path) == {}


def with_residual(path, value):
    """Every step's backward residual as JSON text; value: step → text."""
    texts = []
    for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        hole = value(line["step"]) if line["kind"] == "step" else None
        text = json.dumps(line if hole is None else line | {"backward_residual": "HOLE"})
        texts.append(text.replace('"HOLE"', str(hole)) + "\n")
    (path / "metrics.jsonl").write_text("".join(texts))


@pytest.mark.parametrize("unmeasured", ["null", "0.0", "NaN"])
def test_one_measured_step_in_so_many_makes_one_line(tmp_path, unmeasured):
    """As JFB and plain GDEQ are measured."""
    path = make_run(tmp_path / "a", "jfb", until=4)
    with_residual(path, lambda step: 0.5 if step % 10 == 0 else unmeasured)
    (line,) = figures_of(path)["backward_residual"].series
    assert [x for x, _ in line.points] == [10, 20, 30, 40, 50, 60, 70, 80]


def test_similarities_of_two_runs_are_not_pooled(tmp_path):
    paths = [make_run(tmp_path / str(n), seed=n, similarity=(1, 4)) for n in range(2)]
    with (paths[0] / "similarity.jsonl").open("a") as file:
        file.write('{"epoch": 1, "method": "GDEQ", "cosine": null}\n{"epoch": null}\n{"epo')
    found = similarities(read_runs(paths))
    names = [figure.name for one in found for figure in one.figures]
    assert names == [
        *("similarity_cosine", "similarity_error"),
        *("similarity_cosine_2", "similarity_error_2"),
    ]
    assert len(found[0].groups[4, "GDEQ refine 2"]) == 8
    assert len(found[0].groups[1, "GDEQ"]) == 8
    assert "solved to a residual of 3·10⁻⁷" in found[0].text or "2." in found[0].text
    rows = [[cell.text for cell in row] for row in found[0].table.rows]
    assert ["GDEQ refine 2", "4", "2", "8"] in [row[:4] for row in rows]
