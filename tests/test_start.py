"""A start of the solve that is learned: used where no z0 is given, and fitted to equilibria."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import gdeq
from gdeq import narrowing
from gdeq.fast.kernels import choice
from gdeq.models import MDEQStart
from gdeq.models.mdeq import mdeq
from gdeq.models.mdeq_config import named

F64 = torch.float64
WIDTH = 6


class Cell(nn.Module):
    """tanh(Az + x), ‖A‖ = 0.8."""

    def __init__(self, width=WIDTH):
        super().__init__()
        matrix = torch.randn(width, width, dtype=F64, generator=torch.Generator().manual_seed(0))
        self.matrix = nn.Parameter(0.8 * matrix / torch.linalg.matrix_norm(matrix, 2))
        self.given = []

    def forward(self, z, x):
        self.given.append(len(z))
        return torch.tanh(z @ self.matrix.T + x)


class Pair(Cell):
    """A state that has another form than x."""

    def initial_state(self, x):
        return {"a": x.new_zeros(len(x), 2), "b": (x.new_zeros(len(x), WIDTH - 2),)}

    def forward(self, z, x):
        found = super().forward(torch.cat([z["a"], z["b"][0]], dim=1), x)
        return {"a": found[:, :2], "b": (found[:, 2:],)}


def tight(cell, **options):
    return gdeq.DEQ(cell, gdeq.Broyden(40, 1e-12), **options)


def draw(batch=5, width=WIDTH):
    return torch.randn(batch, width, dtype=F64)


# --- where a solve begins ------------------------------------------------------------------------


def test_a_solve_begins_where_start_says():
    x = draw()
    deq = tight(Cell())
    known = deq(x).detach()
    cold = deq.solution.steps
    deq.start = lambda given: known if given is x else None
    z = deq(x)
    assert deq.solution.steps.max() == 0 < cold.min()
    torch.testing.assert_close(z, known, rtol=0, atol=1e-11)


def test_it_may_be_somewhere_else_and_the_fixed_point_is_the_same():
    x = draw()
    deq = tight(Cell())
    known = deq(x).detach()
    deq.start = lambda x: 3 * torch.randn_like(x)
    torch.testing.assert_close(deq(x), known, rtol=0, atol=1e-10)
    assert deq.solution.converged.all()


def test_the_callers_z0_comes_first():
    def start(x):
        raise AssertionError("was called")

    x = draw()
    deq = tight(Cell(), start=start)
    assert deq(x, z0=torch.zeros_like(x)).isfinite().all()
    with pytest.raises(AssertionError, match="was called"):
        deq(x)


def test_it_is_given_all_inputs_of_the_cell():
    def cell(z, x, scale, *, shift):
        return torch.tanh(0.5 * scale * z + x + shift)

    def start(x, scale, *, shift):
        assert not torch.is_grad_enabled()  # what it keeps for autograd would never be used
        seen.append((scale, shift))
        return torch.zeros_like(x)

    seen = []
    tight(cell, start=start)(draw(), 0.3, shift=0.1)
    assert seen == [(0.3, 0.1)]


def test_nested_states():
    x = draw()
    deq = tight(Pair())
    known = deq(x)
    # Keys in another order and a list for a tuple are no other structure.
    deq.start = lambda x: {"b": [known["b"][0]], "a": known["a"]}
    z = deq(x)
    assert deq.solution.steps.max() == 0
    assert isinstance(z["b"], tuple)
    torch.testing.assert_close(z, known, rtol=0, atol=1e-11)


def test_another_precision_and_order_in_memory_become_those_of_the_state():
    class Image(nn.Module):
        def initial_state(self, x):
            return torch.zeros_like(x, memory_format=torch.channels_last)

        def forward(self, z, x):
            seen.append((z.dtype, z.is_contiguous(memory_format=torch.channels_last)))
            return torch.tanh(0.5 * z + x)

    seen = []
    x = torch.randn(2, 3, 4, 4, dtype=F64)
    deq = tight(Image(), start=lambda x: x.float().contiguous())
    assert deq(x).dtype == F64
    assert set(seen) == {(F64, True)}
    deq = tight(lambda z, x: torch.tanh(0.5 * z + x), start=lambda x: x.float())
    assert deq(x).dtype == F64


def test_without_another_word_it_says_what_form_the_state_has():
    x = draw()
    deq = tight(lambda z, x: torch.tanh(0.5 * z + x.sum(1, keepdim=True)), start=lambda x: x[:, :2])
    assert deq(x).shape == (5, 2)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [gdeq.Implicit(), gdeq.GDEQ(refine=2), gdeq.JFB()])
def test_gradients_are_those_without_it_and_none_is_its_own(gradient):
    x, target = draw().requires_grad_(), draw()
    network = nn.Linear(WIDTH, WIDTH, dtype=F64)
    found = []
    for start in (None, network):
        deq = tight(Cell(), gradient=gradient, start=start)
        z = deq(x)
        found.append(torch.autograd.grad((z * target).sum(), [x, deq.cell.matrix]))
    # Plain reuse in GDEQ depends on the path of the solve, which its refinement leaves a part of.
    accuracy = 0.05 if isinstance(gradient, gdeq.GDEQ) else 1e-6
    for cold, warm in zip(*found, strict=True):
        assert (cold - warm).norm() < accuracy * cold.norm()
    (deq(x) * target).sum().backward()
    assert deq.cell.matrix.grad is not None
    assert [p.grad for p in network.parameters()] == [None, None]


def test_no_gradient_passes_through_it_where_a_solve_is_unrolled():
    x = draw().requires_grad_()
    network = nn.Linear(WIDTH, WIDTH, dtype=F64)
    deq = gdeq.DEQ(Cell(), None, gdeq.Unrolled(steps=2), start=network)
    (found,) = torch.autograd.grad(deq(x).sum(), x)
    (expected,) = torch.autograd.grad(deq(x, z0=network(x).detach()).sum(), x)
    torch.testing.assert_close(found, expected)
    (through,) = torch.autograd.grad(deq(x, z0=network(x)).sum(), x)
    assert (through - expected).norm() > 1e-3


# --- beside the rest of a layer ------------------------------------------------------------------


def test_samples_leave_the_batch_from_there_too(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(narrowing, "LEAST", 2)
    x = draw(8)
    deq = tight(Cell()).eval()
    known = deq(x).detach()
    far = torch.logspace(-13, 0, 8, dtype=F64).unsqueeze(1)
    deq.start, deq.narrow = lambda x: known + far, True
    deq.cell.given.clear()
    with choice.use("plain"), torch.no_grad():
        found = deq(x)
    torch.testing.assert_close(found, known, rtol=0, atol=1e-10)
    assert {8, 4, 2} >= set(deq.cell.given) > {8}
    assert deq.solution.steps[0] == 0 < deq.solution.steps[-1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode):
    x = draw()
    deq = tight(Cell(), start=nn.Linear(WIDTH, WIDTH, dtype=F64)).eval()
    expected = deq(x).detach()
    with mode():
        torch.testing.assert_close(deq(x), expected, rtol=0, atol=1e-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_step_calls_it():
    device = torch.device("cuda")
    network = nn.Linear(WIDTH, WIDTH, dtype=F64)
    deq = tight(Cell(), start=network).to(device).eval()
    step = gdeq.capture(deq)
    with torch.no_grad():
        for _ in range(6):
            x = draw().to(device)
            torch.testing.assert_close(step(x), deq(x), rtol=0, atol=1e-10)
    assert step.graph is not None


def test_it_is_a_part_of_the_layer():
    network = nn.Linear(WIDTH, WIDTH, dtype=F64)
    deq = tight(Cell(), start=network)
    assert "start.weight" in deq.state_dict()
    assert "(start): Linear" in repr(deq)
    x = draw()
    for other in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        assert other.start is not network
        torch.testing.assert_close(other(x), deq(x))
    assert not deq.eval().start.training


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [nn.Linear, 3, torch.zeros(2)])
def test_what_cannot_be_called_is_refused(start):
    with pytest.raises(TypeError, match="start must be a module or function start"):
        tight(Cell(), start=start)


def test_it_is_looked_at_again_when_it_was_set_later():
    deq = tight(Cell())
    deq.start = 3
    with pytest.raises(TypeError, match="start must be a module or function start"):
        deq(draw())


def test_the_nearest_name():
    with pytest.raises(TypeError, match="did you mean 'start'"):
        gdeq.DEQ(Cell(), strat=None)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda x: x, "structure tensor, but the state has {'a': tensor, 'b': (tensor)}"),
        (lambda x: {"a": x[:, :2]}, "structure {'a': tensor}, but the state has {'a'"),
        (
            lambda x: {"a": x[:, :3], "b": (x[:, 2:],)},
            r"returned['a'] has shape (5, 3), but the state there has (5, 2)",
        ),
        (
            lambda x: {"a": x[:, :2], "b": (x[:, 2:].long(),)},
            r"returned['b'][0] has dtype torch.int64, but the state is floating point",
        ),
        (lambda x: {"a": x[:, :2], "b": None}, "must be a tensor or a tuple, list or dict"),
    ],
)
def test_another_form_than_the_states_is_told(returned, told):
    with pytest.raises(gdeq.StateError) as caught:
        tight(Pair(), start=returned)(draw())
    assert "what start returned" in str(caught.value)
    assert told in str(caught.value)


def test_where_the_form_is_not_known_the_error_says_where_z0_came_from():
    with pytest.raises(Exception, match="size of tensor") as caught:
        tight(lambda z, x: torch.tanh(0.5 * z + x), start=lambda x: x[:, :2])(draw())
    assert any("start(x) returned" in note for note in caught.value.__notes__)
    with pytest.raises(gdeq.StateError, match="floating point"):
        tight(Cell(), start=lambda x: x.long())(draw())
    with pytest.raises(gdeq.StateError, match="must be a tensor"):
        tight(Cell(), start=lambda x: None)(draw())


# --- fitting -------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Az + x, whose equilibrium (I − A)⁻¹x is linear in x."""

    def __init__(self):
        super().__init__()
        matrix = torch.randn(WIDTH, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))
        self.matrix = nn.Parameter(0.7 * matrix / torch.linalg.matrix_norm(matrix, 2))
        self.given = []

    def forward(self, z, x):
        self.given.append(len(z))
        return z @ self.matrix.T + x


