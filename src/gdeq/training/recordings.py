"""The steps of a training as CUDA graphs: one recording for each way that a step can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdeq.capture import Captured
from gdeq.recording import Memory

MOST = 16  # kept, the last ones used: their memory is shared, their kernels are not


class Recordings:
    """enabled: else all work is done as it is.
    shared: they take turns, and work in the same memory.
    """

    def __init__(self, enabled: bool, shared: bool) -> None:
        self.enabled = enabled
        self.memory = Memory() if shared else None
        self.kept: dict[tuple[Any, ...], Captured] = {}
        self.seconds = 0.0  # that recording took, in which nothing was trained

    def run(self, work: Callable[..., None], way: tuple[Any, ...], *inputs: Tensor) -> None:
        """The work on these inputs; recorded once it has been done this way a few times."""
        if not self.enabled:
            work(*inputs)
            return
        made = self.of(work, *way)
        before = made.recording_seconds
        made(*inputs)
        self.seconds += made.recording_seconds - before

    def of(self, work: Callable[..., None], *way: Any) -> Captured:
        key = (work.__name__, *way)
        made = self.kept.pop(key) if key in self.kept else self._new(work)
        self.kept[key] = made  # in the order of their last use
        if len(self.kept) > MOST:
            del self.kept[next(iter(self.kept))]
        return made

    def _new(self, work: Callable[..., None]) -> Captured:
        # A step that is no graph yet takes several times as long.  Libraries have started up in
        # those of the first way: the others need one alone, to see that nothing waits.
        started = any(name == work.__name__ for name, *_ in self.kept)
        warmup = 3 if self.memory is None else 1 if started else 2
        return Captured(work, warmup, self.memory)
