"""Second derivatives: any number of passes, in any order, told by structure.

The reference is dense.  With M = (I − J)⁻¹ at z*, held constant, each step z ← z + M(f(z) − z) from
z* gives one more derivative of z* exactly: two steps through autograd have the second ones.
"""

import pytest
import torch
from torch import nn

import gdeq
from cells import F64, GRADIENTS, SOLVER, Cell, assert_same, contraction, data, layer
from gdeq import GDEQ, GMRES, JFB, Broyden, Implicit
from problems import Multiscale, pack
from problems import assert_near as near

TIGHT = Broyden(max_iter=600, tol=1e-13)


def dense(f, z):  # (batch, d) -> (batch, d)
    """z = f(z) with its first and second derivatives."""
    z = z.detach()
    jacobian = torch.autograd.functional.jacobian(lambda u: f(u).sum(0), z).transpose(0, 1)
    inverse = torch.linalg.inv(torch.eye(z.shape[1], dtype=F64) - jacobian)
    for _ in range(2):
        z = z + torch.einsum("bij,bj->bi", inverse, f(z) - z)
    return z


def slope_and_penalty(z, leaves):
    first = torch.autograd.grad(z.square().sum() + z.sin().sum(), leaves, create_graph=True)
    return first, torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def assert_derivatives(z, expected, leaves, rtol):
    """The first ones, and the second ones in a penalty on them."""
    pairs = zip(slope_and_penalty(z, leaves), slope_and_penalty(expected, leaves), strict=True)
    for a, b in pairs:
        assert_near(a, b, rtol)


def hessian_product(z, parameters):
    first = torch.autograd.grad(z.pow(3).sum(), parameters, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), parameters)


def assert_near(found, expected, rtol):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= rtol * b.norm()


def problem():
    return Cell(gain=0.6), torch.randn(2, 4, dtype=F64).requires_grad_()


# --- Implicit, against dense algebra --------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.outer, self.inner = Cell(gain=0.5), inner

    def forward(self, z, x):
        return self.outer(z, x + 0.5 * self.inner(z))


TIGHTLY = Implicit(GMRES(20, 1e-13))


@pytest.mark.parametrize("inner", [Implicit(), TIGHTLY, GDEQ(tolerance=1e-12, max_refine=40)])
@pytest.mark.parametrize("outer", [Implicit(SOLVER), TIGHTLY, GDEQ(tolerance=1e-12, max_refine=40)])
def test_nested_fixed_points(outer, inner):
    """The first derivatives, and the second ones of those that have them."""
    cell = Nested(gdeq.DEQ(Cell(gain=0.6), TIGHT, inner))
    deq = gdeq.DEQ(cell, TIGHT, outer)
    x = torch.randn(2, 4, dtype=F64).requires_grad_()
    leaves = [x, cell.inner.cell.inner.weight, cell.outer.inner.weight]

    def by_hand(z):
        y = dense(lambda y: cell.inner.cell(y, z), cell.inner(z.detach()))
        return cell.outer(z, x + 0.5 * y)

    z = deq(x)
    whole = dense(by_hand, z)
    if GDEQ in (type(outer), type(inner)):
        first, exact = (torch.autograd.grad(y.sin().sum(), leaves) for y in (z, whole))
        assert_near(first, exact, 1e-5)
        return
    assert_derivatives(z, whole, leaves, 1e-5)  # the default tolerance of Implicit is 1e-6


def bratu(strength, points):
    """−u″ = λeᵘ by damped Jacobi steps."""

    def f(u):  # (batch, points)
        sides = nn.functional.pad(u, (1, 1))
        step = (sides[:, :-2] + sides[:, 2:] + strength * u.exp() / (points + 1) ** 2) / 2
        return (u + step) / 2

    return f


