"""The steps of a training as CUDA graphs: one recording for each way that a step can go."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from gdeq.fast.capture import Captured
from gdeq.fast.recording import Memory
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import Config

MOST = 16  # kept, the last ones used: their memory is shared, their kernels are not
# Ways that a step has gone in this process: all their kernels are compiled and loaded.
_gone: set[tuple[Any, ...]] = set()


def kind_of(config: Config) -> Config:
    """What two runs whose steps have the same kernels, and take as long, have in common."""
    return configs.replace(
        config,
        seed=0,
        epochs=1,
        pretrain_steps=min(1, config.pretrain_steps),
        snapshots=(),
        log_every=1,
        test_every=1,
        checkpoint_seconds=0.0,
    )


class Recordings:
    """enabled: else all work is done as it is.
    shared: they take turns, and work in the same memory.
    kind: those of trainings of one kind have the same kernels.
    """

    def __init__(self, enabled: bool, shared: bool, kind: Hashable) -> None:
        self.enabled, self.kind = enabled, kind
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
        if made.reason is None:  # else it cannot be recorded, and who tries must look first
            _gone.add((self.kind, work.__name__, *way))

    def of(self, work: Callable[..., None], *way: Any) -> Captured:
        key = (work.__name__, *way)
        made = self.kept.pop(key) if key in self.kept else self._new(work, key)
        self.kept[key] = made  # in the order of their last use
        if len(self.kept) > MOST:
            del self.kept[next(iter(self.kept))]
        return made

    def _new(self, work: Callable[..., None], key: tuple[Any, ...]) -> Captured:
        # A step that is no graph yet takes several times as long.  In the first of the first way
        # the optimiser's state is made, and is waited for.  The other ways need one alone, to
        # compile and to see that nothing waits; none where another training has gone that way.
        started = any(name == work.__name__ for name, *_ in self.kept)
        known = (self.kind, *key) in _gone
        warmup = 3 if self.memory is None else 2 if not started else 0 if known else 1
        return Captured(work, warmup, self.memory)
