"""The page: a headline table, figures with a sentence each, and what stands behind them."""

from __future__ import annotations

from collections.abc import Iterable

from gdeq.lab.report import formats, settings, tables
from gdeq.lab.report.figures import Figure
from gdeq.lab.report.inline import variables
from gdeq.lab.report.markup import Markup, tag
from gdeq.lab.report.methods import Look, label_of
from gdeq.lab.report.recipes import flatten, usual
from gdeq.lab.report.rows import Row
from gdeq.lab.report.runs import Run, number
from gdeq.lab.report.similarity import IMPLICIT, Similarity
from gdeq.lab.report.style import CSS
from gdeq.options import count

Looks = dict[str, Look]
Drawn = dict[str, str]  # figure name → SVG

READING = (
    f"{formats.SPEEDUP}. Compared are runs on the same data, model, batch size, precision and "
    "device. Accuracy is that of the final epoch: mean ± standard deviation SPREAD. Times are of "
    "the runs without pre-training where there are any. VJPs are the vector-Jacobian products of "
    "one backward pass."
)


def make_page(
    title: str | None,
    runs: list[Run],
    rows: list[Row],
    figures: list[Figure],
    found: list[Similarity],
    looks: Looks,
    drawn: Drawn,
) -> str:
    title = title or f"DEQ training on {_all(run.config.get('data') for run in runs)}"
    style = CSS.replace("LIGHT", variables(looks, False)).replace("DARK", variables(looks, True))
    accuracy = [figure for figure in figures if figure.name.startswith("accuracy")]
    others = [figure for figure in figures if not figure.name.startswith("accuracy")]
    moments = tables.moments_table(rows, looks)
    body = tag(
        "main",
        tag("h1", title),
        tag("p", lead(runs), class_="soft"),
        *(tag("p", problem, class_="note") for problem in tables.problems(runs)),
        tag("h2", "Speed and accuracy"),
        tables.headline(rows, looks),
        tag("p", _reading(rows) + _unsaid(runs) + _unfinished(rows), class_="note"),
        *_section("Convergence", accuracy, drawn),
        *([_passing(), moments] if moments else []),
        *_section("Solver", others, drawn),
        *_similarity(found, looks, drawn),
        tag("h2", "Runs"),
        tables.runs_table(rows, looks),
        tag("h2", "Configuration"),
        settings.differences(runs),
        settings.configurations(runs),
        tag("h2", "Environment"),
        settings.environments(runs),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"


def lead(runs: list[Run]) -> str:
    """One line on what is compared, and where."""
    unfinished = sum(not run.finished for run in runs)
    parts = [
        count(len(runs), "run") + (f" ({unfinished} unfinished)" if unfinished else ""),
        count(len({label_of(run) for run in runs}), "method"),
        _all(run.config.get("data") for run in runs),
        _all(flatten(run.config).get("model.size") for run in runs),
        _all(_parameters(run) for run in runs),
        _all(count(run.epochs_wanted, "epoch") for run in runs),
        _all(run.device for run in runs),
    ]
    return " · ".join(part for part in parts if part)


def _parameters(run: Run) -> str:
    found = number((run.summary or {}).get("parameters"))
    return "" if found is None else f"{found:,.0f} parameters"


def _all(values: Iterable[object]) -> str:
    """Each of them once."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def _reading(rows: list[Row]) -> str:
    return READING.replace("SPREAD", formats.spread_over(rows))


def _unsaid(runs: list[Run]) -> str:
    found = ", ".join(f"{key}={value}" for key, value in usual(runs).items())
    return f" Unless a row says otherwise: {found}." if found else ""


def _unfinished(rows: list[Row]) -> str:
    named = formats.unfinished(rows)
    return f" {formats.UNFINISHED} Not finished, the latest figure: {named}." if named else ""


def _passing() -> Markup:
    text = (
        "Training time after which a test first passed an accuracy (mean over the runs tested most "
        "often)."
    )
    return tag("p", text, class_="note")


def _section(title: str, figures: list[Figure], drawn: Drawn) -> list[Markup]:
    if not figures:
        return []
    return [tag("h2", title), tag("div", *(_figure(f, drawn) for f in figures), class_="figures")]


def _figure(figure: Figure, drawn: Drawn) -> Markup:
    place = f"figures/{figure.name}"
    files = tag(
        "p",
        tag("a", "PNG", href=f"{place}.png"),
        " · ",
        tag("a", "CSV", href=f"{place}.csv"),
        class_="files",
    )
    return tag(
        "figure", tag("h3", figure.title), tag("p", figure.note), Markup(drawn[figure.name]), files
    )


def _similarity(found: list[Similarity], looks: Looks, drawn: Drawn) -> list[Markup]:
    parts = [tag("h2", "Gradient similarity")] if found else []
    for one in found:
        text = f"Measured on the weights of {one.run.name}. {IMPLICIT}"
        if one.exact_residual is not None:
            worst = formats.scientific(one.exact_residual)
            text += f" The exact gradient was solved to a residual of {worst} or less."
        if one.left_out:
            counts = (f"{lost} of {of} after epoch {e}" for e, (lost, of) in one.left_out.items())
            text += (
                " Samples that have no exact gradient are in no figure, and those left are the "
                f"easier ones: {', '.join(counts)}."
            )
        parts.append(tag("p", text))
        parts.append(tag("div", *(_figure(f, drawn) for f in one.figures), class_="figures"))
        parts.append(tables.similarity_table(one, looks))
    return parts
