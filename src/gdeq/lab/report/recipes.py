"""Which runs are repeats of one another, and what to call those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdeq.lab.report import methods
from gdeq.lab.report.runs import Run

Recipe = dict[str, str]

# These do not make another experiment: repeats, the table's own columns, housekeeping.
ASIDE = {"seed", "device", "pretrain_steps", "pretrain_layers"}
ASIDE |= {"measure_every", "log_every", "test_every", "checkpoint_seconds", "snapshots"}
# A time is compared with another only where all of these agree.
WORKLOAD = ("task", "data", "model.size", "batch_size", "precision", "device", "processes")
TOLD_AT_MOST = 3


def flatten(settings: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def recipe(run: Run) -> Recipe:
    """What must agree for two runs to be repeats, beside the method's label."""
    kept = {
        key: str(value)
        for key, value in flatten(run.config).items()
        if key not in ASIDE and not key.startswith("gradient")
    }
    kept.pop("adapt.enabled", None)  # in the label
    if run.adaptive:
        kept.pop("solver.max_iter", None)  # not read: `adapt.steps` has them
    else:  # then its other settings are not read
        kept = {key: value for key, value in kept.items() if not key.startswith("adapt.")}
    if kept.get("solver.name") != "broyden":
        kept.pop("solver.step_bits", None)
    name = str(run.gradient.get("name")).lower()
    for key in methods.USED.get(name, tuple(run.gradient)):
        if key in run.gradient and key not in methods.TOLD and key != "name":
            kept[f"gradient.{key}"] = str(run.gradient[key])
    if run.device is not None:
        kept["device"] = str(run.device)
    if run.summary is not None and "processes" in run.summary:
        kept["processes"] = str(run.summary["processes"])
    return kept


def agree(one: Recipe, other: Recipe, keys: tuple[str, ...] | None = None) -> bool:
    """Equal where both say something; an unfinished run does not say everything."""
    shared = one.keys() & other.keys() & (one.keys() if keys is None else set(keys))
    return all(one[key] == other[key] for key in shared)


def varying(settings: list[Recipe]) -> list[str]:
    """The keys under which not all of those that have them hold the same."""
    keys = dict.fromkeys(key for kept in settings for key in kept)
    return [key for key in keys if len({kept[key] for kept in settings if key in kept}) > 1]


def row_labels(runs: list[Run]) -> dict[Path, str]:
    """Run → its method, with the settings by which it differs from most others here."""
    told, unsaid = _told(runs), usual(runs)
    labels: dict[Path, str] = {}
    seen: dict[str, list[list[str]]] = {}
    for run in runs:
        own = [f"{k}={v}" for k, v in told[run.path].items() if unsaid.get(k) != v]
        name = methods.label_of(run)
        if own:
            name += " · " + ", ".join(own[:TOLD_AT_MOST])
        if len(own) > TOLD_AT_MOST:
            name += f" and {len(own) - TOLD_AT_MOST} more"
        alike = seen.setdefault(name, [])  # recipes whose labels read alike after the cut
        if own not in alike:
            alike.append(own)
        labels[run.path] = f"{name} #{alike.index(own) + 1}" if alike.index(own) else name
    return labels


def usual(runs: list[Run]) -> Recipe:
    """The settings that most runs share but not all: a label need not repeat them."""
    told = list(_told(runs).values())
    found = {}
    for key in dict.fromkeys(key for own in told for key in own):
        values = [own[key] for own in told if key in own]
        most = max(values, key=values.count)
        if values.count(most) > len(values) / 2:
            found[key] = most
    return found


def usual_text(runs: list[Run]) -> str:
    return ", ".join(f"{key}={value}" for key, value in usual(runs).items())


def _told(runs: list[Run]) -> dict[Path, Recipe]:
    """Of each run's recipe, what is not the same in all."""
    recipes = {run.path: recipe(run) for run in runs}
    for run in runs:
        if run.pretrained:  # one column for all of it, so two lengths of it need two rows
            for key in ("pretrain_steps", "pretrain_layers"):
                recipes[run.path][key] = str(run.config.get(key))
    keys = varying(list(recipes.values()))
    return {path: {k: own[k] for k in keys if k in own} for path, own in recipes.items()}
