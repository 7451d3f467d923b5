"""What must stay the same during a solve: dropout masks and normalised weights.

f must be one function while its fixed point is sought.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from gdeq.options import describe


class _Open(threading.local):
    """The holds that are open in this thread, the outermost first: a solve belongs to one."""

    holds: tuple[_Hold, ...] = ()


@dataclass
class _Hold:
    """What is kept while one `hold` is open."""

    modules: frozenset[nn.Module] | None  # whose values; None: those of every module
    owner: nn.Module | None = None
    grad: bool = field(default_factory=torch.is_grad_enabled)
    values: dict[tuple[Any, ...], _Value] = field(default_factory=dict)


class _Value(NamedTuple):
    value: Any
    grad: bool  # made with autograd
    made_of: tuple[Tensor, ...]  # kept alive: their ids are in the key


_open = _Open()


def held_module() -> nn.Module | None:
    """The module whose solve is under way in this thread, if that is known."""
    return _open.holds[-1].owner if _open.holds else None


class Held(nn.Module):
    """A module whose draw or derived value must stay the same during a solve.

    Inside `hold` the value is made once, at its first use, and kept; outside it is made at every
    use.  A subclass calls ``self.held(make)``.
    """

    def held(self, make: Callable[[], Any], *made_of: Tensor) -> Any:
        """made_of: what ``make`` computes with; without it, it draws random numbers.

        What is computed is kept for each ``made_of``, and made again where a graph is wanted.
        """
        holds = [each for each in _open.holds if each.modules is None or self in each.modules]
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
    if not isinstance(owner, nn.Module):
        opened = _Hold(None)
    else:
        opened = _Hold(frozenset(m for m in owner.modules() if isinstance(m, Held)), owner)
    with _opened(opened):
        yield


def hold_all(cell: object) -> contextlib.AbstractContextManager[None]:
    """`hold` for every module that the solve of ``cell`` uses, its own or not."""
    return _opened(_Hold(None, cell if isinstance(cell, nn.Module) else None))


@contextlib.contextmanager
def _opened(new: _Hold) -> Iterator[None]:
    before = _open.holds
    _open.holds = (*before, new)
    try:
        yield
    finally:
        _open.holds = before


class VariationalDropout(Held):
    """Dropout with one mask for the whole solve, so that f stays the same function.

    p: the probability that an entry is dropped.
    channelwise: drop whole channels of ``(batch, channels, ...)``, as MDEQ does.
    shared: dimensions along which entries are dropped together.  On ``(batch, length, features)``,
        ``shared=1`` uses the same mask at all positions; ``shared=0`` the same in all samples.

    Examples:
        >>> import torch, gdeq
        >>> from torch import nn
        >>> class Cell(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dropout = gdeq.VariationalDropout(0.5)
        ...     def forward(self, z, x):
        ...         return self.dropout(torch.tanh(0.5 * z + x))
        >>> deq = gdeq.DEQ(Cell())  # in training mode
        >>> z = deq(torch.randn(4, 8))
        >>> bool(deq.solution.converged.all())
        True
    """

    def __init__(
        self, p: float = 0.5, channelwise: bool = False, shared: int | Sequence[int] = ()
    ) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
            raise ValueError(f"VariationalDropout.p must be at least 0 and below 1, got {p!r}")
        self.p = float(p)
        self.channelwise = channelwise
        self.shared = (shared,) if isinstance(shared, int) else tuple(shared)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.channelwise and x.dim() < 2:
            raise ValueError(f"channelwise dropout needs (batch, channels, ...), got {x.shape}")
        shape = list(x.shape)
        for dim in (*self.shared, *(range(2, x.dim()) if self.channelwise else ())):
            shape[dim] = 1
        mask = self.held(lambda: self._draw(x, shape))
        if list(mask.shape) != shape:
            raise RuntimeError(
                f"VariationalDropout was used with shape {tuple(mask.shape)} and then "
                f"{tuple(shape)} in one solve; use one module for each place"
            )
        return x * mask.to(x.dtype)

    def _draw(self, x: Tensor, shape: list[int]) -> Tensor:
        keep = 1 - self.p
        return torch.empty(shape, device=x.device).bernoulli_(keep) / keep

    def extra_repr(self) -> str:
        shared = f", shared={self.shared}" if self.shared else ""
        return f"p={self.p}, channelwise={self.channelwise}{shared}"


class _WeightNorm(Held):
    """weight = g · v / ‖v‖, the norm taken over all dimensions but ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return self.held(lambda: v * (g / torch.norm_except_dim(v, 2, self.dim)), g, v)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.norm_except_dim(weight, 2, self.dim), weight


class _OncePerSolve(Held, parametrize.ParametrizationList):
    """PyTorch's parametrizations of one tensor, computed once per solve."""

    def forward(self) -> Tensor:
        made: Tensor = self.held(super().forward, *self._originals())
        return made

    def _originals(self) -> list[Tensor]:
        """What PyTorch keeps in place of the tensor: itself, or the parts it was split into."""
        if self.is_tensor:
            return [self.original]
        return [getattr(self, f"original{i}") for i in range(self.ntensors)]


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.factor


def weight_norm(module: nn.Module, name: str = "weight", dim: int = 0) -> nn.Module:
    """Normalise a weight once per solve instead of once per evaluation.  Returns the module.

    Parameters are named as by `torch.nn.utils.parametrizations.weight_norm`, so state dicts are
    interchangeable.  Undo it with `gdeq.remove_norm`.

    Examples:
        >>> import torch, gdeq
        >>> layer = gdeq.weight_norm(torch.nn.Linear(4, 4))
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    _check_tensor(module, name)
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"{type(module).__name__}.{name} is normalised or parametrized already; remove that "
            "first, a norm with gdeq.remove_norm(module)"
        )
    parametrize.register_parametrization(module, name, _WeightNorm(dim), unsafe=True)
    return module


def spectral_norm(
    module: nn.Module, name: str = "weight", bound: float = 1.0, iterations: int = 1
) -> nn.Module:
    """Divide a weight by its largest singular value, computed once per solve.  Returns the module.

    Like `torch.nn.utils.parametrizations.spectral_norm`, with compatible state dicts, except that
    in training its power iteration runs once per solve, not once per evaluation.  Undo it with
    `gdeq.remove_norm`.

    bound: the largest singular value of the result.  A bound below 1 can make f a contraction.
    iterations: of the power method, in each solve.

    Examples:
        >>> import torch, gdeq
        >>> layer = gdeq.spectral_norm(torch.nn.Linear(4, 4), bound=0.9, iterations=50)
        >>> f"{torch.linalg.matrix_norm(layer.weight, 2):.2f}"
        '0.90'
    """
    _check_tensor(module, name)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 < bound < torch.inf:
        raise ValueError(f"the bound of a spectral norm must be above 0, got {bound!r}")
    parametrizations.spectral_norm(module, name, iterations)
    if bound != 1:
        parametrize.register_parametrization(module, name, _Times(bound))
    once_per_solve(module, name)
    return module


def once_per_solve(module: nn.Module, name: str) -> None:
    """From now on this parametrized tensor holds still during a solve."""
    module.parametrizations[name].__class__ = _OncePerSolve  # type: ignore[index]


def apply_norm(
    module: nn.Module,
    norm: Callable[..., nn.Module] = weight_norm,
    where: Callable[[str, nn.Module], bool] = lambda path, layer: True,
    **options: Any,
) -> list[str]:
    """Normalise the weights of all linear and convolution layers in a module; return their paths.

    norm: `weight_norm` or `spectral_norm`.  It is called with the remaining options.
    where: called with a layer's path and the layer; returns whether to normalise it.

    Examples:
        >>> import gdeq
        >>> from torch import nn
        >>> cell = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> gdeq.apply_norm(cell, gdeq.spectral_norm, where=lambda path, layer: path != "0")
        ['2']
    """
    check_module("gdeq.apply_norm", module)
    found = []
    for path, layer in list(module.named_modules()):
        fits = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd))
        if fits and not parametrize.is_parametrized(layer) and where(path, layer):
            norm(layer, **options)
            found.append(path)
    return found


def remove_norm(
    module: nn.Module, where: Callable[[str, nn.Module], bool] = lambda path, layer: True
) -> list[str]:
    """Turn the weight and spectral norms in a module into plain weights; return their paths.

    The weights keep their current values.

    Examples:
        >>> import gdeq
        >>> from torch import nn
        >>> cell = nn.Sequential(gdeq.weight_norm(nn.Linear(4, 4)))
        >>> gdeq.remove_norm(cell)
        ['0.weight']
    """
    check_module("gdeq.remove_norm", module)
    found = []
    norms = (_WeightNorm, parametrizations._WeightNorm, parametrizations._SpectralNorm)
    for path, layer in list(module.named_modules()):
        if not parametrize.is_parametrized(layer) or not where(path, layer):
            continue
        for name, kinds in list(layer.parametrizations.items()):
            if any(isinstance(kind, norms) for kind in kinds):
                parametrize.remove_parametrizations(layer, name)
                found.append(f"{path}.{name}".lstrip("."))
    return found


def check_module(who: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{who} takes a module, got {describe(module)}; of a function, give it the "
            "modules that the function uses"
        )


def _check_tensor(module: nn.Module, name: str) -> None:
    check_module("a norm", module)
    if isinstance(getattr(module, name, None), Tensor):
        return
    layers = [
        "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("."))
        for path, layer in module.named_modules()
        if isinstance(getattr(layer, name, None), Tensor)
    ]
    hint = "; pass a layer that has one: module" + ", module".join(layers) if layers else ""
    hint += ", or use gdeq.apply_norm(module) for all" if layers else ""
    raise ValueError(f"{type(module).__name__} has no tensor {name!r} to normalise{hint}")
