"""What most tests of the core need: a cell, the methods to try it with, and comparisons."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gdeq
from gdeq import GDEQ, GMRES, JFB, NPG, Anderson, Broyden, Implicit, Measured, Picard, Unrolled
from problems import adjoint_residual, pack

F64 = torch.float64
SOLVER = Broyden(max_iter=60, tol=1e-13)
EXACT = Implicit(SOLVER)
GRADIENTS = {
    "GDEQ": GDEQ(),
    "GDEQ-refine": GDEQ(refine=2),
    "GDEQ-tolerance": GDEQ(tolerance=1e-3, max_refine=4),
    "Implicit": EXACT,
    "Implicit-first-order": Implicit(SOLVER, double_backward=False),
    "Implicit-GMRES": Implicit(GMRES(max_iter=30, tol=1e-13), precondition=True),
    "JFB": JFB(),
    "NPG": NPG(steps=4, damping=0.7),
    "Unrolled": Unrolled(steps=3, damping=0.8),
    "Measured": Measured(GDEQ()),
}
SOLVERS = {"Broyden": Broyden(), "Anderson": Anderson(), "Picard": Picard()}

every_gradient = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


class Cell(nn.Module):
    """tanh(Wz + Ux + b) with ‖W‖ = gain: a contraction with a solid Jacobian."""

    def __init__(self, d: int = 4, gain: float = 0.7, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.inner = nn.Linear(d, d, dtype=dtype)
        self.input = nn.Linear(d, d, bias=False, dtype=dtype)
        with torch.no_grad():
            self.inner.weight *= gain / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + self.input(x))


def layer(device, gradient=EXACT, solver=SOLVER, **kwargs) -> gdeq.DEQ:
    return gdeq.DEQ(Cell(**kwargs).to(device), solver, gradient)


def data(device, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def gradients_of(loss, module: nn.Module, *more: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [*module.parameters(), *more], retain_graph=True)


def assert_same(found, expected, rtol: float = 0.0, atol: float = 0.0) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def contraction(d: int, norm: float, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """A matrix of this spectral norm, (d, d)."""
    W = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (W * norm / torch.linalg.matrix_norm(W, 2)).to(dtype)


def differentiate(problem, solver, gradient, v=None):
    """-> the solution of a `problems.Problem` after backward, and w (batch, d)."""
    problem.zero_grad()
    solution = gdeq.fixed_point(problem, problem.z0, solver, gradient)
    v = problem.cotangent() if v is None else v
    (pack(solution.z) * v).sum().backward()
    return solution, problem.shift.grad.clone()


def dense_residual(problem, solution, w):  # -> (batch,)
    return adjoint_residual(problem.dense_jacobian(solution.z), w, problem.cotangent())


# --- maps for solvers, one of its own for every sample --------------------------------------------


def draw(*shape: int, seed: int, device: torch.device | None = None) -> Tensor:
    """The same numbers on every device."""
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make, dtype=F64).to(device)


class Network:
    """f(z) = size tanh((W z + x) / size), with its own W for every sample; counts its calls.

    norms: ‖W‖ of each sample, which bounds the contraction factor.
    """

    def __init__(self, norms, d=6, seed=0, device=None, dtype=F64, size=1.0):
        W = draw(len(norms), d, d, seed=seed)
        W = W / torch.linalg.matrix_norm(W, 2)[:, None, None]
        self.W = (W * torch.tensor(norms).double()[:, None, None]).to(device, dtype)
        self.x = size * draw(len(norms), d, seed=seed + 1, device=device).to(dtype)
        self.size, self.calls = size, 0

    @property
    def z0(self) -> Tensor:
        return torch.zeros_like(self.x)

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.size * torch.tanh((torch.einsum("bij,bj->bi", self.W, z) + self.x) / self.size)


def iterate_at(f, z0: Tensor, solver: gdeq.Solver, t: int) -> Tensor:
    return z0 if t == 0 else gdeq.solve(f, z0, replace(solver, max_iter=t, tol=0.0)).z


def relative_residual(f, z: Tensor) -> Tensor:  # -> (batch,)
    fz = f(z)
    return (fz - z).norm(dim=1) / torch.maximum(fz.norm(dim=1), z.norm(dim=1))
