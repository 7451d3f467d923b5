"""The paper's Table 2 and its convergence figure, with the paper's own figures beside."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gdeq.lab.paper.plan import LONGER, METHODS, title
from gdeq.lab.paper.reading import NOT_YET, Made, markdown
from gdeq.lab.report import recipes
from gdeq.lab.report.figures import Figure, Line, floor
from gdeq.lab.report.formats import time_unit
from gdeq.lab.report.rows import curve, mean
from gdeq.lab.report.runs import Run, number
from gdeq.options import count

# Speed-up, accuracy without and with pre-training; 220 epochs on four RTX A6000.
PAPER = {
    "implicit": (1.00, 91.64, 92.29),
    "jfb": (1.97, 91.56, 91.99),
    "npg": (1.71, 93.42, 92.46),
    "gdeq": (2.16, 92.01, 93.08),
}
LEVELS = (90, 92, 93)
CSV_HEAD = ["gradient", "pretrain", "seed", "epochs", "test_accuracy", "ms_per_step"]
CSV_HEAD += ["train_seconds"]


def in_table(made: Sequence[Made]) -> dict[str, list[Made]]:
    """Row → its runs; the paper's four first, in its order."""
    rows: dict[str, list[Made]] = {name: [] for name in METHODS}
    for one in made:
        if one.planned.group == "table2":
            rows.setdefault(one.planned.row, []).append(one)
    return rows


def csv_lines(made: Sequence[Made]) -> list[list[object]]:
    """Finished runs alone: the last epoch's accuracy, never a better one's."""
    return [
        [
            row,
            str(one.planned.pretrain).lower(),
            one.planned.seed,
            one.run.epochs_done,
            one.run.accuracy,
            one.run.ms_per_step,
            one.run.seconds,
        ]
        for row, all_of in in_table(made).items()
        for one in all_of
        if one.run is not None and one.finished
    ]


class Column:
    """One row's runs with, or without, pre-training."""

    def __init__(self, made: Sequence[Made], pretrain: bool) -> None:
        self.all = [one for one in made if one.planned.pretrain == pretrain]
        self.runs = [one.run for one in self.all if one.run is not None and one.finished]

    @property
    def accuracy(self) -> str:
        """Mean ± standard deviation over seeds."""
        found = [run.accuracy for run in self.runs if run.accuracy is not None]
        if not found:
            states = [one.state for one in self.all if one.state != NOT_YET]
            return "; ".join(states) or (NOT_YET if self.all else "–")
        text = f"{statistics.fmean(found):.2f}"
        if len(found) > 1:
            text += f" ± {statistics.stdev(found):.2f}"
        many = f"{len(found)} of {len(self.all)}" if len(found) < len(self.all) else len(found)
        # A seed that is left out of a mean for having diverged must be seen.
        lost = sum(bool(one.failure) for one in self.all)
        told = f", {lost} diverged" * (lost > 0)
        return f"{text} ({many} seed{'s' * (len(self.all) > 1)}{told})"

    @property
    def seconds(self) -> float | None:
        return mean(run.seconds for run in self.runs)

    @property
    def ms(self) -> float | None:
        return mean(run.ms_per_step for run in self.runs)


def text(made: Sequence[Made]) -> str:
    rows = in_table(made)
    columns = {row: (Column(some, False), Column(some, True)) for row, some in rows.items()}
    lines = []
    for row, pair in columns.items():
        speeds = [
            "1.00×" if row == "implicit" and own.runs else _speed_up(own.runs, columns, base.runs)
            for own, base in zip(pair, columns["implicit"], strict=True)
        ]
        seconds = [_shown(column.seconds, ".0f") for column in pair]
        paper = PAPER.get(row)
        lines.append(
            [
                title(row),
                pair[0].accuracy,
                pair[1].accuracy,
                _shown(pair[0].ms or pair[1].ms, ".1f"),
                *seconds,
                *speeds,
                f"{paper[1]:.2f} / {paper[2]:.2f}" if paper else "–",
                f"{paper[0]:.2f}×" if paper else "–",
            ]
        )
    head = ["Method", "Accuracy %", "pre-trained", "ms / step", "Training s", "pre-trained"]
    head += ["Speed-up", "pre-trained", "Paper's accuracy", "Paper's speed-up"]
    return "\n".join(
        [
            "# Table 2\n",
            markdown(head, lines),
            "Test accuracy of the last epoch; mean ± standard deviation over seeds.  Speed-up: of "
            "the whole training, against Implicit with as much pre-training, of the runs whose "
            "code is that of an Implicit run; ~: there is none, and the means are divided across "
            "code.  Training time is without tests, compilation and the recording of CUDA graphs.  "
            "The paper's accuracies, without / with pre-training, are of 220 epochs on four RTX "
            "A6000.\n",
            *_recipe_notes(rows),
        ]
    )


