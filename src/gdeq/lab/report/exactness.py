"""The paper's similarity figure: each method's gradient beside the exact one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gdeq.lab.report import formats
from gdeq.lab.report.figures import Box, Figure
from gdeq.lab.report.methods import rank
from gdeq.lab.report.runs import Record, Run, number, numbers

IMPLICIT = (
    "Implicit is here an exact backward solve (GMRES) from where the run's solver stopped, not the "
    "truncated one that a run trains with."
)


@dataclass(frozen=True)
class Closeness:
    """One method at one epoch, over mini-batches."""

    method: str
    epoch: int
    records: list[Record]

    def values(self, key: str) -> list[float]:
        return numbers(self.records, key)

    def median(self, key: str, form: str) -> str:
        return median(self.values(key), form)

    @property
    def least_cosine(self) -> str:
        return formats.shown(min(self.values("cosine"), default=None), ".4f")


@dataclass(frozen=True)
class Similarity:
    """One run's measurements."""

    run: Run
    number: int  # among the runs that have some
    groups: tuple[Closeness, ...]

    @property
    def exact_residual(self) -> float | None:
        """The worst: how exact "exact" was."""
        return max(numbers(self.run.similarity, "exact_residual"), default=None)

    @property
    def text(self) -> str:
        """On what, and how well, it was measured."""
        text = f"Measured on the weights of {self.run.name}. {IMPLICIT}"
        if self.exact_residual is not None:
            worst = formats.scientific(self.exact_residual)
            text += f" The exact gradient was solved to a residual of {worst} or less."
        left_out = _left_out(self.run.similarity)
        if left_out:
            text += (
                " Samples that have no exact gradient are in no figure, and those left are the "
                f"easier ones: {', '.join(left_out)}."
            )
        return text

    @property
    def figures(self) -> list[Figure]:
        tail = f"_{self.number}" if self.number > 1 else ""
        cosine = Figure(
            f"similarity_cosine{tail}",
            "Cosine with the exact gradient",
            "1 is the exact direction, 0 a useless one. A box holds the middle half of the "
            "mini-batches, its bar the median, the whiskers all of them.",
            "after epoch",
            "cosine",
            boxes=self._boxes("cosine"),
            columns=("epoch", "cosine"),
        )
        error = Figure(
            f"similarity_error{tail}",
            "Relative error of the gradient",
            "Distance to the exact gradient as a share of its length: it sees what the angle "
            "hides, a gradient that is too long or too short. Lower is better.",
            "after epoch",
            "‖g − exact‖ / ‖exact‖",
            boxes=self._boxes("relative_error", above=0.0),
            log=True,
            columns=("epoch", "relative_error"),
        )
        return [figure for figure in (cosine, error) if figure.boxes]

    def _boxes(self, key: str, above: float = float("-inf")) -> tuple[Box, ...]:
        found = (
            Box(group.method, group.epoch, [v for v in group.values(key) if v > above])
            for group in self.groups
        )
        return tuple(box for box in found if box.values)


def similarities(runs: list[Run]) -> list[Similarity]:
    """One for each run that was measured: runs trained differently are not pooled."""
    found: list[Similarity] = []
    for run in runs:
        groups = _groups(run.similarity)
        if groups:
            found.append(Similarity(run, len(found) + 1, groups))
    return found


def _groups(records: list[Record]) -> tuple[Closeness, ...]:
    by_key: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        epoch = number(record.get("epoch"))
        if epoch is not None and record.get("method") is not None:
            by_key.setdefault((int(epoch), str(record["method"])), []).append(record)
    keys = sorted(by_key, key=lambda key: (key[0], rank(key[1])))
    groups = (Closeness(method, epoch, by_key[epoch, method]) for epoch, method in keys)
    return tuple(g for g in groups if g.values("cosine") or g.values("relative_error"))


def _left_out(records: list[Record]) -> list[str]:
    """Epoch by epoch, how many samples had no exact gradient."""
    counts: dict[float, dict[object, tuple[float, float]]] = {}
    for record in records:
        epoch, samples, solved = (number(record.get(k)) for k in ("epoch", "samples", "solved"))
        if epoch is not None and samples is not None and solved is not None:
            counts.setdefault(epoch, {})[record.get("batch")] = (samples - solved, samples)
    sums = ((e, *map(sum, zip(*some.values(), strict=True))) for e, some in sorted(counts.items()))
    return [f"{lost:.0f} of {of:.0f} after epoch {epoch:.0f}" for epoch, lost, of in sums if lost]


def median(values: Sequence[float], form: str) -> str:
    return formats.shown(statistics.median(values) if values else None, form)
