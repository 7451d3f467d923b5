"""Convolutions whose weights' gradients are computed on other streams.

In a backward pass the gradients of activations are a chain, each waiting for the one before.  But
nobody waits for those of the weights until all of them are gathered at the end.  So on a GPU they
go to streams of their own, and a chain of short kernels becomes half as long.

    weight ──→ _Aside ──┐
    x, weight ──────────┴→ _Convolution ──→ y

_Aside has y as its result, and _Convolution passes it on.  Backward, _Convolution makes the
gradient of x and hands that of y to _Aside, which makes the weight's.  _Aside was called under
another stream: autograd runs its backward there, after the gradient of y has arrived, and lets
the readers of its result wait for it.  A product with Jᵀ alone asks for no weight's gradient, and
autograd then leaves _Aside out.

Where a 3×3 convolution has few outputs, it is faster as one with twice as many for two places at
once (`pair`).  Its gradient in x is such a convolution too, of that in y with the weight
transposed, and has few outputs where x has few channels.  `Pairs` holds both weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from gdeq.fast import streams
from gdeq.fast.kernels.autograd import differentiable, differentiates, wanted_now

# The gradient of one weight fills only a part of the GPU.  On one stream they would be a chain that
# is longer than that of the activations.
STREAMS = 6
_sides: dict[torch.device, list[torch.cuda.Stream]] = {}


@dataclass(frozen=True)
class Pairs:
    """`pair` of a 3×3 convolution's weight and of its `transposed`; None where it is not faster.

    They have no autograd history: gradients go to the weight itself.
    """

    there: Tensor | None = None
    back: Tensor | None = None


def pair(weight: Tensor) -> Tensor:  # (k, c, 3, 3) -> (2 k, c, 3, 4)
    """Output i at place 2j + p is output p·k + i at place j of a convolution with stride (1, 2).

    Channels-last, both results are the same memory.  cuDNN has faster kernels for 64 and 128
    outputs than for 32 and 64; it is 12/9 of the arithmetic.
    """
    k, c, height, width = weight.shape
    wide = weight.new_zeros(2, k, height, width + 1, c)
    for place in range(2):
        wide[place, :, :, place : place + width] = weight.permute(0, 2, 3, 1)
    return wide.flatten(0, 1).permute(0, 3, 1, 2)


def transposed(weight: Tensor) -> Tensor:  # (k, c, 3, 3) -> (c, k, 3, 3)
    """The convolution with it is the gradient in x of one with `weight`, both with padding 1."""
    return weight.flip(2, 3).transpose(0, 1)


def in_pairs(x: Tensor, wide: Tensor) -> Tensor:
    """The convolution of x, whose width is even, with a weight that `pair` made; padding 1."""
    y = conv2d(x, wide, stride=(1, 2), padding=1)
    batch, outputs, height, half = y.shape
    y = y.permute(0, 2, 3, 1).reshape(batch, height, 2 * half, outputs // 2)
    return y.permute(0, 3, 1, 2)


def convolution(
    x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0, pairs: Pairs | None = None
) -> Tensor:
    """`conv2d`; on a GPU as above where the weight is the result of an operation: autograd lets
    that operation wait for its gradient, but not those who read the gradient of a leaf.

    pairs: of this weight, which is 3×3, with padding 1.
    """
    if pairs is not None and x.shape[3] % 2:
        pairs = None
    if not differentiates(x, weight):
        if pairs is not None and pairs.there is not None:
            return in_pairs(x, pairs.there)
        return conv2d(x, weight, stride=stride, padding=padding)
    computed = weight.grad_fn is not None and differentiates(weight)
    if not (x.is_cuda and computed):
        return conv2d(x, weight, stride=stride, padding=padding)
    return apart(x, weight, stride, padding, _side_of(x.device), pairs)


def apart(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    side: torch.cuda.Stream | None,
    pairs: Pairs | None = None,
) -> Tensor:
    """side: the stream for the weight's gradient; None for the current one."""
    x = x.to(weight.dtype)
    settings = (stride, stride), (padding, padding)
    there, back = (None, None) if pairs is None else (pairs.there, pairs.back)
    with torch.no_grad():
        y = conv2d(x, weight, None, *settings) if there is None else in_pairs(x, there)
    if side is not None:
        x.record_stream(side)
    with torch.cuda.stream(side):
        y = _Aside.apply(weight, x.detach(), y, settings)  # allocates nothing: a graph may record
    return _Convolution.apply(x, weight, y, settings, back)


def _side_of(device: torch.device) -> torch.cuda.Stream:
    """The next stream in turn."""
    if device not in _sides:
        _sides[device] = streams.for_all(device, STREAMS)
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
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, y: Tensor, settings: Any, back: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, back)
        ctx.settings = settings
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        x, weight, back = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are PyTorch's

            def plain(x: Tensor, weight: Tensor) -> Tensor:
                return conv2d(x, weight, None, *ctx.settings)

            found = differentiable(plain, (x, weight), ctx.needs_input_grad[:2], e)
            return *found, None, None, None
        dx = None
        if wanted_now(ctx, (x, weight, x, None, back))[0]:
            paired = back is not None
            dx = in_pairs(e, back) if paired else _backward(e, x, weight, ctx.settings, 0)
        return dx, None, e, None, None
