"""What a run tells: a line of metrics.jsonl and a point in TensorBoard; at the end a summary."""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import asdict
from typing import Any

from gdeq.lab.metric import Metric
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


class Story:
    """What the summary tells of a run on the way; part of its checkpoints."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}  # the record of the last epoch
        # Of the log lines; those of pre-training while there are no others.
        self.ms: list[float] = []
        self.unrolled = True

    def note(self, record: dict[str, Any], config: Config) -> None:
        if record["kind"] == "epoch":
            self.last = record
        elif record["kind"] == "step":
            unrolled = unrolled_steps(record, config)
            if self.unrolled and not unrolled:
                self.ms, self.unrolled = [], False
            if unrolled == self.unrolled:
                self.ms.append(record["ms"])

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        self.last, self.ms, self.unrolled = state["last"], state["ms"], state["unrolled"]

    def ms_per_step(self, config: Config) -> float:
        """The middle one of the log lines; of an adaptive run, whose steps differ, the mean."""
        if self.ms and not config.adapt.enabled:
            return statistics.median_high(self.ms)
        return 1e3 * self.last["seconds"] / self.last["step"]

    def summary(self, config: Config, process: Process, metric: Metric) -> dict[str, Any]:
        """Of a run that has reached its last epoch."""
        return {
            f"test_{metric.name}": self.last[f"test_{metric.name}"],
            "metric": asdict(metric),
            "task": config.task,
            "epochs": config.epochs,
            "gradient": config.gradient.name,
            "pretrain": config.pretrain_steps > 0,
            "adaptive": config.adapt.enabled,
            "seed": config.seed,
            "ms_per_step": self.ms_per_step(config),
            "device": device_name(process.device),
            "steps": self.last["step"],
            "processes": process.world_size,
        }
