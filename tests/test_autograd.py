"""The fixed point as a citizen of autograd: modes, reuse, nesting, several passes, lifetimes."""

import gc
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gdeq

F64 = torch.float64
EXACT = gdeq.Implicit(gdeq.Broyden(max_iter=60, tol=1e-13))
SOLVER = gdeq.Broyden(max_iter=60, tol=1e-13)
GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-3, max_refine=4),
    "Implicit": EXACT,
    "Implicit-first-order": gdeq.Implicit(gdeq.Broyden(60, 1e-13), double_backward=False),
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=30, tol=1e-13), precondition=True),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(steps=4, damping=0.7),
    "Unrolled": gdeq.Unrolled(steps=3, damping=0.8),
    "Measured": gdeq.Measured(gdeq.GDEQ()),
}
SECOND_ORDER = ("Implicit", "Implicit-GMRES", "JFB", "Unrolled")

every_gradient = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)


class Cell(nn.Module):
    """tanh(Wz + Ux + b) with ‖W‖ = 0.7: a contraction with a solid Jacobian."""

    def __init__(self, d=4, gain=0.7):
        super().__init__()
        self.inner = nn.Linear(d, d, dtype=F64)
        self.input = nn.Linear(d, d, bias=False, dtype=F64)
        with torch.no_grad():
            self.inner.weight *= gain / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.input(x))


def layer(device, gradient, solver=SOLVER, **kwargs):
    return gdeq.DEQ(Cell(**kwargs).to(device), solver=solver, gradient=gradient)


def data(device, *shape):
    return torch.randn(*shape, dtype=F64, device=device)


def gradients_of(loss, module, *more):
    return torch.autograd.grad(loss, [*module.parameters(), *more], retain_graph=True)


def assert_same(found, expected, rtol=0.0, atol=0.0):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def dense_jacobian(f, z):
    """∂f/∂z of each sample, (batch, d, d), column by column."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        out = f(z).flatten(1)
        rows = [torch.autograd.grad(out[:, i].sum(), z, retain_graph=True)[0] for i in range(4)]
    return torch.stack([row.flatten(1) for row in rows], dim=1)


def exact_gradients(cell, x, z, v):
    """(∂f/∂θ)ᵀ (I − J)⁻ᵀ v by a dense solve, for θ = the cell's parameters and x."""
    jacobian = dense_jacobian(lambda u: cell(u, x), z)
    eye = torch.eye(z.shape[1], dtype=F64, device=z.device)
    w = torch.linalg.solve((eye - jacobian).transpose(1, 2), v.unsqueeze(2)).squeeze(2)
    out = cell(z.detach(), x)
    return torch.autograd.grad(out, [*cell.parameters(), x], w)


def finite_differences(loss, tensors, step=1e-6):
    """Central differences of loss() in every entry of the given leaves."""
    found = []
    for tensor in tensors:
        slope = torch.zeros_like(tensor)
        flat, out = tensor.data.view(-1), slope.view(-1)
        for i in range(flat.numel()):
            kept = flat[i].item()
            flat[i] = kept + step
            high = loss().item()
            flat[i] = kept - step
            low = loss().item()
            flat[i] = kept
            out[i] = (high - low) / (2 * step)
        found.append(slope)
    return found


# --- modes ---------------------------------------------------------------------------------------


@every_gradient
def test_gradients_in_eval_equal_those_in_train(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4).requires_grad_()
    found = []
    for mode in (True, False):
        deq.train(mode)
        found.append(gradients_of(deq(x).square().sum(), deq, x))
    assert all(g.abs().sum() > 0 for g in found[1])
    assert_same(found[1], found[0])


@every_gradient
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradients_without_autograd(device, gradient, mode):
    deq = layer(device, gradient)
    x = data(device, 3, 4).requires_grad_()
    expected = deq(x)
    assert expected.requires_grad
    with mode():
        z = deq(x)
    assert not z.requires_grad
    assert z.grad_fn is None
    assert not torch.is_tensor(deq.solution.z) or not deq.solution.z.requires_grad
    assert deq.solution.backward is None
    torch.testing.assert_close(z, expected.detach(), rtol=0, atol=0)


@every_gradient
def test_the_layer_trains_after_a_call_in_inference_mode(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4)
    expected = gradients_of(deq(x).sum(), deq)
    with torch.inference_mode():
        deq(x)
    assert_same(gradients_of(deq(x).sum(), deq), expected)


