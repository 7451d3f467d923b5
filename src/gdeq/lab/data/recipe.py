"""What every data set knows about itself: `Source`, and `Recipe` for those that live on disk."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from gdeq.lab import files
from gdeq.lab.data.archives import unpack
from gdeq.lab.data.errors import DataError, reading

# progress(what, done, total): total is None where it is not known.
Progress = Callable[[str, int, int | None], None]
Contents = bytes | memoryview
LARGEST = 110_000_000  # bytes of a file at most
T = TypeVar("T")


class Way(NamedTuple):
    """One way to get a data set: `fetch(scratch)` returns a path that `Recipe.build` can read."""

    title: str
    fetch: Callable[[Path], Path]


class Source(ABC, Generic[T]):
    """A named data set, which is loaded as a T."""

    name: str
    classes: tuple[str, ...] = ()

    @abstractmethod
    def load(self, root: Path) -> T:
        """All of it, every byte checked; `DataError` says what is wrong and what to do."""


class Recipe(Source[T]):
    """A data set that must be brought to the disk first, as files with known MD5 sums."""

    title: str  # the name as people write it
    folder: str  # below the root, where `load` looks
    md5: Mapping[str, str]  # of each file in it
    wanted: frozenset[str]  # the names that are taken out of archives
    folders: tuple[str, ...]  # where a copy may lie below a given folder ...
    archives: tuple[str, ...] = ()  # ... and what archives of it are called
    size: int  # bytes needed at the worst moment, for the message when the disk is full
    advice: str  # what a person can do when every way failed

    def holds(self, folder: Path) -> bool:
        """Whether files of the data set, in a form that is known, lie in `folder`."""
        return any((folder / name).is_file() for name in self.wanted)

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        """Each file's name, as in `md5`, and what it should hold, from any known form."""
        for name in self.md5:
            yield name, read(folder / name)

    @abstractmethod
    def arrays(self, contents: dict[str, Contents]) -> T:
        """What `load` returns, from checked contents."""

    def ways(self, progress: Progress) -> Iterator[Way]:
        """How to get it from elsewhere, best first; by default it cannot be had."""
        yield from ()

    def load(self, root: Path) -> T:
        folder = root / self.folder
        if not folder.is_dir():
            raise DataError(
                f"{self.title} is not in {root}: get it with `gdeq data {self.name} --data {root}`"
            )
        try:
            return self.arrays(dict(self.checked(folder)))
        except DataError as error:
            raise DataError(f"{error}; get it again with `gdeq data {self.name}`") from error

    def copies(self, folder: Path) -> list[Path]:
        """Everything in `folder` that `build` might understand."""
        below = [folder, *(folder / name for name in self.folders)]
        packed = [folder / name for name in self.archives]
        return [*filter(self.holds, below), *filter(Path.is_file, packed)]

    def build(self, source: Path, out: Path, scratch: Path, progress: Progress) -> None:
        """Turn a copy in any known form into the checked files in `out`."""
        folder = source
        if not source.is_dir():
            folder = scratch / "unpacked"
            folder.mkdir()
            progress(f"unpacking {source.name}", 0, None)
            unpack(source, self.wanted, folder)
        if not self.holds(folder):
            raise DataError(f"{source} holds no {self.title} batches")
        for index, (name, data) in enumerate(self.checked(folder, source)):
            progress(f"checking {name}", index, len(self.md5))
            files.write(out / name, data)
        progress("checked", len(self.md5), len(self.md5))

    def checked(self, folder: Path, told: Path | None = None) -> Iterator[tuple[str, Contents]]:
        """`contents`, each of the right MD5; `told` is what the message calls the folder."""
        for name, data in self.contents(folder):
            found, official = md5_of(data), self.md5[name]
            if found != official:
                raise DataError(
                    f"{told or folder}: {Path(name).stem} has MD5 {found}, the official one has "
                    f"{official}: it is damaged or not {self.title}"
                )
            yield name, data


def md5_of(data: Contents) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def read(path: Path, most: int = LARGEST) -> bytes:
    """A file of a data set, of at most so many bytes."""
    with reading(path):
        return files.read(path, most)
