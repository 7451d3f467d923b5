"""Where Triton's kernels run, and how large a grid may be."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_SAMPLES = 65535  # of a grid's second dimension


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on this device; on a CPU that is its interpreter alone."""
    if device.type == "cuda":
        return triton_is_there() and torch.version.hip is None
    return triton_is_there() and os.environ.get("TRITON_INTERPRET") == "1"


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
