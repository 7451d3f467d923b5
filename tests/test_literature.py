"""Broyden's method on maps from the literature, against SciPy and against its own theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

import gdeq

DEFAULT = gdeq.Broyden(max_iter=200, tol=1e-13)


@dataclass(frozen=True)
class Problem:
    """z = f(z) with f: (batch, d) -> (batch, d); SciPy gets one sample at a time."""

    f: Callable[[Tensor], Tensor]
    z0: Tensor  # (batch, d)
    solver: gdeq.Broyden = DEFAULT
    contraction: bool = False  # SciPy's own fixed-point iteration must agree too
    known: Tensor | None = None  # (batch, d)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def root(F: Callable[[Tensor], Tensor], scale: float) -> Callable[[Tensor], Tensor]:
    """F(z) = 0 as a fixed point, scaled so that B_0 = -I is a sensible start."""
    return lambda z: z + scale * F(z)


def padded(z: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right neighbour of every component, zero outside."""
    left, right = torch.zeros_like(z), torch.zeros_like(z)
    left[:, 1:], right[:, :-1] = z[:, :-1], z[:, 1:]
    return left, right


def dottie() -> Problem:
    """cos z = z.  Kaplan, "The Dottie number", Mathematics Magazine 80 (2007)."""
    return Problem(torch.cos, row(1.0), contraction=True, known=row(0.7390851332151607))


def logistic() -> Problem:
    """z = r z (1 - z) at 1 - 1/r, stable and unstable.  May, Nature 261 (1976)."""
    r = torch.tensor([[2.8], [3.5], [3.9]], dtype=torch.float64)
    return Problem(lambda z: r * z * (1 - z), torch.full_like(r, 0.6), known=1 - 1 / r)


def tanh_network() -> Problem:
    """z = tanh(Wz + Ux + b).  Bai, Kolter & Koltun, "Deep equilibrium models", NeurIPS (2019)."""
    make = torch.Generator().manual_seed(1)
    W = torch.randn(30, 30, generator=make, dtype=torch.float64)
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(3, 30, generator=make, dtype=torch.float64)
    return Problem(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x), contraction=True)


def pagerank() -> Problem:
    """z = d P z + (1 - d)/n.  Brin & Page, Comput. Netw. ISDN Syst. 30 (1998)."""
    make = torch.Generator().manual_seed(3)
    n, d = 12, 0.85
    links = (torch.rand(n, n, generator=make) < 0.3).double() + torch.eye(n).roll(1, 0).double()
    P = links / links.sum(0)
    teleport = torch.full((n,), (1 - d) / n, dtype=torch.float64)
    known = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - d * P, teleport)
    z0 = torch.zeros(1, n, dtype=torch.float64)
    z0[0, 0] = 1.0
    return Problem(lambda z: d * z @ P.T + teleport, z0, contraction=True, known=known[None])


def bratu() -> Problem:
    """u'' + exp u = 0, u = 0 at both ends, lower branch.  Bratu, Bull. Soc. Math. France 42 (1914).

    The discrete Laplacian asks for as many updates as unknowns: the Picard form cannot do it.
    """
    n = 15
    h = 1 / (n + 1)

    def equations(z: Tensor) -> Tensor:
        left, right = padded(z)
        return left - 2 * z + right + h * h * torch.exp(z)

    return Problem(root(equations, 0.5), torch.zeros(1, n, dtype=torch.float64))


def freudenstein_roth() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 2; Freudenstein & Roth, JACM 10 (1963)."""

    def equations(z: Tensor) -> Tensor:
        x, y = z[:, 0], z[:, 1]
        return torch.stack([-13 + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y], 1)

    # The usual start (0.5, -2) lies in the basin of a point that is no root.
    return Problem(root(equations, -0.05), row(6.0, 4.5), known=row(5.0, 4.0))


def broyden_tridiagonal() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 30; Broyden, Math. Comp. 19 (1965)."""

    def equations(z: Tensor) -> Tensor:
        left, right = padded(z)
        return (3 - 2 * z) * z - left - 2 * right + 1

    return Problem(root(equations, -0.2), torch.full((1, 10), -1.0, dtype=torch.float64))


