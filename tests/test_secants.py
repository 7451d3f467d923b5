"""The test that the first VJP makes of the secants a refinement starts from."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq.fast.product import secants_of_steps
from gdeq.operators import Secants
from gdeq.refinement import Refinement, borne_out, least_combination, minus_identity, refine
from gdeq.solvers.base import Point
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
    for refined in (2, 5):
        found = refine(start, v, shrunk, inverse, Refinement(refined, 1e-16, secants=secants))
        alone = refine(v, v, shrunk, minus_identity(v), Refinement(refined - 1, 1e-16))
        torch.testing.assert_close(found.w[1], alone.w[1])
        assert not torch.allclose(found.w[0], found.w[1])
    # With one VJP: the multiple of it that has the smallest residual, and that residual.
    image = values * start[1]
    share = image @ v[1] / (image @ image)
    found = refine(start, v, shrunk, inverse, Refinement(1, 1e-16, secants=secants))
    torch.testing.assert_close(found.w[1], share * (start[1] - image) + v[1], rtol=1e-7, atol=1e-7)


def test_a_combination_of_smallest_residual():
    """As least squares finds it; what is not finite, or says the same twice, changes nothing."""
    w = draw(6, 3, 8, 20)
    seen = [Point(each, V - times(SYSTEMS, each)) for each in (*w, w[0])]
    seen.append(Point(w[1], torch.full_like(V, torch.inf)))
    found = least_combination(seen, V)
    images = torch.stack([times(SYSTEMS, each) for each in w], dim=2)  # (batch, d, 3)
    shares = torch.linalg.lstsq(images, V.unsqueeze(2)).solution
    expected = torch.einsum("nbd,bn->bd", w, shares.squeeze(2))
    torch.testing.assert_close(found.z, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.g, V - times(SYSTEMS, found.z))
    nothing = least_combination([Point(w[0], torch.full_like(V, torch.inf))], V)
    assert torch.equal(nothing.g, V)
    assert not nothing.z.any()


def test_where_the_residual_rises_the_last_step_starts_from_the_best_combination():
    """A start that is borne out and an inverse that is bad: Broyden's step makes it worse."""
    secants = taken(SYSTEMS)
    inverse = secants.inverse().T
    start = inverse.negative_matvec(V)
    calls = []

    def misleading(w):  # the second product is of another map, so that the residual rises
        calls.append(w)
        return vjp(w) if len(calls) == 1 else w + 5 * draw(7, 8, 20)

    found = refine(start, V, misleading, inverse, Refinement(2, 1e-16, secants=secants))
    seen = [Point(calls[0], V + vjp(start) - start), Point(calls[1], V + 5 * draw(7, 8, 20))]
    best = least_combination(seen, V)
    torch.testing.assert_close(found.w, best.z + best.g)
    moved = best.g.norm(dim=1) * secants.slowest().clamp(min=1.0)
    torch.testing.assert_close(found.error, moved / found.w.norm(dim=1))


def test_sensitivity_is_that_of_the_slowest_secant():
    """One direction in which I − J is 0.01, seen by one secant."""
    values = torch.ones(20).double()
    values[0] = 0.01
    v, s = draw(5, 1, 20), torch.zeros(1, 2, 20).double()
    s[0, 0, 0] = s[0, 1, 1] = 3.0
    secants = Secants(s, -s * values, torch.zeros(1, 2).double(), torch.tensor([2]), torch.ones(1))
    assert secants.slowest().item() == pytest.approx(100)
    inverse = secants.inverse().T
    start = inverse.negative_matvec(v)
    how = Refinement(1, 1e-16, secants=secants)
    found = refine(start, v, lambda w: w - values * w, inverse, how)
    assert found.sensitivity.item() == pytest.approx(max(1.0, 100 * (v.norm() / found.w.norm())))


@pytest.fixture
def dirty(monkeypatch):
    """Memory that is not set holds NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape: x.new_full(shape, torch.nan))


@pytest.mark.parametrize("steps", [0, 1, 8, 15, 16, 20])
def test_places_that_no_step_came_to_are_dropped(dirty, steps):
    short, full = Secants.empty(V, 30), Secants.empty(V, 30)
    for secants in (short, full):
        for step in range(steps):
            kept = draw(100 + step, 8) > -0.5  # the others are rounding
            secants.note(draw(step, 8, 20), draw(50 + step, 8, 20), kept)
    for _ in range(20):
        full.note(torch.zeros_like(V), torch.zeros_like(V), torch.zeros(8, dtype=torch.bool))
    for secants in (short, full):
        secants.close(V, torch.ones(8, dtype=torch.bool))
    assert short.s.shape[1] == min(max(steps, 1), 16)
    assert full.s.shape[1] == 16
    torch.testing.assert_close(short.inverse().as_matrix(), full.inverse().as_matrix())
    torch.testing.assert_close(short.slowest(), full.slowest())


def test_a_solve_in_products_without_steps_has_no_secants(dirty):
    none, all_of_them = torch.zeros(8, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    first, coordinates = V.unsqueeze(1), torch.zeros(8, 1, 1)
    secants = secants_of_steps(first, coordinates, none[:, None], none.long(), V, all_of_them)
    assert secants.inverse().as_matrix().equal(-torch.eye(20).double().expand(8, 20, 20))


@pytest.mark.parametrize("gradient", [gdeq.Implicit(precondition=True), gdeq.GDEQ(refine=4)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_secants_of_any_size_give_finite_gradients(gradient, scale):
    """In float32, where the squares of their lengths would under- or overflow."""
    make = torch.Generator().manual_seed(0)
    weight = 0.2 * torch.randn(16, 16, generator=make)
    x, z0 = scale * torch.randn(2, 2, 16, generator=make)
    if scale == 1.0:
        x[0] = 0  # z* = 0, and every step makes the secants smaller
    weight.requires_grad_()
    f = lambda z, x: scale * torch.tanh((z @ weight + x) / scale)  # noqa: E731
    found = []
    for each in (gradient, gdeq.Implicit()):
        deq, weight.grad = gdeq.DEQ(f, gdeq.Broyden(40, tol=0.0), each), None
        deq(x, z0=z0).sum().backward()
        found.append(weight.grad / scale)
    assert (found[0] - found[1]).norm() < 0.1 * found[1].norm()
