"""The model and its training step: what `Trainer` repeats, and what a finished run is tested by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gdeq import DEQ, Measured, Unrolled, hold, residual_penalty
from gdeq.context import eager
from gdeq.lab.tasks import registry
from gdeq.lab.tasks.task import Task, per_sample
from gdeq.lab.training import optimization as optim
from gdeq.lab.training.adapting import Controller, beginning
from gdeq.lab.training.config import Config, ConfigError
from gdeq.lab.training.metrics import Sums
from gdeq.lab.training.precision import caution
from gdeq.lab.training.process import Process
from gdeq.lab.training.recordings import Recordings
from gdeq.options import count

# Gradients without VJPs (JFB, plain GDEQ) are measured at one step in ten: the measurement would
# cost them part of an evaluation of f at every step.
SELDOM = 10


class Learner:
    """Task, model and optimiser, after so many steps."""

    def __init__(self, config: Config, process: Process, root: Path | None) -> None:
        self.config, self.process = config, process
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
        # Several GPUs exchange gradients in threads that a CUDA graph cannot record.
        alone = device.type == "cuda" and process.world_size == 1
        self.recordings = Recordings(config.graph and alone, adapt.enabled)
        self.penalised = False  # whether this step has the residual penalty
        self.measured = True  # whether this step measures its backward residual
        # A tensor, so that a recorded step sees its changes.
        self.penalty_weight = torch.zeros((), device=device)
        metric = self.task.metric
        self.sums, self.test_sums = Sums(device, metric), Sums(device, metric)  # of this epoch

    def _batches(self) -> tuple[Any, Any]:
        """The batches of the training set and of the test set."""
        size = self.config.batch_size
        tested = _test_batch(len(self.task.data.test[0]), size, self.process.world_size)
        try:
            return self.task.train_batches(size), self.task.test_batches(tested)
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem

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

    def in_use(self) -> dict[str, Any]:
        """What the controller has chosen, for the records; empty without a controller."""
        return self.controller.choice.figures() if self.controller is not None else {}

    @property
    def evaluated(self) -> nn.Module:
        """The model that is tested: the averaged one if weights are averaged."""
        return self.model if self.average is None else self.average.module

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
        yield from self.task.state()
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
                calls = opened.enter_context(deq_inputs(model, task))
            output = self.wrapped(x)
            objective = loss = task.loss(output, *targets)
            if self.penalised:
                objective = loss + self.penalty_weight * self._penalty(*calls[-1])
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
            scores = per_sample(self.task.score(output, *targets), "score() must return one score")
            sums.add(loss.detach(), scores, deq.solution)

    def _penalty(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        deq = self.deq
        assert deq.solution is not None
        return residual_penalty(lambda z: deq.cell(z, *inputs, **options), deq.solution.z)

    # -- the test --------------------------------------------------------------------------------

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


def measures(config: Config, step: int, least: int = 1) -> bool:
    """Whether this step measures the residual of w: one in ``measure_every``, or in ``least``."""
    every = max(config.measure_every, least)
    # One step later each time, or it would always meet the steps that have a penalty.
    return (step - step // every) % every == 0


@contextlib.contextmanager
def deq_inputs(
    model: nn.Module, task: Task[Any]
) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Collect what the model's DEQ gives its cell beside z, call by call: inputs and options."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        own = ("z0", "solver", "gradient")
        seen.append((inputs, {name: x for name, x in options.items() if name not in own}))

    injector = task.injector(model)
    if injector is None:
        handle = _deq_of(model, task).register_forward_pre_hook(note, with_kwargs=True)
    else:
        handle = injector.register_forward_hook(lambda *call: seen.append(((call[-1],), {})))
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
