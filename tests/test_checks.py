"""What a layer tells about its cell: not one function, samples that meet, samples that fail."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, dropout
from torch.utils.checkpoint import checkpoint

import gdeq
import gdeq.layer
from cells import F64, Cell, assert_same, data, every_gradient
from gdeq import JFB, Broyden, ConvergenceWarning, CoupledSamplesWarning, UnsteadyCellWarning
from gdeq.context import blind, values_are_there
from gdeq.solution import Status

D = 16
FEW = Broyden(max_iter=3, tol=1e-3)


class Wrapped(Cell):
    """A cell with something done to its output."""

    def __init__(self, change, part=None):
        super().__init__(D)
        self.change, self.part = change, part
        self.register_buffer("seen", torch.zeros((), dtype=F64))

    def forward(self, z, x):
        return self.change(self, super().forward(z, x))


class Noisy(nn.Module):
    def forward(self, z):
        return dropout(z, 0.3)


def counts(cell, z):
    cell.seen += 1
    return z + 0.1 * torch.sin(cell.seen)


def normalised(cell, z):
    return batch_norm(z, None, None, training=True)


def attention(p):
    return nn.MultiheadAttention(D, 1, dropout=p, dtype=F64)


def attends(cell, z):  # over a sequence of one
    return 0.5 * cell.part(z[None], z[None], z[None])[0][0]


DRAWS = "draws random numbers at every evaluation"
UNSTEADY = {
    "functional": (
        Wrapped(lambda cell, z: dropout(z, 0.3)),
        rf"Wrapped \(the cell itself\) {DRAWS}",
    ),
    "inside": (Wrapped(lambda cell, z: cell.part(z), Noisy()), rf"Noisy \(part\) {DRAWS}"),
    "attention": (Wrapped(attends, attention(0.1)), r"MultiheadAttention \(part\) .* dropout to 0"),
    "closure": (lambda z, x: dropout(torch.tanh(0.5 * z + x), 0.3), f"It {DRAWS}"),
    "noise": (lambda z, x: torch.tanh(0.5 * z + x + 0.1 * torch.rand_like(x)), DRAWS),
    "spectral": (
        Wrapped(lambda cell, z: cell.part(z), nn.utils.spectral_norm(nn.Linear(D, D, dtype=F64))),
        r"Linear \(part\) takes a step .* gdeq.spectral_norm",
    ),
    "parametrized": (
        Wrapped(
            lambda cell, z: cell.part(z),
            nn.utils.parametrizations.spectral_norm(nn.Linear(D, D, dtype=F64)),
        ),
        r"\(part.parametrizations.weight\) takes a step .* gdeq.spectral_norm",
    ),
    "buffer": (Wrapped(counts), "Wrapped changes its buffer seen"),
    "python": (
        lambda z, x: torch.tanh(0.5 * z + x * random.random()),
        "keep something .*or to draw random numbers by other means",
    ),
}
COUPLED = {
    "pairs": lambda z, x: torch.tanh(0.4 * z.view(-1, 2, D).flip(1).reshape(z.shape) + x),
    "two views": lambda z, x: torch.tanh(0.4 * z.roll(len(z) // 2, 0) + x),
    "directed": lambda z, x: torch.tanh(0.4 * torch.cat([z[1:], 0 * z[:1]]) + x),
    "directed back": lambda z, x: torch.tanh(0.4 * torch.cat([0 * z[:1], z[:-1]]) + x),
    "graph": lambda z, x: torch.tanh(0.4 * (z.roll(1, 0) + z.roll(-1, 0)) + x),
    "set": lambda z, x: torch.tanh(0.5 * z.mean(0) + x),
    "batch norm": Wrapped(normalised),
    "sequence": Wrapped(lambda cell, z: 0.5 * cell.part(z, z, z)[0], attention(0.0)),
}


@pytest.mark.parametrize(("cell", "words"), UNSTEADY.values(), ids=UNSTEADY)
@pytest.mark.parametrize("batch", [1, 6])
def test_a_cell_that_is_not_one_function(cell, words, batch):
    deq, x = gdeq.DEQ(cell, FEW), torch.randn(batch, D, dtype=F64)
    with pytest.warns(UnsteadyCellWarning, match=f"changes between evaluations.*{words}"):
        deq(x)
    deq(x)  # told before; another warning would be an error


@pytest.mark.parametrize("cell", COUPLED.values(), ids=COUPLED)
def test_samples_that_influence_each_other(cell):
    deq, x = gdeq.DEQ(cell, FEW), torch.randn(6, D, dtype=F64)
    with pytest.warns(CoupledSamplesWarning, match=r"batched=False.*nn.GroupNorm"):
        deq(x)
    deq(x)
    gdeq.DEQ(cell, FEW, batched=False)(x)  # one system: there is nothing to tell


def test_a_first_call_with_one_sample_does_not_hide_that_samples_influence_each_other():
    coupled = lambda z, x: torch.tanh(0.3 * (z + z.mean(0)) + x)  # noqa: E731
    deq, x = gdeq.DEQ(coupled, FEW), torch.randn(6, D, dtype=F64)
    deq(x[:1])
    with pytest.warns(CoupledSamplesWarning):
        deq(x)


def test_the_checks_come_again_when_the_cell_changes():
    deq, x = gdeq.DEQ(Cell(D), FEW), torch.randn(6, D, dtype=F64)
    calls = []
    deq.cell.register_forward_hook(lambda *_: calls.append(1))

    def checked():
        calls.clear()
        deq(x)
        return len(calls) - deq.solution.evals - 1  # one with autograd

    assert [checked(), checked()] == [2, 0]
    deq.eval()
    assert [checked(), checked()] == [2, 0]
    deq.train()
    assert checked() == 0
    deq.cell = UNSTEADY["functional"][0]
    with pytest.warns(UnsteadyCellWarning):
        deq(x)


def test_cells_that_come_one_after_the_other_are_all_checked():
    """Also one that lies where another was in memory."""
    deq, x = gdeq.DEQ(lambda z, x: 0.5 * z + x, FEW), torch.randn(6, D, dtype=F64)
    deq.warns = False  # none of them converges
    for _ in range(20):
        deq.cell = lambda z, x: dropout(torch.tanh(0.5 * z + x), 0.3)
        with pytest.warns(UnsteadyCellWarning):
            deq(x)


def test_a_trajectory_is_checked_too():
    deq = gdeq.DEQ(COUPLED["set"], FEW)
    with pytest.warns(CoupledSamplesWarning):
        deq.trajectory(torch.randn(6, D, dtype=F64), at=[1])


class Detached(Cell):
    """A cell whose z is hidden from autograd, in all of its output or in a part."""

    def __init__(self, change):
        super().__init__(D)
        self.change = change

    def forward(self, z, x):
        return self.change(super().forward, z, x)


@torch.no_grad()
def without(cell, z, x):
    return cell(z, x)


DETACHED = {
    "detach": lambda cell, z, x: cell(z.detach(), x),
    "data": lambda cell, z, x: cell(z.data, x),
    "no_grad": without,
    "numpy": lambda cell, z, x: x + torch.from_numpy(0.5 * z.detach().numpy()),
}
USES_SLOPE = [gdeq.GDEQ(refine=1), gdeq.Implicit(), gdeq.NPG(2), gdeq.Unrolled(3)]


@pytest.mark.parametrize("change", DETACHED.values(), ids=DETACHED)
@pytest.mark.parametrize("gradient", USES_SLOPE, ids=lambda gradient: type(gradient).__name__)
@pytest.mark.parametrize("batch", [1, 6])
def test_a_cell_that_hides_z_from_autograd(change, gradient, batch):
    x = torch.randn(batch, D, dtype=F64, requires_grad=True)
    deq, calls = gdeq.DEQ(Detached(change), Broyden(18, 1e-6), gradient), []
    deq.cell.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        deq(x)  # no gradient is lost here
    calls.clear()
    with pytest.warns(gdeq.DetachedCellWarning, match=r"Detached depends on z.*gdeq.JFB\(\)"):
        deq(x)
    told = len(calls)
    deq(x)
    assert told - (len(calls) - told) == 3  # once


@pytest.mark.parametrize("gradient", [JFB(), gdeq.GDEQ()], ids=str)
def test_a_gradient_that_does_not_use_the_slope_may_be_given_a_detached_z(gradient):
    x = torch.randn(6, D, dtype=F64, requires_grad=True)
    found = []
    for change in (DETACHED["detach"], lambda cell, z, x: cell(z, x)):
        torch.manual_seed(0)
        deq = gdeq.DEQ(Detached(change), Broyden(18, 1e-6), gradient)
        found.append(torch.autograd.grad(deq(x).sum(), [x, *deq.cell.inner.parameters()]))
    assert_same(*found)
    with pytest.warns(gdeq.DetachedCellWarning, match="missing altogether"):
        gdeq.DEQ(Detached(without), FEW, gradient)(x)


ATTACHED = {
    "a part": lambda cell, z, x: cell(z, x) + 0.1 * z.detach(),
    "one tensor of it": lambda cell, z, x: cell(torch.cat([z[:, :1].detach(), z[:, 1:]], 1), x),
    "constant": lambda cell, z, x: cell(torch.zeros_like(z), x),
    "constant under no_grad": lambda cell, z, x: without(cell, torch.zeros_like(z), x),
    "checkpoint": lambda cell, z, x: checkpoint(cell, z, x, use_reentrant=False),
}


@pytest.mark.parametrize("change", ATTACHED.values(), ids=ATTACHED)
@pytest.mark.parametrize("gradient", [*USES_SLOPE, JFB()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("batch", [1, 6])
def test_no_false_alarm_of_a_hidden_z(change, gradient, batch):
    deq, calls = gdeq.DEQ(Detached(change), FEW, gradient), []
    deq.cell.register_forward_hook(lambda *_: calls.append(1))
    for x in torch.randn(2, batch, D, dtype=F64).unbind():
        calls.append(0)
        deq(x)
    assert calls.index(0, 1) - (len(calls) - calls.index(0, 1)) == 2


@pytest.mark.parametrize("gradient", [*USES_SLOPE, JFB()], ids=lambda each: type(each).__name__)
def test_a_layer_within_a_checkpoint(gradient):
    """What the first call alone checks leaves no trace in its graph."""
    x, found = torch.randn(6, D, dtype=F64, requires_grad=True), []
    deq = gdeq.DEQ(Cell(D), FEW, gradient)
    for _ in range(2):
        z = checkpoint(deq, x, use_reentrant=False)
        found.append(torch.autograd.grad(z.square().sum(), x))
    assert_same(*found)


def test_a_cell_that_leaves_autograd_off():
    deq = gdeq.DEQ(Detached(lambda cell, z, x: (torch.set_grad_enabled(False), cell(z, x))[1]), FEW)
    with torch.enable_grad(), pytest.warns(gdeq.DetachedCellWarning):
        deq(torch.randn(6, D, dtype=F64))


def test_the_mode_of_a_module_that_a_function_uses():
    linear = nn.Sequential(nn.Linear(D, D, dtype=F64), nn.Dropout(0.5))
    deq = gdeq.DEQ(lambda z, x: torch.tanh(0.3 * linear(z) + x), FEW)
    model, x = nn.ModuleList([linear, deq]).eval(), torch.randn(6, D, dtype=F64)
    deq(x)  # it holds still now
    model.train()
    with pytest.warns(UnsteadyCellWarning, match="It draws|Dropout"):
        deq(x)


def quiet_cases():
    x = torch.randn(5, 4, dtype=F64)
    weight = 0.2 * torch.randn(4, 4, dtype=F64)
    dropped = nn.Sequential(nn.Linear(4, 4, dtype=F64), gdeq.VariationalDropout(0.5))
    yield "plain", lambda z, x: torch.tanh(z @ weight + x), (x,), {}
    yield "alone", lambda z, x: torch.tanh(z @ weight + x), (x[:1],), {}
    yield "empty", lambda z, x: torch.tanh(z @ weight + x), (x[:0],), {}
    yield "features first", lambda z, x: torch.tanh(z @ weight + x.T), (x.T,), {"z0": x}
    yield "closed over", lambda z: torch.tanh(z @ weight + x), (), {"z0": x}
    yield "named", lambda z, x, scale: torch.tanh(scale * z @ weight + x), (x,), {"scale": 0.5}
    yield "constant", lambda z, x: x, (x,), {}
    yield "zero", lambda z, x: 0.5 * z, (x,), {}
    yield "diverges", lambda z, x: 3 * z + x, (x,), {}
    yield "same samples", lambda z, x: torch.tanh(z @ weight + x), (x[:1].expand(5, 4),), {}
    yield "dropout", lambda z, x: torch.tanh(0.5 * dropped(z) + x), (x,), {}
    yield "two tensors", lambda z, x: (0.3 * z[1] + x[0], 0.3 * z[0] + x[1]), ((x, x + 1),), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = weight.to(dtype)
        yield str(dtype), lambda z, x, w=low: torch.tanh(z @ w + x), (x.to(dtype),), {}


QUIET = {name: case for name, *case in quiet_cases()}


@pytest.mark.parametrize(("cell", "inputs", "options"), QUIET.values(), ids=QUIET)
def test_no_false_alarm(cell, inputs, options):
    gdeq.DEQ(cell, FEW)(*inputs, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_no_false_alarm_for_large_cells(dtype):
    torch.manual_seed(1)
    cell = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    x = torch.randn(3, 7, 32)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        gdeq.DEQ(lambda z, x: 0.1 * cell(z) + x, FEW)(x)


@every_gradient
def test_the_checks_change_nothing(device, gradient, monkeypatch):
    """Not a number that is drawn, a buffer, a gradient, nor what later steps make of them."""

    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = (
                gdeq.spectral_norm(nn.Linear(4, 4)),
                gdeq.VariationalDropout(0.3),
            )
            self.norm = nn.BatchNorm1d(4)

        def forward(self, z, x):
            return torch.tanh(0.5 * self.drop(self.inner(z)) + self.norm(x)) * random.random()

    def train(checks):
        if not checks:
            monkeypatch.setattr(gdeq.layer, "unsteady_parts", lambda cell: [])
            monkeypatch.setattr(gdeq.layer, "examine", lambda *_: None)
        torch.manual_seed(3)
        random.seed(3)
        deq = gdeq.DEQ(Everything().to(device), FEW, gradient)
        for _ in range(3):
            z = deq(torch.randn(6, 4, device=device))
            z.square().sum().backward()
        state = [torch.rand(1, device=device), torch.rand(1), torch.tensor(random.random())]
        return [z.detach(), *(p.grad for p in deq.parameters()), *deq.buffers(), *state]

    monkeypatch.setattr(gdeq.layer, "unsteady_parts", lambda cell: [])
    with pytest.warns(UnsteadyCellWarning):
        told = train(checks=True)
    assert_same(told, train(checks=False))


def test_nothing_is_looked_at_that_has_no_values():
    x, seen = torch.randn(3, 4, dtype=F64), []
    assert values_are_there([x])
    assert not values_are_there([x.to("meta")])
    torch.func.grad(lambda x: (seen.append(values_are_there([x])), x.sum())[1])(x)
    torch.compile(lambda x: (seen.append(values_are_there([x])), x + 1)[1], backend="eager")(x)
    assert seen == [False, False]


def test_nothing_is_checked_in_a_step_that_is_captured():
    deq, x, calls = gdeq.DEQ(Cell(D), FEW), torch.randn(6, D, dtype=F64), []
    deq.cell.register_forward_hook(lambda *_: calls.append(1))
    with blind():  # on a CPU, what a capture is on a GPU
        deq(x)
    assert len(calls) == deq.solution.evals + 1
    deq(x)
    assert len(calls) == 2 * (deq.solution.evals + 1) + 2  # now it has values


# --- samples that fail ----------------------------------------------------------------------------


def test_most_samples_failing_is_told_once():
    x = torch.randn(6, 4, dtype=F64)
    deq = gdeq.DEQ(lambda z, x: 3 * z + x, Broyden(max_iter=1, tol=1e-9))
    for _ in range(11):
        deq(x)
    with pytest.warns(ConvergenceWarning, match=r"0 of 6 did.*diverged: .*line_search=3"):
        deq(x)
    for _ in range(24):
        deq(x)
    cases = [(1, 0.0, True), (20, 1e-6, True), (1, 1e-9, False)]  # fixed, enough, switched off
    for steps, tol, warns in cases:
        fine = gdeq.DEQ(lambda z, x: 0.5 * torch.sin(z) + x, Broyden(steps, tol))
        fine.warns = warns
        for _ in range(24):
            fine(x)


def test_a_first_call_of_nothing_but_nan_does_not_stand_for_all():
    deq, x = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z.mean(0) + x), FEW), torch.randn(6, 4)
    with pytest.warns(ConvergenceWarning, match="6 of 6 samples of this layer failed"):
        deq(torch.nan * x)
    with pytest.warns(CoupledSamplesWarning):
        deq(x)
    deq(x)


@pytest.mark.parametrize("tol", [1e-3, 0.0])
def test_a_start_where_f_is_not_a_number_is_told_at_once(tol):
    x = torch.randn(6, 4, dtype=F64)
    x[1] = torch.nan
    cells = {lambda z, x: torch.tanh(0.5 * z + x): 1, lambda z, x: z.log() + x: 6}
    for cell, lost in cells.items():
        deq = gdeq.DEQ(cell, Broyden(max_iter=5, tol=tol))
        deq.warns = False
        deq(x)
        deq.warns = True
        with pytest.warns(ConvergenceWarning) as told:
            z = deq(x)
        (only,) = told
        assert str(only.message).startswith(f"{lost} of 6 samples of this layer failed: f ret")
        assert z[1].eq(0).all()
        deq(x)  # told before


def test_training_that_fails_is_told_between_calls_that_converge():
    class OnlyInTraining(nn.Module):
        def forward(self, z, x):
            return (3 if self.training else 1e-6) * z + x

    deq, x = gdeq.DEQ(OnlyInTraining(), Broyden(1, 1e-3)), torch.randn(6, 4, dtype=F64)
    for _ in range(11):
        deq.train()(x)
        deq.eval()(x)
    with pytest.warns(ConvergenceWarning, match=r"last 12 calls in training mode: 0 of 6"):
        deq.train()(x)


class OnDevice:
    """The codes of a solve, of which nothing is known without waiting for them."""

    device = torch.device("cuda")

    def __init__(self, code):
        self.codes, self.waits = torch.full((6,), code), 0

    def __len__(self):
        return len(self.codes)

    def cpu(self):
        self.waits += 1
        return self.codes


@pytest.mark.filterwarnings("ignore::gdeq.ConvergenceWarning")
@pytest.mark.parametrize(
    ("code", "tol", "looks"),
    [
        (Status.CONVERGED, 1e-3, [1, 4, 8, 12, 16, 20]),
        (Status.MAX_STEPS, 1e-3, [1, 4, 8, 12, 16, 20]),  # a later call may start at no number
        (Status.NONFINITE_START, 1e-3, [1, 4, 8, 12]),  # then all is told
        (Status.FIXED_STEPS, 0.0, [1]),
    ],
)
def test_a_layer_waits_for_its_device_once_in_four_calls(code, tol, looks):
    deq, waits = gdeq.DEQ(Cell(D)), []
    for call in range(1, 21):
        codes = OnDevice(code)
        deq._look_at_convergence(SimpleNamespace(codes=codes), Broyden(tol=tol))
        waits += [call] * codes.waits
    assert waits == looks


def test_a_summary_for_loggers(device):
    deq = gdeq.DEQ(Cell().to(device), Broyden(max_iter=2, tol=1e-3))
    z = deq(data(device, 6, 4))
    found = deq.solution.summary()
    assert all(type(number) is float for number in found.values())
    assert found["converged"] == deq.solution.converged.double().mean().item()
    assert found["largest_residual"] == deq.solution.residual.max().item()
    assert "backward_vjps" not in found
    z.sum().backward()
    assert deq.solution.summary()["backward_vjps"] == 1
    assert deq.solution.summary()["backward_error"] > 0
    deq(data(device, 0, 4))
    assert deq.solution.summary()["samples"] == 0


def test_the_default_tolerance_is_one_that_half_precision_reaches(device):
    torch.manual_seed(0)
    cell = Cell(32, dtype=torch.float32).to(device)
    x = torch.randn(64, 32, device=device)
    deq, explicit = gdeq.DEQ(cell), gdeq.DEQ(cell, Broyden(max_iter=18, tol=1e-3))
    assert deq.solver == explicit.solver

    def share(layer):
        layer(x)
        return layer.solution.converged.double().mean().item()

    assert share(deq) == share(explicit) == 1
    assert torch.equal(deq.solution.residual, explicit.solution.residual)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert share(deq) == 1
        assert share(explicit) < 0.9  # what a user asks for stays
        deq.solver = Broyden(max_iter=18, tol=1e-3)
        assert share(deq) < 0.9
