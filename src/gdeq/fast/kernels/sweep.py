"""A solve from its steps, in two kernels an iterate: inner products and decision, combination.

Read `gdeq.fast.product` first, and `gdeq.loop`, which says the same in plain PyTorch;
tests/oracles/sweep.py is the twin that each kernel here is tested against.

Vectors are cut in chunks (`chunks`), a program takes one chunk of one sample, and sums go over
chunks in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.context import host_may_look
from gdeq.fast.eight_bits import BLOCK, Scales
from gdeq.fast.kernels import state
from gdeq.fast.kernels.chunks import (
    ALIGNMENT,
    bounds,
    numbers,
    place,
    places,
    rounded_with_bytes,
    table,
    weighted_steps,
    work,
)
from gdeq.fast.kernels.device import on_device
from gdeq.fast.kernels.verdict import REALS, WHOLES, finish, judge
from gdeq.fast.kernels.words import COARSE_FROM, COMPILES, products_of_words, words_of
from gdeq.fast.product import ProductInverse, Settled, Start, roundings, secants_of_steps
from gdeq.loop import flight_limit, judged_sizes, least_part
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import noise_level

# The best that was found on an H200.
TILE = 2  # stored steps that a program reads at once
TILE_OF_BYTES = 4  # of steps in 8 bits
STEP_WARPS = 4
# Registers of the first pass with steps of 16 bits: 14 programs an SM, where ptxas would take up to
# 253 for 8.  The second where 144 spill: with float16, whose range is looked at, or many steps.
DOTS_REGISTERS, MORE_REGISTERS = 144, 168
SETTLING = 8  # programs for a sample, when few must go back
FIRST_ROOM = 8  # steps that a store starts with, where a solve may end early

DONE = tl.constexpr(-1)  # of ``moves``: before this iterate, so no step is made
SMALL = tl.constexpr(1e-26)  # a sum of squares below may be missing some
LARGEST_HALF = tl.constexpr(torch.finfo(torch.float16).max)


class Point(NamedTuple):
    """Where f was evaluated."""

    z: Any  # (batch, d); not read where z is in parts alone
    parts: Any  # (batch·d,) as f was given it
    fz: Any  # (batch·d,)
    last_fz: Any  # (batch·d,) at the iterate before; read if MEASURED


class Store(NamedTuple):
    """The steps, and how a vector is cut into chunks."""

    steps: Any  # (batch, room, d)
    words: Any  # the same memory, four steps of 8 bits to a word
    scales: Any  # (batch, room, chunks) what the numbers of a step in 8 bits count
    table: Any  # (chunks, 5) of `chunks.table`
    batch: Any
    d: Any
    chunks: Any


class Samples(NamedTuple):
    """What is known of each sample; the first dimension is the batch but where said."""

    norms: Any  # (…, chunks, 4) float64
    bounds: Any  # which chunks a part of the state consists of
    partial: Any  # (…, chunks, 2, places) inner products
    scale: Any  # (…,) ‖f(0)‖ where f is affine
    gram: Any  # (…, places, places)
    keep: Any  # (…, places) which factors are used
    weight: Any  # (…, places) what the next step has of each step
    lead: Any  # (…,) and of g
    moves: Any  # (…,) whether it goes on
    real: Any  # (rows, batch) of `verdict`
    whole: Any  # (rows, batch) of `verdict`
    trace: Any  # (steps, batch) residuals
    unfinished: Any  # (1,) samples that go on
    coordinates: Any  # (…, places, places) of each g in steps
    products: Any  # (…, places, places) g_iᵀg_j, for Anderson's method


class Limits(NamedTuple):
    """The numbers that a verdict depends on."""

    tol: Any
    precision: Any
    eps: Any
    noise: Any
    flight: Any
    least: Any
    mixing: Any  # of Anderson's method, as the rest
    ridge: Any
    coarse: Any
    blur: Any


class Kind(NamedTuple):
    """What a kernel is compiled for.

    FIRST: the first iterate.  COUNTED: in a repetition, which iterate it is is known from the
    sample itself.  MEASURED: ‖y‖ is summed; else it follows from inner products.  WATCH: there is
    a tolerance.  LINEAR: f is affine.  HALF: f was given z in float16; where z is out of its range,
    f(z) counts as NaN.  ROUNDED: z is in parts alone.  IN_PARTS: z is in parts too.  SCALED: steps
    are whole numbers, and only their sums are multiplied by what these count.  PACKED: four of them
    at once, from the same memory as words (`words`); COARSE: with g in 8 bits as well.  ALIGNED:
    all parts are multiples of 16 numbers.  MEMORY: differences of Anderson's method, in a WINDOW of
    so many; 0 for Broyden's.  PLACES: room for steps.  PARTS: that are judged one by one.
    """

    FIRST: bool
    COUNTED: bool
    MEASURED: bool
    WATCH: bool
    RELATIVE_STOP: bool
    LINEAR: bool
    HALF: bool
    ROUNDED: bool
    IN_PARTS: bool
    SCALED: bool
    PACKED: bool
    COARSE: bool
    ALIGNED: bool
    SECANTS: bool
    MEMORY: int
    WINDOW: int
    PLACES: int
    PARTS: int
    BLOCK: int
    TILE: int


@triton.jit
def _z_here(z, parts, in_rows, in_parts, inside, ROUNDED: tl.constexpr):
    if ROUNDED:
        found = tl.load(parts + in_parts, mask=inside, other=0.0).to(z.dtype.element_ty)
    else:
        found = tl.load(z + in_rows, mask=inside, other=0.0)
    return found


@triton.jit
def _store_squares(at, g, there, here, y):
    wide = g.to(tl.float64)
    tl.store(at, tl.sum(wide * wide, 0))
    wide = there.to(tl.float64)
    tl.store(at + 1, tl.sum(wide * wide, 0))
    wide = here.to(tl.float64)
    tl.store(at + 2, tl.sum(wide * wide, 0))
    wide = y.to(tl.float64)
    tl.store(at + 3, tl.sum(wide * wide, 0))


@triton.jit
def _z_and_f(point, in_rows, in_parts, inside, KIND: tl.constexpr):
    here = _z_here(point.z, point.parts, in_rows, in_parts, inside, KIND.ROUNDED)
    there = tl.load(point.fz + in_parts, mask=inside, other=0.0).to(here.dtype)
    if KIND.HALF:
        there = tl.where(tl.abs(here) <= LARGEST_HALF, there, float("nan"))
    return here, there


@triton.jit
def _change(there, last_fz, newest, unit, in_parts, inside):
    """y"""
    before = tl.load(last_fz + in_parts, mask=inside, other=0.0).to(there.dtype)
    return there - before - newest * unit


@triton.jit
def _of_sample(store, b, chunk, room):
    """Where the steps of sample b begin, as bytes and as words, and the scales of their chunk."""
    first = b * tl.cast(room, tl.int64)
    steps, words = store.steps + first * store.d, store.words + ((first * store.d) >> 2)
    return steps, words, store.scales + first * store.chunks + chunk


@triton.jit
def _dots_of_chunk(b, chunk, point, store, samples, room, count, KIND: tl.constexpr):
    """What `_dots` sums, of one chunk."""
    kind = point.z.dtype.element_ty
    d, chunks = store.d, store.chunks
    lane, row, length, in_rows, in_parts = place(
        store.table, b, chunk, store.batch, d, KIND.ALIGNED, KIND.BLOCK
    )
    column, inside = row + lane, lane < length
    base, words, units = _of_sample(store, b, chunk, room)
    if KIND.PACKED and not KIND.FIRST:  # asked for at once: they need not wait for g
        words += row >> 2
        first_words = words_of(words, count, length, d, KIND.BLOCK, KIND.TILE)
        newest_at = words + tl.maximum(count - 1, 0).to(tl.int64) * (d >> 2)
        new_words = words_of(newest_at, count, length, d, KIND.BLOCK, 1)
    here, there = _z_and_f(point, in_rows, in_parts, inside, KIND)
    out = samples.partial + (b * chunks + chunk) * 2 * KIND.PLACES
    g = there - here
    y = g
    last = count - 1
    newest = tl.zeros_like(g)
    unit = tl.cast(1.0, kind)  # of the newest
    if count > 0:
        if KIND.SCALED:
            unit = tl.load(units + last * chunks).to(kind)
        if KIND.MEASURED or not KIND.PACKED:
            newest = tl.load(base + tl.cast(last, tl.int64) * d + column, mask=inside, other=0)
            newest = numbers(newest, kind, KIND.SCALED)
        if not KIND.PACKED:
            tl.store(out + last, tl.sum(newest * g, 0) * unit)
            tl.store(out + KIND.PLACES + last, tl.sum(newest * newest, 0) * unit * unit)
        if KIND.MEASURED:
            y = _change(there, point.last_fz, newest, unit, in_parts, inside)
    at = samples.norms + (b * chunks + chunk) * 4
    gg, ff = tl.sum(g * g, 0), tl.sum(there * there, 0)
    zz, yy = tl.sum(here * here, 0), tl.sum(y * y, 0)
    tl.store(at, gg.to(tl.float64))
    tl.store(at + 1, ff.to(tl.float64))
    tl.store(at + 2, zz.to(tl.float64))
    tl.store(at + 3, yy.to(tl.float64))
    if KIND.FIRST:  # a solve mostly begins at zeros, whose squares are as they should be
        zz = tl.where(tl.max(tl.abs(here), 0) == 0, gg, zz)
    largest = tl.maximum(tl.maximum(gg, ff), tl.maximum(zz, yy))
    least = tl.minimum(tl.minimum(gg, ff), tl.minimum(zz, yy))
    if KIND.PACKED:
        if not KIND.FIRST:  # then there is no step
            products_of_words(
                first_words, new_words[0], words, units, g, unit, out, d, length, chunks, count,
                KIND.BLOCK, KIND.TILE, KIND.PLACES, KIND.COARSE,
            )  # fmt: skip
    else:
        for first in range(0, last, KIND.TILE):
            j = first + tl.arange(0, KIND.TILE)
            known = j < last
            where = j.to(tl.int64)[:, None] * d + column[None, :]
            s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0)
            s = numbers(s, kind, KIND.SCALED)
            of_g, of_newest = tl.sum(s * g[None, :], 1), tl.sum(s * newest[None, :], 1)
            if KIND.SCALED:
                unit_j = tl.load(units + j * chunks, mask=known, other=0.0).to(kind)
                of_g, of_newest = of_g * unit_j, of_newest * unit_j * unit
            tl.store(out + j, of_g, mask=known)
            tl.store(out + KIND.PLACES + j, of_newest, mask=known)
    if (least < SMALL) | ((largest <= 1 / SMALL) == 0):  # NaN too
        # Read again: what is rarely needed is not kept in registers meanwhile.
        here, there = _z_and_f(point, in_rows, in_parts, inside, KIND)
        y = there - here
        if KIND.MEASURED and count > 0:
            newest = tl.load(base + tl.cast(last, tl.int64) * d + column, mask=inside, other=0)
            newest = numbers(newest, kind, KIND.SCALED)
            y = _change(there, point.last_fz, newest, unit, in_parts, inside)
        _store_squares(at, there - here, there, here, y)


@triton.jit(do_not_specialize=["room", "count", "most"])
def _dots(point, store, samples, limits, arrived, room, count, most, KIND: tl.constexpr):
    """a_j = s_jᵀg, the new row s_jᵀs_{t−1} of G, and ‖g‖², ‖f(z)‖², ‖z‖², ‖y‖²: one chunk of each.

    Where squares may have overflowed or vanished, they are summed again in float64.  The program of
    a sample that is done last also judges it.
    """
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if KIND.COUNTED:
        count = tl.load(samples.whole + 2 * store.batch + b) + 1
    if KIND.WATCH and not KIND.FIRST:  # noqa: SIM102 (known when it is compiled)
        if tl.load(samples.whole + b) == 0:  # done: none of its steps is read
            if chunk == 0:
                tl.store(samples.moves + b, DONE)
            return
    _dots_of_chunk(b, chunk, point, store, samples, room, count, KIND)
    tl.debug_barrier()  # what all lanes have stored goes before the count
    if tl.atomic_add(arrived + b, 1, sem="acq_rel") == store.chunks - 1:
        tl.store(arrived + b, 0)  # for the next iterate
        judge(b, samples, limits, store.batch, store.chunks, count, most, KIND)


@triton.jit
def _moved(z, step, unit, SCALED: tl.constexpr, ROUNDED: tl.constexpr):
    """z + s, rounded in one way wherever it is computed."""
    if SCALED:
        z = tl.fma(step.to(z.dtype), tl.zeros_like(z) + unit, z)
    else:
        z += step.to(z.dtype)
    if ROUNDED:
        z = z.to(tl.bfloat16).to(z.dtype)
    return z


@triton.jit
def _step_of_chunk(
    b, chunk, point, store, samples, moved, moved_parts, room, count, KIND: tl.constexpr
):
    """What `_step` makes, of one chunk."""
    goes = tl.load(samples.moves + b)
    kind = point.z.dtype.element_ty
    d, chunks = store.d, store.chunks
    lane, row, length, in_rows, in_parts = place(
        store.table, b, chunk, store.batch, d, KIND.ALIGNED, KIND.BLOCK
    )
    inside = lane < length
    base, _words, units = _of_sample(store, b, chunk, room)
    # Asked for together, f(z) whether or not it will be used: one wait, not one after the other.
    share = tl.load(samples.lead + b)
    here = _z_here(point.z, point.parts, in_rows, in_parts, inside, KIND.ROUNDED)
    there = tl.load(point.fz + in_parts, mask=inside, other=0.0).to(kind)
    total = tl.zeros_like(here)
    if share != 0:
        total = share * (there - here)
        total = weighted_steps(
            total, base, units, samples.weight + b * KIND.PLACES, lane, row, length, d, chunks,
            count, KIND.SCALED, KIND.TILE,
        )  # fmt: skip
    out = base + tl.cast(count, tl.int64) * d + row + lane
    if KIND.SCALED:
        step, stored, unit = rounded_with_bytes(total)
        tl.store(units + count * chunks, unit)
        unit = unit.to(kind)
    else:
        step = total.to(store.steps.dtype.element_ty)
        stored = step
        unit = tl.cast(1.0, kind)
    tl.store(out, stored, mask=inside)
    if goes != 0:
        here = _moved(here, step, unit, KIND.SCALED, KIND.ROUNDED)
    if KIND.FIRST:
        goes += 1  # or stays, but in another place
    if goes != 0:
        if not KIND.ROUNDED:
            tl.store(moved + in_rows, here, mask=inside)
        if KIND.IN_PARTS:
            tl.store(moved_parts + in_parts, here.to(moved_parts.dtype.element_ty), mask=inside)


class Outcome(NamedTuple):
    """What is returned of each sample."""

    codes: Any  # (batch,)
    residual: Any  # (batch,)
    taken: Any  # (batch,) steps
    at: Any  # (batch,) the iterate that is returned
    kept: Any  # (batch, places) the factors that belong to it
    of_parts: Any  # (batch, parts) residuals


@triton.jit(do_not_specialize=["room", "count"])
def _step(point, store, samples, moved, moved_parts, room, count, KIND: tl.constexpr):
    """s_t = lead·g + Σ weight_j s_j into the store, and z + s_t into ``moved``: one chunk.

    That is z itself but for the FIRST step, which leaves z as it is; then z goes there also of a
    sample that does not move.
    """
    chunk, b = work()
    if KIND.WATCH:  # noqa: SIM102 (known when it is compiled)
        if tl.load(samples.moves + b) == DONE:
            return
    if KIND.COUNTED:
        count = tl.load(samples.whole + 2 * store.batch + b)
    _step_of_chunk(b, chunk, point, store, samples, moved, moved_parts, room, count, KIND)


@triton.jit(do_not_specialize=["room", "count", "most"])
def _dots_and_step(
    point, store, samples, limits, moved, moved_parts, room, count, most,
    MOVES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Both kernels in one, for samples of a single chunk; MOVES: the step is wanted."""
    b = tl.program_id(1).to(tl.int64)
    if KIND.WATCH and not KIND.FIRST:  # noqa: SIM102 (known when it is compiled)
        if tl.load(samples.whole + b) == 0:
            return
    _dots_of_chunk(b, 0, point, store, samples, room, count, KIND)
    tl.debug_barrier()  # what one lane stores, others read
    judge(b, samples, limits, store.batch, 1, count, most, KIND)
    tl.debug_barrier()
    if MOVES:
        _step_of_chunk(b, 0, point, store, samples, moved, moved_parts, room, count, KIND)


