"""What the runs show, and what they are too few to show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gdeq.lab.report import methods
from gdeq.lab.report.rows import UNFINISHED, Repeats, Row, metric_of, unfinished
from gdeq.lab.report.runs import mean, number
from gdeq.lab.report.tables import Cell, Table, listed, shown

BUSY = 0.05  # share of the time spent waiting for a core, above which others were at work
APART = 2.0  # standard errors between two means that are told apart


def headline(rows: Sequence[Row]) -> Table:
    """The paper's Table 2.  What leads a column is marked where it is told from all others."""
    metric = metric_of(rows)
    both = all(any(row.scores[p].runs for row in rows) for p in (0, 1))
    fastest, leading = fast(rows), [leaders(rows, p) for p in (0, 1)]
    title = metric.title.capitalize()
    heads = (title, "… with pre-training") if both else (title, f"{title}, with pre-training")
    epochs = [str(row.epochs) for row in rows]
    columns: dict[str, Sequence[str | Cell]] = {
        "Method": [row.label for row in rows],
        "Speed-up": [row.speed_cell([row] == fastest) for row in rows],
        **{
            head: [row.scores[p].cell([row] == leading[p]) for row in rows]
            for p, head in enumerate(heads)
        },
        "ms / step": [row.ms_cell() for row in rows],
        "f / step": [shown(row.evals, ".3g") for row in rows],
        "VJPs / step": [row.vjps for row in rows],
        "Training time": [row.time_cell() for row in rows],
        "Epochs": epochs if len(set(epochs)) > 1 else [""] * len(rows),
    }
    return Table.of(columns, "headline")


def fast(rows: Sequence[Row]) -> list[Row]:
    """The fastest by times taken in turns, and those whose middle half of turns overlaps its."""
    timed = [row for row in rows if row.in_turns]
    if len(timed) < 2:
        return []
    best = max(timed, key=lambda row: row.speedup or 0.0)
    return [row for row in timed if row is best or row.range[1] >= best.range[0]]


def leaders(rows: Sequence[Row], which: int) -> list[Row]:
    """The best score and those that are not told from it; which: 0 without pre-training, 1 with."""
    sign = 1 if metric_of(rows).higher_is_better else -1
    scored = [row for row in rows if row.scores[which].final is not None]
    scored.sort(key=lambda row: -sign * (row.scores[which].final or 0.0))
    if len(scored) < 2:
        return []
    deviation = noise(rows, which)
    best = scored[0].scores[which]
    return [row for row in scored if not _apart(best, row.scores[which], deviation)]


def _apart(one: Repeats, other: Repeats, deviation: float | None) -> bool:
    if deviation is None or one.final is None or other.final is None:
        return False
    error = deviation * math.sqrt(1 / len(one.values) + 1 / len(other.values))
    return one is not other and abs(one.final - other.final) > APART * error


def noise(rows: Sequence[Row], which: int) -> float | None:
    """Standard deviation of one run's score: of seeds, or of so many test samples if larger."""
    some = [row.scores[which] for row in rows]
    spreads = [repeats.spread for repeats in some if repeats.spread is not None]
    found = [math.sqrt(statistics.fmean(spread**2 for spread in spreads))] if spreads else []
    samples = _samples(some)
    level = mean(repeats.final for repeats in some)
    if samples and level is not None and metric_of(rows).percent:
        found.append(math.sqrt(max(0.0, level * (100 - level)) / samples))
    return max(found, default=None)


def verdict(rows: Sequence[Row]) -> str:
    """In a few sentences, first what is shown and then what more it would take."""
    return " ".join(part for part in (_speed(rows), _score(rows)) if part)


def _speed(rows: Sequence[Row]) -> str:
    others = [row for row in rows if row.speedup is not None and not row.is_baseline]
    if not others:
        return ""
    if any(row.is_baseline for row in fast(rows)):
        return "No method's steps are measurably shorter than Implicit's."
    best = [row for row in fast(rows) if row in others]
    best = best or [max(others, key=lambda row: row.speedup or 0.0)]
    sizes = dict.fromkeys(f"{ratio:.1f}" for ratio in sorted(row.speedup or 0.0 for row in best))
    size = " to ".join([*sizes][:: max(1, len(sizes) - 1)])
    verb = "takes" if len(best) == 1 else "take"
    text = f"{_short(best)} {verb} the shortest steps, {size} times as fast as Implicit’s"
    if len(best) > 1:
        text += "; these times show no difference between them"
    return text + ("." if best[0].in_turns else ", judging by whole trainings.")


