"""Sudoku: what each gradient buys at equal time, by puzzles of the validation pool solved.

    python benchmarks/sudoku_gradients.py --data DATA --device cuda --seconds 6 --seeds 3

All rows train the same network with the same optimiser for the same wall time, which sets the
number of their steps; the learning rate falls to zero over those.  At equal memory, one evaluation
of f kept for autograd in each segment, unrolling is JFB; unrolled 2 and 4 keep two and four.
The residual penalty, ‖f(z) − z‖² / ‖z‖² at the last z, is added to the loss at each step; rows with
a star are without.

The gradient's error is ‖g − g*‖ / ‖g*‖ for the gradient g of a puzzle's loss in the last segment
with respect to x, beside the exact one at the same z, in float32: the median over the puzzles where
g* is known, that is, where GMRES ends with a residual below 0.1.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import Report, parser
from gdeq import GMRES, Gradient, Implicit, spectral_radius
from gdeq.lab.data.sudoku import Grids, with_more_givens
from gdeq.lab.tasks.sudoku import Puzzles
from gdeq.lab.training import config as configs
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import precision
from gdeq.lab.training.process import Process
from gdeq.lab.training.recordings import Recordings, wait_for
from sudoku import solved_by_steps, steps_of

BASE = (*("ema=0", "measure_every=10", "batch_size=256", "model.width=128"),)
PICARD = ("solver=picard", "solver.max_iter=7")
UNROLLED = ("gradient=unrolled", "gradient.damping=1")
PENALTY = ("residual_weight=1", "residual_every=1")
GRADIENTS: dict[str, tuple[str, ...]] = {
    "implicit": (*PICARD, "gradient=implicit", "gradient.max_iter=8"),
    "jfb": (*PICARD, "gradient=jfb", "gradient.refine=0"),
    "npg 4": (*PICARD, "gradient=npg", "gradient.steps=4", "gradient.damping=1"),
    "gdeq": ("solver=broyden", "solver.max_iter=7", "gradient=gdeq", "gradient.refine=0"),
    "gdeq refine 1": (*PICARD, "gradient=gdeq", "gradient.refine=1"),
    "gdeq refine 2": (*PICARD, "gradient=gdeq", "gradient.refine=2"),
    "unrolled 2": ("solver=picard", "solver.max_iter=6", *UNROLLED, "gradient.steps=2"),
    "unrolled 4": ("solver=picard", "solver.max_iter=4", *UNROLLED, "gradient.steps=4"),
}
# Each with the residual penalty, and without (a star).
ROWS = {name: (*how, *PENALTY) for name, how in GRADIENTS.items()} | {
    f"{name} *": how for name, how in GRADIENTS.items()
}
QUICK = ("model.width=12", "model.heads=3", "batch_size=16", "graph=false", "precision=float32")


JUDGED = ("residual at the end", "spectral radius", "exact known %", "gradient error", "cosine")


class Bench:
    """One network, compiled once, which all rows and seeds train from new weights."""

    def __init__(self, settings: list[str], device: str, root: Path | None) -> None:
        self.settings, self.root = settings, root
        place = torch.device(device)
        self.learner = self.made(self.config(()), place)
        self.gpus = [place] if place.type == "cuda" else []

    def made(self, config: Any, place: torch.device) -> Learner:
        return Learner(config, Process(place), self.root)

    def config(self, row: tuple[str, ...], seed: int = 0) -> Any:
        return configs.load("sudoku", [*BASE, *row, *self.settings, f"seed={seed}"])

    def take_up(self, row: tuple[str, ...]) -> None:
        learner = self.learner
        learner.config = self.config(row)
        learner.recordings = Recordings(learner.config.graph and bool(self.gpus), False)
        gc.collect()  # the last row's recordings
        if self.gpus:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def restart(self, seed: int, total: int) -> None:
        """New weights and moments in the same tensors: what was recorded stays good."""
        learner = self.learner
        torch.manual_seed(seed)
        compiled: Any = learner.model
        compiled.load_state_dict(learner.task.model().state_dict())
        learner.task.reasoner = compiled  # type: ignore[attr-defined]
        if compiled.carry is not None:
            compiled.carry.age.zero_()
        for kept in learner.optimizer.state.values():
            for value in kept.values():
                value.zero_()
        learner.train_batches.seed = seed
        learner.step, learner.total = 0, total
        learner.sums.clear()

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        for epoch in range(10**6):
            yield from (batch for _, batch in self.learner.train_batches.epoch(epoch))

    def pace(self, seconds: float) -> float:
        """Seconds that a step takes."""
        self.restart(0, 10**6)
        batches = self.batches()
        for _ in range(11):  # measured and unmeasured ones
            self.learner.one_step(*next(batches))
        wait_for(self.gpus)
        began, steps = time.perf_counter(), 0
        while steps < 10 or time.perf_counter() - began < seconds:
            for _ in range(10):
                self.learner.one_step(*next(batches))
            wait_for(self.gpus)
            steps += 10
        return (time.perf_counter() - began) / steps

    def train(self, seed: int, total: int) -> dict[str, Any]:
        learner = self.learner
        self.restart(seed, total)
        batches, told = self.batches(), {}
        began = time.perf_counter()
        for part in (0.25, 1.0):
            while learner.step < round(part * total):
                learner.one_step(*next(batches))
            found = learner.sums.read(learner.process, since_mark=True)
            learner.sums.mark()
            when = "first quarter" if part < 1 else "rest"
            names = ("loss", "residual", "backward_residual", "batch_error")
            told |= {f"{name}, {when}": found[name] for name in names}
        wait_for(self.gpus)
        return {"steps": total, "seconds": time.perf_counter() - began, **told}


def gradient_of(learner: Learner, puzzles: Tensor, digits: Tensor, how: Gradient) -> Tensor:
    """Of each puzzle's loss in the last segment, with respect to x: (b, 81 · width)."""
    model: Any = learner.model
    with torch.no_grad():
        x = model.embed(puzzles)
        z = model.start(x, torch.Generator(puzzles.device).manual_seed(0))
        for _ in range(model.test_segments - 1):
            z = model.deq(x, z0=z)
    model.deq.gradient = how
    x.requires_grad_()
    answer = model.answer(model.deq(x, z0=z.detach()))
    (found,) = torch.autograd.grad(learner.task.losses(answer[:, None], digits).sum(), x)
    return found.flatten(1)


