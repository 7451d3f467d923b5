"""Milliseconds until every sample of a batch has a relative residual of 1e-3, on a trained model.

Ours is a recorded solve that ends early, by Broyden's or Anderson's method; torchdeq's Broyden and
Anderson run as shipped, on the same modules.  The residual of what each returns is measured alike,
by the plain cell in float32.  Solvers stop by what they see, in their own arithmetic and (torchdeq)
for the batch as a whole: each is given a smaller and smaller tolerance until all samples are there
by that measure.  The precision is that of f; the algebra of every solver is in float32.

    PYTHONPATH=src python3 benchmarks/to_residual.py --weights RUN/weights.safetensors --data DATA

--narrow: each of our rows once more, with samples that are done leaving the batch.  --start: and
those once more from a learned start (`gdeq.fit_start`), fitted beforehand to so many batches of
training images; its own time is in the row.  --only-ours leaves out torchdeq's; --half what
was slower for each in all runs so far: ours in tf32, torchdeq's in fp16.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import gdeq
from gdeq.fast import kernels
from gdeq.lab import data as datasets
from gdeq.lab.bench.steps import Setup, arithmetic, milliseconds
from gdeq.lab.data import Batches
from gdeq.models import MDEQStart
from gdeq.models.mdeq import MDEQ, mdeq

State = tuple[Tensor, ...]
SHARES = (
    1.5,
    1.2,
    1.0,
    0.9,
    0.8,
    0.7,
    0.5,
    0.35,
    0.25,
    0.18,
    0.12,
)  # of the tolerance that is asked for


def load(options: argparse.Namespace, fused: bool | str) -> MDEQ:
    weights = load_file(options.weights) if options.weights else {}
    norm = "batch" if any(name.endswith("running_mean") for name in weights) else "group"
    torch.manual_seed(0)  # without weights, all rows have the same model
    model = mdeq(options.size, dropout=0.0, outer_norm=norm, fused=fused)
    if weights:
        model.load_state_dict(weights)
    model = model.to(options.device).eval()
    return model.to(memory_format=torch.channels_last)


def ours(
    model: MDEQ,
    injection: Tensor,
    options: argparse.Namespace,
    tol: float,
    wide: bool = True,
    narrow: bool = False,
    start: MDEQStart | None = None,
    method: type[gdeq.Broyden] | type[gdeq.Anderson] = gdeq.Broyden,
) -> Callable[[], Any]:
    """wide: z in float32, whatever f computes in; else in the precision of f.

    narrow: samples that are done leave the batch.
    """
    model.deq.solver = method(options.max_iter, tol=tol, stop="whole")
    model.deq.narrow = narrow
    cell: Any = model.deq.cell
    zeros = cell.initial_state(injection)
    if wide:
        zeros = tuple(part.float() for part in zeros)
    model.deq.start = start

    def begin(x: Tensor) -> State | None:
        if start is None:
            return zeros
        if not wide:  # as the layer does by itself
            return None
        return tuple(part.to(zeros[0].dtype) for part in start(x))

    step = gdeq.capture(lambda x: (model.deq(x, z0=begin(x)), model.deq.solution.steps))
    return lambda: step(injection)


def learned_start(images: Iterable[Tensor], options: argparse.Namespace) -> MDEQStart:
    """Fitted to the equilibria of training images, in the precision of the fused rows."""
    model = load(options, fused=True)
    model.deq.solver = gdeq.Broyden(options.max_iter, tol=options.tol, stop="whole")
    torch.manual_seed(0)
    start = MDEQStart(model.config).to(options.device, memory_format=torch.channels_last)
    began = time.perf_counter()
    half = "fp16" if options.device.startswith("cuda") else "float32"
    with arithmetic(Setup(device=options.device), half):
        with torch.no_grad():
            batches = [
                model.stem(batch.to(memory_format=torch.channels_last)).float() for batch in images
            ]
        distances = gdeq.fit_start(
            model.deq, start, batches, steps=options.start_steps, lr=options.start_lr
        )
    print(
        f"start fitted in {time.perf_counter() - began:.1f} s to {len(batches)} batches: distance "
        f"{distances[-len(batches) :].mean():.3f} of z* at the end",
        flush=True,
    )
    return start.eval()


def theirs(
    model: MDEQ,
    injection: Tensor,
    options: argparse.Namespace,
    tol: float,
    name: str,
    precision: str,
) -> Callable[[], Any]:
    import torchdeq  # noqa: PLC0415 (optional)

    engine = torchdeq.get_deq(
        core="sliced",
        f_solver=name,
        f_max_iter=options.max_iter,
        f_tol=tol,
        f_stop_mode="rel",
    )
    engine.eval()
    cell: Any = model.deq.cell
    start = cell.initial_state(injection.float())

    setup, evaluations = Setup(device=options.device), 0

    def f(*z: Tensor) -> Any:
        nonlocal evaluations
        evaluations += 1
        with arithmetic(setup, precision):
            return cell(z, injection)

    def solve() -> Any:
        nonlocal evaluations
        evaluations = 0
        with gdeq.hold(cell), arithmetic(setup, "float32"):
            found, _ = engine(f, start)
        return found[-1], torch.tensor(evaluations - 1)

    return solve


def in_half(start: MDEQStart) -> MDEQStart:
    """For autocast to float16, which would cast the weights at each call."""
    start = copy.deepcopy(start)
    for module in start.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.half()
    return start


def residual(model: MDEQ, z: State, injection: Tensor) -> Tensor:  # (batch,)
    """By plain float32, whatever the solve was done in."""
    cell: Any = model.deq.cell
    fused, cell.config = cell.config, replace(cell.config, fused=False)
    with arithmetic(Setup(device=str(injection.device)), "float32"), kernels.use("off"):
        out = cell(tuple(part.float() for part in z), injection.float())
    cell.config = fused
    f = torch.cat([part.flatten(1) for part in out], dim=1)
    here = torch.cat([part.float().flatten(1) for part in z], dim=1)
    size = torch.maximum(f.norm(dim=1), here.norm(dim=1))
    return (f - here).norm(dim=1) / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--size", default="large")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--max-iter", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--start", type=int, default=0, metavar="BATCHES")
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--start-lr", type=float, default=5e-3)
    parser.add_argument("--half", action="store_true", help="ours in fp16, theirs in tf32 alone")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if options.data:
        dataset = datasets.load("cifar10", options.data, torch.device(options.device))
        source = Batches(
            dataset.test_x, dataset.test_y, options.batch, mean=dataset.mean, std=dataset.std
        )
        images = next(iter(source.epoch(0)))[1][0]
        fitted = Batches(
            dataset.train_x, dataset.train_y, options.batch, mean=dataset.mean, std=dataset.std
        )
        batches = (batch[0] for _, batch in fitted.epoch(0))
    else:
        images = torch.randn(options.batch, 3, 32, 32, device=options.device)
        batches = iter(lambda: torch.randn_like(images), None)
    images = images.to(memory_format=torch.channels_last)
    start = None
    if options.start:
        start = learned_start(itertools.islice(batches, options.start), options)
    rows = []
    # bf16 ends at some 3e-3; fp16 has the digits of tf32.
    kinds = [("fp16 f", "fp16", True), ("tf32 f", "tf32", True), ("fp16 f and z", "fp16", False)]
    for kind, precision, wide in kinds if not options.half else kinds[::2]:
        for method, narrow, begin in itertools.product(
            (gdeq.Broyden, gdeq.Anderson),
            (False, True) if options.narrow else (False,),
            (None, start) if start else (None,),
        ):
            name = f"ours, {method.__name__}, {kind}"
            name += f"{', narrow' if narrow else ''}{', start' if begin else ''}"
            used = in_half(begin) if begin and precision == "fp16" else begin
            make = functools.partial(ours, wide=wide, narrow=narrow, start=used, method=method)
            rows.append(measure(name, precision, True, images, options, make))
    for name in () if options.only_ours else ("broyden", "anderson"):
        for precision in ("tf32",) if options.half else ("tf32", "fp16"):
            rows.append(
                measure(
                    f"torchdeq {name}, {precision}",
                    precision,
                    False,
                    images,
                    options,
                    functools.partial(theirs, name=name, precision=precision),
                )
            )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "to_residual.json").write_text(json.dumps(rows, indent=1))


@torch.no_grad()
def measure(
    name: str,
    precision: str,
    fused: bool | str,
    images: Tensor,
    options: argparse.Namespace,
    make: Callable[..., Callable[[], Any]],
) -> dict[str, Any]:
    model = load(options, fused)
    setup = Setup(device=options.device)
    for share in SHARES:
        with arithmetic(setup, precision):
            injection = model.stem(images).float()
            solve = make(model, injection, options, share * options.tol)
            z, steps = solve()
        reached = residual(model, z, injection)
        if reached.max() <= options.tol or steps.max() >= options.max_iter:
            break
    with arithmetic(setup, precision):
        times = milliseconds(setup, solve, options.rounds, warm=5)
    row = {
        "name": name,
        "ms": statistics.median(times),
        "tolerance": share * options.tol,
        "steps": steps.float().max().item(),
        "median_steps": steps.float().median().item(),
        "median_residual": reached.median().item(),
        "largest_residual": reached.max().item(),
        "reached": bool(reached.max() <= options.tol),
    }
    print(
        f"{name:43s} {row['ms']:8.2f} ms  {row['steps']:4.0f} steps (median "
        f"{row['median_steps']:.0f}) with tol "
        f"{row['tolerance']:.1e}  residual: median {row['median_residual']:.1e}, largest "
        f"{row['largest_residual']:.1e}{'' if row['reached'] else '  NOT REACHED'}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
