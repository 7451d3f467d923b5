"""Whether a module may be left out and its work done in another way."""

from __future__ import annotations

from torch import nn


def unwatched(module: nn.Module) -> bool:
    """Whether it need not be called itself: no hook waits for that."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    of_all = nn.modules.module
    shared = of_all._global_forward_hooks, of_all._global_forward_pre_hooks
    back = module._backward_pre_hooks, of_all._global_backward_hooks
    return not any((*own, *shared, *back, of_all._global_backward_pre_hooks))
