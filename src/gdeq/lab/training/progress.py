"""What one sees while it trains: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gdeq.lab.files import shown as plain
from gdeq.lab.metric import Metric


class Silent:
    """For processes other than the first, and for tests."""

    def begin(self, title: str, total: int, done: int, metric: Metric) -> None:
        self.metric = metric

    def step(self, done: int, figures: dict[str, float]) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Lines(Silent):
    """One line every few seconds, for logs."""

    every = 5.0  # seconds

    def begin(self, title: str, total: int, done: int, metric: Metric) -> None:
        super().begin(title, total, done, metric)
        self.say(title)
        self.total, self.first, self.began, self.last = total, done, time.monotonic(), 0.0

    def step(self, done: int, figures: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self.last < self.every:
            return
        self.last = now
        left = (now - self.began) / max(1, done - self.first) * (self.total - done)
        self.say(f"step {done}/{self.total}  {shown(figures, self.metric)}  {left:.0f} s left")

    def say(self, text: str) -> None:
        print(plain(text), flush=True)


class Bar(Silent):
    """A bar with what matters beside it."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self.task: Any = None

    def begin(self, title: str, total: int, done: int, metric: Metric) -> None:
        super().begin(title, total, done, metric)
        self.progress.start()
        self.task = self.progress.add_task(title, total=total, completed=done, figures="")

    def step(self, done: int, figures: dict[str, float]) -> None:
        self.progress.update(self.task, completed=done, figures=shown(figures, self.metric))

    def say(self, text: str) -> None:
        self.progress.console.print(plain(text), highlight=False, markup=False)

    def end(self) -> None:
        self.progress.stop()


def shown(figures: dict[str, float], metric: Metric) -> str:
    formats = {
        "loss": "loss {:.3f}",
        "solver_steps": "{:.1f} solver steps",
        "max_iter": "of at most {:.0f}",  # these three where they are adapted
        "refine": "refine {:.0f}",
        "residual_weight": "penalty {:g}",
        "residual": "residual {:.1e}",
        "ms": "{:.0f} ms/step",
    }
    parts = [text.format(figures[key]) for key, text in formats.items() if key in figures]
    parts.insert(1, metric.text(figures[metric.name]))
    return "  ".join(parts)


def choose(first: bool) -> Silent:
    if not first:
        return Silent()
    return Bar() if sys.stdout.isatty() else Lines()
