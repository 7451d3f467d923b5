"""`torch.func`, forward mode and batched gradients, against the same through an unrolled f."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import gdeq

torch.manual_seed(0)
WEIGHT = torch.randn(4, 4, dtype=torch.float64) / 6
X = torch.randn(3, 4, dtype=torch.float64)
DIRECTION = torch.randn(4, 4, dtype=torch.float64)
MANY = torch.stack([WEIGHT, -WEIGHT, 0.5 * WEIGHT.T])

EXACT = gdeq.Implicit(gdeq.GMRES(max_iter=12, tol=1e-13))
SOLVERS = {
    "Broyden": gdeq.Broyden(max_iter=40, tol=1e-13),
    "Anderson": gdeq.Anderson(max_iter=60, tol=1e-13),
    "Picard": gdeq.Picard(max_iter=80, tol=1e-13),
    "fixed steps": gdeq.Broyden(max_iter=14, tol=0),
}


def f(z, weight, x):
    return torch.tanh(z @ weight.T + x)


def found(weight, x, solver=SOLVERS["Broyden"], gradient=EXACT):
    return gdeq.fixed_point(lambda z: f(z, weight, x), torch.zeros_like(x), solver, gradient).z


def unrolled(weight, x, **_):
    z = torch.zeros_like(x)
    for _ in range(80):
        z = f(z, weight, x)
    return z


def loss(z):
    return (z.square() * torch.arange(1.0, 5.0, dtype=z.dtype)).sum()


def dual(at):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(at(forward_ad.make_dual(WEIGHT, DIRECTION), X)).tangent


def rows(at):  # many backward passes as one, of a graph that was made without a transform
    weight = WEIGHT.clone().requires_grad_()
    z = at(weight, X)
    basis = torch.eye(z.numel(), dtype=z.dtype).view(-1, *z.shape)
    return vmap(lambda v: torch.autograd.grad(z, weight, v)[0])(basis)


def second_rows(at):  # the same of gradients that have a graph
    weight = WEIGHT.clone().requires_grad_()
    (made,) = torch.autograd.grad(loss(at(weight, X)), weight, create_graph=True)
    basis = torch.eye(made.numel(), dtype=made.dtype).view(-1, *made.shape)
    return vmap(lambda v: torch.autograd.grad(made, weight, v)[0])(basis)


def mixed(at):  # a backward pass around a transform
    weight = WEIGHT.clone().requires_grad_()
    inner = grad(lambda x: loss(at(weight, x)))(X)
    return torch.autograd.grad(inner.square().sum(), weight)[0]


def within(at):  # a transform under vmap, then a backward pass
    many = MANY.clone().requires_grad_()
    vmap(lambda weight: loss(at(weight, X)))(many).prod().backward()
    return many.grad


USES = {
    "grad": lambda at: grad(lambda w: loss(at(w, X)))(WEIGHT),
    "vjp": lambda at: vjp(lambda x: at(WEIGHT, x), X)[1](X)[0],
    "jacrev": lambda at: jacrev(at)(WEIGHT, X),
    "ensemble": lambda at: vmap(at, (0, None))(MANY, X),
    "gradients of an ensemble": lambda at: vmap(grad(lambda w: loss(at(w, X))))(MANY),
    "gradient through an ensemble": within,
    "per-sample gradients": lambda at: vmap(grad(lambda w, x: loss(at(w, x[None]))), (None, 0))(
        WEIGHT, X
    ),
    "Jacobians of an ensemble": lambda at: vmap(jacrev(at), (0, None))(MANY, X),
    "Jacobian of an ensemble": lambda at: jacrev(lambda w: vmap(at, (0, None))(w, X).sum(0))(MANY),
    "rows by vmap": rows,
    "vectorize": lambda at: torch.autograd.functional.jacobian(
        lambda w: at(w, X), WEIGHT, vectorize=True
    ),
}
FORWARD = {
    "jvp": lambda at: jvp(lambda w: at(w, X), (WEIGHT,), (DIRECTION,))[1],
    "jacfwd": lambda at: jacfwd(at)(WEIGHT, X),
    "dual numbers": dual,
    "vectorize, forward": lambda at: torch.autograd.functional.jacobian(
        lambda w: at(w, X), WEIGHT, vectorize=True, strategy="forward-mode"
    ),
}
SECOND = {
    "hessian": lambda at: hessian(lambda w: loss(at(w, X)))(WEIGHT),
    "grad of grad": lambda at: grad(lambda w: grad(lambda w: loss(at(w, X)))(w).square().sum())(
        WEIGHT
    ),
    "forward over forward": lambda at: jacfwd(jacfwd(lambda x: at(WEIGHT, x)))(X[:1]),
    "reverse over forward": lambda at: jacrev(jacfwd(lambda x: at(WEIGHT, x)))(X[:1]),
    "a backward pass around grad": mixed,
    "Hessian-vector product": lambda at: jvp(
        grad(lambda w: loss(at(w, X))), (WEIGHT,), (DIRECTION,)
    )[1],
    "Hessian, vectorize": lambda at: torch.autograd.functional.hessian(
        lambda w: loss(at(w, X)), WEIGHT, vectorize=True
    ),
    "second rows by vmap": second_rows,
}


@pytest.mark.parametrize("use", [*USES, *FORWARD, *SECOND])
def test_exact_under_every_transform(use):
    take = {**USES, **FORWARD, **SECOND}[use]
    torch.testing.assert_close(take(found), take(unrolled), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_any_solver(solver):
    def at(weight, x):
        return found(weight, x, solver=SOLVERS[solver])

    for use in ("gradients of an ensemble", "jvp"):
        take = {**USES, **FORWARD}[use]
        torch.testing.assert_close(take(at), take(unrolled), rtol=1e-5, atol=1e-6)


GRADIENTS = [
    gdeq.GDEQ(),
    gdeq.GDEQ(refine=2),
    gdeq.GDEQ(tolerance=1e-6),
    gdeq.NPG(),
    gdeq.JFB(),
    gdeq.JFB(refine=2),
    gdeq.Measured(gdeq.GDEQ()),
    gdeq.Unrolled(3),
    gdeq.Implicit(precondition=True),
]


@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_approximate_gradients_are_those_of_a_backward_pass(gradient):
    many, solver = MANY.clone().requires_grad_(), gdeq.Broyden(max_iter=5, tol=0)

    def at(weight):
        return loss(found(weight, X, solver=solver, gradient=gradient))

    want = torch.stack([torch.autograd.grad(at(weight), weight)[0] for weight in many])
    torch.testing.assert_close(vmap(grad(at))(MANY), want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(grad(at)(WEIGHT), want[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("use", ["hessian", "grad of grad", "a backward pass around grad"])
@pytest.mark.parametrize("gradient", [gdeq.GDEQ(), gdeq.Implicit(double_backward=False)], ids=str)
def test_second_derivatives_that_are_not_there_raise(gradient, use):
    with pytest.raises(RuntimeError, match=r"gdeq\.Implicit\(\)"):
        SECOND[use](lambda w, x: found(w, x, gradient=gradient))


def test_forward_mode_needs_implicit():
    with pytest.raises(RuntimeError, match=r"forward mode .* use gradient=gdeq.Implicit"):
        FORWARD["jvp"](lambda w, x: found(w, x, gradient=gdeq.GDEQ()))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), gdeq.VariationalDropout(0.5)
        with torch.no_grad():
            self.inner.weight *= 0.3
        gdeq.weight_norm(self.inner)

    def forward(self, z, x):
        return self.drop(torch.tanh(self.inner(z) + x))


def test_a_layer_with_dropout_and_weight_norm():
    """What is held still in the solve is so in its derivatives, and those reach the parameters."""
    deq = gdeq.DEQ(Cell().double(), gdeq.Broyden(40, 1e-12), EXACT)
    weights = dict(deq.named_parameters())

    def at(weights):
        torch.manual_seed(1)
        return loss(functional_call(deq, weights, (X,)))

    at(weights).backward()
    for name, got in grad(at)({k: w.detach() for k, w in weights.items()}).items():
        torch.testing.assert_close(got, weights[name].grad, rtol=1e-7, atol=1e-9)
        assert got.abs().sum() > 0
    assert deq.solution is None  # it would be that of tensors which are no more
    assert gdeq.solve(lambda z: f(z, WEIGHT, X), torch.zeros_like(X)).converged.all()
    steps = vmap(lambda w: gdeq.solve(lambda z: f(z, w, X), torch.zeros_like(X)).steps)(MANY)
    assert steps.shape == (3, 3)


def test_no_third_derivatives():
    x = X[:1].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"derivatives only; gdeq\.Unrolled\(\)"):
        jacfwd(hessian(lambda x: loss(found(WEIGHT, x))))(x.detach())
    (first,) = torch.autograd.grad(loss(found(WEIGHT, x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivatives only; gdeq\.Unrolled\(\)"):
        torch.autograd.grad(first.square().sum(), x, create_graph=True)


def test_autocast_in_f():
    """Derivatives are those of f as it computes, in half precision where it chooses that."""

    def at(weight):
        def mixed(z):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.tanh((z @ weight.T).float() + X.float())

        return loss(gdeq.fixed_point(mixed, torch.zeros(3, 4), gradient=gdeq.Implicit()).z)

    weight = WEIGHT.float().requires_grad_()
    at(weight).backward()
    torch.testing.assert_close(grad(at)(weight.detach()), weight.grad, rtol=1e-6, atol=1e-6)


def scripted(z, w, x):
    return torch.jit.script(inner)(z) + x


def inner(z):
    return torch.tanh(0.5 * z)


UNSEEN = {
    "torch.jit": scripted,
    "vmap over z": lambda z, w, x: torch.tanh(vmap(lambda row: w @ row)(z) + x),
    "vmap beside z": lambda z, w, x: torch.tanh(z + vmap(lambda row: w @ row)(x)),
    "grad": lambda z, w, x: grad(lambda z: 0.1 * (z @ w.T).cos().sum())(z) + x,
    "another fixed point": lambda z, w, x: 0.5 * z.tanh() + found(w, x),
}


@pytest.mark.parametrize("cell", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize("take", [grad, vmap, jacfwd])
def test_what_cannot_be_followed_is_told(cell, take):
    def solved(w):
        return gdeq.fixed_point(lambda z: cell(z, w, X), X, gradient=EXACT).z.sum()

    with pytest.raises(RuntimeError, match=r"torch\.func cannot follow.*\.backward\(\)"):
        take(solved)(MANY if take is vmap else WEIGHT)
