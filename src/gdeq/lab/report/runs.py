"""Read a run folder: whatever is there, whole or cut off in the middle."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gdeq.lab.files import FileError, LabError, json_object, load_yaml
from gdeq.lab.metric import Metric

Record = dict[str, Any]
Points = list[tuple[float, float]]


class ReportError(LabError):
    """The report cannot be made; the message says what to do."""


def number(value: object) -> float | None:
    """A finite number, or None: null stands for NaN in the metrics."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(records: Iterable[Record], key: str) -> list[float]:
    return [value for record in records if (value := number(record.get(key))) is not None]


def points(records: Iterable[Record], x: str, y: str) -> Points:
    """Of the records that have both."""
    pairs = ((number(record.get(x)), number(record.get(y))) for record in records)
    return [(at, value) for at, value in pairs if at is not None and value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


class Run:
    """One run folder.  Without a summary it is unfinished, and its latest figures count."""

    def __init__(self, path: Path) -> None:
        problems: list[str] = []
        metrics = _lines(path / "metrics.jsonl", problems)
        summary, self.failed, environment, timing = (  # failed: why it ended early for good
            _object(path / f"{name}.json", problems)
            for name in ("summary", "failed", "environment", "timing")
        )
        self.path, self.name, self.problems = path, path.name, problems
        self.config, self.config_text = _settings(path / "config.yaml")
        self.environment, self.summary = environment or {}, summary or {}
        self.timing = timing or {}  # its steps, timed in turns with those of other runs
        self.steps, self.epochs = (_ordered(metrics, kind) for kind in ("step", "epoch"))
        self.similarity = _lines(path / "similarity.jsonl", problems)

        get, last = self.config.get, self.epochs[-1] if self.epochs else {}
        adapt, gradient, turns = get("adapt"), get("gradient"), self.timing.get("ms")
        self.gradient: Record = gradient if isinstance(gradient, dict) else {"name": gradient}
        self.method = str(self.gradient.get("name")).lower()
        self.revision = self.environment.get("revision")  # of the code
        self.adaptive = isinstance(adapt, dict) and adapt.get("enabled") is True
        self.task = get("data") or get("task")
        self.seed = get("seed")
        self.pretrained = (number(get("pretrain_steps")) or 0) > 0
        self.test_every = int(number(get("test_every")) or 1)  # epochs
        self.metric = _metric([self.summary, self.environment, self.config])

        self.finished = summary is not None
        self.started = self.finished or bool(self.steps or self.epochs)
        told = self.summary if self.finished else last
        self.seconds = number(told.get("train_seconds" if self.finished else "seconds"))
        self.steps_done = int(number(told.get("steps" if self.finished else "step")) or 0)
        self.epochs_done = int(number(told.get("epochs" if self.finished else "epoch")) or 0)
        self.epochs_wanted = int(number(get("epochs")) or self.epochs_done)
        # The metric after the final epoch, never after the best one.
        self.score = number(self.summary.get(self.metric.key))
        if not self.finished:
            self.score = next((y for _, y in reversed(self.curve("epoch"))), None)
        self.seconds_per_step = (
            self.seconds / self.steps_done if self.seconds and self.steps_done else None
        )
        # In its own training: the median, or the mean where steps differ by design.
        logged = numbers(self.steps, "ms")
        self.ms_per_step = statistics.median(logged) if logged else None
        if self.adaptive and self.seconds_per_step is not None:
            self.ms_per_step = 1e3 * self.seconds_per_step
        elif self.finished:
            self.ms_per_step = number(self.summary.get("ms_per_step"))
        # Milliseconds per step in each turn.
        self.turns = [ms for ms in turns if number(ms)] if isinstance(turns, list) else []
        self.device = self.summary.get("device") or self.environment.get("device")
        self.progress = f"epoch {self.epochs_done} of {self.epochs_wanted}"
        if self.failed is not None:
            steps = self.failed.get("steps", "?")
            self.progress = f"failed: the loss became NaN after step {steps}"
        elif not self.started:
            self.progress = "not started"

    def curve(self, x: str) -> Points:
        """The metric at the end of each tested epoch, against ``x``."""
        return points(self.epochs, x, self.metric.key)


def _metric(places: list[Record]) -> Metric:
    """As the run's files describe it; accuracy where they do not."""
    for told in (place.get("metric") for place in places):
        if isinstance(told, dict) and told.get("name"):
            digits = number(told.get("digits"))
            return Metric(
                str(told["name"]),
                str(told.get("unit") or ""),
                3 if digits is None else min(9, max(0, int(digits))),
                told.get("higher_is_better") is not False,
            )
    return Metric("accuracy", "%", 2)


def _settings(path: Path) -> tuple[Record, str]:
    text = _text(path)
    try:
        config = load_yaml(text)
    except FileError as problem:
        raise ReportError(f"{path} {problem}") from problem
    if not isinstance(config, dict):
        raise ReportError(f"{path} holds no settings")
    return config, text


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Each folder once, in the order given, under names that tell them apart."""
    if not paths:
        raise ReportError("no runs given: name one or more run folders, as in `gdeq report runs/*`")
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(Path(path).resolve(), Path(path))
    runs = [read_run(path) for path in once.values()]  # messages name the path as it was given
    for path, run in zip(once, runs, strict=True):
        run.path, run.name = path, _distinct_name(path, list(once))
    of: dict[str, str] = {}
    for run in runs:
        # Old runs name no task: all of them were of images.
        data = f" on {run.config['data']}" if run.config.get("data") else ""
        of[Path(str(run.config.get("task", "images"))).name + data] = run.name
    if len(of) > 1:
        told = ", ".join(f"{task} ({name})" for task, name in of.items())
        raise ReportError(
            f"runs of different tasks or data share no table: {told}; report each alone"
        )
    return runs


def read_run(path: Path) -> Run:
    if not path.is_dir():
        what = "is a file, not a run folder" if path.exists() else "does not exist"
        raise ReportError(f"{path} {what}")
    if not (path / "config.yaml").is_file():
        raise ReportError(f"{path} is not a run folder: it holds no config.yaml{_inside(path)}")
    return Run(path)


def _inside(path: Path) -> str:
    found = sorted(p.parent.name for p in path.glob("*/config.yaml"))
    first = " ".join(str(path / name) for name in found[:4])
    more = " ..." if len(found) > 4 else ""
    return f"; run folders are inside it: `gdeq report {first}{more}`" if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as problem:
        raise ReportError(f"cannot read {path}: {problem.strerror}") from problem


def _lines(path: Path, problems: list[str]) -> list[Record]:
    """The whole lines.  The last one may be torn: the run was cut off, or is still writing."""
    found = [json_object(line) for line in _text(path).splitlines() if line.strip()]
    damaged = sum(record is None for record in found[:-1])
    if damaged:
        problems.append(f"{damaged} damaged lines in {path.name} were passed over")
    return [record for record in found if record is not None]


def _object(path: Path, problems: list[str]) -> Record | None:
    found = json_object(_text(path))
    if found is None and path.exists():
        problems.append(f"{path.name} is damaged and was passed over")
    return found


def _ordered(metrics: list[Record], kind: str) -> list[Record]:
    """By step or epoch; of one that was made twice (a resumed run) the later counts."""
    some = [r for r in metrics if r.get("kind") == kind and number(r.get(kind)) is not None]
    return sorted({r[kind]: r for r in some}.values(), key=lambda r: r[kind])


def _distinct_name(path: Path, paths: list[Path]) -> str:
    """The folder's name, with as many parents as it takes."""
    tails = (path.parts[-many:] for many in range(1, len(path.parts)))
    for tail in tails:
        if sum(other.parts[-len(tail) :] == tail for other in paths) == 1:
            return "/".join(tail)
    return str(path)
