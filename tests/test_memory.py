"""Training memory: what is alive does not grow with ``max_iter`` beyond the stored updates."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gdeq
from cells import assert_same
from engines import using

BATCH, D = 2, 128
STATE = BATCH * D * 8  # bytes of one float64 state
GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "Implicit": gdeq.Implicit(gdeq.Broyden(max_iter=8, tol=0.0)),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(steps=3),
}
FEW = gdeq.Broyden(max_iter=6, tol=0.0)
every_gradient = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)


class Live(TorchDispatchMode):
    """Follows the storages that operations make: bytes alive, at most and now.

    Only those of at least a state's size: the residuals of each step are a few bytes a sample.
    Weights and inputs, of which operations make views, are not counted.
    """

    def __init__(self, *given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage.nbytes() >= STATE and storage.data_ptr() not in self.given:
                self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
                self.peak = max(self.peak, self.now())
        return out

    def now(self):
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        return sum(size for _, size in self.alive.values())


class Cell(nn.Module):
    """Hidden activations three times as wide as the state."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 3 * D, dtype=torch.float64)
        self.down = nn.Linear(3 * D, D, dtype=torch.float64)
        with torch.no_grad():
            for layer in (self.up, self.down):
                layer.weight *= 0.95 / torch.linalg.matrix_norm(layer.weight, 2)

    def forward(self, z, x):
        return torch.tanh(self.down(torch.tanh(self.up(z))) + x)


def measure(device, solver, gradient):
    """Bytes alive over one training step: (peak forward, between, peak backward)."""
    torch.manual_seed(0)
    cell = Cell().to(device)
    x = torch.randn(BATCH, D, dtype=torch.float64, device=device)
    live = Live(*cell.parameters(), x)
    with live:
        found = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), solver, gradient)
        forward, between = live.peak, live.now()
        live.peak = 0
        found.z.sum().backward()
    assert cell.up.weight.grad.abs().sum() > 0
    assert found.evals >= solver.max_iter
    return forward, between, live.peak


def test_the_measure_sees_activations(device):
    # Unrolling keeps every step's activations: the measure must grow with the steps.
    few = measure(device, gdeq.Picard(max_iter=2, tol=0.0), gdeq.Unrolled(steps=5))
    many = measure(device, gdeq.Picard(max_iter=2, tol=0.0), gdeq.Unrolled(steps=25))
    assert many[1] - few[1] >= 20 * 4 * STATE


# Picard with so much damping that it is still under way at the end.
PICARD = [gdeq.Picard(max_iter=n, damping=0.2) for n in (4, 24)]
ANDERSON = [gdeq.Anderson(max_iter=n, memory=4) for n in (6, 16)]
FLAT = [(PICARD, name) for name in GRADIENTS if not name.startswith("GDEQ")]


@pytest.mark.parametrize(("pair", "name"), [*FLAT, (ANDERSON, "Implicit")])
@pytest.mark.parametrize("tol", [0.0, 1e-300], ids=["fixed", "watched"])
def test_solvers_are_flat_in_max_iter(device, pair, name, tol):
    with using("reference"):  # `gdeq.fast.product` keeps all steps of Anderson's
        few, many = (measure(device, replace(s, tol=tol), GRADIENTS[name]) for s in pair)
    assert few == many


@every_gradient
def test_broyden_is_flat_beyond_its_memory(device, gradient):
    solver = [gdeq.Broyden(max_iter=n, tol=0.0, memory=4) for n in (16, 28)]
    few, many = (measure(device, s, gradient) for s in solver)
    # Within a step the temporaries differ by a state or two, according to who skips an update.
    assert many[0] - few[0] <= 3 * STATE
    assert few[1:] == many[1:]


@every_gradient
def test_broyden_grows_by_its_updates_alone(device, gradient):
    solver = [gdeq.Broyden(max_iter=n, tol=0.0) for n in (6, 14)]
    with using("reference"):  # the fast engine keeps one vector a step, not two
        few, many = (measure(device, s, gradient) for s in solver)
    # u and v of each of the eight more steps, and their secants
    stored = 8 * 2 * STATE + (8 * 2 * STATE if gradient.needs.secants else 0)
    for a, b in zip(few, many, strict=True):
        assert b - a <= stored
    # Unrolled steps leave the iterate that the inverse belongs to, so it is not kept.
    kept = 0 if isinstance(gradient, gdeq.Unrolled) else stored
    assert many[1] - few[1] == kept


def test_broyden_store_grows_with_the_steps_taken_not_with_max_iter(device):
    # With a tolerance that is met early, a generous max_iter costs nothing.
    torch.manual_seed(0)
    cell = Cell().to(device)
    x = torch.randn(BATCH, D, dtype=torch.float64, device=device)
    peaks = []
    for max_iter in (50, 5000):
        live = Live(*cell.parameters(), x)
        with using("reference"), live, torch.no_grad():
            found = gdeq.solve(
                lambda z: cell(z, x), torch.zeros_like(x), gdeq.Broyden(max_iter, tol=1e-6)
            )
        assert found.converged.all()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


@every_gradient
def test_memory_between_forward_and_backward_is_one_evaluation(device, gradient):
    _, between, _ = measure(device, gdeq.Broyden(max_iter=10, tol=0.0, memory=3), gradient)
    evaluations = {"Implicit": 2, "Unrolled": 3}.get(type(gradient).__name__, 1)
    updates = 2 * 3 * STATE + (2 * 11 * STATE if gradient.needs.secants else 0)
    # An evaluation keeps its input, the hidden tensor of width 3d and its output; beside these
    # there is the result itself.
    kept = evaluations * (1 + 3 + 1) * STATE + STATE
    assert updates + 4 * STATE <= between <= updates + kept


@every_gradient
def test_a_pass_for_some_gradients_alone_leaves_nothing_behind(device, gradient):
    """It never comes to z, where what was kept to measure the residual would be used."""
    cell, x = Cell().to(device), torch.randn(BATCH, D, dtype=torch.float64, device=device)
    with Live(*cell.parameters(), x) as live:
        z = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), FEW, gradient).z
        before = live.now()
        torch.autograd.grad(z.sum(), cell.down.bias, retain_graph=True)
        assert live.now() == before


class Recomputed(Cell):
    def forward(self, z, x):
        return checkpoint(super().forward, z, x, use_reentrant=False)


@pytest.mark.parametrize("how", ["recomputed", "offloaded"])
def test_other_ways_to_save_memory_change_no_gradient(device, how):
    """Activations that are recomputed in the backward pass, and saved tensors that are copies."""
    found, x = [], torch.randn(BATCH, D, dtype=torch.float64, device=device)
    for saves in (False, True):
        torch.manual_seed(0)
        cell = Recomputed() if saves and how == "recomputed" else Cell()
        deq = gdeq.DEQ(cell.to(device), gradient=gdeq.GDEQ(refine=2))
        offloads = saves and how == "offloaded"
        with torch.autograd.graph.save_on_cpu() if offloads else contextlib.nullcontext():
            loss = deq(x).sum()
        loss.backward()
        found.append([p.grad for p in deq.parameters()])
    assert_same(*found, rtol=1e-12, atol=1e-13)
