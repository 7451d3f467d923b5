"""Layers that the parts of a multiscale network share."""

from __future__ import annotations

import math

from torch import nn


def conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution whose norm follows: no bias, and small weights (Bai et al. 2020).

    Small, because at the highest resolution the cell adds the image's injection to a convolution of
    z: the injection rules at first, f is contractive there, and the first solves converge.
    """
    layer = nn.Conv2d(inner, outer, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.normal_(layer.weight, std=0.01)
    return layer


def group_norm(groups: int, channels: int, affine: bool = True, gain: float = 1.0) -> nn.GroupNorm:
    """GroupNorm with ``groups`` groups, or fewer where they do not divide the channels.

    gain: what its scale starts at.
    """
    norm = nn.GroupNorm(math.gcd(groups, channels), channels, affine=affine)
    if affine:
        nn.init.constant_(norm.weight, gain)
    return norm
