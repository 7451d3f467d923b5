"""A learned start (after Bai, Koltun & Kolter 2022): a network that predicts where a solve ends.

The fixed point does not depend on where its solve begins, but the number of steps does.  A small
network is fitted to solved equilibria, by regression, once the cell is trained: in training the
equilibria move, and it would have to follow.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdeq.layer import DEQ
from gdeq.options import count, describe
from gdeq.state import State, full_precision, matched

Target = tuple[State, Tensor]  # equilibria, and (batch,) which of them were found
WARMUP = 0.05  # share of the steps over which the rate rises; then it falls to 0


def fit_start(
    deq: DEQ, start: nn.Module, batches: Iterable[Any], *, steps: int = 300, lr: float = 3e-3
) -> Tensor:
    """Fit ``start(x)`` to the equilibria of ``deq``; then set ``deq.start = start`` to use it.

    batches: the cell's inputs, a tensor x or a tuple of all of them; gone through again and again.
        Those of a list or tuple are solved once, and their equilibria kept; those of anything else
        (a loader) each time that they come.
    steps, lr: of Adam.

    Returns ‖start(x) − z*‖/‖z*‖, the root mean square over the samples, at each step: (steps,).
    z* is found by the layer's own solver, in eval mode, from where it would begin without a start.
    Samples that it does not bring to its tolerance are left out, with a warning.  The layer is not
    changed.
    """
    _check(deq, start, batches, steps, lr)
    parameters = [p for p in start.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    known: dict[int, Target] | None = {} if isinstance(batches, Sequence) else None
    seen = unsolved = 0
    was_training, start_was_training = deq.training, start.training
    distances = []
    try:
        deq.eval()
        start.train()
        for step, (index, inputs) in enumerate(_repeated(batches, steps)):
            target = None if known is None else known.get(index)
            if target is None:
                target = _equilibrium(deq, inputs)
                seen, unsolved = seen + len(target[1]), unsolved + int((~target[1]).sum())
                if known is not None:
                    known[index] = target
            for group in optimizer.param_groups:
                group["lr"] = lr * min((step + 1) / (WARMUP * steps), 1 - step / steps)
            # Outside autocast: gradients of a mean over all numbers are too small for float16.
            with torch.enable_grad(), full_precision(parameters[0].device):
                found = start(*(_given(x, parameters[0].dtype) for x in inputs))
                loss = _distance(found, *target)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            distances.append(loss.detach().sqrt())
    finally:
        optimizer.zero_grad(set_to_none=True)
        start.train(start_was_training)
        if was_training:
            deq.train()
    if unsolved == seen:
        raise ValueError(
            f"none of the {count(seen, 'sample')} has an equilibrium to the tolerance of "
            f"{deq.solver}: there is nothing to fit"
        )
    curve = torch.stack(distances)
    if not curve.isfinite().all():
        first = int((~curve.isfinite()).int().argmax())
        raise ValueError(
            f"start(x) is not finite at step {first}: look whether x is; or lr={lr:g} is too large"
        )
    if unsolved:
        warnings.warn(
            f"{unsolved} of {count(seen, 'sample')} have no equilibrium to the tolerance of "
            f"{deq.solver} and were not fitted",
            UserWarning,
            stacklevel=2,
        )
    return curve


def _check(deq: object, start: object, batches: object, steps: object, lr: object) -> None:
    if not isinstance(deq, DEQ):
        raise TypeError(f"deq must be a gdeq.DEQ, got {describe(deq)}")
    if not isinstance(start, nn.Module):
        raise TypeError(
            f"start must be a module whose parameters are fitted, got {describe(start)}"
        )
    if not any(p.requires_grad for p in start.parameters()):
        raise ValueError("start has no parameter that requires a gradient: nothing can be fitted")
    if isinstance(batches, Tensor):
        raise TypeError("batches must be a list or loader of batches: for a tensor, x.split(128)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be a number above 0, got {lr!r}")


def _repeated(batches: Iterable[Any], steps: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """So many batches with their places, from the front again when there are no more."""
    left = steps
    while left > 0:
        before = left
        for index, batch in enumerate(itertools.islice(batches, left)):
            yield index, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
            left -= 1
        if left == before == steps:
            raise ValueError("batches is empty: give at least one batch of inputs")
        if left == before:
            raise ValueError(
                f"batches ended after {steps - left} of {count(steps, 'step')} and cannot be gone "
                "through again: give a list, a loader or an iterator that is long enough"
            )


@torch.no_grad()
def _equilibrium(deq: DEQ, inputs: tuple[Any, ...]) -> Target:
    z = deq(*inputs, z0=deq._initial_state(*inputs))
    solution, solver = deq.solution, deq.solver
    assert solution is not None
    asked = solver is not None and solver.tol > 0
    return z, solution.converged if asked else solution.residual.isfinite()


def _distance(found: State, z: State, solved: Tensor) -> Tensor:  # -> ()
    """‖found − z‖²/‖z‖², the mean over the solved samples."""
    apart = size = torch.zeros(())
    for leaf, known in matched(found, z, "what start returned"):
        wide = torch.promote_types(known.dtype, torch.float32)
        target = known.to(wide)
        apart = apart + (leaf.to(wide) - target).flatten(1).square().sum(1)
        size = size + target.flatten(1).square().sum(1)
    some = solved & (size > 0)
    # Selected before dividing: what is left out has no part in the gradient either.
    share = torch.where(some, apart, 0.0) / torch.where(some, size, 1.0)
    return share.sum() / some.sum().clamp(min=1)


def _given(x: Any, dtype: torch.dtype) -> Any:
    """Without the graph that made it, which would be gone through at each step; what an autocast
    region left in half precision, in that of the network's parameters."""
    if not isinstance(x, Tensor):
        return x
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.detach().to(dtype) if half else x.detach()
