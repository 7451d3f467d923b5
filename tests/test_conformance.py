"""All solvers × gradients × state structures × engines against dense algebra.

A new solver, gradient, structure or engine is one more row in a table here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import gdeq
from engines import skip_where_kernels_do_not_run, using
from gdeq import (
    GDEQ,
    GMRES,
    JFB,
    NPG,
    Anderson,
    Broyden,
    Gradient,
    Implicit,
    Measured,
    Picard,
    Solver,
    Unrolled,
)
from problems import (
    Dense,
    Image,
    Multiscale,
    Named,
    Nested,
    Problem,
    Tiny,
    adjoint_residual,
    assert_near,
    exact_cotangent,
    identity,
    limited_broyden,
    map_leaves,
    pack,
    paper_broyden,
    phantom_matrix,
    refined_cotangent,
    secant_inverse,
    times,
    transposed_system,
    watched,
)

# --- the rows -------------------------------------------------------------------------------------

STRUCTURES: dict[str, type[Problem]] = {
    "tensor2d": Dense,
    "tensor4d": Image,
    "tuple": Multiscale,
    "dict": Named,
    "nested": Nested,
}


@dataclass
class SolverRow:
    solver: Solver
    rebuild: Callable[..., tuple[Tensor, Tensor]] | None = None  # (g, z, steps) -> z, B⁻¹


# The tolerance is loose enough that the last updates of Broyden's method are not yet dominated by
# rounding, so that two ways to compute them agree to 1e-9.
SOLVERS = {
    "broyden": SolverRow(Broyden(100, 1e-5), paper_broyden),
    "broyden-memory": SolverRow(Broyden(100, 1e-5, memory=3), partial(limited_broyden, memory=3)),
    "broyden-bounded": SolverRow(
        Broyden(100, 1e-5, max_step=0.7), partial(limited_broyden, max_step=0.7)
    ),
    "anderson": SolverRow(Anderson(100, 1e-5)),
    "picard": SolverRow(Picard(200, 1e-5)),
    "picard-damped": SolverRow(Picard(200, 1e-5, damping=0.7)),
}


@dataclass
class Case:
    """One solved problem, and what is needed to differentiate it by hand."""

    problem: Problem
    row: SolverRow
    solved: gdeq.Solution
    v: Tensor  # (batch, d)
    iterates: list[Tensor]  # (batch, d) each

    @cached_property
    def jacobian(self) -> Tensor:  # (batch, d, d)
        return self.problem.dense_jacobian(self.solved.z)

    @cached_property
    def inverse(self) -> Tensor:  # (batch, d, d)
        """B_T⁻¹, each sample on its own up to its own number of steps; −I if there is none."""
        if self.row.rebuild is None:
            return -torch.eye(self.v.shape[1]).to(self.jacobian).expand_as(self.jacobian)
        start = pack(self.problem.z0)
        return torch.stack(
            [
                self.row.rebuild(self.problem.root(i), start[i], steps)[1]
                for i, steps in enumerate(self.solved.steps.tolist())
            ]
        )

    @cached_property
    def safe_inverse(self) -> Tensor:  # (batch, d, d)
        """Of the last secants of each sample, up to its own number of steps."""
        return torch.stack(
            [
                secant_inverse(self.problem.root(i), [z[i] for z in self.iterates[: steps + 1]])
                for i, steps in enumerate(self.solved.steps.tolist())
            ]
        )

    @property
    def reused(self) -> Tensor:  # (batch, d)
        return -times(self.inverse.mT, self.v)

    def each(self, cotangent: Callable[..., Tensor]) -> Tensor:  # (batch, d)
        """cotangent(A, P, v) of every sample, with P ≈ A⁻¹ by the secants of the forward solve."""
        systems = transposed_system(self.jacobian)
        samples = zip(systems, -self.safe_inverse.mT, self.v, strict=True)
        return torch.stack([cotangent(A, P, v) for A, P, v in samples])

    def tested(self, cotangent: Callable[..., Tensor]) -> Tensor:  # (batch, d)
        """cotangent(A, P, v, tested=Q), with the Q that takes the place of P after one VJP."""
        found = []
        systems, steps = transposed_system(self.jacobian), self.solved.steps.tolist()
        for i, (A, P, v) in enumerate(zip(systems, -self.safe_inverse.mT, self.v, strict=True)):
            path = [z[i] for z in self.iterates[: steps[i] + 1]]
            Q = -secant_inverse(self.problem.root(i), path, P @ v, A @ P @ v).T
            found.append(cotangent(A, P, v, tested=Q))
        return torch.stack(found)

    def through_f(self, w: Tensor) -> list[Tensor]:
        """(∂f/∂θ)ᵀw at the solution, for all parameters and inputs."""
        out = self.problem.on_vectors(pack(self.solved.z).detach())
        return list(torch.autograd.grad(out, list(self.problem.parameters()), w))

    def unrolled(self, steps: int, damping: float) -> list[Tensor]:
        z = pack(self.solved.z).detach()
        for _ in range(steps):
            z = (1 - damping) * z + damping * self.problem.on_vectors(z)
        return list(torch.autograd.grad(z, list(self.problem.parameters()), self.v))


@cache  # the dense algebra is the same for every gradient
def solved_case(solver: str, structure: str, device: torch.device) -> Case:
    problem, row = STRUCTURES[structure]().to(device), SOLVERS[solver]
    f, iterates = watched(problem)
    with using("reference"):
        solved = gdeq.solve(f, problem.z0, row.solver)
    return Case(problem, row, solved, problem.cotangent(), iterates)


@dataclass
class GradientRow:
    gradient: Gradient
    cotangent: Callable[[Case], Tensor] | None = None  # w, by dense algebra
    parameters: Callable[[Case], list[Tensor]] | None = None  # for a method that has no w
    reuses: bool = False  # needs the inverse of a Broyden solve
    accuracy: float = 1e-8


def exact(case: Case) -> Tensor:
    return exact_cotangent(case.jacobian, case.v)


def phantom(case: Case, steps: int, damping: float) -> Tensor:
    return times(phantom_matrix(case.jacobian, steps, damping).mT, case.v)


def refined(case: Case, refine: int) -> Tensor:
    return case.tested(partial(refined_cotangent, refine=refine))


def refined_from_v(case: Case) -> Tensor:
    return case.each(lambda A, P, v: refined_cotangent(A, torch.eye(len(P)).to(P), v, 3))


def adaptive(case: Case, tolerance: float) -> Tensor:
    return case.tested(partial(refined_cotangent, refine=31, tolerance=tolerance))


GRADIENTS = {
    "implicit-broyden": GradientRow(Implicit(Broyden(100, 1e-12)), exact),
    "implicit-anderson": GradientRow(Implicit(Anderson(200, 1e-12)), exact),
    "implicit-picard": GradientRow(Implicit(Picard(300, 1e-12)), exact),
    "implicit-gmres": GradientRow(Implicit(GMRES(50, 1e-12)), exact),
    "implicit-single": GradientRow(Implicit(GMRES(50, 1e-12), double_backward=False), exact),
    "implicit-broyden-preconditioned": GradientRow(
        Implicit(Broyden(100, 1e-12), precondition=True), exact
    ),
    "implicit-gmres-preconditioned": GradientRow(
        Implicit(GMRES(50, 1e-12), precondition=True), exact
    ),
    "jfb": GradientRow(JFB(), lambda case: case.v, accuracy=1e-12),
    "jfb-refine-3": GradientRow(JFB(refine=3), refined_from_v),
    "npg-default": GradientRow(NPG(), lambda case: phantom(case, 5, 0.5), accuracy=1e-12),
    "npg-1": GradientRow(NPG(1, 0.3), lambda case: 0.3 * case.v, accuracy=1e-12),
    "npg-3": GradientRow(NPG(3, 0.8), lambda case: phantom(case, 3, 0.8), accuracy=1e-12),
    "npg-neumann": GradientRow(NPG(8, 1.0), lambda case: phantom(case, 8, 1.0), accuracy=1e-12),
    "gdeq": GradientRow(GDEQ(), lambda case: case.reused, reuses=True, accuracy=1e-9),
    "gdeq-refine-1": GradientRow(GDEQ(refine=1), partial(refined, refine=1)),
    "gdeq-refine-3": GradientRow(GDEQ(refine=3), partial(refined, refine=3)),
    "gdeq-tolerance": GradientRow(
        GDEQ(tolerance=0.05, max_refine=30), partial(adaptive, tolerance=0.05)
    ),
    "measured-jfb": GradientRow(Measured(JFB()), lambda case: case.v, accuracy=1e-12),
    "measured-npg": GradientRow(Measured(NPG(2)), lambda case: phantom(case, 2, 0.5)),
    "measured-gdeq": GradientRow(
        Measured(GDEQ()), lambda case: case.reused, reuses=True, accuracy=1e-9
    ),
    "unrolled": GradientRow(Unrolled(4), parameters=lambda case: case.unrolled(4, 1.0)),
    "unrolled-damped": GradientRow(Unrolled(3, 0.6), parameters=lambda case: case.unrolled(3, 0.6)),
}

# Engines beside the reference, with what they do in their own way.
SWEPT = [
    *(("broyden", g) for g in ("gdeq", "gdeq-refine-3", "jfb-refine-3", "implicit-broyden")),
    *(("anderson", g) for g in ("implicit-anderson", "npg-3")),
]
ENGINES = {"oracle": ("tensor2d", "tuple"), "fast": ("dict",)}

every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_solver = pytest.mark.parametrize("solver", SOLVERS)
every_gradient = pytest.mark.parametrize("gradient", GRADIENTS)


def cases() -> list[tuple[str, str, str, str]]:
    """Every two of solver, gradient and structure meet, in the reference engine."""
    rows = list(itertools.product(GRADIENTS, SOLVERS))
    turns = itertools.cycle(STRUCTURES)
    found = {("reference", s, g, next(turns)) for g, s in rows}
    found |= {("reference", "broyden", g, structure) for g in GRADIENTS for structure in STRUCTURES}
    for engine, structures in ENGINES.items():
        found |= {(engine, s, g, structure) for s, g in SWEPT for structure in structures}
    return sorted(found)


# --- solvers × structures -------------------------------------------------------------------------


@every_structure
@every_solver
@pytest.mark.parametrize("activation", [identity, torch.tanh], ids=["affine", "tanh"])
def test_solvers_find_the_known_fixed_point(solver, structure, activation, device):
    problem = STRUCTURES[structure](activation=activation).to(device)
    tight = replace(SOLVERS[solver].solver, max_iter=300, tol=1e-12)
    solution = gdeq.solve(problem, problem.z0, tight)
    assert solution.converged.all(), str(solution)
    assert_near(pack(solution.z), pack(problem.equilibrium()), 1e-10)
    map_leaves(assert_alike, solution.z, problem.z0)  # in the structure of z0


def assert_alike(a, b):
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return a


# --- solvers × gradients × structures -------------------------------------------------------------


@pytest.mark.parametrize(("engine", "solver", "gradient", "structure"), cases())
def test_gradient_equals_its_dense_formula(engine, solver, gradient, structure, device):
    if engine == "fast":
        skip_where_kernels_do_not_run(device)
    solver_row, row = SOLVERS[solver], GRADIENTS[gradient]
    problem = STRUCTURES[structure]().to(device)
    if row.reuses and solver_row.rebuild is None:
        with pytest.raises(ValueError, match="Broyden"):
            gdeq.fixed_point(problem, problem.z0, solver_row.solver, row.gradient)
        return

    case = solved_case(solver, structure, device)
    with using(engine):
        solution = gdeq.fixed_point(problem, problem.z0, solver_row.solver, row.gradient)
    assert solution.backward is None
    with using(engine):
        (pack(solution.z) * case.v).sum().backward()

    if row.cotangent is None:
        assert row.parameters is not None
        expected = row.parameters(case)
    else:
        w = row.cotangent(case)
        expected = case.through_f(w)
        assert_near(pack(solution.z), pack(case.solved.z), 1e-12, "z")
        assert_near(problem.shift.grad, w, row.accuracy, "w")
        record = solution.backward
        assert record is not None
        if record.residual is not None:
            measured = adjoint_residual(case.jacobian, problem.shift.grad, case.v)
            assert_near(record.residual, measured, 1e-10, "the residual of w")
    for (name, parameter), reference in zip(problem.named_parameters(), expected, strict=True):
        assert_near(parameter.grad, reference, row.accuracy, name)


# --- Implicit, the two other ways: through the loop, and by finite differences --------------------

TIGHT = Broyden(200, 1e-14)
EXACT = {
    "broyden": Implicit(Broyden(100, 1e-13)),
    "anderson": Implicit(Anderson(200, 1e-13)),
    "picard": Implicit(Picard(300, 1e-13)),
    "gmres": Implicit(GMRES(50, 1e-13)),
    "broyden-preconditioned": Implicit(Broyden(100, 1e-13), precondition=True),
    "gmres-preconditioned": Implicit(GMRES(50, 1e-13), precondition=True),
}

every_exact = pytest.mark.parametrize("exactly", EXACT)


def as_function(problem: Problem, solver: Solver | None, gradient: Gradient):
    """The packed fixed point as a function of all parameters and inputs."""
    names = [name for name, _ in problem.named_parameters()]

    def function(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        solution = gdeq.fixed_point(
            lambda z: functional_call(problem, given, (z,)), problem.z0, solver, gradient
        )
        return pack(solution.z)

    return function


def loop(problem: Problem, steps: int = 40) -> Tensor:  # -> (batch, d)
    z = pack(problem.z0)
    for _ in range(steps):
        z = problem.on_vectors(z)
    return z


@pytest.mark.parametrize(
    ("structure", "exactly"),
    [(structure, "broyden") for structure in STRUCTURES]
    + [("tuple", name) for name in EXACT if name != "broyden"],
)
def test_second_derivatives_equal_those_through_a_long_loop(structure, exactly, device):
    problem = STRUCTURES[structure](radius=0.4, batch=2).to(device)
    parameters = list(problem.parameters())

    def second(z: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(z.pow(3).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), parameters)

    expected = second(loop(problem))
    found = second(as_function(problem, TIGHT, EXACT[exactly])(*parameters))
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-8)


@every_solver
@every_exact
def test_implicit_passes_gradcheck_whatever_solves(solver, exactly, device):
    problem = Tiny(batch=1, radius=0.4).to(device)
    tight = replace(SOLVERS[solver].solver, tol=1e-14)
    function = as_function(problem, tight, EXACT[exactly])
    torch.autograd.gradcheck(function, tuple(problem.parameters()), fast_mode=True)


@every_exact
def test_implicit_passes_gradgradcheck_with_every_inner_solver(exactly):
    problem = Tiny(batch=1, radius=0.4)
    function = as_function(problem, TIGHT, EXACT[exactly])
    torch.autograd.gradgradcheck(function, tuple(problem.parameters()), fast_mode=True)


# --- the tables are complete ----------------------------------------------------------------------


def public(base: type) -> set[type]:
    found = {getattr(gdeq, name) for name in gdeq.__all__}
    return {kind for kind in found if isinstance(kind, type) and issubclass(kind, base)} - {base}


def test_every_public_solver_and_gradient_has_its_rows():
    inner = {
        type(row.gradient.solver) for row in GRADIENTS.values() if hasattr(row.gradient, "solver")
    }
    assert {type(row.solver) for row in SOLVERS.values()} | inner == public(Solver)
    assert inner == public(Solver)
    assert {type(row.gradient) for row in GRADIENTS.values()} == public(Gradient)
