"""What a gradient method is called, what it costs, and its colour on every figure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

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
SPARE = (
    *(Look("#cc79a7", "v"), Look("#56b4e9", "X"), Look("#e69f00", "P")),
    *(Look("#000000", "*"), Look("#8b7d00", "p")),
)


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
