"""From the run folders alone: every table and figure of the paper, with what there is so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gdeq.lab import report
from gdeq.lab.paper.plan import LONGER, METHODS, Planned, make_plan, title
from gdeq.lab.report.figures import Figure, Series, against, draw
from gdeq.lab.report.methods import looks, recipe, varying
from gdeq.lab.report.page import save
from gdeq.lab.report.rows import Repeats
from gdeq.lab.report.runs import Record, ReportError, Run, mean, number, read_run
from gdeq.lab.report.similarity import Similarity
from gdeq.lab.report.tables import NONE, Table, csv_text, shown
from gdeq.options import count

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
# A page each: beside a run six times as long, the figures of Table 2 would show nothing.
PAGES = {"report": ("table2",), "report-record": ("record", "sprint")}
TABLE_HEAD = [
    *("gradient", "pretrain", "seed", "epochs"),
    *("test_accuracy", "ms_per_step", "train_seconds"),
]
SIMILARITY_HEAD = [
    *("run", "trained_with", "epoch", "batch", "method", "vjps", "cosine", "relative_error"),
    *("samples", "equilibria", "solved", "solved_share_of_loss"),
    *("adjoint_residual", "forward_residual", "exact_residual", "exact_forward_residual"),
    *("spectral_radius", "spectral_radius_max", "exact"),
]

EXACT = ("exact_tol", "exact_residual", "exact_forward_residual")


@dataclass(frozen=True)
class Made:
    """A planned run and what is there of it."""

    planned: Planned
    run: Run | None


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
        cell = Repeats(self.runs).cell()
        fewer = f" of {self.planned}" * (len(self.runs) < self.planned)
        # A seed that is left out of a mean for having diverged must be seen.
        lost = sum(run.failed is not None for run in self.all)
        return f"{cell.text} ({cell.note}{fewer}{f', {lost} diverged' * (lost > 0)})"

    @property
    def seconds(self) -> float | None:
        return mean(run.seconds for run in self.runs)


Columns = Mapping[str, Sequence[Column]]  # row of Table 2 → without, with pre-training


def read_all(folder: Path) -> list[Made]:
    """All of the plan, in its order."""
    places = ((planned, folder / planned.name) for planned in make_plan())
    return [Made(p, read_run(at) if (at / "config.yaml").is_file() else None) for p, at in places]


def collect(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes into ``out``, by default the folder itself; returns the files."""
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}")
    made = read_all(folder)
    if not any(one.run for one in made):
        raise ReportError(
            f"{folder} holds none of the paper's runs: make them with `gdeq paper run --out "
            f"{folder}`"
        )
    out, columns = out or folder, table2(made)
    files = {
        "table2.csv": csv_text(TABLE_HEAD, table2_lines(columns)).encode(),
        "table2.md": table2_text(columns).encode(),
        "similarity.csv": csv_text(SIMILARITY_HEAD, similarity_lines(made)).encode(),
    }
    curves = convergence(made)
    if curves.series:
        files["convergence.csv"] = csv_text(*curves.csv_lines()).encode()
    for figure in [curves] * bool(curves.series) + similarity(made):
        files[f"{figure.name}.png"], _ = draw(figure, looks(figure.labels))
    places = save(out, files)
    for name, groups in PAGES.items():
        found = [one.run.path for one in made if one.run and one.planned.group in groups]
        if found:
            places.append(report.write(found, out / name))
    return places


def progress(folder: Path) -> str:
    """How much of each part is there."""
    groups: dict[str, list[bool]] = {}
    for one in read_all(folder):
        finished = one.run is not None and one.run.finished
        groups.setdefault(one.planned.group, []).append(finished)
    return "\n".join(
        f"{name:10s} {sum(some)} of {count(len(some), 'run')} finished"
        for name, some in groups.items()
    )


# -- Table 2, with the paper's own figures beside ours ---------------------------------------------


