"""Data sets by name, and mini-batches of them on the device."""

from gdeq.lab.data.augment import Augment
from gdeq.lab.data.batches import Batches, ImageBatches
from gdeq.lab.data.dataset import Dataset
from gdeq.lab.data.errors import DataError
from gdeq.lab.data.preparation import prepare
from gdeq.lab.data.recipe import Progress
from gdeq.lab.data.sets import NAMES, load, terms

__all__ = [
    "NAMES",
    "Augment",
    "Batches",
    "DataError",
    "Dataset",
    "ImageBatches",
    "Progress",
    "load",
    "prepare",
    "terms",
]
