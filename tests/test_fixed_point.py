"""`fixed_point` and `solve`: which solver goes with which gradient, and unrolled steps."""

from __future__ import annotations

import pytest
import torch

import gdeq
from cells import F64, GRADIENTS, contraction
from gdeq import GDEQ, GMRES, JFB, Anderson, Broyden, Implicit, Measured, Picard, Status, Unrolled
from gdeq.engine import REFERENCE
from gdeq.state import StateMap, StateSpace

X = torch.zeros(2, 3)


def identity(z, x=None):
    raise AssertionError("f is not called where the options are wrong")


def by_layer(solver, gradient):
    return gdeq.DEQ(identity, solver, gradient)


def by_function(solver, gradient):
    return gdeq.fixed_point(identity, X, solver, gradient)


def later(solver, gradient):
    """Replaced one after the other: checked at the call."""
    deq = gdeq.DEQ(identity)
    deq.solver, deq.gradient = solver, gradient
    return deq(X)


def by_solve(solver, gradient):
    return gdeq.solve(identity, X, solver)


NO_INVERSE = "reuses the inverse that Broyden's method builds, and {} builds none"
PAIRS = [
    *((s, g, ValueError, (f"{type(g).__name__} " + NO_INVERSE.format(type(s).__name__),
                          "use gdeq.Broyden(), or another gradient"))
      for s in (Anderson(), Picard()) for g in (GDEQ(), Measured(GDEQ()))),
    *((None, g, ValueError, ("solver=None (no solve) works only with gdeq.Unrolled",
                             "give a solver such as gdeq.Broyden()"))
      for name, g in GRADIENTS.items() if name != "Unrolled"),
    *((Broyden(), g, TypeError, ("gradient must be", f"the class {g.__name__} itself",
                                 f"write {g.__name__}()"))
      for g in (GDEQ, Implicit, JFB, gdeq.NPG, Unrolled)),
    (Broyden(), None, TypeError, ("gradient must be a gradient such as gdeq.GDEQ(), got None",)),
    (GDEQ(), Broyden(), TypeError, ("gradient must be a gradient such as gdeq.GDEQ()",)),
]  # fmt: skip
SOLVERS = [
    *((s, JFB(), TypeError, ("solver must be", f"the class {s.__name__} itself; write",))
      for s in (Broyden, Anderson, Picard)),
    *((s, JFB(), TypeError, ("solver must be a solver such as gdeq.Broyden()",))
      for s in ("broyden", 5, 1e-3, GDEQ())),
    (GMRES(), JFB(), ValueError, ("GMRES solves linear systems only",
                                  "gdeq.Implicit(solver=gdeq.GMRES())")),
]  # fmt: skip


@pytest.mark.parametrize(("solver", "gradient", "kind", "words"), [*PAIRS, *SOLVERS])
def test_what_does_not_go_together(solver, gradient, kind, words):
    entries = [by_layer, by_function, later]
    if (solver, gradient, kind, words) in SOLVERS:
        entries.append(by_solve)
    for entry in entries:
        with pytest.raises(kind) as error:
            entry(solver, gradient)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize("call", [gdeq.solve, gdeq.fixed_point])
def test_arguments_that_are_no_map_or_in_the_wrong_order(call):
    with pytest.raises(TypeError, match="callable"):
        call(None, X)
    with pytest.raises(TypeError, match=r"z0 must be a tensor.*function"):
        call(X, lambda z: z)


def test_the_defaults():
    assert GDEQ(refine=1) == gdeq.gradients.DEFAULT
    found = gdeq.fixed_point(torch.cos, torch.zeros(2, 3))
    assert torch.equal(found.z, gdeq.solve(torch.cos, torch.zeros(2, 3), Broyden()).z)


# --- unrolled steps -------------------------------------------------------------------------------


def test_unrolled_steps_are_judged_where_they_end():
    """They may leave the fixed point that the solver found."""
    f = lambda z: -1.8 * z + 1 + 0.1 * torch.sin(z)  # noqa: E731
    z0 = torch.zeros(2, 3, dtype=F64)
    away = gdeq.fixed_point(f, z0, Broyden(50, 1e-6), Unrolled(30))
    assert gdeq.solve(f, z0, Broyden(50, 1e-6)).converged.all()
    assert not away.converged.any()
    assert away.status == [Status.UNROLLED] * 2
    assert "unrolled for a fixed number of steps" in str(away.status[0])
    stays = gdeq.fixed_point(lambda z: 0.5 * z + 1, z0, Broyden(50, 1e-6), Unrolled(3))
    assert stays.status == [Status.CONVERGED] * 2
    # After a solve without a tolerance, or without a solve, nothing is claimed.
    for solver in (Broyden(3, 0.0), None):
        found = gdeq.fixed_point(lambda z: 0 * z + 1, z0, solver, Unrolled(2))
        assert found.status == [Status.UNROLLED] * 2
    assert found.trace.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert found.steps.tolist() == [2, 2]
    assert found.evals == 2
    # Beside a z that runs away any g is small, which the solve has seen.
    flown = gdeq.fixed_point(lambda z: z + 1, z0, Picard(50, 0.4), Unrolled(2))
    assert (flown.residual < 0.4).all()
    assert not flown.converged.any()


