"""The paper's Table 2, with the paper's own figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gdeq.lab.paper.plan import METHODS, title
from gdeq.lab.paper.reading import NOT_YET, Made, markdown
from gdeq.lab.report import recipes
from gdeq.lab.report.formats import shown
from gdeq.lab.report.rows import mean
from gdeq.lab.report.runs import Run

# Speed-up, accuracy without and with pre-training; 220 epochs on four RTX A6000.
PAPER = {
    "implicit": (1.00, 91.64, 92.29),
    "jfb": (1.97, 91.56, 91.99),
    "npg": (1.71, 93.42, 92.46),
    "gdeq": (2.16, 92.01, 93.08),
}
CSV_HEAD = ["gradient", "pretrain", "seed", "epochs", "test_accuracy", "ms_per_step"]
CSV_HEAD += ["train_seconds"]
READING = (
    "Test accuracy of the last epoch; mean ± standard deviation over seeds.  Speed-up: of "
    "the whole training, against Implicit with as much pre-training, of the runs whose "
    "code is that of an Implicit run; ~: there is none, and the means are divided across "
    "code.  Training time is without tests, compilation and the recording of CUDA graphs.  "
    "The paper's accuracies, without / with pre-training, are of 220 epochs on four RTX "
    "A6000.\n"
)


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
            *(row, str(one.planned.pretrain).lower(), one.planned.seed, one.run.epochs_done),
            *(one.run.score, one.run.ms_per_step, one.run.seconds),
        ]
        for row, all_of in in_table(made).items()
        for one in all_of
        if one.run is not None and one.finished
    ]


@dataclass(frozen=True)
class Column:
    """One row's runs with, or without, pre-training."""

    made: list[Made]

    @property
    def runs(self) -> list[Run]:
        return [one.run for one in self.made if one.run is not None and one.finished]

    @property
    def accuracy(self) -> str:
        """Mean ± standard deviation over seeds."""
        found = [run.score for run in self.runs if run.score is not None]
        if not found:
            states = [one.state for one in self.made if one.state != NOT_YET]
            return "; ".join(states) or (NOT_YET if self.made else "–")
        text = f"{statistics.fmean(found):.2f}"
        if len(found) > 1:
            text += f" ± {statistics.stdev(found):.2f}"
        many = f"{len(found)} of {len(self.made)}" if len(found) < len(self.made) else len(found)
        # A seed that is left out of a mean for having diverged must be seen.
        lost = sum(bool(one.failure) for one in self.made)
        told = f", {lost} diverged" * (lost > 0)
        return f"{text} ({many} seed{'s' * (len(self.made) > 1)}{told})"

    @property
    def seconds(self) -> float | None:
        return mean(run.seconds for run in self.runs)

    @property
    def ms(self) -> float | None:
        return mean(run.ms_per_step for run in self.runs)


def text(made: Sequence[Made]) -> str:
    rows = in_table(made)
    columns = {
        row: [Column([one for one in some if one.planned.pretrain == p]) for p in (False, True)]
        for row, some in rows.items()
    }
    # All runs with an exact backward solve, and those of the paper's own row.
    exact = [[run for pair in columns.values() for run in pair[p].runs if _exact(run)] for p in
             (False, True)]  # fmt: skip
    lines = []
    for row, pair in columns.items():
        speeds = [
            _speed_up(pair[p].runs, exact[p], columns["implicit"][p].runs, row == "implicit")
            for p in (False, True)
        ]
        paper = PAPER.get(row)
        lines.append(
            [
                title(row),
                *(column.accuracy for column in pair),
                shown(pair[0].ms or pair[1].ms, ".1f"),
                *(shown(column.seconds, ".0f") for column in pair),
                *speeds,
                f"{paper[1]:.2f} / {paper[2]:.2f}" if paper else "–",
                f"{paper[0]:.2f}×" if paper else "–",
            ]
        )
    head = ["Method", "Accuracy %", "pre-trained", "ms / step", "Training s", "pre-trained"]
    head += ["Speed-up", "pre-trained", "Paper's accuracy", "Paper's speed-up"]
    return "\n".join(["# Table 2\n", markdown(head, lines), READING, *_recipe_notes(rows)])


def _exact(run: Run) -> bool:
    return str(run.gradient.get("name")).lower() == "implicit"


def _speed_up(own: list[Run], exact: list[Run], implicit: list[Run], is_implicit: bool) -> str:
    """Of runs of one revision where there are some, else (~) against the paper's row."""
    if is_implicit and own:
        return "1.00×"
    shared = {_revision(run) for run in exact} & {_revision(run) for run in own} - {None}
    slow, fast = ([r for r in some if _revision(r) in shared] for some in (exact, own))
    if not shared:
        slow, fast = implicit, own
    times = [mean(run.seconds for run in some) for some in (slow, fast)]
    if not times[0] or not times[1]:
        return "–"
    return ("" if shared else "~ ") + f"{times[0] / times[1]:.2f}×"


def _revision(run: Run) -> str | None:
    return run.environment.get("revision")


def _recipe_notes(rows: dict[str, list[Made]]) -> list[str]:
    """One table wants one recipe: what is not the same in all its runs is named."""
    runs = [
        (row, one.run) for row, some in rows.items() for one in some if one.run and one.finished
    ]
    if not runs:
        return []
    epochs = sorted({str(run.epochs_done) for _, run in runs}, key=int)
    devices = sorted({str(run.device) for _, run in runs})
    notes = [f"Epochs: {', '.join(epochs)}.  Device: {', '.join(devices)}.\n"]
    revisions = _grouped((_revision(run) or "not recorded", run.name) for _, run in runs)
    if len(revisions) > 1:  # times, and ratios of times, are of the code that was timed
        told = "; ".join(f"{revision}: {', '.join(names)}" for revision, names in revisions.items())
        notes.append(f"**Of different revisions of the code**, whose times differ ({told}).\n")
    kept = [(title(row), recipes.recipe(run)) for row, run in runs]
    for key in recipes.varying([own for _, own in kept]):
        if key.startswith("gradient"):
            continue
        values = _grouped((own[key], row) for row, own in kept if key in own)
        # Some titles have commas.
        told = "; ".join(f"{value} ({' / '.join(names)})" for value, names in values.items())
        notes.append(f"Not the same in all rows: {key} = {told}.\n")
    return notes


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by value, each once."""
    found: dict[str, list[str]] = {}
    for value, name in pairs:
        if name not in found.setdefault(value, []):
            found[value].append(name)
    return found
