"""Errors of all gradients on maps from many fields, against dense algebra in float64.

The maps are those of tests/fields.py: LASSO, elastic net, Sinkhorn, Bratu, Poisson–Boltzmann,
Kepler, value iteration, APPNP, GARCH, transformer blocks, tanh layers and linear maps of prescribed
spectra.  Each is solved by Broyden's and Anderson's method to two tolerances; then every gradient
is compared with a dense solve at the z that was found.  Samples that did not converge, or where
I − J is singular, are left out.

"Not safe" is an error above twice the larger of 0.5 and what the same VJPs reach without the
forward solve: ``JFB(refine=k)`` for ``GDEQ(refine=k)``, ``JFB(refine=10)`` for a tolerance, and the
plain solve for a preconditioned one.

The draws of this table were not looked at while the method was chosen.  Tried on others without
gain: for the first w, secants as they are (unsafe on LASSO by up to 58 times), scaled to their
smallest residual (loses slow modes), v first and secants later (worse everywhere), and dropping
every secant that does not fit (loses value iteration).  For the last step, the combination of
smallest residual for every sample, or wherever a residual is above that of w = 0: both lose value
iteration, whose good w have large residuals.  On LASSO and the elastic net, smaller ridges for
secants that fit, other scales of misfit, and −I after the first step change the medians by a few
per cent at most: the secants hold little of w.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from torch import Tensor

import gdeq
from common import COLORS, Report, parser, pyplot
from fields import FIELDS, HARDER, Solved
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Gradient, Implicit, Unrolled

DRAWS = [(seed, torch.float64) for seed in range(4000, 4003)]
DRAWS += [(4000, torch.float32)]
SOLVES = [kind(600, tol) for kind in (Broyden, Anderson) for tol in (1e-3, 1e-6)]
REFINED = range(1, 9)
INNER = {"Broyden": Broyden(20, 1e-6), "GMRES": GMRES(20, 1e-6)}
METHODS: dict[str, Gradient] = {
    "JFB": JFB(),
    "NPG": NPG(),
    "Unrolled": Unrolled(),
    "GDEQ, plain": GDEQ(),
    **{f"JFB, refine {k}": JFB(refine=k) for k in (*REFINED, 10)},
    **{f"GDEQ, refine {k}": GDEQ(refine=k) for k in REFINED},
    "GDEQ, tolerance 0.1": GDEQ(tolerance=0.1),
    **{f"Implicit, {name}": Implicit(inner) for name, inner in INNER.items()},
    **{f"{name}, precond.": Implicit(inner, precondition=True) for name, inner in INNER.items()},
}
# More draws: of the set, of the map that is furthest from normal, and of two not in the set.
MORE = {
    "the set": (list(FIELDS), range(5000, 5008)),
    "linear, far from normal": (["linear, far from normal"], range(5000, 5030)),
    **{name: ([name], range(5000, 5013)) for name in HARDER},
}
# What "not safe" compares with.
BASE = {f"GDEQ, refine {k}": f"JFB, refine {k}" for k in REFINED}
BASE |= {"GDEQ, tolerance 0.1": "JFB, refine 10"}
BASE |= {f"{name}, precond.": f"Implicit, {name}" for name in INNER}
JUDGED = {name: METHODS[name] for name in (*BASE, *BASE.values())}

Row = dict[str, Any]


def measure(
    fields: Iterable[str],
    draws: Iterable[tuple[int, torch.dtype]],
    methods: dict[str, Gradient] = METHODS,
) -> list[Row]:
    """One row for each sample, solve and method."""
    rows: list[Row] = []
    for field in fields:
        for seed, dtype in draws:
            for solver in SOLVES:
                case = Solved(field, seed, solver, dtype)
                at = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "solver": type(solver).__name__,
                    "tol": solver.tol,
                    "field": field,
                    "draw": seed,
                }
                for method, gradient in methods.items():
                    if method == "GDEQ, plain" and not isinstance(solver, Broyden):
                        continue
                    if isinstance(gradient, Unrolled):
                        errors, vjps = case.errors_of_unrolling(gradient), gradient.steps
                        guesses = torch.full_like(errors, torch.nan)
                    else:
                        errors, told = case.errors(gradient)
                        guesses, vjps = case.estimates(told), told.vjps
                    pairs = zip(errors.tolist(), guesses.tolist(), strict=True)
                    rows += [
                        at
                        | {"method": method, "sample": i, "vjps": vjps, "error": e, "estimate": g}
                        for i, (e, g) in enumerate(pairs)
                    ]
    return rows


def grouped(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def unsafe(rows: list[Row], base: list[Row]) -> list[Row]:
    pairs = zip(rows, base, strict=True)
    return [
        row | {"without": other["error"]}
        for row, other in pairs
        if not row["error"] <= 2 * max(0.5, other["error"])
    ]


def cases(rows: list[Row]) -> list[Row]:
    """Every one that is not safe."""
    of = grouped(rows, "method")
    names = "draw", "solver", "tol", "method", "error", "without"
    pairs = ((of[(method,)], of[(base,)]) for method, base in BASE.items())
    return [{name: row[name] for name in names} for pair in pairs for row in unsafe(*pair)]


def numbers(rows: list[Row], name: str = "error") -> Tensor:
    # Above 1e9 a quantile says no more than that.
    return torch.tensor([row[name] for row in rows], dtype=torch.float64).nan_to_num(1e9, 1e9)


def summarize(rows: list[Row]) -> list[Row]:
    """Over all fields: how large the errors are, and how many are not safe."""
    table: list[Row] = []
    for (dtype, solver, tol), chosen in grouped(rows, "dtype", "solver", "tol").items():
        of = grouped(chosen, "method")
        for (method,), found in of.items():
            errors, base = numbers(found), of.get((BASE.get(method),))
            if method.startswith("JFB, refine"):
                continue  # shown beside the others
            table.append(
                {
                    "dtype": dtype,
                    "solved by": f"{solver}, {tol:.0e}",
                    "method": method,
                    "judged": len(errors),
                    "VJPs": numbers(found, "vjps").mean().item(),
                    "median": errors.median().item(),
                    "90 %": errors.quantile(0.9).item(),
                    "worst": errors.max().item(),
                    "without": numbers(base).median().item() if base else "",
                    "not safe": len(unsafe(found, base)) if base else "",
                }
            )
    return table


def totals(table: list[Row]) -> list[Row]:
    """How many are not safe, for refine 1 to 8 together."""
    kinds = {
        "refine 1 to 8": lambda method: method.startswith("GDEQ, refine"),
        "tolerance": lambda method: "tolerance" in method,
        "preconditioned": lambda method: "precond" in method,
    }
    found = []
    for (dtype, solve), rows in grouped(table, "dtype", "solved by").items():
        line: Row = {"dtype": dtype, "solved by": solve}
        for kind, of_kind in kinds.items():
            chosen = [row for row in rows if of_kind(row["method"])]
            unsafe_ones = sum(row["not safe"] for row in chosen)
            line[kind] = f"{unsafe_ones} of {sum(row['judged'] for row in chosen)}"
        found.append(line)
    return found


def behind(rows: list[Row]) -> list[Row]:
    """Fields where refinement from JFB has the smaller median error, and for which k."""
    table = []
    for (field,), found in grouped(rows, "field").items():
        of = grouped(found, "method")
        ratios = {
            k: (numbers(of[(f"GDEQ, refine {k}",)]).median()
                / numbers(of[(f"JFB, refine {k}",)]).median()).item()
            for k in REFINED
        }  # fmt: skip
        if max(ratios.values()) > 1:
            table.append({"field": field} | {f"k = {k}": ratio for k, ratio in ratios.items()})
    return table


def understated(rows: list[Row]) -> list[Row]:
    """Fields where the record's estimate is more than twice too small for over 5 % of samples."""
    table = []
    chosen = [row for row in rows if row["method"] in [f"GDEQ, refine {k}" for k in (1, 2, 4)]]
    for (solver, field), found in {
        **grouped(chosen, "solver", "field"),
        **{(solver, "all"): rows for (solver,), rows in grouped(chosen, "solver").items()},
    }.items():
        ratio = numbers(found) / numbers(found, "estimate")
        share = (ratio > 2).double().mean().item()
        if share > 0.05 or field == "all":
            table.append(
                {
                    "solver": solver,
                    "field": field,
                    "share above 2 x": share,
                    "median": ratio.median().item(),
                    "90 %": ratio.quantile(0.9).item(),
                    "worst": ratio.max().item(),
                }
            )
    return table


