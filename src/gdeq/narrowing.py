"""Samples that are done leave the batch: f is evaluated for the others alone.

A solve with a tolerance goes on until its slowest sample is done, and f takes its time for the
whole batch.  Here, as soon as half of the samples that f is evaluated for are done, f is evaluated
for the other half: as many as are still sought, and done ones up to exactly the half, so that there
are few sizes (a CUDA graph is recorded for each).

What f reads and returns becomes smaller; what the solver knows stays where it is.  A sweep of
The product form keeps all samples in their places and is told which ones (``rows``) f is evaluated
for, so nothing has to be put back at the end.

f must be known for some samples alone.  Of a function that closes over its inputs it is not, of a
cell and its inputs it is (`CellOnInputs`): `gdeq.DEQ` has both.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sized
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gdeq.fast.recording import may_wait
from gdeq.solvers.base import Solver
from gdeq.state import State, StateError, VectorMap

LEAST = 16  # samples; of fewer, f hardly takes less time
# How far f of some samples may be from f of all, for each sample, in roundings: another size may be
# computed by another algorithm.  Of bfloat16 that is 5 per cent, of float16 and TF32 2.
ROUNDINGS = {torch.bfloat16: 6.4, torch.float16: 20.0}
TF32 = 2.0**-10
REMEMBERED = 1000  # comparisons at most
# Inputs that say nothing of single samples.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module)


class NarrowError(StateError):
    """The cell is another function for some of the samples alone."""


class Sweep(Protocol):
    """What is needed of `gdeq.fast.product.PlainSweep` and its fused twin."""

    @property
    def parts(self) -> Tensor: ...  # z of the samples that f is evaluated for

    def narrow(self, size: int) -> Tensor: ...


class CellOnInputs:
    """z ↦ cell(z, *inputs, **options), for all samples or for some.

    checked: the cells, sizes and inputs for which it was seen to give the same for some samples
        alone; shared by all calls of a layer until it trains.
    whole: the one for all samples, if this is one for some, and which those are.
    """

    def __init__(
        self,
        cell: Callable[..., State],
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        checked: set[Any],
        whole: tuple[CellOnInputs, Tensor] | None = None,
    ) -> None:
        self.cell, self.inputs, self.options, self.checked = cell, inputs, options, checked
        self.whole = whole
        self.note = ""

    def __call__(self, z: State) -> State:
        try:
            return self.cell(z, *self.inputs, **self.options)
        except Exception as problem:
            if self.note:
                problem.add_note(self.note)
            raise

    def of(self, chosen: Tensor, batch: int) -> CellOnInputs:  # (samples,)
        """The same for some of the samples that it is for.

        batch: of the whole.  By it alone a tensor is told to have a row for each sample: one of 64
        rows for all samples would look so when 64 are left.
        """
        if self.whole is not None:
            whole, rows = self.whole
            return whole.of(rows[chosen], batch)
        inputs, options = gathered((self.inputs, self.options), chosen, batch)
        other = CellOnInputs(self.cell, inputs, options, self.checked, (self, chosen))
        other.note = (
            f"gdeq: narrow=True: the cell was given {len(chosen)} of {batch} samples, with the "
            f"same of every input tensor whose first dimension is {batch}; a cell that cannot take "
            "some samples alone needs narrow=False"
        )
        return other


def allowed(cell: object) -> bool:
    """Whether no part of the cell trains: dropout holds a mask for each sample of the batch.

    Batch norm that has no averages of its own mixes samples in eval mode too, and is refused.
    """
    if isinstance(cell, nn.Module):
        for name, module in cell.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                raise NarrowError(
                    f"{type(module).__name__} ({name or 'the cell itself'}) has no running "
                    "averages, so it mixes the samples of a batch in eval mode too, and none may "
                    "leave: use track_running_stats=True or nn.GroupNorm, or narrow=False"
                )
    return not any(m.training for owner in _owners(cell) for m in owner.modules())


def _owners(cell: object) -> Iterator[nn.Module]:
    """The modules in a cell, as far as they can be seen.

    `DEQ.eval` does not reach those in a function, which may be in training mode still.
    """
    if isinstance(cell, nn.Module):
        yield cell
    elif isinstance(cell, functools.partial):
        for part in (cell.func, *cell.args, *cell.keywords.values()):
            yield from _owners(part)
    elif isinstance(cell, FunctionType):
        for kept in cell.__closure__ or ():
            try:
                value = kept.cell_contents
            except ValueError:  # not yet known
                continue
            if isinstance(value, nn.Module):
                yield value
    elif isinstance(owner := getattr(cell, "__self__", None), nn.Module):  # of a bound method
        yield owner


def check_inputs(value: Any, batch: int, where: str) -> None:
    """Raise where an input seems to hold something for each sample that cannot be cut."""
    if isinstance(value, Tensor):
        if _of_samples(value, batch) and (value.is_nested or value.layout != torch.strided):
            kind = "a nested tensor" if value.is_nested else f"in the layout {value.layout}"
            raise NarrowError(
                f"{where} is {kind}, of which samples cannot be taken: give the cell dense "
                "tensors, or use narrow=False"
            )
        return
    if isinstance(value, dict):
        for key, part in value.items():
            check_inputs(part, batch, f"{where}[{key!r}]")
        return
    parts = value if isinstance(value, (tuple, list)) else None
    cut = parts is not None and all(_of_samples(part, batch) for part in parts)
    if not cut and _length(value) == batch:
        raise NarrowError(
            f"{where} is a {type(value).__name__} of {batch}, as many as there are samples: the "
            "cell would be given all of it beside some samples alone.  Give it as a tensor (or "
            "as one for all samples), or use narrow=False"
        )
    for i, part in enumerate(parts or ()):
        check_inputs(part, batch, f"{where}[{i}]")


def _length(value: Any) -> int | None:
    if not isinstance(value, Sized) or isinstance(value, (str, bytes, nn.Module)):
        return None
    try:
        return len(value)
    except TypeError:  # as an array of no dimension says
        return None


def _of_samples(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == batch


def gathered(value: Any, chosen: Tensor, batch: int) -> Any:
    """Some samples of each tensor in it that has one row for each; all else as it is."""
    if isinstance(value, Tensor):
        return _rows_of(value, chosen) if _of_samples(value, batch) else value
    if isinstance(value, dict):
        return {key: gathered(part, chosen, batch) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [gathered(part, chosen, batch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _rows_of(x: Tensor, chosen: Tensor) -> Tensor:
    """x[chosen] with the dimensions in the order of memory that they have in x."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    back = [order.index(i) for i in range(x.dim())]
    return x.permute(order).index_select(back[0], chosen).permute(back)


