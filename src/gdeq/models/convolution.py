"""Convolutions whose weights' gradients are computed aside.

In a backward pass the gradients of activations are a chain, each waiting for the one before.  Those
of weights are at its side: nobody waits for them until all weights are gathered at the end.  On a
GPU they go to streams of their own, and a chain of short kernels becomes half as long.

    weight ──→ _Aside ──┐
    x, weight ──────────┴→ _Convolution ──→ y

_Aside has y as its result, and _Convolution passes it on.  Backward, _Convolution makes the
gradient of x and hands that of y to _Aside, which makes the weight's.  _Aside was called under
another stream, so autograd runs its backward there, lets it wait for the gradient of y, and lets
who reads its result wait for it.  A product with Jᵀ alone asks for no weight's gradient, and
autograd then leaves _Aside out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from gdeq.kernels.autograd import differentiable, differentiates

weights_aside = True
# Each gradient of a weight fills a part of the GPU alone; one after another they would be a chain
# longer than the one that they are aside of.
STREAMS = 6
_sides: dict[torch.device, list[torch.cuda.Stream]] = {}


def convolution(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """`conv2d`; on a GPU as above, where the weight is the result of an operation: autograd lets
    that wait for its gradient, but not whoever reads the gradient of a leaf."""
    computed = weight.grad_fn is not None and differentiates(weight)
    if not (weights_aside and x.is_cuda and computed):
        return conv2d(x, weight, stride=stride, padding=padding)
    return apart(x, weight, stride, padding, _side_of(x.device))


def apart(
    x: Tensor, weight: Tensor, stride: int, padding: int, side: torch.cuda.Stream | None
) -> Tensor:
    """side: the stream for the weight's gradient; None for the current one."""
    x = x.to(weight.dtype)
    settings = (stride, stride), (padding, padding)
    with torch.no_grad():
        y = conv2d(x, weight, None, *settings)
    if side is not None:
        x.record_stream(side)
    with torch.cuda.stream(side):
        y = _Aside.apply(weight, x.detach(), y, settings)  # allocates nothing: a graph may record
    return _Convolution.apply(x, weight, y, settings)


def _side_of(device: torch.device) -> torch.cuda.Stream:
    """The next stream in turn."""
    if device not in _sides:
        _sides[device] = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    _sides[device].append(_sides[device].pop(0))
    return _sides[device][-1]


def _backward(e: Tensor, x: Tensor, weight: Tensor, settings: Any, which: int) -> Tensor:
    mask = [place == which for place in range(3)]
    found = torch.ops.aten.convolution_backward(
        e, x, weight, None, *settings, (1, 1), False, (0, 0), 1, mask
    )
    return found[which]


class _Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, y: Tensor, settings: Any) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.settings = settings
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        weight, x = ctx.saved_tensors
        return _backward(e, x, weight, ctx.settings, 1), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor, settings: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are PyTorch's

            def plain(x: Tensor, weight: Tensor) -> Tensor:
                return conv2d(x, weight, None, *ctx.settings)

            found = differentiable(plain, (x, weight), ctx.needs_input_grad[:2], e)
            return *found, None, None
        dx = _backward(e, x, weight, ctx.settings, 0) if ctx.needs_input_grad[0] else None
        return dx, None, e, None
