"""The end of a recorded solve on a second stream, beside what follows the solve.

With ``tol=0`` the z that a layer returns is known before f is evaluated there (`LastEvaluation`).
That evaluation, and what the solver learns from it, is first needed by w = −B⁻ᵀv in the backward
pass.  In a recording (`gdeq.capture`) both can run beside the head:

    main  ... z_n, copied ─┬─ head, loss, backward of the head ─┬─ w ─┬─ ... ─ backward of the stem
    side                   └─ f with autograd, verdict, B⁻¹ ────┘     └─ backward of f ─┘

Python does everything in the order it always did; only the streams differ, and who waits for whom.

Memory that is freed is given to the next who asks *on the stream that it was taken on*, although
the other one may still be at work on it:
- What the solver took on main and uses aside is kept until main has waited (``kept``).
- What f reads, others took, on main or beside it, and may free at any time: the allocator is told
  that side reads it (`record_stream`), and does not give it again in this recording.
- What is taken on side is read on main for w, and after the backward pass.  Whenever side goes on,
  here or by way of autograd, it goes on after all that main was given to do until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdeq import streams
from gdeq.recording import current

_sides: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


class Aside:
    """One solve's end.  Inside ``with`` it may `begin`; what follows inside then runs on side.

    reads: what f reads beside its parameters.
    """

    def __init__(self, reads: Callable[[], Any]) -> None:
        self.reads: Callable[[], Any] | None = reads
        self.main: torch.cuda.Stream | None = None  # no stream: it has not begun
        self.side: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.kept: Any = None
        self.over = False  # so is the recording: all that comes later comes after it
        self.opened = contextlib.ExitStack()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.reads = None
        with self.opened:  # back to main, whatever happens
            if self.side is not None and kind is None:
                self.done = self.side.record_event()

    def begin(self, device: torch.device, kept: Any) -> None:
        recording = current()
        assert recording is not None, "without one, nothing would wait for it in the end"
        assert self.reads is not None
        main = torch.cuda.current_stream(device)
        side = _side_of(main, device)
        read = self.reads()
        for tensor in streams.tensors_in(read):
            _tell_allocator(tensor, side)
        self.kept = kept, read
        side.wait_event(main.record_event())
        self.main, self.side = main, side
        recording.asides.append(self)
        self.opened.enter_context(torch.cuda.stream(side))

    @property
    def begun(self) -> bool:
        return self.main is not None

    def on_main(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.main is None else torch.cuda.stream(self.main)

    def join(self) -> None:
        """The current stream goes on after it."""
        if self.main is None or self.done is None or self.over:
            return
        stream = torch.cuda.current_stream(self.main.device)
        stream.wait_event(self.done)
        if stream == self.main:
            self.kept = None

    def follow(self) -> None:
        """The current stream goes on after all that side was given to do until now."""
        if self.main is None or self.side is None or self.over:
            return
        torch.cuda.current_stream(self.main.device).wait_event(self.side.record_event())

    def main_follows(self) -> None:
        """Main goes on after the current stream, which has read what was taken on main."""
        if self.main is not None:
            stream = torch.cuda.current_stream(self.main.device)
            self.main.wait_event(stream.record_event())

    def end(self) -> None:
        """The recording ends: side must come back to main, whether or not anybody has asked."""
        if self.main is not None and self.side is not None and not self.over:
            self.over = True
            self.main.wait_event(self.side.record_event())
        self.kept = None


def _side_of(main: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    key = device, main.cuda_stream
    if key not in _sides:
        _sides[key] = streams.head_of_branches(main, device)
    return _sides[key]


def _tell_allocator(tensor: Tensor, reader: torch.cuda.Stream) -> None:
    if tensor.is_cuda and tensor.layout == torch.strided and not tensor.is_nested:
        tensor.record_stream(reader)
