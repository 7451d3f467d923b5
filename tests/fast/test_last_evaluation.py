"""The last evaluation of a solve with tol=0, differentiated: the same as one evaluation more."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq import GDEQ, JFB, NPG, Broyden, Implicit, Measured, nodes
from gdeq.fast.kernels import choice
from gdeq.solution import Status
from pairs import pairs
from problems import Dense, Image, Multiscale, Named, assert_near, leaves, pack

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
STEPS = 6
GRADIENTS = [
    JFB(),
    GDEQ(),
    Measured(GDEQ()),
    GDEQ(refine=2),
    GDEQ(tolerance=0.1),
    NPG(),
    Implicit(Broyden(8, 1e-6), double_backward=False),
]


@pytest.fixture(params=["plain", "triton"])
def form(request):
    with choice.use(request.param):
        yield request.param


def differentiated(problem, gradient, solver=Broyden(STEPS, 0.0)):  # noqa: B008 (frozen)
    """The solution, its gradients, and how often f was called."""
    calls = []

    def f(z):
        calls.append(torch.is_grad_enabled())
        return problem(z)

    problem.zero_grad()
    solution = gdeq.fixed_point(f, problem.z0, solver, gradient)
    (pack(solution.z) * problem.cotangent()).sum().backward()
    gradients = [parameter.grad.clone() for parameter in problem.parameters()]
    return solution, gradients, calls


def in_the_solve(monkeypatch):
    """As in a recorded step."""
    monkeypatch.setattr(nodes, "recording", lambda device: True)


@pytest.mark.parametrize("kind", [Dense, Image, Multiscale, Named])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_it_is_the_same_with_one_call_less(kind, gradient, form, monkeypatch):
    in_turn = (Dense, Multiscale)[GRADIENTS.index(gradient) % 2]
    if form == "triton" and kind is not in_turn and DEVICE.type == "cpu":
        pytest.skip("slow in the interpreter")
    problem = kind(radius=0.9).to(DEVICE)
    expected, wanted, before = differentiated(problem, gradient)
    in_the_solve(monkeypatch)
    found, gradients, calls = differentiated(problem, gradient)
    assert before == [False] * (STEPS + 1) + [True]
    assert calls == [False] * STEPS + [True]
    for a, b in zip(leaves(found.z), leaves(expected.z), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients, wanted, strict=True):
        assert_near(a, b, 1e-12)
    assert torch.equal(found.residual, expected.residual)
    assert torch.equal(found.trace, expected.trace)
    assert found.codes.tolist() == expected.codes.tolist()
    assert found.evals == expected.evals
    assert found.backward.vjps == expected.backward.vjps
    if expected.backward.residual is not None:
        assert_near(found.backward.residual, expected.backward.residual, 1e-9)


def test_by_anderson_too(form, monkeypatch):
    problem, solver = Dense(radius=0.9).to(DEVICE), gdeq.Anderson(STEPS, 0.0, memory=3)
    _, wanted, before = differentiated(problem, JFB(), solver)
    in_the_solve(monkeypatch)
    _, gradients, calls = differentiated(problem, JFB(), solver)
    assert before == [False] * (STEPS + 1) + [True]
    assert calls == [False] * STEPS + [True]
    for a, b in zip(gradients, wanted, strict=True):
        assert_near(a, b, 1e-12)


@pytest.mark.parametrize(
    ("gradient", "solver"),
    [
        (GDEQ(), Broyden(STEPS, 1e-8)),  # the last iterate is not known beforehand
        (Implicit(Broyden(8, 1e-6)), Broyden(STEPS, 0.0)),  # f is evaluated twice with autograd
        (JFB(), gdeq.Picard(STEPS, 0.0)),  # in `gdeq.solve`'s own loop
    ],
    ids=["tolerance", "second derivatives", "Picard"],
)
def test_where_it_is_not_done(gradient, solver, form, monkeypatch):
    problem = Dense(radius=0.9).to(DEVICE)
    _, wanted, before = differentiated(problem, gradient, solver)
    in_the_solve(monkeypatch)
    if solver.tol:
        monkeypatch.setattr(gdeq.fast.product, "recording", lambda device: False)
    _, gradients, calls = differentiated(problem, gradient, solver)
    assert calls == before
    for a, b in zip(gradients, wanted, strict=True):
        assert torch.equal(a, b)


def test_not_without_autograd(form, monkeypatch):
    in_the_solve(monkeypatch)
    problem = Dense(radius=0.5).to(DEVICE)
    calls = []

    def f(z):
        calls.append(torch.is_grad_enabled())
        return problem(z)

    with torch.no_grad():
        gdeq.fixed_point(f, problem.z0, Broyden(STEPS, 0.0), GDEQ())
    assert calls == [False] * (STEPS + 1)


def failing(kind, when):
    """Not finite for the second sample at one evaluation."""

    class Failing(kind):
        calls = 0

        def forward(self, z):
            self.calls += 1
            out = super().forward(z)
            if self.calls == when + 1:
                for leaf in leaves(out):
                    leaf[1] = torch.nan
            return out

    return Failing(radius=0.9).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "gradient", "when"),
    pairs([Dense, Multiscale], [JFB(), GDEQ(refine=1)], [1, 3, STEPS - 1]),
)
def test_a_sample_that_stopped_is_differentiated_where_it_is_returned(
    kind, gradient, when, form, monkeypatch
):
    expected, wanted, _ = differentiated(failing(kind, when), gradient)
    in_the_solve(monkeypatch)
    found, gradients, _ = differentiated(failing(kind, when), gradient)
    assert found.codes[1] == Status.NONFINITE
    assert found.codes.tolist() == expected.codes.tolist()
    for a, b in zip(leaves(found.z), leaves(expected.z), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients, wanted, strict=True):
        assert bool(b.isfinite().all())
        assert_near(a, b, 1e-10)


@pytest.mark.parametrize("kind", [Dense, Multiscale])
def test_a_sample_that_stops_at_the_very_last_is_returned_as_it_was_before(kind, form, monkeypatch):
    expected, _, _ = differentiated(failing(kind, STEPS), JFB())
    in_the_solve(monkeypatch)
    found, _, _ = differentiated(failing(kind, STEPS), JFB())
    assert found.codes[1] == expected.codes[1] == Status.NONFINITE
    for a, b in zip(leaves(found.z), leaves(expected.z), strict=True):
        assert torch.equal(a, b)
    before = gdeq.solve(kind(radius=0.9).to(DEVICE), kind().to(DEVICE).z0, Broyden(STEPS - 1, 0.0))
    assert_near(pack(found.z)[1], pack(before.z)[1], 1e-12)


@pytest.mark.parametrize("gradient", [JFB(), GDEQ(refine=1)], ids=str)
def test_a_constant_f_has_no_gradient(gradient, form, monkeypatch):
    in_the_solve(monkeypatch)
    z0 = torch.zeros(2, 3, device=DEVICE)
    solution = gdeq.fixed_point(torch.ones_like, z0, Broyden(STEPS, 0.0), gradient)
    assert not solution.z.requires_grad


@pytest.mark.parametrize("refine", [1, 2])
def test_a_product_in_the_precision_of_f_is_the_same(refine, monkeypatch):
    """The refinement's kernels read it as it is; the plain form has it in float32."""
    torch.manual_seed(0)
    weight = torch.randn(2, 6, 6, device=DEVICE).bfloat16().requires_grad_()
    bias = torch.randn(3, 2, 6, device=DEVICE).bfloat16()
    z0 = tuple(torch.zeros(3, 6, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def f(z):
        a, b = z
        mixed = (a @ weight[0].mT * 0.2 + b * 0.3, b @ weight[1].mT * 0.2 + a * 0.3)
        return tuple(torch.tanh(part + bias[:, i]) for i, part in enumerate(mixed))

    asked, results = [], []
    real = nodes._Product.narrow

    def watched(self, u):
        asked.append(real(self, u))
        return asked[-1]

    with choice.use("triton"):
        for method in (watched, nodes._Product.__call__):
            monkeypatch.setattr(nodes._Product, "narrow", method)
            solution = gdeq.fixed_point(f, z0, Broyden(4, 0.0), GDEQ(refine=refine))
            loss = sum(part.float().square().sum() for part in solution.z)
            results.append(torch.autograd.grad(loss, weight)[0])
    assert len(asked) == refine
    assert all(product.dtype == torch.bfloat16 for product in asked)
    assert torch.equal(*results)
