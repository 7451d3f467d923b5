"""How close each gradient comes to the exact one on a trained model: the paper's cosine figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gdeq import (
    GDEQ,
    GMRES,
    JFB,
    NPG,
    Broyden,
    Gradient,
    Implicit,
    Measured,
    Solution,
    Solver,
    hold,
    spectral_radius,
)
from gdeq.fixed_point import check_pair
from gdeq.lab.data import Batches
from gdeq.lab.training.learner import Learner, deq_inputs
from gdeq.lab.training.precision import precision
from gdeq.lab.training.settings import Config
from gdeq.solution import Cotangent
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
        self.kept: list[Tensor] = []  # (batch,) of each solve in the model

    def cotangent(self, v: Tensor, vjp: Vectorized, solution: Solution) -> Cotangent:
        found = self.method.cotangent(v, vjp, solution)
        # Measured, whatever the solver says of itself: one w that is not solved spoils the sum.
        left, size = ((v + vjp(found.w) - found.w).norm(dim=1), v.norm(dim=1))
        residual = torch.where(size > 0, left / size, left)
        self.kept.append(residual <= self.tol)
        w = torch.where(self.kept[-1][:, None], found.w, 0.0)
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
    try:
        check_pair(solver, method)
    except ValueError:
        return Broyden(max_iter=solver.max_iter, tol=solver.tol, stop=solver.stop)
    return solver


def similarity(
    learner: Learner,
    batches: Batches,
    solver: Solver,
    count: int,
    epoch: int,
    exact_tol: float,
) -> Iterator[dict[str, Any]]:
    """One record for each of `METHODS` and mini-batch.

    Each method's gradient with the run's solver, of the task's plain loss, is compared with the
    exact one at the equilibrium, solved as tightly as float32 allows.  Only parameters at and
    before the equilibrium count.  Dropout is off and batch norm as in the test.

    A sample whose equilibrium or adjoint is not found to ``exact_tol`` is in neither gradient:
    "solved" counts those that are left, which are the easier ones.  The spectral radius of ∂f/∂z is
    that of the middle and of the worst solved sample, the same in all records of a mini-batch.
    """
    learner.model.eval()
    for index, batch in itertools.islice(batches.epoch(epoch), count):
        # Closed before a record is handed out: the caller's arithmetic is not ours to change.
        with precision(FULL, batch[0].device):
            records = list(compare(Problem(learner, batch), solver, exact_tol, METHODS))
        for record in records:
            yield {"epoch": epoch, "batch": index, **record}


def compare(
    problem: Problem, solver: Solver, exact_tol: float, methods: dict[str, Gradient]
) -> Iterator[dict[str, Any]]:
    samples = len(problem.batch[0])
    problem.keep_finite(solver)
    truth = problem.truth(exact_tol)
    radius = problem.radius()[truth.taken]
    for name, method in methods.items():
        own = solver_for(method, solver)
        found = problem.gradient(own, method, truth.taken)
        cosine, error = _beside(found.gradient, truth.gradient)
        yield {
            "method": name,
            "solver": type(own).__name__,
            "vjps": found.vjps,
            "samples": samples,
            "equilibria": int((truth.forward_residual <= exact_tol).sum()),
            "solved": int(truth.taken.sum()),
            "solved_share_of_loss": (found.losses[truth.taken].sum() / found.losses.sum()).item(),
            "cosine": cosine,
            "relative_error": error,
            "forward_residual": found.worst(found.forward_residual),
            "adjoint_residual": _middle(found.backward_residual[found.taken]),
            "exact_forward_residual": truth.worst(truth.forward_residual),
            "exact_residual": truth.worst(truth.backward_residual),
            "exact_tol": exact_tol,
            "spectral_radius": _middle(radius),
            "spectral_radius_max": radius.max().item() if len(radius) else None,
        }


class Problem:
    """The loss of one mini-batch, and gradients of it by any solver and method."""

    def __init__(self, learner: Learner, batch: tuple[Tensor, ...]) -> None:
        self.model, self.deq, self.task = learner.model, learner.deq, learner.task
        self.batch = batch

    def losses(self, solver: Solver, method: Gradient) -> Tensor:  # -> (batch,)
        self.deq.solver, self.deq.gradient = solver, method
        x, *targets = self.batch
        return self.task.losses(self.model(x), *targets)

    @property
    def solution(self) -> Solution:
        """Of the last call."""
        assert self.deq.solution is not None
        return self.deq.solution

    def keep_finite(self, solver: Solver) -> None:
        """Leave the other samples out: zero times one of them would be in the gradient of all."""
        with torch.no_grad():
            losses = self.losses(solver, METHODS["JFB"])
        finite = losses.isfinite() & self.solution.residual.isfinite()
        if not finite.any():
            raise RuntimeError(
                f"f or the loss is finite for no {self.task.samples.removesuffix('s')} of a "
                "mini-batch: nothing to compare"
            )
        self.batch = tuple(tensor[finite] for tensor in self.batch)

    def gradient(self, solver: Solver, method: Gradient, which: Tensor | float) -> Found:
        """which: the samples whose loss counts, or how large their forward residual may be."""
        residuals: list[Tensor] = []
        with (
            deq_inputs(self.model, self.task) as calls,
            self.deq.register_forward_hook(lambda *_: residuals.append(self.solution.residual)),
        ):
            losses = self.losses(solver, method)
        solution, residual = self.solution, torch.stack(residuals).amax(0)  # worst of all solves
        taken = which if isinstance(which, Tensor) else residual <= which
        loss = torch.where(taken, losses, 0.0).sum() / taken.sum().clamp(min=1)
        # Each once: a weight of the cell may also make an input, as the keys of a memory.
        parts = dict.fromkeys([*self.deq.parameters(), *_upstream(self.model, calls)])
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # not autograd.grad: the pass down to z measures the residual
        flat = torch.cat([p.grad.double().flatten() for p in parts if p.grad is not None])
        self.model.zero_grad(set_to_none=True)
        assert solution.record.residual is not None
        backward = torch.where(taken, solution.record.residual, 0.0)
        losses = losses.detach()
        return Found(flat, losses, taken, residual, backward, solution.record.vjps)

    def truth(self, tol: float) -> Found:
        """The exact gradient at the equilibrium, of samples both of whose solves reach ``tol``."""
        tight = Broyden(max_iter=EQUILIBRIUM_STEPS, tol=EQUILIBRIUM_TOL, stop="whole")
        method = Sifting(tol, ADJOINT_STEPS)
        found = self.gradient(tight, method, tol)
        good = found.taken & torch.stack(method.kept).all(0)
        # The loss was the mean over those taken; it is to be the mean over the good ones.
        share = found.taken.sum() / good.sum().clamp(min=1)
        residual = torch.where(good, found.backward_residual, 0.0)  # NaN is none to be content with
        return replace(
            found, gradient=found.gradient * share, taken=good, backward_residual=residual
        )

    def radius(self) -> Tensor:  # -> (batch,)
        """The spectral radius of ∂f/∂z at the solution of the last call."""
        z, cell = self.solution.z, self.deq.cell
        with torch.no_grad(), deq_inputs(self.model, self.task) as calls:
            self.model(self.batch[0])
        inputs, options = calls[-1]
        generator = torch.Generator(self.batch[0].device).manual_seed(0)
        with hold(cell):
            return spectral_radius(lambda z: cell(z, *inputs, **options), z, POWER_STEPS, generator)


def _upstream(model: nn.Module, inputs: Any) -> list[nn.Parameter]:
    """The parameters that the DEQ's inputs are computed from."""
    made = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    if not made:
        return []
    all_of_them = [p for p in model.parameters() if p.requires_grad]
    total = torch.stack([x.sum() for x in made]).sum()
    found = torch.autograd.grad(total, all_of_them, retain_graph=True, allow_unused=True)
    return [p for p, g in zip(all_of_them, found, strict=True) if g is not None]


def _middle(values: Tensor) -> float | None:
    return values.median().item() if len(values) else None


def _beside(found: Tensor, truth: Tensor) -> tuple[float | None, float | None]:
    """Cosine and relative error; none where no sample has a truth."""
    size = truth.norm()
    if not size > 0:
        return None, None
    cosine = (found @ truth) / (found.norm() * size)
    return cosine.item(), ((found - truth).norm() / size).item()
