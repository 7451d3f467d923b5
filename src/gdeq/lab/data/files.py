"""Writing so that half never looks like a whole, and one process at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
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


def publish(made: Path, target: Path) -> None:
    """Rename `made` to `target`, or its files to their names there: files of others stay."""
    if target.is_symlink():
        target.unlink()  # what it points to is not ours to change
    if target.exists():
        for file in made.iterdir():
            file.replace(target / file.name)
    else:
        made.rename(target)
