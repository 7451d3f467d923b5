"""Sudoku: puzzles solved against solver steps, with and without a choice among random starts.

    python benchmarks/sudoku.py runs/RUN --data DATA --device cuda --starts 8

Steps are spent in segments of the length that the run was trained with, where steps through
autograd (gradient=unrolled) count too.  Of several starts, zeros and then random ones, the answer
with the smallest forward residual counts.  The picture shows one puzzle of the test filling in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import COLORS, Report, parser, pyplot
from gdeq import JFB
from gdeq.lab.data.sudoku import Grids, with_more_givens
from gdeq.lab.tasks.sudoku import Puzzles
from gdeq.lab.training import runs
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import precision

BATCH = 2000
SHOWN = (2, 4, 8, 12, 16, 24, 32, 48)  # solver steps in the picture


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


def steps_of(learner: Learner) -> int:
    """Of one segment."""
    config = learner.config
    return config.solver.max_iter + config.gradient.steps * (config.gradient.name == "unrolled")


@torch.no_grad()
def solve(learner: Learner, puzzles: Tensor, starts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Digits (starts, b, 81) and residuals (starts, b) after all segments."""
    model: Any = learner.model
    source = torch.Generator(puzzles.device).manual_seed(seed)
    digits, residuals = [], []
    for number in range(starts):
        z = model.start(model.embed(puzzles), source) if number else None
        digits.append(model(puzzles, z)[:, -1].argmax(2) + 1)
        residuals.append(model.deq.solution.residual)
    return torch.stack(digits), torch.stack(residuals)


def solved_by_steps(
    learner: Learner, grids: Grids, steps: list[int], starts: int, seed: int
) -> Iterator[dict[str, float]]:
    """Shares in per cent, for each number of solver steps."""
    model: Any = learner.model
    device, length, before = learner.process.device, steps_of(learner), model.test_segments
    puzzles, solutions = (torch.from_numpy(g).to(device).long() for g in grids)
    for many in steps:
        model.test_segments = max(1, round(many / length))
        first, best, cells, residual = [], [], [], []
        for at in range(0, len(puzzles), BATCH):
            truth = solutions[at : at + BATCH]
            digits, left = solve(learner, puzzles[at : at + BATCH], starts, seed + at)
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
def draw(learner: Learner, grids: Grids) -> Any:
    """Of the puzzles that are solved at last, the one that takes most steps, filling in."""
    model: Any = learner.model
    puzzles, solutions = (torch.from_numpy(g).to(learner.process.device).long() for g in grids)
    model.deq.solver = replace(model.deq.solver, max_iter=SHOWN[-1])
    model.deq.gradient = JFB()  # without steps through autograd
    states = torch.stack(model.deq.trajectory(model.embed(puzzles), at=SHOWN)[:-1])
    shares, digits = model.answer(states).float().softmax(3).max(3)  # (shown, b, 81)
    right = digits + 1 == solutions
    late = (~right.all(2)).sum(0).where(right[-1].all(1), -1).argmax()
    puzzle, share, digit, right = (t.cpu() for t in (
        puzzles[late], shares[:, late], digits[:, late] + 1, right[:, late]
    ))  # fmt: skip
    plt = pyplot()
    figure, boards = plt.subplots(2, len(SHOWN) // 2, figsize=(12, 6.4))
    for at, axes in enumerate(boards.flat):
        for line in range(10):
            width = 1.6 if line % 3 == 0 else 0.4
            axes.plot([0, 9], [line, line], color="black", linewidth=width)
            axes.plot([line, line], [0, 9], color="black", linewidth=width)
        for cell in range(81):
            given = bool(puzzle[cell] > 0)
            value = int(puzzle[cell] if given else digit[at, cell])
            colour = COLORS["GDEQ"] if right[at, cell] else COLORS["Implicit"]
            axes.text(
                cell % 9 + 0.5, cell // 9 + 0.55, str(value), ha="center", va="center",
                color="black" if given else colour, fontweight="bold" if given else None,
                alpha=1.0 if given else max(0.12, float(share[at, cell])), fontsize=11,
            )  # fmt: skip
        free = puzzle == 0
        title = f"{SHOWN[at]} solver steps: {int(right[at][free].sum())} of {int(free.sum())}"
        axes.set(xlim=(0, 9), ylim=(9, 0), aspect="equal", title=title)
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
    wanted.add_argument("--picture", type=int, default=200, help="chosen from so many; 0: none")
    args = wanted.parse_args()
    if args.quick:
        args.steps, args.starts, args.puzzles = [16, 64], 2, 36
    report = Report("sudoku", args)
    learner = runs.trained(args.run, args.data, args.device)
    task = learner.task
    assert isinstance(task, Puzzles)
    learner.set_phase(learner.total)
    with precision(learner.config, learner.process.device):
        found = [
            {"set": name, "puzzles": len(grids.puzzles), "starts": args.starts, **row}
            for name, grids in sets(task, args.test, args.puzzles)
            for row in solved_by_steps(learner, grids, args.steps, args.starts, args.seed)
        ]
        report.table(found)
        report.csv(found)
        if args.picture:
            shown = with_more_givens(task.pools()[args.test], (0, 0), args.picture)
            report.figure(draw(learner, shown))
    report.close()


if __name__ == "__main__":
    main()
