"""Tables: as text, Markdown and CSV here, as HTML by the page's template; and how numbers read."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gdeq.lab.files import csv_cell

NONE = "–"


class Cell(NamedTuple):
    """What stands in a table."""

    text: str
    note: str = ""  # small print
    best: bool = False

    @property
    def plain(self) -> str:
        """In one line, without control characters: a run folder must not steer the terminal."""
        text = f"{self.text} ({self.note})" if self.note else self.text
        return "".join(c if unicodedata.category(c)[0] != "C" else "?" for c in text)


@dataclass(frozen=True)
class Table:
    """Columns by their heads, without those that are empty."""

    columns: dict[str, list[Cell]]
    name: str = ""

    @staticmethod
    def of(columns: Mapping[str, Iterable[str | Cell]], name: str = "") -> Table:
        made = {
            head: [Cell(cell) if isinstance(cell, str) else cell for cell in cells]
            for head, cells in columns.items()
        }
        told = {h: cells for h, cells in made.items() if {c.text for c in cells} - {"", NONE}}
        return Table(told, name)

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*self.columns.values(), strict=True))

    def lines(self) -> list[list[str]]:
        """Head and rows, as plain text."""
        return [list(self.columns), *([cell.plain for cell in row] for row in self.rows)]

    def text(self) -> str:
        """The first column to the left, all others to the right."""
        lines = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        forms = [f">{width}" for width in widths]
        forms[:1] = [f"<{width}" for width in widths[:1]]
        rows = (map(format, line, forms) for line in lines)
        return "\n".join("  ".join(row).rstrip() for row in rows)

    def markdown(self) -> str:
        lines = self.lines()
        lines.insert(1, ["---"] * len(self.columns))
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([csv_cell(cell) for cell in line] for line in (head, *lines))
    return file.getvalue()


def shown(value: object, form: str = "") -> str:
    """In a format; a dash where there is nothing."""
    return NONE if value is None else format(value, form) if form else str(value)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    unit, name = time_unit(seconds)
    return f"{seconds / unit:{'.3g' if seconds < 100 * unit else '.0f'}} {name}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this size is told."""
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def milliseconds(value: float | None) -> str:
    return shown(value, ".1f" if value is not None and value < 100 else ".0f")


def scientific(value: float) -> str:
    """A number of any size in few characters: 0.02, 3·10⁻⁷, 10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    raised = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return raised if digits == "1.0" else f"{digits.removesuffix('.0')}·{raised}"


def listed(names: Sequence[str]) -> str:
    """``A, B and C``"""
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])
