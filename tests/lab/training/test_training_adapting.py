"""The adaptive method: what the controller decides, and that a training follows it."""

import copy
import functools
import json
import math
from itertools import pairwise

import pytest
import torch
import training_runs
from rich.console import Console
from training_runs import PER_EPOCH, RICH, TINY, assert_resumed, run_all

from gdeq.gradients import GDEQ, JFB, Measured, Unrolled
from gdeq.lab import data as datasets
from gdeq.lab.metric import Metric
from gdeq.lab.training import adapting, learner, loop, process, progress, recordings, runs
from gdeq.lab.training import config as configs
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.settings import AdaptConfig
from gdeq.solvers import Broyden

CPU = process.Process(torch.device("cpu"))
ADAPT = ["adapt.enabled=true", "solver.tol=0", "adapt.every=1"]


def beginning(residual_weight=0.0, **settings):
    return adapting.Controller(AdaptConfig(enabled=True, **settings), residual_weight)


def controller(residual_weight=0.0, **settings):
    """One that has come down to its lowest rungs: from there every move can be told."""
    made = beginning(residual_weight, **settings)
    made.forward.rung = made.backward.rung = 0
    return made


def steps_under(made, residual_of, looks, backward=0.2):
    """The rungs that it takes, when the residual is a function of the forward steps."""
    found = []
    for _ in range(looks):
        made.look(residual_of(made.choice.steps), backward)
        found.append(made.choice.steps)
    return found


# -- the controller --------------------------------------------------------------------------------


def choices(made, looks):
    """What is in use after each look, as (steps, refine, weight)."""
    found = []
    for look in looks:
        before = made.choice
        told = made.look(*look)
        assert told == (made.choice if made.choice != before else None)
        found.append((made.choice.steps, made.choice.refine, made.choice.residual_weight))
    return found


CALM, ABOVE = (1e-4, 0.01), (0.02, 0.2)
SCRIPTS = {
    "one rung up at each look above the target; reached is reached": (
        controller(forward=1e-2, backward=0.3),
        [ABOVE, (0.011, 0.31), (0.009, 0.4), (0.01, 0.3)],
        [(5, 0, 0), (6, 1, 0), (6, 2, 0), (6, 2, 0)],
    ),
    "from the middle nothing moves without room": (beginning(), [(0.01, 0.3)] * 5, [(7, 2, 0)] * 5),
    "with room it comes down, rung by rung, and stays": (
        beginning(patience=1),
        [CALM] * 5,
        [(6, 1, 0), (5, 0, 0), *[(4, 0, 0)] * 3],
    ),
    "no penalty before the rungs above the first were tried": (
        beginning(),
        [ABOVE] * 6,
        [(9, 2, 0), (12, 2, 0), (15, 2, 0), (18, 2, 0), (18, 2, 1), (18, 2, 2)],
    ),
    "down only with room and patience, in a row": (
        controller(patience=3, room=0.5),
        [*[ABOVE] * 3, *[(6e-3, 0.2)] * 10, *[(4e-3, 0.2)] * 2, (6e-3, 0.2), *[(4e-3, 0.2)] * 3],
        [(5, 0, 0), (6, 0, 0), *[(7, 0, 0)] * 16, (6, 0, 0)],
    ),
    "targets that tighten": (
        controller(
            forward=0.1, forward_at_first=0.2, backward=0.5, backward_at_first=0.9, steps=(4, 5, 6)
        ),
        [(0.19, 0.85, 0.0), (0.16, 0.75, 0.5), (0.101, 0.45, 0.99), (0.1, 0.501, 1.0)],
        [(4, 0, 0), (5, 1, 0), (5, 1, 0), (5, 2, 0)],
    ),
    "a target that does not tighten is as wide as at the end": (
        controller(forward=0.1, steps=(4, 5, 6)),
        [(0.11, 0.2, 0.0)],
        [(5, 0, 0)],
    ),
    "the penalty rises on the top rung alone and is bounded": (
        controller(steps=(4, 5), penalty_least=0.1, penalty_most=0.5),
        [(1.0, 0.2)] * 6,
        [(5, 0, weight) for weight in (0, 0.1, 0.2, 0.4, 0.5, 0.5)],
    ),
    "no penalty for the error of w": (
        controller(refine=(0, 1), penalty_least=0.1),
        [(1e-3, 0.9)] * 6,
        [(4, 1, 0)] * 6,
    ),
    "the penalty falls back to what was configured, more slowly than it rose": (
        controller(0.25, steps=(5,), patience=1, penalty_least=0.1),
        [*[(1.0, 0.2)] * 3, *[(1e-3, 0.2)] * 15],
        [(5, 0, w) for w in (0.5, 1, 2, 2, 2, 2, *[1] * 4, *[0.5] * 4, *[0.25] * 4)],
    ),
    "no penalty is lowered on the top rung without room": (
        controller(steps=(9,), patience=1, room=0.5, penalty_least=0.1),
        [(1.0, 0.2), *[(8e-3, 0.2)] * 20, *[(4e-3, 0.2)] * 4],
        [*[(9, 0, 0.1)] * 24, (9, 0, 0)],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_it_chooses(name):
    made, looks, expected = SCRIPTS[name]
    assert choices(copy.deepcopy(made), looks) == expected


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, (7, 2)),
        ({"forward_at_first": 0.1}, (4, 2)),  # a target that is wider at first: the lowest rung
        ({"backward_at_first": 0.9}, (7, 0)),
        ({"forward_at_first": 1e-2, "backward_at_first": 0.3}, (7, 2)),  # no wider
        ({"steps": (5,)}, (5, 2)),
        ({"steps": (5, 6)}, (5, 2)),
        ({"steps": (5, 6, 7)}, (6, 2)),
    ],
)
def test_where_it_begins(settings, first):
    assert beginning(**settings).choice == adapting.Choice(*first, 0.0)


