"""The tables as lines of text and as CSV."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence

from gdeq.lab.report import formats
from gdeq.lab.report.recipes import usual
from gdeq.lab.report.rows import Cell, Row
from gdeq.lab.report.runs import Run

HEAD = ["Method", "Speed-up", "Accuracy %", "pre-trained", "ms / step", "Time", "VJPs"]


def text_table(rows: list[Row]) -> str:
    """As the paper's Table 2, for a terminal."""
    body = [
        [
            _printable(row.label),
            _speedup(row),
            _with_seeds(row.without),
            _with_seeds(row.pretrained),
            *formats.times(row),
            row.vjps,
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [HEAD, *body]) for column in range(len(HEAD))]
    rule = "  ".join("-" * width for width in widths)
    lines = [_aligned(HEAD, widths), rule, *(_aligned(line, widths) for line in body)]
    lines += [f"mean ± standard deviation {formats.spread_over(rows)}", formats.SPEEDUP]
    if any(formats.few_steps(row) for row in rows):
        lines.append(f"(steps): fewer than {formats.FEW_STEPS} were timed for the speed-up")
    unsaid = usual([run for row in rows for run in row.runs])
    if unsaid:
        told = ", ".join(f"{key}={value}" for key, value in unsaid.items())
        lines.append(_printable(f"unless a row says otherwise: {told}"))
    if any(formats.UNFINISHED in text for line in body for text in line):
        named = _printable(formats.unfinished(rows))
        lines.append(f"{formats.UNFINISHED} unfinished, the latest figure: {named}")
    return "\n".join(line.rstrip() for line in lines)


def _with_seeds(cell: Cell) -> str:
    if not cell.runs:
        return formats.NONE
    behind = formats.seeds(cell).replace(" unfinished", "")  # the mark's line says it
    return f"{formats.accuracy(cell)} ({behind})"


def _speedup(row: Row) -> str:
    few = formats.few_steps(row).removesuffix(" timed")
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
    writer.writerow(head)
    writer.writerows(lines)
    return file.getvalue()


def table_csv(rows: list[Row]) -> str:
    """One line for each row of the table; numbers in full."""
    head = ["method", "speedup"]
    for name in ("without", "pretrained"):
        head += [f"accuracy_{name}", f"spread_{name}", f"seeds_{name}", f"unfinished_{name}"]
    head += ["ms_per_step", "train_seconds", "seconds_per_step", "vjps", "epochs"]
    lines = []
    for row in rows:
        line: list[object] = [row.label, row.speedup]
        for cell in (row.without, row.pretrained):
            line += [cell.mean, cell.spread, cell.seeds, len(cell.unfinished)]
        line += [row.ms_per_step, row.seconds, row.seconds_per_step, row.vjps, row.epochs]
        lines.append(line)
    return csv_text(head, lines)


def runs_csv(runs: list[Run]) -> str:
    """One line for each run: what stands behind the table."""
    head = ["gradient", "pretrain", "seed", "epochs", "test_accuracy", "ms_per_step"]
    head += ["train_seconds", "finished", "steps", "data", "device", "run"]
    lines = [
        [
            run.gradient.get("name"),
            run.pretrained,
            run.seed,
            run.epochs_done,
            run.accuracy,
            run.ms_per_step,
            run.seconds,
            run.finished,
            run.steps_done,
            run.config.get("data"),
            run.device,
            run.name,
        ]
        for run in runs
    ]
    return csv_text(head, lines)
