"""All weights of a network's convolutions made ready in one launch: normalised, cast, merged.

Each row, the weights of one output channel, becomes

    w = s v,    s = g / ‖v‖ with weight normalisation, 1 without,

in the compute dtype and in channels-last order.  Rows go into one buffer, of which the merged
weights are channels-last views:

    shared input    rows of all convolutions one below another
    own inputs      the same, but each row is as wide as all inputs together, 0 outside its own
    room            rows of zeros below, or zeros at the end of each row, up to a number

Backward, with the gradient e of a row of w:

    dg = v·e / ‖v‖,    dv = s (e − v (v·e) / ‖v‖²).

The kernels find the parameters by their addresses, which a table on the device holds (`Plan`).  It
is made at the first call and again when a parameter has moved, never while a CUDA graph is
recorded.  Arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdeq.fast.kernels.autograd import differentiable, differentiates
from gdeq.fast.kernels.device import available, on_device
from gdeq.fast.kernels.jit import jit, tl, triton

ALIGNMENT = 64  # numbers: cuDNN's fast kernels want each weight to start at a multiple of 16 bytes
INDEX_LIMIT = 2**31  # offsets within one row are 32-bit integers


ROWS = 1  # of a program
NUMBERS = 1024  # of each, that it looks at together
WARPS = 4


@dataclass(frozen=True)
class Convolution:
    """One convolution's parameters: g and v of a normalised weight, or the weight itself."""

    weight: Tensor  # (outputs, inputs, height, width)
    gain: Tensor | None = None  # (outputs, 1, 1, 1)


@dataclass(frozen=True)
class Merged:
    """Convolutions that run as one.

    own_inputs: each has channels of its own as input, one after another; else all share theirs.
    outputs, inputs: of the merged weight at least; what nobody has is zero.
    """

    parts: tuple[Convolution, ...]
    own_inputs: bool = False
    outputs: int = 0
    inputs: int = 0

    @property
    def form(self) -> tuple[bool, int, int]:
        """All but the parts."""
        return self.own_inputs, self.outputs, self.inputs

    def size(self) -> tuple[int, int]:
        """Outputs and inputs."""
        counts = [part.weight.shape[1] for part in self.parts]
        outputs = sum(len(part.weight) for part in self.parts)
        inputs = sum(counts) if self.own_inputs else counts[0]
        return max(self.outputs, outputs), max(self.inputs, inputs)


def merge_plain(merged: Sequence[Merged], dtype: torch.dtype) -> list[Tensor]:
    """One weight for each entry, (all outputs, inputs, height, width), channels-last."""
    return [_merge_one(entry, dtype) for entry in merged]


def _merge_one(entry: Merged, dtype: torch.dtype) -> Tensor:
    weights = [_normalised(part) for part in entry.parts]
    if entry.own_inputs:
        widths = [weight.shape[1] for weight in weights]
        weights = [
            pad(weight, (0, 0, 0, 0, sum(widths[:i]), sum(widths[i + 1 :])))
            for i, weight in enumerate(weights)
        ]
    joined = weights[0] if len(weights) == 1 else torch.cat(weights)
    outputs, inputs = entry.size()
    if joined.shape[:2] != (outputs, inputs):
        joined = pad(joined, (0, 0, 0, 0, 0, inputs - joined.shape[1], 0, outputs - len(joined)))
    return joined.to(dtype, memory_format=torch.channels_last)


def _normalised(part: Convolution) -> Tensor:
    if part.gain is None:
        return part.weight
    return part.weight * (part.gain / torch.norm_except_dim(part.weight, 2, 0))


# ---- kernels


@jit
def _field(table, index: tl.constexpr, row, count):
    return tl.load(table + index * count + row, mask=row < count, other=0)


@jit
def _layout(table, row, count):
    """Of each row: strides of channels and pixels, inputs, inputs of the merged weight, which of
    them is its first, and the kernel's pixels."""
    found = ()
    for field in tl.static_range(4, 10):
        found += (_field(table, field, row, count).to(tl.int32),)  # type: ignore[assignment]
    return found