@triton.jit(do_not_specialize=["room", "most"])
def _settle(first, point, store, samples, outcome, precision, room, most, KIND: tl.constexpr):
    """`Ledger.finish`, and the iterate that is returned: some chunks of one sample.

    Who must go back does so to z_0 + s_0 + …, by the additions of the solve.
    """
    b = tl.program_id(1).to(tl.int64)
    batch = store.batch
    code, residual, wanted, last_residual, done, missed = finish(b, samples, batch, precision, KIND)
    if tl.program_id(0) == 0:
        if KIND.PARTS > 1:
            part = tl.arange(0, KIND.PARTS)
            row = REALS + part + tl.where(missed, KIND.PARTS, 0)
            of_parts = tl.load(samples.real + row * batch + b)
            tl.store(outcome.of_parts + b * KIND.PARTS + part, of_parts)
        tl.store(outcome.codes + b, code.to(tl.int64))
        tl.store(outcome.residual + b, residual)
        tl.store(outcome.taken + b, done.to(tl.int64))
        tl.store(outcome.at + b, wanted.to(tl.int64))
        j = tl.arange(0, KIND.PLACES)
        of_j = tl.load(samples.keep + b * KIND.PLACES + j)
        tl.store(outcome.kept + b * KIND.PLACES + j, tl.where(j < wanted, of_j, 0))
        # Of iterates that came when it was done, and were not judged:
        tl.store(samples.trace + j * batch + b, last_residual, mask=(j >= done) & (j < most))
    if wanted < done:
        for chunk in range(tl.program_id(0), store.chunks, tl.num_programs(0)):
            lane, row, length, in_rows, in_parts = place(
                store.table, b, chunk, batch, store.d, KIND.ALIGNED, KIND.BLOCK
            )
            column, inside = row + lane, lane < length
            total = _z_here(first, first, in_rows, in_parts, inside, KIND.ROUNDED)
            total = total.to(point.z.dtype.element_ty)
            base, _words, units = _of_sample(store, b, chunk, room)
            for j in range(0, wanted):
                at = base + tl.cast(j, tl.int64) * store.d + column
                s = numbers(tl.load(at, mask=inside, other=0), total.dtype, KIND.SCALED)
                unit = tl.cast(1.0, total.dtype)
                if KIND.SCALED:
                    unit = tl.load(units + j * store.chunks).to(total.dtype)
                total = _moved(total, s, unit, KIND.SCALED, KIND.ROUNDED)
            if not KIND.ROUNDED:
                tl.store(point.z + in_rows, total, mask=inside)
            if KIND.IN_PARTS:
                kind = point.parts.dtype.element_ty
                tl.store(point.parts + in_parts, total.to(kind), mask=inside)


