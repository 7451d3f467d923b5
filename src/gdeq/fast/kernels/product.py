"""The product form on a GPU, in two kernels an iterate: inner products and decision, combination.

Read `gdeq.fast.product.PlainSweep` first; each function here says which of its lines it computes.
Vectors are cut in chunks (`chunks`), a program takes one chunk of one sample, and sums
go over chunks in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdeq.fast.anderson_steps import roundings
from gdeq.fast.eight_bits import BLOCK, Scales
from gdeq.fast.kernels import state
from gdeq.fast.kernels.choice import on_device
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
from gdeq.fast.kernels.product_judge import ACTIVE, REALS, STEPS, WHOLES, finish, judge
from gdeq.fast.kernels.words import (
    COARSE_FROM,
    COMPILES,
    MOST_NUMBERS,
    products_of_words,
    words_of,
)
from gdeq.fast.product import (
    ProductInverse,
    Settled,
    in_eight_bits,
    nowhere,
    rounds_z,
    store_dtype,
)
from gdeq.fast.recording import recording
from gdeq.ledger import flight_limit, judged_sizes, least_part
from gdeq.narrowing import first_active, gathered_parts
from gdeq.secants import Secants
from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import Solver, noise_level


@dataclass(frozen=True)
class Tuning:
    """The best that was found on an H200 (docs/performance.md)."""

    block: int = BLOCK  # numbers in a chunk
    tile: int = 2  # stored steps that a program reads at once
    dots_warps: int = 1  # sums then need no other warp
    step_warps: int = 4
    backwards: bool = True  # the second pass over the steps starts where the first one ended
    # Who sums the last chunk of a sample judges it (in one warp, so only with dots_warps = 1).
    judge_in_dots: bool = True
    # ‖y‖ from inner products that are known, where steps are rounded: f at the last z is not read.
    change_from_dots: bool = True
    rounded_z: bool = True  # where `gdeq.fast.product.rounds_z` says so
    # Steps in 8 bits: in the first pass four numbers at once; so many steps in each; warps of the
    # second.
    packed: bool = True
    tile_of_bytes: tuple[int, int] = (4, 4)
    warps_of_bytes: int = 1
    # Of the first pass, with steps of 16 bits: 14 programs an SM, where ptxas would take up to 253
    # for 8.  The second where 144 spill: with float16, whose range is looked at, or many steps.
    dots_registers: tuple[int, int] = (144, 168)


tuning = Tuning()
SETTLING = 8  # programs for a sample, when few must go back
DONE = tl.constexpr(-1)  # of ``moves``: before this iterate, so no step is made
SMALL = tl.constexpr(1e-26)  # a sum of squares below may be missing some
LARGEST_HALF = tl.constexpr(torch.finfo(torch.float16).max)


@triton.jit
def _sample(rows, at, NARROW: tl.constexpr):
    """Which sample is at this place of those that f was evaluated for."""
    if NARROW:
        at = tl.load(rows + at)
    return at


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
def _z_and_f(
    z, parts, fz, in_rows, in_parts, inside, HALF: tl.constexpr, ROUNDED: tl.constexpr
):  # fmt: skip
    here = _z_here(z, parts, in_rows, in_parts, inside, ROUNDED)
    there = tl.load(fz + in_parts, mask=inside, other=0.0).to(z.dtype.element_ty)
    if HALF:
        there = tl.where(tl.abs(here) <= LARGEST_HALF, there, float("nan"))
    return here, there


@triton.jit
def _change(there, last_fz, newest, unit, in_parts, inside):
    """y"""
    before = tl.load(last_fz + in_parts, mask=inside, other=0.0).to(there.dtype)
    return there - before - newest * unit


@triton.jit
def _dots_of_chunk(
    b, at_parts, chunk,
    evaluated, z, parts, fz, last_fz, steps, words, scales, chunk_table, d, step_stride,
    scale_stride, norms, partial, chunks, count,
    HALF: tl.constexpr, ROUNDED: tl.constexpr, FIRST: tl.constexpr, MEASURED: tl.constexpr,
    SCALED: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PLACES: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """What `_dots` sums, of one chunk."""
    kind = z.dtype.element_ty
    lane, row, length, in_rows, in_parts = place(
        chunk_table, b, at_parts, chunk, evaluated, d, ALIGNED, BLOCK
    )
    column, inside = row + lane, lane < length
    if PACKED and not FIRST:  # asked for at once: they need not wait for g
        words += (b * step_stride + row) >> 2
        first_words = words_of(words, count, length, d, BLOCK, TILE)
        newest_at = words + tl.maximum(count - 1, 0).to(tl.int64) * (d >> 2)
        new_words = words_of(newest_at, count, length, d, BLOCK, 1)
    here, there = _z_and_f(z, parts, fz, in_rows, in_parts, inside, HALF, ROUNDED)
    base = steps + b * step_stride
    out = partial + (b * chunks + chunk) * 2 * PLACES
    g = there - here
    y = g
    last = count - 1
    newest = tl.zeros_like(g)
    units = scales + b * scale_stride + chunk
    unit = tl.cast(1.0, kind)  # of the newest
    if count > 0:
        if SCALED:
            unit = tl.load(units + last * chunks).to(kind)
        if MEASURED or not PACKED:
            newest = tl.load(base + tl.cast(last, tl.int64) * d + column, mask=inside, other=0)
            newest = numbers(newest, kind, SCALED)
        if not PACKED:
            tl.store(out + last, tl.sum(newest * g, 0) * unit)
            tl.store(out + PLACES + last, tl.sum(newest * newest, 0) * unit * unit)
        if MEASURED:
            y = _change(there, last_fz, newest, unit, in_parts, inside)
    at = norms + (b * chunks + chunk) * 4
    gg, ff, zz, yy = (
        tl.sum(g * g, 0),
        tl.sum(there * there, 0),
        tl.sum(here * here, 0),
        tl.sum(y * y, 0),
    )
    tl.store(at, gg.to(tl.float64))
    tl.store(at + 1, ff.to(tl.float64))
    tl.store(at + 2, zz.to(tl.float64))
    tl.store(at + 3, yy.to(tl.float64))
    if FIRST:  # a solve mostly begins at zeros, whose squares are as they should be
        zz = tl.where(tl.max(tl.abs(here), 0) == 0, gg, zz)
    largest = tl.maximum(tl.maximum(gg, ff), tl.maximum(zz, yy))
    least = tl.minimum(tl.minimum(gg, ff), tl.minimum(zz, yy))
    if PACKED:
        if not FIRST:  # then there is no step
            products_of_words(
                first_words, new_words[0], words, units, g, unit, out, d, length, chunks, count,
                BLOCK, TILE, PLACES, COARSE,
            )  # fmt: skip
    else:
        for first in range(0, last, TILE):
            j = first + tl.arange(0, TILE)
            known = j < last
            where = j.to(tl.int64)[:, None] * d + column[None, :]
            s = tl.load(base + where, mask=known[:, None] & inside[None, :], other=0)
            s = numbers(s, kind, SCALED)
            of_g, of_newest = tl.sum(s * g[None, :], 1), tl.sum(s * newest[None, :], 1)
            if SCALED:
                unit_j = tl.load(units + j * chunks, mask=known, other=0.0).to(kind)
                of_g, of_newest = of_g * unit_j, of_newest * unit_j * unit
            tl.store(out + j, of_g, mask=known)
            tl.store(out + PLACES + j, of_newest, mask=known)
    if (least < SMALL) | ((largest <= 1 / SMALL) == 0):  # NaN too
        # Read again: what is rarely needed is not kept in registers meanwhile.
        here, there = _z_and_f(z, parts, fz, in_rows, in_parts, inside, HALF, ROUNDED)
        y = there - here
        if MEASURED and count > 0:
            newest = tl.load(base + tl.cast(last, tl.int64) * d + column, mask=inside, other=0)
            newest = numbers(newest, kind, SCALED)
            y = _change(there, last_fz, newest, unit, in_parts, inside)
        _store_squares(at, there - here, there, here, y)


@triton.jit(do_not_specialize=["count", "most", "scale_stride"])
def _dots(
    rows, evaluated,
    z, parts, fz, last_fz, steps, words, scales, chunk_table, d, step_stride, scale_stride, arrived,
    norms, bounds, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, unfinished,
    coordinates, products, batch, chunks, count, most, tol, precision, eps, noise,
    flight, least, mixing, ridge, coarse, blur,
    MEMORY: tl.constexpr, WINDOW: tl.constexpr, SECANTS: tl.constexpr,
    NARROW: tl.constexpr, JUDGE: tl.constexpr, COUNTED: tl.constexpr, HALF: tl.constexpr,
    ROUNDED: tl.constexpr, FIRST: tl.constexpr, MEASURED: tl.constexpr,
    WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    SCALED: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, COARSE: tl.constexpr = False,
):  # fmt: skip
    """a_j = s_jᵀg, the new row s_jᵀs_{t−1} of G, and ‖g‖², ‖f(z)‖², ‖z‖², ‖y‖²: one chunk of each.

    Where squares may have overflowed or vanished, they are summed again in float64.  MEASURED: ‖y‖
    is not found in another way.  JUDGE: the program of a sample that is done last also judges it.
    SCALED: steps are whole numbers, and only their sums are multiplied by what these count.
    PACKED: four of them at once, from the same memory as words (`words`); COARSE: with
    g in 8 bits as well.
    HALF: f was given z in float16; where z is out of its range, f(z) counts as NaN.
    ROUNDED: z is in parts alone (`gdeq.fast.product.rounds_z`).
    COUNTED: in a repetition, which iterate it is, is known from the sample itself.
    NARROW: f was evaluated for these rows alone, so only what it takes and returns is in parts.
    """
    chunk, at_parts = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = _sample(rows, at_parts, NARROW)
    if COUNTED:
        count = tl.load(whole + 2 * batch + b) + 1
    if WATCH and not FIRST:  # noqa: SIM102 (known when it is compiled)
        if tl.load(whole + b) == 0:  # done: none of its steps is read
            if chunk == 0:
                tl.store(moves + b, DONE)
            return
    _dots_of_chunk(
        b, at_parts, chunk, evaluated, z, parts, fz, last_fz, steps, words, scales, chunk_table, d,
        step_stride, scale_stride, norms, partial, chunks, count, HALF, ROUNDED, FIRST, MEASURED,
        SCALED, PACKED, ALIGNED, BLOCK, TILE, PLACES, COARSE,
    )  # fmt: skip
    if JUDGE:
        tl.debug_barrier()  # what all lanes have stored goes before the count
        if tl.atomic_add(arrived + b, 1, sem="acq_rel") == chunks - 1:
            tl.store(arrived + b, 0)  # for the next iterate
            judge(
                b, norms, bounds, partial, scale, gram, keep, weight, lead, moves, real, whole,
                trace, unfinished, coordinates, products, batch, chunks, count, most, tol,
                precision, eps, noise, flight, least, mixing, ridge, coarse, blur, MEMORY, WINDOW,
                SECANTS, FIRST, MEASURED, WATCH, RELATIVE_STOP, LINEAR, PLACES, CHUNKS, PARTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "most"])
def _judge(
    rows,
    norms, bounds, partial, scale, gram, keep, weight, lead, moves, real, whole, trace, unfinished,
    coordinates, products, batch, chunks, count, most, tol, precision, eps, noise,
    flight, least, mixing, ridge, coarse, blur,
    MEMORY: tl.constexpr, WINDOW: tl.constexpr, SECANTS: tl.constexpr,
    NARROW: tl.constexpr, COUNTED: tl.constexpr, FIRST: tl.constexpr, MEASURED: tl.constexpr,
    WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr, LINEAR: tl.constexpr,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    b = _sample(rows, tl.program_id(0).to(tl.int64), NARROW)
    if COUNTED:
        count = tl.load(whole + 2 * batch + b) + 1
    if WATCH and not FIRST:  # noqa: SIM102 (known when it is compiled)
        if tl.load(whole + b) == 0:
            tl.store(moves + b, DONE)
            return
    judge(
        b, norms, bounds, partial, scale, gram, keep, weight, lead, moves, real, whole, trace,
        unfinished, coordinates, products, batch, chunks, count, most, tol, precision, eps,
        noise, flight, least, mixing, ridge, coarse, blur, MEMORY, WINDOW, SECANTS, FIRST,
        MEASURED, WATCH, RELATIVE_STOP, LINEAR, PLACES, CHUNKS, PARTS,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["count", "scale_stride"])
def _step(
    rows, evaluated,
    z, begun, moved, fz, steps, scales, parts, chunk_table, weight, lead, moves, taken,
    d, step_stride, scale_stride, chunks, count,
    NARROW: tl.constexpr, COUNTED: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr,
    WATCH: tl.constexpr, ROUNDED: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BACKWARDS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """s_t = lead·g + Σ weight_j s_j into the store, and z + s_t into ``moved``: one chunk.

    That is z itself but for the FIRST step, which leaves z as it is; then z goes there also of a
    sample that does not move.  taken: the steps of each sample, this one too (if COUNTED).
    ROUNDED: z is in parts alone: in ``begun``, and changed into ``parts``.
    """
    chunk, at_parts = work(BACKWARDS)
    b = _sample(rows, at_parts, NARROW)
    goes = tl.load(moves + b)
    if WATCH:  # noqa: SIM102 (known when it is compiled)
        if goes == DONE:
            return
    if COUNTED:
        count = tl.load(taken + b)
    kind = z.dtype.element_ty
    lane, row, length, in_rows, in_parts = place(
        chunk_table, b, at_parts, chunk, evaluated, d, ALIGNED, BLOCK
    )
    inside = lane < length
    base = steps + b * step_stride
    units = scales + b * scale_stride + chunk
    # Asked for together, f(z) whether or not it will be used: one wait, not one after the other.
    share = tl.load(lead + b)
    here = _z_here(z, begun, in_rows, in_parts, inside, ROUNDED)
    there = tl.load(fz + in_parts, mask=inside, other=0.0).to(kind)
    total = tl.zeros_like(here)
    if share != 0:
        total = share * (there - here)
        total = weighted_steps(
            total, base, units, weight + b * PLACES, lane, row, length, d, chunks, count,
            SCALED, TILE, BACKWARDS,
        )  # fmt: skip
    out = base + tl.cast(count, tl.int64) * d + row + lane
    if SCALED:
        step, stored, unit = rounded_with_bytes(total)
        tl.store(units + count * chunks, unit)
        unit = unit.to(kind)
    else:
        step = total.to(steps.dtype.element_ty)
        stored = step
        unit = tl.cast(1.0, kind)
    tl.store(out, stored, mask=inside)
    if goes != 0:
        here = _moved(here, step, unit, SCALED, ROUNDED)
    if FIRST:
        goes += 1  # or stays, but in another place
    if goes != 0:
        if not ROUNDED:
            tl.store(moved + in_rows, here, mask=inside)
        if PARTS:
            tl.store(parts + in_parts, here.to(parts.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most", "scale_stride"])
def _settle(
    first, z, parts, steps, scales, real, whole, keep, trace, codes, residuals, taken, at, kept,
    of_parts, chunk_table, batch, d, step_stride, scale_stride, chunks, most, precision,
    WATCH: tl.constexpr, RELATIVE_STOP: tl.constexpr,
    PARTS: tl.constexpr, ROUNDED: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, JUDGED: tl.constexpr,
):  # fmt: skip
    """`Ledger.finish` and `PlainSweep.settle`: some chunks of one sample.

    Who must go back does so to z_0 + s_0 + …, by the additions of the solve.
    """
    b = tl.program_id(1).to(tl.int64)
    code, residual, wanted, last_residual, done, missed = finish(
        b, real, whole, batch, precision, WATCH, RELATIVE_STOP
    )
    if tl.program_id(0) == 0:
        if JUDGED > 1:
            part = tl.arange(0, JUDGED)
            row = REALS + part + tl.where(missed, JUDGED, 0)
            tl.store(of_parts + b * JUDGED + part, tl.load(real + row * batch + b))
        tl.store(codes + b, code.to(tl.int64))
        tl.store(residuals + b, residual)
        tl.store(taken + b, done.to(tl.int64))
        tl.store(at + b, wanted.to(tl.int64))
        j = tl.arange(0, PLACES)
        of_j = tl.load(keep + b * PLACES + j)
        tl.store(kept + b * PLACES + j, tl.where(j < wanted, of_j, 0))
        # Of iterates that came when it was done, and were not judged:
        tl.store(trace + j * batch + b, last_residual, mask=(j >= done) & (j < most))
    if wanted < done:
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            lane, row, length, in_rows, in_parts = place(
                chunk_table, b, b, chunk, batch, d, ALIGNED, BLOCK
            )
            column, inside = row + lane, lane < length
            if ROUNDED:
                total = tl.load(first + in_parts, mask=inside, other=0.0).to(z.dtype.element_ty)
            else:
                total = tl.load(first + in_rows, mask=inside, other=0.0)
            base, units = steps + b * step_stride, scales + b * scale_stride + chunk
            for j in range(0, wanted):
                s = tl.load(base + tl.cast(j, tl.int64) * d + column, mask=inside, other=0)
                unit = tl.cast(1.0, total.dtype)
                if SCALED:
                    unit = tl.load(units + j * chunks).to(total.dtype)
                total = _moved(total, numbers(s, total.dtype, SCALED), unit, SCALED, ROUNDED)
            if not ROUNDED:
                tl.store(z + in_rows, total, mask=inside)
            if PARTS:
                tl.store(parts + in_parts, total.to(parts.dtype.element_ty), mask=inside)


def _in_parts(z: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:  # -> (batch·d,)
    if state.takes(len(z), [dtype] * len(sizes)):
        return state.split_buffer(z, sizes, dtype)
    return torch.cat([row.reshape(-1) for row in z.to(dtype).split(sizes, dim=1)])


def _measures_change(solver: Solver, z: Tensor, precision: float) -> bool:
    rounded = store_dtype(z, precision, in_eight_bits(solver)) != z.dtype
    return not ((rounded and tuning.change_from_dots) or isinstance(solver, Anderson))


def in_parts_alone(solver: Solver, z: Tensor, dtype: torch.dtype, precision: float) -> bool:
    """Whether a `Sweep` keeps z as f is given it, in this dtype, and in no other form."""
    measured = _measures_change(solver, z, precision)
    return tuning.rounded_z and rounds_z(solver, dtype) and not measured


def _with_room(x: Tensor, room: int) -> Tensor:  # (batch, fewer, n) -> (batch, room, n)
    batch, known, n = x.shape
    larger = x.new_empty(batch, room, n)
    larger[:, :known] = x
    return larger


class Sweep:
    """`gdeq.fast.product.PlainSweep`, fused."""

    rows: Tensor | None = None

    def __init__(
        self,
        z: Tensor,  # (batch, d)
        sizes: list[int],
        dtype: torch.dtype,
        solver: Solver,
        precision: float,
        max_steps: int,
        scale: Tensor | None,  # (batch,)
        keep_secants: bool = False,
        parts: Tensor | None = None,  # (batch·d,) in this dtype
        inverts: bool = True,
    ) -> None:
        """parts: z in parts, where it is kept in no other form (`in_parts_alone`).

        inverts: whether B⁻¹ is asked for.
        """
        batch, d = z.shape
        device = z.device
        self.solver, self.precision, self.max_steps = solver, precision, max_steps
        self.scale, self.keep_secants = scale, keep_secants
        self.table = table(tuple(sizes), tuning.block, device)
        self.aligned = all(size % ALIGNMENT == 0 for size in sizes)
        self.in_parts = len(sizes) > 1 or dtype != z.dtype
        self.rounded = in_parts_alone(solver, z, dtype, precision)
        # The first step leaves what it begins with, and makes another z.
        if self.rounded:
            self.parts = _in_parts(z, sizes, dtype) if parts is None else parts
            self.z, self.first = nowhere(batch, d, z.dtype, device), self.parts
        else:
            self.first = self.z = z.contiguous()
            self.parts = _in_parts(z, sizes, dtype) if self.in_parts else self.z.view(-1)
        # In a captured graph, or with tol=0, all places will be used; else the store grows.
        whole = solver.tol == 0 or recording(device)
        room = max_steps + 1 if whole else min(max_steps + 1, 8)
        self.memory = solver.memory if isinstance(solver, Anderson) else 0
        self.inverts = inverts and not self.memory
        kept = store_dtype(z, precision, in_eight_bits(solver))
        self.steps = z.new_empty(batch, room, d, dtype=kept)
        # Of each chunk of a step in 8 bits; else never read.
        self.scaled, self.sizes = kept == torch.int8, tuple(sizes)
        chunks = len(self.table)
        self.scales = z.new_empty(batch, room, chunks if self.scaled else 0, dtype=torch.float32)
        self.places = places(max_steps + 1)
        self.gram = z.new_empty(batch, self.places, self.places)
        self.keep = torch.empty(batch, self.places, dtype=torch.int8, device=device)
        # Anderson's method writes both; the former is also written where secants are asked for.
        noted = bool(self.memory) or keep_secants
        square = self.places, self.places
        self.coordinates = z.new_empty(batch if noted else 0, *square, dtype=torch.float64)
        self.products = z.new_empty(batch if self.memory else 0, *square, dtype=torch.float64)
        self.weight = z.new_empty(batch, self.places)
        self.lead = z.new_empty(batch)
        self.moves = torch.empty(batch, dtype=torch.int32, device=device)
        self.judged = len(judged_sizes(solver.stop, sizes, linear=scale is not None))  # parts
        self.bounds = bounds(tuple(sizes) if self.judged > 1 else (d,), tuning.block, device)
        self.of_parts = len(self.bounds) - 1  # room for their residuals
        rows = REALS.value + (2 * self.of_parts if self.judged > 1 else 0)
        self.real = z.new_empty(rows, batch)
        self.whole = torch.empty(WHOLES, batch, dtype=torch.int32, device=device)
        self.trace = z.new_empty(max_steps, batch)
        self.partial = z.new_empty(batch, chunks, 2, self.places)
        self.norms = torch.empty(batch, chunks, 4, dtype=torch.float64, device=device)
        self.arrived = torch.zeros(batch, dtype=torch.int32, device=device)
        self.unfinished = self.arrived  # samples; counted with a tolerance alone
        if solver.tol > 0:
            self.unfinished = torch.full((1,), batch, dtype=torch.int32, device=device)
        self.measured = _measures_change(solver, z, precision)  # ‖y‖; else nothing keeps f
        self.returned = self.last_fz = self.parts
        self.another_size = True  # than the last f(z) had

    def left(self) -> int:
        return int(self.unfinished)

    def narrow(self, size: int) -> Tensor:  # -> (size,)
        if self.rows is None:
            self.rows = torch.arange(len(self.z), device=self.z.device)
        chosen = first_active(self.whole[ACTIVE][self.rows], size)
        self.rows = self.rows[chosen]
        sizes = list(self.sizes)
        self.parts, self.in_parts = gathered_parts(self.parts, sizes, chosen), True
        self.another_size = True
        self.last_fz = gathered_parts(self.last_fz, sizes, chosen) if self.measured else self.parts
        return chosen

    def _evaluated(self) -> tuple[Tensor, int]:
        """The samples that f is evaluated for (not read where that is all), and their number."""
        return (self.table, len(self.z)) if self.rows is None else (self.rows, len(self.rows))

    def take(self, t: int, fz: Tensor) -> None:
        fz = fz.contiguous()
        if t == self.steps.shape[1]:
            self._grow()
        with on_device(self.z):
            self._judge(t, fz, counted=False)
            # A last step is of use for B⁻¹ and for secants alone.
            if self.inverts or self.keep_secants or t < self.max_steps:
                self._move(t, fz, counted=False)
        if not self.measured:
            return
        # An f that writes into the same memory at each call (of a size) would leave no trace of the
        # last one.
        reused = self.another_size or fz.data_ptr() == self.returned.data_ptr()
        self.returned, self.last_fz = fz, fz.clone() if reused else fz
        self.another_size = False

    def prepare_repetition(self) -> None:
        """From here on `judge_next` and then `go_on` are `take`, whichever iterate it is."""
        if self.measured:
            self.last_fz = self.last_fz.clone()

    def judge_next(self, fz: Tensor) -> None:
        self.returned = fz.contiguous()
        with on_device(self.z):
            self._judge(1, self.returned, counted=True)

    def go_on(self) -> None:
        with on_device(self.z):
            self._move(1, self.returned, counted=True)
        if self.measured:
            self.last_fz.copy_(self.returned)

    def _judge(self, t: int, fz: Tensor, counted: bool) -> None:
        batch, d = self.z.shape
        strides, chunks = (self.steps.stride(0), self.scales.stride(0)), len(self.table)
        solver, precision = self.solver, self.precision
        scale = self.real if self.scale is None else self.scale
        sums = self.norms, self.bounds, self.partial, scale
        kept = self.gram, self.keep, self.weight, self.lead, self.moves
        noted = self.real, self.whole, self.trace, self.unfinished, self.coordinates, self.products
        limits = (
            self.max_steps,
            float(solver.tol),
            float(precision),
            float(torch.finfo(self.z.dtype).eps),
            noise_level(precision),
            flight_limit(solver.tol, precision),
            least_part(solver.tol, precision, self.z.dtype),
            *self._mixing(),
        )
        verdict = *sums, *kept, *noted, batch, chunks, t, *limits
        rows, evaluated = self._evaluated()
        common = {"NARROW": self.rows is not None, "COUNTED": counted, "PLACES": self.places}
        judging = {
            "FIRST": t == 0,
            "MEASURED": self.measured,
            "WATCH": solver.tol > 0,
            "RELATIVE_STOP": solver.stop != "absolute",
            "PARTS": self.of_parts,
            "LINEAR": self.scale is not None,
            "CHUNKS": 32,
            "MEMORY": self.memory,
            "WINDOW": max(8, triton.next_power_of_2(self.memory)),
            "SECANTS": self.keep_secants,
        }
        at_once = tuning.judge_in_dots and tuning.dots_warps == 1
        _dots[(chunks, evaluated)](
            rows, evaluated, self.z, self.parts, fz, self.last_fz, self.steps, self._words(),
            self.scales, self.table, d, *strides, self.arrived, *verdict,
            JUDGE=at_once, HALF=self.parts.dtype == torch.float16, ROUNDED=self.rounded,
            PACKED=self._packed(), COARSE=self._packed() and d >= COARSE_FROM,
            **common, **judging, **self._tiles(0), **self._registers(), num_warps=tuning.dots_warps,
        )  # fmt: skip
        if not at_once:
            _judge[(evaluated,)](rows, *verdict, **common, **judging, num_warps=1)

    def _mixing(self) -> tuple[float, float, float, float]:
        if not isinstance(self.solver, Anderson):
            return 1.0, 0.0, 0.0, 0.0
        coarse, blur = roundings(self.steps.dtype, self.z)
        return float(self.solver.mixing), self.solver.ridge(self.z.dtype), coarse, blur

    def _move(self, t: int, fz: Tensor, counted: bool) -> None:
        d = self.z.shape[1]
        rows, evaluated = self._evaluated()
        before, begun = self.z, self.parts
        if t == 0 and self.rounded:
            self.parts = torch.empty_like(begun)
        elif t == 0:
            self.z = torch.empty_like(before)
            self.parts = self.parts if self.in_parts else self.z.view(-1)
        strides, chunks = (self.steps.stride(0), self.scales.stride(0)), len(self.table)
        _step[(chunks, evaluated)](
            rows, evaluated,
            before, begun, self.z, fz, self.steps, self.scales, self.parts, self.table,
            self.weight, self.lead, self.moves, self.whole[STEPS], d, *strides, chunks, t,
            NARROW=self.rows is not None, COUNTED=counted, FIRST=t == 0, PARTS=self.in_parts,
            WATCH=self.solver.tol > 0, ROUNDED=self.rounded, BACKWARDS=tuning.backwards,
            PLACES=self.places, **self._tiles(1),
            num_warps=tuning.warps_of_bytes if self.scaled else tuning.step_warps,
        )  # fmt: skip

    def _packed(self) -> bool:
        possible = (
            COMPILES
            and self.aligned
            and tuning.block <= MOST_NUMBERS
            and self.z.dtype == torch.float32
        )
        return tuning.packed and self.scaled and possible

    def _words(self) -> Tensor:
        return self.steps.view(torch.int32) if self._packed() else self.steps

    def _tiles(self, of_pass: int) -> dict[str, int | bool]:
        return {
            "SCALED": self.scaled,
            "ALIGNED": self.aligned,
            "BLOCK": tuning.block,
            "TILE": tuning.tile_of_bytes[of_pass] if self.scaled else tuning.tile,
        }

    def _registers(self) -> dict[str, int]:
        if self.steps.element_size() != 2:
            return {}
        more = self.places > 32 or self.parts.dtype == torch.float16
        return {"maxnreg": tuning.dots_registers[more]}

    def _grow(self) -> None:
        room = min(2 * self.steps.shape[1], self.max_steps + 1)
        self.steps, self.scales = _with_room(self.steps, room), _with_room(self.scales, room)

    def go_back(self) -> None:
        self._settle()

    def settle(self, last: int) -> Settled:
        codes, residual, taken, at, kept, found = self._settle()
        inverse = None
        if self.inverts:
            scales = Scales(self.scales, self.sizes, tuning.block).first(last + 1)
            inverse = ProductInverse(
                self.steps[:, : last + 1],
                self.gram,
                kept.view(torch.bool),
                scales=scales if self.scaled else None,
                at=at,
            )
        # They have gone back with z.  The graph of an f that was differentiated in the solve reads
        # the same memory: for a sample whose f was not finite there, so neither is its gradient.
        parts = self.parts if self._all_in_parts() else None
        secants = None
        if self.keep_secants:
            steps, keep = self.steps[:, : last + 1], self.keep.view(torch.bool)
            secants = Secants.of_steps(steps, self.coordinates, keep, taken, self.z, at == taken)
        z = None if self.rounded else self.z
        of_parts = found[:, : self.judged] if self.judged > 1 else None
        return Settled(z, parts, residual, taken, codes, inverse, of_parts, secants)

    def _all_in_parts(self) -> bool:
        return self.in_parts and self.rows is None

    def _settle(self) -> tuple[Tensor, ...]:
        """z as it is returned; codes, residuals, steps, iterates, factors, residuals of parts."""
        batch, d = self.z.shape
        codes, taken, at = torch.empty(3, batch, dtype=torch.int64, device=self.z.device)
        residual, kept = torch.empty_like(self.lead), torch.empty_like(self.keep)
        of_parts = self.lead.new_empty(batch, self.of_parts)
        with on_device(self.z):
            _settle[(SETTLING, batch)](
                self.first, self.z, self.parts, self.steps, self.scales, self.real, self.whole,
                self.keep, self.trace, codes, residual, taken, at, kept, of_parts, self.table,
                batch, d, self.steps.stride(0), self.scales.stride(0), len(self.table),
                self.max_steps, float(self.precision),
                WATCH=self.solver.tol > 0, RELATIVE_STOP=self.solver.stop != "absolute",
                PARTS=self._all_in_parts(), ROUNDED=self.rounded, SCALED=self.scaled,
                ALIGNED=self.aligned, BLOCK=tuning.block, PLACES=self.places,
                JUDGED=self.of_parts, num_warps=tuning.step_warps,
            )  # fmt: skip
        return codes, residual, taken, at, kept, of_parts