@pytest.mark.parametrize("stop", ["relative", "absolute"])
def test_claims_of_unrolled_steps_are_about_the_z_that_is_returned(stop):
    """Where f spreads what is left of the last step, its residual is larger than the one before."""
    W = torch.triu(contraction(6, 30.0), 1)  # nilpotent: it converges, but not monotonically
    x = torch.randn(40, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    calls = []

    def f(z):
        calls.append(1)
        return z @ W.T + x

    solver = Broyden(50, 1e-2, stop=stop)
    found = gdeq.fixed_point(f, torch.zeros_like(x), solver, Unrolled(1))
    assert found.evals == len(calls)
    fz = f(found.z)
    true = (fz - found.z).norm(dim=1)
    if stop == "relative":
        true = true / torch.maximum(fz.norm(dim=1), found.z.norm(dim=1))
    torch.testing.assert_close(found.residual, true, rtol=1e-3, atol=1e-12)
    assert found.converged.tolist() == (true <= 1e-2).tolist()
    assert found.converged.any()
    assert not found.converged.all()


def test_unrolled_steps_go_on_from_all_digits_of_a_solve():
    """A state in half precision is solved for in float32; damped steps must not round it first."""
    c = torch.linspace(0.1, 3.0, 64).to(torch.bfloat16).unsqueeze(0)
    f = lambda z: (0.5 * z + c).to(torch.bfloat16)  # noqa: E731
    solver = gdeq.Picard(max_iter=3, tol=0.0, damping=0.7)
    space = StateSpace(torch.zeros_like(c))
    solved = REFERENCE.solve(StateMap(space, f), torch.zeros_like(c), solver, None)
    assert not torch.equal(solved.vector, solved.solution.z.float())  # there are such digits
    expected = solved.vector + 0.5 * (f(solved.solution.z).float() - solved.vector)
    found = gdeq.fixed_point(f, torch.zeros_like(c), solver, gdeq.Unrolled(1, damping=0.5))
    assert torch.equal(found.z, expected.to(torch.bfloat16))
    rounded = solved.solution.z.float()
    other = (rounded + 0.5 * (f(solved.solution.z).float() - rounded)).to(torch.bfloat16)
    assert not torch.equal(found.z, other)  # the rounded start would be seen


# --- states along the way -------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [gdeq.Implicit(), gdeq.JFB(), gdeq.Unrolled(1)], ids=str)
def test_states_on_the_way_have_the_gradient_of_the_layer(gradient):
    torch.manual_seed(0)
    weight = torch.randn(4, 4, dtype=torch.float64) / 6
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    deq = gdeq.DEQ(lambda z, x: torch.tanh(z @ weight.T + x), gdeq.Broyden(9, 0.0), gradient)
    states = deq.trajectory(x, at=[2, 5])
    solution = deq.solution
    assert torch.equal(states[-1], deq(x))
    for step, state in zip((2, 5), states, strict=False):
        z = gdeq.solve(
            lambda z: torch.tanh(z @ weight.T + x), torch.zeros_like(x), gdeq.Broyden(step, 0.0)
        ).z
        slope = 1 - torch.tanh(z @ weight.T + x.detach()).square()
        v = torch.ones_like(z)
        if isinstance(gradient, gdeq.Implicit):
            jacobian = slope.unsqueeze(2) * weight
            v = torch.linalg.solve(torch.eye(4) - jacobian.mT, v)
        if not isinstance(gradient, gdeq.Unrolled):
            torch.testing.assert_close(state, z)
        (found,) = torch.autograd.grad(state.sum(), x, retain_graph=True)
        torch.testing.assert_close(found, slope * v, rtol=1e-5, atol=1e-7)
    assert solution.backward is None  # it is about the fixed point
    states[-1].sum().backward()
    assert (solution.backward is None) == isinstance(gradient, gdeq.Unrolled)


def test_a_trajectory_outside_the_solve():
    x = torch.zeros(2, 3)
    states = gdeq.trajectory(torch.cos, x, at=[1, 40], solver=gdeq.Broyden(max_iter=40))
    assert torch.equal(states[1], states[2])  # the solve had ended before
    with pytest.raises(ValueError, match="makes at most 4 steps, not 5"):
        gdeq.trajectory(torch.cos, x, at=[5], solver=gdeq.Broyden(max_iter=4))
    with pytest.raises(ValueError, match="at least 1"):
        gdeq.trajectory(torch.cos, x, at=[0])
    with pytest.raises(TypeError, match=r"at must be a list of steps, such as \[3\]"):
        gdeq.trajectory(torch.cos, x, at=3)
    with pytest.raises(ValueError, match="needs a solver"):
        gdeq.DEQ(torch.add, None, gdeq.Unrolled(2)).trajectory(x, at=[1])
