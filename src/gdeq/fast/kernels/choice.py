"""Which form of an algorithm runs: the Triton kernels, their plain twins, or neither."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHOICES = ("auto", "triton", "plain", "off")
# Not a context variable: the backward pass on a GPU runs in a thread of its own.
_choice = [os.environ.get("GDEQ_KERNELS", "auto")]


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on this device; on a CPU that is its interpreter alone."""
    if _choice[-1] == "off":
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return triton_is_there() and (device.type == "cuda" or interpreted)


def chosen(x: Tensor) -> str:
    """ "triton", "plain" or "off" for work on this tensor.

    By itself that is Triton on a GPU that has it, and off elsewhere.
    """
    choice = _choice[-1]
    if choice != "auto":
        return choice
    return "triton" if x.is_cuda and triton_is_there() and torch.version.hip is None else "off"


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


@contextlib.contextmanager
def use(choice: str) -> Iterator[None]:
    """Within this context, take "triton", the "plain" twins, neither ("off"), or "auto"."""
    if choice not in CHOICES:
        raise ValueError(f"kernels are {', '.join(CHOICES)}, got {choice!r}")
    _choice.append(choice)
    try:
        yield
    finally:
        _choice.pop()
