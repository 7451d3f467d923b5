"""The paper's Table 2 from runs: one row for each method under each recipe, and its wording."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gdeq.lab.report import formats, methods, recipes
from gdeq.lab.report.runs import Metric, Run, number
from gdeq.options import count

# Accuracies, in per cent, whose first passing is worth a time.
LEVELS = (50, 60, 70, 80, 85, 90, 92, 93, 94, 95, 96, 97, 98, 99)
FEW_STEPS = 100  # timed: below this a speed-up is said to rest on few


@dataclass(frozen=True)
class Cell:
    """What repeats scored.  Unfinished runs count only where no other is there."""

    runs: tuple[Run, ...]

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def counted(self) -> list[Run]:
        return [r for r in self.runs if r.finished == self.finished and r.score is not None]

    @property
    def values(self) -> list[float]:
        return [run.score for run in self.counted if run.score is not None]

    @property
    def mean(self) -> float | None:
        return mean(self.values)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation, from two runs on."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def seeds(self) -> int:
        return len({str(run.seed) for run in self.counted})

    @property
    def unfinished(self) -> list[Run]:
        return [run for run in self.runs if not run.finished]

    @property
    def test_every(self) -> int:
        """Epochs from test to test, where they are fewest."""
        return min((run.test_every for run in self.runs), default=1)

    @property
    def followed(self) -> list[Run]:
        """Those tested most often: of the others it is less known when they passed a level."""
        return [run for run in self.runs if run.test_every == self.test_every]

    @property
    def text(self) -> str:
        """Mean ± spread, marked if no run is whole."""
        if self.mean is None:
            return formats.NONE if self.finished or not self.runs else formats.UNFINISHED
        metric = self.runs[0].metric
        text = metric.text(self.mean)
        if self.spread is not None:
            text += f" ± {metric.text(self.spread)}"
        return text if self.finished else text + formats.UNFINISHED

    @property
    def behind(self) -> str:
        """How many runs stand behind the mean, and how far they are if not to the end.

        Seeds are named only where they differ or where they are fewer than the runs.
        """
        if not self.runs:
            return ""
        if not self.finished:
            return ", ".join(dict.fromkeys(run.progress for run in self.runs))
        seeds, runs, left = self.seeds, len(self.counted), len(self.unfinished)
        text = count(seeds, "seed") if runs == seeds > 1 else count(runs, "run")
        if runs != seeds:
            text += f", {count(seeds, 'seed')}"
        return f"{text}, {left} unfinished{formats.UNFINISHED}" if left else text

    @property
    def final(self) -> float | None:
        """The mean, of whole runs alone."""
        return self.mean if self.finished else None

    def moment(self, level: float) -> tuple[str, str]:
        """When a test first passed a level, in the mean; and a note on what that rests on."""
        found, many, every = moments(self.followed, level), len(self.followed), self.test_every
        if not found:
            return formats.NONE, ""
        notes = [f"{len(found)} of {count(many, 'run')}"] if len(found) < many else []
        notes += [f"tested every {every} epochs"] if every > 1 else []
        at_most = "≤ " * (every > 1)
        return at_most + formats.duration(statistics.fmean(found)), ", ".join(notes)


@dataclass(frozen=True)
class Row:
    """One method under one recipe."""

    label: str
    runs: tuple[Run, ...]
    speedup: float | None = None
    speedup_steps: int = 0  # timed for it: the method's or Implicit's, whichever are fewer

    @property
    def without(self) -> Cell:
        return Cell(tuple(run for run in self.runs if not run.pretrained))

    @property
    def pretrained(self) -> Cell:
        return Cell(tuple(run for run in self.runs if run.pretrained))

    @property
    def cells(self) -> tuple[Cell, Cell]:
        return self.without, self.pretrained

    @property
    def timed(self) -> list[Run]:
        """Times are those without pre-training, where there are any, of whole runs if possible."""
        some = self.without.runs or self.pretrained.runs
        return [run for run in some if run.finished] or list(some)

    @property
    def ms_per_step(self) -> float | None:
        return mean(run.ms_per_step for run in self.timed)

    @property
    def seconds(self) -> float | None:
        return mean(run.seconds for run in self.timed)

    @property
    def seconds_per_step(self) -> float | None:
        return mean(run.seconds_per_step for run in self.timed)

    @property
    def steps_timed(self) -> int:
        return int(sum(run.steps_done or 0 for run in self.timed))

    @property
    def vjps(self) -> str:
        """Measured where the metrics hold it, else what the settings tell."""
        steps = [record for run in self.runs for record in run.steps]
        found = mean(number(r.get("vjps", r.get("refine"))) for r in steps)  # refine: as adapted
        return f"{found:.3g}" if found is not None else methods.vjps(self.runs[0].gradient)

    @property
    def epochs(self) -> int:
        return self.runs[0].epochs_wanted

    @property
    def few_steps(self) -> str:
        """How many steps were timed for a speed-up, where they are few."""
        few = self.speedup is not None and self.speedup_steps < FEW_STEPS
        return f"{count(self.speedup_steps, 'step')} timed" if few else ""

    @property
    def times(self) -> tuple[str, str]:
        """Milliseconds a step, and the whole training; marked where no run is whole."""
        whole = self.seconds is None or any(run.finished for run in self.timed)
        mark = "" if whole else formats.UNFINISHED
        return formats.milliseconds(self.ms_per_step), formats.duration(self.seconds) + mark


def mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def make_rows(runs: list[Run]) -> list[Row]:
    """Repeats (other seeds, with or without pre-training) share a row."""
    labels = recipes.row_labels(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(labels[run.path], []).append(run)
    rows = [Row(name, tuple(groups[name])) for name in sorted(groups, key=methods.rank)]
    return [_with_speedup(row, rows) for row in rows]


def _with_speedup(row: Row, rows: list[Row]) -> Row:
    """Against Implicit under the same recipe, else under the only other one of its workload."""
    baseline = _baseline(row, rows)
    if baseline is None or not row.seconds_per_step or not baseline.seconds_per_step:
        return row
    return replace(
        row,
        speedup=baseline.seconds_per_step / row.seconds_per_step,
        speedup_steps=min(row.steps_timed, baseline.steps_timed),
    )


def _baseline(row: Row, rows: list[Row]) -> Row | None:
    implicit = [
        other
        for other in rows
        if other.label.split(" ")[0] == "Implicit"
        and other.timed[0].pretrained == row.timed[0].pretrained
    ]
    # The paper's Implicit before one with another solver or budget.
    implicit = [r for r in implicit if r.label.split(" · ")[0] == "Implicit"] or implicit
    own = recipes.recipe(row.timed[0])
    for keys in (tuple(key for key in own if not key.startswith("gradient.")), recipes.WORKLOAD):
        found = [r for r in implicit if recipes.agree(own, recipes.recipe(r.timed[0]), keys)]
        if row in found:
            return row
        if len(found) == 1:
            return found[0]
    return None


def metric_of(rows: Sequence[Row]) -> Metric:
    """What the columns are called, from a run that tells; tasks are not meant to share a table."""
    runs = [run for row in rows for run in row.runs]
    return max(runs, key=lambda run: (run.finished, len(run.epochs))).metric


def levels_reached(rows: list[Row]) -> list[int]:
    """The three highest accuracies worth naming that some run reached."""
    runs = [run for row in rows for run in row.runs if run.metric.percent]
    best = max((value for run in runs for _, value in run.curve("epoch")), default=0.0)
    return [level for level in LEVELS if level <= best][-3:]


def moments(runs: Sequence[Run], level: float) -> list[float]:
    """Training seconds after which each run first tested at ``level`` or above."""
    passed = ([at for at, value in run.curve("seconds") if value >= level] for run in runs)
    return [times[0] for times in passed if times]


def best(values: Sequence[float | None], higher: bool = True) -> float | None:
    """What leads a column; None where fewer than two are compared, or two are equal."""
    found = sorted((value for value in values if value is not None), reverse=higher)
    return found[0] if len(found) > 1 and found[0] != found[1] else None


def spread_over(rows: list[Row]) -> str:
    """What the standard deviations are over: seeds only where each run has its own."""
    cells = [cell for row in rows for cell in row.cells if cell.spread is not None]
    same = any(cell.seeds < len(cell.counted) for cell in cells)
    return "over runs, some of the same seed" if same else "over seeds"


def unfinished(rows: Iterable[Row]) -> str:
    """The unfinished runs by name, how far they are, and whether a figure rests on them."""
    found = []
    for cell in (cell for row in rows for cell in row.cells):
        for run in cell.unfinished:
            aside = ", not counted" * (cell.finished and run.started)
            found.append(f"{run.name} ({run.progress}{aside})")
    return "; ".join(found)
