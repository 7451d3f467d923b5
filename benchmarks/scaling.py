"""How a recorded step grows: time and memory against batch, state size, solver steps and memory.

PYTHONPATH=src python3 benchmarks/scaling.py --out results/bench
"""

from __future__ import annotations

import argparse
import copy
import csv
from pathlib import Path
from typing import Any

import torch

import gdeq
from step import cell_times, measure, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="large")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.batch, options.side, options.forward, options.backward = 128, 32, 18, 20
    options.precision = "bf16" if options.device == "cuda" else "float32"
    torch.backends.cudnn.benchmark = False  # trying all algorithms for each shape takes minutes
    axes: dict[str, list[Any]] = {
        "batch": [32, 64, 128, 256, 512, 1024],
        "side": [8, 16, 32, 64],
        "forward": [3, 6, 9, 12, 18, 27, 36],
    }
    rows = []
    for axis, values in axes.items():
        for value in values:
            case = copy.copy(options)
            setattr(case, axis, value)
            rows.append({"axis": axis, "value": value, **one(case)})
            if options.out:
                save(options.out, rows)
    if options.out:
        draw(options.out, rows)


def one(options: argparse.Namespace) -> dict[str, Any]:
    images = torch.randn(options.batch, 3, options.side, options.side, device=options.device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=options.device)
    name = f"batch {options.batch}, side {options.side}, {options.forward} steps"
    row = measure(
        name,
        lambda: ours(options, gdeq.GDEQ(), options.precision),
        (images, labels),
        options.rounds,
    )
    state = sum(
        channels * (options.side // 2**i) ** 2 for i, channels in enumerate((32, 64, 128, 256))
    )
    f = cell_times(options, images)["f"] if options.device == "cuda" else 0.0
    return {"state": state, "ms": row["ms"], "peak_gib": row["peak_gib"], "f_ms": f}


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
    }
    figure, grid = pyplot.subplots(2, 3, figsize=(11, 6), sharex="col")
    for column, (axis, (title, key)) in enumerate(titles.items()):
        mine = [row for row in rows if row["axis"] == axis]
        x = [row[key] for row in mine]
        steps = [row["value"] if axis == "forward" else 18 for row in mine]
        in_f = [(n + 4) * row["f_ms"] for n, row in zip(steps, mine, strict=True)]
        top, bottom = grid[0][column], grid[1][column]
        top.plot(x, [row["ms"] for row in mine], "o-", label="step")
        top.plot(x, in_f, "s--", label="evaluations of f × time of one f")
        bottom.plot(x, [row["peak_gib"] for row in mine], "o-", color="C2")
        bottom.set_xlabel(title)
        scale = "linear" if axis == "forward" else "log"
        for axes in (top, bottom):
            axes.set_xscale(scale)
            axes.set_yscale(scale)
            axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("ms a step")
    grid[1][0].set_ylabel("peak GiB")
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(out / "scaling.png", dpi=130)


if __name__ == "__main__":
    main()
