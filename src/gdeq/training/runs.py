"""Whole runs: start, resume, evaluate, compare.  What the command line calls."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gdeq import data as datasets
from gdeq.data import Batches
from gdeq.models.mdeq import MDEQ
from gdeq.training import checkpoint, process, progress
from gdeq.training import config as configs
from gdeq.training.config import Config
from gdeq.training.folder import RunError, RunFolder, device_name
from gdeq.training.loop import Trainer, build_model, precision
from gdeq.training.similarity import similarity

GRADIENTS = ("implicit", "jfb", "npg", "gdeq")


def train(path: Path, config: Config, root: Path | None = None) -> dict[str, Any]:
    """A new run in a new folder."""
    me = process.start(config.device)
    try:
        path = Path(me.agree(str(path)))
        view = progress.choose(me.first)
        # The data set and the model come first: a run that cannot start leaves no folder behind.
        trainer = Trainer(config, RunFolder(path), me, view, _text(root))
        if me.first:
            trainer.run = RunFolder.create(path, config)
        me.wait()
        return trainer.fit()
    finally:
        process.stop()


def resume(
    path: Path, root: Path | None = None, overrides: list[str] | None = None
) -> dict[str, Any]:
    """Go on where the newest whole checkpoint is; from the start if there is none yet."""
    run = RunFolder.open(path)
    before = run.config()
    config = configs.load(str(path / "config.yaml"), overrides)
    _check_unchanged(before, config)
    me = process.start(config.device)
    try:
        view = progress.choose(me.first)
        trainer = Trainer(config, run, me, view, _text(root))
        if checkpoint.available(path):
            trainer.restore(checkpoint.latest(path, view.say))
        elif me.first:
            run.cut(0)
        if me.first and config != before:
            run.write_config(config)  # the next resume goes on with the same
        me.wait()
        return trainer.fit()
    finally:
        process.stop()


def trained_model(
    path: Path, root: Path | None = None, device: str | None = None, weights: str | None = None
) -> tuple[MDEQ, Config, datasets.Dataset]:
    """The model of a finished run (or of one of its snapshots), ready to use."""
    run = RunFolder.open(path)
    config = run.config()
    place = process.start(device or config.device).device
    file = path / (weights or "weights.safetensors")
    if not file.is_file():
        raise RunError(
            f"{path} has no {file.name}: it is not finished; continue it with "
            f"`gdeq train --resume {path}`"
        )
    dataset = datasets.load(config.data, _text(root), place)
    model = build_model(config, dataset)
    try:
        model.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as problem:
        raise RunError(f"{file} is damaged or of another model: {problem}") from problem
    return model.to(place).eval(), config, dataset


def evaluate(path: Path, root: Path | None = None, device: str | None = None) -> dict[str, float]:
    """Test accuracy and loss of a finished run."""
    run = RunFolder.open(path)
    model, config, _ = trained_model(path, root, device)
    me = process.Process(next(model.parameters()).device)
    trainer = Trainer(configs.replace(config, ema=0.0), run, me, progress.Silent(), _text(root))
    trainer.model.load_state_dict(model.state_dict())
    trainer.set_phase(trainer.total - 1)
    with precision(config, me.device):
        return trainer.evaluate()


def measure_similarity(
    path: Path,
    epochs: list[int] | None = None,
    batches: int = 8,
    batch_size: int = 64,
    root: Path | None = None,
    device: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Compare the gradients on the run's snapshots; writes ``similarity.jsonl`` as it goes."""
    run = RunFolder.open(path)
    found = snapshots(path)
    if not found:
        raise RunError(
            f"{path} holds no snapshots; train with snapshots=[1,10,20,50] (epochs) to have them"
        )
    chosen = epochs if epochs else sorted(found)
    missing = [epoch for epoch in chosen if epoch not in found]
    if missing:
        raise RunError(f"no snapshot of epoch {missing[0]}; there are {sorted(found)}")
    lines: list[str] = []
    for epoch in chosen:
        model, config, dataset = trained_model(path, root, device, found[epoch])
        source = Batches(
            dataset.train_x,
            dataset.train_y,
            batch_size,
            mean=dataset.mean,
            std=dataset.std,
            seed=config.seed,
        )
        for record in similarity(model, source, config.solver.build(), batches, epoch):
            lines.append(json.dumps(record))
            run.write("similarity.jsonl", "\n".join(lines) + "\n")
            yield record


