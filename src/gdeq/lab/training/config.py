"""From a preset, a YAML file, a task's file and ``key=value`` to a `Config`, and back to YAML."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gdeq.lab import files
from gdeq.lab.tasks import registry
from gdeq.lab.training.settings import Config, ConfigError

__all__ = ["Config", "ConfigError", "differences", "from_dict", "load", "replace", "to_dict"]

LARGEST = 1e30  # of a number: float32 ends at 3e38
C = TypeVar("C", bound=Config)
MEANING = re.compile(r"^    (\w+): [^#]*?  # (.*)$", re.MULTILINE)  # the comment beside a setting


def load(
    source: str = "digits",
    overrides: Sequence[str] | None = None,
    gradients: Sequence[str] = (),
) -> Config:
    """A preset, a YAML file or a task's file, with ``key=value`` settings on top.

    gradients: those that the command goes through, where that is not for ``gradient.name`` to say.
    """
    return _changed(_source(source), overrides or [], gradients)


def change(config: Config, overrides: Sequence[str]) -> Config:
    """The same run with these ``key=value`` settings."""
    return _changed(to_dict(config), overrides)


def _changed(
    settings: dict[str, Any], overrides: Sequence[str], gradients: Sequence[str] = ()
) -> Config:
    kind = registry.find(settings.get("task", Config.task)).settings
    given: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not a setting; write key=value, such as epochs=5")
        try:
            parsed = files.load_yaml(value)
        except files.FileError as problem:
            raise ConfigError(
                f"{key.strip()}: cannot read the value {value[:80]!r}, it {problem}"
            ) from problem
        given |= _put(kind, settings, key.strip(), parsed)
    config = from_dict(settings)
    _check_read(config, given, gradients)
    return config


def from_dict(settings: dict[str, Any]) -> Config:
    """The configuration of the task that they name; images, if they name none."""
    task = registry.find(settings.get("task", Config.task))
    built: Config = _build(task.settings, task.settings, {**settings, "task": task.name}, "")
    return built


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data, as YAML writes it."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def replace(config: C, **settings: Any) -> C:
    """The same run with other settings; ``optimizer__lr`` stands for ``optimizer.lr``."""
    changed = to_dict(config)
    for key, value in settings.items():
        _put(type(config), changed, key.replace("__", "."), value)
    return typing.cast(C, from_dict(changed))


def differences(before: Config, after: Config) -> list[str]:
    """The settings in which two runs differ: ``epochs: 1 -> 2``."""
    if type(before) is not type(after):
        return [f"task: {before.task} -> {after.task}"]
    keys = all_keys(type(before))
    pairs = {key: (attrgetter(key)(before), attrgetter(key)(after)) for key in keys}
    return [f"{key}: {old} -> {new}" for key, (old, new) in pairs.items() if old != new]


def _source(source: str) -> dict[str, Any]:
    presets = registry.presets()
    if source in presets:
        return copy.deepcopy(presets[source])
    if source.endswith(".py"):
        task = registry.find(source)
        first = next(iter(task.presets.values()), {})
        return {**copy.deepcopy(dict(first)), "task": task.name}
    try:
        if source.endswith((".yaml", ".yml")) or Path(source).exists():
            settings = files.load_yaml(files.read(Path(source), files.TEXT))
            if isinstance(settings, dict):
                return settings
            raise ConfigError(f"{source} must hold settings, one 'key: value' a line")
    except (OSError, ValueError, files.FileError) as problem:
        if isinstance(problem, ConfigError):
            raise
        told = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"cannot read {source}: {told}") from problem
    near = difflib.get_close_matches(source, list(presets), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{source!r} is neither a preset ({', '.join(presets)}) nor a YAML file nor a task's "
        f".py file{hint}"
    )


# -- what settings there are -----------------------------------------------------------------------


def _sections(kind: type) -> dict[str, Any]:
    """The class of each setting that holds settings, None of the others."""
    hints = typing.get_type_hints(kind)
    types_of = {item.name: hints[item.name] for item in dataclasses.fields(kind)}
    return {name: t if dataclasses.is_dataclass(t) else None for name, t in types_of.items()}


def all_keys(kind: type, prefix: str = "") -> list[str]:
    """Every setting there is, dotted."""
    keys = []
    for name, inner in _sections(kind).items():
        keys += [prefix + name] if inner is None else all_keys(inner, f"{prefix}{name}.")
    return keys


def meanings(kind: type, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Of each setting, dotted: its default, as YAML writes it, and its meaning."""
    beside: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            beside |= dict(MEANING.findall(inspect.getsource(owner)))
        except OSError:  # installed without its source
            continue
    found: dict[str, tuple[str, str]] = {}
    for name, inner in _sections(kind).items():
        if inner is not None:
            found |= meanings(inner, f"{prefix}{name}.")
        else:
            default = _plain(getattr(kind, name))
            text = yaml.safe_dump(default, default_flow_style=True).splitlines()[0]
            found[prefix + name] = (text.replace(", ", ","), beside.get(name, ""))
    return found


