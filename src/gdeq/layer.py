"""`DEQ`: an equilibrium layer around the user's cell."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor, nn

from gdeq import narrowing
from gdeq.fast import product
from gdeq.fast.kernels import choice
from gdeq.fast.recording import recording
from gdeq.fixed_point import check_pair, solve_and_attach
from gdeq.gradients import DEFAULT, Gradient
from gdeq.hooks import unwatched
from gdeq.options import describe
from gdeq.regularize import hold
from gdeq.solution import Solution
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden
from gdeq.state import State, StateError, conformed, copied, matched
from gdeq.uncompiled import uncompiled


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
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        "mixes the samples of a batch and moves its averages at every evaluation: use nn.GroupNorm",
    ),
)


# How far at_initial_state may be from a call, relative to it: another algorithm, TF32.
FAR = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.02, torch.float64: 1e-6}

# Where z0 came from, for errors of a solve to which none was given.
FROM_ZEROS = (
    "gdeq: no z0 was given, so the solve started from zeros like x; if z has another shape than x, "
    "call deq(x, z0=...) or give the cell a method initial_state(x)"
)
FROM_START = (
    "gdeq: no z0 was given, so the solve started from what start(x) returned; if z has another "
    "shape than that, the fault is there"
)


class DEQ(nn.Module):
    """z = cell(z, x), solved.

    cell: a module or function ``cell(z, x, ...)`` that returns a new z of the same form.  The
        parameters of a function are not known to the layer, nor is dropout in it held still.
    solver, gradient: may be replaced at any time (pre-train with ``Unrolled``, then switch).

    narrow: in a solve with a tolerance, samples that are done leave the batch: when half are done,
        the cell is called for the other half alone, and so on down to 16 samples.  The results are
        the same up to rounding.  Only in eval mode, and by `Broyden` or `Anderson` on a GPU (where
        `gdeq.fast.product` runs).  The cell must treat samples independently and take a smaller
        batch: z and each tensor in its inputs (nested in tuples, lists and dicts) whose first
        dimension is the batch size are cut to the samples left, all else is handed over as it is.
        The first time (after training, for each cell, shape and flag or number among the inputs)
        both ways are compared: a cell that gives something else for some samples alone is refused
        with a `gdeq.NarrowError`; so is a list with one entry for each sample.  Else is what
        differs by more than 50 roundings or a tenth of the tolerance; in half precision and TF32,
        by 2 per cent, in bfloat16 by 5: less cannot be told from rounding.  A cell that is changed
        in another way than by training needs ``deq.train()`` and ``deq.eval()`` to be compared
        again.  Where no sample can leave, that is said once.

    start: a module or function ``start(x, ...)`` of the cell's inputs that returns a state close to
        the fixed point, for fewer steps (`gdeq.fit_start` fits one).  No gradient flows through it:
        the fixed point does not depend on where its solve began.

    ``lends``, False unless set, says that nobody changes in place the z that is returned, until the
    backward pass, nor the cell z0: they are then not copied, and the former lies where ``solution``
    and the graph of f read it.

    ``z0`` is taken from the call; else from ``start``; else from ``cell.initial_state(x, ...)``
    where the cell has such a method (which also says what form ``start`` must return); else it is
    zeros like x.  ``solution`` is the record of the last call (its z is
    detached; it keeps the solver's inverse in memory until the next call).

    A cell whose f is cheaper at its initial state than elsewhere may say so by a method
    ``at_initial_state(x, ...)`` that returns ``cell(cell.initial_state(x, ...), x, ...)``, or None
    for a call as usual.  It is called without autograd, for the first evaluation of a solve that
    begins there; not where the cell itself has hooks, nor where a subclass has another ``forward``
    or ``initial_state`` and no such method of its own.  At a layer's first call both ways are taken
    and compared.
    """

    _warned = False  # of unsteady parts: once a layer
    _told_idle = False  # that no sample can leave: once a layer
    _first_known = False  # at_initial_state has been compared with a call
    lends = False

    def __init__(
        self,
        cell: Callable[..., State],
        solver: Solver | None = Broyden(max_iter=18, tol=1e-3),  # noqa: B008 (frozen)
        gradient: Gradient = DEFAULT,
        narrow: bool = False,
        start: Callable[..., State] | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        for key in unknown:
            names = ("cell", "solver", "gradient", "narrow", "start")
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"DEQ has no option {key!r}{hint} (options: {', '.join(names)})")
        if not callable(cell) or isinstance(cell, type):
            raise TypeError(f"cell must be a module or function cell(z, x), got {describe(cell)}")
        check_pair(solver, gradient)
        self.narrow = narrow
        self._check_narrow()
        self.cell = cell
        self.start = start
        self._check_start()
        self.solver = solver
        self.gradient = gradient
        self.solution: Solution | None = None
        self._narrowed_well: set[Any] = set()

    @uncompiled
    def forward(self, *inputs: Any, z0: State = None, **options: Any) -> State:
        self.solution = None  # frees the last call's inverse before this one grows
        note, first = "", None
        if z0 is None:
            if self.start is not None:
                z0, note = self._started(*inputs, **options), FROM_START
            else:
                z0 = self._initial_state(*inputs, **options)
                first = self._first(inputs, options)
                note = "" if hasattr(self.cell, "initial_state") else FROM_ZEROS
        if self.solver is not None and not self._warned:  # unrolled, a mask a layer is no harm
            self._warn_of_unsteady_parts()
        with hold(self.cell):
            try:
                z, solution = solve_and_attach(
                    self._map(inputs, options),
                    z0,
                    self.solver,
                    self.gradient,
                    first,
                    self.lends,
                )
            except Exception as problem:
                if note:
                    problem.add_note(note)
                if not _takes(self.cell, z0, *inputs, **options):
                    problem.add_note(
                        "gdeq: the cell is called as cell(z, x) with the x that deq(x) was given, "
                        "and returns the next z; wrap what takes other arguments: "
                        "DEQ(lambda z, x: torch.tanh(linear(z) + x))"
                    )
                raise
        if solution.z is z:  # it must stay what it is when the caller works on the output in place
            solution = replace(solution, z=copied(z))
        self.solution = solution
        if self.narrow and not self.training and not self._told_idle:
            self._warn_of_idle_narrowing(solution.residual)
        return z

    def train(self, mode: bool = True) -> DEQ:
        if mode:  # the cell may become another function
            self._narrowed_well.clear()
        return super().train(mode)

    def _check_narrow(self) -> None:
        if not isinstance(self.narrow, bool):
            raise TypeError(f"narrow must be True or False, got {describe(self.narrow)}")

    def _warn_of_idle_narrowing(self, on_device: Tensor) -> None:
        solver = self.solver
        if solver is None or not product.takes(solver, solver.max_iter):
            why = (
                "samples leave a solve by Broyden(memory=None) or Anderson(memory<="
                f"{product.MOST_DIFFERENCES}), not {solver}"
            )
        elif solver.tol == 0:
            why = "with tol=0 no sample is done before the others: give the solver a tolerance"
        elif choice.chosen(on_device) == "off":
            why = "samples leave where a solve is kept as its steps: on a GPU with Triton"
        else:
            return
        self._told_idle = True
        warnings.warn(f"narrow=True has no effect here: {why}", UserWarning, stacklevel=1)

    def _map(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Callable[[State], State]:
        self._check_narrow()  # it may have been set since
        if self.narrow and not self.training and narrowing.allowed(self.cell):
            return narrowing.CellOnInputs(self.cell, inputs, options, self._narrowed_well)
        return lambda z: self.cell(z, *inputs, **options)

    def _first(
        self, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[[State], State] | None:
        """f at the cell's initial state, where the cell may have a cheaper way to it."""
        shortcut = self._shortcut()
        if shortcut is None:
            return None

        def first(z: State) -> State:
            try:
                found = shortcut(*inputs, **options)
            except Exception as problem:
                problem.add_note("gdeq: in the cell's at_initial_state, for the first evaluation")
                raise
            if found is None:
                return self.cell(z, *inputs, **options)
            if not self._first_known:
                self._compare_first(found, self.cell(z, *inputs, **options))
            return found

        return first

    def _compare_first(self, found: State, expected: State) -> None:
        """Once a layer: a wrong at_initial_state would be an f of its own, and go unnoticed."""
        pairs = matched(found, expected, "what at_initial_state returned")
        if recording(pairs[0][0].device):  # where nothing can be read
            return
        self._first_known = True
        apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
        size = sum(float(b.double().square().sum()) for _, b in pairs)
        limit = max(FAR.get(b.dtype, FAR[torch.float32]) for _, b in pairs)
        if apart > limit**2 * size:  # (what is not finite is the solver's to judge)
            share = f"{(apart / size) ** 0.5:.0%}" if size else "all of it"
            raise StateError(
                "the cell's at_initial_state(x) does not return what cell(initial_state(x), x) "
                f"does: they differ by {share}.  It is the first evaluation of f, not the state "
                "where it is made; leave it out if f is not cheaper there"
            )

    def _shortcut(self) -> Callable[..., State] | None:
        """The cell's ``at_initial_state``, if a call without z0 will use it."""
        begins_there = self.solver is not None and self.start is None
        return _at_initial_state(self.cell) if begins_there else None

    def _check_start(self) -> None:
        if self.start is not None and (not callable(self.start) or isinstance(self.start, type)):
            raise TypeError(
                f"start must be a module or function start(x), got {describe(self.start)}"
            )

    def _started(self, *inputs: Any, **options: Any) -> State:
        self._check_start()  # it may have been set since
        assert self.start is not None
        with torch.no_grad():
            z0 = self.start(*inputs, **options)
        x = inputs[0] if inputs else None
        if hasattr(self.cell, "initial_state"):
            like = self._initial_state(*inputs, **options)
        elif isinstance(z0, Tensor) and isinstance(x, Tensor) and z0.shape == x.shape:
            like = x if x.is_floating_point() else z0
        else:
            like = z0  # the form of the state is not known otherwise
        return conformed(z0, like, "what start returned")

    def _initial_state(self, *inputs: Any, **options: Any) -> State:
        """Where a solve begins without ``z0`` and ``start``."""
        make = getattr(self.cell, "initial_state", None)
        if make is not None:
            return make(*inputs, **options)
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0:
            return torch.zeros_like(x)
        if isinstance(x, Tensor) and not x.is_floating_point():
            raise ValueError(
                f"the shape of the state is not known: x is {x.dtype}, and a state must be "
                "floating point, so it cannot start as zeros like x; call deq(x, z0=...), or give "
                "the cell a method initial_state(x)"
            )
        if not inputs and options:
            first = next(iter(options))
            raise ValueError(
                f"the shape of the state is not known: pass {first} by position, deq({first}), so "
                "that it can start as zeros like it; or call deq(x, z0=...), or give the cell a "
                "method initial_state(x)"
            )
        if inputs and not isinstance(x, Tensor):
            raise ValueError(
                f"the shape of the state is not known: x must be a tensor, got {type(x).__name__}, "
                "so that it can start as zeros like x; else call deq(x, z0=...), or give the cell "
                "a method initial_state(x)"
            )
        raise ValueError(
            "the shape of the state is not known: call deq(x, z0=...), or give the cell a method "
            "initial_state(x) that returns one (without either, zeros like a tensor x are used)"
        )

    def _warn_of_unsteady_parts(self) -> None:
        if not isinstance(self.cell, nn.Module):
            return  # the module of a bound method may use such parts outside the cell
        told = []
        for kinds, why in UNSTEADY:
            for name, module in self.cell.named_modules():
                if isinstance(module, kinds) and module.training and getattr(module, "p", 1) > 0:
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
        narrow = ", narrow=True" if self.narrow else ""
        if self.start is not None and not isinstance(self.start, nn.Module):
            narrow += f", start={describe(self.start)}"
        return f"solver={self.solver}, gradient={self.gradient}{narrow}"

    def __getstate__(self) -> dict[str, Any]:
        # The record is of one call; copies and pickles of the layer start without it.
        return {**super().__getstate__(), "solution": None, "_narrowed_well": set()}


def _at_initial_state(cell: Any) -> Callable[..., State] | None:
    """The method of that name, where it speaks of what a call would compute: nothing that it
    stands for is defined further down, by a subclass or for this cell alone, and no hook waits."""
    own, start = (_definer(cell, name) for name in ("at_initial_state", "initial_state"))
    if own is None or start is None or (isinstance(cell, nn.Module) and not unwatched(cell)):
        return None
    for name in ("initial_state", "forward", "__call__"):
        of_all = _definer(cell, name)
        if name in getattr(cell, "__dict__", ()) or (of_all and not issubclass(own, of_all)):
            return None
    found: Callable[..., State] = cell.at_initial_state
    return found


def _definer(cell: object, name: str) -> type | None:
    """The class that the cell has this method from."""
    return next((kind for kind in type(cell).__mro__ if name in vars(kind)), None)


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
