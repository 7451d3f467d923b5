"""batch_norms: batch normalisation over all samples and pixels, of one map or of the sum of two.

    out = act(Σ_j w_j x̂_j + b_j),  j = 1, or j = 1, 2

A channels-last map is rows × channels numbers without gaps.  It is read as if a row had
L = lcm(channels, 64) numbers, and a program takes 64 columns of these: whole lines of memory, 16
bytes for each thread, for 14 channels as well as for 64.  Column k holds the channel k mod channels
alone, so that sums stay within columns until a second kernel joins the columns of each channel.

    forward    moments   mean and Σ(x − mean)² of the columns of each program
               joined    those of each channel (Chan, Golub, LeVeque 1979); running statistics
               applied   act(Σ (x − mean) ρ w + b)
    backward   sums      Σ g and Σ g (x − mean), g = act′ dout, of the columns of each program
               joined    those of each channel; gradients of scales and shifts
               applied   dx = ρ w (g − mean(g) − x̂ mean(g x̂))

The second and third kernels know how many numbers each program saw from the sizes alone.  The order
of all sums is fixed, so the results repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional

from gdeq.fast.kernels.autograd import differentiable, differentiates
from gdeq.fast.kernels.choice import on_device
from gdeq.fast.kernels.norms import batch_kernels as kernels
from gdeq.fast.kernels.norms.affine import Vector
from gdeq.fast.kernels.norms.tensors import at_least_float32, deliver, empty_channels_last, runs

enabled = True  # for comparisons
COLUMNS = 64  # of a program: 8 threads, 16 bytes of half precision each
LANES = 16  # rows that the other threads of 4 warps take at once
WARPS = 4
MOST_SOURCES = 2


@dataclass
class Tuning:
    """rows: of a thread in one tile; it reads all of them before it uses the first.
    programs: at most so many; an SM of an H200 has registers for 1 / 132 of them.
    """

    rows: int
    programs: int


# One entry for each kernel and number of maps.
TUNING = {
    ("moments", 1): Tuning(rows=4, programs=10 * 132),
    ("apply", 1): Tuning(rows=4, programs=10 * 132),
    ("apply", 2): Tuning(rows=2, programs=8 * 132),
    ("sums", 1): Tuning(rows=2, programs=7 * 132),
    ("sums", 2): Tuning(rows=2, programs=4 * 132),
    ("apply_backward", 1): Tuning(rows=2, programs=8 * 132),
    ("apply_backward", 2): Tuning(rows=2, programs=4 * 132),
}


@dataclass(frozen=True)
class Running:
    """The buffers of an nn.BatchNorm2d in training, which each evaluation moves.

    Of the first channels, if they are shorter: the others are zeros without a norm of their own.
    """

    mean: Tensor  # (channels,)
    var: Tensor  # (channels,), unbiased
    batches: Tensor | None  # (), how many so far
    momentum: float | None  # None: the mean of all batches

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.mean, self.var, self.batches) if t is not None]


@dataclass(frozen=True)
class BatchSource:
    """A map before its norm.  x: (batch, channels, height, width); weight, bias: (channels,)."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running: Running | None = None
    eps: float = 1e-5


