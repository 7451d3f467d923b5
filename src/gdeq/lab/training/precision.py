"""The arithmetic of f."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gdeq.lab.training.settings import Config


@contextlib.contextmanager
def arithmetic(name: str, kind: str) -> Iterator[None]:
    """float32, tf32 or bf16 on this kind of device, for what is computed inside."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if name == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = name != "float32"
    try:
        with torch.autocast(kind, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def precision(config: Config, device: torch.device) -> Iterator[None]:
    """TF32 or bf16 where asked; solvers stay in float32."""
    tuned = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"  # shapes stay the same
    try:
        with arithmetic(config.precision, device.type):
            yield
    finally:
        torch.backends.cudnn.benchmark = tuned


def caution(config: Config, device: torch.device) -> str | None:
    """A warning to print before the first step, since an illegal instruction gives no message."""
    slow = config.precision == "bf16" and device.type == "cpu"
    return slow_on_a_cpu("precision=float32") if slow else None


def slow_on_a_cpu(better: str) -> str:
    return (
        "warning: bf16 on a CPU is slow, and some machines do not support it (the process then "
        f"dies with an illegal instruction, SIGILL): {better} is the safe choice"
    )
