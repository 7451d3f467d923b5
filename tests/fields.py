"""Maps from other fields whose equilibria people differentiate: small, in float64.

A field is a function of a seed that returns a `Map`; samples of its batch have data of their own.
`Solved` compares gradients with dense algebra there: tests/test_fields.py for every method, and
benchmarks/gradients.py makes a table of their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softplus

import gdeq
import gdeq.solution
from problems import exact_cotangent

BATCH = 2
F64 = torch.float64


class Map(NamedTuple):
    """z = f(z), and the parameter whose gradient is compared."""

    f: Callable[[Tensor], Tensor]  # (batch, d) -> (batch, d)
    z0: Tensor  # (batch, d)
    parameter: Tensor  # (batch, ...), a leaf that f closes over


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(make: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=make)


def _uniform(make: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=F64, generator=make)


# --- optimisation ---------------------------------------------------------------------------------


def sparse_regression(
    seed: int, rows: int, unknowns: int, ridge: float, correlation: float = 0.0
) -> Map:
    """LASSO (ridge = 0) and elastic net by proximal gradient steps; the parameter is the data b."""
    make = _generator(seed)
    A = _normal(make, BATCH, rows, unknowns) / rows**0.5
    if correlation:
        common = _normal(make, BATCH, rows, 1) / rows**0.5
        A = (1 - correlation) ** 0.5 * A + correlation**0.5 * common
    truth = _normal(make, BATCH, unknowns) * (_uniform(make, 0, 1, BATCH, unknowns) < 0.3)
    b = torch.einsum("brd,bd->br", A, truth) + 0.1 * _normal(make, BATCH, rows)
    b.requires_grad_()
    step = 1 / (torch.linalg.matrix_norm(A, 2) ** 2 + ridge).unsqueeze(1)  # (batch, 1)
    sparsity = 0.05

    def f(z: Tensor) -> Tensor:
        r = torch.einsum("brd,bd->br", A, z) - b
        moved = z - step * (torch.einsum("brd,br->bd", A, r) + ridge * z)
        return moved.sign() * (moved.abs() - step * sparsity).clamp(min=0)

    return Map(f, torch.zeros(BATCH, unknowns, dtype=F64), b)


def sinkhorn(seed: int, points: int, sharpness: float) -> Map:
    """Entropic optimal transport: the log-scaling of one side, centred; the parameter is a cost."""
    make = _generator(seed)
    x, y = _uniform(make, 0, 1, BATCH, points, 2), _uniform(make, 0, 1, BATCH, points, 2)
    cost = (torch.cdist(x, y) ** 2).requires_grad_()
    weight = math.log(1 / points)

    def f(z: Tensor) -> Tensor:
        other = weight - torch.logsumexp(z.unsqueeze(2) - sharpness * cost, dim=1)
        z = weight - torch.logsumexp(other.unsqueeze(1) - sharpness * cost, dim=2)
        return z - z.mean(dim=1, keepdim=True)

    return Map(f, torch.zeros(BATCH, points, dtype=F64), cost)


# --- differential equations -----------------------------------------------------------------------


def bratu(seed: int, points: int) -> Map:
    """u'' + λ(x) eᵘ = 0, u = 0 at both ends, by Jacobi's iteration; the parameter is λ."""
    make = _generator(seed)
    h = 1 / (points + 1)
    rate = _uniform(make, 0.5, 2.5, BATCH, points).requires_grad_()

    def f(z: Tensor) -> Tensor:
        around = torch.nn.functional.pad(z, (1, 1))
        return (around[:, :-2] + around[:, 2:] + h**2 * rate * z.exp()) / 2

    return Map(f, torch.zeros(BATCH, points, dtype=F64), rate)


def poisson_boltzmann(seed: int, side: int) -> Map:
    """∇²u = κ² sinh u − ρ on a square by Jacobi's iteration; the parameter is the charge ρ."""
    make = _generator(seed)
    h = 1 / (side + 1)
    charge = (20 * _normal(make, BATCH, side, side)).requires_grad_()
    kappa = _uniform(make, 1, 3, BATCH, 1, 1)

    def f(z: Tensor) -> Tensor:
        u = z.view(BATCH, side, side)
        p = torch.nn.functional.pad(u, (1, 1, 1, 1))
        around = p[:, :-2, 1:-1] + p[:, 2:, 1:-1] + p[:, 1:-1, :-2] + p[:, 1:-1, 2:]
        return ((around - h**2 * (kappa**2 * u.sinh() - charge)) / 4).flatten(1)

    return Map(f, torch.zeros(BATCH, side * side, dtype=F64), charge)


