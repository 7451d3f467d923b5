"""How large a program's tile is, and the launch of a kernel with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.jit import triton


@dataclass
class Tuning:
    """run_bytes: the least that a program reads of one pixel, if the groups allow it.
    tile: elements held in registers; larger inputs go by in chunks.
    per_thread: elements of a tile for one thread, which sets the number of warps.
    """

    run_bytes: int = 32
    tile: int = 32768
    per_thread: int = 64
    max_warps: int = 16


# One entry for each kernel; the benchmark varies them.
TUNING = {
    "norm": Tuning(),
    "norm_backward": Tuning(tile=16384, per_thread=32),
    "block_end": Tuning(),
    "block_end_backward": Tuning(run_bytes=16, tile=8192, per_thread=32),  # else registers spill
    "fuse": Tuning(tile=8192, per_thread=32, max_warps=8),
    "fuse_backward": Tuning(tile=8192, per_thread=16, max_warps=8),
}


@dataclass(frozen=True)
class Tile:
    group_block: int
    lanes: int
    pixels: int
    warps: int


def choose_tile(tuning: Tuning, pixels: int, channels: int, groups: int, itemsize: int) -> Tile:
    per_group = channels // groups
    lanes = _power_of_two(per_group)
    block = 1
    while block < groups and block * per_group * itemsize < tuning.run_bytes:
        block *= 2
    columns = block * lanes
    rows = _power_of_two(pixels)
    while rows > 1 and rows * columns > tuning.tile:
        rows //= 2
    warps = min(tuning.max_warps, max(1, rows * columns // (32 * tuning.per_thread)))
    return Tile(block, lanes, rows, _power_of_two(warps))


def _power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()


def room_beside(channels: int, groups: int) -> int:
    """So many channels of zeros a kernel can write: as many as its tiles have columns to spare."""
    per_group = channels // groups
    return groups * (_power_of_two(per_group) - per_group)


def tile_of(kernel: str, x: Tensor, groups: int) -> Tile:
    """The tile that a kernel of `TUNING` has for x, (batch, channels, height, width)."""
    _, channels, height, width = x.shape
    return choose_tile(TUNING[kernel], height * width, channels, groups, x.element_size())


def launch(
    function: Any, kernel: str, like: Tensor, groups: int, *arguments: Any, **options: Any
) -> None:
    """One program for each sample of `like` and each block of groups.

    kernel: the entry of `TUNING`.  options: what the kernel takes beyond the sizes that all take.
    """
    batch, channels, height, width = like.shape
    tile = tile_of(kernel, like, groups)
    with on_device(like):
        function[(batch * triton.cdiv(groups, tile.group_block),)](
            *arguments,
            **options,
            PIXELS=height * width,
            GROUPS=groups,
            CPG=channels // groups,
            GROUP_BLOCK=tile.group_block,
            LANES=tile.lanes,
            ROWS=tile.pixels,
            num_warps=tile.warps,
        )