def _in_parts(z: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:  # -> (batch·d,)
    if state.takes(len(z), [dtype] * len(sizes)):
        return state.split_buffer(z, sizes, dtype)
    return torch.cat([row.reshape(-1) for row in z.to(dtype).split(sizes, dim=1)])


def _with_room(x: Tensor, room: int) -> Tensor:  # (batch, fewer, n) -> (batch, room, n)
    batch, known, n = x.shape
    larger = x.new_empty(batch, room, n)
    larger[:, :known] = x
    return larger


class Sweep:
    """The steps of a solve and what is known about them; `take` goes from one iterate to the next.

    Only the newest z is kept; a sample that must go back to an earlier iterate gets it from the
    first one and the steps, by the same additions.
    """

    def __init__(self, start: Start, inverts: bool = True) -> None:
        """inverts: whether B⁻¹ is asked for."""
        self.start, solver, sizes = start, start.solver, start.sizes
        batch, d, device = start.batch, start.d, start.device
        self.table = table(tuple(sizes), BLOCK, device)
        self.in_parts = len(sizes) > 1 or start.given_dtype != start.dtype
        # The first step leaves what it begins with, and makes another z.
        if start.rounds_z:  # z is kept as f is given it, and in no other form
            assert start.parts is not None
            self.parts = start.parts
            self.z = torch.empty((), dtype=start.dtype, device=device).expand(batch, d)
            self.first = self.parts
        else:
            assert start.z is not None
            self.first = self.z = start.z.contiguous()
            self.parts = self.z.view(-1)
            if self.in_parts:
                self.parts = _in_parts(self.z, sizes, start.given_dtype)
        self.memory = solver.memory if isinstance(solver, Anderson) else 0
        self.inverts = inverts and not self.memory
        # Recorded, or with tol=0, all places will be used; else the store grows.
        whole = solver.tol == 0 or not host_may_look(device)
        room = start.max_steps + 1 if whole else min(start.max_steps + 1, FIRST_ROOM)
        self.steps = self._new(batch, room, d, dtype=start.store_dtype)
        self.scaled = start.store_dtype == torch.int8
        chunks = len(self.table)
        # Of each chunk of a step in 8 bits; else never read.
        of_steps = chunks if self.scaled else 0
        self.scales = self._new(batch, room, of_steps, dtype=torch.float32)
        # ‖y‖ follows from inner products where steps are rounded, and is not asked for by Anderson.
        self.measured = start.store_dtype == start.dtype and not self.memory
        self.judged = len(judged_sizes(solver.stop, sizes, linear=start.scale is not None))
        self.unfinished = torch.full((1,), batch, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(batch, dtype=torch.int32, device=device)
        self.places = places(start.max_steps + 1)
        self.samples = self._samples(batch, chunks)
        self.limits = self._limits()
        self.kind = self._kind()
        self.store = self._store()
        self.registers: dict[str, int] = {}
        if self.steps.element_size() == 2:
            more = self.places > 32 or self.parts.dtype == torch.float16
            self.registers["maxnreg"] = MORE_REGISTERS if more else DOTS_REGISTERS
        self.returned = self.last_fz = self.parts
        self.begun = False

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.start.dtype if dtype is None else dtype
        return torch.empty(shape, dtype=dtype, device=self.start.device)

    def _samples(self, batch: int, chunks: int) -> Samples:
        start, places = self.start, self.places
        sizes = tuple(start.sizes) if self.judged > 1 else (start.d,)
        of_parts = bounds(sizes, BLOCK, start.device)
        rows = REALS.value + (2 * (len(of_parts) - 1) if self.judged > 1 else 0)
        real = self._new(rows, batch)
        # Anderson's method writes both; the former is also written where secants are asked for.
        noted = batch if self.memory or start.keep_secants else 0
        return Samples(
            norms=self._new(batch, chunks, 4, dtype=torch.float64),
            bounds=of_parts,
            partial=self._new(batch, chunks, 2, places),
            scale=real if start.scale is None else start.scale,
            gram=self._new(batch, places, places),
            keep=self._new(batch, places, dtype=torch.int8),
            weight=self._new(batch, places),
            lead=self._new(batch),
            moves=self._new(batch, dtype=torch.int32),
            real=real,
            whole=self._new(WHOLES, batch, dtype=torch.int32),
            trace=self._new(start.max_steps, batch),
            unfinished=self.unfinished,
            coordinates=self._new(noted, places, places, dtype=torch.float64),
            products=self._new(batch if self.memory else 0, places, places, dtype=torch.float64),
        )

    def _limits(self) -> Limits:
        start, solver = self.start, self.start.solver
        mixing, ridge, coarse, blur = 1.0, 0.0, 0.0, 0.0
        if isinstance(solver, Anderson):
            mixing, ridge = float(solver.mixing), solver.ridge(start.dtype)
            coarse, blur = roundings(start.store_dtype, start.dtype, start.d)
        return Limits(
            tol=float(solver.tol),
            precision=float(start.precision),
            eps=float(torch.finfo(start.dtype).eps),
            noise=noise_level(start.precision),
            flight=flight_limit(solver.tol, start.precision),
            least=least_part(solver.tol, start.precision, start.dtype),
            mixing=mixing,
            ridge=ridge,
            coarse=coarse,
            blur=blur,
        )

    def _kind(self) -> Kind:
        start, solver = self.start, self.start.solver
        aligned = all(size % ALIGNMENT == 0 for size in start.sizes)
        packed = COMPILES and aligned and self.scaled and start.dtype == torch.float32
        return Kind(
            FIRST=False,
            COUNTED=False,
            MEASURED=self.measured,
            WATCH=solver.tol > 0,
            RELATIVE_STOP=solver.stop != "absolute",
            LINEAR=start.scale is not None,
            HALF=self.parts.dtype == torch.float16,
            ROUNDED=start.rounds_z,
            IN_PARTS=self.in_parts,
            SCALED=self.scaled,
            PACKED=packed,
            COARSE=packed and start.d >= COARSE_FROM,
            ALIGNED=aligned,
            SECANTS=start.keep_secants,
            MEMORY=self.memory,
            WINDOW=max(8, triton.next_power_of_2(self.memory)),
            PLACES=self.places,
            PARTS=len(self.samples.bounds) - 1,
            BLOCK=BLOCK,
            TILE=TILE_OF_BYTES if self.scaled else TILE,
        )

    def _kind_of(self, t: int, counted: bool) -> Kind:
        return self.kind._replace(FIRST=t == 0, COUNTED=counted)

    def _point(self, fz: Tensor) -> Point:
        return Point(self.z, self.parts, fz, self.last_fz)

    def _store(self) -> Store:
        return Store(
            steps=self.steps,
            words=self.steps.view(torch.int32) if self.kind.PACKED else self.steps,
            scales=self.scales,
            table=self.table,
            batch=self.start.batch,
            d=self.start.d,
            chunks=len(self.table),
        )

    def left(self) -> int:
        """How many samples are still sought; waits for the device."""
        return int(self.unfinished)

    def take(self, t: int, fz: Tensor) -> None:
        """Judge iterate t by f at it, learn from it, and go on unless it is the last one."""
        fz = fz.contiguous()
        if t == self.steps.shape[1]:
            room = min(2 * t, self.start.max_steps + 1)
            self.steps, self.scales = _with_room(self.steps, room), _with_room(self.scales, room)
            self.store = self._store()
        # A last step is of use for B⁻¹ and for secants alone.
        moves = self.inverts or self.start.keep_secants or t < self.start.max_steps
        with on_device(self.parts):
            if len(self.table) == 1:
                self._judge_and_move(t, fz, moves)
            else:
                self._judge(t, fz, counted=False)
                if moves:
                    self._move(t, fz, counted=False)
        if not self.measured:
            return
        # An f that writes into the same memory at each call would leave no trace of the last one.
        reused = not self.begun or fz.data_ptr() == self.returned.data_ptr()
        self.returned, self.last_fz = fz, fz.clone() if reused else fz
        self.begun = True

    def prepare_repetition(self) -> None:
        """From here on `judge_next` and then `go_on` are `take`, whichever iterate it is."""
        if self.measured:
            self.last_fz = self.last_fz.clone()

    def judge_next(self, fz: Tensor) -> None:
        self.returned = fz.contiguous()
        with on_device(self.parts):
            self._judge(1, self.returned, counted=True)

    def go_on(self) -> None:
        with on_device(self.parts):
            self._move(1, self.returned, counted=True)
        if self.measured:
            self.last_fz.copy_(self.returned)

    def _judge(self, t: int, fz: Tensor, counted: bool) -> None:
        _dots[(len(self.table), self.start.batch)](
            self._point(fz), self.store, self.samples, self.limits, self.arrived,
            self.steps.shape[1], t, self.start.max_steps, self._kind_of(t, counted),
            num_warps=1, **self.registers,
        )  # fmt: skip

    def _judge_and_move(self, t: int, fz: Tensor, moves: bool) -> None:
        point = self._point(fz)
        if moves:
            self._make_room(t)
        _dots_and_step[(1, self.start.batch)](
            point, self.store, self.samples, self.limits, self.z, self.parts,
            self.steps.shape[1], t, self.start.max_steps, moves, self._kind_of(t, counted=False),
            num_warps=1, **self.registers,
        )  # fmt: skip

    def _make_room(self, t: int) -> None:
        """The first step leaves the z that it begins with."""
        if t == 0 and self.start.rounds_z:
            self.parts = torch.empty_like(self.parts)
        elif t == 0:
            self.z = torch.empty_like(self.z)
            self.parts = self.parts if self.in_parts else self.z.view(-1)

    def _move(self, t: int, fz: Tensor, counted: bool) -> None:
        point = self._point(fz)
        self._make_room(t)
        _step[(len(self.table), self.start.batch)](
            point, self.store, self.samples, self.z, self.parts, self.steps.shape[1], t,
            self._kind_of(t, counted), num_warps=1 if self.scaled else STEP_WARPS,
        )  # fmt: skip

    def go_back(self) -> None:
        """Samples for which f was not finite return to the iterate before that."""
        self._settle()

    def settle(self, last: int) -> Settled:
        """The iterate that is returned of each sample, and what belongs to it."""
        found, samples, start = self._settle(), self.samples, self.start
        inverse = None
        if self.inverts:
            scales = Scales(self.scales, tuple(start.sizes), BLOCK).first(last + 1)
            inverse = ProductInverse(
                self.steps[:, : last + 1],
                samples.gram,
                found.kept.view(torch.bool),
                scales=scales if self.scaled else None,
                at=found.at,
            )
        secants = None
        if start.keep_secants:
            keep, ended = samples.keep.view(torch.bool), found.at == found.taken
            steps = self.steps[:, : last + 1]
            secants = secants_of_steps(steps, samples.coordinates, keep, found.taken, self.z, ended)
        # The graph of an f that was differentiated in the solve reads the same memory as parts.
        return Settled(
            z=None if start.rounds_z else self.z,
            parts=self.parts if self.in_parts else None,
            residual=found.residual,
            steps=found.taken,
            codes=found.codes,
            trace=samples.trace,
            evals=0,
            inverse=inverse,
            of_parts=found.of_parts[:, : self.judged] if self.judged > 1 else None,
            secants=secants,
        )

    def _settle(self) -> Outcome:
        batch = self.start.batch
        codes, taken, at = self._new(3, batch, dtype=torch.int64)
        kept, parts = torch.empty_like(self.samples.keep), len(self.samples.bounds) - 1
        outcome = Outcome(codes, self._new(batch), taken, at, kept, self._new(batch, parts))
        with on_device(self.parts):
            _settle[(SETTLING, batch)](
                self.first, self._point(self.parts), self.store, self.samples, outcome,
                self.limits.precision, self.steps.shape[1], self.start.max_steps, self.kind,
                num_warps=STEP_WARPS,
            )  # fmt: skip
        return outcome
