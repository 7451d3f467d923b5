"""Kernels in Triton, each beside a plain PyTorch function that it equals."""

from __future__ import annotations

import importlib.util
import os

import torch


def available(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device; Triton's interpreter runs on all."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return importlib.util.find_spec("triton") is not None
