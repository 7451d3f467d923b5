"""What keeps an equilibrium well behaved: penalties to train with, and the spectral radius."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gdeq.operators import norm
from gdeq.options import count_of
from gdeq.state import State, StateMap, StateSpace, full_precision


def jacobian_penalty(
    f: Callable[[State], State],
    z: State,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ‖∂f/∂z‖²_F / d at z, averaged over the batch, by Hutchinson's estimate.

    E‖Jᵀε‖² = tr(JJᵀ) for ε ~ N(0, I) (Bai et al. 2021).  Differentiable in everything that f closes
    over; z is a constant.  Add it to the loss with a small weight to keep the spectral radius
    small.

    samples: random vectors ε to average over; each costs a VJP.

    Examples:
        >>> import torch, gdeq
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> penalty = gdeq.jacobian_penalty(lambda z: scale * z, torch.zeros(64, 64))
        >>> 0.2 < penalty.item() < 0.3  # about 0.5²
        True
        >>> penalty.backward()  # a step against this gradient lowers the scale
        >>> scale.grad.item() > 0
        True
    """
    count_of("samples", samples, 1)
    point, out = _linearize(f, z)
    total = out.new_zeros(())
    for _ in range(samples):
        noise = torch.empty_like(out).normal_(generator=generator)
        product = _vjp(point, out, noise, create_graph=torch.is_grad_enabled())
        total = total + product.square().sum()
    return total / (samples * max(1, out.numel()))


def residual_penalty(f: Callable[[State], State], z: State) -> Tensor:
    """Return ‖f(z) − z‖² / ‖z‖², averaged over the batch, at the z where a solve has stopped.

    Differentiable in everything that f closes over; z is a constant.  Training therefore pulls f(z)
    towards z, and f keeps an equilibrium that the solver can find.  Costs one evaluation of f.  If
    f has dropout, call this in the same `hold` as the solve, so that both use one mask.

    Examples:
        >>> import torch, gdeq
        >>> linear = torch.nn.Linear(8, 8)
        >>> f = lambda z: torch.tanh(0.5 * linear(z) + 1)
        >>> solution = gdeq.solve(f, torch.zeros(2, 8))
        >>> gdeq.residual_penalty(f, solution.z).item() < 1e-9  # at a fixed point there is none
        True
    """
    space = StateSpace(z)
    on_vectors = StateMap(space, f)
    torch.clear_autocast_cache()
    with full_precision(space.device):
        here = space.pack(z).detach()
        size = here.square().sum(1)
        squared = (on_vectors(here) - here).square().sum(1)
        relative = squared / torch.where(size > 0, size, 1.0)
        return relative.sum() / max(1, len(relative))


def spectral_radius(
    f: Callable[[State], State],
    z: State,
    iterations: int = 50,
    generator: torch.Generator | None = None,
) -> Tensor:  # (batch,)
    """Return the spectral radius of ∂f/∂z at z for each sample, by power iteration on Jᵀ.

    The result is the mean growth over the second half of the iterations.  It is also right if the
    largest eigenvalues are a complex pair, for which the growth of single steps never settles.

    Examples:
        >>> import torch, gdeq
        >>> A = torch.diag(torch.tensor([0.3, -0.9]))
        >>> gdeq.spectral_radius(lambda z: z @ A.T, torch.zeros(1, 2))
        tensor([0.9000])
    """
    count_of("iterations", iterations, 2)
    point, out = _linearize(f, z)
    with torch.no_grad(), full_precision(out.device):
        u = torch.empty_like(out).normal_(generator=generator)
        u = u / norm(u).unsqueeze(1)
        growth = u.new_zeros(len(u))
        dead = torch.zeros_like(growth, dtype=torch.bool)
        for i in range(iterations):
            u = _vjp(point, out, u)
            size = norm(u)
            dead |= size == 0  # nilpotent: the radius is zero
            size = torch.where(dead, 1.0, size)
            u = u / size.unsqueeze(1)
            if i >= iterations // 2:
                growth += size.log()
        radius = (growth / (iterations - iterations // 2)).exp()
        return torch.where(dead, 0.0, radius)


def _linearize(f: Callable[[State], State], z: State) -> tuple[Tensor, Tensor]:
    """f at z with a graph from a fresh input: -> input (batch, d), output (batch, d)."""
    space = StateSpace(z)
    on_vectors = StateMap(space, f)  # under the autocast state of the caller
    point = space.pack(z).detach().requires_grad_()
    torch.clear_autocast_cache()
    with torch.enable_grad(), full_precision(space.device):
        out = on_vectors(point)
    if not out.requires_grad:
        raise ValueError("f(z) does not depend on z through autograd, so it has no Jacobian")
    return point, out


def _vjp(point: Tensor, out: Tensor, u: Tensor, create_graph: bool = False) -> Tensor:
    """Jᵀu, zero where f does not depend on z."""
    (product,) = torch.autograd.grad(
        out, point, u, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return torch.zeros_like(u) if product is None else product
