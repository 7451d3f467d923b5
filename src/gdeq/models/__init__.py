"""Models: cells and networks.  `gdeq.models.mdeq.mdeq("large")` builds a multiscale DEQ by name."""

from gdeq.models import mdeq
from gdeq.models.mdeq import MDEQ, MDEQCell, MDEQConfig

__all__ = ["MDEQ", "MDEQCell", "MDEQConfig", "mdeq"]
