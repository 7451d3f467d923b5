"""From runs to what is plotted: lines and boxes, with the sentence that explains them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from gdeq.lab.report import formats
from gdeq.lab.report.rows import Row, curve
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
    name: str
    title: str
    note: str
    x: str
    y: str
    marks: tuple[Line, ...] | tuple[Box, ...]
    log: bool = False
    unit: float = 1.0  # x is divided by it in the picture, not in the CSV
    columns: tuple[str, str] = ("x", "y")
    bottom: float | None = None  # where y begins, if not with the lowest value

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(mark.label for mark in self.marks))

    def csv_lines(self) -> tuple[list[str], Iterator[list[object]]]:
        """Head and lines of the figure's data."""
        if self.marks and isinstance(self.marks[0], Box):
            return ["method", "epoch", self.columns[1]], (
                [mark.label, mark.epoch, value]
                for mark in self.marks
                if isinstance(mark, Box)
                for value in mark.values
            )
        return ["method", "pretrain", "seed", "run", *self.columns], (
            [mark.label, mark.run.pretrained, mark.run.seed, mark.run.name, x, y]
            for mark in self.marks
            if isinstance(mark, Line)
            for x, y in mark.points
        )


def make_figures(rows: list[Row]) -> list[Figure]:
    """All for which there is something to show."""
    found = [_against_time(rows), _against_epochs(rows)]
    found += [
        _over_training(
            rows,
            "residual",
            "Forward residual",
            "relative residual of the solve",
            "How far the forward solve is from the fixed point when it stops: lower is better. A "
            "line that rises says that the model becomes harder to solve.",
            log=True,
        ),
        _over_training(
            rows,
            "solver_steps",
            "Forward solver steps",
            "solver steps per sample",
            "What the forward solve costs: a flat line at the solver’s budget says that it stops "
            "there before it reaches its tolerance.",
        ),
        _over_training(
            rows,
            "backward_residual",
            "Backward residual",
            "‖(I − Jᵀ)w − v‖ / ‖v‖",
            "How well each method solves the adjoint equation, where the run measured it: 0 is the "
            "exact gradient. Of two larger ones the smaller need not be the better gradient, where "
            "f is hard. Methods that do not measure it have no line; gaps are where a run that "
            "measures now and then did not.",
            log=True,
        ),
    ]
    return [figure for figure in found if figure.marks]


def _lines(rows: list[Row], x: str) -> tuple[Line, ...]:
    cells = ((row, cell) for row in rows for cell in (row.without, row.pretrained))
    lines = (Line(row.label, run, curve(run, x)) for row, cell in cells for run in cell.followed)
    return tuple(line for line in lines if line.points)


def _against_time(rows: list[Row]) -> Figure:
    lines = _lines(rows, "seconds")
    many = sum(bool(curve(run, "seconds")) for row in rows for run in row.runs)
    bottom = floor([[y for _, y in line.points] for line in lines])
    longest = max((x for line in lines for x, _ in line.points), default=0.0)
    unit, name = formats.time_unit(longest)
    return Figure(
        "accuracy_time",
        "Test accuracy against training time",
        "The paper’s convergence figure: further left is faster, higher is better. One line for "
        "each run; the clock stands still during tests."
        + (" Repeats that were tested less often are left out." if len(lines) < many else "")
        + ("" if bottom is None else " The first epochs lie below the axis."),
        f"training time ({name})",
        "test accuracy (%)",
        lines,
        unit=unit,
        columns=("seconds", "test_accuracy"),
        bottom=bottom,
    )


def floor(curves: list[list[float]]) -> float | None:
    """Where the accuracy axis begins: the first epochs of a long run would flatten all others.

    Where each run ends is always on it, however low.
    """
    longest = max((len(curve) for curve in curves), default=0)
    if longest < 10:
        return None
    settled = min(v for curve in curves for v in (*curve[longest // 4 :], *curve[-1:]))
    best = max(max(curve) for curve in curves)
    bottom = max(0.0, settled - 0.15 * (best - settled))
    return bottom if any(value < bottom for curve in curves for value in curve) else None


def _against_epochs(rows: list[Row]) -> Figure:
    lines = _lines(rows, "epoch")
    return Figure(
        "accuracy_epochs",
        "Test accuracy against epochs",
        "The same runs without the clock: where one of the same length and rate lies lower here, "
        "its gradient teaches less per step, however fast it is.",
        "epoch",
        "test accuracy (%)",
        lines,
        columns=("epoch", "test_accuracy"),
        bottom=floor([[y for _, y in line.points] for line in lines]),
    )


def _over_training(
    rows: list[Row], key: str, title: str, y: str, note: str, log: bool = False
) -> Figure:
    lines = []
    for row in rows:
        for run in row.runs:
            lines += [Line(row.label, run, thinned(points)) for points in _stretches(run, key)]
    if any(line.run.pretrained for line in lines):
        note += " The first steps of a dashed line are its pre-training, which unrolls f instead."
    return Figure(
        key, title, note, "training step", y, tuple(lines), log=log, columns=("step", key)
    )


def _stretches(run: Run, key: str) -> Iterator[Points]:
    """A run's values, broken off where none was measured: a line across would claim one.

    In older logs a zero stands for that; and a logarithmic axis has no place for one.
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
