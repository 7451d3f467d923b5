"""What holds the residual of few solver steps while f learns: nothing, or one of two penalties.

A small MDEQ on digits with three Broyden steps and no weight normalisation, at a rate at which f
loses its equilibrium.  Figures of the last epoch; the penalties are taken at every fifth step.

    PYTHONPATH=src python3 benchmarks/penalties.py --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from gdeq.lab.training import config as configs
from gdeq.lab.training import process, progress
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.loop import Trainer

SETTINGS = [
    *("solver.max_iter=3", "solver.tol=0", "gradient=gdeq", "gradient.refine=1"),
    *("optimizer=muon", "optimizer.lr=0.05", "optimizer.weight_decay=0"),
    *("model.weight_norm=false", "device=cpu", "snapshots=[]"),
]
PENALTIES: dict[str, list[str]] = {
    "none": [],
    "residual, weight 5": ["residual_weight=5"],
    "residual, weight 50": ["residual_weight=50"],
    "Jacobian, weight 2": ["jacobian_weight=2"],
    "Jacobian, weight 10": ["jacobian_weight=10"],
}


def train(settings: list[str]) -> dict[str, float]:
    config = configs.load("digits", [*SETTINGS, *settings])
    me = process.start(config.device)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        trainer = Trainer(config, run, me, progress.Silent(), None)
        began = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - began
        last = [record for record in run.metrics() if record["kind"] == "epoch"][-1]
    names = ("test_accuracy", "test_loss", "residual", "backward_residual")
    return {name: last[name] for name in names} | {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--only", help="the penalties whose name has this in it")
    options = parser.parse_args()
    print("penalty                accuracy            loss    forward  backward  seconds")
    for name, settings in PENALTIES.items():
        if options.only and options.only not in name:
            continue
        found = [
            train([*settings, f"epochs={options.epochs}", f"seed={seed}"])
            for seed in range(options.seeds)
        ]
        mean = {key: statistics.mean(one[key] for one in found) for key in found[0]}
        each = " ".join(f"{one['test_accuracy']:.2f}" for one in found)
        print(
            f"{name:20s}  {each:20s} {mean['test_loss']:.3f}   {mean['residual']:.3f}    "
            f"{mean['backward_residual']:.3f}     {mean['seconds']:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
