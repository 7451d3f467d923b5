"""One training step, measured: ours, torchdeq's beside it, and where the time goes."""

from gdeq.bench.steps import Setup, default_setup
from gdeq.bench.table import run

__all__ = ["Setup", "default_setup", "run"]
