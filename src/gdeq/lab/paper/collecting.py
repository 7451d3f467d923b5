"""From the run folders alone: every table and figure of the paper, with what there is so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gdeq.lab import report
from gdeq.lab.paper import table2
from gdeq.lab.paper.plan import LONGER, METHODS, Planned, make_plan, title
from gdeq.lab.report.figures import Figure, Series, against, draw
from gdeq.lab.report.methods import looks
from gdeq.lab.report.page import save
from gdeq.lab.report.runs import Record, ReportError, Run, number, read_run
from gdeq.lab.report.similarity import Similarity
from gdeq.lab.report.tables import csv_text
from gdeq.options import count

# A page each: beside a run six times as long, the figures of Table 2 would show nothing.
PAGES = {"report": ("table2",), "report-record": ("record", "sprint")}
SIMILARITY_HEAD = [
    *("run", "trained_with", "epoch", "batch", "method", "vjps", "cosine", "relative_error"),
    *("cosine_here", "relative_error_here", "samples", "equilibria", "solved"),
    *("solved_share_of_loss", "solved_here"),
    *("adjoint_residual", "forward_residual", "exact_residual", "exact_forward_residual"),
    *("spectral_radius", "spectral_radius_max", "exact"),
]


@dataclass(frozen=True)
class Made:
    """A planned run and what is there of it."""

    planned: Planned
    run: Run | None


def read_all(folder: Path) -> list[Made]:
    """All of the plan, in its order."""
    places = ((planned, folder / planned.name) for planned in make_plan())
    return [Made(p, read_run(at) if (at / "config.yaml").is_file() else None) for p, at in places]


def in_table(made: Sequence[Made]) -> dict[str, list[Made]]:
    """Row of Table 2 → its runs; the paper's four first, in its order."""
    rows: dict[str, list[Made]] = {name: [] for name in METHODS}
    for one in made:
        if one.planned.group == "table2":
            rows.setdefault(one.planned.row, []).append(one)
    return rows


def collect(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes into ``out``, by default the folder itself; returns the files."""
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}")
    made = read_all(folder)
    if not any(one.run for one in made):
        raise ReportError(
            f"{folder} holds none of the paper's runs: make them with `gdeq paper run --out "
            f"{folder}`"
        )
    out, rows = out or folder, in_table(made)
    columns = table2.make_columns(rows)
    files = {
        "table2.csv": csv_text(*table2.csv_lines(columns)).encode(),
        "table2.md": table2.text(columns).encode(),
        "similarity.csv": csv_text(SIMILARITY_HEAD, similarity_lines(made)).encode(),
    }
    curves = convergence(rows)
    if curves.series:
        files["convergence.csv"] = csv_text(*curves.csv_lines()).encode()
    for figure in [curves] * bool(curves.series) + similarity(made):
        files[f"{figure.name}.png"], _ = draw(figure, looks(figure.labels))
    places = save(out, files)
    for name, groups in PAGES.items():
        shown = [one.run.path for one in made if one.run and one.planned.group in groups]
        if shown:
            places.append(report.write(shown, out / name))
    return places


def progress(folder: Path) -> str:
    """How much of each part is there."""
    groups: dict[str, list[bool]] = {}
    for one in read_all(folder):
        finished = one.run is not None and one.run.finished
        groups.setdefault(one.planned.group, []).append(finished)
    return "\n".join(
        f"{name:10s} {sum(some)} of {count(len(some), 'run')} finished"
        for name, some in groups.items()
    )


def convergence(rows: dict[str, list[Made]]) -> Figure:
    """Accuracy against seconds of training, in which no test is counted.

    Of each row the runs tested after every epoch; where it has none, the others.  Without longer
    schedules: accuracy comes at a schedule's end.
    """
    lines: list[Series] = []
    for row, some in rows.items():
        runs = [one.run for one in some if one.run and one.run.epochs and not one.planned.pretrain]
        often = [run for run in runs if run.test_every == 1] or runs
        if row not in LONGER:
            lines += [Series(title(row), run, run.curve("seconds")) for run in often]
    return against("seconds", "test accuracy (%)", "test_accuracy", tuple(lines), "convergence")


def is_exact(record: Record) -> bool:
    """Whether the gradient it was compared with was solved as asked for (``--exact-tol``)."""
    bound = number(record.get("exact_tol")) or 1e-4
    residuals = [number(record.get(k)) for k in ("exact_residual", "exact_forward_residual")]
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
    for run in (one.run for one in made if one.run is not None):
        sound = [record for record in run.similarity if is_exact(record)]
        figures += Similarity(run, f"_{run.name}", sound).figures
    return figures
