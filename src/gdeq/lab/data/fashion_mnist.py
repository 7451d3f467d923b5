"""Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of 28 × 28, ten classes."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gdeq.lab.data.archives import payload, unpack
from gdeq.lab.data.dataset import Arrays, Pixels
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.fetch import run_downloader
from gdeq.lab.data.files import md5, write_synced
from gdeq.lab.data.recipe import Progress, Recipe, Way

# Of the uncompressed files in Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1.  Debian
# compressed them again, so the MD5s of the authors' .gz files do not hold for every copy.
OFFICIAL_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FOLDERS = (
    "fashion-mnist",
    "FashionMNIST/raw",
    "data/fashion",  # the authors' repository
    str(DEBIAN).lstrip("/"),  # what `dpkg -x` leaves
)


@dataclass(frozen=True)
class FashionMNIST(Recipe):
    md5: Mapping[str, str] = field(default_factory=lambda: OFFICIAL_MD5)
    debian: Path = DEBIAN
    apt: tuple[str, ...] = ("apt-get", "download", "dataset-fashion-mnist")
    size: int = 150_000_000

    name = "fashion-mnist"
    classes = (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
    advice = (
        "on Debian or Ubuntu run `apt-get install dataset-fashion-mnist`; elsewhere copy the four "
        "idx files (*-ubyte or *-ubyte.gz) into one folder, or take the .deb, and run: "
        "gdeq data fashion-mnist --from PATH"
    )

    def target(self, root: Path) -> Path:
        return root / "fashion-mnist"

    def files(self) -> tuple[str, ...]:
        return tuple(OFFICIAL_MD5)

    def places(self, root: Path) -> list[Path]:
        return [self.target(root), self.debian]

    def load(self, root: Path) -> Arrays:
        for folder in self.places(root):
            if _holds(folder):
                try:
                    return self.read(folder)
                except DataError as error:
                    raise DataError(
                        f"{error}; get it again with `gdeq data fashion-mnist`"
                    ) from error
        raise DataError(
            f"Fashion-MNIST is neither in {self.target(root)} nor in {self.debian}: "
            "get it with `gdeq data fashion-mnist`"
        )

    def read(self, folder: Path) -> Arrays:
        train_x, train_y, test_x, test_y = (
            parse_idx(self._checked(name, folder), name, folder) for name in self.files()
        )
        if len(train_x) != len(train_y) or len(test_x) != len(test_y):
            raise DataError(f"{folder}: there are not as many labels as images")
        return Arrays(train_x[:, None], train_y, test_x[:, None], test_y)

    def copies(self, folder: Path) -> list[Path]:
        folders = [folder, *(folder / name for name in FOLDERS)]
        return [
            *(f for f in folders if _holds(f)),
            *sorted(folder.glob("dataset-fashion-mnist*.deb")),
        ]

    def ways(self, root: Path, progress: Progress) -> Iterator[Way]:
        def apt(scratch: Path) -> Path:
            progress("waiting for apt-get (31 MB)", 0, None)
            return run_downloader(list(self.apt), scratch, "*.deb")

        yield Way("the Debian package dataset-fashion-mnist", apt)

    def build(self, source: Path, out: Path, scratch: Path, progress: Progress) -> None:
        folder = source
        if not source.is_dir():
            progress(f"unpacking {source.name}", 0, None)
            folder = scratch / "unpacked"
            folder.mkdir()
            inner = payload(source, scratch) if source.suffix == ".deb" else source
            unpack(inner, {n + end for n in self.files() for end in ("", ".gz")}, folder)
        for index, name in enumerate(self.files()):
            progress(f"checking {name}", index, len(self.files()))
            data = self._checked(name, folder)
            parse_idx(data, name, folder)
            write_synced(out / name, data)
        progress("checked", len(self.files()), len(self.files()))

    def _checked(self, name: str, folder: Path) -> bytes:
        data = _contents(folder, name)
        found, wanted = md5(data), self.md5[name]
        if found != wanted:
            raise DataError(
                f"{folder}: {name} has MD5 {found} (uncompressed), the official one has {wanted}: "
                "it is damaged or not Fashion-MNIST"
            )
        return data


def _holds(folder: Path) -> bool:
    return any((folder / f"{name}{end}").is_file() for name in OFFICIAL_MD5 for end in ("", ".gz"))


def _contents(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() or not packed.is_file() else packed
    with reading(path):
        data = path.read_bytes()
    if path is plain:
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is cut short or damaged ({error}): copy it again") from error


def parse_idx(data: bytes, name: str, folder: Path) -> Pixels:
    """An idx file: zero, zero, the type (8 is uint8), the number of sizes, the sizes, the bytes."""
    where = folder / name
    dims = 3 if "images" in name else 1
    start = 4 + 4 * dims
    if len(data) < start or data[:4] != bytes([0, 0, 8, dims]):
        raise DataError(f"{where} is not an idx file of {'images' if dims == 3 else 'labels'}")
    shape = struct.unpack(f">{dims}I", data[4:start])
    values = np.frombuffer(data, np.uint8, offset=start)
    if len(values) != int(np.prod(shape, dtype=np.uint64)):
        raise DataError(f"{where} is cut short: it announces {shape} and holds {len(values):,}")
    return values.reshape(shape)
