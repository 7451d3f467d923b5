"""Through the plan: skip what is done, go on with what was begun, make the rest."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gdeq.lab.data import DataError
from gdeq.lab.paper.plan import Planned
from gdeq.lab.report.runs import read_run
from gdeq.lab.report.tables import Table, shown
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, runs
from gdeq.lab.training.config import Config
from gdeq.lab.training.folder import RunError, RunFolder
from gdeq.lab.training.precision import caution
from gdeq.lab.training.stopping import DivergedError
from gdeq.options import count

DONE, FAILED, BEGUN, MISSING = "finished", "failed", "begun", "missing"
# In which the runs of one experiment may differ; the table names the bits of each row.
ASIDE = {"device", "log_every", "test_every", "checkpoint_seconds", "snapshots", "solver.step_bits"}


class Journey:
    """One call.

    out: where the run folders are.
    batches, images: mini-batches by which the gradients of a run are compared, and their size.
    """

    def __init__(
        self,
        out: Path,
        *,
        overrides: Sequence[str] = (),
        root: Path | None = None,
        batches: int = 8,
        images: int = 64,
        exact_tol: float = 1e-4,
        tell: Callable[[str], None] = print,
    ) -> None:
        runs.check_exact_tol(exact_tol)  # before anything is trained
        self.out, self.overrides, self.root, self.tell = out, overrides, root, tell
        self.batches, self.images, self.exact_tol = batches, images, exact_tol
        self.notes: dict[str, str] = {}  # on each run that was trained in this call

    def state(self, run: Planned) -> str:
        path = self.out / run.name
        if not (path / "config.yaml").is_file():
            return MISSING
        found = read_run(path)
        return DONE if found.finished else BEGUN if found.failed is None else FAILED

    def check(self, planned: Sequence[Planned]) -> dict[str, Config]:
        """The configuration of each; before any is begun, what is there must be of the same."""
        wanted = {run.name: run.config(self.overrides, self.root) for run in planned}
        for name, config in wanted.items():
            path = self.out / name
            if not (path / "config.yaml").is_file():
                continue
            other = configs.differences(RunFolder.open(path).config(), config)
            other = [text for text in other if text.partition(":")[0] not in ASIDE]
            if other:
                raise RunError(
                    f"{path} was made with other settings ({', '.join(other)}), but all runs of a "
                    "table need the same: choose another folder, or leave the run out (--only)"
                )
        return wanted

    def forecast(self, planned: Sequence[Planned]) -> list[str]:
        lines = [f"{run.group:10s} {run.name:30s} {self.state(run)}" for run in planned]
        try:
            self.check(planned)
        except DataError as problem:  # how long pre-training is depends on the data
            lines.append(f"cannot start: {problem}")
        return lines

    def go(self, planned: Sequence[Planned]) -> None:
        wanted = self.check(planned)
        cautions = (caution(c, process.start(c.device).device) for c in wanted.values())
        warning = next((text for text in cautions if text), None)
        if warning:  # before the first step, with which the process may die
            self.tell(warning)
        for run in planned:
            config, state = wanted[run.name], self.state(run)
            if state in (BEGUN, MISSING):
                self.tell(f"-- {run.name}")
                self.notes[run.name] = self._train(run, config, state)
                self.tell(f"{run.name}: {self.state(run)}, {self.notes[run.name]}")
            if self.state(run) == DONE:
                self._compare(run, config)

    def _train(self, run: Planned, config: Config, state: str) -> str:
        path = self.out / run.name
        again = f"the same command: `gdeq paper run ... --out {self.out}`"
        try:
            if state == BEGUN:
                runs.resume(path, self.root, tell=self.tell, more=True, proceed=again)
            else:
                runs.train(path, config, self.root, more=True, proceed=again)
        except DivergedError as problem:
            steps = max((record["step"] for record in read_run(path).steps), default=0)
            told = {"reason": str(problem), "steps": steps}
            RunFolder(path).write("failed.json", json.dumps(told, indent=1))
            return f"the loss became NaN after step {steps}"
        finally:
            _free()
        made = read_run(path)
        return f"{shown(made.score, '.2f')} %, {shown(made.seconds, '.0f')} s of training"

    def _compare(self, run: Planned, config: Config) -> None:
        """The gradients of each snapshot that was not looked at before."""
        path = self.out / run.name
        seen = {record.get("epoch") for record in read_run(path).similarity}
        for epoch in runs.snapshots(path):
            if epoch in seen:
                continue
            self.tell(f"{run.name}: comparing the gradients of epoch {epoch}")
            for _ in runs.measure_similarity(
                *(path, [epoch], self.batches, self.images),
                *(self.root, config.device, self.exact_tol, self.tell),
            ):
                pass
            _free()

    def report(self, planned: Sequence[Planned]) -> str:
        """What this call did as a table, and how much is there."""
        states = {run.name: self.state(run) for run in planned}
        told = {name: read_run(self.out / name) for name in self.notes}
        columns = {
            "run": list(told),
            "state": [states[name] for name in told],
            "accuracy": [shown(own.score, ".2f") for own in told.values()],
            "ms/step": [shown(own.ms_per_step, ".2f") for own in told.values()],
            "seconds": [shown(own.seconds, ".0f") for own in told.values()],
            "note": list(self.notes.values()),
        }
        lines = [Table.of(columns).text()] if told else []
        counts = {state: list(states.values()).count(state) for state in (FAILED, BEGUN, MISSING)}
        rest = [f"{number} {state}" for state, number in counts.items() if number]
        finished = len(states) - sum(counts.values())
        lines.append(", ".join([f"{finished} of {count(len(states), 'run')} finished", *rest]))
        before = [name for name, state in states.items() if state == FAILED and name not in told]
        if before:
            lines.append(f"failed before: {', '.join(before)}; delete a folder to try that again")
        return "\n".join(lines)


def _free() -> None:
    """What a run leaves behind: its recordings hold each other, and memory with them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
