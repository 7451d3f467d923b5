"""`DEQ` as a module: its interface, copies, checkpoints, training."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gdeq
from cells import EXACT, F64, SOLVER, Cell, assert_same, data, every_gradient, layer
from gdeq import GDEQ, JFB, Broyden, Picard, Unrolled, UnsteadyCellWarning


class Sized(nn.Module):
    """A state that is not shaped like the input, and further inputs."""

    def __init__(self):
        super().__init__()
        self.mix, self.embed, self.seen = Cell(), nn.Linear(3, 4, dtype=F64), []

    def initial_state(self, x, gate, *, shift):
        self.seen.append((gate, shift))
        return torch.full((len(x), 4), 0.1, dtype=x.dtype, device=x.device)

    def forward(self, z, x, gate, *, shift):
        return gate * self.mix(z, self.embed(x)) + shift


# --- the interface -------------------------------------------------------------------------------


def test_the_fixed_point_and_its_record(device):
    deq = gdeq.DEQ(Cell())
    assert deq.solver == Broyden(max_iter=18, tol=1e-3)
    assert deq.gradient == GDEQ(refine=1)
    assert deq.solution is None
    deq, x = layer(device, GDEQ()), data(device, 3, 4)
    z = deq(x)
    torch.testing.assert_close(z, deq.cell(z, x), rtol=1e-10, atol=1e-11)
    assert z.abs().min() > 1e-3  # not the zeros that it started from
    first = deq.solution
    assert isinstance(first, gdeq.Solution)
    assert torch.equal(first.z, z)
    assert not first.z.requires_grad
    assert first.converged.all()
    assert first.trace.shape == (int(first.steps.max()), 3)
    assert first.inverse.as_matrix().shape == (3, 4, 4)
    whole = deq(data(device, 5, 4))  # another batch size, another record
    assert deq.solution is not first
    assert deq.solution.converged.shape == (5,)
    assert whole.shape == (5, 4)
    with torch.no_grad():
        z = deq(x)
        kept = z.clone()
        z.mul_(0)
    assert torch.equal(deq.solution.z, kept)  # unharmed by what is done to the output


def test_where_a_solve_starts(device):
    seen = []

    def cell(z, x):
        seen.append(z.clone())
        return 0.5 * z + x

    deq, x, z0 = gdeq.DEQ(cell), data(device, 3, 4), data(device, 3, 4)
    kept = z0.clone()
    torch.testing.assert_close(deq(x), 2 * x, rtol=1e-6, atol=1e-6)
    assert torch.equal(seen[0], torch.zeros_like(x))
    seen.clear()
    deq(x, z0=z0)
    assert torch.equal(seen[0], z0)
    assert torch.equal(z0, kept)


@pytest.mark.parametrize("grad", [True, False])
def test_a_warm_start(device, grad):
    deq = layer(device, GDEQ(), Broyden(max_iter=60, tol=1e-8))
    x = data(device, 4, 4)
    with torch.set_grad_enabled(grad):
        z0 = deq(x).detach().clone()
        cold = deq.solution.steps
        z = deq(x, z0=z0)
        assert (deq.solution.steps == 0).all()
        assert deq.solution.evals == 1
        assert z.data_ptr() != z0.data_ptr()  # a z0 that is a solution is not the output
        deq(x + 1e-4, z0=z0)
        assert (deq.solution.steps < cold).all()


def test_initial_state_and_extra_inputs(device):
    deq = gdeq.DEQ(Sized().to(device), Broyden(60, 1e-13), EXACT)
    x, seen = data(device, 5, 3), deq.cell.seen
    gate = torch.full((4,), 0.5, dtype=F64, device=device, requires_grad=True)
    shift = torch.tensor(0.1, dtype=F64, device=device, requires_grad=True)
    z = deq(x, gate, shift=shift)
    assert seen == [(gate, shift)]
    torch.testing.assert_close(z, deq.cell(z, x, gate, shift=shift), rtol=1e-10, atol=1e-11)
    assert torch.equal(deq(x, gate, shift=shift, z0=z.detach()), z)  # the call's z0 goes first
    assert len(seen) == 1
    (slope,) = torch.autograd.grad(z.sum(), shift)
    with torch.no_grad():
        moved = [deq(x, gate, shift=shift + way).sum() for way in (1e-6, -1e-6)]
    torch.testing.assert_close(slope, (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_cell_solver_and_gradient_can_be_replaced(device):
    deq, x = layer(device, GDEQ()), data(device, 3, 4)
    z, solver = deq(x), deq.solver
    deq.solver, deq.gradient = Picard(max_iter=2, tol=0.0), JFB()
    by_hand = deq.cell(deq.cell(torch.zeros_like(x), x), x)
    torch.testing.assert_close(deq(x), by_hand, rtol=1e-12, atol=1e-13)
    assert deq.solution.inverse is None
    deq.solver, deq.gradient = None, Unrolled(steps=4)
    for _ in range(2):
        by_hand = deq.cell(by_hand, x)
    torch.testing.assert_close(deq(x), by_hand, rtol=1e-12, atol=1e-13)
    deq.solver, deq.gradient = solver, GDEQ()
    assert torch.equal(deq(x), z)
    deq.cell = Cell().to(device)
    assert not torch.allclose(deq(x), z)
    assert {id(p) for p in deq.parameters()} == {id(p) for p in deq.cell.parameters()}


class Model(nn.Module):
    """With a method as cell, and parts beside it that the layer does not use."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Cell(), nn.Dropout(0.5)
        self.drop = gdeq.VariationalDropout(0.5)
        self.deq = gdeq.DEQ(self.step, Broyden(max_iter=40, tol=1e-10))

    def step(self, z, x):
        return self.drop(self.inner(z, x))

    def forward(self, x):
        return self.deq(x)


