"""What `gdeq.models.mdeq_fused` needs of a cell's parameters, made once for each solve."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.utils import parametrize

from gdeq.fast.kernels import choice
from gdeq.fast.kernels.weights import Convolution, Merged, merge, plans_of
from gdeq.models.branches import Parallel, Serial
from gdeq.models.convolution import Pairs, pair, transposed
from gdeq.models.mdeq_config import halve
from gdeq.models.parts import map_parts
from gdeq.regularize import Held, _WeightNorm

if TYPE_CHECKING:
    from gdeq.models.mdeq_cell import MDEQCell

T = TypeVar("T")


@dataclass(frozen=True)
class Norm:
    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class BlockWeights:
    expand: Tensor
    expand_norm: Norm
    reduce: Tensor
    reduce_norm: Norm
    sum_norm: Norm
    expand_pairs: Pairs | None = None
    reduce_pairs: Pairs | None = None


@dataclass(frozen=True)
class DownWeights:
    """One level of the ways down from one stream: what arrives at it, and what goes on."""

    conv: Tensor
    arriving: Norm
    arriving_channels: int
    passing: Norm | None


@dataclass(frozen=True)
class UpWeights:
    """The ways up from one stream, the target of the highest resolution first."""

    conv: Tensor
    norms: tuple[Norm, ...]
    channels: tuple[int, ...]


@dataclass(frozen=True)
class PostWeights:
    conv: Tensor
    norm: Norm


@dataclass(frozen=True)
class Weights:
    """All that f needs of a cell's parameters, in the dtype and order its operations take."""

    blocks: tuple[tuple[BlockWeights, ...], ...]
    downs: tuple[tuple[DownWeights, ...], ...]
    ups: tuple[UpWeights | None, ...]
    posts: tuple[PostWeights, ...]

    def detach(self) -> Weights:
        return map_parts(self, Tensor, Tensor.detach)

    def in_pairs(self) -> Weights:
        """With those of pairs of places, where these are faster."""

        def change(block: BlockWeights) -> BlockWeights:
            pairs = pairs_of(block.expand), pairs_of(block.reduce)
            return replace(block, expand_pairs=pairs[0], reduce_pairs=pairs[1])

        return replace(
            self, blocks=tuple(tuple(change(block) for block in scale) for scale in self.blocks)
        )


PAIRED = 64  # outputs up to which a convolution is made one of twice as many
BACK_PAIRED = 32  # the same of a gradient's: cuDNN's own kernels for those of 64 are good
HALF = (torch.bfloat16, torch.float16)


def pays(weight: Tensor, outputs: int, most: int) -> bool:
    """Whether a convolution with so many outputs is faster for two places at once."""
    return weight.is_cuda and weight.dtype in HALF and outputs <= most


@torch.no_grad()
def pairs_of(weight: Tensor) -> Pairs | None:
    """Of a 3×3 convolution that keeps the resolution, where that is faster."""
    k, c = weight.shape[:2]
    there = pair(weight) if pays(weight, k, PAIRED) else None
    back = pair(transposed(weight)) if pays(weight, c, BACK_PAIRED) else None
    return None if there is None and back is None else Pairs(there, back)


def prepare(cell: MDEQCell, dtype: torch.dtype) -> Weights:
    """The cell's weights for `evaluate`; differentiable under autograd."""
    template = _template(cell)
    wanted: list[Merged] = []
    map_parts(template, Merged, wanted.append)
    device = wanted[0].parts[0].weight.device
    grad = torch.is_grad_enabled()
    # Backward, they come last: autograd then runs them beside what is before the cell.
    branches = Parallel(device, 2, grad) if device.type == "cuda" and grad else Serial()
    with branches.on(1):
        merged = merge(wanted, dtype, plans_of(cell))
    branches.join(merged)
    found = iter(merged)
    return map_parts(template, Merged, lambda _: next(found))


@dataclass(frozen=True)
class AtZero:
    """One sample of a scale at z = 0, which all samples share: (1, channels, height, width)."""

    z: Tensor
    reduced: Tensor  # what the first block makes of it, up to dropout and injection


@torch.no_grad()
def at_zero(weights: Weights, height: int, width: int) -> tuple[AtZero, ...]:
    """height, width: of the highest resolution."""
    scales = []
    for first, *_ in weights.blocks:
        scales.append(_reduced_at_zero(first, height, width))
        height, width = halve(height), halve(width)
    zeros = scales[0].new_zeros(max(reduced.numel() for reduced in scales))
    return tuple(AtZero(_like(reduced, zeros), reduced) for reduced in scales)


def _like(reduced: Tensor, zeros: Tensor) -> Tensor:
    """Some of the zeros, in this shape and order."""
    _, channels, height, width = reduced.shape
    return zeros[: reduced.numel()].view(1, height, width, channels).permute(0, 3, 1, 2)


def _reduced_at_zero(block: BlockWeights, height: int, width: int) -> Tensor:
    """The block's second convolution of relu(norm(0)), which is relu(bias) at each pixel.

    Of numbers that are the same at each pixel, a convolution is one of ones with what it makes of
    them at each of its places: one channel instead of all.
    """
    weight, bias = block.reduce, block.expand_norm.bias
    if choice.chosen(weight) == "triton":
        from gdeq.fast.kernels import constant_maps  # noqa: PLC0415 (needs Triton)

        if constant_maps.takes(weight):
            return constant_maps.convolved(weight, bias, height, width)
    k, c, *places = weight.shape
    wide = torch.promote_types(weight.dtype, torch.float32)
    inner = weight.new_zeros(c) if bias is None else torch.relu(bias).to(weight.dtype)
    one_channel = weight.permute(0, 2, 3, 1).reshape(-1, c).to(wide) @ inner.to(wide)
    ones = weight.new_ones((1, 1, height, width), dtype=wide)
    reduced = conv2d(ones, one_channel.view(k, 1, *places), padding=1)
    return reduced.to(weight.dtype, memory_format=torch.channels_last)


