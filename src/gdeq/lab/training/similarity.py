"""How close each gradient comes to the exact one on a trained model: the paper's cosine figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Measured, relative_norm
from gdeq.lab.data import Batches
from gdeq.lab.training.config import Config
from gdeq.lab.training.loop import precision
from gdeq.models.mdeq import MDEQ
from gdeq.regularize import hold, spectral_radius
from gdeq.solution import Cotangent, Solution
from gdeq.solvers import GMRES, Broyden, Solver
from gdeq.solvers.base import select
from gdeq.state import Vectorized


def exact(tol: float, steps: int = 300) -> Implicit:
    """GMRES far below ``tol``: an ill-conditioned system makes more of what it leaves."""
    return Implicit(GMRES(max_iter=steps, tol=tol / 100), double_backward=False)


class Sifting(Gradient):
    """Exact, of the samples that are solved to ``tol``: the others' w is 0.

    Samples do not mix, so the gradient is the one of those samples' loss: no second solve for it.
    """

    def __init__(self, tol: float, steps: int) -> None:
        self.tol, self.method = tol, exact(tol, steps)
        self.kept: Tensor | None = None  # (batch,)

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        found = self.method.cotangent(v, vjp, solution)
        # Measured, whatever the solver says of itself: one w that is not solved spoils the sum.
        residual = relative_norm(v + vjp(found.w) - found.w, v)
        self.kept = residual <= self.tol
        w = select(self.kept, found.w, torch.zeros_like(v))
        return replace(found, w=w, vjps=found.vjps + 1, residual=residual)


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
    "GDEQ tolerance 0.1": GDEQ(tolerance=0.1, max_refine=5),
    "NPG": NPG(steps=5, damping=0.5),
}
# The exact gradient is that of the equilibrium itself, not of where the run's solver stops.  Steps
# of the two solves behind it: a sample that needs more is left out, and counted.
EQUILIBRIUM_STEPS, ADJOINT_STEPS = 200, 300
EQUILIBRIUM_TOL = 1e-6
POWER_STEPS = 40  # VJPs for the spectral radius
# Without TF32 or bf16: compared are the methods, not the arithmetic they were trained in.
FULL = Config(precision="float32")


@dataclass(frozen=True)
class Found:
    """The gradient of some samples' loss, and how well the two solves behind it went."""

    gradient: Tensor
    losses: Tensor  # (batch,)
    taken: Tensor  # (batch,): whose loss it is the gradient of
    forward_residual: Tensor  # (batch,)
    backward_residual: Tensor  # (batch,); 0 for samples that are not taken
    vjps: int

    def worst(self, residual: Tensor) -> float | None:
        return residual[self.taken].max().item() if self.taken.any() else None


def solver_for(method: Gradient, solver: Solver) -> Solver:
    """The run's own solver; for GDEQ, which reuses Broyden's inverse, Broyden with its limits."""
    if solver.keeps_inverse or not method.needs_inverse:
        return solver
    return Broyden(max_iter=solver.max_iter, tol=solver.tol, stop=solver.stop)


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
    all see one function.

    A sample whose equilibrium or adjoint is not found to ``exact_tol`` has no exact gradient: its
    loss is in neither gradient; "solved" says how many of the "samples" are left, and how much of
    the loss.  Those are the easier ones, and runs with other shares are not quite comparable.  So
    there is a second comparison, "here": with the exact backward pass from where the run's solver
    stops, which nearly all samples have ("solved_here").  It tells what the backward pass loses
    alone, the first one what both passes do.

    The spectral radius of ∂f/∂z at the equilibrium is that of the middle and of the worst solved
    sample, the same in all records of a mini-batch.
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


def methods_for(config: Config) -> dict[str, Gradient]:
    """`METHODS`, and the run's own where it is another one with a tolerance."""
    own = config.gradient.build()
    if isinstance(own, GDEQ) and own.tolerance is not None:
        return {**METHODS, f"GDEQ tolerance {own.tolerance}": own}
    return METHODS


