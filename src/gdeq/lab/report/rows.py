"""The paper's Table 2 from runs: one row for each method under each recipe."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gdeq.lab.report import methods, recipes
from gdeq.lab.report.runs import Run, number

# Accuracies whose first passing is worth a time.
LEVELS = (50, 60, 70, 80, 85, 90, 92, 93, 94, 95, 96, 97, 98, 99)


@dataclass(frozen=True)
class Cell:
    """Accuracies of repeats.  Unfinished runs count only where no other is there."""

    runs: tuple[Run, ...]

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def counted(self) -> list[Run]:
        return [r for r in self.runs if r.finished == self.finished and r.accuracy is not None]

    @property
    def values(self) -> list[float]:
        return [run.accuracy for run in self.counted if run.accuracy is not None]

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
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


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


def levels_reached(rows: list[Row]) -> list[int]:
    """The three highest accuracies worth naming that some run reached."""
    best = max((a for row in rows for run in row.runs for _, a in curve(run, "epoch")), default=0.0)
    return [level for level in LEVELS if level <= best][-3:]


def moments(cell: Cell, level: float, runs: Sequence[Run] | None = None) -> list[float]:
    """Training seconds after which each run (that is followed) tested at ``level`` or above."""
    some = cell.followed if runs is None else runs
    passed = ([at for at, a in curve(run, "seconds") if a >= level] for run in some)
    return [times[0] for times in passed if times]


def curve(run: Run, x: str) -> list[tuple[float, float]]:
    """Test accuracy at the end of each epoch, against ``x``."""
    pairs = ((number(r.get(x)), number(r.get("test_accuracy"))) for r in run.epochs)
    return [(at, accuracy) for at, accuracy in pairs if at is not None and accuracy is not None]
