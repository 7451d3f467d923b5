"""The multiscale DEQ (Bai, Koltun, Kolter 2020) as an image classifier.

image → stem → injection → DEQ(cell) → one feature map per scale → head → logits
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gdeq.fast.kernels import classifier
from gdeq.gradients import DEFAULT, Gradient
from gdeq.hooks import unwatched
from gdeq.layer import DEQ
from gdeq.models import mdeq_fused
from gdeq.models.branches import Parallel, Serial
from gdeq.models.layers import (
    BatchNorm2d,
    Layers,
    Residual,
    conv,
    group_norm,
    made_ready,
    ready_tensors,
    runs_as_kernels,
)
from gdeq.models.mdeq_cell import MDEQCell, MultiscaleState
from gdeq.models.mdeq_config import MDEQConfig, Shape, named
from gdeq.regularize import hold
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden

HEAD_EXPANSION = 4
weights_beside = True  # those of cell and head are made beside the stem


def outer_norm(config: MDEQConfig, channels: int, affine: bool = True) -> nn.Module:
    if config.outer_norm == "group":
        return group_norm(config.groups, channels, affine=affine)
    return BatchNorm2d(channels, affine=affine)


class Stem(Layers):
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


class Bottleneck(Residual):
    """Widens one scale's features for the head; only the shortcut's norm is affine."""

    def __init__(self, channels: int, inner: int, config: MDEQConfig) -> None:
        outer = HEAD_EXPANSION * inner
        body = Layers(
            conv(channels, inner, 1),
            outer_norm(config, inner, affine=False),
            nn.ReLU(),
            conv(inner, inner, 3),
            outer_norm(config, inner, affine=False),
            nn.ReLU(),
            conv(inner, outer, 1),
            outer_norm(config, outer, affine=False),
        )
        shortcut: nn.Module = nn.Identity()
        if channels != outer:
            shortcut = Layers(conv(channels, outer, 1), outer_norm(config, outer))
        super().__init__(body, shortcut)


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
            Layers(conv(high, low, 3, stride=2), outer_norm(config, low), nn.ReLU())
            for high, low in pairwise(outer)
        )
        self.final = Layers(
            conv(outer[-1], config.final_channels, 1),
            outer_norm(config, config.final_channels),
            nn.ReLU(),
        )
        self.classify = nn.Linear(config.final_channels, config.classes)

    def forward(self, z: MultiscaleState) -> Tensor:  # -> (batch, classes)
        branches = self._branches(z)
        wide = []  # kept until the end of the branches
        for i, (widen, part) in enumerate(zip(self.widen, z, strict=True)):
            with branches.on(i):
                branches.reads(part, ready_tensors(widen))
                wide.append(widen(part))
                branches.mark(i)
        y = wide[0]
        for i, down in enumerate(self.down, start=1):
            lower = down(y)
            branches.await_(i)
            branches.reads(wide[i])
            y = wide[i] + lower
        branches.join([])
        y = self.final(y)
        last = self.classify  # or what a user has put there
        if runs_as_kernels(y) and type(last) is nn.Linear and unwatched(last):
            tensors = y, last.weight, last.bias
            if classifier.takes(*tensors):
                return classifier.classify(*tensors)
        return last(average(y))

    def _branches(self, z: MultiscaleState) -> Serial:
        """The scales side by side on a GPU, where all their weights are made before."""
        grad = torch.is_grad_enabled()
        wanted = mdeq_fused.streams_with_grad or not grad
        if wanted and runs_as_kernels(z[0]) and ready_tensors(self.widen[0]):
            return Parallel(z[0].device, len(z), grad)
        return Serial()


def average(y: Tensor) -> Tensor:  # (batch, channels, height, width) -> (batch, channels)
    """Over the image."""
    return _Average.apply(y)


class _Average(torch.autograd.Function):
    """`mean`, whose gradient is one number for all pixels of a channel and here takes no memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.mean(dim=(2, 3))

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Tensor:
        pixels = ctx.shape[2] * ctx.shape[3]
        return (e / pixels)[:, :, None, None].expand(ctx.shape)


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
        self.deq.lends = True  # the head changes nothing in place
        self.deq._first_known = True  # by the tests
        self.head = Head(config)

    def forward(self, images: Tensor) -> Tensor:
        if not runs_as_kernels(images, mdeq_fused.compute_dtype(images)):
            return self.head(self.deq(self.stem(images)))
        grad = torch.is_grad_enabled()
        aside = weights_beside and (mdeq_fused.streams_with_grad or not grad)
        branches = Parallel(images.device, 3, grad) if aside else Serial()
        with contextlib.ExitStack() as opened:
            opened.enter_context(made_ready(self.stem, images))
            # What the others need goes beside the stem; backward, their weights' gradients.
            with branches.on(1):
                opened.enter_context(made_ready(self.head, images))
                branches.mark("head")
            cell = getattr(self.deq, "cell", None)  # a user may have put another layer there
            opened.enter_context(hold(cell))
            with branches.on(2):
                if aside:
                    from_zero = isinstance(self.deq, DEQ) and self.deq._shortcut() is not None
                    mdeq_fused.prepare_early(cell, images, from_zero)
                branches.mark("cell")
            injection = self.stem(images)
            branches.await_("cell")
            branches.await_("head")
            branches.reads(ready_tensors(self.head))
            return self.head(self.deq(injection))


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
