"""A start for the solves of a multiscale DEQ, predicted from the injection (`gdeq.fit_start`).

down:  a_0 = relu(norm(conv(injection))),   a_i = relu(norm(strided conv(a_{i−1})))
up:    b_i = a_i + resample(b_{i+1})
out:   z_i = conv(relu(norm(b_i)))
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from gdeq.models.layers import conv, group_norm
from gdeq.models.mdeq_cell import MultiscaleState, Up
from gdeq.models.mdeq_config import MDEQConfig


class MDEQStart(nn.Module):
    """injection ↦ z of all scales; zeros until it is fitted.

    For MDEQ-LARGE 0.15 of the multiplications of one evaluation of the cell.
    """

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        channels, groups = config.channels, config.groups
        self.down = nn.ModuleList([conv(channels[0], channels[0], 3)])
        self.down.extend(conv(high, low, 3, stride=2) for high, low in pairwise(channels))
        self.down_norms = nn.ModuleList(group_norm(groups, width) for width in channels)
        self.up = nn.ModuleList(
            Up(low, high, 1, groups, gain=1.0) for high, low in pairwise(channels)
        )
        self.up_norms = nn.ModuleList(group_norm(groups, width) for width in channels)
        self.out = nn.ModuleList(conv(width, width, 3) for width in channels)
        for module in self.modules():  # Adam's rate is one of weights of this size
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, injection: Tensor) -> MultiscaleState:
        streams, y = [], injection
        for layer, norm in zip(self.down, self.down_norms, strict=True):
            y = norm(layer(y), relu=True)
            streams.append(y)
        for i in range(len(self.up) - 1, -1, -1):
            here = streams[i]
            streams[i] = here + self.up[i](streams[i + 1], *here.shape[-2:])
        return tuple(
            layer(norm(stream, relu=True))
            for layer, norm, stream in zip(self.out, self.up_norms, streams, strict=True)
        )
