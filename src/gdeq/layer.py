"""`DEQ`: an equilibrium layer around the user's cell."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gdeq.checks import (
    ConvergenceWarning,
    UnsteadyCellWarning,
    examine,
    process_groups,
    values_are_there,
)
from gdeq.fixed_point import check_pair, find, find_all
from gdeq.gradients import DEFAULT, JFB, Gradient
from gdeq.holding import hold_all
from gdeq.options import describe
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, check_solver
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateMap, StateSpace, copied
from gdeq.steady import unsteady_parts
from gdeq.tracing import is_traced, uncompiled

# Reachable in float32.  In half precision its tolerance is raised to what f can resolve.
SOLVER = Broyden(max_iter=18, tol=1e-3)
LOOK_EVERY, LOOKS = 4, 3  # most samples fail at this many looks in a row, at every fourth call
# Where z0 came from, for errors of a solve to which none was given.
FROM_ZEROS = (
    "gdeq: no z0 was given, so the solve started from zeros like x; if z has another shape than x, "
    "call deq(x, z0=...) or give the cell a method initial_state(x)"
)


class DEQ(nn.Module):
    """An equilibrium layer: z = cell(z, x), solved.

    cell: a module or function ``cell(z, x, ...)`` that returns a new z of the same form.  The
        parameters of a function are not known to the layer.
    solver, gradient: ``Broyden(max_iter=18, tol=1e-3)`` and ``GDEQ(refine=1)`` by default; both may
        be replaced at any time, for example after pre-training with ``Unrolled``.  In half
        precision the default solver's tolerance is raised to what f can resolve, 8e-3 in bf16.
    eval_solver: used instead of ``solver`` after ``deq.eval()``.
    batched: False for one system without a batch dimension: a graph or set ``(nodes, d)``, a grid.

    A solve starts from the ``z0`` of the call; without it from ``cell.initial_state(x, ...)``, if
    the cell has that method; otherwise from zeros like x.  ``solution`` is the record of the last
    call in this thread.  Its z is detached, and it keeps the solver's inverse in memory until the
    next call.

    The first call, and the first with another cell, mode, device or dtype, checks by two more
    evaluations that f does not change between evaluations and treats samples independently, and
    warns if not.  Another warning says once that most samples do not converge;
    ``deq.warns = False`` switches it off.

    Examples:
        >>> import torch, gdeq
        >>> linear = torch.nn.Linear(8, 8)
        >>> deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * linear(z) + x), gdeq.Broyden(30, 1e-4))
        >>> z = deq(torch.randn(4, 8))
        >>> z.shape, bool(deq.solution.converged.all())
        (torch.Size([4, 8]), True)
    """

    warns = True

    def __init__(
        self,
        cell: Callable[..., State],
        solver: Solver | None = SOLVER,
        gradient: Gradient = DEFAULT,
        *,
        eval_solver: Solver | None = None,
        batched: bool = True,
        **unknown: Never,
    ) -> None:
        super().__init__()
        for key in unknown:
            names = ("cell", "solver", "gradient", "eval_solver", "batched")
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"DEQ has no option {key!r}{hint} (options: {', '.join(names)})")
        if not callable(cell) or isinstance(cell, type):
            raise TypeError(f"cell must be a module or function cell(z, x), got {describe(cell)}")
        if not isinstance(batched, bool):
            raise TypeError(f"DEQ.batched must be True or False, got {batched!r}")
        check_pair(solver, gradient)
        if eval_solver is not None:
            check_solver(eval_solver)
        self.cell = cell
        self.solver = solver
        self.gradient = gradient
        self.eval_solver = eval_solver
        self.batched = batched
        self._default: Solver | None = SOLVER if solver is SOLVER else None
        self._examined: set[object] = set()
        self._calls = self._failures = 0
        self._of_thread, self._groups = threading.local(), ()

    @property
    def solution(self) -> Solution | None:
        """The record of the last call in this thread."""
        return getattr(self._of_thread, "solution", None)

    @solution.setter
    def solution(self, solution: Solution | None) -> None:
        self._of_thread.solution = solution

    @uncompiled
    def forward(
        self,
        *inputs: Any,
        z0: State = None,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        **options: Any,
    ) -> State:
        """Return the fixed point z = cell(z, *inputs, **options), with gradients.

        z0: where the solve starts.
        solver, gradient: for this call only.
        """
        self.solution = None  # frees the last call's inverse before this one grows
        from_zeros = z0 is None and not hasattr(self.cell, "initial_state")
        if z0 is None:
            z0 = self._initial_state(*inputs, **options)
        try:
            return self._solve(
                lambda z: self.cell(z, *inputs, **options), z0, solver, gradient, examine=True
            )
        except Exception as problem:
            if from_zeros:
                problem.add_note(FROM_ZEROS)
            if not _takes(self.cell, z0, *inputs, **options):
                problem.add_note(
                    "gdeq: the cell is called as cell(z, x) with the x that deq(x) was given, "
                    "and returns the next z; wrap what takes other arguments: "
                    "DEQ(lambda z, x: torch.tanh(linear(z) + x))"
                )
            raise

    @uncompiled
    def trajectory(
        self, *inputs: Any, at: Sequence[int], z0: State = None, **options: Any
    ) -> list[State]:
        """Return the states after these steps and the fixed point; see `gdeq.trajectory`."""
        self.solution = None
        z0 = self._initial_state(*inputs, **options) if z0 is None else z0
        f, z0, solver, gradient = self._prepared(
            lambda z: self.cell(z, *inputs, **options), z0, None, None
        )
        with hold_all(self.cell):
            states, solution = find_all(f, z0, solver, gradient, at)
        if not is_traced():
            self._keep(replace(solution, z=copied(solution.z)))
        return states if self.batched else [_only_one(z) for z in states]

    def equilibrium(self, f: Callable[[State], State], z0: State) -> State:
        """Return the fixed point of ``f`` from ``z0``, by this layer's solver and gradient.

        For an f that stands in for the cell: dropout masks and normalised weights in the cell stay
        fixed during the solve, and `solution` is its record.
        """
        self.solution = None  # frees the last call's inverse before this one grows
        return self._solve(f, z0)

    def _solve(
        self,
        f: Callable[[State], State],
        z0: State,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        examine: bool = False,
    ) -> State:
        f, z0, solver, gradient = self._prepared(f, z0, solver, gradient)
        with hold_all(self.cell):
            z, solution = find(f, z0, solver, gradient)
            # Unrolled from z0, a new mask at each step is no harm.
            if solver is not None and not is_traced():
                leaves = pytree.tree_leaves(solution.z)
                if values_are_there(leaves):
                    self._look_at_convergence(solution, solver)
                    if examine:
                        self._examine(f, solution.z, leaves, solver.tol)
        out = z if self.batched else _only_one(z)
        if is_traced():  # a record would outlive what its tensors stand for
            return out
        if solution.z is z:  # it must stay what it is when the caller changes the output in place
            solution = replace(solution, z=copied(z))
        self._keep(solution)
        return out

    def _prepared(
        self,
        f: Callable[[State], State],
        z0: State,
        solver: Solver | None,
        gradient: Gradient | None,
    ) -> tuple[Callable[[State], State], State, Solver | None, Gradient]:
        """The map, start, solver and gradient of one solve."""
        if not self.batched:
            of_one, z0 = f, _batch_of_one(z0)
            f = lambda z: _batch_of_one(of_one(_only_one(z)))  # noqa: E731
        if solver is None:
            solver = (None if self.training else self.eval_solver) or self.solver
        gradient = gradient or self.gradient
        if solver is not None and not torch.is_grad_enabled() and gradient.needs.broyden:
            gradient = JFB()  # none is computed, so any solver will do
        self._groups = self._groups or process_groups(self.cell)
        if self._groups:
            f = _Sharded(f, self._groups)
        if solver is not None and solver is self._default:
            precision = StateMap(StateSpace(z0), f).precision
            solver = replace(solver, tol=max(solver.tol, precision))
        return f, z0, solver, gradient

    def _keep(self, solution: Solution) -> None:
        """Make it the record of this call."""
        if not self.batched:
            solution = replace(solution, z=_only_one(solution.z), batched=False)
        self.solution = solution

    def _initial_state(self, *inputs: Any, **options: Any) -> State:
        """Where a solve starts without ``z0``."""
        make = getattr(self.cell, "initial_state", None)
        if make is not None:
            return make(*inputs, **options)
        x = inputs[0] if inputs else options.get("x", next(iter(options.values()), None))
        leaves = pytree.tree_leaves(x)
        if leaves and all(self._starts(leaf) for leaf in leaves):
            return pytree.tree_map(torch.zeros_like, x)
        why = "without either, it starts as zeros like x, and there is none"
        if isinstance(x, Tensor) and not x.is_floating_point():
            why = f"x is {x.dtype}, and a state must be floating point, so it cannot start like x"
        elif inputs or options:
            why = f"x must be a tensor to start as zeros like it, got {type(x).__name__}"
        raise ValueError(
            "the shape of the state is not known: call deq(x, z0=...), or give the cell a method "
            f"initial_state(x) that returns one ({why})"
        )

    def _starts(self, x: Any) -> bool:
        """Whether a state can be zeros like this."""
        return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= self.batched

    # ---- what is told

    def _examine(
        self, f: Callable[[State], State], z: State, leaves: list[Tensor], tol: float
    ) -> None:
        """Once for a cell in one mode: does it fit a solve?"""
        mode = (
            getattr(self.cell, "training", None),
            torch.is_autocast_enabled(leaves[0].device.type),
        )
        key = (id(self.cell), *mode, *((leaf.device, leaf.dtype) for leaf in leaves))
        if key in self._examined:
            return
        self._examined.add(key)
        parts = unsteady_parts(self.cell) if isinstance(self.cell, nn.Module) else []
        told: Warning | None = None
        if parts:
            told = UnsteadyCellWarning(
                f"{type(self.cell).__name__} in training mode changes between evaluations, so its "
                f"solve may not converge: {'; '.join(parts)}"
            )
        elif len(leaves[0]) and not self._groups:
            with contextlib.suppress(Exception):  # a check must not end what works without it
                told = examine(StateMap(StateSpace(z), f), z, self.cell, tol)
        if told is not None:
            warnings.warn(told, stacklevel=1)

    def _look_at_convergence(self, solution: Solution, solver: Solver) -> None:
        """Tell once that most samples fail; a look waits for the device, so looks are rare."""
        if not self.warns or not solver.tol or self._failures == LOOKS:
            return
        self._calls += 1
        if self._calls % LOOK_EVERY:
            return
        missed = solution.codes[~solution.converged]
        fails = 2 * len(missed) > len(solution.codes)
        self._failures = self._failures + 1 if fails else 0
        if self._failures == LOOKS:
            total = len(solution.codes)
            warnings.warn(
                f"most samples of this layer have not converged for {LOOK_EVERY * LOOKS} calls: "
                f"{total - len(missed)} of {total} did in this one. The most frequent status: "
                f"{Status(int(missed.mode().values))}. print(deq.solution) shows more",
                ConvergenceWarning,
                stacklevel=1,
            )

    def extra_repr(self) -> str:
        told = f"solver={self.solver}, gradient={self.gradient}"
        told += "" if self.eval_solver is None else f", eval_solver={self.eval_solver}"
        return told if self.batched else f"{told}, batched=False"

    def __getstate__(self) -> dict[str, Any]:
        # The record is of one call; copies and pickles of the layer start without it.
        state = {**super().__getstate__(), "_groups": ()}
        del state["_of_thread"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._of_thread = threading.local()


@dataclass(frozen=True)
class _Sharded:
    """An f that the members of these process groups evaluate together (`gdeq.engine.choose`)."""

    f: Callable[[State], State]
    groups: tuple[Any, ...]

    def __call__(self, z: State) -> State:
        return self.f(z)


def _batch_of_one(z: State) -> State:
    return pytree.tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, z)


def _only_one(z: State) -> State:
    return pytree.tree_map(lambda leaf: leaf.squeeze(0), z)


def mixed_start(
    z0: State, share: float = 0.5, scale: float = 1.0, generator: torch.Generator | None = None
) -> State:
    """Replace about this share of the samples in z0 by normal noise.

    Trained from such starts, f tends to have a single equilibrium that all of them lead to.

    z0: a state ``(batch, ...)``, such as zeros.  scale: the standard deviation of the noise.

    Examples:
        >>> import torch, gdeq
        >>> z0 = gdeq.mixed_start(torch.zeros(100, 3))
        >>> 20 < (z0 == 0).all(1).sum() < 80  # about half of the samples start at zero
        tensor(True)
    """
    first = pytree.tree_leaves(z0)[0]
    noisy = torch.rand(len(first), generator=generator, device=first.device) < share

    def mix(leaf: Tensor) -> Tensor:
        noise = torch.empty_like(leaf).normal_(std=scale, generator=generator)
        return torch.where(noisy.view(-1, *[1] * (leaf.dim() - 1)), noise, leaf)

    return pytree.tree_map(mix, z0)


def _takes(cell: Callable[..., Any], *inputs: Any, **options: Any) -> bool:
    """Whether it can be called so, as far as its signature tells."""
    try:
        signature = inspect.signature(cell.forward if isinstance(cell, nn.Module) else cell)
    except (TypeError, ValueError):  # some builtins have none
        return True
    try:
        signature.bind(*inputs, **options)
    except TypeError:
        return False
    return True
