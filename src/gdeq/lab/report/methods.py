"""What a gradient method is called, what it costs, and its colour on every figure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gdeq.lab.report.runs import Record, Run, number
from gdeq.options import count

# In the order of the paper's Table 2.
TITLES = {
    "implicit": "Implicit",
    "jfb": "JFB",
    "npg": "NPG",
    "gdeq": "GDEQ",
    "unrolled": "Unrolled",
}
# The settings that each of them reads, and of these the ones that its label tells.
USED = {
    "implicit": ("solver", "max_iter", "tol"),
    "jfb": ("refine",),
    "npg": ("steps", "damping"),
    "gdeq": ("refine", "tolerance", "max_refine"),
    "unrolled": ("steps", "damping"),
}
TOLD = ("solver", "max_iter", "steps", "damping", "refine", "tolerance")


def label(gradient: Record) -> str:
    """The paper's name where the settings are the paper's, else what is different."""
    name = str(gradient.get("name")).lower()
    title = TITLES.get(name, str(gradient.get("name")))
    steps, damping = gradient.get("steps", 5), gradient.get("damping", 0.5)
    if name == "gdeq" and gradient.get("tolerance") is not None:
        return f"{title} tolerance {gradient['tolerance']}"
    if name in ("gdeq", "jfb") and gradient.get("refine"):
        return f"{title} refine {gradient['refine']}"
    if name == "implicit":
        solver, limit = gradient.get("solver", "broyden"), gradient.get("max_iter", 20)
        usual = (solver, limit) == ("broyden", 20)
        return title if usual else f"{title} ({solver}, {count(limit, 'step')})"
    if name in ("npg", "unrolled") and (steps, damping) != (5, 0.5):
        return f"{title} ({count(steps, 'step')}, damping {damping})"
    return title


def label_of(run: Run) -> str:
    if not run.adaptive:
        return label(run.gradient)
    return f"{label({**run.gradient, 'refine': 0})} adaptive"  # how much is what was adapted


def vjps(gradient: Record) -> str:
    """Vector-Jacobian products of one backward pass, as far as the settings tell."""
    name = str(gradient.get("name")).lower()
    if name == "npg":
        return str(int(number(gradient.get("steps")) or 5) - 1)
    if name == "implicit":  # one to see where it starts, one for each step
        return f"≤ {int(number(gradient.get('max_iter')) or 20) + 1}"
    if name == "gdeq" and gradient.get("tolerance") is not None:  # and one more to fall back
        return f"≤ {int(number(gradient.get('max_refine')) or 10) + 2}"
    if name in ("gdeq", "jfb"):
        return str(int(number(gradient.get("refine")) or 0))
    return "–"


def rank(name: str) -> list[tuple[int, str]]:
    """Sorts labels as the paper's table does, variants behind their method, numbers by size."""
    known = list(TITLES)
    first = name.lower().split(" ")[0]
    place = known.index(first) if first in known else len(known)
    # "·" sorts behind every letter; a variant of GDEQ stands before "GDEQ refine 1".
    parts = re.split(r"(\d+)", name.replace("·", " "))
    return [(place, ""), *((int(p), "") if p.isdecimal() else (-1, p) for p in parts)]


@dataclass(frozen=True)
class Look:
    """A colour on white, its lighter twin on black, and a marker for those who see no colour."""

    light: str
    dark: str
    marker: str


# Told apart under the three kinds of colour blindness (tests/report/test_report_colours.py).
LOOKS = {
    "implicit": Look("#5c4d56", "#cdd7df", "o"),
    "jfb": Look("#a98f1c", "#dd9819", "s"),
    "npg": Look("#118645", "#3ba273", "^"),
    "gdeq": Look("#233dae", "#35d0ff", "D"),
}
SPARE = (
    Look("#c556a4", "#dd5fc6", "v"),
    Look("#783504", "#fe536e", "X"),
    Look("#7c19ff", "#bc6afa", "P"),
    Look("#1d97f1", "#9effb5", "*"),
    Look("#75247f", "#752efd", "p"),
    Look("#829585", "#896104", "<"),
)


def looks(rows: Iterable[str], others: Iterable[str] = ()) -> dict[str, Look]:
    """One look for each label: a method's own for its first row, then the spare ones in turn.

    others: labels without a row (the similarity figure has them).  A plain method keeps its own.
    """
    chosen: dict[str, Look] = {}
    spare = 0
    plain = set(TITLES.values())
    for name in [*sorted(dict.fromkeys(rows), key=rank), *sorted(set(others), key=rank)]:
        if name in chosen:
            continue
        own = LOOKS.get(name.lower().split(" ")[0])
        if own is None or (own in chosen.values() and name not in plain):
            own, spare = _spare(spare), spare + 1
        chosen[name] = own
    return chosen


def _spare(index: int) -> Look:
    """When the colours begin again, the markers do not match them as before."""
    turn, place = divmod(index, len(SPARE))
    return replace(SPARE[place], marker=SPARE[(place + turn) % len(SPARE)].marker)
