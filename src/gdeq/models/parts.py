"""Values made of tuples and dataclasses, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def map_parts(value: T, kind: type, change: Callable[[Any], Any]) -> T:
    """value with `change` of each part of this kind in its place."""
    result: Any = value
    if isinstance(value, kind):
        result = change(value)
    elif isinstance(value, tuple):
        result = tuple(map_parts(part, kind, change) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        result = type(value)(**{name: map_parts(p, kind, change) for name, p in parts.items()})
    return result
