"""What stays the same during a solve: dropout masks, normalised weights, and `steady` for the rest.

f must be one function while its fixed point is sought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm
from torch.nn.utils.spectral_norm import SpectralNorm

from gdeq.context import Held
from gdeq.options import describe


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
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"{self} was given {tuple(shape)}, which has no dimension {dim}")
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


class _WeightNorm(nn.Module):
    """weight = g · v / ‖v‖, the norm taken over all dimensions but ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return v * (g / torch.norm_except_dim(v, 2, self.dim))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.norm_except_dim(weight, 2, self.dim), weight


class _OncePerSolve(Held, parametrize.ParametrizationList):
    """PyTorch's parametrizations of one tensor, computed once per solve."""

    def forward(self) -> Tensor:
        made: Tensor = self.held(super().forward, *self.parameters(False), *self.buffers(False))
        return made


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
    once_per_solve(module, name)
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
        # Where the weight is computed, it is normalised or parametrized already.
        if fits and "weight" in layer._parameters and where(path, layer):
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


# ---- parts that do not hold still

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DRAWS = "draws a new mask at every evaluation: "


def steady(module: nn.Module) -> list[str]:
    """Replace the parts of a cell that change between evaluations; return a list of what was done.

    It changes the cell in place, at any depth:

    - dropout becomes `gdeq.VariationalDropout`, with one mask per solve;
    - batch norm becomes group norm, with its weight and bias (train it again);
    - spectral norms and other parametrizations are computed once per solve.

    Entries that begin with "left" name a part that it cannot replace, and say what to do about it.

    Examples:
        >>> import gdeq
        >>> from torch import nn
        >>> cell = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        >>> print(*gdeq.steady(cell))
        1: Dropout(p=0.1, inplace=False) became VariationalDropout(p=0.1, channelwise=False)
    """
    check_module("gdeq.steady", module)
    done = []
    for path, owner in list(module.named_modules()):
        at = f"{path}." if path else ""
        for name, part in list(owner._modules.items()):  # also one that is used twice
            new = _replacement(part)
            if new is not None:
                setattr(owner, name, new.train(part.training))
                done.append(f"{at}{name}: {part} became {new}")
        for hook in list(owner._forward_pre_hooks.values()):
            if isinstance(hook, SpectralNorm):  # PyTorch's older form
                remove_spectral_norm(owner, hook.name)
                spectral_norm(owner, hook.name, iterations=hook.n_power_iterations)
                done.append(f"{at}{hook.name}: spectral norm, computed once per solve")
        if parametrize.is_parametrized(owner):
            for name, kinds in owner.parametrizations.items():
                if not isinstance(kinds, Held):
                    once_per_solve(owner, name)
                    done.append(f"{at}{name}: parametrized, computed once per solve")
    return done + [f"left {told}" for told in unsteady_parts(module, in_training=True)]


def unsteady_parts(module: nn.Module, in_training: bool = False) -> list[str]:
    """What in it changes from one evaluation to the next in this mode: a sentence for each kind."""
    told = []
    for changes, why in UNSTEADY:
        for path, part in module.named_modules():
            if (part.training or in_training) and changes(part):
                told.append(f"{type(part).__name__} ({path or 'the cell itself'}) {why}")
                break
    return told


def _drops(*kinds: type) -> Callable[[nn.Module], bool]:
    def changes(part: nn.Module) -> bool:
        # With p=1 it draws nothing: all is 0.
        return isinstance(part, kinds) and 0 < getattr(part, "p", getattr(part, "dropout", 0)) < 1

    return changes


def _moves_spectral_norm(part: nn.Module) -> bool:
    old = any(isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values())
    return old or (
        isinstance(part, parametrize.ParametrizationList)
        and not isinstance(part, Held)
        and any(type(kind).__name__ == "_SpectralNorm" for kind in part)
    )


UNSTEADY: tuple[tuple[Callable[[nn.Module], bool], str], ...] = (
    (_drops(nn.Dropout, *CHANNELWISE), f"{DRAWS}use gdeq.VariationalDropout, or gdeq.steady(cell)"),
    (_drops(nn.AlphaDropout, nn.FeatureAlphaDropout), f"{DRAWS}use gdeq.VariationalDropout"),
    (
        _drops(nn.MultiheadAttention, nn.RNNBase),
        "draws a new dropout mask at every evaluation: set its attribute dropout to 0",
    ),
    (
        lambda part: isinstance(part, BATCH_NORMS),
        "mixes the samples of a batch and moves its averages at every evaluation: use nn.GroupNorm",
    ),
    (
        _moves_spectral_norm,
        "takes a step of its power iteration at every evaluation: use gdeq.spectral_norm, or "
        "gdeq.steady(cell)",
    ),
)


def _replacement(part: nn.Module) -> nn.Module | None:
    if isinstance(part, (nn.Dropout, *CHANNELWISE)) and part.p < 1:
        return VariationalDropout(part.p, channelwise=isinstance(part, CHANNELWISE))
    if isinstance(part, BATCH_NORMS):
        # Eight channels or more a group: alone, a channel of (batch, channels) would become 0.
        channels = part.num_features
        groups = max(g for g in range(1, max(2, channels // 8 + 1)) if channels % g == 0)
        new = nn.GroupNorm(groups, channels, part.eps, part.affine)
        if part.affine:
            new.weight, new.bias = part.weight, part.bias
        return new
    return None
