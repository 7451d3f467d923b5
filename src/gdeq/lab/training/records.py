"""The records of a run: metrics.jsonl and TensorBoard on the way, a summary at the end."""

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
    """Writes records, in the first process alone.

    step: where the run stands.  TensorBoard drops what it has from later steps.
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
    """Whether a log line covers steps of the pre-training."""
    first = record["step"] - record["samples"] / config.batch_size
    return bool(first < config.pretrain_steps)


class Story:
    """What the summary needs to know of the run so far.  Checkpoints hold it."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}  # the record of the last epoch
        # Milliseconds per step of each log line; those of pre-training only until others come.
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
        """The median of the log lines; the overall mean in an adaptive run, whose steps differ."""
        if self.ms and not config.adapt.enabled:
            return statistics.median_high(self.ms)
        return 1e3 * self.last["seconds"] / self.last["step"]

    def summary(self, config: Config, process: Process, metric: Metric) -> dict[str, Any]:
        """The summary of a run that has reached its last epoch."""
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
