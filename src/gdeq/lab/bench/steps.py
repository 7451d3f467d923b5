"""Training steps to be timed: forward, loss, backward and optimiser, data on the device.

A fixed number of Broyden steps, none stopping early (tol=0), makes a fair comparison.  Ours is run
as `gdeq train` runs its steps: on a GPU with fused kernels and all in one CUDA graph.  torchdeq
gets the same modules as f, and is run as shipped, in eager PyTorch: what its user has.  Neither has
dropout, both have group norm throughout and SGD.  (The presets of `gdeq train` have batch norm in
stem and head, dropout and Muon.)
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gdeq import JFB, CaptureWarning, Gradient, capture, hold
from gdeq.fast.kernels.compiling import compile_ahead
from gdeq.lab.bench.subjects import Setup, build, loss_of
from gdeq.lab.training import precision
from gdeq.lab.training.timing import in_turns

Step = Callable[[Tensor, Tensor], Tensor]
PEERS: dict[str, dict[str, Any]] = {
    "implicit": {"ift": True},
    "implicit by a hook": {"hook_ift": True},  # an evaluation of f less
    "jfb": {"grad": 1},
}


def arithmetic(setup: Setup, name: str) -> AbstractContextManager[None]:
    """float32, tf32 or bf16 for what is computed inside."""
    return precision.arithmetic(name, "cuda" if setup.cuda else "cpu")


def _optimizer(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(0.01, device=setup.device) if setup.cuda else 0.01
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=setup.cuda or None)


def ours(setup: Setup, gradient: Gradient) -> Step:
    model = build(setup, gradient)
    optimizer = _optimizer(setup, model)

    def passes(x: Tensor, y: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        with arithmetic(setup, setup.precision):
            loss = loss_of(setup, model(x), y)
        loss.backward()
        return loss.detach()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = passes(x, y)
        optimizer.step()
        return loss

    if not setup.cuda:
        return step
    compile_ahead(lambda: passes(*setup.draw()), model)
    return capture(step)


def torchdeq_is_there() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


def torchdeq_engine(forward: int, backward: int, **settings: Any) -> Any:
    """Torchdeq's solver and backward pass, with so many steps of Broyden's method each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its escape sequences, when it is first compiled
        import torchdeq  # noqa: PLC0415 (optional)

    given = {"solver": "broyden", "tol": 0.0, "stop_mode": "rel"}
    both = {f"{side}_{name}": value for side in "fb" for name, value in given.items()}
    steps = {"f_max_iter": forward, "b_max_iter": backward}
    return torchdeq.get_deq(core="sliced", **both, **steps, **settings).train()


def theirs(setup: Setup, kind: str, **settings: Any) -> Step:
    # Plain modules: what a user of torchdeq has.
    model = build(setup, JFB(), fused=False)
    engine = torchdeq_engine(setup.forward, setup.backward, **settings)
    optimizer = _optimizer(setup, model)
    cell = model.deq.cell

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(setup, kind), hold(cell):
            found = solved(engine, cell, model.stem(x))
            loss = loss_of(setup, model.head(found), y)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def solved(engine: Any, cell: Any, injection: Tensor) -> Any:
    """The equilibrium by torchdeq, of a state that is a tensor or several."""
    if not hasattr(cell, "initial_state"):
        (z,), _ = engine(lambda z: cell(z, injection), torch.zeros_like(injection))
        return z
    found, _ = engine(lambda *z: cell(z, injection), cell.initial_state(injection))
    return found[-1]


def milliseconds(setup: Setup, work: Callable[[], Any], rounds: int, warm: int = 4) -> list[float]:
    """Of each call, one after another as in a training, where no step waits for the host."""
    for _ in range(warm):
        work()
    if setup.cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(events)]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def measure(setup: Setup, name: str, make: Callable[[], Step]) -> tuple[dict[str, Any], Step]:
    """Median time of a step, and what it needs of the GPU's memory from nothing on."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    batch = setup.draw()
    step = make()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CaptureWarning)
        step(*batch)
        # After the first step, in which cuDNN tries what each algorithm needs.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times = milliseconds(setup, lambda: step(*batch), setup.rounds)
    row = _row(name, times, step(*batch))
    row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    row["graph"] = getattr(step, "graph", None) is not None
    return row, step


def measure_in_turns(setup: Setup, makes: dict[str, Callable[[], Step]]) -> list[dict[str, Any]]:
    """On a CPU: what else the machine does then falls on all of them alike."""
    batch = setup.draw()
    steps: dict[str, Callable[[], Any]] = {n: partial(make(), *batch) for n, make in makes.items()}
    times, _ = in_turns(steps, setup.rounds)
    return [_row(name, spent, steps[name]()) for name, spent in times.items()]


def _row(name: str, times: list[float], loss: Tensor) -> dict[str, Any]:
    found = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return {"name": name, **found, "peak_gib": None, "loss": loss.item(), "graph": False}


def in_graph(setup: Setup, work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call of ``work``, from a graph that holds ``repeats`` of them."""
    if not setup.cuda:
        return statistics.median(milliseconds(setup, work, setup.rounds, warm=1))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            work()
    return statistics.median(milliseconds(setup, graph.replay, setup.rounds)) / repeats


def cell_times(setup: Setup) -> dict[str, float]:
    """Of one evaluation of f without autograd, and of one VJP, as the step runs them."""
    model = build(setup, JFB())
    cell = model.deq.cell
    x, _ = setup.draw()
    found: dict[str, float] = {}
    with arithmetic(setup, setup.precision), hold(cell):
        torch.clear_autocast_cache()
        with torch.no_grad():
            model(x)
            z = model.deq.solution.z  # in the precision of the step
            injection = model.stem(x)
            if setup.cell == "mdeq":
                nhwc = torch.channels_last
                z = tuple(part.contiguous(memory_format=nhwc) for part in z)
                injection = injection.to(z[0].dtype, memory_format=nhwc)
            found["f"] = in_graph(setup, lambda: cell(z, injection), 10)
        torch.clear_autocast_cache()

        def with_products(count: int) -> Callable[[], None]:
            def work() -> None:
                start = tree_map(lambda part: part.detach().requires_grad_(), z)
                out, starts = tree_leaves(cell(start, injection)), tree_leaves(start)
                for _ in range(count):
                    torch.autograd.grad(out, starts, out, retain_graph=True)

            return work

        few, many = (in_graph(setup, with_products(n), 1) for n in (1, 6))
        found["vjp"] = (many - few) / 5
    return found