def kepler(seed: int, eccentricity: float) -> Map:
    """E = M + e sin E for a few anomalies at once; the parameter is M."""
    make = _generator(seed)
    mean = _uniform(make, 0.1, 3.0, BATCH, 5).requires_grad_()
    return Map(lambda z: mean + eccentricity * z.sin(), torch.zeros(BATCH, 5, dtype=F64), mean)


# --- sequences, graphs, decisions -----------------------------------------------------------------


def value_iteration(seed: int, states: int, discount: float) -> Map:
    """The soft Bellman equation of a random decision process; the parameter are its rewards."""
    make = _generator(seed)
    actions = 3
    moves = torch.softmax(3 * _normal(make, BATCH, actions, states, states), dim=3)
    reward = _normal(make, BATCH, actions, states).requires_grad_()

    def f(z: Tensor) -> Tensor:
        worth = reward + discount * torch.einsum("bast,bt->bas", moves, z)
        return torch.logsumexp(worth, dim=1)

    return Map(f, torch.zeros(BATCH, states, dtype=F64), reward)


def propagation(seed: int, nodes: int, teleport: float) -> Map:
    """APPNP: Z = (1 − α) Â Z + α H on a random graph, three features; the parameter is H."""
    make = _generator(seed)
    edges = (_uniform(make, 0, 1, BATCH, nodes, nodes) < 4 / nodes).to(F64)
    edges = ((edges + edges.mT) > 0).to(F64) + torch.eye(nodes, dtype=F64)
    scale = edges.sum(2).rsqrt()
    adjacency = scale.unsqueeze(2) * edges * scale.unsqueeze(1)
    features = _normal(make, BATCH, nodes, 3).requires_grad_()

    def f(z: Tensor) -> Tensor:
        spread = adjacency @ z.view(BATCH, nodes, 3)
        return ((1 - teleport) * spread + teleport * features).flatten(1)

    return Map(f, torch.zeros(BATCH, 3 * nodes, dtype=F64), features)


def garch(seed: int, length: int) -> Map:
    """GARCH(1, 1): all variances of a series at once, σ²ₜ = ω + α e²ₜ₋₁ + β σ²ₜ₋₁."""
    make = _generator(seed)
    beta = _uniform(make, 0.8, 0.95, BATCH, 1)
    shock = _normal(make, BATCH, length).square()
    omega = _uniform(make, 0.02, 0.1, BATCH, length).requires_grad_()

    def f(z: Tensor) -> Tensor:
        return omega + 0.05 * shock + beta * torch.nn.functional.pad(z, (1, 0), value=1.0)[:, :-1]

    return Map(f, torch.zeros(BATCH, length, dtype=F64), omega)


# --- networks -------------------------------------------------------------------------------------


def transformer(seed: int, tokens: int, width: int, gain: float) -> Map:
    """A post-norm transformer block with its input injected; the parameter is that input."""
    make = _generator(seed)
    draw = partial(_normal, make)
    query, key, value, out = (gain * draw(width, width) / width**0.5 for _ in range(4))
    up, down = gain * draw(width, 2 * width) / width**0.5, gain * draw(2 * width, width) / width
    x = draw(BATCH, tokens, width).requires_grad_()

    def f(z: Tensor) -> Tensor:
        h = z.view(BATCH, tokens, width)
        mix = torch.softmax(h @ query @ (h @ key).mT / width**0.5, dim=2)
        h = layer_norm(h + mix @ (h @ value) @ out + x, (width,))
        return layer_norm(h + softplus(h @ up) @ down + x, (width,)).flatten(1)

    return Map(f, torch.zeros(BATCH, tokens * width, dtype=F64), x)


