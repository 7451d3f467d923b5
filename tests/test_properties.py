"""Whatever the state, the map and the solver: nothing crashes, and what is claimed is true."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import gdeq
from gdeq import Status

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# --- strategies -----------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from(DTYPES))  # of one sample
structures = st.recursive(
    leaves.map(lambda leaf: ("leaf", *leaf)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple).map(lambda parts: ("tuple", parts))
        | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)
tolerances = st.sampled_from([0.0, 1e-10, 1e-6, 1e-3, 1e-1])
common = {
    "max_iter": st.integers(1, 40),
    "tol": tolerances,
    "stop": st.sampled_from(["relative", "absolute"]),
    "check_every": st.sampled_from([1, 1, 2, 5]),
}
solvers = st.one_of(
    st.builds(
        gdeq.Broyden,
        **common,
        memory=st.none() | st.integers(1, 6),
        max_step=st.none() | st.sampled_from([0.1, 1.0]),
        line_search=st.sampled_from([0, 0, 3]),
    ),
    st.builds(
        gdeq.Anderson,
        **common,
        memory=st.integers(1, 6),
        mixing=st.sampled_from([1.0, 0.5]),
        regularization=st.sampled_from([0.0, 1e-10, 1e-4]),
    ),
    st.builds(gdeq.Picard, **common, damping=st.sampled_from([1.0, 0.5])),
)
factors = st.one_of(
    st.floats(0.0, 2.0), st.sampled_from([0.0, 0.5, 0.99, 1.0, 1.0 + 1e-7, 1.01, 2.0])
)
seeds = st.integers(0, 10_000)


def build(structure, batch: int, seed: int):
    """A state of this structure, small numbers in it."""
    if isinstance(structure, tuple) and structure[0] == "leaf":
        _, shape, dtype = structure
        make = torch.Generator().manual_seed(seed)
        return torch.randn(batch, *shape, generator=make).to(dtype)
    if isinstance(structure, tuple):
        return tuple(build(part, batch, seed + i) for i, part in enumerate(structure[1]))
    if isinstance(structure, list):
        return [build(part, batch, seed + i) for i, part in enumerate(structure)]
    return {key: build(part, batch, seed + i) for i, (key, part) in enumerate(structure.items())}


def joined(z) -> Tensor:  # -> (batch, d), float64
    rows = [
        leaf.double().reshape(len(leaf), math.prod(leaf.shape[1:]))
        for leaf in pytree.tree_leaves(z)
    ]
    return torch.cat(rows, 1)


class Coupled:
    """A map that couples all parts of a state, in their own dtypes.

    factor: the norm of its linear part.
    kind: "tanh" is bounded, "affine" is not.
    """

    def __init__(self, z0, factor: float, kind: str, seed: int, fault=None):
        parts, self.spec = pytree.tree_flatten(z0)
        self.sizes = [math.prod(part.shape[1:]) for part in parts]
        d = sum(self.sizes)
        make = torch.Generator().manual_seed(seed)
        W = torch.randn(d, d, generator=make, dtype=torch.float64)
        self.W = factor * W / torch.linalg.matrix_norm(W, 2) if d else W
        self.x = torch.randn(len(parts[0]), d, generator=make, dtype=torch.float64)
        self.kind, self.fault, self.calls = kind, fault, 0

    def __call__(self, z):
        self.calls += 1
        parts = pytree.tree_leaves(z)
        out = joined(z) @ self.W.T + self.x
        out = torch.tanh(out) if self.kind == "tanh" else out
        if self.fault and self.calls >= self.fault.call and len(out):
            out[self.fault.sample % len(out)] = self.fault.bad
        pieces = out.split(self.sizes, 1)
        made = [
            piece.reshape(part.shape).to(part.dtype)
            for piece, part in zip(pieces, parts, strict=True)
        ]
        return pytree.tree_unflatten(made, self.spec)


def assert_consistent(solution: gdeq.Solution, z0, solver: gdeq.Solver, f) -> None:
    """What holds for every solution, good or bad."""
    batch = len(pytree.tree_leaves(z0)[0])
    ours, theirs = (pytree.tree_flatten(state) for state in (solution.z, z0))
    assert ours[1] == theirs[1]
    assert [(a.shape, a.dtype) for a in ours[0]] == [(b.shape, b.dtype) for b in theirs[0]]
    for name in ("converged", "residual", "steps", "codes"):
        assert getattr(solution, name).shape == (batch,), name
    assert all(torch.isfinite(leaf).all() for leaf in pytree.tree_leaves(solution.z))
    status = solution.status
    assert Status.RUNNING not in status
    for i in range(batch):
        assert (status[i] is Status.CONVERGED) == bool(solution.converged[i])
        assert 0 <= solution.steps[i] <= solver.max_iter
        # The one residual that may be missing is that of a sample that never had one.
        assert math.isfinite(solution.residual[i]) != (status[i] is Status.NONFINITE_START)
        if solution.converged[i]:
            assert solution.residual[i] <= solver.tol
    assert solution.trace.dim() == 2
    assert solution.trace.shape[1] == batch
    if solver.tol == 0:
        assert len(solution.trace) == solver.max_iter
        assert not solution.converged.any()
    elif batch:
        assert len(solution.trace) == int(solution.steps.max())
    assert solution.evals == f.calls
    if solution.inverse is not None:
        assert solution.inverse.rank <= min(solver.max_iter, solver.memory or solver.max_iter)
        assert torch.isfinite(solution.inverse.as_matrix()).all()
    str(solution)


def assert_truly_converged(solution: gdeq.Solution, f, solver: gdeq.Solver) -> None:
    """Recompute the residual of what was returned, in float64 around the user's f."""
    parts = pytree.tree_leaves(solution.z)
    eps = max([torch.finfo(leaf.dtype).eps for leaf in parts])
    z, fz = joined(solution.z), joined(f(solution.z))
    size = torch.maximum(z.norm(dim=1), fz.norm(dim=1))
    # z is rounded to the dtypes of the state before f sees it, f's output after.
    slack = 4 * eps * size + 1e-6 * size * solver.tol
    bound = solver.tol * size if solver.stop == "relative" else torch.full_like(size, solver.tol)
    true = (fz - z).norm(dim=1)
    assert ((true <= bound * (1 + 1e-3) + slack) | ~solution.converged).all(), (true, bound, slack)


