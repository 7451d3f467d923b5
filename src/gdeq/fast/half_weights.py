"""Weights of linear and convolution layers in the dtype of autocast, made once for each solve.

Autocast casts the weights of a layer at each call.  In a solve of 18 steps that is 19 times the
same copy, and for a small batch the copies take as long as the products.  Here each layer of the
cell computes with one copy until the solve ends; the values are the same bit for bit.

The parameters themselves stay where they are, so whoever else reads them sees no change.  A layer
that is not exactly PyTorch's own, or whose forward was replaced, is left alone.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# One thread at a time computes with copies; the others, and calls with autograd or outside
# autocast, take the plain way.
_busy = threading.Lock()


def _copies(self: Any, x: Tensor) -> Any:
    plain = torch.is_grad_enabled() or not torch.is_autocast_enabled(x.device.type)
    return None if plain else getattr(self, "half_weights", None)


def _linear(self: Any, x: Tensor) -> Tensor:
    half = _copies(self, x)
    return nn.Linear.forward(self, x) if half is None else linear(x, *half)


def _convolution(self: Any, x: Tensor) -> Tensor:
    half = _copies(self, x)
    y: Tensor = type(self).forward(self, x) if half is None else self._conv_forward(x, *half)
    return y


FORWARD: dict[type, Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


class HalfWeights:
    """The copies for the layers inside a cell; `used` puts them in place."""

    def __init__(self, cell: nn.Module | None, dtype: torch.dtype | None) -> None:
        """dtype: of autocast; None without it, and then there is nothing to do."""
        found = [] if cell is None or dtype is None else cell.modules()
        layers: list[Any] = [m for m in found if type(m) in FORWARD and _is_plain(m)]
        given = [p.detach() for m in layers for p in (m.weight, m.bias) if p is not None]
        copies = [torch.empty_like(p, dtype=dtype) for p in given]
        if copies:
            torch._foreach_copy_(copies, given)
        rest = iter(copies)
        self.layers = [(m, (next(rest), None if m.bias is None else next(rest))) for m in layers]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While this is open the layers compute with the copies; without autograd."""
        if not self.layers or not _busy.acquire(blocking=False):
            yield
            return
        try:
            for m, half in self.layers:
                # A method and not a closure: torch.compile takes every pair of copies for the same.
                vars(m).update(half_weights=half, forward=types.MethodType(FORWARD[type(m)], m))
            yield
        finally:
            for m, _ in self.layers:
                del vars(m)["forward"], vars(m)["half_weights"]
            _busy.release()


def _is_plain(m: Any) -> bool:
    """Whether a call of it is one of its class, with weights that autocast would cast."""
    own = "weight" in m._parameters and not m._forward_pre_hooks  # else a hook makes it at a call
    return own and "forward" not in vars(m) and m.weight.dtype == torch.float32
