"""What PyTorch does around a solve: record it, trace it, transform it, compile it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

P = ParamSpec("P")
T = TypeVar("T")
WHY = (
    "gdeq: a solve stops where its values say, which is no single graph; compile the cell with "
    "deq.cell.compile(), or make the solves of a model traceable with gdeq.fixed_steps(model)"
)
# Not of a thread: backward passes of what is recorded run in threads of their own.
_hidden = [False]


class _OfThread(threading.local):
    blind = False  # nobody looks at values
    groups: tuple[Any, ...] = ()  # of processes that evaluate f at the same time


_here = _OfThread()


def host_may_look(device: torch.device) -> bool:
    """False while the work under way has no values yet: it is recorded or traced.

    Where this is False, compute both outcomes and select; elsewhere a look may save work.
    """
    if device.type == "cpu":
        return not _here.blind
    recording = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return not (_here.blind or _hidden[-1] or (recording is not None and recording()))


def look_is_free(device: torch.device) -> bool:
    """Whether the host may look and need not wait: on a CPU."""
    return device.type == "cpu" and not _here.blind


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """While this is open, work on a device behaves as if it were being recorded."""
    _hidden.append(True)
    try:
        yield
    finally:
        _hidden.pop()


@contextlib.contextmanager
def blind(wanted: bool = True) -> Iterator[None]:
    """While this is open, nobody in this thread looks at values, on a CPU neither."""
    before = _here.blind
    _here.blind = wanted or before
    try:
        yield
    finally:
        _here.blind = before


def is_blind() -> bool:
    return _here.blind


@contextlib.contextmanager
def together(groups: tuple[Any, ...]) -> Iterator[None]:
    """While this is open, `anywhere` asks all members of these process groups.

    An f that is sharded over processes is evaluated by all of them at the same time, so all must
    make the same number of evaluations.
    """
    before, _here.groups = _here.groups, groups
    try:
        yield
    finally:
        _here.groups = before


def anywhere(mask: Tensor) -> bool:
    """Whether the mask holds for any sample, here or on a process that evaluates f with us."""
    found = mask.any()
    for group in _here.groups:
        found = found.int()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return bool(found)


def transforms() -> list[str]:
    """The `torch.func` transforms around this call, outermost first: "Grad", "Jvp", "Vmap"."""
    if torch.compiler.is_dynamo_compiling():  # which cannot see them
        return []
    return [level.key().name for level in functorch.get_interpreter_stack() or ()]


def without_values(leaves: Sequence[Tensor]) -> bool:
    """Whether these tensors stand for others: for a batch, a graph or shapes."""
    if torch.compiler.is_compiling() or leaves[0].is_meta or "Vmap" in transforms():
        return True
    if functorch.is_legacy_batchedtensor(leaves[0]):
        return True
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and any(isinstance(leaf, fakes.FakeTensor) for leaf in leaves)


def row_by_row(
    function: Callable[[list[Tensor]], Sequence[Tensor]], leaves: list[Tensor]
) -> Sequence[Tensor]:
    """function(leaves), for each row where `torch.autograd` batches passes by its older vmap."""
    if not any(map(functorch.is_legacy_batchedtensor, leaves)):
        return function(leaves)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    first = next(leaf for leaf in leaves if functorch.is_legacy_batchedtensor(leaf))
    count = len(torch._remove_batch_dim(first, level, 1, 0))
    whole = [torch._remove_batch_dim(leaf, level, count, 0) for leaf in leaves]
    made = [function(list(row)) for row in zip(*whole, strict=True)]
    columns = map(torch.stack, zip(*made, strict=True))
    return [torch._add_batch_dim(column, 0, level) for column in columns]


def is_transformed() -> bool:
    """Whether derivatives are taken otherwise than by a backward pass, or of many at once."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or bool(transforms())


def is_traced() -> bool:
    """Whether the tensors of this call mean nothing after it."""
    return is_transformed() or torch.compiler.is_compiling()


def values_are_there(leaves: Sequence[Tensor]) -> bool:
    """Not while they are captured, compiled, exported, transformed or without memory."""
    plain = all(type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta for leaf in leaves)
    return plain and not is_traced() and host_may_look(leaves[0].device)


def beneath(leaf: Tensor, stack: list[Any] | None = None) -> Tensor:
    """The same as a constant to the innermost transform of the stack that takes derivatives."""
    stack = functorch.get_interpreter_stack() or [] if stack is None else stack
    leaf = functorch.unwrap_if_dead(leaf)
    if not stack:
        return leaf
    level, around = stack[-1].level(), stack[:-1]
    if stack[-1].key().name != "Vmap":
        return functorch._unwrap_for_grad(leaf, level)
    if functorch.maybe_get_level(leaf) != level:
        return beneath(leaf, around)
    inner, at = functorch.get_unwrapped(leaf), functorch.maybe_get_bdim(leaf)
    return functorch._add_batch_dim(beneath(inner, around), at, level)


@contextlib.contextmanager
def constant() -> Iterator[None]:
    """What is computed here has no derivatives, in no mode."""
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        yield


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """As `torch.compiler.disable`, which would load the compiler with the library.

    Here that waits until another has loaded it; before that there is nothing to be kept from.
    """
    apart: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not apart:
            kept = torch.compiler.disable(function, reason=WHY)
            _skip(call)
            apart.append(kept)
        return apart[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return call


def _skip(wrapper: Any) -> None:
    """This and the mark above are what the compiler does with wrappers of its own."""
    skip = getattr(sys.modules["torch._dynamo"].eval_frame, "skip_code", None)
    if skip is not None:
        skip(wrapper.__code__)


def eager() -> contextlib.AbstractContextManager[Any]:
    """While this is open, nothing is compiled and what was compiled runs as it is written."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):  # PyTorch 2.6
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()
