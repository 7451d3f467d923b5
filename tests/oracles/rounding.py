"""Steps in 8 bits in plain PyTorch: what the kernels' rounding is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdeq.fast.eight_bits import LEAST, LEVELS, chunks_of


def rounded_to_eight_bits(
    step: Tensor, sizes: tuple[int, ...], block: int
) -> tuple[Tensor, Tensor]:  # (batch, d) -> (batch, d) int8, (batch, chunks) float32
    """The whole numbers and their scales."""
    parts = step.float().split(sizes, dim=1)
    padded = [pad(part, (0, -part.shape[1] % block)).unflatten(1, (-1, block)) for part in parts]
    chunks = torch.cat(padded, dim=1)  # (batch, chunks, block)
    largest = chunks.abs().amax(2)
    finite = largest < torch.inf  # false for NaN too
    largest = torch.where(finite, largest, torch.inf)
    some = largest >= LEAST
    scale = torch.where(some, largest * (1 / LEVELS), 0.0)
    per_scale = torch.where(some & finite, LEVELS / largest, 0.0)
    whole = torch.round(chunks * per_scale.unsqueeze(2))
    whole = torch.where(finite.unsqueeze(2), whole, 0.0).to(torch.int8)
    pieces = whole.split(chunks_of(sizes, block), dim=1)
    pairs = zip(pieces, sizes, strict=True)
    return torch.cat([piece.flatten(1)[:, :size] for piece, size in pairs], dim=1), scale
