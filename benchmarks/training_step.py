"""One training step as `gdeq train` makes it: milliseconds, and what they go to.

    python benchmarks/training_step.py cifar10-fast ema=0 --data DATA
    python benchmarks/training_step.py digits batch_size=16 --steps 5      # on a CPU

Without --data, CIFAR-10 is random images of its shape.  Printed are

- ms per step, batches and all, as they come one after the other;
- ms of host time: what Python needs for a step, while the device has nothing else to do;
- ms of the parts that training adds to the gradient, each alone (on a GPU in a graph of its own);
- on a GPU, the kernels of the recorded step and those around it, by kind and by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gdeq.fast.capture import Captured
from gdeq.lab import data as datasets
from gdeq.lab.bench.steps import Setup, in_graph
from gdeq.lab.bench.where import events_of, tally
from gdeq.lab.data.dataset import Arrays, Dataset, make
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, progress
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.loop import Trainer
from gdeq.lab.training.precision import precision

WARM = 6  # steps before any timing; the fourth is recorded
TOP = 70  # kernels named


def random_images(name: str, _root: str | None, device: str | torch.device) -> Dataset:
    """In place of `gdeq.lab.data.load`: noise, of which there is enough for an epoch or two."""
    source = np.random.default_rng(0)
    counts = (20_000, 1_000)
    images = [source.integers(0, 256, (n, 3, 32, 32), np.uint8) for n in counts]
    labels = [source.integers(0, 10, n).astype(np.uint8) for n in counts]
    arrays = Arrays(images[0], labels[0], images[1], labels[1])
    return make(name, arrays, tuple("0123456789"), device)


def build(options: argparse.Namespace, folder: Path) -> Trainer:
    config = configs.load(options.preset, options.settings)
    if config.data == "cifar10" and options.data is None:
        datasets.load = random_images
    me = process.start(config.device)
    return Trainer(config, RunFolder(folder), me, progress.Silent(), options.data)


def batches(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        for _, batch in trainer.train_batches.epoch(epoch):
            yield batch
        epoch += 1


def wait(trainer: Trainer) -> None:
    if trainer.process.device.type == "cuda":
        torch.cuda.synchronize()


def per_step(trainer: Trainer, source: Iterator[Any], steps: int) -> float:
    wait(trainer)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.one_step(*next(source))
    wait(trainer)
    return 1e3 * (time.perf_counter() - began) / steps


def on_the_host(trainer: Trainer, source: Iterator[Any], steps: int) -> dict[str, float]:
    """On a CPU that is all there is."""
    batch_times, step_times = [], []
    for _ in range(steps):
        wait(trainer)
        began = time.perf_counter()
        batch = next(source)
        between = time.perf_counter()
        trainer.one_step(*batch)
        batch_times.append(1e3 * (between - began))
        step_times.append(1e3 * (time.perf_counter() - between))
    wait(trainer)
    return {"batch": statistics.median(batch_times), "step": statistics.median(step_times)}


def parts(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Each on the gradients and the solution that the last step has left."""
    device = trainer.process.device
    setup = Setup(device=str(device), rounds=10)
    images, labels = batch
    logits = torch.randn(len(images), len(trainer.dataset.classes), device=device)
    loss = torch.zeros((), device=device)
    work: dict[str, Callable[[], Any]] = {"optimiser": trainer.optimizer.step}
    if trainer.config.optimizer.clip is not None:
        work["clipping"] = trainer.clip_gradients
    work["sums for the log"] = lambda: trainer.sums.add(logits, labels, loss, trainer.model)
    if trainer.average is not None:
        work["averaged weights"] = trainer.average.update
    with torch.no_grad():
        return {name: in_graph(setup, call, 5) for name, call in work.items()}


def kernels(trainer: Trainer, source: Iterator[Any]) -> dict[str, Any]:
    """On a GPU: of the recorded step, and of what comes before it."""
    batch = next(source)
    trainer.one_step(*batch)
    recorded = list(trainer.recordings.kept.values())[-1] if trainer.recordings.kept else None
    if not isinstance(recorded, Captured) or recorded.graph is None:
        reason = getattr(recorded, "reason", None) or "graph=false"
        print(f"the step is not recorded: {reason}")
        return {"whole step": _print("step", lambda: trainer.one_step(*batch))}
    graph, places = recorded.graph, recorded.inputs

    def around() -> None:
        trainer._prepare(trainer.step)
        for place, value in zip(places, next(source), strict=True):
            place.copy_(value, non_blocking=True)

    return {
        "recorded": _print("the recorded step", graph.replay),
        "around": _print("around it: batch, rates, inputs", around),
    }


def _print(title: str, work: Callable[[], Any]) -> dict[str, Any]:
    found, lines = tally(events_of(work))
    kinds = ", ".join(f"{kind} {ms:.3f}" for kind, ms in found["by_kind_ms"].items())
    print(
        f"\n{title}: {found['kernels']} kernels, {found['whole_ms']:.3f} ms, of which "
        f"{found['gaps_ms']:.3f} gaps; by kind: {kinds}\n"
        "(matrix products of Muon count as convolutions: see the optimiser's own time)"
    )
    print("\n".join(lines[:TOP]), flush=True)
    return found | {"lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", help="or a YAML file")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--data", help="folder of the data set")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for training_step.json")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, Path(folder))
    device = trainer.process.device
    source = batches(trainer)
    trainer.step = trainer.config.pretrain_steps  # the solver's steps, not the unrolled ones
    with precision(trainer.config, device):
        per_step(trainer, source, WARM)
        found: dict[str, Any] = {"ms": per_step(trainer, source, options.steps)}
        print(f"{found['ms']:9.3f} ms per step, over {options.steps}")
        found["host"] = on_the_host(trainer, source, min(options.steps, 20))
        for name, ms in found["host"].items():
            print(f"{ms:9.3f} ms of host time: {name}")
        if device.type == "cuda":
            found["kernels"] = kernels(trainer, source)
            print()
        found["parts"] = parts(trainer, next(source))
        for name, ms in found["parts"].items():
            print(f"{ms:9.3f} ms {name}, alone")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "training_step.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
