"""The training loop around the step: epochs, records, checkpoints, and how a run ends."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gdeq.lab.files import LabError
from gdeq.lab.training import checkpoint
from gdeq.lab.training import optimization as optim
from gdeq.lab.training.adapting import exhausted
from gdeq.lab.training.config import Config, to_dict
from gdeq.lab.training.convergence import ConvergenceWatch
from gdeq.lab.training.folder import RunError, RunFolder, device_name
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import precision
from gdeq.lab.training.process import Process
from gdeq.lab.training.progress import Silent
from gdeq.lab.training.records import Records
from gdeq.lab.training.stopping import Interrupted, StopRequest, check_finite, unwritten


class Trainer(Learner):
    """One run.  All that changes from step to step is in `state` and goes into a checkpoint."""

    def __init__(
        self, config: Config, run: RunFolder, process: Process, progress: Silent, root: Path | None
    ) -> None:
        super().__init__(config, process, root)
        self.run, self.progress = run, progress
        self.told: int | None = None  # the epoch of the controller's last warning
        self.seconds = 0.0  # of training so far, also before a resume
        self.saved_at = time.monotonic()
        self.stop = StopRequest(patience=20.0 if process.world_size > 1 else 2.0)
        self.proceed = ""  # the command that continues after a stop
        self.convergence = ConvergenceWatch(config)
        self.records = Records(run, config)

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a resume needs.  Every process must call this: each has its own random state."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "recording_seconds": self.recordings.seconds,
            "sums": self.sums.state(self.process),
            "model": self.model.state_dict(),
            "averaged": self.average.state_dict() if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "adapt": self.controller.state() if self.controller else None,
            "task": [self.process.gather(tensor) for tensor in self.task.state()],
            "records": self.records.state(),
            **self.process.random_state(),
            "metrics_size": self.run.size(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds.  Every process must call this with the same state."""
        try:
            self._restore(state)
        except (LookupError, RuntimeError, TypeError, ValueError) as problem:
            if isinstance(problem, LabError):
                raise
            raise checkpoint.CheckpointError(
                f"the checkpoint of {self.run.path} does not fit its configuration: {problem}"
            ) from problem

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        if self.step > self.total:
            least = -(-self.step // len(self.train_batches))
            raise RunError(
                f"{self.run.path} is at step {self.step}, beyond the {self.total} steps of "
                f"epochs={self.config.epochs}: leave that out, or give epochs={least} or more"
            )
        self.recordings.seconds = state["recording_seconds"]
        self.sums.restore(state["sums"], self.process)
        checkpoint.load_weights(self.model, state["model"])
        if self.average is not None:
            checkpoint.load_weights(self.average, state["averaged"])
        self.records.restore(state["records"])
        optim.restore_moments(self.optimizer, state["optimizer"])
        if self.controller is not None and state["adapt"] is not None:
            self.controller.restore(state["adapt"], self.step / self.total)
        kept = state.get("task", [])  # one row a process
        if all(len(rows) == self.process.world_size for rows in kept):
            self.task.restore([rows[self.process.rank] for rows in kept])
        self.process.restore_random_state(state)

    def save(self) -> None:
        check_finite(self.sums.read(self.process)["loss"], self.step, self.run.path)
        # The loss was computed before the last update, which may have made weights infinite.
        if not torch.stack([p.isfinite().all() for p in self.model.parameters()]).all():
            check_finite(math.nan, self.step, self.run.path)
        state = self.state()
        if self.process.first:
            self.run.save(state, self.config)
        self.process.wait()
        self.saved_at = time.monotonic()

    def whereabouts(self) -> str:
        """Where a resumed run continues, as a sentence."""
        if self.step == self.total:
            return f"step {self.total} of {self.total} is done: only the end of the run is left"
        epoch = self.step // len(self.train_batches) + 1
        return f"continuing at step {self.step} of {self.total} (epoch {epoch})"

    # -- the loop --------------------------------------------------------------------------------

    def fit(self, more: bool = False, proceed: str | None = None) -> dict[str, Any]:
        """Train to the end; returns the summary.

        more: other runs follow.  A signal then raises `Interrupted` even if this run finishes.
        proceed: the command to continue with after a stop, by default `gdeq train --resume`.
        """
        path = self.run.path
        self.proceed = proceed or f"`gdeq train --resume {path}`"
        try:
            summary = self._fit()
        except OSError as problem:
            raise unwritten(problem, path) from problem
        finally:
            self.progress.end()
            self.records.close()
            # DistributedDataParallel must not outlive the process group.  Its destructor holds
            # Python's lock and waits for a thread of the group, which waits for that lock.
            self.wrapped = self.model
        if self.process.any(more and self.stop.caught is not None):
            raise Interrupted(
                self.stop.caught,
                f"stopped after {path}, which is finished; the same command goes on with the rest",
            )
        return summary

    def _fit(self) -> dict[str, Any]:
        config, device = self.config, self.process.device
        if self.process.first:
            self.records.open(self.step)
        title = f"{self.task.title_of(config)} {config.gradient.name}"
        self.progress.begin(title, self.total, self.step, self.task.metric)
        for text in self.notes():
            self.progress.say(text)
        if self.process.world_size > 1:  # if all processes die, none can say it later
            self.progress.say(f"if a process is lost: `gdeq train --resume {self.run.path}`")
        with self.stop, precision(config, device):
            self._epochs()
        return self._finish()

    def _epochs(self) -> None:
        per_epoch = len(self.train_batches)
        while self.step < self.total:
            epoch, index = divmod(self.step, per_epoch)
            if index == 0:
                self.sums.clear()
            self._epoch(epoch, index)
            self._end_of_epoch(epoch)

    def _epoch(self, epoch: int, index: int) -> None:
        watch, window, counted = self._clock(), 0.0, self.step
        per_epoch = len(self.train_batches)
        batches = self.train_batches.epoch(epoch, start=index)
        upcoming = next(batches, None)
        while upcoming is not None:
            at, batch = upcoming
            self.one_step(*batch)
            upcoming = next(batches, None)  # prepared while the device still works on the step
            logging = self.step % self.config.log_every == 0
            # Not after the last step, or a resume would skip the end of the epoch.
            saving = at + 1 < per_epoch and self._must_save()
            looking = self._must_look()
            if not (logging or looking or saving):
                continue
            figures = self.sums.read(self.process, since_mark=True)  # waits for the device
            spent = self._clock() - watch
            self.seconds, window = self.seconds + spent, window + spent
            if logging:
                figures["ms"] = 1e3 * window / max(1, self.step - counted)
                window, counted = 0.0, self.step
                self._log(epoch, figures)
                self.sums.mark()
            if looking:
                self._adapt(epoch)
            if saving:
                self.save()
                if self.process.any(self.stop.caught is not None):
                    raise self._interrupted()
            watch = self._clock()
        self.sums.read(self.process)
        self.seconds += self._clock() - watch

    def _clock(self) -> float:
        """Seconds, without the time spent recording steps."""
        return time.perf_counter() - self.recordings.seconds

    def _interrupted(self) -> Interrupted:
        text = f"stopped at step {self.step}; continue with {self.proceed}"
        return Interrupted(self.stop.caught, text)

    def _must_save(self) -> bool:
        if self.process.world_size > 1 and self.step % self.config.log_every:
            return False  # asking the other processes costs a message
        late = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        return self.process.any(self.stop.caught is not None or late)

    def _must_look(self) -> bool:
        if self.controller is None or self.step % self.controller.every:
            return False
        return self.step - self.config.pretrain_steps >= self.controller.every

    def _adapt(self, epoch: int) -> None:
        """Let the controller decide.  Every process must call this, and all decide the same."""
        assert self.controller is not None
        figures = self.sums.read_since_look(self.process)
        if figures is None:  # nothing was measured yet, as right after a resume
            return
        self.sums.look()
        measured = {name: figures[name] for name in ("residual", "batch_error")}
        residual, error = measured.values()
        choice = self.controller.look(residual, error, self.step / self.total)
        if choice is not None:
            record = {"kind": "adapt", "step": self.step, "epoch": epoch + 1}
            judged = zip(measured, self.controller.above, strict=True)
            why = {"above_target": [name for name, high in judged if high]}  # none: room to spare
            self.records.add({**record, **choice.figures(), **measured, **why})
        if any(self.controller.exhausted) and epoch != self.told:
            self.told = epoch
            for text in exhausted(self.step, self.controller.exhausted, residual, error):
                self.progress.say(text)

    # -- what it tells ---------------------------------------------------------------------------

    def _log(self, epoch: int, figures: dict[str, float]) -> None:
        check_finite(figures["loss"], self.step, self.run.path)
        figures |= self.in_use()
        self.progress.step(self.step, figures)
        record = {"kind": "step", "step": self.step, "epoch": epoch + 1, **figures}
        record["lr"] = optim.learning_rate(self.config, self.step - 1, self.total)
        self.records.add(record)
        if not self.records.has_unrolled(record):
            warning = self.convergence.warning(epoch, self.step, figures["residual"])
            if warning is not None:
                self.progress.say(warning)

    def _end_of_epoch(self, epoch: int) -> None:
        train = self.sums.read(self.process)
        check_finite(train["loss"], self.step, self.run.path)
        tested = (epoch + 1) % self.config.test_every == 0 or self.step == self.total
        metric = self.task.metric
        test: dict[str, Any] = self.evaluate() if tested else {"loss": None, metric.name: None}
        told = ("solver_steps", "residual", "backward_residual", "backward_error", "batch_error")
        record = {
            **{"kind": "epoch", "epoch": epoch + 1, "step": self.step, "seconds": self.seconds},
            **{f"train_{name}": train[name] for name in ("loss", metric.name)},
            **{f"test_{name}": test[name] for name in ("loss", metric.name)},
            **{name: train[name] for name in told},
            **self.in_use(),
        }
        self.records.add(record)
        if tested:
            self.progress.say(
                f"epoch {epoch + 1}/{self.config.epochs}: test {metric.text(test[metric.name])}, "
                f"loss {test['loss']:.3f}, {self.seconds:.0f} s of training"
            )
        if self.process.first and epoch + 1 in self.config.snapshots:
            self._write_weights(f"snapshots/epoch-{epoch + 1:03d}.safetensors")
        timer = self.config.checkpoint_seconds
        late = time.monotonic() - self.saved_at >= min(max(10.0, timer / 6), timer)
        stop = self.process.any(self.stop.caught is not None)
        # Always after the first epoch, so that a short run that is killed leaves a checkpoint.
        if self.step == self.total or stop or epoch == 0 or self.process.any(late):
            self.save()
        if stop and self.step < self.total:
            raise self._interrupted()

    def _finish(self) -> dict[str, Any]:
        if not self.process.first:  # only the first process writes files
            return {}
        config, metric, last = self.config, self.task.metric, self.records.last
        summary = {
            metric.key: last[metric.key],
            "metric": asdict(metric),
            "task": config.task,
            "epochs": config.epochs,
            "gradient": config.gradient.name,
            "pretrain": config.pretrain_steps > 0,
            "adaptive": config.adapt.enabled,
            "seed": config.seed,
            "ms_per_step": self.records.ms_per_step(),
            "device": device_name(self.process.device),
            "steps": last["step"],
            "processes": self.process.world_size,
            "train_seconds": self.seconds,
            "recording_seconds": self.recordings.seconds,  # compiling too; not in train_seconds
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "test_samples": len(self.task.data.test[0]),
        }
        self._write_weights("weights.safetensors")
        self.run.write("summary.json", json.dumps(summary, indent=1))
        return summary

    def _write_weights(self, name: str) -> None:
        about = {"config": to_dict(self.config), "choice": self.in_use() or None}
        self.run.write_weights(name, self.evaluated.state_dict(), about)
