"""What is plotted, with the sentence that explains it; by matplotlib, as PNG and SVG."""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from gdeq.lab.report.methods import Look
from gdeq.lab.report.rows import Row, metric_of
from gdeq.lab.report.runs import Points, Run, points
from gdeq.lab.report.tables import scientific, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 60  # of one line: more is noise in which the lines drown
INK = "#23282f"
WIDTH = 4.4  # inches of 72 points: text stays readable where a phone shows it in 340 pixels
SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gdeq",  # the same runs give the same file
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


class Series(NamedTuple):
    """One method's points in one run."""

    label: str
    run: Run
    points: Points


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    note: str
    x: str
    y: str
    columns: tuple[str, str]  # of the CSV
    series: tuple[Series, ...]
    boxes: bool = False  # a box for all points of a method with the same x, in place of a line
    log: bool = False
    unit: float = 1.0  # x is divided by it in the picture, not in the CSV
    bottom: float | None = None  # where y begins, if not with the lowest value

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(one.label for one in self.series))

    def csv_lines(self) -> tuple[list[str], list[list[object]]]:
        """Head and lines of the figure's data."""
        return ["method", "pretrain", "seed", "run", *self.columns], [
            [one.label, one.run.pretrained, one.run.seed, one.run.name, x, y]
            for one in self.series
            for x, y in one.points
        ]


# Over the training, by their key in the metrics: title, y axis, note.
OVER_TRAINING = {
    "residual": (
        "Forward residual",
        "relative residual of the solve",
        "How far the forward solve is from the fixed point when it stops: lower is better. A "
        "rising line means that the model becomes harder to solve.",
    ),
    "solver_steps": (
        "Forward solver steps",
        "solver steps per sample",
        "What the forward solve costs. A flat line at the maximum number of steps means that "
        "solves stop there before they reach their tolerance.",
    ),
    "backward_residual": (
        "Backward residual",
        "‖(I − Jᵀ)w − v‖ / ‖v‖",
        "How well each method solves the adjoint equation, at the steps where the run measured it: "
        "0 is the exact gradient. If f is hard to solve, a smaller residual need not mean a better "
        "gradient.",
    ),
}


def make_figures(rows: Sequence[Row]) -> list[Figure]:
    """All for which there is something to show: of the metric, then of the solver."""
    found = [
        _metric(rows, "seconds"),
        _metric(rows, "epoch"),
        *(_over_training(rows, key) for key in OVER_TRAINING),
    ]
    return [figure for figure in found if figure.series]


def _metric(rows: Sequence[Row], x: str) -> Figure:
    metric = metric_of(rows)
    lines = tuple(
        Series(row.label, run, curve)
        for row in rows
        for some in row.scores
        for run in some.followed
        if (curve := run.curve(x))
    )
    note = (
        "The same runs by epoch. Between runs of equal length and learning rate, a worse curve "
        "means that the gradient achieves less per step."
    )
    if x == "seconds":
        better = "higher" if metric.higher_is_better else "lower"
        note = (
            f"The paper’s convergence figure: further left is faster, {better} is better. There is "
            "one line for each run, and time excludes tests."
        )
        if len(lines) < sum(bool(run.curve(x)) for row in rows for run in row.runs):
            note += " Repeats that were tested less often are left out."
    slug = re.sub(r"\W+", "_", metric.name)  # a run folder does not choose where files go
    name = f"{slug}_time" if x == "seconds" else f"{slug}_epochs"
    return against(x, metric.title, metric.key, lines, name, note)


def against(
    x: str, y: str, key: str, lines: tuple[Series, ...], name: str, note: str = ""
) -> Figure:
    """A metric against seconds or epochs."""
    unit, label, told = 1.0, "epoch", "epochs"
    if x == "seconds":
        unit, short = time_unit(max((at for line in lines for at, _ in line.points), default=0.0))
        label, told = f"training time ({short})", "training time"
    bottom = floor(lines)
    if bottom is not None:
        note += " The first epochs are below the range of the axis."
    title = f"{y.capitalize()} against {told}"
    return Figure(name, title, note, label, y, (x, key), lines, unit=unit, bottom=bottom)


