import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))

from training_fixtures import gdeq, zygote

__all__ = ["gdeq", "zygote"]
