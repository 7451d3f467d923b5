"""Files out of archives.  Only names we ask for are read, and no path inside is ever followed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from gdeq.lab.data.errors import DataError, reading

LARGEST = 128 * 2**20  # bytes of a file: none of a data set is near this large
WHOLE = 2**30  # bytes of an archive when unpacked
MEMBERS = 1000
ONCE = 2**16  # bytes read at once: no header is longer
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, RecursionError)


class _Bounded:
    """The unpacked bytes of an archive, for `tarfile`, which believes what headers say."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.tell = file, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= ONCE or self.tell() > WHOLE:
            raise DataError("a header in it claims more than any data set has")
        return self.file.read(size)

    def seek(self, place: int) -> int:
        if place > WHOLE:
            raise DataError("it is larger than any data set")
        return self.file.seek(place)


def unpack(archive: Path, wanted: Collection[str], out: Path) -> None:
    """Write the archive's files whose last name is wanted to `out`, under that name alone."""
    seen: set[str] = set()
    with reading(archive):
        with archive.open("rb") as file:
            start = file.read(6)
        openers = [make for magic, make in _OPENERS.items() if start.startswith(magic)]
        opener: Any = openers[0] if openers else open
        try:
            with opener(archive, "rb") as file:
                source: Any = _Bounded(file)
                with tarfile.open(fileobj=source, mode="r:") as tar:
                    _take(tar, wanted, out, seen)
        except DataError as error:
            raise DataError(f"{archive} was not unpacked: {error}") from error
        except _BROKEN as error:
            if seen or openers:
                raise DataError(
                    f"{archive} is cut short or damaged ({error}): copy or download it again"
                ) from error
            raise DataError(f"{archive} is not an archive (tar, tar.gz) of a data set") from error


def _take(tar: tarfile.TarFile, wanted: Collection[str], out: Path, seen: set[str]) -> None:
    for number, member in enumerate(tar):
        if number >= MEMBERS:
            raise DataError(f"it has more than {MEMBERS} members")
        name = member.name.rsplit("/", 1)[-1]
        # Regular files only: a link or a device could point out of the archive.
        if name not in wanted or name in seen or not member.isreg():
            continue
        if member.size > LARGEST:
            raise DataError(f"{member.name} claims {member.size} bytes")
        seen.add(name)
        content = tar.extractfile(member)
        assert content is not None  # true of every regular file
        with (out / name).open("wb") as file:
            shutil.copyfileobj(content, file, ONCE)
