"""Where the time of a step goes, and how far f is from what the chip can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gdeq.gradients import JFB
from gdeq.lab.bench.steps import Setup, Step, build, in_graph

SOLVER = ("_dots", "_judge", "_step", "_settle", "_weights_of", "_apply")
NORMS = ("_norm", "_uneven", "_block_end", "_fuse", "group_norm", "groupnorm", "rowwisemoments")
CONVOLUTIONS = ("conv", "xmma", "cutlass", "gemm", "cudnn", "wgrad", "dgrad", "nvjet", "splitk")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if kernel.startswith(SOLVER):
        return "solver"
    if "sgd" in name or "multi_tensor" in name:
        return "optimiser"
    if any(part in name for part in CONVOLUTIONS):
        return "convolutions"
    if any(part in name for part in NORMS):
        return "norms"
    return "other"


def events_of(work: Callable[[], Any]) -> list[Any]:
    """What the device did for this work, which has been done before, in order."""
    from torch.profiler import ProfilerActivity  # noqa: PLC0415

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        work()
        torch.cuda.synchronize()
    events = [e for e in record.events() if str(e.device_type).endswith("CUDA")]
    events = [e for e in events if e.time_range.end > e.time_range.start]
    return sorted(events, key=lambda e: e.time_range.start)


def tally(events: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Their time by kind, the gaps between them; and a line for each kernel, the longest first.

    Kernels that run side by side are counted each, so that the kinds add up to more than the whole.
    """
    begin = events[0].time_range.start
    kinds: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    busy, reached = 0.0, begin
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + end - start
        names.setdefault(event.name[:120], []).append(end - start)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    top = sorted(names.items(), key=lambda item: -sum(item[1]))
    found = {
        "whole_ms": (reached - begin) / 1e3,
        "gaps_ms": (reached - begin - busy) / 1e3,
        "kernels": len(events),
        "by_kind_ms": {k: v / 1e3 for k, v in sorted(kinds.items(), key=lambda i: -i[1])},
    }
    return found, [f"{sum(t) / 1e3:9.3f} ms {len(t):5d} x  {n}" for n, t in top]


def profile(setup: Setup, step: Step, out: Path | None) -> dict[str, Any]:
    """One replay: time by kind of kernel and by phase, and the gaps between kernels."""
    batch = setup.draw()
    step(*batch)
    events = events_of(lambda: step(*batch))
    # What comes before the graph (the copies of the inputs) is followed by its start-up.
    first = next(i for i, e in enumerate(events) if i and _gap(events, i) < 100) - 1
    events = events[max(0, first) :]
    begin = events[0].time_range.start
    reached = max(e.time_range.end for e in events)
    found, lines = tally(events)

    def last_of(prefix: str, fallback: float) -> float:
        ends = [e.time_range.end for e in events if e.name.startswith(prefix)]
        return max(ends, default=fallback)

    def first_of(prefix: str, fallback: float) -> float:
        return next((e.time_range.start for e in events if e.name.startswith(prefix)), fallback)

    solve, solved = first_of("_dots", begin), last_of("_settle", begin)
    product = last_of("_apply", reached)
    # The last thing before the update is what gives the weights of the stem their gradients.
    update = last_of("_merge_backward", reached)
    phases = {
        "stem, weights, first f": solve - begin,
        "solve, the last f with autograd": solved - solve,
        "head and its backward, w": product - solved,
        "backward of f and stem": max(0.0, update - product),
        "optimiser": max(0.0, reached - max(update, product)),
    }
    if out is not None:
        (out / "kernels.txt").write_text("\n".join(lines) + "\n")
    return found | {"by_phase_ms": {k: v / 1e3 for k, v in phases.items()}}


def _gap(events: list[Any], i: int) -> float:
    return float(events[i].time_range.start - events[i - 1].time_range.end)


def roofline(setup: Setup, f_ms: float) -> dict[str, float]:
    """f beside the chip: its multiplications and its least traffic, at the rates measured here."""
    model = build(setup, JFB(), fused=False)
    cell = model.deq.cell
    assert isinstance(cell, nn.Module)
    images, _ = setup.draw()
    flops, moved = [0], [0]

    def count(module: nn.Conv2d, inputs: Any, output: torch.Tensor) -> None:
        window = module.weight[0].numel()
        flops[0] += 2 * output.numel() * window
        width = 2 if setup.precision == "bf16" else 4
        # Each convolution reads its input and weight once and writes its output once; the norms
        # between them could be computed on the way.
        moved[0] += width * (inputs[0].numel() + output.numel() + module.weight.numel())

    hooks = [m.register_forward_hook(count) for m in cell.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        injection = model.stem(images)
        cell(cell.initial_state(injection), injection)  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    dtype = torch.bfloat16 if setup.precision == "bf16" else torch.float32
    n = 8192 if setup.cuda else 1024
    a = torch.randn(n, n, device=setup.device, dtype=dtype)
    b = torch.randn(n, n, device=setup.device, dtype=dtype)
    rate = 2 * n**3 / in_graph(setup, lambda: a @ b, 1) * 1e3
    source = torch.randn(2**28 if setup.cuda else 2**24, device=setup.device)
    target = torch.empty_like(source)
    moves = (lambda: target.copy_(source), lambda: torch.add(source, 1.0, out=target))
    fastest = min(in_graph(setup, move, 1) for move in moves)
    bandwidth = 2 * source.numel() * 4 / fastest * 1e3
    return {
        "f_gflop": flops[0] / 1e9,
        "f_mbyte": moved[0] / 1e6,
        "tflop_per_s": rate / 1e12,
        "tbyte_per_s": bandwidth / 1e12,
        "arithmetic_ms": flops[0] / rate * 1e3,
        "traffic_ms": moved[0] / bandwidth * 1e3,
        "f_ms": f_ms,
    }