def help_lines(kind: type) -> list[str]:
    """Each setting with its meaning, in lines of a terminal, for ``--help``."""
    found = [
        f"{f'{key}={default}':28s}  {meaning}".rstrip()
        for key, (default, meaning) in meanings(kind).items()
    ]
    return [textwrap.fill(line, 78, subsequent_indent=30 * " ") for line in found]


def _unknown(kind: type, key: str) -> ConfigError:
    hint = _hint(all_keys(kind), key)
    return ConfigError(f"there is no setting {key!r}{hint} (`gdeq train --help` lists them)")


def _hint(known: list[str], key: str) -> str:
    """The nearest setting or section; where the section is clear alone, what it has."""
    section, dot, last = key.partition(".")
    inner = [k for k in known if dot and k.startswith(f"{section}.")]
    if inner:
        near = difflib.get_close_matches(key, inner, n=1, cutoff=0.8)
        if not near:
            return f"; {section} has {', '.join(k.partition('.')[2] for k in inner)}"
    else:
        sections = list(dict.fromkeys(k.partition(".")[0] for k in known))
        # The last part alone is what people remember.
        near = [k for k in known if k.rpartition(".")[2] == (last or section)]
        near = near or difflib.get_close_matches(key, [*sections, *known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# -- from text and plain data ----------------------------------------------------------------------


def _put(kind: type, settings: dict[str, Any], key: str, value: Any) -> set[str]:
    """Set it; returns the keys that were set, written out."""
    sections = _sections(kind)
    if key not in all_keys(kind) and key not in sections:
        raise _unknown(kind, key)
    *parents, last = key.split(".")
    place = settings
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise _unknown(kind, key)
    short = getattr(sections.get(key), "short", None)
    if short is not None and isinstance(value, str):
        place.setdefault(key, {})[short] = value
        return {f"{key}.{short}"}
    place[last] = value
    return {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}


def _check_read(config: Config, given: set[str], gradients: Sequence[str]) -> None:
    """What was asked for must be read by someone.

    Only of settings given by hand: a preset holds those of several gradients, to switch between.
    To give one its default takes back what a preset says, and asks for nothing.
    """
    if gradients and "gradient.name" in given:
        raise ConfigError(
            f"this command takes the gradients {', '.join(gradients)} in turn; leave "
            f"gradient={config.gradient.name} out"
        )
    default = type(config)()
    asked = {key for key in given if attrgetter(key)(config) != attrgetter(key)(default)}
    idle = sorted(key for key in asked if key.startswith("adapt."))
    if idle and not config.adapt.enabled and "adapt.enabled" not in given:
        raise ConfigError(
            f"{idle[0]} is read with adapt.enabled=true alone: add that, or leave {idle[0]} out"
        )
    for key in sorted(asked):
        section, _, name = key.partition(".")
        readers = getattr(getattr(config, section), "read_by", {}).get(name)
        if readers is None:
            continue
        chosen = [getattr(config, section).name]
        if section == "gradient" and gradients:
            chosen = list(gradients)
        if not set(readers) & set(chosen):
            listed = " and ".join(f"{section}={reader}" for reader in readers)
            raise ConfigError(
                f"{key} is read by {listed} alone, and this is {section}={' or '.join(chosen)}: "
                f"leave {key} out, or choose {section}={readers[0]}"
            )


def _build(root: type, kind: type, settings: dict[str, Any], prefix: str) -> Any:
    sections, hints = _sections(kind), typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        dotted = f"{prefix}{key}"
        if key not in sections:
            raise _unknown(root, dotted)
        inner = sections[key]
        if inner is None:
            values[key] = _coerce(value, hints[key], dotted)
        elif isinstance(value, dict):
            values[key] = _build(root, inner, value, f"{dotted}.")
        else:
            listed = ", ".join(all_keys(inner, f"{dotted}."))
            raise ConfigError(f"{dotted} holds settings, got {value!r}; it has {listed}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:
        # GradientConfig.name, GDEQ.refine: the user knows them as gradient.name, gradient.refine.
        owner = rf"^[A-Z]\w*\.(?=(?:{'|'.join(sections)})\b)"
        raise ConfigError(re.sub(owner, prefix, str(problem))) from problem


def _coerce(value: Any, hint: Any, key: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(value)
        raise ConfigError(f"{key} must be a list such as [1,10], got {value!r}")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    given = value
    if float in kinds and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-3 as text
    if isinstance(value, float) and LARGEST < abs(value) < math.inf:
        raise ConfigError(f"{key} must be at most {LARGEST:g}, got {given!r}")
    if type(value) in kinds:
        return value
    names = " or ".join("nothing" if k is types.NoneType else k.__name__ for k in kinds)
    raise ConfigError(f"{key} must be {names}, got {value!r}")
