"""`DEQ`: an equilibrium layer around the user's cell."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor, nn

from gdeq.fixed_point import check_pair, find, find_all
from gdeq.gradients import DEFAULT, Gradient
from gdeq.holding import hold
from gdeq.options import describe
from gdeq.solution import Solution
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, copied
from gdeq.tracing import is_traced, uncompiled


class UnsteadyCellWarning(UserWarning):
    """The cell is not one function while its fixed point is sought."""


UNSTEADY = (
    (
        (
            *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
            *(nn.AlphaDropout, nn.FeatureAlphaDropout),
        ),
        "draws a new mask at every evaluation: use gdeq.VariationalDropout, which keeps one",
    ),
    (
        (nn.MultiheadAttention, nn.RNNBase),
        "draws a new dropout mask at every evaluation: set its dropout to 0",
    ),
    (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        "mixes the samples of a batch and moves its averages at every evaluation: use nn.GroupNorm",
    ),
)


# Where z0 came from, for errors of a solve to which none was given.
FROM_ZEROS = (
    "gdeq: no z0 was given, so the solve started from zeros like x; if z has another shape than x, "
    "call deq(x, z0=...) or give the cell a method initial_state(x)"
)


class DEQ(nn.Module):
    """An equilibrium layer: z = cell(z, x), solved.

    cell: a module or function ``cell(z, x, ...)`` that returns a new z of the same form.  The
        parameters of a function are not known to the layer, nor is dropout in it held still.
    solver, gradient: may be replaced at any time (pre-train with ``Unrolled``, then switch).

    A solve starts from the ``z0`` of the call; else from ``cell.initial_state(x, ...)`` where the
    cell has such a method; else from zeros like x.  ``solution`` is the record of the last call.
    Its z is detached, and it keeps the solver's inverse in memory until the next call.
    """

    _warned = False  # of unsteady parts: once a layer

    def __init__(
        self,
        cell: Callable[..., State],
        solver: Solver | None = Broyden(max_iter=18, tol=1e-3),  # noqa: B008 (frozen)
        gradient: Gradient = DEFAULT,
        **unknown: Never,
    ) -> None:
        super().__init__()
        for key in unknown:
            names = ("cell", "solver", "gradient")
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"DEQ has no option {key!r}{hint} (options: {', '.join(names)})")
        if not callable(cell) or isinstance(cell, type):
            raise TypeError(f"cell must be a module or function cell(z, x), got {describe(cell)}")
        check_pair(solver, gradient)
        self.cell = cell
        self.solver = solver
        self.gradient = gradient
        self.solution: Solution | None = None

    @uncompiled
    def forward(self, *inputs: Any, z0: State = None, **options: Any) -> State:
        """The fixed point z = cell(z, *inputs, **options), with gradients.

        z0: where the solve starts.
        """
        self.solution = None  # frees the last call's inverse before this one grows
        from_zeros = z0 is None and not hasattr(self.cell, "initial_state")
        if z0 is None:
            z0 = self._initial_state(*inputs, **options)
        if self.solver is not None and not self._warned:  # unrolled, a mask a step is no harm
            self._warn_of_unsteady_parts()
        try:
            return self.equilibrium(lambda z: self.cell(z, *inputs, **options), z0)
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
        """The states after these solver steps and, last, the fixed point (`gdeq.trajectory`)."""
        self.solution = None
        z0 = self._initial_state(*inputs, **options) if z0 is None else z0
        with hold(self.cell):
            f = lambda z: self.cell(z, *inputs, **options)  # noqa: E731
            states, solution = find_all(f, z0, self.solver, self.gradient, at)
        if not is_traced():
            self.solution = replace(solution, z=copied(solution.z))
        return states

    def equilibrium(self, f: Callable[[State], State], z0: State) -> State:
        """The fixed point of ``f`` from ``z0`` by this layer's solver and gradient.

        For an f that stands in for the cell: dropout masks and normalised weights in the cell do
        not change meanwhile, and `solution` is the record.
        """
        self.solution = None  # frees the last call's inverse before this one grows
        with hold(self.cell):
            z, solution = find(f, z0, self.solver, self.gradient)
        if is_traced():  # a record would outlive what its tensors stand for
            return z
        if solution.z is z:  # it must stay what it is when the caller changes the output in place
            solution = replace(solution, z=copied(z))
        self.solution = solution
        return z

    def _initial_state(self, *inputs: Any, **options: Any) -> State:
        """Where a solve starts without ``z0``."""
        make = getattr(self.cell, "initial_state", None)
        if make is not None:
            return make(*inputs, **options)
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0:
            return torch.zeros_like(x)
        why = "without either, it starts as zeros like a tensor x, and there is none"
        if isinstance(x, Tensor) and not x.is_floating_point():
            why = f"x is {x.dtype}, and a state must be floating point, so it cannot start like x"
        elif inputs and not isinstance(x, Tensor):
            why = f"x must be a tensor to start as zeros like it, got {type(x).__name__}"
        elif options:
            why = f"pass {(name := next(iter(options)))} by position, deq({name}), to start like it"
        raise ValueError(
            "the shape of the state is not known: call deq(x, z0=...), or give the cell a method "
            f"initial_state(x) that returns one ({why})"
        )

    def _warn_of_unsteady_parts(self) -> None:
        if not isinstance(self.cell, nn.Module):
            return  # the module of a bound method may use such parts outside the cell
        told = []
        for kinds, why in UNSTEADY:
            for name, module in self.cell.named_modules():
                rate = getattr(module, "p", getattr(module, "dropout", 1))
                if isinstance(module, kinds) and module.training and rate > 0:
                    told.append(f"{type(module).__name__} ({name or 'the cell itself'}) {why}")
                    break
        if told:
            self._warned = True
            warnings.warn(
                f"{type(self.cell).__name__} in training mode is not one function during a solve, "
                f"which need not converge: {'; '.join(told)}",
                UnsteadyCellWarning,
                stacklevel=1,
            )

    def extra_repr(self) -> str:
        return f"solver={self.solver}, gradient={self.gradient}"

    def __getstate__(self) -> dict[str, Any]:
        # The record is of one call; copies and pickles of the layer start without it.
        return {**super().__getstate__(), "solution": None}


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
