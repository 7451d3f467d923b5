"""Maps with known answers: small, in float64, their dense Jacobians at hand.

Nothing here uses gdeq: what the library computes is compared with this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d

State = Any
Root = Callable[[Tensor], Tensor]  # g(z) = f(z) − z of one sample: (d,) -> (d,)


# --- states ---------------------------------------------------------------------------------------


def map_leaves(fn: Callable[..., Tensor], *states: State) -> State:
    """fn on the tensors that stand at the same place of each state."""
    first = states[0]
    if isinstance(first, Tensor):
        return fn(*states)
    if isinstance(first, dict):
        return {key: map_leaves(fn, *(state[key] for state in states)) for key in first}
    return type(first)(map_leaves(fn, *parts) for parts in zip(*states, strict=True))


def leaves(state: State) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, state)
    return found


def pack(state: State) -> Tensor:  # -> (batch, d)
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves(state)], dim=1)


def unpack(flat: Tensor, template: State) -> State:  # flat: (batch, d)
    sizes = [leaf[0].numel() for leaf in leaves(template)]
    parts = iter(flat.split(sizes, dim=1))
    return map_leaves(lambda leaf: next(parts).reshape(len(flat), *leaf.shape[1:]), template)


# --- problems -------------------------------------------------------------------------------------


class Problem(nn.Module):
    """f(z) = φ(L z + x) + shift with a linear coupling L of all parts of the state.

    x and shift are given per sample, packed: (batch, d).  Because ∂f/∂shift is the identity, the
    gradient that arrives at ``shift`` is the w of the gradient method itself.

    radius: spectral radius of L.
    activation: φ; the identity makes f affine.
    """

    template: State  # what a batch of one looks like

    def __init__(
        self,
        batch: int = 3,
        radius: float = 0.6,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))

        self.activation = activation
        self.weights = nn.ParameterList(draw(*shape) for shape in self.weight_shapes())
        self.x = draw(batch, self.size)
        self.shift = draw(batch, self.size)
        with torch.no_grad():
            self.shift.mul_(0.1)
            largest = torch.linalg.eigvals(self.coupling_matrix()).abs().max()
            for weight in self.weights:
                weight.mul_(radius / largest)

    def weight_shapes(self) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def couple(self, z: State) -> State:
        """L z; linear in z, and in the weights taken together."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        return pack(self.template).shape[1]

    @property
    def z0(self) -> State:
        return self.unpack(torch.zeros_like(self.x))

    def unpack(self, flat: Tensor) -> State:  # (batch, d)
        return unpack(flat, self.template)

    def forward(self, z: State) -> State:
        inner = map_leaves(torch.add, self.couple(z), self.unpack(self.x))
        return map_leaves(lambda a, s: self.activation(a) + s, inner, self.unpack(self.shift))

    def on_vectors(self, flat: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        return pack(self(self.unpack(flat)))

    def alone(self, sample: int) -> Problem:
        """The problem of one sample, as a batch of one."""
        other = copy.deepcopy(self)
        other.x = nn.Parameter(self.x[sample : sample + 1].detach().clone())
        other.shift = nn.Parameter(self.shift[sample : sample + 1].detach().clone())
        return other

    def root(self, sample: int) -> Root:
        """g(z) = f(z) − z of one sample, without autograd."""
        one = self.alone(sample).requires_grad_(False)
        return lambda z: one.on_vectors(z.unsqueeze(0)).squeeze(0) - z

    def coupling_matrix(self) -> Tensor:  # -> (d, d)
        eye = torch.eye(self.size, dtype=self.x.dtype, device=self.x.device)
        return pack(self.couple(self.unpack(eye))).T

    def dense_jacobian(self, z: State) -> Tensor:  # -> (batch, d, d)
        """∂f/∂z of each sample over the packed state."""
        flat = pack(z).detach().requires_grad_()
        out = self.on_vectors(flat)
        rows = [
            torch.autograd.grad(out[:, i].sum(), flat, retain_graph=True)[0]
            for i in range(self.size)
        ]
        return torch.stack(rows, dim=1)

    def cotangent(self) -> Tensor:  # -> (batch, d)
        """Some v = ∂ℓ/∂z, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        v = torch.randn(self.x.shape, dtype=self.x.dtype, generator=generator)
        return v.to(self.x.device)

    def equilibrium(self) -> State:
        """z* by Newton's method with the dense Jacobian, to machine precision."""
        flat = torch.zeros_like(self.x)
        for _ in range(60):  # into the basin of Newton's method, for radius < 1
            flat = self.on_vectors(flat).detach()
        eye = torch.eye(self.size, dtype=flat.dtype, device=flat.device)
        for _ in range(4):
            g = self.on_vectors(flat).detach() - flat
            jacobian = self.dense_jacobian(self.unpack(flat))
            flat = flat - torch.linalg.solve(jacobian - eye, g)
        return self.unpack(flat)


class Dense(Problem):
    """A full matrix over the packed state, for any structure; (batch, 6) by default."""

    template: State = torch.empty(1, 6)

    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [(self.size, self.size)]

    def couple(self, z: State) -> State:
        return self.unpack(pack(z) @ self.weights[0].T)


class Named(Dense):
    """A dict, its parts of different shapes."""

    template: State = {"slow": torch.empty(1, 3), "fast": torch.empty(1, 2, 2)}  # noqa: RUF012


class Nested(Dense):
    """A list in a dict in a list, and a tuple of one."""

    template: State = [  # noqa: RUF012
        torch.empty(1, 2),
        {"a": [torch.empty(1, 1, 2), torch.empty(1, 3)], "b": (torch.empty(1),)},
    ]


class Image(Problem):
    """(batch, channels, height, width), coupled by a convolution."""

    template: State = torch.empty(1, 2, 3, 3)

    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [(2, 2, 3, 3)]

    def couple(self, z: State) -> State:
        return conv2d(z, self.weights[0], padding=1)


class Multiscale(Problem):
    """Two resolutions in a tuple: each is convolved, and they are coupled down and up."""

    template: State = (torch.empty(1, 1, 4, 4), torch.empty(1, 2, 2, 2))

    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [(1, 1, 3, 3), (2, 2, 3, 3), (2, 1, 2, 2), (2, 1, 2, 2)]

    def couple(self, z: State) -> State:
        fine, coarse = z
        at_fine, at_coarse, down, up = self.weights
        return (
            conv2d(fine, at_fine, padding=1) + conv_transpose2d(coarse, up, stride=2),
            conv2d(coarse, at_coarse, padding=1) + conv2d(fine, down, stride=2),
        )


class Wide(Dense):
    """Enough dimensions that Broyden's method does not exhaust them in a few steps."""

    template: State = torch.empty(1, 24)


def identity(a: Tensor) -> Tensor:
    return a


class Tiny(Dense):
    """For finite differences in every single entry."""

    template: State = torch.empty(1, 3)


def assert_near(found: Tensor, expected: Tensor, accuracy: float, what: str = "") -> None:
    torch.testing.assert_close(
        found, expected, rtol=accuracy, atol=accuracy, msg=lambda text: f"{what}\n{text}"
    )


# --- the adjoint equation, densely ----------------------------------------------------------------


def transposed_system(jacobian: Tensor) -> Tensor:  # (batch, d, d) -> (batch, d, d)
    """(I − J)ᵀ."""
    eye = torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device)
    return (eye - jacobian).mT