def _template(cell: MDEQCell) -> Weights:
    """`Weights` with a `Merged` in place of each convolution's tensor."""
    fusions: list[Any] = list(cell.fusions)
    scales = range(len(fusions))
    return Weights(
        blocks=tuple(
            tuple(_block_weights(block) for block in scale.blocks)  # type: ignore[union-attr]
            for scale in cell.scales
        ),
        downs=tuple(
            tuple(
                _down_weights(fusions, j, level) for level in scales if 0 < level < len(scales) - j
            )
            for j in scales
        ),
        ups=tuple(_up_weights(fusions, j) if j else None for j in scales),
        posts=tuple(
            PostWeights(_merged([fusion.post]), _norm(fusion.post_norm)) for fusion in fusions
        ),
    )


def _block_weights(block: Any) -> BlockWeights:
    return BlockWeights(
        _merged([block.expand]),
        _norm(block.expand_norm),
        _merged([block.reduce]),
        _norm(block.reduce_norm),
        _norm(block.sum_norm),
    )


def _down_weights(fusions: list[Any], stream: int, level: int) -> DownWeights:
    at = 3 * (level - 1)  # in Down's sequence of convolution, norm, ReLU, convolution, ...
    paths = [fusion.down[stream] for fusion in fusions[stream + level :]]
    return DownWeights(
        conv=_merged([path[at] for path in paths], own_inputs=level > 1),
        arriving=_norm(paths[0][at + 1]),
        arriving_channels=paths[0][at].out_channels,
        passing=_merged_norm([path[at + 1] for path in paths[1:]]),
    )


def _up_weights(fusions: list[Any], stream: int) -> UpWeights:
    paths = [fusion.up[stream - i - 1] for i, fusion in enumerate(fusions[:stream])]
    return UpWeights(
        _merged([path.conv for path in paths]),
        tuple(_norm(path.norm) for path in paths),
        tuple(path.conv.out_channels for path in paths),
    )


def _merged(convs: Sequence[nn.Conv2d], own_inputs: bool = False) -> Any:
    return Merged(tuple(_convolution(conv) for conv in convs), own_inputs)


def _convolution(conv: nn.Conv2d) -> Convolution:
    if parametrize.is_parametrized(conv, "weight"):
        steps: Any = conv.parametrizations["weight"]  # type: ignore[index]
        if len(steps) == 1 and isinstance(steps[0], _WeightNorm) and steps[0].dim == 0:
            return Convolution(steps.original1, steps.original0)
    return Convolution(conv.weight)


def _norm(norm: nn.GroupNorm) -> Norm:
    return Norm(norm.num_groups, norm.weight, norm.bias, norm.eps)


def _merged_norm(norms: Sequence[nn.GroupNorm]) -> Norm | None:
    if len(norms) < 2:
        return _norm(norms[0]) if norms else None
    return Norm(
        sum(norm.num_groups for norm in norms),
        torch.cat([norm.weight for norm in norms]),
        torch.cat([norm.bias for norm in norms]),
        norms[0].eps,
    )


class Prepared(Held):
    """A cell's prepared weights, what they make of z = 0, and its injection in the right order,
    kept during a solve.

    It must be a submodule of the cell, so that `hold` finds it.  Each entry is kept twice, with its
    autograd history for the evaluation that is differentiated, and without for the others.
    """

    def weights(self, cell: MDEQCell, dtype: torch.dtype) -> Weights:
        def make() -> Weights:
            found = prepare(cell, dtype)
            return found if self._depth == 0 else found.in_pairs()  # not for one evaluation

        return self._kept(("weights", dtype), None, make, Weights.detach)

    def at_zero(self, weights: Weights, height: int, width: int) -> tuple[AtZero, ...]:
        """weights: those kept here."""
        return self._kept(
            ("at zero", weights.posts[0].conv.dtype, height, width),
            None,
            lambda: at_zero(weights, height, width),
            lambda found: found,  # has no autograd history
        )

    def injection(self, injection: Tensor, dtype: torch.dtype) -> Tensor:
        if injection.is_inference():  # has no version, so that changes would not be noticed
            return injection.to(dtype, memory_format=torch.channels_last)
        return self._kept(
            ("injection", dtype),
            (injection, injection._version),
            lambda: injection.to(dtype, memory_format=torch.channels_last),
            Tensor.detach,
        )

    def _kept(
        self, name: Hashable, source: Any, make: Callable[[], T], detach: Callable[[T], T]
    ) -> T:
        if self._depth == 0 or (torch.is_grad_enabled() and not self._grad):
            return make()
        kept: dict[Hashable, Any] = self.held(dict)
        if name not in kept or not _same_source(kept[name][0], source):
            with torch.set_grad_enabled(self._grad):
                live = make()
            kept[name] = source, live, detach(live)
        return kept[name][1 if torch.is_grad_enabled() else 2]


def _same_source(one: Any, other: Any) -> bool:
    return one is other or (one[0] is other[0] and one[1] == other[1])
