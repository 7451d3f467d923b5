"""The random states of all processes: dropout masks and noise go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdeq.lab.training.process import Process


def random_state(process: Process) -> dict[str, Tensor | None]:
    """One row for each process; all of them call it."""
    device, gather = process.device, process.gather
    cuda = device.type == "cuda"
    return {
        "rng": gather(torch.get_rng_state()),
        "cuda_rng": gather(torch.cuda.get_rng_state(device)) if cuda else None,
    }


def restore_random_state(state: dict[str, Any], process: Process) -> None:
    rank, device = process.rank, process.device
    rng = torch.atleast_2d(state["rng"])
    if rank < len(rng):  # else there are more processes than before
        torch.set_rng_state(rng[rank].clone())
    if state["cuda_rng"] is not None and device.type == "cuda":
        rng = torch.atleast_2d(state["cuda_rng"])
        if rank < len(rng):
            torch.cuda.set_rng_state(rng[rank].clone(), device)