def test_a_linear_start_learns_the_inverse():
    deq, network = tight(Linear()), nn.Linear(WIDTH, WIDTH, dtype=F64)
    batches = [draw(32) for _ in range(4)]
    distances = gdeq.fit_start(deq, network, batches, steps=400, lr=0.05)
    assert distances.shape == (400,)
    assert distances[0] > 0.3
    assert distances[-1] < 1e-3
    exact = torch.linalg.inv(torch.eye(WIDTH, dtype=F64) - deq.cell.matrix)
    assert (network.weight - exact).norm() < 1e-3 * exact.norm()
    deq.solver = gdeq.Broyden(40, 1e-3)
    x = draw()
    deq(x)
    cold = deq.solution.steps
    deq.start = network
    deq(x)
    assert (deq.solution.steps < cold).all()


def test_inputs_that_a_network_made_are_no_part_of_the_fit():
    """Such as `model.stem(images)`: not once through its graph, and not twice."""
    stem = nn.Linear(WIDTH, WIDTH, dtype=F64)
    deq, network = tight(Linear()), nn.Linear(WIDTH, WIDTH, dtype=F64)
    gdeq.fit_start(deq, network, [stem(draw(8)), stem(draw(8))], steps=5)
    assert stem.weight.grad is None


def test_the_distance_is_that_of_the_samples():
    deq, x = tight(Linear()), draw(7)
    network = nn.Linear(WIDTH, WIDTH, dtype=F64)
    z = deq(x).detach()
    apart = (network(x) - z).norm(dim=1) / z.norm(dim=1)
    (found,) = gdeq.fit_start(deq, network, [x], steps=1)
    torch.testing.assert_close(found, apart.square().mean().sqrt().detach())


