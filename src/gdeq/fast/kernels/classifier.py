"""A linear map of the average over the pixels, in one launch each way.

    logits = W mean_p y_p + b

and backward, with the gradient e of the logits,

    dy_p = eᵀ W / pixels,   dW = Σ_samples e meanᵀ,   db = Σ_samples e.

PyTorch takes 4 launches there and 7 back, each of some µs with nothing beside it: the average, the
casts of weight and bias for autocast and those of their gradients, three products of matrices.
Arithmetic is float32; dy is one number for all pixels of a channel, and takes no memory for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gdeq.fast.kernels.autograd import differentiable, differentiates
from gdeq.fast.kernels.device import available, on_device
from gdeq.fast.kernels.jit import jit, tl, triton
from gdeq.fast.kernels.norms.tensors import as_map

MOST_CLASSES = 64
TILE = 8192  # numbers of the weight that a program holds
PIXELS = 16  # together
SAMPLES = 64  # together, backward
COLUMNS = 32  # channels of a program, backward


def classify_plain(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = y.to(torch.promote_types(y.dtype, weight.dtype))
    return linear(wide.mean(dim=(2, 3)), weight, bias).to(y.dtype)


def classify(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y: (batch, channels, height, width); weight: (classes, channels) -> (batch, classes).

    For what it `takes`; the result has the dtype of y.
    """
    if differentiates(y, weight, bias):
        return _Classify.apply(y, weight, bias)
    return _forward(y, weight, bias)[0]


def takes(y: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if bias is None:
        return False
    floats = weight.dtype == bias.dtype == torch.float32 and y.dtype != torch.float64
    few = weight.shape[0] <= MOST_CLASSES and 0 < y.numel() < 2**31
    return floats and few and weight.is_contiguous() and available(y.device)


def _lanes(classes: int) -> int:
    """At least 16, for products of matrices."""
    return max(16, triton.next_power_of_2(classes))


def _forward(y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the average, (batch, channels) in float32."""
    batch, channels, height, width = y.shape
    classes = len(weight)
    logits = y.new_empty(batch, classes)
    mean = y.new_empty(batch, channels, dtype=torch.float32)
    with on_device(y):
        _classify_kernel[(batch,)](
            *as_map(y), weight, bias, logits, mean, channels, height * width, classes,
            CLASSES=_lanes(classes), BLOCK=TILE // _lanes(classes), PIXELS=PIXELS, num_warps=8,
        )  # fmt: skip
    return logits, mean


class _Classify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits, mean = _forward(y, weight, bias)
        ctx.save_for_backward(y, weight, bias, mean)
        return logits

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        y, weight, bias, mean = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(differentiable(classify_plain, (y, weight, bias), ctx.needs_input_grad, e))
        batch, channels, height, width = y.shape
        classes = len(weight)
        dy = y.new_empty(batch, channels)
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        with on_device(y):
            _classify_backward_kernel[(triton.cdiv(channels, COLUMNS),)](
                e.contiguous(), weight, mean, dy, dweight, dbias,
                batch, channels, classes, 1.0 / (height * width),
                CLASSES=_lanes(classes), COLUMNS=COLUMNS, SAMPLES=SAMPLES, num_warps=4,
            )  # fmt: skip
        return dy[:, :, None, None].expand(y.shape), dweight, dbias


@jit
def _classify_kernel(
    y, y_sample, y_pixel, weight, bias, logits, mean, channels, pixels, classes,
    CLASSES: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One sample."""
    sample = tl.program_id(0).to(tl.int64)
    y += sample * y_sample
    row = tl.arange(0, CLASSES)
    total = tl.zeros((CLASSES, BLOCK), tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < channels
        w = tl.load(
            weight + row[:, None] * channels + channel[None, :],
            mask=(row < classes)[:, None] & inside[None, :],
            other=0.0,
        )
        average = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, pixels, PIXELS):
            pixel = first + tl.arange(0, PIXELS)
            tile = tl.load(
                y + pixel[:, None] * y_pixel + channel[None, :],
                mask=(pixel < pixels)[:, None] & inside[None, :],
                other=0.0,
            )
            average += tl.sum(tile.to(tl.float32), axis=0)
        average /= pixels
        tl.store(mean + sample * channels + channel, average, mask=inside)
        total += w * average[None, :]
    value = tl.sum(total, axis=1) + tl.load(bias + row, mask=row < classes, other=0.0)
    where = logits + sample * classes + row
    tl.store(where, value.to(logits.dtype.element_ty), mask=row < classes)


@jit
def _classify_backward_kernel(
    e, weight, mean, dy, dweight, dbias, batch, channels, classes, share,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Some channels of all samples."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, CLASSES)
    inside = (row < classes)[:, None] & (channel < channels)[None, :]
    in_weight = row[:, None] * channels + channel[None, :]
    w = tl.load(weight + in_weight, mask=inside, other=0.0) * share
    dw = tl.zeros((CLASSES, COLUMNS), tl.float32)
    db = tl.zeros((CLASSES,), tl.float32)
    for start in range(0, batch, SAMPLES):
        sample = start + tl.arange(0, SAMPLES)
        mask = (sample < batch)[:, None] & (row < classes)[None, :]
        given = tl.load(e + sample[:, None] * classes + row[None, :], mask=mask, other=0.0)
        given = given.to(tl.float32)
        where = sample[:, None] * channels + channel[None, :]
        mask = (sample < batch)[:, None] & (channel < channels)[None, :]
        average = tl.load(mean + where, mask=mask, other=0.0)
        found = tl.dot(given, w, input_precision="ieee")
        tl.store(dy + where, found.to(dy.dtype.element_ty), mask=mask)
        dw += tl.dot(tl.trans(given), average, input_precision="ieee")
        db += tl.sum(given, axis=0)
    tl.store(dweight + in_weight, dw, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(dbias + row, db, mask=row < classes)
