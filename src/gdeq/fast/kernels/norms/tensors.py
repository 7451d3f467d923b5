"""Where the tensors of the norms lie, which of them kernels take, and the tiles they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.fast.kernels.device import available

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_LIMIT = 2**31  # offsets within one sample are 32-bit integers
VECTOR_BYTES = 16  # the most that one instruction reads

Map = tuple[Tensor, int, int]  # as kernels take it: memory, stride of samples, stride of pixels


# ---- memory


def as_map(x: Tensor, unit: int = 1) -> Map:
    """x, or a copy in channels-last order, with its strides in units of so many numbers."""
    strides = pixel_strides(x)
    if strides is None:
        x = empty_like(x).copy_(x)
        strides = pixel_strides(x)
        assert strides is not None
    sample, pixel = strides
    return x, sample // unit, pixel // unit


def as_pairs(x: Tensor) -> Map:
    """A channels-last half-precision map (see `in_pairs`), two numbers to an int32."""
    _, sample, pixel = as_map(x, 2)
    return x.permute(0, 2, 3, 1).view(torch.int32), sample, pixel


def pixel_strides(x: Tensor) -> tuple[int, int] | None:
    """Strides of samples and pixels, if channels are adjacent and pixels evenly spaced."""
    _, channels, height, width = x.shape
    sample, channel, row, column = x.stride()
    pixel = column if width > 1 else row if height > 1 else channels
    even = (width == 1 or column == pixel) and (height == 1 or row == width * pixel)
    return (sample, pixel) if even and (channels == 1 or channel == 1) else None


def in_pairs(x: Tensor) -> bool:
    """Whether `as_pairs` takes it: all pixels of a half-precision map begin at whole int32s."""
    sample, _, row, pixel = x.stride()
    even = not any(number % 2 for number in (sample, row, pixel, x.storage_offset()))
    return x.element_size() == 2 and even and pixel_strides(x) is not None


def in_vectors(x: Tensor) -> bool:
    """Whether all pixels of a half-precision map begin at whole vectors of 16 bytes."""
    strides = pixel_strides(x)
    whole = strides is not None and not any(2 * stride % VECTOR_BYTES for stride in strides)
    return whole and x.element_size() == 2 and x.data_ptr() % VECTOR_BYTES == 0


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


# ---- tiles


@dataclass(frozen=True)
class Tuning:
    """tile: numbers that a program holds in registers; larger maps go by in chunks.
    per_thread: numbers of a tile for one thread, which sets the number of warps.
    run_bytes: the least that a program reads of one pixel, if the groups allow it.
    """

    tile: int = 32768
    per_thread: int = 64
    max_warps: int = 16
    run_bytes: int = 32

    def warps(self, numbers: int) -> int:
        return power_of_two(min(self.max_warps, max(1, numbers // (32 * self.per_thread))))


@dataclass(frozen=True)
class Tile:
    """What a program works on at once: `rows` pixels of `block` groups of one sample.

    Each group has `lanes` columns.  Aligned tiles have a power of two of them, of which some may
    stand for no channel.  Packed tiles have as many lanes as the group has channels, and the
    `columns` of all groups are the channels as they lie; beside them may be `room` more channels.
    """

    pixels: int
    groups: int
    channels: int  # of a group
    block: int
    lanes: int
    columns: int
    rows: int
    warps: int
    unit: int = 1  # strides are multiples of it
    room: int = 0

    def programs(self, batch: int) -> int:
        return batch * (self.groups // self.block)

    def sizes(self) -> dict[str, int]:
        """What kernels of such tiles take."""
        there = self.block * self.channels + self.room
        return {
            "PIXELS": self.pixels,
            "GROUPS": self.groups,
            "CPG": self.channels,
            "BLOCK": self.block,
            "LANES": self.lanes,
            "COLUMNS": self.columns,
            "ROWS": self.rows,
            "UNIT": self.unit,
            "MASKED": self.pixels % self.rows != 0 or self.columns != there,
            "num_warps": self.warps,
        }


MOST_PACKED = 64  # columns of a packed tile, unless it has room beside


def aligned_tile(tuning: Tuning, x: Tensor, groups: int) -> Tile:
    channels, height, width = x.shape[1:]
    size = channels // groups
    block = 1
    while groups % (2 * block) == 0 and block * size * x.element_size() < tuning.run_bytes:
        block *= 2
    lanes = power_of_two(size)
    columns = block * lanes
    rows = _rows(height * width, columns, tuning.tile)
    warps = tuning.warps(rows * columns)
    return Tile(height * width, groups, size, block, lanes, columns, rows, warps)


def packed_tile(
    tuning: Tuning, maps: Sequence[Tensor], groups: int, room: int = 0
) -> Tile | None:  # maps: all that are read or written
    """For groups that do not fill whole vectors, where several do so together; else None.

    In an aligned tile such a group begins in the middle of a vector, and its numbers go one by one.
    Where there is room beside the groups, the only tile there is.
    """
    like = maps[0]
    height, width = like.shape[2:]
    size, pixels = (like.shape[1] - room) // groups, height * width
    unit = VECTOR_BYTES // 2 if all(x.shape == like.shape and in_vectors(x) for x in maps) else 1
    block = groups
    if not room:
        if unit == 1 or size % unit == 0 or power_of_two(size) == size:
            return None
        whole = (b for b in range(1, groups + 1) if b * size % unit == 0 and groups % b == 0)
        block = next(whole, 0)
    columns = power_of_two(block * size + room)
    few = block > 0 and columns <= MOST_PACKED and pixels * columns >= 32 * unit
    if not (few or room):
        return None
    rows = _rows(pixels, columns, tuning.tile)
    warps = tuning.warps(rows * columns)
    return Tile(pixels, groups, size, block, size, columns, rows, warps, unit, room)


def _rows(pixels: int, columns: int, most: int) -> int:
    return max(1, min(power_of_two(pixels), most // columns))


def power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()


def room_beside(channels: int, groups: int) -> int:
    """So many channels of zeros beside the groups `norm_act` takes."""
    per_group = channels // groups
    return groups * (power_of_two(per_group) - per_group)