@jit
def _merge_kernel(table, count, out, norms, ROWS: tl.constexpr, NUMBERS: tl.constexpr):
    """Reads rows of v as they lie, writes rows of w as they lie: no lane is idle, whatever the
    size of the convolution."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = _field(table, 0, row, count).to(tl.pointer_type(tl.float32))[:, None]
    gains = _field(table, 1, row, count)
    target = (out + _field(table, 2, row, count))[:, None]
    channel_step, pixel_step, inputs, width, first, pixels = _layout(table, row, count)
    normalised = gains != 0
    squares = tl.zeros((ROWS,), tl.float32)
    if tl.max(normalised.to(tl.int32)) > 0:
        size = inputs * pixels
        for start in range(0, tl.max(size), NUMBERS):
            number = start + tl.arange(0, NUMBERS)[None, :]
            v = tl.load(source + number, mask=number < size[:, None], other=0.0)
            squares += tl.sum(v * v, axis=1)
    norm = tl.where(normalised, tl.sqrt(squares), 1.0)
    g = tl.load(gains.to(tl.pointer_type(tl.float32)), mask=normalised, other=1.0)
    scale = g / norm  # 1 where there is neither
    tl.store(norms + row, norm, mask=row < count)
    size = width * pixels
    for start in range(0, tl.max(size), NUMBERS):
        number = start + tl.arange(0, NUMBERS)[None, :]
        pixel = number // tl.maximum(width, 1)[:, None]
        channel = number - pixel * width[:, None] - first[:, None]
        inside = number < size[:, None]
        own = (channel >= 0) & (channel < inputs[:, None])
        where = source + pixel * pixel_step[:, None] + channel * channel_step[:, None]
        v = tl.load(where, mask=inside & own, other=0.0)
        value = tl.where(own, v * scale[:, None], 0.0)  # a scale may be infinite
        tl.store(target + number, value.to(out.dtype.element_ty), mask=inside)


@jit
def _place_in_merged(number, channel_step, inputs, width, first, pixels):
    """Where the numbers of a row of v, in the order they lie in, are in the row of w."""
    last = channel_step == 1  # channels-last, or a single pixel
    inner = tl.maximum(tl.where(last, inputs, pixels), 1)[:, None]
    outer = number // inner
    within = number - outer * inner
    pixel = tl.where(last[:, None], outer, within)
    channel = tl.where(last[:, None], within, outer)
    return pixel * width[:, None] + channel + first[:, None]


@jit
def _merge_backward_kernel(
    table, count, incoming, norms, dweights, dgains, ROWS: tl.constexpr, NUMBERS: tl.constexpr
):
    """Everything in the order of v."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = _field(table, 0, row, count).to(tl.pointer_type(tl.float32))[:, None]
    gains = _field(table, 1, row, count)
    e_row = (incoming + _field(table, 2, row, count))[:, None]
    target = (dweights + _field(table, 3, row, count))[:, None]
    channel_step, _pixel_step, inputs, width, first, pixels = _layout(table, row, count)
    size = inputs * pixels
    normalised = gains != 0
    along = tl.zeros((ROWS,), tl.float32)
    if tl.max(normalised.to(tl.int32)) > 0:
        for start in range(0, tl.max(size), NUMBERS):
            number = start + tl.arange(0, NUMBERS)[None, :]
            mask = (number < size[:, None]) & normalised[:, None]
            v = tl.load(source + number, mask=mask, other=0.0)
            place = _place_in_merged(number, channel_step, inputs, width, first, pixels)
            along += tl.sum(v * tl.load(e_row + place, mask=mask, other=0.0).to(tl.float32), axis=1)
    norm = tl.load(norms + row, mask=normalised, other=1.0)
    g = tl.load(gains.to(tl.pointer_type(tl.float32)), mask=normalised, other=1.0)
    tl.store(dgains + row, along / norm, mask=normalised)
    scale = g / norm  # 1 where there is neither
    back = along / (norm * norm)
    for start in range(0, tl.max(size), NUMBERS):
        number = start + tl.arange(0, NUMBERS)[None, :]
        mask = number < size[:, None]
        v = tl.load(source + number, mask=mask & normalised[:, None], other=0.0)
        place = _place_in_merged(number, channel_step, inputs, width, first, pixels)
        e = tl.load(e_row + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + number, scale[:, None] * (e - v * back[:, None]), mask=mask)


