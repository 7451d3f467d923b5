"""Kernels in Triton, each beside a plain PyTorch function that it equals."""

from gdeq.fast.kernels.choice import available, chosen, use

__all__ = ["available", "chosen", "use"]
