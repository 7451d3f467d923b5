"""One process or several: which one this is, and what they exchange."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from gdeq.lab.files import LabError


class DeviceError(LabError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Process:
    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def lost_another(self, problem: RuntimeError) -> bool:
        """Whether this error means that another process did not answer."""
        said = str(problem).lower()
        signs = ("gloo", "nccl", "connection", "timed out")
        return self.world_size > 1 and (
            isinstance(problem, dist.DistError) or any(sign in said for sign in signs)
        )

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def gather(self, values: Tensor) -> Tensor:
        """The tensors of all processes, stacked, on the CPU."""
        if self.world_size == 1:
            return values[None]
        mine = values.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def agree(self, text: str) -> str:
        """The text of the first process, such as a name made from the time."""
        if self.world_size == 1:
            return text
        said = [text]
        dist.broadcast_object_list(said)
        return said[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; the answer is the same in all."""
        if self.world_size == 1:
            return flag
        raised = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return bool(raised.item())

    def random_state(self) -> dict[str, Tensor | None]:
        """Random states, one row per process.  Every process must call this."""
        cuda = self.device.type == "cuda"
        return {
            "rng": self.gather(torch.get_rng_state()),
            "cuda_rng": self.gather(torch.cuda.get_rng_state(self.device)) if cuda else None,
        }

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Continue the random numbers.  A process that did not exist before keeps its own."""
        rng, cuda_rng = state["rng"], state["cuda_rng"]
        if self.rank >= len(rng):
            return
        torch.set_rng_state(rng[self.rank].clone())
        if cuda_rng is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda_rng[self.rank].clone(), self.device)


def start(device: str, option: str = "device=", timeout: float = 600.0) -> Process:
    """Join the group that `torchrun` made, if it did.

    option: what the user chose the device with, for the advice in an error.
    timeout: seconds after which a process that does not answer counts as lost.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"there is no device {device!r}: write cpu, cuda or cuda:0; use {option}cpu"
        )
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                f"{option}cuda was asked for, but PyTorch sees no GPU here; use {option}cpu or "
                f"{option}auto, or install a CUDA build of PyTorch"
            )
        index = chosen.index if chosen.index is not None else local
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"there is no GPU {index}: this machine has {torch.cuda.device_count()}; use "
                f"{option}cpu"
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    if world_size == 1:
        return Process(chosen)
    if not dist.is_initialized():
        try:
            _meet("nccl" if chosen.type == "cuda" else "gloo", timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as problem:
            raise LabError(
                f"the {world_size} processes of this training did not meet within {timeout:g} "
                f"seconds (timeout_seconds); start them with torchrun: {problem}"
            ) from problem
    return Process(chosen, dist.get_rank(), world_size)


def _meet(backend: str, limit: timedelta) -> None:
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    # `torchrun` keeps its store when it restarts its processes, and in it the addresses of those
    # that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