def table2(made: Sequence[Made]) -> Columns:
    """The paper's four first, in its order."""
    some = [one for one in made if one.planned.group == "table2"]
    found: dict[str, list[Column]] = {}
    for row in (*METHODS, *(one.planned.row for one in some)):
        own = [one for one in some if one.planned.row == row]
        pair = ([one for one in own if one.planned.pretrain == p] for p in (False, True))
        found[row] = [Column(len(part), [one.run for one in part if one.run]) for part in pair]
    return found


def table2_lines(columns: Columns) -> list[list[object]]:
    """Finished runs alone: the last epoch's accuracy, never a better one's."""
    return [
        [
            *(row, str(run.pretrained).lower(), run.seed, run.epochs_done),
            *(run.score, run.ms_per_step, run.seconds),
        ]
        for row, pair in columns.items()
        for column in pair
        for run in column.runs
    ]


def table2_text(columns: Columns) -> str:
    without, with_ = ([pair[p] for pair in columns.values()] for p in (0, 1))
    paper = [PAPER.get(row) for row in columns]
    speeds = [[_speed_up(columns, row, p) for row in columns] for p in (0, 1)]
    ms = (mean(r.ms_per_step for r in a.runs or b.runs) for a, b in columns.values())
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
    exact = [r for pair in columns.values() for r in pair[which].runs if r.method == "implicit"]
    shared = {run.revision for run in exact} & {run.revision for run in own} - {None}
    slow, fast = ([r for r in some if r.revision in shared] for some in (exact, own))
    if not shared:
        slow, fast = columns["implicit"][which].runs, own
    times = [mean(run.seconds for run in some) for some in (slow, fast)]
    if not times[0] or not times[1]:
        return NONE
    return ("" if shared else "~ ") + f"{times[0] / times[1]:.2f}×"


def _notes(columns: Columns) -> list[str]:
    """One table wants one recipe: what is not the same in all its runs is named."""
    runs = [(title(row), r) for row, pair in columns.items() for some in pair for r in some.runs]
    if not runs:
        return []
    epochs = sorted({str(run.epochs_done) for _, run in runs}, key=int)
    devices = sorted({str(run.device) for _, run in runs})
    notes = [f"Epochs: {', '.join(epochs)}.  Device: {', '.join(devices)}.\n"]
    revisions = _grouped((run.revision or "not recorded", run.name) for _, run in runs)
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


# -- figures ---------------------------------------------------------------------------------------


def convergence(made: Sequence[Made]) -> Figure:
    """Accuracy against seconds of training, in which no test is counted.

    Of each row the runs tested after every epoch; where it has none, the others.  Without longer
    schedules: accuracy comes at a schedule's end.
    """
    lines: list[Series] = []
    for row, (without, _) in table2(made).items():
        runs = [run for run in without.all if run.epochs]
        often = [run for run in runs if run.test_every == 1] or runs
        if row not in LONGER:
            lines += [Series(title(row), run, run.curve("seconds")) for run in often]
    return against("seconds", "test accuracy (%)", "test_accuracy", tuple(lines), "convergence")


def is_exact(record: Record) -> bool:
    """Whether the gradient it was compared with was solved as asked for (``--exact-tol``)."""
    bound, *residuals = (number(record.get(key)) for key in EXACT)
    return bound is not None and all(value is not None and value <= bound for value in residuals)


def similarity_lines(made: Sequence[Made]) -> list[list[object]]:
    """One line for each method, mini-batch and epoch of every run that was measured."""
    return [
        [
            one.planned.name,
            title(one.planned.row),
            *(record.get(key) for key in SIMILARITY_HEAD[2:-1]),
            "yes" if is_exact(record) else "no",
        ]
        for one in made
        for record in (one.run.similarity if one.run else ())
    ]


def similarity(made: Sequence[Made]) -> list[Figure]:
    """Cosine and relative error of each measured run, of mini-batches whose truth is exact."""
    figures = []
    for run in (one.run for one in made if one.run is not None):
        sound = [record for record in run.similarity if is_exact(record)]
        figures += Similarity(run, f"_{run.name}", sound).figures
    return figures
