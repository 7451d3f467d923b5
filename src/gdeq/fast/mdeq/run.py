"""What runs in the place of an MDEQ's plain modules, and when.

Stem, cell and head are each taken over only where they are as their configuration builds them
(`gdeq.fast.mdeq.as_built`).  A part that a user has replaced, or changed or watches inside, is
called itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gdeq.context import hold
from gdeq.engine import runs_fast
from gdeq.fast.maps import FastMap
from gdeq.fast.mdeq.as_built import (
    Description,
    is_as_built,
    of_config,
    stands_for_itself,
    unwatched,
)
from gdeq.fast.mdeq.cell import evaluate, zeros
from gdeq.fast.mdeq.stem_and_head import prepare, run_head, run_stem
from gdeq.fast.mdeq.weights import Prepared, Weights
from gdeq.fast.streams import side_by_side
from gdeq.layer import DEQ
from gdeq.models.mdeq import MDEQ, Head, MDEQCell, MDEQConfig, MultiscaleState, Stem
from gdeq.state import autocast_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runner(module: MDEQ | MDEQCell, *inputs: Any) -> Callable[[], Any] | None:
    """A faster way to what ``module(*inputs)`` returns; None where there is none."""
    if isinstance(module, MDEQ):
        (images,) = inputs
        return partial(_run_model, module, images) if _takes(module.config, images) else None
    z, injection = inputs
    if len(z) != len(module.config.channels) or not _takes(module.config, *z, injection):
        return None
    prepared = _prepared(module)
    f = CellMap(prepared, compute_dtype(z[0]), injection)
    return partial(f, z) if prepared.usable else None


def _takes(config: MDEQConfig, *tensors: Tensor) -> bool:
    """fused=True takes all that it can; "auto" what is faster: half precision on a GPU."""
    if any(tensor.dtype not in DTYPES or tensor.dim() != 4 for tensor in tensors):
        return False
    x = tensors[-1]
    faster = x.is_cuda and runs_fast(x.device) and compute_dtype(x).itemsize == 2
    return config.fused is True or faster


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x computes in."""
    return autocast_dtype(x.device.type) or x.dtype


def _prepared(cell: MDEQCell) -> Prepared:
    found: Prepared = cell.held(lambda: Prepared(cell))
    return found


# ---- the cell


@dataclass(frozen=True)
class CellMap:
    """z ↦ f(z, injection) in this dtype."""

    prepared: Prepared
    dtype: torch.dtype
    injection: Tensor

    def __call__(self, z: MultiscaleState, at_zero: bool = False) -> MultiscaleState:
        prepared, dtype = self.prepared, self.dtype
        with torch.autocast(self.injection.device.type, enabled=False):
            weights, masks = prepared.weights(dtype), prepared.masks(self.injection)
            known = prepared.at_zero(dtype, *z[0].shape[-2:]) if at_zero else None
            return evaluate(prepared.cell, weights, z, self.injection, masks, known)

    def at_zero(self, z: MultiscaleState) -> MultiscaleState:
        """The same where z is zero, with less work; without autograd."""
        return self(z, at_zero=True)


# ---- the model


def _run_model(model: MDEQ, images: Tensor) -> Tensor:
    dtype = compute_dtype(images)
    expected = of_config(model.config)
    cell = getattr(model.deq, "cell", None)  # a user may have put another layer there
    # What cell and head need is made beside the stem, and so are, backward, its gradients.
    branches = side_by_side(images.device, 3)
    with hold(cell):
        stem = _outer_weights(model.stem, Stem, expected.stem, images)
        with branches.on(1):
            head = _outer_weights(model.head, Head, expected.head, images)
            branches.mark("head")
        with branches.on(2):
            prepared = _prepared_early(model, images, dtype, stem is not None)
            branches.mark("cell")
        injection = _call(model.stem, run_stem, stem, images)
        branches.await_("cell")
        branches.await_("head")
        if head is not None:
            branches.reads(head.made)
        if prepared is not None and _takes(prepared.cell.config, injection):
            lends = head is not None and unwatched(model.head)  # our head changes nothing in place
            z = _equilibrium(model.deq, prepared, injection, dtype, lends)
        else:
            z = model.deq(injection)
        return _call(model.head, run_head, head, z)


def _outer_weights(
    part: nn.Module, kind: type, expected: Description, images: Tensor
) -> Weights | None:
    """None where this stem or head must be called itself."""
    if stands_for_itself(part, kind) and is_as_built(part, expected):
        return prepare(part, len(images), compute_dtype(images))
    return None


def _call(part: nn.Module, run: Callable[..., Tensor], weights: Weights | None, x: Any) -> Any:
    """part(x), with ``run`` in the place of its forward where there are weights for that."""
    if weights is None:
        return part(x)
    if unwatched(part):
        return run(part, x, weights)
    vars(part)["forward"] = lambda x: run(part, x, weights)  # so that its own hooks see the call
    try:
        return part(x)
    finally:
        del vars(part)["forward"]


def _prepared_early(
    model: MDEQ, images: Tensor, dtype: torch.dtype, own_stem: bool
) -> Prepared | None:
    """The weights of the cell, before it is first evaluated; None where it must be called itself.

    own_stem: so that the size of the injection is known.
    """
    deq, cell = model.deq, getattr(model.deq, "cell", None)
    layers: list[tuple[Any, type]] = [(deq, DEQ), (cell, MDEQCell)]
    if not all(stands_for_itself(layer, kind) and unwatched(layer) for layer, kind in layers):
        return None
    prepared = _prepared(cell)  # type: ignore[arg-type]
    if not prepared.usable:
        return None
    with torch.autocast(images.device.type, enabled=False):
        prepared.weights(dtype)
        if own_stem and deq.solver is not None:
            _, *size = model.config.state_shapes(*images.shape[-2:])[0]
            prepared.at_zero(dtype, *size)
    return prepared


def _equilibrium(
    deq: DEQ, prepared: Prepared, injection: Tensor, dtype: torch.dtype, lends: bool
) -> Any:
    injection = injection.to(dtype, memory_format=torch.channels_last)
    shapes = prepared.cell.config.scale_shapes(*injection.shape[-2:])
    f = CellMap(prepared, dtype, injection)
    z0 = zeros([(len(injection), *shape) for shape in shapes], like=injection)
    return deq.equilibrium(FastMap(f, at_start=f.at_zero, lends=lends), z0)
