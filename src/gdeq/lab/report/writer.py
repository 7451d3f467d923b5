"""Runs in, files out: the page, its figures and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdeq.lab.report import plain
from gdeq.lab.report.draw import draw
from gdeq.lab.report.exactness import similarities
from gdeq.lab.report.figures import make_figures
from gdeq.lab.report.methods import looks
from gdeq.lab.report.page import make_page
from gdeq.lab.report.rows import make_rows
from gdeq.lab.report.runs import ReportError, read_runs


def table(runs: Sequence[Path]) -> str:
    """The paper's Table 2 for these run folders, as plain text."""
    return plain.text_table(make_rows(read_runs(runs)))


def write(runs: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """One HTML page about these run folders, and beside it ``figures/`` and the tables as CSV.

    out: the page (``….html``), or a folder for it and its figures.
    """
    read = read_runs(runs)
    rows = make_rows(read)
    found = similarities(read)
    figures = make_figures(rows)
    chosen = looks(
        [row.label for row in rows], [group.method for one in found for group in one.groups]
    )
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    folder = page.parent
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        drawn = {}
        for figure in (*figures, *(figure for one in found for figure in one.figures)):
            drawn[figure.name] = draw(figure, chosen)
            put(folder / "figures" / f"{figure.name}.png", drawn[figure.name].png)
            data = plain.csv_text(*figure.csv_lines())
            put(folder / "figures" / f"{figure.name}.csv", data.encode())
        put(folder / "table.csv", plain.table_csv(rows).encode())
        put(folder / "runs.csv", plain.runs_csv(rows).encode())
        put(page, make_page(title, read, rows, figures, found, chosen, drawn).encode())
    except OSError as problem:
        place = problem.filename or folder
        raise ReportError(
            f"cannot write the report to {folder}: {problem.strerror or problem} ({place}); "
            "choose another folder"
        ) from problem
    return page


def put(path: Path, data: bytes) -> None:
    """Whole or not at all: an earlier page stays until the new one is there."""
    half = path.with_name(path.name + ".part")
    try:
        half.write_bytes(data)
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