def tanh_map(seed: int, d: int, radius: float) -> Map:
    make = _generator(seed)
    W = radius * _normal(make, d, d) / d**0.5
    x = _normal(make, BATCH, d).requires_grad_()
    return Map(lambda z: torch.tanh(z @ W.T + x), torch.zeros(BATCH, d, dtype=F64), x)


def gru(seed: int, d: int, gain: float) -> Map:
    """z = (1 − u) z + u tanh(H (r z) + x), the GRU's step; the parameter is all its inputs.

    Where the gate u is nearly closed w is long, but the gradient of x, which is u (1 − z²) w for
    the last input, is not.
    """
    make = _generator(seed)
    update, reset, state = (gain * _normal(make, d, d) / d**0.5 for _ in range(3))
    x = _normal(make, BATCH, 3, d).requires_grad_()

    def f(z: Tensor) -> Tensor:
        u, r = torch.sigmoid(z @ update.T + x[:, 0]), torch.sigmoid(z @ reset.T + x[:, 1])
        return (1 - u) * z + u * torch.tanh((r * z) @ state.T + x[:, 2])

    return Map(f, torch.zeros(BATCH, d, dtype=F64), x)


# --- linear maps of prescribed spectra ------------------------------------------------------------


def linear(seed: int, d: int, spectrum: Callable[[int], Tensor], shear: float = 0.0) -> Map:
    """f(z) = Mz + b with these eigenvalues, in random orthogonal directions.

    shear: size of what stands above the diagonal; with any, M is not normal.
    """
    make = _generator(seed)
    b = _normal(make, BATCH, d).requires_grad_()
    basis, _ = torch.linalg.qr(_normal(make, BATCH, d, d))
    middle = torch.diag(spectrum(d)) + shear * torch.triu(_normal(make, BATCH, d, d), 1)
    M = basis @ middle @ basis.mT
    return Map(lambda z: torch.einsum("bij,bj->bi", M, z) + b, torch.zeros_like(b.detach()), b)


def _between(low: float, high: float) -> Callable[[int], Tensor]:
    return lambda d: torch.linspace(low, high, d, dtype=F64)


def _one_slow(slow: float) -> Callable[[int], Tensor]:
    return lambda d: torch.cat([torch.tensor([slow], dtype=F64), _between(-0.3, 0.3)(d - 1)])


FIELDS: dict[str, Callable[[int], Map]] = {
    "LASSO 40 × 40": partial(sparse_regression, rows=40, unknowns=40, ridge=0.0),
    "LASSO 30 × 60": partial(sparse_regression, rows=30, unknowns=60, ridge=0.0),
    "elastic net 40 × 60": partial(sparse_regression, rows=40, unknowns=60, ridge=0.1),
    "Sinkhorn, 30 points, ε 0.1": partial(sinkhorn, points=30, sharpness=10.0),
    "Sinkhorn, 30 points, ε 0.02": partial(sinkhorn, points=30, sharpness=50.0),
    "Bratu, 31 points": partial(bratu, points=31),
    "Bratu, 63 points": partial(bratu, points=63),
    "Poisson–Boltzmann 14²": partial(poisson_boltzmann, side=14),
    "Kepler, e 0.6": partial(kepler, eccentricity=0.6),
    "Kepler, e 0.95": partial(kepler, eccentricity=0.95),
    "value iteration, γ 0.9": partial(value_iteration, states=30, discount=0.9),
    "value iteration, γ 0.999": partial(value_iteration, states=30, discount=0.999),
    "APPNP, α 0.2": partial(propagation, nodes=40, teleport=0.2),
    "APPNP, α 0.02": partial(propagation, nodes=40, teleport=0.02),
    "GARCH, 100 steps": partial(garch, length=100),
    "transformer block": partial(transformer, tokens=8, width=16, gain=0.5),
    "transformer block, strong": partial(transformer, tokens=8, width=16, gain=0.9),
    "tanh, radius 0.6": partial(tanh_map, d=100, radius=0.6),
    "tanh, radius 1": partial(tanh_map, d=100, radius=1.0),
    "linear, one slow mode 0.99": partial(linear, d=60, spectrum=_one_slow(0.99)),
    "linear, one slow mode 0.999": partial(linear, d=60, spectrum=_one_slow(0.999)),
    "linear, negative to −0.95": partial(linear, d=60, spectrum=_between(-0.95, 0.0)),
    "linear, stiff to −5": partial(linear, d=40, spectrum=_between(-5.0, 0.5)),
    "linear, stiff to −20": partial(linear, d=30, spectrum=_between(-20.0, 0.5)),
    "linear, not normal": partial(linear, d=60, spectrum=_between(-0.5, 0.5), shear=0.15),
    "linear, far from normal": partial(linear, d=40, spectrum=_between(-0.5, 0.5), shear=0.4),
}
# Where refined gradients are known not to be safe for every sample.
HARDER: dict[str, Callable[[int], Map]] = {
    "LASSO 50 × 40, correlated": partial(
        sparse_regression, rows=50, unknowns=40, ridge=0.0, correlation=0.7
    ),
    "GRU cell": partial(gru, d=50, gain=1.5),
}


