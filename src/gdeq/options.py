"""Frozen option objects: a wrong name, type or value raises when the object is made."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
# What other libraries call our options, and no likeness of letters leads to.
ELSEWHERE = {
    "steps": "max_iter",
    "max_steps": "max_iter",
    "iterations": "max_iter",
    "threshold": "max_iter",
    "tolerance": "tol",
    "eps": "tol",
}


@dataclass_transform(frozen_default=True)
def options(cls: type[T]) -> type[T]:
    """A frozen dataclass whose constructor names the nearest right option for an unknown one."""
    made: Any = dataclass(frozen=True)(cls)
    build = made.__init__
    names = [f.name for f in fields(made) if f.init]

    @functools.wraps(build)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(made.__name__, kwargs, names)
        build(self, *args, **kwargs)

    def frozen(self: Any, name: str, value: object) -> None:
        raise FrozenInstanceError(
            f"cannot assign to field {name!r}; make another one: "
            f"dataclasses.replace(this, {name}={value!r})"
        )

    made.__init__, made.__setattr__ = checked, frozen
    return made


def check_names(owner: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Raise for an option that is none of these, and name the nearest right one."""
    for key in given:
        if key not in names:
            near = [ELSEWHERE[key]] if ELSEWHERE.get(key) in names else []
            near += difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(names) or "none"
            raise TypeError(f"{owner} has no option {key!r}{hint} (options: {listed})")


def check_integer(owner: object, name: str, minimum: int | None = None) -> None:
    value = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{where} must be at least {minimum}, got {value}")


def check_real(
    owner: object, name: str, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    value = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where} must be a number, got {value!r}")
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        left = f"above {low:g}" if open_low else f"at least {low:g}"
        right = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{where} must be {left}{right}, got {value!r}")


def check_flag(owner: object, name: str) -> None:
    check_type(owner, name, bool, "True or False")


def check_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        listed = " or ".join(repr(c) for c in choices)
        kind: type[Exception] = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{type(owner).__name__}.{name} must be {listed}, got {value!r}")


def check_type(owner: object, name: str, kind: type | tuple[type, ...], example: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind):
        raise TypeError(f"{type(owner).__name__}.{name} must be {example}, got {describe(value)}")


def count_of(name: str, value: object, minimum: int) -> None:
    """Raise where an argument is no integer of at least this."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def describe(value: object) -> str:
    """What was passed, for an error message: forgetting the brackets is the common slip."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself; write {value.__name__}()"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def count(many: int, name: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{many} {name}" if many == 1 else f"{many} {name}s"
