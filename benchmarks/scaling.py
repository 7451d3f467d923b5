"""How a recorded step grows: against batch, state size, solver steps and the solver's memory.

PYTHONPATH=src python3 benchmarks/scaling.py --out results/bench
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gdeq
from gdeq.lab.bench.steps import Setup, Step, cell_times, default_setup, measure, ours
from gdeq.lab.bench.where import profile

AXES: dict[str, list[int]] = {
    "batch": [32, 64, 128, 256, 512, 1024],
    "side": [16, 32, 64],
    "forward": [3, 9, 18, 36],
    "memory": [2, 6, 18],  # a memory for all 18 steps is the product form
}
TICKS = [digit * 10.0**power for power in range(-2, 4) for digit in (1, 2, 5)]
KINDS = ("convolutions", "norms", "solver", "optimiser", "other")  # side by side: counted each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="to see whether it runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--axis", choices=AXES, action="append", help="leave out for all")
    parser.add_argument("--draw", action="store_true", help="only the figure of what is in --out")
    options = parser.parse_args()
    if options.draw:
        with (options.out / "scaling.csv").open() as file:
            draw(options.out, [_numbers(row) for row in csv.DictReader(file)])
        return
    setup = replace(default_setup(), rounds=options.rounds)
    torch.backends.cudnn.benchmark = False  # trying all algorithms for each shape takes minutes
    rows = []
    for axis, values in AXES.items():
        if options.axis and axis not in options.axis:
            continue
        for value in values[:2] if options.tiny else values:
            rows.append({"axis": axis, "value": value, **one(replace(setup, **{axis: value}))})
            print(rows[-1], flush=True)
            if options.out:
                save(options.out, rows)
    if options.out:
        draw(options.out, rows)


def one(setup: Setup) -> dict[str, Any]:
    made: list[Step] = []

    def make() -> Step:
        made.append(ours(setup, gdeq.GDEQ()))
        return made[0]

    row = measure(setup, "", make)
    where: dict[str, float] = {}
    if setup.cuda:
        shown = profile(setup, made[0], None)
        where = {kind: shown["by_kind_ms"].get(kind, 0.0) for kind in KINDS}
        where["gaps"] = shown["gaps_ms"]
    channels = (32, 64, 128, 256)
    state = sum(c * (setup.side // 2**i) ** 2 for i, c in enumerate(channels))
    f = cell_times(setup, vjp=False)["f"]
    found = {"state": state, "ms": row["ms"], "peak_gib": row["peak_gib"], "f_ms": f}
    return found | {name: round(value, 4) for name, value in where.items()}


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    return {key: value if key == "axis" else float(value) for key, value in row.items()}


def save(out: Path, rows: list[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def draw(out: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    titles = {
        "batch": ("images in a batch", "value"),
        "side": ("numbers in the state of an image", "state"),
        "forward": ("Broyden steps", "value"),
        "memory": ("updates kept, of 18", "value"),
    }
    measured = {row["axis"] for row in rows}
    titles = {axis: title for axis, title in titles.items() if axis in measured}
    size = (3.5 * len(titles) + 1, 6)
    figure, grid = pyplot.subplots(2, len(titles), figsize=size, sharex="col", squeeze=False)
    for column, (axis, (title, key)) in enumerate(titles.items()):
        mine = [row for row in rows if row["axis"] == axis]
        x = [row[key] for row in mine]
        steps = [row["value"] if axis == "forward" else 18 for row in mine]
        # Where not all updates are kept, the last evaluation is not the differentiated one.
        extra = [4 if axis == "memory" and row["value"] < 18 else 3 for row in mine]
        in_f = [(n + e) * row["f_ms"] for n, e, row in zip(steps, extra, mine, strict=True)]
        top, bottom = grid[0][column], grid[1][column]
        top.plot(x, [row["ms"] for row in mine], "o-", label="step")
        top.plot(x, in_f, "s--", label="evaluations of f × time of one f")
        bottom.plot(x, [row["peak_gib"] or 0.0 for row in mine], "o-", color="C2")
        bottom.set_xlabel(title)
        scale = "linear" if axis in ("forward", "memory") else "log"
        for axes in (top, bottom):
            axes.set_xscale(scale)
            axes.set_yscale(scale)
            axes.set_xticks(x, [f"{value:,.0f}" for value in x])
            axes.minorticks_off()
            if scale == "log":
                low, high = axes.get_ylim()
                ticks = [tick for tick in TICKS if low <= tick <= high]
                axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            else:
                axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("ms a step")
    grid[1][0].set_ylabel("peak GiB")
    grid[0][0].legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(out / "scaling.png", dpi=130)


if __name__ == "__main__":
    main()
