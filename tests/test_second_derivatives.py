"""Second derivatives of `gdeq.Implicit`: any number of passes, in any order, told by structure.

The reference is dense.  With M = (I − J)⁻¹ at z*, held constant, each step z ← z + M(f(z) − z) from
z* gives one more derivative of z* exactly: two steps through autograd have the second ones.
"""

import pytest
import torch
from torch import nn

import gdeq

F64 = torch.float64
TIGHT = gdeq.Broyden(max_iter=600, tol=1e-13)


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


def assert_near(found, expected, rtol):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= rtol * b.norm()


class Cell(nn.Module):
    def __init__(self, d=4, gain=0.6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d, dtype=F64))
        with torch.no_grad():
            self.weight *= gain / torch.linalg.matrix_norm(self.weight, 2)

    def forward(self, z, x):
        return torch.tanh(z @ self.weight.T + x)


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.outer, self.inner = Cell(gain=0.5), inner

    def forward(self, z, x):
        return self.outer(z, x + 0.5 * self.inner(z))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("inner", [gdeq.Implicit(), gdeq.Implicit(gdeq.GMRES(20, 1e-13))], ids=str)
def test_nested_fixed_points(seed, inner):
    torch.manual_seed(seed)
    cell = Nested(gdeq.DEQ(Cell(), TIGHT, inner))
    deq = gdeq.DEQ(cell, TIGHT, gdeq.Implicit(gdeq.GMRES()))
    x = torch.randn(2, 4, dtype=F64).requires_grad_()
    leaves = [x, cell.inner.cell.weight, cell.outer.weight]

    def by_hand(z):
        y = dense(lambda y: cell.inner.cell(y, z), cell.inner(z.detach()))
        return cell.outer(z, x + 0.5 * y)

    z = deq(x)
    found = slope_and_penalty(z, leaves)
    expected = slope_and_penalty(dense(by_hand, z), leaves)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-4)  # the tolerance of the outer gradient is 1e-6


def bratu(strength, points):
    """−u″ = λeᵘ by damped Jacobi steps."""

    def f(u):  # (batch, points)
        sides = nn.functional.pad(u, (1, 1))
        step = (sides[:, :-2] + sides[:, 2:] + strength * u.exp() / (points + 1) ** 2) / 2
        return (u + step) / 2

    return f


@pytest.mark.parametrize("points", [31, 63])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("precondition", [True, False])
def test_an_ill_conditioned_map(points, seed, precondition):
    torch.manual_seed(seed)
    strength = (0.3 + 2 * torch.rand(3, 1, dtype=F64)).requires_grad_()
    f = bratu(strength, points)
    gradient = gdeq.Implicit(gdeq.GMRES(400, 1e-12), precondition=precondition)
    solution = gdeq.fixed_point(f, torch.zeros(3, points, dtype=F64), TIGHT, gradient)
    first, second = slope_and_penalty(solution.z, [strength])
    expected = slope_and_penalty(dense(f, solution.z), [strength])
    assert_near(first, expected[0], 1e-6)
    assert_near(second, expected[1], 1e-6)


LOOSE = gdeq.Implicit(gdeq.Broyden(40, 1e-2))


@pytest.mark.parametrize("gradient", [gdeq.Implicit(gdeq.GMRES(20, 1e-13)), LOOSE], ids=str)
def test_any_number_of_passes_may_be_differentiated(gradient):
    """Slopes of several outputs, one by one, and a plain pass between them."""
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(3, 4, dtype=F64).requires_grad_()
    solution = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), TIGHT, gradient)

    def penalty(z):
        slopes = []
        for i in range(4):
            output = z[:, i].square().sum()
            slopes += torch.autograd.grad(output, x, create_graph=True)
            torch.autograd.grad(output, x, retain_graph=True)
        return sum(slope.square().sum() for slope in slopes)

    found = torch.autograd.grad(penalty(solution.z), cell.weight)
    expected = torch.autograd.grad(penalty(dense(lambda z: cell(z, x), solution.z)), cell.weight)
    assert_near(found, expected, 3e-2 if gradient is LOOSE else 1e-10)