# --- properties -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """From call ``call`` on (1 is the first) this sample is given something bad."""

    sample: int
    call: int
    bad: float


faults = st.builds(
    Fault,
    sample=st.integers(0, 4),
    call=st.integers(1, 12),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)


@settings(max_examples=150)
@given(
    structure=structures,
    batch=st.integers(0, 4),
    solver=solvers,
    factor=factors,
    kind=st.sampled_from(["tanh", "affine"]),
    fault=st.none() | faults,
    seed=seeds,
)
def test_any_state_any_solver_any_map(structure, batch, solver, factor, kind, fault, seed):
    z0 = build(structure, batch, seed)
    f, good = Coupled(z0, factor, kind, seed, fault), Coupled(z0, factor, kind, seed)
    solution = gdeq.solve(f, z0, solver)
    assert_consistent(solution, z0, solver, f)
    # Claims about a sick sample are judged by the map it had before it fell ill.
    assert_truly_converged(solution, good, solver)
    if fault is None or batch == 0:
        return
    sick = fault.sample % batch
    if joined(z0).shape[1] and fault.call == 1:
        assert solution.status[sick] is Status.NONFINITE_START
        assert torch.equal(joined(solution.z)[sick], joined(z0)[sick])
    # A line search calls f more often when a neighbour needs it, which shifts nobody's iterates.
    expected = gdeq.solve(good, z0, solver)
    others = [i for i in range(batch) if i != sick]
    for name in ("steps", "codes", "residual"):
        ours, theirs = getattr(solution, name)[others], getattr(expected, name)[others]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(joined(solution.z)[others], joined(expected.z)[others])