def test_what_is_exhausted():
    made = controller(steps=(4, 5), penalty_least=0.1, penalty_most=0.5)
    found = []
    for look in [(1.0, 0.2)] * 6 + [(5e-3, 0.2)]:
        made.look(*look)
        found.append(made.exhausted)
    # At last the largest penalty has been tried; then it is well again.
    assert found == [(False, False)] * 5 + [(True, False), (False, False)]
    made = controller(refine=(0, 1))
    found = []
    for error in (0.9, 0.9, 0.9, 0.2):
        made.look(1e-3, error)
        found.append(made.exhausted)
    assert found == [(False, False), (False, True), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("residual", "steps"),
    [
        *[(0.02, 5), (0.021, 6), (0.04, 6), (0.05, 7), (0.5, 15), (1e30, 18)],
        *[(1e308, 18), (math.inf, 18), (math.nan, 18)],
    ],
)
def test_more_rungs_at_once_far_above_the_target(residual, steps):
    made = controller(forward=1e-2, backward=0.3)
    assert made.look(residual, 0.2) == adapting.Choice(steps, 0, 0.0)


@pytest.mark.parametrize("begin", [beginning, controller])
@pytest.mark.parametrize("rate", [0.3, 0.45, 0.6, 0.7])
def test_settles_where_the_target_is_met(rate, begin):
    """A solver that converges at this rate: the lowest sufficient rung, and seldom another.

    Or one rung higher: where there is not room enough to try the next.
    """
    made = begin()
    found = steps_under(made, lambda steps: rate**steps, 400)
    rungs = AdaptConfig().steps
    enough = next(n for n, steps in enumerate(rungs) if rate**steps <= 1e-2)
    settled = max(rungs[enough : enough + 2], key=found.count)
    assert found[10:].count(settled) >= 0.9 * len(found[10:])
    late = found[-100:]
    assert sum(a != b for a, b in pairwise(late)) <= 2 * (100 // 16 + 1)
    assert made.choice.residual_weight == 0


def test_a_try_that_was_taken_back_waits_longer():
    made = controller(patience=2)
    # At 5 steps there is much room, at 4 it is above the target.
    found = steps_under(made, lambda steps: 0.02 if steps == 4 else 1e-3, 200)
    tries = [n for n, steps in enumerate(found) if steps == 4]
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[:3] == sorted(gaps[:3])
    assert gaps[0] < gaps[1] < gaps[2]
    assert set(gaps[3:]) == {17}  # sixteen looks and the one that takes it back
    # Where it then holds, the next one follows soon.
    assert steps_under(made, lambda _: 1e-3, 40)[-1] == 4


def test_a_try_that_was_taken_back_delays_this_rung_alone():
    made = controller(patience=2, steps=(4, 5, 6, 7))
    steps_under(made, lambda steps: 0.02 if steps == 4 else 4e-3, 100)  # no room at five
    assert made.forward.tries[0].wait == 2  # it was never tried
    steps_under(made, lambda steps: 0.02 if steps == 4 else 1e-3, 60)  # tried, over and over
    assert made.forward.tries[0].wait == 16
    steps_under(made, lambda _: 0.02, 3)
    assert made.choice.steps == 7
    assert steps_under(made, lambda steps: 0.02 if steps == 4 else 1e-3, 4)[-1] == 5


def test_what_failed_before_the_penalty_was_raised_is_tried_soon_again():
    made = controller(patience=2, steps=(4, 5))
    steps_under(made, lambda steps: 0.02 if steps == 4 else 1e-3, 60)
    while made.choice.steps == 4:
        made.look(0.02, 0.2)
    made.look(0.02, 0.2)  # nor are five steps enough any more
    assert made.choice == adapting.Choice(5, 0, 1.0)
    assert [made.look(1e-3, 0.2) for _ in range(2)][-1].steps == 4


ROW = {
    **{"forward": 0.1, "backward": 0.7, "steps": (4, 5, 6, 7, 9), "refine": (1, 2)},
    **{"room": 0.5, "patience": 2},
}


def test_a_penalty_that_is_needed_is_not_let_go_again_and_again():
    """Nine steps are too few without it and five are enough with it, for ever."""
    made = beginning(**ROW)
    rate = {4: 0.5, 5: 0.35, 6: 0.25, 7: 0.18, 9: 0.12}
    found = []
    for _ in range(300):
        choice = made.choice
        made.look(rate[choice.steps] / (1 + 4 * min(1.0, choice.residual_weight)), 0.3)
        found.append(made.choice)
    assert sum(a != b for a, b in pairwise(found)) <= 50
    assert sum(a != b for a, b in pairwise(found[200:])) <= 12


def test_a_penalty_goes_when_the_residual_that_asked_for_it_is_well():
    """Though the other one needs its highest rung."""
    made = beginning(**ROW)
    for look in range(100):
        made.look(0.2 if look < 8 else 0.01, 0.55 if made.choice.refine == 2 else 0.8)
        assert made.choice.residual_weight > 0 or not 4 <= look < 8
    assert made.choice == adapting.Choice(4, 2, 0.0)


def test_a_rise_long_after_a_try_is_no_failure_of_it():
    made = controller(patience=2, steps=(4, 5, 6))
    found = steps_under(made, lambda _: 0.02, 1) + steps_under(made, lambda _: 1e-3, 30)
    assert found[0] == 5
    assert found[-1] == 4
    steps_under(made, lambda _: 0.02, 2)  # f has changed
    assert made.choice.steps == 6
    assert steps_under(made, lambda _: 1e-3, 4)[-1] == 4  # as soon as at first


def test_what_it_remembers():
    values = [(0.02, 0.5), *[(1e-3, 0.2)] * 3, (1e-3, 0.1), (0.5, 0.5), *[(1e-3, 0.1)] * 4] * 4
    for cut in (3, 17, 19):  # some of them with one calm look of two
        made = controller(patience=2, steps=(4, 5))
        for value in values[:cut]:
            made.look(*value)
        again = controller(patience=2, steps=(4, 5))
        again.restore(json.loads(json.dumps(made.state())))
        for value in values[cut:]:
            assert made.look(*value) == again.look(*value)
            assert made.state() == again.state()


def test_another_ladder_after_a_resume():
    made = controller()
    for _ in range(4):
        made.look(0.02, 1.0)
    assert made.choice.steps == 9
    for steps, expected in (((4, 8, 10), 10), ((2, 3), 3), ((9, 18), 9)):
        again = controller(steps=steps)
        again.restore(made.state())
        assert again.choice.steps == expected


# -- in a training ---------------------------------------------------------------------------------


@pytest.fixture
def adaptive(trainer):
    return functools.partial(trainer, *ADAPT)


def scripted(made, choices):
    """A controller that chooses so, whatever it sees; returns what it has seen."""
    seen, left = [], [adapting.Choice(*c) for c in choices]

    class Scripted(adapting.Controller):
        choice = left[0]

        def look(self, residual, backward_error, done):
            assert done == made.step / made.total
            seen.append((residual, backward_error))
            self.choice = left[len(seen)] if len(seen) < len(left) else self.choice
            return self.choice

    made.controller = Scripted(made.config.adapt, 0.0)
    return seen


def test_steps_follow_the_choice(adaptive, monkeypatch):
    made = adaptive("epochs=2")
    scripted(made, [(4, 0, 0.0), (5, 2, 0.0), (6, 0, 0.5), (6, 0, 0.5), (4, 1, 0.0)])
    used, real = [], made._compute

    def noted(*batch):
        real(*batch)
        deq = made.model.deq
        used.append((deq.solver, deq.gradient, deq.solution.steps.unique().item()))
        assert deq.solution.record.residual is not None  # measured with and without refinement

    monkeypatch.setattr(made, "_compute", noted)
    made.config = configs.replace(made.config, residual_every=1)
    penalties, penalty = [], made._penalty
    monkeypatch.setattr(
        made, "_penalty", lambda *inputs: penalties.append(made.step) or penalty(*inputs)
    )
    made.fit()
    expected = [(4, 0), (5, 2), (6, 0), (6, 0), (4, 1), (4, 1)]
    assert used == [
        (Broyden(n, tol=0.0, stop="whole"), GDEQ(refine=k) if k else Measured(GDEQ()), n)
        for n, k in expected
    ]
    assert penalties == [2, 3]


@pytest.mark.parametrize(
    ("settings", "plain", "refined"),
    [
        ([], GDEQ(), GDEQ(refine=2)),
        (["solver=anderson", "gradient.refine=1"], JFB(), GDEQ(refine=2)),
        (["gradient=jfb"], JFB(), JFB(refine=2)),
        (["gradient=jfb", "solver=anderson"], JFB(), JFB(refine=2)),
    ],
)
def test_the_gradient_of_a_choice(settings, plain, refined):
    config = configs.load("digits", [*ADAPT, *settings])
    assert adapting.Choice(4, 0, 0.0).gradient(config) == Measured(plain)
    assert adapting.Choice(4, 2, 0.0).gradient(config) == refined


def test_the_weight_that_was_chosen_is_in_the_objective(adaptive):
    """Twice the weight, twice its part of the update: of plain SGD."""
    plain = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=1", "residual_every=1"]
    plain += ["optimizer.schedule=constant"]
    found = []
    for weight in (0.0, 0.5, 1.0):
        made = adaptive(*plain)
        scripted(made, [(6, 1, weight)])
        torch.manual_seed(1)
        made.one_step(*next(made.train_batches.epoch(0))[1])
        found.append(torch.cat([p.detach().double().flatten() for p in made.model.parameters()]))
    half, whole = found[1] - found[0], found[2] - found[0]
    assert half.norm() > 1e-4
    torch.testing.assert_close(whole, 2 * half, rtol=1e-2, atol=1e-5)


def test_it_is_shown_the_means_since_the_last_look(tmp_path, few_images):
    run = tmp_path / "run"
    settings = [*TINY, "adapt.enabled=true", "solver.tol=0", "adapt.every=2", "epochs=3"]
    settings += ["adapt.refine=[0,1]", "adapt.backward=1e-9"]  # it begins with none
    seen = []
    real = adapting.Controller.look

    def noted(self, residual, backward_error, done):
        seen.append((residual, backward_error))
        return real(self, residual, backward_error, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting.Controller, "look", noted)
        runs.train(run, configs.load("digits", settings))
    lines = [r for r in training_runs.metrics(run) if r["kind"] == "step"]
    errors = [r["batch_error"] for r in lines]
    assert {r["refine"] > 0 for r in lines} == {False, True}
    assert all((r["backward_error"] is None) == (r["refine"] == 0) for r in lines)
    values = list(zip((r["residual"] for r in lines), errors, strict=True))
    assert PER_EPOCH == 3
    # Steps 2, 4, 6, 8 of 9, over the ends of epochs.
    windows = [values[0:2], values[2:4], values[4:6], values[6:8]]
    assert len(seen) == len(windows)
    for found, window in zip(seen, windows, strict=True):
        for value, parts in zip(found, zip(*window, strict=True), strict=True):
            assert value == pytest.approx(sum(parts) / len(parts))


def test_nothing_is_judged_by_unrolled_steps(adaptive):
    made = adaptive("pretrain_steps=4", "epochs=2", "adapt.every=2")
    seen = scripted(made, [(4, 0, 0.0)])
    made.fit()
    assert len(seen) == 1  # at step 6, of steps 5 and 6
    lines = [r for r in training_runs.metrics(made.run.path) if r["kind"] == "step"]
    assert lines[3]["backward_residual"] is None
    assert seen[0][1] == pytest.approx(sum(r["batch_error"] for r in lines[4:]) / 2)
    made = adaptive("pretrain_steps=2")
    made._prepare(1)
    assert made.model.deq.gradient == Unrolled(made.config.pretrain_layers)


def test_what_will_be_adapted_is_told(adaptive):
    (text,) = adaptive("epochs=3").notes()
    assert text.startswith("adaptive: begins with 7 forward steps and 2 VJPs, decides every 1 st")
    for settings, steps in ((["adapt.every=10"], 9), (["adapt.every=8", "pretrain_steps=2"], 7)):
        *_, text = adaptive("epochs=3", *settings).notes()
        assert f"warning: nothing will be adapted in {steps} steps with a solver" in text
    texts = adaptive("epochs=3", "pretrain_steps=9").notes()
    assert texts[0].startswith("warning: all 9 steps are unrolled, none has a solver")
    assert adaptive("adapt.enabled=false", "pretrain_steps=8", "epochs=3").notes() == []


def test_a_warning_once_an_epoch(adaptive):
    made = adaptive("epochs=3", "adapt.forward=1e-9", "adapt.steps=[2]", "adapt.penalty_most=1")
    texts = []
    made.progress.say = texts.append
    made.fit()
    warnings = [text for text in texts if text.startswith("warning: a mean forward residual of ")]
    assert len(warnings) == 3
    assert "at step 2, with all that adapt.steps and adapt.penalty_most allow" in warnings[0]
    assert "or raise adapt.forward" in warnings[0]


def test_the_test_is_solved_with_the_steps_in_use(adaptive):
    made = adaptive("solver.max_iter=7", "epochs=1", "ema=0.5")
    scripted(made, [(4, 1, 0.0)])
    made.fit()
    assert made.evaluated.deq.solution.steps.unique().item() == 4
    assert made.model.deq.solution.steps.unique().item() == 4
    found = made.evaluate()
    told = training_runs.metrics(made.run.path)[-1]
    assert found["loss"] == told["test_loss"]


# A target that digits' small cell misses with four steps, so that there are changes to tell.
MOVING = [*RICH, "epochs=4", "adapt.enabled=true", "solver.tol=0", "adapt.every=2"]
MOVING += ["adapt.forward=1e-4", "adapt.backward=0.02", "adapt.steps=[2,3,4]", "adapt.refine=[0,1]"]
MOVING += ["adapt.penalty_least=0.2"]


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    run = tmp_path_factory.mktemp("moving") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load", training_runs.few)
        runs.train(run, configs.load("digits", MOVING))
    return run


def test_a_run_is_opened_with_the_steps_that_were_in_use(moving, few_images):
    """Where it is evaluated or its gradients are compared."""
    told = [r for r in training_runs.metrics(moving) if r["kind"] == "epoch"]
    run = RunFolder.open(moving)
    for record in told[:1]:  # the snapshot
        config = runs.trained(moving, epoch=record["epoch"]).config
        used = config.solver.max_iter, config.gradient.refine
        assert used == (record["max_iter"], record["refine"])
        assert not config.adapt.enabled
    config = runs.trained(moving).config
    assert config.solver.max_iter == told[-1]["max_iter"] != run.config().solver.max_iter
    assert runs.evaluate(moving)["accuracy"] == told[-1]["test_accuracy"]
    (moving / "metrics.jsonl").rename(moving / "metrics.away")  # the weights know it themselves
    assert runs.trained(moving).config == config
    (moving / "metrics.away").rename(moving / "metrics.jsonl")


def test_decisions_are_in_the_records(moving):
    lines = training_runs.metrics(moving)
    changes = [r for r in lines if r["kind"] == "adapt"]
    assert len(changes) >= 3
    last = {"max_iter": 3, "refine": 0, "residual_weight": 0.1}
    for line in lines:
        if line["kind"] == "adapt":
            now = {key: line[key] for key in last}
            assert now != last
            assert line["step"] % 2 == 0
            assert line["residual"] > 0
            assert ("residual" in line["above_target"]) == (line["residual"] > 1e-4)
            last = now
        elif line["kind"] in ("step", "epoch"):
            assert {key: line[key] for key in last} == last
    assert last["max_iter"] == 4
    assert last["residual_weight"] > 0.1
    ends = {r["epoch"]: r["step"] for r in lines if r["kind"] == "epoch"}
    for line in lines:  # the epoch that a step is in, counted from 1 in all lines
        assert ends.get(line["epoch"] - 1, 0) < line["step"] <= ends[line["epoch"]]
    summary = json.loads((moving / "summary.json").read_text())
    assert summary["adaptive"] is True


@pytest.mark.parametrize("stop", [3, 5, 8, 10])
def test_resumed_bit_for_bit(tmp_path, few_images, moving, stop):
    assert_resumed(tmp_path / "run", MOVING, stop, moving)


def test_a_resumed_target_is_as_tight_as_it_was(adaptive):
    settings = ("adapt.forward=0.05", "adapt.forward_at_first=0.2", "epochs=2")
    made = adaptive(*settings)
    made.controller.look(0.1, 0.2, 0.5)
    made.step = made.total // 2
    again = adaptive(*settings)
    again.restore(made.state())
    assert again.controller.forward.target == made.controller.forward.target == 0.125


def test_two_processes_choose_the_same(tmp_path, zygote, few_images):
    """What differs between processes by design, dropout and the penalty's noise, is off."""
    settings = [*TINY, "epochs=3", "adapt.enabled=true", "solver.tol=0", "adapt.every=2"]
    settings += ["adapt.forward=1e-4", "adapt.steps=[2,3,4,5,6]", "adapt.penalty_least=1e-9"]
    settings += ["adapt.penalty_most=1e-9"]
    runs.train(tmp_path / "alone", configs.load("digits", settings))
    run_all(zygote, tmp_path, 2, "train", *settings, "--out", tmp_path / "both")
    found, expected = (
        [(r["step"], r["max_iter"], r["refine"]) for r in training_runs.metrics(tmp_path / name)]
        for name in ("both", "alone")
    )
    assert found == expected
    assert len({line[1] for line in found}) > 1


def test_the_bar_shows_the_steps_in_use():
    console = Console(record=True, width=200, force_terminal=True)
    bar = progress.Bar(console)
    bar.begin("digits", 3, 0, Metric("accuracy", "%", digits=1))
    chosen = adapting.Choice(5, 2, 0.5).figures()
    bar.step(1, {"loss": 1.0, "accuracy": 50.0, "solver_steps": 5.0, **chosen, "ms": 1.0})
    bar.end()
    shown = "accuracy 50.0 %  5.0 solver steps  of at most 5  refine 2  penalty 0.5"
    assert shown in console.export_text()


def test_recordings_are_kept_and_the_oldest_dropped(monkeypatch):
    recorded = []

    class Captured:
        recording_seconds = 0.0

        def __init__(self, work, warmup, memory):
            assert memory is made.memory is not None
            recorded.append(warmup)

        def __call__(self):
            pass

    monkeypatch.setattr(recordings, "Captured", Captured)
    made = recordings.Recordings(enabled=True, shared=True)
    others = range(1, recordings.MOST)
    for way in (0, *others, 0, 99, 0, 1):  # 99 takes the place of 1, which is the oldest by then
        made.run(print, (way,))
    assert len(made.kept) == recordings.MOST
    # Libraries start up in the first way of a work alone; the last one was recorded before.
    assert recorded == [2, *[1] * len(others), 1, 0]


def test_all_that_changes_a_step_is_in_its_way(adaptive, monkeypatch):
    """Or a recording of other VJPs, steps or penalties would be played."""
    made = adaptive("measure_every=3", "residual_every=2", "adapt.every=50")
    ways = {}
    monkeypatch.setattr(
        made.recordings, "run", lambda work, way, *inputs: ways.setdefault(way, []).append(now)
    )
    batch = next(made.train_batches.epoch(0))[1]
    wanted = [(s, k, w) for s in (4, 5) for k in (0, 1) for w in (0.0, 0.5)]
    for steps, refine, weight in wanted:
        scripted(made, [(steps, refine, weight)])
        for made.step in range(6):
            measured = learner.measures(made.config, made.step)
            now = steps, refine, bool(weight) and made.step % 2 == 0, measured
            made.one_step(*batch)
    assert len(ways) == 2 * 2 * 2 * 2
    assert all(len(set(one)) == 1 for one in ways.values())


def test_several_processes_measure_at_every_step(adaptive):
    made = adaptive("measure_every=40", "adapt.every=50")
    made._prepare(1)
    assert not made.measured
    made.wrapped = torch.nn.Identity()  # what stands for all processes' model
    made._prepare(1)
    assert made.measured


class Recorded:
    """In place of a captured step; its second call is recorded, which takes 100 seconds."""

    def __init__(self, work, clock):
        self.work, self.clock, self.calls, self.recording_seconds = work, clock, 0, 0.0
        self.reason = self.graph = None

    def __call__(self, *inputs):
        self.calls += 1
        if self.calls == 2:
            self.clock[0] += 100
            self.recording_seconds += 100
            self.graph = self.work
        self.clock[0] += 1 if self.graph else 50
        self.work(*inputs)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_rehearsals_are_in_no_step_and_change_nothing(adaptive, monkeypatch, optimizer):
    """Training time has neither them nor recordings in it, and the results are the same."""
    choices = [(4, 0, 0.0), (4, 0, 0.0), (4, 0, 0.0), (5, 1, 0.0)]
    settings = ["epochs=2", "log_every=2", "model.dropout=0.2", f"optimizer={optimizer}"]
    plain = adaptive(*settings)
    scripted(plain, choices)
    plain.fit()
    clock = [0.0]
    monkeypatch.setattr(recordings, "Captured", lambda work, *_options: Recorded(work, clock))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    (plain.run.path / "metrics.jsonl").unlink()
    made = adaptive(*settings)
    made.recordings.enabled = True
    scripted(made, choices)
    made.fit()
    assert made.recordings.seconds >= 300  # of both ways, and maybe of the test
    assert made.seconds == 2 * PER_EPOCH
    lines = training_runs.metrics(made.run.path, timing=True)
    assert [r["ms"] for r in lines if r["kind"] == "step"] == [1000.0] * 3
    for one, other in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(made.sums.values, plain.sums.values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_that_take_turns(tmp_path):
    """With and without recordings, through changes and back: the same losses."""
    choices = [(4, 0, 0.0), (6, 1, 0.0), (4, 0, 0.2), (6, 1, 0.0), (4, 0, 0.0), (6, 1, 0.4)]
    gpu = process.Process(torch.device("cuda", 0))
    losses = []
    for number, graph in enumerate(("false", "true")):
        settings = [*TINY, *ADAPT, "device=cuda", f"graph={graph}", "epochs=5", "batch_size=128"]
        settings += ["adapt.every=8", "residual_every=2", "checkpoint_seconds=1000"]
        config = configs.load("digits", settings)
        folder = RunFolder(tmp_path / str(number))
        made = loop.Trainer(config, folder, gpu, progress.Silent(), None)
        made.run.path.mkdir()
        scripted(made, choices)
        made.fit()
        lines = [r for r in training_runs.metrics(made.run.path) if r["kind"] == "step"]
        losses.append([r["loss"] for r in lines])
        recorded = [c for c in made.recordings.kept.values() if c.graph is not None]
        assert bool(recorded) == (graph == "true")
    # Rounding differs from run to run on a GPU, and a training makes more of it.
    for found in losses[1:]:
        assert found[:16] == pytest.approx(losses[0][:16], rel=1e-2)
        assert found == pytest.approx(losses[0], rel=0.2)
