"""The fast engine: what runs on a GPU.  The core knows it through `gdeq.engine` alone."""

from gdeq.fast.kernels.device import available

REQUIRES = "a GPU with Triton"

__all__ = ["REQUIRES", "available"]
