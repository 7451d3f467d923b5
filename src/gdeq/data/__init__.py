"""Data sets by name, and mini-batches of them on the device."""

from gdeq.data.augment import Augment
from gdeq.data.batches import Batches
from gdeq.data.dataset import Dataset
from gdeq.data.errors import DataError
from gdeq.data.preparation import prepare
from gdeq.data.recipe import Progress
from gdeq.data.sets import NAMES, load

__all__ = ["NAMES", "Augment", "Batches", "DataError", "Dataset", "Progress", "load", "prepare"]
