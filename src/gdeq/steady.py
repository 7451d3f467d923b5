"""`steady`: parts that hold still during a solve, in the place of those that do not."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm
from torch.nn.utils.spectral_norm import SpectralNorm

from gdeq.holding import Held, VariationalDropout, check_module, once_per_solve, spectral_norm

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
        for name, part in list(owner.named_children()):
            new = _replacement(part)
            if new is not None:
                setattr(owner, name, new.train(part.training))
                where = f"{path}.{name}".lstrip(".")
                done.append(f"{where}: {part} became {new}")
        for hook in list(owner._forward_pre_hooks.values()):
            if isinstance(hook, SpectralNorm):  # PyTorch's older form
                remove_spectral_norm(owner, hook.name)
                spectral_norm(owner, hook.name, iterations=hook.n_power_iterations)
                done.append(
                    f"{path}.{hook.name}: spectral norm, computed once per solve".lstrip(".")
                )
        if parametrize.is_parametrized(owner):
            for name, kinds in owner.parametrizations.items():
                if not any(isinstance(kind, Held) for kind in (kinds, *kinds)):
                    once_per_solve(owner, name)
                    done.append(f"{path}.{name}: parametrized, computed once per solve".lstrip("."))
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
        return isinstance(part, kinds) and getattr(part, "p", getattr(part, "dropout", 0)) > 0

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