def test_functions_and_methods_as_cells(device):
    w, x = (0.3 * data(device, 4, 4)).requires_grad_(), data(device, 3, 4).requires_grad_()
    deq = gdeq.DEQ(lambda z, x: torch.tanh(z @ w + x))
    deq(x).sum().backward()
    assert w.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0
    assert list(deq.parameters()) == []
    model = Model().to(device)
    assert len(list(model.parameters())) == 3
    for each in (model, copy.deepcopy(model)):  # the copy's cell is the copy's
        each.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the dropout beside it is nobody's concern
            each(x).sum().backward()
        assert each.deq.solution.converged.all()  # its own is held still
        assert each.inner.inner.weight.grad.abs().sum() > 0


def test_equilibrium_of_a_stand_in_for_the_cell(device):
    """An f of one's own, solved as the cell is, its dropout masks held."""

    class Dropped(Cell):
        def __init__(self):
            super().__init__()
            self.drop = gdeq.VariationalDropout(0.5)

    deq, x = gdeq.DEQ(Dropped().to(device), Broyden(40, 1e-10), EXACT), data(device, 3, 4)
    z = deq.equilibrium(lambda z: deq.cell.drop(2 * deq.cell(z, x)), torch.zeros_like(x))
    assert deq.solution.converged.all()
    assert torch.equal(deq.solution.z, z)
    assert not deq.solution.z.requires_grad
    z.sum().backward()
    assert deq.solution.backward.converged.all()
    assert deq.cell.inner.weight.grad.abs().sum() > 0


def test_repr_and_hooks(device):
    text = repr(gdeq.DEQ(Cell(), gradient=gdeq.NPG(steps=3)))
    assert "Broyden(max_iter=18, tol=0.001" in text
    assert "NPG(steps=3, damping=0.5)" in text
    assert "Linear" in text
    deq, seen = layer(device), []
    deq.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    deq(data(device, 3, 4))
    assert seen == [(3, 4)]


@every_gradient
def test_a_record_that_is_changed_before_the_backward_pass(device, gradient):
    deq, x = layer(device, gradient), data(device, 3, 4)
    z = deq(x)
    if deq.solution.inverse is None and isinstance(gradient, Unrolled):
        return  # its record is a copy
    deq.solution.z.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place.*solution.z.clone\(\)"):
        z.sum().backward()
    z = deq(x)
    z.sum().backward()
    deq.solution.z.zero_()  # now it may be


# --- one system, two uses, threads ----------------------------------------------------------------


def propagate(z, x):
    """A graph of five nodes in a circle."""
    return torch.tanh(0.3 * (z.roll(1, -2) + z.roll(-1, -2)) + x)


@every_gradient
def test_one_system_without_a_batch(device, gradient):
    x = data(device, 5, 4).requires_grad_()
    one = gdeq.DEQ(propagate, SOLVER, gradient, batched=False)
    batch = gdeq.DEQ(propagate, SOLVER, gradient)
    z, expected = one(x), batch(x[None])
    assert z.shape == one.solution.z.shape == (5, 4)
    assert torch.equal(z[None], expected)
    weights = data(device, 5, 4)
    found = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (z, expected)]
    assert torch.equal(*found)
    text = str(one.solution)
    for figure in ("steps", "residual", "error"):
        ours, theirs = getattr(one.solution, figure), getattr(batch.solution, figure)
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert text.startswith("one system, ")
    assert "sample" not in text
    with torch.no_grad():
        assert torch.equal(one(x), z)
    torch.relu_(one(x)).sum().backward()  # in place, as nn.ReLU(inplace=True) after a layer


