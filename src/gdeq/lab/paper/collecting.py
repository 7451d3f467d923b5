"""From the run folders alone: every table and figure of the paper, with what there is so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gdeq.lab import report
from gdeq.lab.paper import budget, similarity, table2
from gdeq.lab.paper.reading import Made, read_all
from gdeq.lab.report.draw import draw
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.methods import looks
from gdeq.lab.report.plain import csv_text
from gdeq.lab.report.runs import ReportError
from gdeq.options import count


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
    place.text("table2", table2.text(made))
    place.text("record", table2.records_text(made))
    place.csv("convergence_moments", table2.MOMENTS_HEAD, table2.moments(made))
    place.text("convergence", table2.moments_text(made))
    place.figures([table2.convergence(made)])
    place.csv("similarity", similarity.SIMILARITY_HEAD, similarity.similarity_lines(made))
    place.text("similarity", similarity.similarity_text(made))
    place.figures(similarity.similarity_figures(made))
    lines = [*budget.steps_lines(made), *budget.steps_lines(made, "tolerance")]
    place.csv("steps", budget.STEPS_HEAD, lines)
    place.text("steps", budget.steps_text(made))
    place.csv("steps_gradients", budget.GRADIENTS_HEAD, budget.gradients_lines(made))
    # The two files hold all of them.
    place.figures([*budget.steps_figures(made), *budget.gradients_figures(made)], with_csv=False)
    for name, groups in PAGES.items():
        shown = [one.run.path for one in made if one.run and one.planned.group in groups]
        if shown:
            place.files.append(report.write(shown, place.out / name))
    return place.files


# A page each: beside a run six times as long, the figures of Table 2 would show nothing.
PAGES = {"report": ("table2",), "report-record": ("record", "sprint")}


def progress(folder: Path) -> str:
    """How much of each part is there."""
    made = read_all(folder)
    groups: dict[str, list[Made]] = {}
    for one in made:
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
        self._put(f"{name}.csv", csv_text(head, lines).encode())

    def text(self, name: str, text: str) -> None:
        self._put(f"{name}.md", text.encode())

    def figures(self, figures: Sequence[Figure], with_csv: bool = True) -> None:
        some = [figure for figure in figures if figure.marks]
        for figure in some:
            png, _ = draw(figure, looks(figure.labels))
            self._put(f"{figure.name}.png", png)
            if with_csv:
                self._put(f"{figure.name}.csv", csv_text(*figure.csv_lines()).encode())

    def _put(self, name: str, data: bytes) -> None:
        place = self.out / name
        half = place.with_name(place.name + ".part")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            half.write_bytes(data)
            half.replace(place)
        except OSError as problem:
            raise ReportError(f"cannot write {place}: {problem.strerror or problem}") from problem
        self.files.append(place)