def batch_norms_plain(
    sources: Sequence[BatchSource], relu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    total: Any = 0
    for source in sources:
        wide = at_least_float32(source.x)
        scale = None if source.weight is None else source.weight.to(wide.dtype)
        shift = None if source.bias is None else source.bias.to(wide.dtype)
        running, share = source.running, 0.0
        if running is not None:
            if running.batches is not None:
                running.batches.add_(1)
            if running.momentum is not None:
                share = running.momentum
            elif running.batches is not None:
                share = 1.0 / float(running.batches)
        mean, var = (None, None) if running is None else (running.mean, running.var)
        known = wide if mean is None else wide[:, : len(mean)]
        norm = functional.batch_norm(known, mean, var, scale, shift, True, share, source.eps)
        if norm.shape != wide.shape:
            norm = functional.pad(norm, (0, 0, 0, 0, 0, wide.shape[1] - norm.shape[1]))
        total = total + norm
    return deliver(torch.relu(total) if relu else total, None, dtype or sources[0].x.dtype)


def batch_norms(
    sources: Sequence[BatchSource], relu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of one or two batch norms in training, then ReLU where asked.

    dtype: of the result; the default is that of the first map.
    """
    dtype = dtype or sources[0].x.dtype
    tensors = [t for source in sources for t in (source.x, source.weight, source.bias)]
    buffers = [t for s in sources if s.running is not None for t in (s.running.mean, s.running.var)]
    sizes = {source.x.shape for source in sources}
    first = sources[0].x
    taken = (
        len(sources) <= MOST_SOURCES
        and len(sizes) == 1
        and first.numel() > first.shape[1]  # else PyTorch's error: one number has no variance
        and runs(*tensors, *buffers)
        and all(_is_vector(t, first.shape[1]) for t in (*tensors[1::3], *tensors[2::3]))
        and all(_is_vector(t, len(t)) and t.is_contiguous() for t in buffers)
        and all(len(t) <= first.shape[1] for t in buffers)
    )
    if not taken:
        return batch_norms_plain(sources, relu, dtype)
    if differentiates(*tensors):
        return _Differentiated.apply(sources, relu, dtype, *tensors)
    return _forward(sources, relu, dtype)[0]


def _is_vector(x: Tensor | None, channels: int) -> bool:
    return x is None or x.shape == (channels,)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sources: Sequence[BatchSource], relu: bool, dtype: torch.dtype, *tensors: Vector
    ) -> Tensor:
        out, stats = _forward(sources, relu, dtype)
        ctx.save_for_backward(stats, *tensors)
        ctx.relu, ctx.dtype, ctx.eps = relu, dtype, [source.eps for source in sources]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        stats, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():

            def plain(*tensors: Any) -> Tensor:
                each = zip(tensors[::3], tensors[1::3], tensors[2::3], ctx.eps, strict=True)
                sources = [BatchSource(x, w, b, None, eps) for x, w, b, eps in each]
                return batch_norms_plain(sources, ctx.relu, ctx.dtype)

            return None, None, None, *differentiable(plain, tensors, wanted, dout)
        return None, None, None, *_backward(stats, tensors, dout, ctx.relu, wanted)


# ---- launches


@dataclass(frozen=True)
class _Plan:
    """How the maps of this shape are divided.

    length: L.  tiles: of `height` rows of L numbers; each program takes `each` of them, or fewer.
    """

    total: int
    channels: int
    length: int
    height: int
    tiles: int
    each: int

    @property
    def splits(self) -> int:
        return -(-self.tiles // self.each)

    @property
    def partials(self) -> int:
        """Sums of one channel that wait to be joined."""
        return self.splits * (self.length // self.channels)

    def launch(self, kernel: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        with on_device(like):
            kernel[(self.splits * (self.length // COLUMNS),)](
                *arguments,
                self.total,
                self.channels,
                self.tiles,
                self.each,
                L=self.length,
                EVEN=self.total == self.tiles * self.height * self.length,
                COLUMNS=COLUMNS,
                LANES=LANES,
                ROWS=self.height // LANES,
                **options,
                num_warps=WARPS,
            )

    def join(self, kernel: Any, like: Tensor, *arguments: Any, **options: Any) -> None:
        few = self.partials <= 256
        with on_device(like):
            kernel[(self.channels,)](
                *arguments,
                self.total,
                self.channels,
                self.length // self.channels,
                self.each * self.height,
                self.partials,
                MOST=COLUMNS,
                BLOCK=256 if few else 2048,
                **options,
                num_warps=2 if few else 8,
            )


def _plan(like: Tensor, kernel: str, sources: int) -> _Plan:
    tuning = TUNING[kernel, sources]
    channels = like.shape[1]
    length = math.lcm(channels, COLUMNS)
    height = LANES * tuning.rows
    tiles = -(-like.numel() // (length * height))
    each = -(-tiles // max(1, tuning.programs // (length // COLUMNS)))
    return _Plan(like.numel(), channels, length, height, tiles, each)


def _flat(x: Tensor) -> Tensor:  # (batch, height, width, channels)
    return x.permute(0, 2, 3, 1).contiguous()


def _pairs(found: Sequence[Any]) -> tuple[Any, Any]:
    """As kernels take them; the only one stands for the second too."""
    return found[0], found[-1]


def _forward(
    sources: Sequence[BatchSource], relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result, and mean, ρ w, shift and ρ of each column of each map, (maps, 4, L)."""
    like = sources[0].x
    maps = [_flat(source.x) for source in sources]
    plan = _plan(like, "moments", 1)
    stats = like.new_empty((len(sources), 4, plan.length), dtype=torch.float32)
    for i, source in enumerate(sources):
        running = source.running
        partials = stats.new_empty((2, plan.channels, plan.partials))
        batches = None if running is None else running.batches
        counted = batches is not None
        plan.launch(kernels.moments_kernel, like, maps[i], partials, batches, COUNTED=counted)
        momentum = 0.0 if running is None else running.momentum
        plan.join(
            kernels.join_moments_kernel,
            like,
            partials,
            source.weight if source.weight is None else source.weight.contiguous(),
            source.bias if source.bias is None else source.bias.contiguous(),
            *((None, None, None) if running is None else (running.mean, running.var, batches)),
            0 if running is None else len(running.mean),
            0.0 if momentum is None else float(momentum),
            float(source.eps),
            stats[i],
            SCALED=source.weight is not None,
            SHIFTED=source.bias is not None,
            RUNNING=running is not None,
            CUMULATIVE=momentum is None and counted,
        )
        if running is not None:
            increment_version(running.tensors())
    out = empty_channels_last(like.shape, dtype, like.device)
    plan = _plan(like, "apply", len(sources))
    plan.launch(
        kernels.apply_kernel, like, *_pairs(maps), stats, out, TWO=len(sources) > 1, RELU=relu
    )
    return out, stats


def _backward(
    stats: Tensor, tensors: Sequence[Any], dout: Tensor, relu: bool, wanted: Sequence[bool]
) -> list[Vector]:
    like = tensors[0]
    maps = [_flat(x) for x in tensors[::3]]
    dout = _flat(dout)
    count = len(maps)
    plan = _plan(like, "sums", count)
    partials = stats.new_empty((1 + count, plan.channels, plan.partials))
    vectors = stats.new_empty((count, 2, plan.channels))
    slopes = stats.new_empty((count, 2, plan.length))
    shape = {"TWO": count > 1, "RELU": relu}
    plan.launch(kernels.sums_kernel, like, dout, *_pairs(maps), stats, partials, **shape)
    plan.join(kernels.join_sums_kernel, like, partials, stats, vectors, slopes, TWO=count > 1)
    found: list[Vector] = [None] * len(tensors)
    for i in range(count):
        for k in (1, 2):
            if wanted[3 * i + k]:
                found[3 * i + k] = vectors[i, k - 1].to(tensors[3 * i + k].dtype)
    if any(wanted[::3]):
        made = [empty_channels_last(x.shape, x.dtype, x.device) for x in tensors[::3]]
        plan = _plan(like, "apply_backward", count)
        plan.launch(
            kernels.apply_backward_kernel,
            like,
            dout,
            *_pairs(maps),
            stats,
            slopes,
            *_pairs(made),
            **shape,
        )
        found[::3] = made
    return found
