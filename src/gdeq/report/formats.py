"""Numbers as people read them."""

from __future__ import annotations

from gdeq.report.rows import Cell, Row

NONE = "–"
UNFINISHED = "†"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    unit, name = time_unit(seconds)
    return (
        f"{seconds / unit:.3g} {name}" if seconds < 100 * unit else f"{seconds / unit:.0f} {name}"
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this size is told."""
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def speedup(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def accuracy(cell: Cell) -> str:
    if cell.mean is None:
        return NONE if cell.finished or not cell.runs else UNFINISHED
    text = f"{cell.mean:.2f}"
    if cell.spread is not None:
        text += f" ± {cell.spread:.2f}"
    return text if cell.finished else text + UNFINISHED


def scientific(value: float) -> str:
    """A number of any size in few characters: 0.02, 3·10⁻⁷, 10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    raised = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return raised if digits == "1.0" else f"{digits.removesuffix('.0')}·{raised}"


def seeds(cell: Cell) -> str:
    """How many runs stand behind an accuracy, and how far they are if not to the end."""
    if not cell.runs:
        return ""
    if not cell.finished:
        return ", ".join(dict.fromkeys(run.progress for run in cell.runs))
    count, runs = cell.seeds, len(cell.counted)
    text = f"{count} seed{'s' if count != 1 else ''}"
    return text if runs == count else f"{text}, {runs} runs"


def times(row: Row) -> tuple[str, str]:
    """Milliseconds a step, and the whole training; marked where no run is whole."""
    mark = "" if any(run.finished for run in row.timed) else UNFINISHED
    return milliseconds(row.ms_per_step), duration(row.seconds) + mark
