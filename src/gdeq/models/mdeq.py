"""The multiscale DEQ (Bai, Koltun, Kolter 2020) as an image classifier.

    image → stem → injection → DEQ(cell) → one feature map for each scale → head → logits

The cell is the function f whose fixed point is sought:

    every scale:  block:  y = norm(relu(z + norm(dropout(conv(relu(norm(conv(z))))) + injection)))
    all pairs:    fuse:   s_i = y_i + Σ_{j≠i} resample_{j→i}(y_j)
    every scale:  post:   z_i = norm(conv(relu(s_i)))

The image is injected at the highest resolution alone; the others see it through the fusion.

If every norm gave its path the same weight at first, f would answer more to z than to the image:
its spectral radius would be above 1, and no solver would converge.  So each path that carries z
starts with ``config.feedback`` times the weight of the path beside it that carries the image: z in
the sum of the injected block, and in the fusion everything but the highest resolution.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gdeq.context import Held
from gdeq.engine import faster
from gdeq.gradients import DEFAULT, Gradient
from gdeq.holding import VariationalDropout, weight_norm
from gdeq.layer import DEQ
from gdeq.options import check_choice, check_flag, check_integer, check_real, options
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden

Shape = tuple[int, int, int]  # channels, height, width
MultiscaleState = tuple[Tensor, ...]  # (batch, channels, height, width), high resolution first

HEAD_EXPANSION = 4


# ---- options


@options
class MDEQConfig:
    """A multiscale DEQ; the defaults are the paper's MDEQ-LARGE on CIFAR-10.

    channels: of the state, from the highest resolution to the lowest; each scale halves the last.
    blocks: residual blocks at each scale.
    expansion: a block's inner channels over its outer ones.
    groups: of every GroupNorm; fewer where they do not divide the channels.
    head_channels: inner channels of the head's bottlenecks, one for each scale; times 4 outside.
    final_channels: what the head averages over the image and classifies.
    downsample: how often the stem halves the image before the highest resolution.
    dropout: of whole channels in the cell; one mask for the whole solve.
    weight_norm: normalise the weights of the blocks and of the post-fusion.
    post_affine: let the cell's last norm scale and shift.  Without, ‖z‖ cannot grow in training.
    outer_norm: the norm of stem and head, "batch" as published, or "group", where no sample's
        result depends on the others in training either.
    feedback: how strongly z enters f at the start of training, beside the image (the gains of the
        norms say it, and learn).  1 as published, where no solver converges before some training.
    fused: compute the same with fewer, larger operations (`gdeq.fast.mdeq`): "auto" where that is
        faster, in half precision on a GPU with Triton; True wherever possible; or False.
    """

    channels: tuple[int, ...] = (32, 64, 128, 256)
    blocks: int = 1
    expansion: int = 5
    groups: int = 8
    head_channels: tuple[int, ...] = (14, 28, 56, 112)
    final_channels: int = 1680
    downsample: int = 0
    classes: int = 10
    image_channels: int = 3
    dropout: float = 0.3
    weight_norm: bool = True
    post_affine: bool = False
    outer_norm: str = "batch"
    feedback: float = 0.2
    fused: bool | str = "auto"

    def __post_init__(self) -> None:
        for name in ("channels", "head_channels"):
            object.__setattr__(self, name, _positive_tuple(name, getattr(self, name)))
        if len(self.head_channels) != len(self.channels):
            raise ValueError(
                f"MDEQConfig.head_channels needs one entry for each scale: {len(self.channels)} "
                f"channels, {len(self.head_channels)} head_channels"
            )
        for name in ("blocks", "expansion", "groups", "final_channels", "classes"):
            check_integer(self, name, 1)
        check_integer(self, "image_channels", 1)
        check_integer(self, "downsample", 0)
        check_real(self, "dropout", 0.0)
        if self.dropout >= 1:
            raise ValueError(f"MDEQConfig.dropout must be below 1, got {self.dropout!r}")
        check_flag(self, "weight_norm")
        check_flag(self, "post_affine")
        check_real(self, "feedback", 0.0, 1.0, open_low=True)
        check_choice(self, "outer_norm", ("batch", "group"))
        if self.fused not in (True, False, "auto"):
            raise ValueError(f"MDEQConfig.fused must be True, False or 'auto', got {self.fused!r}")

    def state_shapes(self, height: int, width: int) -> tuple[Shape, ...]:
        """The shape of each part of the state for one image of this size."""
        for _ in range(self.downsample):
            height, width = halve(height), halve(width)
        return self.scale_shapes(height, width)

    def scale_shapes(self, height: int, width: int) -> tuple[Shape, ...]:
        """The same for an injection of this size."""
        shapes = []
        for channels in self.channels:
            shapes.append((channels, height, width))
            height, width = halve(height), halve(width)
        return tuple(shapes)

    def state_size(self, height: int, width: int) -> int:
        """d_z: the numbers in the state of one image of this size."""
        return sum(c * h * w for c, h, w in self.state_shapes(height, width))


def halve(size: int) -> int:
    """What a strided 3×3 convolution leaves of an edge; an odd one rounds up."""
    return (size + 1) // 2


def _positive_tuple(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or any(type(entry) is not int for entry in value):
        raise TypeError(f"MDEQConfig.{name} must be a tuple of integers, got {value!r}")
    if not value or min(value) < 1:
        raise ValueError(f"MDEQConfig.{name} must hold at least one integer above 0, got {value!r}")
    return tuple(value)


LARGE = MDEQConfig()

TINY = MDEQConfig(channels=(24, 24), head_channels=(8, 16), final_channels=200, dropout=0.25)

# Ours: trains on two CPU cores in a minute.  No sample sees another (group norm throughout), so
# that one process and many compute the same.
SMALL = MDEQConfig(
    channels=(16, 32),
    expansion=2,
    groups=4,
    head_channels=(8, 16),
    final_channels=128,
    image_channels=1,
    dropout=0.0,
    outer_norm="group",
)

SIZES = {"small": SMALL, "tiny": TINY, "large": LARGE}


def named(size: str, **overrides: Any) -> MDEQConfig:
    """A named size with some of its options changed."""
    if size not in SIZES:
        near = difflib.get_close_matches(str(size).lower(), SIZES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no MDEQ of size {size!r}{hint} (sizes: {', '.join(SIZES)})")
    return replace(SIZES[size], **overrides)


# ---- layers


def conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that a norm follows: no bias, and small weights (Bai et al. 2020).

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


def outer_norm(config: MDEQConfig, channels: int, affine: bool = True) -> nn.Module:
    if config.outer_norm == "group":
        return group_norm(config.groups, channels, affine=affine)
    return nn.BatchNorm2d(channels, affine=affine)


# ---- the cell


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


class MDEQCell(Held):
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

    def forward(self, z: MultiscaleState, injection: Tensor) -> MultiscaleState:
        if run := faster("mdeq", self, z, injection):
            return run()
        streams = [
            scale(part, injection if i == 0 else None)
            for i, (scale, part) in enumerate(zip(self.scales, z, strict=True))
        ]
        return tuple(fusion(streams) for fusion in self.fusions)

    def initial_state(self, injection: Tensor) -> MultiscaleState:
        """Zeros, in the precision of the weights: under autocast an injection has less."""
        batch, _, height, width = injection.shape
        dtype = next(self.parameters()).dtype
        shapes = self.config.scale_shapes(height, width)
        return tuple(injection.new_zeros((batch, *shape), dtype=dtype) for shape in shapes)


# ---- stem and head


class Stem(nn.Sequential):
    """The image as the cell's injection: 3×3 convolutions, the first of them strided as asked."""

    def __init__(self, config: MDEQConfig) -> None:
        width = config.channels[0]
        layers: list[nn.Module] = []
        inner = config.image_channels
        for i in range(max(2, config.downsample)):
            stride = 2 if i < config.downsample else 1
            layers += [conv(inner, width, 3, stride), outer_norm(config, width), nn.ReLU()]
            inner = width
        if config.downsample or len(config.channels) > 2:
            layers += [conv(width, width, 1), outer_norm(config, width), nn.ReLU()]
        super().__init__(*layers)


