"""Grey pictures of any size, and batches of them: random patches, or whole ones of one size.

What is to be restored is not stored: each batch is measured when it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from gdeq.lab.data.batches import Batches, Part, generator, rows, sent
from gdeq.lab.data.dataset import Pixels
from gdeq.lab.data.errors import DataError, reading

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
MOST = 2**26  # pixels of one picture
LARGEST = 2**22  # pixels of a batch of whole pictures, about


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pixels of all pictures, one after another, and their sizes."""

    pixels: Pixels  # (total,)
    sizes: NDArray[np.int64]  # (n, 2) height and width

    def __getitem__(self, number: int) -> Pixels:  # (height, width)
        height, width = self.sizes[number]
        start = self.starts[number]
        return self.pixels[start : start + height * width].reshape(height, width)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> NDArray[np.int64]:  # (n,)
        area = self.sizes.prod(1)
        return area.cumsum() - area


def pictures_of(images: Sequence[Pixels]) -> Pictures:  # each (h, w)
    sizes = np.array([image.shape for image in images], np.int64).reshape(-1, 2)
    return Pictures(np.concatenate([image.reshape(-1) for image in images]), sizes)


def with_shrunk(pictures: Pictures, scales: Sequence[float]) -> Pictures:
    """The same pictures, and then all of them at each of these scales."""
    images = [pictures[number] for number in range(len(pictures))]
    return pictures_of([*images, *(_shrunk(image, s) for s in scales for image in images)])


def held_out(pictures: Pictures, every: int = 20) -> tuple[Pictures, Pictures]:
    """All but one of so many, and those: to train on, and to choose by."""
    kept: tuple[list[Pixels], list[Pixels]] = [], []
    for number in range(len(pictures)):
        kept[number % every == 0].append(pictures[number])
    return pictures_of(kept[0]), pictures_of(kept[1])


def _shrunk(image: Pixels, scale: float) -> Pixels:  # (h, w)
    size = [max(1, round(scale * length)) for length in image.shape]
    given = torch.from_numpy(image)[None, None].float()
    made = interpolate(given, size, mode="bicubic", antialias=True)[0, 0]
    found: Pixels = made.round().clamp(0, 255).byte().numpy()
    return found


def read_folder(folder: Path) -> Pictures:
    """All pictures in a folder, by name, as grey ones."""
    with reading(folder):
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{folder} holds no pictures ({', '.join(SUFFIXES)})")
    return pictures_of([read_grey(path) for path in paths])


def read_grey(path: Path) -> Pixels:  # (h, w)
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    with reading(path), path.open("rb") as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                if image.mode[0] in "IF":  # Pillow would cut their numbers off at 255
                    raise DataError(f"{path} has more than 8 bits a pixel: save it with 8")
                if image.width * image.height <= MOST:  # known before it is unpacked
                    return np.asarray(image.convert("L"))
        except Image.DecompressionBombError:  # more still
            pass
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{path} is cut short or no picture: copy it again") from error
    raise DataError(f"{path} has more than {MOST:,} pixels: make it smaller")


def photos() -> Pictures:
    """Two photographs that come with scikit-learn, a temple and a flower, 427 × 640."""
    from PIL import Image  # noqa: PLC0415

    colours = importlib.import_module("sklearn.datasets").load_sample_images().images
    return pictures_of([np.asarray(Image.fromarray(colour).convert("L")) for colour in colours])


# -- batches ---------------------------------------------------------------------------------------

# measure(clean (b, 1, h, w) in [0, 1], which (b,), draw) -> the model's input (b, c, h, w), where
# draw(*shape) are normal numbers (b, *shape), and `which` says how each is measured, if in several
# ways: any number, at random in training.
Draw = Callable[..., Tensor]
Measure = Callable[[Tensor, Tensor, Draw], Tensor]


