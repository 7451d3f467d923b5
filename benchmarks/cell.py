"""How fast is one evaluation of f of MDEQ-LARGE, and is the fused one the same function?

    PYTHONPATH=src python3 benchmarks/cell.py [--sweep] [--out FOLDER]

Times are of CUDA graphs, the median over replays.  Without a GPU the same steps run at a small
size, timed by the clock: a test of this script and nothing more.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and then refuse it; see tests/conftest.py.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor

from gdeq.fast.kernels import norms, weights
from gdeq.fast.kernels.norms.fusion import Fuse
from gdeq.fast.kernels.norms.operation import Operation
from gdeq.fast.kernels.norms.residual import BlockEnd
from gdeq.fast.kernels.norms.single import NormAct
from gdeq.models import mdeq_fused
from gdeq.models.mdeq_cell import MDEQCell
from gdeq.models.mdeq_config import named
from gdeq.models.mdeq_fused import as_buffer, fused_forward
from gdeq.models.mdeq_weights import Prepared, prepare
from gdeq.regularize import hold

EVALUATIONS = 10  # captured in one graph
REPLAYS = 20


class Table:
    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def __call__(self, name: str, value: str) -> None:
        self.rows.append((name, value))
        print(f"{name:<58} {value}", flush=True)


# ---- timing


def graph_time(work: Callable[[], Any], repeats: int = 1) -> float:
    """Microseconds of one of the ``repeats`` pieces of work that one call does."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6 / repeats
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats)
    del kept
    return statistics.median(times)


def eager_time(work: Callable[[], Any], repeats: int) -> float:
    """Microseconds by the clock, launches included."""
    work()
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return (time.perf_counter() - start) * 1e6 / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- the cells and their input


