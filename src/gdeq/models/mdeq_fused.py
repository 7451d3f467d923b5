"""The cell of a multiscale DEQ with few, large operations: the same function, computed faster.

    `MDEQCell.forward`                  here
    one convolution for each pair       those that share their input are one with all outputs
    norm, add, relu, norm ...           one kernel (`gdeq.fast.kernels.norms`)
    weights normalised, cast, ordered   once for each solve (`Prepared`), not at each evaluation
    one scale after another             side by side, on CUDA streams of their own
    one tensor for each scale           views of one buffer, all samples of a scale together

Everything is channels-last.  Convolutions compute in the dtype of autocast, or of z without it;
statistics and sums of the norms in float32; the result has the dtype of z.

Streams j → i > j pass i − j strided convolutions.  Level l of all of them is one convolution: at
l = 1 they share the input; further down each has its own, and the weight is block diagonal.  The
zeros cost little, since these maps are small, and a launch less is worth more:

    level 1 of stream 0 (four scales)    [ →1 | →2 | →3 ]    from C₀
    level 2                              [ →2 | →3 ]         from 2 C₀, block diagonal
    level 3                              [ →3 ]              from C₀

The first part of each level has arrived; the norms of the rest have groups of the same size and
are one call.  Streams j → i < j are 1×1 convolutions at the low resolution, one for all i.

A solve begins at z = 0.  There the first block of each scale makes the same of all samples, of the
weights alone, until the injection comes in: its two convolutions, more than half of f, are left out
(`AtZero`).  That supposes finite weights; of others the next evaluation tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gdeq.fast import kernels
from gdeq.fast.kernels.norms import Source, block_end_for, fuse, norm_act, per_sample, slices
from gdeq.models.branches import Parallel, Serial
from gdeq.models.convolution import convolution
from gdeq.models.mdeq_weights import AtZero, BlockWeights, Norm, Prepared, Weights
from gdeq.models.parts import map_parts
from gdeq.regularize import VariationalDropout

if TYPE_CHECKING:
    from gdeq.models.mdeq_cell import MDEQCell, MultiscaleState

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

streams_with_grad = True  # run the scales side by side under autograd too
slices_with_grad = True  # their gradients are written beside each other, not copied there
zero_start = True  # the first evaluation of a solve by what all samples share (`fused_at_zero`)


# ---- f


def evaluate(
    weights: Weights,
    z: MultiscaleState,
    injection: Tensor,
    masks: Sequence[Sequence[Tensor | None]],
    out: Tensor | None = None,
    streams: bool = True,
    zero: Sequence[AtZero] | None = None,
) -> MultiscaleState:
    """f(z, injection) with all its tensors given; makes nothing that a CUDA graph cannot hold.

    masks: for each scale and block, (batch, channels), or None without dropout.
    out: where the result goes, one vector with all samples of the first scale, then of the next.
    streams: on a GPU, run the scales side by side; under autograd if `streams_with_grad`, too.
    zero: where z is zero, what all samples share; without autograd.
    """
    dtype = weights.posts[0].conv.dtype
    scales = range(len(z))
    grad = torch.is_grad_enabled()
    parallel = streams and z[0].is_cuda and (streams_with_grad or not grad)
    if grad:
        weights = _affine_per_sample(weights, len(z[0]))
        # Gradients of leaves are to arrive on the current stream.
        z = tuple(part.view_as(part) for part in z)
    inputs = _cast(z, dtype) if zero is None else z
    injection = injection.to(dtype, memory_format=torch.channels_last)
    results: list[Any] = [None] * len(z) if grad and out is None else _parts_of(z, out)
    # Ways up have branches of their own, beside the longer ones down.
    branches = Parallel(z[0].device, 2 * len(z) - 1, grad) if parallel else Serial()

    streams_out: list[Tensor] = []
    arrived: dict[tuple[int, int], Source] = {}
    alive: list[Any] = [inputs, injection, streams_out, arrived]
    for j in scales:
        with branches.on(j):
            given = injection if j == 0 else None
            reduced = None if zero is None else zero[j].reduced
            branches.reads(weights.blocks[j], weights.downs[j], weights.posts[j])
            branches.reads(z[j], inputs[j], reduced, *masks[j])
            readers = 1 + bool(weights.downs[j]) + (weights.ups[j] is not None)
            y, *others = _blocks(
                weights.blocks[j], z[j], inputs[j], given, masks[j], readers, alive, reduced
            )
            streams_out.append(y)
            branches.mark(j)
            passing = others.pop() if weights.downs[j] else y
            for level, down in enumerate(weights.downs[j], start=1):
                joined = convolution(passing, down.conv, stride=2, padding=1)
                alive.append(joined)
                here, rest = joined, None
                if down.passing is not None:
                    width = down.arriving_channels
                    here, rest = _apart(joined, [width, joined.shape[1] - width])
                arrived[j, j + level] = _source(here, down.arriving)
                branches.mark((j, j + level))
                if rest is not None and down.passing is not None:
                    passing = _normalised(rest, down.passing, relu=True)
                    alive.append(passing)
        up = weights.ups[j]
        if up is not None:
            with branches.on(len(z) - 1 + j):
                branches.await_(j)
                branches.reads(y, up.conv)
                joined = convolution(others.pop(), up.conv)
                alive.append(joined)
                parts = _apart(joined, up.channels) if j > 1 else [joined]
                for i, (part, norm) in enumerate(zip(parts, up.norms, strict=True)):
                    arrived[j, i] = _source(part, norm, levels=j - i)
                branches.mark((j, "up"))

    found = []
    for i in scales:
        with branches.on(i):
            for j in scales:
                if j != i:
                    branches.await_((j, i) if j < i else (j, "up"))
            total = streams_out[i]
            sources = [arrived[j, i] for j in scales if j != i]
            branches.reads(*sources)
            groups, eps = _common(weights, i)
            total = fuse(total, sources, groups, eps)
            post = weights.posts[i]
            raw = convolution(total, post.conv)
            alive += [total, raw]
            found.append(_normalised(raw, post.norm, out=results[i], dtype=z[i].dtype))
    branches.join(found)
    del alive  # not before
    return tuple(found)


def _apart(joined: Tensor, channels: Sequence[int]) -> list[Tensor]:
    """Each part goes to another scale, and its gradient comes back on that one's stream."""
    if slices_with_grad:
        return slices(joined, channels, across_streams=True)
    return list(joined.split(list(channels), dim=1))