PROBLEMS = [
    *(dottie, logistic, tanh_network, pagerank, bratu),
    *(freudenstein_roth, broyden_tridiagonal),
]


def every(*problems):
    return pytest.mark.parametrize("make", problems, ids=lambda make: make.__name__)


def one_sample(problem: Problem, i: int) -> Callable[[np.ndarray], np.ndarray]:
    """f of sample i alone on NumPy vectors, for SciPy."""

    def f(x: np.ndarray) -> np.ndarray:
        z = problem.z0.clone()
        z[i] = torch.from_numpy(np.array(x))
        return problem.f(z)[i].numpy()

    return f


@every(*PROBLEMS)
def test_broyden_agrees_with_scipy(make):
    problem = make()
    solution = gdeq.solve(problem.f, problem.z0, problem.solver)
    assert solution.converged.all(), str(solution)
    for i in range(len(problem.z0)):
        f, z0 = one_sample(problem, i), problem.z0[i].numpy()
        found = optimize.root(lambda x, f=f: f(x) - x, z0, tol=1e-12)
        # MINPACK reports slow progress where the last steps are rounding: judge its residual.
        assert np.abs(found.fun).max() < 1e-10
        np.testing.assert_allclose(solution.z[i].numpy(), found.x, rtol=1e-8, atol=1e-8)
        if problem.contraction:
            found = optimize.fixed_point(f, z0, xtol=1e-12, maxiter=5000, method="iteration")
            np.testing.assert_allclose(solution.z[i].numpy(), found, rtol=1e-8, atol=1e-8)
    if problem.known is not None:
        torch.testing.assert_close(solution.z, problem.known, rtol=1e-10, atol=1e-10)


def errors(problem: Problem, solver: gdeq.Solver, steps: int) -> Tensor:  # -> (steps + 1, batch)
    """The distance to the solution after each step; z_t is what max_iter=t, tol=0 returns."""
    exact = gdeq.solve(problem.f, problem.z0, gdeq.Broyden(max_iter=100, tol=1e-15)).z
    iterates = [problem.z0]
    for t in range(1, steps + 1):
        run = replace(solver, max_iter=t, tol=0.0)
        iterates.append(gdeq.solve(problem.f, problem.z0, run).z)
    return torch.stack([(z - exact).norm(dim=1) for z in iterates])


# Few dimensions: in many, the errors reach the rounding level before the updates span the space.


@every(dottie, logistic)
def test_in_one_dimension_broyden_is_the_secant_method(make):
    """e_{t+1} / (e_t e_{t-1}) tends to |g''/2g'|, hence order 1.618.  Ostrowski (1960)."""
    problem = make()
    z = gdeq.solve(problem.f, problem.z0, problem.solver).z.requires_grad_()
    (slope,) = torch.autograd.grad(problem.f(z).sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    expected = (curvature / (2 * (slope - 1))).abs().squeeze(1)
    for i, history in enumerate(errors(problem, gdeq.Broyden(), 6).T):
        e = history[history > 1e-11]
        constant = (e[-1] / (e[-2] * e[-3])).item()
        assert constant == pytest.approx(expected[i].item(), rel=0.1)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("norm", [0.5, 3.0], ids=["contraction", "expansion"])
def test_linear_maps_are_solved_in_at_most_2n_steps(n, norm):
    """Gay, "Some convergence properties of Broyden's method", SIAM J. Numer. Anal. 16 (1979)."""
    make = torch.Generator().manual_seed(n)
    A = torch.randn(4, n, n, generator=make, dtype=torch.float64)
    A = norm * A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    b = torch.randn(4, n, generator=make, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - A, b)

    def f(z: Tensor) -> Tensor:
        return (A @ z.unsqueeze(2)).squeeze(2) + b

    solution = gdeq.solve(f, torch.zeros_like(b), gdeq.Broyden(max_iter=2 * n, tol=1e-9))
    assert solution.converged.all(), str(solution)
    torch.testing.assert_close(solution.z, exact, rtol=1e-6, atol=1e-6)
    if norm > 1:  # the plain iteration is nowhere near
        plain = gdeq.solve(f, torch.zeros_like(b), gdeq.Picard(max_iter=2 * n, tol=1e-9))
        assert not plain.converged.any()
