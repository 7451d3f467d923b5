"""The engines that tests of `gdeq.fast` compare, and sweeps that are driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdeq import engine
from gdeq.fast.kernels.sweep import Sweep
from gdeq.fast.product import Start
from gdeq.loop import Ledger
from gdeq.state import StateMap, StateSpace
from oracles.sweep import OracleEngine, PlainSweep

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FORMS = ["oracle", "fast"]  # each is compared with the reference


def use(form: str) -> Any:
    """ "reference", "oracle" (plain PyTorch from the steps alone) or "fast" (kernels)."""
    return engine.use(OracleEngine() if form == "oracle" else form)


def both(form: str, work: Callable[[], Any]) -> tuple[Any, Any]:
    """What the reference makes of it, and what this form does."""
    with use("reference"):
        expected = work()
    with use(form):
        return expected, work()


def engine_of(z: Tensor) -> Any:
    """The engine that is chosen for a state like this now."""
    return engine.choose(StateMap(StateSpace(z), lambda z: z))


def rows_of(parts: Tensor, sizes: list[int]) -> Tensor:  # (batch·d,) -> (batch, d)
    batch = len(parts) // sum(sizes)
    pieces = parts.split([batch * size for size in sizes])
    return torch.cat([piece.view(batch, -1) for piece in pieces], dim=1)


def parts_of(rows: Tensor, sizes: list[int]) -> Tensor:  # (batch, d) -> (batch·d,)
    return torch.cat([part.reshape(-1) for part in rows.split(sizes, dim=1)])


def start_at(
    z: Tensor,  # (batch, d)
    solver: Any,
    *,
    precision: float | None = None,
    sizes: list[int] | None = None,
    given: torch.dtype | None = None,
) -> Start:
    """given: the dtype of what f is given."""
    sizes = [z.shape[1]] if sizes is None else sizes
    start = Start(
        solver=solver,
        precision=torch.finfo(z.dtype).eps if precision is None else precision,
        max_steps=solver.max_iter,
        sizes=sizes,
        batch=len(z),
        device=z.device,
        dtype=z.dtype,
        given_dtype=given or z.dtype,
    )
    if start.rounds_z:
        start.parts = parts_of(z.to(start.given_dtype), sizes)
    else:
        start.z = z
    return start


def sweep(form: str, *args: Any, **kwargs: Any) -> Any:
    """A sweep of this form from `start_at`."""
    start = start_at(*args, **kwargs)
    return Sweep(start) if form == "fast" else OracleEngine().sweep(start)


def drive(
    made: Any, f: Callable[[int, Tensor], Tensor], evaluations: int, repeated: bool = False
) -> list[Tensor]:
    """f(t, z) on rows, as f is given them; returns those.  repeated: as a recording does it."""
    sizes, seen = made.start.sizes, []
    for t in range(evaluations):
        seen.append(rows_of(made.parts, sizes).clone())
        fz = parts_of(f(t, seen[-1]), sizes)
        if repeated and t:
            made.judge_next(fz)
            made.go_on()
            continue
        made.take(t, fz)
        if repeated:
            made.prepare_repetition()
    return seen


def kept(made: Any) -> Tensor:  # (batch, places) bool
    """Which factors a sweep uses."""
    return made.keep if isinstance(made, PlainSweep) else made.samples.keep != 0


def ledger_of(made: Any) -> Ledger:
    """What a sweep has noted, in the terms of the reference."""
    if isinstance(made, PlainSweep):
        return made.ledger
    ledger, samples, start = Ledger.__new__(Ledger), made.samples, made.start
    ledger.solver, ledger.precision = start.solver, start.precision
    ledger.watch = start.solver.tol > 0
    ledger.rounding = 0.5 * start.precision
    ledger.absolute, ledger.relative, ledger.first_absolute, ledger.first_size = samples.real[:4]
    ledger.peak, ledger.best_absolute, ledger.best_residual = samples.real[4:7]
    ledger.residual = ledger._residual()
    ledger.parts = ledger.best_parts = None
    if made.judged > 1:
        places = len(samples.bounds) - 1
        ledger.parts, ledger.best_parts = (
            samples.real[first : first + made.judged].T for first in (7, 7 + places)
        )
    ledger.active, ledger.codes, ledger.steps, ledger.best_step = samples.whole.long()
    ledger.active = ledger.active != 0
    return ledger
