"""Estimates of (∂f/∂z − I)⁻¹ as linear operators, by secants too, and norms that are safe."""

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


# Chosen on the maps of tests/fields.py (benchmarks/gradients.py): 10 secants are worse, ridges from
# 0.1 to 0.4 differ little.  More secants help after solves of more steps, but each takes two
# vectors, and of more than 16 rows torch.linalg.inv_ex waits for the device, which a recorded step
# may not.
MOST_SECANTS = 15
RIDGE = 0.2
NEAR = 0.5  # beside ‖z‖: at this distance from z the ridge of a secant, squared, has doubled
FIT = 0.02  # and at this misfit; from 0.01 to 0.03 differ little


@dataclass
class Secants:
    """The last `MOST_SECANTS` secants of every sample, and the inverse that follows from them.

    Between two iterates z moves by s, and g(z) = f(z) − z by y ≈ (J − I)s.  With one column a
    secant in S and Y, the matrix nearest to −I that maps every y to its s is

        H = −I + (S + Y)(YᵀY)⁻¹Yᵀ  ≈  (J − I)⁻¹.

    Anderson acceleration steps by −Hg (Walker & Ni 2011); a gradient needs its transpose.  The
    exact w* = (I − J)⁻ᵀv satisfies Yᵀw* = −Sᵀv, and −Hᵀv is the vector nearest to v that does so
    too: a projection of v towards w*.  Where f is affine it is never further from w* than v is,
    which nobody can say of Broyden's inverse: after a long solve that can be orders of magnitude
    too long in directions that no step explored.

    That holds for an affine f.  Where f is curved, a secant says less the further from z it was
    taken, and one across a kink of f may say anything.  So columns are scaled to length one, and
    each has a ridge that grows with its distance from z, and with its misfit once a VJP has shown
    it.  The ridge also keeps down what only differences of nearly parallel secants say: that is
    mostly curvature and rounding.

    Unused places hold zeros.  One more place is written to at every step, and kept only if the
    secant is more than rounding.
    """

    s: Tensor  # (batch, places, d)
    y: Tensor  # (batch, places, d)
    far: Tensor  # (batch, places) how far z has gone since each of them began
    count: Tensor  # (batch,) kept so far; the place that is free is count mod places
    size: Tensor  # (batch,) ‖z‖; 0 where an earlier iterate is returned: it is far from all secants
    noted: int = 0  # steps; places beyond hold anything, until `close` drops them

    @staticmethod
    def empty(z: Tensor, steps: int) -> Secants:  # (batch, d)
        batch, d = z.shape
        places = min(MOST_SECANTS, steps) + 1
        s, y = z.new_empty(2, batch, places, d)  # most solves need few of them
        count = torch.zeros(batch, dtype=torch.long, device=z.device)
        return Secants(s, y, z.new_zeros(batch, places), count, z.new_zeros(batch))

    def _place(self) -> tuple[Tensor, Tensor]:
        """The free place of every sample, as an index."""
        return torch.arange(len(self.s), device=self.s.device), self.count % self.s.shape[1]

    def note(self, s: Tensor, y: Tensor, seen: Tensor) -> None:  # (batch, d) twice, (batch,)
        """Take in one step, and keep its secant of the samples for which y is more than rounding.

        Of a sample that does not move s is zero.
        """
        if self.noted < self.s.shape[1]:  # the first step that comes to this place
            self.s[:, self.noted], self.y[:, self.noted] = 0.0, 0.0
        self.noted += 1
        place, length = self._place(), norm(s)
        self.s[place], self.y[place] = s, y
        self.far += length.unsqueeze(1)
        self.far[place] = length
        self.count = self.count + seen

    def close(self, z: Tensor, ended: Tensor) -> None:  # (batch, d), (batch,)
        """Clear the free place and drop those that no step has come to.

        ended: whether the z that is returned is the last iterate.
        """
        place, used = self._place(), max(1, self.noted)
        self.s[place], self.y[place] = 0.0, 0.0
        self.s, self.y, self.far = self.s[:, :used], self.y[:, :used], self.far[:, :used]
        self.size = torch.where(ended, norm(z), 0.0)

    def slowest(self) -> Tensor:  # -> (batch,)
        """The largest ‖s‖/‖y‖.  (I − J)⁻¹ is at least about so large."""
        sizes = [torch.linalg.vector_norm(vectors, dim=2) for vectors in (self.s, self.y)]
        return relative(*sizes).nan_to_num(0.0).amax(dim=1)

    def misfit(self, w: Tensor, image: Tensor) -> Tensor:  # (batch, d) twice -> (batch, places)
        """How far each secant is from the derivative at z, which has image = w − Jᵀw.

        An exact one has sᵀ(w − Jᵀw) = −yᵀw.
        """
        sums = torch.bmm(self.s, image.unsqueeze(2)) + torch.bmm(self.y, w.unsqueeze(2))
        sizes = torch.linalg.vector_norm(self.y, dim=2) * norm(w).unsqueeze(1)
        return relative(sums.squeeze(2).abs(), sizes)

    def inverse(self, misfit: Tensor | None = None) -> LowRankInverse:  # (batch, places)
        """H of every sample; −I where there is no secant.  misfit: of each, once it is known."""
        size = torch.linalg.vector_norm(self.y, dim=2)  # (batch, places)
        used = size > torch.finfo(size.dtype).tiny
        unit = torch.where(used, 1 / torch.where(used, size, 1.0), 0.0)
        # Scaled before they are multiplied: the squares of small secants would vanish in float32.
        y, both = self.y * unit.unsqueeze(2), (self.s + self.y) * unit.unsqueeze(2)
        gram = torch.bmm(y, y.transpose(1, 2)).double()
        doubt = (self.far / (NEAR * self.size).unsqueeze(1)).double() ** 2
        if misfit is not None:
            doubt = doubt + (misfit / FIT).double() ** 2
        ridge = RIDGE**2 * (1 + doubt).nan_to_num(1.0, 1e30).clamp(max=1e30)
        system = gram + torch.diag_embed(torch.where(used, ridge, 1.0))
        # inv_ex does not wait for the device to look for errors: the ridge keeps it regular.
        inverse, _ = torch.linalg.inv_ex(system)
        return LowRankInverse(torch.bmm(inverse.to(size.dtype), both), y)


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