@every_gradient
def test_a_state_found_in_inference_mode_may_start_a_training_step(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4)
    with torch.inference_mode():
        z0 = deq(x)
    # At a z0 that is a solution already, the solver hands z0 itself to autograd.
    found = gradients_of(deq(x, z0=z0).sum(), deq)
    deq(x, z0=z0.clone()).sum().backward()
    assert all(torch.isfinite(g).all() for g in found)
    assert_same(found, [p.grad for p in deq.parameters()])


@every_gradient
def test_works_with_grad_mode_switched_back_on_inside_no_grad(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4)
    expected = gradients_of(deq(x).sum(), deq)
    with torch.no_grad(), torch.enable_grad():
        z = deq(x)
    assert_same(gradients_of(z.sum(), deq), expected)


# --- one layer, several uses ---------------------------------------------------------------------


@every_gradient
def test_layer_used_twice_before_backward_adds_up(device, gradient):
    deq = layer(device, gradient)
    x1, x2 = data(device, 3, 4), data(device, 2, 4)
    a, b = data(device, 3, 4), data(device, 2, 4)
    apart = [gradients_of((deq(x) * v).sum(), deq) for x, v in ((x1, a), (x2, b))]
    z1, z2 = deq(x1), deq(x2)
    together = gradients_of((z1 * a).sum() + (z2 * b).sum(), deq)
    assert_same(together, [g1 + g2 for g1, g2 in zip(*apart, strict=True)], rtol=1e-12, atol=1e-14)


def test_layer_used_twice_equals_the_dense_solve(device):
    deq = layer(device, EXACT)
    x1, x2 = data(device, 3, 4).requires_grad_(), data(device, 3, 4).requires_grad_()
    v1, v2 = data(device, 3, 4), data(device, 3, 4)
    z1, z2 = deq(x1), deq(x2)
    found = gradients_of((z1 * v1).sum() + (z2 * v2).sum(), deq, x1, x2)
    one, two = exact_gradients(deq.cell, x1, z1, v1), exact_gradients(deq.cell, x2, z2, v2)
    expected = [a + b for a, b in zip(one[:-1], two[:-1], strict=True)] + [one[-1], two[-1]]
    assert_same(found, expected, rtol=1e-9, atol=1e-11)


def test_layer_applied_to_its_own_output_equals_the_dense_solve(device):
    deq = layer(device, EXACT)
    x = data(device, 3, 4).requires_grad_()
    v = data(device, 3, 4)
    z1 = deq(x)
    z2 = deq(z1)
    found = gradients_of((z2 * v).sum(), deq, x)
    second = exact_gradients(deq.cell, z1.detach().requires_grad_(), z2, v)
    first = exact_gradients(deq.cell, x, z1, second[-1])
    expected = [a + b for a, b in zip(first[:-1], second[:-1], strict=True)] + [first[-1]]
    assert_same(found, expected, rtol=1e-9, atol=1e-11)


@every_gradient
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_order_of_backward_calls_does_not_matter(device, gradient, order):
    deq = layer(device, gradient)
    xs = [data(device, 2, 4) for _ in range(3)]
    expected = []
    for x in xs:
        deq.zero_grad()
        deq(x).square().sum().backward()
        expected.append([p.grad for p in deq.parameters()])
    losses = [deq(x).square().sum() for x in xs]
    for i in order:
        deq.zero_grad()
        losses[i].backward()
        assert_same([p.grad for p in deq.parameters()], expected[i])


def test_forward_calls_between_forward_and_backward_do_no_harm(device):
    deq = layer(device, gdeq.GDEQ(refine=1))
    x = data(device, 3, 4)
    expected = gradients_of(deq(x).sum(), deq)
    loss = deq(x).sum()
    record = deq.solution
    deq(data(device, 5, 4)).sum().backward()
    with torch.no_grad():
        deq(data(device, 1, 4))
    assert record.backward is None
    assert_same(gradients_of(loss, deq), expected)
    assert record.backward is not None


# --- nesting -------------------------------------------------------------------------------------


class Nested(nn.Module):
    """An equilibrium whose cell solves another one; the inner depends on the outer state."""

    def __init__(self, inner):
        super().__init__()
        self.outer = Cell(gain=0.5)
        self.inner = inner

    def forward(self, z, x):
        return self.outer(z, x + 0.5 * self.inner(z))


NESTED = {
    "Implicit": EXACT,
    "GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=30, tol=1e-13)),
    "refined": gdeq.GDEQ(tolerance=1e-12, max_refine=40),
}


