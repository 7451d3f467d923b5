"""What a step tells of itself, summed where it is computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gdeq.models.mdeq import MDEQ
from gdeq.training.process import Process


class Sums:
    """Running sums on the device, always in the same tensor.

    Reading them is the only time the loop waits for the device.
    """

    NAMES = (
        *("samples", "loss", "correct", "residual", "solver_steps"),
        *("backward_residual", "measured"),  # measured: samples that have a backward residual
    )

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.marked = self.values.clone()  # as they were at the last log line
        self.looked = self.values.clone()  # and when the method was last adapted

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, model: MDEQ) -> None:
        """logits: (b, classes), labels: (b,), or shares of the classes: the largest one counts."""
        solution = model.deq.solution
        assert solution is not None
        backward, wide = solution.record.residual, torch.float64
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
        self.values[: len(found)].add_(torch.stack(found))

    def clear(self) -> None:
        """An epoch begins.  What is looked at goes on: steps between looks pass over epochs."""
        self.looked.sub_(self.values)
        self.values.zero_()
        self.mark()

    def mark(self) -> None:
        """From here on counts what `read` gives with ``since_mark``."""
        self.marked.copy_(self.values)

    def look(self) -> None:
        """From here on counts what `read_since_look` gives."""
        self.looked.copy_(self.values)

    def read(self, process: Process, since_mark: bool = False) -> dict[str, float]:
        """Means per sample over all processes; NaN where nothing was measured."""
        return self._means(process, self.values - self.marked if since_mark else self.values)

    def read_since_look(self, process: Process) -> dict[str, float]:
        return self._means(process, self.values - self.looked)

    def _means(self, process: Process, values: Tensor) -> dict[str, float]:
        sums = dict(zip(self.NAMES, process.sum(values.clone()).tolist(), strict=True))
        samples, measured = sums.pop("samples"), sums.pop("measured")
        backward = sums.pop("backward_residual")
        means = {name: total / max(1.0, samples) for name, total in sums.items()}
        means["accuracy"] = 100 * means.pop("correct")
        means["backward_residual"] = backward / measured if measured else math.nan
        return {"samples": samples, **means}

    def state(self, process: Process) -> dict[str, Tensor]:
        """Over all processes: how many there will be after a resume is not known."""
        return {name: process.sum(values.clone()) for name, values in self._kept().items()}

    def restore(self, state: dict[str, Tensor], process: Process) -> None:
        """The first process takes what all had, the others nothing: the sum stays what it was."""
        for name, values in self._kept().items():
            values.zero_()
            # One from before `measured` was counted is left: its epoch's means begin here.
            if process.first and name in state and state[name].shape == values.shape:
                values.copy_(state[name])

    def _kept(self) -> dict[str, Tensor]:
        return {"sums": self.values, "logged_sums": self.marked, "looked_sums": self.looked}
