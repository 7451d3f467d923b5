import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("training", "report")]

from training_fixtures import few_images, gdeq, zygote

__all__ = ["few_images", "gdeq", "zygote"]
