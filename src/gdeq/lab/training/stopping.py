"""How a training ends early: asked to by a signal, or because it cannot go on."""

from __future__ import annotations

import errno
import math
import signal
import time
from pathlib import Path
from typing import Any

from gdeq.lab.files import LabError
from gdeq.lab.training import checkpoint


class Interrupted(KeyboardInterrupt):
    """A signal came; the state was saved first."""

    def __init__(self, number: int | None, message: str) -> None:
        super().__init__(message)
        self.number = number or signal.SIGTERM  # None: another process has heard it


class StopRequest:
    """While it is open, SIGTERM and SIGINT are noted in ``caught``; a repeated one stops at once.

    patience: seconds for which repeats are ignored.  `torchrun` passes on what its workers have
        already heard from the terminal, `timeout` signals the process and then its group; taken
        for impatience, the echo would cost the save.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience
        self.caught: int | None = None
        self.caught_at = 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.caught is None:
            self.caught, self.caught_at = number, time.monotonic()
        elif time.monotonic() - self.caught_at >= self.patience:
            raise KeyboardInterrupt


class TrainingError(LabError):
    """The training cannot go on; the last good checkpoint is intact."""


class DivergedError(TrainingError):
    """The loss is no number any more: the same settings would lead there again."""


def check_finite(loss: float, step: int, run: Path) -> None:
    if math.isfinite(loss):
        return
    raise DivergedError(
        f"the loss became NaN or infinite at or before step {step}; {kept(run)}.  Try "
        "a lower optimizer.lr, optimizer.clip=1, or residual_weight=5 so that f keeps an "
        "equilibrium; with precision=float32 to see whether it is rounding: "
        f"`gdeq train --resume {run} optimizer.clip=1`"
    )


def unwritten(problem: OSError, run: Path) -> TrainingError:
    """A file could not be written."""
    full = " The disk is full: free some space." * (problem.errno == errno.ENOSPC)
    place = "standard output" if problem.errno == errno.EPIPE else run
    return TrainingError(
        f"could not write to {place}: {problem.strerror or problem};{full} {kept(run)}; continue "
        f"with `gdeq train --resume {run}`"
    )


def kept(run: Path) -> str:
    found = checkpoint.available(run)
    return f"the last good checkpoint is {found[0].name}" if found else "no checkpoint was made"
