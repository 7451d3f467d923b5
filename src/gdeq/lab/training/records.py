"""What a run tells: a line of metrics.jsonl and a point in TensorBoard; at the end a summary."""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import asdict
from typing import Any

from gdeq.lab.tasks.task import Metric
from gdeq.lab.training.folder import RunFolder, device_name
from gdeq.lab.training.process import Process
from gdeq.lab.training.settings import Config


class Recorder:
    """Of the first process.

    step: where the run stands; what TensorBoard was told after it is forgotten.
    """

    def __init__(self, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import  # noqa: PLC0415

        self.run = run
        self.writer: Any = SummaryWriter(str(run.path), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        self.run.append(record)
        for key, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.writer.close()


def unrolled_steps(record: dict[str, Any], config: Config) -> bool:
    """Whether pre-training had a part in what a log line tells."""
    first = record["step"] - record["samples"] / config.batch_size
    return bool(first < config.pretrain_steps)


def ms_per_step(metrics: list[dict[str, Any]], config: Config) -> float | None:
    """The middle one of the log lines, of those without pre-training where there are any.

    None for an adaptive run: its steps differ.
    """
    if config.adapt.enabled:
        return None
    lines = [r for r in metrics if r["kind"] == "step"]
    chosen = [r for r in lines if not unrolled_steps(r, config)] or lines
    return statistics.median_high(r["ms"] for r in chosen) if chosen else None


def summary(
    config: Config, process: Process, metrics: list[dict[str, Any]], metric: Metric
) -> dict[str, Any]:
    """Of a run that has reached its last epoch."""
    last = [r for r in metrics if r["kind"] == "epoch"][-1]
    return {
        f"test_{metric.name}": last[f"test_{metric.name}"],
        "metric": asdict(metric),
        "task": config.task,
        "epochs": config.epochs,
        "gradient": config.gradient.name,
        "pretrain": config.pretrain_steps > 0,
        "adaptive": config.adapt.enabled,
        "seed": config.seed,
        "ms_per_step": ms_per_step(metrics, config) or 1e3 * last["seconds"] / last["step"],
        "device": device_name(process.device),
        "steps": last["step"],
        "processes": process.world_size,
    }
