"""The steps of a training as CUDA graphs: one recording for each way that a step can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdeq.capture import Captured, capture
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
        # Of ways that take turns, the fewest steps that are no graph yet.
        made: Captured = capture(work, warmup=2 if self.memory else 3, memory=self.memory)
        return made
