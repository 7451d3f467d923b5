"""`DEQ` as a module: its interface, copies, checkpoints, training."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import gdeq
from gdeq.layer import UnsteadyCellWarning

F64 = torch.float64
GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-2),
    "Implicit": gdeq.Implicit(),
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=10, tol=1e-6), precondition=True),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(),
    "Measured": gdeq.Measured(gdeq.GDEQ()),
}


class Cell(nn.Module):
    def __init__(self, d=4, dtype=F64):
        super().__init__()
        self.inner = nn.Linear(d, d, dtype=dtype)
        self.register_buffer("scale", torch.tensor(0.8, dtype=dtype))
        with torch.no_grad():
            self.inner.weight *= 0.7 / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z, x):
        return self.scale * torch.tanh(self.inner(z) + x)


class Sized(Cell):
    """A state that is not shaped like the input."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, dtype=F64)

    def initial_state(self, x):
        return torch.full((len(x), 4), 0.1, dtype=x.dtype, device=x.device)

    def forward(self, z, x):
        return super().forward(z, self.embed(x))


def tight(cell, device, **kwargs):
    kwargs.setdefault("solver", gdeq.Broyden(max_iter=60, tol=1e-12))
    return gdeq.DEQ(cell.to(device), **kwargs)


def data(device, *shape):
    return torch.randn(*shape, dtype=F64, device=device)


# --- the interface -------------------------------------------------------------------------------


def test_call_returns_the_fixed_point(device):
    deq = tight(Cell(), device)
    x = data(device, 3, 4)
    z = deq(x)
    assert z.shape == x.shape
    torch.testing.assert_close(z, deq.cell(z, x), rtol=1e-10, atol=1e-11)
    assert z.abs().min() > 1e-3  # not the zeros that it started from


def test_defaults_are_those_of_the_contract():
    deq = gdeq.DEQ(Cell())
    assert deq.solver == gdeq.Broyden(max_iter=18, tol=1e-3)
    assert deq.gradient == gdeq.GDEQ(refine=1)
    assert deq.solution is None


def test_solution_is_the_record_of_the_last_call(device):
    deq = tight(Cell(), device)
    z = deq(data(device, 3, 4))
    first = deq.solution
    assert isinstance(first, gdeq.Solution)
    assert torch.equal(first.z, z)
    assert not first.z.requires_grad
    assert first.converged.shape == first.residual.shape == first.steps.shape == (3,)
    assert first.converged.all()
    assert first.trace.shape == (int(first.steps.max()), 3)
    assert first.inverse.as_matrix().shape == (3, 4, 4)
    assert [str(s) for s in first.status] == ["converged: the residual is within the tolerance"] * 3
    deq(data(device, 5, 4))
    assert deq.solution is not first
    assert deq.solution.converged.shape == (5,)
    assert first.converged.shape == (3,)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("grad", "gradient"), ("solvers", "solver"), ("gradients", "gradient"), ("slover", "solver")],
)
def test_an_unknown_option_names_the_nearest(wrong, right):
    message = rf"DEQ has no option '{wrong}'; did you mean '{right}'\? \(options: cell, solver, "
    with pytest.raises(TypeError, match=message):
        gdeq.DEQ(Cell(), **{wrong: None})


def test_an_unknown_option_like_nothing():
    with pytest.raises(TypeError, match=r"DEQ has no option 'zzz' \(options: cell, solver, grad"):
        gdeq.DEQ(Cell(), zzz=3)


