"""The inverse-Jacobian estimate of Broyden's method as a linear operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.state import State, StateSpace, full_precision


@dataclass(frozen=True)
class LowRankInverse:
    """B⁻¹ = B₀⁻¹ + Σᵢ uᵢ vᵢᵀ for every sample, with B₀⁻¹ = −I or an earlier estimate.

    It stands for (∂f/∂z − I)⁻¹.  Unused places hold zeros, so they add nothing.
    """

    u: Tensor  # (batch, rank, d)
    v: Tensor  # (batch, rank, d)
    base: LowRankInverse | None = None

    @property
    def rank(self) -> int:
        """The largest number of rank-one terms that a sample holds."""
        return self.u.shape[1] + (self.base.rank if self.base else 0)

    @property
    def T(self) -> LowRankInverse:
        """B⁻ᵀ; shares the stored vectors."""
        return LowRankInverse(self.v, self.u, self.base.T if self.base else None)

    def matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻¹x."""
        start = self.base.matvec(x) if self.base else -x
        if self.u.shape[1] == 0:
            return start
        weights = torch.bmm(self.v, x.unsqueeze(2))  # (batch, rank, 1)
        return torch.baddbmm(start.unsqueeze(1), weights.transpose(1, 2), self.u).squeeze(1)

    def rmatvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻ᵀx."""
        return self.T.matvec(x)

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        """Dense, for tests: d² numbers a sample."""
        batch, _, d = self.u.shape
        if self.base:
            start = self.base.as_matrix()
        else:
            eye = torch.eye(d, dtype=self.u.dtype, device=self.u.device)
            start = -eye.expand(batch, d, d)
        return start + self.u.transpose(1, 2) @ self.v


@dataclass(frozen=True)
class StateInverse:
    """The same operator for the user: takes a batched vector or a state, returns what it took."""

    vectors: LowRankInverse
    space: StateSpace

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

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        """Dense, over the packed state; for tests."""
        return self.vectors.as_matrix()

    def _apply(self, operator: LowRankInverse, v: State) -> State:
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

    Summing in float64 costs nothing on a GPU.  On a CPU it does, but there a look at the plain
    norms is free and says whether, and for which samples, it is needed.
    """
    if vectors[0].device.type != "cpu" and vectors[0].dtype == torch.float32:
        return tuple(
            torch.linalg.vector_norm(a, dim=1, dtype=torch.float64).to(a.dtype) for a in vectors
        )
    plain = tuple(norm(a) for a in vectors)
    if vectors[0].device.type == "cpu" and plain[0].numel():
        least, largest = torch.stack(plain).aminmax()
        if least > 1e-15 and largest < 1e15:
            return plain
    return tuple(_careful_norm(a, size) for a, size in zip(vectors, plain, strict=True))


def _careful_norm(a: Tensor, plain: Tensor) -> Tensor:  # (batch, d), (batch,) -> (batch,)
    size = torch.linalg.vector_norm(a, float("inf"), dim=1) if a.shape[1] else plain
    unit = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    sound = (plain > 1e-15) & (plain < 1e15)
    return torch.where(sound, plain, norm(a / unit.unsqueeze(1)) * unit)
