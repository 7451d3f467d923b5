"""From runs to what is plotted: lines and boxes, with the sentence that explains them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from gdeq.lab.report import formats
from gdeq.lab.report.rows import Row, metric_of
from gdeq.lab.report.runs import Run, number

Points = list[tuple[float, float]]
MOST_POINTS = 60  # of one line: more is noise in which the lines drown


@dataclass(frozen=True)
class Line:
    """One run."""

    label: str
    run: Run
    points: Points


@dataclass(frozen=True)
class Box:
    """One method at one epoch: a value for each mini-batch."""

    label: str
    epoch: int
    values: list[float]


@dataclass(frozen=True)
class Figure:
    """What is drawn: lines or boxes, never both."""

    name: str
    title: str
    note: str
    x: str
    y: str
    lines: tuple[Line, ...] = ()
    boxes: tuple[Box, ...] = ()
    log: bool = False
    unit: float = 1.0  # x is divided by it in the picture, not in the CSV
    columns: tuple[str, str] = ("x", "y")
    bottom: float | None = None  # where y begins, if not with the lowest value

    @property
    def labels(self) -> list[str]:
        lines, boxes = ([mark.label for mark in marks] for marks in (self.lines, self.boxes))
        return list(dict.fromkeys([*lines, *boxes]))

    def csv_lines(self) -> tuple[list[str], list[list[object]]]:
        """Head and lines of the figure's data."""
        if self.boxes:
            head = ["method", "epoch", self.columns[1]]
            return head, [[box.label, box.epoch, v] for box in self.boxes for v in box.values]
        return ["method", "pretrain", "seed", "run", *self.columns], [
            [line.label, line.run.pretrained, line.run.seed, line.run.name, x, y]
            for line in self.lines
            for x, y in line.points
        ]


# Over the training: key of the metrics, title, y axis, note, whether it is logarithmic.
OVER_TRAINING = (
    (
        *("residual", "Forward residual", "relative residual of the solve"),
        "How far the forward solve is from the fixed point when it stops: lower is better. A line "
        "that rises says that the model becomes harder to solve.",
        True,
    ),
    (
        *("solver_steps", "Forward solver steps", "solver steps per sample"),
        "What the forward solve costs: a flat line at the solver’s budget says that it stops there "
        "before it reaches its tolerance.",
        False,
    ),
    (
        *("backward_residual", "Backward residual", "‖(I − Jᵀ)w − v‖ / ‖v‖"),
        "How well each method solves the adjoint equation, where the run measured it: 0 is the "
        "exact gradient. A smaller residual need not be a better gradient where f is hard. Methods "
        "that do not measure it have no line; gaps are where a run did not measure.",
        True,
    ),
)


def make_figures(rows: list[Row]) -> list[Figure]:
    """All for which there is something to show."""
    found = [_against_time(rows), _against_epochs(rows)]
    found += [_over_training(rows, *settings) for settings in OVER_TRAINING]
    return [figure for figure in found if figure.lines]


def _curves(rows: list[Row], x: str) -> tuple[Line, ...]:
    cells = ((row, cell) for row in rows for cell in row.cells)
    lines = (Line(row.label, run, run.curve(x)) for row, cell in cells for run in cell.followed)
    return tuple(line for line in lines if line.points)


def _against_time(rows: list[Row]) -> Figure:
    lines = _curves(rows, "seconds")
    metric = metric_of(rows)
    many = sum(bool(run.curve("seconds")) for row in rows for run in row.runs)
    bottom = floor(lines)
    longest = max((x for line in lines for x, _ in line.points), default=0.0)
    unit, name = formats.time_unit(longest)
    better = "higher" if metric.higher_is_better else "lower"
    return Figure(
        f"{metric.slug}_time",
        f"{metric.title.capitalize()} against training time",
        f"The paper’s convergence figure: further left is faster, {better} is better. One line for "
        "each run; the clock stands still during tests."
        + (" Repeats that were tested less often are left out." if len(lines) < many else "")
        + ("" if bottom is None else " The first epochs lie below the axis."),
        f"training time ({name})",
        metric.title,
        lines,
        unit=unit,
        columns=("seconds", metric.key),
        bottom=bottom,
    )


def _against_epochs(rows: list[Row]) -> Figure:
    lines = _curves(rows, "epoch")
    metric = metric_of(rows)
    return Figure(
        f"{metric.slug}_epochs",
        f"{metric.title.capitalize()} against epochs",
        "The same runs without the clock: where one of the same length and rate is worse here, its "
        "gradient teaches less per step, however fast it is.",
        "epoch",
        metric.title,
        lines,
        columns=("epoch", metric.key),
        bottom=floor(lines),
    )


def floor(lines: tuple[Line, ...]) -> float | None:
    """Where an axis of accuracies begins: a long run's first epochs would flatten all others.

    Where each run ends is always on it, however low.
    """
    if not all(line.run.metric.higher_is_better for line in lines):
        return None
    curves = [[y for _, y in line.points] for line in lines]
    longest = max((len(curve) for curve in curves), default=0)
    if longest < 10:
        return None
    settled = min(v for curve in curves for v in (*curve[longest // 4 :], *curve[-1:]))
    best = max(max(curve) for curve in curves)
    bottom = max(0.0, settled - 0.15 * (best - settled))
    return bottom if any(value < bottom for curve in curves for value in curve) else None


def _over_training(rows: list[Row], key: str, title: str, y: str, note: str, log: bool) -> Figure:
    lines = tuple(
        Line(row.label, run, thinned(points))
        for row in rows
        for run in row.runs
        for points in _stretches(run, key)
    )
    if any(line.run.pretrained for line in lines):
        note += " The first steps of a dashed line are its pre-training, which unrolls f instead."
    return Figure(key, title, note, "training step", y, lines, log=log, columns=("step", key))


def _stretches(run: Run, key: str) -> Iterator[Points]:
    """A run's values, broken off where none was measured: a line across would claim one.

    Zeros are left out too: a logarithmic axis has no place for them.
    """
    pairs = [(number(r.get("step")), number(r.get(key))) for r in run.steps]
    for measured, part in groupby(pairs, key=lambda pair: bool(pair[1] and pair[1] > 0)):
        if measured:
            yield [(s, v) for s, v in part if s is not None and v is not None]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Medians of equal stretches, where there are more points than can be seen."""
    if len(points) <= most:
        return points
    cuts = [index * len(points) // most for index in range(most + 1)]
    parts = [points[start:stop] for start, stop in pairwise(cuts)]
    return [
        (statistics.median(x for x, _ in part), statistics.median(y for _, y in part))
        for part in parts
    ]