def _compare(
    model: MDEQ,
    solver: Solver,
    exact_tol: float,
    methods: dict[str, Gradient],
    images: Tensor,
    labels: Tensor,
) -> Iterator[dict[str, Any]]:
    samples = len(images)
    images, labels = _sound(model, solver, images, labels)
    tight = Broyden(max_iter=EQUILIBRIUM_STEPS, tol=EQUILIBRIUM_TOL, stop="whole")
    truth = _exact(model, tight, exact_tol, exact_tol, images, labels)
    radius = _radius(model, images)[truth.taken]
    here: dict[Solver, Found] = {}  # of each solver that a method wants
    for name, method in methods.items():
        own = solver_for(method, solver)
        if own not in here:
            here[own] = _exact(model, own, float("inf"), exact_tol, images, labels)
        same = torch.equal(here[own].taken, truth.taken)
        if name == "Implicit" and same:
            found = found_here = here[own]
        else:
            found = _gradient(model, own, method, images, labels, truth.taken)
            found_here = found
            if not same:
                found_here = _gradient(model, own, method, images, labels, here[own].taken)
        cosine, error = _beside(found.gradient, truth.gradient)
        cosine_here, error_here = _beside(found_here.gradient, here[own].gradient)
        if found_here is here[own]:  # that is what "here" is
            cosine_here = error_here = None
        yield {
            "method": name,
            "solver": type(own).__name__,
            "vjps": found.vjps,
            "samples": samples,
            "equilibria": int((truth.forward_residual <= exact_tol).sum()),
            "solved": int(truth.taken.sum()),
            "solved_share_of_loss": _share(found.losses, truth.taken),
            "cosine": cosine,
            "relative_error": error,
            "solved_here": int(here[own].taken.sum()),
            "cosine_here": cosine_here,
            "relative_error_here": error_here,
            "forward_residual": found.worst(found.forward_residual),
            "adjoint_residual": _middle(found_here.backward_residual[found_here.taken]),
            "exact_forward_residual": truth.worst(truth.forward_residual),
            "exact_residual": truth.worst(truth.backward_residual),
            "exact_residual_here": here[own].worst(here[own].backward_residual),
            "exact_tol": exact_tol,
            "spectral_radius": _middle(radius),
            "spectral_radius_max": radius.max().item() if len(radius) else None,
        }


def _sound(model: MDEQ, solver: Solver, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Those that are finite: zero times another one would be in the gradient of all."""
    model.deq.solver, model.deq.gradient = solver, METHODS["JFB"]
    with torch.no_grad():
        losses = cross_entropy(model(images), labels, reduction="none")
    assert model.deq.solution is not None
    finite = losses.isfinite() & model.deq.solution.residual.isfinite()
    if not finite.any():
        raise RuntimeError(
            "f or the loss is finite for no image of a mini-batch: nothing to compare"
        )
    return images[finite], labels[finite]


def _middle(values: Tensor) -> float | None:
    return values.median().item() if len(values) else None


def _share(values: Tensor, some: Tensor) -> float:
    return (values[some].sum() / values.sum()).item()


def _beside(found: Tensor, truth: Tensor) -> tuple[float | None, float | None]:
    """Cosine and relative error; none where no sample has a truth."""
    size = truth.norm()
    if not size > 0:
        return None, None
    cosine = (found @ truth) / (found.norm() * size)
    return cosine.item(), ((found - truth).norm() / size).item()


def _exact(
    model: MDEQ, solver: Solver, forward: float, backward: float, images: Tensor, labels: Tensor
) -> Found:
    """The exact gradient at the solver's result, of the samples that are solved to these residuals.

    NaN is no residual to be content with.
    """
    method = Sifting(backward, ADJOINT_STEPS)
    found = _gradient(model, solver, method, images, labels, forward)
    assert method.kept is not None
    good = found.taken & method.kept
    # The loss was the mean over those taken; it is to be the mean over the good ones.
    share = found.taken.sum() / good.sum().clamp(min=1)
    residual = torch.where(good, found.backward_residual, 0.0)
    return replace(found, gradient=found.gradient * share, taken=good, backward_residual=residual)


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
    model: MDEQ,
    solver: Solver,
    method: Gradient,
    images: Tensor,
    labels: Tensor,
    which: Tensor | float,
) -> Found:
    """which: the samples whose loss counts, or how large their forward residual may be."""
    model.deq.solver, model.deq.gradient = solver, method
    losses = cross_entropy(model(images), labels, reduction="none")
    solution = model.deq.solution
    assert solution is not None
    taken = which if isinstance(which, Tensor) else solution.residual <= which
    loss = torch.where(taken, losses, 0.0).sum() / taken.sum().clamp(min=1)
    model.zero_grad(set_to_none=True)
    loss.backward()  # not autograd.grad: the pass down to z measures the residual
    parts = [*model.deq.parameters(), *model.stem.parameters()]
    flat = torch.cat([p.grad.double().flatten() for p in parts if p.grad is not None])
    model.zero_grad(set_to_none=True)
    assert solution.record.residual is not None
    backward = torch.where(taken, solution.record.residual, 0.0)
    losses = losses.detach()
    return Found(flat, losses, taken, solution.residual, backward, solution.record.vjps)