def forward_estimates(batches: int) -> list[Row]:
    """True error of z beside `Solution.error`, by the smallest singular value of linear maps."""
    make, d, table = torch.Generator().manual_seed(11), 20, []
    eye = torch.eye(d, dtype=torch.float64)
    for smallest in (1e-1, 1e-2, 1e-3, 1e-4):
        ratios = []
        for _ in range(batches):
            drawn = torch.randn(100, d, d, generator=make, dtype=torch.float64) / d**0.5
            left, values, right = torch.linalg.svd(eye - 0.6 * drawn)
            values[:, -1] = smallest
            system = left @ torch.diag_embed(values) @ right
            x = torch.randn(100, d, generator=make, dtype=torch.float64)
            found = gdeq.solve(
                lambda z, M=eye - system, x=x: torch.einsum("bij,bj->bi", M, z) + x,
                torch.zeros_like(x),
                Broyden(200, 1e-3),
            )
            off = (found.z - torch.linalg.solve(system, x)).norm(dim=1) / found.z.norm(dim=1)
            ratios.append((off / found.error)[found.converged])
        ratio = torch.cat(ratios)
        table.append(
            {
                "smallest singular value": smallest,
                "converged": len(ratio),
                "median": ratio.median().item(),
                "90 %": ratio.quantile(0.9).item(),
                "worst": ratio.max().item(),
            }
        )
    return table


