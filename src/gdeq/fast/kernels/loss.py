"""The cross-entropy of a batch, in one launch, with its gradient already made.

With probabilities p = softmax(x) and targets t, smoothed as PyTorch does,

    loss = −mean_samples Σ_k t_k log p_k,    dx = (p Σ_k t_k − t) / batch.

PyTorch takes 3 launches there and 5 back for labels, and twice as many for probabilities; each
has a few thousand numbers, and nothing runs beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdeq.engine import runs_fast
from gdeq.fast.kernels import on_device
from gdeq.fast.kernels.autograd import differentiable
from gdeq.fast.kernels.jit import jit, tl, triton

MOST_CLASSES = 1024
MOST = 65536  # numbers of one program; beyond, PyTorch's many are faster, by guess
TILE = 2048  # numbers at once, in one program


def cross_entropy_plain(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, labels, label_smoothing=label_smoothing)


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean over the batch, in float32 at least.

    logits: (batch, classes).  labels: (batch,), each a class, or probabilities (batch, classes).
    Labels are trusted: none is ignored (PyTorch's −100), and one that is no class has no target.
    """
    if not _takes(logits, labels):
        return cross_entropy_plain(logits, labels, label_smoothing)
    found: Tensor = _CrossEntropy.apply(logits, labels, label_smoothing)
    return found


def _takes(logits: Tensor, labels: Tensor) -> bool:
    if not runs_fast(logits.device) or labels.requires_grad:
        return False
    soft = labels.is_floating_point() and labels.shape == logits.shape
    hard = labels.dtype == torch.int64 and labels.shape == logits.shape[:1]
    few = logits.dim() == 2 and 0 < logits.shape[1] <= MOST_CLASSES and 0 < logits.numel() <= MOST
    return (soft or hard) and few and logits.dtype != torch.float64


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        batch, classes = logits.shape
        loss = logits.new_empty((), dtype=torch.float32)
        gradient = logits.new_empty(logits.shape, dtype=torch.float32)
        lanes = max(16, triton.next_power_of_2(classes))
        with on_device(logits):
            _cross_entropy_kernel[(1,)](
                logits.contiguous(), labels.contiguous(), loss, gradient, batch, classes,
                label_smoothing, SOFT=labels.is_floating_point(), CLASSES=lanes,
                SAMPLES=max(1, TILE // lanes), num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(logits, labels, gradient)
        ctx.label_smoothing = label_smoothing
        return loss

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        logits, labels, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(logits: Tensor) -> Tensor:
                return cross_entropy_plain(logits, labels, ctx.label_smoothing)

            return *differentiable(plain, [logits], [True], e), None, None
        # Into the dtype of the logits, in one launch.
        return torch.mul(gradient, e, out=torch.empty_like(logits)), None, None


@jit
def _cross_entropy_kernel(
    logits, labels, loss, gradient, batch, classes, smoothing,
    SOFT: tl.constexpr, CLASSES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, CLASSES)[None, :]
    losses = tl.zeros((SAMPLES, CLASSES), tl.float32)
    for start in range(0, batch, SAMPLES):
        sample = start + tl.arange(0, SAMPLES)
        row = sample[:, None]
        mask = (row < batch) & (column < classes)
        at = row * classes + column
        x = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
        top = tl.max(tl.where(column < classes, x, -float("inf")), axis=1)[:, None]
        power = tl.where(column < classes, tl.exp(x - top), 0.0)
        total = tl.sum(power, axis=1)[:, None]
        if SOFT:
            target = tl.load(labels + at, mask=mask, other=0.0).to(tl.float32)
        else:
            label = tl.load(labels + sample, mask=sample < batch, other=0)[:, None]
            target = tl.where(column == label, 1.0, 0.0)
        target = tl.where(mask, target * (1 - smoothing) + smoothing / classes, 0.0)
        # Where the target is 0 the logit may be −∞.
        log = tl.where(target != 0, x - top - tl.log(total), 0.0)
        losses -= target * log
        share = power / total
        if SOFT:
            share *= tl.sum(target, axis=1)[:, None]
        tl.store(gradient + at, (share - target) / batch, mask=mask)
    tl.store(loss, tl.sum(losses) / batch)
