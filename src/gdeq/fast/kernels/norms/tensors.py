"""What the kernels take: where tensors lie, and which go to the plain functions instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdeq.fast.kernels.choice import available

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_LIMIT = 2**31  # offsets within one sample are 32-bit integers

Memory = tuple[Tensor, int, int]


def channels_last(x: Tensor) -> Memory:
    """x, or a copy in channels-last order, with its strides of samples and pixels."""
    strides = pixel_strides(x)
    if strides is None:
        x = empty_channels_last(x.shape, x.dtype, x.device).copy_(x)
        strides = pixel_strides(x)
        assert strides is not None
    return x, *strides


def channels_last_or(instead: Tensor, x: Tensor | None) -> Memory:
    """The same; `instead` fills the place of a tensor that is not there and not looked at."""
    return (instead, 0, 0) if x is None else channels_last(x)


def pixel_strides(x: Tensor) -> tuple[int, int] | None:
    """Strides of samples and pixels, if channels are adjacent and pixels evenly spaced."""
    _, channels, height, width = x.shape
    sample, channel, row, column = x.stride()
    pixel = column if width > 1 else row if height > 1 else channels
    even = (width == 1 or column == pixel) and (height == 1 or row == width * pixel)
    return (sample, pixel) if even and (channels == 1 or channel == 1) else None


def empty_channels_last(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    batch, channels, height, width = shape
    memory = torch.empty((batch, height, width, channels), dtype=dtype, device=device)
    return memory.permute(0, 3, 1, 2)


def empty_like(x: Tensor) -> Tensor:
    return empty_channels_last(x.shape, x.dtype, x.device)


def runs(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors; the plain functions take all."""
    present = [tensor for tensor in tensors if tensor is not None]
    return available(present[0].device) and all(
        tensor.dtype in KERNEL_DTYPES and tensor.numel() > 0 and _extent(tensor) < INDEX_LIMIT
        for tensor in present
    )


def _extent(x: Tensor) -> int:
    """How far the last number of a sample lies behind its first."""
    return sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))


def destination(like: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    if out is None:
        return empty_channels_last(like.shape, dtype, like.device)
    if out.shape != like.shape or pixel_strides(out) is None:
        raise ValueError(
            f"out must be channels-last of shape {tuple(like.shape)}, got shape "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    return out


def deliver(y: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A plain function's result, where and as a kernel leaves it."""
    if out is not None:
        return out.copy_(y)
    return y.to(dtype, memory_format=torch.channels_last)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
