"""The run folder: configuration, metrics, summary; what `gdeq.lab.report` reads."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save as to_safetensors

from gdeq import __version__
from gdeq.lab.tasks import registry
from gdeq.lab.training import config as configs
from gdeq.lab.training.settings import Config


class RunError(RuntimeError):
    """The run folder is not what it should be."""


class RunFolder:
    """``metrics.jsonl`` grows by a line an event; the other files are written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"

    @staticmethod
    def check_free(path: Path, option: str = "--run") -> None:
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
        if not (path / "config.yaml").is_file():
            raise RunError(f"{path} is not a run folder: it holds no config.yaml")
        return cls(path)

    def config(self) -> Config:
        return configs.load(str(self.path / "config.yaml"))

    def write_config(self, config: Config) -> None:
        self.write("config.yaml", yaml.safe_dump(configs.to_dict(config), sort_keys=False))

    def write(self, name: str, text: str) -> None:
        place = self.path / name
        half = place.with_name(place.name + ".part")
        half.write_text(text)
        half.replace(place)

    def write_weights(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """In a form that any program reads and no code hides in."""
        tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        half = place.with_name(place.name + ".part")
        half.write_bytes(to_safetensors(tensors))
        half.replace(place)

    def append(self, record: dict[str, Any]) -> None:
        """One metrics line.  NaN has no place in JSON and becomes null."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(clean) + "\n")

    def sync(self) -> None:
        """What a checkpoint counts on must be on the disk before it."""
        if self.metrics_path.exists():
            with self.metrics_path.open("rb") as file:
                os.fsync(file.fileno())

    def size(self) -> int:
        """Bytes of metrics so far; a checkpoint remembers it."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def cut(self, size: int) -> None:
        """Forget the metrics that came after a checkpoint: they will be made again."""
        if self.size() > size:  # truncate would fill a shorter file up with zeros
            os.truncate(self.metrics_path, size)

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.metrics_path)

    def finished(self, epochs: int) -> dict[str, Any] | None:
        """The summary of a run that came to the end of so many epochs; None of one that did not."""
        if not (self.path / "weights.safetensors").is_file():
            return None  # `gdeq evaluate` sends those who miss them to --resume
        try:
            summary = json.loads((self.path / "summary.json").read_text())
            # Of a run that was lengthened the summary is the old one until the new end.
            whole = summary["epochs"] >= epochs and "metric" in summary
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return summary if whole else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that was cut off is passed over."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


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


def companions() -> dict[str, str]:
    """Packages that are of use but not needed, as they are here."""
    try:
        triton = importlib.import_module("triton")
        usable = f"{triton.__version__}, importable"
    except Exception as problem:  # a build for another machine fails in ways of its own
        usable = f"not importable: {type(problem).__name__}: {problem}"
    try:
        peer = metadata.version("torchdeq")
    except metadata.PackageNotFoundError:
        peer = "not installed"
    return {"triton": usable, "torchdeq": peer}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


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
