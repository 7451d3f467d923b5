"""Writing so that half never looks like a whole, and one process at a time."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

SCRATCH = ".gdeq-scratch-"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold `root` for one writer; what a killed writer left there is swept away."""
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".gdeq.lock"):
        for left in root.glob(SCRATCH + "*"):  # no owner is alive: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        yield


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
    if not target.exists():
        made.rename(target)
        return None
    names = (target.with_name(f"{target.name}.old-{n}") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    target.rename(aside)
    made.rename(target)
    if aside.is_dir():
        for name in ours:
            (aside / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            aside.rmdir()
    return aside if aside.exists() else None
