"""`DataError`, and where the errors of the disk become sentences."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gdeq.lab.files import FileError, LabError


class DataError(LabError):
    """A data set is unknown, missing, damaged or cannot be written; says what to do about it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong inside is about `path`, which is only read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except FileError as error:
        raise DataError(str(error)) from error


@contextmanager
def writing(root: Path, needed: int) -> Iterator[None]:
    """What goes wrong inside is about writing `needed` bytes below `root`."""
    elsewhere = "choose another folder (GDEQ_DATA=FOLDER)"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left in {root}: about {needed / 1e6:,.0f} MB are needed. Make room or "
                f"{elsewhere}; nothing half-written was kept."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataError(
                f"no permission to write {error.filename or root}: change its owner or {elsewhere}"
            ) from error
        raise DataError(
            f"cannot write {error.filename or root}: {error.strerror or error}; {elsewhere}"
        ) from error