@pytest.mark.parametrize("precondition", [True, False])
def test_an_ill_conditioned_map(precondition):
    strength = (0.3 + 2 * torch.rand(3, 1, dtype=F64)).requires_grad_()
    f = bratu(strength, points=31)
    gradient = Implicit(GMRES(400, 1e-12), precondition=precondition)
    solution = gdeq.fixed_point(f, torch.zeros(3, 31, dtype=F64), TIGHT, gradient)
    assert_derivatives(solution.z, dense(f, solution.z), [strength], 1e-6)


LOOSE = Implicit(Broyden(40, 1e-2))


@pytest.mark.parametrize("gradient", [Implicit(GMRES(20, 1e-13)), LOOSE], ids=str)
def test_any_number_of_passes_may_be_differentiated(gradient):
    """Slopes of several outputs, one by one, and a plain pass between them."""
    cell, x = problem()
    solution = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), TIGHT, gradient)

    def penalty(z):
        slopes = []
        for i in range(4):
            output = z[:, i].square().sum()
            slopes += torch.autograd.grad(output, x, create_graph=True)
            torch.autograd.grad(output, x, retain_graph=True)
        return sum(slope.square().sum() for slope in slopes)

    weight = cell.inner.weight
    mine, theirs = penalty(solution.z), penalty(dense(lambda z: cell(z, x), solution.z))
    found = torch.autograd.grad(mine, weight, retain_graph=True)
    assert_same(torch.autograd.grad(mine, weight), found)  # such a pass may be repeated
    expected = torch.autograd.grad(theirs, weight)
    assert_near(found, expected, 3e-2 if gradient is LOOSE else 1e-10)


def test_a_linear_map_whose_second_pass_does_not_need_w():
    """f is linear in z and the loss too: z* alone depends on x."""
    W, x = contraction(4, 0.6).requires_grad_(), torch.randn(2, 4, dtype=F64).requires_grad_()
    gradient = Implicit(GMRES(9, 1e-13))
    solution = gdeq.fixed_point(lambda z: z @ W.T + x, torch.zeros_like(x), TIGHT, gradient)
    weight = torch.randn(4, 4, dtype=F64)

    def second(z):
        (first,) = torch.autograd.grad(z.sum(), W, create_graph=True)
        return torch.autograd.grad((weight * first).sum(), x)

    found = second(solution.z)
    inverse = torch.linalg.inv(torch.eye(4, dtype=F64) - W)
    assert found[0].norm() > 0.1
    assert_near(found, second(x @ inverse.T), 1e-10)


def test_a_part_of_the_state_that_the_loss_does_not_use():
    cell, x = problem()
    z0 = (torch.zeros(2, 1, dtype=F64), torch.zeros(2, 3, dtype=F64))

    def f(parts):
        return cell(torch.cat(parts, 1), x).split((1, 3), dim=1)

    z = gdeq.fixed_point(f, z0, TIGHT, Implicit(GMRES(9, 1e-13))).z
    whole, leaves = dense(lambda z: cell(z, x), torch.cat(z, 1)), [x, cell.inner.weight]
    assert_derivatives(z[1], whole[:, 1:], leaves, 1e-10)


@pytest.mark.parametrize(("tol", "weight"), [(1e-3, 0.01), (3e-2, 0.1)])
def test_first_and_second_order_in_one_pass_are_their_sum(tol, weight):
    """A loss and a penalty on its gradient: the penalty must not be taken for a residual."""
    matrix, start = contraction(12, 0.7).requires_grad_(), torch.randn(4, 12, dtype=F64)

    def parts():
        x = start.clone().requires_grad_()
        gradient = Implicit(Broyden(40, tol))
        z = gdeq.fixed_point(
            lambda z: torch.tanh(z @ matrix.T + x), torch.zeros_like(start), SOLVER, gradient
        ).z
        loss = z.square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss, weight * slope.square().sum()

    (whole,) = torch.autograd.grad(sum(parts()), matrix)
    loss, penalty = parts()
    (first,) = torch.autograd.grad(loss, matrix, retain_graph=True)
    (second,) = torch.autograd.grad(penalty, matrix)
    assert (whole - first - second).norm() < 3 * tol * (first.norm() + second.norm())


