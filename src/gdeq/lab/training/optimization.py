"""The optimiser, its learning rate, and the averaged weights.

On a GPU the rate is a tensor that a step reads where it lies, and the update is one kernel that
asks the host nothing: such a step can be recorded once and played again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gdeq.lab.training.muon import Muon, split
from gdeq.lab.training.settings import Config


def learning_rate(config: Config, step: int, total: int) -> float:
    """The rate of a step: a function of its number alone, so that nothing has to be resumed."""
    choice = config.optimizer
    rise = choice.warmup * total
    if step < rise:
        return choice.lr * (step + 1) / (rise + 1)
    part = (step - rise) / max(1.0, total - rise)
    if choice.schedule == "cosine":
        return choice.lr * 0.5 * (1 + math.cos(math.pi * part))
    if choice.schedule == "onecycle":
        return choice.lr * (1 - part)
    return choice.lr


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    choice = config.optimizer
    params = [p for p in model.parameters() if p.requires_grad]
    decayed: dict[str, Any] = {"weight_decay": choice.weight_decay}
    groups = [
        {"params": [p for p in params if p.dim() > 1], **decayed},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if choice.name == "muon":
        inner, outer, rest = split(model)
        share = choice.adam_lr / choice.lr
        groups = [
            {"params": inner, **decayed, "orthogonal": True},
            {"params": outer, **decayed, "rate_share": share},
            {"params": rest, "weight_decay": 0.0, "rate_share": share},
        ]
    device = params[0].device
    on_gpu = device.type == "cuda"
    if on_gpu:
        for group in groups:
            group["lr"] = torch.tensor(choice.lr, dtype=torch.float32, device=device)
    fused = True if on_gpu else None  # None: as PyTorch chooses
    if choice.name == "muon":
        return Muon(groups, choice.lr, choice.momentum)
    if choice.name == "adam":
        return torch.optim.AdamW(groups, lr=choice.lr, fused=fused, capturable=on_gpu)
    momentum: dict[str, Any] = {"momentum": choice.momentum, "nesterov": choice.momentum > 0}
    return torch.optim.SGD(groups, lr=choice.lr, fused=fused, **momentum)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """rate: for groups without a ``rate_share``; the others get that share of it."""
    for group in optimizer.param_groups:
        own = rate * group.get("rate_share", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def restore_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Take the moments from a checkpoint, but the options from the configuration of now."""
    rates = [group["lr"] for group in optimizer.param_groups]
    options = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**saved, "param_groups": options})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the same tensor as before, which a recorded step reads
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # A fused update needs the same memory layout for both.
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Averaged weights, which start from those after the first step; the decay grows to ``decay``.

    The update is not part of a recorded step, since the host counts the updates.
    """
    kept: AveragedModel

    @torch.no_grad()
    def update(old: Any, new: Any, _many: Tensor | int) -> None:
        many = int(kept.n_averaged)  # on the host, unlike what is passed here
        if old[0].is_floating_point():
            torch._foreach_lerp_(old, new, 1 - min(decay, (1 + many) / (10 + many)))
        else:  # counters, such as the batches that a batch norm has seen, have no average
            torch._foreach_copy_(old, new)

    kept = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
    kept.module.requires_grad_(False)
    return kept
