"""Everything behind the `gdeq` command: data sets, training, reports, the paper's experiment."""