def gathered_parts(parts: Tensor, sizes: list[int], chosen: Tensor) -> Tensor:
    """Some samples of a vector in parts (`gdeq.state.VectorMap`), in parts again."""
    return torch.cat([piece[chosen].view(-1) for piece in _pieces(parts, sizes)])


def _pieces(parts: Tensor, sizes: list[int]) -> list[Tensor]:  # -> (batch, size) each
    batch = parts.numel() // sum(sizes)
    pieces = parts.split([batch * size for size in sizes])
    return [piece.view(batch, size) for piece, size in zip(pieces, sizes, strict=True)]


def first_active(active: Tensor, size: int) -> Tensor:  # (batch,) -> (size,)
    """Where the active samples are, and then the others."""
    return torch.argsort(active.int(), descending=True, stable=True)[:size]


def sizes_below(batch: int) -> list[int]:
    sizes = []
    while (batch := batch // 2) >= LEAST:
        sizes.append(batch)
    return sizes


class Samples:
    """f for those samples of a sweep that it is evaluated for, at first all.

    solver: without a tolerance no sample leaves.
    """

    def __init__(self, f: VectorMap, sweep: Sweep, solver: Solver) -> None:
        self.f, self.sweep = f, sweep
        self.batch = f.space.batch
        can = solver.tol > 0 and isinstance(f.f, CellOnInputs)
        # What couples samples by less than that is in no residual that the solve tells.
        self.tolerated = 0.0 if solver.stop == "absolute" else 0.1 * solver.tol
        self.sizes = sizes_below(f.space.batch) if can else []  # to come
        self.narrowed = False
        if self.sizes:  # told at once, whether or not samples will leave
            assert isinstance(f.f, CellOnInputs)
            for i, value in enumerate(f.f.inputs):
                check_inputs(value, f.space.batch, f"input {i} of the cell")
            for key, value in f.f.options.items():
                check_inputs(value, f.space.batch, f"{key} of the cell")

    def evaluate(self) -> Tensor:
        return self.f.on_parts(self.sweep.parts)

    def narrow(self) -> Tensor:
        """From here on f is evaluated for the next smaller number; which of the samples so far."""
        chosen = self.sweep.narrow(self.sizes.pop(0))
        self.f, self.narrowed = _of(self.f, chosen, self.batch), True
        return chosen

    def fit(self, left: int) -> None:
        """Let samples leave if so few are still sought; the host may wait for the device."""
        while self.sizes and left <= self.sizes[0]:
            if not self._narrow_if_known():
                self._narrow_and_compare()

    def rehearse(self) -> None:
        """Evaluate f once in each size that a recording of it will have.

        Nothing is compared in a recording, so what is not known yet is compared here.
        """
        while self.sizes:
            if self._narrow_if_known():
                self.evaluate()
            else:
                self._narrow_and_compare()

    def _key(self) -> Any:
        """What was compared once is known for; None if an input may hold anything."""
        assert isinstance(self.f.f, CellOnInputs)
        given = self.f.f.whole[0] if self.f.f.whole else self.f.f
        try:
            key = self.sizes[0], self.batch, self._limit(), given.cell, _kinds(given)
            hash(key)
        except (_OpaqueError, TypeError):
            return None
        return key

    def _limit(self) -> float:
        space = self.f.space
        kinds = {*space.dtypes, self.f.autocast_dtype or space.dtype}
        return max(self.tolerated, *(_rounding(kind, space.device) for kind in kinds))

    def _narrow_if_known(self) -> bool:
        assert isinstance(self.f.f, CellOnInputs)
        known = self._key() in self.f.f.checked
        if known:
            self.narrow()
        return known

    def _narrow_and_compare(self) -> None:
        assert isinstance(self.f.f, CellOnInputs)
        key, checked = self._key(), self.f.f.checked
        before, of_all = self.f.space, self.evaluate()
        expected = gathered_parts(of_all, before.sizes, self.narrow())
        apart = _distance(self.evaluate(), expected, before.sizes)
        limit = self._limit()
        with may_wait(before.device):
            if not bool(apart <= limit):
                raise NarrowError(
                    f"the cell gives other values for {self.f.space.batch} of {before.batch} "
                    f"samples alone than for all of them together (by {float(apart):.2g} of their "
                    f"size, where {limit:.2g} would be taken for rounding).  With narrow=True "
                    "samples must not influence each other, and of every input tensor whose first "
                    f"dimension is {self.batch} the cell is given some rows alone: nothing else "
                    "may depend on which samples are in the batch.  If that is not so, use "
                    "narrow=False"
                )
        if key is not None:
            if len(checked) >= REMEMBERED:  # a number that is another one at each call
                checked.clear()
            checked.add(key)


def _rounding(kind: torch.dtype, device: torch.device) -> float:
    """How far apart two computations of f in this precision may be."""
    eps = torch.finfo(kind).eps
    if kind == torch.float32 and device.type == "cuda" and _tf32_allowed():
        return 20 * TF32
    return ROUNDINGS.get(kind, 50.0) * eps


def _tf32_allowed() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set by the newer names, for some operations alone
        return True


def _distance(found: Tensor, expected: Tensor, sizes: list[int]) -> Tensor:  # (batch·d,) each -> ()
    """The largest relative distance of a sample; NaN where one is NaN that should not be.

    Beside the samples that are larger than half of them, if those are larger.  A sample whose
    numbers reach the end of their range is left out: rounding may take it beyond.
    """
    lost = 0.01 * torch.finfo(expected.dtype).max
    a, b = (torch.cat(_pieces(x, sizes), dim=1).double() for x in (found, expected))
    left_out = ~(b.abs().amax(1) <= lost)
    b = torch.where(left_out.unsqueeze(1), 0.0, b)
    size, apart = b.norm(dim=1), (a - b).norm(dim=1)
    size = torch.maximum(size, size.median())
    relative = torch.where(left_out | (apart == 0), 0.0, apart / size)
    return relative.max()  # NaN if there is one


def _of(f: VectorMap, chosen: Tensor, batch: int) -> VectorMap:
    """f for some of its samples; under the autocast state that was kept when it was made."""
    assert isinstance(f.f, CellOnInputs)
    size, space = len(chosen), copy.copy(f.space)
    space.batch, space.shapes = size, [torch.Size((size, *shape[1:])) for shape in space.shapes]
    other = copy.copy(f)
    other.space, other.f = space, f.f.of(chosen, batch)
    return other


class _OpaqueError(Exception):
    pass


def _kinds(given: CellOnInputs) -> Any:
    return _kind((given.inputs, given.options))


def _kind(value: Any) -> Any:
    """Of tensors the shape; what chooses between functions (flags, names, numbers) as it is."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple((key, _kind(part)) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_kind(part) for part in value)
    if isinstance(value, PLAIN):
        return type(value), value
    raise _OpaqueError
