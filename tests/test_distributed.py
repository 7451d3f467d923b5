"""`DistributedDataParallel` with two processes gives the gradients of one with the whole batch."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gdeq

F64 = torch.float64
PROCESSES = 2
# The last updates of the inverse come from steps of this length; were they much smaller, the
# rounding of f, which changes with the batch size, would be seen in the plain GDEQ gradient.
SOLVER = gdeq.Broyden(max_iter=40, tol=1e-3)
GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    # The number of VJPs then differs between the processes; none of them may wait for another.
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-8, max_refine=20),
    "Implicit": gdeq.Implicit(gdeq.Broyden(max_iter=40, tol=1e-12)),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(),
}
CASES = [(name, "once") for name in GRADIENTS] + [
    ("GDEQ-refine", "twice"),
    ("Implicit", "twice"),
    ("Implicit", "normalised"),
    ("GDEQ", "unused"),
    ("GDEQ-refine", "accumulated"),
]


class Cell(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.inner = nn.Linear(d, d, dtype=F64)
        with torch.no_grad():
            self.inner.weight *= 0.7 / torch.linalg.matrix_norm(self.inner.weight, 2)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + x)


class Model(nn.Module):
    def __init__(self, gradient, form):
        super().__init__()
        self.form = form
        self.encoder = nn.Linear(3, 4, dtype=F64)
        self.deq = gdeq.DEQ(Cell(), SOLVER, gradient)
        self.head = nn.Linear(4, 2, dtype=F64)
        if form == "normalised":
            gdeq.weight_norm(self.deq.cell.inner)
        if form == "unused":
            self.spare = nn.Linear(2, 2, dtype=F64)

    def forward(self, x):
        h, cell = self.encoder(x), self.deq.cell
        if self.form == "function":
            deq, zero = self.deq, torch.zeros_like(h)
            self.found = gdeq.fixed_point(lambda z: cell(z, h), zero, deq.solver, deq.gradient)
            return self.head(self.found.z)
        z = self.deq(h)
        if self.form == "twice":
            z = z + self.deq(z)
        return self.head(z)


def build(name, form):
    torch.manual_seed(3)
    model = Model(GRADIENTS[name], form)
    x = torch.randn(6, 3, dtype=F64)
    x[3:] = 10 * x[3:]  # tanh is flat there: the second process needs fewer steps
    return model, x, torch.randn(6, 2, dtype=F64)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_process(rank, name, form):
    """The gradients that this process ends up with, and the steps its samples took."""
    model, x, y = build(name, form)
    rows = slice(3 * rank, 3 * rank + 3)
    parallel = DistributedDataParallel(model, find_unused_parameters=form == "unused")
    if form == "accumulated":
        with parallel.no_sync():
            loss_of(parallel, x[rows], y[rows]).backward()
    loss_of(parallel, x[rows], y[rows]).backward()
    return gradients(model), model.deq.solution.steps


# --- a cell that is sharded on its own ------------------------------------------------------------

# Without a common end the processes would call f, and its VJPs, a different number of times.
SHARDED = {
    "tolerance": (SOLVER, gdeq.GDEQ(refine=1)),
    "Implicit": (SOLVER, gdeq.Implicit(gdeq.Broyden(max_iter=40, tol=1e-12))),
    "GMRES": (gdeq.Anderson(max_iter=40, tol=1e-9), gdeq.Implicit(double_backward=False)),
    "GDEQ-tolerance": (SOLVER, gdeq.GDEQ(tolerance=1e-8, max_refine=20)),
    "line search": (gdeq.Broyden(max_iter=40, tol=1e-3, line_search=2), gdeq.JFB()),
    "function": (SOLVER, gdeq.Implicit(gdeq.Broyden(max_iter=40, tol=1e-12))),
}


def build_sharded(name):
    model, x, y = build("GDEQ", "function" if name == "function" else "once")
    model.deq.solver, model.deq.gradient = SHARDED[name]
    x[3:] = 10 * x[3:]  # all samples of the second process are done before the first's
    return model, x, y


def sharded(rank, name):
    """Gradients and steps of one process whose cell is sharded by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (only in the processes)

    model, x, y = build_sharded(name)
    # A root keeps its weights after its first call; what is inside a sharded model does not.
    fully_shard(model.deq.cell, reshard_after_forward=True)
    rows = slice(3 * rank, 3 * rank + 3)
    for _ in range(2):  # the gradients of the second are those that count
        model.zero_grad()
        loss_of(model, x[rows], y[rows]).backward()
    found = {key: g.full_tensor() for key, g in gradients(model).items() if "cell" in key}
    return found, (model.deq.solution or model.found).steps


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {case: one_process(rank, *case) for case in CASES}
    found |= {("sharded", name): sharded(rank, name) for name in SHARDED}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # no one leaves while another still talks
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found: one start for all cases, since that is what takes long."""
    folder = tmp_path_factory.mktemp("ddp")
    started = mp.spawn(work, args=(str(folder),), nprocs=PROCESSES, join=False, daemon=True)
    deadline = time.monotonic() + 200
    while not started.join(timeout=1):  # a process that never ends must not take pytest with it
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            pytest.fail("the processes did not end")
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no distributed")
@pytest.mark.parametrize(("name", "form"), CASES)
def test_two_processes_give_the_gradients_of_one(results, name, form):
    model, x, y = build(name, form)
    loss_of(model, x, y).backward()
    if form == "accumulated":
        loss_of(model, x, y).backward()
    expected = gradients(model)
    assert "deq.cell.inner.bias" in expected
    for rank in range(PROCESSES):
        found, _ = results[rank][name, form]
        for key, gradient in expected.items():
            assert gradient.abs().sum() > 0
            torch.testing.assert_close(found[key], gradient, rtol=1e-10, atol=1e-12)
        for key in found.keys() - expected.keys():
            assert form == "unused"
            assert (found[key] == 0).all()


@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no distributed")
def test_the_processes_did_different_work(results):
    first, second = (results[rank]["GDEQ", "once"][1] for rank in range(PROCESSES))
    assert first.sum() > second.sum()


@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no distributed")
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_cell_ends_its_solves_together(results, name):
    model, x, y = build_sharded(name)
    loss_of(model, x, y).backward()
    for rank in range(PROCESSES):
        found, _ = results[rank]["sharded", name]
        assert len(found) == 2
        for key, gradient in found.items():
            expected = gradients(model)[key]
            torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)
    first, second = (results[rank]["sharded", name][1] for rank in range(PROCESSES))
    assert first.max() > second.max()  # alone it would have called f less often
