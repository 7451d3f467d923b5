"""Which tasks there are: the package's own by name, a user's by the path of its file."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gdeq.lab.tasks.images import Images
from gdeq.lab.tasks.imaging import Imaging
from gdeq.lab.tasks.language import Bytes, Words
from gdeq.lab.tasks.sudoku import Puzzles
from gdeq.lab.tasks.task import Task
from gdeq.lab.training.settings import ConfigError

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task for task in (Images, Bytes, Words, Puzzles, Imaging)
}


def presets() -> dict[str, dict[str, Any]]:
    """Of all tasks of the package: ``gdeq train NAME``."""
    return {
        name: {"task": task.name, **settings}
        for task in TASKS.values()
        for name, settings in task.presets.items()
    }


def find(name: str) -> type[Task[Any]]:
    """A task by its name, or the one that a Python file defines."""
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    if not str(name).endswith(".py"):
        raise ConfigError(
            f"there is no task {name!r}: write {', '.join(TASKS)}, or the path of a .py file that "
            "defines one"
        )
    try:
        return _from_file(Path(name).resolve())
    except (OSError, ValueError) as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"cannot read the task {name}: {problem}") from problem


def _from_file(path: Path) -> type[Task[Any]]:
    module_name = f"gdeq_task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = sys.modules.get(module_name)
    if module is None:
        if not path.is_file():
            raise ConfigError(f"cannot read the task {path}: there is no such file")
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where dataclasses look for its names
        sys.path.append(str(path.parent))  # the file may import its neighbours
        try:
            spec.loader.exec_module(module)
        except Exception as problem:
            del sys.modules[module_name]
            raise ConfigError(
                f"{path} cannot be imported: {type(problem).__name__}: {problem}"
            ) from problem
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module_name
    ]
    if len(own) != 1:
        found = ", ".join(task.__name__ for task in own) or "none"
        raise ConfigError(f"{path} must define one subclass of gdeq.lab.tasks.Task, has {found}")
    if missing := ", ".join(sorted(own[0].__abstractmethods__)):
        raise ConfigError(f"{own[0].__name__} in {path} must define {missing}")
    own[0].name = str(path)
    return own[0]
