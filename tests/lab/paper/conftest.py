from training_fixtures import few_images, gdeq, zygote

__all__ = ["few_images", "gdeq", "zygote"]
