"""Figures by matplotlib, as PNG for papers and as SVG for the page."""

from __future__ import annotations

import io
import math
import statistics
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from gdeq.lab.report import formats
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.methods import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#23282f"
WIDTH = 5.0  # inches of 72 points: text stays readable when a phone shrinks it to 360 pixels
SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gdeq",  # the same runs give the same file
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


class Drawn(NamedTuple):
    """One figure as bytes of two kinds of file."""

    png: bytes
    svg: bytes


def draw(figure: Figure, looks: dict[str, Look]) -> Drawn:
    import matplotlib as mpl  # slow to import  # noqa: PLC0415
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script
        handles = _handles(figure, looks)
        longest = max(len(handle.get_label()) for handle in handles)
        across = max(1, min(3, int(WIDTH * 72 / (5.8 * longest + 48))))
        height = 3.3 + 0.23 * math.ceil(len(handles) / across)
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        axes.set(xlabel=figure.x, ylabel=figure.y, yscale="log" if figure.log else "linear")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.8)
        axes.set_axisbelow(True)
        _lines(axes, figure, looks)
        _boxes(axes, figure, looks)
        if figure.log:
            _log_ticks(axes)
        canvas.legend(handles=handles, loc="outside lower center", ncols=across, frameon=False)
        png, svg = io.BytesIO(), io.BytesIO()
        canvas.savefig(png, format="png", dpi=170, facecolor="white")
        canvas.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
    return Drawn(png.getvalue(), svg.getvalue())


def _lines(axes: Axes, figure: Figure, looks: dict[str, Look]) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for line in figure.lines:
        many = len(line.points)
        axes.plot(
            [x / figure.unit for x, _ in line.points],
            [y for _, y in line.points],
            color=looks[line.label].colour,
            linestyle="--" if line.run.pretrained else "-",
            linewidth=1.3 if len(figure.lines) <= 8 else 0.9,
            marker=looks[line.label].marker,
            markersize=4,
            markevery=1 if many <= 12 else (many // 10, many // 5),
        )
    if figure.lines and figure.columns[0] == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if figure.bottom is not None:
        best = max(y for line in figure.lines for _, y in line.points)
        axes.set_ylim(figure.bottom, best + 0.06 * (best - figure.bottom))


def _boxes(axes: Axes, figure: Figure, looks: dict[str, Look]) -> None:
    if not figure.boxes:
        return
    epochs, labels = sorted({box.epoch for box in figure.boxes}), figure.labels
    room = 0.8 / len(labels)
    for box in figure.boxes:
        colour, marker = looks[box.label]
        place = epochs.index(box.epoch) + (labels.index(box.label) - (len(labels) - 1) / 2) * room
        axes.boxplot(
            [box.values],
            positions=[place],
            widths=room * 0.8,
            whis=(0, 100),
            manage_ticks=False,
            patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45, "edgecolor": colour},
            medianprops={"color": colour, "linewidth": 2.0},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        middle = statistics.median(box.values)
        axes.plot(place, middle, color=colour, marker=marker, markersize=3.5)
    axes.set_xticks(range(len(epochs)), [str(epoch) for epoch in epochs])
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
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: formats.scientific(y)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _handles(figure: Figure, looks: dict[str, Look]) -> list[Any]:
    """The legend: a line for each method, and what a dashed one means if there is any."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    handles = []
    for name in figure.labels:
        shown = name if len(name) <= 60 else name[:59] + "…"
        colour, marker = looks[name]
        # Matplotlib leaves out what begins with an underscore.
        handles.append(Line2D([], [], color=colour, marker=marker, label=f"\u200b{shown}"))
    if any(line.run.pretrained for line in figure.lines):
        handles.append(Line2D([], [], color=INK, label="without pre-training"))
        handles.append(Line2D([], [], color=INK, linestyle="--", label="with pre-training"))
    return handles
