"""An exponential average of the weights, which is what gets evaluated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Begins with the weights after the first step, and soon counts few steps, later ``decay``.

    Its update is no part of a recorded step: the number of updates is the host's.
    """
    kept: AveragedModel

    @torch.no_grad()
    def update(old: Tensors, new: Tensors, _many: Tensor | int) -> None:
        many = int(kept.n_averaged)  # on the host, unlike what is passed here
        if old[0].is_floating_point():
            torch._foreach_lerp_(old, new, 1 - min(decay, (1 + many) / (10 + many)))
        else:  # counters, such as the batches that a batch norm has seen, have no average
            torch._foreach_copy_(old, new)

    kept = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
    kept.module.requires_grad_(False)
    return kept