def snapshots(path: Path) -> dict[int, str]:
    """Epoch → file name, of the weights kept on the way."""
    found = sorted((path / "snapshots").glob("epoch-*.safetensors"))
    return {int(file.stem.split("-")[1]): f"snapshots/{file.name}" for file in found}


def compare(
    folder: Path,
    config: Config,
    pretrain_steps: int,
    seeds: int = 1,
    root: Path | None = None,
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """The paper's Table 2: four gradients, without and with pre-training (0: without), else alike.

    Runs that are finished are kept, half ones go on: the same call continues a broken one.
    """
    paths = []
    for seed in range(config.seed, config.seed + seeds):
        for steps in sorted({0, pretrain_steps}):
            for name in GRADIENTS:
                label = f"{name}{'-pretrained' if steps else ''}-seed{seed}"
                wanted = configs.replace(
                    config, gradient__name=name, pretrain_steps=steps, seed=seed
                )
                path = folder / label
                paths.append(path)
                _one_of(path, wanted, root, tell)
    return paths


def bench(config: Config, steps: int, root: Path | None = None) -> list[dict[str, Any]]:
    """Milliseconds of one training step with each gradient.

    They take turns step by step, so that what else the machine does falls on all of them alike;
    the median counts.
    """
    trainers = {}
    for name in GRADIENTS:
        wanted = configs.replace(config, gradient__name=name, pretrain_steps=0)
        me = process.start(wanted.device)
        trainers[name] = Trainer(wanted, RunFolder(Path()), me, progress.Silent(), _text(root))
    times: dict[str, list[float]] = {name: [] for name in GRADIENTS}
    peaks: dict[str, float | None] = dict.fromkeys(GRADIENTS)
    device = me.device
    cuda = device.type == "cuda"
    source = trainers[GRADIENTS[0]].train_batches
    batches = (batch for epoch in itertools.count() for batch in source.epoch(epoch))
    with precision(config, device):
        for turn in range(steps + 2):  # the first two warm up
            _, (images, labels) = next(batches)
            for name, trainer in trainers.items():
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                began = time.perf_counter()
                trainer.one_step(images, labels)
                if cuda:
                    torch.cuda.synchronize()
                    peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
                if turn >= 2:
                    times[name].append(1e3 * (time.perf_counter() - began))
    return [
        {
            "gradient": name,
            "ms": statistics.median(times[name]),
            "peak_mib": peaks[name],
            "device": device_name(device),
        }
        for name in GRADIENTS
    ]


def default_pretraining(config: Config, root: Path | None) -> int:
    """A fifth of the steps."""
    dataset = datasets.load(config.data, _text(root))
    return max(1, config.epochs * (len(dataset.train_x) // config.batch_size) // 5)


def _one_of(path: Path, wanted: Config, root: Path | None, tell: Callable[[str], None]) -> None:
    if (path / "config.yaml").is_file():
        if RunFolder.open(path).config() != wanted:
            raise RunError(f"{path} was made with other settings; choose another --out")
        if (path / "summary.json").is_file():
            tell(f"{path.name}: finished before, kept")
            return
        resume(path, root)
    else:
        train(path, wanted, root)


def _check_unchanged(before: Config, after: Config) -> None:
    """What the saved state depends on must stay."""
    for key in ("data", "batch_size", "seed", "model", "optimizer.name", "ema"):
        get = attrgetter(key)
        if get(before) != get(after):
            raise RunError(
                f"{key} cannot change in the middle of a run (it is {get(before)!r}): "
                "start a new one"
            )


def _text(root: Path | None) -> str | None:
    return None if root is None else str(root)
