"""The training loop: from a configuration and a run folder to a trained model."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gdeq import data as datasets
from gdeq.data import Augment, Batches, Dataset
from gdeq.gradients import Unrolled
from gdeq.models.mdeq import MDEQ, mdeq
from gdeq.regularize import hold, jacobian_penalty
from gdeq.training import checkpoint
from gdeq.training.config import Config, ConfigError
from gdeq.training.folder import RunFolder, device_name
from gdeq.training.process import Process
from gdeq.training.progress import Silent


class TrainingError(RuntimeError):
    """The training cannot go on; the last good checkpoint is intact."""


class Interrupted(KeyboardInterrupt):
    """A signal came; the state was saved first."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def build_model(config: Config, dataset: Dataset) -> MDEQ:
    torch.manual_seed(config.seed)
    return mdeq(
        config.model.size,
        classes=len(dataset.classes),
        image_shape=dataset.shape,
        solver=config.solver.build(),
        gradient=config.gradient.build(),
        weight_norm=config.model.weight_norm,
        dropout=config.model.dropout,
        outer_norm=config.model.outer_norm,
    )


def learning_rate(config: Config, step: int, total: int) -> float:
    """The rate of a step: a function of its number alone, so that nothing has to be resumed."""
    choice = config.optimizer
    rise = choice.warmup * total
    if step < rise:
        return choice.lr * (step + 1) / (rise + 1)
    part = (step - rise) / max(1.0, total - rise)
    if choice.schedule == "cosine":
        return choice.lr * 0.5 * (1 + math.cos(math.pi * part))
    if choice.schedule == "onecycle":
        return choice.lr * (1 - part)
    return choice.lr


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    choice = config.optimizer
    named = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": choice.weight_decay},
        {"params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if choice.name == "adam":
        return torch.optim.AdamW(groups, lr=choice.lr)
    return torch.optim.SGD(
        groups, lr=choice.lr, momentum=choice.momentum, nesterov=choice.momentum > 0
    )


@contextlib.contextmanager
def precision(config: Config, device: torch.device) -> Iterator[None]:
    """The arithmetic of f: TF32 or bf16 where asked; solvers stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if config.precision == "float32" else "high")
    cudnn = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.precision != "float32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


class Sums:
    """Running sums on the device: reading them is the only time the loop waits for it."""

    NAMES = ("samples", "loss", "correct", "residual", "solver_steps", "backward_residual")

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, model: MDEQ) -> None:
        count = len(labels)
        solution = model.deq.solution
        assert solution is not None
        backward = solution.record.residual
        self.values += torch.stack(
            [
                torch.full_like(loss, count, dtype=torch.float64),
                loss.double() * count,
                (logits.argmax(1) == labels).sum().double(),
                solution.residual.double().sum(),
                solution.steps.double().sum(),
                torch.zeros_like(loss).double() if backward is None else backward.double().sum(),
            ]
        )

    def read(self, process: Process, since: Tensor | None = None) -> dict[str, float]:
        """Means per sample over all processes, since an earlier copy of ``values``."""
        values = self.values if since is None else self.values - since
        sums = process.sum(values.clone()).tolist()
        count = max(1.0, sums[0])
        means = {name: total / count for name, total in zip(self.NAMES, sums, strict=True)}
        means["accuracy"] = 100 * means.pop("correct")
        means["samples"] = sums[0]
        return means


class Trainer:
    """One run.  All that changes from step to step is in `state` and goes into a checkpoint."""

    def __init__(
        self, config: Config, run: RunFolder, process: Process, progress: Silent, root: str | None
    ) -> None:
        self.config, self.run, self.process, self.progress = config, run, process, progress
        device = process.device
        self.dataset = datasets.load(config.data, root, device)
        self.model = build_model(config, self.dataset).to(device)
        if process.rank:  # the same weights everywhere, but dropout masks of its own
            torch.manual_seed(config.seed + 1_000_003 * process.rank)
        self.averaged = copy.deepcopy(self.model).requires_grad_(False) if config.ema else None
        self.wrapped: nn.Module = self.model
        if process.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer = build_optimizer(config, self.model)
        try:
            self.train_batches, self.test_batches = self._batches()
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem
        self.total = config.epochs * len(self.train_batches)
        self.step = 0
        self.seconds = 0.0  # spent training, over all pieces of the run
        self.sums = Sums(device)  # of this epoch
        self.logged_sums = self.sums.values.clone()  # as they were at the last log line
        self.saved_at = time.monotonic()
        self.caught: int | None = None
        self.writer: Any = None

    def _batches(self) -> tuple[Batches, Batches]:
        config, dataset, processes = self.config, self.dataset, self.process.world_size
        shared: dict[str, Any] = {
            "mean": dataset.mean,
            "std": dataset.std,
            "rank": self.process.rank,
            "world_size": processes,
        }
        augment = Augment(
            crop=config.augment.crop, flip=config.augment.flip, cutout=config.augment.cutout
        )
        train = Batches(
            dataset.train_x,
            dataset.train_y,
            config.batch_size,
            seed=config.seed,
            augment=augment,
            **shared,
        )
        size = -(-max(256, config.batch_size) // processes) * processes
        test = Batches(
            dataset.test_x, dataset.test_y, size, shuffle=False, drop_last=False, **shared
        )
        return train, test

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All processes call it: each has a random state of its own."""
        device, gather = self.process.device, self.process.gather
        cuda = device.type == "cuda"
        return {
            "step": self.step,
            "seconds": self.seconds,
            "sums": self.sums.values,
            "logged_sums": self.logged_sums,
            "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict() if self.averaged else None,
            "optimizer": self.optimizer.state_dict(),
            "rng": gather(torch.get_rng_state()),
            "cuda_rng": gather(torch.cuda.get_rng_state(device)) if cuda else None,
            "metrics_size": self.run.size(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self._restore(state)
        except (KeyError, RuntimeError, ValueError) as problem:
            raise checkpoint.CheckpointError(
                f"the checkpoint of {self.run.path} does not fit its config.yaml: {problem}"
            ) from problem
        if self.process.first:
            self.run.cut(state["metrics_size"])

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        self.sums.values = state["sums"].to(self.process.device)
        self.logged_sums = state["logged_sums"].to(self.process.device)
        self.model.load_state_dict(state["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        # Moments from the checkpoint, options from the configuration: they may have been changed.
        options = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        rank, device = self.process.rank, self.process.device
        rng = torch.atleast_2d(state["rng"])
        if rank < len(rng):  # else there are more processes than before
            torch.set_rng_state(rng[rank].clone())
        if state["cuda_rng"] is not None and device.type == "cuda":
            rng = torch.atleast_2d(state["cuda_rng"])
            if rank < len(rng):
                torch.cuda.set_rng_state(rng[rank].clone(), device)

    def save(self) -> None:
        self._check_finite(self.sums.read(self.process))
        # The loss is from before the last update: that may have spoilt the weights.
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            self._check_finite({"loss": math.nan})
        state = self.state()
        if self.process.first:
            self.run.sync()
            checkpoint.save(self.run.path, self.step, state)
        self.process.wait()
        self.saved_at = time.monotonic()

    def _check_finite(self, figures: dict[str, float]) -> None:
        if math.isfinite(figures["loss"]):
            return
        raise TrainingError(
            f"the loss became NaN or infinite at or before step {self.step}; {self._kept()}.  Try "
            "a lower optimizer.lr, optimizer.clip=1, or jacobian_weight=1 to keep f contractive, "
            "with precision=float32 to see whether it is rounding: `gdeq train --resume "
            f"{self.run.path} optimizer.clip=1`"
        )

    def _kept(self) -> str:
        kept = checkpoint.available(self.run.path)
        return f"the last good checkpoint is {kept[0].name}" if kept else "no checkpoint was made"

    # -- the loop --------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        try:
            return self._fit()
        except OSError as problem:
            full = " The disk is full: free some space." * (problem.errno == errno.ENOSPC)
            raise TrainingError(
                f"could not write to {self.run.path}: {problem.strerror or problem};"
                f"{full} {self._kept()}; continue with `gdeq train --resume {self.run.path}`"
            ) from problem
        finally:
            self.progress.end()
            if self.writer is not None:
                with contextlib.suppress(OSError):
                    self.writer.close()

    def _fit(self) -> dict[str, Any]:
        config = self.config
        if self.process.first:
            from torch.utils.tensorboard import SummaryWriter  # slow to import  # noqa: PLC0415

            self.writer = SummaryWriter(str(self.run.path), purge_step=self.step + 1)
        title = f"{config.data} {config.model.size} {config.gradient.name}"
        self.progress.begin(title, self.total, self.step)
        with self._signals(), precision(config, self.process.device):
            self._epochs()
        return self._finish()

    def _epochs(self) -> None:
        per_epoch = len(self.train_batches)
        while self.step < self.total:
            epoch, index = divmod(self.step, per_epoch)
            if index == 0:
                self.sums = Sums(self.process.device)
                self._mark()
            self._epoch(epoch, index)
            self._end_of_epoch(epoch)

    def _epoch(self, epoch: int, index: int) -> None:
        watch, window, counted = time.perf_counter(), 0.0, self.step
        per_epoch = len(self.train_batches)
        for at, (images, labels) in self.train_batches.epoch(epoch, start=index):
            self.one_step(images, labels)
            logging = self.step % self.config.log_every == 0
            # Not after the last step: who resumes there would miss the end of the epoch.
            saving = at + 1 < per_epoch and self._must_save()
            if not (logging or saving):
                continue
            figures = self.sums.read(self.process, since=self.logged_sums)  # waits for the device
            spent = time.perf_counter() - watch
            self.seconds, window = self.seconds + spent, window + spent
            if logging:
                figures["ms"] = 1e3 * window / max(1, self.step - counted)
                window, counted = 0.0, self.step
                self._log(epoch, figures)
                self._mark()
            if saving:
                self.save()
                if self.process.any(self.caught is not None):
                    raise self._interrupted()
            watch = time.perf_counter()
        self.sums.read(self.process)
        self.seconds += time.perf_counter() - watch

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            self.caught or signal.SIGTERM,
            f"stopped at step {self.step}; continue with `gdeq train --resume {self.run.path}`",
        )

    def _mark(self) -> None:
        self.logged_sums = self.sums.values.clone()

    def _must_save(self) -> bool:
        if self.process.world_size > 1 and self.step % self.config.log_every:
            return False  # asking the others costs a message: not at every step
        late = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        return self.process.any(self.caught is not None or late)

    def set_phase(self, step: int) -> None:
        """How the model is solved at this step: unrolled at first, then as configured."""
        config, deq = self.config, self.model.deq
        if step < config.pretrain_steps:
            deq.solver, deq.gradient = None, Unrolled(config.pretrain_layers)
        else:
            deq.solver, deq.gradient = config.solver.build(), config.gradient.build()

    def one_step(self, images: Tensor, labels: Tensor) -> None:
        config, model = self.config, self.model
        torch.clear_autocast_cache()  # its half-precision copies are of the weights before a step
        self.set_phase(self.step)
        rate = learning_rate(config, self.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        model.train()
        logits = self.wrapped(images)
        loss = cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        objective = loss
        if config.jacobian_weight and self.step % config.jacobian_every == 0:
            objective = loss + config.jacobian_weight * self._jacobian_penalty(images)
        self.optimizer.zero_grad(set_to_none=True)
        objective.backward()
        if config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        self.optimizer.step()
        self.step += 1
        self.sums.add(logits.detach(), labels, loss.detach(), model)
        if self.averaged is not None:
            self._average()

    def _jacobian_penalty(self, images: Tensor) -> Tensor:
        deq = self.model.deq
        assert deq.solution is not None
        injection = self.model.stem(images)
        with hold(deq.cell):
            return jacobian_penalty(lambda z: deq.cell(z, injection), deq.solution.z)

    def _average(self) -> None:
        assert self.averaged is not None
        # As if the average had begun with the first step, not with the random start.
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.averaged.parameters()), list(self.model.parameters()), 1 - decay
            )
            for kept, current in zip(self.averaged.buffers(), self.model.buffers(), strict=True):
                kept.copy_(current)

    # -- what it tells ---------------------------------------------------------------------------

    def _log(self, epoch: int, figures: dict[str, float]) -> None:
        self._check_finite(figures)
        self.progress.step(self.step, figures)
        record = {"kind": "step", "step": self.step, "epoch": epoch, **figures}
        record["lr"] = learning_rate(self.config, self.step - 1, self.total)
        self._write(record)
        unsolved = figures["residual"] > max(0.3, 10 * self.config.solver.tol)
        if unsolved and self.step > self.config.pretrain_steps:
            self.progress.say(
                f"warning: the solver no longer converges (mean residual {figures['residual']:.1e} "
                f"at step {self.step}): raise solver.max_iter, or hold f down with "
                "jacobian_weight=1 or a lower optimizer.lr"
            )

    def _write(self, record: dict[str, Any]) -> None:
        if not self.process.first:
            return
        self.run.append(record)
        for key, value in record.items():
            if isinstance(value, float):
                self.writer.add_scalar(f"{record['kind']}/{key}", value, self.step)

    def _end_of_epoch(self, epoch: int) -> None:
        train = self.sums.read(self.process)
        self._check_finite(train)
        test = self.evaluate()
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
        }
        self._write(record)
        self.progress.say(
            f"epoch {epoch + 1}/{self.config.epochs}: test accuracy {test['accuracy']:.2f} %, "
            f"loss {test['loss']:.3f}, {self.seconds:.0f} s of training"
        )
        if self.process.first and epoch + 1 in self.config.snapshots:
            self._write_weights(f"snapshots/epoch-{epoch + 1:03d}.safetensors")
        late = time.monotonic() - self.saved_at >= min(10.0, self.config.checkpoint_seconds)
        stop = self.process.any(self.caught is not None)
        if self.step == self.total or stop or self.process.any(late):
            self.save()
        if stop and self.step < self.total:
            raise self._interrupted()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy over the test set, by the averaged weights where there are any."""
        model = self.averaged if self.averaged is not None else self.model
        torch.clear_autocast_cache()
        model.eval()
        model.deq.solver, model.deq.gradient = self.model.deq.solver, self.model.deq.gradient
        sums = Sums(self.process.device)
        for _, (images, labels) in self.test_batches.epoch():
            logits = model(images)
            sums.add(logits, labels, cross_entropy(logits.float(), labels), model)
        return sums.read(self.process)

    def _finish(self) -> dict[str, Any]:
        if not self.process.first:  # the files are the first one's
            return {}
        epochs = [r for r in self.run.metrics() if r["kind"] == "epoch"]
        steps = sorted(r["ms"] for r in self.run.metrics() if r["kind"] == "step")
        config = self.config
        summary: dict[str, Any] = {
            "test_accuracy": epochs[-1]["test_accuracy"],
            "epochs": config.epochs,
            "gradient": config.gradient.name,
            "pretrain": config.pretrain_steps > 0,
            "seed": config.seed,
            "ms_per_step": steps[len(steps) // 2] if steps else 1e3 * self.seconds / self.step,
            "train_seconds": self.seconds,
            "device": device_name(self.process.device),
            "data": config.data,
            "size": config.model.size,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "processes": self.process.world_size,
        }
        self._write_weights("weights.safetensors")
        self.run.write("summary.json", json.dumps(summary, indent=1))
        return summary

    def _write_weights(self, name: str) -> None:
        """What is evaluated, in a form that any program reads and no code hides in."""
        model = self.averaged if self.averaged is not None else self.model
        tensors = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        place = self.run.path / name
        place.parent.mkdir(exist_ok=True)
        half = place.with_name(place.name + ".part")
        half.write_bytes(to_safetensors(tensors))
        half.replace(place)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the step under way, save, and stop; a second one stops at once."""

        def note(number: int, frame: Any) -> None:
            if self.caught is not None:
                raise KeyboardInterrupt
            self.caught = number

        before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
