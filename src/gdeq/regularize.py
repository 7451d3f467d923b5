"""What keeps an equilibrium well behaved: a Jacobian penalty, the spectral radius, and weight
normalisation and dropout that hold still during a solve."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gdeq.operators import norm
from gdeq.state import State, StateSpace, Vectorized, full_precision


class Held(nn.Module):
    """A module whose draw or derived value must stay the same during a solve.

    Inside `hold` the value is made once, at its first use, and kept; outside it is made at every
    use.  A subclass calls ``self.held(make)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._grad = False
        self._value: Any = None

    def held(self, make: Callable[[], Any]) -> Any:
        if self._depth == 0:
            return make()
        if self._value is None:
            # The solve runs without autograd, but what it keeps is also used with it afterwards.
            with torch.set_grad_enabled(self._grad):
                self._value = make()
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_depth": 0, "_value": None}


@contextlib.contextmanager
def hold(cell: object) -> Iterator[None]:
    """While this is open, the dropout masks and normalised weights in ``cell`` do not change.

    `DEQ` opens it around each call.  Around `fixed_point` with an f of your own, open it yourself.
    Nested: what an outer solve holds, an inner one does not renew.
    """
    owner = getattr(cell, "__self__", cell)  # of a bound method, its module
    modules = []
    if isinstance(owner, nn.Module):
        modules = [m for m in owner.modules() if isinstance(m, Held)]
    for module in modules:
        if module._depth == 0:
            module._grad = torch.is_grad_enabled()
        module._depth += 1
    try:
        yield
    finally:
        for module in modules:
            module._depth -= 1
            if module._depth == 0:
                module._value = None


class VariationalDropout(Held):
    """Dropout with one mask for the whole solve: f must be one function while z is sought.

    channelwise: drop whole channels, ``(batch, channels, ...)``, as MDEQ does.
    """

    def __init__(self, p: float = 0.5, channelwise: bool = False) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
            raise ValueError(f"VariationalDropout.p must be at least 0 and below 1, got {p!r}")
        self.p = float(p)
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = x.shape
        if self.channelwise:
            if x.dim() < 2:
                raise ValueError(f"channelwise dropout needs (batch, channels, ...), got {shape}")
            shape = x.shape[:2] + (1,) * (x.dim() - 2)
        mask = self.held(lambda: self._draw(x, shape))
        if mask.shape != shape:
            raise RuntimeError(
                f"VariationalDropout was used with shape {tuple(mask.shape)} and then "
                f"{tuple(shape)} in one solve; use one module for each place"
            )
        return x * mask.to(x.dtype)

    def _draw(self, x: Tensor, shape: torch.Size) -> Tensor:
        keep = 1 - self.p
        return torch.empty(shape, device=x.device).bernoulli_(keep) / keep

    def extra_repr(self) -> str:
        return f"p={self.p}, channelwise={self.channelwise}"


