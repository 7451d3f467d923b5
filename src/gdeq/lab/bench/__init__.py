"""One training step, measured: ours, torchdeq's beside it, and where the time goes."""

from gdeq.lab.bench.subjects import CELLS, Setup, default_setup
from gdeq.lab.bench.table import BenchError, read_peers, run

__all__ = ["CELLS", "BenchError", "Setup", "default_setup", "read_peers", "run"]
