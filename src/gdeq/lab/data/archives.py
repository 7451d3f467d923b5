"""Files out of archives.  Only names we ask for are read, and no path inside is ever followed."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from gdeq.lab.data.errors import DataError, reading

# No wanted file is near this large; a member that claims to be is not one of ours.
LARGEST = 128 * 2**20
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")


def unpack(archive: Path, wanted: Collection[str], out: Path) -> None:
    """Write the archive's files whose last name is wanted to `out`, under that name alone."""
    for name, data in _members(archive, wanted):
        (out / name).write_bytes(data)


def _members(archive: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    seen: set[str] = set()
    with reading(archive):
        magic = _head(archive, 6)
        try:
            with tarfile.open(archive, "r:*") as tar:
                for member in tar:
                    name = member.name.rsplit("/", 1)[-1]
                    # isreg: a link or device could point out of the archive.
                    if name not in wanted or name in seen or not member.isreg():
                        continue
                    if member.size > LARGEST:
                        raise DataError(f"{archive}: {member.name} claims {member.size} bytes")
                    seen.add(name)
                    file = tar.extractfile(member)
                    assert file is not None  # true of every regular file
                    yield name, file.read()
        except _BROKEN as error:
            if seen or magic.startswith(_COMPRESSED):
                raise DataError(
                    f"{archive} is cut short or damaged ({error}): copy or download it again"
                ) from error
            raise DataError(f"{archive} is not an archive (tar, tar.gz) of a data set") from error


def payload(deb: Path, scratch: Path) -> Path:
    """The data archive inside a Debian package, written to `scratch`."""
    with reading(deb), deb.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise DataError(f"{deb} is not a Debian package")
        while len(header := file.read(60)) == 60:
            # ar: 16 bytes of name, ..., 10 bytes of size, 2 bytes of magic; members start even.
            if header[58:] != b"`\n" or not header[48:58].strip().isdigit():
                raise DataError(f"{deb} is damaged: copy or download it again")
            name, size = header[:16].decode("latin-1").strip(" /"), int(header[48:58])
            if not name.startswith("data.tar"):
                file.seek(size + size % 2, 1)
                continue
            if name.endswith(".zst"):
                raise DataError(
                    f"{deb} is compressed with zstd: unpack it with `dpkg -x {deb} FOLDER` "
                    "and give FOLDER instead"
                )
            data = file.read(size)
            if len(data) < size:
                raise DataError(f"{deb} is cut short: copy or download it again")
            break
        else:
            raise DataError(f"{deb} is cut short or not a package with data in it")
    inner = scratch / "data.tar"
    inner.write_bytes(data)
    return inner


def _head(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
