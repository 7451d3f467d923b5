from training_fixtures import gdeq, zygote

__all__ = ["gdeq", "zygote"]
