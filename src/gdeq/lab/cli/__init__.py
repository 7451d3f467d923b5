"""The command line: thin; the work is in `training`, `report` and `data`.

Each command imports what it needs: `gdeq --help` waits for none of it.
"""

from gdeq.lab.cli import training  # isort: skip (commands are listed in this order)
from gdeq.lab.cli import measuring
from gdeq.lab.cli.shared import app

__all__ = ["app", "measuring", "training"]