def test_one_system_of_several_tensors_and_of_one_number(device):
    def cell(z, x):
        nodes, mean = z
        return torch.tanh(0.3 * nodes + mean + x), 0.5 * torch.sin(nodes.mean())

    x = data(device, 5, 4)
    start = torch.zeros_like(x), torch.zeros((), dtype=F64, device=device)
    deq = gdeq.DEQ(cell, SOLVER, batched=False)
    nodes, mean = deq(x, z0=start)
    assert mean.shape == ()
    assert_same((nodes, mean), cell((nodes, mean), x), rtol=1e-10, atol=1e-11)
    root = gdeq.DEQ(lambda z, a: 0.5 * (z + a / (1 + z)), SOLVER, batched=False)
    assert root(torch.tensor(2.0, dtype=F64)).shape == ()
    with pytest.raises(TypeError, match="batched must be True or False"):
        gdeq.DEQ(cell, batched=1)


def test_a_solver_for_training_one_for_evaluation_and_one_for_a_call(device):
    many = Broyden(max_iter=40, tol=1e-10)
    deq = gdeq.DEQ(Cell().to(device), Picard(2, 0.0), gdeq.Implicit(), eval_solver=many)
    x = data(device, 3, 4)

    def evals(**options):
        deq(x, **options)
        return deq.solution.evals

    assert evals() == 3
    assert evals(solver=many) > 5
    assert evals() == 3
    deq.eval()
    assert evals() > 5
    assert evals(solver=Picard(4, 0.0), gradient=JFB()) == 5
    deq.eval_solver = None
    assert evals() == 3
    with pytest.raises(TypeError, match="eval_solver must be a solver"):
        gdeq.DEQ(Cell(), eval_solver=3)
    # Where no gradient is computed, any solver goes with any gradient.
    reuse = gdeq.DEQ(Cell().to(device), gradient=GDEQ(), eval_solver=Picard()).eval()
    with torch.no_grad():
        reuse(x)
    with pytest.raises(ValueError, match="GDEQ reuses the inverse"):
        reuse(x)


def test_named_and_nested_inputs_start_a_solve(device):
    a, b = data(device, 2, 3), data(device, 2, 5)
    assert torch.equal(*(gdeq.DEQ(lambda z, x: 0.5 * z + x)(**x) for x in ({"x": a}, {"x": a})))
    z = gdeq.DEQ(lambda z, shift=1.0, x=None: 0.5 * z + x)(shift=2.0, x=a)
    torch.testing.assert_close(z, 2 * a, rtol=1e-6, atol=1e-6)
    for x in ((a, b), {"a": a, "b": b}, [a, (b, a)]):
        z = gdeq.DEQ(lambda z, x: pytree.tree_map(lambda z, x: 0.5 * z + x, z, x))(x)
        found, expected = pytree.tree_leaves(z), [2 * leaf for leaf in pytree.tree_leaves(x)]
        assert_same(found, expected, rtol=1e-6, atol=1e-6)


def test_a_start_of_zeros_and_noise(device):
    zeros = torch.zeros(400, 3, device=device), torch.zeros(400, 2, 2, device=device)
    first, second = gdeq.mixed_start(zeros, share=0.25, scale=2.0)
    noisy = first.abs().sum(1) > 0
    assert torch.equal(noisy, second.flatten(1).abs().sum(1) > 0)
    assert 60 < noisy.sum() < 140
    assert second[noisy].std().item() == pytest.approx(2.0, rel=0.15)


def test_threads_have_records_and_masks_of_their_own():
    """Eight threads with batches of eight sizes through one layer."""
    cell = nn.Sequential(gdeq.weight_norm(nn.Linear(4, 4)), gdeq.VariationalDropout(0.1))
    deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * cell(z) + x), Broyden(max_iter=8, tol=1e-4))
    deq(torch.randn(3, 4))

    def work(size):
        for _ in range(20):
            with torch.set_grad_enabled(size % 2 == 0):
                z = deq(torch.randn(size, 4))
            assert deq.solution.z.shape == (size, 4)
            assert torch.equal(deq.solution.z, z)
            if size % 2 == 0:
                norms = cell[0].parametrizations.weight
                found = torch.autograd.grad(z.sum(), [norms.original0, norms.original1])
                assert all(gradient.abs().sum() > 0 for gradient in found)
        return size

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(1, 9))) == list(range(1, 9))
    assert deq.solution.z.shape == (3, 4)


