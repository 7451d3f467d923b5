"""Gradients against forward steps and tolerances on one trained model: what a forward solve that
ends early costs each of them.

    PYTHONPATH=src python3 benchmarks/budgets.py --run RUN --data DATA --out FOLDER

RUN is a run folder with its weights.  Mini-batches of training images, float32; the gradient of
each method from where the solver stopped, beside the exact one at the equilibrium (solved to
1e-6).  Half an hour on two cores; the CSV is written as it comes.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Report, parser, pyplot
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured
from gdeq.lab.data import Batches
from gdeq.lab.training import runs, similarity
from gdeq.solvers import GMRES, Broyden

METHODS: dict[str, Gradient] = {
    "JFB": Measured(JFB()),
    "GDEQ": Measured(GDEQ()),
    "GDEQ refine 1": GDEQ(refine=1),
    "GDEQ refine 2": GDEQ(refine=2),
    "GDEQ refine 4": GDEQ(refine=4),
    "GDEQ tolerance 0.1": GDEQ(tolerance=0.1, max_refine=5),
    "NPG": NPG(steps=5, damping=0.5),
    "exact from there": Implicit(GMRES(max_iter=60, tol=1e-4), double_backward=False),
}
STEPS = (4, 6, 9, 12, 18, 27)
TOLERANCES = (0.1, 0.01)  # within 27 steps


def budgets() -> dict[str, Broyden]:
    whole = Broyden(max_iter=27, stop="whole")  # as in `gdeq train`
    fixed = {f"{n} steps": replace(whole, max_iter=n, tol=0.0) for n in STEPS}
    return fixed | {f"tolerance {tol:g}": replace(whole, tol=tol) for tol in TOLERANCES}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--run", type=Path, required=True, help="a run folder with its weights")
    options.add_argument("--data", type=Path, help="folder of the data sets")
    options.add_argument("--batches", type=int, default=4)
    options.add_argument("--images", type=int, default=32, help="in a mini-batch")
    args = options.parse_args()
    report = Report("budgets", args)
    model, config, data = runs.trained_model(args.run, args.data, args.device)
    source = Batches(
        data.train_x, data.train_y, args.images, mean=data.mean, std=data.std, seed=config.seed
    )
    rows: list[dict[str, Any]] = []
    for index, (images, labels) in source.epoch(config.epochs):
        if index >= args.batches:
            break
        limits = similarity.EQUILIBRIUM_STEPS, similarity.EQUILIBRIUM_TOL
        tight = Broyden(*limits, stop="whole")
        truth = similarity._exact(model, tight, 1e-4, 1e-4, images, labels)
        forward, backward = map(truth.worst, (truth.forward_residual, truth.backward_residual))
        report(
            f"mini-batch {index + 1}: {int(truth.taken.sum())} of {len(images)} have an "
            f"equilibrium, solved to {forward:.1e}, and an adjoint, to {backward:.1e}"
        )
        for budget, solver in budgets().items():
            for name, method in METHODS.items():
                found = similarity._gradient(model, solver, method, images, labels, truth.taken)
                cosine, error = similarity._beside(found.gradient, truth.gradient)
                assert model.deq.solution is not None
                row = {"batch": index, "budget": budget, "method": name, "vjps": found.vjps}
                row |= {"cosine": cosine, "relative_error": error}
                row["residual"] = found.forward_residual[truth.taken].mean().item()
                row["steps"] = model.deq.solution.steps[truth.taken].double().mean().item()
                rows.append(row)
            report.csv(rows)
    show(report, rows)
    report.figure(draw(rows))
    report.close()


def of(rows: list[dict[str, Any]], budget: str, name: str, key: str) -> list[float]:
    return [row[key] for row in rows if (row["budget"], row["method"]) == (budget, name)]


def show(report: Report, rows: list[dict[str, Any]]) -> None:
    report("\ncosine with the exact gradient, (relative error): medians of the mini-batches")
    lines = []
    for name in METHODS:
        line: dict[str, Any] = {"": name}
        for budget in budgets():
            cosine, error = (
                statistics.median(of(rows, budget, name, key))
                for key in ("cosine", "relative_error")
            )
            line[budget] = f"{cosine:.3f} ({error:.2g})"
        lines.append(line)
    ends: dict[str, Any] = {"": "mean residual (steps)"}
    for budget in budgets():
        residual, steps = (
            statistics.fmean(of(rows, budget, "JFB", key)) for key in ("residual", "steps")
        )
        ends[budget] = f"{residual:.2g} ({steps:.1f})"
    report.table([*lines, ends])


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.4, 4.4))
    for name in METHODS:
        errors = [
            statistics.median(of(rows, f"{steps} steps", name, "relative_error")) for steps in STEPS
        ]
        axes.plot(STEPS, errors, marker="o", label=name)
    axes.set(yscale="log", xlabel="forward steps", ylabel="‖g − exact‖ / ‖exact‖")
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
