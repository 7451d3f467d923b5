"""`fixed_steps`: a model whose solves are the same operations for every input."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from gdeq.context import is_exporting
from gdeq.gradients import Unrolled
from gdeq.holding import check_module
from gdeq.layer import DEQ
from gdeq.options import count_of
from gdeq.state import State

M = TypeVar("M", bound=nn.Module)


class FixedSteps(DEQ):
    """A `DEQ` that `torch.compile` traces with the model around it."""

    def forward(self, *inputs: Any, z0: State = None, **options: Any) -> State:
        compiling = torch.compiler.is_compiling() and not is_exporting()
        products = self.gradient.needs.vjp and not isinstance(self.gradient, Unrolled)
        if compiling and products and torch.is_grad_enabled():
            raise RuntimeError(
                f"gdeq: {type(self.gradient).__name__} with these options computes VJPs in the "
                "backward pass, which torch.compile cannot trace; use gradient GDEQ(), JFB() or "
                "Unrolled(), or torch.no_grad()"
            )
        return _forward(self, *inputs, z0=z0, **options)


_forward = inspect.unwrap(DEQ.forward)


def fixed_steps(model: M, steps: int | None = None) -> M:
    """Make every `DEQ` in ``model`` take a fixed number of solver steps.  Changes it in place.

    The model is then a single graph, as ``torch.compile(model, fullgraph=True)`` needs, and
    ``torch.export.export`` and ``torch.onnx.export`` make a smaller and faster program.  Without
    it, export works too: a solve with a tolerance then makes all ``max_iter`` steps and freezes
    converged samples, as it does eagerly.

    steps: the number of steps; by default the ``max_iter`` of each solver.

    Examples:
        >>> import torch, gdeq
        >>> linear = torch.nn.Linear(4, 4)
        >>> deq = gdeq.fixed_steps(gdeq.DEQ(lambda z, x: torch.tanh(0.5 * linear(z) + x)), steps=8)
        >>> with torch.no_grad():
        ...     program = torch.export.export(deq, (torch.randn(2, 4),))
        ...     z = program.module()(torch.randn(2, 4))
        >>> z.shape
        torch.Size([2, 4])
    """
    if steps is not None:
        count_of("steps", steps, 1)
    check_module("gdeq.fixed_steps", model)
    layers = [module for module in model.modules() if isinstance(module, DEQ)]
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no gdeq.DEQ")
    for layer in layers:
        if type(layer) not in (DEQ, FixedSteps):
            raise TypeError(
                f"{type(layer).__name__} has a forward of its own; put a plain gdeq.DEQ inside it"
            )
        layer.__class__ = FixedSteps
        for name in ("solver", "eval_solver"):
            solver = getattr(layer, name)
            if solver is not None:
                setattr(layer, name, replace(solver, tol=0.0, max_iter=steps or solver.max_iter))
    return model
