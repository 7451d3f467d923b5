"""The adaptive method: forward steps, refinement and the residual penalty follow what is measured.

Every so many steps the loop hands over two means: the relative residual of the fixed point where
the solver stopped, and the error of the batch's gradient (`BackwardRecord.batch_error`).  Each has
a target and a ladder of costs:

- above its target, one rung up at once, and one more for each further factor of two: more forward
  steps, or more VJPs;
- well below it for a while, one rung down.  If that has to be taken back soon, the next try of this
  rung waits twice as long, so that it settles instead of flapping;
- with the forward residual above its target on the highest rung, the weight of the residual
  penalty, which gives f an equilibrium, is doubled.  It is halved again, more hesitantly, when the
  residual has room.  An f with more penalty is another f: failed tries are then forgotten.  (The
  error of w raises no penalty: on CIFAR-10 that led to a weight of 64 in six epochs.)

A target can be wider at first and tighten evenly; its ladder then begins on the lowest rung.
Otherwise it begins in the middle, the lower one of two, from where the first rungs are free in both
directions.  All decisions are made on the host between two steps, from what was measured alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gdeq import GDEQ, JFB, Gradient, Measured, Solver
from gdeq.lab.training.settings import AdaptConfig, Config
from gdeq.options import count

LONGEST_WAIT = 8  # times the patience
LOWERING = 4  # the penalty is lowered so many times as hesitantly as a rung


@dataclass(frozen=True)
class Choice:
    """What the steps of a training use until the next look."""

    steps: int
    refine: int
    residual_weight: float

    def solver(self, config: Config) -> Solver:
        return replace(config.solver, max_iter=self.steps).build()

    def gradient(self, config: Config) -> Gradient:
        plain = config.gradient.name == "jfb"
        if self.refine:
            return JFB(refine=self.refine) if plain else GDEQ(refine=self.refine)
        return Measured(JFB() if plain or not self.solver(config).keeps_inverse else GDEQ())

    def figures(self) -> dict[str, Any]:
        used = {"max_iter": self.steps, "refine": self.refine}
        return {**used, "residual_weight": self.residual_weight}


class Tries:
    """How long to wait before something cheaper is tried: longer after each try in vain."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.wait = patience  # looks
        self.since: int | None = None  # looks since the last try; None once it has held

    def made(self) -> None:
        self.since = 0

    def held(self) -> None:
        if self.since is None:
            return
        self.since += 1
        if self.since >= self.wait:
            self.wait, self.since = self.patience, None

    def taken_back(self) -> None:
        if self.since is not None:
            self.wait, self.since = min(2 * self.wait, LONGEST_WAIT * self.patience), None

    def state(self) -> dict[str, Any]:
        return {"wait": self.wait, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        self.wait, self.since = state["wait"], state["since"]


class Ladder:
    """One cost that is raised when a mean is above its target.

    targets: at the first step of the training and at its last.
    """

    def __init__(
        self, rungs: tuple[int, ...], targets: tuple[float, float], room: float, patience: int
    ) -> None:
        self.rungs, self.targets, self.room, self.patience = rungs, targets, room, patience
        self.target = targets[0]
        middle = (len(rungs) - 1) // 2
        self.rung = middle if targets[0] == targets[1] else 0
        self.forget()

    def forget(self) -> None:
        """Of what was tried; at first, or with another f."""
        self.calm = 0  # looks in a row with room to spare
        # Of each rung, from the one above: that one was in vain says nothing of a higher one.
        self.tries = [Tries(self.patience) for _ in self.rungs[:-1]]

    def tighten(self, done: float) -> None:
        """done: the share of the training that is."""
        first, last = self.targets
        self.target = first + (last - first) * done

    @property
    def value(self) -> int:
        return self.rungs[self.rung]

    @property
    def at_top(self) -> bool:
        return self.rung == len(self.rungs) - 1

    def above(self, residual: float) -> bool:
        return not residual <= self.target  # also where it is not a number

    def at_ease(self, residual: float) -> bool:
        """Nothing is lost for it if the penalty is lowered."""
        return residual <= self.target * (self.room if self.at_top else 1.0)

    def _rungs_up(self, residual: float) -> int:
        """An f that is about to lose its equilibrium does so within a few looks."""
        times = residual / self.target
        return max(1, math.ceil(math.log2(times))) if math.isfinite(times) else len(self.rungs)

    def look(self, residual: float) -> None:
        if self.above(residual):
            self.calm = 0
            top = min(len(self.rungs) - 1, self.rung + self._rungs_up(residual))
            for tries in self.tries[self.rung : top]:
                tries.taken_back()
            self.rung = top
            return
        for tries in self.tries[self.rung :]:  # also those that led to rungs above
            tries.held()
        self.calm = self.calm + 1 if residual < self.room * self.target else 0
        if self.rung and self.calm >= self.tries[self.rung - 1].wait:
            self.tries[self.rung - 1].made()
            self.rung, self.calm = self.rung - 1, 0

    def state(self) -> dict[str, Any]:
        tried = zip(self.rungs, self.tries, strict=False)  # none of the highest
        tries = {str(value): tries.state() for value, tries in tried}
        return {"value": self.value, "calm": self.calm, "tries": tries}

    def restore(self, state: dict[str, Any]) -> None:
        """The ladder may have got other rungs since: the first one that is not cheaper, then."""
        cheaper = sum(value < state["value"] for value in self.rungs)
        self.rung = min(cheaper, len(self.rungs) - 1)
        self.calm = state["calm"]
        for value, tries in zip(self.rungs, self.tries, strict=False):
            if str(value) in state["tries"]:
                tries.restore(state["tries"][str(value)])


class Penalty:
    """The weight of the residual penalty: ``base`` unless the forward steps are at their end."""

    def __init__(self, base: float, least: float, most: float, patience: int) -> None:
        self.base, self.least, self.most = base, max(least, base), max(most, base)
        self.patience = patience
        self.weight = base
        self.calm = 0  # looks in a row in which the residual was at ease
        self.tries = Tries(patience)

    def look(self, pressed: bool, at_ease: bool) -> None:
        self.calm = self.calm + 1 if at_ease and not pressed else 0
        if pressed:
            self.tries.taken_back()
            self.weight = min(self.most, max(self.least, 2 * self.weight))
            return
        self.tries.held()
        if self.calm >= self.tries.wait and self.weight > self.base:
            self.tries.made()
            self.calm = 0
            half = self.weight / 2
            self.weight = half if half >= self.least else self.base


class Controller:
    """Chooses for the steps that follow; `look` is the only time that it changes its mind."""

    def __init__(self, config: AdaptConfig, residual_weight: float) -> None:
        self.every = config.every
        forward = config.forward_at_first or config.forward, config.forward
        backward = config.backward_at_first or config.backward, config.backward
        self.forward = Ladder(config.steps, forward, config.room, config.patience)
        self.backward = Ladder(config.refine, backward, config.room, config.patience)
        patience = LOWERING * config.patience
        least, most = config.penalty_least, config.penalty_most
        self.penalty = Penalty(residual_weight, least, most, patience)
        # Of the last look, forward and backward: above its target; and nothing left to raise.
        self.above = self.exhausted = (False, False)

    @property
    def choice(self) -> Choice:
        return Choice(self.forward.value, self.backward.value, self.penalty.weight)

    def look(self, residual: float, backward_error: float, done: float = 1.0) -> Choice | None:
        """The means since the last look; returns the new choice if it is another one.

        done: the share of the training that is, by which targets tighten.
        """
        before, weight = self.choice, self.penalty.weight
        self.forward.tighten(done)
        self.backward.tighten(done)
        # Judged before the ladders move: the top rung has to be tried first.
        self.above = self.forward.above(residual), self.backward.above(backward_error)
        pressed = self.above[0] and self.forward.at_top
        self.exhausted = (
            pressed and weight == self.penalty.most,
            self.above[1] and self.backward.at_top,
        )
        at_ease = self.forward.at_ease(residual)
        self.forward.look(residual)
        self.backward.look(backward_error)
        self.penalty.look(pressed, at_ease)
        if self.penalty.weight > weight:
            self.forward.forget()
            self.backward.forget()
        return self.choice if self.choice != before else None

    def state(self) -> dict[str, Any]:
        return {
            "forward": self.forward.state(),
            "backward": self.backward.state(),
            "residual_weight": self.penalty.weight,
            "residual_calm": self.penalty.calm,
            "residual_tries": self.penalty.tries.state(),
        }

    def restore(self, state: dict[str, Any], done: float = 0.0) -> None:
        """done: as for `look`."""
        for name, ladder in (("forward", self.forward), ("backward", self.backward)):
            ladder.tighten(done)
            ladder.restore(state[name])
        # Never below what the configuration asks for, which a resume may have raised.
        weight = state["residual_weight"]
        self.penalty.weight = min(max(weight, self.penalty.base), self.penalty.most)
        self.penalty.calm = state["residual_calm"]
        self.penalty.tries.restore(state["residual_tries"])


def exhausted(
    step: int, which: tuple[bool, bool], residual: float, backward_error: float
) -> Iterator[str]:
    """What to say when there is nothing left to raise."""
    told = (
        ("forward residual", residual, "adapt.steps and adapt.penalty_most", "adapt.forward"),
        ("error of w", backward_error, "adapt.refine", "adapt.backward"),
    )
    for short, (name, value, budget, target) in zip(which, told, strict=True):
        if short:
            yield (
                f"warning: a mean {name} of {value:.1e} at step {step}, with all that {budget} "
                f"allow: extend that, lower optimizer.lr, or raise {target}"
            )


def beginning(controller: Controller, pretrain_steps: int, total: int) -> Iterator[str]:
    """What will be adapted, and whether there are steps enough for it."""
    choice = controller.choice
    yield (
        f"adaptive: begins with {choice.steps} forward steps and "
        f"{count(choice.refine, 'VJP')}, decides every {controller.every} steps "
        "(solver.max_iter and gradient.refine are not read)"
    )
    if total - pretrain_steps < controller.every:
        yield (
            f"warning: nothing will be adapted in {count(max(0, total - pretrain_steps), 'step')} "
            "with a solver: lower adapt.every, or raise epochs"
        )
