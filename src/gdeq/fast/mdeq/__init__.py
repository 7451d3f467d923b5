"""The accelerated form of `gdeq.models.mdeq`: prepared weights, merged convolutions, streams.

A model asks `runner` for it, one line in `MDEQ.forward` and one in `MDEQCell.forward`, and knows
nothing else of it.
"""

from gdeq.fast.mdeq.run import runner

__all__ = ["runner"]
