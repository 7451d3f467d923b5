"""Layers that the parts of a multiscale network share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gdeq import kernels
from gdeq.kernels.norms import norm_act


def conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution whose norm follows: no bias, and small weights (Bai et al. 2020).

    Small, because at the highest resolution the cell adds the image's injection to a convolution of
    z: the injection rules at first, f is contractive there, and the first solves converge.
    """
    layer = nn.Conv2d(inner, outer, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.normal_(layer.weight, std=0.01)
    return layer


class GroupNorm(nn.GroupNorm):
    """The same; under half-precision autocast on a GPU one kernel, whose result is half too."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.dtype.itemsize == 2 and torch.is_autocast_enabled(x.device.type)
        if x.is_cuda and half and x.dim() == 4 and kernels.available(x.device):
            return norm_act(x, self.num_groups, self.weight, self.bias, self.eps, relu=False)
        return super().forward(x)


def group_norm(groups: int, channels: int, affine: bool = True, gain: float = 1.0) -> nn.GroupNorm:
    """GroupNorm with ``groups`` groups, or fewer where they do not divide the channels.

    gain: what its scale starts at.
    """
    norm = GroupNorm(math.gcd(groups, channels), channels, affine=affine)
    if affine:
        nn.init.constant_(norm.weight, gain)
    return norm
