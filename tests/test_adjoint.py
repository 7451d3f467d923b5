"""The fixed point as a citizen of autograd: modes, reuse, nesting, several passes, lifetimes."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import gdeq
from cells import (
    EXACT,
    F64,
    GRADIENTS,
    SOLVER,
    Cell,
    assert_same,
    data,
    every_gradient,
    gradients_of,
    layer,
)


def exact_gradients(cell, x, z, v):
    """(∂f/∂θ)ᵀ (I − J)⁻ᵀ v by a dense solve, for θ = the cell's parameters and x."""
    point = z.detach().requires_grad_()
    out = cell(point, x)
    rows = [torch.autograd.grad(out[:, i].sum(), point, retain_graph=True)[0] for i in range(4)]
    system = torch.eye(4, dtype=F64, device=z.device) - torch.stack(rows, dim=1)
    w = torch.linalg.solve(system.mT, v)
    return torch.autograd.grad(cell(z.detach(), x), [*cell.parameters(), x], w)


# --- modes ---------------------------------------------------------------------------------------


@every_gradient
def test_modes_of_the_layer_and_of_autograd(device, gradient):
    """Gradients are the same in eval mode, after calls without autograd, and in grad mode again."""
    deq, x = layer(device, gradient), data(device, 3, 4).requires_grad_()
    expected = gradients_of(deq(x).square().sum(), deq, x)
    assert all(g.abs().sum() > 0 for g in expected)
    assert_same(gradients_of(deq.eval()(x).square().sum(), deq, x), expected)
    z = deq(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            plain = deq(x)
        assert not plain.requires_grad
        assert not deq.solution.z.requires_grad
        assert deq.solution.backward is None
        assert torch.equal(plain, z)
    with torch.no_grad(), torch.enable_grad():
        assert_same(gradients_of(deq(x).square().sum(), deq, x), expected)
    # A z0 found in inference mode, at which the solver hands z0 itself to autograd.
    found = gradients_of(deq(x, z0=plain).sum(), deq)
    assert all(torch.isfinite(g).all() for g in found)
    assert_same(found, gradients_of(deq(x, z0=plain.clone()).sum(), deq))


# --- one layer, several uses ---------------------------------------------------------------------


@every_gradient
def test_several_uses_before_backward(device, gradient):
    """They add up, and may be differentiated in any order, other calls in between."""
    deq = layer(device, gradient)
    xs, vs = ([data(device, n, 4) for n in (3, 2, 1)] for _ in range(2))
    expected = [gradients_of((deq(x) * v).sum(), deq) for x, v in zip(xs, vs, strict=True)]
    losses, records = [], []
    for x, v in zip(xs, vs, strict=True):
        losses.append((deq(x) * v).sum())
        records.append(deq.solution)
    with torch.no_grad():
        deq(xs[0])
    together = gradients_of(sum(losses), deq)
    assert_same(together, [sum(g) for g in zip(*expected, strict=True)], rtol=1e-12, atol=1e-14)
    for i in (1, 2, 0):
        deq.zero_grad()
        losses[i].backward()
        assert_same([p.grad for p in deq.parameters()], expected[i])
    filled = [record.backward is not None for record in records]
    assert filled == [not isinstance(gradient, gdeq.Unrolled)] * 3


# --- several passes ------------------------------------------------------------------------------


@every_gradient
def test_several_passes_through_one_graph(device, gradient):
    # A refinement must start from the forward inverse each time, not from the last pass's.
    deq, x = layer(device, gradient), data(device, 3, 4).requires_grad_()
    v, u = data(device, 3, 4), data(device, 3, 4)
    expected = [gradients_of((deq(x) * t).sum(), deq, x) for t in (v, u)]
    z = deq(x)
    for i in (0, 1, 0, 0):
        assert_same(gradients_of((z * (v, u)[i]).sum(), deq, x), expected[i])
    loss = (z * v).sum()
    for tensor, alone in zip([*deq.parameters(), x], expected[0], strict=True):  # some of them
        assert_same(torch.autograd.grad(loss, tensor, retain_graph=True), [alone])
    unrelated = torch.ones(2, device=device, requires_grad=True)
    assert torch.autograd.grad(loss, unrelated, retain_graph=True, allow_unused=True) == (None,)
    loss.backward(inputs=[x])
    assert torch.equal(x.grad, expected[0][-1])
    assert all(p.grad is None for p in deq.parameters())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["GDEQ-refine", "Implicit-first-order", "Measured"])
def test_a_residual_is_measured_in_the_pass_that_made_its_w(device, name):
    """One for some gradients alone never comes to z; a later one past f may, without a w."""
    w = (0.3 * data(device, 4, 4)).requires_grad_()
    x = data(device, 3, 4)
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


# --- inputs --------------------------------------------------------------------------------------


@every_gradient
def test_z0_may_require_grad_and_gets_none(device, gradient):
    deq, x = layer(device, gradient), data(device, 3, 4)
    z0 = data(device, 3, 4).requires_grad_()
    expected = gradients_of(deq(x, z0=z0.detach()).sum(), deq)
    for start in (z0, z0 * 1):  # a leaf, and part of a graph
        z = deq(x, z0=start)
        assert_same(gradients_of(z.sum(), deq), expected)
        assert torch.autograd.grad(z.sum(), z0, allow_unused=True) == (None,)


