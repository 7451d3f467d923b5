"""The engines that the same case is run through: the reference, its fast twin, and the kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from gdeq import engine
from oracles.sweep import OracleEngine

ORACLE = OracleEngine()


def using(name: str) -> AbstractContextManager[None]:
    """name: "reference", "oracle" or "fast", the kernels, in Triton's interpreter without a GPU."""
    return engine.use(ORACLE if name == "oracle" else name)


def skip_where_kernels_do_not_run(device: torch.device) -> None:
    """On a machine with a GPU they are compiled for it, and not interpreted."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
