"""Files out of archives.  Only names we ask for are read, and no path inside is ever followed."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from gdeq.lab.data.errors import DataError, reading

LARGEST = 128 * 2**20  # bytes: no file of a data set is near this large
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")


def unpack(archive: Path, wanted: Collection[str], out: Path) -> None:
    """Write the archive's files whose last name is wanted to `out`, under that name alone."""
    seen: set[str] = set()
    with reading(archive):
        with archive.open("rb") as file:
            compressed = file.read(6).startswith(_COMPRESSED)
        try:
            with tarfile.open(archive, "r:*") as tar:
                for member in tar:
                    name = member.name.rsplit("/", 1)[-1]
                    # Regular files only: a link or a device could point out of the archive.
                    if name not in wanted or name in seen or not member.isreg():
                        continue
                    if member.size > LARGEST:
                        raise DataError(f"{archive}: {member.name} claims {member.size} bytes")
                    seen.add(name)
                    content = tar.extractfile(member)
                    assert content is not None  # true of every regular file
                    (out / name).write_bytes(content.read())
        except _BROKEN as error:
            if seen or compressed:
                raise DataError(
                    f"{archive} is cut short or damaged ({error}): copy or download it again"
                ) from error
            raise DataError(f"{archive} is not an archive (tar, tar.gz) of a data set") from error
