"""A 3×3 convolution of maps that are constant over the image, relu(bias) in each channel.

Its result is the same for all samples.  At a pixel it is the sum of what each of the nine places
makes of the channels, over those places that lie inside the image (the rest is padded with zeros):
two launches, where PyTorch's operations would be seven.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.kernels.device import on_device

BLOCK = 512  # channels at once
OUTPUTS = 128  # of a program


@triton.jit
def _of_places(weight, bias, out, channels, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Σ_c weight_c relu(bias_c) of one place of one output, (outputs, 3, 3)."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    if GIVEN:
        for begin in range(0, channels, BLOCK):
            c = begin + tl.arange(0, BLOCK)
            w = tl.load(weight + row * channels + c, mask=c < channels, other=0.0)
            b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
            # As the norm's kernel would write it, in the dtype of the convolution.
            inner = tl.where(b < 0, 0.0, b).to(weight.dtype.element_ty)  # NaN stays
            total += w.to(tl.float32) * inner.to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=("height", "width", "outputs"))
def _over_image(places, out, height, width, outputs, BLOCK: tl.constexpr):
    """One pixel of some outputs."""
    pixel = tl.program_id(0)
    y, x = pixel // width, pixel % width
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(9):
        other_y, other_x = y + place // 3 - 1, x + place % 3 - 1
        inside = (other_y >= 0) & (other_y < height) & (other_x >= 0) & (other_x < width)
        wanted = tl.where(inside, outputs, 0)
        total += tl.load(places + k * 9 + place, mask=k < wanted, other=0.0)
    tl.store(out + pixel * outputs + k, total.to(out.dtype.element_ty), mask=k < outputs)


def takes(weight: Tensor) -> bool:  # (outputs, channels, 3, 3)
    half = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return half and weight.shape[2:] == (3, 3) and weight.permute(0, 2, 3, 1).is_contiguous()


def convolved(weight: Tensor, bias: Tensor | None, height: int, width: int) -> Tensor:
    """(1, outputs, height, width), channels last, in the dtype of the weight; without autograd."""
    outputs, channels = weight.shape[:2]
    places = weight.new_empty(outputs, 9, dtype=torch.float32)
    out = weight.new_empty(1, height, width, outputs)
    given = bias is not None
    with on_device(weight):
        _of_places[(outputs * 9,)](
            weight, bias if given else weight, places, channels, GIVEN=given, BLOCK=BLOCK
        )
        _over_image[(height * width, triton.cdiv(outputs, OUTPUTS))](
            places, out, height, width, outputs, BLOCK=OUTPUTS
        )
    return out.permute(0, 3, 1, 2)
