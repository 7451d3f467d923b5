"""Whether a cell fits a solve: one function, of independent samples, that autograd can follow.

`DEQ` checks this after its first call, at the z that was found: two evaluations of f, and a third
if the second differs.  PyTorch's and Python's random generators and the buffers of the cell's
modules are restored afterwards; other state of a cell is not.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gdeq.context import eager, modules_of
from gdeq.operators import safe_norms
from gdeq.state import State, StateMap


class UnsteadyCellWarning(UserWarning):
    """The cell changes between evaluations, so its solve may not converge.

    Examples:
        >>> import torch, gdeq, warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     z = gdeq.DEQ(lambda z, x: torch.tanh(torch.rand_like(z) * z + x))(torch.randn(5, 3))
        >>> told[0].category.__name__
        'UnsteadyCellWarning'
    """


class CoupledSamplesWarning(UserWarning):
    """The cell lets the samples of a batch influence each other.

    Examples:
        >>> import torch, gdeq, warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     z = gdeq.DEQ(lambda z, x: torch.tanh(z.mean(0) / 2 + x))(torch.randn(5, 3))
        >>> told[0].category.__name__
        'CoupledSamplesWarning'
    """


class DetachedCellWarning(UserWarning):
    """The cell depends on z in a way that autograd cannot follow, so its gradients lack that part.

    Examples:
        >>> import torch, gdeq, warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     z = gdeq.DEQ(lambda z, x: torch.tanh(z.detach() / 2 + x))(torch.randn(5, 3))
        >>> told[0].category.__name__
        'DetachedCellWarning'
    """


class ConvergenceWarning(UserWarning):
    """Most samples do not converge, or f is NaN or infinite where a solve starts.

    Examples:
        >>> import torch, gdeq, warnings
        >>> deq = gdeq.DEQ(lambda z, x: z + x)  # has no fixed point
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     for _ in range(12):
        ...         z = deq(torch.ones(2, 3))
        >>> told[-1].category.__name__
        'ConvergenceWarning'
    """


COUPLED = (
    "samples influence each other in {cell}: changing the state of some samples changed f of the "
    "others, by up to {by:.2g} of its size. The solve and its gradient are then wrong, since gdeq "
    "takes the first dimension of a state for a batch of independent systems. For one system "
    "without a batch (a graph or set as (nodes, d), a grid) use DEQ(cell, batched=False); replace "
    "batch norm with nn.GroupNorm; if the state is (length, batch, d), put the batch first"
)
DETACHED = (
    "autograd does not see that {cell} depends on z: another z changed f by up to {by:.2g} of its "
    "size, but no graph leads back from f(z), so gradients lack ∂f/∂z or are missing altogether. "
    "Look in the cell for z.detach(), z.data, torch.no_grad() and NumPy; to leave out ∂f/∂z on "
    "purpose, use gradient=gdeq.JFB()"
)
UNSTEADY = (
    "{cell} changes between evaluations, so its solve may not converge: two evaluations at the "
    "same z differ by up to {by:.2g} of their size. {why}"
)
DRAWS = (
    "{who} draws random numbers at every evaluation: for dropout, F.dropout included, use "
    "gdeq.VariationalDropout, which keeps its mask during a solve; set the dropout of attention "
    "and recurrent layers to 0; draw noise outside the cell"
)

KEEPS = (
    "It seems to keep something from one evaluation to the next, or to draw random numbers by "
    "other means than PyTorch's"
)


class Watched:
    """The user's f; keeps what its last evaluation with gradients took and returned."""

    def __init__(self, f: Callable[[State], State]) -> None:
        self.f = f
        self.last: tuple[list[Tensor], list[Tensor]] | None = None

    def __call__(self, z: State) -> State:
        graph = torch.is_grad_enabled()  # before f, which may leave it otherwise
        out = self.f(z)
        if graph:
            self.last = _with_gradients(z), _with_gradients(out)
        return out

    def follows(self, cell: object) -> bool:
        """Whether the graph of that evaluation leads from f(z) back to z, if it should."""
        if self.last is None:
            return True
        z, out = self.last
        if not z:  # is there one of the weights?
            weights = (weight for module in modules_of(cell) for weight in module.parameters())
            return bool(out) or not any(weight.requires_grad for weight in weights)
        ends = {get_gradient_edge(leaf).node for leaf in z}
        seen: set[Any] = set()
        ahead: list[Any] = [get_gradient_edge(leaf).node for leaf in out]
        while ahead:
            node = ahead.pop()
            if node in ends:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                ahead += [each for each, _ in node.next_functions]
        return False


