"""`ProductInverse` times a vector, in three kernels: inner products, weights, combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from gdeq.fast.kernels.chunks import ALIGNMENT, numbers, place, places, table, weighted_steps, work
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.verdict import AHEAD, one_more

if TYPE_CHECKING:
    from gdeq.fast.product import ProductInverse

BLOCK = 1024  # numbers in a chunk
TILE = 4  # stored steps that a program reads at once
DOTS_WARPS, APPLY_WARPS = 1, 4


@triton.jit
def _widened(x):
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x


@triton.jit(do_not_specialize=["scale_stride", "begin", "end"])
def _dots_of(
    x, steps, scales, table, partial, squares,
    batch, d, step_stride, scale_stride, chunks, begin, end,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """a_j = s_jᵀx of `ProductInverse.matvec`, begin ≤ j < end: one chunk of each.

    BOUNDED: and ‖x‖².
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, row, length, in_rows, _in_parts = place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    column, inside = row + lane, lane < length
    here = _widened(tl.load(x + in_rows, mask=inside, other=0.0))
    base = steps + b * step_stride
    units = scales + b * scale_stride + chunk
    out = partial + (b * chunks + chunk) * PLACES
    if BOUNDED:
        tl.store(squares + b * chunks + chunk, tl.sum(here * here, 0))
    for first in range(begin, end, TILE):
        j = first + tl.arange(0, TILE)
        known = j < end
        where = j.to(tl.int64)[:, None] * d + column[None, :]
        s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0)
        a = tl.sum(numbers(s, here.dtype, SCALED) * here[None, :], 1)
        if SCALED:
            a *= tl.load(units + j * chunks, mask=known, other=0.0).to(a.dtype)
        tl.store(out + j, a, mask=known)


