"""Where every file of the laboratory is written, and where files from elsewhere are read.

A file is written beside its place, flushed to the disk and renamed, and then its folder is flushed:
it is whole or not there, also after a power cut.  No symbolic link is followed.  What is read has a
bound that is known beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import yaml

TEXT = 2**20  # bytes of a YAML file at most
DEPTH = 20  # levels of nesting at most
# PyYAML lets the errors of numbers, dates and tables through: !!bool abc, 2024-02-31.
NO_YAML = yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError


class LabError(RuntimeError):
    """Something that the user can mend: the message says what to do."""


class FileError(LabError):
    """A file is not what it should be."""


def write(place: Path, data: bytes | memoryview | str) -> None:
    """Write a file: afterwards it is whole, or as it was before."""
    part = place.with_name(place.name + ".part")
    try:
        part.unlink(missing_ok=True)  # of a process that was killed here
        with os.fdopen(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            sync(file.fileno())
        part.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(place.parent)


def append(place: Path, text: str) -> None:
    """Write to the end of a file, without waiting for the disk."""
    with os.fdopen(open_file(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(text.encode())


def cut(place: Path, size: int) -> bytes:
    """Keep the whole lines among the first ``size`` bytes.

    Returns the part of a line that ended them: it was torn when it was written.
    """
    if not os.path.lexists(place):
        return b""
    with os.fdopen(open_file(place, os.O_RDWR), "r+b") as file:
        kept = file.read(size)
        whole = kept.rfind(b"\n") + 1
        file.truncate(whole)
        file.flush()
        sync(file.fileno())
    return kept[whole:]


def subfolder(root: Path, name: str) -> Path:
    """Make a folder in ``root``, which must exist; a symbolic link is refused."""
    place = root / name
    if place.is_symlink():
        raise _linked(place)
    place.mkdir(exist_ok=True)
    return place


def sync(handle: int) -> None:
    """Wait until the disk has it."""
    os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_file(place: Path, flags: int) -> int:
    """A handle of the file itself, never of what a link points to."""
    try:
        return os.open(place, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise _linked(place) from problem
        raise


def _linked(place: Path) -> FileError:
    return FileError(
        f"{place} is a symbolic link, and gdeq writes in a folder of its own alone: put what it "
        "points to in its place"
    )


def read(place: Path, limit: int) -> bytes:
    """What is in a regular file of at most ``limit`` bytes."""
    found = place.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileError(f"{place} is not a regular file")
    with place.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FileError(f"{place} has {found.st_size:,} bytes, where at most {limit:,} belong")
    return data


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """The object in a JSON text; None if there is none."""
    try:
        found = _encodable(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _encodable(found: Any) -> Any:
    """The same; raises `ValueError` for half of a character, which no file can hold."""
    try:
        json.dumps(found, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as problem:
        raise ValueError("half of a character, a lone surrogate") from problem
    return found


class _Plain(yaml.SafeLoader):
    """Without aliases, which multiply, and without deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        if self.depth > DEPTH:
            raise yaml.YAMLError(f"more than {DEPTH} levels of nesting")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def whole_number(self, node: Any) -> int:
        # 1:00:00:... is read in a time that grows as the square of its length.
        value = self.construct_yaml_int(node) if len(node.value) < 100 else 2**63
        if abs(value) >= 2**63:
            raise yaml.YAMLError("a whole number of more than 64 bits")
        return value


_Plain.add_constructor("tag:yaml.org,2002:int", _Plain.whole_number)


def load_yaml(text: str | bytes) -> Any:
    """Plain data; raises `FileError` for anything else."""
    if len(text) > TEXT:
        raise FileError(f"is longer than {TEXT:,} bytes")
    try:
        return _encodable(yaml.load(text, _Plain))
    except NO_YAML as problem:
        raise FileError(f"is not valid YAML: {shown(str(problem))}") from problem


def shown(text: str) -> str:
    """Text for a terminal: control characters and lone surrogates are written out."""
    safe = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return safe.encode(errors="backslashreplace").decode()


def csv_cell(value: object) -> object:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def gunzip(data: bytes | memoryview, limit: int) -> bytes:
    """What a .gz file holds, of at most ``limit`` bytes."""
    reader = zlib.decompressobj(wbits=31)
    try:
        found = reader.decompress(data, limit)
    except zlib.error as problem:
        raise FileError(f"a file is not a .gz file: {problem}") from problem
    if not reader.eof:
        raise FileError(f"a .gz file is cut short, or more than {limit:,} bytes when unpacked")
    return found
