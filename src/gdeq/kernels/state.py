"""The tensors of a state as one batched vector and back, in one launch each way.

`StateSpace._join` and `StateSpace._split` are the plain twins.  *Parts* here are the tensors of a
state with their dimensions in the order of memory, as ``(batch, size)`` each.  A program moves one
chunk of one part of one sample, and casts it on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.kernels.choice import on_device

BLOCK = 2048  # numbers in a chunk
WARPS = 4
ALIGNMENT = 16
MOST_PARTS = 8
MOST_SAMPLES = 65535  # of a grid's second dimension


@triton.jit(do_not_specialize=["at1", "at2", "at3", "at4", "at5", "at6", "at7"])
def _move(
    rows, parts, table,
    at1: tl.int64, at2: tl.int64, at3: tl.int64, at4: tl.int64, at5: tl.int64, at6: tl.int64,
    at7: tl.int64, d,
    JOIN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts: the first one; the others lie at1, at2, ... numbers from it, wherever that is.

    ALIGNED: all those distances, and all sizes, are multiples of 16 (as in `kernels.product`).
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.load(table + chunk * 5)
    row = tl.load(table + chunk * 5 + 1)
    size = tl.load(table + chunk * 5 + 2)
    offset = tl.load(table + chunk * 5 + 3)
    length = tl.load(table + chunk * 5 + 4)
    at = part * 0
    at = tl.where(part == 1, at1, at)
    at = tl.where(part == 2, at2, at)
    at = tl.where(part == 3, at3, at)
    at = tl.where(part == 4, at4, at)
    at = tl.where(part == 5, at5, at)
    at = tl.where(part == 6, at6, at)
    at = tl.where(part == 7, at7, at)
    if ALIGNED:
        row, size = tl.multiple_of(row, 16), tl.multiple_of(size, 16)
        offset, length = tl.multiple_of(offset, 16), tl.multiple_of(length, 16)
        at = tl.multiple_of(at, 16)
    lane = tl.arange(0, BLOCK)
    inside = lane < length
    in_rows = rows + (b * d + row + lane)
    in_parts = parts + (at + b * size + offset + lane)
    if JOIN:
        value = tl.load(in_parts, mask=inside)
        tl.store(in_rows, value.to(rows.dtype.element_ty), mask=inside)
    else:
        value = tl.load(in_rows, mask=inside)
        tl.store(in_parts, value.to(parts.dtype.element_ty), mask=inside)


@cache
def _table(sizes: tuple[int, ...], device: torch.device) -> Tensor:  # (chunks, 5)
    """For each chunk: its part, where it is in a row, the part's size, where in it, how long."""
    entries = []
    start = 0
    for part, size in enumerate(sizes):
        for offset in range(0, size, BLOCK):
            entries.append((part, start + offset, size, offset, min(BLOCK, size - offset)))
        start += size
    return torch.tensor(entries, dtype=torch.int64, device=device)


def takes(batch: int, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether parts of these dtypes can be joined and split here."""
    alike = all(dtype == dtypes[0] for dtype in dtypes)
    return alike and len(dtypes) <= MOST_PARTS and 0 < batch <= MOST_SAMPLES


def join(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # (batch, size) each
    """Their rows beside each other, in this dtype: (batch, d)."""
    return _Join.apply(dtype, *parts)


def split(rows: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:  # (batch, d)
    """The columns of each part, (batch, size), in this dtype.

    They lie in one buffer, one after another; to autograd they are tensors of their own.
    """
    return list(_Split.apply(rows, tuple(sizes), dtype))


def split_buffer(rows: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The one buffer, (batch·d,), of what `split` returns; without autograd."""
    buffer = rows.new_empty(rows.numel(), dtype=dtype)
    pieces = buffer.split([len(rows) * size for size in sizes])
    _launch(rows.contiguous(), [piece.view(len(rows), -1) for piece in pieces], joins=False)
    return buffer


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        sizes = tuple(part.shape[1] for part in parts)
        ctx.sizes, ctx.dtype = sizes, parts[0].dtype
        rows = parts[0].new_empty(len(parts[0]), sum(sizes), dtype=dtype)
        _launch(rows, [part.contiguous() for part in parts], joins=True)
        return rows

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        return None, *_Split.apply(rows, ctx.sizes, ctx.dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.dtype = rows.dtype
        buffer = split_buffer(rows, sizes, dtype)
        pieces = buffer.split([len(rows) * size for size in sizes])
        # As .data: views of one buffer could not be changed in place, one without the others.
        return tuple(piece.view(len(rows), -1).data for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Any, ...]:
        return _Join.apply(ctx.dtype, *parts), None, None


def _launch(rows: Tensor, parts: list[Tensor], joins: bool) -> None:
    sizes = tuple(part.shape[1] for part in parts)
    first = parts[0]
    unused = [first] * (MOST_PARTS - len(parts))
    at = [
        (part.data_ptr() - first.data_ptr()) // first.element_size()
        for part in [*parts[1:], *unused]
    ]
    table = _table(sizes, rows.device)
    with on_device(rows):
        _move[len(table), len(rows)](
            rows, first, table, *at, rows.shape[1],
            JOIN=joins, ALIGNED=all(number % ALIGNMENT == 0 for number in (*sizes, *at)),
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
