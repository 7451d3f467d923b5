"""Layers that the parts of a multiscale network share."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import pad

from gdeq.fast import kernels
from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.norms import (
    BatchSource,
    Running,
    Source,
    batch,
    batch_norms,
    fuse,
    norm_act,
    per_sample,
    room_beside,
    slices,
)
from gdeq.fast.kernels.weights import Convolution, Merged, merge, plans_of
from gdeq.hooks import unwatched
from gdeq.models.convolution import convolution

MULTIPLE = 8  # channels that cuDNN's fast kernels want; 1: none beside, for comparisons
group_rooms = True  # beside channels of group norms, too
joined_shortcuts = True
wide_images = True  # with as many channels
image_patches = True  # their convolutions as products with what each place sees


def conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution whose norm follows: no bias, and small weights (Bai et al. 2020).

    Small, because at the highest resolution the cell adds the image's injection to a convolution of
    z: the injection rules at first, f is contractive there, and the first solves converge.
    """
    layer = Conv2d(inner, outer, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.normal_(layer.weight, std=0.01)
    return layer


def runs_as_kernels(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Under half-precision autocast on a GPU norms are one kernel each, and their results half.

    dtype: of what comes after x, where that is asked; else x's.
    """
    half = (dtype or x.dtype).itemsize == 2 and torch.is_autocast_enabled(x.device.type)
    return (
        x.is_cuda
        and half
        and x.dim() == 4
        and kernels.available(x.device)
        and not torch.compiler.is_compiling()
    )


class Conv2d(nn.Conv2d):
    """The same; ready: its weight in the compute dtype, while `made_ready` is open, which may have
    zeros for channels that x has not."""

    ready: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ready is None:
            return super().forward(x)
        more = self.ready.shape[1] - x.shape[1]
        if more > 0 and self._sees_patches(x):
            inner = self.ready.permute(0, 2, 3, 1).flatten(1)[..., None, None]
            return convolution(patches(x, self.kernel_size[0], self.ready.dtype), inner)
        if more > 0:
            x = pad(x.to(self.ready.dtype), (0, 0, 0, 0, 0, more))
        return convolution(x, self.ready, self.stride[0], self.padding[0])  # type: ignore[arg-type]

    def _sees_patches(self, x: Tensor) -> bool:
        """An image, of which no gradient is asked: cuDNN's gradient of a weight of so few channels
        takes long, and is the last of a backward pass."""
        assert self.ready is not None
        same = self.kernel_size[0] == self.kernel_size[1] == 2 * self.padding[0] + 1  # type: ignore[operator]
        same = same and self.padding[0] == self.padding[1] and self.stride == (1, 1)
        same = same and self.dilation == (1, 1)
        vectors = self.ready.shape[1] == MULTIPLE and self.ready.dtype.itemsize * MULTIPLE == 16
        asked = differentiates(x) or forward_ad.unpack_dual(x).tangent is not None
        return image_patches and same and vectors and not asked


def patches(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """For each place of x, (batch, channels, height, width), the size × size places around it, with
    zeros outside and to 8 channels: (batch, 8 size², height, width) in the order of a
    channels-last weight.  Of the values alone."""
    batch, channels, height, width = x.shape
    edge = size // 2
    wide = x.new_zeros((batch, height + 2 * edge, width + 2 * edge, MULTIPLE), dtype=dtype)
    inner = wide[:, edge : edge + height, edge : edge + width, :channels]
    inner.copy_(x.detach().permute(0, 2, 3, 1))
    places = wide.view(torch.complex128).squeeze(-1)  # what 16 bytes are, so that all go at once
    around = places.unfold(1, size, 1).unfold(2, size, 1).contiguous()
    seen = around.view(dtype).view(batch, height, width, size * size * MULTIPLE)
    return seen.permute(0, 3, 1, 2)


class GroupNorm(nn.GroupNorm):
    """The same, as one kernel where that runs, with a ReLU if asked.

    ready: its scale and shift for each sample, while `made_ready` is open.
    room: channels of x, while `made_ready` is open; those beyond its own are zeros, and stay zeros.
    """

    ready: tuple[Tensor, Tensor] | None = None
    room: int | None = None

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        if runs_as_kernels(x):
            # Of x itself: a float32 x may have come by a convolution that was not made ready.
            room = 0 if self.room is None else x.shape[1] - self.num_channels
            affine = self.affine_tensors()
            return norm_act(x, self.num_groups, *affine, self.eps, relu, room=room)
        y = super().forward(x)
        return torch.relu(y) if relu else y

    def affine_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.ready or (self.weight, self.bias)


class BatchNorm2d(nn.BatchNorm2d):
    """The same; in training in few kernels where those run, with a ReLU if asked.

    room: channels of x, while `made_ready` is open; those beyond its own are zeros, and stay zeros.
    """

    room: int | None = None

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        if self.runs_as_kernels(x):
            return batch_norms([self.source(x)], relu)
        y = super().forward(x)
        return torch.relu(y) if relu else y

    def runs_as_kernels(self, x: Tensor) -> bool:
        channels = self.room or self.num_features
        fits = x.dim() == 4 and x.shape[1] == channels  # else PyTorch's error
        return batch.enabled and self.of_batch() and fits and runs_as_kernels(x)

    def of_batch(self) -> bool:
        """Whether its statistics are those of the batch."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def source(self, x: Tensor) -> BatchSource:
        running = None
        moves = self.training and self.track_running_stats
        if moves and self.running_mean is not None and self.running_var is not None:
            counted = self.num_batches_tracked
            running = Running(self.running_mean, self.running_var, counted, self.momentum)
        return BatchSource(x, self.weight, self.bias, running, self.eps)


NORMS = (GroupNorm, BatchNorm2d)


class Layers(nn.Sequential):
    """The same; a norm of this module and the ReLU behind it run together."""

    def forward(self, x: Tensor) -> Tensor:
        return run_layers(list(self), x)


def run_layers(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    merged = False
    for layer, after in itertools.zip_longest(layers, layers[1:]):
        if merged:
            merged = False
        elif isinstance(layer, NORMS) and isinstance(after, nn.ReLU) and runs_as_kernels(x):
            x, merged = layer(x, relu=True), True
        else:
            x = layer(x)
    return x


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)); norms that they end in are one kernel with that.

    ready: the weight of the first convolutions of both in one, while `made_ready` is open.
    """

    ready: Tensor | None = None

    def __init__(self, body: Layers, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        norm, other = _last_norm(self.body), _last_norm(self.shortcut)
        if isinstance(norm, GroupNorm) and runs_as_kernels(x):
            at_shortcut, at_body, done = x, x, 0
            if self.ready is not None:
                width, done = self.shortcut[0].out_channels, 1  # type: ignore[index]
                both = convolution(x, self.ready)
                at_shortcut, at_body = slices(both, (width, both.shape[1] - width))
            sources, own = [_source(self.body, norm, at_body, done)], None
            alike = isinstance(other, GroupNorm) and other.num_groups == norm.num_groups
            if isinstance(other, GroupNorm) and alike and other.eps == norm.eps:
                sources.append(_source(self.shortcut, other, at_shortcut, done))
            else:
                own = self.shortcut(x)
            return fuse(own, sources, norm.num_groups, norm.eps)
        if isinstance(norm, BatchNorm2d) and isinstance(other, BatchNorm2d):
            one, two = _before_norm(self.body, x), _before_norm(self.shortcut, x)
            if norm.runs_as_kernels(one) and other.runs_as_kernels(two):
                return batch_norms([norm.source(one), other.source(two)], relu=True)
            return torch.relu(norm(one) + other(two))
        return torch.relu(self.body(x) + self.shortcut(x))

    def begins_alike(self) -> bool:
        """Whether `ready` may be used: two convolutions of the same kind, and norms that take
        slices."""
        if not (joined_shortcuts and isinstance(self.shortcut, Layers)):
            return False
        one, two = self.shortcut[0], self.body[0]
        norms = self.shortcut[-1], self.body[1], self.body[-1]
        return (
            _has_room(one)
            and _has_room(two)
            and unwatched(one)
            and unwatched(two)
            and one.kernel_size == two.kernel_size == (1, 1)
            and one.stride == two.stride == (1, 1)
            and all(type(norm) is GroupNorm for norm in norms)
            and norms[0].num_groups == norms[2].num_groups
            and norms[0].eps == norms[2].eps
        )


def _last_norm(layers: nn.Module) -> nn.Module | None:
    return layers[-1] if isinstance(layers, Layers) else None


def _before_norm(layers: nn.Module, x: Tensor, done: int = 0) -> Tensor:
    return run_layers(list(layers.children())[done:-1], x)


def _source(layers: nn.Module, norm: GroupNorm, x: Tensor, done: int) -> Source:
    return Source(_before_norm(layers, x, done), *norm.affine_tensors())


@contextlib.contextmanager
def made_ready(owner: nn.Module, x: Tensor) -> Iterator[None]:
    """While open, the convolutions and norms of ``owner`` have their parameters as kernels take
    them, made in one launch for all: weights cast and ordered, and scales and shifts for each
    sample of the batch x, so that one reduction sums all their gradients.

    Where cuDNN would copy what is between two convolutions to have zeros beside its channels, these
    are there already (`_rooms`)."""
    modules = list(owner.modules())
    residuals: list[Any] = [m for m in modules if isinstance(m, Residual) and m.begins_alike()]
    pairs = [(m.shortcut[0], m.body[0]) for m in residuals]
    in_pairs = {id(conv) for pair in pairs for conv in pair}
    convs = [m for m in modules if isinstance(m, Conv2d) and "weight" in m._parameters]
    convs = [conv for conv in convs if id(conv) not in in_pairs]
    norms = [m for m in modules if isinstance(m, GroupNorm) and m.affine]
    dtype = torch.get_autocast_dtype(x.device.type)
    rooms = _rooms([module for module in modules if isinstance(module, Layers)])
    outputs, inputs = ({id(room[i]): room[3] for room in rooms} for i in (0, 2))
    # Of an image: cuDNN would make them itself, for each of its kernels.
    if wide_images:
        inputs |= {id(conv): MULTIPLE for conv in convs if _has_room(conv) and conv.in_channels < 4}
    merged = [
        Merged(
            (Convolution(conv.weight),),
            outputs=outputs.get(id(conv), 0),
            inputs=inputs.get(id(conv), 0),
        )
        for conv in convs
    ]
    for one, two in pairs:
        both = Convolution(one.weight), Convolution(two.weight)
        room = outputs.get(id(two), two.out_channels)
        merged.append(Merged(both, outputs=one.out_channels + room))
    vectors = [vector for norm in norms for vector in (norm.weight, norm.bias)]
    with torch.autocast(x.device.type, enabled=False):
        weights = merge(merged, dtype, plans_of(owner))
        spread = per_sample(vectors, len(x)) if vectors else []
    weighted: list[Any] = [*convs, *residuals]
    try:
        for layer, weight in zip(weighted, weights, strict=True):
            layer.ready = weight
        for norm, scale, shift in zip(norms, spread[::2], spread[1::2], strict=True):
            norm.ready = (scale, shift)
        for _, between, _, channels in rooms:
            between.room = channels
        yield
    finally:
        for layer in weighted:
            layer.ready = None
        for norm in norms:
            norm.ready = None
        for _, between, _, _ in rooms:
            between.room = None


def _rooms(parts: Sequence[Layers]) -> list[tuple[Conv2d, Any, Conv2d, int]]:
    """Convolution, norm, ReLU, convolution, and the channels between them with zeros beside.

    A channel of zeros is its own batch norm, if that neither scales nor shifts.  Group norms leave
    the zeros out.
    """
    found = []
    for part in parts:
        layers: list[Any] = list(part)
        for one, norm, act, two in zip(layers, layers[1:], layers[2:], layers[3:], strict=False):
            if not (_has_room(one) and _has_room(two) and type(act) is nn.ReLU):
                continue
            if not (unwatched(one) and unwatched(norm) and unwatched(two)):  # they would see zeros
                continue
            room = -(-one.out_channels // MULTIPLE) * MULTIPLE
            if two.in_channels < room and _takes_room(norm, two.in_channels, room):
                found.append((one, norm, two, room))
    return found


def _takes_room(norm: Any, channels: int, room: int) -> bool:
    if type(norm) is BatchNorm2d:
        of_batch = batch.enabled and norm.of_batch()
        return of_batch and not norm.affine and norm.num_features == channels
    if type(norm) is GroupNorm:
        fits = room - channels <= room_beside(channels, norm.num_groups)
        return group_rooms and fits and not norm.affine and norm.num_channels == channels
    return False


def _has_room(layer: nn.Module) -> bool:
    """Of one group and without a bias, whose weight `made_ready` makes."""
    plain = type(layer) is Conv2d and layer.groups == 1 and layer.bias is None
    return plain and "weight" in layer._parameters


def ready_tensors(part: nn.Module) -> tuple[Tensor | tuple[Tensor, Tensor], ...]:
    """What `made_ready` has put into the convolutions and norms of this part."""
    found = (getattr(module, "ready", None) for module in part.modules())
    return tuple(ready for ready in found if ready is not None)


def group_norm(groups: int, channels: int, affine: bool = True, gain: float = 1.0) -> nn.GroupNorm:
    """GroupNorm with ``groups`` groups, or fewer where they do not divide the channels.

    gain: what its scale starts at.
    """
    norm = GroupNorm(math.gcd(groups, channels), channels, affine=affine)
    if affine:
        nn.init.constant_(norm.weight, gain)
    return norm
