"""Training steps to be timed: forward, loss, backward and optimiser, data on the device.

A fixed number of Broyden steps, none stopping early (tol=0), makes a fair comparison.  Ours is run
as `gdeq train` runs its steps: on a GPU with fused kernels and all in one CUDA graph.  torchdeq
gets the same modules as f, and is run as shipped, in eager PyTorch: what its user has.  Neither has
dropout, both have group norm throughout and SGD.  (The presets of `gdeq train` have batch norm in
stem and head, dropout and Muon.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdeq.fast.capture import CaptureWarning, capture
from gdeq.fast.kernels.loss import cross_entropy
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit
from gdeq.models.mdeq import MDEQ, mdeq
from gdeq.regularize import hold
from gdeq.solvers.broyden import Broyden

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[Tensor, Tensor], Tensor]
PEERS: dict[str, dict[str, Any]] = {
    "implicit": {"ift": True},
    "implicit by a hook": {"hook_ift": True},  # an evaluation of f less
    "jfb": {"grad": 1},
}


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    size: str = "large"
    batch: int = 128
    side: int = 32  # of the images
    forward: int = 18  # Broyden steps
    backward: int = 20  # of Implicit
    memory: int | None = None  # updates that Broyden's method keeps; None: all
    step_bits: int = 8  # of a step in half precision, as in `gdeq train`
    precision: str = "bf16"  # of ours: float32, tf32, bf16
    rounds: int = 20
    device: str = "cuda"

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def gradients(self) -> dict[str, Gradient]:
        solver = Broyden(self.backward, tol=0.0)
        return {
            "gdeq": GDEQ(),
            "gdeq refine 1": GDEQ(refine=1),
            "jfb": JFB(),
            "npg": NPG(steps=5, damping=0.5),
            "implicit": Implicit(solver, double_backward=False),
        }

    def draw(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        images = torch.randn(self.batch, 3, self.side, self.side, device=self.device)
        labels = torch.randint(0, 10, (self.batch,), device=self.device)
        return images.to(memory_format=torch.channels_last), labels


def default_setup(device: str = "auto") -> Setup:
    """The paper's model on a GPU; on a CPU one that takes seconds."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return Setup(device=device)
    return Setup(size="small", batch=64, side=8, precision="float32", rounds=10, device=device)


@contextlib.contextmanager
def arithmetic(setup: Setup, name: str) -> Iterator[None]:
    """float32, tf32, bf16 or fp16 for what is computed inside."""
    tf32 = name != "float32"
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = tf32
    kind = "cuda" if setup.cuda else "cpu"
    try:
        with torch.autocast(kind, HALF.get(name, torch.bfloat16), enabled=name in HALF):
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


def build(setup: Setup, gradient: Gradient, fused: bool | str = "auto") -> MDEQ:
    torch.manual_seed(0)
    solver = Broyden(
        setup.forward,
        tol=0.0,
        memory=setup.memory,
        step_bits=setup.step_bits,
        stop="whole",  # as in `gdeq train`
    )
    kind: dict[str, Any] = {"dropout": 0.0, "outer_norm": "group", "fused": fused}
    model = mdeq(setup.size, solver=solver, gradient=gradient, **kind).to(setup.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _optimizer(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(0.01, device=setup.device) if setup.cuda else 0.01
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=setup.cuda or None)


def ours(setup: Setup, gradient: Gradient, precision: str | None = None) -> Step:
    model = build(setup, gradient)
    optimizer = _optimizer(setup, model)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(setup, precision or setup.precision):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return capture(step) if setup.cuda else step


def torchdeq_is_there() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


def theirs(setup: Setup, precision: str, **settings: Any) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its escape sequences, when it is first compiled
        import torchdeq  # noqa: PLC0415 (optional)

    # Plain modules: what a user of torchdeq has.
    model = build(setup, JFB(), fused=False)
    engine = torchdeq.get_deq(
        core="sliced",
        f_solver="broyden",
        b_solver="broyden",
        f_max_iter=setup.forward,
        b_max_iter=setup.backward,
        f_tol=0.0,
        b_tol=0.0,
        f_stop_mode="rel",
        b_stop_mode="rel",
        **settings,
    )
    engine.train()
    optimizer = _optimizer(setup, model)
    cell: Any = model.deq.cell

    def step(images: Tensor, labels: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(setup, precision), hold(cell):
            injection = model.stem(images)
            found, _ = engine(lambda *z: cell(z, injection), cell.initial_state(injection))
            loss = functional.cross_entropy(model.head(found[-1]).float(), labels)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


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


def measure(
    setup: Setup, name: str, make: Callable[[], Step], rounds: int | None = None
) -> dict[str, Any]:
    """Median time of a step, and what it needs of the device's memory from nothing on."""
    gc.collect()
    before = 0
    if setup.cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    batch = setup.draw()
    step = make()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CaptureWarning)
        step(*batch)
        if setup.cuda:  # after the first step, in which cuDNN tries what each algorithm needs
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = milliseconds(setup, lambda: step(*batch), rounds or setup.rounds)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if setup.cuda else None
    return {
        "name": name,
        "ms": statistics.median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "peak_gib": peak,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if setup.cuda else None,
        "loss": step(*batch).item(),
        "graph": getattr(step, "graph", None) is not None,
    }


def measure_in_turns(setup: Setup, makes: dict[str, Callable[[], Step]]) -> list[dict[str, Any]]:
    """On a CPU: what else the machine does then falls on all of them alike."""
    batch = setup.draw()
    steps = {name: make() for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(setup.rounds + 1):  # the first warms up
        for name, step in steps.items():
            spent = milliseconds(setup, partial(step, *batch), 1, warm=0)
            times[name] += spent if turn else []
    return [
        {
            "name": name,
            "ms": statistics.median(spent),
            "ms_min": min(spent),
            "ms_max": max(spent),
            "peak_gib": None,
            "loss": steps[name](*batch).item(),
            "graph": False,
        }
        for name, spent in times.items()
    ]


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


def cell_times(setup: Setup, vjp: bool = True) -> dict[str, float]:
    """Of one evaluation of f without autograd, and of one VJP, as the step runs them."""
    model = build(setup, JFB())
    cell: Any = model.deq.cell
    images, _ = setup.draw()
    found: dict[str, float] = {}
    with arithmetic(setup, setup.precision), hold(cell):
        torch.clear_autocast_cache()
        with torch.no_grad():
            injection = model.stem(images)
            z = model.deq(injection)
            z = tuple(part.contiguous(memory_format=torch.channels_last) for part in z)
            found["f"] = in_graph(setup, lambda: cell(z, injection), 10)
        torch.clear_autocast_cache()
        if not vjp:
            return found

        def with_products(count: int) -> Callable[[], None]:
            def work() -> None:
                start = tuple(part.detach().requires_grad_() for part in z)
                out = cell(start, injection)
                for _ in range(count):
                    torch.autograd.grad(out, start, out, retain_graph=True)

            return work

        few, many = (in_graph(setup, with_products(n), 1) for n in (1, 6))
        found["vjp"] = (many - few) / 5
    return found
