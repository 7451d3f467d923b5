"""The similarity figure: how close each gradient comes to the exact one, run by run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from gdeq.lab.paper.plan import LAST, title
from gdeq.lab.paper.reading import NOT_YET, Made, markdown
from gdeq.lab.report import methods
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.runs import Record, Run, number
from gdeq.lab.report.similarity import IMPLICIT, similarities

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
    groups = ("table2", "record")
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
        if one.planned.group in ("table2", "record") and one.planned.similarity:
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
        sound = [r for r in own if is_exact(r)]
        cosine, error = numbers(sound, "cosine"), numbers(sound, "relative_error")
        lines.append(
            [
                name,
                _middle(numbers(own, "vjps"), ".3g"),
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
    share = solved_share(records)
    if share is not None and share < 1:
        mark += f"  **{100 * (1 - share):.0f} % of the samples have no exact gradient.**"
    radius, most = numbers(records, "spectral_radius"), numbers(records, "spectral_radius_max")
    worst = max(numbers(records, "exact_residual"), default=float("nan"))
    forward = max(numbers(records, "exact_forward_residual"), default=float("nan"))
    return [
        f"After epoch {epoch}:\n",
        markdown([*head, "Relative error, median", "worst"], lines),
        f"The exact gradient's own residual: at most {worst:.1e}, at an equilibrium solved to "
        f"{forward:.1e}.{mark}  Spectral radius of ∂f/∂z there: median {_middle(radius, '.3f')}, "
        f"largest {_most(most)}.\n",
    ]


def solved_share(records: Sequence[Record], key: str = "solved") -> float | None:
    """The share of samples that have an exact gradient."""
    samples, solved = (sum(numbers(records, name)) for name in ("samples", key))
    return solved / samples if samples else None


def numbers(records: Sequence[Record], key: str) -> list[float]:
    return [value for record in records if (value := number(record.get(key))) is not None]


def _middle(values: list[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "–"


def _most(values: list[float]) -> str:
    return f"{max(values):.3f}" if values else "–"