class Unsteady(Cell):
    """A cell with a part that is another one at every evaluation."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, z, x):
        return self.part(super().forward(z, x))


UNSTEADY = {
    "Dropout": (
        nn.Dropout(0.5),
        r"Dropout \(part\) draws a new mask at every evaluation: use gdeq.VariationalDropout",
    ),
    "Alpha": (nn.AlphaDropout(0.5), r"AlphaDropout \(part\) .* gdeq.VariationalDropout"),
    "BatchNorm": (nn.BatchNorm1d(4).to(F64), r"BatchNorm1d \(part\) mixes .* nn.GroupNorm"),
    "both": (
        nn.Sequential(nn.BatchNorm1d(4).to(F64), nn.Dropout(0.5)),
        r"Dropout \(part.1\) .*VariationalDropout.*; BatchNorm1d \(part.0\) .* nn.GroupNorm",
    ),
}


@pytest.mark.parametrize(("part", "message"), UNSTEADY.values(), ids=UNSTEADY)
def test_an_unsteady_cell_is_warned_of_once(device, part, message):
    deq = gdeq.DEQ(Unsteady(copy.deepcopy(part)).to(device))
    x = data(device, 3, 4)
    deq.eval()
    deq(x)  # it holds still now
    deq.train()
    deq.solver, deq.gradient = None, gdeq.Unrolled(2)
    deq(x)  # nothing is solved
    deq.solver, deq.gradient = gdeq.Broyden(max_iter=3), gdeq.GDEQ()
    with pytest.warns(UnsteadyCellWarning, match=f"Unsteady in training mode is not .*{message}"):
        deq(x)
    deq(x)  # told before; a second warning would be an error here
    other = gdeq.DEQ(Unsteady(copy.deepcopy(part)).to(device))
    with pytest.warns(UnsteadyCellWarning):
        other(x)


def test_steady_cells_are_not_warned_of(device):
    x = data(device, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steady = (gdeq.VariationalDropout(0.5), nn.GroupNorm(2, 4).to(F64), nn.Dropout(0.0))
        for part in (*steady, nn.Dropout(0.5).eval()):
            gdeq.DEQ(Unsteady(part).to(device), gdeq.Broyden(max_iter=3))(x)


def test_what_lies_beside_a_method_as_cell_is_not_warned_of(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Cell(), nn.Dropout(0.5)
            self.deq = gdeq.DEQ(self.step)

        def step(self, z, x):
            return self.inner(z, x)

        def forward(self, x):
            return self.head(self.deq(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Model().to(device)(data(device, 3, 4))


def test_an_unrolled_solution_does_not_speak_of_failure(device):
    deq = gdeq.DEQ(Cell().to(device), solver=None, gradient=gdeq.Unrolled(steps=3))
    deq(data(device, 5, 4))
    text = str(deq.solution)
    assert text.startswith(
        "5 samples, not asked to converge: at most 3 steps, 3 evaluations of f, "
    )
    assert f"largest residual {deq.solution.residual.max().item():.1e}" in text
    assert "converged" not in text
    assert "\n" not in text


def test_one_of_each_is_told_in_the_singular(device):
    deq = gdeq.DEQ(Cell().to(device), gdeq.Broyden(1, 0.0), gdeq.GDEQ(refine=1))
    deq(data(device, 1, 4)).sum().backward()
    assert str(deq.solution).startswith("1 sample, not asked to converge: at most 1 step, ")
    assert ": 1 VJP, " in str(deq.solution.backward)


def test_z0_is_where_the_solver_starts(device):
    seen = []

    def cell(z, x):
        seen.append(z.clone())
        return 0.5 * z + x

    deq = gdeq.DEQ(cell)
    x, z0 = data(device, 3, 4), data(device, 3, 4)
    deq(x)
    assert torch.equal(seen[0], torch.zeros_like(x))
    seen.clear()
    z = deq(x, z0=z0)
    assert torch.equal(seen[0], z0)
    torch.testing.assert_close(z, 2 * x, rtol=1e-6, atol=1e-6)


def test_z0_is_not_changed(device):
    deq = tight(Cell(), device)
    x, z0 = data(device, 3, 4), data(device, 3, 4)
    kept = z0.clone()
    deq(x, z0=z0).sum().backward()
    assert torch.equal(z0, kept)


@pytest.mark.parametrize("grad", [True, False])
def test_output_does_not_share_memory_with_z0(device, grad):
    # A z0 that is already a solution must not become an alias of the output.
    deq = tight(Cell(), device)
    x = data(device, 3, 4)
    with torch.set_grad_enabled(grad):
        z0 = deq(x).detach().clone()
        z = deq(x, z0=z0)
    assert (deq.solution.steps == 0).all()
    assert z.data_ptr() != z0.data_ptr()


def test_record_is_unharmed_by_an_in_place_op_on_the_output(device):
    deq = tight(Cell(), device)
    with torch.no_grad():
        z = deq(data(device, 3, 4))
        kept = z.clone()
        z.mul_(0)
    torch.testing.assert_close(deq.solution.z, kept, rtol=0, atol=0)


def test_initial_state_of_the_cell_is_used(device):
    deq = tight(Sized(), device)
    x = data(device, 5, 3)
    z = deq(x)
    assert z.shape == (5, 4)
    torch.testing.assert_close(z, deq.cell(z, x), rtol=1e-10, atol=1e-11)
    assert torch.equal(deq(x, z0=z.detach()), z)  # the call's z0 goes first


def test_extra_inputs_reach_cell_and_initial_state(device):
    seen = []

    class Extra(nn.Module):
        def initial_state(self, x, gate, *, shift):
            seen.append((gate, shift))
            return torch.zeros_like(x)

        def forward(self, z, x, gate, *, shift):
            return gate * torch.tanh(z + x) + shift

    deq = tight(Extra(), device, gradient=gdeq.Implicit(gdeq.Broyden(60, 1e-12)))
    x = data(device, 3, 4)
    gate = torch.full((4,), 0.5, dtype=F64, device=device, requires_grad=True)
    shift = torch.tensor(0.1, dtype=F64, device=device, requires_grad=True)
    z = deq(x, gate, shift=shift)
    assert seen == [(gate, shift)]
    torch.testing.assert_close(z, gate * torch.tanh(z + x) + shift, rtol=1e-10, atol=1e-11)
    z.sum().backward()
    # dz = (1 − gate·sech²)⁻¹ (tanh dgate + dshift), entry by entry
    t = torch.tanh(z + x).detach()
    w = 1 / (1 - 0.5 * (1 - t**2))
    torch.testing.assert_close(gate.grad, (w * t).sum(0), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(shift.grad, w.sum(), rtol=1e-9, atol=1e-10)


def test_inputs_need_not_be_tensors(device):
    def cell(z, parts, name=None):
        assert name == "n"
        return 0.5 * z + parts["a"] + parts["b"]

    a, b = data(device, 2, 3), data(device, 2, 3)
    z = gdeq.DEQ(cell)({"a": a, "b": b}, name="n", z0=torch.zeros_like(a))
    torch.testing.assert_close(z, 2 * (a + b), rtol=1e-6, atol=1e-6)


def test_a_cell_without_inputs(device):
    c = data(device, 2, 3)
    z = gdeq.DEQ(lambda z: 0.5 * z + c)(z0=torch.zeros_like(c))
    torch.testing.assert_close(z, 2 * c, rtol=1e-6, atol=1e-6)


def test_cell_solver_and_gradient_can_be_replaced(device):
    deq = tight(Cell(), device)
    x = data(device, 3, 4)
    z = deq(x)
    deq.solver = gdeq.Picard(max_iter=2, tol=0.0)
    deq.gradient = gdeq.JFB()
    by_hand = deq.cell(deq.cell(torch.zeros_like(x), x), x)
    torch.testing.assert_close(deq(x), by_hand, rtol=1e-12, atol=1e-13)
    assert deq.solution.inverse is None
    deq.solver, deq.gradient = None, gdeq.Unrolled(steps=4)
    for _ in range(2):
        by_hand = deq.cell(by_hand, x)
    torch.testing.assert_close(deq(x), by_hand, rtol=1e-12, atol=1e-13)
    deq.solver, deq.gradient = gdeq.Broyden(max_iter=60, tol=1e-12), gdeq.GDEQ()
    assert torch.equal(deq(x), z)
    deq.cell = Cell().to(device)
    assert not torch.allclose(deq(x), z)
    assert {id(p) for p in deq.parameters()} == {id(p) for p in deq.cell.parameters()}


def test_functions_as_cells(device):
    w = (0.3 * data(device, 4, 4)).requires_grad_()
    deq = gdeq.DEQ(lambda z, x: torch.tanh(z @ w + x))
    x = data(device, 3, 4).requires_grad_()
    deq(x).sum().backward()
    assert w.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0
    assert list(deq.parameters()) == []


def test_methods_as_cells(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Cell()
            self.deq = gdeq.DEQ(self.step)

        def step(self, z, x):
            return self.inner(z, x)

        def forward(self, x):
            return self.deq(x)

    model = Model().to(device)
    assert len(list(model.parameters())) == 2
    model(data(device, 3, 4)).sum().backward()
    assert model.inner.inner.weight.grad.abs().sum() > 0
    again = copy.deepcopy(model)
    again.zero_grad()
    again(data(device, 3, 4)).sum().backward()
    assert again.inner.inner.weight.grad.abs().sum() > 0  # the copy's cell is the copy's


def test_method_of_a_module_as_cell_holds_its_dropout_still(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = gdeq.VariationalDropout(0.5)
            self.deq = gdeq.DEQ(self.step, solver=gdeq.Broyden(max_iter=40, tol=1e-10))

        def step(self, z, x):
            return self.drop(torch.tanh(0.5 * z + x))

        def forward(self, x):
            return self.deq(x)

    model = Model().to(device)
    model(data(device, 3, 8))
    assert model.deq.solution.status == [gdeq.Status.CONVERGED] * 3


def test_repr_shows_the_choices():
    text = repr(gdeq.DEQ(Cell(), gradient=gdeq.NPG(steps=3)))
    assert "Broyden(max_iter=18, tol=0.001" in text
    assert "NPG(steps=3, damping=0.5)" in text
    assert "Linear" in text


def test_in_a_sequential(device):
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=F64),
        tight(Cell(), device),
        nn.ReLU(),
        nn.Linear(4, 2, dtype=F64),
    ).to(device)
    x = data(device, 5, 3)
    assert model(x).shape == (5, 2)
    model(x).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert model[0].weight.grad.abs().sum() > 0


def test_followed_by_an_in_place_activation(device):
    # nn.ReLU(inplace=True) after a layer is what most image models write.
    deq = tight(Cell(), device)
    x = data(device, 5, 4)
    found = []
    for inplace in (False, True):
        deq.zero_grad()
        nn.Sequential(deq, nn.ReLU(inplace=inplace))(x).square().sum().backward()
        found.append(deq.cell.inner.weight.grad)
    assert torch.equal(found[0], found[1])


def test_hooks_run(device):
    deq = tight(Cell(), device)
    seen = []
    deq.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    deq(data(device, 3, 4))
    assert seen == [(3, 4)]


# --- modules -------------------------------------------------------------------------------------


def test_parameters_and_buffers_are_found():
    deq = gdeq.DEQ(Cell())
    assert [name for name, _ in deq.named_parameters()] == ["cell.inner.weight", "cell.inner.bias"]
    assert [name for name, _ in deq.named_buffers()] == ["cell.scale"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_dtype(device, dtype):
    deq = gdeq.DEQ(Cell()).to(device)
    x = data(device, 3, 4)
    expected = deq(x)
    deq.to(dtype)
    z = deq(x.to(dtype))
    assert z.dtype == dtype
    torch.testing.assert_close(z.double(), expected, rtol=0.05, atol=0.02)
    z.float().sum().backward()
    assert deq.cell.inner.weight.grad.dtype == dtype


def test_state_dict_round_trip(device):
    deq, other = tight(Cell(), device), tight(Cell(), device)
    x = data(device, 3, 4)
    deq(x).sum().backward()
    z = deq(x)
    assert not torch.allclose(other(x), z)
    assert set(deq.state_dict()) == {"cell.inner.weight", "cell.inner.bias", "cell.scale"}
    file = io.BytesIO()
    torch.save(deq.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True, map_location=device))
    assert torch.equal(other(x), z)


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("when", ["new", "forward", "backward"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(device, gradient, when, how):
    deq = tight(Cell(), device, gradient=gradient)
    x = data(device, 3, 4)
    pending = None
    if when != "new":
        pending = deq(x).sum()
    if when == "backward":
        pending.backward()
    same = copy.deepcopy(deq) if how == "deepcopy" else pickle.loads(pickle.dumps(deq))
    assert same.solver == deq.solver
    assert same.gradient == deq.gradient
    assert same.solution is None
    assert (deq.solution is None) == (when == "new")  # the original keeps its record
    for p, q in zip(deq.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()
    deq.zero_grad()
    same.zero_grad()
    z, z_same = deq(x), same(x)
    assert torch.equal(z, z_same)
    z.sum().backward()
    z_same.sum().backward()
    for p, q in zip(deq.parameters(), same.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with torch.no_grad():
        same.cell.inner.weight.zero_()
    assert torch.equal(deq(x), z)
    if when == "forward":
        pending.backward()  # of a graph that was open while the copy was made


def test_shallow_copy_shares_the_cell_but_not_the_record(device):
    deq = tight(Cell(), device)
    deq(data(device, 3, 4))
    same = copy.copy(deq)
    assert same.cell is deq.cell
    assert same.solution is None


def test_solutions_can_be_pickled_and_copied(device):
    deq = tight(Cell(), device)
    deq(data(device, 3, 4)).sum().backward()
    for same in (pickle.loads(pickle.dumps(deq.solution)), copy.deepcopy(deq.solution)):
        assert torch.equal(same.z, deq.solution.z)
        assert same.backward.vjps == deq.solution.backward.vjps == 1
        assert torch.equal(same.backward.residual, deq.solution.backward.residual)
        v = data(device, 3, 4)
        assert torch.equal(same.inverse.rmatvec(v), deq.solution.inverse.rmatvec(v))


# --- use -----------------------------------------------------------------------------------------


def test_warm_start_needs_fewer_steps(device):
    deq = tight(Cell(), device, solver=gdeq.Broyden(max_iter=60, tol=1e-8))
    x = data(device, 4, 4)
    with torch.no_grad():
        z = deq(x)
        cold = deq.solution.steps
        deq(x, z0=z)
        assert (deq.solution.steps == 0).all()
        assert deq.solution.evals == 1
        deq(x + 1e-4, z0=z)
        near = deq.solution.steps
        deq(x + 1e-4, z0=torch.zeros_like(z))
    assert (cold > 3).all()
    assert (near < deq.solution.steps).all()


def test_batch_size_may_change_between_calls(device):
    deq = tight(Cell(), device)
    x = data(device, 6, 4)
    whole = deq(x)
    parts = torch.cat([deq(x[:1]), deq(x[1:4]), deq(x[4:])])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_images_and_multiscale_states(device):
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.high = nn.Conv2d(2, 2, 3, padding=1, dtype=F64)
            self.down = nn.Conv2d(2, 3, 3, padding=1, stride=2, dtype=F64)
            with torch.no_grad():
                for p in self.parameters():
                    p.mul_(0.3)

        def initial_state(self, x):
            n = len(x)
            return [x.new_zeros(n, 2, 4, 4), x.new_zeros(n, 3, 2, 2)]

        def forward(self, z, x):
            high, low = z
            up = low.mean(1, keepdim=True).repeat_interleave(2, 2).repeat_interleave(2, 3)
            return [
                torch.tanh(self.high(high) + x + 0.1 * up),
                torch.tanh(self.down(high) + 0.5 * low),
            ]

    deq = tight(Pyramid(), device, gradient=gdeq.GDEQ(refine=1))
    x = data(device, 2, 2, 4, 4)
    z = deq(x)
    assert isinstance(z, list)
    assert [t.shape for t in z] == [(2, 2, 4, 4), (2, 3, 2, 2)]
    for found, expected in zip(z, deq.cell(z, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (z[0].sum() + z[1].sum()).backward()
    assert all(p.grad.abs().sum() > 0 for p in deq.parameters())


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_training_reduces_the_loss(device, gradient):
    # A toy regression: y = sin(2x), a weight-tied layer of width 12 between two linear ones.
    x = torch.linspace(-1, 1, 32, device=device).unsqueeze(1)
    y = torch.sin(2 * x)
    model = nn.Sequential(
        nn.Linear(1, 12),
        gdeq.DEQ(Cell(12, dtype=torch.float32), gradient=gradient),
        nn.Linear(12, 1),
    ).to(device)
    before = model[1].cell.inner.weight.detach().clone()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (model(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 0.1
    assert losses[-1] < 0.02 * losses[0]
    assert (model[1].cell.inner.weight - before).norm() > 0.01
    assert model[1].solution.converged.all()


def test_pretraining_unrolled_then_switching(device):
    x = torch.linspace(-1, 1, 32, device=device).unsqueeze(1)
    y = torch.sin(2 * x)
    deq = gdeq.DEQ(Cell(12, dtype=torch.float32), solver=None, gradient=gdeq.Unrolled(steps=6))
    model = nn.Sequential(nn.Linear(1, 12), deq, nn.Linear(12, 1)).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(60):
        if step == 30:
            deq.solver, deq.gradient = gdeq.Broyden(max_iter=18, tol=1e-3), gdeq.GDEQ()
        loss = (model(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[29] < 0.2 * losses[0]
    assert losses[30] < 1.5 * losses[29]  # what was learned unrolled holds at the equilibrium
    assert losses[-1] < losses[29]
