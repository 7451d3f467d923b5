"""The test that the first VJP makes of the secants a refinement starts from."""

from __future__ import annotations

import torch

from gdeq.refinement import Refinement, borne_out, refine
from gdeq.secants import Secants
from problems import times


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def taken(systems, spoiled=()):  # systems: (I − J)ᵀ, (batch, d, d)
    """Six random secants of every sample, those at some places of another map."""
    batch, d, _ = systems.shape
    s = draw(1, batch, 6, d)
    y = -s @ systems
    for place in spoiled:
        y[:, place] = 3 * draw(2, batch, d)
    far, size = torch.zeros(batch, 6), torch.ones(batch)
    return Secants(s, y, far.double(), torch.full((batch,), 6), size.double())


SYSTEMS = torch.eye(20) - 0.6 * draw(0, 8, 20, 20) / 20**0.5
V = draw(3, 8, 20)


def error(w):
    exact = torch.linalg.solve(SYSTEMS, V)
    return ((w - exact).norm(dim=1) / exact.norm(dim=1)).mean()


def vjp(w):
    return w - times(SYSTEMS, w)


def test_a_secant_of_another_map_does_not_fit_and_loses_its_say():
    secants, w = taken(SYSTEMS, spoiled=(2,)), draw(4, 8, 20)
    misfit = secants.misfit(w, times(SYSTEMS, w))
    others = misfit[:, [0, 1, 3, 4, 5]]
    assert others.max() < 1e-12
    assert misfit[:, 2].min() > 10 * others.max()
    doubt = torch.zeros(8, 6).double()
    doubt[:, 2] = 100.0
    secants.y[:, 2] *= 5  # whatever it says
    found = secants.inverse(doubt).as_matrix()
    secants.s[:, 2], secants.y[:, 2] = 0.0, 0.0
    torch.testing.assert_close(found, secants.inverse().as_matrix(), rtol=0, atol=1e-4)


def test_later_steps_do_without_secants_that_do_not_fit():
    secants = taken(SYSTEMS, spoiled=(1, 4))
    inverse = secants.inverse().T
    start = inverse.negative_matvec(V)
    as_they_are, tested = (
        refine(start, V, vjp, inverse, Refinement(4, 1e-16, secants=told))
        for told in (None, secants)
    )
    assert error(tested.w) < 0.8 * error(as_they_are.w)


def test_a_start_that_is_far_too_long_is_not_borne_out():
    """For a symmetric map between 0 and 1, in directions that a step shortens little."""
    values = torch.linspace(0.01, 1, 20).double()
    v = draw(5, 1, 20)
    exact, medium = v / values, torch.zeros(1, 20).double()
    medium[:, 5:10] = 1.0
    for w, good in ((exact, True), (v, True), (exact + 100 * medium, False)):
        assert borne_out(w, v, v - values * w).item() is good
    assert not borne_out(v * torch.nan, v, v * torch.nan).any()


def test_a_sample_that_is_not_borne_out_goes_on_from_jfb_one_vjp_later():
    values = torch.linspace(0.01, 1, 20).double()
    systems, v = torch.diag(values).expand(2, 20, 20), draw(5, 1, 20).expand(2, 20)
    secants = taken(systems)
    inverse = secants.inverse().T
    start = inverse.negative_matvec(v)
    start[1, 5:10] += 100.0
    shrunk = lambda w: w - values * w  # noqa: E731
    for refined in (1, 2, 5):
        found = refine(start, v, shrunk, inverse, Refinement(refined, 1e-16, secants=secants))
        alone = refine(v, v, shrunk, secants.inverse().only(v[:, 0] > torch.inf).T,
                       Refinement(refined - 1, 1e-16)) if refined > 1 else None  # fmt: skip
        torch.testing.assert_close(found.w[1], v[1] if alone is None else alone.w[1])
        assert not torch.allclose(found.w[0], found.w[1])
    assert refine(start, v, shrunk, inverse, Refinement(1, 1e-16, secants=secants)).error[1].isinf()
