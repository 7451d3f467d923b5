"""GMRES for the adjoint equation: a linear solver in the same loop as the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from gdeq.operators import Inverse, norm
from gdeq.options import options
from gdeq.solvers.base import Point, Solver, System, advance


@dataclass
class GMRESState:
    right: Tensor  # (batch, d) b, the residual of z = 0
    beta: Tensor  # (batch, 1) its norm
    basis: Tensor  # (batch, rows + 1, d) orthonormal, from b and the images of the directions
    directions: Tensor  # (batch, rows, d)
    hessenberg: Tensor  # (batch, rows + 1, rows): A · directions = basis · hessenberg
    inverse: Inverse | None
    most: int  # rows
    step: int = 0

    def grow(self) -> None:
        more = min(self.step, self.most - self.step)
        self.basis, self.directions = (
            pad(x, (0, 0, 0, more)) for x in (self.basis, self.directions)
        )
        self.hessenberg = pad(self.hessenberg, (0, more, 0, more))


@options
class GMRES(Solver):
    """Flexible GMRES (Saad 1993) without restart, per sample, for affine f only.

    Solves A z = b where g(z) = f(z) − z = b − A z, that is A = I − ∂f/∂z and b = f(0), with one
    evaluation of f per step.  Each iterate has the smallest ‖g‖ among all combinations of the
    directions tried, of which the start is the first.

    An inverse estimate B⁻¹ ≈ (∂f/∂z − I)⁻¹ = −A⁻¹ preconditions from the right: directions are
    −B⁻¹q instead of q, so the residual of the system itself is minimised and reported.  Directions
    are made orthogonal to each other.  Otherwise all of them could be long in the direction that A
    shortens most, and rounding would spoil their images.

    Examples:
        >>> import torch, gdeq
        >>> exact = gdeq.Implicit(gdeq.GMRES(max_iter=50, tol=1e-10))
        >>> x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
        >>> deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z + x), gdeq.Broyden(50, 1e-10), exact)
        >>> deq(x).sum().backward()
        >>> bool(deq.solution.backward.residual.max() < 1e-9)
        True
    """

    linear_only: ClassVar[bool] = True

    def init(self, start: Point, system: System) -> GMRESState:
        (batch, d), right = start.z.shape, system.right
        assert right is not None
        most = min(self.max_iter, d) + 1  # a Krylov space has no more directions than the system
        rows = most if self.tol == 0 else min(most, 8)  # as in `Broyden`: most solves end early
        beta = norm(right).nan_to_num(0.0, 0.0).unsqueeze(1)  # a sample that failed spans nothing
        basis, directions = right.new_zeros(batch, rows + 1, d), right.new_zeros(batch, rows, d)
        basis[:, 0] = torch.where(beta > 0, right, 0.0) / torch.where(beta > 0, beta, 1.0)
        hessenberg = right.new_zeros(batch, rows + 1, rows)
        state = GMRESState(right, beta, basis, directions, hessenberg, system.inverse, most)
        self._extend(start, torch.isfinite(norm(start.g)), state)
        return state

    def propose(self, here: Point, state: GMRESState) -> Tensor:
        if state.step == state.most:
            return here.z
        q = state.basis[:, state.step]
        p = q
        if state.inverse is not None:
            known = normalize(state.directions[:, : state.step], dim=2)
            p = state.inverse.negative_matvec(q)
            for _ in range(2):
                p = p - torch.bmm(torch.bmm(p.unsqueeze(1), known.mT), known).squeeze(1)
            length = norm(p).unsqueeze(1)
            p = torch.where(length > 0, p / length, q)
        # A probe, not an iterate; as long as b, so that subtracting from b loses no digits.
        return state.beta * p

    def learn(
        self, here: Point, there: Point, accepted: Tensor, state: GMRESState
    ) -> tuple[Point, GMRESState]:
        if state.step == state.most:
            return here, state
        self._extend(there, accepted, state)
        return advance(accepted, here, self.minimise(state)), state

    def _extend(self, there: Point, accepted: Tensor, state: GMRESState) -> None:
        """Take in one more direction, z, whose image under A is b − g."""
        j, mask = state.step, accepted.unsqueeze(1)
        if j == state.directions.shape[1]:
            state.grow()
        state.directions[:, j] = torch.where(mask, there.z, 0.0)
        image = torch.where(mask, state.right - there.g, 0.0)
        size = norm(image)
        known = state.basis[:, : j + 1]
        for _ in range(2):  # Gram-Schmidt twice is enough to keep the basis orthogonal
            overlap = torch.bmm(known, image.unsqueeze(2))  # (batch, j + 1, 1)
            state.hessenberg[:, : j + 1, j] += overlap.squeeze(2)
            image = image - torch.bmm(overlap.transpose(1, 2), known).squeeze(1)
        rest = norm(image)
        rest = torch.where(rest > 10 * torch.finfo(rest.dtype).eps * size, rest, 0.0)  # or none
        state.hessenberg[:, j + 1, j] = rest
        state.basis[:, j + 1] = image * torch.where(rest > 0, 1 / rest, 0.0).unsqueeze(1)
        state.step = j + 1

    def minimise(self, state: GMRESState) -> Point:
        """The z of smallest ‖g‖ among all combinations of the directions."""
        j = state.step
        # y = argmin ‖β e_1 − H y‖ by QR, in float64: it is tiny.
        h = state.hessenberg[:, : j + 1, :j].double()
        target = torch.zeros_like(h[:, :, :1])
        target[:, 0] = state.beta.double()
        q, triangle = torch.linalg.qr(h)
        diagonal = triangle.diagonal(dim1=1, dim2=2)  # (batch, j)
        floor = torch.finfo(state.right.dtype).eps * diagonal.abs().amax(dim=1, keepdim=True)
        dead = (diagonal.abs() <= floor).unsqueeze(2)  # a direction without an image of its own
        regular = triangle + torch.diag_embed(dead.squeeze(2).to(h.dtype))
        y = torch.linalg.solve_triangular(
            regular, torch.where(dead, 0.0, q.transpose(1, 2) @ target), upper=True
        )
        left = (target - h @ y).to(state.right.dtype)  # (batch, j + 1, 1)
        move = torch.bmm(y.to(left.dtype).transpose(1, 2), state.directions[:, :j]).squeeze(1)
        g = torch.bmm(left.transpose(1, 2), state.basis[:, : j + 1]).squeeze(1)
        return Point(move, g)