def test_nested_states_are_fitted():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            return {"a": y[:, :2], "b": (y[:, 2:],)}

    deq, network = tight(Pair()), Network()
    distances = gdeq.fit_start(deq, network, [draw(32) for _ in range(3)], steps=200, lr=0.02)
    assert distances[-1] < 0.3 * distances[0]


@pytest.mark.parametrize("training", [False, True])
def test_the_layer_is_as_it_was(training):
    deq = tight(Cell()).train(training)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=F64)).train(not training)
    before = copy.deepcopy(deq.state_dict())
    gdeq.fit_start(deq, network, [draw()], steps=2)
    assert deq.training is training
    assert network.training is not training
    assert deq.start is None
    assert deq.cell.matrix.grad is None
    torch.testing.assert_close(deq.state_dict(), before)


def test_equilibria_are_those_of_eval_mode_from_where_it_began_before():
    class Noisy(Cell):
        def forward(self, z, x):
            assert not self.training
            return super().forward(z, x)

    def start(x):
        raise AssertionError("the start of before is not asked")

    deq = tight(Noisy(), start=start)
    gdeq.fit_start(deq, nn.Linear(WIDTH, WIDTH, dtype=F64), [draw()], steps=1)


def test_what_is_in_a_list_is_solved_once():
    batches = [(draw(3),), (draw(4),)]  # a batch is the cell's inputs
    deq, network = tight(Cell()), nn.Linear(WIDTH, WIDTH, dtype=F64)

    def solved(batches):
        given = deq.cell.given
        given.clear()
        gdeq.fit_start(deq, network, batches, steps=6)
        return given.count(3)

    class Loader:
        def __iter__(self):
            return iter(batches)

    once = solved(batches)
    assert once > 0
    assert solved(Loader()) == 3 * once
    assert solved(batches * 3) == 3 * once
    assert solved(batch for batch in batches * 3) == 3 * once


