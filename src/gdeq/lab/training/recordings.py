"""The steps of a training as CUDA graphs: one recording for each way that a step can go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.graphs import Captured, Memory
from gdeq.fast.kernels.compiling import compile_ahead

MOST = 16  # kept, the last ones used: their memory is shared, their kernels are not
REHEARSALS = 4  # of a new way at most: warm-up, then the recording


class Recordings:
    """enabled: else all work is done as it is.
    shared: they take turns, and work in the same memory.
    """

    def __init__(self, enabled: bool, shared: bool) -> None:
        self.enabled = enabled
        self.memory = Memory() if shared else None
        self.kept: dict[tuple[Any, ...], Captured] = {}
        self.gone: set[tuple[Any, ...]] = set()  # ways that were recorded, kept or not
        self.seconds = 0.0  # spent on rehearsals and recording, in which nothing was trained

    def run(self, work: Callable[..., None], way: tuple[Any, ...], *inputs: Tensor) -> None:
        """The work on these inputs, by its recording where there is one."""
        if not self.enabled:
            work(*inputs)
            return
        made = self._of(work, way)
        before = made.recording_seconds
        made(*inputs)
        self.seconds += made.recording_seconds - before

    def rehearse(
        self,
        work: Callable[..., None],
        way: tuple[Any, ...],
        changed: Callable[[], Iterable[Tensor]],
        *inputs: Tensor,
    ) -> None:
        """Of a way that is new: compile and record it, and leave all as it was.

        So every step of a training is a replay, which takes as long as any other: what a GPU
        compiles and what is recorded is in `seconds` and in no step.

        changed: the tensors that the work changes; those that it makes itself begin as zeros.
        """
        if not self.enabled or (work.__name__, *way) in self.kept:
            return
        gpus = [inputs[0].device] if inputs[0].is_cuda else []
        wait_for(gpus)
        start, before = time.perf_counter(), self.seconds
        saved = [(tensor, tensor.detach().clone()) for tensor in changed()]
        if gpus and (work.__name__, *way) not in self.gone:
            compile_ahead(lambda: work(*inputs))
        made = self._of(work, way)
        with torch.random.fork_rng(gpus):
            for _ in range(REHEARSALS):
                if made.graph is None and made.reason is None:
                    self.run(work, way, *inputs)
        with torch.no_grad():
            known = {id(tensor) for tensor, _ in saved}
            for tensor in changed():
                if id(tensor) not in known:
                    tensor.zero_()
            for tensor, value in saved:
                tensor.copy_(value)
        torch.clear_autocast_cache()  # its copies are of the rehearsal's weights
        wait_for(gpus)
        self.seconds = before + time.perf_counter() - start

    def _of(self, work: Callable[..., None], way: tuple[Any, ...]) -> Captured:
        key = (work.__name__, *way)
        made = self.kept.pop(key) if key in self.kept else self._new(work, key)
        self.kept[key] = made  # in the order of their last use
        if len(self.kept) > MOST:
            del self.kept[next(iter(self.kept))]
        return made

    def _new(self, work: Callable[..., None], key: tuple[Any, ...]) -> Captured:
        # In the first of the first way the optimiser's state is made, and is waited for.  The other
        # ways need one alone, to compile and to see that nothing waits; one that was recorded
        # before and dropped since needs none.
        started = any(name == work.__name__ for name, *_ in self.kept)
        warmup = 3 if self.memory is None else 2 if not started else int(key not in self.gone)
        self.gone.add(key)
        return Captured(work, warmup, self.memory)


def wait_for(gpus: list[torch.device]) -> None:
    for device in gpus:
        torch.cuda.synchronize(device)
