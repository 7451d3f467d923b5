"""What must stay the same during a solve: dropout masks and normalised weights.

f must be one function while its fixed point is sought.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_open: list[nn.Module] = []  # the modules whose solves are under way, the innermost last


def held_module() -> nn.Module | None:
    """The module whose solve is under way, if that is known."""
    return _open[-1] if _open else None


class Held(nn.Module):
    """A module whose draw or derived value must stay the same during a solve.

    Inside `hold` the value is made once, at its first use, and kept; outside it is made at every
    use.  A subclass calls ``self.held(make)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._grad = False
        self._value: Any = None

    def held(self, make: Callable[[], Any]) -> Any:
        if self._depth == 0:
            return make()
        if self._value is None:
            # The solve runs without autograd, but what it keeps is also used with it afterwards.
            with torch.set_grad_enabled(self._grad):
                self._value = make()
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_depth": 0, "_value": None}


@contextlib.contextmanager
def hold(cell: object) -> Iterator[None]:
    """While this is open, the dropout masks and normalised weights in ``cell`` do not change.

    `DEQ` opens it around each call.  Around `fixed_point` with an f of your own, open it yourself.
    Nested: what an outer solve holds, an inner one does not renew.
    """
    owner = getattr(cell, "__self__", cell)  # of a bound method, its module
    owners = [owner] if isinstance(owner, nn.Module) else []
    modules = [m for module in owners for m in module.modules() if isinstance(m, Held)]
    for module in modules:
        if module._depth == 0:
            module._grad = torch.is_grad_enabled()
        module._depth += 1
    _open.extend(owners)
    try:
        yield
    finally:
        del _open[len(_open) - len(owners) :]
        for module in modules:
            module._depth -= 1
            if module._depth == 0:
                module._value = None


class VariationalDropout(Held):
    """Dropout with one mask for the whole solve: f must be one function while z is sought.

    channelwise: drop whole channels, ``(batch, channels, ...)``, as MDEQ does.
    """

    def __init__(self, p: float = 0.5, channelwise: bool = False) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
            raise ValueError(f"VariationalDropout.p must be at least 0 and below 1, got {p!r}")
        self.p = float(p)
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = x.shape
        if self.channelwise:
            if x.dim() < 2:
                raise ValueError(f"channelwise dropout needs (batch, channels, ...), got {shape}")
            shape = x.shape[:2] + (1,) * (x.dim() - 2)
        mask = self.held(lambda: self._draw(x, shape))
        if mask.shape != shape:
            raise RuntimeError(
                f"VariationalDropout was used with shape {tuple(mask.shape)} and then "
                f"{tuple(shape)} in one solve; use one module for each place"
            )
        return x * mask.to(x.dtype)

    def _draw(self, x: Tensor, shape: torch.Size) -> Tensor:
        keep = 1 - self.p
        return torch.empty(shape, device=x.device).bernoulli_(keep) / keep

    def extra_repr(self) -> str:
        return f"p={self.p}, channelwise={self.channelwise}"


class _WeightNorm(Held):
    """weight = g · v / ‖v‖, the norm taken over all dimensions but ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return self.held(lambda: v * (g / torch.norm_except_dim(v, 2, self.dim)))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.norm_except_dim(weight, 2, self.dim), weight


def weight_norm(module: nn.Module, name: str = "weight", dim: int = 0) -> nn.Module:
    """Weight normalisation that is computed once per solve instead of once per evaluation.

    Parameters are named as by `torch.nn.utils.parametrizations.weight_norm`, so state dicts are
    exchangeable; undo with `torch.nn.utils.parametrize.remove_parametrizations`.
    """
    if not isinstance(getattr(module, name, None), Tensor):
        layers = [
            "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("."))
            for path, layer in module.named_modules()
            if isinstance(getattr(layer, name, None), Tensor)
        ]
        hint = "; pass a layer that has one: module" + ", module".join(layers) if layers else ""
        raise ValueError(f"{type(module).__name__} has no tensor {name!r} to normalise{hint}")
    parametrize.register_parametrization(module, name, _WeightNorm(dim), unsafe=True)
    return module
