"""What a step tells of itself, summed where it is computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gdeq.models.mdeq import MDEQ
from gdeq.training.process import Process


class Sums:
    """Running sums on the device, always in the same tensor.

    Three of them, each from its own beginning: a number that is not finite is in what it was
    measured for, and not in what comes after.  Reading them is the only time the loop waits for
    the device.
    """

    NAMES = (
        *("samples", "loss", "correct", "residual", "solver_steps"),
        *("backward_residual", "measured"),  # measured: samples that have a backward residual
        *("backward_error", "estimated"),  # estimated: samples whose error of w is
    )
    EPOCH, LOG, LOOK = range(3)  # since the epoch began, the last log line, the last adapting
    KEPT = ("sums", "sums_since_log", "sums_since_look")  # in a checkpoint

    def __init__(self, device: torch.device) -> None:
        shape = (len(self.KEPT), len(self.NAMES))
        self.values = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, model: MDEQ) -> None:
        """logits: (b, classes), labels: (b,), or shares of the classes: the largest one counts."""
        solution = model.deq.solution
        assert solution is not None
        backward, error, wide = solution.record.residual, solution.record.error, torch.float64
        named = labels.argmax(1) if labels.is_floating_point() else labels
        samples = torch.full_like(loss, len(labels), dtype=wide)
        found = [
            samples,
            loss * samples,
            (logits.argmax(1) == named).sum(dtype=wide),
            solution.residual.sum(dtype=wide),
            solution.steps.sum(dtype=wide),
        ]
        if backward is not None:
            found += [backward.sum(dtype=wide), samples]
        elif error is not None:
            found += [torch.zeros_like(samples)] * 2
        if error is not None:  # of a w that is far off, 1 says enough, and keeps the mean one
            found += [error.clamp(max=1.0).sum(dtype=wide), samples]
        self.values[:, : len(found)].add_(torch.stack(found))

    def clear(self) -> None:
        """An epoch begins.  What is looked at goes on: steps between looks pass over epochs."""
        self.values[self.EPOCH].zero_()
        self.mark()

    def mark(self) -> None:
        """From here on counts what `read` gives with ``since_mark``."""
        self.values[self.LOG].zero_()

    def look(self) -> None:
        """From here on counts what `read_since_look` gives."""
        self.values[self.LOOK].zero_()

    def read(self, process: Process, since_mark: bool = False) -> dict[str, float]:
        """Means per sample over all processes; NaN where nothing was measured."""
        return self._means(self._over_all(process, self.LOG if since_mark else self.EPOCH))

    def read_since_look(self, process: Process) -> dict[str, float] | None:
        """None where nothing is known of the gradient since."""
        found = self._over_all(process, self.LOOK)
        return self._means(found) if found["measured"] or found["estimated"] else None

    def _over_all(self, process: Process, which: int) -> dict[str, float]:
        found = process.sum(self.values[which].clone()).tolist()
        return dict(zip(self.NAMES, found, strict=True))

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        samples, measured, estimated = (
            sums.pop(name) for name in ("samples", "measured", "estimated")
        )
        backward, error = sums.pop("backward_residual"), sums.pop("backward_error")
        means = {name: total / max(1.0, samples) for name, total in sums.items()}
        means["accuracy"] = 100 * means.pop("correct")
        means["backward_residual"] = backward / measured if measured else math.nan
        means["backward_error"] = error / estimated if estimated else math.nan
        return {"samples": samples, **means}

    def state(self, process: Process) -> dict[str, Tensor]:
        """Over all processes: how many there will be after a resume is not known."""
        return {
            name: process.sum(values.clone())
            for name, values in zip(self.KEPT, self.values, strict=True)
        }

    def restore(self, state: dict[str, Tensor], process: Process) -> None:
        """The first process takes what all had, the others nothing: the sum stays what it was."""
        self.values.zero_()
        for name, values in zip(self.KEPT, self.values, strict=True):
            # What older checkpoints do not have begins anew.
            if process.first and name in state and state[name].shape == values.shape:
                values.copy_(state[name])
