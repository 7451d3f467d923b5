"""The last secants of a solve, and an inverse that is safe to differentiate with.

Between two iterates z moves by s, and g(z) = f(z) − z by y ≈ (J − I)s.  With one column a secant in
S and Y, the matrix nearest to −I that maps every y to its s is

    H = −I + (S + Y)(YᵀY)⁻¹Yᵀ  ≈  (J − I)⁻¹.

Anderson acceleration steps by −Hg (Walker & Ni 2011); a gradient needs its transpose.  The exact
w* = (I − J)⁻ᵀv satisfies Yᵀw* = −Sᵀv, and −Hᵀv is the vector nearest to v that does so too: a
projection of v towards w*.  Where f is affine it is never further from w* than v is, which nobody
can say of Broyden's inverse: after a long solve that can be orders of magnitude too long in
directions that no step explored.

That holds for an affine f.  Where f is curved, a secant says less the further from z it was taken,
and one across a kink of f may say anything.  So columns are scaled to length one, and each has a
ridge that grows with its distance from z, and with its misfit once a VJP has shown it.  The ridge
also keeps down what only differences of nearly parallel secants say: that is mostly curvature and
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdeq.operators import LowRankInverse, norm, relative

# Chosen on the maps of tests/fields.py (benchmarks/gradients.py): 10 secants are worse, ridges from
# 0.1 to 0.4 differ little.  More secants help after solves of more steps, but each takes two
# vectors, and of more than 16 rows torch.linalg.inv_ex waits for the device, which a recorded step
# may not.
COUNT = 15
RIDGE = 0.2
NEAR = 0.5  # beside ‖z‖: at this distance from z the ridge of a secant, squared, has doubled
FIT = 0.02  # and at this misfit; from 0.01 to 0.03 differ little


@dataclass
class Secants:
    """The last `COUNT` secants of every sample.  Unused places hold zeros.

    One more place is written to at every step, and kept only if the secant is more than rounding.
    """

    s: Tensor  # (batch, places, d)
    y: Tensor  # (batch, places, d)
    far: Tensor  # (batch, places) how far z has gone since each of them began
    count: Tensor  # (batch,) kept so far; the place that is free is count mod places
    size: Tensor  # (batch,) ‖z‖; 0 where an earlier iterate is returned: it is far from all secants

    @staticmethod
    def empty(z: Tensor, steps: int) -> Secants:  # (batch, d)
        batch, d = z.shape
        places = min(COUNT, steps) + 1
        s, y = z.new_zeros(2, batch, places, d)
        count = torch.zeros(batch, dtype=torch.long, device=z.device)
        return Secants(s, y, z.new_zeros(batch, places), count, z.new_zeros(batch))

    def _place(self) -> tuple[Tensor, Tensor]:
        """The free place of every sample, as an index."""
        return torch.arange(len(self.s), device=self.s.device), self.count % self.s.shape[1]

    def note(self, s: Tensor, y: Tensor, seen: Tensor) -> None:  # (batch, d) twice, (batch,)
        """Take in one step, and keep its secant of the samples for which y is more than rounding.

        Of a sample that does not move s is zero.
        """
        place, length = self._place(), norm(s)
        self.s[place], self.y[place] = s, y
        self.far += length.unsqueeze(1)
        self.far[place] = length
        self.count = self.count + seen

    def close(self, z: Tensor, ended: Tensor) -> None:  # (batch, d), (batch,)
        """Clear the free place.  ended: whether the z that is returned is the last iterate."""
        place = self._place()
        self.s[place], self.y[place] = 0.0, 0.0
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
