"""A reasoner: one small network, applied to the 81 cells of a Sudoku until nothing changes.

The state is a vector for each cell, (batch, 81, width).  The equilibrium is found in segments: each
starts where the last one ended, without its gradient, and each has an answer of its own to learn
from (deep supervision, as in HRM and TRM).  With a `Carry`, segments go on over training steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

from gdeq import DEQ, GDEQ, Broyden, Gradient, Solver

CELLS, DIGITS = 81, 9
KINDS = 3  # of units: rows, columns, boxes


class Attention(nn.Module):
    """Each cell looks at all others, with a learned preference for those that share a unit with it.

    Two cells share a row, a column and a box or not: one of eight relations, and a number for it
    in each head.  There are no other positions, so that moving rows or bands moves the answer.
    """

    relation: Tensor  # (81, 81)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.register_buffer("relation", relations(), persistent=False)
        # At first a head prefers rows, columns or boxes, by a factor of e⁴ in the weights.
        own = 2 ** (torch.arange(heads) % KINDS)
        preferred = (torch.arange(2**KINDS) & own[:, None]) > 0
        self.preference = nn.Parameter(4.0 * preferred.float().flatten())  # (heads · 8,)

    def forward(self, h: Tensor) -> Tensor:  # (b, 81, d) -> (b, 81, d)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, heads, 81, d/heads)
            for part in self.project(h).chunk(3, dim=-1)
        )
        bias = self.preference.view(self.heads, -1)[:, self.relation].to(q.dtype)
        return self.merge(scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Mixing(nn.Module):
    """Each cell hears the means of its row, its column and its box, of features of their own.

    It costs a fraction of attention, and the answer moves with rows, bands and the like as well.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, KINDS * width)
        self.merge = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(KINDS))

    def forward(self, h: Tensor) -> Tensor:  # (b, 81, d) -> (b, 81, d)
        told = gelu(self.project(h)).unflatten(1, (3, 3, 3, 3))  # (b, band, row, stack, column, 3d)
        over = ((3, 4), (1, 2), (2, 4))  # of a row, a column, a box: these places differ
        means = [
            part.mean(places, keepdim=True)
            for part, places in zip(told.chunk(KINDS, dim=-1), over, strict=True)
        ]
        # Times 3, the mean of nine independent features has the size of one.
        row, column, box = (3 * merge(m) for merge, m in zip(self.merge, means, strict=True))
        heard: Tensor = (row + column + box).flatten(1, 4)
        return heard


MIXES: dict[str, type[nn.Module]] = {"attention": Attention, "mixing": Mixing}


class Block(nn.Module):
    """Attention or mixing and two layers on each cell, each followed by a norm (post-norm)."""

    def __init__(self, width: int, heads: int, mix: str) -> None:
        super().__init__()
        self.look = MIXES[mix](width, heads)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = norm(h + self.look(h))
        return norm(h + self.narrow(gelu(self.widen(h))))


class Cell(nn.Module):
    """f(z, x): some blocks on z + x.  The last norm keeps the state bounded."""

    def __init__(self, width: int, heads: int, blocks: int, mix: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads, mix) for _ in range(blocks)))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (b, 81, d), (b, 81, d) -> (b, 81, d)
        made: Tensor = self.blocks(z + x)
        return made


class Carry(NamedTuple):
    """What a training step leaves for the next one, for each place in the batch.

    A place is halted when its puzzle is solved or has had its time; then it takes a new one.
    """

    z: Tensor  # (b, 81, width)
    age: Tensor  # (b,) segments spent on the puzzle; 0: halted

    @property
    def halted(self) -> Tensor:  # (b,) bool
        return self.age == 0


class Reasoner(nn.Module):
    """Puzzles (b, 81), 0 for an empty cell, to logits of the digits (b, segments, 81, 9).

    The answer is that of the last segment.

    mix: how cells hear of each other, "attention" or "mixing".
    noise: in training, the first segment starts from noise of this size; otherwise from zeros.
    patience: in training, a puzzle stays for so many segments at most, ``segments`` of them in a
        step and so rounded up to whole steps; the caller shows the same puzzle again until
        ``carry.halted``, and tells by `halt` which are solved.  In a test all of them follow.  0:
        each step begins with new puzzles, and a test has ``segments``.
    """

    carry: Carry | None = None

    def __init__(
        self,
        width: int = 384,
        heads: int = 6,
        blocks: int = 3,
        segments: int = 4,
        noise: float = 1.0,
        mix: str = "attention",
        patience: int = 0,
        solver: Solver | None = Broyden(max_iter=6, tol=0.0),  # noqa: B008 (frozen)
        gradient: Gradient = GDEQ(refine=1),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        if mix not in MIXES:
            raise ValueError(f"mix must be one of {', '.join(MIXES)}, got {mix!r}")
        self.segments, self.noise, self.patience = segments, noise, patience
        self.test_segments = patience or segments
        self.embed = nn.Embedding(DIGITS + 1, width)
        self.deq = DEQ(Cell(width, heads, blocks, mix), solver, gradient)
        self.answer = nn.Linear(width, DIGITS)

    def forward(self, puzzles: Tensor, z: Tensor | None = None) -> Tensor:
        """z: (b, 81, width), where the first segment starts."""
        x = self.embed(puzzles)
        if z is None:
            z = self.start(x) if self.training else torch.zeros_like(x)
            if self.training and self.patience:
                z = self._carried(z)
        answers = []
        for _ in range(self.segments if self.training else self.test_segments):
            z = self.deq(x, z0=z.detach())
            answers.append(self.answer(z))
        if self.training and self.carry is not None:
            self.carry.z.copy_(z.detach())
        return torch.stack(answers, 1)

    def _carried(self, fresh: Tensor) -> Tensor:
        """Where each place goes on; changed in place, for steps that are recorded."""
        if self.carry is None or self.carry.z.shape != fresh.shape:
            age = torch.zeros(len(fresh), dtype=torch.long, device=fresh.device)
            self.carry = Carry(fresh.detach().clone(), age)
        z = torch.where(self.carry.halted[:, None, None], fresh, self.carry.z)
        self.carry.age.add_(self.segments)
        return z

    @torch.no_grad()
    def halt(self, solved: Tensor) -> None:
        """After a training step with `patience`: these are done, and those that had their time."""
        assert self.carry is not None
        self.carry.age.masked_fill_(solved | (self.carry.age >= self.patience), 0)

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random state for each cell."""
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        return self.noise * noise


def norm(h: Tensor) -> Tensor:
    return rms_norm(h, h.shape[-1:])


def relations() -> Tensor:  # -> (81, 81)
    """1 for the same row, 2 for the same column, 4 for the same box; added up."""
    cell = torch.arange(CELLS)
    row, column = cell // 9, cell % 9
    kinds = (row, column, row // 3 * 3 + column // 3)
    return torch.stack([(kind[:, None] == kind) * 2**n for n, kind in enumerate(kinds)]).sum(0)
