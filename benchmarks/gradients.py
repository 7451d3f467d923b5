"""Errors of all gradients on maps from many fields, against dense algebra in float64.

The maps are those of tests/fields.py: LASSO, elastic net, Sinkhorn, Bratu, Poisson–Boltzmann,
Kepler, value iteration, APPNP, GARCH, transformer blocks, tanh layers and linear maps of prescribed
spectra.  Each is solved by Broyden's and Anderson's method to two tolerances; then every gradient
is compared with a dense solve at the z that was found.  Samples that did not converge, or where
I − J is singular, are left out.

Draws 0 to 2 were used to choose the method and its constants.  Draws 100 to 104 were not looked at
before the last run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch

from common import COLORS, Report, parser, pyplot
from fields import FIELDS, Solved
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Gradient, Implicit

DRAWS = {"development": range(3), "held out": range(100, 105)}
SOLVES = [kind(600, tol) for kind in (Broyden, Anderson) for tol in (1e-3, 1e-6)]
REFINED = (1, 2, 3, 4, 6, 8)
METHODS: dict[str, Gradient] = {
    "JFB": JFB(),
    "NPG": NPG(),
    "GDEQ, plain": GDEQ(),
    **{f"JFB, refine {k}": JFB(refine=k) for k in REFINED},
    **{f"GDEQ, refine {k}": GDEQ(refine=k) for k in REFINED},
    "GDEQ, tolerance 0.1": GDEQ(tolerance=0.1),
    "Implicit, Broyden": Implicit(Broyden(20, 1e-6)),
    "Implicit, GMRES": Implicit(GMRES(20, 1e-6)),
    "Implicit, GMRES, preconditioned": Implicit(GMRES(20, 1e-6), precondition=True),
}


def measure(draws: str, fields: list[str], report: Report) -> list[dict[str, Any]]:
    """One row for each sample, solve and method."""
    rows: list[dict[str, Any]] = []
    for field in fields:
        for seed in DRAWS[draws]:
            for solver in SOLVES:
                case = Solved(field, seed, solver)
                name = type(solver).__name__
                for method, gradient in METHODS.items():
                    if gradient.needs_inverse and not solver.keeps_inverse:
                        continue
                    errors, told = case.errors(gradient)
                    rows += [
                        {
                            "draws": draws,
                            "field": field,
                            "draw": seed,
                            "solver": name,
                            "tol": solver.tol,
                            "method": method,
                            "sample": sample,
                            "vjps": told.vjps,
                            "error": error,
                        }
                        for sample, error in enumerate(errors.tolist())
                    ]
        report(f"{draws}: {field}")
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over all fields: how large the errors are, and how many are not safe.

    An error is safe if it is at most twice the larger of 0.5 and JFB's with as many VJPs.
    """
    key = ("draws", "field", "draw", "solver", "tol", "sample")
    table: list[dict[str, Any]] = []
    for draws, solver in dict.fromkeys((row["draws"], row["solver"]) for row in rows):
        chosen = [row for row in rows if (row["draws"], row["solver"]) == (draws, solver)]
        by_method = {
            method: {tuple(row[k] for k in key): row for row in chosen if row["method"] == method}
            for method in METHODS
        }
        for method, found in by_method.items():
            if not found:
                continue
            # Above 1e9 a quantile says no more than that.
            errors = torch.tensor([row["error"] for row in found.values()]).nan_to_num(1e9, 1e9)
            line = {
                "draws": draws,
                "solver": solver,
                "method": method,
                "samples": len(errors),
                "median": errors.median().item(),
                "90 %": errors.quantile(0.9).item(),
                "worst": errors.max().item(),
                "above 1e-3": int((errors > 1e-3).sum()),
                "VJPs": sum(row["vjps"] for row in found.values()) / len(found),
                "not safe": "",
            }
            if method.startswith("GDEQ, refine"):
                base = by_method[method.replace("GDEQ", "JFB")]
                line["not safe"] = sum(
                    not row["error"] <= 2 * max(0.5, base[at]["error"]) for at, row in found.items()
                )
            table.append(line)
    return table


def draw(rows: list[dict[str, Any]], report: Report) -> None:
    plt = pyplot()
    solvers = ("Broyden", "Anderson")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, solver in zip(axes, solvers, strict=True):
        for name, color in (("JFB", COLORS["JFB"]), ("GDEQ", COLORS["GDEQ"])):
            for quantile, style in ((0.5, "-"), (0.9, "--"), (1.0, ":")):
                heights = [
                    torch.tensor(
                        [
                            row["error"]
                            for row in rows
                            if row["solver"] == solver and row["method"] == f"{name}, refine {k}"
                        ]
                    )
                    .quantile(quantile)
                    .item()
                    for k in REFINED
                ]
                told = {0.5: "median", 0.9: "90 %", 1.0: "worst"}[quantile]
                axis.semilogy(REFINED, heights, style, color=color, label=f"{name}, {told}")
        axis.set_title(f"after {solver}")
        axis.set_xlabel("VJPs (refine)")
    axes[0].set_ylabel("relative error of the gradient")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right")
    report.figure(figure)
    plt.close(figure)


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("gradients", args)
    torch.set_num_threads(1)  # the maps are small
    fields = list(FIELDS)[::8] if args.quick else list(FIELDS)
    names = list(DRAWS)[:1] if args.quick else list(DRAWS)
    rows = [row for name in names for row in measure(name, fields, report)]
    report()
    table = summarize(rows)
    report.table(table)
    report.csv(table)
    draw(rows, report)
    report.close()


if __name__ == "__main__":
    main()