def test_second_derivatives_in_low_precision_are_not_taken_for_third():
    W, x = contraction(6, 0.5).float().requires_grad_(), torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        solution = gdeq.fixed_point(
            lambda z: torch.tanh(z @ W.T + x),
            torch.zeros(2, 6),
            Broyden(10, 1e-2),
            Implicit(GMRES(12, 0.0)),
        )
    (first,) = torch.autograd.grad(solution.z.square().sum(), W, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), W)
    assert torch.isfinite(second).all()
    assert solution.backward.residual.max() > 1e-5  # bf16 products cannot do better, so: not 1e-16


# --- which pass is which --------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_first_pass_ends_at_the_input_node(create_graph):
    """f's graph for second derivatives, with a solve of its own, costs a first pass nothing."""
    cell, x = problem()
    inner = []

    def f(z):
        inside = gdeq.fixed_point(
            lambda y: 0.3 * torch.sin(y + z), torch.zeros_like(z), TIGHT, Implicit()
        )
        inner.append(inside)
        return cell(inside.z, x)

    solution = gdeq.fixed_point(f, torch.zeros_like(x), TIGHT, Implicit())
    *_, of_second, of_first = inner
    torch.autograd.grad(solution.z.sum(), x, create_graph=create_graph)
    assert of_first.backward.vjps > 0
    assert of_second.backward is None
    assert solution.backward.residual.shape == (2,)
    assert solution.backward.converged.all()


def test_a_pass_that_failed_leaves_nothing_behind():
    """What the output node left for the input node is not that of the next pass."""
    cell, x = problem()
    fails = [False]

    def f(z):
        out = cell(z, x)
        if out.requires_grad:
            out.register_hook(lambda grad: 1 / 0 if fails[0] else grad)
        return out

    z = gdeq.fixed_point(f, torch.zeros_like(x), TIGHT, Implicit(GMRES(9, 1e-13))).z
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), cell.inner.weight, retain_graph=True)
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(z.square().sum(), x, retain_graph=True)
    fails[0] = False
    (found,) = torch.autograd.grad(first.square().sum(), cell.inner.weight)
    assert_near([found], [expected], 1e-12)


@pytest.mark.parametrize("of", ["x", "weight"])
@pytest.mark.parametrize("power", [1, 2])
def test_a_third_derivative_is_refused_and_nothing_else(of, power):
    cell, x = problem()
    z = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), TIGHT, Implicit()).z
    leaf = x if of == "x" else cell.inner.weight
    for _ in range(2):
        (first,) = torch.autograd.grad(z.pow(power).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="first and second derivatives only"):
        torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert torch.isfinite(second).all()


# --- the other gradients --------------------------------------------------------------------------

SECOND_ORDER = ("Implicit", "Implicit-GMRES", "JFB", "Unrolled")
FIRST_ORDER = {name: g for name, g in GRADIENTS.items() if name not in SECOND_ORDER}
FIRST_ORDER["Measured-Implicit"] = gdeq.Measured(Implicit())


@pytest.mark.parametrize("gradient", FIRST_ORDER.values(), ids=FIRST_ORDER)
def test_those_without_second_derivatives_say_so(device, gradient):
    deq, x = layer(device, gradient), data(device, 2, 4).requires_grad_()
    loss = deq(x).sum()
    with pytest.raises(RuntimeError, match=r"Implicit\(\)"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad(loss, x)[0].abs().sum() > 0  # the graph is still good for one


def test_second_derivative_of_jfb_is_that_of_f_at_a_constant_z(device):
    problem = Multiscale().to(device)
    parameters = list(problem.parameters())
    solution = gdeq.fixed_point(problem, problem.z0, Broyden(100, 1e-14), JFB())
    found = hessian_product(pack(solution.z), parameters)
    expected = hessian_product(problem.on_vectors(pack(solution.z).detach()), parameters)
    for a, b in zip(found, expected, strict=True):
        near(a, b, 1e-10)
    assert any(gradient.abs().max() > 1e-2 for gradient in found)
