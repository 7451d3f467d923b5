"""`Augment`: crop, flip and CutMix of a whole batch at once.

The random part is a handful of integers per image, drawn on the CPU; the pixels stay where they
are and are only looked up at other places.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gdeq.options import check_choice, check_flag, check_integer, check_real, options

# What is drawn: top, left, flip; for CutMix the edges of its rectangle.
FLIP, EDGES = 2, 3


@options
class Augment:
    """The usual augmentation of small images, drawn anew for each; by default, none.

    CutMix takes a rectangle of an image from the next one of the batch, and as much of the label as
    of the pixels (Yun et al. 2019).  That is a random other image where batches are shuffled.
    `ImageBatches` knows the epochs of alternating flips (Jordan 2024).
    """

    crop: int = 0  # pixels of padding before a random crop
    flip: bool = False  # left and right exchanged, half of the time
    fill: str = "zeros"  # padding of a crop: zeros (black), reflect
    cutmix: float = 0.0  # share of images that get a rectangle, and its label, from another
    alternate: bool = False  # with flip: flip each image in every second epoch, not at random

    def __post_init__(self) -> None:
        check_integer(self, "crop", 0)
        check_choice(self, "fill", ("zeros", "reflect"))
        check_flag(self, "flip")
        check_real(self, "cutmix", 0.0, 1.0)
        check_flag(self, "alternate")
        if self.alternate and not self.flip:
            raise ValueError(
                "Augment.alternate says in which epochs images are flipped, and flip=false flips "
                "none: set augment.flip=true, or leave alternate out"
            )

    def check(self, height: int, width: int) -> None:
        if self.fill == "reflect" and self.crop >= min(height, width):
            raise ValueError(
                f"Augment.crop={self.crop} with fill='reflect' needs images larger than that, "
                f"these are {height}×{width}"
            )

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
        """What happens to each image. -> (count, 3) int64 on the CPU; (count, 7) with cutmix"""
        # Always all of them, and CutMix last: changing one option leaves the draws of the others
        # alone.  The last two are unused; without them recorded runs would have other rectangles.
        tops = (2 * self.crop + 1, 2 * self.crop + 1, 2, height, width)
        columns = [torch.randint(0, top, (count,), generator=generator) for top in tops][:EDGES]
        if self.cutmix:
            columns += self._edges(count, height, width, generator)
        return torch.stack(columns, dim=1)

    def _edges(
        self, count: int, height: int, width: int, generator: torch.Generator
    ) -> list[Tensor]:
        """First row and the one after the last, the same of columns; equal: nothing is replaced."""
        mixed, area = torch.rand(2, count, generator=generator, dtype=torch.float64)
        side = area.sqrt() * (mixed < self.cutmix)
        edges = []
        for size in (height, width):
            length = (size * side).round().long()
            first = torch.randint(0, size, (count,), generator=generator) - length // 2
            edges += [first.clamp(min=0), (first + length).clamp(max=size)]
        return edges

    def move(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Crop and flip. x: (b, c, h, w), drawn: (b, 3) -> (b, c, h, w)"""
        if not self.crop and not self.flip:
            return x
        rows, columns = self._sources(*x.shape[-2:], x.device)
        row = rows[drawn[:, 0]]  # (b, h)
        column = columns[torch.add(drawn[:, 2], drawn[:, 1], alpha=2)]  # (b, w)
        at = (row[:, :, None] + column[:, None, :]).flatten(1)[:, None]  # (b, 1, h·w)
        looked_up = at.clamp(min=0).expand(-1, x.shape[1], -1)
        moved = x.flatten(2).gather(2, looked_up)
        if self.crop and self.fill == "zeros":
            moved.masked_fill_(at < 0, 0)
        return moved.view_as(x)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (options, not what they work on)
    def _sources(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the pixels of a row and of a column come from; below 0 from beyond the edge.

        Rows by their first one (2 crop + 1, h), as places in memory; columns by their first one and
        the flip (2 (2 crop + 1), w).
        """
        first = torch.arange(2 * self.crop + 1)[:, None] - self.crop
        rows, columns = first + torch.arange(height), first + torch.arange(width)
        both = [columns, columns.flip(1) if self.flip else columns]
        columns = torch.stack(both, dim=1).flatten(0, 1)
        places = [_reflected(rows, height) * width, _reflected(columns, width)]
        if self.fill == "zeros":
            beyond = -2 * height * width  # whatever the other one adds
            places[0].masked_fill_(~_within(rows, height), beyond)
            places[1].masked_fill_(~_within(columns, width), beyond)
        return places[0].to(device), places[1].to(device)

    def mix(self, x: Tensor, y: Tensor, classes: int, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """CutMix of each image with the next one: images, and the shares of their classes.

        x: (b + 1, c, h, w), y: (b + 1,), drawn: (b + 1, 7) -> (b, c, h, w), (b, classes) float32
        """
        height, width = x.shape[-2:]
        top, bottom, left, right = drawn[:-1, EDGES:, None].unbind(1)  # (b, 1)
        rows = torch.arange(height, device=x.device) - top  # (b, h)
        columns = torch.arange(width, device=x.device) - left  # (b, w)
        replaced = _within(rows, bottom - top)[:, :, None] & _within(columns, right - left)[:, None]
        share = ((bottom - top) * (right - left)).float() / (height * width)
        one_hot = (y[:, None] == torch.arange(classes, device=y.device)).float()
        images = torch.where(replaced[:, None], x[1:], x[:-1])
        return images, torch.lerp(one_hot[:-1], one_hot[1:], share)


def _within(index: Tensor, size: int | Tensor) -> Tensor:
    return (index >= 0) & (index < size)


def _reflected(index: Tensor, size: int) -> Tensor:
    """Indices beyond an edge mirrored at it; clamped where one mirror is not enough (zeros)."""
    return ((size - 1) - ((size - 1) - index.abs()).abs()).clamp(min=0)
