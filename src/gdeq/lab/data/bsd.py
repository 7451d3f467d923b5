"""Pictures of the Berkeley segmentation data set, as image restoration uses them.

BSD400 for training, BSD68 and Set12 for tests, all grey, from the repository of DnCNN (Zhang et al.
2017), and Levin's eight blur kernels (2009) from that of DPIR.  No picture of BSD68 is in BSD400.

The pictures are kept unpacked, one file a set: their number, their sizes, their pixels.  The sums
are of these files, so that how a picture was packed does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdeq.lab import files
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.fetch import download
from gdeq.lab.data.pictures import Pictures, pictures_of, read_grey
from gdeq.lab.data.recipe import Contents, Progress, Recipe, Way

MD5 = {
    "Train400.bin": "08af0c246890f7e9c7cf4fdf6988d5a9",
    "BSD68.bin": "09750b9011b04b3d7472b22b43e6ddfe",
    "Set12.bin": "2123e85027ebfd1d02759ecde02628d5",
    "Levin09.mat": "afa10180734c3e608d7a3de652a0a677",
}
NAMES = {
    "Train400": tuple(f"test_{n:03}.png" for n in range(1, 401)),
    "BSD68": tuple(f"test{n:03}.png" for n in range(1, 69)),
    "Set12": tuple(f"{n:02}.png" for n in range(1, 13)),
}
KERNELS = "Levin09.mat"
# Where its HDF5 has each kernel, column by column in float64: width and first byte.
PLACES = (
    *((19, 3492), (17, 6652), (15, 9236), (27, 11308)),
    *((13, 17412), (21, 19036), (23, 22836), (23, 27340)),
)
RAW = "https://raw.githubusercontent.com/cszn"
HOMES = {
    "Train400": "TrainingCodes/DnCNN_TrainingCodes_v1.0/data/Train400",
    "BSD68": "testsets/BSD68",
    "Set12": "testsets/Set12",
}
PICTURES = f"{RAW}/DnCNN/e93b27812d3ff523a3a79d19e5e50d233d7a8d0a"
LEVIN = f"{RAW}/DPIR/15bca3fcc1f3cc51a1f99ccf027691e278c19354/kernels"
LARGEST = 64_000_000  # bytes of a file at most
AT_ONCE = 8  # downloads


class Pools(NamedTuple):
    train: Pictures
    bsd68: Pictures
    set12: Pictures
    kernels: list[NDArray[np.float64]]  # each (k, k), with the sum 1


@dataclass(frozen=True)
class BSD(Recipe[Pools]):
    """The fields are what the tests make smaller."""

    md5: Mapping[str, str] = field(default_factory=lambda: MD5)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)
    pictures: str = PICTURES
    kernels: str = LEVIN
    size: int = 80_000_000

    name = "bsd"
    title = "BSD400, BSD68 and Set12"
    folder = "bsd"
    wanted = frozenset(MD5)
    folders = ("bsd",)
    archives = ("bsd.tar.xz",)
    terms = (
        "The Berkeley pictures are for non-commercial research and education, as far as we know; "
        "the kernels come from a repository under the MIT licence.  Do not pass the pictures on"
    )
    advice = (
        f"put the folders {', '.join(HOMES.values())} of {PICTURES} and the file {LEVIN}/{KERNELS} "
        "into one folder (as Train400, BSD68 and Set12) and run: gdeq data bsd --from FOLDER"
    )

    def holds(self, folder: Path) -> bool:
        return (folder / "BSD68").is_dir() or (folder / "BSD68.bin").is_file()

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        for pool, names in self.names.items():
            packed = folder / f"{pool}.bin"
            with reading(packed):
                if packed.is_file():
                    yield packed.name, files.read(packed, LARGEST)
                else:
                    yield packed.name, pack([read_grey(folder / pool / name) for name in names])
        with reading(folder / KERNELS):
            yield KERNELS, files.read(folder / KERNELS, LARGEST)

    def arrays(self, contents: dict[str, Contents]) -> Pools:
        train, bsd68, set12 = (unpack(contents[f"{pool}.bin"]) for pool in NAMES)
        return Pools(train, bsd68, set12, read_kernels(bytes(contents[KERNELS])))

    def ways(self, progress: Progress) -> Iterator[Way]:
        def authors(scratch: Path) -> Path:
            def silent(what: str, done: int, total: int | None) -> None:
                pass

            def get(place: tuple[str, str]) -> None:
                pool, name = place
                url = f"{self.pictures}/{HOMES[pool]}/{name}"
                download(url, None, scratch / pool, silent)  # what it shows is checked

            places = [(pool, name) for pool, names in self.names.items() for name in names]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for done, _ in enumerate(pool.map(get, places), 1):
                    progress("downloading pictures", done, len(places))
            download(f"{self.kernels}/{KERNELS}", self.md5[KERNELS], scratch, progress)
            return scratch

        yield Way(f"the pictures of {self.pictures}", authors)


def pack(images: list[NDArray[np.uint8]]) -> bytes:
    found = pictures_of(images)
    head = np.concatenate([[len(found)], found.sizes.reshape(-1)]).astype("<i4")
    return head.tobytes() + found.pixels.tobytes()


def unpack(content: Contents) -> Pictures:
    numbers = np.frombuffer(content, "<i4", 1)
    sizes = np.frombuffer(content, "<i4", 2 * numbers[0], 4).astype(np.int64).reshape(-1, 2)
    pixels = np.frombuffer(content, np.uint8, offset=4 + 8 * len(sizes))
    if sizes.prod(1).sum() != len(pixels):
        raise DataError("a set of pictures has not as many pixels as its sizes say")
    return Pictures(pixels.copy(), sizes)


def read_kernels(content: bytes) -> list[NDArray[np.float64]]:
    """Levin's, from the very file whose sum is known."""
    return [
        np.frombuffer(content, "<f8", k * k, start).reshape(k, k).T.copy() for k, start in PLACES
    ]
