"""What a sweep has noted, the fused one in the terms of the plain one."""

from __future__ import annotations

from typing import Any

from gdeq.fast.product import PlainSweep
from gdeq.ledger import Ledger


def ledger_of(sweep: Any) -> Ledger:
    if isinstance(sweep, PlainSweep):
        return sweep.ledger
    ledger = Ledger.__new__(Ledger)
    ledger.solver, ledger.precision = sweep.solver, sweep.precision
    ledger.linear, ledger.watch = sweep.scale is not None, sweep.solver.tol > 0
    ledger.rounding = 0.5 * sweep.precision
    ledger.absolute, ledger.relative, ledger.first_absolute, ledger.first_size = sweep.real[:4]
    ledger.peak, ledger.best_absolute, ledger.best_residual = sweep.real[4:7]
    ledger.residual = ledger._residual()
    ledger.parts = ledger.best_parts = None
    if sweep.judged > 1:
        ledger.parts, ledger.best_parts = (
            sweep.real[first : first + sweep.judged].T for first in (7, 7 + sweep.of_parts)
        )
    ledger.active, ledger.codes, ledger.steps, ledger.best_step = sweep.whole.long()
    ledger.active = ledger.active != 0
    return ledger
