"""`load`: a data set by name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import torch

from gdeq.lab.data.bsd import BSD
from gdeq.lab.data.cifar10 import CIFAR10
from gdeq.lab.data.dataset import Dataset, make
from gdeq.lab.data.digits import Digits
from gdeq.lab.data.errors import DataError
from gdeq.lab.data.recipe import Source
from gdeq.lab.data.sudoku import Sudoku
from gdeq.lab.data.text import PENN_TREEBANK, WIKITEXT2, Enwik8

ALL = (Digits(), CIFAR10(), BSD(), Sudoku(), PENN_TREEBANK, WIKITEXT2, Enwik8())
SETS: dict[str, Source[Any]] = {source.name: source for source in ALL}
NAMES = tuple(SETS)


def load(
    name: str = "digits",
    root: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
) -> Dataset:
    """The data set, whole and checked, on `device`.

    name: "digits" (comes with scikit-learn) or "cifar10" (`prepare` gets it).
    root: where the data sets are; by default $GDEQ_DATA, else ./data.
    """
    found = find(name)
    return make(found.name, found.load(data_root(root)), found.classes, device)


def find(name: str) -> Source[Any]:
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(str(name).lower(), SETS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"there is no data set {name!r}{hint} (there are: {', '.join(SETS)})")


def terms(name: str) -> str:
    """Under what terms it may be used, where that must be said."""
    return getattr(find(name), "terms", "")


def data_root(root: str | os.PathLike[str] | None) -> Path:
    return Path(root if root is not None else os.environ.get("GDEQ_DATA") or "data").expanduser()