def _with_gradients(state: State) -> list[Tensor]:
    leaves = pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@torch.no_grad()  # z of an unrolled solve has a graph
def examine(
    f: StateMap, z: State, cell: object, tol: float, follows: bool = True
) -> Warning | None:
    """What is wrong with f as the map of a solve, from its values at z and beside it.

    follows: whether autograd says that f depends on z.
    """
    space, modules = f.space, modules_of(cell)
    name = type(cell).__name__ if isinstance(cell, nn.Module) else "the cell"
    half = f.precision >= torch.finfo(torch.float16).eps
    limit = max((4 if half else 100) * f.precision, 0.1 * tol)
    # Some of the samples get other states: f of the others must not change.  Drawn at random, they
    # are on both sides of any regular coupling.  The batch is as large as it was, so that dropout
    # masks fit and sums are rounded alike.
    moved = torch.rand(space.batch, generator=torch.Generator().manual_seed(1)) < 0.5
    moved[0], moved[-1] = True, False
    if not follows:  # then no sample should notice
        moved[:] = True
    moved = moved.to(space.device)
    still = ~moved if follows else moved
    here = space.leaves(z, "z", cast=False)
    beside = space.copies(here)
    for leaf, other in zip(here, beside, strict=True):
        offset = 0.1 * (1 + leaf.square().mean().sqrt())
        other[moved] = (0.5 * leaf.roll(1, 0) + offset)[moved]
    with _unnoticed(space.device, modules) as buffers:
        first = space.join(f.leaves(here))
        changes = _difference(first, space.join(f.leaves(beside)), still)
        if changes <= limit:
            return None
        with _watching(modules, space.device) as draws:
            unsteady = _difference(first, space.join(f.leaves(here)))
        moving = [
            f"{type(owner).__name__} changes its buffer {key} at every evaluation"
            for owner, key, buffer in buffers
            if not torch.equal(buffer, owner._buffers[key])  # type: ignore[arg-type]
        ]
    if unsteady <= limit:
        if not follows:
            return DetachedCellWarning(DETACHED.format(cell=name, by=changes))
        told = COUPLED.format(cell=name, by=changes)
        return CoupledSamplesWarning(told) if space.batch > 1 else None
    why = moving[0] if moving else KEEPS
    if draws:  # the innermost part that does comes first
        why = DRAWS.format(who=draws[0])
    return UnsteadyCellWarning(UNSTEADY.format(cell=name, by=unsteady, why=why))


def _difference(a: Tensor, b: Tensor, of: Any = slice(None)) -> float:  # (batch, d) each
    """The largest of these samples, beside its own size and theirs."""
    moved, size = (each.nan_to_num(0.0) for each in safe_norms((b - a)[of], a[of]))
    beside = (size + size.mean()).clamp(min=torch.finfo(size.dtype).tiny)
    return (moved / beside).max().item()


@contextlib.contextmanager
def _unnoticed(
    device: torch.device, modules: Sequence[nn.Module]
) -> Iterator[list[tuple[nn.Module, str, Tensor]]]:
    """Random generators and buffers stay as they are, and nothing is compiled.  -> the buffers."""
    parts = [part for module in modules for part in module.modules()]
    kept = [(p, key, b) for p in parts for key, b in p._buffers.items() if b is not None]
    devices = [] if device.type == "cpu" else [device]
    state = random.getstate()
    with torch.random.fork_rng(devices, device_type=device.type), eager():
        try:
            for owner, key, buffer in kept:
                owner._buffers[key] = buffer.clone()
            yield kept
        finally:
            for owner, key, buffer in kept:
                owner._buffers[key] = buffer
            random.setstate(state)
            torch.clear_autocast_cache()  # of copies of weights that have no gradients


@contextlib.contextmanager
def _watching(modules: Sequence[nn.Module], device: torch.device) -> Iterator[list[str]]:
    """Collects the parts that draw random numbers, the innermost first."""
    generators = torch.get_device_module(device)
    found: list[str] = []
    before: list[list[Tensor]] = []

    def states() -> list[Tensor]:
        own = [] if device.type == "cpu" else [generators.get_rng_state(device)]
        return [torch.get_rng_state(), *own]

    def after(path: str, part: nn.Module, *_: Any) -> None:
        if not all(map(torch.equal, before.pop(), states())):
            found.append(f"{type(part).__name__} ({path or 'the cell itself'})")

    hooks = []
    for module in modules:
        for path, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(lambda *_: before.append(states())))
            hooks.append(part.register_forward_hook(functools.partial(after, path)))
    start = states()
    try:
        yield found
        if not found and not all(map(torch.equal, start, states())):
            found.append("It")
    finally:
        for hook in hooks:
            hook.remove()