# ---- where everything lies


def _steps(weight: Tensor) -> tuple[int, int]:
    """Strides of channels and of pixels, in contiguous or channels-last memory."""
    _, inputs, height, width = weight.shape
    _, channel, row, column = weight.stride()
    pixel = column if width > 1 else row if height > 1 else 0
    return (channel if inputs > 1 else 0), pixel


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.data_ptr(), tensor.stride()) for tensor in tensors)


class Plan:
    """Where the rows of all parameters lie, and where those of the merged weights go."""

    def __init__(self, merged: Sequence[Merged], device: torch.device) -> None:
        self.views: list[tuple[int, tuple[int, int, int, int]]] = []  # start, shape in memory
        self.starts: list[int] = []  # of each part's gradient
        self.first_rows: list[int] = []  # of each part
        self.captured = False  # a CUDA graph reads the table, so it must stay
        blocks: list[Tensor] = []
        out_size = grad_size = rows = 0
        for entry in merged:
            height, width = entry.parts[0].weight.shape[2:]
            pixels = int(height * width)
            counts = [part.weight.shape[1] for part in entry.parts]
            outputs, inputs = entry.size()
            self.views.append((out_size, (outputs, height, width, inputs)))
            above = 0
            for i, part in enumerate(entry.parts):
                weight, gain = part.weight, part.gain
                index = torch.arange(len(weight))
                block = torch.zeros(10, len(weight), dtype=torch.int64)
                block[0] = weight.data_ptr() + 4 * index * weight.stride(0)
                if gain is not None:
                    block[1] = gain.data_ptr() + 4 * index * gain.stride(0)
                block[2] = out_size + (above + index) * pixels * inputs
                block[3] = grad_size + index * weight.stride(0)
                block[4], block[5] = _steps(weight)
                block[6], block[7] = weight.shape[1], inputs
                block[8] = sum(counts[:i]) if entry.own_inputs else 0
                block[9] = pixels
                blocks.append(block)
                self.starts.append(grad_size)
                self.first_rows.append(rows)
                grad_size += _aligned(weight.numel())
                rows += len(weight)
                above += len(weight)
            if above < outputs:  # rows without inputs are zero
                index = torch.arange(above, outputs)
                block = torch.zeros(10, len(index), dtype=torch.int64)
                block[0] = entry.parts[0].weight.data_ptr()  # of which nothing is read
                block[2] = out_size + index * pixels * inputs
                block[7], block[9] = inputs, pixels
                blocks.append(block)
                rows += len(index)
            out_size += _aligned(outputs * pixels * inputs)
        self.rows, self.out_size, self.grad_size = rows, out_size, grad_size
        table = torch.cat(blocks, dim=1)
        if device.type == "cuda":  # pinned: a copy that waits could not be near a recording
            table = table.pin_memory().to(device, non_blocking=True)
        self.table = table

    def outputs(self, buffer: Tensor) -> list[Tensor]:
        found = []
        for start, shape in self.views:
            size = torch.Size(shape).numel()
            found.append(buffer[start : start + size].view(shape).permute(0, 3, 1, 2))
        return found


class Plans:
    """The tables of one network.  Those that a CUDA graph reads are kept as long as this is."""

    def __init__(self) -> None:
        self._known: dict[Any, Plan] = {}

    def find(self, merged: Sequence[Merged], tensors: Sequence[Tensor]) -> Plan:
        device = tensors[0].device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        form = tuple((len(entry.parts), *entry.form) for entry in merged)
        key = (device, form, _address(tensors))
        plan = self._known.get(key)
        if plan is None:
            if capturing:
                raise RuntimeError(
                    "a parameter has moved in memory since the last step (or there was none), and "
                    "its address cannot be taken while a CUDA graph is recorded: run the step once "
                    "before, and do not move or replace parameters in it"
                )
            self._known = {k: p for k, p in self._known.items() if p.captured}
            plan = self._known[key] = Plan(merged, device)
        plan.captured |= capturing
        return plan


_plans: WeakKeyDictionary[Any, Plans] = WeakKeyDictionary()