def _recipe_notes(rows: dict[str, list[Made]]) -> list[str]:
    """One table wants one recipe: what is not the same in all its runs is named."""
    runs = [
        (row, one.run) for row, some in rows.items() for one in some if one.run and one.finished
    ]
    kept = [(row, _recipe(run)) for row, run in runs]
    notes = []
    if runs:
        epochs = sorted({str(run.epochs_done) for _, run in runs}, key=int)
        devices = sorted({str(run.device) for _, run in runs})
        notes.append(f"Epochs: {', '.join(epochs)}.  Device: {', '.join(devices)}.\n")
        notes += _revision_note([run for _, run in runs])
    for key in recipes.varying([own for _, own in kept]):
        values: dict[str, list[str]] = {}
        for row, own in kept:
            if key in own and title(row) not in values.setdefault(own[key], []):
                values[own[key]].append(title(row))
        # Some titles have commas.
        told = "; ".join(f"{value} ({' / '.join(names)})" for value, names in values.items())
        notes.append(f"Not the same in all rows: {key} = {told}.\n")
    return notes


def _revision_note(runs: Sequence[Run]) -> list[str]:
    """Times, and ratios of times, are of the code that was timed."""
    by_revision: dict[str, list[str]] = {}
    for run in runs:
        by_revision.setdefault(_revision(run) or "not recorded", []).append(run.name)
    if len(by_revision) < 2:
        return []
    told = "; ".join(f"{revision}: {', '.join(names)}" for revision, names in by_revision.items())
    return [f"**Of different revisions of the code**, whose times differ ({told}).\n"]


def _recipe(run: Run) -> dict[str, str]:
    return {k: v for k, v in recipes.recipe(run).items() if not k.startswith("gradient")}


def _speed_up(
    runs: Sequence[Run], columns: dict[str, tuple[Column, Column]], base: Sequence[Run]
) -> str:
    """base: Implicit's own, where no Implicit run has the code of one of these."""
    pretrained = bool(runs) and runs[0].pretrained
    exact = [
        run
        for pair in columns.values()
        for run in pair[pretrained].runs
        if str(run.gradient.get("name")).lower() == "implicit"
    ]
    shared = {_revision(run) for run in exact} & {_revision(run) for run in runs} - {None}
    pairs = [[run for run in some if _revision(run) in shared] for some in (exact, runs)]
    slow, fast = pairs if shared else (base, runs)
    ratio = _ratio(*(mean(run.seconds for run in some) for some in (slow, fast)))
    return ("" if shared else "~ ") + f"{ratio:.2f}×" if ratio else "–"


def _revision(run: Run) -> str | None:
    return run.environment.get("revision")


def _ratio(base: float | None, own: float | None) -> float | None:
    return base / own if base and own else None


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else format(value, form) + unit


# -- convergence -----------------------------------------------------------------------------------


def in_convergence(made: Sequence[Made]) -> dict[str, list[Made]]:
    """As `in_table`, without those whose schedule is longer: accuracy comes at a schedule's end."""
    return {row: some for row, some in in_table(made).items() if row not in LONGER}


def without_pretraining(made: Sequence[Made]) -> list[tuple[str, Run]]:
    """Those tested after every epoch: of the others it is not known when they passed a level."""
    return [
        (title(row), one.run)
        for row, some in in_convergence(made).items()
        for one in some
        if one.run is not None and not one.planned.pretrain and one.run.epochs
        and one.run.test_every == 1
    ]  # fmt: skip


def drawn(made: Sequence[Made]) -> list[tuple[str, Run]]:
    """The same; of a row that has none, those that were tested less often."""
    often = without_pretraining(made)
    known = {label for label, _ in often}
    seldom = [
        (title(row), one.run)
        for row, some in in_convergence(made).items()
        for one in some
        if one.run is not None and not one.planned.pretrain and one.run.epochs
        and title(row) not in known
    ]  # fmt: skip
    return often + seldom


