"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from gdeq.lab.report.rows import Cell, Row
from gdeq.lab.report.runs import Run
from gdeq.options import count

NONE = "–"
UNFINISHED = "†"
# One wording for the page and the terminal; in the paper's Table 2 it is of the whole training.
SPEEDUP = (
    "Speed-up: Implicit's time per step, mean over the whole training, divided by the method's; "
    "ms / step is the median of the log lines, so its ratios may be others"
)
FEW_STEPS = 100  # timed: below this a speed-up is said to rest on few


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
    """How many runs stand behind an accuracy, and how far they are if not to the end.

    Seeds are named only where they differ or where they are fewer than the runs.
    """
    if not cell.runs:
        return ""
    if not cell.finished:
        return ", ".join(dict.fromkeys(run.progress for run in cell.runs))
    seeds, runs = cell.seeds, len(cell.counted)
    text = count(seeds, "seed") if runs == seeds > 1 else count(runs, "run")
    if runs != seeds:
        text += f", {count(seeds, 'seed')}"
    left = len(cell.unfinished)
    return f"{text}, {left} unfinished{UNFINISHED}" if left else text


def spread_over(rows: list[Row]) -> str:
    """What the standard deviations are over: seeds only where each run has its own."""
    cells = [cell for row in rows for cell in (row.without, row.pretrained)]
    same = any(cell.seeds < len(cell.counted) for cell in cells if cell.spread is not None)
    return "over runs, some of the same seed" if same else "over seeds"


def few_steps(row: Row) -> str:
    """How many steps were timed for a speed-up, where they are few."""
    if row.speedup is None or row.speedup_steps >= FEW_STEPS:
        return ""
    return f"{count(row.speedup_steps, 'step')} timed"


def unfinished(rows: Iterable[Row]) -> str:
    """The unfinished runs by name, how far they are, and whether a figure rests on them."""
    found = []
    for row in rows:
        for cell in (row.without, row.pretrained):
            found += [_state(run, cell) for run in cell.unfinished]
    return "; ".join(found)


def _state(run: Run, cell: Cell) -> str:
    state = f"{run.name} ({run.progress}"
    return f"{state}, not counted)" if cell.finished and run.started else f"{state})"


def times(row: Row) -> tuple[str, str]:
    """Milliseconds a step, and the whole training; marked where no run is whole."""
    whole = row.seconds is None or any(run.finished for run in row.timed)
    return milliseconds(row.ms_per_step), duration(row.seconds) + ("" if whole else UNFINISHED)
