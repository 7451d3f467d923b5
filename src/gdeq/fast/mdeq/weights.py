"""The parameters of an MDEQ's parts as the fast operations take them.

Weights of convolutions are normalised, cast, ordered and merged in one launch; those of a cell once
for each solve (`Prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.utils import parametrize

from gdeq.engine import runs_fast
from gdeq.fast.kernels.norms import per_sample
from gdeq.fast.kernels.weights import Convolution, Merged, merge, plans_of
from gdeq.fast.mdeq.as_built import is_as_built, of_config
from gdeq.fast.mdeq.convolution import Pairs, pair, transposed
from gdeq.fast.streams import Serial, side_by_side
from gdeq.models.mdeq import MDEQCell, halve

T = TypeVar("T")

PAIRED = 64  # outputs up to which a convolution is made one of twice as many
BACK_PAIRED = 32  # the same for a gradient's: cuDNN's own kernels for those of 64 are good
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm:
    """Group norms as one; weight, bias: (channels,), or (batch, channels) for each sample."""

    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @property
    def affine(self) -> tuple[Any, Any]:
        return self.weight, self.bias


def norm_of(*norms: Any) -> Norm:
    """Norms of adjacent channels, whose groups have the same size, are one."""
    first, groups = norms[0], sum(norm.num_groups for norm in norms)
    if len(norms) == 1:
        return Norm(groups, first.weight, first.bias, first.eps)
    weight, bias = (torch.cat([getattr(n, name) for n in norms]) for name in ("weight", "bias"))
    return Norm(groups, weight, bias, first.eps)


@dataclass(frozen=True)
class Weights:
    """What the operations of one part need, by the module or by the place where it is used."""

    dtype: torch.dtype
    convs: dict[Hashable, Tensor]
    norms: dict[Hashable, Norm]
    pairs: dict[Hashable, Pairs] = field(default_factory=dict)

    @property
    def made(self) -> list[Any]:
        """What is not the parameters' own memory, which nobody frees while a step runs."""
        merged_norms = [norm for key, norm in self.norms.items() if isinstance(key, tuple)]
        return [self.convs, self.pairs, merged_norms]

    def per_sample(self, batch: int) -> Weights:
        """With scales and shifts for each sample: one reduction sums all their gradients."""
        norms = self.norms.items()
        vectors = [v for _, norm in norms for v in (norm.weight, norm.bias) if v is not None]
        spread = iter(per_sample(vectors, batch))

        def change(norm: Norm) -> Norm:
            weight, bias = (None if v is None else next(spread) for v in (norm.weight, norm.bias))
            return replace(norm, weight=weight, bias=bias)

        return replace(self, norms={key: change(norm) for key, norm in norms})


def make(
    owner: nn.Module,
    convs: dict[Hashable, Merged],
    norms: dict[Hashable, Norm],
    dtype: torch.dtype,
) -> Weights:
    """Differentiable under autograd.  owner: the module whose parameters these are."""
    made = merge(list(convs.values()), dtype, plans_of(owner))
    return Weights(dtype, dict(zip(convs, made, strict=True)), norms)


def merged(*convs: Any, **form: Any) -> Merged:
    return Merged(tuple(_parameters(conv) for conv in convs), **form)


def _parameters(conv: nn.Conv2d) -> Convolution:
    if parametrize.is_parametrized(conv, "weight"):  # by `gdeq.weight_norm`
        parts: Any = conv.parametrizations["weight"]  # type: ignore[index]
        return Convolution(parts.original1, parts.original0)
    return Convolution(conv.weight)


# ---- of a cell


def prepare(cell: MDEQCell, dtype: torch.dtype) -> Weights:
    """The cell's weights for `cell.evaluate`.

    ("down", j, l) is level l of the ways down from stream j: as a convolution that of all, as a
    norm that of those that go on.  ("up", j) are the ways up, the highest resolution first.
    """
    scales: Any = cell.scales
    fusions: list[Any] = list(cell.fusions)
    blocks = [block for scale in scales for block in scale.blocks]
    wide = [conv for block in blocks for conv in (block.expand, block.reduce)]
    convs: dict[Hashable, Merged] = {conv: merged(conv) for conv in wide}
    used = [n for b in blocks for n in (b.expand_norm, b.reduce_norm, b.sum_norm)]
    norms: dict[Hashable, Norm] = {norm: norm_of(norm) for norm in used}
    for j in range(len(fusions)):
        for level in range(1, len(fusions) - j):
            at = 3 * (level - 1)  # in Down's sequence of convolution, norm, ReLU, convolution, ...
            arriving, *passing = [fusion.down[j] for fusion in fusions[j + level :]]
            each = [path[at] for path in (arriving, *passing)]
            convs["down", j, level] = merged(*each, own_inputs=level > 1)
            norms[arriving[at + 1]] = norm_of(arriving[at + 1])
            if passing:
                norms["down", j, level] = norm_of(*(path[at + 1] for path in passing))
        if j > 0:
            ups = [fusion.up[j - i - 1] for i, fusion in enumerate(fusions[:j])]
            convs["up", j] = merged(*(up.conv for up in ups))
            norms.update({up.norm: norm_of(up.norm) for up in ups})
        convs[fusions[j].post] = merged(fusions[j].post)
        norms[fusions[j].post_norm] = norm_of(fusions[j].post_norm)
    # On a stream of their own: in the backward pass they come last, and autograd then runs them
    # beside what is before the cell.
    branches: Serial = Serial()
    if torch.is_grad_enabled():
        branches = side_by_side(next(cell.parameters()).device, 2)
    with branches.on(1):
        found = make(cell, convs, norms, dtype)
    branches.join(list(found.convs.values()))
    pairs = {conv: pairs_of(found.convs[conv]) for conv in wide}
    return replace(found, pairs={conv: both for conv, both in pairs.items() if both is not None})


