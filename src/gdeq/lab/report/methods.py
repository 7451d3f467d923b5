"""Which runs are repeats of one another, what their method is called, and its colour."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gdeq.lab.report.runs import Record, Run, number
from gdeq.options import count

Recipe = dict[str, str]

# In the order of the paper's Table 2.
TITLES = {"implicit": "Implicit", "jfb": "JFB", "npg": "NPG", "gdeq": "GDEQ"}
TITLES |= {"unrolled": "Unrolled"}
# The settings a method reads that its label does not tell.
UNTOLD = {"implicit": ("tol",), "jfb": (), "npg": (), "gdeq": ("max_refine",), "unrolled": ()}
# These make no other experiment: repeats, columns of the table, housekeeping.
ASIDE = {"seed", "device", "pretrain_steps", "pretrain_layers", "adapt.enabled"}
ASIDE |= {"measure_every", "log_every", "test_every", "checkpoint_seconds", "snapshots"}
# Times are compared only where all of these agree.
WORKLOAD = ("task", "data", "model.size", "batch_size", "precision", "device", "processes")
TOLD_AT_MOST = 3


def label(gradient: Record) -> str:
    """The paper's name where the settings are the paper's, else with what is different."""
    get, name = gradient.get, str(gradient.get("name")).lower()
    told = ""
    if name == "implicit":
        solver, steps = get("solver", "broyden"), get("max_iter", 20)
        if (solver, steps) != ("broyden", 20):
            told = f" ({solver}, {count(steps, 'step')})"
    elif name in ("npg", "unrolled"):
        steps, damping = get("steps", 5), get("damping", 0.5)
        if (steps, damping) != (5, 0.5):
            told = f" ({count(steps, 'step')}, damping {damping})"
    elif name == "gdeq" and get("tolerance") is not None:
        told = f" tolerance {get('tolerance')}"
    elif name in ("gdeq", "jfb") and get("refine"):
        told = f" refine {get('refine')}"
    return TITLES.get(name, str(get("name"))) + told


def label_of(run: Run) -> str:
    if not run.adaptive:
        return label(run.gradient)
    return f"{label({**run.gradient, 'refine': 0})} adaptive"  # the refinement is what is adapted


def vjps(gradient: Record) -> str:
    """Vector-Jacobian products of one backward pass, as far as the settings tell."""
    name = str(gradient.get("name")).lower()
    steps, most, refine, rest = (
        int(number(gradient.get(key)) or default)
        for key, default in (("steps", 5), ("max_iter", 20), ("refine", 0), ("max_refine", 10))
    )
    if name == "gdeq" and gradient.get("tolerance") is not None:  # one to measure the first w
        return f"≤ {rest + 1}"
    # Implicit: one to see where it starts, one for each step.
    known = {"npg": steps - 1, "implicit": f"≤ {most + 1}", "gdeq": refine, "jfb": refine}
    return str(known.get(name, "–"))


def rank(name: str) -> list[tuple[int, str]]:
    """Sorts labels as the paper's table does, variants behind their method, numbers by size."""
    known = list(TITLES)
    first = name.lower().split(" ")[0]
    place = known.index(first) if first in known else len(known)
    # "·" sorts behind every letter; a variant of GDEQ stands before "GDEQ refine 1".
    parts = re.split(r"(\d+)", name.replace("·", " "))
    return [(place, ""), *((int(p), "") if p.isdecimal() else (-1, p) for p in parts)]


def flatten(settings: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def recipe(run: Run) -> Recipe:
    """What must agree for two runs to be repeats, beside the method's label."""
    unread = ["gradient"] + ["adapt."] * (not run.adaptive)
    unread += ["solver.max_iter"] * run.adaptive  # `adapt.steps` takes its place
    if flatten(run.config).get("solver.name") != "broyden":
        unread.append("solver.step_bits")
    kept = {
        key: str(value)
        for key, value in flatten(run.config).items()
        if key not in ASIDE and not key.startswith(tuple(unread))
    }
    read = UNTOLD.get(run.method, tuple(key for key in run.gradient if key != "name"))
    kept |= {f"gradient.{key}": str(run.gradient[key]) for key in read if key in run.gradient}
    processes = run.summary.get("processes")
    facts = {"device": run.device, "processes": processes}
    return kept | {key: str(value) for key, value in facts.items() if value is not None}


def agree(one: Recipe, other: Recipe, keys: Iterable[str]) -> bool:
    """Equal where both say something; an unfinished run does not say everything."""
    return all(one[key] == other[key] for key in keys if key in one and key in other)


def varying(settings: list[Recipe]) -> list[str]:
    """The keys under which not all of those that have them hold the same."""
    keys = dict.fromkeys(key for kept in settings for key in kept)
    return [key for key in keys if len({kept[key] for kept in settings if key in kept}) > 1]


def row_labels(runs: list[Run]) -> tuple[dict[Path, str], str]:
    """Run → its method, with the settings by which it differs from most others; and those."""
    recipes = {run.path: recipe(run) for run in runs}
    for run in runs:
        if run.pretrained:  # one column for all of it, so two lengths of it need two rows
            for key in ("pretrain_steps", "pretrain_layers"):
                recipes[run.path][key] = str(run.config.get(key))
    usual: Recipe = {}
    keys = varying(list(recipes.values()))
    for key in keys:
        values = [own[key] for own in recipes.values() if key in own]
        ((most, many),) = Counter(values).most_common(1)
        usual |= {key: most} if many > len(values) / 2 else {}
    labels: dict[Path, str] = {}
    seen: dict[str, list[list[str]]] = {}
    for run in runs:
        told = recipes[run.path]
        own = [f"{k}={told[k]}" for k in keys if k in told and usual.get(k) != told[k]]
        name = label_of(run) + " · " * bool(own) + ", ".join(own[:TOLD_AT_MOST])
        if len(own) > TOLD_AT_MOST:
            name += f" and {len(own) - TOLD_AT_MOST} more"
        alike = seen.setdefault(name, [])  # recipes whose labels read alike after the cut
        if own not in alike:
            alike.append(own)
        labels[run.path] = name + f" #{alike.index(own) + 1}" * (alike.index(own) > 0)
    return labels, ", ".join(f"{key}={value}" for key, value in usual.items())


class Look(NamedTuple):
    """A colour, and a marker for those who see no colour."""

    colour: str
    marker: str


# Okabe and Ito's colours, which colour-blind readers tell apart; the yellow is darkened for white.
LOOKS = {
    "Implicit": Look("#d55e00", "o"),
    "JFB": Look("#555555", "s"),
    "NPG": Look("#009e73", "^"),
    "GDEQ": Look("#0072b2", "D"),
}
SPARE = [*map(Look, ("#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8b7d00"), "vXP*p")]


def looks(rows: Iterable[str], others: Iterable[str] = ()) -> dict[str, Look]:
    """One look for each label: a method's own for its first row, then the spare ones in turn.

    others: labels without a row (the similarity figure has them).
    """
    chosen: dict[str, Look] = {}
    spare = itertools.cycle(SPARE)
    for name in dict.fromkeys([*sorted(rows, key=rank), *sorted(others, key=rank)]):
        own = LOOKS.get(name) or LOOKS.get(name.split(" ")[0])
        free = own is not None and own not in chosen.values()
        chosen[name] = own if own is not None and (free or name in LOOKS) else next(spare)
    return chosen
