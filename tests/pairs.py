"""Fewer combinations than all: each takes time in Triton's interpreter, or to be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one of each, in which any two values of two choices meet at least once."""
    rows = list(product(*(range(len(values)) for values in choices)))

    def met(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), 2))

    missing = set[tuple[tuple[int, int], ...]]().union(*map(met, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(met(row) & missing))
        missing -= met(best)
        chosen.append(tuple(values[i] for values, i in zip(choices, best, strict=True)))
    return chosen
