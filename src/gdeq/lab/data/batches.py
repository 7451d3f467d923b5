"""`Batches`: normalised mini-batches, made where the data is.

Nothing random is carried from one batch to the next.  The order of an epoch is a function of
(seed, epoch), the augmentation of a batch one of (seed, epoch, index), alternating flips one of
(seed, sample, epoch); so an epoch can be taken up at any batch, and every process of a group can
work out its own part of the same global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gdeq.lab.data.augment import FLIP, Augment
from gdeq.options import count

Batch = tuple[int, tuple[Tensor, Tensor]]


class Batches:
    """Mini-batches of images `x` (n, c, h, w) in uint8 with labels `y` (n,).

    batch_size: of all processes together; rank r of world_size takes the r-th equal part of it.
    mean, std: per channel, of images scaled to [0, 1].
    drop_last: leave out the last batch if it is smaller.  Turn it off (and `shuffle` too) to
        evaluate: every sample then comes exactly once over all ranks, and a rank whose part of
        the last batch is empty does not get it.
    classes: how many there are, for cutmix; if not given, as many as `y` shows.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        channels_last: bool = False,
        classes: int | None = None,
    ) -> None:
        _check(x, y, mean, std, augment)
        mixing = augment is not None and augment.cutmix > 0
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if mixing and batch_size == 1:
            raise ValueError(
                "cutmix takes pixels from another image of the batch, and batch_size is 1: raise "
                "it, or leave cutmix out"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if batch_size % world_size:
            below = batch_size - batch_size % world_size
            near = f"{below} or {below + world_size}" if below else str(world_size)
            raise ValueError(
                f"batch_size {batch_size} is that of all processes together and must be a multiple "
                f"of their number {world_size}: try {near}"
            )
        if drop_last and batch_size > len(x):
            raise ValueError(
                f"batch_size {batch_size} is larger than the data set ({count(len(x), 'sample')}): "
                "lower it, or pass drop_last=False"
            )
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.augment = augment
        self.drop_last = drop_last
        self.rank, self.world_size = rank, world_size
        known = int(y.max()) + 1
        if classes is not None and classes < known:
            raise ValueError(f"there are labels up to {known - 1}, so classes={classes} is too few")
        self.classes = (classes or known) if mixing else None  # None: labels stay numbers
        self.first_flips: Tensor | None = None  # of each sample, in epoch 0: (n,)
        if augment is not None and augment.alternate:
            coins = torch.randint(0, 2, (len(x),), generator=generator(seed))
            self.first_flips = coins.to(x.device)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        # (x/255 − mean) / std in one multiplication and one addition per pixel.
        deviation = torch.tensor(std, dtype=torch.float64)
        centre = torch.tensor(mean, dtype=torch.float64)
        self.scale = (1 / (255 * deviation)).float().to(x.device)[:, None, None]  # (c, 1, 1)
        self.shift = (-centre / deviation).float().to(x.device)[:, None, None]

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.x), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """index, (images, labels) for each batch of an epoch from the `start`-th on.

        images: (b, c, h, w) float32, normalised; labels: (b,) int64, or with cutmix the shares of
        the classes (b, classes) float32.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be in 0..{len(self)} (batches per epoch), got {start}")
        return self._epoch(epoch, start)

    def _epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        order = None
        if self.shuffle:
            order = torch.randperm(len(self.x), generator=generator(self.seed, epoch))
        elif self.classes is not None:
            order = torch.arange(len(self.x))
        if order is not None:
            order = _sent(order, self.x.device)
        for index in range(start, len(self)):
            first = index * self.batch_size
            count = min(self.batch_size, len(self.x) - first)
            # Equal parts of a whole batch; parts that differ by one at most of the last one.
            low, high = (count * r // self.world_size for r in (self.rank, self.rank + 1))
            if low < high:
                chosen: slice | Tensor = slice(first + low, first + high)
                if order is not None:
                    chosen = self._part(order[first : first + count], low, high)
                yield index, self._batch(chosen, self._drawn(epoch, index, count, low, high), epoch)

    def _part(self, batch: Tensor, low: int, high: int) -> Tensor:
        """Of something for each image of the batch; with cutmix also of the one that follows."""
        if self.classes is None:
            return batch[low:high]
        return torch.cat([batch, batch[:1]])[low : high + 1]  # the first one follows the last

    def _drawn(self, epoch: int, index: int, count: int, low: int, high: int) -> Tensor | None:
        if self.augment is None:
            return None
        height, width = self.x.shape[-2:]
        source = generator(self.seed, epoch, index)
        drawn = self.augment.draw(count, height, width, source)
        return _sent(self._part(drawn, low, high), self.x.device)

    def _batch(
        self, chosen: slice | Tensor, drawn: Tensor | None, epoch: int
    ) -> tuple[Tensor, Tensor]:
        if self.first_flips is not None and drawn is not None:
            drawn[:, FLIP] = self.first_flips[chosen] ^ (epoch % 2)
        images, labels = self._images(chosen, drawn), self.y[chosen]
        if self.augment is None or drawn is None or self.classes is None:
            return images, labels
        return self.augment.mix(images, labels, self.classes, drawn)

    def _images(self, chosen: slice | Tensor, drawn: Tensor | None) -> Tensor:
        # index_select: the same as x[chosen], several times as fast on the CPU.
        images = self.x[chosen] if isinstance(chosen, slice) else self.x.index_select(0, chosen)
        if self.augment is not None and drawn is not None:
            images = self.augment.move(images, drawn)
        # Two roundings everywhere, so that CPU and GPU agree to the bit.
        normal = images.to(torch.float32, memory_format=self.layout).mul_(self.scale)
        normal.add_(self.shift)
        if self.augment is not None and drawn is not None:
            normal = self.augment.cut(normal, drawn)
        return normal


def generator(*key: int) -> torch.Generator:
    """A CPU generator that depends on all of `key` and nothing else."""
    digest = hashlib.blake2b(repr([*map(int, key)]).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _sent(small: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    if device.type != "cuda":
        return small.to(device)
    return small.pin_memory().to(device, non_blocking=True)


def _check(
    x: Tensor, y: Tensor, mean: Sequence[float], std: Sequence[float], augment: Augment | None
) -> None:
    if x.dtype != torch.uint8 or x.dim() != 4:
        raise ValueError(
            f"x must be uint8 images (n, c, h, w), got {x.dtype} of shape {tuple(x.shape)}"
        )
    if y.dtype != torch.int64 or y.shape != x.shape[:1]:
        raise ValueError(
            f"y must be int64 labels ({len(x)},), got {y.dtype} of shape {tuple(y.shape)}"
        )
    if y.device != x.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}: put both on one device")
    if not len(x):
        raise ValueError("the data set is empty")
    if len(mean) != x.shape[1] or len(std) != x.shape[1]:
        raise ValueError(
            f"mean and std need one value for each of the {x.shape[1]} channels, "
            f"got {len(mean)} and {len(std)}"
        )
    if not all(s > 0 for s in std):
        raise ValueError(f"std must be positive in every channel, got {tuple(std)}")
    if augment is None:
        return
    if not isinstance(augment, Augment):
        raise TypeError(f"augment must be Augment(...) or None, got {augment!r}")
    augment.check(*x.shape[-2:])
