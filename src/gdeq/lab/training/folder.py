"""The run folder: configuration, metrics, summary; what `gdeq.lab.report` reads."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from gdeq import __version__
from gdeq.lab import files
from gdeq.lab.files import LabError
from gdeq.lab.metric import Metric
from gdeq.lab.tasks import registry
from gdeq.lab.training import checkpoint
from gdeq.lab.training import config as configs
from gdeq.lab.training.settings import Config
from gdeq.options import count


class RunError(LabError):
    """The run folder is not what it should be."""


class RunFolder:
    """``metrics.jsonl`` grows by a line an event; the other files are written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"

    @staticmethod
    def check_free(path: Path, option: str = "--out") -> None:
        """Raise if no run can begin there; writes nothing.

        option: with which the user would choose another place.
        """
        if path.exists() and not path.is_dir():
            raise RunError(
                f"{path} exists already and is a file, not a folder: choose another folder with "
                f"{option}"
            )
        # A .part alone is what a process leaves that was killed before it could begin.
        if path.exists() and any(p.suffix != ".part" for p in path.iterdir()):
            begun = (path / "config.yaml").is_file()
            proceed = f"continue it with `gdeq train --resume {path}`, or " if begun else ""
            raise RunError(
                f"{path} exists already and is left as it is; {proceed}choose another folder "
                f"with {option}"
            )
        nearest = next(place for place in (path, *path.parents) if place.exists())
        problem = 0 if os.access(nearest, os.W_OK | os.X_OK) else errno.EACCES
        if not nearest.is_dir():
            problem = errno.ENOTDIR
        if problem:
            raise RunError(f"cannot make the run folder {path}: {nearest}: {os.strerror(problem)}")

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        cls.check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run.write_config(config)
            metric = asdict(registry.find(config.task).metric)
            told = {**environment(), "metric": metric}  # for a report on an unfinished run
            run.write("environment.json", json.dumps(told, indent=1))
        except OSError as problem:
            raise RunError(f"cannot make the run folder {path}: {problem.strerror}") from problem
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not path.exists():
            raise RunError(f"{path} does not exist")
        if not path.is_dir():
            raise RunError(f"{path} is a file, not a run folder")
        if not (path / "config.yaml").is_file() and not checkpoint.available(path):
            raise RunError(f"{path} is not a run folder: it holds no config.yaml")
        return cls(path)

    def config(self) -> Config:
        """What its checkpoints, or else its weights, were made with.

        config.yaml is a copy of that for people; it counts alone while there is nothing else.
        """
        for place in (*checkpoint.available(self.path), self.path / "weights.safetensors"):
            kept = checkpoint.config_in(place)
            if kept is not None:
                return configs.from_dict(kept)
        found = self._readable()
        if isinstance(found, str):
            raise RunError(
                f"{self.path / 'config.yaml'} {found}, and there is no checkpoint to restore it "
                "from: start the run anew in another folder"
            )
        return found

    def restore_config(self, config: Config, tell: Callable[[str], None]) -> None:
        """Put config.yaml right where it does not say what the run is made with."""
        found = self._readable()
        if found == config:
            return
        said = found if isinstance(found, str) else "says something else"
        if not isinstance(found, str):
            said += f" ({', '.join(configs.differences(config, found))})"
        tell(
            f"warning: config.yaml {said}; it was restored from the checkpoint.  To change a "
            f"setting, write `gdeq train --resume {self.path} key=value`"
        )
        self.write_config(config)

    def _readable(self) -> Config | str:
        """The configuration in config.yaml, or what is wrong with it."""
        try:
            settings = files.load_yaml(files.read(self.path / "config.yaml", files.TEXT))
            if not isinstance(settings, dict) or not settings:
                return "is empty or cut short"
            config = configs.from_dict(settings)
        except (OSError, LabError) as problem:
            missing = isinstance(problem, FileNotFoundError)
            return "is missing" if missing else f"cannot be used ({problem})"
        return config if configs.to_dict(config) == settings else "is not complete"

    def write_config(self, config: Config) -> None:
        self.write("config.yaml", yaml.safe_dump(configs.to_dict(config), sort_keys=False))

    def write(self, name: str, text: str) -> None:
        files.write(self.path / name, text)

    def write_weights(
        self, name: str, state: dict[str, torch.Tensor], about: dict[str, Any] | None = None
    ) -> None:
        """In a form that any program reads and no code hides in."""
        if "/" in name:
            files.subfolder(self.path, name.partition("/")[0])
        files.write(self.path / name, checkpoint.pack(state, about))

    def append(self, record: dict[str, Any]) -> None:
        """One metrics line.  NaN has no place in JSON and becomes null."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        files.append(self.metrics_path, json.dumps(clean) + "\n")

    def sync(self) -> None:
        """What a checkpoint counts on must be on the disk before it."""
        if self.metrics_path.exists():
            with self.metrics_path.open("rb") as file:
                files.sync(file.fileno())

    def size(self) -> int:
        """Bytes of metrics so far; a checkpoint remembers it."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def cut(self, size: int, tell: Callable[[str], None] = print) -> None:
        """Forget the metrics that came after a checkpoint: they will be made again.

        A line that was torn is set aside; the lines before it that are lost are said to be.
        """
        before = self.size()
        torn = files.cut(self.metrics_path, size)
        if torn:
            files.append(self.path / "metrics.torn", torn.decode(errors="replace") + "\n")
            tell("warning: the last line of metrics.jsonl was torn; it is now in metrics.torn")
        if before < size:
            tell(
                f"warning: metrics.jsonl had {before} of the {size} bytes that were written before "
                "the checkpoint: its curves have a gap, the summary does not depend on it"
            )

    def finished(self, epochs: int) -> dict[str, Any] | None:
        """The summary of a run that came to the end of so many epochs; None of one that did not."""
        if not (self.path / "weights.safetensors").is_file():
            return None  # `gdeq evaluate` sends those who miss them to --resume
        try:
            summary = json.loads((self.path / "summary.json").read_text())
            # Of a run that was lengthened the summary is the old one until the new end.
            whole = summary["epochs"] >= epochs and bool(self.tested(summary))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return summary if whole else None

    @staticmethod
    def tested(summary: dict[str, Any]) -> str:
        """Its metric: ``accuracy 97.50 %``."""
        metric = Metric(**summary["metric"])
        return metric.text(summary[metric.key])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; those that are damaged or cut off are passed over."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for line in lines if (record := files.json_object(line)) is not None]


def environment() -> dict[str, Any]:
    """Versions, device and source revision: what a figure needs beside it."""
    found: dict[str, Any] = {
        "gdeq": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
    }
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {count(torch.get_num_threads(), 'thread')})"


def _revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
