"""The fast engine: what runs on a GPU.  The core knows it through `gdeq.engine.choose` alone."""
