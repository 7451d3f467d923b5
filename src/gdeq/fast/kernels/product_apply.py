"""`ProductInverse.matvec` in three kernels: inner products, weights, combination."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from gdeq.fast.eight_bits import Scales
from gdeq.fast.kernels import product
from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.chunks import ALIGNMENT, numbers, place, places, table, weighted_steps, work
from gdeq.fast.kernels.product_judge import AHEAD, one_more

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
    lane, row, length, in_rows, _in_parts = place(table, b, b, chunk, batch, d, ALIGNED, BLOCK)
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
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, BACKWARDS: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """y = ∓(x + Σ weight_j s_j), + if NEGATIVE: one chunk; in the dtype of y."""
    chunk, b = work(BACKWARDS)
    lane, row, length, in_rows, _in_parts = place(table, b, b, chunk, batch, d, ALIGNED, BLOCK)
    inside = lane < length
    total = _widened(tl.load(x + in_rows, mask=inside, other=0.0))
    base = steps + b * step_stride
    units = scales + b * scale_stride + chunk
    total = weighted_steps(
        total, base, units, weight + b * PLACES, lane, row, length, d, chunks, count,
        SCALED, TILE, BACKWARDS,
    )  # fmt: skip
    total = total if NEGATIVE else -total
    tl.store(y + in_rows, total.to(y.dtype.element_ty), mask=inside)


def apply(
    steps: Tensor,
    gram: Tensor,
    keep: Tensor,
    x: Tensor,
    transposed: bool,
    negative: bool = False,
    scales: Scales | None = None,
) -> Tensor:
    """`ProductInverse.matvec`, or its negative; in half precision for such an x."""
    with on_device(x):
        return _applied(steps, gram, keep, x, transposed, negative, scales, None)[0]


def trusted(
    steps: Tensor, gram: Tensor, keep: Tensor, x: Tensor, scales: Scales | None, longest: float
) -> tuple[Tensor, Tensor]:  # (batch, d), (batch,) bool
    """−B⁻ᵀx, or x where that is too long, and for which samples it is not."""
    with on_device(x):
        y, short = _applied(steps, gram, keep, x, True, True, scales, longest)
    return y, short.view(torch.bool)


def _applied(
    steps: Tensor,
    gram: Tensor,
    keep: Tensor,
    x: Tensor,
    transposed: bool,
    negative: bool,
    scales: Scales | None,
    longest: float | None,
) -> tuple[Tensor, Tensor]:
    batch, count, d = steps.shape
    x = x.contiguous()
    if x.element_size() > 2:
        x = x.to(torch.promote_types(x.dtype, gram.dtype))
    sizes, block = ((d,), BLOCK) if scales is None else (scales.sizes, scales.block)
    units = gram if scales is None else scales.values
    chunk_table = table(sizes, block, x.device)
    chunks, wide = len(chunk_table), places(gram.shape[1])
    if wide != gram.shape[1]:  # made by the plain twin
        more = wide - gram.shape[1]
        gram, keep = pad(gram, (0, more, 0, more)), pad(keep, (0, more))
    partial = gram.new_empty(batch, chunks, wide)
    weight = gram.new_empty(batch, wide)
    kept = keep.view(torch.int8)
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    strides = steps.stride(0), units.stride(0)
    common = {
        "SCALED": scales is not None,
        "ALIGNED": aligned,
        "BLOCK": block,
        "TILE": TILE,
        "PLACES": wide,
    }
    bounded = longest is not None
    squares = gram.new_empty(batch if bounded else 0, chunks)
    short = torch.empty(batch if bounded else 0, dtype=torch.int8, device=x.device)
    # No factor asks for s_0ᵀx in the transposed product, nor for the last a_j in the other.
    begin, end = (0 if bounded else 1, count) if transposed else (0, count - 1)
    _dots_of[(chunks, batch)](
        x, steps, units, chunk_table, partial, squares, batch, d, *strides, chunks, begin, end,
        BOUNDED=bounded, **common, num_warps=DOTS_WARPS,
    )  # fmt: skip
    _weights_of[(batch,)](
        partial, squares, gram, kept, weight, short, chunks, count, begin, end, longest or 0.0,
        TRANSPOSED=transposed, BOUNDED=bounded, PLACES=wide, CHUNKS=32, num_warps=1,
    )  # fmt: skip
    y = torch.empty_like(x)
    _apply[(chunks, batch)](
        x, y, steps, units, chunk_table, weight, batch, d, *strides, chunks, count,
        BACKWARDS=product.tuning.backwards, NEGATIVE=negative, **common,
        num_warps=APPLY_WARPS if scales is None else product.tuning.warps_of_bytes,
    )  # fmt: skip
    return y, short
