"""`capture`: a whole training step as one CUDA graph.

A step on a GPU is thousands of small kernels, and Python takes longer to launch them than the GPU
to run them.  A CUDA graph records them once and launches them all at once:

    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device="cuda"), fused=True)

    @gdeq.capture
    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in batches:
        loss = step(x, y)

The recording repeats what the *device* did, with new inputs.  What Python did (counting, printing,
choosing a learning rate) is not repeated: keep it outside the step, and pass whatever changes as a
tensor.

With Triton, a forward solve by `Broyden` (all its memory, full steps) or `Anderson` with a
tolerance still ends when all samples are done.  Other solvers, and those in the backward pass
(`Implicit`, `GDEQ(tolerance=...)`), run to their ``max_iter`` with the finished samples frozen.

A graph is a fixed list of operations, and the number of a solver's steps is not fixed.  So a
recording is cut where a solve begins to iterate:

    [up to the first iterate]  [judge an iterate][go on to the next]  [the rest]
                               `--- played until all are done ---´

Between the two in the middle the device leaves a flag for the host, who reads it and starts the
next play, or the rest, while the device works on the second: no evaluation is wasted, and the
device never waits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gdeq.context import hidden
from gdeq.fast import streams

# Not a context variable: the backward pass runs in a thread of its own.
_recordings: list[Recording] = []

ADVICE = (
    "A captured step must not read values from the device (.item(), bool(tensor), printing a "
    "tensor), as create_graph=True and line searches do, nor change shapes. Give the optimiser "
    "fused=True or capturable=True, and keep a changing learning rate in a tensor"
)


class CaptureWarning(UserWarning):
    """A captured step runs without a CUDA graph; the message says why.

    Examples:
        >>> import torch, gdeq, warnings
        >>> step = gdeq.capture(lambda x: x + 1)
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     y = step(torch.zeros(2))
        >>> str(told[0].message)
        '<lambda> runs without a CUDA graph: its inputs are not on a CUDA device'
    """


class Captured:
    """A step that records itself; see `capture`.

    warmup: 0 where a step with the same kernels has been made in this process.
    """

    def __init__(self, step: Callable[..., Any], warmup: int, memory: Memory | None) -> None:
        functools.update_wrapper(self, step)
        self.step, self.warmup = step, warmup
        self.memory = Memory() if memory is None else memory
        self.recording_seconds = 0.0  # in which the device did nothing
        self.reset()

    def reset(self) -> None:
        """Forget the recording, so that the next calls make a new one.

        Needed after a change of anything but the values of tensors.  A step that could not be
        recorded is tried again.
        """
        self.reason: str | None = None  # why there is no graph, once that is known
        self._warned = False
        self.graph: Recording | None = None
        self.signature: list[Any] | None = None  # what must stay for the recording to be used
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: Any = None
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> Any:
        if self.reason is None:
            self._check(inputs)
        if self.reason is not None:
            return self.step(*inputs)
        with torch.cuda.device(inputs[0].device):  # where streams and graphs are made
            return self._on_device(*inputs)

    def _on_device(self, *inputs: Tensor) -> Any:
        signature = [(x.shape, x.dtype, x.device, x.stride()) for x in inputs]
        if self.signature is None:
            self.signature = signature
        if signature != self.signature:
            self._warn_once(
                "inputs of another shape, dtype or device than the first ones: these calls run "
                "without the graph (leave out the smaller last batch, or pad it)"
            )
            return self.step(*inputs)
        self.calls += 1
        if self.calls <= self.warmup:
            return self._beside(inputs, listen=self.calls == self.warmup)
        if self.graph is None and not self._record(inputs):
            # Without a reason it is tried again: it had no eager step before it, but now has one.
            return self.step(*inputs) if self.reason else self._beside(inputs, listen=True)
        assert self.graph is not None
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        return pytree.tree_map(_copy, self.outputs)

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        if not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError(
                "a captured step takes only tensors (a number would be frozen into the recording)"
            )
        if not inputs or not all(x.is_cuda for x in inputs):
            self._give_up("its inputs are not on a CUDA device")
        elif len({x.device for x in inputs}) > 1:
            self._give_up("its inputs are on several CUDA devices")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        name = getattr(self.step, "__name__", "step")
        warnings.warn(f"{name} runs without a CUDA graph: {reason}", CaptureWarning, stacklevel=4)

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, CaptureWarning, stacklevel=3)

    def _beside(self, inputs: tuple[Tensor, ...], listen: bool) -> Any:
        """A real step on a stream of its own, as libraries must start up before a recording.

        listen: the last one before the recording.  A step that waits for the device cannot be
        recorded, and an attempt would leave PyTorch's random generator unusable: look first.
        """
        here, aside = torch.cuda.current_stream(), self.memory.aside
        aside.wait_stream(here)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard, torch.cuda.stream(aside):
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn" if listen else before)
                with hidden() if listen else contextlib.nullcontext():
                    outputs = self.step(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        here.wait_stream(aside)
        waits = [w for w in heard if "synchronizing" in str(w.message)]
        for other in heard:
            if other not in waits:
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        if waits and listen:
            place = f"{waits[0].filename}:{waits[0].lineno}"
            self._give_up(f"it waits for the device, first at {place}.  {ADVICE}")
        return outputs

    def _record(self, inputs: tuple[Tensor, ...]) -> bool:
        torch.cuda.synchronize()  # the steps before this one are not part of it
        start = time.perf_counter()
        try:
            return self._try_to_record(inputs)
        finally:
            self.recording_seconds += time.perf_counter() - start

    def _try_to_record(self, inputs: tuple[Tensor, ...]) -> bool:
        self.inputs = tuple(x.clone() for x in inputs)
        gc.collect()
        # Autocast's copies of the weights are made once for all that follows.  One from before the
        # recording would be played again for ever, one from within it would be used outside.
        torch.clear_autocast_cache()
        recording = Recording(self.memory)
        try:
            with recording.record():
                self.outputs = self.step(*self.inputs)
        except Exception as problem:
            _forget_failed_capture()
            if not self.warmup:
                self.warmup = self.calls
                return False
            first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            self._give_up(f"it could not be recorded ({first}).  {ADVICE}")
            return False
        finally:
            torch.clear_autocast_cache()
        self.graph = recording
        return True


def _forget_failed_capture() -> None:
    """A capture that fails leaves the random generator in capture mode; one that works ends it."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device="cuda")
    torch.cuda.synchronize()


