"""The page's tables of results: the paper's Table 2, moments, runs, similarity."""

from __future__ import annotations

import statistics

from gdeq.lab.report import formats
from gdeq.lab.report.inline import colours
from gdeq.lab.report.markup import Markup, header, join, table, tag
from gdeq.lab.report.methods import Look
from gdeq.lab.report.recipes import WORKLOAD, recipe
from gdeq.lab.report.rows import Cell, Row, levels_reached, moments
from gdeq.lab.report.runs import Run
from gdeq.lab.report.similarity import Similarity
from gdeq.options import count

Looks = dict[str, Look]
TEST_IMAGES = {"digits": 360}  # all others: 10 000


def key(name: str, looks: Looks) -> Markup:
    """A patch of the method's colour beside its name."""
    index = list(colours(looks)).index(looks[name].light)
    patch = tag("span", "", class_="key", style=f"background: var(--method-{index})")
    return join(patch, name)


def headline(rows: list[Row], looks: Looks) -> Markup:
    """In the form of the paper's Table 2; the best of a column is bold."""
    columns = ("Method", "Speed-up", None, "ms / step", "Training time", "VJPs", "Epochs")
    top = [
        tag("th", name, scope="col", rowspan="2")
        if name
        else tag("th", "Test accuracy (%), pre-training", scope="colgroup", colspan="2")
        for name in columns
    ]
    head = [
        tag("tr", *top),
        tag("tr", tag("th", "without", scope="col"), tag("th", "with", scope="col")),
    ]
    timed = [None if formats.few_steps(row) else row.speedup for row in rows]
    fastest = _best(rows, timed, 0.01)
    image = max((_one_image(row) for row in rows), default=0.0)
    plain = _best(rows, [_final(row.without) for row in rows], image)
    pretrained = _best(rows, [_final(row.pretrained) for row in rows], image)
    body: list[list[object]] = []
    for row, speed in zip(rows, timed, strict=True):
        ms, time = formats.times(row)
        body.append(
            [
                key(row.label, looks),
                _cell(formats.speedup(row.speedup), speed == fastest, formats.few_steps(row)),
                _cell(
                    formats.accuracy(row.without),
                    _final(row.without) == plain,
                    formats.seeds(row.without),
                ),
                _cell(
                    formats.accuracy(row.pretrained),
                    _final(row.pretrained) == pretrained,
                    formats.seeds(row.pretrained),
                ),
                ms,
                time,
                row.vjps,
                row.epochs,
            ]
        )
    return table(head, body, "headline")


def _final(cell: Cell) -> float | None:
    return cell.mean if cell.finished else None


def _one_image(row: Row) -> float:
    """What one test image more is in per cent."""
    return 100 / TEST_IMAGES.get(str(row.runs[0].config.get("data")), 10_000)


def _best(rows: list[Row], values: list[float | None], least: float) -> float:
    """The highest of at least two on one workload; else one that nothing equals.

    So too where it leads the next by less than ``least``, or after one epoch: that says nothing.
    """
    pairs = zip(values, rows, strict=True)
    found = sorted(((v, row.epochs) for v, row in pairs if v is not None), reverse=True)[:2]
    loads = {tuple(recipe(row.runs[0]).get(key) for key in WORKLOAD[:2]) for row in rows}
    if len(found) < 2 or len(loads) > 1 or min(epochs for _, epochs in found) <= 1:
        return float("nan")
    (best, _), (second, _) = found
    return best if best - second >= least * (1 - 1e-6) else float("nan")


def _cell(text: str, best: bool, small: str = "") -> Markup:
    below = tag("small", small) if small else Markup("")
    return tag("td", tag("span", text, class_="best") if best else text, below)


def moments_table(rows: list[Row], looks: Looks) -> Markup | None:
    """When each method first tested above the highest round accuracies."""
    levels = levels_reached(rows)
    body: list[list[object]] = []
    for row in rows:
        for cell, name in ((row.without, "without"), (row.pretrained, "with")):
            if cell.runs:
                found = [_moment(cell, level) for level in levels]
                body.append([key(row.label, looks), name, *found])
    if not levels or not body:
        return None
    return table(header("Method", "pre-training", *(f"{level} %" for level in levels)), body)


def _moment(cell: Cell, level: int) -> Markup:
    found, many, every = moments(cell, level), len(cell.followed), cell.test_every
    if not found:  # one that is tested less often may have passed it all the same
        found, many = moments(cell, level, cell.runs), len(cell.runs)
        every = max((run.test_every for run in cell.runs), default=1)
    if not found:
        return tag("td", formats.NONE)
    notes = [f"{len(found)} of {count(many, 'run')}"] if len(found) < many else []
    notes += [f"tested every {every} epochs"] if every > 1 else []
    at_most = "≤ " * (every > 1)
    return _cell(at_most + formats.duration(statistics.fmean(found)), False, ", ".join(notes))


def runs_table(rows: list[Row], looks: Looks) -> Markup:
    """Each run, also the unfinished ones."""
    body: list[list[object]] = [
        [
            run.name,
            tag("td", key(row.label, looks), class_="text"),
            "with" if run.pretrained else "without",
            run.seed,
            _state(run),
            formats.NONE if run.accuracy is None else f"{run.accuracy:.2f}",
            formats.milliseconds(run.ms_per_step),
            formats.duration(run.seconds),
        ]
        for row in rows
        for run in row.runs
    ]
    method = tag("th", "Method", scope="col", class_="text")
    names = ("Run", method, "Pre-training", "Seed", "State", "Accuracy (%)", "ms / step", "Time")
    return table(header(*names), body, "runs")


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    return f"in {run.progress}" if run.started else run.progress


def similarity_table(found: Similarity, looks: Looks) -> Markup:
    body: list[list[object]] = [
        [
            key(group.method, looks),
            group.epoch,
            formats.NONE if group.vjps is None else f"{group.vjps:.3g}",
            len(group.cosine),
            _middle(group.cosine, ".4f"),
            f"{min(group.cosine):.4f}" if group.cosine else formats.NONE,
            _middle(group.error, ".3f"),
            _middle(group.residual, ".3f"),
        ]
        for group in found.groups
    ]
    names = ("Method", "After epoch", "VJPs, median", "Batches", "Cosine, median", "least")
    made = table(header(*names, "Relative error, median", "Adjoint residual, median"), body)
    return tag("details", tag("summary", "The same in numbers"), made)


def _middle(values: list[float], form: str) -> str:
    return format(statistics.median(values), form) if values else formats.NONE


def problems(runs: list[Run]) -> list[str]:
    """What could not be read, in sentences."""
    return [f"{run.name}: {problem}." for run in runs for problem in run.problems]
