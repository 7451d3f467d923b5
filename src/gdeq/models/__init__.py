"""Cells and networks.  `gdeq.models.mdeq.mdeq("large")` builds a multiscale DEQ by name."""

from gdeq.models.mdeq import MDEQ
from gdeq.models.mdeq_cell import MDEQCell
from gdeq.models.mdeq_config import MDEQConfig
from gdeq.models.mdeq_start import MDEQStart

__all__ = ["MDEQ", "MDEQCell", "MDEQConfig", "MDEQStart"]
