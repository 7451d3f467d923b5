"""Samples that are done leave the batch: f is evaluated for the others alone.

A solve with a tolerance goes on until its slowest sample is done, and f takes its time for the
whole batch.  Here, as soon as half of the samples that f is evaluated for are done, f is evaluated
for the other half: as many as are still sought, and done ones up to exactly the half, so that there
are few sizes (a CUDA graph is recorded for each).

What f reads and returns becomes smaller; what the solver knows stays where it is.  A sweep of
`gdeq.product` keeps all samples in their places and is told which ones (``rows``) f is evaluated
for, so nothing has to be put back at the end.

f must be known for some samples alone.  Of a function that closes over its inputs it is not, of a
cell and its inputs it is (`CellOnInputs`): `gdeq.DEQ` has both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gdeq.state import State, StateError, VectorMap

LEAST = 16  # samples; of fewer, f hardly takes less time
ROUNDING = 0.05  # how far f of some samples may be from f of all: half precision is well within


class NarrowError(StateError):
    """The cell is another function for some of the samples alone."""


class Sweep(Protocol):
    """What is needed of `gdeq.product.PlainSweep` and its fused twin."""

    @property
    def parts(self) -> Tensor: ...  # z of the samples that f is evaluated for

    def narrow(self, size: int) -> Tensor: ...


class CellOnInputs:
    """z ↦ cell(z, *inputs, **options), for all samples or for some.

    checked: the sizes and inputs for which the cell was seen to give the same for some samples
        alone; shared by all calls of a layer.
    """

    def __init__(
        self,
        cell: Callable[..., State],
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        checked: set[Any],
    ) -> None:
        self.cell, self.inputs, self.options, self.checked = cell, inputs, options, checked
        self.note = ""

    def __call__(self, z: State) -> State:
        try:
            return self.cell(z, *self.inputs, **self.options)
        except Exception as problem:
            if self.note:
                problem.add_note(self.note)
            raise

    def of(self, chosen: Tensor, batch: int) -> CellOnInputs:  # (samples,)
        """The same for some of the samples of this batch."""
        inputs, options = gathered((self.inputs, self.options), chosen, batch)
        other = CellOnInputs(self.cell, inputs, options, self.checked)
        other.note = (
            f"gdeq: narrow=True: the cell was given {len(chosen)} of {batch} samples, with the "
            f"same of every input tensor whose first dimension is {batch}; a cell that cannot take "
            "some samples alone needs narrow=False"
        )
        return other


def allowed(cell: object) -> bool:
    """Whether no part of the cell trains: dropout holds a mask for each sample of the batch."""
    owner = getattr(cell, "__self__", cell)  # of a bound method, its module
    return not isinstance(owner, nn.Module) or not any(m.training for m in owner.modules())


def gathered(value: Any, chosen: Tensor, batch: int) -> Any:
    """Some samples of each tensor in it that has one row for each; all else as it is."""
    if isinstance(value, Tensor):
        of_samples = value.dim() > 0 and len(value) == batch
        return _rows_of(value, chosen) if of_samples else value
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
    batch = parts.numel() // sum(sizes)
    pieces = parts.split([batch * size for size in sizes])
    return torch.cat([piece.view(batch, -1)[chosen].view(-1) for piece in pieces])


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

    watched: the solve may end early; else no sample leaves.
    """

    def __init__(self, f: VectorMap, sweep: Sweep, watched: bool) -> None:
        self.f, self.sweep = f, sweep
        can = watched and isinstance(f.f, CellOnInputs)
        self.sizes = sizes_below(f.space.batch) if can else []  # to come
        self.narrowed = False

    def evaluate(self) -> Tensor:
        return self.f.on_parts(self.sweep.parts)

    def narrow(self) -> Tensor:
        """From here on f is evaluated for the next smaller number; which of the samples so far."""
        chosen = self.sweep.narrow(self.sizes.pop(0))
        self.f, self.narrowed = _of(self.f, chosen), True
        return chosen

    def fit(self, left: int) -> None:
        """Let samples leave if so few are still sought; the host may wait for the device."""
        while self.sizes and left <= self.sizes[0]:
            assert isinstance(self.f.f, CellOnInputs)
            key = self.sizes[0], self.f.space.batch, _shapes((self.f.f.inputs, self.f.f.options))
            if key in self.f.f.checked:
                self.narrow()
            else:
                self._narrow_and_compare()
                self.f.f.checked.add(key)

    def _narrow_and_compare(self) -> None:
        before, of_all = self.f.space, self.evaluate()
        expected = gathered_parts(of_all, before.sizes, self.narrow())
        found, expected = (
            torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for x in (self.evaluate(), expected)
        )
        if bool((found - expected).norm() > ROUNDING * expected.norm()):
            raise NarrowError(
                f"the cell gives other values for {self.f.space.batch} of {before.batch} samples "
                "alone than for all of them together.  With narrow=True samples must not influence "
                f"each other, and of every input tensor whose first dimension is {before.batch} "
                "the cell is given some rows alone: nothing else may depend on which samples are "
                "in the batch.  If that is not so, use narrow=False"
            )

    def rehearse(self) -> None:
        """Evaluate f once in each size that a recording of it will have."""
        while self.sizes:
            self.narrow()
            self.evaluate()


def _of(f: VectorMap, chosen: Tensor) -> VectorMap:
    """f for some of its samples; under the autocast state that was kept when it was made."""
    assert isinstance(f.f, CellOnInputs)
    size, space = len(chosen), copy.copy(f.space)
    space.batch, space.shapes = size, [torch.Size((size, *shape[1:])) for shape in space.shapes]
    other = copy.copy(f)
    other.space, other.f = space, f.f.of(chosen, f.space.batch)
    other.starts = list(itertools.accumulate((size * n for n in space.sizes), initial=0))
    return other


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple((key, _shapes(part)) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(part) for part in value)
    return type(value)