def judged(learner: Learner, grids: Grids) -> dict[str, float]:
    """At the trained weights: residual, spectral radius, and the gradient beside the exact one."""
    model: Any = learner.model
    device, deq = learner.process.device, model.deq
    puzzles, solutions = (torch.from_numpy(grid[:64]).to(device).long() for grid in grids)
    learner.set_phase(learner.total)
    own = gradient_of(learner, puzzles, solutions - 1, deq.gradient)
    # As many steps, those through autograd counted.
    deq.solver = replace(deq.solver, max_iter=steps_of(learner))
    exact = gradient_of(learner, puzzles, solutions - 1, Implicit(GMRES(max_iter=60, tol=1e-3)))
    solution, x = deq.solution, model.embed(puzzles).detach()
    known = solution.record.residual < 0.1
    error = (own - exact).norm(dim=1) / exact.norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(own, exact, dim=1)
    radius = spectral_radius(lambda z: deq.cell(z, x), solution.z, 30)
    return {
        "residual at the end": solution.residual.median().item(),
        "spectral radius": radius.median().item(),
        "exact known %": 100 * known.float().mean().item(),
        "gradient error": error[known].median().item(),  # NaN of none
        "cosine": cosine[known].median().item(),
    }


def trained(bench: Bench, row: str, args: Any, sets: dict[str, Grids]) -> Iterator[dict[str, Any]]:
    """One row: what each seed comes to."""
    learner = bench.learner
    with precision(learner.config, learner.process.device):
        bench.take_up(ROWS[row])
        pace = bench.pace(min(1.0, args.seconds / 8))
        total = args.train_steps or max(10, round(args.seconds / pace))
        peak = torch.cuda.max_memory_allocated() / 2**30 if bench.gpus else float("nan")
        for seed in range(args.seed, args.seed + args.seeds):
            told = bench.train(seed, total)
            told = {"row": row, "seed": seed, "ms": 1e3 * pace, "GiB": peak, **told}
            # As it is, without compiling for other sizes.
            with torch.compiler.set_stance("force_eager"):
                learner.model.eval()
                learner.set_phase(learner.total)
                for name, grids in sets.items():
                    for each in solved_by_steps(learner, grids, args.steps, 1, seed):
                        told[f"solved {name}, {each['steps']}"] = each["solved"]
                with torch.autocast(learner.process.device.type, enabled=False):
                    told |= judged(learner, sets["more"])
            yield told


def summary(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Mean and spread over the seeds."""
    for row in dict.fromkeys(each["row"] for each in found):
        those = [each for each in found if each["row"] == row]
        told = {"row": row, "seeds": len(those)}
        for name in ("steps", "ms", "GiB"):
            told[name] = those[0][name]
        for name in those[0]:
            if name.startswith("solved"):
                values = [each[name] for each in those]
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                told[name] = f"{statistics.mean(values):.1f}{spread}"
        for name in JUDGED:
            told[name] = statistics.mean(each[name] for each in those)
        yield told


def main() -> None:
    wanted = parser("Gradients on Sudoku at equal time.")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--seconds", type=float, default=6.0, help="of training, each")
    wanted.add_argument("--train-steps", type=int, default=0, help="in place of --seconds")
    wanted.add_argument("--seeds", type=int, default=3)
    wanted.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256])
    wanted.add_argument("--puzzles", type=int, default=1000, help="of each set")
    wanted.add_argument("--within", type=float, default=1e9, help="seconds for all rows")
    wanted.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    wanted.add_argument("--set", nargs="+", default=[], help="settings for all rows, key=value")
    args = wanted.parse_args()
    if args.quick:
        args.seconds, args.seeds, args.steps, args.puzzles = 1.0, 1, [16, 32], 36
        args.set = [*QUICK, *args.set]
    report = Report("sudoku_gradients", args)
    bench = Bench([*args.set, f"device={args.device}"], args.device, args.data)
    task = bench.learner.task
    assert isinstance(task, Puzzles)
    pool = task.pools()["validation"]
    sets = {
        "17": with_more_givens(pool, (0, 0), args.puzzles),
        "more": with_more_givens(pool, task.revealed, args.puzzles),
    }
    found: list[dict[str, Any]] = []
    last = 0.0  # seconds that the last row took
    for row in args.rows:
        began = time.perf_counter()
        if began - report.started + last > args.within:
            report(f"no time is left for {row}")
            continue
        try:
            for told in trained(bench, row, args, sets):
                found.append(told)
                report(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                                for k, v in told.items()))  # fmt: skip
                report.csv(found)  # at once: a run that is cut short keeps what it has
        except Exception as problem:
            report(f"{row} failed, the others go on: {problem!r}")
        last = time.perf_counter() - began
    report.table(list(summary(found)))
    report.close()


if __name__ == "__main__":
    main()
