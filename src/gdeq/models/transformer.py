"""A DEQ transformer: a few causal blocks, applied to a text until nothing changes.

The state is a vector for each token, (batch, length, width).  Every block adds the embedded token
to what it gets (input injection), attends, and applies two layers to each token.  A block ends in a
norm, which keeps the state bounded.

Tokens also attend to the previous segments of their text: to what each block saw there at the
equilibrium (the memory of Transformer-XL, in a DEQ as of Bai et al. 2019).  So a text that is read
segment by segment has the equilibrium of the whole, as far as the memory reaches.

Solved, the blocks share their weights over all iterations.  Evaluated once, from a state of zeros,
they are an explicit transformer of the same parameters: ``deq.solver = None`` and
``deq.gradient = gdeq.Unrolled(1)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention

from gdeq import DEQ, GDEQ, Gradient, Picard, Solver, Unrolled


class Masks(NamedTuple):
    """Dropout of one block, the same at all tokens of a text and at all iterations."""

    look: Tensor  # (b, 1, width), on what attention returns
    think: Tensor  # (b, 1, 4 width), between the two layers


class Context(NamedTuple):
    """What f needs beside z and x, and what stays the same during a solve."""

    visible: Tensor  # (length, memory + length), or of each text (b, 1, ...): who looks at whom
    turns: tuple[Tensor, Tensor]  # cosines and sines of the places, (memory + length, d/2)
    past: tuple[tuple[Tensor, Tensor], ...]  # of each block: keys and values of the memory
    masks: tuple[Masks, ...] | None  # None: no dropout


class Attention(nn.Module):
    """Causal attention with rotary places; d = width / heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)

    def split(self, h: Tensor) -> Tensor:  # (b, t, width) -> (b, heads, t, d)
        return h.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_and_values(self, h: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (self.split(part) for part in self.key_value(h).chunk(2, dim=-1))
        return turned(k, turns), v

    def forward(
        self, h: Tensor, visible: Tensor, turns: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor]
    ) -> Tensor:
        here = (turns[0][-h.shape[1] :], turns[1][-h.shape[1] :])
        q = turned(self.split(self.query(h)), here)
        k, v = (
            torch.cat([old, new.to(old.dtype)], dim=2)
            for old, new in zip(past, self.keys_and_values(h, here), strict=True)
        )
        seen = scaled_dot_product_attention(q.to(v.dtype), k, v, visible)
        return self.merge(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two layers on each token; each is added and followed by a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.look = Attention(width, heads)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(
        self, h: Tensor, context: Context, past: tuple[Tensor, Tensor], masks: Masks | None
    ) -> Tensor:  # (b, t, width) -> (b, t, width)
        seen = self.look(h, context.visible, context.turns, past)
        h = norm(h + (seen if masks is None else seen * masks.look))
        wide = gelu(self.widen(h))
        return norm(h + self.narrow(wide if masks is None else wide * masks.think))


class Cell(nn.Module):
    """f(z, x): some blocks; x is added before each."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, z: Tensor, x: Tensor, context: Context) -> Tensor:  # (b, t, width) each
        for number, block in enumerate(self.blocks):
            masks = None if context.masks is None else context.masks[number]
            z = block(z + x, context, context.past[number], masks)
        return z

    def seen(self, z: Tensor, x: Tensor, context: Context) -> Iterator[Tensor]:
        """What each block attends to: (b, t, width)."""
        for number, block in enumerate(self.blocks):
            yield z + x
            if number + 1 < len(self.blocks):
                masks = None if context.masks is None else context.masks[number]
                z = block(z + x, context, context.past[number], masks)


class Transformer(nn.Module):
    """Tokens (b, t) to logits of the next ones (b, t, symbols).

    Calls continue each other's texts, row by row, once `advance` was called in between.  In
    training that memory is a buffer and part of the model's state.  `eval` begins new texts, as a
    call in eval mode with another number of rows does.

    With ``Picard(tol=0)``, no token sees a later one; with another solver or a tolerance, it does
    only by the error of the solve.

    rows: texts that are read side by side in training.
    memory: tokens before a segment that are attended to.
    dropout: share of features dropped in f, the same at all tokens of a text.
    attention: share of the earlier tokens that a token does not see, the same for all heads.
    embedding: share of the symbols that are dropped from a batch, wherever they occur.
    outer: share of features dropped of the embedding and of the equilibrium.

    Examples:
        >>> import torch
        >>> from gdeq.models.transformer import Transformer
        >>> model = Transformer(50, width=16, heads=2, blocks=1, memory=8, rows=4)
        >>> model(torch.randint(50, (4, 8))).shape
        torch.Size([4, 8, 50])
        >>> bool(model.deq.solution.converged.all())
        True
    """

    memory: Tensor  # (blocks, rows, memory, width)
    filled: Tensor  # () tokens in it so far

    def __init__(
        self,
        symbols: int,
        width: int = 512,
        heads: int = 8,
        blocks: int = 1,
        memory: int = 128,
        rows: int = 1,
        *,
        dropout: float = 0.0,
        attention: float = 0.0,
        embedding: float = 0.0,
        outer: float = 0.0,
        solver: Solver | None = Picard(max_iter=30, tol=1e-3),  # noqa: B008 (frozen)
        gradient: Gradient = GDEQ(refine=2),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.attention = heads, dropout, attention
        self.embedding, self.outer = embedding, outer
        self.embed = nn.Embedding(symbols, width)
        # z holds x: were x the embedding itself, which is tied to the output, each token would
        # predict itself.  The bias is what a dropped word is read as: with x = 0, f need not
        # contract, since its norms undo any scale.
        self.read = nn.Linear(width, width)
        nn.init.normal_(self.read.bias, std=0.5)
        for weight in (self.embed.weight, self.read.weight):
            nn.init.normal_(weight, std=width**-0.5)
        self.deq = DEQ(Cell(width, heads, blocks), solver, gradient)
        self.bias = nn.Parameter(torch.zeros(symbols))
        self.register_buffer("memory", torch.zeros(blocks, rows, memory, width))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self.recent: tuple[Tensor, Tensor] | None = None  # memory of the texts read in eval mode
        self.heard: Tensor | None = None  # what the next segment may remember of the last call

    def train(self, mode: bool = True) -> Transformer:
        if not mode and self.recent is not None:
            for kept in self.recent:
                kept.zero_()
        return super().train(mode)

    def _apply(self, *how: Any, **options: Any) -> Transformer:
        self.recent = None  # it stays behind when the model moves to another device or dtype
        return super()._apply(*how, **options)

    def forward(self, tokens: Tensor, z0: Tensor | None = None) -> Tensor:
        """z0: where the solve starts; zeros if not given.  Its result is ``deq.solution.z``."""
        x, context = self.inject(tokens), self.context(tokens)
        z = self.deq(x, context, z0=z0)
        if self.deq.solver is None and self.deq.gradient == Unrolled(1):
            last = torch.zeros_like(x) if z0 is None else z0  # what the blocks have really seen
        else:
            last = z
        with torch.no_grad():
            self.heard = torch.stack(list(self.cell.seen(last, x, context)))
        return linear(self._dropped(z), self.embed.weight, self.bias)

    @property
    def cell(self) -> Cell:
        assert isinstance(self.deq.cell, Cell)
        return self.deq.cell

    def inject(self, tokens: Tensor) -> Tensor:  # (b, t) -> (b, t, width)
        x = self.embed(tokens.long())
        x = x * x.shape[2] ** 0.5
        if self.training and self.embedding:
            words = self._mask(self.embedding, 1, self.embed.num_embeddings).view(-1, 1)
            x = x * words[tokens.long()]
        made: Tensor = self.read(self._dropped(x))
        return made

    def context(self, tokens: Tensor) -> Context:
        memory, filled = self._past(len(tokens))
        kept, length = memory.shape[2], tokens.shape[1]
        place = torch.arange(kept + length, device=tokens.device)
        # Of the memory what is filled, of the segment what is not later.
        visible = (place >= kept - filled) & (place <= place[kept:, None])
        if self.training and self.attention:  # a token always sees itself
            drawn = torch.rand(len(tokens), 1, *visible.shape, device=tokens.device)
            visible = visible & ((drawn > self.attention) | (place == place[kept:, None]))
        wide = torch.promote_types(memory.dtype, torch.float32)  # bf16 knows no place above 256
        turns = turns_of(place.to(wide), memory.shape[3] // self.heads)
        before = (turns[0][:kept], turns[1][:kept])
        looks: list[Any] = [block.look for block in self.cell.blocks]
        past = tuple(
            look.keys_and_values(old, before) for look, old in zip(looks, memory, strict=True)
        )
        masks = None
        if self.training and self.dropout:
            masks = tuple(self._masks(len(tokens)) for _ in looks)
        return Context(visible, turns, past, masks)

    @torch.no_grad()
    def advance(self) -> None:
        """What the last call has read is now the past."""
        if self.heard is None:
            return
        memory, filled = self._past(self.heard.shape[1])
        new = self.heard.shape[2]
        memory.copy_(torch.cat([memory, self.heard.to(memory.dtype)], dim=2)[:, :, new:])
        filled.add_(new).clamp_(max=memory.shape[2])

    def _past(self, rows: int) -> tuple[Tensor, Tensor]:
        """The memory in use, and how much of it is filled."""
        if self.training:
            if rows != self.memory.shape[1]:
                raise ValueError(
                    f"this model reads {self.memory.shape[1]} texts side by side in training, got "
                    f"{rows}: make it with rows={rows}"
                )
            return self.memory, self.filled
        if self.recent is None or self.recent[0].shape[1] != rows:
            blocks, _, kept, width = self.memory.shape
            with torch.inference_mode(False):  # later calls may be outside of it
                self.recent = (
                    self.memory.new_zeros(blocks, rows, kept, width),
                    self.filled.new_zeros(()),
                )
        return self.recent

    def _masks(self, rows: int) -> Masks:
        width = self.embed.embedding_dim
        return Masks(*(self._mask(self.dropout, rows, n) for n in (width, 4 * width)))

    def _mask(self, p: float, rows: int, features: int) -> Tensor:  # (rows, 1, features)
        made = torch.empty(rows, 1, features, device=self.memory.device).bernoulli_(1 - p)
        return made / (1 - p)

    def _dropped(self, h: Tensor) -> Tensor:
        if not self.training or not self.outer:
            return h
        return h * self._mask(self.outer, len(h), h.shape[2])


def norm(h: Tensor) -> Tensor:
    return rms_norm(h, h.shape[-1:])


def turns_of(place: Tensor, features: int) -> tuple[Tensor, Tensor]:  # (n,) -> (n, features/2)
    """Cosine and sine of the angle by which each pair of features is turned at each place."""
    speed = 1e4 ** (-torch.arange(0, features, 2, device=place.device).to(place) / features)
    angle = place[:, None] * speed
    return angle.cos(), angle.sin()


def turned(h: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:  # (..., t, d) -> (..., t, d)
    """Rotary places (Su et al. 2021): products of what was turned know the distance alone."""
    cosine, sine = turns
    a, b = h.float().chunk(2, dim=-1) if h.dtype.itemsize < 4 else h.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1).to(h.dtype)