@triton.jit(do_not_specialize=["count", "begin", "end"])
def _weights_of(
    partial, squares, gram, keep, weight, trusted, chunks, count, begin, end, longest,
    TRANSPOSED: tl.constexpr, BOUNDED: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`gdeq.fast.product.weights` or `transposed_weights`: one sample.

    BOUNDED: none where they make x more than ``longest`` times as long (`Inverse.trusted`).
    """
    b = tl.program_id(0).to(tl.int64)
    kind = gram.dtype.element_ty
    place = tl.arange(0, PLACES)
    a = tl.zeros((PLACES,), dtype=kind)
    xx = tl.zeros((CHUNKS,), dtype=kind)
    for first in range(0, chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        where = partial + ((b * chunks + c) * PLACES)[:, None] + place[None, :]
        a += tl.sum(tl.load(where, mask=(c < chunks)[:, None], other=0.0), 0)
        if BOUNDED:
            xx += tl.load(squares + b * chunks + c, mask=c < chunks, other=0.0)
    a = tl.where((place >= begin) & (place < end), a, 0.0)
    of_b = gram + b * PLACES * PLACES
    factor = place - 1 if TRANSPOSED else place  # of each row
    known = (factor >= 0) & (factor < count - 1)
    diagonal = tl.load(of_b + factor * (PLACES + 1), mask=known, other=1.0)
    kept = tl.load(keep + b * PLACES + factor, mask=known, other=0) != 0
    found = tl.zeros((PLACES,), dtype=kind)
    inner = a
    for i in tl.range(0, count - 1, num_stages=AHEAD):
        row = count - 1 - i if TRANSPOSED else i
        column = row - 1 if TRANSPOSED else row + 1
        of_column = tl.load(of_b + column * PLACES + place, mask=place < count, other=0.0)
        found, inner = one_more(found, inner, diagonal, kept, of_column, place, row, column)
    if BOUNDED:
        of_x = tl.sum(xx, 0)
        # ‖x + Σ found_j s_j‖²
        of_y = of_x + tl.sum(tl.where(found != 0, found * (a + inner), 0.0), 0)
        short = of_y <= longest * longest * of_x
        found = tl.where(short, found, 0.0)
        tl.store(trusted + b, short.to(tl.int8))
    tl.store(weight + b * PLACES + place, found)


@triton.jit(do_not_specialize=["scale_stride", "count"])
def _apply(
    x, y, steps, scales, table, weight, batch, d, step_stride, scale_stride, chunks, count,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """y = ∓(x + Σ weight_j s_j), + if NEGATIVE: one chunk; in the dtype of y."""
    chunk, b = work()
    lane, row, length, in_rows, _in_parts = place(table, b, chunk, batch, d, ALIGNED, BLOCK)
    inside = lane < length
    total = _widened(tl.load(x + in_rows, mask=inside, other=0.0))
    base = steps + b * step_stride
    units = scales + b * scale_stride + chunk
    total = weighted_steps(
        total, base, units, weight + b * PLACES, lane, row, length, d, chunks, count,
        SCALED, TILE,
    )  # fmt: skip
    total = total if NEGATIVE else -total
    tl.store(y + in_rows, total.to(y.dtype.element_ty), mask=inside)


def apply(inverse: ProductInverse, x: Tensor, negative: bool = False) -> Tensor:
    """`ProductInverse.matvec`, or its negative; in half precision for such an x."""
    return _applied(inverse, x, negative, None)[0]


def trusted(inverse: ProductInverse, x: Tensor, longest: float) -> tuple[Tensor, Tensor]:
    """−B⁻¹x, or x where that is too long, (batch, d); for which samples it is not, (batch,) bool.

    The inverse is a transposed one.
    """
    y, short = _applied(inverse, x, True, longest)
    return y, short.view(torch.bool)


class Layout(NamedTuple):
    """How the vectors of an inverse are cut into chunks, and room for its weights."""

    table: Tensor  # (chunks, 5) of `chunks.table`
    scales: Tensor  # (batch, steps, chunks) of steps in 8 bits; else never read
    gram: Tensor  # (batch, places, places)
    keep: Tensor  # (batch, places) int8
    common: dict[str, Any]  # what kernels are compiled for


def laid_out(inverse: ProductInverse, vectors: int) -> Layout:
    """vectors: how many weights there must be room for."""
    (_, _, d), gram, keep = inverse.steps.shape, inverse.gram, inverse.keep
    scales = inverse.scales
    sizes, block = ((d,), BLOCK) if scales is None else (scales.sizes, scales.block)
    wide = places(max(vectors, gram.shape[1]))
    more = wide - gram.shape[1]
    if more:
        gram, keep = pad(gram, (0, more, 0, more)), pad(keep, (0, more))
    common = {
        "SCALED": scales is not None,
        "ALIGNED": all(size % ALIGNMENT == 0 for size in sizes),
        "BLOCK": block,
        "PLACES": wide,
    }
    units = gram if scales is None else scales.values
    chunk_table = table(sizes, block, gram.device)
    return Layout(chunk_table, units, gram, keep.view(torch.int8), common)


def _applied(
    inverse: ProductInverse, x: Tensor, negative: bool, longest: float | None
) -> tuple[Tensor, Tensor]:
    steps, transposed = inverse.steps, inverse.transposed
    batch, count, d = steps.shape
    x = x.contiguous()
    if x.element_size() > 2:
        x = x.to(torch.promote_types(x.dtype, inverse.gram.dtype))
    chunk_table, units, gram, keep, common = laid_out(inverse, count)
    chunks, wide = len(chunk_table), gram.shape[1]
    partial = gram.new_empty(batch, chunks, wide)
    weight = gram.new_empty(batch, wide)
    strides = steps.stride(0), units.stride(0)
    bounded = longest is not None
    squares = gram.new_empty(batch if bounded else 0, chunks)
    short = torch.empty(batch if bounded else 0, dtype=torch.int8, device=x.device)
    # No factor asks for s_0ᵀx in the transposed product, nor for the last a_j in the other.
    begin, end = (0 if bounded else 1, count) if transposed else (0, count - 1)
    y = torch.empty_like(x)
    with on_device(x):
        _dots_of[(chunks, batch)](
            x, steps, units, chunk_table, partial, squares, batch, d, *strides, chunks, begin, end,
            BOUNDED=bounded, TILE=TILE, **common, num_warps=DOTS_WARPS,
        )  # fmt: skip
        _weights_of[(batch,)](
            partial, squares, gram, keep, weight, short, chunks, count, begin, end, longest or 0.0,
            TRANSPOSED=transposed, BOUNDED=bounded, PLACES=wide, CHUNKS=32, num_warps=1,
        )  # fmt: skip
        _apply[(chunks, batch)](
            x, y, steps, units, chunk_table, weight, batch, d, *strides, chunks, count,
            NEGATIVE=negative, TILE=TILE, **common,
            num_warps=APPLY_WARPS if inverse.scales is None else 1,
        )  # fmt: skip
    return y, short
