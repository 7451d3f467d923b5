"""The paper's similarity figure: each method's gradient beside the exact one."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from gdeq.lab.report.figures import Box, Figure
from gdeq.lab.report.methods import rank
from gdeq.lab.report.runs import Record, Run, number

IMPLICIT = (
    "Implicit is here an exact backward solve (GMRES) from where the run's solver stopped, not the "
    "truncated one that a run trains with."
)


@dataclass(frozen=True)
class Closeness:
    """One method at one epoch, over mini-batches."""

    method: str
    epoch: int
    vjps: float | None  # the median
    cosine: list[float]
    error: list[float]
    residual: list[float]


@dataclass(frozen=True)
class Similarity:
    """One run's measurements."""

    run: Run
    number: int  # among the runs that have some
    groups: tuple[Closeness, ...]
    exact_residual: float | None  # the worst: how exact "exact" was
    left_out: dict[int, tuple[int, int]]  # epoch → samples without an exact gradient, of so many

    @property
    def figures(self) -> list[Figure]:
        tail = f"_{self.number}" if self.number > 1 else ""
        found = [
            Figure(
                f"similarity_cosine{tail}",
                "Cosine with the exact gradient",
                "1 is the exact direction, 0 a useless one. A box holds the middle half of the "
                "mini-batches, its bar the median, the whiskers all of them.",
                "after epoch",
                "cosine",
                tuple(Box(g.method, g.epoch, g.cosine) for g in self.groups if g.cosine),
                columns=("epoch", "cosine"),
            ),
            Figure(
                f"similarity_error{tail}",
                "Relative error of the gradient",
                "Distance to the exact gradient as a share of its length: it sees what the angle "
                "hides, a gradient that is too long or too short. Lower is better.",
                "after epoch",
                "‖g − exact‖ / ‖exact‖",
                tuple(
                    Box(g.method, g.epoch, [e for e in g.error if e > 0])
                    for g in self.groups
                    if any(e > 0 for e in g.error)
                ),
                log=True,
                columns=("epoch", "relative_error"),
            ),
        ]
        return [figure for figure in found if figure.marks]


def similarities(runs: list[Run]) -> list[Similarity]:
    """One for each run that was measured: runs trained differently are not pooled."""
    found: list[Similarity] = []
    for run in runs:
        groups = _groups(run.similarity)
        if groups:
            exact = _numbers(run.similarity, "exact_residual")
            worst = max(exact) if exact else None
            lost = _left_out(run.similarity)
            found.append(Similarity(run, len(found) + 1, groups, worst, lost))
    return found


def _left_out(records: list[Record]) -> dict[int, tuple[int, int]]:
    counts: dict[int, dict[object, tuple[int, int]]] = {}
    for record in records:
        epoch, samples, solved = (number(record.get(k)) for k in ("epoch", "samples", "solved"))
        if epoch is not None and samples is not None and solved is not None:
            of_batch = int(samples - solved), int(samples)
            counts.setdefault(int(epoch), {})[record.get("batch")] = of_batch
    sums = {
        epoch: (sum(lost for lost, _ in some.values()), sum(of for _, of in some.values()))
        for epoch, some in counts.items()
    }
    return {epoch: (lost, of) for epoch, (lost, of) in sorted(sums.items()) if lost}


def _groups(records: list[Record]) -> tuple[Closeness, ...]:
    by_key: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        epoch = number(record.get("epoch"))
        if epoch is not None and record.get("method") is not None:
            by_key.setdefault((int(epoch), str(record["method"])), []).append(record)
    groups = []
    for epoch, method in sorted(by_key, key=lambda key: (key[0], rank(key[1]))):
        some = by_key[epoch, method]
        products = _numbers(some, "vjps")
        groups.append(
            Closeness(
                method,
                epoch,
                statistics.median(products) if products else None,
                _numbers(some, "cosine"),
                _numbers(some, "relative_error"),
                _numbers(some, "adjoint_residual"),
            )
        )
    return tuple(group for group in groups if group.cosine or group.error)


def _numbers(records: list[Record], key: str) -> list[float]:
    return [value for record in records if (value := number(record.get(key))) is not None]
