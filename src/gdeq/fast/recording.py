"""CUDA graphs of work whose solves may end early.

A graph is a fixed list of kernels; the number of a solver's steps is not fixed.  So a recording is
cut where a solve begins to iterate:

    [up to the first iterate]  [judge an iterate][go on to the next]  [the rest]
                               `--- played until all are done ---´

(several times where samples leave the batch, `gdeq.narrowing`: the two in the middle are then there
for each size, and before them what makes the batch smaller.)

Between the two in the middle the device leaves a flag for the host, who reads it and starts the
next play, or the rest, while the device works on the second: no evaluation too many, and no wait.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdeq.fast import streams

# Not context variables: the backward pass runs in a thread of its own.
_rehearsing = [False]
_recordings: list[Recording] = []


def recording(device: torch.device) -> bool:
    """Whether the work under way is, or will be, part of a graph, where nothing can be read."""
    if device.type != "cuda":
        return False
    return _rehearsing[-1] or torch.cuda.is_current_stream_capturing()


def rehearsing() -> bool:
    return _rehearsing[-1]


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Behave as in a recording without being one."""
    _rehearsing.append(True)
    try:
        yield
    finally:
        _rehearsing.pop()


@contextlib.contextmanager
def may_wait(device: torch.device) -> Iterator[None]:
    """What waits for the device here is no part of what will be recorded."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def current() -> Recording | None:
    """The recording under way, where it can be cut: in its own thread, on its own stream."""
    if not _recordings or not torch.cuda.is_current_stream_capturing():
        return None
    found = _recordings[-1]
    here = torch.cuda.current_stream() == found.memory.stream
    return found if here and found.thread == threading.get_ident() else None


class Memory:
    """What several recordings may work in, if nothing that one leaves there is read after another
    has been played.  The allocator gives memory again only on the stream that it was taken on.

    stream: of the recordings.
    aside: of the steps before one.  On a new stream each of them would ask the driver for all its
        memory again, which takes longer than the step.
    """

    def __init__(self) -> None:
        self.used = False  # a recording has worked in it

    @functools.cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        return streams.new_main(torch.device("cuda", torch.cuda.current_device()))

    @functools.cached_property
    def aside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def make_room(self) -> None:
        """The allocator gives back what it keeps for later.  Not where others have recorded here
        and the device has much left: the next one needs little, and steps aside want theirs."""
        free, _ = torch.cuda.mem_get_info()
        if not self.used or free < torch.cuda.memory_reserved():
            torch.cuda.empty_cache()
        self.used = True


class Recording:
    """Graphs that are played one after the other; some of them repeatedly.

    memory: shared with others.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.thread = threading.get_ident()
        self.parts: list[torch.cuda.CUDAGraph | Repeated] = []
        self.open: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """What is done inside is recorded, not done."""
        torch.cuda.synchronize()
        self.memory.make_room()
        _recordings.append(self)
        try:
            with torch.cuda.stream(self.memory.stream):
                self._begin()
                try:
                    yield
                finally:
                    self.parts.append(self._end())
        finally:
            _recordings.pop()

    def _begin(self) -> None:
        self.open = torch.cuda.CUDAGraph()
        # The backward pass runs in threads of its own: only this thread's mistakes count.
        self.open.capture_begin(pool=self.memory.pool, capture_error_mode="thread_local")

    def _end(self) -> torch.cuda.CUDAGraph:
        assert self.open is not None
        graph, self.open = self.open, None
        graph.capture_end()
        return graph

    def repeat(
        self,
        judge: Callable[[], None],
        go_on: Callable[[], None],
        unfinished: Tensor,
        most: int,
        every: int,
        changes: Sequence[tuple[int, Callable[[], Any]]] = (),
    ) -> None:
        """Play both until ``unfinished``, a number that ``judge`` writes, is 0.

        At most so often, and looking after each ``every`` times.
        They must free no memory from before them: the next play would find it overwritten.

        changes: with how few unfinished (fewer in each) what is to be done once; from there on,
            what is played is what both do after it.
        """
        self.parts.append(self._end())
        stages = [Stage(self._graph(judge), self._graph(go_on))]
        for few, change in changes:
            once = self._graph(change)
            stages.append(Stage(self._graph(judge), self._graph(go_on), once, few))
        self.parts.append(Repeated(stages, unfinished, most, every))
        self._begin()

    def _graph(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        self._begin()
        work()
        return self._end()

    def replay(self) -> None:
        for part in self.parts:
            part.replay()


class Stage(NamedTuple):
    judge: torch.cuda.CUDAGraph
    go_on: torch.cuda.CUDAGraph
    change: torch.cuda.CUDAGraph | None = None  # played when it begins; none for the first
    few: int = 0  # unfinished when it begins


class Repeated:
    def __init__(self, stages: list[Stage], unfinished: Tensor, most: int, every: int) -> None:
        self.stages = stages
        self.unfinished, self.most, self.every = unfinished, most, every
        self.seen = torch.ones(1, dtype=unfinished.dtype).pin_memory()
        self.read = torch.cuda.Event()

    def replay(self) -> None:
        stage, *following = self.stages
        for done in range(1, self.most + 1):
            looks = done % self.every == 0 and done < self.most
            stage.judge.replay()
            if looks:
                self.seen.copy_(self.unfinished, non_blocking=True)
                self.read.record()
            stage.go_on.replay()
            if looks:
                self.read.synchronize()
                left = self.seen.item()
                if not left:
                    return
                while following and left <= following[0].few:
                    stage = following.pop(0)
                    if stage.change is not None:
                        stage.change.replay()
