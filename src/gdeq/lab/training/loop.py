"""The training loop: from a configuration and a run folder to a trained model."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gdeq.fast.kernels.loss import cross_entropy
from gdeq.gradients import Unrolled
from gdeq.lab import data as datasets
from gdeq.lab.training import checkpoint
from gdeq.lab.training.adapting import Controller, beginning, exhausted
from gdeq.lab.training.averaging import Average
from gdeq.lab.training.building import build_batches, build_model, share_batch_statistics
from gdeq.lab.training.config import Config, ConfigError
from gdeq.lab.training.convergence import ConvergenceWatch
from gdeq.lab.training.failures import DivergedError, TrainingError, check_finite, unwritten
from gdeq.lab.training.folder import RunError, RunFolder
from gdeq.lab.training.lock import RunLock
from gdeq.lab.training.metrics import Sums
from gdeq.lab.training.optimization import build_optimizer, learning_rate, restore_moments, set_rate
from gdeq.lab.training.precision import caution, precision
from gdeq.lab.training.process import Process
from gdeq.lab.training.progress import Silent
from gdeq.lab.training.randomness import random_state, restore_random_state
from gdeq.lab.training.recordings import Recordings, kind_of
from gdeq.lab.training.records import Recorder, summary, unrolled_steps
from gdeq.lab.training.stopping import Interrupted, StopRequest
from gdeq.models.mdeq import MDEQ
from gdeq.options import count
from gdeq.regularize import hold, jacobian_penalty, residual_penalty

__all__ = [
    "DivergedError",
    "Interrupted",
    "Trainer",
    "TrainingError",
    "build_model",
    "learning_rate",
    "precision",
]


class Trainer:
    """One run.  All that changes from step to step is in `state` and goes into a checkpoint."""

    def __init__(
        self, config: Config, run: RunFolder, process: Process, progress: Silent, root: str | None
    ) -> None:
        self.config, self.run, self.process, self.progress = config, run, process, progress
        device = process.device
        self.dataset = datasets.load(config.data, root, device)
        samples = len(self.dataset.train_x)
        if config.batch_size > samples:
            raise ConfigError(
                f"batch_size {config.batch_size} is larger than the data set "
                f"({count(samples, 'sample')}): lower batch_size"
            )
        model = build_model(config, self.dataset).to(device)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = share_batch_statistics(model, config, process)
        if process.rank:  # the same weights everywhere, but dropout masks of its own
            torch.manual_seed(config.seed + 1_000_003 * process.rank)
        self.average = Average(self.model, config.ema) if config.ema else None
        self.wrapped: nn.Module = self.model
        if process.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = build_optimizer(config, self.model)
        self.train_batches, self.test_batches = build_batches(config, self.dataset, process)
        self.total = config.epochs * len(self.train_batches)
        self.step = 0
        adapt = config.adapt
        self.controller = Controller(adapt, config.residual_weight) if adapt.enabled else None
        self.told: int | None = None  # the epoch of its last warning
        # Between several GPUs gradients are exchanged by threads that no graph sees.
        alone = device.type == "cuda" and process.world_size == 1
        self.recordings = Recordings(config.graph and alone, adapt.enabled, kind_of(config))
        self.penalised: tuple[str, ...] = ()  # the penalties of the step under way
        self.measured = True  # its gradient's residual is
        # Their weights; on a GPU a step reads them where they lie.
        self.penalty_weights: dict[str, float | Tensor] = {
            name: torch.zeros((), device=device) if device.type == "cuda" else 0.0
            for name in ("jacobian", "residual")
        }
        self.seconds = 0.0  # spent training, over all pieces of the run
        self.sums, self.test_sums = Sums(device), Sums(device)  # of this epoch
        self.saved_at = time.monotonic()
        self.stop = StopRequest(patience=20.0 if process.world_size > 1 else 2.0)
        self.proceed: str | None = None  # the command that goes on, where it is not --resume
        self.asked_to_stop = False  # by a signal that came too late to cut the training short
        self.convergence = ConvergenceWatch(config)
        self.run_lock = RunLock()
        self.recorder: Recorder | None = None  # of the first process, while it trains

    @property
    def evaluated(self) -> MDEQ:
        """The averaged weights where there are any."""
        return self.model if self.average is None else self.average.model

    # -- state -----------------------------------------------------------------------------------

    def lock(self) -> None:
        """Keep others out of the run folder until `fit` ends.  All processes call it."""
        holder = (self.run_lock.take(self.run.path) if self.process.first else None) or ""
        holder = self.process.agree(holder)
        if holder:
            raise RunError(
                f"{self.run.path} is being trained already, by process {holder}: wait until it "
                f"ends, or stop it (SIGTERM saves first) and then `gdeq train --resume "
                f"{self.run.path}`"
            )

    def state(self) -> dict[str, Any]:
        """All processes call it: each has a random state and sums of its own."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "recording_seconds": self.recordings.seconds,
            **self.sums.state(self.process),
            "model": self.model.state_dict(),
            "averaged": self.average.model.state_dict() if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "adapt": self.controller.state() if self.controller else None,
            **random_state(self.process),
            "metrics_size": self.run.size(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """All processes call it, with the same state."""
        self.lock()  # before anything in the folder is touched
        try:
            self.take_over(state)
            metrics_size = state["metrics_size"]
        except (KeyError, RuntimeError, ValueError) as problem:
            self.run_lock.release()
            raise checkpoint.CheckpointError(
                f"the checkpoint of {self.run.path} does not fit its config.yaml: {problem}"
            ) from problem
        self.process.wait()  # until the last one has read the folder
        if self.process.first:
            for place in checkpoint.set_aside(self.run.path, newer_than=self.step):
                self.progress.say(f"the damaged checkpoint is now {place.name}")
            self.run.cut(metrics_size)

    def take_over(self, state: dict[str, Any]) -> None:
        """What a checkpoint holds; the run folder is left alone."""
        self.step, self.seconds = state["step"], state["seconds"]
        self.recordings.seconds = state.get("recording_seconds", 0.0)  # older ones do not say
        self.sums.restore(state, self.process)
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.model.load_state_dict(state["averaged"])
        restore_moments(self.optimizer, state["optimizer"])
        if self.controller is not None and state.get("adapt") is not None:
            self.controller.restore(state["adapt"], self.step / self.total)
        restore_random_state(state, self.process)

    def save(self) -> None:
        check_finite(self.sums.read(self.process)["loss"], self.step, self.run.path)
        # The loss is from before the last update: that may have spoilt the weights.
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            check_finite(math.nan, self.step, self.run.path)
        state = self.state()
        if self.process.first:
            self.run.sync()
            checkpoint.save(self.run.path, self.step, state)
        self.process.wait()
        self.saved_at = time.monotonic()

    def notes(self) -> list[str]:
        """What its settings come to, where that is not plain from them."""
        first, found = self.config.pretrain_steps, []
        if first >= self.total:
            found.append(
                f"warning: all {count(self.total, 'step')} are unrolled, none has a solver: lower "
                f"pretrain_steps, {first}, or raise epochs"
            )
        if self.controller is not None:
            found += beginning(self.controller, first, self.total)
        return found

    def whereabouts(self) -> str:
        """Where a resumed run goes on."""
        if self.step == self.total:
            return f"step {self.total} of {self.total} is done: only the end of the run is left"
        epoch = self.step // len(self.train_batches) + 1
        return f"continuing at step {self.step} of {self.total} (epoch {epoch})"

    # -- the loop --------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        try:
            self.lock()
            return self._fit()
        except OSError as problem:
            raise unwritten(problem, self.run.path) from problem
        finally:
            self.progress.end()
            if self.recorder is not None:
                self.recorder.close()
            self.run_lock.release()
            # Or it outlives the group: its end would then wait, with Python's lock in hand, for a
            # thread of the group that waits for that lock.
            self.wrapped = self.model

    def _fit(self) -> dict[str, Any]:
        config, device = self.config, self.process.device
        if self.process.first:
            self.recorder = Recorder(self.run, self.step)
        title = f"{config.data} {config.model.size} {config.gradient.name}"
        self.progress.begin(title, self.total, self.step)
        self._say(caution(config, device))
        for text in self.notes():
            self._say(text)
        with self.stop, precision(config, device):
            self._epochs()
        self.asked_to_stop = self.process.any(self.stop.caught is not None)
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
            upcoming = next(batches, None)  # made while the device is at work on the step
            logging = self.step % self.config.log_every == 0
            # Not after the last step: who resumes there would miss the end of the epoch.
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
        """It stands still while a step is recorded."""
        return time.perf_counter() - self.recordings.seconds

    def _interrupted(self) -> Interrupted:
        proceed = self.proceed or f"`gdeq train --resume {self.run.path}`"
        return Interrupted(
            self.stop.caught or signal.SIGTERM,
            f"stopped at step {self.step}; continue with {proceed}",
        )

    def _must_save(self) -> bool:
        if self.process.world_size > 1 and self.step % self.config.log_every:
            return False  # asking the others costs a message: not at every step
        late = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        return self.process.any(self.stop.caught is not None or late)

    def _must_look(self) -> bool:
        if self.controller is None or self.step % self.controller.every:
            return False
        return self.step - self.config.pretrain_steps >= self.controller.every

    def _adapt(self, epoch: int) -> None:
        """All processes call it, and measure and choose the same."""
        assert self.controller is not None
        figures = self.sums.read_since_look(self.process)
        if figures is None:  # resumed from an older checkpoint a few steps ago
            return
        self.sums.look()
        names = "residual", "batch_error"
        residual, error = (figures[name] for name in names)
        measured = dict(zip(names, (residual, error), strict=True))
        choice = self.controller.look(residual, error, self.step / self.total)
        if choice is not None:
            record = {"kind": "adapt", "step": self.step, "epoch": epoch + 1}
            above = [name for name, high in zip(names, self.controller.above, strict=True) if high]
            why = {"above_target": above}  # none: room to spare
            self._write({**record, **choice.figures(), **measured, **why})
        if any(self.controller.exhausted) and epoch != self.told:
            self.told = epoch
            for text in exhausted(self.step, self.controller.exhausted, residual, error):
                self._say(text)

    def _in_use(self) -> dict[str, Any]:
        """For the records: what the controller has chosen, where there is one."""
        return self.controller.choice.figures() if self.controller is not None else {}

    # -- one step --------------------------------------------------------------------------------

    def one_step(self, images: Tensor, labels: Tensor) -> None:
        self._prepare(self.step)
        unrolled = self.model.deq.solver is None
        way: tuple[Any, ...] = (unrolled, self.penalised, self.measured)
        if self.controller is not None and not unrolled:
            choice = self.controller.choice
            way += (choice.steps, choice.refine)
        self.recordings.run(self._compute, way, images, labels)
        self.step += 1

    def set_phase(self, step: int) -> None:
        """How the model is solved at this step: unrolled at first, then as configured."""
        config, deq = self.config, self.model.deq
        if step < config.pretrain_steps:
            deq.solver, deq.gradient = None, Unrolled(config.pretrain_layers)
        elif self.controller is not None:
            choice = self.controller.choice
            deq.solver = choice.solver(config)
            deq.gradient = choice.gradient(config)
        else:
            deq.solver, deq.gradient = config.solver.build(), config.gradient.build()

    def _prepare(self, step: int) -> None:
        """All that depends on the number of the step; what is a number goes into its tensor."""
        config = self.config
        torch.clear_autocast_cache()  # its half-precision copies are of the weights before a step
        self.set_phase(step)
        # Unrolled, there is no equilibrium to speak of.
        solved = step >= config.pretrain_steps
        if step == config.pretrain_steps:
            self.sums.look()  # what went before says nothing of the solver
        residual_weight = config.residual_weight
        if self.controller is not None:
            residual_weight = self.controller.choice.residual_weight
        wanted = {
            "jacobian": (config.jacobian_weight, config.jacobian_every),
            "residual": (residual_weight, config.residual_every),
        }
        self.penalised = tuple(
            name
            for name, (weight, every) in wanted.items()
            if solved and weight > 0 and step % every == 0
        )
        # (Of DistributedDataParallel all gradients are asked for, in the way it knows.)
        self.measured = self.wrapped is not self.model or measures(config, step)
        for name in self.penalised:
            weight, kept = wanted[name][0], self.penalty_weights[name]
            if isinstance(kept, Tensor):
                kept.fill_(weight)
            else:
                self.penalty_weights[name] = weight
        set_rate(self.optimizer, learning_rate(config, step, self.total))
        if self.average is not None:
            self.average.prepare(step)
        self.model.train()

    def _compute(self, images: Tensor, labels: Tensor) -> None:
        """The step itself: reads and writes tensors that stay where they are, waits for nothing."""
        config, model = self.config, self.model
        # Penalties are on the f that was solved: with its dropout masks and its injection.
        with hold(model.deq.cell), _outputs(model.stem) as injections:
            logits = self.wrapped(images)
            loss = cross_entropy(logits, labels, config.label_smoothing)
            objective = loss
            for name in self.penalised:
                penalty = self._penalty(name, *injections)
                objective = objective + self.penalty_weights[name] * penalty
        self.optimizer.zero_grad(set_to_none=True)
        # The way down to z, which measures the residual, is none to the parameters.
        parameters = [p for p in model.parameters() if p.requires_grad]
        objective.backward(inputs=None if self.measured else parameters)
        self.clip_gradients()
        self.optimizer.step()
        self.sums.add(logits.detach(), labels, loss.detach(), model)
        if self.average is not None:
            self.average.update()

    def clip_gradients(self) -> None:
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)

    def _penalty(self, name: str, injection: Tensor) -> Tensor:
        deq = self.model.deq
        assert deq.solution is not None
        z = deq.solution.z
        if name == "residual":
            return residual_penalty(lambda z: deq.cell(z, injection), z)
        step = self.config.jacobian_step
        return jacobian_penalty(lambda z: deq.cell(z, injection), z, step=step)

    # -- what it tells ---------------------------------------------------------------------------

    def _say(self, text: str | None) -> None:
        if text is not None:
            self.progress.say(text)

    def _log(self, epoch: int, figures: dict[str, float]) -> None:
        check_finite(figures["loss"], self.step, self.run.path)
        figures |= self._in_use()
        self.progress.step(self.step, figures)
        record = {"kind": "step", "step": self.step, "epoch": epoch + 1, **figures}
        record["lr"] = learning_rate(self.config, self.step - 1, self.total)
        self._write(record)
        if not unrolled_steps(record, self.config):
            target = self.controller.forward.target if self.controller else None
            self._say(self.convergence.warning(epoch, self.step, figures["residual"], target))

    def _write(self, record: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.write(record)

    def _end_of_epoch(self, epoch: int) -> None:
        train = self.sums.read(self.process)
        check_finite(train["loss"], self.step, self.run.path)
        tested = (epoch + 1) % self.config.test_every == 0 or self.step == self.total
        test = self.evaluate() if tested else {"loss": None, "accuracy": None}
        record = {
            "kind": "epoch",
            "epoch": epoch + 1,
            "step": self.step,
            "seconds": self.seconds,
            "train_loss": train["loss"],
            "train_accuracy": train["accuracy"],
            "test_loss": test["loss"],
            "test_accuracy": test["accuracy"],
            "solver_steps": train["solver_steps"],
            "residual": train["residual"],
            "backward_residual": train["backward_residual"],
            "backward_error": train["backward_error"],
            "batch_error": train["batch_error"],
            **self._in_use(),
        }
        self._write(record)
        if tested:
            self.progress.say(
                f"epoch {epoch + 1}/{self.config.epochs}: test accuracy {test['accuracy']:.2f} %, "
                f"loss {test['loss']:.3f}, {self.seconds:.0f} s of training"
            )
        if self.process.first and epoch + 1 in self.config.snapshots:
            self.run.write_weights(
                f"snapshots/epoch-{epoch + 1:03d}.safetensors", self.evaluated.state_dict()
            )
        timer = self.config.checkpoint_seconds
        late = time.monotonic() - self.saved_at >= min(max(10.0, timer / 6), timer)
        stop = self.process.any(self.stop.caught is not None)
        # After the first one always: of a short run that is killed, something is left.
        if self.step == self.total or stop or epoch == 0 or self.process.any(late):
            self.save()
        if stop and self.step < self.total:
            raise self._interrupted()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy over the test set, by the averaged weights where there are any."""
        model = self.evaluated
        torch.clear_autocast_cache()
        model.eval()
        model.deq.solver, model.deq.gradient = self.model.deq.solver, self.model.deq.gradient
        way: tuple[Any, ...] = (model.deq.solver is None,)
        if self.controller is not None and model.deq.solver is not None:
            # Not with more steps than it is trained with: an f that is not an equilibrium within
            # them is another function with more.
            choice = self.controller.choice
            model.deq.solver = choice.solver(self.config)
            way += (choice.steps,)
        self.test_sums.clear()
        for _, (images, labels) in self.test_batches.epoch():
            if len(images) == self.test_batches.batch_size:
                self.recordings.run(self._test, way, images, labels)
            else:
                self._test(images, labels)
        found = self.test_sums.read(self.process)
        backward = {name for name, _ in self.test_sums.BACKWARD}  # there was no such pass
        return {name: value for name, value in found.items() if name not in backward}

    def _test(self, images: Tensor, labels: Tensor) -> None:
        torch.clear_autocast_cache()  # or a recording would keep what the first batches left there
        logits = self.evaluated(images)
        loss = cross_entropy(logits, labels)
        self.test_sums.add(logits, labels, loss, self.evaluated)

    def _finish(self) -> dict[str, Any]:
        if not self.process.first:  # the files are the first one's
            return {}
        parameters = sum(p.numel() for p in self.model.parameters())
        times = self.seconds, self.recordings.seconds
        told = summary(self.config, self.process, self.run.metrics(), *times, parameters)
        self.run.write_weights("weights.safetensors", self.evaluated.state_dict())
        self.run.write("summary.json", json.dumps(told, indent=1))
        return told


def measures(config: Config, step: int) -> bool:
    """Whether the residual of w is measured at this step."""
    every = config.measure_every
    # Not always at the steps that have a penalty: one step later each time.
    return (step - step // every) % every == 0


@contextlib.contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Any]]:
    """What the module returns while this is open: also where another one calls it."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
