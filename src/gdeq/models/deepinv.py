"""Any iteration of deepinv as an equilibrium layer.  Needs ``pip install 'gdeq[imaging]'``."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from gdeq import DEQ, GDEQ, Anderson, Gradient, Solver
from gdeq.state import State


class Iteration(nn.Module):
    """One iteration of an algorithm of deepinv: f(z, y, physics).

    The state is an image, or a tuple where the iteration reads more than that (ADMM,
    Douglas-Rachford, Chambolle-Pock).
    """

    def __init__(self, algorithm: Any) -> None:
        from deepinv.optim import BaseOptim, OptimIterator  # noqa: PLC0415 (slow, and only here)
        from deepinv.optim.optim_iterators import FISTAIteration  # noqa: PLC0415

        super().__init__()
        if not isinstance(algorithm, BaseOptim):
            raise TypeError(
                "from_deepinv takes an algorithm of deepinv.optim, such as "
                f"PGD(prior=..., data_fidelity=..., stepsize=1.0), got {type(algorithm).__name__}"
            )
        iterator = algorithm.fixed_point.iterator
        if isinstance(iterator, FISTAIteration):
            raise ValueError(
                "FISTA changes from step to step, so it is no map with a fixed point: take PGD, "
                "and gdeq.Anderson accelerates it"
            )
        many = [k for k, values in algorithm.init_params_algo.items() if len(values) > 1]
        many += [k for k in ("prior", "data_fidelity") if len(getattr(algorithm, k)) > 1]
        if many:
            raise ValueError(
                f"{', '.join(many)} of this algorithm differs from step to step, so it is no map "
                "with a fixed point: give one value for all steps"
            )
        self.algorithm = algorithm
        self.iterator = copy.copy(iterator)
        self.iterator.has_cost = False  # nobody reads it
        # Without unfold=True the algorithm keeps its networks in plain lists.
        parts = [*algorithm.prior, *algorithm.data_fidelity]
        self.learned = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        # The general iteration returns, beside the image, what it made on the way to it.
        self.alone = type(iterator).forward is OptimIterator.forward

    def initial_state(self, y: Tensor, physics: Any, **options: Any) -> State:
        start = self.algorithm.init_iterate_fn(y, physics)["est"]
        return self._step(start, y, physics, **options)  # which has the form of all that follow

    def forward(self, z: State, y: Tensor, physics: Any, **options: Any) -> State:
        return self._step((z,) if isinstance(z, Tensor) else z, y, physics, **options)

    def _step(self, variables: Any, y: Tensor, physics: Any, **options: Any) -> State:
        algorithm = self.algorithm
        found = self.iterator(
            {"est": variables, "cost": None},
            algorithm.update_data_fidelity_fn(0),
            algorithm.update_prior_fn(0),
            algorithm.update_params_fn(0),
            y,
            physics,
            **options,
        )["est"]
        return found[0] if self.alone or len(found) == 1 else tuple(found)


def from_deepinv(
    algorithm: Any,
    solver: Solver | None = Anderson(max_iter=50, tol=1e-4),  # noqa: B008 (frozen)
    gradient: Gradient = GDEQ(refine=1),  # noqa: B008 (frozen)
) -> DEQ:
    """The equilibrium of an algorithm of deepinv, with the solvers and gradients of gdeq.

    Physics, data terms, priors and denoisers are used as they are.

    algorithm: of `deepinv.optim`, such as ``PGD(...)`` or ``ADMM(...)``.  With ``unfold=True`` its
        step sizes and other parameters are trained too.

    Call it as ``deq(y, physics)``: the result is the image, or for an algorithm with several
    variables (ADMM, DRS, primal-dual) a tuple that begins with it.

    Examples:
        >>> import torch, gdeq
        >>> import deepinv as dinv
        >>> from gdeq.models.deepinv import from_deepinv
        >>> physics = dinv.physics.Denoising()
        >>> prior = dinv.optim.PnP(denoiser=dinv.models.MedianFilter())
        >>> pgd = dinv.optim.PGD(prior=prior, data_fidelity=dinv.optim.L2(), stepsize=0.5)
        >>> from_deepinv(pgd)(torch.rand(1, 1, 16, 16), physics).shape
        torch.Size([1, 1, 16, 16])
    """
    return DEQ(Iteration(algorithm), solver, gradient)
