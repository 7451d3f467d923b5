"""The study of the forward solve's budget: what fewer steps, or a tolerance, do to a training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gdeq.lab.paper.plan import COMPARED_WITH_FEW_STEPS, STUDIED, title
from gdeq.lab.paper.reading import Made, markdown
from gdeq.lab.paper.similarity import is_exact, numbers, solved_share
from gdeq.lab.report import methods
from gdeq.lab.report.figures import Figure, Line
from gdeq.lab.report.runs import Record, Run, number
from gdeq.lab.report.similarity import IMPLICIT

STEPS_HEAD = [
    *("method", "forward_steps", "forward_tolerance", "epochs", "state", "test_accuracy"),
    *("largest_drop", "residual", "backward_residual", "equilibria", "solved"),
    *("solved_share_of_loss", "cosine", "relative_error"),
    *("cosine_here", "relative_error_here", "vjps"),
    *("exact_residual", "spectral_radius"),  # no times: runs may be made side by side
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
            "equilibria": solved_share(own, "equilibria"),
            "solved": solved_share(own),
            "exact_residual": max(numbers(own, "exact_residual"), default=None),
        }
        sound = [record for record in own if is_exact(record)]
        for key, some in (
            *((key, sound) for key in ("cosine", "relative_error", "spectral_radius")),
            *((key, own) for key in ("cosine_here", "relative_error_here", "vjps")),
            ("solved_share_of_loss", own),
        ):
            line[key] = _median(some, key)
    return [line.get(key) for key in STEPS_HEAD]


def _settings(one: Made) -> dict[str, str]:
    return dict(text.split("=", 1) for text in one.planned.settings)


def _own_gradient(run: Run) -> list[Record]:
    """Of the last epoch that was compared, the records of what the run was trained with."""
    name = methods.label(run.gradient)
    return [r for r in _last_compared(run) if r.get("method") == name]


def _largest_drop(run: Run) -> float | None:
    """Of the accuracy in training, which each epoch has, from one epoch to the next."""
    found = numbers(run.epochs, "train_accuracy")
    drops = [before - after for before, after in pairwise(found)]
    return max([0.0, *drops]) if drops else None


STEPS_FIGURES = {
    "test_accuracy": ("steps_accuracy", "test accuracy (%)", False),
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


# All gradients on one set of weights: those that the row's method made within so many steps.
GRADIENTS_HEAD = [
    *("weights_of", "forward_steps", "forward_tolerance", "method", "vjps", "batches"),
    *("cosine", "relative_error", "cosine_here", "relative_error_here"),
    *("samples", "solved", "spectral_radius"),
]
GRADIENTS_FIGURES = {
    "cosine": ("steps_cosine", "cosine with the exact gradient", False),
    "relative_error": ("steps_error", "relative error of the gradient", True),
}


def gradients_lines(made: Sequence[Made]) -> list[list[object]]:
    """Medians over mini-batches, of those whose truth is exact; "here" of all."""
    lines: list[list[object]] = []
    for one in made:
        run = one.run
        if run is None or not run.similarity or one.planned.group not in ("steps", "tolerance"):
            continue
        if one.planned.row not in COMPARED_WITH_FEW_STEPS:
            continue
        planned = _settings(one)
        limits = [int(planned["solver.max_iter"]), float(planned.get("solver.tol", 0))]
        budget = [title(one.planned.row), *limits]
        lines += ([*budget, *line] for line in _gradients(_last_compared(run)))
    return sorted(lines, key=lambda a: (str(a[0]), -(number(a[2]) or 1.0), number(a[1]) or 0.0))


def _last_compared(run: Run) -> list[Record]:
    last = max(numbers(run.similarity, "epoch"), default=None)
    return [r for r in run.similarity if number(r.get("epoch")) == last]


def _gradients(records: Sequence[Record]) -> Iterator[list[object]]:
    for name in sorted({str(r.get("method")) for r in records}, key=methods.rank):
        own = [r for r in records if r.get("method") == name]
        sound = [r for r in own if is_exact(r)]
        yield [
            name,
            _median(own, "vjps"),
            len(own),
            *(_median(sound, key) for key in ("cosine", "relative_error")),
            *(_median(own, key) for key in ("cosine_here", "relative_error_here")),
            sum(numbers(own, "samples")) or None,
            solved_share(own),
            _median(sound, "spectral_radius"),
        ]


def gradients_figures(made: Sequence[Made]) -> list[Figure]:
    """On the weights of plain GDEQ, against the forward steps."""
    runs = [one.run for one in made if one.run is not None]
    records = [
        record
        for record in _gradients_records(made)
        if record["weights_of"] == title("gdeq") and not number(record["forward_tolerance"])
    ]
    names = sorted({str(record["method"]) for record in records}, key=methods.rank)
    figures = []
    for key, (name, y, log) in GRADIENTS_FIGURES.items():
        marks = []
        for label in names:
            own = [record for record in records if record["method"] == label]
            points = [(number(record["forward_steps"]), number(record[key])) for record in own]
            whole = [(x, v) for x, v in points if x is not None and v is not None]
            if whole:
                marks.append(Line(label, runs[0], whole))
        figures.append(Figure(name, y, "", "forward steps", y, tuple(marks), log=log))
    return figures


def _gradients_records(made: Sequence[Made]) -> list[dict[str, object]]:
    return [dict(zip(GRADIENTS_HEAD, line, strict=True)) for line in gradients_lines(made)]


def _gradients_text(made: Sequence[Made]) -> list[str]:
    records = _gradients_records(made)
    parts = []
    for weights in dict.fromkeys(str(record["weights_of"]) for record in records):
        own = [record for record in records if record["weights_of"] == weights]
        budgets = list(dict.fromkeys(_budget(record) for record in own))
        by = {(record["method"], _budget(record)): record for record in own}
        names = sorted({str(record["method"]) for record in own}, key=methods.rank)
        body = [
            [name, *(_cosine_and_error(by.get((name, budget), {})) for budget in budgets)]
            for name in names
        ]
        parts += [
            f"# {'All gradients' if len(names) > 1 else 'Its own gradient'} on the weights that "
            f"{weights} made\n",
            markdown(["method", *budgets], body),
        ]
    if parts:
        parts.append(
            "Cosine with the exact gradient, in brackets the relative error: the median of n "
            "mini-batches of training images, after the last epoch (`steps_gradients.csv`).  "
            f"{IMPLICIT}\n"
        )
    return parts


def _budget(record: dict[str, object]) -> str:
    tol, count = number(record["forward_tolerance"]), record["batches"]
    budget = f"tolerance {tol:g}" if tol else f"{record['forward_steps']} steps"
    return f"{budget}, n = {count}"


def _cosine_and_error(record: dict[str, object]) -> str:
    cosine, error = number(record.get("cosine")), number(record.get("relative_error"))
    return "–" if cosine is None or error is None else f"{cosine:.3f} ({error:.2g})"


def _median(records: Sequence[Record], key: str) -> float | None:
    values = numbers(records, key)
    return statistics.median(values) if values else None


READING = (
    "Short trainings of MDEQ-LARGE on CIFAR-10 in bf16 (`config.yaml` has the rest); accuracy in % "
    "of 10,000 test images: two runs that differ by less than about a point cannot be told apart. "
    ' "GDEQ tolerance 0.1" refines until the residual of w is below 0.1, with at most seven VJPs. '
    ' "–": not measured.  A residual of a few thousandths is the rounding of bf16.\n'
)


def steps_text(made: Sequence[Made]) -> str:
    parts = ["# When the forward solve has few steps\n", READING, _steps_table(steps_lines(made))]
    parts += _gradients_text(made)
    parts += [
        "# When the forward solve stops at a tolerance (27 steps at most)\n",
        _steps_table(steps_lines(made, "tolerance")),
        "Accuracy of the last epoch, one seed each.  Largest drop: of the accuracy in training "
        "from one epoch to the next, in points.  Residuals: of the forward solve and of w, means "
        "over the last epoch (of w where the method measures it).  Solved: the share of samples "
        "whose equilibrium and adjoint are found to 1e-4 after the last epoch, and the spectral "
        "radius of ∂f/∂z there, where the gradients were compared.\n",
    ]
    return "\n".join(parts)


def _steps_table(lines: Sequence[list[object]]) -> str:
    shown = {
        "forward_tolerance": "g", "test_accuracy": ".2f", "largest_drop": ".2f",
        "residual": ".1e", "backward_residual": ".2g", "solved": ".0%", "spectral_radius": ".3f",
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