def times(matrix: Tensor, vector: Tensor) -> Tensor:  # (batch, d, d), (batch, d) -> (batch, d)
    return torch.einsum("nij,nj->ni", matrix, vector)


def exact_cotangent(jacobian: Tensor, v: Tensor) -> Tensor:
    return torch.linalg.solve(transposed_system(jacobian), v)


def adjoint_residual(jacobian: Tensor, w: Tensor, v: Tensor) -> Tensor:  # -> (batch,)
    """‖(I − Jᵀ)w − v‖ / ‖v‖."""
    return (times(transposed_system(jacobian), w) - v).norm(dim=1) / v.norm(dim=1)


def phantom_matrix(jacobian: Tensor, steps: int, damping: float) -> Tensor:  # -> (batch, d, d)
    """A = λ Σ_{i<k} Mⁱ with M = λJ + (1 − λ)I, the paper's NPG."""
    eye = torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device)
    M = damping * jacobian + (1 - damping) * eye
    return damping * sum(torch.linalg.matrix_power(M, i) for i in range(steps))


# --- Broyden's method of one sample, densely, from the paper's formulas ---------------------------


def paper_broyden(
    g: Root, z: Tensor, steps: int, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(z_T, B_T⁻¹), literally as in section 3 of the paper: (d,), (d, d)."""
    inverse = -torch.eye(len(z), dtype=z.dtype, device=z.device) if inverse is None else inverse
    g_old = g(z)
    for _ in range(steps):
        z_new = z - inverse @ g_old
        g_new = g(z_new)
        dz = z_new - z
        bg = inverse @ g_new
        inverse = inverse - torch.outer(bg, dz @ inverse) / (dz @ (dz + bg))
        z, g_old = z_new, g_new
    return z, inverse


def limited_broyden(
    g: Root,
    z: Tensor,
    steps: int,
    memory: int | None = None,
    max_step: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with at most ``memory`` pairs; the oldest goes before the new one is made.

    After a pair was dropped, B⁻¹g is no longer −Δz, and the secant form of the update is needed.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def inverse() -> Tensor:
        start = -torch.eye(len(z), dtype=z.dtype, device=z.device)
        return start + sum(torch.outer(u, v) for u, v in pairs)

    g_old = g(z)
    for _ in range(steps):
        s = -inverse() @ g_old
        if max_step is not None:
            s = s * min(1.0, float(max_step * max(z.norm(), 1.0) / s.norm()))
        g_new = g(z + s)
        if memory is not None and len(pairs) == memory:
            pairs.pop(0)
        B = inverse()
        By = B @ (g_new - g_old)
        pairs.append(((s - By) / (s @ By), s @ B))
        z, g_old = z + s, g_new
    return z, inverse()


# --- GDEQ with refinement, densely ----------------------------------------------------------------
# A = (I − J)ᵀ is the adjoint system, P ≈ A⁻¹ what the forward solve left: both (d, d).


def watched(f: Callable[[State], State]) -> tuple[Callable[[State], State], list[Tensor]]:
    """f, and a list that gains each z that it is given, packed."""
    seen: list[Tensor] = []

    def watching(z: State) -> State:
        seen.append(pack(z).detach().clone())
        return f(z)

    return watching, seen


def secant_inverse(
    g: Root,
    iterates: list[Tensor],  # (d,) each
    w: Tensor | None = None,  # (d,)
    image: Tensor | None = None,  # (d,)
) -> Tensor:  # (d, d)
    """H ≈ (J − I)⁻¹ of the last 15 secants, by the formula of `gdeq.operators`.

    The ridge of each is 0.2, and more the further z has gone since, beside half its length.  Once
    image = (I − J)ᵀw is known, also the less the secant fits it, beside 0.02.
    """
    s = torch.stack([b - a for a, b in pairwise(iterates)][-15:], dim=1)  # (d, secants)
    y = torch.stack([g(b) - g(a) for a, b in pairwise(iterates)][-15:], dim=1)
    far, size = s.norm(dim=0).flip(0).cumsum(0).flip(0), y.norm(dim=0)
    ridge = 0.2**2 * (1 + (far / (0.5 * iterates[-1].norm())) ** 2)
    if w is not None:
        ridge += 0.2**2 * ((s.T @ image + y.T @ w) / (0.02 * size * w.norm())) ** 2
    t, y = (s + y) / size, y / size
    return -torch.eye(len(s)).to(s) + t @ torch.linalg.solve(y.T @ y + torch.diag(ridge), y.T)


def refined_cotangent(
    A: Tensor,
    P: Tensor,
    v: Tensor,
    refine: int,
    tested: Tensor | None = None,
    tolerance: float = -1.0,
) -> Tensor:  # -> (d,)
    """Broyden's method on v − Aw from 0 and the inverse −P: w = Pv is its first step.

    The factor by which the last step is longer than q, Broyden's step without an update, is bounded
    by 1.5 times the one of smallest residual, or 1.5.

    tested: takes the place of P once the first VJP is known.
    tolerance: the first w with a residual of so many ‖v‖ is the result.
    """
    w, P = P @ v, P if tested is None else tested
    step, before = w, v
    for left in reversed(range(refine)):
        r = v - A @ w
        if r.norm() <= tolerance * v.norm():
            return w
        q, y, squared = P @ r, before - r, step @ step
        factor = squared / (squared - step @ q)
        if left == 0:
            most = 1.5 * max(1.0, float((before @ y).abs() / (y @ y)))
            factor = factor.clamp(-most, most)
        P = P + torch.outer(factor * q, step @ P) / squared
        w, step, before = w + factor * q, factor * q, r
    return w