def _affine_per_sample(weights: Weights, batch: int) -> Weights:
    """Scales and shifts of all norms for each sample: their gradients are summed in one go."""
    norms: list[Norm] = []
    map_parts(weights, Norm, norms.append)
    vectors = [v for norm in norms for v in (norm.weight, norm.bias) if v is not None]
    spread = iter(per_sample(vectors, batch))

    def change(norm: Norm) -> Norm:
        weight, bias = (None if v is None else next(spread) for v in (norm.weight, norm.bias))
        return dataclasses.replace(norm, weight=weight, bias=bias)

    return map_parts(weights, Norm, change)


def _blocks(
    blocks: Sequence[BlockWeights],
    z: Tensor,
    half: Tensor,
    injection: Tensor | None,
    masks: Sequence[Tensor | None],
    readers: int,
    alive: list[Any],
    reduced: Tensor | None = None,
) -> list[Tensor]:
    """The residual blocks of one scale.  half: z in the dtype of the convolutions.

    reduced: of one sample, what the convolutions of the first block make of z, if that is known.

    The result is given once for each of its readers.
    """
    results = [half]
    for i, (block, mask) in enumerate(zip(blocks, masks, strict=True)):
        if i == 0 and reduced is not None:
            reduced = reduced.expand_as(z)  # kernels read the one sample for each
        else:
            expanded = convolution(half, block.expand, padding=1, pairs=block.expand_pairs)
            inner = _normalised(expanded, block.expand_norm, relu=True)
            reduced = convolution(inner, block.reduce, padding=1, pairs=block.reduce_pairs)
            alive += [expanded, inner]
        norms = block.reduce_norm, block.sum_norm
        results = block_end_for(
            readers if i == len(blocks) - 1 else 1,
            reduced,
            mask,
            injection if i == 0 else None,
            z,
            *_affine(norms[0]),
            *_affine(norms[1]),
            norms[0].groups,
            norms[0].eps,
        )
        z = half = results[0]
        alive += [reduced, half]
    return results