def floor(lines: Sequence[Series]) -> float | None:
    """Where an axis of accuracies begins: a long run's first epochs would flatten all others.

    Where each run ends is always on it, however low.
    """
    curves = [[y for _, y in line.points] for line in lines]
    longest = max(map(len, curves), default=0)
    if longest < 10 or not all(line.run.metric.higher_is_better for line in lines):
        return None
    settled = min(v for curve in curves for v in (*curve[longest // 4 :], *curve[-1:]))
    best, worst = max(map(max, curves)), min(map(min, curves))
    bottom = max(0.0, settled - 0.15 * (best - settled))
    return bottom if worst < bottom else None


def _over_training(rows: Sequence[Row], key: str) -> Figure:
    title, y, note = OVER_TRAINING[key]
    # Zeros are left out, for which a logarithmic axis has no place.
    measured = [
        (row.label, run, [(at, value) for at, value in points(run.steps, "step", key) if value])
        for row in rows
        for run in row.runs
    ]
    lines = tuple(Series(label, run, thinned(found)) for label, run, found in measured if found)
    if any(line.run.pretrained for line in lines):
        note += " The first steps of a dashed line are its pre-training, which unrolls f."
    log = key.endswith("residual")
    return Figure(key, title, note, "training step", y, ("step", key), lines, log=log)


def thinned(line: Points, most: int = MOST_POINTS) -> Points:
    """Medians of equal stretches, where there are more points than can be seen."""
    if len(line) <= most:
        return line
    cuts = [index * len(line) // most for index in range(most + 1)]
    columns = (zip(*line[start:stop], strict=True) for start, stop in pairwise(cuts))
    return [(statistics.median(x), statistics.median(y)) for x, y in columns]


def draw(figure: Figure, looks: Mapping[str, Look]) -> tuple[bytes, bytes]:
    """As PNG for papers, and as SVG for the page."""
    import matplotlib as mpl  # slow to import  # noqa: PLC0415
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script
        handles = _handles(figure, looks)
        lengths = [6 * len(handle.get_label()) + 38 for handle in handles]  # points, about
        across = max(1, int(WIDTH * 72 / max(lengths)))
        across = len(lengths) if sum(lengths) < WIDTH * 72 else across
        height = 2.9 + 0.23 * math.ceil(len(handles) / across)
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        axes.set(xlabel=figure.x, ylabel=figure.y, yscale="log" if figure.log else "linear")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.8)
        axes.set_axisbelow(True)
        (_draw_boxes if figure.boxes else _draw_lines)(axes, figure, looks)
        if figure.log:
            _log_ticks(axes)
        canvas.legend(
            handles=handles, loc="outside lower center", ncols=across, frameon=False,
            columnspacing=1.2, handlelength=1.6,
        )  # fmt: skip
        png, svg = io.BytesIO(), io.BytesIO()
        canvas.savefig(png, format="png", dpi=170, facecolor="white")
        canvas.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return png.getvalue(), svg.getvalue()


def _draw_lines(axes: Axes, figure: Figure, looks: Mapping[str, Look]) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for index, line in enumerate(figure.series):
        many = len(line.points)
        first = many * (2 * index + 1) // (10 * len(figure.series))  # lines may cover each other
        axes.plot(
            [x / figure.unit for x, _ in line.points],
            [y for _, y in line.points],
            color=looks[line.label].colour,
            linestyle="--" if line.run.pretrained else "-",
            linewidth=1.3 if len(figure.series) <= 8 else 0.9,
            marker=looks[line.label].marker,
            markersize=4,
            markevery=1 if many <= 12 else (first, many // 5),
        )
    if figure.columns[0] == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if figure.bottom is not None:
        best = max(y for line in figure.series for _, y in line.points)
        axes.set_ylim(figure.bottom, best + 0.06 * (best - figure.bottom))


def _draw_boxes(axes: Axes, figure: Figure, looks: Mapping[str, Look]) -> None:
    epochs = sorted({x for one in figure.series for x, _ in one.points})
    room = 0.8 / len(figure.series)
    for index, one in enumerate(figure.series):
        colour, marker = looks[one.label]
        aside = (index - (len(figure.series) - 1) / 2) * room
        values: dict[float, list[float]] = {}
        for x, y in one.points:
            values.setdefault(x, []).append(y)
        places = [epochs.index(epoch) + aside for epoch in values]
        axes.boxplot(
            list(values.values()),
            positions=places,
            widths=room * 0.8,
            whis=(0, 100),
            manage_ticks=False,
            patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45, "edgecolor": colour},
            medianprops={"color": colour, "linewidth": 2.0},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        middles = [statistics.median(some) for some in values.values()]
        axes.plot(places, middles, color=colour, linestyle="", marker=marker, markersize=3.5)
    axes.set_xticks(range(len(epochs)), [f"{epoch:.0f}" for epoch in epochs])
    axes.set_xlim(-0.5, len(epochs) - 0.5)


def _log_ticks(axes: Axes) -> None:
    """Numbers enough to read a value by, also where the axis spans no whole decade."""
    from matplotlib import ticker  # noqa: PLC0415

    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    if decades < 0.8:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    elif decades < 2:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: scientific(y)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _handles(figure: Figure, looks: Mapping[str, Look]) -> list[Any]:
    """The legend: a line for each method, and what a dashed one means if there is any."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    handles = []
    for name in figure.labels:
        shown = name if len(name) <= 44 else name[:43] + "…"
        colour, marker = looks[name]
        # Matplotlib leaves out what begins with an underscore.
        handles.append(Line2D([], [], color=colour, marker=marker, label=f"\u200b{shown}"))
    if any(one.run.pretrained for one in figure.series) and not figure.boxes:
        handles.append(Line2D([], [], color=INK, label="without pre-training"))
        handles.append(Line2D([], [], color=INK, linestyle="--", label="with pre-training"))
    return handles
