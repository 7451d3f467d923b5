"""Steps in 8 bits: whole numbers from −127 to 127, and a scale for each chunk of a step.

A chunk is ``block`` numbers of one part of the state, or what is left at the end of the part; its
scale is its largest number over 127.  So a number is known to 1/254 of the largest one beside it.
Rounding is to the nearest, and to the even one of two.  A chunk that is not finite has the scale
infinity and zeros, whose product is NaN.

`gdeq.fast.kernels.chunks.rounded_with_bytes` does it; tests/oracles/rounding.py is its plain twin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEVELS = 127
BLOCK = 1024
LEAST = 1e-30  # a chunk whose largest number is below counts as zero: the square is lost anyway


@dataclass(frozen=True)
class Scales:
    """One number for each chunk of each step; how steps are cut into chunks."""

    values: Tensor  # (batch, steps, chunks) float32
    sizes: tuple[int, ...]  # of the parts
    block: int  # numbers in a chunk

    def first(self, count: int) -> Scales:
        """Those of so many steps."""
        return replace(self, values=self.values[:, :count])

    def spread(self) -> Tensor:  # -> (batch, steps, d)
        """The scale of each number."""
        pieces = self.values.split(chunks_of(self.sizes, self.block), dim=2)
        pairs = zip(pieces, self.sizes, strict=True)
        wide = [piece.repeat_interleave(self.block, dim=2)[..., :size] for piece, size in pairs]
        return torch.cat(wide, dim=2)


def chunks_of(sizes: tuple[int, ...], block: int) -> list[int]:
    """The number of chunks of each part."""
    return [-(-size // block) for size in sizes]


def in_full(steps: Tensor, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    """Stored steps as numbers.  (batch, steps, d) -> (batch, steps, d)"""
    return steps.to(dtype) if scales is None else steps.to(dtype) * scales.spread().to(dtype)
