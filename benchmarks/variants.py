"""The GDEQ step of `gdeq bench` with its latest changes, one after the other, in one process.

    PYTHONPATH=src python3 benchmarks/variants.py [--batch 128] [--rounds 20]
    PYTHONPATH=src python3 benchmarks/variants.py --device cpu --batch 2 --rounds 1   # does it run

Each line has the changes of the lines above it too.  The losses after the same steps, of random
images, say whether one of them goes astray; they differ by chance (docs/performance.md).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from gdeq.gradients import GDEQ
from gdeq.lab.bench.steps import Setup, cell_times, default_setup, measure, ours
from gdeq.models import mdeq_fused


def tune(**changes: object) -> None:
    try:
        from gdeq.fast.kernels import product  # noqa: PLC0415 (needs Triton)
    except ImportError:
        return
    product.tuning = replace(product.tuning, **changes)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiles", action="store_true", help="other sizes in the solver's passes")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    setup = replace(default_setup(args.device), batch=args.batch, rounds=args.rounds, step_bits=16)
    tune(rounded_z=False)
    mdeq_fused.zero_start = False

    def tell(name: str, of: Setup) -> float:
        row = measure(of, name, lambda: ours(of, GDEQ()))
        peak = f"  {row['peak_gib']:.3f} GiB" if row["peak_gib"] is not None else ""
        print(
            f"{name:44s}{row['ms']:9.3f} ms  ({row['ms_min']:.3f} to {row['ms_max']:.3f}){peak}"
            f"  loss {row['loss']:.3f}",
            flush=True,
        )
        return float(row["ms"])

    in_bytes = replace(setup, step_bits=8)
    tell("before", setup)
    tune(rounded_z=True)
    tell("z in bfloat16", setup)
    tune(packed=False)
    tell("steps in 8 bits, one number after another", in_bytes)
    tune(packed=True)
    tell("four numbers at once", in_bytes)
    mdeq_fused.zero_start = True
    best = tell("the first f from what samples share", in_bytes)
    f = cell_times(in_bytes, vjp=False)["f"]
    evaluations = setup.forward + 3
    print(f"f in a graph {f:.4f} ms; step ÷ ({evaluations} × f): {best / (evaluations * f):.3f}")
    for tiles in ((2, 2), (4, 2), (8, 2), (8, 4), (4, 8)) if args.tiles else ():
        tune(tile_of_bytes=tiles)
        tell(f"all, {tiles[0]} and {tiles[1]} steps at once", in_bytes)


if __name__ == "__main__":
    main()
