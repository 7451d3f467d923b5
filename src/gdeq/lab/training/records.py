"""The records of a run: metrics.jsonl and TensorBoard on the way, a summary at the end."""

from __future__ import annotations

import contextlib
import math
import statistics
from typing import Any

from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.settings import Config


class Records:
    """Every process keeps what the summary needs; the first one also writes files."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self.writer: Any = None  # TensorBoard's, in the first process while it trains
        self.last: dict[str, Any] = {}  # the record of the last epoch
        # Milliseconds per step of each log line; those of pre-training only until others come.
        self.ms: list[float] = []
        self.unrolled = True

    def open(self, step: int) -> None:
        """Begin to write.  TensorBoard drops what it has from later steps."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import  # noqa: PLC0415

        self.writer = SummaryWriter(str(self.run.path), purge_step=step + 1)

    def close(self) -> None:
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()

    def add(self, record: dict[str, Any]) -> None:
        if record["kind"] == "epoch":
            self.last = record
        elif record["kind"] == "step":
            unrolled = self.has_unrolled(record)
            if self.unrolled and not unrolled:
                self.ms, self.unrolled = [], False
            if unrolled == self.unrolled:
                self.ms.append(record["ms"])
        if self.writer is None:
            return
        self.run.append(record)
        for key, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def has_unrolled(self, record: dict[str, Any]) -> bool:
        """Whether a log line covers steps of the pre-training."""
        first = record["step"] - record["samples"] / self.config.batch_size
        return bool(first < self.config.pretrain_steps)

    def state(self) -> dict[str, Any]:
        return {"last": self.last, "ms": self.ms, "unrolled": self.unrolled}

    def restore(self, state: dict[str, Any]) -> None:
        self.last, self.ms, self.unrolled = state["last"], state["ms"], state["unrolled"]

    def ms_per_step(self) -> float:
        """The median of the log lines; the overall mean in an adaptive run, whose steps differ."""
        if self.ms and not self.config.adapt.enabled:
            return statistics.median_high(self.ms)
        return 1e3 * self.last["seconds"] / self.last["step"]
