"""How close each gradient comes to the exact one on a trained model: the paper's cosine figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdeq.data import Batches
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured
from gdeq.models.mdeq import MDEQ
from gdeq.regularize import hold, spectral_radius
from gdeq.solvers import GMRES, Broyden, Solver
from gdeq.training.config import Config
from gdeq.training.loop import precision


def exact(tol: float, steps: int = 300) -> Implicit:
    """GMRES far below ``tol``: an ill-conditioned system makes more of what it leaves."""
    return Implicit(GMRES(max_iter=steps, tol=tol / 100), double_backward=False)


METHODS: dict[str, Gradient] = {
    # An exact backward pass from where the run's solver stops: what this one lacks was lost in the
    # forward pass, by all of them.
    "Implicit": exact(1e-4),
    "JFB": Measured(JFB()),
    "GDEQ": Measured(GDEQ()),
    "GDEQ refine 1": GDEQ(refine=1),
    "GDEQ refine 2": GDEQ(refine=2),
    "GDEQ refine 3": GDEQ(refine=3),
    "GDEQ refine 4": GDEQ(refine=4),
    "NPG": NPG(steps=5, damping=0.5),
}
# The exact gradient is that of the equilibrium itself, not of where the run's solver stops.  Steps
# of the two solves behind it; the second pair is for where the first was not enough.
BUDGETS = ((100, 300), (400, 600))
EQUILIBRIUM_TOL = 1e-6
POWER_STEPS = 40  # VJPs for the spectral radius
# Without TF32 or bf16: compared are the methods, not the arithmetic they were trained in.
FULL = Config(precision="float32")


@dataclass(frozen=True)
class Found:
    """One gradient, and how well the two solves behind it went: the worst sample of each."""

    gradient: Tensor
    forward_residual: float
    backward_residual: Tensor  # (batch,)
    vjps: int


def solver_for(method: Gradient, solver: Solver) -> Solver:
    """The run's own solver; for GDEQ, which reuses Broyden's inverse, Broyden with its limits."""
    if solver.keeps_inverse or not method.uses_inverse:
        return solver
    return Broyden(max_iter=solver.max_iter, tol=solver.tol)


def similarity(
    model: MDEQ,
    batches: Batches,
    solver: Solver,
    count: int,
    epoch: int,
    exact_tol: float = 1e-4,
    methods: dict[str, Gradient] | None = None,
) -> Iterator[dict[str, Any]]:
    """One record for each method (of `METHODS`, or of those given) and mini-batch.

    Compared is the gradient that each method gives with the run's solver, of the plain
    cross-entropy of these images, with the exact one at the equilibrium, solved as tightly as
    float32 allows.  Of the parameters, those at and before the equilibrium count (cell and stem);
    the head's are no matter of the method.  Dropout is off and batch norm as in the test, so that
    all see one function.  The spectral radius of ∂f/∂z at the equilibrium is that of the middle and
    of the worst sample, the same in all records of a mini-batch.
    """
    model.eval()
    for index, (images, labels) in batches.epoch(epoch):
        if index >= count:
            return
        # Closed before a record is handed out: the caller's arithmetic is not ours to change.
        with precision(FULL, images.device):
            own = METHODS if methods is None else methods
            records = list(_compare(model, solver, exact_tol, own, images, labels))
        for record in records:
            yield {"epoch": epoch, "batch": index, **record}


def methods_for(config: Config, alone: bool = False) -> dict[str, Gradient]:
    """`METHODS`, and the run's own where it is none of them; or its own alone."""
    own = config.gradient.build()
    if isinstance(own, GDEQ) and own.tolerance is not None:
        added: dict[str, Gradient] = {f"GDEQ tolerance {own.tolerance}": own}
        return added if alone else {**METHODS, **added}
    if not alone:
        return METHODS
    same = {n: m for n, m in METHODS.items() if m in (own, Measured(own))}
    return same or METHODS  # Implicit, and refinements that are not in the list


def _compare(
    model: MDEQ,
    solver: Solver,
    exact_tol: float,
    methods: dict[str, Gradient],
    images: Tensor,
    labels: Tensor,
) -> Iterator[dict[str, Any]]:
    truth, radius = _truth(model, exact_tol, images, labels)
    size = truth.gradient.norm()
    for name, method in methods.items():
        own = solver_for(method, solver)
        found = _gradient(model, own, method, images, labels)
        product = found.gradient @ truth.gradient
        yield {
            "method": name,
            "solver": type(own).__name__,
            "vjps": found.vjps,
            "cosine": (product / (found.gradient.norm() * size)).item(),
            "relative_error": ((found.gradient - truth.gradient).norm() / size).item(),
            "forward_residual": found.forward_residual,
            "adjoint_residual": found.backward_residual.median().item(),
            "exact_forward_residual": truth.forward_residual,
            "exact_residual": truth.backward_residual.max().item(),
            "exact_tol": exact_tol,
            "spectral_radius": radius.median().item(),
            "spectral_radius_max": radius.max().item(),
        }


def _truth(model: MDEQ, tol: float, images: Tensor, labels: Tensor) -> tuple[Found, Tensor]:
    """The exact gradient, and the spectral radius (batch,) at its equilibrium."""
    for forward, backward in BUDGETS:
        solver = Broyden(max_iter=forward, tol=EQUILIBRIUM_TOL)
        truth = _gradient(model, solver, exact(tol, backward), images, labels)
        if truth.forward_residual <= tol and truth.backward_residual.max().item() <= tol:
            break  # NaN is neither
    return truth, _radius(model, images)


def _radius(model: MDEQ, images: Tensor) -> Tensor:  # (batch,)
    """At the solution of the last call."""
    deq = model.deq
    assert deq.solution is not None
    z = deq.solution.z
    with torch.no_grad():
        injection = model.stem(images)
    generator = torch.Generator(images.device).manual_seed(0)
    with hold(deq.cell):
        return spectral_radius(lambda z: deq.cell(z, injection), z, POWER_STEPS, generator)


def _gradient(
    model: MDEQ, solver: Solver, method: Gradient, images: Tensor, labels: Tensor
) -> Found:
    model.deq.solver, model.deq.gradient = solver, method
    loss = cross_entropy(model(images), labels)
    model.zero_grad(set_to_none=True)
    loss.backward()  # not autograd.grad: the pass down to z measures the residual
    parts = [*model.deq.parameters(), *model.stem.parameters()]
    flat = torch.cat([p.grad.double().flatten() for p in parts if p.grad is not None])
    model.zero_grad(set_to_none=True)
    solution = model.deq.solution
    assert solution is not None
    assert solution.record.residual is not None
    return Found(
        flat,
        solution.residual.max().item(),
        solution.record.residual,
        solution.record.vjps,
    )
