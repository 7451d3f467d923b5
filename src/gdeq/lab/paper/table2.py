"""The paper's Table 2, with the paper's own figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdeq.lab.paper.plan import title
from gdeq.lab.report.methods import recipe, varying
from gdeq.lab.report.rows import Repeats
from gdeq.lab.report.runs import Run, mean
from gdeq.lab.report.tables import NONE, Table, shown

if TYPE_CHECKING:
    from gdeq.lab.paper.collecting import Made

NOT_YET = "not yet run"
# Speed-up, accuracy without and with pre-training; 220 epochs on four RTX A6000.
PAPER = {
    "implicit": (1.00, 91.64, 92.29),
    "jfb": (1.97, 91.56, 91.99),
    "npg": (1.71, 93.42, 92.46),
    "gdeq": (2.16, 92.01, 93.08),
}
READING = (
    "Test accuracy of the last epoch; mean ± standard deviation over seeds.  Speed-up: of "
    "the whole training, against Implicit with as much pre-training, of the runs whose "
    "code is that of an Implicit run; ~: there is none, and the means are divided across "
    "code.  Training time is without tests, compilation and the recording of CUDA graphs.  "
    "The paper's accuracies, without / with pre-training, are of 220 epochs on four RTX "
    "A6000.\n"
)


@dataclass(frozen=True)
class Column:
    """One row's runs without, or with, pre-training; those that are finished count."""

    planned: int
    all: list[Run]

    @property
    def runs(self) -> list[Run]:
        return [run for run in self.all if run.finished]

    @property
    def accuracy(self) -> str:
        if not self.runs:
            told = "; ".join(run.progress for run in self.all)
            return told or (NOT_YET if self.planned else NONE)
        cell = Repeats(tuple(self.runs)).cell()
        fewer = f" of {self.planned}" * (len(self.runs) < self.planned)
        # A seed that is left out of a mean for having diverged must be seen.
        lost = sum(run.failed is not None for run in self.all)
        return f"{cell.text} ({cell.note}{fewer}{f', {lost} diverged' * (lost > 0)})"

    @property
    def seconds(self) -> float | None:
        return mean(run.seconds for run in self.runs)


Columns = Mapping[str, Sequence[Column]]  # row → without, with pre-training


def make_columns(rows: dict[str, list[Made]]) -> Columns:
    return {
        row: [
            Column(len(some), [one.run for one in some if one.run])
            for some in ([one for one in all_of if one.planned.pretrain == p] for p in (0, 1))
        ]
        for row, all_of in rows.items()
    }


def csv_lines(columns: Columns) -> tuple[list[str], list[list[object]]]:
    """Finished runs alone: the last epoch's accuracy, never a better one's."""
    head = ["gradient", "pretrain", "seed", "epochs", "test_accuracy", "ms_per_step"]
    return [*head, "train_seconds"], [
        [
            *(row, str(run.pretrained).lower(), run.seed, run.epochs_done),
            *(run.score, run.ms_per_step, run.seconds),
        ]
        for row, pair in columns.items()
        for column in pair
        for run in column.runs
    ]


def text(columns: Columns) -> str:
    pairs = columns.values()
    paper = [PAPER.get(row) for row in columns]
    without, with_ = ([pair[p] for pair in pairs] for p in (0, 1))
    speeds = [[_speed_up(columns, row, p) for row in columns] for p in (0, 1)]
    ms = (mean(run.ms_per_step for run in pair[0].runs or pair[1].runs) for pair in pairs)
    table = Table.of(
        {
            "Method": [title(row) for row in columns],
            "Accuracy %": [column.accuracy for column in without],
            "pre-trained %": [column.accuracy for column in with_],
            "ms / step": [shown(value, ".1f") for value in ms],
            "Training s": [shown(column.seconds, ".0f") for column in without],
            "pre-trained s": [shown(column.seconds, ".0f") for column in with_],
            "Speed-up": speeds[0],
            "pre-trained speed-up": speeds[1],
            "Paper's accuracy": [f"{own[1]:.2f} / {own[2]:.2f}" if own else NONE for own in paper],
            "Paper's speed-up": [f"{own[0]:.2f}×" if own else NONE for own in paper],
        }
    )
    return "\n".join(["# Table 2\n", table.markdown(), READING, *_notes(columns)])


def _speed_up(columns: Columns, row: str, which: int) -> str:
    """Of runs of one revision where there are some, else (~) against the paper's row."""
    own = columns[row][which].runs
    if row == "implicit" and own:
        return "1.00×"
    exact = [r for pair in columns.values() for r in pair[which].runs if _is_exact(r)]
    shared = {_revision(run) for run in exact} & {_revision(run) for run in own} - {None}
    slow, fast = ([r for r in some if _revision(r) in shared] for some in (exact, own))
    if not shared:
        slow, fast = columns["implicit"][which].runs, own
    times = [mean(run.seconds for run in some) for some in (slow, fast)]
    if not times[0] or not times[1]:
        return NONE
    return ("" if shared else "~ ") + f"{times[0] / times[1]:.2f}×"


def _is_exact(run: Run) -> bool:
    return str(run.gradient.get("name")).lower() == "implicit"


def _revision(run: Run) -> str | None:
    return run.environment.get("revision")


def _notes(columns: Columns) -> list[str]:
    """One table wants one recipe: what is not the same in all its runs is named."""
    runs = [
        (title(row), run) for row, pair in columns.items() for some in pair for run in some.runs
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
    kept = [(row, recipe(run)) for row, run in runs]
    for key in varying([own for _, own in kept]):
        values = _grouped((own[key], row) for row, own in kept if key in own)
        # Some titles have commas.
        told = "; ".join(f"{value} ({' / '.join(names)})" for value, names in values.items())
        if not key.startswith("gradient"):
            notes.append(f"Not the same in all rows: {key} = {told}.\n")
    return notes


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by value, each once."""
    found: dict[str, list[str]] = {}
    for value, name in pairs:
        if name not in found.setdefault(value, []):
            found[value].append(name)
    return found
