"""What every data set knows about itself: `Source`, and `Recipe` for those that live on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gdeq.lab.data.dataset import Arrays

# progress(what, done, total): total is None where it is not known.
Progress = Callable[[str, int, int | None], None]


class Way(NamedTuple):
    """One way to get a data set: `fetch(scratch)` returns a path `Recipe.build` understands."""

    title: str
    fetch: Callable[[Path], Path]


class Source(ABC):
    """A named data set."""

    name: str
    classes: tuple[str, ...]

    @abstractmethod
    def load(self, root: Path) -> Arrays:
        """The arrays, every byte checked; `DataError` says what is wrong and what to do."""


class Recipe(Source):
    """A data set that must be brought to the disk first."""

    size: int  # bytes needed at the worst moment, for the message when the disk is full
    advice: str  # what a person can do when every way failed

    @abstractmethod
    def target(self, root: Path) -> Path:
        """The folder `build`'s files end up in."""

    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The names of these files."""

    @abstractmethod
    def places(self, root: Path) -> list[Path]:
        """Where `load` looks, best first."""

    @abstractmethod
    def read(self, folder: Path) -> Arrays:
        """Read and check one of `places`."""

    @abstractmethod
    def copies(self, folder: Path) -> list[Path]:
        """Everything in `folder` that `build` might understand."""

    @abstractmethod
    def ways(self, root: Path, progress: Progress) -> Iterator[Way]:
        """How to get it from elsewhere, best first."""

    @abstractmethod
    def build(self, source: Path, out: Path, scratch: Path, progress: Progress) -> None:
        """Turn a copy in any known form into the checked files in `out`."""
