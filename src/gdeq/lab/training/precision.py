"""The arithmetic of f."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gdeq.lab.training.settings import Config


@contextlib.contextmanager
def precision(config: Config, device: torch.device) -> Iterator[None]:
    """TF32 or bf16 where asked; solvers stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if config.precision == "float32" else "high")
    cudnn = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.precision != "float32"
    tuned = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"  # the shapes stay, so trying pays
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cudnn.benchmark = tuned


def caution(config: Config, device: torch.device) -> str | None:
    """To be said before the first step: an illegal instruction ends a process without a word."""
    if config.precision != "bf16" or device.type != "cpu":
        return None
    return (
        "warning: bf16 on a CPU is slow, and some machines do not support it (the process then "
        "dies with an illegal instruction, SIGILL): precision=float32 is the safe choice"
    )
