"""The inverse-Jacobian estimate of Broyden's method as a linear operator.

`LowRankInverse` is the readable form; `ProductInverse` is the same operator kept in
half the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.fast.kernels import choice
from gdeq.fast.kernels.autograd import differentiates
from gdeq.options import count
from gdeq.state import State, StateSpace, Vectorized, full_precision


@dataclass(frozen=True)
class Refinement:
    """The numbers in `gdeq.gradients._refine`."""

    times: int  # products with Jᵀ
    precision: float  # of f
    amplification: float
    overshoot: float
    setback: float
    growth: float

    @property
    def rules(self) -> tuple[float, float, float, float]:
        return self.amplification, self.overshoot, self.setback, self.growth


class Inverse:
    """An estimate B⁻¹ of (∂f/∂z − I)⁻¹ for every sample; vectors are ``(batch, d)``."""

    @property
    def rank(self) -> int:
        """The largest number of rank-one terms that a sample holds."""
        raise NotImplementedError

    @property
    def T(self) -> Inverse:
        """B⁻ᵀ; shares the stored vectors."""
        raise NotImplementedError

    def matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻¹x."""
        raise NotImplementedError

    def negative_matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """−B⁻¹x; where the sign is free, without another pass over the vector."""
        return -self.matvec(x)

    def widens(self, x: Tensor) -> bool:
        """Whether x in half precision is as good as the same in float32, and the result rounded."""
        return False

    def rmatvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻ᵀx."""
        return self.T.matvec(x)

    def trusted(self, x: Tensor, longest: float) -> tuple[Tensor, Inverse]:  # (batch, d)
        """−B⁻¹x and B⁻¹; −I stands for B⁻¹ where that makes x more than so many times as long."""
        product = self.negative_matvec(x)
        mask = norm(product) <= longest * norm(x)  # (batch,)
        return torch.where(mask.unsqueeze(1), product, x), self.only(mask)

    def only(self, mask: Tensor) -> Inverse:  # (batch,)
        """The same for the samples of the mask, and −I for the others."""
        raise NotImplementedError

    def step_length(self) -> Tensor | None:  # -> (batch,)
        """‖B⁻¹g‖ at the z that it belongs to, where the solver has left that."""
        return None

    def refined(
        self, w: Tensor, v: Tensor, vjp: Vectorized, how: Refinement
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """What `gdeq.GDEQ` makes of w = −B⁻¹v, (batch, d), where that is fused; else None.

        With it, (batch,) each, how far the last step went, and ‖w‖.

        Then `gdeq.gradients._refine` does the same in more passes over memory.
        """
        return None

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        """Dense, for tests: d² numbers a sample."""
        raise NotImplementedError

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The long vectors that it keeps in memory."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRankInverse(Inverse):
    """B⁻¹ = B₀⁻¹ + Σᵢ uᵢ vᵢᵀ for every sample, with B₀⁻¹ = −I or an earlier estimate.

    Unused places hold zeros, so they add nothing.
    """

    u: Tensor  # (batch, rank, d)
    v: Tensor  # (batch, rank, d)
    base: Inverse | None = None
    length: Tensor | None = None  # (batch,) what `step_length` says

    @property
    def rank(self) -> int:
        return self.u.shape[1] + (self.base.rank if self.base else 0)

    def step_length(self) -> Tensor | None:
        return self.length

    @property
    def T(self) -> LowRankInverse:
        return LowRankInverse(self.v, self.u, self.base.T if self.base else None)

    def matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        if self.u.shape[1] == 0:
            return self.base.matvec(x) if self.base else -x
        start, sign = (self.base.matvec(x), 1) if self.base else (x, -1)
        # Row times matrix: the other way round BLAS takes up to twice as long.
        weights = torch.bmm(x.unsqueeze(1), self.v.transpose(1, 2))  # (batch, 1, rank)
        return torch.baddbmm(start.unsqueeze(1), weights, self.u, beta=sign).squeeze(1)

    def only(self, mask: Tensor) -> LowRankInverse:
        u = torch.where(mask[:, None, None], self.u, 0.0)
        return LowRankInverse(u, self.v, self.base.only(mask) if self.base else None)

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        batch, _, d = self.u.shape
        if self.base:
            start = self.base.as_matrix()
        else:
            eye = torch.eye(d, dtype=self.u.dtype, device=self.u.device)
            start = -eye.expand(batch, d, d)
        return start + self.u.transpose(1, 2) @ self.v

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return self.u, self.v, *(self.base.stored if self.base else ())


@dataclass(frozen=True, repr=False)
class StateInverse:
    """The same operator for the user: takes a batched vector or a state, returns what it took."""

    vectors: Inverse
    space: StateSpace

    def __repr__(self) -> str:
        samples = count(self.space.batch, "sample")
        return f"<inverse of rank {self.rank} for {samples} of {self.space.size}>"

    @property
    def rank(self) -> int:
        """The largest number of rank-one terms that a sample holds."""
        return self.vectors.rank

    def matvec(self, v: State) -> State:
        """B⁻¹v."""
        return self._apply(self.vectors, v)

    def rmatvec(self, v: State) -> State:
        """B⁻ᵀv."""
        return self._apply(self.vectors.T, v)

    def step_beside(self, z: State) -> Tensor | None:  # -> (batch,)
        """‖B⁻¹g‖/‖z‖, z being what it belongs to."""
        length = self.vectors.step_length()
        if length is None:
            return None
        with torch.no_grad(), full_precision(self.space.device):
            (size,) = safe_norms(self.space.pack(z))
        return torch.where(length > 0, length / size, length)

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        """Dense, over the packed state; for tests."""
        return self.vectors.as_matrix()

    def _apply(self, operator: Inverse, v: State) -> State:
        with full_precision(self.space.device):
            if isinstance(v, Tensor) and v.shape == (self.space.batch, self.space.size):
                return operator.matvec(v.to(self.space.dtype)).to(v.dtype)
            return self.space.unpack(operator.matvec(self.space.pack(v)))


def dot(a: Tensor, b: Tensor) -> Tensor:  # (batch, d), (batch, d) -> (batch, 1)
    """The inner product of each sample, as a column."""
    return torch.linalg.vecdot(a, b).unsqueeze(1)


def norm(a: Tensor) -> Tensor:  # (batch, d) -> (batch,)
    """The Euclidean norm of each sample."""
    return torch.linalg.vector_norm(a, dim=1)


def safe_norms(*vectors: Tensor) -> tuple[Tensor, ...]:  # (batch, d) each -> (batch,) each
    """The same, right also where the squares over- or underflow: claims are built on it.

    A GPU sums in float64.  On a CPU a look at the plain norms is free and says whether, and for
    which samples, more care is needed.
    """
    if vectors[0].device.type != "cpu" and vectors[0].dtype == torch.float32:
        return tuple(_norm_by_float64(a) for a in vectors)
    plain = tuple(norm(a) for a in vectors)
    if vectors[0].device.type == "cpu" and plain[0].numel():
        least, largest = torch.stack(plain).aminmax()
        if least > 1e-15 and largest < 1e15:
            return plain
    return tuple(_careful_norm(a, size) for a, size in zip(vectors, plain, strict=True))


def residual_norm(v: Tensor, w: Tensor, product: Tensor) -> Tensor:  # (batch, d) each -> (batch,)
    """‖v − w + Jᵀw‖, as `safe_norms`; product: Jᵀw.  On a GPU in one pass."""
    if choice.chosen(v) == "triton" and not differentiates(v, w, product):
        from gdeq.fast.kernels import lengths  # noqa: PLC0415 (needs Triton)

        if all(lengths.takes(a) for a in (v, w, product)):
            return lengths.residual_norms(v, w, product)
    return safe_norms(v - w + product)[0]


def _norm_by_float64(a: Tensor) -> Tensor:  # (batch, d) -> (batch,)
    if choice.chosen(a) == "triton" and not differentiates(a):
        from gdeq.fast.kernels import lengths  # noqa: PLC0415 (needs Triton)

        if lengths.takes(a):
            return lengths.norms(a)
    return torch.linalg.vector_norm(a, dim=1, dtype=torch.float64).to(a.dtype)


def _careful_norm(a: Tensor, plain: Tensor) -> Tensor:  # (batch, d), (batch,) -> (batch,)
    size = torch.linalg.vector_norm(a, float("inf"), dim=1) if a.shape[1] else plain
    unit = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    sound = (plain > 1e-15) & (plain < 1e15)
    return torch.where(sound, plain, norm(a / unit.unsqueeze(1)) * unit)