def draw(rows: list[Row], report: Report) -> None:
    plt = pyplot()
    solvers = ("Broyden", "Anderson")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, solver in zip(axes, solvers, strict=True):
        of = grouped([row for row in rows if row["solver"] == solver], "method")
        for name, color in (("JFB", COLORS["JFB"]), ("GDEQ", COLORS["GDEQ"])):
            for quantile, style in ((0.5, "-"), (0.9, "--"), (1.0, ":")):
                heights = [
                    numbers(of[(f"{name}, refine {k}",)]).quantile(quantile).item() for k in REFINED
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


def report_more(report: Report, quick: bool) -> None:
    """Only what is judged, on more draws."""
    for name, (maps, more) in MORE.items():
        chosen, seeds = (maps[:1], more[:1]) if quick else (maps, more)
        found = measure(chosen, [(seed, torch.float64) for seed in seeds], JUDGED)
        report(f"\n{name}, draws {seeds[0]} to {seeds[-1]}, and each case that is not safe")
        report.table(totals(summarize(found)))
        report.table(cases(found))
        if name in ("the set", "GRU cell"):
            report("\nmedian of GDEQ(refine=k) over that of JFB(refine=k) there, where above 1")
            report.table(behind(found))


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    report = Report("gradients", args)
    torch.set_num_threads(1)  # the maps are small
    fields = list(FIELDS)[::8] if args.quick else list(FIELDS)
    draws = [(0, torch.float64)] if args.quick else DRAWS
    rows = measure(fields, draws)
    table = summarize(rows)
    double = [row for row in rows if row["dtype"] == "float64"]
    seeds = [seed for seed, dtype in draws if dtype == torch.float64]
    report(f"draws {seeds}, in float32 the first; not safe, of all judged samples:")
    report.table(totals(table))
    for field in HARDER:
        report(f"\n{field}, which is not in the set")
        report.table(totals(summarize(measure([field], draws))))
    report_more(report, args.quick)
    report("\nerrors in float64 (without: the median of what 'not safe' compares with)")
    report.table([{k: v for k, v in row.items() if k != "dtype"} for row in table
                  if row["dtype"] == "float64"])  # fmt: skip
    report("\nfields with samples that are not judged, of all draws")
    for (field, solver, tol), found in grouped(
        [row for row in double if row["method"] == "JFB"], "field", "solver", "tol"
    ).items():
        if len(found) < 2 * sum(dtype == torch.float64 for _, dtype in draws):
            report(f"  {field}, {solver}, {tol:.0e}: {len(found)} judged")
    judged = grouped(double, "field", "solver", "tol")
    for field in fields:
        for solver in SOLVES:
            if (field, type(solver).__name__, solver.tol) not in judged:
                report(f"  {field}, {type(solver).__name__}, {solver.tol:.0e}: none judged")
    report("\nmedian of GDEQ(refine=k) over that of JFB(refine=k), where it is above 1")
    report.table(behind(double))
    report("\ntrue error beside the record's, GDEQ refine 1, 2 and 4, float64")
    report.table(understated(double))
    report("\ntrue error of z beside Solution.error, linear maps, Broyden to 1e-3")
    report.table(forward_estimates(1 if args.quick else 5))
    report.csv(table)
    draw(double, report)
    report.close()


if __name__ == "__main__":
    main()
