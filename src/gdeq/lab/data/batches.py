"""`Batches` of any tensors and `ImageBatches`: mini-batches, made where the data is.

Nothing random is carried from one batch to the next.  The order of an epoch is a function of
(seed, epoch), the augmentation of a batch one of (seed, epoch, index), alternating flips one of
(seed, sample, epoch); so an epoch can be taken up at any batch, and every process of a group can
work out its own part of the same global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdeq.lab.data.augment import FLIP, Augment
from gdeq.options import count


@dataclass(frozen=True)
class Part:
    """This process's part of a batch: samples ``low`` to ``high`` of its ``count``."""

    epoch: int
    index: int  # of the batch in its epoch
    count: int
    low: int
    high: int
    chosen: slice | Tensor  # those samples, in the data set


class Batches:
    """Mini-batches of tensors that have one row a sample.

    batch_size: of all processes together; rank r of world_size takes the r-th equal part of it.
    drop_last: leave out the last batch if it is smaller.  Turn it off (and `shuffle` too) to
        evaluate: every sample then comes exactly once over all ranks, and a rank whose part of
        the last batch is empty does not get it.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.tensors = tuple(tensors)
        self.samples = len(self.tensors[0])
        if {len(tensor) for tensor in self.tensors} != {self.samples}:
            raise ValueError(
                "the tensors of a data set have one row a sample, these have "
                f"{', '.join(str(len(tensor)) for tensor in self.tensors)}"
            )
        if not self.samples:
            raise ValueError("the data set is empty")
        if batch_size % world_size:
            below = batch_size - batch_size % world_size
            near = f"{below} or {below + world_size}" if below else str(world_size)
            raise ValueError(
                f"batch_size {batch_size} is that of all processes together and must be a multiple "
                f"of their number {world_size}: try {near}"
            )
        if drop_last and batch_size > self.samples:
            raise ValueError(
                f"batch_size {batch_size} is larger than the data set "
                f"({count(self.samples, 'sample')}): lower batch_size"
            )
        self.batch_size, self.seed = batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Index and tensors of each batch of an epoch, from the `start`-th on."""
        order = self._order(epoch)
        if order is not None:
            order = sent(order, self.tensors[0].device)
        for index in range(start, len(self)):
            first = index * self.batch_size
            number = min(self.batch_size, self.samples - first)
            # Equal parts of a whole batch; parts that differ by one at most of the last one.
            low, high = (number * r // self.world_size for r in (self.rank, self.rank + 1))
            if low < high:
                chosen: slice | Tensor = slice(first + low, first + high)
                if order is not None:
                    chosen = self._rows(order[first : first + number], low, high)
                yield index, self._batch(Part(epoch, index, number, low, high, chosen))

    def _order(self, epoch: int) -> Tensor | None:
        """None: as they are."""
        if not self.shuffle:
            return None
        return torch.randperm(self.samples, generator=generator(self.seed, epoch))

    def _rows(self, batch: Tensor, low: int, high: int) -> Tensor:
        """Of something for each sample of a batch, what this process needs."""
        return batch[low:high]

    def _batch(self, part: Part) -> tuple[Tensor, ...]:
        return tuple(rows(tensor, part.chosen) for tensor in self.tensors)


class ImageBatches(Batches):
    """Normalised mini-batches of images `x` (n, c, h, w) in uint8 with labels `y` (n,).

    A batch is images (b, c, h, w) in float32 and labels (b,) in int64, or with cutmix the shares of
    the classes (b, classes) in float32.

    mean, std: per channel, of images scaled to [0, 1].
    classes: how many there are, for cutmix.
    options: those of `Batches`.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        channels_last: bool = False,
        classes: int = 0,
        **options: Any,
    ) -> None:
        super().__init__((x, y), batch_size, **options)
        if augment is not None:
            augment.check(*x.shape[-2:])
        mixing = augment is not None and augment.cutmix > 0
        if mixing and batch_size == 1:
            raise ValueError(
                "cutmix takes pixels from another image of the batch, and batch_size is 1: raise "
                "it, or leave cutmix out"
            )
        self.x, self.y, self.augment = x, y, augment
        self.classes = classes if mixing else None  # None: labels stay numbers
        self.first_flips: Tensor | None = None  # of each sample, in epoch 0: (n,)
        if augment is not None and augment.alternate:
            coins = torch.randint(0, 2, (len(x),), generator=generator(self.seed))
            self.first_flips = coins.to(x.device)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        # (x/255 − mean) / std in one multiplication and one addition per pixel.
        deviation = torch.tensor(std, dtype=torch.float64)
        centre = torch.tensor(mean, dtype=torch.float64)
        self.scale = (1 / (255 * deviation)).float().to(x.device)[:, None, None]  # (c, 1, 1)
        self.shift = (-centre / deviation).float().to(x.device)[:, None, None]

    def _order(self, epoch: int) -> Tensor | None:
        if not self.shuffle and self.classes is not None:  # cutmix looks for the next one by number
            return torch.arange(len(self.x))
        return super()._order(epoch)

    def _rows(self, batch: Tensor, low: int, high: int) -> Tensor:
        """With cutmix also of the image that follows; the first one follows the last."""
        if self.classes is None:
            return batch[low:high]
        return torch.cat([batch, batch[:1]])[low : high + 1]

    def _batch(self, part: Part) -> tuple[Tensor, ...]:
        augment, drawn = self.augment, self._drawn(part)
        images, labels = rows(self.x, part.chosen), self.y[part.chosen]
        if augment is not None and drawn is not None:
            images = augment.move(images, drawn)
        # Two roundings everywhere, so that CPU and GPU agree to the bit.
        normal = images.to(torch.float32, memory_format=self.layout).mul_(self.scale)
        normal.add_(self.shift)
        if augment is None or drawn is None or self.classes is None:
            return normal, labels
        return augment.mix(normal, labels, self.classes, drawn)

    def _drawn(self, part: Part) -> Tensor | None:
        """What happens to each image of the part; drawn for the whole batch."""
        if self.augment is None:
            return None
        source = generator(self.seed, part.epoch, part.index)
        height, width = self.x.shape[-2:]
        drawn = self.augment.draw(part.count, height, width, source)
        drawn = sent(self._rows(drawn, part.low, part.high), self.x.device)
        if self.first_flips is not None:
            drawn[:, FLIP] = self.first_flips[part.chosen] ^ (part.epoch % 2)
        return drawn


def generator(*key: int) -> torch.Generator:
    """A CPU generator that depends on all of `key` and nothing else."""
    digest = hashlib.blake2b(repr([*map(int, key)]).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def rows(tensor: Tensor, chosen: slice | Tensor) -> Tensor:
    """``tensor[chosen]``; by index_select, which is several times as fast on the CPU."""
    return tensor[chosen] if isinstance(chosen, slice) else tensor.index_select(0, chosen)


def sent(small: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    if device.type != "cuda":
        return small.to(device)
    return small.pin_memory().to(device, non_blocking=True)