def _score(rows: Sequence[Row]) -> str:
    which = 0 if sum(row.without.final is not None for row in rows) > 1 else 1
    leading, metric = leaders(rows, which), metric_of(rows)
    if not leading:
        return ""
    finals = sorted(row.scores[which].final or 0.0 for row in leading)
    low, high = metric.number(finals[0]), metric.number(finals[-1])
    unit = f" {metric.unit}" * bool(metric.unit)
    if len(leading) == 1:
        return f"{_short(leading)} has the best test {metric.words}, {high}{unit}."
    text = f"The runs show no difference in test {metric.words}"
    if len(leading) < sum(row.scores[which].final is not None for row in rows):
        text = f"{_short(leading)} lead in test {metric.words}; no difference shows between them"
    return f"{text}: {low} to {high}{unit}. {_needed(rows, leading, which)}".rstrip()


def _short(rows: Sequence[Row]) -> str:
    """Their methods, without the settings."""
    return listed(list(dict.fromkeys(row.label.split(" · ")[0] for row in rows)))


def _needed(rows: Sequence[Row], leading: list[Row], which: int) -> str:
    """How much more it would take to tell the best from the worst of those that lead."""
    ends = leading[0], leading[-1]
    first, last = (row.scores[which].final or 0.0 for row in ends)
    deviation, gap = noise(rows, which), abs(first - last)
    if deviation is None:
        return "One run of each says nothing about the spread: repeat with --seeds 3."
    if not gap:
        return ""
    times, more = 2 * (APART * deviation / gap) ** 2, ""
    samples = _samples([leading[0].scores[which]]) if metric_of(rows).percent else None
    if samples:
        more = f"{_round(times * samples)} test samples (there are {samples:.0f}), or "
    names = " and ".join(row.label.split(" · ")[0] for row in ends)
    return (
        f"If the difference between {names} is real, it takes about {more}{_round(times)} seeds "
        "of each to show it."
    )


def _samples(some: Sequence[Repeats]) -> float | None:
    """In the test set."""
    return mean(number(run.summary.get("test_samples")) for one in some for run in one.runs)


def _round(amount: float) -> str:
    """Two digits say enough."""
    size = 10 ** max(0, math.floor(math.log10(amount)) - 1) if amount >= 1 else 1
    return f"{math.ceil(amount / size) * size:,.0f}"


def notes(rows: Sequence[Row]) -> list[str]:
    """How to read the headline table."""
    found = []
    clocks = [row.clock for row in rows if row.clock]
    if any(row.in_turns for row in rows):
        found.append(
            "Speed-up: Implicit's time per step divided by the method's. All methods are timed in "
            "turns after training; below the median is the range of the middle half of the turns"
        )
    elif any(row.speedup is not None for row in rows):
        found.append(
            "Speed-up: Implicit's mean time per step in training divided by the method's. The "
            "trainings ran one after another, so other work on the machine may have slowed some "
            "of them; ms / step is the median of the log lines"
        )
    waited = max((number(run.timing.get("waited")) or 0.0 for run in clocks), default=0.0)
    if waited > BUSY:
        found.append(
            f"The machine was busy: {100 * waited:.0f} % of the timing was spent waiting for a "
            "core. This slowed all methods alike, so trust the ratios more than the milliseconds. "
            "To time them again, repeat the command on an idle machine"
        )
    # A step in training beside the same step timed in turns.
    shares = {
        row.label: 1e3 * row.seconds_per_step / row.ms_per_step
        for row in rows
        if row.clock and row.seconds_per_step and row.ms_per_step
    }
    slow = [label for label, share in shares.items() if share > min(1.5, 2 * min(shares.values()))]
    if slow:
        found.append(
            f"Other work on the machine slowed the training of {listed(slow)}: do not compare "
            "training times"
        )
    if clocks:
        found.append("f / step: evaluations of f per training step, including one with autograd")
    every = [repeats for row in rows for repeats in row.scores if repeats.spread is not None]
    if every:
        same = any(repeats.seeds < len(repeats.counted) for repeats in every)
        over = "over runs, some of the same seed" if same else "over seeds"
        found.append(f"Figures are of the final epoch: mean ± standard deviation {over}")
    _, usual = methods.row_labels([run for row in rows for run in row.runs])
    found += [f"Unless a row says otherwise: {usual}"] if usual else []
    left = unfinished(rows)
    found += [f"{UNFINISHED} unfinished, the latest figure: {left}"] if left else []
    return found