class Bottleneck(nn.Module):
    """Widens one scale's features for the head; only the shortcut's norm is affine."""

    def __init__(self, channels: int, inner: int, config: MDEQConfig) -> None:
        super().__init__()
        outer = HEAD_EXPANSION * inner
        self.body = nn.Sequential(
            conv(channels, inner, 1),
            outer_norm(config, inner, affine=False),
            nn.ReLU(),
            conv(inner, inner, 3),
            outer_norm(config, inner, affine=False),
            nn.ReLU(),
            conv(inner, outer, 1),
            outer_norm(config, outer, affine=False),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != outer:
            self.shortcut = nn.Sequential(conv(channels, outer, 1), outer_norm(config, outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Head(nn.Module):
    """Collects the scales from the highest resolution down, averages, and classifies."""

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        outer = [HEAD_EXPANSION * inner for inner in config.head_channels]
        self.widen = nn.ModuleList(
            Bottleneck(channels, inner, config)
            for channels, inner in zip(config.channels, config.head_channels, strict=True)
        )
        self.down = nn.ModuleList(
            nn.Sequential(conv(high, low, 3, stride=2), outer_norm(config, low), nn.ReLU())
            for high, low in pairwise(outer)
        )
        self.final = nn.Sequential(
            conv(outer[-1], config.final_channels, 1),
            outer_norm(config, config.final_channels),
            nn.ReLU(),
        )
        self.classify = nn.Linear(config.final_channels, config.classes)

    def forward(self, z: MultiscaleState) -> Tensor:  # -> (batch, classes)
        wide = [widen(part) for widen, part in zip(self.widen, z, strict=True)]
        y = wide[0]
        for down, lower in zip(self.down, wide[1:], strict=True):
            y = lower + down(y)
        return self.classify(self.final(y).mean(dim=(2, 3)))


# ---- the model


class MDEQ(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, classes); any height and width.

    ``deq`` is the equilibrium layer: its solver and gradient may be replaced at any time.  The
    paper's pre-training is ``model.deq.solver, model.deq.gradient = None, Unrolled(10)``.
    """

    def __init__(
        self,
        config: MDEQConfig,
        solver: Solver | None = Broyden(max_iter=18, tol=1e-3),  # noqa: B008 (frozen)
        gradient: Gradient = DEFAULT,
    ) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.deq = DEQ(MDEQCell(config), solver, gradient)
        self.head = Head(config)

    def forward(self, images: Tensor) -> Tensor:
        if run := faster("mdeq", self, images):
            return run()
        return self.head(self.deq(self.stem(images)))


def mdeq(
    size: str,
    *,
    classes: int = 10,
    image_shape: Shape = (3, 32, 32),
    solver: Solver | None = Broyden(max_iter=18, tol=1e-3),  # noqa: B008 (frozen)
    gradient: Gradient = DEFAULT,
    **overrides: Any,
) -> MDEQ:
    """A named size, "small", "tiny" or "large", for images of this shape, channels first.

    Height and width are free at every call; ``image_shape`` is what a data set has at hand.
    overrides: any option of `MDEQConfig`.
    """
    if len(image_shape) != 3:
        raise ValueError(f"image_shape is (channels, height, width), got {image_shape!r}")
    config = named(size, classes=classes, image_channels=image_shape[0], **overrides)
    return MDEQ(config, solver, gradient)
