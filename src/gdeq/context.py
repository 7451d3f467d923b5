"""What a solve runs in: work that is recorded, traced or compiled, and modules that hold still."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
    """What is open in this thread."""

    def __init__(self) -> None:  # in each thread; compilers before PyTorch 2.13 need attributes
        self.blind = False  # nobody looks at values
        self.groups: tuple[Any, ...] = ()  # of processes that evaluate f at the same time
        self.holds: tuple[_Hold, ...] = ()  # open ones, the outermost first: a solve belongs to one


here = _OfThread()


@contextlib.contextmanager
def _while_open(name: str, value: object) -> Iterator[None]:
    before = getattr(here, name)
    setattr(here, name, value)
    try:
        yield
    finally:
        setattr(here, name, before)


# ---- whether values may be looked at


def host_may_look(device: torch.device) -> bool:
    """False while the work under way has no values yet: it is recorded or traced.

    Where this is False, compute both outcomes and select; elsewhere a look may save work.
    """
    if device.type == "cpu":
        return not here.blind
    recording = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return not (here.blind or _hidden[-1] or (recording is not None and recording()))


def look_is_free(device: torch.device) -> bool:
    """Whether the host may look and need not wait: on a CPU."""
    return device.type == "cpu" and not here.blind


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """While this is open, work on a device behaves as if it were being recorded."""
    _hidden.append(True)
    try:
        yield
    finally:
        _hidden.pop()


def blind(wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """While this is open, nobody in this thread looks at values, on a CPU neither."""
    return _while_open("blind", wanted or here.blind)


def modules_of(cell: object) -> list[nn.Module]:
    """The modules that a cell is known to use: itself, its owner, or what a function refers to."""
    if isinstance(cell, functools.partial):
        return [m for part in (cell.func, *cell.args) for m in modules_of(part)]
    owner = getattr(cell, "__self__", cell)
    if isinstance(owner, nn.Module):
        return [owner]
    try:
        seen = inspect.getclosurevars(owner)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or one whose variables are not there yet
        return []
    named = (*seen.nonlocals.values(), *seen.globals.values())
    return [value for value in named if isinstance(value, nn.Module)]


def process_groups(cell: object) -> tuple[Any, ...]:
    """Those over which a parameter of the cell is sharded now, as by `fully_shard`."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ()
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return ()
    weights = (weight for module in modules_of(cell) for weight in module.parameters())
    meshes = (weight.device_mesh for weight in weights if isinstance(weight, kind))
    return next((tuple(mesh.get_all_groups()) for mesh in meshes), ())


def together(groups: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """While this is open, `anywhere` asks all members of these process groups, if there are any.

    An f that is sharded over processes is evaluated by all of them at the same time, so all must
    make the same number of evaluations.
    """
    return _while_open("groups", groups or here.groups)


def anywhere(mask: Tensor) -> bool:
    """Whether the mask holds for any sample, here or on a process that evaluates f with us."""
    found = mask.any()
    for group in here.groups:
        found = found.int()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return bool(found)


# ---- how PyTorch traces and transforms


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


def is_exporting() -> bool:
    """Whether `torch.export` traces this call; a strict one counts as a compilation."""
    # Before PyTorch 2.13 the compiler finds that it exports, whatever it does.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


# ---- what is not compiled


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
            apart.append(torch.compiler.disable(function))
            # This and the marks below are what the compiler does with wrappers of its own.
            skip = getattr(sys.modules["torch._dynamo"].eval_frame, "skip_code", None)
            if skip is not None:
                skip(call.__code__)  # type: ignore[attr-defined]
        return apart[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return call


def eager() -> contextlib.AbstractContextManager[Any]:
    """While this is open, nothing is compiled and what was compiled runs as it is written."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


# ---- what holds still during a solve


@dataclass
class _Hold:
    """What is kept while one `hold` is open."""

    modules: tuple[nn.Module, ...] | None  # whose values; None: those of every module
    owner: nn.Module | None = None
    grad: bool = field(default_factory=torch.is_grad_enabled)
    values: dict[tuple[Any, ...], _Value] = field(default_factory=dict)


class _Value(NamedTuple):
    value: Any
    grad: bool  # made with autograd
    made_of: tuple[Tensor, ...]  # kept alive: their ids are in the key


def held_module() -> nn.Module | None:
    """The module whose solve is under way in this thread, if that is known."""
    return here.holds[-1].owner if here.holds else None


class Held(nn.Module):
    """A module whose draw or derived value must stay the same during a solve.

    Inside `hold` the value is made once, at its first use, and kept; outside it is made at every
    use.  A subclass calls ``self.held(make)``.
    """

    def held(self, make: Callable[[], Any], *made_of: Tensor) -> Any:
        """made_of: what ``make`` computes with; without it, it draws random numbers.

        What is computed is kept for each ``made_of``, and made again where a graph is wanted.
        """
        holds = [each for each in here.holds if each.modules is None or self in each.modules]
        if not holds:
            return make()
        # The solve runs without autograd, but its values are used with it afterwards.
        grad = torch.is_grad_enabled() or any(each.grad for each in holds)
        values, key = holds[0].values, (self, *map(id, made_of))
        if key not in values or (grad and made_of and not values[key].grad):
            with torch.set_grad_enabled(grad):
                values[key] = _Value(make(), grad, made_of)
        return values[key].value


@contextlib.contextmanager
def hold(cell: object = None) -> Iterator[None]:
    """Keep the dropout masks and normalised weights in ``cell`` fixed inside this context.

    `DEQ` opens it around each call.  If you call `fixed_point` with an f of your own, open it
    yourself.  If ``cell`` is not a module (a function, or None), every module that is used inside
    is held.  In nested contexts the outermost one counts.  Other threads are not affected.

    Examples:
        >>> import torch, gdeq
        >>> dropout = gdeq.VariationalDropout(0.5)
        >>> with gdeq.hold(dropout):
        ...     same = torch.equal(dropout(torch.ones(9, 9)), dropout(torch.ones(9, 9)))
        >>> same
        True
    """
    owner = getattr(cell, "__self__", cell)  # of a bound method, its module
    new = _Hold(None)
    if isinstance(owner, nn.Module):
        new = _Hold(tuple(m for m in owner.modules() if isinstance(m, Held)), owner)
    with _while_open("holds", (*here.holds, new)):
        yield


def hold_all(cell: object) -> contextlib.AbstractContextManager[None]:
    """`hold` for every module that the solve of ``cell`` uses, its own or not."""
    new = _Hold(None, cell if isinstance(cell, nn.Module) else None)
    return _while_open("holds", (*here.holds, new))