def test_batches_that_end_too_soon():
    deq, network = tight(Cell()), nn.Linear(WIDTH, WIDTH, dtype=F64)
    with pytest.raises(ValueError, match="ended after 2 of 5 steps"):
        gdeq.fit_start(deq, network, iter([draw(), draw()]), steps=5)
    with pytest.raises(ValueError, match="batches is empty"):
        gdeq.fit_start(deq, network, [], steps=1)


def test_bad_input_to_the_fit():
    deq, network, x = tight(Cell()), nn.Linear(WIDTH, WIDTH, dtype=F64), draw()
    with pytest.raises(TypeError, match=r"must be a gdeq\.DEQ"):
        gdeq.fit_start(deq.cell, network, [x])
    with pytest.raises(TypeError, match="a module whose parameters are fitted"):
        gdeq.fit_start(deq, lambda x: x, [x])
    with pytest.raises(ValueError, match="nothing can be fitted"):
        gdeq.fit_start(deq, nn.Identity(), [x])
    for steps in (0, 1.5, True):
        with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
            gdeq.fit_start(deq, network, [x], steps=steps)
    for lr in (0.0, -1, "fast", float("nan")):
        with pytest.raises(ValueError, match="lr must be a number above 0"):
            gdeq.fit_start(deq, network, [x], lr=lr)
    with pytest.raises(gdeq.StateError, match="what start returned has shape"):
        gdeq.fit_start(deq, nn.Linear(WIDTH, 2, dtype=F64), [x])
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"start\(x\) is not finite at step"):
        gdeq.fit_start(deq, network, [x], steps=3)
    with pytest.raises(TypeError, match="list or loader of batches"):
        gdeq.fit_start(deq, network, draw())


def test_samples_without_an_equilibrium_are_not_fitted():
    """z = 3z + x for one of them: it runs away, and nothing may be learned from it."""
    x, networks = draw(8), [nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    scale, solver = torch.full((8, 1), 0.3, dtype=F64), gdeq.Picard(60, tol=1e-9)
    deq = gdeq.DEQ(lambda z, x, scale: scale * torch.tanh(z) + x, solver, gdeq.JFB())
    wild = gdeq.DEQ(
        lambda z, x, scale: torch.where(scale > 1, z + 1e3, scale * torch.tanh(z)) + x,
        solver,
        gdeq.JFB(),
    )

    class Alone(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, scale):
            return self.inner(x)

    gdeq.fit_start(deq, Alone(networks[0]), [(x[1:], scale[1:])], steps=20)
    scale[0] = 3.0
    with pytest.warns(UserWarning, match="1 of 8 samples have no equilibrium"):
        found = gdeq.fit_start(wild, Alone(networks[1]), [(x, scale)], steps=20)
    assert found[-1] < found[0]
    torch.testing.assert_close(networks[1].weight, networks[0].weight)
    assert all(p.grad is None for p in networks[1].parameters())
    with pytest.raises(ValueError, match="none of the 8 samples has an equilibrium"):
        gdeq.fit_start(wild, Alone(networks[1]), [(x, scale.fill_(3.0))], steps=2)


def test_a_fit_under_autocast_is_not_in_half_precision():
    linear, network = nn.Linear(4, 4), nn.Linear(4, 4)
    deq = gdeq.DEQ(lambda z, x: torch.tanh(0.3 * linear(z) + x), gdeq.Broyden(4, 1e-2))
    seen = []
    network.register_forward_hook(lambda module, given, found: seen.append(found.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        gdeq.fit_start(deq, network, [torch.randn(3, 4).bfloat16()], steps=2)
    assert set(seen) == {torch.float32}


# --- the network for MDEQ ------------------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 13])
def test_mdeq_start_has_the_form_of_the_state_and_begins_with_zeros(side):
    config = named("small", channels=(8, 16, 16), head_channels=(4, 8, 8))
    found = MDEQStart(config)(torch.randn(2, 8, side, side))
    assert tuple(part.shape[1:] for part in found) == config.state_shapes(side, side)
    assert all((part == 0).all() for part in found)


def test_mdeq_needs_fewer_steps_with_it():
    model = mdeq("small", image_shape=(3, 8, 8), solver=gdeq.Broyden(30, 1e-2)).double().eval()
    with torch.no_grad():
        x = model.stem(torch.randn(8, 3, 8, 8, dtype=F64))
    start = MDEQStart(model.config).double()
    distances = gdeq.fit_start(model.deq, start, [x], steps=150, lr=0.02)
    assert distances[0] == 1  # zeros
    assert distances[-1] < 0.3
    with torch.no_grad():
        expected = model.deq(x)
        cold = model.deq.solution.steps
        model.deq.start = start
        found = model.deq(x)
    assert (model.deq.solution.steps < cold).all()
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
