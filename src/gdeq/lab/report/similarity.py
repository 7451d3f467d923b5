"""The paper's similarity figure: each method's gradient beside the exact one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gdeq.lab.report.figures import Figure, Series
from gdeq.lab.report.methods import rank
from gdeq.lab.report.runs import Points, Record, Run, number, numbers
from gdeq.lab.report.tables import Table, scientific, shown

# By their key in the records: name, title, y axis, note.
FIGURES = {
    "cosine": (
        "similarity_cosine",
        "Cosine with the exact gradient",
        "cosine",
        "1 is the exact direction, 0 a useless one. A box spans the middle half of the "
        "mini-batches, its bar is the median, and the whiskers reach to all of them.",
    ),
    "relative_error": (
        "similarity_error",
        "Relative error of the gradient",
        "‖g − exact‖ / ‖exact‖",
        "Distance to the exact gradient, relative to its length. Unlike the cosine, it shows a "
        "gradient that is too long or too short. Lower is better.",
    ),
}


@dataclass(frozen=True)
class Similarity:
    """One run's measurements: runs trained differently are not pooled."""

    run: Run
    name: str  # ends the names of its figures
    records: list[Record]

    @property
    def groups(self) -> dict[tuple[int, str], list[Record]]:
        """Of each epoch and method, the mini-batches."""
        found: dict[tuple[int, str], list[Record]] = {}
        for record in self.records:
            epoch, told = number(record.get("epoch")), number(record.get("cosine"))
            error = number(record.get("relative_error"))
            if epoch is not None and "method" in record and (told, error) != (None, None):
                found.setdefault((int(epoch), str(record["method"])), []).append(record)
        return {key: found[key] for key in sorted(found, key=lambda key: (key[0], rank(key[1])))}

    @property
    def text(self) -> str:
        """On what, and how well, it was measured."""
        text = (
            f"Measured on the weights of {self.run.name}. Implicit here is an exact backward solve "
            "(GMRES) from where the run's solver stopped, not the shorter one used in training."
        )
        worst = max(numbers(self.records, "exact_residual"), default=None)
        if worst is not None:
            text += f" The exact gradient was solved to a residual of {scientific(worst)} or less."
        lost = left_out(self.records)
        if lost:
            text += (
                " Samples that have no exact gradient are left out of all figures, and the others "
                f"are easier: {', '.join(lost)}."
            )
        return text

    @property
    def figures(self) -> list[Figure]:
        made = []
        for key, (name, title, y, note) in FIGURES.items():
            log = key == "relative_error"  # an axis that has no place for zeros
            values: dict[str, Points] = {}
            for (epoch, method), some in self.groups.items():
                found = [(epoch, value) for value in numbers(some, key) if value or not log]
                values.setdefault(method, []).extend(found)
            series = tuple(Series(label, self.run, own) for label, own in values.items() if own)
            axes = ("after epoch", y, ("epoch", key))
            made.append(Figure(name + self.name, title, note, *axes, series, boxes=True, log=log))
        return [figure for figure in made if figure.series]

    @property
    def table(self) -> Table:
        def each(key: str, form: str, what: Callable[[list[float]], float]) -> list[str]:
            found = [numbers(some, key) for some in self.groups.values()]
            return [shown(what(values) if values else None, form) for values in found]

        median = statistics.median
        columns = {
            "Method": [method for _, method in self.groups],
            "After epoch": [str(epoch) for epoch, _ in self.groups],
            "VJPs, median": each("vjps", ".3g", median),
            "Batches": each("cosine", "d", len),
            "Cosine, median": each("cosine", ".4f", median),
            "least": each("cosine", ".4f", min),
            "Relative error, median": each("relative_error", ".3f", median),
            "Backward residual, median": each("adjoint_residual", ".3f", median),
            "Spectral radius, most": each("spectral_radius_max", ".3f", max),
            "Exact residual, most": each("exact_residual", ".1e", max),
        }
        return Table.of(columns)


def similarities(runs: Sequence[Run]) -> list[Similarity]:
    """One for each run that was measured."""
    measured = [run for run in runs if Similarity(run, "", run.similarity).groups]
    return [Similarity(run, f"_{n}" * (n > 1), run.similarity) for n, run in enumerate(measured, 1)]


def left_out(records: list[Record]) -> list[str]:
    """Epoch by epoch, how many samples had no exact gradient."""
    counts: dict[float, dict[object, tuple[float, float]]] = {}
    for record in records:
        epoch, samples, solved = (number(record.get(k)) for k in ("epoch", "samples", "solved"))
        if epoch is not None and samples is not None and solved is not None:
            counts.setdefault(epoch, {})[record.get("batch")] = (samples - solved, samples)
    sums = ((e, *map(sum, zip(*some.values(), strict=True))) for e, some in sorted(counts.items()))
    return [f"{lost:.0f} of {of:.0f} after epoch {epoch:.0f}" for epoch, lost, of in sums if lost]