# --- gradients against dense algebra --------------------------------------------------------------


class Solved:
    """A map at the z that a solver found, and the gradients of ⟨v, z⟩ there, v random.

    dtype: of the state; the map computes in float64, and only what it is given and returns is
        rounded.  What gradients are compared with is in float64 too.
    """

    def __init__(
        self, field: str, seed: int, solver: gdeq.Solver, dtype: torch.dtype = F64
    ) -> None:
        self.map, self.dtype = (FIELDS | HARDER)[field](seed), dtype
        # A refined gradient asks for all that a solve can leave.
        self.solution = gdeq.fixed_point(
            lambda z: self.map.f(z.to(F64)).to(dtype),
            self.map.z0.to(dtype),
            solver,
            gdeq.GDEQ(refine=1),
        )
        z = self.solution.z.detach().to(F64).requires_grad_()
        self.out = self.map.f(z)
        self.z = z
        columns = [self._vjp(row) for row in torch.eye(z.shape[1], dtype=F64)]
        jacobian = torch.stack(columns, dim=1)  # (batch, d, d)
        self.v = _normal(_generator(seed + 1000), *z.shape)
        system = torch.eye(z.shape[1], dtype=F64) - jacobian
        # Where I − J is singular there is no gradient.
        self.judged = self.solution.converged & (torch.linalg.svdvals(system)[:, -1] > 1e-8)
        self.exact = torch.zeros_like(self.v)
        self.exact[self.judged] = exact_cotangent(jacobian[self.judged], self.v[self.judged])

    def _vjp(self, u: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        given = u.to(F64).expand_as(self.out)
        (found,) = torch.autograd.grad(self.out, self.z, given, retain_graph=True)
        return found.to(u.dtype)

    def _to_parameter(self, w: Tensor) -> Tensor:  # (batch, d) -> (batch, p)
        given = torch.autograd.grad(self.out, self.map.parameter, w.to(F64), retain_graph=True)
        return given[0].flatten(1)[self.judged]

    def _off(self, found: Tensor) -> Tensor:  # (judged, p) -> (judged,)
        exact = self._to_parameter(self.exact)
        return (found - exact).norm(dim=1) / exact.norm(dim=1)

    def errors(self, gradient: gdeq.Gradient) -> tuple[Tensor, Any]:
        """Relative errors of the parameter's gradient, (judged,), and what the method told."""
        with torch.no_grad():
            found = gradient.cotangent(self.v.to(self.dtype), self._vjp, self.solution)
        return self._off(self._to_parameter(found.w)), found

    def estimates(self, told: gdeq.solution.Cotangent) -> Tensor:  # -> (judged,)
        """What the record would say of this w."""
        v, record = self.v.to(self.dtype), gdeq.solution.BackwardRecord()
        record.write(None, told)
        record.measured((v + self._vjp(told.w) - told.w).norm(dim=1) / v.norm(dim=1))
        return record.sample_error[self.judged].to(F64)

    def errors_of_unrolling(self, unrolled: gdeq.Unrolled) -> Tensor:  # -> (judged,)
        """Of the unrolled phantom gradient, from the z that was found."""
        z = self.z.detach()
        for _ in range(unrolled.steps):
            z = z + unrolled.damping * (self.map.f(z) - z)
        (found,) = torch.autograd.grad(z, self.map.parameter, self.v)
        return self._off(found.flatten(1)[self.judged])
