"""What a recorded solve spends beside f: the solver's kernels alone, and w = −B⁻ᵀv.

    python benchmarks/solver.py [--batch 128] [--steps 18] [--bits 8] [--rounds 20]
    TRITON_INTERPRET=1 python benchmarks/solver.py --device cpu --batch 2 --steps 3    # does it run

f has its values at hand, random ones, and takes no time but that of emptying the cache, as a real
one does (a kernel of its own, whose name says "vectorized" or "fill").  With tol=0 and with a
tolerance that is not met, so that all steps are made; bfloat16 and float16.  Printed are the time
of the whole, in which f is the same for all, and then each kernel's.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import torch
from torch import Tensor

import gdeq
from gdeq.fast.kernels import choice
from gdeq.lab.bench.where import events_of, tally

SHAPES = [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]  # 61,440 numbers
CACHE = 32 << 20  # float32: 128 MiB, more than the cache of an H200


class Given:
    """f: values that lie in one buffer, another one at each call of a solve."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.sizes = [options.batch * torch.Size(shape).numel() for shape in SHAPES]
        make = torch.Generator(options.device).manual_seed(0)
        self.values = [
            torch.randn(sum(self.sizes), device=options.device, generator=make).to(dtype)
            for _ in range(4)
        ]
        self.shapes = [(options.batch, *shape) for shape in SHAPES]
        self.room = torch.zeros(CACHE if options.device == "cuda" else 1, device=options.device)
        self.calls = 0

    def __call__(self, z: Any) -> tuple[Tensor, ...]:
        self.room.add_(1.0)
        self.calls += 1
        parts = self.values[self.calls % len(self.values)].split(self.sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))


def measure(options: argparse.Namespace, dtype: torch.dtype, tol: float) -> None:
    f = Given(options, dtype)
    z0 = tuple(torch.zeros(shape, dtype=dtype, device=options.device) for shape in f.shapes)
    solver = gdeq.Broyden(options.steps, tol, step_bits=options.bits)

    def work(v: Tensor) -> Tensor:  # (batch, d)
        solution = gdeq.solve(f, z0, solver)
        assert solution.inverse is not None
        return solution.inverse.vectors.T.negative_matvec(v)

    v = torch.randn(options.batch, sum(f.sizes) // options.batch, device=options.device)
    step = gdeq.capture(work)
    for _ in range(5):
        step(v)
    print(f"\n{dtype}, tol={tol}:", flush=True)
    if options.device != "cuda":
        return
    times = []
    for _ in range(options.rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(v)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    found, lines = tally(events_of(lambda: step(v)))
    print(f"{statistics.median(times):.3f} ms, {found['kernels']} kernels")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    forced = contextlib.nullcontext() if options.device == "cuda" else choice.use("triton")
    with forced:
        for dtype in (torch.bfloat16, torch.float16):
            for tol in (0.0, 1e-12):
                measure(options, dtype, tol)


if __name__ == "__main__":
    main()
