"""Writing so that half never looks like a whole, and one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such lock on Windows
    fcntl = None  # type: ignore[assignment]

SCRATCH = ".gdeq-scratch-"
PART = ".gdeq-{}.part"  # a download that was not finished


def md5(data: bytes | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write, and wait for the disk: a rename must not overtake the data it publishes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold `root` for one writer; what a killed writer left there is swept away."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".gdeq.lock").open("w") as file:
        if _lock(file.fileno()):
            for left in root.glob(SCRATCH + "*"):  # no owner is alive: we have the lock
                shutil.rmtree(left, ignore_errors=True)
        yield


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return False
    return True


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A folder on the same disk as `root`, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(made: Path, target: Path, ours: Iterable[str]) -> Path | None:
    """Rename `made` to `target`.  An older folder there loses the files that are `ours`; if it
    holds others it is kept beside `target`, and returned."""
    if target.is_symlink():
        target.unlink()  # what it points to is not ours to clear away
    aside = None
    if target.exists():
        aside = _unused(target)
        target.rename(aside)
    made.rename(target)
    _sync_folder(target.parent)
    if aside is None:
        return None
    if aside.is_dir():
        for name in ours:
            (aside / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            aside.rmdir()
    return aside if aside.exists() else None


def _unused(target: Path) -> Path:
    number = 1
    while (aside := target.with_name(f"{target.name}.old-{number}")).exists():
        number += 1
    return aside


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
