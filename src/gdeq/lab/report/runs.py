"""Reading a run folder: whatever is there, whole or cut off in the middle."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdeq.lab.files import FileError, load_yaml

Record = dict[str, Any]
NOT_STARTED = "not started"


class ReportError(RuntimeError):
    """The report cannot be made; the message says what to do."""


def number(value: object) -> float | None:
    """A finite number, or nothing: null stands for NaN in the metrics."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(records: Sequence[Record], key: str) -> list[float]:
    """Those of the records that have one."""
    return [value for record in records if (value := number(record.get(key))) is not None]


@dataclass(frozen=True)
class Metric:
    """What the runs of a task are judged by, on its test set."""

    name: str = "accuracy"
    unit: str = "%"
    digits: int = 2
    higher_is_better: bool = True

    @property
    def key(self) -> str:
        """Under which metrics and summaries hold it."""
        return f"test_{self.name}"

    @property
    def slug(self) -> str:
        """For the names of files: a run folder does not choose where they go."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def title(self) -> str:
        """Its name and unit, as axes have it."""
        return f"test {self.column.lower()}"

    @property
    def column(self) -> str:
        """The same as the head of a column."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.name.replace('_', ' ').capitalize()}{unit}"

    @property
    def percent(self) -> bool:
        """Whether it is a share of test samples that were right."""
        return self.higher_is_better and self.unit == "%"

    def text(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Run:
    """One run folder.  Without a summary it is unfinished, and its latest figures stand."""

    path: Path
    name: str
    config: Record
    config_text: str
    environment: Record
    steps: list[Record]
    epochs: list[Record]
    similarity: list[Record]
    summary: Record | None
    problems: tuple[str, ...]

    @property
    def metric(self) -> Metric:
        """As the run's files describe it; accuracy where they do not."""
        for place in (self.summary or {}, self.environment, self.config):
            told = place.get("metric")
            if isinstance(told, dict) and told.get("name"):
                digits = number(told.get("digits"))
                return Metric(
                    str(told["name"]),
                    str(told.get("unit") or ""),
                    3 if digits is None else min(9, max(0, int(digits))),
                    told.get("higher_is_better") is not False,
                )
        # An unfinished run has no summary yet, but lines with the name.
        names = [k.removeprefix("test_") for r in self.epochs[-1:] for k in r if k[:5] == "test_"]
        others = [name for name in names if name not in ("loss", "accuracy")]
        return Metric(others[0], "", 3, False) if others else Metric()

    @property
    def task(self) -> object:
        """What was trained on: a data set's name, or a task's."""
        return self.config.get("data") or self.config.get("task")

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def adaptive(self) -> bool:
        """Whether its steps and VJPs followed the residuals."""
        found = self.config.get("adapt")
        return isinstance(found, dict) and found.get("enabled") is True

    @property
    def gradient(self) -> Record:
        """The settings of the gradient, by name alone where only that is given."""
        found = self.config.get("gradient")
        return found if isinstance(found, dict) else {"name": found or "unknown"}

    @property
    def seed(self) -> object:
        return self.config.get("seed")

    @property
    def pretrained(self) -> bool:
        return (number(self.config.get("pretrain_steps")) or 0) > 0

    @property
    def test_every(self) -> int:
        """Epochs from one test to the next."""
        return int(number(self.config.get("test_every")) or 1)

    def curve(self, x: str) -> list[tuple[float, float]]:
        """The metric at the end of each tested epoch, against ``x``."""
        pairs = ((number(r.get(x)), number(r.get(self.metric.key))) for r in self.epochs)
        return [(at, value) for at, value in pairs if at is not None and value is not None]

    @property
    def score(self) -> float | None:
        """The metric after the final epoch, never after the best one."""
        if self.summary is not None:
            return number(self.summary.get(self.metric.key))
        tested = self.curve("epoch")
        return tested[-1][1] if tested else None

    @property
    def seconds(self) -> float | None:
        return self._figure("train_seconds", "seconds")

    @property
    def steps_done(self) -> float | None:
        return self._figure("steps", "step")

    @property
    def epochs_done(self) -> int:
        return int(self._figure("epochs", "epoch") or 0)

    @property
    def epochs_wanted(self) -> int:
        return int(number(self.config.get("epochs")) or self.epochs_done)

    @property
    def seconds_per_step(self) -> float | None:
        seconds, steps = self.seconds, self.steps_done
        return seconds / steps if seconds is not None and steps else None

    @property
    def ms_per_step(self) -> float | None:
        """The median; the mean where steps differ by design."""
        if self.adaptive and self.seconds_per_step is not None:
            return 1e3 * self.seconds_per_step
        if self.summary is not None:
            return number(self.summary.get("ms_per_step"))
        found = numbers(self.steps, "ms")
        return statistics.median(found) if found else None

    @property
    def device(self) -> object:
        return (self.summary or {}).get("device") or self.environment.get("device")

    @property
    def started(self) -> bool:
        return self.finished or bool(self.steps or self.epochs)

    @property
    def progress(self) -> str:
        if not self.started:
            return NOT_STARTED
        return f"epoch {self.epochs_done} of {self.epochs_wanted}"

    def _figure(self, in_summary: str, in_epoch: str) -> float | None:
        if self.summary is not None:
            return number(self.summary.get(in_summary))
        return number(self.epochs[-1].get(in_epoch)) if self.epochs else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Each folder once, in the order given, under names that tell them apart."""
    if not paths:
        raise ReportError("no runs given: name one or more run folders, as in `gdeq report runs/*`")
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(Path(path).resolve(), Path(path))
    runs = [read_run(path) for path in once.values()]  # messages name the path as it was given
    return [
        replace(run, path=path, name=_distinct_name(path, list(once)))
        for path, run in zip(once, runs, strict=True)
    ]


def read_run(path: Path) -> Run:
    if not path.is_dir():
        what = "is a file, not a run folder" if path.exists() else "does not exist"
        raise ReportError(f"{path} {what}")
    if not (path / "config.yaml").is_file():
        raise ReportError(f"{path} is not a run folder: it holds no config.yaml{_inside(path)}")
    problems: list[str] = []
    text = _text(path / "config.yaml")
    try:
        config = load_yaml(text)
    except FileError as problem:
        raise ReportError(f"{path / 'config.yaml'} {problem}") from problem
    if not isinstance(config, dict):
        raise ReportError(f"{path / 'config.yaml'} holds no settings")
    metrics = _lines(path / "metrics.jsonl", problems)
    return Run(
        path,
        path.name,
        config,
        text,
        _object(path / "environment.json", problems) or {},
        _ordered(metrics, "step", "step"),
        _ordered(metrics, "epoch", "epoch"),
        _lines(path / "similarity.jsonl", problems),
        _object(path / "summary.json", problems),
        tuple(problems),
    )


def _inside(path: Path) -> str:
    found = sorted(p.parent.name for p in path.glob("*/config.yaml"))
    first = " ".join(str(path / name) for name in found[:4])
    more = " ..." if len(found) > 4 else ""
    return f"; run folders are inside it: `gdeq report {first}{more}`" if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ReportError(f"cannot read {path}: {problem.strerror}") from problem


def _lines(path: Path, problems: list[str]) -> list[Record]:
    """The lines that are whole.  The last one may be torn: the run was cut off, or is writing."""
    lines = _text(path).splitlines() if path.exists() else []
    found, damaged = [], 0
    for index, line in enumerate(lines):
        record = _parsed(line)
        if record is not None:
            found.append(record)
        elif line.strip() and index < len(lines) - 1:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged lines in {path.name} were passed over")
    return found


def _object(path: Path, problems: list[str]) -> Record | None:
    if not path.exists():
        return None
    found = _parsed(_text(path))
    if found is None:
        problems.append(f"{path.name} is damaged and was passed over")
    return found


def _parsed(text: str) -> Record | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _ordered(metrics: list[Record], kind: str, key: str) -> list[Record]:
    """By step or epoch; of one that was made twice (a resumed run) the later counts."""
    by_key = {
        at: record
        for record in metrics
        if record.get("kind") == kind and (at := number(record.get(key))) is not None
    }
    return [by_key[at] for at in sorted(by_key)]


def _distinct_name(path: Path, paths: list[Path]) -> str:
    """The folder's name, with as many parents as it takes."""
    for count in range(1, len(path.parts)):
        tail = path.parts[-count:]
        if sum(other.parts[-count:] == tail for other in paths) == 1:
            return "/".join(tail)
    return str(path)
