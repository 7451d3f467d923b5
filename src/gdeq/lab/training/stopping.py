"""Being asked to stop by a signal: the step ends, is saved, and all stops."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A signal came; the state was saved first."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class StopRequest:
    """While it is open, SIGTERM and SIGINT are noted in ``caught``; a repeated one stops at once.

    patience: seconds for which repeats are ignored.  `torchrun` passes on what its workers have
        already heard from the terminal, `timeout` signals the process and then its group; taken
        for impatience, the echo would cost the save.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience
        self.caught: int | None = None
        self.caught_at = 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.caught is None:
            self.caught, self.caught_at = number, time.monotonic()
        elif time.monotonic() - self.caught_at >= self.patience:
            raise KeyboardInterrupt
