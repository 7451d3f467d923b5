"""What the kernels' autograd functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def differentiable(
    plain: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    incoming: Any,
) -> list[Tensor | None]:
    """The gradients that backward returns where second derivatives are wanted: PyTorch's.

    plain: the function of the inputs that the kernel equals.
    """
    # Aliases: one input may depend on another, and its gradient must not go that way here.
    aliases = [None if t is None else t.view_as(t) for t in inputs]
    targets = [t for t, asked in zip(aliases, wanted, strict=True) if asked and t is not None]
    found = iter(torch.autograd.grad(plain(*aliases), targets, incoming, create_graph=True))
    return [next(found) if asked else None for asked in wanted]
