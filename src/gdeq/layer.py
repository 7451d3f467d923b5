"""`DEQ`: an equilibrium layer around the user's cell."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gdeq.checks import (
    ConvergenceWarning,
    DetachedCellWarning,
    UnsteadyCellWarning,
    Watched,
    examine,
)
from gdeq.context import (
    hold_all,
    is_traced,
    look_is_free,
    process_groups,
    together,
    uncompiled,
    values_are_there,
)
from gdeq.fixed_point import check_gradient, check_pair, find, find_all
from gdeq.gradients import DEFAULT, JFB, Gradient
from gdeq.holding import unsteady_parts
from gdeq.options import check_flag, check_names, describe
from gdeq.solution import Solution, Status
from gdeq.solvers.base import Solver, check_solver
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateMap, StateSpace, autocast_dtype

# Reachable in float32.  In half precision its tolerance is raised to what f can resolve.
SOLVER = Broyden(max_iter=18, tol=1e-3)
LOOK_EVERY, LOOKS = 4, 3  # warn when most samples fail at 3 looks in a row, one every 4 calls
# Where z0 came from, for errors of a solve to which none was given.
FROM_ZEROS = (
    "gdeq: no z0 was given, so the solve started from zeros like x; if z has another shape than x, "
    "call deq(x, z0=...) or give the cell a method initial_state(x)"
)

EXPORT = "use torch.export.export, or torch.onnx.export with dynamo=True"
# What PyTorch says of checkpoint(..., use_reentrant=True) where z is its only tensor.
REENTRANT = "None of the inputs have requires_grad"


class DEQ(nn.Module):
    """An equilibrium layer: it returns the z that solves z = cell(z, x), with gradients.

    cell: a module or function ``cell(z, x, ...)`` that returns a new z of the same form.  If it is
        a function, the layer does not know its parameters.
    solver, gradient: ``Broyden(max_iter=18, tol=1e-3)`` and ``GDEQ(refine=1)`` by default; both may
        be replaced at any time, for example after pre-training with ``Unrolled``.  In half
        precision the default solver's tolerance is raised to what f can resolve, 8e-3 in bf16.
    eval_solver: used instead of ``solver`` after ``deq.eval()``.
    batched: False for one system without a batch dimension: a graph or set ``(nodes, d)``, a grid.

    A solve starts from the ``z0`` of the call, else from ``cell.initial_state(x, ...)`` if the
    cell has that method, else from zeros like x.

    ``solution`` is the record of the last call in this thread.  Its z is detached.  It keeps the
    solver's inverse in memory until the next call.

    The first call, and the first with another cell, mode, device or dtype, or with gradients that
    use ∂f/∂z, evaluates f twice more to check that it stays the same function, treats samples
    independently and does not hide z from autograd, and warns if not.
    The layer warns once if most samples keep failing to converge, and once if f is NaN or infinite
    where a solve starts, which then returns z0; ``deq.warns = False`` switches both off.

    Examples:
        >>> import torch, gdeq
        >>> linear = torch.nn.Linear(8, 8)
        >>> deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * linear(z) + x), gdeq.Broyden(30, 1e-4))
        >>> z = deq(torch.randn(4, 8))
        >>> z.shape, bool(deq.solution.converged.all())
        (torch.Size([4, 8]), True)
    """

    warns = True
    _groups: tuple[Any, ...]  # of processes that the cell is sharded over

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
        check_names("DEQ", unknown, ("cell", "solver", "gradient", "eval_solver", "batched"))
        if not callable(cell) or isinstance(cell, type):
            raise TypeError(f"cell must be a module or function cell(z, x), got {describe(cell)}")
        check_pair(solver, gradient)
        if eval_solver is not None:
            check_solver(eval_solver, name="eval_solver")
        self.cell = cell
        self.solver = solver
        self.gradient = gradient
        self.eval_solver = eval_solver
        self.batched = batched
        check_flag(self, "batched")
        self._default: Solver | None = SOLVER if solver is SOLVER else None
        self._learn_anew()
        self._calls, self._failures = [0, 0], [0, 0]  # in evaluation and in training
        self._lost = False  # whether samples that failed at the start were told
        self._of_thread = threading.local()

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
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"gdeq: torch.jit.trace would keep the steps of this one input; {EXPORT}"
            )
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
        """Return the states after the steps ``at``, and the fixed point; see `gdeq.trajectory`."""
        z0 = self._initial_state(*inputs, **options) if z0 is None else z0
        return self._solve(lambda z: self.cell(z, *inputs, **options), z0, examine=True, at=at)

    def equilibrium(self, f: Callable[[State], State], z0: State) -> State:
        """Return the fixed point of ``f``, used in place of the cell, starting from ``z0``.

        Dropout masks and normalised weights in the cell stay fixed during the solve.
        """
        return self._solve(f, z0)

    def _solve(
        self,
        f: Callable[[State], State],
        z0: State,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        examine: bool = False,
        at: Sequence[int] | None = None,
    ) -> State:
        """The fixed point, or the states of a trajectory, and the record of it."""
        self.solution = None  # frees the last call's inverse before this one grows
        if self._of[0] is not self.cell:
            self._learn_anew()
        given, again = (f, z0, solver, gradient), False
        if not self.batched:
            of_one, z0 = f, _batch_of_one(z0)
            f = lambda z: _batch_of_one(of_one(_only_one(z)))  # noqa: E731
        if solver is None:
            solver = (None if self.training else self.eval_solver) or self.solver
        gradient = check_gradient(self.gradient if gradient is None else gradient)
        if solver is not None and not torch.is_grad_enabled() and gradient.needs.broyden:
            gradient = JFB()  # none is computed, so any solver will do
        if self._reentrant:
            f = functools.partial(_through_z, f)
        kind = self._kind(z0, gradient) if examine and not is_traced() else None
        watched = None if kind is None or kind in self._examined else Watched(f)
        f = watched or f
        if not self._groups:
            self._groups = process_groups(self.cell)
        if solver is not None and solver is self._default:
            precision = StateMap(StateSpace(z0), f).precision
            solver = replace(solver, tol=max(solver.tol, precision))
        with hold_all(self.cell), together(self._groups):
            if at is None:
                z, solution = find(f, z0, solver, gradient)
            else:
                z, solution = find_all(f, z0, solver, gradient, at)
            # Without a solver nothing is solved, and a new dropout mask at each step is no harm.
            if solver is not None and not is_traced():
                leaves = pytree.tree_leaves(solution.z)
                if values_are_there(leaves):
                    self._look_at_convergence(solution, solver)
                    # Where f is NaN for all samples there is nothing to see: a later call looks.
                    if watched and bool(solution.codes.ne(Status.NONFINITE_START).any()):
                        self._examined.add(kind)
                        again = self._examine(watched, solution.z, leaves, solver.tol)
        if watched is not None:
            watched.last = None  # its graph belongs to the caller
        if again:
            return self._solve(*given, at=at)
        if not is_traced():  # else the record would outlive what its tensors stand for
            kept = solution.z
            if at is not None or kept is z:  # it must not change with the caller's tensors
                kept = pytree.tree_map(lambda leaf: leaf.detach().clone(), kept)
            kept = kept if self.batched else _only_one(kept)
            self.solution = replace(solution, z=kept, batched=self.batched)
        return z if self.batched else _only_one(z)

    def _initial_state(self, *inputs: Any, **options: Any) -> State:
        """Where a solve starts without ``z0``."""
        if hasattr(self.cell, "initial_state"):
            return self.cell.initial_state(*inputs, **options)
        x = inputs[0] if inputs else options.get("x", next(iter(options.values()), None))
        leaves = pytree.tree_leaves(x)
        if leaves and all(_is_real(leaf) and leaf.dim() >= self.batched for leaf in leaves):
            return pytree.tree_map(torch.zeros_like, x)
        why = "without either, it starts as zeros like x, and there is none"
        if isinstance(x, Tensor) and not _is_real(x):
            why = f"x is {x.dtype}, and a state must be floating point, so it cannot start like x"
        elif isinstance(x, Tensor):
            why = "x has no batch dimension; DEQ(cell, batched=False) takes one system without"
        elif inputs or options:
            why = f"x must be a tensor to start as zeros like it, got {type(x).__name__}"
        raise ValueError(
            "the shape of the state is not known: call deq(x, z0=...), or give the cell a method "
            f"initial_state(x) that returns one ({why})"
        )

    # ---- what is told

    def _learn_anew(self) -> None:
        """What is known of a cell; in a list, the cell is no second part of the layer."""
        self._of = [self.cell]
        self._examined: set[object] = set()
        self._reentrant = False  # whether it loses gradients where z has none
        self._groups = ()

    def _kind(self, z0: State, gradient: Gradient) -> tuple[object, ...]:
        """What makes a call another one to the checks."""
        leaves = [leaf for leaf in pytree.tree_leaves(z0) if isinstance(leaf, Tensor)]
        # A function's modules are in the layer's own mode, as a rule.
        modes = self.training, getattr(self.cell, "training", None)
        grad = torch.is_grad_enabled()
        several = any(len(leaf) > 1 for leaf in leaves if leaf.dim())  # one shows no coupling
        autocast = [autocast_dtype(leaf.device.type) for leaf in leaves[:1]]
        kinds = [(leaf.device, leaf.dtype) for leaf in leaves]
        return *modes, several, grad, grad and gradient.needs.vjp, *autocast, *kinds

    def _examine(self, f: Watched, z: State, leaves: list[Tensor], tol: float) -> bool:
        """Does the cell fit a solve?  -> whether this one lost gradients"""
        parts = unsteady_parts(self.cell) if isinstance(self.cell, nn.Module) else []
        told: Warning | None = None
        if parts:
            told = UnsteadyCellWarning(
                f"{type(self.cell).__name__} in training mode changes between evaluations, so its "
                f"solve may not converge: {'; '.join(parts)}"
            )
        elif len(leaves[0]) and not self._groups:
            with warnings.catch_warnings(record=True) as said, contextlib.suppress(Exception):
                warnings.simplefilter("always")  # a check must not end what works without it
                follows = f.follows(self.cell)
                told = examine(StateMap(StateSpace(z), f.f), z, self.cell, tol, follows)
            if any(REENTRANT in str(each.message) for each in said):
                self._reentrant = True
                told = None if isinstance(told, DetachedCellWarning) else told  # mended by that
        if told is not None:
            warnings.warn(told, stacklevel=1)
        return self._reentrant and torch.is_grad_enabled()

    def _look_at_convergence(self, solution: Solution, solver: Solver) -> None:
        """Tell once of samples that fail; a look waits for the device, so looks are rare."""
        if not self.warns:
            return
        mode = self.training  # a test that converges says nothing of training
        self._calls[mode] += 1
        looks = solver.tol > 0 and self._calls[mode] % LOOK_EVERY == 0
        free = look_is_free(solution.codes.device)
        seeks = not self._lost and (looks or self._calls[mode] == 1 or free)
        looks = looks and max(self._failures) < LOOKS
        if not (seeks or looks):
            return
        codes, total = solution.codes.cpu(), len(solution.codes)  # the one wait
        if seeks:
            lost = int(codes.eq(Status.NONFINITE_START).sum())
            self._lost = lost > 0
            if self._lost:
                told = f"{lost} of {total} samples of this layer {Status.NONFINITE_START}"
                warnings.warn(told, ConvergenceWarning, stacklevel=1)
        if not looks:
            return
        missed = codes[codes.ne(Status.CONVERGED)]
        self._failures[mode] = self._failures[mode] + 1 if 2 * len(missed) > total else 0
        if self._failures[mode] == LOOKS:
            warnings.warn(
                f"most samples of this layer have not converged in its last {LOOK_EVERY * LOOKS} "
                f"calls in {'training' if mode else 'eval'} mode: {total - len(missed)} of {total} "
                f"did in this one. The most frequent status: {Status(int(missed.mode().values))}. "
                "For more, print(deq.solution)",
                ConvergenceWarning,
                stacklevel=1,
            )

    def extra_repr(self) -> str:
        told = f"solver={self.solver}, gradient={self.gradient}"
        if self.eval_solver is not None:
            told += f", eval_solver={self.eval_solver}"
        return told if self.batched else f"{told}, batched=False"

    def __prepare_scriptable__(self) -> Never:
        """What `torch.jit.script` asks of every module that it comes to."""
        raise RuntimeError(
            f"gdeq: torch.jit.script does not know what a solve is made of; {EXPORT}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The record is of one call; copies and pickles of the layer start without it.
        state = {**super().__getstate__(), "_groups": ()}
        del state["_of_thread"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._of_thread = threading.local()


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _through_z(f: Callable[[State], State], z: State) -> State:
    """f of a z that has gradients, without which reentrant checkpointing makes none for weights."""
    if torch.is_grad_enabled():
        z = pytree.tree_map(lambda z: z if z.requires_grad else z.detach().requires_grad_(), z)
    return f(z)


def _batch_of_one(z: State) -> State:
    return pytree.tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, z)


def _only_one(z: State) -> State:
    return pytree.tree_map(lambda leaf: leaf.squeeze(0), z)


def mixed_start(
    z0: State, share: float = 0.5, scale: float = 1.0, generator: torch.Generator | None = None
) -> State:
    """Replace about this share of the samples in z0 with normal noise.

    A model trained from such starts tends to have a single equilibrium, whatever the start.

    z0: a state ``(batch, ...)``, such as zeros.
    share: the probability that a sample is replaced.
    scale: the standard deviation of the noise.

    Examples:
        >>> import torch, gdeq
        >>> z0 = gdeq.mixed_start(torch.zeros(100, 3))
        >>> 20 < (z0 == 0).all(1).sum() < 80  # about half of the samples start at zero
        tensor(True)
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, got {share!r}")
    space = StateSpace(z0)
    noisy = torch.rand(space.batch, generator=generator, device=space.device) < share

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
