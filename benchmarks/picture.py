"""The README's picture: speed beside torchdeq, and what a VJP buys, from the tables in results/.

.venv/bin/python benchmarks/picture.py        # writes docs/overview.png
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
SPEED = ROOT / "results" / "bench" / "beside-torchdeq.csv"  # ms per training step
ERRORS = ROOT / "results" / "core" / "gradients.csv"  # by benchmarks/gradients.py
PICTURE = ROOT / "docs" / "overview.png"
BLUE, GREY, LIGHT = "#0072b2", "#555555", "#b5b5b5"
LEGEND = {"fontsize": 8, "framealpha": 1, "edgecolor": "none", "borderpad": 0.1}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_speed(axes: Axes) -> None:
    """Milliseconds of each library as bars, one group per model."""
    models = rows(SPEED)
    libraries = (("gdeq", BLUE), ("torchdeq JFB", GREY), ("torchdeq Implicit", LIGHT))
    for place, (library, colour) in enumerate(libraries):
        ms = [float(row[library]) for row in models]
        where = [model + 0.27 * (place - 1) for model in range(len(models))]
        axes.barh(where, ms, 0.25, color=colour, label=library)
        for y, value in zip(where, ms, strict=True):
            text = f"{value:.0f}" if value >= 100 else f"{value:.1f}"
            axes.text(value * 1.08, y, text, va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(0.3, 4000)
    axes.set_yticks(range(len(models)), [row["model"].split(" (")[0] for row in models])
    axes.invert_yaxis()
    axes.set_title("One training step, one H200", fontsize=11)
    axes.set_xlabel("milliseconds, less is better")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(**LEGEND, loc="lower right")


def draw_errors(axes: Axes) -> None:
    """Median error of the gradient on held-out maps, against the VJPs spent on it."""
    found = [
        row
        for row in rows(ERRORS)
        if row["dtype"] == "float64" and row["solved by"] == "Broyden, 1e-06"
    ]
    of = {row["method"]: (float(row["VJPs"]), float(row["median"])) for row in found}
    refined = [row for row in found if row["method"].startswith("GDEQ, refine")]
    vjps = [float(row["VJPs"]) for row in refined]
    # "without" is what the same refinement reaches from JFB's gradient.
    for column, method, colour, mark in (
        ("without", "JFB", GREY, "s"),
        ("median", "GDEQ", BLUE, "o"),
    ):
        errors = [float(row[column]) for row in refined]
        axes.plot(vjps, errors, mark, ls="-", color=colour, label=f"{method}(refine=k)")
    axes.plot(*of["JFB"], "s", mfc="white", color=GREY, label="JFB()")
    axes.plot(*of["GDEQ, plain"], "o", mfc="white", color=BLUE, label="GDEQ(), the paper's")
    axes.plot(*of["NPG"], "^", color="#009e73", label="NPG()")
    axes.set_yscale("log")
    axes.set_title("Gradient error on 26 maps, median", fontsize=11)
    axes.set_xlabel("VJPs spent on the gradient")
    axes.set_ylabel("relative error")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(**LEGEND, loc="lower left")


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw_speed(left)
    draw_errors(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both" if axes is right else "x", alpha=0.3)
        axes.set_axisbelow(True)
    source = hashlib.sha256(SPEED.read_bytes() + ERRORS.read_bytes()).hexdigest()  # for a test
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None, "Source": source})
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
