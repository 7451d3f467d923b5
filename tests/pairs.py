"""Fewer combinations than all, where kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import torch


def pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one of each, in which any two values of two choices meet at least once.

    All combinations on a GPU: there they cost nothing.
    """
    if torch.cuda.is_available():
        return list(product(*choices))
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
