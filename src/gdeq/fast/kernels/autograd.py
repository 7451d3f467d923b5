"""What the kernels' autograd functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def wanted_now(ctx: Any, inputs: Sequence[Any]) -> list[bool]:
    """Of which inputs of its function, tensors and others, backward is to return gradients.

    ctx.needs_input_grad says of which it could be asked.  A product with Jᵀ alone, or a
    ``backward(inputs=...)``, asks for fewer.
    """
    found = []
    functions = iter(ctx.next_functions)  # of the tensors alone
    for x, needed in zip(inputs, ctx.needs_input_grad, strict=True):
        node = next(functions)[0] if isinstance(x, Tensor) else None
        found.append(needed and (node is None or _executes(node)))
    return found


def _executes(node: Any) -> bool:
    """Whether the backward pass under way runs it, or returns what arrives there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except (AttributeError, RuntimeError):  # of a leaf that is asked for it is not told
        return True


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