@every_gradient
def test_around_the_layer(device, gradient):
    """Gradients reach an encoder before it, and what follows may change its output in place."""
    encoder, deq = nn.Linear(5, 4, dtype=F64, device=device), layer(device, gradient)
    raw = data(device, 3, 5)
    x = encoder(raw).detach().requires_grad_()
    (2 * deq(x)).square().sum().backward()
    expected = [p.grad for p in deq.parameters()]
    deq.zero_grad()
    deq(encoder(raw)).mul_(2).square().sum().backward()
    assert_same([p.grad for p in deq.parameters()], expected, rtol=1e-13, atol=1e-15)
    found = [encoder.weight.grad, encoder.bias.grad]
    assert_same(found, [x.grad.T @ raw, x.grad.sum(0)], rtol=1e-12, atol=1e-14)


def test_a_parameter_changed_between_forward_and_backward_is_noticed(device):
    # Otherwise f would be linearised at other weights than it was solved with, silently.
    deq = layer(device)
    loss = deq(data(device, 2, 4)).sum()
    with torch.no_grad():
        deq.cell.inner.weight *= 1.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_gradient
def test_what_f_raises_in_backward_arrives(device, gradient):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, v):
            raise ArithmeticError("in the backward of f")

    w = torch.tensor(0.5, device=device, requires_grad=True)
    z0 = torch.zeros(3, 4, device=device)
    found = gdeq.fixed_point(lambda z: Fails.apply(w * z + 1), z0, gradient=gradient)
    with pytest.raises(ArithmeticError, match="in the backward of f"):
        found.z.sum().backward()
    assert torch.is_grad_enabled()


# --- losses and maps that depend on little --------------------------------------------------------


@every_gradient
def test_samples_that_the_loss_ignores(device, gradient):
    # One sample is rounded otherwise than four: from steps that are rounding, no two solves learn
    # the same inverse.
    deq = layer(device, gradient, gdeq.Broyden(max_iter=60, tol=1e-4))
    x = data(device, 4, 4).requires_grad_()
    found = gradients_of(deq(x)[1].square().sum(), deq, x)
    assert found[-1][1].abs().sum() > 0
    assert found[-1][[0, 2, 3]].abs().sum() == 0
    record = deq.solution.backward
    if record is not None and record.residual is not None:
        assert (record.residual[[0, 2, 3]] == 0).all()
    alone = gradients_of(deq(x[1:2].detach()).square().sum(), deq)
    assert_same(found[:-1], alone, rtol=1e-9, atol=1e-12)
    for g in gradients_of((0 * deq(x)).sum(), deq, x):
        assert (g == 0).all()


class Scales(nn.Module):
    """Two coupled scales in a dict, of different rank."""

    def __init__(self):
        super().__init__()
        self.mix = Cell(gain=0.6)

    def initial_state(self, x):
        return {"fine": x.new_zeros(len(x), 3), "coarse": x.new_zeros(len(x), 1, 1)}

    def forward(self, z, x):
        out = self.mix(torch.cat([z["fine"], z["coarse"].flatten(1)], dim=1), x)
        return {"fine": out[:, :3], "coarse": out[:, 3:].unsqueeze(2)}


@every_gradient
@pytest.mark.parametrize("scale", ["fine", "coarse"])
def test_a_loss_on_one_scale_is_one_with_zero_weight_on_the_other(device, gradient, scale):
    deq = gdeq.DEQ(Scales().to(device), SOLVER, gradient)
    x = data(device, 2, 4).requires_grad_()
    z = deq(x)
    found = gradients_of(z[scale].square().sum(), deq, x)
    weighted = sum((key == scale) * part.square().sum() for key, part in z.items())
    assert_same(found, gradients_of(weighted, deq, x))
    assert all(g.abs().sum() > 0 for g in found)
    if gradient is EXACT:
        joined = torch.cat([z["fine"], z["coarse"].flatten(1)], dim=1).detach()
        v = 2 * joined
        v[:, slice(3, None) if scale == "fine" else slice(0, 3)] = 0
        assert_same(found, exact_gradients(deq.cell.mix, x, joined, v), rtol=1e-9, atol=1e-11)


