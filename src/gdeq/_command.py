"""Ctrl-C while the `gdeq` command is still being imported ends it without a traceback."""

import os
import signal
import sys

# Of `python -m gdeq`, sys.argv is not set yet.
if (
    sys.orig_argv[1:3] == ["-m", "gdeq"]
    or os.path.basename(sys.argv[0] if sys.argv else "") == "gdeq"
):
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
