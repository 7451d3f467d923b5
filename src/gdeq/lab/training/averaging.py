"""An exponential average of the weights, which is what gets evaluated."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gdeq.models.mdeq import MDEQ


class Average:
    """`update` moves ``model`` towards the trained one by a share that `prepare` has set."""

    def __init__(self, trained: MDEQ, decay: float) -> None:
        self.model = copy.deepcopy(trained).requires_grad_(False)
        self.decay = decay
        device = next(trained.parameters()).device
        # On a GPU a step reads it where it lies.
        self.share: float | Tensor = (
            torch.zeros((), device=device) if device.type == "cuda" else 0.0
        )
        kept = [*self.model.parameters(), *self.model.buffers()]
        new = [*trained.parameters(), *trained.buffers()]
        pairs = list(zip(kept, new, strict=True))
        # Counters, such as the batches that a batch norm has seen, have no average.
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self.kept = [kept for kept, _ in pairs if kept.is_floating_point()]
        self.new = [new for _, new in pairs if new.is_floating_point()]

    def prepare(self, step: int) -> None:
        """For the step of this number, from 0 on."""
        # As if the average had begun with the first step, not with the random start.
        share = 1 - min(self.decay, (2 + step) / (11 + step))
        if isinstance(self.share, Tensor):
            self.share.fill_(share)
        else:
            self.share = share

    @torch.no_grad()
    def update(self) -> None:
        if isinstance(self.share, Tensor):  # a lerp of many takes no weight from the device
            moves = torch._foreach_sub(self.new, self.kept)
            torch._foreach_mul_(moves, self.share)
            torch._foreach_add_(self.kept, moves)
        else:
            torch._foreach_lerp_(self.kept, self.new, self.share)
        for kept, new in self.counters:
            kept.copy_(new)
