"""The training loop: from a configuration and a run folder to a trained model."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gdeq import DEQ, Measured, Unrolled, hold, residual_penalty
from gdeq.context import eager
from gdeq.lab.files import LabError
from gdeq.lab.tasks import registry
from gdeq.lab.tasks.task import Task
from gdeq.lab.training import checkpoint
from gdeq.lab.training import optimization as optim
from gdeq.lab.training.adapting import Controller, beginning, exhausted
from gdeq.lab.training.config import Config, ConfigError, to_dict
from gdeq.lab.training.convergence import ConvergenceWatch
from gdeq.lab.training.folder import RunError, RunFolder, device_name
from gdeq.lab.training.metrics import Sums
from gdeq.lab.training.precision import caution, precision
from gdeq.lab.training.process import Process
from gdeq.lab.training.progress import Silent
from gdeq.lab.training.recordings import Recordings
from gdeq.lab.training.records import Records
from gdeq.lab.training.stopping import (
    DivergedError,
    Interrupted,
    StopRequest,
    TrainingError,
    check_finite,
    unwritten,
)
from gdeq.options import count

# Gradients without VJPs (JFB, plain GDEQ) are measured at one step in ten: the measurement would
# cost them part of an evaluation of f at every step.
SELDOM = 10
__all__ = ["DivergedError", "Interrupted", "Trainer", "TrainingError", "measures", "precision"]


class Trainer:
    """One run.  All that changes from step to step is in `state` and goes into a checkpoint."""

    def __init__(
        self, config: Config, run: RunFolder, process: Process, progress: Silent, root: Path | None
    ) -> None:
        self.config, self.run, self.process, self.progress = config, run, process, progress
        device = process.device
        self.task: Task[Any] = registry.find(config.task)(config, process, root)
        self.train_batches, self.test_batches = self._batches()
        torch.manual_seed(config.seed)
        self.model = self.task.model().to(device)
        self.deq = _deq_of(self.model, self.task)
        self.deq.warns = False  # the log already shows how many samples converge
        if process.rank:  # equal weights in all processes, different dropout masks
            torch.manual_seed(config.seed + 1_000_003 * process.rank)
        self.average = optim.averaged(self.model, config.ema) if config.ema else None
        self.wrapped: nn.Module = self.model
        if process.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = optim.build_optimizer(config, self.model)
        self.total = config.epochs * len(self.train_batches)
        self.step = 0
        adapt = config.adapt
        self.controller = Controller(adapt, config.residual_weight) if adapt.enabled else None
        self.told: int | None = None  # the epoch of the controller's last warning
        # Several GPUs exchange gradients in threads that a CUDA graph cannot record.
        alone = device.type == "cuda" and process.world_size == 1
        self.recordings = Recordings(config.graph and alone, adapt.enabled)
        self.penalised = False  # whether this step has the residual penalty
        self.measured = True  # whether this step measures its backward residual
        # A tensor, so that a recorded step sees its changes.
        self.penalty_weight = torch.zeros((), device=device)
        self.seconds = 0.0  # of training so far, also before a resume
        metric = self.task.metric
        self.sums, self.test_sums = Sums(device, metric), Sums(device, metric)  # of this epoch
        self.saved_at = time.monotonic()
        self.stop = StopRequest(patience=20.0 if process.world_size > 1 else 2.0)
        self.proceed = ""  # the command that continues after a stop
        self.convergence = ConvergenceWatch(config)
        self.records = Records(run, config)

    def _batches(self) -> tuple[Any, Any]:
        """The batches of the training set and of the test set."""
        size, samples = self.config.batch_size, len(self.task.data.train[0])
        if size > samples:
            raise ConfigError(
                f"batch_size {size} is larger than the data set ({count(samples, 'sample')}): "
                "lower batch_size"
            )
        tested = _test_batch(len(self.task.data.test[0]), size, self.process.world_size)
        try:
            return self.task.train_batches(size), self.task.test_batches(tested)
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem

    @property
    def evaluated(self) -> nn.Module:
        """The model that is tested: the averaged one if weights are averaged."""
        return self.model if self.average is None else self.average.module

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

    def notes(self) -> list[str]:
        """Lines to print before the first step: warnings, and what the settings amount to."""
        first = self.config.pretrain_steps
        warning = caution(self.config, self.process.device)
        found = [*([warning] if warning else []), *self.task.notes()]
        if first >= self.total:
            found.append(
                f"warning: all {count(self.total, 'step')} are unrolled, none has a solver: lower "
                f"pretrain_steps, {first}, or raise epochs"
            )
        if self.controller is not None:
            found += beginning(self.controller, first, self.total)
        return found

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

    def _in_use(self) -> dict[str, Any]:
        """What the controller has chosen, for the records; empty without a controller."""
        return self.controller.choice.figures() if self.controller is not None else {}

    # -- one step --------------------------------------------------------------------------------

    def one_step(self, *batch: Tensor) -> None:
        self._prepare(self.step)
        way: tuple[Any, ...] = (self.deq.solver is None, self.penalised, self.measured)
        if self.controller is not None and self.deq.solver is not None:
            way += (self.controller.choice.steps, self.controller.choice.refine)
        self.recordings.rehearse(self._compute, way, self._changed, *batch)
        self.recordings.run(self._compute, way, *batch)
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step += 1

    def _changed(self) -> Iterator[Tensor]:
        """The tensors that a step changes."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield self.sums.values
        for kept in self.optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))

    def set_phase(self, step: int) -> None:
        """How the model is solved at this step: unrolled at first, then as configured."""
        config, deq = self.config, self.deq
        if step < config.pretrain_steps:
            deq.solver, deq.gradient = None, Unrolled(config.pretrain_layers)
        elif self.controller is not None:
            choice = self.controller.choice
            deq.solver, deq.gradient = choice.solver(config), choice.gradient(config)
        else:
            deq.solver, deq.gradient = config.solver.build(), config.gradient.build()

    def _prepare(self, step: int) -> None:
        """Set what depends on the number of the step; a recorded step reads it from tensors."""
        config = self.config
        torch.clear_autocast_cache()  # its half-precision copies are of the weights before a step
        self.set_phase(step)
        if step == config.pretrain_steps:
            self.sums.look()  # measurements of unrolled steps say nothing about the solver
        weight = config.residual_weight
        if self.controller is not None:
            weight = self.controller.choice.residual_weight
        # An unrolled step has no equilibrium, so no penalty either.
        solved = step >= config.pretrain_steps
        self.penalised = solved and weight > 0 and step % config.residual_every == 0
        if self.penalised:
            self.penalty_weight.fill_(weight)
        plain = solved and not self.deq.gradient.needs.vjp  # JFB, GDEQ without refinement
        measured = measures(config, step, SELDOM if plain else 1)
        if plain and measured:
            self.deq.gradient = Measured(self.deq.gradient)
        # (DistributedDataParallel needs a plain backward(), which always measures.)
        self.measured = measured or self.wrapped is not self.model
        optim.set_rate(self.optimizer, optim.learning_rate(config, step, self.total))
        self.model.train()

    def _compute(self, x: Tensor, *targets: Tensor) -> None:
        """The step itself: it uses tensors that stay in place, and never waits for the device."""
        model, task = self.model, self.task
        with contextlib.ExitStack() as opened:
            if self.penalised:  # the penalty is on the f that was solved: same masks and inputs
                opened.enter_context(hold(self.deq.cell))
                inputs = opened.enter_context(deq_inputs(model, task))
            output = self.wrapped(x)
            objective = loss = task.loss(output, *targets)
            if self.penalised:
                objective = loss + self.penalty_weight * self._penalty(*inputs[0])
        self.optimizer.zero_grad(set_to_none=True)
        # With the parameters alone there is no pass down to z, which measures the residual.
        parameters = [p for p in model.parameters() if p.requires_grad]
        objective.backward(inputs=None if self.measured else parameters)
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.config.optimizer.clip)
        self.optimizer.step()
        self._add(self.sums, loss, output, targets, self.deq)
        task.advance(model)

    def _add(
        self, sums: Sums, loss: Tensor, output: Any, targets: tuple[Tensor, ...], deq: DEQ
    ) -> None:
        assert deq.solution is not None
        with torch.no_grad():
            sums.add(loss.detach(), self.task.score(output, *targets), deq.solution)

    def _penalty(self, *inputs: Any) -> Tensor:
        deq = self.deq
        assert deq.solution is not None
        return residual_penalty(lambda z: deq.cell(z, *inputs), deq.solution.z)

    # -- what it tells ---------------------------------------------------------------------------

    def _log(self, epoch: int, figures: dict[str, float]) -> None:
        check_finite(figures["loss"], self.step, self.run.path)
        figures |= self._in_use()
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
            **self._in_use(),
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

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over the test set, with the averaged weights if there are any."""
        model = self.evaluated
        torch.clear_autocast_cache()
        model.eval()
        # With the steps of training: more of them would compute another function wherever those
        # do not reach the equilibrium.
        self.set_phase(self.step - 1)
        deq = _deq_of(model, self.task)
        deq.solver, deq.gradient = self.deq.solver, self.deq.gradient
        way: tuple[Any, ...] = (deq.solver is None,)
        if self.controller is not None and deq.solver is not None:
            way += (self.controller.choice.steps,)
        self.test_sums.clear()
        for _, batch in self.test_batches.epoch():
            if len(batch[0]) == self.test_batches.batch_size:
                self.recordings.run(self._test, way, *batch)
            else:
                with eager():  # one batch of another size is not worth a compilation
                    self._test(*batch)
        found = self.test_sums.read(self.process)
        backward = {name for name, _ in self.test_sums.BACKWARD}  # a test has no backward pass
        return {name: value for name, value in found.items() if name not in backward}

    def _test(self, x: Tensor, *targets: Tensor) -> None:
        torch.clear_autocast_cache()  # else a recording would keep stale copies
        output = self.evaluated(x)
        loss = self.task.losses(output, *targets).mean()
        self._add(self.test_sums, loss, output, targets, _deq_of(self.evaluated, self.task))
        self.task.advance(self.evaluated)

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
        about = {"config": to_dict(self.config), "choice": self._in_use() or None}
        self.run.write_weights(name, self.evaluated.state_dict(), about)


def measures(config: Config, step: int, least: int = 1) -> bool:
    """Whether this step measures the residual of w: one in ``measure_every``, or in ``least``."""
    every = max(config.measure_every, least)
    # One step later each time, or it would always meet the steps that have a penalty.
    return (step - step // every) % every == 0


@contextlib.contextmanager
def deq_inputs(model: nn.Module, task: Task[Any]) -> Iterator[list[tuple[Any, ...]]]:
    """Collect the inputs that the model's DEQ is called with."""
    seen: list[tuple[Any, ...]] = []
    injector = task.injector(model)
    if injector is None:
        handle = _deq_of(model, task).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs)
        )
    else:
        handle = injector.register_forward_hook(lambda *call: seen.append((call[-1],)))
    try:
        yield seen
    finally:
        handle.remove()


def _deq_of(model: nn.Module, task: Task[Any]) -> DEQ:
    found = getattr(model, "deq", None)
    if not isinstance(found, DEQ):
        raise ConfigError(
            f"the model of {task.name} must have its equilibrium layer, a gdeq.DEQ, as the "
            "attribute deq"
        )
    found.eval_solver = None  # tests use the solver of the run's settings, too
    return found


def _test_batch(samples: int, training: int, processes: int) -> int:
    """At least 256 and the training's batch size; if possible a divisor of the test set."""
    least = -(-max(256, training) // processes) * processes
    whole = [size for size in range(least, 2 * least + 1, processes) if samples % size == 0]
    return whole[0] if whole else least
