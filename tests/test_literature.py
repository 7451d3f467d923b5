"""Broyden's method on maps from the literature, against SciPy and against its own theory."""

from __future__ import annotations

import itertools
import math
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


def omega() -> Problem:
    """z = exp(-z).  Corless et al., "On the Lambert W function", Adv. Comput. Math. 5 (1996)."""
    f = lambda z: torch.exp(-z)  # noqa: E731
    return Problem(f, row(0.0), contraction=True, known=row(0.5671432904097838))


def kepler() -> Problem:
    """E = M + e sin E.  Colwell, "Solving Kepler's equation over three centuries" (1993)."""
    e = torch.tensor([[0.05], [0.3], [0.6], [0.9]], dtype=torch.float64)
    M = torch.tensor([[0.1], [1.0], [2.0], [2.5]], dtype=torch.float64)
    return Problem(lambda z: M + e * torch.sin(z), M.clone(), contraction=True)


def logistic() -> Problem:
    """z = r z (1 - z) at 1 - 1/r, stable and unstable.  May, Nature 261 (1976)."""
    r = torch.tensor([[2.8], [3.5], [3.9]], dtype=torch.float64)
    return Problem(lambda z: r * z * (1 - z), torch.full_like(r, 0.6), known=1 - 1 / r)


def colebrook() -> Problem:
    """Friction in rough pipes, x = 1/sqrt(lambda).  Colebrook, J. Inst. Civ. Eng. 11 (1939)."""
    rough, reynolds = row(1e-5, 1e-4, 1e-3, 1e-2), row(1e4, 1e5, 1e6, 1e7)
    f = lambda z: -2 * torch.log10(rough / 3.7 + 2.51 * z / reynolds)  # noqa: E731
    return Problem(f, torch.full((1, 4), 7.0, dtype=torch.float64), contraction=True)


def mean_field() -> Problem:
    """Weiss' magnetisation m = tanh(beta J m + h).  Weiss, J. Phys. Theor. Appl. 6 (1907)."""
    beta = torch.tensor([[0.5], [0.95], [1.5]], dtype=torch.float64)
    f = lambda z: torch.tanh(beta * z.mean(1, keepdim=True) + 0.1 * torch.cos(3 * z))  # noqa: E731
    return Problem(f, torch.linspace(0.1, 0.9, 3, dtype=torch.float64).expand(3, 3).clone())


def tanh_network() -> Problem:
    """z = tanh(Wz + Ux + b).  Bai, Kolter & Koltun, "Deep equilibrium models", NeurIPS (2019)."""
    make = torch.Generator().manual_seed(1)
    W = torch.randn(30, 30, generator=make, dtype=torch.float64)
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(3, 30, generator=make, dtype=torch.float64)
    return Problem(lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x), contraction=True)


