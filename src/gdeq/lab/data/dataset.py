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
    """Mean and standard deviation per channel, from how often each of the 256 levels occurs."""
    levels = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(x.shape[1]):
        counts = torch.from_numpy(x[:, channel].ravel()).bincount(minlength=256).numpy()
        means.append(float(counts @ levels / counts.sum()))
        variance = counts @ (levels - means[-1]) ** 2 / counts.sum()
        deviations.append(math.sqrt(variance))
    return tuple(means), tuple(deviations)