# --- what is wrong with a cell --------------------------------------------------------------------


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_that_is_none(share):
    with pytest.raises(ValueError, match="share must be from 0 to 1"):
        gdeq.mixed_start(torch.zeros(2, 3), share)
    with pytest.raises(gdeq.StateError, match=r"z0 has dtype torch\.int64"):
        gdeq.mixed_start(torch.zeros(2, 3).long())


@pytest.mark.parametrize("cell", [None, 3, "cell", torch.zeros(2), nn.Linear], ids=str)
def test_a_cell_that_cannot_be_called(cell):
    with pytest.raises(TypeError, match=r"cell must be a module or function cell\(z, x\)"):
        gdeq.DEQ(cell)


SHAPELESS = {
    "nothing": ((), {}, "there is none"),
    "tokens": ((torch.zeros(2, 3).long(),), {}, "x is torch.int64, and a state must be floating"),
    "scalar": ((torch.tensor(1.0),), {}, "x has no batch dimension; DEQ\\(cell, batched=False"),
    "dict": (({"x": 1},), {}, "x must be a tensor to start as zeros like it, got dict"),
    "none": ((None,), {}, "got NoneType"),
    "named": ((), {"x": "none"}, "got str"),
    "mixed": (((torch.zeros(2, 3), 1),), {}, "got tuple"),
}


@pytest.mark.parametrize(("inputs", "options", "words"), SHAPELESS.values(), ids=SHAPELESS)
def test_a_state_of_unknown_shape(inputs, options, words):
    with pytest.raises(ValueError, match="the shape of the state is not known") as error:
        gdeq.DEQ(lambda z, *inputs, **options: z)(*inputs, **options)
    for word in (r"deq\(x, z0=...\)", r"initial_state\(x\)", words):
        assert error.match(word)


def test_notes_on_errors_of_the_cell():
    def notes(cell, **options):
        with pytest.raises((TypeError, gdeq.StateError, RuntimeError)) as caught:
            gdeq.DEQ(cell)(torch.zeros(2, 3), **options)
        told = " ".join(getattr(caught.value, "__notes__", []))
        return "called as cell(z, x)" in told, "started from zeros like x" in told

    assert notes(lambda z: z) == (True, True)  # it takes no x
    assert notes(nn.Linear(3, 3)) == (True, True)
    assert notes(lambda z, x: len(3)) == (False, True)  # one that is called well fails on its own
    assert notes(lambda z, x: z[:, :2]) == (False, True)
    assert notes(lambda z, x: z[:, :2], z0=torch.zeros(2, 4)) == (False, False)

    class Wrong(Cell):
        def initial_state(self, x):
            return x.shape  # forgot to make a tensor of it

    with pytest.raises(TypeError, match=r"must be a tensor.*got int") as error:
        gdeq.DEQ(Wrong())(torch.zeros(2, 3))
    assert "started from zeros" not in str(getattr(error.value, "__notes__", ""))