def plans_of(owner: Any) -> Plans:
    """The tables of this module's parameters; beside it, so that no copy or file has them."""
    return _plans.setdefault(owner, Plans())


# ---- as a function


def _inputs(merged: Sequence[Merged]) -> list[Tensor]:
    return [
        tensor
        for entry in merged
        for part in entry.parts
        for tensor in (part.weight, part.gain)
        if tensor is not None
    ]


def _runs(tensors: Sequence[Tensor]) -> bool:
    """Leaves alone: what is computed anew at each call lies elsewhere each time."""
    device = tensors[0].device
    return available(device) and all(
        tensor.dtype == torch.float32
        and tensor.device == device
        and tensor.is_leaf
        and 0 < tensor.numel() < INDEX_LIMIT
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
        for tensor in tensors
    )


def merge(merged: Sequence[Merged], dtype: torch.dtype, plans: Plans | None = None) -> list[Tensor]:
    """`merge_plain` in one launch, and backward in one and a copy.

    The results are views of one buffer.  plans: keeps the addresses of the parameters; without it
    they are collected at each call.
    """
    tensors = _inputs(merged)
    if not tensors or not _runs(tensors):
        return merge_plain(merged, dtype)
    plan = (plans or Plans()).find(merged, tensors)
    if differentiates(*tensors):
        return list(_Merge.apply(plan, merged, dtype, *tensors))
    return plan.outputs(_merged(plan, dtype)[0])


def _merged(plan: Plan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = plan.table.device
    buffer = torch.empty(plan.out_size, dtype=dtype, device=device)
    norms = torch.empty(plan.rows, dtype=torch.float32, device=device)
    _launch(_merge_kernel, plan, buffer, norms)
    return buffer, norms


def _launch(kernel: Any, plan: Plan, *arguments: Tensor) -> None:
    with on_device(plan.table):
        kernel[(triton.cdiv(plan.rows, ROWS),)](
            plan.table, plan.rows, *arguments, ROWS=ROWS, NUMBERS=NUMBERS, num_warps=WARPS
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, merged: Sequence[Merged], dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        buffer, norms = _merged(plan, dtype)
        ctx.save_for_backward(norms, *tensors)
        # Without the tensors: they would be kept beyond the graph's own release.
        ctx.plan, ctx.dtype = plan, dtype
        ctx.form = [([part.gain is not None for part in e.parts], e.form) for e in merged]
        return tuple(plan.outputs(buffer))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        norms, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():

            def plain(*tensors: Tensor) -> list[Tensor]:
                rest = iter(tensors)
                merged = []
                for gains, form in ctx.form:
                    parts = (Convolution(next(rest), next(rest) if g else None) for g in gains)
                    merged.append(Merged(tuple(parts), *form))
                return merge_plain(merged, ctx.dtype)

            return None, None, None, *differentiable(plain, tensors, wanted, incoming)
        plan: Plan = ctx.plan
        device = plan.table.device
        gathered = torch.empty(plan.out_size, dtype=ctx.dtype, device=device)
        starts = [start for start, _ in plan.views]
        places = [gathered[a : a + e.numel()] for a, e in zip(starts, incoming, strict=True)]
        torch._foreach_copy_(places, [e.permute(0, 2, 3, 1).reshape(-1) for e in incoming])
        dweights = torch.empty(plan.grad_size, dtype=torch.float32, device=device)
        dgains = torch.empty(plan.rows, dtype=torch.float32, device=device)
        arguments = gathered, norms, dweights, dgains
        _launch(_merge_backward_kernel, plan, *arguments)
        found: list[Tensor | None] = []
        rest = iter(zip(tensors, wanted, strict=True))
        gains = [gain for parts, _ in ctx.form for gain in parts]
        for start, row, gain in zip(plan.starts, plan.first_rows, gains, strict=True):
            weight, asked = next(rest)
            shape, strides = weight.shape, weight.stride()
            found.append(dweights.as_strided(shape, strides, start) if asked else None)
            if gain:
                parameter, asked = next(rest)
                dgain = dgains[row : row + len(weight)]
                found.append(dgain.view(parameter.shape) if asked else None)
        return None, None, None, *found
