"""The run folder: configuration, metrics, summary; what `gdeq.lab.report` reads."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
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
from gdeq.lab.training.lock import RunLock
from gdeq.lab.training.process import Process
from gdeq.lab.training.settings import Config
from gdeq.options import count


class RunError(LabError):
    """The run folder is not what it should be."""


class RunFolder:
    """``metrics.jsonl`` grows by a line an event; the other files are written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.lock = RunLock()

    # -- before a run ----------------------------------------------------------------------------

    def check_free(self) -> None:
        """Raise if no run can begin here; writes nothing."""
        path, other = self.path, "choose another folder with --out"
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} exists already and is a file, not a folder: {other}")
        # A .part alone is what a process leaves that was killed before it could begin.
        if path.exists() and any(p.suffix != ".part" for p in path.iterdir()):
            begun = (path / "config.yaml").is_file()
            proceed = f"continue it with `gdeq train --resume {path}`, or " if begun else ""
            raise RunError(f"{path} exists already and is left as it is; {proceed}{other}")
        nearest = next(place for place in (path, *path.parents) if place.exists())
        problem = 0 if os.access(nearest, os.W_OK | os.X_OK) else errno.EACCES
        if not nearest.is_dir():
            problem = errno.ENOTDIR
        if problem:
            raise RunError(f"cannot make the run folder {path}: {nearest}: {os.strerror(problem)}")

    def create(self, config: Config) -> RunFolder:
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            metric = asdict(registry.find(config.task).metric)
            told = {**environment(), "metric": metric}  # for a report on an unfinished run
            self.write("environment.json", json.dumps(told, indent=1))
        except OSError as problem:
            raise RunError(
                f"cannot make the run folder {self.path}: {problem.strerror}"
            ) from problem
        return self

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not path.exists():
            raise RunError(f"{path} does not exist")
        if not path.is_dir():
            raise RunError(f"{path} is a file, not a run folder")
        run = cls(path)
        if not run.begun:
            raise RunError(f"{path} is not a run folder: it holds no config.yaml")
        return run

    @property
    def begun(self) -> bool:
        return (self.path / "config.yaml").is_file() or bool(checkpoint.available(self.path))

    # -- while it is trained ---------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, me: Process) -> Iterator[None]:
        """Keep other trainings out of the folder.  All processes call it."""
        holder = me.agree((self.lock.take(self.path) if me.first else None) or "")
        if holder:
            raise RunError(
                f"{self.path} is being trained already, by process {holder}: wait until it ends, "
                f"or stop it (SIGTERM saves first) and then `gdeq train --resume {self.path}`"
            )
        try:
            yield
        finally:
            self.lock.release()

    def guard(self) -> None:
        """Nothing may be written to a folder that is not the one of the beginning."""
        if self.lock.lost(self.path):
            raise RunError(
                f"{self.path} was moved or deleted while it was being trained: nothing more is "
                "written; continue it where it is now with `gdeq train --resume`"
            )

    def write(self, name: str, data: str | bytes) -> None:
        self.guard()
        folder, slash, _ = name.rpartition("/")
        if slash:
            files.subfolder(self.path, folder)
        files.write(self.path / name, data)

    def write_config(self, config: Config) -> None:
        self.write("config.yaml", yaml.safe_dump(configs.to_dict(config), sort_keys=False))

    def write_weights(
        self, name: str, tensors: dict[str, torch.Tensor], about: dict[str, Any] | None = None
    ) -> None:
        """In a form that any program reads and no code hides in."""
        self.write(name, checkpoint.pack(tensors, about))

    def append(self, record: dict[str, Any]) -> None:
        """One metrics line.  NaN has no place in JSON and becomes null."""
        self.guard()
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        files.append(self.metrics_path, json.dumps(clean) + "\n")

    def save(self, state: dict[str, Any], config: Config) -> None:
        """A checkpoint; the metrics that it counts on must be on the disk before it."""
        self.guard()
        if self.metrics_path.exists():
            with self.metrics_path.open("rb") as file:
                files.sync(file.fileno())
        checkpoint.save(self.path, state["step"], state, configs.to_dict(config))

    # -- what is in it ---------------------------------------------------------------------------

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
        wrong = self.wrong(config)
        if not wrong:
            return
        tell(
            f"warning: config.yaml {wrong}; it was restored from the checkpoint.  To change a "
            f"setting, write `gdeq train --resume {self.path} key=value`"
        )
        self.write_config(config)

    def wrong(self, config: Config) -> str:
        """What is wrong with config.yaml, which should say this; nothing if it does."""
        found = self._readable()
        if isinstance(found, str):
            return found
        if found == config:
            return ""
        return f"says something else ({', '.join(configs.differences(config, found))})"

    def _readable(self) -> Config | str:
        """The configuration in config.yaml, or what is wrong with it."""
        try:
            settings = files.load_yaml(files.read(self.path / "config.yaml", files.TEXT))
            if not isinstance(settings, dict) or not settings:
                return "is empty or cut short"
            checkpoint.check_task(settings, self.path / "config.yaml")
            config = configs.from_dict(settings)
        except FileNotFoundError:
            return "is missing"
        except (OSError, LabError) as problem:
            return f"cannot be used ({problem})"
        return config if configs.to_dict(config) == settings else "is not complete"

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
    return {
        "gdeq": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
    }


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
