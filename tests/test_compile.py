"""`torch.compile` on the cell and on a model with a DEQ inside gives what eager gives."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import gdeq
from gdeq.context import eager

GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-3),
    "Implicit": gdeq.Implicit(),
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(max_iter=10, tol=1e-6), precondition=True),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(steps=3),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Cell(nn.Module):
    def __init__(self, d=4, dropout=0.0, normalised=False):
        super().__init__()
        self.inner = nn.Linear(d, d)
        self.drop = gdeq.VariationalDropout(dropout)
        with torch.no_grad():
            self.inner.weight *= 0.6 / torch.linalg.matrix_norm(self.inner.weight, 2)
        if normalised:
            gdeq.weight_norm(self.inner)

    def forward(self, z, x):
        # Products of saved tensors: what an optimising backend likes to reuse in place.
        return self.drop(torch.tanh(self.inner(z) + x) * torch.sigmoid(x))


class Model(nn.Module):
    def __init__(self, gradient, **kwargs):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        # A fixed number of steps, and few: rounding must decide neither how many there are nor
        # what the last updates of the inverse are.
        self.deq = gdeq.DEQ(Cell(**kwargs), gdeq.Broyden(max_iter=5, tol=0.0), gradient)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.deq(torch.sin(self.encoder(x)))))


def compiled(model, what, backend="aot_eager"):
    """A copy with compiled parts, the thing to call, and the counter of compiled graphs."""
    model = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    call = model
    if what in ("cell", "both"):
        model.deq.cell = torch.compile(model.deq.cell, backend=counter, fullgraph=True)
    if what == "cell in place":
        names = set(model.state_dict())
        model.deq.cell.compile(backend=counter, fullgraph=True)
        assert set(model.state_dict()) == names
    if what in ("model", "both"):
        call = torch.compile(model, backend=counter)
    return model, call, counter


def assert_same_step(eager, model, call, x, seed=0, rtol=1e-3, atol=1e-5):
    """One training step each, same random numbers; returns the outputs."""
    outputs = []
    for module, run in ((eager, eager), (model, call)):
        module.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        outputs.append(run(x))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert p.grad.abs().sum() > 0
        torch.testing.assert_close(q.grad, p.grad, rtol=rtol, atol=atol)
    return outputs[1].detach()


@pytest.mark.parametrize("what", ["cell", "cell in place", "model"])
def test_same_as_eager(device, what):
    eager = Model(gdeq.GDEQ()).to(device)
    model, call, counter = compiled(eager, what)
    x = torch.randn(5, 3, device=device)
    for gradient in GRADIENTS.values():
        eager.deq.gradient = model.deq.gradient = gradient
        assert_same_step(eager, model, call, x)
        assert counter.frame_count > 0
        graphs = counter.frame_count
        assert_same_step(eager, model, call, x + 1)
        assert counter.frame_count == graphs  # nothing is compiled again in the second step
    model.deq.gradient = gdeq.GDEQ(refine=2)
    call(x).sum().backward()
    assert model.deq.solution.steps.tolist() == [5] * 5
    assert model.deq.solution.backward.vjps == 2
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(call(x), eager(x), rtol=1e-4, atol=1e-5)


def test_same_as_eager_with_inductor(device):
    # The one backend here that fuses and reuses memory; VJPs go through its graphs repeatedly.
    eager = Model(gdeq.GDEQ()).to(device)
    model, call, counter = compiled(eager, "cell", "inductor")
    x = torch.randn(5, 3, device=device)
    for name in ("GDEQ-refine", "Implicit", "JFB"):
        eager.deq.gradient = model.deq.gradient = GRADIENTS[name]
        # Its kernels on a GPU round otherwise than the eager ones, and plain reuse shows it.
        near = {"rtol": 1e-2, "atol": 1e-3} if device.type == "cuda" else {}
        assert_same_step(eager, model, call, x, **near)
    assert counter.frame_count > 0


@pytest.mark.parametrize(
    ("what", "backend"),
    [("cell", "aot_eager"), ("cell in place", "aot_eager"), ("both", "aot_eager"),
     ("cell", "inductor")],
)  # fmt: skip
def test_dropout_and_weight_norm_hold_still_when_compiled(device, what, backend):
    """As eager on the same mask: compiled code may draw other random numbers."""
    model = Model(gdeq.Implicit(), dropout=0.5, normalised=True).to(device)
    model, call, counter = compiled(model, what, backend)
    parameters, x = list(model.parameters()), torch.randn(5, 3, device=device)

    def step(run):
        y = run(x)  # with a weight that is made once for both, so its graph must stay
        gradients = torch.autograd.grad(y.square().sum(), parameters, retain_graph=True)
        return y.detach(), gradients

    outputs = []
    for weights in ("old", "old", "new"):
        if weights == "new":
            with torch.no_grad():
                model.deq.cell.inner.parametrizations.weight.original0 *= 0.5
        with gdeq.hold(model.deq.cell):
            found, gradients = step(call)
            with eager():
                expected, exact = step(model)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for a, b in zip(gradients, exact, strict=True):
            assert b.abs().sum() > 0
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        outputs.append(found)
    assert not torch.allclose(outputs[0], outputs[1])  # a new mask in the next solve
    assert not torch.allclose(outputs[1], outputs[2])
    assert counter.frame_count > (1 if what == "both" else 0)


@pytest.mark.parametrize("what", ["cell", "model"])
def test_under_autocast(device, what):
    eager = Model(gdeq.GDEQ(refine=1)).to(device)
    model, call, counter = compiled(eager, what)
    x, losses = torch.randn(5, 3, device=device), []
    for module in (eager, call):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            losses.append(module(x).float().square().sum())
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 0.1 * p.grad.norm()
    assert counter.frame_count > 0


ALONE = """
import sys, gdeq, torch
assert "torch._dynamo" not in sys.modules, "the library loads the compiler"
w = torch.full((4, 4), 0.1, requires_grad=True)

