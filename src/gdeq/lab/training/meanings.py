"""What each setting means, for `gdeq train --help`: the comment beside it in `config.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

import yaml

from gdeq.lab.training.config import Config

BESIDE = re.compile(r"^    (\w+): [^#]*?  # (.*)$", re.MULTILINE)


def meanings(kind: type = Config, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Of each setting, dotted: its default, as YAML writes it, and its meaning."""
    try:
        beside = dict(BESIDE.findall(inspect.getsource(kind)))
    except OSError:  # installed without its source
        beside = {}
    found: dict[str, tuple[str, str]] = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        inner = hints[item.name]
        if dataclasses.is_dataclass(inner):
            found |= meanings(typing.cast(type, inner), f"{prefix}{item.name}.")
            continue
        value = list(item.default) if isinstance(item.default, tuple) else item.default
        text = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
        found[prefix + item.name] = (text.replace(", ", ","), beside.get(item.name, ""))
    return found


def listed() -> list[str]:
    """A line each."""
    return [
        f"{f'{key}={default}':28s}  {meaning}".rstrip()
        for key, (default, meaning) in meanings().items()
    ]
