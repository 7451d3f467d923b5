"""The page: what the templates show of a report, every text escaped by Jinja."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gdeq.lab.report import formats
from gdeq.lab.report.draw import Drawn
from gdeq.lab.report.exactness import Similarity
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.methods import Look, label_of
from gdeq.lab.report.recipes import flatten, usual_text, varying
from gdeq.lab.report.rows import Row, best, levels_reached, metric_of, spread_over, unfinished
from gdeq.lab.report.runs import Run, number
from gdeq.options import count

if TYPE_CHECKING:
    import jinja2

READING = (
    f"{formats.SPEEDUP}. Compared are runs on the same data, model, batch size, precision and "
    "device. NAME: of the final epoch, mean ± standard deviation SPREAD. Times are of "
    "the runs without pre-training where there are any. VJPs are the vector-Jacobian products of "
    "one backward pass."
)


def make_page(
    title: str | None,
    runs: list[Run],
    rows: list[Row],
    figures: list[Figure],
    found: list[Similarity],
    looks: dict[str, Look],
    drawn: dict[str, Drawn],
) -> str:
    metric, levels = metric_of(rows), levels_reached(rows)
    higher = metric.higher_is_better
    return _template().render(
        title=title or f"DEQ training on {_each(run.task for run in runs)}",
        lead=lead(runs),
        runs=runs,
        rows=rows,
        metric=metric,
        best_speedup=best([None if row.few_steps else row.speedup for row in rows]),
        best_of=[best([row.cells[p].final for row in rows], higher) for p in (0, 1)],
        reading=_reading(rows, runs),
        levels=levels,
        level_names=[f"{level} %" for level in levels],
        convergence=[figure for figure in figures if figure.columns[1] == metric.key],
        solver=[figure for figure in figures if figure.columns[1] != metric.key],
        similarities=found,
        differences=differences(runs),
        environment=environments(runs),
        looks=looks,
        drawn=drawn,
    )


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # noqa: PLC0415 (not for the table on a terminal)

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("gdeq.lab.report"),
        autoescape=True,  # run folders cannot inject markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for show in (formats.speedup, formats.duration, formats.milliseconds, data_uri):
        made.filters[show.__name__] = show
    return made.get_template("report.html")


def data_uri(svg: bytes) -> str:
    """As the source of an image: nothing is fetched, and no script in it would run."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def lead(runs: list[Run]) -> str:
    """One line on what is compared, and where."""
    left = sum(not run.finished for run in runs)
    parts = [
        count(len(runs), "run") + (f" ({left} unfinished)" if left else ""),
        count(len({label_of(run) for run in runs}), "method"),
        _each(run.task for run in runs),
        _each(flatten(run.config).get("model.size") for run in runs),
        _each(_parameters(run) for run in runs),
        _each(count(run.epochs_wanted, "epoch") for run in runs),
        _each(run.device for run in runs),
    ]
    return " · ".join(part for part in parts if part)


def _parameters(run: Run) -> str:
    found = number((run.summary or {}).get("parameters"))
    return "" if found is None else f"{found:,.0f} parameters"


def _each(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def _reading(rows: list[Row], runs: list[Run]) -> str:
    """How to read the table."""
    text = READING.replace("NAME", metric_of(rows).title.capitalize())
    text = text.replace("SPREAD", spread_over(rows))
    told, left = usual_text(runs), unfinished(rows)
    if told:
        text += f" Unless a row says otherwise: {told}."
    if left:
        text += f" {formats.UNFINISHED} Not finished, the latest figure: {left}."
    return text


def differences(runs: list[Run]) -> dict[str, dict[Path, str]]:
    """Of each setting that is not the same in all, every run's value."""
    flat = {run.path: _texts(run.config) for run in runs}
    return {
        key: {path: own.get(key, formats.NONE) for path, own in flat.items()}
        for key in varying(list(flat.values()))
    }


def environments(runs: list[Run]) -> dict[str, dict[str, list[str]]]:
    """Versions and hardware: of each fact its values, and the runs that have them."""
    found: dict[str, dict[str, list[str]]] = {}
    flat = [_texts(run.environment) for run in runs]
    for key in dict.fromkeys(key for own in flat for key in own):
        for run, own in zip(runs, flat, strict=True):
            found.setdefault(key, {}).setdefault(own.get(key, formats.NONE), []).append(run.name)
    return found


def _texts(settings: dict[str, object]) -> dict[str, str]:
    return {key: formats.shown(value) for key, value in flatten(settings).items()}