def step(x):
    h = torch.sin(x)
    solver = gdeq.Broyden(30, 1e-6)
    z = gdeq.fixed_point(lambda z: torch.tanh(z @ w + h), torch.zeros_like(h), solver).z
    return torch.cos(z).sum()

x = torch.arange(12.0).view(3, 4)
first = sys.argv[1:] == ["compiled"]
if not first:
    (expected,) = torch.autograd.grad(step(x), w)
    assert "torch._dynamo" not in sys.modules, "a solve loads the compiler"
from torch._dynamo.testing import CompileCounterWithBackend
counter = CompileCounterWithBackend("aot_eager")
(found,) = torch.autograd.grad(torch.compile(step, backend=counter)(x), w)
if first:
    (expected,) = torch.autograd.grad(step(x), w)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
assert counter.frame_count == 2, counter.frame_count  # before and after the solve, which is not
"""


@pytest.mark.parametrize("first", ["compiled", "eager"])
def test_the_compiler_is_loaded_only_by_those_who_compile(first):
    words = [sys.executable, "-c", ALONE, first]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_what_is_around_the_layer_is_compiled(device):
    """Not the lines that keep the compiler from it, either, anew for other inputs."""
    model = Model(gdeq.GDEQ()).to(device)
    model(torch.randn(5, 3, device=device))
    torch._dynamo.utils.counters.clear()
    call = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        call(torch.randn(5, 3, device=device))
    assert torch._dynamo.utils.counters["frames"]["total"] == 2


class Mixed(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.linear, self.norm = nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, z, x):
        return self.norm(0.5 * torch.nn.functional.gelu(self.linear(z)) + x)


def test_products_through_what_was_compiled_for_one_backward_pass():
    """PyTorch lets that pass overwrite what it has saved."""

    def train(gradient):
        deq(x, gradient=gradient).square().sum().backward()

    cell, x = Mixed(), torch.randn(8, 32)
    cell.compile()
    deq = gdeq.DEQ(cell)
    train(gdeq.Unrolled(steps=3))
    with pytest.raises(RuntimeError, match="donated_buffer = False before the first call"):
        train(gdeq.GDEQ(refine=1))
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        train(gdeq.Unrolled(steps=3))
        train(gdeq.GDEQ(refine=1))
