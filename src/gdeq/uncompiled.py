"""`uncompiled`: a function that `torch.compile` leaves as it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """As `torch.compiler.disable`, which as a decorator would load the compiler with the library,
    for longer than PyTorch itself.  Here that waits until another has loaded it, as
    `torch.compile` does; before that there is nothing to be kept from."""
    apart: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not apart:
            kept = torch.compiler.disable(function)
            _skip(call)
            apart.append(kept)
        return apart[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _skip(wrapper: Any) -> None:
    """This and the mark above are what the compiler does with wrappers of its own.  A version that
    knows neither compiles the few lines of ours, anew for other arguments, and not the function."""
    skip = getattr(sys.modules["torch._dynamo"].eval_frame, "skip_code", None)
    if skip is not None:
        skip(wrapper.__code__)
