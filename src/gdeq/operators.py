"""Estimates of (∂f/∂z − I)⁻¹ as linear operators, and norms that do not overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gdeq.context import look_is_free
from gdeq.options import count
from gdeq.state import State, StateSpace, full_precision


class Inverse(Protocol):
    """An estimate B⁻¹ of (∂f/∂z − I)⁻¹ for every sample; vectors are ``(batch, d)``."""

    @property
    def rank(self) -> int:
        """The largest number of rank-one terms that a sample holds."""

    @property
    def T(self) -> Inverse:
        """B⁻ᵀ; shares the stored vectors."""

    def matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻¹x."""

    def negative_matvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """−B⁻¹x; operators that get the sign at no cost override it."""
        return -self.matvec(x)

    def rmatvec(self, x: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        """B⁻ᵀx."""
        return self.T.matvec(x)

    def trusted(self, x: Tensor, longest: float) -> tuple[Tensor, Inverse]:  # (batch, d)
        """−B⁻¹x and B⁻¹, or x and −I for samples where B⁻¹x is over ``longest`` times as long."""
        product = self.negative_matvec(x)
        mask = norm(product) <= longest * norm(x)  # (batch,)
        return torch.where(mask.unsqueeze(1), product, x), self.only(mask)

    def only(self, mask: Tensor) -> Inverse:  # (batch,)
        """The same for the samples of the mask, and −I for the others."""

    def step_length(self) -> Tensor | None:  # -> (batch,)
        """‖B⁻¹g‖ at the z that it belongs to, where the solver has left that."""
        return None

    def as_matrix(self) -> Tensor:  # -> (batch, d, d)
        """Dense, for tests: d² numbers a sample."""

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The long vectors that it keeps in memory."""


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
            return relative(length, *safe_norms(self.space.pack(z)))

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
    """Euclidean norms that are right also where squares over- or underflow; claims rest on them.

    On a CPU a look at the plain norms says whether more care is needed.  Elsewhere float32 is
    summed in float64.
    """
    if vectors[0].device.type != "cpu" and vectors[0].dtype == torch.float32:
        wide = (torch.linalg.vector_norm(a, dim=1, dtype=torch.float64) for a in vectors)
        return tuple(size.to(a.dtype) for size, a in zip(wide, vectors, strict=True))
    plain = tuple(norm(a) for a in vectors)
    if look_is_free(vectors[0].device) and plain[0].numel():
        least, largest = torch.stack(plain).aminmax()
        if least > 1e-15 and largest < 1e15:
            return plain
    return tuple(_careful_norm(a, size) for a, size in zip(vectors, plain, strict=True))


def _careful_norm(a: Tensor, plain: Tensor) -> Tensor:  # (batch, d), (batch,) -> (batch,)
    size = torch.linalg.vector_norm(a, float("inf"), dim=1) if a.shape[1] else plain
    unit = torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    sound = (plain > 1e-15) & (plain < 1e15)
    return torch.where(sound, plain, norm(a / unit.unsqueeze(1)) * unit)


def relative(size: Tensor, reference: Tensor) -> Tensor:  # of one shape
    """size / reference, and 0 for 0/0."""
    return torch.where(size > 0, size / reference, size)
