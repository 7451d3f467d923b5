"""The function f of a multiscale DEQ (Bai, Koltun, Kolter 2020); it knows nothing of solvers.

    every scale:  block:  y = norm(relu(z + norm(dropout(conv(relu(norm(conv(z))))) + injection)))
    all pairs:    fuse:   s_i = y_i + Σ_{j≠i} resample_{j→i}(y_j)
    every scale:  post:   z_i = norm(conv(relu(s_i)))

The image is injected at the highest resolution alone; the others see it through the fusion.

Every norm gives its path the same weight at first, and then f answers more to z than to the image:
its spectral radius is above 1, and no solver converges.  So each path that carries z starts with
``config.feedback`` times the weight of the path beside it that carries the image: z in the sum of
the injected block, and in the fusion everything but the stream of the highest resolution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gdeq.models import mdeq_fused
from gdeq.models.layers import conv, group_norm
from gdeq.models.mdeq_config import MDEQConfig, halve
from gdeq.models.mdeq_weights import Prepared
from gdeq.regularize import VariationalDropout, weight_norm

MultiscaleState = tuple[Tensor, ...]  # (batch, channels, height, width), high resolution first


class ResidualBlock(nn.Module):
    """branch_gain, gain: what the norms before and after the residual sum start with."""

    def __init__(
        self, channels: int, config: MDEQConfig, branch_gain: float = 1.0, gain: float = 1.0
    ) -> None:
        super().__init__()
        inner = config.expansion * channels
        self.expand = conv(channels, inner, 3)
        self.expand_norm = group_norm(config.groups, inner)
        self.reduce = conv(inner, channels, 3)
        self.dropout = VariationalDropout(config.dropout, channelwise=True)
        self.reduce_norm = group_norm(config.groups, channels, gain=branch_gain)
        self.sum_norm = group_norm(config.groups, channels, gain=gain)
        if config.weight_norm:
            weight_norm(self.expand)
            weight_norm(self.reduce)

    def forward(self, z: Tensor, injection: Tensor | None = None) -> Tensor:
        y = torch.relu(self.expand_norm(self.expand(z)))
        y = self.dropout(self.reduce(y))
        if injection is not None:
            y = y + injection
        return self.sum_norm(torch.relu(z + self.reduce_norm(y)))


class Scale(nn.Module):
    """The residual blocks of one resolution; at the highest the first takes the injection."""

    def __init__(self, channels: int, config: MDEQConfig, injected: bool) -> None:
        super().__init__()
        first, last = 0, config.blocks - 1
        self.blocks = nn.ModuleList(
            ResidualBlock(
                channels,
                config,
                branch_gain=1 / config.feedback if injected and i == first else 1.0,
                gain=1.0 if injected or i != last else config.feedback,
            )
            for i in range(config.blocks)
        )

    def forward(self, z: Tensor, injection: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            z = block(z, injection if i == 0 else None)
        return z


class Down(nn.Sequential):
    """``levels`` strided convolutions; the channels change in the last."""

    def __init__(self, inner: int, outer: int, levels: int, groups: int, gain: float) -> None:
        steps: list[nn.Module] = []
        for _ in range(levels - 1):
            steps += [conv(inner, inner, 3, stride=2), group_norm(groups, inner), nn.ReLU()]
        steps += [conv(inner, outer, 3, stride=2), group_norm(groups, outer, gain=gain)]
        super().__init__(*steps)


class Up(nn.Module):
    """The channels change at the low resolution, where it is cheap; then each pixel is repeated."""

    def __init__(self, inner: int, outer: int, levels: int, groups: int, gain: float) -> None:
        super().__init__()
        self.conv = conv(inner, outer, 1)
        self.norm = group_norm(groups, outer, gain=gain)
        self.factor = 2**levels

    def forward(self, y: Tensor, height: int, width: int) -> Tensor:
        y = nn.functional.interpolate(self.norm(self.conv(y)), scale_factor=float(self.factor))
        # An edge that was odd on the way down is larger now.  Cutting keeps pixel k of the low
        # resolution over pixels factor·k, where its strided convolution looked; scaling would not.
        return y[..., :height, :width] if y.shape[-2:] != (height, width) else y


class Fusion(nn.Module):
    """What one scale receives: its own stream and every other one, resampled."""

    def __init__(self, target: int, config: MDEQConfig) -> None:
        super().__init__()
        channels, groups, feedback = config.channels, config.groups, config.feedback
        outer = channels[target]
        self.target = target
        self.down = nn.ModuleList(
            Down(channels[j], outer, target - j, groups, gain=1.0 if j == 0 else feedback)
            for j in range(target)
        )
        self.up = nn.ModuleList(
            Up(channels[j], outer, j - target, groups, gain=feedback)
            for j in range(target + 1, len(channels))
        )
        self.post = conv(outer, outer, 1)
        self.post_norm = group_norm(max(1, groups // 2), outer, affine=config.post_affine)
        if config.weight_norm:
            weight_norm(self.post)

    def forward(self, streams: list[Tensor]) -> Tensor:
        total = streams[self.target]
        height, width = total.shape[-2:]
        for down, stream in zip(self.down, streams[: self.target], strict=True):
            total = total + down(stream)
        for up, stream in zip(self.up, streams[self.target + 1 :], strict=True):
            total = total + up(stream, height, width)
        return self.post_norm(self.post(torch.relu(total)))


class MDEQCell(nn.Module):
    """z, injection ↦ f(z, injection).

    z: one tensor for each scale, from the highest resolution to the lowest.
    injection: the image's features at the highest resolution, (batch, channels[0], height, width).
    """

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        self.config = config
        self.scales = nn.ModuleList(
            Scale(channels, config, injected=i == 0) for i, channels in enumerate(config.channels)
        )
        self.fusions = nn.ModuleList(Fusion(i, config) for i in range(len(config.channels)))
        self.prepared = Prepared()  # a submodule, so that `hold` finds it

    def forward(self, z: MultiscaleState, injection: Tensor) -> MultiscaleState:
        if mdeq_fused.applies(self, z, injection):
            return mdeq_fused.fused_forward(self, z, injection)
        streams = [
            scale(part, injection if i == 0 else None)
            for i, (scale, part) in enumerate(zip(self.scales, z, strict=True))
        ]
        return tuple(fusion(streams) for fusion in self.fusions)

    def initial_state(self, injection: Tensor) -> MultiscaleState:
        """Zeros, in the precision of the weights: under autocast an injection has less.

        Where the fused form will compute in half precision, they have its precision and order.
        """
        dtype, order = next(self.parameters()).dtype, torch.contiguous_format
        if mdeq_fused.applies(self, (), injection):
            dtype, order = mdeq_fused.compute_dtype(injection), torch.channels_last
        batch, _, height, width = injection.shape
        shapes = []
        for channels in self.config.channels:
            shapes.append((batch, height, width, channels))
            height, width = halve(height), halve(width)
        # In one piece: filled at once, and a solve can begin with it as it lies.
        sizes = [math.prod(shape) for shape in shapes]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=injection.device)
        parts = zip(buffer.split(sizes), shapes, strict=True)
        if order == torch.channels_last:
            return tuple(part.data.view(shape).permute(0, 3, 1, 2) for part, shape in parts)
        return tuple(part.data.view(n, c, h, w) for part, (n, h, w, c) in parts)

    def at_initial_state(self, injection: Tensor) -> MultiscaleState | None:
        """f there, without autograd, where the fused form runs: less than half of its work.

        For finite weights: one of those that zeros make no use of is seen at the next evaluation.
        """
        return mdeq_fused.fused_at_zero(self, injection)
