"""The paper's Table 2 from runs: one row for each method under each recipe."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gdeq.lab.metric import Metric
from gdeq.lab.report import methods
from gdeq.lab.report.runs import Run, mean, number
from gdeq.lab.report.tables import NONE, Cell, duration, milliseconds, shown
from gdeq.options import count

UNFINISHED = "†"
FEW_STEPS = 100  # timed: below this a speed-up is said to rest on few


class Repeats:
    """What repeats scored.  Unfinished runs count only where no other is there."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = list(runs)
        self.finished = any(run.finished for run in self.runs)
        self.unfinished = [run for run in self.runs if not run.finished]
        self.counted = [r for r in self.runs if r.finished == self.finished and r.score is not None]
        self.values = [run.score for run in self.counted if run.score is not None]
        self.seeds = len({str(run.seed) for run in self.counted})
        self.mean = mean(self.values)
        self.final = self.mean if self.finished else None  # of whole runs alone
        self.spread = statistics.stdev(self.values) if len(self.values) > 1 else None
        often = min((run.test_every for run in self.runs), default=1)  # the others' lines are rough
        self.followed = [run for run in self.runs if run.test_every == often]

    def cell(self, best: bool = False) -> Cell:
        """Mean ± spread, and how many runs stand behind it."""
        if not self.runs:
            return Cell(NONE)
        if not self.finished:
            behind = ", ".join(dict.fromkeys(run.progress for run in self.runs))
        else:  # seeds are named only where they differ or are fewer than the runs
            seeds, runs, left = self.seeds, len(self.counted), len(self.unfinished)
            behind = count(seeds, "seed") if runs == seeds > 1 else count(runs, "run")
            behind += f", {count(seeds, 'seed')}" if runs != seeds else ""
            behind += f", {left} unfinished{UNFINISHED}" if left else ""
        if self.mean is None:
            return Cell(NONE if self.finished else UNFINISHED, behind)
        metric = self.runs[0].metric
        text = metric.number(self.mean)
        text += "" if self.spread is None else f" ± {metric.number(self.spread)}"
        return Cell(text + UNFINISHED * (not self.finished), behind, best)


class Row:
    """One method under one recipe."""

    def __init__(self, label: str, runs: Sequence[Run]) -> None:
        self.label, self.runs = label, list(runs)
        self.without = Repeats(run for run in runs if not run.pretrained)
        self.pretrained = Repeats(run for run in runs if run.pretrained)
        self.scores = self.without, self.pretrained
        # Times are those without pre-training, where there are any, of whole runs if possible.
        some = self.without.runs or self.pretrained.runs
        self.timed = [run for run in some if run.finished] or some
        self.seconds = mean(run.seconds for run in self.timed)
        self.seconds_per_step = mean(run.seconds_per_step for run in self.timed)
        self.ms_per_step = mean(run.ms_per_step for run in self.timed)
        self.epochs = runs[0].epochs_wanted
        refined = mean(number(record.get("refine")) for run in runs for record in run.steps)
        self.vjps = methods.vjps(runs[0].gradient) if refined is None else f"{refined:.3g}"
        self.evals: float | None = None  # of f in a step, the one with autograd among them
        # The run whose steps were timed in turns with others.
        self.clock = next((run for run in self.timed if len(run.turns) > 1), None)
        if self.clock is not None:
            self.ms_per_step = statistics.median(self.clock.turns)
            self.evals = number(self.clock.timing.get("evals"))
            self.vjps = shown(number(self.clock.timing.get("vjps")), ".3g")
        self.ratios: list[float] = []  # Implicit's time per step by its own: of each turn, or one
        self.steps_timed = 0  # for one ratio: the method's or Implicit's, whichever are fewer

    @property
    def in_turns(self) -> bool:
        return len(self.ratios) > 1

    @property
    def is_baseline(self) -> bool:
        return set(self.ratios) == {1.0}

    @property
    def speedup(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def range(self) -> tuple[float, float]:
        """Of the speed-up: the middle half of the turns."""
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    def compare(self, baseline: Row) -> None:
        """Set the speed-up over this row of Implicit."""
        slow, fast = baseline.clock, self.clock
        if slow and fast and slow.timing.get("session") == fast.timing.get("session"):
            self.ratios = [one / own for one, own in zip(slow.turns, fast.turns, strict=False)]
        elif self.seconds_per_step and baseline.seconds_per_step:
            self.ratios = [baseline.seconds_per_step / self.seconds_per_step]
            steps = (sum(run.steps_done for run in row.timed) for row in (self, baseline))
            self.steps_timed = min(steps)

    def speed_cell(self, best: bool) -> Cell:
        if self.speedup is None:
            return Cell(NONE)
        note = ""
        if self.in_turns and not self.is_baseline:
            note = "{:.2f} to {:.2f}".format(*self.range)
        elif not self.in_turns and self.steps_timed < FEW_STEPS:
            note = f"{count(self.steps_timed, 'step')} timed"
        return Cell(f"{self.speedup:.2f}×", note, best)

    def time_cell(self) -> Cell:
        """The whole training; marked where no run is whole."""
        whole = self.seconds is None or any(run.finished for run in self.timed)
        return Cell(duration(self.seconds) + UNFINISHED * (not whole))

    def ms_cell(self) -> Cell:
        note = ""
        if self.clock is not None:
            quartiles = statistics.quantiles(self.clock.turns, n=4, method="inclusive")
            note = " to ".join(milliseconds(ms) for ms in quartiles[::2])
        return Cell(milliseconds(self.ms_per_step), note)


def make_rows(runs: list[Run]) -> list[Row]:
    """Repeats (other seeds, with or without pre-training) share a row."""
    labels, _ = methods.row_labels(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(labels[run.path], []).append(run)
    rows = [Row(name, groups[name]) for name in sorted(groups, key=methods.rank)]
    for row in rows:
        baseline = _baseline(row, rows)
        if baseline is not None:
            row.compare(baseline)
    return rows


def _baseline(row: Row, rows: list[Row]) -> Row | None:
    """Implicit under the same recipe, else the only one with the same workload."""
    pretrained = row.timed[0].pretrained
    implicit = [r for r in rows if r.label.split(" ")[0] == "Implicit"]
    implicit = [r for r in implicit if r.timed[0].pretrained == pretrained]
    # The paper's Implicit before one with another solver or budget.
    implicit = [r for r in implicit if r.label.split(" · ")[0] == "Implicit"] or implicit
    own = methods.recipe(row.timed[0])
    for keys in ([key for key in own if not key.startswith("gradient.")], methods.WORKLOAD):
        found = [r for r in implicit if methods.agree(own, methods.recipe(r.timed[0]), keys)]
        if row in found:
            return row
        if len(found) == 1:
            return found[0]
    return None


def metric_of(rows: Sequence[Row]) -> Metric:
    """What the columns are called, from a run that tells."""
    runs = [run for row in rows for run in row.runs]
    return max(runs, key=lambda run: (run.finished, len(run.epochs))).metric


def unfinished(rows: Iterable[Row]) -> str:
    """The unfinished runs by name, how far they are, and whether a figure rests on them."""
    return "; ".join(
        f"{run.name} ({run.progress}{', not counted' * (repeats.finished and run.started)})"
        for row in rows
        for repeats in row.scores
        for run in repeats.unfinished
    )