def _normalised(
    x: Tensor,
    norm: Norm,
    relu: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return norm_act(x, norm.groups, norm.weight, norm.bias, norm.eps, relu, out, dtype)


def _source(raw: Tensor, norm: Norm, levels: int = 0) -> Source:
    return Source(raw, *_affine(norm), levels)


def _affine(norm: Norm) -> tuple[Tensor, Tensor]:
    assert norm.weight is not None, "only the last norm of the cell may have no scale and shift"
    assert norm.bias is not None
    return norm.weight, norm.bias


def _common(weights: Weights, target: int) -> tuple[int, float]:
    """Groups and ε of all norms with the channels of this scale."""
    norm = weights.blocks[target][0].sum_norm
    return norm.groups, norm.eps


def _parts_of(z: MultiscaleState, out: Tensor | None) -> list[Tensor]:
    """Channels-last tensors like z that lie one after another in one buffer."""
    if out is None:
        size = sum(part.numel() for part in z)
        out = torch.empty(size, dtype=z[0].dtype, device=z[0].device)
    parts = out.split([part.numel() for part in z])
    shapes = [(n, h, w, c) for n, c, h, w in (part.shape for part in z)]
    return [part.view(shape).permute(0, 3, 1, 2) for part, shape in zip(parts, shapes, strict=True)]


def as_buffer(parts: Sequence[Tensor]) -> Tensor | None:
    """The one vector that channels-last tensors lie in, one after another; None if they do not."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.dtype != first.dtype
            or part.storage_offset() != at
            or not part.permute(0, 2, 3, 1).is_contiguous()
        ):
            return None
        at += part.numel()
    return first.as_strided((at - first.storage_offset(),), (1,), first.storage_offset())


def _cast(z: MultiscaleState, dtype: torch.dtype) -> list[Tensor]:
    """z channels-last in this dtype; one operation where it lies in one buffer."""
    if not torch.is_grad_enabled() and any(part.dtype != dtype for part in z):
        buffer = as_buffer(z)
        if buffer is not None:
            return _parts_of(z, buffer.to(dtype))
    return [part.to(dtype, memory_format=torch.channels_last) for part in z]


def draw_masks(cell: MDEQCell, z: MultiscaleState) -> list[list[Tensor | None]]:
    """The dropout masks of all blocks, drawn in the order of the plain cell, or as held."""
    return [
        [_mask(block.dropout, part) for block in scale.blocks]  # type: ignore[union-attr]
        for scale, part in zip(cell.scales, z, strict=True)
    ]


def _mask(dropout: VariationalDropout, like: Tensor) -> Tensor | None:
    if not dropout.training or dropout.p == 0:
        return None
    shape = torch.Size((*like.shape[:2], 1, 1))
    mask = dropout.held(lambda: dropout._draw(like, shape))
    if mask.shape != shape:
        raise RuntimeError(
            f"VariationalDropout was used with shape {tuple(mask.shape)} and then "
            f"{tuple(shape)} in one solve"
        )
    return mask.flatten(1)


# ---- in place of the plain cell


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x computes in."""
    kind = x.device.type
    if torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def applies(cell: MDEQCell, z: MultiscaleState, injection: Tensor) -> bool:
    """Whether `fused_forward` takes the place of the plain forward.

    config.fused: True, wherever it can; "auto", where it is faster, in half precision on a GPU with
    Triton; False, never.
    """
    fused = getattr(cell.config, "fused", "auto")
    if fused is False or torch.compiler.is_compiling():
        return False
    tensors = (*z, injection)
    if any(tensor.dtype not in DTYPES or tensor.dim() != 4 for tensor in tensors):
        return False
    if fused is True:
        return True
    device, dtype = injection.device, compute_dtype(injection)
    return device.type == "cuda" and kernels.available(device) and dtype.itemsize == 2


def prepare_early(cell: Any, x: Tensor, from_zero: bool = False) -> None:
    """Make the weights of a cell that is held (`gdeq.hold`) before it is first evaluated.

    x: images, on the device and of the dtype of what it will be given.
    from_zero: it will first be evaluated at zero.
    """
    if isinstance(getattr(cell, "prepared", None), Prepared) and applies(cell, (), x):
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            weights = cell.prepared.weights(cell, dtype)
            if from_zero and zero_start:
                # With another stem than ours they may have another size, and are made then.
                _, height, width = cell.config.state_shapes(*x.shape[-2:])[0]
                cell.prepared.at_zero(weights, height, width)


def fused_forward(
    cell: MDEQCell,
    z: MultiscaleState,
    injection: Tensor,
    out: Tensor | None = None,
    streams: bool = True,
) -> MultiscaleState:
    """`MDEQCell.forward`.  Without autograd the result is one buffer (`as_buffer`)."""
    dtype, prepared = compute_dtype(z[0]), _prepared(cell)
    with torch.autocast(z[0].device.type, enabled=False):
        weights = prepared.weights(cell, dtype)
        injection = prepared.injection(injection, dtype)
        return evaluate(weights, z, injection, draw_masks(cell, z), out, streams)


def fused_at_zero(cell: MDEQCell, injection: Tensor) -> MultiscaleState | None:
    """`fused_forward` at `MDEQCell.initial_state`; None where that does not apply."""
    if torch.is_grad_enabled() or not (zero_start and applies(cell, (), injection)):
        return None
    dtype, prepared = compute_dtype(injection), _prepared(cell)
    batch, _, height, width = injection.shape
    with torch.autocast(injection.device.type, enabled=False):
        weights = prepared.weights(cell, dtype)
        zero = prepared.at_zero(weights, height, width)
        injection = prepared.injection(injection, dtype)
        z = tuple(scale.z.expand(batch, -1, -1, -1) for scale in zero)
        return evaluate(weights, z, injection, draw_masks(cell, z), zero=zero)


def _prepared(cell: MDEQCell) -> Prepared:
    found = getattr(cell, "prepared", None)
    return found if isinstance(found, Prepared) else Prepared()  # that keeps nothing: not held
