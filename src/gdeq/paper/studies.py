"""The similarity figure, and the study of what the forward solve's budget does."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gdeq.paper.plan import LAST, STUDIED, title
from gdeq.paper.reading import NOT_YET, Made, markdown
from gdeq.report import methods
from gdeq.report.figures import Figure, Line
from gdeq.report.runs import Record, Run, number
from gdeq.report.similarity import IMPLICIT, similarities

EXACT = 1e-4  # what the exact gradient's own residual may be, in records that do not say
SIMILARITY_HEAD = [
    *("run", "trained_with", "epoch", "batch", "method", "vjps", "cosine", "relative_error"),
    *("cosine_here", "relative_error_here", "samples", "equilibria", "solved"),
    *("solved_share_of_loss", "solved_here"),
    *("adjoint_residual", "forward_residual", "exact_residual", "exact_forward_residual"),
    *("spectral_radius", "spectral_radius_max", "exact"),
]


# -- similarity ------------------------------------------------------------------------------------


def is_exact(record: Record) -> bool:
    """Whether what it was compared with may be called exact."""
    residuals = [number(record.get(k)) for k in ("exact_residual", "exact_forward_residual")]
    return all(value is not None and value <= bound(record) for value in residuals)


def bound(record: Record) -> float:
    """What was asked for when it was measured (``--exact-tol``)."""
    found = number(record.get("exact_tol"))
    return EXACT if found is None else found


def measured(made: Sequence[Made]) -> list[tuple[Made, Run]]:
    """For the similarity figure; the study of forward steps has its own."""
    groups = ("similarity", "table2", "record")
    found = [(one, one.run) for one in made if one.run is not None and one.run.similarity]
    some = [pair for pair in found if pair[0].planned.group in groups]
    return sorted(some, key=lambda pair: groups.index(pair[0].planned.group))


def similarity_lines(made: Sequence[Made]) -> list[list[object]]:
    return [
        [
            one.planned.name,
            title(one.planned.row),
            *(record.get(key) for key in SIMILARITY_HEAD[2:-1]),
            "yes" if is_exact(record) else "no",
        ]
        for one, run in measured(made)
        for record in run.similarity
    ]


def similarity_figures(made: Sequence[Made]) -> list[Figure]:
    """Cosine and relative error of each measured run, of mini-batches whose truth is exact."""
    figures = []
    for one, run in measured(made):
        sound = replace(run, similarity=[r for r in run.similarity if is_exact(r)])
        for found in similarities([sound]):
            figures += [replace(f, name=f"{f.name}_{one.planned.name}") for f in found.figures]
    return figures


def similarity_text(made: Sequence[Made]) -> str:
    parts = ["# Similarity with the exact gradient\n"]
    for one in made:
        if one.planned.group in ("similarity", "table2", "record") and one.planned.similarity:
            parts += _similarity_of(one)
    bounds = sorted({bound(r) for _, run in measured(made) for r in run.similarity}) or [EXACT]
    asked = " or ".join(f"{value:g}" for value in bounds)
    parts.append(
        "Over mini-batches of training images, in float32 without TF32.  VJPs: products with ∂f/∂z "
        f"that the method spends.  {IMPLICIT}  Relative error: ‖g − g*‖ / ‖g*‖ of the gradient of "
        "cell and stem.  Samples whose own residual of g* or of the equilibrium stays above "
        f"{asked} are in neither gradient; in older records a mini-batch with such a sample is in "
        "no figure.\n"
    )
    return "\n".join(parts)


def _similarity_of(one: Made) -> list[str]:
    parts = [f"## {one.planned.name}, trained with {title(one.planned.row)}\n"]
    run = one.run
    wanted = one.planned.similarity
    records = run.similarity if run is not None else []
    last = run.epochs_wanted if run is not None else LAST
    there = {int(r["epoch"]) for r in records if number(r.get("epoch")) is not None}
    planned = {epoch or last for epoch in wanted} - {LAST}
    missing = sorted(epoch for epoch in planned - there if run is None or epoch <= last)
    for epoch in sorted(there):
        parts += _epoch_text(epoch, [r for r in records if number(r.get("epoch")) == epoch])
    if missing:
        parts.append(f"Epochs {', '.join(map(str, missing))}: {NOT_YET}.\n")
    return parts


def _epoch_text(epoch: int, records: list[Record]) -> list[str]:
    lines = []
    for name in sorted({str(r.get("method")) for r in records}, key=methods.rank):
        own = [r for r in records if r.get("method") == name]
        cosine, error = _numbers(own, "cosine"), _numbers(own, "relative_error")
        lines.append(
            [
                name,
                _middle(_numbers(own, "vjps"), ".3g"),
                len(own),
                _middle(cosine, ".4f"),
                f"{min(cosine):.4f}" if cosine else "–",
                _middle(error, ".3g"),
                f"{max(error):.3g}" if error else "–",
            ]
        )
    head = ["Method", "VJPs, median", "Batches", "Cosine, median", "least"]
    left_out = len({r.get("batch") for r in records if not is_exact(r)})
    mark = f"  **Not exact in {left_out} mini-batch{'es' * (left_out > 1)}.**" * (left_out > 0)
    share = _solved(records)
    if share is not None and share < 1:
        mark += f"  **{100 * (1 - share):.0f} % of the samples have no exact gradient.**"
    radius, most = _numbers(records, "spectral_radius"), _numbers(records, "spectral_radius_max")
    worst = max(_numbers(records, "exact_residual"), default=float("nan"))
    forward = max(_numbers(records, "exact_forward_residual"), default=float("nan"))
    return [
        f"After epoch {epoch}:\n",
        markdown([*head, "Relative error, median", "worst"], lines),
        f"The exact gradient's own residual: at most {worst:.1e}, at an equilibrium solved to "
        f"{forward:.1e}.{mark}  Spectral radius of ∂f/∂z there: median {_middle(radius, '.3f')}, "
        f"largest {_most(most)}.\n",
    ]


def _solved(records: Sequence[Record], key: str = "solved") -> float | None:
    """The share of samples that have an exact gradient."""
    samples, solved = (sum(_numbers(records, name)) for name in ("samples", key))
    return solved / samples if samples else None


def _numbers(records: Sequence[Record], key: str) -> list[float]:
    return [value for record in records if (value := number(record.get(key))) is not None]


def _middle(values: list[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "–"


def _most(values: list[float]) -> str:
    return f"{max(values):.3f}" if values else "–"


# -- the forward solve's budget --------------------------------------------------------------------

STEPS_HEAD = [
    *("method", "forward_steps", "forward_tolerance", "epochs", "state", "test_accuracy"),
    *("largest_drop", "residual", "backward_residual", "equilibria", "solved"),
    *("solved_share_of_loss", "cosine", "relative_error"),
    *("cosine_here", "relative_error_here", "vjps"),
    *("exact_residual", "spectral_radius", "ms_per_step", "train_seconds"),
]


def steps_lines(made: Sequence[Made], group: str = "steps") -> list[list[object]]:
    """One line a run, planned ones too.

    largest_drop: of the accuracy in training from one epoch to the next, in points.  Residuals:
    means over the last epoch.  After it, of the method's own gradient: cosine and relative error,
    medians, beside the exact one of the samples that have one (solved: their share), and "here",
    beside an exact backward pass from where the run's solver stops.
    """
    return [_steps_line(one) for one in made if one.planned.group == group]


def _steps_line(one: Made) -> list[object]:
    planned = _settings(one)
    line: dict[str, object] = {"method": title(one.planned.row), "state": one.state}
    line["forward_steps"] = int(planned["solver.max_iter"])
    line["forward_tolerance"] = float(planned.get("solver.tol", 0))
    run = one.run
    if run is not None:
        epoch = run.epochs[-1] if run.epochs else {}
        own = _own_gradient(run)
        line |= {
            "forward_steps": run.config.get("solver", {}).get("max_iter"),
            "forward_tolerance": run.config.get("solver", {}).get("tol"),
            "epochs": run.epochs_done,
            "test_accuracy": run.accuracy,
            "largest_drop": _largest_drop(run),
            "residual": number(epoch.get("residual")),
            "backward_residual": number(epoch.get("backward_residual")),
            "equilibria": _solved(own, "equilibria"),
            "solved": _solved(own),
            "exact_residual": max(_numbers(own, "exact_residual"), default=None),
            "ms_per_step": run.ms_per_step,
            "train_seconds": run.seconds,
        }
        sound = [record for record in own if is_exact(record)]
        for key, some in (
            *((key, sound) for key in ("cosine", "relative_error", "spectral_radius")),
            *((key, own) for key in ("cosine_here", "relative_error_here", "vjps")),
            ("solved_share_of_loss", own),
        ):
            values = _numbers(some, key)
            line[key] = statistics.median(values) if values else None
    return [line.get(key) for key in STEPS_HEAD]


def _settings(one: Made) -> dict[str, str]:
    return dict(text.split("=", 1) for text in one.planned.settings)


def _own_gradient(run: Run) -> list[Record]:
    """Of the last epoch that was compared, the records of what the run was trained with."""
    epochs = _numbers(run.similarity, "epoch")
    name = methods.label(run.gradient)
    return [r for r in run.similarity if r.get("method") == name and r.get("epoch") == max(epochs)]


def _largest_drop(run: Run) -> float | None:
    """Of the accuracy in training, which each epoch has, from one epoch to the next."""
    found = _numbers(run.epochs, "train_accuracy")
    drops = [before - after for before, after in pairwise(found)]
    return max([0.0, *drops]) if drops else None


STEPS_FIGURES = {
    "test_accuracy": ("steps_accuracy", "test accuracy (%)", False),
    "cosine": ("steps_cosine", "cosine with the exact gradient", False),
    "relative_error": ("steps_error", "relative error of the gradient", True),
    "relative_error_here": ("steps_error_here", "error of the backward pass alone", True),
    "solved": ("steps_solved", "share of samples with an equilibrium", False),
    "residual": ("steps_residual", "forward residual in the last epoch", True),
    "largest_drop": ("steps_stability", "largest drop in training accuracy (points)", False),
}


def steps_figures(made: Sequence[Made]) -> list[Figure]:
    lines = [dict(zip(STEPS_HEAD, line, strict=True)) for line in steps_lines(made)]
    finished = [one for one in made if one.planned.group == "steps" and one.finished]
    by_row = {title(one.planned.row): one.run for one in finished}
    figures = []
    for key, (name, y, log) in STEPS_FIGURES.items():
        marks = []
        for row in STUDIED:
            own = [r for r in lines if r["method"] == title(row) and r["state"] == "finished"]
            points = [(number(r["forward_steps"]), number(r[key])) for r in own]
            whole = sorted(
                (x, v) for x, v in points if x is not None and v is not None and (v > 0 or not log)
            )
            run = by_row.get(title(row))
            if whole and run is not None:
                marks.append(Line(title(row), run, whole))
        if marks:
            figures.append(Figure(name, y, "", "forward steps", y, tuple(marks), log=log))
    return figures


def steps_text(made: Sequence[Made]) -> str:
    parts = ["# When the forward solve has few steps\n", _steps_table(steps_lines(made))]
    parts += [
        "# When the forward solve stops at a tolerance (27 steps at most)\n",
        _steps_table(steps_lines(made, "tolerance")),
        "Accuracy of the last epoch, one seed each.  Largest drop: of the accuracy in training "
        "from one epoch to the next, in points.  Residual: of the forward solve, mean over the "
        "last epoch.  After the last epoch, of the method's own gradient (medians): cosine and "
        "relative error beside the exact one, of the samples whose equilibrium and adjoint are "
        "found to 1e-4 (solved: their share, of the samples and of the loss; they are the easier "
        'ones); "here": beside an exact '
        "backward pass from where the run's solver stops.  Times are no result: compilation may "
        "be in them.\n",
    ]
    return "\n".join(parts)


def _steps_table(lines: Sequence[list[object]]) -> str:
    shown = {
        "forward_tolerance": "g", "test_accuracy": ".2f", "largest_drop": ".2f",
        "residual": ".1e", "solved": ".0%", "solved_share_of_loss": ".0%", "cosine": ".4f",
        "relative_error": ".3g",
        "cosine_here": ".4f", "relative_error_here": ".3g", "spectral_radius": ".3f",
        "ms_per_step": ".1f",
    }  # fmt: skip
    keys = ["method", "forward_steps", *shown, "state"]
    order = list(STUDIED)
    titles = {title(row): order.index(row) for row in order}
    body = []
    for line in sorted(
        lines, key=lambda a: (titles[str(a[0])], float(str(a[1])), -float(str(a[2])))
    ):
        record = dict(zip(STEPS_HEAD, line, strict=True))
        body.append([_cell(record[key], shown.get(key)) for key in keys])
    return markdown([key.replace("_", " ") for key in keys], body)


def _cell(value: object, form: str | None) -> str:
    if value is None:
        return "–"
    return (
        str(value) if form is None or not isinstance(value, (int, float)) else format(value, form)
    )
