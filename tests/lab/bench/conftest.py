from training_fixtures import gdeq

__all__ = ["gdeq"]