class PatchBatches(Batches):
    """Measured patches (b, c, p, p) and what they should be (b, 1, p, p) in [0, 1].

    patch: their size.  each: how many an epoch has of each picture.
    plain: without flips and rotations.

    What happens to a batch is a function of (seed, epoch, index), on one kind of device.
    """

    def __init__(
        self,
        pictures: Pictures,
        batch_size: int,
        measure: Measure,
        *,
        patch: int,
        each: int = 1,
        plain: bool = False,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        if patch > pictures.sizes.min():
            raise ValueError(
                f"patches of {patch} pixels do not fit into the smallest picture, "
                f"{pictures.sizes.min()} pixels: lower patch"
            )
        super().__init__(
            (torch.arange(len(pictures)).repeat(each).to(device),), batch_size, **options
        )
        self.measure, self.patch, self.plain = measure, patch, plain
        self.pixels, self.sizes, self.starts = (
            torch.from_numpy(array).to(device)
            for array in (pictures.pixels, pictures.sizes, pictures.starts)
        )

    def _batch(self, part: Part) -> tuple[Tensor, ...]:
        numbers = rows(self.tensors[0], part.chosen)
        key = (self.seed, part.epoch, part.index)
        drawn = torch.rand(part.count, 6, generator=generator(*key))
        drawn = sent(drawn[part.low : part.high], numbers.device)
        clean = self._cut(numbers, drawn)
        source = torch.Generator(numbers.device).manual_seed(generator(*key).initial_seed())

        def draw(*shape: int) -> Tensor:
            whole = (part.count, *shape)
            made = torch.randn(whole, generator=source, device=numbers.device)
            return made[part.low : part.high]

        return self.measure(clean, (drawn[:, 5] * 2**20).long(), draw), clean

    def _cut(self, numbers: Tensor, drawn: Tensor) -> Tensor:  # (b,), (b, 6) -> (b, 1, p, p)
        sizes, along = self.sizes[numbers], torch.arange(self.patch, device=numbers.device)
        corner = (drawn[:, :2] * (sizes - self.patch + 1)).long()  # (b, 2)
        turned = drawn[:, 2:5] < 0.5
        lines = along.expand(2, len(numbers), -1)
        if not self.plain:
            lines = torch.where(turned[:, :2].T[..., None], lines.flip(-1), lines)
        down, right = lines + corner.T[..., None]  # (b, p) each
        at = self.starts[numbers, None, None] + down[..., None] * sizes[:, 1, None, None]
        found = self.pixels[at + right[:, None, :]]  # (b, p, p)
        if not self.plain:
            found = torch.where(turned[:, 2, None, None], found.mT, found)
        return found[:, None].float() / 255


class WholeBatches(Batches):
    """Each picture once, with others of its size, and with the same noise in each test.

    each: measurements of a picture; the number of one is ``each * picture + which``.
    """

    def __init__(
        self,
        pictures: Pictures,
        batch_size: int,
        measure: Measure,
        *,
        each: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        many = each * len(pictures)
        super().__init__(
            (torch.arange(many),), batch_size, shuffle=False, drop_last=False, **options
        )
        self.pictures, self.measure, self.each, self.device = pictures, measure, each, device
        self.groups = list(self._groups(batch_size))

    def _groups(self, batch_size: int) -> Iterator[list[int]]:
        """The numbers of each batch."""
        of_size: dict[tuple[int, ...], list[int]] = {}
        for number in range(self.samples):
            size = tuple(self.pictures.sizes[number // self.each])
            of_size.setdefault(size, []).append(number)
        for (height, width), numbers in of_size.items():
            most = max(1, min(batch_size, LARGEST // int(height * width)))
            yield from (numbers[at : at + most] for at in range(0, len(numbers), most))

    def __len__(self) -> int:
        return len(self.groups)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        for index in range(start, len(self)):
            numbers = self.groups[index]
            low, high = (len(numbers) * r // self.world_size for r in (self.rank, self.rank + 1))
            if low < high:
                yield index, self.measured(numbers[low:high])

    def measured(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """These measurements, of pictures of one size."""
        images = [self.pictures[number // self.each] for number in numbers]
        clean = torch.from_numpy(np.stack(images))[:, None].to(self.device).float() / 255
        sources = [generator(number) for number in numbers]

        def draw(*shape: int) -> Tensor:
            each = [torch.randn(shape, generator=source) for source in sources]
            return torch.stack(each).to(self.device)

        return self.measure(clean, torch.tensor(numbers, device=self.device), draw), clean
