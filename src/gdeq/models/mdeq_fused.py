"""The cell of a multiscale DEQ with few, large operations: the same function, computed faster.

    `MDEQCell.forward`                  here
    one convolution for each pair       those that share their input are one with all outputs
    norm, add, relu, norm ...           one kernel (`gdeq.kernels.norms`)
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
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.utils import parametrize

from gdeq import kernels
from gdeq.kernels.norms import Source, block_end, fuse, norm_act, per_sample
from gdeq.kernels.weights import Convolution, Merged, merge, plans_of
from gdeq.regularize import Held, VariationalDropout, _WeightNorm

if TYPE_CHECKING:
    from gdeq.models.mdeq_cell import MDEQCell, MultiscaleState

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
T = TypeVar("T")


# ---- weights


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
        return _map_parts(self, Tensor, Tensor.detach)

    def tensors(self) -> list[Tensor]:
        return _tensors(self)

    def copy_(self, other: Weights) -> None:
        """Take over the values: a captured graph reads them where they were at its capture."""
        torch._foreach_copy_(self.tensors(), other.tensors())


def _map_parts(value: T, kind: type, change: Callable[[Any], Any]) -> T:
    result: Any = value
    if isinstance(value, kind):
        result = change(value)
    elif isinstance(value, tuple):
        result = tuple(_map_parts(part, kind, change) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        result = type(value)(**{name: _map_parts(p, kind, change) for name, p in parts.items()})
    return result


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_parts(value, Tensor, found.append)
    return found


def prepare(cell: MDEQCell, dtype: torch.dtype) -> Weights:
    """The cell's weights for `evaluate`; differentiable under autograd."""
    template = _template(cell)
    wanted: list[Merged] = []
    _map_parts(template, Merged, wanted.append)
    found = iter(merge(wanted, dtype, plans_of(cell)))
    return _map_parts(template, Merged, lambda _: next(found))


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
    """A cell's prepared weights, and its injection in the right order, kept during a solve.

    It must be a submodule of the cell, so that `hold` finds it.  Each entry is kept twice, with its
    autograd history for the evaluation that is differentiated, and without for the others.
    """

    def weights(self, cell: MDEQCell, dtype: torch.dtype) -> Weights:
        return self._kept(("weights", dtype), None, lambda: prepare(cell, dtype), Weights.detach)

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


# ---- branches that run side by side


streams_with_grad = True  # run the scales side by side under autograd too


class _Serial:
    """Everything on the current stream."""

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        yield

    def mark(self, name: Hashable) -> None:
        pass

    def await_(self, name: Hashable) -> None:
        pass

    def reads(self, *values: Any) -> None:
        """Tensors in these, made on other branches, are read on this one."""

    def join(self, results: Sequence[Tensor]) -> None:
        pass


_streams: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}


class _Parallel(_Serial):
    """Branch 0 on the current stream, each other one on its own.

    What is allocated on a stream is free for that stream's next work as soon as nothing refers to
    it, although another one may still read it.  So the caller keeps all of it until `join`; the
    next evaluation starts after that.  One from another current stream might not, and has other
    streams.

    grad: autograd keeps tensors longer, and frees them one by one in its backward pass, where each
    operation runs on the stream of its forward one.  Autograd itself lets streams wait for each
    other's gradients and guards those; what forward operations read from another stream is told to
    the allocator here (`reads`), which then does not give the memory away too early.
    """

    def __init__(self, device: torch.device, branches: int, grad: bool) -> None:
        self.grad = grad
        self.main = torch.cuda.current_stream(device)
        kept = _streams.setdefault((device, self.main.cuda_stream), [])
        while len(kept) < branches - 1:
            kept.append(torch.cuda.Stream(device))
        self.sides = kept[: branches - 1]
        self.marks: dict[Hashable, torch.cuda.Event] = {}
        start = self.main.record_event()
        for side in self.sides:
            side.wait_event(start)

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        with torch.cuda.stream(self.sides[branch - 1] if branch else self.main):
            yield

    def mark(self, name: Hashable) -> None:
        self.marks[name] = torch.cuda.current_stream(self.main.device).record_event()

    def await_(self, name: Hashable) -> None:
        torch.cuda.current_stream(self.main.device).wait_event(self.marks[name])

    def reads(self, *values: Any) -> None:
        if self.grad:
            stream = torch.cuda.current_stream(self.main.device)
            seen = {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors(values)}
            for tensor in seen.values():
                tensor.record_stream(stream)

    def join(self, results: Sequence[Tensor]) -> None:
        for side in self.sides:
            self.main.wait_event(side.record_event())
        self.reads(*results)


# ---- f


