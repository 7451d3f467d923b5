"""Stem and head of a multiscale DEQ with few, large operations: the same functions.

    `Stem` and `Head`                 here
    weights cast at each layer        in one launch for all (`prepare`)
    norm, ReLU                        one kernel, also with the sum of two norms before it
    two 1×1 convolutions of a scale   one, for shortcut and body (with group norms)
    14 channels, which cuDNN pads     16 of which two are zeros, from the weights on
    an image of 3 channels            what each place sees of it, and a product with that
    one scale after another           side by side, on CUDA streams of their own

Everything is channels-last and in the dtype of autocast.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import pad

from gdeq.fast.kernels import classifier
from gdeq.fast.kernels.autograd import differentiates
from gdeq.fast.kernels.norms import (
    BatchSource,
    Running,
    Source,
    batch_norms,
    fuse,
    norm_act,
    room_beside,
    slices,
)
from gdeq.fast.kernels.weights import Merged
from gdeq.fast.mdeq.convolution import convolution
from gdeq.fast.mdeq.weights import Weights, make, merged, norm_of
from gdeq.fast.streams import side_by_side
from gdeq.models.mdeq import Bottleneck, Head, MultiscaleState, Stem

MULTIPLE = 8  # cuDNN's fast kernels want so many channels, or a multiple
IMAGE_CHANNELS = 3  # up to so many, an image is given MULTIPLE channels


def prepare(part: nn.Module, batch: int, dtype: torch.dtype) -> Weights:
    """The weights of a stem or head, for so many samples.

    Zeros make room for channels that nobody has.  At the place of a bottleneck are the first
    convolutions of its shortcut and its body as one.
    """
    modules: list[Any] = list(part.modules())
    inputs: dict[nn.Module, int] = {}
    outputs: dict[nn.Module, int] = {}
    if isinstance(part, Stem) and modules[1].in_channels <= IMAGE_CHANNELS:
        inputs[modules[1]] = MULTIPLE
    joined: dict[Hashable, Merged] = {}
    for block in (m for m in modules if isinstance(m, Bottleneck)):
        first, norm, _, second, other_norm, _, third, _ = block.body
        outputs[first] = inputs[second] = _with_room(norm)
        outputs[second] = inputs[third] = _with_room(other_norm)
        if isinstance(norm, nn.GroupNorm) and not isinstance(block.shortcut, nn.Identity):
            beside: Any = block.shortcut.get_submodule("0")
            room = beside.out_channels + outputs.pop(first)
            joined[block] = merged(beside, first, outputs=room)
            modules.remove(beside)
            modules.remove(first)
    convs: dict[Hashable, Merged] = {
        m: merged(m, outputs=outputs.get(m, 0), inputs=inputs.get(m, 0))
        for m in modules
        if isinstance(m, nn.Conv2d)
    }
    norms: dict[Hashable, Any] = {m: norm_of(m) for m in modules if isinstance(m, nn.GroupNorm)}
    with torch.autocast(next(part.parameters()).device.type, enabled=False):
        return make(part, convs | joined, norms, dtype).per_sample(batch)


def _with_room(norm: Any) -> int:
    """The channels of this norm, which neither scales nor shifts, and zeros up to a multiple.

    A channel of zeros is its own batch norm; group norms leave the zeros out.
    """
    grouped = isinstance(norm, nn.GroupNorm)
    channels: int = norm.num_channels if grouped else norm.num_features
    room = -channels % MULTIPLE
    fits = room <= room_beside(channels, norm.num_groups) if grouped else of_batch(norm)
    return channels + room if fits else channels


def run_stem(stem: Stem, images: Tensor, weights: Weights) -> Tensor:
    return _layers(list(stem), images, weights)


def run_head(head: Head, z: MultiscaleState, weights: Weights) -> Tensor:
    branches = side_by_side(z[0].device, len(z))
    wide = []  # kept until the branches are joined
    for i, (widen, part) in enumerate(zip(head.widen, z, strict=True)):
        with branches.on(i):
            branches.reads(part, weights.made)
            wide.append(bottleneck(widen, part.to(weights.dtype), weights))
            branches.mark(i)
    y = wide[0]
    for i, down in enumerate(head.down, start=1):
        lower = _layers(list(down.children()), y, weights)
        branches.await_(i)
        branches.reads(wide[i])
        y = wide[i] + lower
    branches.join([])
    y = _layers(list(head.final), y, weights)
    last = head.classify
    if classifier.takes(y, last.weight, last.bias):
        return classifier.classify(y, last.weight, last.bias)
    logits: Tensor = last(y.mean(dim=(2, 3)))
    return logits


def bottleneck(block: Any, x: Tensor, weights: Weights) -> Tensor:
    """relu(body(x) + shortcut(x)), with the norms that both end in."""
    body, shortcut = list(block.body), list(block.shortcut.children())
    last, other = body[-1], shortcut[-1] if shortcut else None
    if isinstance(last, nn.GroupNorm):
        if other is None:
            sources = [Source(_layers(body[:-1], x, weights), None, None)]
            return fuse(x, sources, last.num_groups, last.eps)
        both = convolution(x, weights.convs[block])
        width = shortcut[0].out_channels
        beside, inner = slices(both, (width, both.shape[1] - width))
        inner = _layers(body[1:-1], inner, weights)
        sources = [Source(inner, None, None), Source(beside, *weights.norms[other].affine)]
        return fuse(None, sources, last.num_groups, last.eps)
    inner = _layers(body[:-1], x, weights)
    if other is None:
        return torch.relu(normalised(last, inner, weights) + x)
    beside = _convolved(shortcut[0], x, weights)
    if of_batch(last) and of_batch(other):
        return batch_norms([batch_source(last, inner), batch_source(other, beside)], relu=True)
    return torch.relu(normalised(last, inner, weights) + normalised(other, beside, weights))


def _layers(layers: Sequence[nn.Module], x: Tensor, weights: Weights) -> Tensor:
    """Convolutions and norms in turn; a ReLU runs with the norm before it."""
    for layer, after in zip_longest(layers, layers[1:]):
        if isinstance(layer, nn.Conv2d):
            x = _convolved(layer, x, weights)
        elif not isinstance(layer, nn.ReLU):
            x = normalised(layer, x, weights, relu=isinstance(after, nn.ReLU))
    return x


def normalised(norm: Any, x: Tensor, weights: Weights, relu: bool = False) -> Tensor:
    if isinstance(norm, nn.GroupNorm):
        room = x.shape[1] - norm.num_channels
        return norm_act(x, norm.num_groups, *weights.norms[norm].affine, norm.eps, relu, room=room)
    if of_batch(norm):
        return batch_norms([batch_source(norm, x)], relu)
    y: Tensor = norm(x)
    return torch.relu(y) if relu else y


def of_batch(norm: nn.Module) -> bool:
    """Whether this batch norm takes its statistics from the batch, and from this process alone."""
    return isinstance(norm, nn.BatchNorm2d) and (norm.training or norm.running_mean is None)


def batch_source(norm: nn.BatchNorm2d, x: Tensor) -> BatchSource:
    running = None
    moves = norm.training and norm.track_running_stats
    if moves and norm.running_mean is not None and norm.running_var is not None:
        counted = norm.num_batches_tracked
        running = Running(norm.running_mean, norm.running_var, counted, norm.momentum)
    return BatchSource(x, norm.weight, norm.bias, running, norm.eps)


def _convolved(conv: Any, x: Tensor, weights: Weights) -> Tensor:
    weight = weights.convs[conv]
    if weight.shape[1] > x.shape[1]:
        return image_convolved(x, weight, conv.stride[0], conv.padding[0])
    return convolution(x, weight, conv.stride[0], conv.padding[0])


def image_convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of an image with a weight that has zeros for channels that x has not.

    cuDNN's gradient of a weight of so few channels takes long, and is the last of a backward pass.
    So it is a product with `patches` where nobody asks for a gradient of the image.
    """
    asked = differentiates(x) or forward_ad.unpack_dual(x).tangent is not None
    if stride == 1 and weight.dtype.itemsize == 2 and not asked:
        flat = weight.permute(0, 2, 3, 1).flatten(1)[..., None, None]
        return convolution(patches(x, weight.shape[2], weight.dtype), flat)
    more = weight.shape[1] - x.shape[1]
    return convolution(pad(x.to(weight.dtype), (0, 0, 0, 0, 0, more)), weight, stride, padding)


def patches(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """For each place of x, (batch, channels, height, width), the size × size places around it, with
    zeros outside and up to 8 channels: (batch, 8 size², height, width) in the order of a
    channels-last weight, in half precision and without autograd history."""
    batch, channels, height, width = x.shape
    edge = size // 2
    wide = x.new_zeros((batch, height + 2 * edge, width + 2 * edge, MULTIPLE), dtype=dtype)
    inner = wide[:, edge : edge + height, edge : edge + width, :channels]
    inner.copy_(x.detach().permute(0, 2, 3, 1))
    places = wide.view(torch.complex128).squeeze(-1)  # 16 bytes, so that all channels go at once
    around = places.unfold(1, size, 1).unfold(2, size, 1).contiguous()
    seen = around.view(dtype).view(batch, height, width, size * size * MULTIPLE)
    return seen.permute(0, 3, 1, 2)