@torch.no_grad()
def pairs_of(weight: Tensor) -> Pairs | None:
    """Of a 3×3 convolution that keeps the resolution, where that is faster."""
    k, c = weight.shape[:2]
    there = pair(weight) if pays(weight, k, PAIRED) else None
    back = pair(transposed(weight)) if pays(weight, c, BACK_PAIRED) else None
    return None if there is None and back is None else Pairs(there, back)


def pays(weight: Tensor, outputs: int, most: int) -> bool:
    """Whether a convolution with so many outputs is faster for two places at once."""
    return weight.is_cuda and weight.dtype in HALF and outputs <= most


@torch.no_grad()
def at_zero(weight: Tensor, bias: Tensor | None, height: int, width: int) -> Tensor:
    """What the convolutions of a block make of z = 0, of one sample for all.

    weight: of the second, 3×3.  It sees relu(norm(0)), which is relu(bias) at each pixel.
    """
    if weight.is_cuda and runs_fast(weight.device):
        from gdeq.fast.kernels import constant_maps  # noqa: PLC0415 (needs Triton)

        if constant_maps.takes(weight):
            return constant_maps.convolved(weight, bias, height, width)
    inner = weight.new_zeros(weight.shape[1]) if bias is None else torch.relu(bias)
    maps = inner.to(weight.dtype).view(1, -1, 1, 1).expand(-1, -1, height, width)
    return conv2d(maps, weight, padding=1).contiguous(memory_format=torch.channels_last)


class Prepared:
    """What a cell's evaluations share; ``cell.held`` keeps it during a solve.

    usable: whether the cell need not be called itself.
    """

    def __init__(self, cell: MDEQCell) -> None:
        self.cell = cell
        self.usable = is_as_built(cell, of_config(cell.config).cell)
        self._grad = torch.is_grad_enabled()
        self._kept: dict[Hashable, Any] = {}

    def weights(self, dtype: torch.dtype) -> Weights:
        if torch.is_grad_enabled() and not self._grad:  # the solve was opened without autograd
            return prepare(self.cell, dtype)
        return self._once(("weights", dtype), lambda: prepare(self.cell, dtype))

    def at_zero(self, dtype: torch.dtype, height: int, width: int) -> list[Tensor]:
        """`at_zero` of each scale's first block.  height, width: of the highest resolution."""

        def make() -> list[Tensor]:
            weights, size, found = self.weights(dtype), (height, width), []
            for scale in self.cell.scales:
                block: Any = scale.blocks[0]  # type: ignore[index]
                bias = weights.norms[block.expand_norm].bias
                found.append(at_zero(weights.convs[block.reduce], bias, *size))
                size = halve(size[0]), halve(size[1])
            return found

        return self._once(("at zero", dtype, height, width), make)

    def masks(self, like: Tensor) -> dict[nn.Module, Tensor]:
        """The mask of each dropout that drops, (batch, channels), in the order of the modules."""
        scales: Any = self.cell.scales
        dropouts = [(block.dropout, block.reduce) for scale in scales for block in scale.blocks]
        drops = tuple(dropout.training and dropout.p > 0 for dropout, _ in dropouts)

        def draw() -> dict[nn.Module, Tensor]:
            found = {}
            for (dropout, conv), wanted in zip(dropouts, drops, strict=True):
                if wanted:
                    shape = len(like), conv.out_channels, 1, 1
                    found[dropout] = dropout(like.new_ones(shape, dtype=torch.float32)).flatten(1)
            return found

        return self._once(("masks", len(like), drops), draw)

    def _once(self, name: Hashable, make: Callable[[], T]) -> T:
        if name not in self._kept:
            with torch.set_grad_enabled(self._grad):
                self._kept[name] = make()
        found: T = self._kept[name]
        return found
