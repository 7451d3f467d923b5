"""From run folders to a page, its figures and its tables."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdeq.lab.report.figures import Figure, draw, make_figures
from gdeq.lab.report.methods import flatten, label_of, looks, varying
from gdeq.lab.report.rows import Row, make_rows, metric_of
from gdeq.lab.report.runs import ReportError, Run, number, read_runs
from gdeq.lab.report.similarity import similarities
from gdeq.lab.report.tables import NONE, Cell, Table, csv_text, duration, milliseconds, shown
from gdeq.lab.report.verdict import headline, notes, verdict
from gdeq.options import count

# Accuracies, in per cent, whose first passing is worth a time.
LEVELS = (50, 60, 70, 80, 85, 90, 92, 93, 94, 95, 96, 97, 98, 99)


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
    """One HTML page about these run folders, and beside it ``figures/`` and the tables as CSV.

    out: the page (``….html``), or a folder for it and its figures.
    """
    read = read_runs(runs)
    rows = make_rows(read)
    sections = make_sections(read, rows)
    figures = [figure for section in sections for figure in section.figures]
    measured = [name for figure in figures if figure.boxes for name in figure.labels]
    chosen = looks([row.label for row in rows], measured)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    files: dict[str, bytes] = {}
    images: dict[str, str] = {}
    for figure in figures:
        files[f"figures/{figure.name}.png"], svg = draw(figure, chosen)
        files[f"figures/{figure.name}.csv"] = csv_text(*figure.csv_lines()).encode()
        # As the source of an image nothing is fetched, and no script in it would run.
        images[figure.name] = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    files["table.csv"] = table_csv(rows).encode()
    files["runs.csv"] = runs_csv(rows).encode()
    files[page.name] = _render(
        title=title or f"DEQ training on {_each(run.task for run in read)}",
        verdict=verdict(rows),
        lead=lead(read),
        problems=[f"{run.name}: {problem}" for run in read for problem in run.problems],
        sections=sections,
        looks=chosen,
        images=images,
    ).encode()
    save(page.parent, files)
    return page


def save(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Each whole or not at all: an earlier one stays until the new one is there."""
    place = folder
    try:
        for name, data in files.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            half = place.with_name(place.name + ".part")
            try:
                half.write_bytes(data)
                half.replace(place)
            except OSError:
                half.unlink(missing_ok=True)
                raise
    except OSError as problem:
        raise ReportError(
            f"cannot write the report to {folder}: {problem.strerror or problem} "
            f"({problem.filename or place}); choose another folder"
        ) from problem
    return [folder / name for name in files]


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
    metric, figures = metric_of(rows), make_figures(rows)
    training = [figure for figure in figures if figure.columns[1] == metric.key]
    found = [Section(f"Speed and {metric.words}", "", headline(rows), notes(rows))]
    found.append(Section("Convergence", figures=training))
    told, levels = "Training time after which a test first passed an accuracy.", levels_table(rows)
    found += [Section("", told, levels)] if levels.rows else []
    found.append(Section("Solver", figures=[f for f in figures if f not in training]))
    for index, one in enumerate(similarities(runs)):
        title = "" if index else "Gradient similarity"
        found.append(Section(title, one.text, figures=one.figures))
        found.append(Section(table=one.table, folded="The same in numbers"))
    found.append(Section("Runs", table=runs_table(rows)))
    different = differences(runs)
    told = "What differs between the runs; below, each run’s settings in full."
    if not different.columns:
        told = "All runs have the same settings." * (len(runs) > 1)
    found.append(Section("Configuration", told, different))
    found += [Section(folded=run.name, source=run.config_text.rstrip()) for run in runs]
    found.append(Section("Environment", table=environments(runs)))
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


def levels_table(rows: list[Row]) -> Table:
    """The three highest accuracies worth naming that some run reached, and when."""
    runs = [run for row in rows for run in row.runs if run.metric.percent]
    best = max((value for run in runs for _, value in run.curve("epoch")), default=0.0)
    levels = [level for level in LEVELS if level <= best][-3:]
    shown = [(row.label, some) for row in rows for some in row.scores if some.runs and levels]
    several = len({some.runs[0].pretrained for _, some in shown}) > 1
    columns: dict[str, Iterable[str | Cell]] = {
        "Method": [label for label, _ in shown],
        "Pre-training": [_pretraining(some.runs[0]) * several for _, some in shown],
    }
    columns |= {f"{level} %": [some.moment(level) for _, some in shown] for level in levels}
    return Table.of(columns, "levels")


def _pretraining(run: Run) -> str:
    return "with" if run.pretrained else "without"


def runs_table(rows: list[Row]) -> Table:
    several = [(row, run) for row in rows for run in row.runs]
    metric = metric_of(rows)
    columns: dict[str, Callable[[Row, Run], str]] = {
        "Run": lambda _, run: run.name,
        "Method": lambda row, _: row.label,
        "Pre-training": lambda _, run: _pretraining(run) * any(r.pretrained for _, r in several),
        "Seed": lambda _, run: str(run.seed),
        "State": lambda _, run: "finished" if run.finished else run.progress,
        metric.title.capitalize(): lambda _, run: (
            NONE if run.score is None else run.metric.text(run.score)
        ),
        "ms / step": lambda _, run: milliseconds(run.ms_per_step),
        "Time": lambda _, run: duration(run.seconds),
    }
    return Table.of({h: [show(*one) for one in several] for h, show in columns.items()}, "runs")


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


def table_csv(rows: list[Row]) -> str:
    """One line for each row of the table; numbers in full."""
    name = metric_of(rows).name
    head = ["method", "speedup", "speedup_low", "speedup_high"]
    for end in ("without", "pretrained"):
        head += [f"{name}_{end}", f"spread_{end}", f"seeds_{end}", f"unfinished_{end}"]
    head += ["ms_per_step", "train_seconds", "seconds_per_step", "evals", "vjps", "epochs"]
    lines = []
    for row in rows:
        line: list[object] = [row.label, row.speedup]
        line += row.range if row.in_turns else [None, None]
        for some in row.scores:
            line += [some.mean, some.spread, some.seeds, len(some.unfinished)]
        line += [row.ms_per_step, row.seconds, row.seconds_per_step, row.evals]
        lines.append([*line, row.vjps, row.epochs])
    return csv_text(head, lines)


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
