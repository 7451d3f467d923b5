"""One training step, measured: ours, torchdeq's beside it, and where the time goes."""

from gdeq.lab.bench.steps import Setup, default_setup
from gdeq.lab.bench.table import BenchError, read_peers, run

__all__ = ["BenchError", "Setup", "default_setup", "read_peers", "run"]
