"""From the run folders alone: every table and figure of the paper, with what there is so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdeq.lab import report
from gdeq.lab.paper import drawing, table2
from gdeq.lab.paper.reading import Made, read_all
from gdeq.lab.report import writer
from gdeq.lab.report.draw import draw
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.methods import looks
from gdeq.lab.report.plain import csv_text
from gdeq.lab.report.runs import ReportError
from gdeq.options import count

# A page each: beside a run six times as long, the figures of Table 2 would show nothing.
PAGES = {"report": ("table2",), "report-record": ("record", "sprint")}


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
    place = Writer(out or folder)
    place.csv("table2", table2.CSV_HEAD, table2.csv_lines(made))
    place.put("table2.md", table2.text(made).encode())
    curves = drawing.convergence(made)
    if curves.lines:
        place.csv("convergence", *curves.csv_lines())
        place.png(curves)
    place.csv("similarity", drawing.SIMILARITY_HEAD, drawing.similarity_lines(made))
    for figure in drawing.similarity(made):
        place.png(figure)
    for name, groups in PAGES.items():
        shown = [one.run.path for one in made if one.run and one.planned.group in groups]
        if shown:
            place.files.append(report.write(shown, place.out / name))
    return place.files


def progress(folder: Path) -> str:
    """How much of each part is there."""
    groups: dict[str, list[Made]] = {}
    for one in read_all(folder):
        groups.setdefault(one.planned.group, []).append(one)
    return "\n".join(
        f"{name:10s} {sum(one.finished for one in some)} of {count(len(some), 'run')} finished"
        for name, some in groups.items()
    )


class Writer:
    """Whole files or none: what an earlier call wrote stays until the new one is there."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.files: list[Path] = []

    def csv(self, name: str, head: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
        self.put(f"{name}.csv", csv_text(head, lines).encode())

    def png(self, figure: Figure) -> None:
        self.put(f"{figure.name}.png", draw(figure, looks(figure.labels)).png)

    def put(self, name: str, data: bytes) -> None:
        place = self.out / name
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            writer.put(place, data)
        except OSError as problem:
            raise ReportError(f"cannot write {place}: {problem.strerror or problem}") from problem
        self.files.append(place)
