"""The steps of a training as CUDA graphs: one recording for each variant of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.graphs import Captured, Memory
from gdeq.fast.kernels.compiling import compile_ahead

MOST = 16  # recordings kept, the last used: they share memory, but not kernels
REHEARSALS = 4  # calls of a new variant at most: warm-up, then the recording


class Recordings:
    """Records and replays work.  Its ``way`` names the variant.

    enabled: if not, all work runs eagerly.
    shared: the recordings take turns, and share their memory.
    """

    def __init__(self, enabled: bool, shared: bool) -> None:
        self.enabled = enabled
        self.memory = Memory() if shared else None
        self.kept: dict[tuple[Any, ...], Captured] = {}
        self.gone: set[tuple[Any, ...]] = set()  # all ways that were ever recorded
        self.seconds = 0.0  # spent on rehearsals and recording

    def run(self, work: Callable[..., None], way: tuple[Any, ...], *inputs: Tensor) -> None:
        """Do the work on these inputs, by its recording if there is one."""
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
        """Compile and record a way that is new, then undo all its effects.

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
