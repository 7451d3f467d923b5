"""Through the plan: skip what is done, go on with what was begun, stop when the time is up."""

from __future__ import annotations

import io
import json
import signal
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdeq.lab.data import DataError
from gdeq.lab.paper.plan import Planned
from gdeq.lab.paper.timing import Estimates, free, steps_done
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, runs
from gdeq.lab.training.config import Config
from gdeq.lab.training.folder import RunError, RunFolder, read_metrics
from gdeq.lab.training.loop import DivergedError, Interrupted
from gdeq.lab.training.precision import caution
from gdeq.options import count

DONE, FAILED, HALF, MISSING = "finished", "failed", "begun", "missing"
# What comes back from a lent machine; weights and checkpoints stay there.
SMALL = (
    *("config.yaml", "environment.json", "metrics.jsonl"),
    *("summary.json", "similarity.jsonl", "failed.json"),
)
# In which one experiment may differ; the table names the bits of each row.
ASIDE = {"device", "log_every", "test_every", "checkpoint_seconds", "snapshots"}
ASIDE |= {"solver.step_bits"}
SAVING = 10.0  # seconds kept back for the checkpoint and the archive
LEAST = 20.0  # seconds in which it is no use to begin anything
NEXT = 3  # runs that are named of those that are left
GUESS = 20.0  # seconds for the gradients of one epoch, before one has been timed


@dataclass(frozen=True)
class Measure:
    """How the gradients of a run are compared."""

    batches: int = 8
    images: int = 64
    tol: float = 1e-4

    def __post_init__(self) -> None:
        runs.check_exact_tol(self.tol)  # before anything is trained


@dataclass
class Outcome:
    """What became of a run in this call."""

    run: Planned
    state: str
    note: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    worked: bool = False  # it was trained in this call


class Clock:
    """minutes: None for no limit."""

    def __init__(self, minutes: float | None) -> None:
        self.until: float | None = None
        if minutes is not None:
            self.until = time.monotonic() + 60 * minutes - min(SAVING, 6 * minutes)

    @property
    def left(self) -> float:
        return float("inf") if self.until is None else self.until - time.monotonic()


