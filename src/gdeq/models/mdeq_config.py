"""The options of a multiscale DEQ, and the sizes that have a name."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from gdeq.options import check_choice, check_flag, check_integer, check_real, options

Shape = tuple[int, int, int]  # channels, height, width


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
    fused: compute the same with fewer, larger operations (`gdeq.models.mdeq_fused`): "auto" where
        that is faster, in half precision on a GPU with Triton; True wherever it can; or False.
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
