"""The fast path beside the plain one on a real model: gradients, and the curve of a training.

Fast: fused kernels, the solver's steps in Triton, the step in a CUDA graph.  Plain: PyTorch's
modules, `gdeq.solve`'s own loop, no graph.  Both get the same weights and the same batches.

    PYTHONPATH=src python3 benchmarks/equality.py --data DATA --out results/bench
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdeq.fast import kernels
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, progress
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.loop import Trainer, precision


@contextlib.contextmanager
def form(fast: bool) -> Iterator[None]:
    with kernels.use("auto" if fast else "off"):
        yield


def trainer_of(options: argparse.Namespace, arithmetic: str, fast: bool) -> Trainer:
    settings = [*options.settings, f"precision={arithmetic}", f"graph={str(fast).lower()}"]
    config = configs.load(options.preset, settings)
    me = process.start(config.device)
    return Trainer(config, RunFolder(Path(tempfile.mkdtemp())), me, progress.Silent(), options.data)


def nudged(images: Tensor) -> Tensor:
    """Other images to float32's last digit: what they change in a gradient, its rounding may."""
    drawn = torch.Generator(images.device).manual_seed(0)
    noise = torch.randn(images.shape, generator=drawn, device=images.device)
    return images * (1 + torch.finfo(torch.float32).eps * noise)


def gradient(trainer: Trainer, images: Tensor, labels: Tensor) -> Tensor:
    model = trainer.model.train()
    torch.clear_autocast_cache()
    model.zero_grad(set_to_none=True)
    with precision(trainer.config, trainer.process.device):
        torch.backends.cudnn.benchmark = False
        loss = cross_entropy(model(images).float(), labels)
        loss.backward()  # still without TF32, where that is asked for
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def gradients(options: argparse.Namespace, weights: dict[str, Tensor], when: str) -> list[Any]:
    """Each way's gradient against that of plain float32, over some batches."""
    ways = [
        ("float32", "plain"), ("float32", "plain, images nudged"), ("float32", "fast"),
        ("bf16", "plain"), ("bf16", "fast"),
    ]  # fmt: skip
    found: dict[tuple[str, str], list[Tensor]] = {}
    for arithmetic, name in ways:
        fast = name == "fast"
        change = nudged if "nudged" in name else torch.clone
        with form(fast):
            trainer = trainer_of(options, arithmetic, fast)
            trainer.model.load_state_dict(weights)
            trainer.set_phase(trainer.total)
            if arithmetic == "float32" and fast:
                cell: Any = trainer.model.deq.cell
                object.__setattr__(cell.config, "fused", True)
            batches = trainer.train_batches.epoch(0)
            found[arithmetic, name] = [
                gradient(trainer, change(images), labels)
                for _, (_, (images, labels)) in zip(range(4), batches, strict=False)
            ]
            if arithmetic == "float32" and fast:
                object.__setattr__(cell.config, "fused", "auto")
    rows = []
    for (arithmetic, name), those in found.items():
        cosines, errors = [], []
        for exact, other in zip(found["float32", "plain"], those, strict=True):
            cosines.append((exact @ other / (exact.norm() * other.norm())).item())
            errors.append(((exact - other).norm() / exact.norm()).item())
        row = [when, arithmetic, name, min(cosines), max(errors)]
        print("{:16s} {:8s} {:20s} cosine >= {:.8f}  relative error <= {:.2e}".format(*row))
        rows.append(row)
    return rows


def curve(
    options: argparse.Namespace, arithmetic: str, fast: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a training, in means over ``every`` steps."""
    losses = []
    with form(fast):
        trainer = trainer_of(options, arithmetic, fast)
        with precision(trainer.config, trainer.process.device):
            for index, (images, labels) in trainer.train_batches.epoch(0):
                if index == options.steps:
                    break
                trainer.one_step(images, labels)
                if trainer.step % options.every == 0:
                    losses.append(trainer.sums.read(trainer.process, since_mark=True)["loss"])
                    trainer.sums.mark()
    return losses, {k: v.clone() for k, v in trainer.model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="cifar10-fast")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, as for gdeq train")
    options = parser.parse_args()
    fast, weights = curve(options, "bf16", True)
    plain, _ = curve(options, "bf16", False)
    again, _ = curve(options, "bf16", True)
    print("loss, mean over the steps before")
    print("step   fast bf16   again       plain bf16")
    steps = [options.every * (i + 1) for i in range(len(fast))]
    table = list(zip(steps, fast, again, plain, strict=True))
    for row in table:
        print("{:5d}   {:9.4f}   {:9.4f}   {:9.4f}".format(*row))
    start = trainer_of(options, "float32", False).model.state_dict()
    rows = gradients(options, start, "at the start")
    rows += gradients(options, weights, f"after {options.steps} steps")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        names = ["step", "fast_bf16", "fast_bf16_again", "plain_bf16"]
        write(options.out / "curve.csv", names, table)
        names = ["when", "precision", "form", "least_cosine", "largest_relative_error"]
        write(options.out / "gradients.csv", names, rows)


def write(path: Path, names: list[str], rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


if __name__ == "__main__":
    main()