@every_gradient
def test_f_that_ignores_z(device, gradient):
    w, x, v = data(device, 4, 4).requires_grad_(), data(device, 3, 4), data(device, 3, 4)
    for f in (lambda z: torch.tanh(x @ w), lambda z: torch.tanh(x @ w) + 0 * z.detach()):
        found = gdeq.fixed_point(f, torch.zeros_like(x), SOLVER, gradient)
        out = torch.tanh(x @ w)
        torch.testing.assert_close(found.z, out, rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad((found.z * v).sum(), w)
        (expected,) = torch.autograd.grad((out * v).sum(), w)
        factor = 1.0  # with J = 0 all methods are exact, but for their damping
        if isinstance(gradient, gdeq.NPG | gdeq.Unrolled):
            factor = 1 - (1 - gradient.damping) ** gradient.steps
        torch.testing.assert_close(slope, factor * expected, rtol=1e-9, atol=1e-11)
        record = found.backward
        if factor == 1 and record is not None and record.residual is not None:
            assert (record.residual < 1e-12).all()


@every_gradient
def test_f_without_anything_that_requires_grad(device, gradient):
    cell, c = Cell().to(device).requires_grad_(False), data(device, 3, 4)
    for f in (lambda z: cell(z, c), lambda z: c.clone()):
        head = nn.Linear(4, 2, dtype=F64, device=device)
        found = gdeq.fixed_point(f, torch.zeros_like(c), SOLVER, gradient)
        head(found.z).sum().backward()  # a linear probe on frozen features
        torch.testing.assert_close(head.weight.grad, found.z.detach().sum(0).expand(2, 4))
        assert all(p.grad is None for p in cell.parameters())


def test_f_may_return_its_argument_or_a_view_of_it(device):
    z0 = data(device, 2, 4)
    for f in (lambda z: z, lambda z: z.view(2, 4), lambda z: z.flip(1).flip(1)):
        found = gdeq.fixed_point(f, z0, SOLVER, gdeq.JFB())
        assert found.converged.all()
        assert torch.equal(found.z, z0)


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
    cell, x, watch = Cell().to(device), data(device, 3, 4), Watch()

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
@every_gradient
def test_the_graph_keeps_the_inverse_only_where_it_is_used(device, gradient):
    cell, x, watch = Cell().to(device), data(device, 3, 4), Watch()
    found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER, gradient)
    if found.inverse is None:  # after unrolled steps
        return
    watch.add(*found.inverse.vectors.stored)
    z = found.z
    del found
    if gradient in (gdeq.GDEQ(), gdeq.Measured(gdeq.GDEQ())):
        assert watch.alive == len(watch.refs)
    else:
        assert watch.all_die()
    z.sum().backward()


@pytest.mark.usefixtures("no_gc")
def test_a_layer_keeps_only_its_last_record_and_is_freed_itself(device):
    deq, watch, weights = layer(device, gdeq.GDEQ()), Watch(), Watch()
    weights.add(*deq.parameters())
    for _ in range(3):
        z = deq(data(device, 3, 4))
        watch.add(deq.solution.inverse.vectors.stored[0])
        z.sum().backward()
    del z
    assert watch.alive == 1
    deq.solution = None
    assert watch.all_die()
    z = deq(data(device, 3, 4))
    del deq
    assert weights.alive > 0  # the graph of z still uses them
    del z
    assert weights.all_die()


def test_a_pass_with_create_graph_leaves_nothing_behind():
    """The record must have no graph: it would keep the node that wrote it alive."""
    weights = []
    for _ in range(3):
        p, x = torch.tensor(0.5, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
        p, x = p.requires_grad_(), x.requires_grad_()
        found = gdeq.fixed_point(
            lambda z, p=p, x=x: torch.tanh(p * z + x), torch.zeros_like(x), gradient=gdeq.Implicit()
        )
        (g,) = torch.autograd.grad(found.z.sum(), x, create_graph=True)
        assert not found.backward.residual.requires_grad
        weights.append(weakref.ref(p))
        del p, x, found, g
    gc.collect()
    assert not any(ref() is not None for ref in weights)


def test_reentrant_checkpointing_in_f():
    def f(z, reentrant):
        return checkpoint(lambda z: 0.5 * torch.cos(z) + x, z, use_reentrant=reentrant)

    x = torch.randn(3, 4, requires_grad=True)
    z = gdeq.fixed_point(lambda z: f(z, True), x.detach(), gradient=gdeq.GDEQ(refine=1)).z
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        z.sum().backward()


class Checkpointed(nn.Module):
    """z goes in alone: PyTorch gives the weights no gradient where z has none."""

    def __init__(self, whole):
        super().__init__()
        self.inner, self.whole, self.reentrant = nn.Linear(4, 4, dtype=F64), whole, True

    def forward(self, z, x):
        x = x.detach() if self.whole else x

        def block(z):
            return torch.tanh(0.5 * self.inner(z) + x * self.whole)

        return checkpoint(block, z, use_reentrant=self.reentrant) + x * (not self.whole)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("gradient", [gdeq.JFB(), gdeq.GDEQ(), gdeq.Unrolled(2)], ids=str)
def test_reentrant_checkpointing_of_z_alone(gradient, whole):
    torch.manual_seed(0)
    cell, x = Checkpointed(whole), torch.randn(3, 4, dtype=F64)
    deq, found = gdeq.DEQ(cell, gdeq.Broyden(20, 1e-9), gradient), []
    for cell.reentrant in (True, True, False):  # also in the first call
        cell.zero_grad()
        deq(x).square().sum().backward()
        found.append(cell.inner.weight.grad)
    for got in found[:2]:
        assert got is not None
        torch.testing.assert_close(got, found[2], rtol=1e-7, atol=1e-9)
    copied = copy.deepcopy(deq)
    copied.cell.reentrant = True
    copied(x).square().sum().backward()
    assert not deq.solution.z.requires_grad