@settings(max_examples=60)
@given(
    scale=st.integers(-60, 60),
    d=st.integers(1, 5),
    factor=factors,
    solver=solvers,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=seeds,
)
@example(-30, 3, 0.5, gdeq.Picard(), torch.float32, 0)
@example(-100, 3, 0.5, gdeq.Broyden(), torch.float64, 0)
@example(17, 2, 2.0, gdeq.Picard(max_iter=20), torch.float32, 0)
@example(19, 20, 1.3, gdeq.Picard(max_iter=200), torch.float32, 0)
@example(150, 2, 2.0, gdeq.Picard(max_iter=20), torch.float64, 0)
def test_no_scale_of_the_state_makes_a_false_claim(scale, d, factor, solver, dtype, seed):
    """Squares overflow at 1e19 and vanish at 1e-23 in float32: norms must not be fooled by it."""
    if dtype is torch.float32:
        scale = max(-30, min(scale, 30))
    unit = 10.0**scale
    z0 = (unit * build(("leaf", (d,), torch.float64), 2, seed)).to(dtype)
    inner = Coupled(z0, factor, "affine", seed)
    inner.x = inner.x * unit
    solver = replace(solver, stop="relative")
    solution = gdeq.solve(inner, z0, solver)
    assert torch.isfinite(solution.z).all()
    # In units of the state: NumPy and SciPy would do no better at such scales themselves.
    size = solution.z.double().abs().max(dim=1).values.clamp(min=1e-300)
    fz = inner(solution.z).double()
    z = solution.z.double() / size[:, None]
    fz = fz / size[:, None]
    true = (fz - z).norm(dim=1) / torch.maximum(fz.norm(dim=1), z.norm(dim=1))
    eps = torch.finfo(dtype).eps
    assert ((true <= 1.01 * solver.tol + 8 * eps) | ~solution.converged).all(), true


@settings(max_examples=60)
@given(
    gradient=st.one_of(
        st.just(gdeq.Implicit()),
        st.just(gdeq.Implicit(gdeq.GMRES(max_iter=10, tol=1e-6))),
        st.just(gdeq.Implicit(gdeq.Anderson(max_iter=10))),
        st.just(gdeq.JFB()),
        st.builds(gdeq.NPG, steps=st.integers(1, 4)),
        st.builds(gdeq.GDEQ, refine=st.integers(0, 4)),
        st.builds(
            gdeq.GDEQ, tolerance=st.sampled_from([1e-8, 1e-3, 0.3]), max_refine=st.integers(1, 5)
        ),
    ),
    d=st.integers(0, 5),
    batch=st.integers(0, 3),
    factor=factors,
    memory=st.none() | st.integers(1, 4),
    max_iter=st.integers(1, 15),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    fault=st.none() | faults,
    seed=seeds,
)
def test_gradients_never_crash_and_their_claims_are_true(
    gradient, d, batch, factor, memory, max_iter, dtype, fault, seed
):
    """w arrives at ``shift``, since ∂f/∂shift is the identity; the residual of it is recomputed."""
    z0 = torch.zeros(batch, d, dtype=dtype)
    make = torch.Generator().manual_seed(seed)
    W = torch.randn(d, d, generator=make, dtype=torch.float64)
    W = (factor * W / torch.linalg.matrix_norm(W, 2) if d else W).to(dtype)
    x = torch.randn(batch, d, generator=make, dtype=torch.float64).to(dtype)
    shift = torch.zeros(batch, d, dtype=dtype, requires_grad=True)
    sick = fault.sample % batch if fault and batch else None
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        out = torch.tanh(z @ W.T + x) + shift
        if sick is not None and len(calls) >= fault.call:
            out = torch.where(torch.arange(batch).unsqueeze(1) == sick, fault.bad, out)
        return out

    solver = gdeq.Broyden(max_iter=max_iter, tol=1e-6, memory=memory)
    solution = gdeq.fixed_point(f, z0, solver=solver, gradient=gradient)
    assert torch.isfinite(solution.z).all()
    v = torch.randn(batch, d, generator=make, dtype=torch.float64).to(dtype)
    (solution.z * v).sum().backward()
    healthy = [i for i in range(batch) if i != sick]
    w = shift.grad.double()[healthy]
    assert w.shape == (len(healthy), d)
    assert torch.isfinite(w).all()
    record = solution.backward
    assert record is not None
    str(record)
    if record.residual is None:
        return
    z = solution.z.detach().double()[healthy]
    slope = 1 - torch.tanh(z @ W.T.double() + x.double()[healthy]) ** 2
    left = v.double()[healthy] - w + (w * slope) @ W.double()
    size = v.double()[healthy].norm(dim=1)
    claimed = record.residual.double()[healthy] * size
    tiny = 100 * torch.finfo(dtype).eps * (size + (1 + factor) * w.norm(dim=1))
    assert ((left.norm(dim=1) - claimed).abs() <= tiny + 1e-3 * claimed).all()
    if record.converged is not None and isinstance(gradient, gdeq.GDEQ):
        met = record.converged[healthy]
        assert (left.norm(dim=1)[met] <= 1.01 * gradient.tolerance * size[met] + tiny[met]).all()