def test_hessian():
    torch.manual_seed(0)
    cell, start, direction = Cell(), torch.randn(1, 4, dtype=F64), torch.randn(1, 4, dtype=F64)

    def solved(x):
        gradient = gdeq.Implicit(gdeq.GMRES(9, 1e-13))
        z = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), TIGHT, gradient).z
        return z.pow(3).sum()

    def by_hand(x):
        z = gdeq.solve(lambda z: cell(z, x), torch.zeros_like(x), TIGHT).z
        return dense(lambda z: cell(z, x), z).pow(3).sum()

    expected = torch.autograd.functional.hessian(by_hand, start)
    found = torch.autograd.functional.hessian(solved, start)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    _, found = torch.autograd.functional.vhp(solved, start, direction)
    expected = torch.einsum("ij,ijkl->kl", direction, expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_linear_map_whose_second_pass_does_not_need_w():
    """f is linear in z and the loss too: z* alone depends on x."""
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(2, 4, dtype=F64).requires_grad_()
    solution = gdeq.fixed_point(
        lambda z: z @ cell.weight.T + x,
        torch.zeros_like(x),
        TIGHT,
        gdeq.Implicit(gdeq.GMRES(9, 1e-13)),
    )
    weight = torch.randn(4, 4, dtype=F64)

    def second(z):
        (first,) = torch.autograd.grad(z.sum(), cell.weight, create_graph=True)
        return torch.autograd.grad((weight * first).sum(), x)

    found = second(solution.z)
    inverse = torch.linalg.inv(torch.eye(4, dtype=F64) - cell.weight)
    assert found[0].norm() > 0.1
    assert_near(found, second(x @ inverse.T), 1e-10)


def test_a_part_of_the_state_that_the_loss_does_not_use():
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(2, 4, dtype=F64).requires_grad_()

    def f(parts):
        return cell(torch.cat(parts, 1), x).split((1, 3), dim=1)

    z0 = (torch.zeros(2, 1, dtype=F64), torch.zeros(2, 3, dtype=F64))
    z = gdeq.fixed_point(f, z0, TIGHT, gdeq.Implicit(gdeq.GMRES(9, 1e-13))).z
    whole = dense(lambda z: cell(z, x), torch.cat(z, 1))
    for found, expected in zip(
        slope_and_penalty(z[1], [x, cell.weight]),
        slope_and_penalty(whole[:, 1:], [x, cell.weight]),
        strict=True,
    ):
        assert_near(found, expected, 1e-10)


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_first_pass_ends_at_the_input_node(create_graph):
    """f's graph for second derivatives, with a solve of its own, costs a first pass nothing."""
    torch.manual_seed(0)
    cell, x, inner = Cell(), torch.randn(2, 4, dtype=F64).requires_grad_(), []

    def f(z):
        inside = gdeq.fixed_point(
            lambda y: 0.3 * torch.sin(y + z), torch.zeros_like(z), TIGHT, gdeq.Implicit()
        )
        inner.append(inside)
        return cell(inside.z, x)

    solution = gdeq.fixed_point(f, torch.zeros_like(x), TIGHT, gdeq.Implicit())
    *_, of_second, of_first = inner
    torch.autograd.grad(solution.z.sum(), x, create_graph=create_graph)
    assert of_first.backward.vjps > 0
    assert of_second.backward is None
    assert solution.backward.residual.shape == (2,)
    assert solution.backward.converged.all()


def test_a_pass_that_failed_leaves_nothing_behind():
    """What the output node left for the input node is not that of the next pass."""
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(2, 4, dtype=F64).requires_grad_()
    fails = [False]

    def f(z):
        out = cell(z, x)
        if out.requires_grad:
            out.register_hook(lambda grad: 1 / 0 if fails[0] else grad)
        return out

    gradient = gdeq.Implicit(gdeq.GMRES(9, 1e-13))
    z = gdeq.fixed_point(f, torch.zeros_like(x), TIGHT, gradient).z
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), cell.weight, retain_graph=True)
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(z.square().sum(), x, retain_graph=True)
    fails[0] = False
    (found,) = torch.autograd.grad(first.square().sum(), cell.weight)
    assert_near([found], [expected], 1e-12)


@pytest.mark.parametrize("of", ["x", "weight"])
@pytest.mark.parametrize("power", [1, 2])
def test_a_third_derivative_is_refused_and_nothing_else(of, power):
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(2, 4, dtype=F64).requires_grad_()
    z = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), TIGHT, gdeq.Implicit()).z
    leaf = x if of == "x" else cell.weight
    for _ in range(2):
        (first,) = torch.autograd.grad(z.pow(power).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no third"):
        torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert torch.isfinite(second).all()
