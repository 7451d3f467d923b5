"""`Dataset`: images and labels on the device, and what is known about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]


class Arrays(NamedTuple):
    """A data set as it was read."""

    train_x: Pixels  # (n, c, h, w)
    train_y: Pixels  # (n,)
    test_x: Pixels  # (m, c, h, w)
    test_y: Pixels  # (m,)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images in 0..255; `mean` and `std` are the train set's, per channel, scaled to [0, 1]."""

    name: str
    train_x: Tensor  # (n, c, h, w) uint8
    train_y: Tensor  # (n,) int64
    test_x: Tensor  # (m, c, h, w) uint8
    test_y: Tensor  # (m,) int64
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        _, channels, height, width = self.train_x.shape
        return channels, height, width

    def __repr__(self) -> str:
        size = "×".join(map(str, self.shape))
        return (
            f"Dataset({self.name}: {len(self.train_x):,} train and {len(self.test_x):,} test "
            f"images of {size}, {len(self.classes)} classes, on {self.train_x.device})"
        )


def make(
    name: str, arrays: Arrays, classes: tuple[str, ...], device: str | torch.device
) -> Dataset:
    mean, std = channel_statistics(arrays.train_x)

    def images(x: Pixels) -> Tensor:
        # A view of the bytes of a file is read-only, which tensors cannot be.
        return torch.from_numpy(np.require(x, requirements=["C", "W"])).to(device)

    def labels(y: Pixels) -> Tensor:
        return torch.from_numpy(y.astype(np.int64)).to(device)

    return Dataset(
        name=name,
        train_x=images(arrays.train_x),
        train_y=labels(arrays.train_y),
        test_x=images(arrays.test_x),
        test_y=labels(arrays.test_y),
        classes=classes,
        mean=mean,
        std=std,
    )


def channel_statistics(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, from exact integer sums."""
    total = np.zeros(x.shape[1], np.int64)
    squares = total.copy()
    for start in range(0, len(x), 512):  # a wider copy of all of it would be four times as large
        wide = x[start : start + 512].astype(np.uint32)
        total += wide.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += (wide * wide).sum(axis=(0, 2, 3), dtype=np.int64)
    count = x.size // x.shape[1]
    # Python's integers: count · squares does not fit in 64 bits.
    spread = [count * int(q) - int(s) ** 2 for s, q in zip(total, squares, strict=True)]
    mean = tuple(int(s) / (255 * count) for s in total)
    return mean, tuple(math.sqrt(v) / (255 * count) for v in spread)
