"""Whether a part of an MDEQ is as its configuration builds it.

The runner computes what a part computes without calling the modules inside.  It may do so only
where nobody would notice: no module was replaced or given other settings, none has a hook or a
forward of its own, and none is compiled.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from gdeq.models.mdeq import MDEQ, MDEQConfig

# What the runner takes for granted.  The rest it reads from the modules at each call.
SETTINGS = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    *("padding_mode", "num_groups", "num_channels", "num_features", "affine", "eps"),
    *("inplace", "in_features", "channelwise", "dim"),
)
# Modules that the runner calls in the place of others.
IN_PLACE_OF: dict[type, type] = {nn.SyncBatchNorm: nn.BatchNorm2d}
Description = list[tuple[Any, ...]]  # of the modules inside: name, class, settings, has a bias


class Descriptions(NamedTuple):
    stem: Description
    cell: Description
    head: Description


@functools.cache
def of_config(config: MDEQConfig) -> Descriptions:
    """What the parts of a new model look like."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        model = MDEQ(config)
    cell: Any = model.deq.cell
    return Descriptions(*(_described(part) for part in (model.stem, cell, model.head)))


def is_as_built(part: nn.Module, expected: Description) -> bool:
    """Whether the modules inside this part, itself aside, need not be called."""
    if _described(part) != expected:
        return False
    return all(_calls_its_class(m) and unwatched(m) for m in part.modules() if m is not part)


def stands_for_itself(part: nn.Module, kind: type) -> bool:
    """Whether a call of this part, its hooks aside, is one of this class's methods."""
    return type(part) is kind and _calls_its_class(part)


def unwatched(module: nn.Module) -> bool:
    """Whether no hook waits for a call of this module."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    of_all = nn.modules.module
    shared = of_all._global_forward_hooks, of_all._global_forward_pre_hooks
    back = module._backward_pre_hooks, of_all._global_backward_hooks
    return not any((*own, *shared, *back, of_all._global_backward_pre_hooks))


def _calls_its_class(module: nn.Module) -> bool:
    own = vars(module)
    return not ("forward" in own or "initial_state" in own or module._compiled_call_impl)


def _described(part: nn.Module) -> Description:
    found = []
    for name, module in part.named_children():
        kind = type(module)
        if "parametrizations" in module._modules:  # PyTorch makes a class for each such module
            kind = kind.__bases__[0]
        settings = tuple(map(vars(module).get, SETTINGS))
        biased = module._parameters.get("bias") is not None
        found.append((name, IN_PLACE_OF.get(kind, kind), settings, biased))
        found += _described(module)
    return found