class _WeightNorm(Held):
    """weight = g · v / ‖v‖, the norm taken over all dimensions but ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return self.held(lambda: v * (g / torch.norm_except_dim(v, 2, self.dim)))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.norm_except_dim(weight, 2, self.dim), weight


def weight_norm(module: nn.Module, name: str = "weight", dim: int = 0) -> nn.Module:
    """Weight normalisation that is computed once per solve instead of once per evaluation.

    Parameters are named as by `torch.nn.utils.parametrizations.weight_norm`, so state dicts are
    exchangeable; undo with `torch.nn.utils.parametrize.remove_parametrizations`.
    """
    if not isinstance(getattr(module, name, None), Tensor):
        layers = [
            "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("."))
            for path, layer in module.named_modules()
            if isinstance(getattr(layer, name, None), Tensor)
        ]
        hint = "; pass a layer that has one: module" + ", module".join(layers) if layers else ""
        raise ValueError(f"{type(module).__name__} has no tensor {name!r} to normalise{hint}")
    parametrize.register_parametrization(module, name, _WeightNorm(dim), unsafe=True)
    return module


def _linearize(f: Callable[[State], State], z: State) -> tuple[Tensor, Tensor]:
    """f at z with a graph from a fresh input: -> input (batch, d), output (batch, d)."""
    space = StateSpace(z)
    on_vectors: Vectorized = space.vectorize(f)
    point = space.start(z).detach().requires_grad_()
    torch.clear_autocast_cache()
    with torch.enable_grad(), full_precision(space.device):
        out = on_vectors(point)
    if not out.requires_grad:
        raise ValueError("f(z) does not depend on z through autograd; its Jacobian is not there")
    return point, out


def _vjp(point: Tensor, out: Tensor, u: Tensor, create_graph: bool = False) -> Tensor:
    """Jᵀu, zero where f does not depend on z."""
    (product,) = torch.autograd.grad(
        out, point, u, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return torch.zeros_like(u) if product is None else product


def jacobian_penalty(
    f: Callable[[State], State],
    z: State,
    samples: int = 1,
    generator: torch.Generator | None = None,
    step: float | None = None,
) -> Tensor:
    """‖∂f/∂z‖²_F / d at z, averaged over the batch: Hutchinson's estimate (Bai et al. 2021).

    E‖Jᵀε‖² = tr(JJᵀ) for ε ~ N(0, I).  Differentiable in all that f closes over; z is taken as
    given.  Add it to the loss with a small weight to hold the spectral radius down.

    step: None for the derivative itself, whose own derivative is a double backward pass through f.
        A number for E‖Jε‖² from differences f(z + δ) − f(z − δ), with ‖δ‖ = step·‖z‖: two
        evaluations and a plain backward pass.  It must stand out from the rounding of f: about
        0.1 in bfloat16, 0.01 in float32.  Long steps see less of a curved f (on an untrained
        MDEQ 7 % less with 0.1), and all tensors of the state get the same absolute noise.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be an integer of at least 1, got {samples!r}")
    if step is None:
        return _by_derivative(f, z, samples, generator)
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 < step < math.inf:
        raise ValueError(f"step must be a positive number or None, got {step!r}")
    return _by_differences(f, z, samples, generator, float(step))


def _by_derivative(
    f: Callable[[State], State], z: State, samples: int, generator: torch.Generator | None
) -> Tensor:
    point, out = _linearize(f, z)
    total = out.new_zeros(())
    for _ in range(samples):
        noise = torch.empty_like(out).normal_(generator=generator)
        product = _vjp(point, out, noise, create_graph=torch.is_grad_enabled())
        total = total + product.square().sum()
    return total / (samples * max(1, out.numel()))


def _by_differences(
    f: Callable[[State], State],
    z: State,
    samples: int,
    generator: torch.Generator | None,
    step: float,
) -> Tensor:
    space = StateSpace(z)
    on_vectors = space.vectorize(f)
    torch.clear_autocast_cache()
    with full_precision(space.device):
        here = space.pack(z).detach()
        length = norm(here)
        length = step * torch.where(length > 0, length, 1.0)
        total = here.new_zeros(())
        for _ in range(samples):
            noise = torch.empty_like(here).normal_(generator=generator)
            noise *= (length / norm(noise)).unsqueeze(1)
            # As f will see them, which may be in half precision.
            ahead, behind = (space.pack(space.unpack(here + way * noise)) for way in (1, -1))
            change = on_vectors(ahead) - on_vectors(behind)
            moved = (ahead - behind).square().sum(1)
            ratio = change.square().sum(1) / torch.where(moved > 0, moved, 1.0)
            total = total + ratio.sum() / max(1, len(ratio))
    return total / samples


def residual_penalty(f: Callable[[State], State], z: State) -> Tensor:
    """‖f(z) − z‖² / ‖z‖², averaged over the batch, at the z where a solve has stopped.

    Differentiable in all that f closes over; z is taken as given, so that training draws f(z) to z:
    f keeps an equilibrium that its solver finds in the steps that it has.  One evaluation of f.
    Solve and call it within one `hold` where f has dropout: with another mask it is another f.
    """
    space = StateSpace(z)
    on_vectors = space.vectorize(f)
    torch.clear_autocast_cache()
    with full_precision(space.device):
        here = space.start(z).detach()
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
    """The spectral radius of ∂f/∂z at z for each sample, by power iteration on Jᵀ.

    It is the mean growth over the later half of the iterations, which also holds when the largest
    eigenvalues are a complex pair and the growth of single steps never settles.
    """
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 2:
        raise ValueError(f"iterations must be an integer of at least 2, got {iterations!r}")
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
