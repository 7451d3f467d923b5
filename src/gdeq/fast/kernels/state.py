"""The tensors of a state as one batched vector and back, in one launch each way.

`gdeq.state.StateSpace.join` and `split` do the same in plain PyTorch.  *Parts* here are the tensors
of a state with their dimensions in the order of memory, as ``(batch, size)`` each.  A program moves
one chunk of one part of one sample, and casts it on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.kernels.chunks import ALIGNMENT
from gdeq.fast.kernels.device import MOST_SAMPLES, on_device

BLOCK = 2048  # numbers in a chunk
WARPS = 4
MOST_PARTS = 8


@triton.jit(do_not_specialize=["at1", "at2", "at3", "at4", "at5", "at6", "at7"])
def _move(
    rows, parts, table,
    at1: tl.int64, at2: tl.int64, at3: tl.int64, at4: tl.int64, at5: tl.int64, at6: tl.int64,
    at7: tl.int64, d, factor,
    JOIN: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts: the first one; the others lie at1, at2, ... numbers from it, wherever that is.

    factor: of each sample, if SCALED.
    ALIGNED: all those distances, and all sizes, are multiples of 16 (as in `chunks.place`).
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, row, size, offset, length, at = _chunk(
        table, chunk, at1, at2, at3, at4, at5, at6, at7, ALIGNED, BLOCK
    )
    inside = lane < length
    in_rows = rows + (b * d + row + lane)
    in_parts = parts + (at + b * size + offset + lane)
    if JOIN:
        value = tl.load(in_parts, mask=inside).to(rows.dtype.element_ty)
        if SCALED:
            value *= tl.load(factor + b)
        tl.store(in_rows, value, mask=inside)
    else:
        value = tl.load(in_rows, mask=inside)
        if SCALED:
            value *= tl.load(factor + b)
        tl.store(in_parts, value.to(parts.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["at1", "at2", "at3", "at4", "at5", "at6", "at7"])
def _squares(
    parts, table, partial,
    at1: tl.int64, at2: tl.int64, at3: tl.int64, at4: tl.int64, at5: tl.int64, at6: tl.int64,
    at7: tl.int64,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ x² of one chunk; partial: (batch, chunks) in float64."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, _row, size, offset, length, at = _chunk(
        table, chunk, at1, at2, at3, at4, at5, at6, at7, ALIGNED, BLOCK
    )
    value = tl.load(parts + (at + b * size + offset + lane), mask=lane < length, other=0.0)
    wide = value.to(tl.float32).to(tl.float64)
    tl.store(partial + b * tl.num_programs(0) + chunk, tl.sum(wide * wide, 0))


@triton.jit
def _chunk(
    table, chunk, at1, at2, at3, at4, at5, at6, at7, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where it is in a row, in its part, and where that lies; with the lanes of its numbers."""
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
    return tl.arange(0, BLOCK), row, size, offset, length, at


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


def join(parts: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """The rows of the parts, (batch, size) each, beside each other in this dtype: (batch, d).

    factor: of each sample, (batch,) in this dtype; without autograd.
    """
    return _Join.apply(dtype, *parts) if factor is None else _joined(parts, dtype, factor)


def split(
    rows: Tensor, sizes: Sequence[int], dtype: torch.dtype, factor: Tensor | None = None
) -> list[Tensor]:
    """The columns of each part of the rows, (batch, d), in this dtype: (batch, size).

    They lie in one buffer, one after another; to autograd they are tensors of their own.

    factor: of each sample, (batch,) in the dtype of the rows; without autograd.
    """
    if factor is None:
        return list(_Split.apply(rows, tuple(sizes), dtype))
    return _pieces(split_buffer(rows, sizes, dtype, factor), sizes, len(rows))


def norms(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # -> (batch,)
    """Euclidean norms of their rows beside each other, summed in float64; not of float64."""
    parts = [part.contiguous() for part in parts]
    sizes, at = tuple(part.shape[1] for part in parts), _distances(parts)
    table, first = _table(sizes, parts[0].device), parts[0]
    partial = torch.empty(len(first), len(table), dtype=torch.float64, device=first.device)
    with on_device(first):
        _squares[len(table), len(first)](
            first, table, partial, *at,
            ALIGNED=_aligned(sizes, at), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return partial.sum(1).sqrt_().to(dtype)


def split_buffer(
    rows: Tensor, sizes: Sequence[int], dtype: torch.dtype, factor: Tensor | None = None
) -> Tensor:
    """The one buffer, (batch·d,), of what `split` returns; without autograd."""
    buffer = rows.new_empty(rows.numel(), dtype=dtype)
    _launch(rows.contiguous(), _pieces(buffer, sizes, len(rows)), False, factor)
    return buffer


def _pieces(buffer: Tensor, sizes: Sequence[int], batch: int) -> list[Tensor]:
    return [piece.view(batch, -1) for piece in buffer.split([batch * size for size in sizes])]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    rows = parts[0].new_empty(len(parts[0]), sum(part.shape[1] for part in parts), dtype=dtype)
    _launch(rows, [part.contiguous() for part in parts], True, factor)
    return rows


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        ctx.sizes, ctx.dtype = tuple(part.shape[1] for part in parts), parts[0].dtype
        return _joined(parts, dtype)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        return None, *_Split.apply(rows, ctx.sizes, ctx.dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.dtype = rows.dtype
        pieces = _pieces(split_buffer(rows, sizes, dtype), sizes, len(rows))
        # As .data: views of one buffer could not be changed in place, one without the others.
        return tuple(piece.data for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Any, ...]:
        return _Join.apply(ctx.dtype, *parts), None, None


def _launch(rows: Tensor, parts: list[Tensor], joins: bool, factor: Tensor | None) -> None:
    sizes, at = tuple(part.shape[1] for part in parts), _distances(parts)
    table = _table(sizes, rows.device)
    with on_device(rows):
        _move[len(table), len(rows)](
            rows, parts[0], table, *at, rows.shape[1], factor,
            JOIN=joins, SCALED=factor is not None, ALIGNED=_aligned(sizes, at),
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _distances(parts: Sequence[Tensor]) -> list[int]:
    """Of the others from the first, in numbers."""
    first = parts[0]
    unused = [first] * (MOST_PARTS - len(parts))
    return [
        (part.data_ptr() - first.data_ptr()) // first.element_size()
        for part in [*parts[1:], *unused]
    ]


def _aligned(sizes: Sequence[int], at: Sequence[int]) -> bool:
    return all(number % ALIGNMENT == 0 for number in (*sizes, *at))
