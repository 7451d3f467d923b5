"""One training step of MDEQ on a GPU: ours beside torchdeq as shipped, in one process.

Forward, loss, backward and optimiser step; data already on the device; 18 Broyden steps forward
and, for Implicit, 20 backward, none of them stopping early (tol=0).  Ours is what `gdeq train`
runs: f with fused kernels in bf16, steps of the solver in Triton, the whole step in one CUDA
graph.  torchdeq gets the same modules as f, its own solver, autograd and eager PyTorch, in the
precision in which it is fastest.

    PYTHONPATH=src python3 benchmarks/step.py --out results/bench
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gdeq
from gdeq.models.mdeq import MDEQ, mdeq

Step = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def arithmetic(name: str) -> Iterator[None]:
    """float32, tf32 or bf16 for what is computed inside."""
    high = name != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = high
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(kind, torch.bfloat16, enabled=name == "bf16"):
        yield


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    rate = torch.tensor(0.01, device=device) if cuda else 0.01
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=cuda or None)


def build(options: argparse.Namespace, gradient: gdeq.Gradient, fused: bool | str = "auto") -> MDEQ:
    torch.manual_seed(0)
    solver = gdeq.Broyden(options.forward, tol=0.0)
    kind = {"dropout": 0.0, "outer_norm": "group", "fused": fused}
    model = mdeq(options.size, solver=solver, gradient=gradient, **kind)
    return model.to(options.device).to(memory_format=torch.channels_last)


def ours(options: argparse.Namespace, gradient: gdeq.Gradient, precision: str) -> tuple[Step, MDEQ]:
    model = build(options, gradient)
    optimizer = optimizer_of(model)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(precision):
            loss = cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return gdeq.capture(step), model


def theirs(options: argparse.Namespace, precision: str, **settings: Any) -> tuple[Step, MDEQ]:
    import torchdeq  # noqa: PLC0415 (optional)

    # Plain modules: what a user of torchdeq has.
    model = build(options, gdeq.JFB(), fused=False)
    engine = torchdeq.get_deq(
        core="sliced",
        f_solver="broyden",
        b_solver="broyden",
        f_max_iter=options.forward,
        b_max_iter=options.backward,
        f_tol=0.0,
        b_tol=0.0,
        f_stop_mode="rel",
        b_stop_mode="rel",
        **settings,
    )
    engine.train()
    optimizer = optimizer_of(model)
    cell = model.deq.cell

    def step(images: Tensor, labels: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        with arithmetic(precision), gdeq.hold(cell):
            injection = model.stem(images)
            start = cell.initial_state(injection)
            found, _ = engine(lambda *z: cell(z, injection), start)
            loss = cross_entropy(model.head(found[-1]).float(), labels)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def milliseconds(work: Callable[[], Any], rounds: int, warm: int = 4) -> list[float]:
    for _ in range(warm):
        work()
    times = []
    if not torch.cuda.is_available():
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    torch.cuda.synchronize()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def measure(
    name: str, make: Callable[[], tuple[Step, MDEQ]], batch: tuple[Tensor, Tensor], rounds: int
) -> dict[str, Any]:
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    step, _ = make()
    times = milliseconds(lambda: step(*batch), rounds)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    loss = step(*batch).item()
    row = {
        "name": name,
        "ms": statistics.median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "peak_gib": peak,
        "loss": loss,
        "graph": getattr(step, "graph", None) is not None,
    }
    print(f"{name:34s} {row['ms']:8.2f} ms   peak {peak:5.2f} GiB   loss {loss:.4f}", flush=True)
    return row


def graph_milliseconds(work: Callable[[], Any], rounds: int, repeats: int) -> float:
    """Of one call of ``work``, from a graph that holds ``repeats`` of them."""
    if not torch.cuda.is_available():
        return 0.0
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
    return statistics.median(milliseconds(graph.replay, rounds)) / repeats


def cell_times(options: argparse.Namespace, images: Tensor) -> dict[str, float]:
    """f without autograd, with it, and with the pass back, as the step runs them."""
    model = build(options, gdeq.JFB())
    cell = model.deq.cell
    found: dict[str, float] = {}
    with arithmetic(options.precision), gdeq.hold(cell):
        torch.clear_autocast_cache()
        with torch.no_grad():
            injection = model.stem(images)
            z = model.deq(injection)
            z = tuple(part.contiguous(memory_format=torch.channels_last) for part in z)
            found["f"] = graph_milliseconds(lambda: cell(z, injection), options.rounds, 10)
        torch.clear_autocast_cache()

        def with_products(count: int) -> Callable[[], None]:
            def work() -> None:
                start = tuple(part.detach().requires_grad_() for part in z)
                out = cell(start, injection)
                for _ in range(count):
                    torch.autograd.grad(out, start, out, retain_graph=True)

            return work

        few, many = (graph_milliseconds(with_products(n), options.rounds, 1) for n in (1, 6))
        found["vjp"] = (many - few) / 5
    return found


SOLVER = ("_dots", "_judge", "_step", "_rebuild", "_weights_of", "_apply")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if any(kernel.startswith(known) for known in SOLVER):
        return "solver"
    if "sgd" in name or "multi_tensor" in name:
        return "optimiser"
    convolution = ("conv", "xmma", "cutlass", "gemm", "cudnn", "wgrad", "dgrad", "nchw", "nhwc")
    if any(part in name for part in convolution):
        return "convolutions"
    norms = ("_norm", "_block_end", "_fuse", "group_norm", "groupnorm", "rowwisemoments")
    if any(name.startswith(part) or part in name for part in norms):
        return "norms"
    return "other"


def profile(step: Step, batch: tuple[Tensor, Tensor], out: Path | None) -> dict[str, Any]:
    """Where the time of one replay goes: by kind of kernel, by phase, and the gaps."""
    from torch.profiler import ProfilerActivity  # noqa: PLC0415

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        step(*batch)
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in events if e.time_range.end > e.time_range.start]
    events.sort(key=lambda e: e.time_range.start)
    first, last = events[0].time_range.start, max(e.time_range.end for e in events)
    kinds: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    busy, reached = 0.0, first
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + end - start
        names.setdefault(event.name[:110], []).append(end - start)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    marks = {
        "solve begins": next(
            (e.time_range.start for e in events if e.name.startswith("_dots")), first
        ),
        "solve ends": max(
            (e.time_range.end for e in events if e.name.startswith("_rebuild")), default=first
        ),
        "backward of f begins": max(
            (e.time_range.end for e in events if e.name.startswith("_apply")), default=last
        ),
    }
    top = sorted(names.items(), key=lambda item: -sum(item[1]))
    found = {
        "wall_ms": (last - first) / 1e3,
        "gaps_ms": (last - first - busy) / 1e3,
        "kernels": len(events),
        "by_kind_ms": {k: v / 1e3 for k, v in sorted(kinds.items(), key=lambda i: -i[1])},
        "until_ms": {k: (v - first) / 1e3 for k, v in marks.items()},
    }
    if out is not None:
        lines = [f"{sum(t) / 1e3:9.3f} ms {len(t):5d} x  {n}" for n, t in top]
        (out / "kernels.txt").write_text("\n".join(lines) + "\n")
    for name, spent in top[:28]:
        print(f"{sum(spent):9.1f} us {len(spent):4d} x  {name}")
    print(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="large")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--forward", type=int, default=18)
    parser.add_argument("--backward", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--precision", default="bf16", help="of ours")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", default="float32,tf32,bf16", help="precisions of torchdeq; ''")
    parser.add_argument("--only", default="gdeq,jfb,npg,implicit", help="of ours")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True  # for all of them
    torch.manual_seed(0)
    images = torch.randn(options.batch, 3, options.side, options.side)
    images = images.to(options.device, memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=options.device)
    batch = (images, labels)

    backward = gdeq.Broyden(options.backward, tol=0.0)
    gradients = {
        "gdeq": gdeq.GDEQ(),
        "gdeq refine 1": gdeq.GDEQ(refine=1),
        "jfb": gdeq.JFB(),
        "npg": gdeq.NPG(steps=5, damping=0.5),
        "implicit": gdeq.Implicit(backward, double_backward=False),
    }
    rows = []
    warnings.simplefilter("always", gdeq.CaptureWarning)
    wanted = options.only.split(",")
    for name in wanted:
        made: list[Any] = []

        def make(name: str = name, made: list[Any] = made) -> tuple[Step, MDEQ]:
            made[:] = ours(options, gradients[name], options.precision)
            return made[0], made[1]

        rows.append(measure(f"ours {name}", make, batch, options.rounds))
        if name == "gdeq" and options.profile and options.device == "cuda":
            rows[-1]["profile"] = profile(made[0], batch, options.out)
        made.clear()
    if options.peers and importlib.util.find_spec("torchdeq"):
        for precision in options.peers.split(","):
            for label, settings in {"implicit": {"ift": True}, "jfb": {"grad": 1}}.items():
                rows.append(
                    measure(
                        f"torchdeq {label} {precision}",
                        lambda p=precision, s=settings: theirs(options, p, **s),
                        batch,
                        max(5, options.rounds // 4),
                    )
                )
    times = cell_times(options, images) if options.device == "cuda" else {"f": 0.0, "vjp": 0.0}
    print_table(options, rows, times)
    if options.out:
        text = json.dumps({"options": vars(options), "rows": rows, "cell": times}, default=str)
        (options.out / "step.json").write_text(text)


def print_table(
    options: argparse.Namespace, rows: list[dict[str, Any]], times: dict[str, float]
) -> None:
    by_name = {row["name"]: row for row in rows}
    print(f"\nMDEQ-{options.size}, batch {options.batch}, {options.forward} steps forward")
    print(f"f in a graph: {times['f']:.3f} ms; a VJP: {times['vjp']:.3f} ms")
    if "ours gdeq" not in by_name:
        return
    mine = by_name["ours gdeq"]["ms"]
    evaluations = options.forward + 2 + 2  # the first, one a step, one with autograd, a VJP as two
    if times["f"]:
        share = mine / (evaluations * times["f"])
        print(f"GDEQ step / ({evaluations} x f): {share:.2f}")
    peers = {label: [r for r in rows if f"torchdeq {label}" in r["name"]] for label in
             ("implicit", "jfb")}  # fmt: skip
    for found in peers.values():
        if found:
            best = min(found, key=lambda row: row["ms"])
            print(f"{best['name']:34s} {best['ms']:8.2f} ms   {best['ms'] / mine:6.2f} x GDEQ's")
    for name in ("jfb", "npg", "implicit", "gdeq refine 1"):
        row = by_name.get(f"ours {name}")
        if row:
            print(f"ours {name:29s} {row['ms']:8.2f} ms   {row['ms'] / mine:6.2f} x GDEQ's")
    gdeq_row = by_name["ours gdeq"]
    print(f"ours gdeq {'':24s} {mine:8.2f} ms   peak {gdeq_row['peak_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
