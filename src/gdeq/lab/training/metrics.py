"""Running sums of what each step measures, kept on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gdeq.lab.metric import Metric
from gdeq.lab.training.process import Process
from gdeq.solution import Solution, mean_by_share


class Sums:
    """Running sums on the device, always in the same tensor.

    There are three rows, each cleared on its own: a number that is not finite spoils its own
    window and not the next one.  Reading them is the only time the loop waits for the device.

    metric: turns the mean score into what is reported.
    """

    # Measurements of w, each with the number of samples that have it.
    BACKWARD = (
        ("backward_residual", "measured"),
        ("backward_error", "estimated"),
        ("batch_error", "judged"),  # `BackwardRecord.batch_error`
    )
    NAMES = (
        *("samples", "loss", "score", "residual", "solver_steps"),
        *(name for pair in BACKWARD for name in pair),
    )
    EPOCH, LOG, LOOK = range(3)  # since the epoch began, the last log line, the last adapting

    def __init__(self, device: torch.device, metric: Metric) -> None:
        self.metric = metric
        self.values = torch.zeros(3, len(self.NAMES), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, scores: Tensor, solution: Solution) -> None:
        """loss: () mean of the samples; scores: (b,)"""
        record, wide = solution.record, torch.float64
        samples = torch.full_like(loss, len(scores), dtype=wide)
        found = [
            samples,
            loss * samples,
            scores.sum(dtype=wide),
            solution.residual.sum(dtype=wide),
            solution.steps.sum(dtype=wide),
        ]
        residual, error, each = record.residual, record.error, record.sample_error
        nothing = [torch.zeros_like(samples)] * 2
        found += nothing if residual is None else [residual.sum(dtype=wide), samples]
        # At most 1 per sample, so that a few bad ones do not hide the others in the mean.
        found += nothing if error is None else [error.clamp(max=1.0).sum(dtype=wide), samples]
        if each is not None:
            found += [mean_by_share(each.clamp(max=1.0), record.length) * samples, samples]
        self.values[:, : len(found)].add_(torch.stack(found))

    def clear(self) -> None:
        """Begin an epoch.  The window of the controller goes on across epochs."""
        self.values[self.EPOCH].zero_()
        self.mark()

    def mark(self) -> None:
        """Begin the window that `read` gives with ``since_mark``."""
        self.values[self.LOG].zero_()

    def look(self) -> None:
        """Begin the window that `read_since_look` gives."""
        self.values[self.LOOK].zero_()

    def read(self, process: Process, since_mark: bool = False) -> dict[str, float]:
        """Means per sample over all processes; NaN where nothing was measured."""
        return self._means(self._over_all(process, self.LOG if since_mark else self.EPOCH))

    def read_since_look(self, process: Process) -> dict[str, float] | None:
        """None if no gradient was measured in this window."""
        found = self._over_all(process, self.LOOK)
        return self._means(found) if found["judged"] else None

    def _over_all(self, process: Process, which: int) -> dict[str, float]:
        found = process.sum(self.values[which].clone()).tolist()
        return dict(zip(self.NAMES, found, strict=True))

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        samples = sums.pop("samples")
        backward = {}
        for name, those in self.BACKWARD:
            total, known = sums.pop(name), sums.pop(those)
            backward[name] = total / known if known else math.nan
        means = {name: total / max(1.0, samples) for name, total in sums.items()}
        score = self.metric.of_mean(means.pop("score"))
        return {"samples": samples, **means, self.metric.name: score, **backward}

    def state(self, process: Process) -> Tensor:
        """The sum over all processes, as a resume may have another number of them."""
        return process.sum(self.values.clone())

    def restore(self, state: Tensor, process: Process) -> None:
        """The first process takes all of it, the others nothing, so that the sum stays the same."""
        self.values.zero_()
        if process.first:
            self.values.copy_(state)
