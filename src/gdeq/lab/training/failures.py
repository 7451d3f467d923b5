"""How a training ends badly, and what is left of it then."""

from __future__ import annotations

import errno
import math
from pathlib import Path

from gdeq.lab.files import LabError
from gdeq.lab.training import checkpoint


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
    return TrainingError(
        f"could not write to {run}: {problem.strerror or problem};{full} {kept(run)}; continue "
        f"with `gdeq train --resume {run}`"
    )


def kept(run: Path) -> str:
    found = checkpoint.available(run)
    return f"the last good checkpoint is {found[0].name}" if found else "no checkpoint was made"
