"""How long a run would take: asked before it is begun on a machine that is lent by the minute."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gdeq.lab.training import checkpoint, process, progress
from gdeq.lab.training.config import Config
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.loop import Trainer, measures, precision
from gdeq.lab.training.recordings import kind_of

RECORDING = 5  # steps until a CUDA graph is made and has been played
TIMED = 8
EVALUATION = 1.2  # of a finished run the training alone is known; tests come to about this
START = 5.0  # seconds: data set, model, first evaluation
COMPILATION = 15.0  # seconds, where a run has not been tried out before


@dataclass(frozen=True)
class Speed:
    """Seconds."""

    step: float
    unrolled_step: float  # of pre-training
    test: float  # over the whole test set

    def seconds(self, config: Config, per_epoch: int, done: int = 0) -> float:
        """For what is left after ``done`` steps, tests included."""
        total = config.epochs * per_epoch
        unrolled = max(0, min(config.pretrain_steps, total) - done)
        solved = total - done - unrolled
        tests = sum(
            epoch % config.test_every == 0 or epoch == config.epochs
            for epoch in range(done // per_epoch + 1, config.epochs + 1)
        )
        work = unrolled * self.unrolled_step + solved * self.step + tests * self.test
        return work + START


def probe(config: Config, root: Path | None = None) -> tuple[Speed, int]:
    """Steps of a throw-away model; with the number of steps an epoch has.

    It also compiles and tries out what the run needs, once in a process, so that this is not in
    the training time of whichever run comes first.
    """
    me = process.start(config.device)
    folder = RunFolder(Path("nowhere"))  # steps write nothing
    trainer = Trainer(config, folder, me, progress.Silent(), None if root is None else str(root))
    with precision(config, me.device):
        _every_rung(trainer, config.pretrain_steps)
        solved = _solved_seconds(trainer, config.pretrain_steps)
        unrolled = _step_seconds(trainer, 0) if config.pretrain_steps else solved
        trainer.set_phase(config.pretrain_steps)
        trainer.evaluate()  # recorded as a graph
        start = time.perf_counter()
        trainer.evaluate()
        test = time.perf_counter() - start
    per_epoch = len(trainer.train_batches)
    del trainer
    free()
    return Speed(solved, unrolled, test), per_epoch


def _every_rung(trainer: Trainer, first: int) -> None:
    """Of an adaptive run, a step on all pairs of rungs, measured and not, penalised and not.

    Those that follow are then recorded without such a step, which takes several times as long as a
    recorded one.  It is timed in the middle of its ladders.
    """
    made, config = trainer.controller, trainer.config
    if made is None:
        return
    _, (images, labels) = next(iter(trainer.train_batches.epoch(0)))
    forward, backward = (range(len(ladder.rungs)) for ladder in (made.forward, made.backward))
    weights = (made.penalty.least, 0.0)
    tried = [(one, other, weight) for weight in weights for one in forward for other in backward]
    for made.forward.rung, made.backward.rung, made.penalty.weight in tried:
        penalties = config.residual_every if made.penalty.weight else 1
        steps = range(first, first + 2 * penalties * config.measure_every)
        for wanted in (True, False):
            fits = (s for s in steps if s % penalties == 0 and measures(config, s) == wanted)
            found = next(fits, None)
            if found is not None:
                trainer.step = found
                trainer.one_step(images, labels)
    made.forward.rung, made.backward.rung = made.forward.middle, made.backward.middle
    made.penalty.weight = made.penalty.base


def _solved_seconds(trainer: Trainer, first: int) -> float:
    """Of a step from ``first`` on, in the mean: some have a penalty."""
    config = trainer.config
    penalties = (
        (config.jacobian_weight, config.jacobian_every),
        (config.residual_weight, config.residual_every),
    )
    rates = [every for weight, every in penalties if weight > 0]
    period = math.lcm(*rates)
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for step in range(first, first + period):
        kinds.setdefault(tuple(step % every == 0 for every in rates), []).append(step)
    return sum(len(steps) * _step_seconds(trainer, steps[0]) for steps in kinds.values()) / period


def _step_seconds(trainer: Trainer, first: int) -> float:
    """Of steps like this one; the median would hide steps that take long now and then."""
    trainer.step = first
    start, done = 0.0, 0
    while done < RECORDING + TIMED:
        for _, (images, labels) in trainer.train_batches.epoch(0):
            if done == RECORDING:
                trainer.sums.read(trainer.process)  # waits for the device
                start = time.perf_counter()
            trainer.one_step(images, labels)
            trainer.step = first  # however few steps pre-training has
            done += 1
            if done == RECORDING + TIMED:
                break
    trainer.sums.read(trainer.process)
    return (time.perf_counter() - start) / TIMED


def free() -> None:
    """What a run leaves behind: its recordings hold each other, and memory with them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def steps_done(path: Path) -> int | None:
    """Where the newest checkpoint stands; None without one."""
    found = checkpoint.available(path)
    return int(found[0].stem.removeprefix("step-")) if found else None


def _evaluations(config: Config) -> int:
    """Of f in a step at most, a VJP counted as two."""
    if config.adapt.enabled:
        return max(config.adapt.steps) + 2 * max(config.adapt.refine)
    gradient = config.gradient
    refined = max(gradient.refine, gradient.max_refine or 0)
    vjps = {"implicit": gradient.max_iter, "npg": gradient.steps, "gdeq": refined}
    vjps["jfb"] = gradient.refine
    return config.solver.max_iter + 2 * vjps.get(gradient.name, 0)


def _at_pace(pace: float, per_epoch: int, config: Config, done: int) -> float:
    return EVALUATION * pace * (config.epochs * per_epoch - done) + START


class Estimates:
    """Of each kind of run, from finished ones or from trying it out once in this process."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.finished: dict[Config, tuple[float, int]] = {}  # seconds a step, steps an epoch
        self.probed: dict[Config, tuple[Speed, int]] = {}

    def learn(self, folders: Iterable[Path]) -> None:
        for path in folders:
            try:
                run = RunFolder.open(path)
                config = run.config()
                last = [r for r in run.metrics() if r["kind"] == "epoch"][-1]
                pace = (last["seconds"] / last["step"], last["step"] // last["epoch"])
            except (RuntimeError, ValueError, LookupError, OSError):
                continue  # whatever it is, it is no run to learn from
            self.finished[kind_of(config)] = pace

    def known(self, config: Config, done: int = 0) -> float | None:
        """Seconds, without trying anything."""
        which = kind_of(config)
        if which in self.probed:
            speed, per_epoch = self.probed[which]
            return speed.seconds(config, per_epoch, done)
        if which in self.finished:
            return _at_pace(*self.finished[which], config, done)
        return None

    def at_most(self, config: Config, done: int = 0) -> float | None:
        """Seconds at the pace of the slowest run of this model that is known, with compilation.

        None where no known one has as much to do in a step.
        """
        probed = {k: (speed.step, per_epoch) for k, (speed, per_epoch) in self.probed.items()}
        known = self.finished | probed
        same = [
            other
            for other in known
            if (other.data, other.batch_size, other.model, other.precision)
            == (config.data, config.batch_size, config.model, config.precision)
        ]
        if not any(_evaluations(other) >= _evaluations(config) for other in same):
            return None
        return COMPILATION + _at_pace(*max(known[other] for other in same), config, done)

    def probe(self, config: Config, done: int = 0) -> float:
        which = kind_of(config)
        if which not in self.probed:
            self.probed[which] = probe(config, self.root)
        speed, per_epoch = self.probed[which]
        return speed.seconds(config, per_epoch, done)