def capture(
    step: Callable[..., Any] | None = None, *, warmup: int = 3, memory: Memory | None = None
) -> Any:
    """Run a function of tensors as a CUDA graph: record it once, then replay it.

    The first ``warmup`` calls run eagerly and count as ordinary training steps; the next call is
    recorded.  Returned tensors are copies, so they stay valid after the next call.  On a CPU, or
    if recording fails, the function runs eagerly and a `CaptureWarning` says why.  After a change
    of anything but tensor values, such as another solver, call ``reset()`` to record again.

    warmup: how many calls run eagerly first; at least 2.
    memory: a `gdeq.fast.graphs.Memory` that several captured steps share if they run in turns.
        A step may read only the copies that another one returned, not its other tensors.

    Examples:
        >>> import torch, gdeq
        >>> deq = gdeq.DEQ(torch.nn.Bilinear(4, 4, 4))
        >>> @gdeq.capture  # on a GPU, a graph from the fourth call on
        ... def step(x):
        ...     loss = deq(x).square().mean()
        ...     loss.backward()
        ...     return loss
    """
    if step is None:
        return functools.partial(capture, warmup=warmup, memory=memory)
    if not callable(step):
        raise TypeError(f"capture takes a function of tensors, got {type(step).__name__}")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 2:
        raise ValueError(f"warmup must be an integer of at least 2, got {warmup!r}")
    return Captured(step, warmup, memory)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def current() -> Recording | None:
    """The recording under way, where it can be cut: in its own thread, on its own stream."""
    if not _recordings or not torch.cuda.is_current_stream_capturing():
        return None
    found = _recordings[-1]
    here = torch.cuda.current_stream() == found.memory.stream
    return found if here and found.thread == threading.get_ident() else None


class Memory:
    """Device memory and streams that several recordings share.

    That is safe if nothing that one of them leaves there is read after another was played.

    stream: of the recordings.  The allocator reuses memory only on the stream it was taken on.
    aside: of the steps before a recording.  On a new stream each of them would ask the driver for
        all its memory again, which takes longer than the step.
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
        """Make the allocator give back what it keeps for later.

        Not where others have recorded here and much is left on the device: the next recording
        needs little, and the steps before it would have to ask for theirs again.
        """
        free, _ = torch.cuda.mem_get_info()
        if not self.used or free < torch.cuda.memory_reserved():
            torch.cuda.empty_cache()
        self.used = True


class Recording:
    """Graphs that are played one after the other; some of them repeatedly."""

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
    ) -> None:
        """Play both until ``unfinished``, a number that ``judge`` writes, is 0.

        At most so often, and looking after each ``every`` times.
        They must free no memory from before them: the next play would find it overwritten.
        """
        self.parts.append(self._end())
        graphs = self._graph(judge), self._graph(go_on)
        self.parts.append(Repeated(*graphs, unfinished, most, every))
        self._begin()

    def _graph(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        self._begin()
        work()
        return self._end()

    def replay(self) -> None:
        for part in self.parts:
            part.replay()


@dataclass
class Repeated:
    """Two graphs that are played in turn until nothing is left to do."""

    judge: torch.cuda.CUDAGraph
    go_on: torch.cuda.CUDAGraph
    unfinished: Tensor
    most: int
    every: int

    def __post_init__(self) -> None:
        self.seen = torch.ones(1, dtype=self.unfinished.dtype).pin_memory()
        self.read = torch.cuda.Event()

    def replay(self) -> None:
        for done in range(1, self.most + 1):
            looks = done % self.every == 0 and done < self.most
            self.judge.replay()
            if looks:
                self.seen.copy_(self.unfinished, non_blocking=True)
                self.read.record()
            self.go_on.replay()
            if looks:
                self.read.synchronize()
                if not self.seen.item():
                    return