def build(device: torch.device, batch: int, edge: int, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(0)
    cell = MDEQCell(named("large")).to(device).train()
    with torch.no_grad():
        for parameter in cell.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    cell.prepared = Prepared()
    shape = (batch, cell.config.channels[0], edge, edge)
    injection = torch.randn(shape, device=device).relu().to(memory_format=torch.channels_last)
    injection = injection.to(dtype)
    z = one_buffer([torch.randn_like(p) for p in cell.initial_state(injection)], dtype)
    return cell, z, injection


def one_buffer(parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The parts channels-last and one after another, as the solver holds them."""
    moved = [part.permute(0, 2, 3, 1).to(dtype).contiguous() for part in parts]
    buffer = torch.cat([part.flatten() for part in moved])
    views = zip(buffer.split([part.numel() for part in moved]), moved, strict=True)
    made = tuple(view.view(part.shape).permute(0, 3, 1, 2) for view, part in views)
    assert as_buffer(made) is not None
    return made


@contextmanager
def autocast(device: torch.device, enabled: bool = True) -> Iterator[None]:
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        yield


# ---- is it the same function?


def compare(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> str:
    texts = []
    for a, b in zip(one, other, strict=True):
        a, b = a.double().flatten(), b.double().flatten()  # noqa: PLW2901
        error = float((a - b).norm() / b.norm())
        cosine = float(a @ b / (a.norm() * b.norm()))
        texts.append(f"{error:.1e}/{1 - cosine:.0e}")
    return "  ".join(texts)


def check(device: torch.device, batch: int, edge: int, table: Table) -> None:
    """Relative error / 1 − cosine of each scale, against the plain cell in float32."""
    cell, z, injection = build(device, batch, edge, torch.float32)
    with hold(cell), torch.no_grad():
        plain = cell(z, injection)
        table("float32: fused to plain", compare(fused_forward(cell, z, injection), plain))
        serial = fused_forward(cell, z, injection, streams=False)
        table("float32: fused without streams to plain", compare(serial, plain))
        with autocast(device):
            table("bf16 autocast: plain to float32", compare(cell(z, injection), plain))
            fused = fused_forward(cell, z, injection)
            table("bf16 autocast: fused to float32", compare(fused, plain))
            again = fused_forward(cell, z, injection)
            assert as_buffer(fused) is not None
            same = all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))
            table("bf16 autocast: fused repeats bit for bit", str(same))
        half = tuple(part.bfloat16() for part in z)
        with autocast(device):
            fused = fused_forward(cell, half, injection)
            table("bf16 autocast, bf16 state: fused to float32", compare(fused, plain))
    gradients = {}
    for name, function, half_precision in (
        ("plain float32", cell, False),
        ("fused float32", lambda z, x: fused_forward(cell, z, x), False),
        ("plain bf16", cell, True),
        ("fused bf16", lambda z, x: fused_forward(cell, z, x), True),
    ):
        torch.manual_seed(1)
        inputs = tuple(part.detach().requires_grad_() for part in z)
        with hold(cell), autocast(device, half_precision):
            out = function(inputs, injection)
        directions = [torch.randn_like(part, dtype=torch.float32) for part in plain]
        loss = sum((a.float() * b).sum() for a, b in zip(out, directions, strict=True))
        parameters = list(cell.parameters())
        found = torch.autograd.grad(loss, [*inputs, *parameters])
        joined = torch.cat([g.float().flatten() for g in found[len(inputs) :]])
        gradients[name] = (*found[: len(inputs)], joined)
    for name in list(gradients)[1:]:
        text = compare(gradients[name], gradients["plain float32"])
        table(f"gradients to z₀ … z₃, parameters: {name}", text)


# ---- how fast is it?


def chained(function: Callable[..., Any], z: tuple[Tensor, ...], injection: Tensor) -> Any:
    """Evaluations that wait for one another, as in a solve."""

    def work() -> Any:
        state = z
        for _ in range(EVALUATIONS):
            state = function(state, injection)
        return state

    return work


def time_f(device: torch.device, batch: int, edge: int, table: Table) -> None:
    cell, z, injection = build(device, batch, edge, torch.bfloat16)
    wide = tuple(part.float() for part in z)
    wide = one_buffer(list(wide), torch.float32)
    plain = MDEQCell(named("large")).to(device, memory_format=torch.channels_last).train()
    plain.load_state_dict(cell.state_dict())

    def fused(**options: Any) -> Callable[..., Any]:
        return lambda z, x: fused_forward(cell, z, x, **options)

    with torch.no_grad(), hold(cell), hold(plain):

        def plain_work() -> Any:
            with autocast(device):
                return chained(plain, wide, injection)()

        table(
            "f plain, bf16 autocast, channels-last, µs",
            f"{graph_time(plain_work, EVALUATIONS):.0f}",
        )
        with autocast(device):
            for name, state, options in (
                ("fused, float32 state, µs", wide, {}),
                ("fused, float32 state, no streams, µs", wide, {"streams": False}),
                ("fused, bf16 state, µs", z, {}),
                ("fused, bf16 state, no streams, µs", z, {"streams": False}),
            ):
                work = chained(fused(**options), state, injection)
                table(f"f {name}", f"{graph_time(work, EVALUATIONS):.0f}")
            eager = eager_time(chained(fused(), z, injection), EVALUATIONS)
            table("f fused, bf16 state, not in a graph, µs", f"{eager:.0f}")


def time_gradients(device: torch.device, batch: int, edge: int, table: Table) -> None:
    cell, z, injection = build(device, batch, edge, torch.float32)
    z = tuple(part.requires_grad_() for part in z)
    directions = [torch.randn_like(part) for part in z]
    parameters = list(cell.parameters())

    def differentiate(function: Callable[..., Any], targets: list[Tensor]) -> Callable[[], Any]:
        def work() -> Any:
            with hold(cell):
                with autocast(device):
                    out = function(z, injection)
                return torch.autograd.grad(out, targets, [d.to(out[0].dtype) for d in directions])

        return work

    def forward() -> Any:
        with hold(cell), autocast(device):
            return [part.detach() for part in fused_forward(cell, z, injection)]

    def fused(z: Any, x: Tensor) -> Any:
        return fused_forward(cell, z, x)

    def weights_alone(back: bool) -> Callable[[], Any]:
        def work() -> Any:
            made = [t for t in prepare(cell, torch.bfloat16).tensors() if t.dim() == 4]
            return torch.autograd.grad(made, convolutions, made) if back else made

        return work

    convolutions = [p for p in parameters if p.dim() == 4]
    made = graph_time(weights_alone(back=False))
    table("weights prepared, µs", f"{made:.0f}")
    back = graph_time(weights_alone(back=True))
    table("  and backward, µs", f"{back:.0f} (alone {back - made:.0f})")
    for side_by_side in (True, False):
        mdeq_fused.streams_with_grad = side_by_side
        name = "" if side_by_side else ", no streams"
        with_autograd = graph_time(forward)
        table(f"f fused with autograd, weights prepared anew{name}, µs", f"{with_autograd:.0f}")
        both = graph_time(differentiate(fused, parameters))
        table(f"  and backward to all parameters{name}, µs", f"{both:.0f}")
        vjp = graph_time(differentiate(fused, list(z)))
        alone = f"{vjp:.0f} (VJP alone {vjp - with_autograd:.0f})"
        table(f"  and backward to z alone{name}, µs", alone)
    mdeq_fused.streams_with_grad = True
    both = graph_time(differentiate(cell, parameters))
    table("f plain with autograd and backward to parameters, µs", f"{both:.0f}")


def kernels_of(
    device: torch.device, batch: int, edge: int, grad: bool
) -> list[tuple[str, int, float]]:
    """Name, count and total microseconds of the kernels of one evaluation, without streams."""
    cell, z, injection = build(device, batch, edge, torch.float32)
    directions = [torch.randn_like(part) for part in z]

    def work() -> None:
        with autocast(device):
            out = fused_forward(cell, z, injection, streams=False)
        if grad:
            torch.autograd.grad(out, list(cell.parameters()), directions)

    totals: dict[str, list[float]] = defaultdict(list)
    with torch.set_grad_enabled(grad):
        if grad:
            with hold(cell):
                work()
        with hold(cell):
            if not grad:
                work()
            _wait()
            activity = torch.profiler.ProfilerActivity
            with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
                work()
                _wait()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name].append(event.device_time)
    found = [(name, len(times), sum(times)) for name, times in totals.items()]
    return sorted(found, key=lambda entry: -entry[2])


# ---- sizes of tiles


def sweep(
    device: torch.device, batch: int, seconds: float, kernels: list[str] | None = None
) -> list[dict[str, Any]]:
    """Each kernel at the sizes of the cell, for a few sizes of its tile."""
    rows = []
    deadline = time.perf_counter() + seconds
    scales = [(32, 32), (64, 16), (128, 8), (256, 4)]
    choices: dict[str, list[dict[str, int]]] = {
        "norm": [
            {"run_bytes": run, "tile": tile, "per_thread": each}
            for run, tile, each in itertools.product((32, 64, 128), (8192, 32768), (32, 64))
        ],
        "block_end": [
            {"run_bytes": run, "per_thread": each}
            for run, each in itertools.product((32, 64, 128), (16, 32, 64))
        ],
        "fuse": [
            {"run_bytes": run, "tile": tile, "per_thread": each}
            for run, tile, each in itertools.product((32, 64), (4096, 8192), (16, 32))
        ],
    }
    choices["norm_backward"] = choices["block_end_backward"] = [
        {"run_bytes": run, "tile": tile, "per_thread": each}
        for run, tile, each in itertools.product((16, 32, 64), (4096, 16384), (16, 32))
    ]
    choices["fuse_backward"] = [
        {"run_bytes": run, "tile": tile, "per_thread": each}
        for run, tile, each in itertools.product((16, 32, 64), (4096, 8192, 16384), (16, 32))
    ]

    def tensor(channels: int, edge: int) -> Tensor:
        made = torch.randn(batch, channels, edge, edge, device=device, dtype=torch.bfloat16)
        return made.to(memory_format=torch.channels_last)

    def affine(channels: int) -> tuple[Tensor, Tensor]:
        return torch.ones(channels, device=device), torch.zeros(channels, device=device)

    def backward_of(
        operation: Operation,
        maps: Sequence[Tensor | None],
        vectors: Sequence[Tensor],
        out: Tensor | None,
        dout: Tensor,
        wanted: Sequence[bool],
    ) -> Callable[[], Any]:
        stats = torch.zeros(len(vectors), batch, 8, device=device)
        sums = torch.empty(len(vectors), batch, dout.shape[1], device=device)
        return lambda: operation.launch_backward(maps, vectors, out, stats, dout, sums, wanted)

    def cases(kernel: str, i: int) -> tuple[Callable[[], Any], int]:
        channels, edge = scales[i]
        if kernel == "norm":
            x = tensor(5 * channels, edge)
            scale = affine(5 * channels)
            return lambda: norms.norm_act(x, 8, *scale, relu=True), 2 * x.numel()
        if kernel == "norm_backward":
            x = tensor(5 * channels, edge)
            scale = affine(5 * channels)
            work = backward_of(NormAct(8, 1e-5, relu=True), (x,), scale, None, x, [True] * 3)
            return work, 3 * x.numel()
        own, z, other = (tensor(channels, edge) for _ in range(3))
        scale = affine(channels)
        if kernel == "block_end":
            mask = torch.ones(batch, channels, device=device)
            injection = other if i == 0 else None
            reads = 4 if i == 0 else 3
            return (
                lambda: norms.block_end(own, mask, injection, z, *scale, *scale, 8),
                reads * own.numel(),
            )
        if kernel == "block_end_backward":
            maps = (own, None, other if i == 0 else None, z)
            wanted = [True, False, False, False]
            work = backward_of(BlockEnd(8, 1e-5), maps, scale * 2, None, own, wanted)
            return work, (5 if i == 0 else 4) * own.numel()
        sources = [
            norms.Source(tensor(channels, scales[max(i, j)][1]), *scale, max(0, j - i))
            for j in range(len(scales))
            if j != i
        ]
        moved = 2 * own.numel() + sum(source.raw.numel() for source in sources)
        if kernel == "fuse_backward":
            raws = [source.raw for source in sources]
            fused = Fuse(8, 1e-5, relu=True, levels=tuple(source.levels for source in sources))
            work = backward_of(fused, (other, *raws), scale * len(raws), own, z, [True])
            return work, moved + own.numel() + sum(raw.numel() for raw in raws)
        return lambda: norms.fuse(own, sources, 8), moved

    for kernel, i in itertools.product(kernels or choices, range(len(scales))):
        work, moved = cases(kernel, i)
        default = norms.TUNING[kernel]
        for choice in [{}, *choices[kernel]]:
            if time.perf_counter() > deadline:
                break
            norms.TUNING[kernel] = replace(default, **choice)
            try:
                spent = graph_time(lambda w=work: [w() for _ in range(10)], 10)
            except Exception as problem:  # too many registers, say
                print(f"{kernel} {scales[i]} {choice}: {problem}")
                continue
            finally:
                norms.TUNING[kernel] = default
            options = " ".join(f"{k}={v}" for k, v in choice.items()) or "as set"
            rate = moved * 2 / spent / 1e3
            rows.append({"kernel": kernel, "scale": i, "tile": options, "us": spent, "GB/s": rate})
    return rows


def sweep_weights(device: torch.device) -> list[dict[str, Any]]:
    """Forward, and forward and backward, of all weights of the cell."""
    cell = MDEQCell(named("large")).to(device, memory_format=torch.channels_last)
    parameters = [p for p in cell.parameters() if p.dim() == 4]
    rows = []

    def forward() -> list[Tensor]:
        return [t for t in prepare(cell, torch.bfloat16).tensors() if t.dim() == 4]

    def both() -> Any:
        made = forward()
        return torch.autograd.grad(made, parameters, made)

    for numbers, together, warps in itertools.product((512, 1024, 2048), (1, 2), (2, 4, 8)):
        if device.type == "cpu" and (numbers, together, warps) != (1024, 1, 4):
            continue
        default = dict(weights.TUNING)
        for name in default:
            weights.TUNING[name] = weights.Tuning(together, numbers, warps)
        try:
            spent = [graph_time(forward), graph_time(both)]
        finally:
            weights.TUNING.update(default)
        tile = f"numbers={numbers} rows={together} warps={warps}"
        for name, us in zip(("weights", "weights and back"), spent, strict=True):
            rows.append({"kernel": name, "scale": "", "tile": tile, "us": us, "GB/s": 0.0})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--edge", type=int, default=32)
    parser.add_argument("--out", type=Path, help="folder for the raw output")
    parser.add_argument("--sweep", action="store_true", help="vary the sizes of the tiles")
    parser.add_argument("--kernels", help="of the sweep, with commas: norm, fuse_backward, weights")
    parser.add_argument("--no-cudnn-benchmark", action="store_true", help="cuDNN's own choice")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        args.batch, args.edge = 1, 4
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = not args.no_cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = False
    size = device, args.batch, args.edge
    started = time.perf_counter()
    table = Table()
    check(*size, table)
    time_f(*size, table)
    time_gradients(*size, table)
    files: dict[str, list[dict[str, Any]]] = {}
    for name, grad in (("kernels", False), ("kernels_gradient", True)):
        found = kernels_of(*size, grad)
        files[name] = [{"us": f"{us:.1f}", "count": n, "kernel": k} for k, n, us in found]
        total = sum(us for _, _, us in found)
        table(f"sum of all {name.replace('_', ' of the ')}, µs", f"{total:.0f}")
        print(f"\n{'µs':>8} {'count':>5}  {name}")
        for kernel, count, us in found[:40]:
            print(f"{us:8.1f} {count:5}  {kernel[:130]}")
        print()
    if args.sweep:
        wanted = args.kernels.split(",") if args.kernels else None
        rows = sweep_weights(device) if wanted is None or "weights" in wanted else []
        named_ones = [k for k in wanted if k != "weights"] if wanted else None
        if named_ones != []:
            rows += sweep(device, args.batch, 240.0, named_ones)
        files["sweep"] = rows
        for row in files["sweep"]:
            print(
                f"{row['kernel']:<10} {row['scale']} {row['tile']:<45} {row['us']:8.1f} µs "
                f"{row['GB/s']:7.0f} GB/s"
            )
    print()
    for name, value in table.rows:
        print(f"{name:<58} {value}")
    print(f"took {time.perf_counter() - started:.0f} s on {device}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, rows in {**files, "cell": [dict(zip(("what", "value"), r)) for r in table.rows]}.items():  # fmt: skip # noqa: B905, E501
            if rows:
                with (args.out / f"{name}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