@pytest.mark.parametrize("outer", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("inner", NESTED.values(), ids=NESTED)
def test_nested_equilibria_against_the_dense_solve(device, outer, inner):
    cell = Nested(layer(device, inner)).to(device)
    deq = gdeq.DEQ(cell, solver=SOLVER, gradient=outer)
    x, v = data(device, 2, 4).requires_grad_(), data(device, 2, 4)
    z = deq(x)
    assert deq.solution.converged.all()
    found = gradients_of((z * v).sum(), deq, x)

    # Everything dense: the inner solution's derivative by the implicit function theorem.
    zi = cell.inner(z.detach()).detach()
    into = z.detach().requires_grad_()
    pre = cell.outer.inner(into) + cell.outer.input(x + 0.5 * zi)
    slope = 1 - torch.tanh(pre) ** 2  # (batch, d)
    w_o, u_o = cell.outer.inner.weight, cell.outer.input.weight
    c = cell.inner.cell
    slope_i = 1 - zi**2
    eye = torch.eye(4, dtype=F64, device=device)
    j_i = slope_i.unsqueeze(2) * c.inner.weight
    d_inner = torch.linalg.solve(eye - j_i, slope_i.unsqueeze(2) * c.input.weight)
    j = slope.unsqueeze(2) * (w_o + 0.5 * u_o @ d_inner)
    w = torch.linalg.solve((eye - j).transpose(1, 2), v.unsqueeze(2)).squeeze(2)
    x_grad = (w * slope) @ u_o
    torch.testing.assert_close(found[-1], x_grad, rtol=1e-8, atol=1e-10)
    v_inner = 0.5 * x_grad
    inner = exact_gradients(c, z.detach().requires_grad_(), zi, v_inner)[:-1]
    names = [name for name, _ in deq.named_parameters()]
    by_name = dict(zip(names, found[:-1], strict=True))
    for (name, _), expected in zip(c.named_parameters(), inner, strict=True):
        torch.testing.assert_close(
            by_name[f"cell.inner.cell.{name}"], expected, rtol=1e-8, atol=1e-10
        )
    torch.testing.assert_close(
        by_name["cell.outer.inner.weight"], (w * slope).T @ z.detach(), rtol=1e-8, atol=1e-10
    )


def test_nested_equilibria_second_derivatives(device):
    solver = gdeq.Broyden(max_iter=40, tol=1e-11)
    gradient = gdeq.Implicit(solver)
    cell = Nested(layer(device, gradient, solver=solver)).to(device)
    deq = gdeq.DEQ(cell, solver=solver, gradient=gradient)
    x = data(device, 1, 4).requires_grad_()

    def penalty():
        (slope,) = torch.autograd.grad(deq(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    leaves = [x, cell.inner.cell.inner.bias]
    found = torch.autograd.grad(penalty(), leaves)
    expected = finite_differences(penalty, leaves, step=1e-4)
    assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_nested_approximate_gradients_point_the_right_way(device):
    cell = Nested(layer(device, EXACT)).to(device)
    deq = gdeq.DEQ(cell, solver=SOLVER, gradient=EXACT)
    x = data(device, 2, 4)

    def direction():
        return torch.cat([g.flatten() for g in gradients_of(deq(x).square().sum(), deq)])

    exact = direction()
    for deq.gradient in (gdeq.GDEQ(), gdeq.GDEQ(refine=2), gdeq.NPG()):
        for cell.inner.gradient in (gdeq.GDEQ(), gdeq.JFB(), gdeq.NPG(), gdeq.Unrolled()):
            assert torch.cosine_similarity(direction(), exact, dim=0) > 0.8


# --- several passes ------------------------------------------------------------------------------


@every_gradient
def test_repeated_backward_with_retain_graph(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4).requires_grad_()
    loss = deq(x).square().sum()
    found = []
    for keep in (True, True, False):
        deq.zero_grad()
        x.grad = None
        loss.backward(retain_graph=keep)
        found.append([p.grad for p in deq.parameters()] + [x.grad])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@every_gradient
def test_backward_with_other_cotangents_on_the_same_graph(device, gradient):
    # A refinement must start from the forward inverse each time, not from the last pass's.
    deq = layer(device, gradient)
    x, v, u = data(device, 3, 4), data(device, 3, 4), data(device, 3, 4)
    expected = [gradients_of((deq(x) * t).sum(), deq) for t in (v, u, v)]
    z = deq(x)
    found = [gradients_of((z * t).sum(), deq) for t in (v, u, v)]
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


@every_gradient
def test_second_backward_without_retain_graph_is_pytorchs_error(device, gradient):
    deq = layer(device, gradient)
    loss = deq(data(device, 3, 4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["GDEQ-refine", "Implicit-first-order", "Measured"])
def test_a_residual_is_measured_in_the_pass_that_made_its_w(device, name):
    """One for some gradients alone never comes to z; a later one past f may, without a w."""
    w = (0.3 * torch.randn(4, 4, dtype=F64, device=device)).requires_grad_()
    x = torch.randn(3, 4, dtype=F64, device=device)
    inside = []

    def f(z):
        inside.append(z @ w + x)
        return torch.tanh(inside[-1])

    found = gdeq.fixed_point(f, torch.zeros_like(x), gdeq.Broyden(4, 0.0), GRADIENTS[name])
    torch.autograd.grad(found.z.sum(), [w], retain_graph=True)
    before = found.backward.residual
    inside[-1].square().sum().backward(retain_graph=True)
    assert (found.backward.residual is None) == (before is None)
    assert before is None or torch.equal(found.backward.residual, before)
    found.z.sum().backward()
    assert found.backward.residual is not None


@every_gradient
def test_gradient_for_a_subset_of_inputs(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4).requires_grad_()
    unrelated = torch.ones(2, device=device, requires_grad=True)
    loss = deq(x).square().sum()
    tensors = [*deq.parameters(), x]
    together = torch.autograd.grad(loss, tensors, retain_graph=True)
    for tensor, expected in zip(tensors, together, strict=True):
        (alone,) = torch.autograd.grad(loss, tensor, retain_graph=True)
        assert torch.equal(alone, expected)
    assert torch.autograd.grad(loss, unrelated, retain_graph=True, allow_unused=True) == (None,)
    loss.backward(inputs=[x])
    assert torch.equal(x.grad, together[-1])
    assert all(p.grad is None for p in deq.parameters())


# --- inputs --------------------------------------------------------------------------------------


@every_gradient
def test_z0_may_require_grad_and_gets_none(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4)
    z0 = data(device, 3, 4).requires_grad_()
    expected = gradients_of(deq(x, z0=z0.detach()).sum(), deq)
    for start in (z0, z0 * 1):  # a leaf, and part of a graph
        z = deq(x, z0=start)
        assert_same(gradients_of(z.sum(), deq), expected)
        assert torch.autograd.grad(z.sum(), z0, allow_unused=True) == (None,)


def test_unrolled_without_solve_differentiates_z0_too(device):
    deq = layer(device, gdeq.Unrolled(steps=3, damping=0.8), solver=None)
    x = data(device, 3, 4)
    z0 = data(device, 3, 4).requires_grad_()
    found = gradients_of(deq(x, z0=z0).square().sum(), deq, z0)
    z = z0
    for _ in range(3):
        z = 0.2 * z + 0.8 * deq.cell(z, x)
    assert_same(found, gradients_of(z.square().sum(), deq, z0), rtol=1e-12, atol=1e-14)


@every_gradient
def test_gradients_reach_an_encoder_before_the_layer(device, gradient):
    encoder = nn.Linear(5, 4, dtype=F64, device=device)
    deq = layer(device, gradient)
    raw = data(device, 3, 5)
    x = encoder(raw).detach().requires_grad_()
    deq(x).square().sum().backward()
    deq(encoder(raw)).square().sum().backward()
    torch.testing.assert_close(encoder.weight.grad, x.grad.T @ raw, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(encoder.bias.grad, x.grad.sum(0), rtol=1e-12, atol=1e-14)


def test_inputs_that_f_closes_over_get_gradients(device):
    w = (0.2 * data(device, 4, 4)).requires_grad_()
    scale = torch.tensor(0.5, dtype=F64, device=device, requires_grad=True)
    x = data(device, 2, 4)

    def loss(w, scale):
        found = gdeq.fixed_point(
            lambda z: scale * torch.tanh(z @ w + x), torch.zeros_like(x), SOLVER, EXACT
        )
        return found.z.square().sum()

    assert torch.autograd.gradcheck(loss, (w, scale))


def test_inplace_change_of_a_parameter_between_forward_and_backward_is_noticed(device):
    # Otherwise f would be linearised at other weights than it was solved with, silently.
    deq = layer(device, EXACT)
    loss = deq(data(device, 2, 4)).sum()
    with torch.no_grad():
        deq.cell.inner.weight *= 1.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_gradient
def test_output_may_be_changed_in_place(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4)
    expected = gradients_of((2 * deq(x)).square().sum(), deq)
    z = deq(x)
    z.mul_(2)
    assert_same(gradients_of(z.square().sum(), deq), expected, rtol=1e-13, atol=1e-15)


# --- losses that see only a part -----------------------------------------------------------------


@every_gradient
def test_samples_that_the_loss_ignores(device, gradient):
    # One sample is rounded otherwise than four: from steps that are rounding, no two solves learn
    # the same inverse.
    deq = layer(device, gradient, gdeq.Broyden(max_iter=60, tol=1e-4))
    x = data(device, 4, 4).requires_grad_()
    found = gradients_of(deq(x)[1].square().sum(), deq, x)
    assert all(torch.isfinite(g).all() for g in found)
    assert found[-1][1].abs().sum() > 0
    assert found[-1][[0, 2, 3]].abs().sum() == 0
    record = deq.solution.backward
    if record is not None and record.residual is not None:
        assert torch.isfinite(record.residual).all()
        assert (record.residual[[0, 2, 3]] == 0).all()
    alone = x[1:2].detach().requires_grad_()
    expected = gradients_of(deq(alone).square().sum(), deq)
    assert_same(found[:-1], expected, rtol=1e-9, atol=1e-12)


@every_gradient
def test_loss_with_zero_gradient_everywhere(device, gradient):
    deq = layer(device, gradient)
    x = data(device, 3, 4).requires_grad_()
    for g in gradients_of((0 * deq(x)).sum(), deq, x):
        assert (g == 0).all()


class Scales(nn.Module):
    """Two coupled scales in a dict, of different rank."""

    def __init__(self):
        super().__init__()
        self.mix = Cell(d=4, gain=0.6)

    def initial_state(self, x):
        return {"fine": x.new_zeros(len(x), 3), "coarse": x.new_zeros(len(x), 1, 1)}

    def forward(self, z, x):
        joined = torch.cat([z["fine"], z["coarse"].flatten(1)], dim=1)
        out = self.mix(joined, x)
        return {"fine": out[:, :3], "coarse": out[:, 3:].unsqueeze(2)}


@pytest.mark.parametrize("scale", ["fine", "coarse"])
def test_loss_on_one_scale_equals_the_dense_solve(device, scale):
    deq = gdeq.DEQ(Scales().to(device), solver=SOLVER, gradient=EXACT)
    x = data(device, 2, 4).requires_grad_()
    z = deq(x)
    found = gradients_of(z[scale].square().sum(), deq, x)
    joined = torch.cat([z["fine"], z["coarse"].flatten(1)], dim=1).detach()
    v = 2 * joined
    v[:, slice(3, None) if scale == "fine" else slice(0, 3)] = 0
    assert_same(found, exact_gradients(deq.cell.mix, x, joined, v), rtol=1e-9, atol=1e-11)


@every_gradient
@pytest.mark.parametrize("scale", ["fine", "coarse"])
def test_loss_on_one_scale_equals_zero_weight_on_the_other(device, gradient, scale):
    deq = gdeq.DEQ(Scales().to(device), solver=SOLVER, gradient=gradient)
    x = data(device, 2, 4).requires_grad_()
    z = deq(x)
    found = gradients_of(z[scale].square().sum(), deq, x)
    weighted = sum((key == scale) * part.square().sum() for key, part in z.items())
    assert_same(found, gradients_of(weighted, deq, x))
    assert all(g.abs().sum() > 0 for g in found)


# --- maps that depend on little ------------------------------------------------------------------


@every_gradient
def test_f_that_ignores_z(device, gradient):
    w, x, v = data(device, 4, 4).requires_grad_(), data(device, 3, 4), data(device, 3, 4)
    found = gdeq.fixed_point(lambda z: torch.tanh(x @ w), torch.zeros_like(x), SOLVER, gradient)
    out = torch.tanh(x @ w)
    torch.testing.assert_close(found.z, out, rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad((found.z * v).sum(), w)
    (expected,) = torch.autograd.grad((out * v).sum(), w)
    factor = 1.0  # with J = 0 all methods are exact, but for their damping
    if isinstance(gradient, gdeq.NPG):
        factor = 1 - (1 - gradient.damping) ** gradient.steps
    if isinstance(gradient, gdeq.Unrolled):
        factor = 1 - (1 - gradient.damping) ** gradient.steps
    torch.testing.assert_close(slope, factor * expected, rtol=1e-9, atol=1e-11)


@every_gradient
def test_f_without_anything_that_requires_grad(device, gradient):
    cell = Cell().to(device).requires_grad_(False)
    x = data(device, 3, 4)
    head = nn.Linear(4, 2, dtype=F64, device=device)
    found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER, gradient)
    head(found.z).sum().backward()  # a linear probe on frozen features
    torch.testing.assert_close(head.weight.grad, found.z.detach().sum(0).expand(2, 4))
    assert all(p.grad is None for p in cell.parameters())


@every_gradient
def test_constant_f(device, gradient):
    c = data(device, 3, 4)
    head = nn.Linear(4, 2, dtype=F64, device=device)
    found = gdeq.fixed_point(lambda z: c.clone(), torch.zeros_like(c), SOLVER, gradient)
    head(found.z).sum().backward()
    assert torch.isfinite(head.weight.grad).all()


def test_f_may_return_its_argument_or_a_view_of_it(device):
    z0 = data(device, 2, 4)
    for f in (lambda z: z, lambda z: z.view(2, 4), lambda z: z.flip(1).flip(1)):
        found = gdeq.fixed_point(f, z0, SOLVER, gdeq.JFB())
        assert found.converged.all()
        torch.testing.assert_close(found.z, z0, rtol=0, atol=0)


# --- second derivatives --------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self, gradient, solver=SOLVER):
        super().__init__()
        self.encoder = nn.Linear(2, 3, dtype=F64)
        self.deq = gdeq.DEQ(Cell(d=3), solver=solver, gradient=gradient)
        self.head = nn.Linear(3, 1, dtype=F64)

    def forward(self, x):
        return self.head(torch.tanh(self.deq(self.encoder(x))))


def penalised(network, x, target):
    """A regression loss and the squared slope of the output in the input."""
    y = network(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y - target).square().mean() + slope.square().sum(1).mean()


PENALTY = {
    "Implicit": EXACT,
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=30, tol=1e-13)),
    "Implicit-Anderson": gdeq.Implicit(gdeq.Anderson(max_iter=60, tol=1e-13)),
    "Implicit-preconditioned": gdeq.Implicit(gdeq.Broyden(60, 1e-13), precondition=True),
}


@pytest.mark.parametrize("gradient", PENALTY.values(), ids=PENALTY)
def test_gradient_penalty_against_finite_differences(device, gradient):
    network = Network(gradient).to(device)
    x, target = data(device, 3, 2).requires_grad_(), data(device, 3, 1)
    leaves = [*network.parameters(), x]
    found = torch.autograd.grad(penalised(network, x, target), leaves)
    expected = finite_differences(lambda: penalised(network, x, target), leaves)
    assert_same(found, expected, rtol=1e-5, atol=1e-7)


def test_gradient_penalty_by_backward_accumulates_the_same(device):
    network = Network(EXACT).to(device)
    x, target = data(device, 3, 2).requires_grad_(), data(device, 3, 1)
    expected = torch.autograd.grad(penalised(network, x, target), list(network.parameters()))
    penalised(network, x, target).backward()
    assert_same([p.grad for p in network.parameters()], expected)


def test_gradient_penalty_of_the_unrolled_network_against_finite_differences(device):
    # Without a solve the unrolled network is an ordinary one: its derivatives are exact.
    network = Network(gdeq.Unrolled(steps=3, damping=0.8), solver=None).to(device)
    x, target = data(device, 3, 2).requires_grad_(), data(device, 3, 1)
    leaves = [*network.parameters(), x]
    found = torch.autograd.grad(penalised(network, x, target), leaves)
    expected = finite_differences(lambda: penalised(network, x, target), leaves)
    assert_same(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradient", [gdeq.JFB(), gdeq.Unrolled(steps=3)], ids=["JFB", "Unrolled"])
def test_gradient_penalty_of_a_phantom_is_that_of_its_graph(device, gradient):
    network = Network(gradient).to(device)
    x, target = data(device, 3, 2).requires_grad_(), data(device, 3, 1)
    found = torch.autograd.grad(penalised(network, x, target), list(network.parameters()))

    def by_hand(x):
        h = network.encoder(x)
        with torch.no_grad():
            z = network.deq(h)
        for _ in range(1 if isinstance(gradient, gdeq.JFB) else gradient.steps):
            z = network.deq.cell(z, h)
        return network.head(torch.tanh(z))

    expected = torch.autograd.grad(penalised(by_hand, x, target), list(network.parameters()))
    assert_same(found, expected, rtol=1e-9, atol=1e-11)


def test_gradgradcheck(device):
    cell = Cell(d=2).to(device)
    x = data(device, 2, 2).requires_grad_()

    def f(x, weight):
        def step(z):
            return torch.tanh(z @ weight.T + x)

        return gdeq.fixed_point(step, torch.zeros_like(x), SOLVER, EXACT).z

    weight = cell.inner.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(f, (x, weight))
    assert torch.autograd.gradgradcheck(f, (x, weight))


def test_gradgradcheck_of_a_state_of_two_scales(device):
    w = (0.2 * data(device, 3, 3)).requires_grad_()
    x = data(device, 2, 3).requires_grad_()

    def f(x, w):
        def step(z):
            out = torch.tanh(torch.cat(z, dim=1) @ w + x)
            return out[:, :1], out[:, 1:]

        return gdeq.fixed_point(step, (x.new_zeros(2, 1), x.new_zeros(2, 2)), SOLVER, EXACT).z

    assert torch.autograd.gradgradcheck(f, (x, w))


def test_first_pass_of_a_double_backward_graph_can_be_repeated(device):
    network = Network(EXACT).to(device)
    x = data(device, 3, 2).requires_grad_()
    y = network(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    first = torch.autograd.grad(slope.square().sum(), network.encoder.weight, retain_graph=True)
    again = torch.autograd.grad(slope.square().sum(), network.encoder.weight, retain_graph=True)
    plain = torch.autograd.grad(y, x, retain_graph=True)
    assert_same(again, first)
    assert_same(plain, [slope.detach()], rtol=1e-12, atol=1e-14)
    assert_same(torch.autograd.grad(slope.square().sum(), network.encoder.weight), first)


@pytest.mark.parametrize("name", [name for name in GRADIENTS if name not in SECOND_ORDER])
def test_double_backward_elsewhere_is_a_clear_error(device, name):
    deq = layer(device, GRADIENTS[name])
    x = data(device, 2, 4).requires_grad_()
    loss = deq(x).sum()
    with pytest.raises(RuntimeError, match=r"Implicit\(\)"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad(loss, x)[0].abs().sum() > 0  # the graph is still good for one


def test_third_derivative_is_a_clear_error(device):
    deq = layer(device, EXACT)
    x = data(device, 1, 4).requires_grad_()
    (first,) = torch.autograd.grad(deq(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third"):
        torch.autograd.grad(first.square().sum(), x, create_graph=True)


# --- the record ----------------------------------------------------------------------------------


@every_gradient
def test_backward_record_is_none_before_and_filled_after(device, gradient):
    deq = layer(device, gradient)
    loss = deq(data(device, 3, 4)).square().sum()
    record = deq.solution
    assert record.backward is None
    loss.backward()
    if isinstance(gradient, gdeq.Unrolled):
        assert record.backward is None  # plain autograd: there is no adjoint equation
        return
    kinds = [gradient, *([gradient.gradient] if isinstance(gradient, gdeq.Measured) else [])]
    assert record.backward.gradient == " ".join(type(kind).__name__ for kind in kinds)
    assert record.backward.gradient in str(record.backward)
    free = isinstance(gradient, gdeq.JFB | gdeq.Measured) or gradient == gdeq.GDEQ()
    assert (record.backward.vjps == 0) == free
    unmeasured = isinstance(gradient, gdeq.JFB) or gradient == gdeq.GDEQ()
    assert (record.backward.residual is None) == unmeasured
    if not unmeasured:
        assert record.backward.residual.shape == (3,)
        assert not record.backward.residual.requires_grad
    deq(data(device, 3, 4))
    assert deq.solution.backward is None


def test_fixed_point_record(device):
    cell, x = Cell().to(device), data(device, 3, 4)
    found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER, gdeq.NPG(steps=4))
    assert found.backward is None
    found.z.sum().backward()
    assert found.backward.vjps == 3


@pytest.mark.parametrize(
    "gradient",
    [gdeq.GDEQ(refine=2), gdeq.NPG(3), gdeq.Measured(gdeq.JFB()), gdeq.Measured(gdeq.GDEQ())],
)
def test_reported_residual_is_that_of_the_gradient_used(device, gradient):
    deq = layer(device, gradient, solver=gdeq.Broyden(max_iter=4, tol=0.0))
    x, v = data(device, 3, 4).requires_grad_(), data(device, 3, 4)
    z = deq(x)
    z.backward(v)
    jacobian = dense_jacobian(lambda u: deq.cell(u, x), z)
    slope = 1 - deq.cell(z, x).detach() ** 2
    w = torch.linalg.solve(deq.cell.input.weight.T, x.grad.T).T / slope  # x.grad = (w·slope) U
    r = w - torch.bmm(jacobian.transpose(1, 2), w.unsqueeze(2)).squeeze(2) - v
    expected = r.norm(dim=1) / v.norm(dim=1)
    assert (expected > 1e-5).all()
    torch.testing.assert_close(deq.solution.backward.residual, expected, rtol=1e-8, atol=1e-10)


# --- lifetimes -----------------------------------------------------------------------------------


class Watch:
    """Keeps weak references to storages: what is not expired is still in memory."""

    def __init__(self):
        self.refs = []

    def add(self, *tensors):
        self.refs += [StorageWeakRef(t.untyped_storage()) for t in tensors]

    @property
    def alive(self):
        return sum(not ref.expired() for ref in self.refs)

    def all_die(self):
        """Soon: on a GPU the thread of the backward pass lets go a moment after the pass."""
        until = time.monotonic() + 2
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)
        return not self.alive


@pytest.fixture
def no_gc():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@every_gradient
@pytest.mark.parametrize("passes", ["none", "one", "retained", "created", "subset", "failed"])
def test_graph_and_factors_die_with_the_result(device, gradient, passes):
    second_order = isinstance(gradient, gdeq.Unrolled) or gradient.second_order
    cell, x = Cell().to(device), data(device, 3, 4).requires_grad_()
    watch = Watch()

    def f(z):
        out = cell(z, x)
        if torch.is_grad_enabled():
            watch.add(out)  # tanh saves its output: it lives as long as the graph
        return out

    found = gdeq.fixed_point(f, torch.zeros_like(x), SOLVER, gradient)
    if found.inverse is not None:
        watch.add(*found.inverse.vectors.stored)
    watch.add(found.z)
    assert watch.alive == len(watch.refs) >= 3
    loss, slope = found.z.square().sum(), None
    if passes == "one":
        loss.backward()
    elif passes == "retained":
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    elif passes == "created" and second_order:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
    elif passes == "created":
        with pytest.raises(RuntimeError, match=r"double.backward"):
            torch.autograd.grad(loss, x, create_graph=True)
    elif passes == "subset":
        torch.autograd.grad(loss, cell.inner.weight, retain_graph=True)
    elif passes == "failed":
        with pytest.raises(RuntimeError):
            torch.autograd.grad(loss, x, torch.zeros(7, dtype=F64, device=device))
    del found, loss, slope
    assert watch.all_die()


@pytest.mark.usefixtures("no_gc")
@every_gradient
def test_activations_are_freed_by_backward_while_the_result_lives(device, gradient):
    cell, x = Cell().to(device), data(device, 3, 4)
    watch = Watch()

    def f(z):
        hidden = torch.exp(cell(z, x))  # exp saves its output
        if torch.is_grad_enabled():
            watch.add(hidden)
        return 0.3 * torch.tanh(hidden)

    found = gdeq.fixed_point(f, torch.zeros_like(x), SOLVER, gradient)
    assert watch.alive > 0
    found.z.sum().backward()
    assert watch.all_die()


@pytest.mark.usefixtures("no_gc")
def test_layer_keeps_only_the_last_record(device):
    deq = layer(device, gdeq.GDEQ())
    watch = Watch()
    for _ in range(3):
        z = deq(data(device, 3, 4))
        watch.add(deq.solution.inverse.vectors.stored[0])
        z.sum().backward()
    del z
    assert watch.alive == 1
    deq.solution = None
    assert watch.all_die()


@pytest.mark.usefixtures("no_gc")
def test_layer_itself_is_freed(device):
    deq = layer(device, EXACT)
    watch = Watch()
    watch.add(*deq.parameters())
    z = deq(data(device, 3, 4))
    z.sum().backward()
    del deq
    assert watch.alive > 0  # the graph of z still uses them
    del z
    assert watch.all_die()
