"""One process at a time trains in a run folder, and the folder stays where it is."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import IO

from gdeq.lab import files

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
        """Take it.  Returns who holds it if another does, never where files cannot be locked."""
        if fcntl is None:
            return None
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            handle = files.open_file(run / "lock", os.O_RDWR | os.O_CREAT)
            file = opened.enter_context(os.fdopen(handle, "r+", errors="replace"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(200).strip() or "unknown"
            self.file = file
            opened.pop_all()  # it stays open
            file.truncate(0)  # on a full disk the lock holds, without a name
            file.write(f"{os.getpid()} on {platform.node()}")
            file.flush()
        return None

    def lost(self, run: Path) -> bool:
        """Whether the folder that was locked is gone or was replaced."""
        if self.file is None:
            return not run.is_dir()
        try:
            return not os.path.samestat(os.fstat(self.file.fileno()), (run / "lock").lstat())
        except OSError:
            return True

    def release(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None
