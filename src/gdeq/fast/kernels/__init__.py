"""Kernels in Triton, one file per operation; each is tested against plain PyTorch."""

from gdeq.fast.kernels.device import available, on_device

__all__ = ["available", "on_device"]
