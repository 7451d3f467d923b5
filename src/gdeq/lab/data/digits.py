"""The digits that come with scikit-learn: 1,797 real grey images of 8 × 8, no download.

The split is fixed: within each class, `numpy.random.RandomState(0)` permutes the images (class 0
first), and the first of them go to the test set, 360 in all, shared in proportion to the classes.
Both parts keep the order of the original.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gdeq.lab.data.dataset import Arrays
from gdeq.lab.data.errors import DataError
from gdeq.lab.data.recipe import Source

TEST = 360


class Digits(Source[Arrays]):
    name = "digits"
    classes = tuple(map(str, range(10)))

    def load(self, root: Path) -> Arrays:
        try:
            datasets = importlib.import_module("sklearn.datasets")  # slow, and only here
        except ImportError as error:
            raise DataError("digits come with scikit-learn: pip install scikit-learn") from error
        images, labels = datasets.load_digits(return_X_y=True)
        # 0..16 becomes 0..255, as in every other set; the 17 levels stay apart.
        x = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        y = labels.astype(np.uint8)
        test = held_out(y)
        return Arrays(x[~test], y[~test], x[test], y[test])


def held_out(y: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which samples are the test set's."""
    random = np.random.RandomState(0)  # its stream is frozen by NumPy's policy
    counts = np.bincount(y)
    exact = counts * TEST / len(y)
    share = np.floor(exact).astype(int)
    # Largest remainders: the shares add up to TEST.
    missing = TEST - share.sum()
    share[np.argsort(share - exact, kind="stable")[:missing]] += 1
    chosen = np.zeros(len(y), dtype=bool)
    for label, number in enumerate(share):
        members = np.flatnonzero(y == label)
        chosen[random.permutation(members)[:number]] = True
    return chosen
