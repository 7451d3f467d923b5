"""The paper's figures: accuracy against training time, and gradients beside the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gdeq.lab.paper.plan import LONGER, title
from gdeq.lab.paper.reading import Made
from gdeq.lab.paper.table2 import in_table
from gdeq.lab.report.exactness import similarities
from gdeq.lab.report.figures import Figure, Line, floor
from gdeq.lab.report.formats import time_unit
from gdeq.lab.report.runs import Record, Run, number

EXACT = 1e-4  # what the exact gradient's own residual may be, in records that do not say
SIMILARITY_HEAD = [
    *("run", "trained_with", "epoch", "batch", "method", "vjps", "cosine", "relative_error"),
    *("cosine_here", "relative_error_here", "samples", "equilibria", "solved"),
    *("solved_share_of_loss", "solved_here"),
    *("adjoint_residual", "forward_residual", "exact_residual", "exact_forward_residual"),
    *("spectral_radius", "spectral_radius_max", "exact"),
]


def convergence(made: Sequence[Made]) -> Figure:
    """Accuracy against seconds of training, in which no test is counted."""
    lines = tuple(Line(label, run, run.curve("seconds")) for label, run in drawn(made))
    unit, name = time_unit(max((x for line in lines for x, _ in line.points), default=0.0))
    return Figure(
        "convergence",
        "Convergence without pre-training",
        "",
        f"training time without tests ({name})",
        "test accuracy (%)",
        lines,
        unit=unit,
        columns=("seconds", "test_accuracy"),
        bottom=floor(lines),
    )


def drawn(made: Sequence[Made]) -> list[tuple[str, Run]]:
    """Of each row the runs tested after every epoch; where it has none, the others.

    Without longer schedules: accuracy comes at a schedule's end.
    """
    found = []
    for row, some in in_table(made).items():
        runs = [one.run for one in some if one.run and one.run.epochs and not one.planned.pretrain]
        often = [run for run in runs if run.test_every == 1]
        if row not in LONGER:
            found += [(title(row), run) for run in often or runs]
    return found


def is_exact(record: Record) -> bool:
    """Whether the gradient it was compared with was solved as asked for (``--exact-tol``)."""
    asked = number(record.get("exact_tol"))
    residuals = [number(record.get(k)) for k in ("exact_residual", "exact_forward_residual")]
    bound = EXACT if asked is None else asked
    return all(value is not None and value <= bound for value in residuals)


def similarity_lines(made: Sequence[Made]) -> list[list[object]]:
    """One line for each method, mini-batch and epoch of every run that was measured."""
    return [
        [
            one.planned.name,
            title(one.planned.row),
            *(record.get(key) for key in SIMILARITY_HEAD[2:-1]),
            "yes" if is_exact(record) else "no",
        ]
        for one in made
        for record in (one.run.similarity if one.run else ())
    ]


def similarity(made: Sequence[Made]) -> list[Figure]:
    """Cosine and relative error of each measured run, of mini-batches whose truth is exact."""
    figures = []
    for one in made:
        if one.run is not None:
            sound = [record for record in one.run.similarity if is_exact(record)]
            for found in similarities([replace(one.run, similarity=sound)]):
                figures += [replace(f, name=f"{f.name}_{one.planned.name}") for f in found.figures]
    return figures