def convergence(made: Sequence[Made]) -> Figure:
    """Accuracy against seconds of training, in which no test is counted."""
    lines = tuple(Line(label, run, curve(run, "seconds")) for label, run in drawn(made))
    longest = max((x for line in lines for x, _ in line.points), default=0.0)
    unit, name = time_unit(longest)
    return Figure(
        "convergence",
        "Convergence without pre-training",
        "",
        f"training time without tests ({name})",
        "test accuracy (%)",
        lines,
        unit=unit,
        columns=("seconds", "test_accuracy"),
        bottom=floor([[y for _, y in line.points] for line in lines]),
    )


MOMENTS_HEAD = ["method", "seed", "level", "seconds", "epoch"]


def moments(made: Sequence[Made]) -> list[list[object]]:
    """When each run first tested at a level or above; nothing where it never did."""
    lines: list[list[object]] = []
    for label, run in without_pretraining(made):
        for level in LEVELS:
            passed = [r for r in run.epochs if (number(r.get("test_accuracy")) or 0) >= level]
            at = [passed[0].get("seconds"), passed[0].get("epoch")] if passed else [None, None]
            lines.append([label, run.seed, level, *at])
    return lines


def moments_text(made: Sequence[Made]) -> str:
    found = moments(made)
    lines = []
    for row, some in in_convergence(made).items():
        own = [line for line in found if line[0] == title(row)]
        states = [one.state for one in some if not one.planned.pretrain and not one.finished]
        under_way = [state for state in states if state != NOT_YET]
        seldom = [
            one.run
            for one in some
            if one.run is not None and not one.planned.pretrain and one.run.test_every > 1
        ]
        cells = [
            _moment(level, [line for line in own if line[2] == level], under_way, seldom)
            for level in LEVELS
        ]
        lines.append([title(row), *(cells if own or seldom else [NOT_YET] * len(LEVELS))])
    return "\n".join(
        [
            "# Convergence without pre-training\n",
            markdown(["Method", *(f"{level} %" for level in LEVELS)], lines),
            "Seconds of training, tests not counted, at the end of the first epoch that tested at "
            "the level or above; of the runs tested after every epoch, mean over their seeds.  "
            "Under schedules of other lengths, and with faster code, the moments are others; a row "
            "may have runs of several codes.\n",
        ]
    )


def _moment(
    level: float, lines: list[list[object]], under_way: list[str], seldom: Sequence[Run]
) -> str:
    """under_way: how far those are that have not ended, or not well; seldom: tested less often."""
    reached = [at for line in lines if (at := number(line[3])) is not None]
    if not reached:
        passed = [[at for at, a in curve(run, "seconds") if a >= level] for run in seldom]
        late = [times[0] for times in passed if times]
        if late:
            return (
                f"≤ {statistics.fmean(late):.0f} s ({len(late)} of "
                f"{count(len(lines) + len(seldom), 'run')}, tested every {seldom[0].test_every} "
                "epochs)"
            )
        return f"not reached ({'; '.join(under_way)})" if under_way else "not reached"
    few = f" ({len(reached)} of {count(len(lines), 'run')})" * (len(reached) < len(lines))
    return f"{statistics.fmean(reached):.0f} s{few}"


# -- the record and the sprint ---------------------------------------------------------------------

GOAL = 93.08  # the paper's GDEQ


def records_text(made: Sequence[Made]) -> str:
    lines = []
    for one in made:
        if one.planned.group not in ("record", "sprint"):
            continue
        run = one.run
        passed = [
            at
            for at, accuracy in (curve(run, "seconds") if run else [])
            if accuracy >= GOAL
        ]  # fmt: skip
        lines.append(
            [
                one.planned.name,
                one.state,
                "–" if run is None else run.epochs_done,
                _shown(run.accuracy if run else None, ".2f"),
                _shown(run.seconds / 60 if run and run.seconds else None, ".1f"),
                f"{'≤ ' * (run is not None and run.test_every > 1)}{passed[0]:.0f} s"
                if passed
                else "–",
                _shown(run.epochs[-1].get("residual") if run and run.epochs else None, ".2g"),
                f"`{' '.join(one.planned.settings)}`",
            ]
        )
    head = ["Run", "State", "Epochs", "Accuracy %, last epoch", "Training min", f"to {GOAL} %"]
    head += ["Forward residual, last epoch", "Settings"]
    return "\n".join(["# Record and sprint\n", markdown(head, lines)])
