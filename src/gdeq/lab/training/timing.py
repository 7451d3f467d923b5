"""Step times measured in turns, so that other load on the machine slows all methods alike."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gdeq.lab.training import runs
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import precision
from gdeq.lab.training.recordings import wait_for

TURNS, STEPS = 12, 3  # of each method, and the steps of a turn
LEAST, PATIENCE = 4, 60.0  # turns at least; seconds after which no other turn begins


def in_turns(
    steps: dict[str, Callable[[], Any]], turns: int, each: int = 1
) -> tuple[dict[str, list[float]], float | None]:
    """Milliseconds per step in each turn; and the share of it that this process's threads waited
    for a core, where the system tells.  A first turn warms up and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    waited = took = 0.0
    for turn in range(turns + 1):
        if turn > LEAST and took > PATIENCE:
            break
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            before, began = _waiting(), time.perf_counter()
            for _ in range(each):
                steps[name]()
            spent = time.perf_counter() - began
            if turn:
                found[name].append(1e3 * spent / each)
                waited, took = waited + _waiting() - before, took + spent
    return found, waited / took if waited else None


def _waiting() -> float:
    """Seconds that the threads of this process were ready to run and had no core (Linux)."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may have ended
            total += int(file.read_text().split()[1])
    return total / 1e9


def time_runs(
    paths: Sequence[Path], root: Path | None = None, tell: Callable[[str], None] = print
) -> None:
    """A few more steps of each finished run, in turns, from its final weights: `timing.json`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return  # one process alone would time another step
    tell(f"timing {len(paths)} methods in turns")
    with contextlib.ExitStack() as opened:
        learners = {str(path): runs.trained(path, root) for path in paths}
        first = next(iter(learners.values()))
        opened.enter_context(precision(first.config, first.process.device))
        counts: dict[str, list[tuple[int, int]]] = {name: [] for name in learners}
        steps = {name: _step(learner, counts[name]) for name, learner in learners.items()}
        found, waited = in_turns(steps, TURNS, STEPS)
    shared = {
        "session": time.strftime("%Y-%m-%d %H:%M:%S"),
        "steps_per_turn": STEPS,
        "waited": waited,
    }
    for name, some in counts.items():
        evals, vjps = (statistics.mean(column) for column in zip(*some, strict=True))
        told = {**shared, "ms": found[name], "evals": evals, "vjps": vjps}
        RunFolder(Path(name)).write("timing.json", json.dumps(told, indent=1))
    del learners, steps, first
    gc.collect()


def _step(learner: Learner, counts: list[tuple[int, int]]) -> Callable[[], None]:
    """One training step as the run's last ones were; the device has finished it when it returns.

    counts: receives its evaluations of f, the one with autograd among them, and its VJPs.
    """
    epochs = (learner.train_batches.epoch(number) for number in itertools.count())
    batches = (batch for _, batch in itertools.chain.from_iterable(epochs))
    device = learner.process.device
    first = max(learner.config.pretrain_steps, learner.total - 10)  # one of ten may be measured

    def step() -> None:
        learner.step = first + len(counts) % (learner.total - first)
        learner.one_step(*next(batches))
        wait_for([device] if device.type == "cuda" else [])
        solution = learner.deq.solution
        assert solution is not None
        counts.append((int(solution.evals) + 1, int(solution.record.vjps)))

    return step
