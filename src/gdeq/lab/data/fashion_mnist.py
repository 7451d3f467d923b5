"""Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 grey images of 28 × 28, ten classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gdeq.lab import files
from gdeq.lab.data.dataset import Arrays, Pixels
from gdeq.lab.data.errors import reading
from gdeq.lab.data.fetch import download
from gdeq.lab.data.recipe import Contents, Progress, Recipe, Way

OFFICIAL_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
LARGEST = 48_000_000  # bytes of a file, packed or not
HOME = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"


@dataclass(frozen=True)
class FashionMNIST(Recipe):
    """The fields are what the tests make smaller."""

    md5: Mapping[str, str] = field(default_factory=lambda: OFFICIAL_MD5)
    url: str = HOME
    size: int = 70_000_000

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    folder = "fashion-mnist"
    wanted = frozenset(OFFICIAL_MD5)
    folders = ("fashion-mnist", "FashionMNIST/raw", "data/fashion")  # torchvision's, the authors'
    classes = (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
    advice = (
        f"on any machine get the four .gz files from {HOME}, copy them here into one folder and "
        "run: gdeq data fashion-mnist --from PATH"
    )

    def holds(self, folder: Path) -> bool:
        return any((folder / name).is_file() for name in OFFICIAL_MD5)

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        for name in OFFICIAL_MD5:
            with reading(folder / name):
                yield name, files.read(folder / name, LARGEST)

    def arrays(self, contents: dict[str, Contents]) -> Arrays:
        with reading(Path(self.folder)):
            train_x, train_y, test_x, test_y = (_idx(contents[name]) for name in OFFICIAL_MD5)
        return Arrays(train_x[:, None], train_y, test_x[:, None], test_y)

    def ways(self, progress: Progress) -> Iterator[Way]:
        def authors(scratch: Path) -> Path:
            for name, md5 in self.md5.items():
                download(f"{self.url}/{name}", md5, scratch, progress)
            return scratch

        yield Way(f"the authors' files in {self.url}", authors)


def _idx(data: Contents) -> Pixels:
    """An idx file of uint8: zero, zero, 8, the number of sizes, the sizes, the values."""
    values = np.frombuffer(files.gunzip(data, LARGEST), np.uint8)
    dims = int(values[3])
    shape = values[4 : 4 + 4 * dims].view(">u4")
    return values[4 + 4 * dims :].reshape(shape)
