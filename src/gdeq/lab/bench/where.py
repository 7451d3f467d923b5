"""Where the time of a step goes, and how far f is from what the chip can do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gdeq import JFB
from gdeq.lab.bench.steps import Step, in_graph
from gdeq.lab.bench.subjects import Setup, build


def profile(setup: Setup, step: Step, out: Path | None) -> dict[str, Any]:
    """One replay: its kernels, and the time in which none of them runs."""
    from torch.profiler import ProfilerActivity  # noqa: PLC0415 (slow to import)

    batch = setup.draw()
    step(*batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        step(*batch)
        torch.cuda.synchronize()
    if out is not None:
        table = record.key_averages().table(sort_by="self_cuda_time_total", row_limit=100)
        (out / "kernels.txt").write_text(table)
    ranges = [e.time_range for e in record.events() if str(e.device_type).endswith("CUDA")]
    spans = sorted((r.start, r.end) for r in ranges if r.end > r.start)
    # What comes before the graph (the copies of the inputs) is followed by its start-up.
    first = next(i for i, (one, two) in enumerate(pairwise(spans)) if two[0] - one[1] < 100)
    begin, _ = spans[first]
    busy, reached = 0.0, begin
    for start, end in spans[first:]:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "whole_ms": (reached - begin) / 1e3,
        "gaps_ms": (reached - begin - busy) / 1e3,
        "kernels": len(spans) - first,
    }


def roofline(setup: Setup, f_ms: float) -> dict[str, float]:
    """f beside the chip: its multiplications and its least traffic, at the rates measured here."""
    model = build(setup, JFB(), fused=False)
    cell = model.deq.cell
    x, _ = setup.draw()
    moved = [0]
    width = 2 if setup.precision == "bf16" else 4

    def count(module: nn.Conv2d | nn.Linear, inputs: Any, output: torch.Tensor) -> None:
        # Each layer reads its input and weight once and writes its output once; what is between
        # them could be computed on the way.
        moved[0] += width * (inputs[0].numel() + output.numel() + module.weight.numel())

    layers = [m for m in cell.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        injection = model.stem(x)
        make = getattr(cell, "initial_state", torch.zeros_like)
        with FlopCounterMode(display=False) as counter:
            cell(make(injection), injection)
    for hook in hooks:
        hook.remove()
    flops = counter.get_total_flops()
    dtype = torch.bfloat16 if setup.precision == "bf16" else torch.float32
    n = 8192 if setup.cuda else 1024
    a, b = (torch.randn(n, n, device=setup.device, dtype=dtype) for _ in range(2))
    rate = 2 * n**3 / in_graph(setup, lambda: a @ b, 1) * 1e3
    source = torch.randn(2**28 if setup.cuda else 2**24, device=setup.device)
    target = torch.empty_like(source)
    moves = (lambda: target.copy_(source), lambda: torch.add(source, 1.0, out=target))
    fastest = min(in_graph(setup, move, 1) for move in moves)
    bandwidth = 2 * source.numel() * 4 / fastest * 1e3
    return {
        "f_gflop": flops / 1e9,
        "f_mbyte": moved[0] / 1e6,
        "tflop_per_s": rate / 1e12,
        "tbyte_per_s": bandwidth / 1e12,
        "arithmetic_ms": flops / rate * 1e3,
        "traffic_ms": moved[0] / bandwidth * 1e3,
        "f_ms": f_ms,
    }
