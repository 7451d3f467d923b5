"""What a configuration names, built: the model and the batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from gdeq.lab.data import Augment, Batches, Dataset
from gdeq.lab.training.config import Config, ConfigError
from gdeq.lab.training.process import Process
from gdeq.models.mdeq import MDEQ, mdeq


def build_model(config: Config, dataset: Dataset) -> MDEQ:
    torch.manual_seed(config.seed)
    return mdeq(
        config.model.size,
        classes=len(dataset.classes),
        image_shape=dataset.shape,
        solver=config.solver.build(),
        gradient=config.gradient.build(),
        weight_norm=config.model.weight_norm,
        dropout=config.model.dropout,
        outer_norm=config.model.outer_norm,
    )


def share_batch_statistics(model: MDEQ, config: Config, process: Process) -> MDEQ:
    """Batch norms see the batch of all processes: a run must not depend on their number."""
    if config.model.outer_norm != "batch" or process.world_size == 1:
        return model
    if process.device.type != "cuda":
        raise ConfigError(
            "model.outer_norm=batch takes statistics over the whole batch, which several processes "
            "can share on GPUs alone: use model.outer_norm=group, or a single process"
        )
    shared: MDEQ = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return shared


def build_batches(config: Config, dataset: Dataset, process: Process) -> tuple[Batches, Batches]:
    """Of training, and of the test."""
    processes = process.world_size
    shared: dict[str, Any] = {
        "mean": dataset.mean,
        "std": dataset.std,
        "rank": process.rank,
        "world_size": processes,
    }
    augment = Augment(**dataclasses.asdict(config.augment))
    gpu = process.device.type == "cuda"
    shared["channels_last"] = gpu  # what its convolutions are fastest with
    try:
        train = Batches(
            dataset.train_x,
            dataset.train_y,
            config.batch_size,
            seed=config.seed,
            augment=augment,
            classes=len(dataset.classes),
            **shared,
        )
        test = Batches(
            dataset.test_x,
            dataset.test_y,
            _test_batch(len(dataset.test_x), config.batch_size, processes),
            shuffle=False,
            drop_last=False,
            **shared,
        )
    except ValueError as problem:
        raise ConfigError(str(problem)) from problem
    return train, test


def _test_batch(samples: int, training: int, processes: int) -> int:
    """At least 256, or as large as in training; if one near that leaves no rest, that one."""
    least = -(-max(256, training) // processes) * processes
    whole = [size for size in range(least, 2 * least + 1, processes) if samples % size == 0]
    return whole[0] if whole else least
