"""One process at a time trains in a run folder."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not a Unix: then there is no lock
    fcntl = None  # type: ignore[assignment]


class RunLock:
    """An advisory lock on the file ``lock``.  The system frees it when its holder dies.

    The file stays: were it deleted, two could hold a lock on two files of one name.
    """

    def __init__(self) -> None:
        self.file: IO[str] | None = None

    def take(self, run: Path) -> str | None:
        """Who holds it, if another does.  Where a file system has no locks, nobody ever does."""
        if self.file is not None or fcntl is None:
            return None
        file = None
        try:
            file = (run / "lock").open("a+")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert file is not None
            with file:
                file.seek(0)
                return file.read().strip() or "unknown"
        except OSError:
            if file is not None:
                file.close()
            return None
        self.file = file
        with contextlib.suppress(OSError):  # a full disk; whose lock it is, is only told
            file.truncate(0)
            file.write(f"{os.getpid()} on {platform.node()}")
            file.flush()
        return None

    def release(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None

    def __del__(self) -> None:
        self.release()
