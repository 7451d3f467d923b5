"""Euclidean norms of batched vectors, summed in float64: one pass over memory.

`torch.linalg.vector_norm(x, dtype=torch.float64)`, the plain twin, writes x in float64 first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.kernels.device import MOST_SAMPLES, on_device

BLOCK = 1024  # numbers that a program reads at once
PROGRAMS = 4 * 132  # at least so many, if there is work for them
MOST_NUMBERS = 1 << 30  # of a sample, so that 32 bits hold their places


def takes(x: Tensor) -> bool:
    dense = x.dim() == 2 and x.dtype == torch.float32 and x.is_contiguous()
    return dense and 0 < x.shape[0] <= MOST_SAMPLES and 0 < x.shape[1] < MOST_NUMBERS


def norms(x: Tensor) -> Tensor:  # (batch, d) -> (batch,)
    return _norms(x, x, x, residual=False)


def residual_norms(v: Tensor, w: Tensor, product: Tensor) -> Tensor:  # (batch, d) each -> (batch,)
    """`gdeq.engine.Reference.residual_norm`: of v − w + product."""
    return _norms(v, w, product, residual=True)


def _norms(x: Tensor, less: Tensor, more: Tensor, residual: bool) -> Tensor:
    batch, d = x.shape
    blocks = triton.cdiv(d, BLOCK)
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, batch)))
    parts = triton.cdiv(blocks, each)
    partial = torch.empty((batch, parts), dtype=torch.float64, device=x.device)
    with on_device(x):
        _squares_kernel[(parts, batch)](
            x, less, more, partial, d, each, RESIDUAL=residual, BLOCK=BLOCK, num_warps=4
        )
    return partial.sum(1).sqrt_().to(x.dtype)


@triton.jit
def _squares_kernel(
    x, less, more, partial, d, each, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x, less, more = x + b * d, less + b * d, more + b * d
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(part * each, part * each + each):
        at = i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < d, other=0.0)
        if RESIDUAL:
            value -= tl.load(less + at, mask=at < d, other=0.0)
            value += tl.load(more + at, mask=at < d, other=0.0)
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(partial + b * tl.num_programs(0) + part, tl.sum(total))
