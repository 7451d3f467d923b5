"""A sample gives the same answer alone and in any batch, forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gdeq
from cells import F64
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Implicit, Picard, Status

D = 8


@dataclass
class Family:
    """f_i(z) = tanh(W_i z + x_i), or z + x_i: samples of all kinds, to be picked."""

    W: Tensor  # (samples, d, d)
    x: Tensor  # (samples, d)
    drifts: Tensor  # (samples, 1) bool: z + x_i, which has no fixed point

    def pick(self, rows: list[int]) -> Family:
        return Family(self.W[rows], self.x[rows].clone(), self.drifts[rows])

    def __call__(self, z: Tensor) -> Tensor:
        inside = torch.einsum("bij,bj->bi", self.W, z) + self.x
        return torch.where(self.drifts, z + self.x, torch.tanh(inside))


# Very easy, easy, ordinary, hard, very hard, beyond contraction, constant, NaN, NaN in W, no fixed
# point, already solved at the start.
NORMS = [0.01, 0.2, 0.6, 0.95, 0.999, 1.5, 0.0, 0.5, 0.5, 0.0, 0.5]
NAN_X, NAN_W, DRIFTS, SOLVED = 7, 8, 9, 10
KINDS = len(NORMS)
REGULAR = [0, 1, 2, 3, 4, 5, 6, SOLVED]


def family(device) -> Family:
    make = torch.Generator().manual_seed(11)
    W = torch.randn(KINDS, D, D, generator=make, dtype=F64)
    W = W / torch.linalg.matrix_norm(W, 2)[:, None, None]
    W = W * torch.tensor(NORMS, dtype=F64)[:, None, None]
    x = torch.randn(KINDS, D, generator=make, dtype=F64)
    x[NAN_X, 3] = float("nan")
    W[NAN_W, 2, 2] = float("nan")
    x[SOLVED] = 0.0  # z = 0 solves it
    drifts = torch.arange(KINDS).unsqueeze(1) == DRIFTS
    return Family(W.to(device), x.to(device), drifts.to(device))


def batches() -> list[list[int]]:
    """All kinds backwards, random subsets in random order, and repeated samples."""
    make = torch.Generator().manual_seed(3)
    found = [list(range(KINDS))[::-1]]
    for size in (3, 8):
        found.append(torch.randperm(KINDS, generator=make)[:size].tolist())
    found.append(torch.randint(KINDS, (40,), generator=make).tolist())
    found.append([2, 2, NAN_X, 2])
    return found


SOLVERS = {
    "broyden": Broyden(max_iter=60, tol=1e-9),
    "broyden-memory": Broyden(max_iter=60, tol=1e-9, memory=3),
    "broyden-line-search": Broyden(max_iter=60, tol=1e-9, line_search=3),
    "broyden-max-step": Broyden(max_iter=60, tol=1e-9, max_step=0.3),
    "broyden-seldom": Broyden(max_iter=60, tol=1e-9, check_every=7),
    "broyden-exactly": Broyden(max_iter=9, tol=0.0),
    "broyden-unfinished": Broyden(max_iter=4, tol=1e-9, memory=2),
    "anderson": Anderson(max_iter=60, tol=1e-9),
    "anderson-exactly": Anderson(max_iter=6, tol=0.0),
    "picard": Picard(max_iter=60, tol=1e-9),
    "picard-damped": Picard(max_iter=60, tol=1e-9, damping=0.7),
}
CLOSE = {
    "steps": {},
    "codes": {},
    "converged": {},
    "z": {"rtol": 1e-7, "atol": 1e-9},
    "residual": {"rtol": 1e-5, "atol": 1e-9, "equal_nan": True},
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_sample_is_solved_alike_alone_and_in_any_batch(name, device):
    solver, all_kinds = SOLVERS[name], family(device)
    z0 = torch.zeros(1, D, dtype=F64, device=device)
    alone = [gdeq.solve(all_kinds.pick([kind]), z0, solver) for kind in range(KINDS)]
    if solver.tol > 0 and solver.max_iter == 60:
        assert alone[NAN_X].status == alone[NAN_W].status == [Status.NONFINITE_START]
        assert alone[SOLVED].status == [Status.CONVERGED]
        assert len({int(one.steps) for one in alone}) > 4  # the kinds do differ
    for batch in batches():
        together = gdeq.solve(all_kinds.pick(batch), z0.expand(len(batch), D), solver)
        for field, close in CLOSE.items():
            expected = torch.cat([getattr(alone[kind], field) for kind in batch])
            torch.testing.assert_close(getattr(together, field), expected, **close)
        for place, kind in enumerate(batch):
            trace = alone[kind].trace[:, 0]
            ours = together.trace[: len(trace), place]
            torch.testing.assert_close(ours, trace, rtol=1e-4, atol=1e-9, equal_nan=True)
            first = batch.index(kind)  # the same sample, the same bits
            assert torch.equal(together.z[place], together.z[first])
        if together.inverse is not None:
            expected = torch.cat([alone[kind].inverse.as_matrix() for kind in batch])
            ours = together.inverse.as_matrix()
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_each_sample_has_its_own_start(device):
    """Permuting the batch permutes the answer, starts included."""
    picked = family(device).pick(REGULAR)
    make = torch.Generator().manual_seed(5)
    z0 = torch.randn(len(REGULAR), D, generator=make, dtype=F64).to(device)
    order = torch.randperm(len(REGULAR), generator=make).tolist()
    for solver in SOLVERS.values():
        plain = gdeq.solve(picked, z0, solver)
        moved = gdeq.solve(picked.pick(order), z0[order], solver)
        assert torch.equal(moved.steps, plain.steps[order])
        torch.testing.assert_close(moved.z, plain.z[order], rtol=1e-7, atol=1e-9)


# --- gradients ------------------------------------------------------------------------------------

FORWARD = Broyden(max_iter=60, tol=1e-9)
ROUGH = Broyden(max_iter=4, tol=1e-9)
GRADIENTS = {
    "implicit": (FORWARD, Implicit(Broyden(max_iter=60, tol=1e-9))),
    "implicit-first-order": (FORWARD, Implicit(double_backward=False)),
    "implicit-anderson": (FORWARD, Implicit(Anderson(max_iter=40, tol=1e-7))),
    "implicit-picard": (FORWARD, Implicit(Picard(max_iter=40, tol=1e-7))),
    "implicit-gmres": (FORWARD, Implicit(GMRES(max_iter=12, tol=1e-9))),
    "implicit-truncated": (FORWARD, Implicit(Broyden(max_iter=3, tol=0.0))),
    "implicit-preconditioned": (ROUGH, Implicit(precondition=True)),
    "gmres-preconditioned": (ROUGH, Implicit(GMRES(max_iter=12, tol=1e-9), precondition=True)),
    "jfb": (FORWARD, JFB()),
    "npg": (FORWARD, NPG()),
    "gdeq": (FORWARD, GDEQ()),
    "gdeq-rough": (ROUGH, GDEQ()),
    "gdeq-refine-1": (ROUGH, GDEQ(refine=1)),
    "gdeq-refine-4": (ROUGH, GDEQ(refine=4)),
    "gdeq-tolerance": (ROUGH, GDEQ(tolerance=1e-3)),
    "gdeq-tolerance-missed": (ROUGH, GDEQ(tolerance=1e-6, max_refine=2)),
    "measured": (ROUGH, gdeq.Measured(GDEQ())),
    "unrolled": (FORWARD, gdeq.Unrolled(steps=3, damping=0.8)),
}


def backward(picked: Family, rows: list[int], solver, gradient):
    """∂ℓ/∂x of every sample, with a weight on the output that belongs to the sample's kind."""
    x = picked.x.requires_grad_()
    z0 = torch.zeros_like(x, requires_grad=False)
    solution = gdeq.fixed_point(picked, z0, solver=solver, gradient=gradient)
    make = torch.Generator().manual_seed(7)
    weights = torch.randn(KINDS, D, generator=make, dtype=F64).to(x.device)
    (solution.z * weights[rows]).sum().backward()
    return x.grad, solution.backward


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_sample_has_the_same_gradient_alone_and_in_any_batch(name, device):
    solver, gradient = GRADIENTS[name]
    all_kinds = family(device)
    alone = [backward(all_kinds.pick([kind]), [kind], solver, gradient) for kind in range(KINDS)]
    regular = torch.stack([alone[kind][0][0] for kind in REGULAR])
    assert torch.isfinite(regular).all()
    assert (regular.norm(dim=1) > 1e-3).all()
    for batch in batches():
        grad, record = backward(all_kinds.pick(batch), batch, solver, gradient)
        # The others' own gradients may be NaN, their neighbours' may not.
        places = [place for place, kind in enumerate(batch) if kind in REGULAR]
        theirs = [alone[batch[place]] for place in places]
        expected = torch.cat([one[0] for one in theirs])
        torch.testing.assert_close(grad[places], expected, rtol=1e-6, atol=1e-8)
        for field in ("residual", "converged", "error"):
            if record is not None and getattr(record, field) is not None:
                ours = getattr(record, field)[places]
                expected = torch.cat([getattr(one[1], field) for one in theirs])
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-9)
    if name == "gdeq-tolerance-missed":  # this compares something
        met = torch.cat([alone[kind][1].converged for kind in REGULAR])
        assert 0 < int(met.sum()) < len(REGULAR)
