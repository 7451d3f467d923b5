"""How close each gradient comes to the exact one on a trained model: the paper's cosine figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdeq.data import Batches
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured
from gdeq.models.mdeq import MDEQ
from gdeq.solvers import GMRES, Solver

METHODS: dict[str, Gradient] = {
    "JFB": Measured(JFB()),
    "GDEQ": Measured(GDEQ()),
    "GDEQ refine 1": GDEQ(refine=1),
    "GDEQ refine 2": GDEQ(refine=2),
    "GDEQ refine 4": GDEQ(refine=4),
    "NPG": NPG(steps=5, damping=0.5),
}
EXACT = Implicit(GMRES(max_iter=100, tol=1e-6), double_backward=False)


def similarity(
    model: MDEQ, batches: Batches, solver: Solver, count: int, epoch: int
) -> Iterator[dict[str, Any]]:
    """One record for each method and mini-batch.

    Compared are the gradients of what lies at and before the equilibrium (cell and stem); those of
    the head are the same for all.  Dropout is off, so that all see one function.
    """
    model.eval()
    for index, (images, labels) in batches.epoch(epoch):
        if index >= count:
            return
        exact, record = _gradient(model, solver, EXACT, images, labels)
        exact_residual = record.residual.max().item()
        size = exact.norm()
        for name, method in METHODS.items():
            found, record = _gradient(model, solver, method, images, labels)
            yield {
                "epoch": epoch,
                "batch": index,
                "method": name,
                "vjps": record.vjps,
                "cosine": (found @ exact / (found.norm() * size)).item(),
                "relative_error": ((found - exact).norm() / size).item(),
                "adjoint_residual": record.residual.median().item(),
                "exact_residual": exact_residual,
            }


def _gradient(
    model: MDEQ, solver: Solver, method: Gradient, images: Tensor, labels: Tensor
) -> tuple[Tensor, Any]:
    model.deq.solver, model.deq.gradient = solver, method
    loss = cross_entropy(model(images), labels)
    model.zero_grad(set_to_none=True)
    loss.backward()  # not autograd.grad: the pass down to z measures the residual
    parts = [*model.deq.parameters(), *model.stem.parameters()]
    flat = torch.cat([p.grad.double().flatten() for p in parts if p.grad is not None])
    model.zero_grad(set_to_none=True)
    assert model.deq.solution is not None
    return flat, model.deq.solution.record