def evaluate(
    weights: Weights,
    z: MultiscaleState,
    injection: Tensor,
    masks: Sequence[Sequence[Tensor | None]],
    out: Tensor | None = None,
    streams: bool = True,
) -> MultiscaleState:
    """f(z, injection) with all its tensors given; makes nothing that a CUDA graph cannot hold.

    masks: for each scale and block, (batch, channels), or None without dropout.
    out: where the result goes, one vector with all samples of the first scale, then of the next.
    streams: on a GPU, run the scales side by side; under autograd if `streams_with_grad`, too.
    """
    dtype = weights.posts[0].conv.dtype
    scales = range(len(z))
    grad = torch.is_grad_enabled()
    parallel = streams and z[0].is_cuda and (streams_with_grad or not grad)
    if grad:
        weights = _affine_per_sample(weights, len(z[0]))
        # Gradients of leaves are to arrive on the current stream.
        z = tuple(part.view_as(part) for part in z)
    inputs = _cast(z, dtype)
    injection = injection.to(dtype, memory_format=torch.channels_last)
    results: list[Any] = [None] * len(z) if grad and out is None else _parts_of(z, out)
    # Ways up have branches of their own, beside the longer ones down.
    branches = _Parallel(z[0].device, 2 * len(z) - 1, grad) if parallel else _Serial()

    streams_out: list[Tensor] = []
    arrived: dict[tuple[int, int], Source] = {}
    alive: list[Any] = [inputs, injection, streams_out, arrived]
    for j in scales:
        with branches.on(j):
            given = injection if j == 0 else None
            branches.reads(
                weights.blocks[j], weights.downs[j], weights.posts[j], z[j], inputs[j], *masks[j]
            )
            y = _blocks(weights.blocks[j], z[j], inputs[j], given, masks[j], alive)
            streams_out.append(y)
            branches.mark(j)
            passing = y
            for level, down in enumerate(weights.downs[j], start=1):
                joined = conv2d(passing, down.conv, stride=2, padding=1)
                alive.append(joined)
                here, rest = joined, None
                if down.passing is not None:
                    width = down.arriving_channels
                    here, rest = joined.split([width, joined.shape[1] - width], dim=1)
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
                joined = conv2d(y, up.conv)
                alive.append(joined)
                parts = joined.split(up.channels, dim=1) if j > 1 else [joined]
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
            raw = conv2d(total, post.conv)
            alive += [total, raw]
            found.append(_normalised(raw, post.norm, out=results[i], dtype=z[i].dtype))
    branches.join(found)
    del alive  # not before
    return tuple(found)


def _affine_per_sample(weights: Weights, batch: int) -> Weights:
    """Scales and shifts of all norms for each sample: their gradients are summed in one go."""
    norms: list[Norm] = []
    _map_parts(weights, Norm, norms.append)
    vectors = [v for norm in norms for v in (norm.weight, norm.bias) if v is not None]
    spread = iter(per_sample(vectors, batch))

    def change(norm: Norm) -> Norm:
        weight, bias = (None if v is None else next(spread) for v in (norm.weight, norm.bias))
        return dataclasses.replace(norm, weight=weight, bias=bias)

    return _map_parts(weights, Norm, change)


def _blocks(
    blocks: Sequence[BlockWeights],
    z: Tensor,
    half: Tensor,
    injection: Tensor | None,
    masks: Sequence[Tensor | None],
    alive: list[Any],
) -> Tensor:
    """The residual blocks of one scale.  half: z in the dtype of the convolutions."""
    for i, (block, mask) in enumerate(zip(blocks, masks, strict=True)):
        expanded = conv2d(half, block.expand, padding=1)
        inner = _normalised(expanded, block.expand_norm, relu=True)
        reduced = conv2d(inner, block.reduce, padding=1)
        norms = block.reduce_norm, block.sum_norm
        z = half = block_end(
            reduced,
            mask,
            injection if i == 0 else None,
            z,
            *_affine(norms[0]),
            *_affine(norms[1]),
            norms[0].groups,
            norms[0].eps,
        )
        alive += [expanded, inner, reduced, half]
    return half


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


def fused_forward(
    cell: MDEQCell,
    z: MultiscaleState,
    injection: Tensor,
    out: Tensor | None = None,
    streams: bool = True,
) -> MultiscaleState:
    """`MDEQCell.forward`.  Without autograd the result is one buffer (`as_buffer`)."""
    dtype = compute_dtype(z[0])
    prepared = getattr(cell, "prepared", None)
    if not isinstance(prepared, Prepared):
        prepared = Prepared()  # keeps nothing: no `hold` knows it
    with torch.autocast(z[0].device.type, enabled=False):
        weights = prepared.weights(cell, dtype)
        injection = prepared.injection(injection, dtype)
        return evaluate(weights, z, injection, draw_masks(cell, z), out, streams)
