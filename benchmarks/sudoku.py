"""Sudoku: puzzles solved against solver steps, with and without a choice among random starts.

    python benchmarks/sudoku.py runs/RUN --data DATA --device cuda --starts 8

Steps are spent in segments of the length that the run was trained with, where steps through
autograd (gradient=unrolled) count too.  Of several starts, zeros and then random ones, the answer
with the smallest forward residual counts.  The picture shows one puzzle of the test along the
segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import COLORS, Report, parser, pyplot
from gdeq.lab.data.sudoku import Grids, with_more_givens
from gdeq.lab.tasks.sudoku import Puzzles
from gdeq.lab.training import runs
from gdeq.lab.training.loop import Trainer
from gdeq.lab.training.precision import precision

BATCH = 2000
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)  # segments in the picture


def sets(task: Puzzles, pool: str, many: int) -> Iterator[tuple[str, Grids]]:
    """The tests: by givens, and the hardest (every so many of them, in the order of the table)."""
    pools = task.pools()
    for low, high in ((0, 0), (1, 17)):
        name = "17 givens" if high == 0 else "18 to 34 givens"
        yield name, with_more_givens(pools[pool], (low, high), many)
    hardest = pools.get("hardest") if pool == "test" else None
    if hardest is not None:
        every = max(1, len(hardest.puzzles) // many)
        yield "hardest", Grids(*(grid[::every][:many] for grid in hardest))


def steps_of(trainer: Trainer) -> int:
    """Of one segment."""
    config = trainer.config
    return config.solver.max_iter + config.gradient.steps * (config.gradient.name == "unrolled")


@torch.no_grad()
def solve(trainer: Trainer, puzzles: Tensor, starts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Digits (starts, b, 81) and residuals (starts, b) after all segments."""
    model: Any = trainer.model
    source = torch.Generator(puzzles.device).manual_seed(seed)
    digits, residuals = [], []
    for number in range(starts):
        z = model.start(model.embed(puzzles), source) if number else None
        digits.append(model(puzzles, z)[:, -1].argmax(2) + 1)
        residuals.append(model.deq.solution.residual)
    return torch.stack(digits), torch.stack(residuals)


def solved_by_steps(
    trainer: Trainer, grids: Grids, steps: list[int], starts: int, seed: int
) -> Iterator[dict[str, float]]:
    """Shares in per cent, for each number of solver steps."""
    model: Any = trainer.model
    device, length, before = trainer.process.device, steps_of(trainer), model.test_segments
    puzzles, solutions = (torch.from_numpy(g).to(device).long() for g in grids)
    for many in steps:
        model.test_segments = max(1, round(many / length))
        first, best, cells, residual = [], [], [], []
        for at in range(0, len(puzzles), BATCH):
            truth = solutions[at : at + BATCH]
            digits, left = solve(trainer, puzzles[at : at + BATCH], starts, seed + at)
            right = digits == truth  # (starts, b, 81)
            chosen = left.nan_to_num(torch.inf).argmin(0)
            first.append(right[0].all(1))
            best.append(right.all(2)[chosen, torch.arange(len(truth), device=device)])
            cells.append(right[0].float().mean(1))
            residual.append(left[0])
        yield {
            "steps": many,
            "evaluations": model.test_segments * length,
            "solved": percent(first),
            "best": percent(best),
            "cells": percent(cells),
            "residual": torch.cat(residual).median().item(),
        }
    model.test_segments = before


def percent(parts: list[Tensor]) -> float:
    return 100 * torch.cat(parts).float().mean().item()


@torch.no_grad()
def draw(trainer: Trainer, puzzle: Tensor, solution: Tensor) -> Any:
    """puzzle, solution: (81,).  Of a board, what the model thinks after so many solver steps."""
    model: Any = trainer.model
    model.test_segments = SHOWN[-1]
    share, digit = model(puzzle[None])[0].float().softmax(2).max(2)  # (segments, 81)
    length, plt = steps_of(trainer), pyplot()
    figure, boards = plt.subplots(2, len(SHOWN) // 2, figsize=(12, 6.4))
    for axes, segment in zip(boards.flat, SHOWN, strict=True):
        for line in range(10):
            width = 1.6 if line % 3 == 0 else 0.4
            axes.plot([0, 9], [line, line], color="black", linewidth=width)
            axes.plot([line, line], [0, 9], color="black", linewidth=width)
        for cell in range(81):
            given, at = puzzle[cell] > 0, segment - 1
            value = int(puzzle[cell]) if given else int(digit[at, cell]) + 1
            right = value == int(solution[cell])
            colour = "black" if given else COLORS["GDEQ"] if right else COLORS["Implicit"]
            axes.text(
                cell % 9 + 0.5, cell // 9 + 0.55, str(value), ha="center", va="center",
                color=colour, alpha=1.0 if given else max(0.12, float(share[at, cell])),
                fontweight="bold" if given else None, fontsize=11,
            )  # fmt: skip
        axes.set(xlim=(0, 9), ylim=(9, 0), aspect="equal", title=f"{segment * length} solver steps")
        axes.axis("off")
    figure.suptitle("Blue: right.  Orange: wrong.  The fainter, the less certain.", fontsize=10)
    return figure


def main() -> None:
    wanted = parser("Puzzles solved against solver steps.")
    wanted.add_argument("run", type=Path, help="folder of a finished run")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256])
    wanted.add_argument("--starts", type=int, default=8, help="to choose among by residual")
    wanted.add_argument("--test", default="test", choices=("test", "validation"), help="which pool")
    wanted.add_argument("--puzzles", type=int, default=2000, help="of each set")
    args = wanted.parse_args()
    if args.quick:
        args.steps, args.starts, args.puzzles = [16, 64], 2, 36
    report = Report("sudoku", args)
    trainer = runs.trained(args.run, args.data, args.device)
    task = trainer.task
    assert isinstance(task, Puzzles)
    trainer.set_phase(trainer.total)
    with precision(trainer.config, trainer.process.device):
        found = [
            {"set": name, "puzzles": len(grids.puzzles), "starts": args.starts, **row}
            for name, grids in sets(task, args.test, args.puzzles)
            for row in solved_by_steps(trainer, grids, args.steps, args.starts, args.seed)
        ]
        report.table(found)
        report.csv(found)
        puzzles, solutions = next(iter(task.test_batches(1).epoch()))[1]
        report.figure(draw(trainer, puzzles[0], solutions[0] + 1))
    report.close()


if __name__ == "__main__":
    main()
