"""The tables as lines of text and as CSV."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence

from gdeq.lab.files import csv_cell
from gdeq.lab.report import formats
from gdeq.lab.report.recipes import usual_text
from gdeq.lab.report.rows import FEW_STEPS, Cell, Row, metric_of, spread_over, unfinished


def text_table(rows: list[Row]) -> str:
    """As the paper's Table 2, for a terminal."""
    metric = metric_of(rows).column.replace("(", "").replace(")", "")
    head = ["Method", "Speed-up", metric, "pre-trained", "ms / step", "Time", "VJPs"]
    body = [
        [
            _printable(row.label),
            _speedup(row),
            *map(_with_seeds, row.cells),
            *row.times,
            row.vjps,
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    rule = "  ".join("-" * width for width in widths)
    lines = [_aligned(head, widths), rule, *(_aligned(line, widths) for line in body)]
    lines += [f"mean ± standard deviation {spread_over(rows)}", formats.SPEEDUP]
    if any(row.few_steps for row in rows):
        lines.append(f"(steps): fewer than {FEW_STEPS} were timed for the speed-up")
    told = usual_text([run for row in rows for run in row.runs])
    if told:
        lines.append(_printable(f"unless a row says otherwise: {told}"))
    if any(formats.UNFINISHED in text for line in body for text in line):
        named = _printable(unfinished(rows))
        lines.append(f"{formats.UNFINISHED} unfinished, the latest figure: {named}")
    return "\n".join(line.rstrip() for line in lines)


def _with_seeds(cell: Cell) -> str:
    behind = cell.behind.replace(" unfinished", "")  # the mark's line says it
    return f"{cell.text} ({behind})" if cell.runs else formats.NONE


def _speedup(row: Row) -> str:
    few = row.few_steps.removesuffix(" timed")
    return formats.speedup(row.speedup) + (f" ({few})" if few else "")


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first = line[0].ljust(widths[0])
    rest = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
    return "  ".join([first, *rest])


def _printable(text: str) -> str:
    """No control characters: a run folder must not steer the terminal."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "?" for c in text)


def csv_text(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([csv_cell(cell) for cell in line] for line in (head, *lines))
    return file.getvalue()


def table_csv(rows: list[Row]) -> str:
    """One line for each row of the table; numbers in full."""
    name = metric_of(rows).name
    head = ["method", "speedup"]
    for end in ("without", "pretrained"):
        head += [f"{name}_{end}", f"spread_{end}", f"seeds_{end}", f"unfinished_{end}"]
    head += ["ms_per_step", "train_seconds", "seconds_per_step", "vjps", "epochs"]
    lines = []
    for row in rows:
        line: list[object] = [row.label, row.speedup]
        for cell in row.cells:
            line += [cell.mean, cell.spread, cell.seeds, len(cell.unfinished)]
        line += [row.ms_per_step, row.seconds, row.seconds_per_step, row.vjps, row.epochs]
        lines.append(line)
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
