"""From run folders to a page, its figures and its tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdeq.lab import files
from gdeq.lab.report.figures import Figure, draw, make_figures
from gdeq.lab.report.methods import flatten, label_of, looks, varying
from gdeq.lab.report.rows import Row, make_rows, metric_of
from gdeq.lab.report.runs import ReportError, Run, number, read_runs
from gdeq.lab.report.similarity import similarities
from gdeq.lab.report.tables import NONE, Cell, Table, csv_text, duration, milliseconds, shown
from gdeq.lab.report.verdict import headline, notes, verdict
from gdeq.options import count


@dataclass(frozen=True)
class Section:
    """Part of the page, from top to bottom."""

    title: str = ""
    text: str = ""
    table: Table | None = None
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    folded: str = ""  # under this line, to be opened: the table or ``source``
    source: str = ""


def table(runs: Sequence[Path]) -> str:
    """The paper's Table 2 for these run folders, as plain text, and what it shows."""
    rows = make_rows(read_runs(runs))
    lines = [headline(rows).text(), *(Cell(note).plain for note in notes(rows))]
    return "\n".join([*lines, *filter(None, [Cell(verdict(rows)).plain])])


def write(runs: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """One HTML page about these run folders, and beside it ``figures/`` and ``runs.csv``.

    out: the page (``….html``), or a folder for it and its figures.
    """
    read = read_runs(runs)
    rows = make_rows(read)
    sections = make_sections(read, rows)
    figures = [figure for section in sections for figure in section.figures]
    measured = [name for figure in figures if figure.boxes for name in figure.labels]
    chosen = looks([row.label for row in rows], measured)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    contents: dict[str, bytes] = {}
    images: dict[str, str] = {}
    for figure in figures:
        contents[f"figures/{figure.name}.png"], svg = draw(figure, chosen)
        contents[f"figures/{figure.name}.csv"] = csv_text(*figure.csv_lines()).encode(
            errors="backslashreplace"
        )
        # As the source of an image nothing is fetched, and no script in it would run.
        images[figure.name] = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    contents["runs.csv"] = runs_csv(rows).encode(errors="backslashreplace")
    contents[page.name] = _render(
        title=title or f"DEQ training on {_each(run.task for run in read)}",
        verdict=verdict(rows),
        lead=lead(read),
        problems=[f"{run.name}: {problem}" for run in read for problem in run.problems],
        sections=sections,
        looks=chosen,
        images=images,
    ).encode(errors="backslashreplace")  # of a name that is not UTF-8, or made up
    save(page.parent, contents)
    return page


def save(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Each whole or not at all: an earlier one stays until the new one is there."""
    place = folder
    try:
        for name, data in contents.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            files.write(place, data)
    except OSError as problem:
        raise ReportError(
            f"cannot write the report to {folder}: {problem.strerror or problem} "
            f"({problem.filename or place}); choose another folder"
        ) from problem
    return [folder / name for name in contents]


def _render(**shown: Any) -> str:
    import jinja2  # noqa: PLC0415 (not for the table on a terminal)

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("gdeq.lab.report"),
        autoescape=True,  # run folders cannot inject markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template("report.html").render(**shown)


def make_sections(runs: list[Run], rows: list[Row]) -> list[Section]:
    metric, figures, different = metric_of(rows), make_figures(rows), differences(runs)
    training = [figure for figure in figures if figure.columns[1] == metric.key]
    found = [
        Section(f"Speed and {metric.words}", "", headline(rows), notes(rows)),
        Section("Convergence", figures=training),
        Section("Solver", figures=[figure for figure in figures if figure not in training]),
    ]
    for index, one in enumerate(similarities(runs)):
        found.append(Section("Gradient similarity" * (not index), one.text, figures=one.figures))
        found.append(Section(table=one.table, folded="These figures in numbers"))
    told = "The settings that differ between the runs. Below are all settings of each run."
    if not different.columns:
        told = "All runs have the same settings." * (len(runs) > 1)
    found += [
        Section("Runs", table=runs_table(rows)),
        Section("Configuration", told, different),
        *(Section(folded=run.name, source=run.config_text.rstrip()) for run in runs),
        Section("Environment", table=environments(runs)),
    ]
    return [s for s in found if s.text or s.figures or s.source or (s.table and s.table.rows)]


def lead(runs: list[Run]) -> str:
    """One line on what is compared, and where."""
    left = sum(not run.finished for run in runs)
    sizes = (number(run.summary.get("parameters")) for run in runs)
    parts = [
        count(len(runs), "run") + (f" ({left} unfinished)" if left else ""),
        count(len({label_of(run) for run in runs}), "method"),
        _each(run.task for run in runs),
        _each(flatten(run.config).get("model.size") for run in runs),
        _each(f"{size:,.0f} parameters" for size in sizes if size),
        _each(count(run.epochs_wanted, "epoch") for run in runs),
        _each(run.device for run in runs),
    ]
    return " · ".join(part for part in parts if part)


def _each(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def runs_table(rows: list[Row]) -> Table:
    runs = [run for row in rows for run in row.runs]
    pretraining = ["with" if run.pretrained else "without" for run in runs]
    scores = [shown(run.score, f".{run.metric.digits}f") for run in runs]
    columns = {
        "Run": [run.name for run in runs],
        "Method": [row.label for row in rows for _ in row.runs],
        "Pre-training": pretraining if "with" in pretraining else [""] * len(runs),
        "Seed": [str(run.seed) for run in runs],
        "State": ["finished" if run.finished else run.progress for run in runs],
        metric_of(rows).title.capitalize(): scores,
        "ms / step in training": [milliseconds(run.ms_per_step) for run in runs],
        "Training time": [duration(run.seconds) for run in runs],
    }
    return Table.of(columns, "runs")


def differences(runs: list[Run]) -> Table:
    """Of each setting that is not the same in all, every run's value."""
    flat = [{k: shown(v) for k, v in flatten(run.config).items()} for run in runs]
    keys = varying(flat)
    columns = {"Run": [run.name for run in runs]} if keys else {}
    return Table.of(
        columns | {key: [own.get(key, NONE) for own in flat] for key in keys}, "differences"
    )


def environments(runs: list[Run]) -> Table:
    """Versions and hardware: of each fact its values, and the runs that have them."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for key, value in flatten(run.environment).items():
            if not key.startswith("metric."):
                found.setdefault(key, {}).setdefault(shown(value), []).append(run.name)
    pairs = [(key, *pair) for key, some in found.items() for pair in some.items()]
    cells = [Cell(value, ", ".join(names) * (len(found[key]) > 1)) for key, value, names in pairs]
    return Table.of({"Fact": [key for key, *_ in pairs], "Value": cells}, "environment")


def runs_csv(rows: list[Row]) -> str:
    """One line for each run: what stands behind the table."""
    head = ["gradient", "pretrain", "seed", "epochs", metric_of(rows).key, "ms_per_step"]
    head += ["train_seconds", "finished", "steps", "data", "device", "run"]
    lines = [
        [
            *(run.gradient.get("name"), run.pretrained, run.seed, run.epochs_done, run.score),
            *(run.ms_per_step, run.seconds, run.finished, run.steps_done),
            *(run.task, run.device, run.name),
        ]
        for row in rows
        for run in row.runs
    ]
    return csv_text(head, lines)
