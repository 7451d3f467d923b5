"""What is plotted, before it is drawn."""

import json
import re
from unittest import mock

import pytest
from report_runs import make_run

from gdeq.lab.report.draw import draw
from gdeq.lab.report.exactness import similarities
from gdeq.lab.report.figures import Line, floor, make_figures, thinned
from gdeq.lab.report.methods import looks
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import Metric, read_runs


def lines(*curves):
    run = mock.Mock(metric=Metric())
    return tuple(Line("GDEQ", run, list(enumerate(curve))) for curve in curves)


def test_long_lines_are_thinned_to_medians():
    points = [(float(x), 1.0 if x != 500 else 1e9) for x in range(1003)]
    thin = thinned(points, 60)
    assert len(thin) == 60
    assert {y for _, y in thin} == {1.0}  # one wild value does not move a median
    assert thin[0][0] < 20
    assert thin[-1][0] > 980
    assert thinned(points[:60], 60) == points[:60]


def test_the_accuracy_axis_leaves_out_the_first_epochs_of_long_runs():
    assert floor(lines([10.0, 50.0, 90.0])) is None
    rising = [10.0, 50.0, 80.0, *([90.0] * 9), 92.0]
    bottom = floor(lines(rising, rising))
    assert 80 < bottom < 90
    assert floor(()) is None
    assert floor(lines([90.0] * 12)) is None


@pytest.mark.parametrize("low", [[10.0, 18.0], [18.0]])
def test_the_accuracy_axis_holds_the_end_of_every_run(low):
    rising = [10.0, 50.0, 80.0, *([90.0] * 9), 92.0]
    bottom = floor(lines(rising, low))
    assert bottom is None or bottom < 18


def test_a_single_epoch_has_whole_ticks(tmp_path):
    rows = make_rows(read_runs([make_run(tmp_path / "a", epochs=1)]))
    (figure,) = (f for f in make_figures(rows) if f.name == "accuracy_epochs")
    svg = draw(figure, looks([row.label for row in rows])).svg.decode()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert texts[: texts.index("epoch")] == ["1"]


def test_figures_without_data_are_left_out(tmp_path):
    path = make_run(tmp_path / "a", until=2)
    names = {f.name for f in make_figures(make_rows(read_runs([path])))}
    assert names == {"accuracy_time", "accuracy_epochs", "residual", "solver_steps"}
    (path / "metrics.jsonl").write_text("")
    assert make_figures(make_rows(read_runs([path]))) == []


@pytest.mark.parametrize("unmeasured", ["null", "0.0", "NaN"])  # 0.0: as older logs have it
def test_a_line_breaks_off_where_nothing_was_measured(tmp_path, unmeasured):
    path = make_run(tmp_path / "a", "implicit", until=1)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    texts = []
    for line in lines:  # steps 2, 4, ... 22
        hole = line["kind"] == "step" and line["step"] in (2, 10, 12)
        text = json.dumps(line | {"backward_residual": "HOLE"} if hole else line)
        texts.append(text.replace('"HOLE"', unmeasured) + "\n")
    (path / "metrics.jsonl").write_text("".join(texts))
    figures = {f.name: f for f in make_figures(make_rows(read_runs([path])))}
    pieces = [[x for x, _ in line.points] for line in figures["backward_residual"].lines]
    assert pieces == [[4, 6, 8], [14, 16, 18, 20, 22]]
    assert len(figures["backward_residual"].labels) == 1
    assert len(figures["residual"].lines) == 1


@pytest.mark.parametrize("unmeasured", ["null", "0.0"])
def test_what_was_never_measured_has_no_figure(tmp_path, unmeasured):
    path = make_run(tmp_path / "a", "jfb", until=2)
    text = (path / "metrics.jsonl").read_text()
    old, new = '"backward_residual": null', f'"backward_residual": {unmeasured}'
    assert old in text
    (path / "metrics.jsonl").write_text(text.replace(old, new))
    assert "backward_residual" not in {f.name for f in make_figures(make_rows(read_runs([path])))}


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
    (group,) = (g for g in found[0].groups if (g.method, g.epoch) == ("GDEQ refine 2", 4))
    assert len(group.values("cosine")) == 8
    assert group.median("vjps", ".3g") == "2"
    assert 1.5e-7 <= found[0].exact_residual <= 3e-7