def quantal_response() -> Problem:
    """Logit equilibrium of a game.  McKelvey & Palfrey, Games Econ. Behav. 10 (1995)."""
    make = torch.Generator().manual_seed(2)
    A = torch.randn(4, 4, generator=make, dtype=torch.float64)
    B = torch.randn(4, 4, generator=make, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        p, q = z[:, :4], z[:, 4:]
        return torch.cat([torch.softmax(q @ A.T, 1), torch.softmax(p @ B.T, 1)], 1)

    return Problem(f, torch.full((1, 8), 0.25, dtype=torch.float64), contraction=True)


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


def chandrasekhar() -> Problem:
    """The H-equation, midpoint rule.  Kelley, "Iterative methods for linear and nonlinear
    equations" (1995), section 5.6; Chandrasekhar, "Radiative transfer" (1960)."""
    n = 40
    mu = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    kernel = mu[:, None] / (mu[:, None] + mu) / (2 * n)
    c = torch.tensor([[0.5], [0.9], [0.99]], dtype=torch.float64)
    f = lambda z: 1 / (1 - c * (z @ kernel.T))  # noqa: E731
    return Problem(f, torch.ones(3, n, dtype=torch.float64), contraction=True)


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


def rosenbrock() -> Problem:
    """Moré, Garbow & Hillstrom, ACM TOMS 7 (1981), function 1."""

    def equations(z: Tensor) -> Tensor:
        return torch.stack([1 - z[:, 0], 10 * (z[:, 1] - z[:, 0] ** 2)], 1)

    flip = row(1.0, -0.1)
    return Problem(lambda z: z + flip * equations(z), row(-1.2, 1.0), known=row(1.0, 1.0))


def freudenstein_roth() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 2; Freudenstein & Roth, JACM 10 (1963)."""

    def equations(z: Tensor) -> Tensor:
        x, y = z[:, 0], z[:, 1]
        return torch.stack([-13 + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y], 1)

    # The usual start (0.5, -2) lies in the basin of a point that is no root.
    return Problem(root(equations, -0.05), row(6.0, 4.5), known=row(5.0, 4.0))


def variably_dimensioned() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 25, as the stationary point of its sum of squares.

    The cubic term is 50 times the linear one at the start: a full step overshoots.
    """
    n = 6
    weight = torch.arange(1, n + 1, dtype=torch.float64)

    def equations(z: Tensor) -> Tensor:
        s = ((z - 1) * weight).sum(1, keepdim=True)
        return (z - 1) + weight * (s + 2 * s**3)

    solver = gdeq.Broyden(max_iter=300, tol=1e-13, line_search=12)
    z0 = (1 - weight / n)[None]
    return Problem(root(equations, -0.05), z0, solver, known=torch.ones_like(z0))


def trigonometric() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 26; Spedicato (1975)."""
    n = 3  # larger ones have so many roots that two solvers rarely end in the same
    i = torch.arange(1, n + 1, dtype=torch.float64)

    def equations(z: Tensor) -> Tensor:
        cosines = torch.cos(z)
        return n - cosines.sum(1, keepdim=True) + i * (1 - cosines) - torch.sin(z)

    return Problem(root(equations, 1.0), torch.full((1, n), 1 / n, dtype=torch.float64))


def discrete_boundary_value() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 28; Moré & Cosnard, ACM TOMS 5 (1979)."""
    n = 10
    h = 1 / (n + 1)
    t = h * torch.arange(1, n + 1, dtype=torch.float64)

    def equations(z: Tensor) -> Tensor:
        left, right = padded(z)
        return 2 * z - left - right + h * h * (z + t + 1) ** 3 / 2

    return Problem(root(equations, -0.5), (t * (t - 1))[None])


def discrete_integral() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 29; Moré & Cosnard, ACM TOMS 5 (1979)."""
    n = 10
    h = 1 / (n + 1)
    t = h * torch.arange(1, n + 1, dtype=torch.float64)
    kernel = torch.where(t[None, :] <= t[:, None], (1 - t[:, None]) * t, t[:, None] * (1 - t))

    def equations(z: Tensor) -> Tensor:
        return z + h / 2 * (z + t + 1) ** 3 @ kernel.T

    return Problem(root(equations, -1.0), (t * (t - 1))[None])


def broyden_tridiagonal() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 30; Broyden, Math. Comp. 19 (1965)."""

    def equations(z: Tensor) -> Tensor:
        left, right = padded(z)
        return (3 - 2 * z) * z - left - 2 * right + 1

    return Problem(root(equations, -0.2), torch.full((1, 10), -1.0, dtype=torch.float64))


def broyden_banded() -> Problem:
    """Moré, Garbow & Hillstrom (1981), function 31; Broyden, Math. Comp. 25 (1971)."""
    n = 10
    i = torch.arange(n)
    band = (i[None, :] >= i[:, None] - 5) & (i[None, :] <= i[:, None] + 1) & ~torch.eye(n).bool()
    band = band.double()

    def equations(z: Tensor) -> Tensor:
        return z * (2 + 5 * z**2) + 1 - (z * (1 + z)) @ band.T

    return Problem(root(equations, -0.1), torch.full((1, n), -1.0, dtype=torch.float64))


PROBLEMS = [
    dottie,
    omega,
    kepler,
    logistic,
    colebrook,
    mean_field,
    tanh_network,
    quantal_response,
    pagerank,
    chandrasekhar,
    bratu,
    rosenbrock,
    freudenstein_roth,
    variably_dimensioned,
    trigonometric,
    discrete_boundary_value,
    discrete_integral,
    broyden_tridiagonal,
    broyden_banded,
]


def one_sample(problem: Problem, i: int) -> Callable[[np.ndarray], np.ndarray]:
    """f of sample i alone on NumPy vectors, for SciPy."""

    def f(x: np.ndarray) -> np.ndarray:
        z = problem.z0.clone()
        z[i] = torch.from_numpy(np.array(x))
        return problem.f(z)[i].numpy()

    return f


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
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


@pytest.mark.parametrize(
    "make",
    [logistic, bratu, freudenstein_roth, variably_dimensioned, discrete_boundary_value],
    ids=lambda make: make.__name__,
)
def test_picard_cannot_solve_what_broyden_can(make):
    """The agreement above is no accident of maps that anything would solve."""
    problem = make()
    solution = gdeq.solve(problem.f, problem.z0, gdeq.Picard(max_iter=200, tol=1e-13))
    assert not solution.converged.all()


def errors(problem: Problem, solver: gdeq.Solver, steps: int) -> Tensor:  # -> (steps + 1, batch)
    """The distance to the solution after each step; z_t is what max_iter=t, tol=0 returns."""
    exact = gdeq.solve(problem.f, problem.z0, gdeq.Broyden(max_iter=100, tol=1e-15)).z
    iterates = [problem.z0]
    for t in range(1, steps + 1):
        run = replace(solver, max_iter=t, tol=0.0)
        iterates.append(gdeq.solve(problem.f, problem.z0, run).z)
    return torch.stack([(z - exact).norm(dim=1) for z in iterates])


def jacobian(problem: Problem, z: Tensor, i: int) -> Tensor:  # -> (d, d)
    def f(x: Tensor) -> Tensor:
        rows = [*problem.z0[:i], x, *problem.z0[i + 1 :]]
        return problem.f(torch.stack(rows))[i]

    return torch.autograd.functional.jacobian(f, z[i])


def geometric_mean(values: Tensor) -> float:
    return math.exp(values.log().mean().item())


# Few dimensions: in many, the errors reach the rounding level before the updates span the space.
SUPERLINEAR = [
    mean_field,
    quantal_response,
    pagerank,
    bratu,
    freudenstein_roth,
    trigonometric,
    discrete_boundary_value,
    discrete_integral,
    broyden_tridiagonal,
    broyden_banded,
]


@pytest.mark.parametrize("make", SUPERLINEAR, ids=lambda make: make.__name__)
def test_broyden_converges_superlinearly(make):
    """‖e_{t+1}‖/‖e_t‖ tends to 0.  Broyden, Dennis & Moré, IMA J. Appl. Math. 12 (1973)."""
    problem = make()
    steps = int(gdeq.solve(problem.f, problem.z0, problem.solver).steps.max())
    for history in errors(problem, gdeq.Broyden(), steps).T:
        e = history[history > 1e-12]  # below, it is rounding
        ratio = e[1:] / e[:-1]
        third = len(ratio) // 3
        early, late = geometric_mean(ratio[:third]), geometric_mean(ratio[-third:])
        assert late < 0.5 * early
        assert late < 0.2
        assert ratio[-third:].min() < 0.1


@pytest.mark.parametrize(
    "make", [dottie, kepler, chandrasekhar, tanh_network], ids=lambda make: make.__name__
)
def test_picard_converges_linearly_at_the_spectral_radius(make):
    """What superlinear is measured against: the ratio settles at the spectral radius of ∂f/∂z."""
    problem = make()
    exact = gdeq.solve(problem.f, problem.z0, gdeq.Broyden(max_iter=100, tol=1e-15)).z
    for i, history in enumerate(errors(problem, gdeq.Picard(), 60).T):
        radius = torch.linalg.eigvals(jacobian(problem, exact, i)).abs().max().item()
        e = history[history > 1e-10]
        # Complex eigenvalues make the single ratios swing about the radius.
        rate = (e[-1] / e[len(e) // 2]).item() ** (1 / (len(e) - 1 - len(e) // 2))
        assert rate == pytest.approx(radius, rel=0.1)


@pytest.mark.parametrize("make", [dottie, omega, logistic], ids=lambda make: make.__name__)
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


def test_at_a_double_root_the_rate_is_the_golden_ratio():
    """F' = 0 at the root: linear, by 0.618.  Decker, Keller & Kelley, SIAM J. Numer. Anal. 20
    (1983)."""
    problem = Problem(root(lambda z: z**2, -1.0), row(0.4))
    iterates = [
        gdeq.solve(problem.f, problem.z0, gdeq.Broyden(max_iter=t, tol=0.0)).z.item()
        for t in range(10, 25)
    ]
    ratios = [b / a for a, b in itertools.pairwise(iterates)]
    assert ratios[-1] == pytest.approx((math.sqrt(5) - 1) / 2, rel=1e-3)


def test_powell_singular():
    """Powell, Comput. J. 5 (1962); Moré, Garbow & Hillstrom (1981), function 13.

    The Jacobian has rank 2 at the root 0: slow, and z is only known to the root of the residual.
    """

    def equations(z: Tensor) -> Tensor:
        a, b, c, d = z.unbind(1)
        parts = [a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
        return torch.stack(parts, 1)

    # Relative to z no residual is small when z itself vanishes.
    solver = gdeq.Broyden(max_iter=400, tol=1e-8, stop="absolute")
    solution = gdeq.solve(root(equations, -0.3), row(3.0, -1.0, 0.0, 1.0), solver)
    assert solution.converged.all(), str(solution)
    assert equations(solution.z).norm() < 1e-7
    assert solution.z.norm() < 1e-3


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
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