class Unsteady(Cell):
    """A cell with a part that is another one at every evaluation."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, z, x):
        made = super().forward(z, x)
        if isinstance(self.part, nn.LSTM):  # over a sequence of one; it returns its state too
            return self.part(made.unsqueeze(0))[0].squeeze(0)
        return self.part(made)


UNSTEADY = {
    "Dropout": (
        nn.Dropout(0.5),
        r"Dropout \(part\) draws a new mask at every evaluation: use gdeq.VariationalDropout",
    ),
    "Alpha": (nn.AlphaDropout(0.5), r"AlphaDropout \(part\) draws .* gdeq.VariationalDropout"),
    "BatchNorm": (nn.BatchNorm1d(4).to(F64), r"BatchNorm1d \(part\) mixes .* nn.GroupNorm"),
    "LSTM": (nn.LSTM(4, 4, 2, dropout=0.5).to(F64), r"LSTM \(part\) .* attribute dropout to 0"),
    "both": (
        nn.Sequential(nn.BatchNorm1d(4).to(F64), nn.Dropout(0.5)),
        r"Dropout \(part.1\) .*VariationalDropout.*; BatchNorm1d \(part.0\) .* nn.GroupNorm",
    ),
}


@pytest.mark.parametrize(("part", "message"), UNSTEADY.values(), ids=UNSTEADY)
def test_an_unsteady_cell_is_warned_of_once(device, part, message):
    deq, x = gdeq.DEQ(Unsteady(copy.deepcopy(part)).to(device)), data(device, 3, 4)
    deq.eval()
    deq(x)  # it holds still now
    deq.train()
    deq.solver, deq.gradient = None, Unrolled(2)
    deq(x)  # nothing is solved
    deq.solver, deq.gradient = Broyden(max_iter=3), GDEQ()
    with pytest.warns(UnsteadyCellWarning, match=f"Unsteady in training mode changes .*{message}"):
        deq(x)
    deq(x)  # told before; a second warning would be an error here
    with pytest.warns(UnsteadyCellWarning):
        gdeq.DEQ(Unsteady(copy.deepcopy(part)).to(device))(x)
    steady = (gdeq.VariationalDropout(0.5), nn.GroupNorm(2, 4).to(F64), nn.Dropout(0.0))
    for quiet in (*steady, nn.Dropout(0.5).eval()):
        gdeq.DEQ(Unsteady(quiet).to(device), Broyden(max_iter=3))(x)


class Moody(nn.Module):
    """A cell that can be told to misbehave."""

    def __init__(self):
        super().__init__()
        self.inner = gdeq.weight_norm(nn.Linear(3, 3))
        self.drop = gdeq.VariationalDropout(0.5)
        self.mood = None

    def forward(self, z, x):
        out = torch.tanh(0.5 * self.drop(self.inner(z)) + x)
        if self.mood == "raise" or (self.mood == "raise late" and torch.is_grad_enabled()):
            raise ArithmeticError("today not")
        return out[:, :1] if self.mood == "shape" else out


@every_gradient
@pytest.mark.parametrize("mood", ["raise", "raise late", "shape", "state"])
def test_the_layer_is_usable_after_an_error_and_keeps_nothing(device, gradient, mood):
    deq, x = gdeq.DEQ(Moody().to(device), gradient=gradient), torch.randn(2, 3, device=device)

    def step():
        deq.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        z = deq(x)
        z.sum().backward()
        return [z.detach(), *(p.grad for p in deq.parameters())]

    before = step()
    deq.cell.mood = mood
    with pytest.raises((ArithmeticError, gdeq.StateError)):
        deq(x, z0=torch.zeros(2, 3, dtype=torch.long) if mood == "state" else None)
    assert deq.solution is None  # not the record of the call before
    deq.cell.mood = None
    ones = torch.ones(64, 3, device=device)
    assert not torch.equal(deq.cell.drop(ones), deq.cell.drop(ones))  # nothing is held
    assert torch.is_grad_enabled()
    assert_same(step(), before)


# --- modules -------------------------------------------------------------------------------------


def test_state_dict_round_trip(device):
    deq, other, x = layer(device), layer(device), data(device, 3, 4)
    assert not torch.allclose(other(x), deq(x))
    assert set(deq.state_dict()) == {"cell.inner.weight", "cell.inner.bias", "cell.input.weight"}
    other.load_state_dict(deq.state_dict())
    assert torch.equal(other(x), deq(x))


@every_gradient
@pytest.mark.parametrize("when", ["new", "forward", "backward"])
def test_copies(device, gradient, when):
    deq, x, pending = layer(device, gradient), data(device, 3, 4), None
    if when != "new":
        pending = deq(x).sum()
    if when == "backward":
        pending.backward()
    for same in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        assert (same.solver, same.gradient) == (deq.solver, deq.gradient)
        assert same.solution is None
        assert (deq.solution is None) == (when == "new")  # the original keeps its record
        shared = {p.data_ptr() for p in deq.parameters()} & {
            p.data_ptr() for p in same.parameters()
        }
        assert not shared
        results = []
        for each in (deq, same):
            each.zero_grad()
            z = each(x)
            z.sum().backward()
            results.append([z.detach(), *(p.grad for p in each.parameters())])
        assert_same(*results)
        if when == "new":
            deq.solution = None
    if when == "forward":
        pending.backward()  # of a graph that was open while the copies were made
    shallow = copy.copy(deq)
    assert shallow.cell is deq.cell
    assert shallow.solution is None


# --- use -----------------------------------------------------------------------------------------


def test_pretraining_unrolled_then_switching(device):
    """A toy, y = sin(2x): a weight-tied layer of width 12 between linear ones."""
    deq = gdeq.DEQ(Cell(12, dtype=torch.float32), solver=None, gradient=Unrolled(steps=6))
    x = torch.linspace(-1, 1, 32, device=device).unsqueeze(1)
    model = nn.Sequential(nn.Linear(1, 12), deq, nn.Linear(12, 1)).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(50):
        if step == 25:
            deq.solver, deq.gradient = Broyden(max_iter=18, tol=1e-3), GDEQ()
        loss = (model(x) - torch.sin(2 * x)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[24] < 0.5 * losses[0]
    assert losses[25] < 1.5 * losses[24]  # what was learned unrolled holds at the equilibrium
    assert losses[-1] < losses[24]