class Journey:
    """One call.

    out: the run folders' place.
    finished: other such places; what is finished there is not made again.
    export: an archive of all small files in ``out``, renewed after each run.
    """

    def __init__(
        self,
        out: Path,
        *,
        minutes: float | None = None,
        overrides: Sequence[str] = (),
        root: Path | None = None,
        finished: Sequence[Path] = (),
        export: Path | None = None,
        measure: Measure | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.clock = Clock(minutes)
        self.out, self.overrides, self.root = out, overrides, root
        self.finished, self.export, self.tell = finished, export, tell
        self.measure = measure or Measure()
        self.estimates = Estimates(root)
        self.per_epoch_compared = GUESS
        self.outcomes: list[Outcome] = []

    # -- what there is ---------------------------------------------------------------------------

    def state(self, run: Planned) -> str:
        if self._summary(run) is not None:
            return DONE
        path = self.out / run.name
        if (path / "failed.json").is_file():
            return FAILED
        return HALF if (path / "config.yaml").is_file() else MISSING

    def _summary(self, run: Planned) -> dict[str, Any] | None:
        for place in (self.out, *self.finished):
            try:
                found = json.loads((place / run.name / "summary.json").read_text())
            except (OSError, ValueError):
                continue
            if isinstance(found, dict):
                return found
        return None

    def check(self, planned: Sequence[Planned]) -> dict[str, Config]:
        """The configuration of each; before any is begun, what is there must be of the same."""
        for place in self.finished:
            if not place.is_dir():
                raise RunError(f"--finished {place}: there is no such folder")
        wanted = {run.name: run.config(self.overrides, self.root) for run in planned}
        for run in planned:
            for place in (self.out, *self.finished):
                path = place / run.name
                if not (path / "config.yaml").is_file():
                    continue
                before = RunFolder.open(path).config()
                other = configs.differences(before, wanted[run.name])
                other = [text for text in other if text.partition(":")[0] not in ASIDE]
                if other:
                    raise RunError(
                        f"{path} was made with other settings ({', '.join(other)}): one table "
                        "wants one recipe; choose another folder, or leave the run out (--only)"
                    )
        return wanted

    def to_compare(self, run: Planned, config: Config) -> list[int]:
        """Epochs whose weights are here and whose gradients have not been compared."""
        path = self.out / run.name
        seen = {r.get("epoch") for r in read_metrics(path / "similarity.jsonl")}
        return [epoch for epoch in runs.snapshots(path) if epoch not in seen]

    # -- the way ---------------------------------------------------------------------------------

    def forecast(self, planned: Sequence[Planned]) -> list[str]:
        try:
            wanted = self.check(planned)
        except DataError as problem:  # how long pre-training is depends on the data
            names = [f"{run.group:10s} {run.name:28s} {self.state(run)}" for run in planned]
            return [*names, f"nothing can be begun: {problem}"]
        self._learn()
        lines = []
        for run in planned:
            config, state = wanted[run.name], self.state(run)
            needs = "" if state == DONE else _minutes(self.estimates.known(config, self._at(run)))
            lines.append(
                f"{run.group:10s} {run.name:28s} {config.epochs:4d} epochs  {state}{needs}"
            )
        return lines

    def go(self, planned: Sequence[Planned]) -> list[Outcome]:
        wanted = self.check(planned)
        for config in wanted.values():
            warning = caution(config, process.start(config.device).device)
            if warning:  # before the first step, with which the process may die
                self.tell(warning)
                break
        self._learn()
        try:
            for run in planned:
                outcome = self._one(run, wanted[run.name])
                self.outcomes.append(outcome)
                if outcome.worked:
                    self.tell(f"{run.name}: {outcome.state}, {outcome.note}")
        finally:
            self._export()
        return self.outcomes

    def _one(self, run: Planned, config: Config) -> Outcome:
        state = self.state(run)
        if state == FAILED:
            return Outcome(run, FAILED)
        if state == DONE:
            if self.to_compare(run, config) and self.clock.left > LEAST:
                self._compare(run, config)
            return Outcome(run, DONE)
        at = self._at(run)
        refusal = self._refusal(run, config, at)
        if refusal:
            return Outcome(run, state, refusal)
        self.tell(f"-- {run.name} ({self._left()})")
        try:
            return self._train(run, config, state)
        finally:
            free()
            self._export()

    def _refusal(self, run: Planned, config: Config, at: int) -> str:
        """Why it is not begun now; empty if it is."""
        left = self.clock.left
        if left < LEAST:
            return "no time left"
        need = self.estimates.known(config, at)
        if need is None and not run.timed:
            need = self.estimates.at_most(config, at)
        patient = at > 0 or run.long  # begun once, or too long for any call
        extra = self.per_epoch_compared * len(config.snapshots)
        if need is None or (run.timed and (need + extra <= left or patient)):
            need = self.estimates.probe(config, at)  # and all is compiled before it is timed
        if need + extra <= self.clock.left or patient:
            return ""
        return f"needs about {(need + extra) / 60:.1f} min, {self._left()}"

    def _train(self, run: Planned, config: Config, state: str) -> Outcome:
        path, until = self.out / run.name, self.clock.until
        again = f"the same command: `gdeq paper run ... --out {self.out}`"
        try:
            if state == HALF:
                runs.resume(path, self.root, tell=self.tell, more=True, until=until, proceed=again)
            else:
                runs.train(path, config, self.root, more=True, until=until, proceed=again)
        except DivergedError as problem:
            told = {"reason": str(problem), "steps": _last_step(path)}
            RunFolder(path).write("failed.json", json.dumps(told, indent=1))
            note = f"the loss became NaN after step {told['steps']}"
            return Outcome(run, FAILED, note, worked=True)
        except Interrupted as stop:
            if stop.number != signal.SIGALRM:  # a person's
                raise
            if self._summary(run) is None:
                return Outcome(run, HALF, "stopped when the time was up, saved", worked=True)
        summary = self._summary(run) or {}
        free()
        if self.clock.left > LEAST:
            self._compare(run, config)
        note = f"{summary['test_accuracy']:.2f} %, {summary['train_seconds']:.0f} s of training"
        return Outcome(run, DONE, note, summary, worked=True)

    def _compare(self, run: Planned, config: Config) -> None:
        """Here and now: the weights stay on this machine."""
        path = self.out / run.name
        for epoch in self.to_compare(run, config):
            if self.clock.left < max(LEAST, self.per_epoch_compared):
                self.tell(f"{run.name}: no time to compare the gradients of epoch {epoch}")
                return
            start = time.monotonic()
            self.tell(f"{run.name}: comparing the gradients of epoch {epoch}")
            for _ in runs.measure_similarity(
                path,
                [epoch],
                self.measure.batches,
                self.measure.images,
                self.root,
                config.device,
                self.measure.tol,
                self.tell,
            ):
                pass
            free()
            self.per_epoch_compared = time.monotonic() - start

    def _learn(self) -> None:
        for place in (*self.finished, self.out):
            self.estimates.learn(sorted(p.parent for p in place.glob("*/summary.json")))

    def _at(self, run: Planned) -> int:
        return steps_done(self.out / run.name) or 0

    def _left(self) -> str:
        left = self.clock.left
        return "no time limit" if left == float("inf") else f"{max(0.0, left) / 60:.1f} min left"

    # -- what comes back -------------------------------------------------------------------------

    def report(self, planned: Sequence[Planned]) -> str:
        """What this call did as a table; of the rest, how many and which are next."""
        worked = [outcome for outcome in self.outcomes if outcome.worked]
        lines = [table(worked)] if worked else []
        found = {outcome.run.name: outcome for outcome in self.outcomes}
        now = [found.get(run.name) or Outcome(run, self.state(run)) for run in planned]
        by_state = {
            state: [outcome for outcome in now if outcome.state == state]
            for state in (DONE, FAILED, HALF, MISSING)
        }
        rest = [
            f"{len(some)} {state}" for state, some in by_state.items() if some and state != DONE
        ]
        lines.append(
            ", ".join([f"{len(by_state[DONE])} of {count(len(now), 'run')} finished", *rest])
        )
        before = [outcome.run.name for outcome in by_state[FAILED] if not outcome.worked]
        if before:
            lines.append(f"failed before: {', '.join(before)}; delete a folder to try that again")
        left = [outcome for outcome in now if outcome.state in (HALF, MISSING)]
        if left:
            more = f", and {len(left) - NEXT} more (--dry-run lists all)" * (len(left) > NEXT)
            lines.append(f"next: {', '.join(map(_with_note, left[:NEXT]))}{more}")
        return "\n".join(lines)

    def _export(self) -> None:
        """All small files as one archive, whole or as it was before."""
        if self.export is None:
            return
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            for file in small_files(self.out):
                archive.add(file, str(file.relative_to(self.out)))
        self.export.parent.mkdir(parents=True, exist_ok=True)
        half = self.export.with_name(self.export.name + ".part")
        half.write_bytes(data.getvalue())
        half.replace(self.export)


def small_files(out: Path) -> Iterator[Path]:
    for config in sorted(out.glob("*/config.yaml")):
        yield from (file for name in SMALL if (file := config.with_name(name)).is_file())


def table(outcomes: Sequence[Outcome]) -> str:
    head = f"{'run':28s} {'state':9s} {'accuracy':>8s} {'ms/step':>8s} {'seconds':>8s}  note"
    lines = [head]
    for outcome in outcomes:
        figures = " ".join(
            f"{outcome.summary[key]:8.2f}" if key in outcome.summary else f"{'–':>8s}"
            for key in ("test_accuracy", "ms_per_step", "train_seconds")
        )
        lines.append(f"{outcome.run.name:28s} {outcome.state:9s} {figures}  {outcome.note}")
    return "\n".join(line.rstrip() for line in lines)


def _with_note(outcome: Outcome) -> str:
    note = "; ".join(filter(None, ("begun" * (outcome.state == HALF), outcome.note)))
    return outcome.run.name + f" ({note})" * bool(note)


def _minutes(seconds: float | None) -> str:
    return "" if seconds is None else f", needs about {seconds / 60:.1f} min"


def _last_step(path: Path) -> int:
    steps = [r["step"] for r in read_metrics(path / "metrics.jsonl") if "step" in r]
    return max(steps, default=0)
