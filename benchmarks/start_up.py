"""Seconds from import to the first steps of a fused MDEQ, and the kernel variants it compiles.

TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/start_up.py [--one-by-one] [--list]
"""

# ruff: noqa: E402 (the clock starts before the imports)
from __future__ import annotations

import argparse
import sys
import time

began = time.perf_counter()

import torch
from torch.nn import functional

from gdeq import GDEQ, Broyden
from gdeq.models.mdeq import mdeq


def variants() -> dict[str, int]:
    """How many variants of each of our kernels this process has compiled or loaded."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 (needs Triton)

    modules = [m for name, m in list(sys.modules.items()) if name.startswith("gdeq.")]
    kernels = {v for m in modules for v in vars(m).values() if isinstance(v, JITFunction)}
    counts = {k.fn.__name__: sum(len(c[0]) for c in k.device_caches.values()) for k in kernels}
    return {name: count for name, count in sorted(counts.items()) if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-by-one", action="store_true", help="compile as kernels are launched")
    parser.add_argument("--list", action="store_true", help="print the variants of each kernel")
    arguments = parser.parse_args()
    solver = Broyden(18, tol=0.0, step_bits=8, stop="whole")
    model = mdeq("large", solver=solver, gradient=GDEQ(), dropout=0.0, outer_norm="group")
    model = model.cuda().to(memory_format=torch.channels_last)
    images = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (128,), device="cuda")

    def step() -> None:
        torch.clear_autocast_cache()
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(images).float(), labels)
        loss.backward()

    def told(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    told("imported, model built")
    if not arguments.one_by_one:
        from gdeq.fast.kernels.compiling import compile_ahead  # noqa: PLC0415 (needs Triton)

        told(f"{compile_ahead(step, model)} kernels compiled side by side")
    for number in range(3):
        step()
        told(f"step {number + 1}")
    found = variants()
    print(f"{sum(found.values())} variants of {len(found)} kernels")
    if arguments.list:
        for name, count in found.items():
            print(f"{count:4d}  {name}")


if __name__ == "__main__":
    main()
