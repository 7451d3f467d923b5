"""Whole runs: start, resume, evaluate, compare.  What the command line calls."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from gdeq.lab.files import LabError
from gdeq.lab.tasks import registry
from gdeq.lab.training import checkpoint, process, progress
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import Config, ConfigError
from gdeq.lab.training.folder import RunError, RunFolder, device_name, read_metrics
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.loop import Trainer
from gdeq.lab.training.precision import precision
from gdeq.lab.training.similarity import METHODS, similarity, solver_for
from gdeq.lab.training.stopping import TrainingError
from gdeq.options import count

Tell = Callable[[str], None]
GRADIENTS = ("implicit", "jfb", "npg", "gdeq")
MISSING, HALF, FINISHED = "missing", "half", "finished"  # the runs of a comparison
DEEDS = {MISSING: "train into", HALF: "go on with", FINISHED: "keep"}


@contextlib.contextmanager
def joined(config: Config, path: Path) -> Iterator[process.Process]:
    """Join the group of processes for a run; a lost process becomes a `TrainingError`."""
    me = process.start(config.device, timeout=config.timeout_seconds)
    try:
        yield me
    except RuntimeError as problem:
        if isinstance(problem, LabError) or not me.lost_another(problem):
            raise
        raise TrainingError(
            f"another process of this training was lost, or did not answer for "
            f"{config.timeout_seconds:g} seconds (timeout_seconds).  Continue with "
            f"`gdeq train --resume {path}`"
        ) from problem
    finally:
        process.stop()


def train(
    path: Path, config: Config, root: Path | None = None, tell: Tell = print, **manner: Any
) -> dict[str, Any]:
    """A new run in a new folder; returns its summary.

    manner: ``dry_run=True`` only says what would be done; the rest are options of `Trainer.fit`.
    """
    with joined(config, path) as me:
        return _begin(me, path, config, root, tell, **manner)


def resume(
    path: Path,
    root: Path | None = None,
    overrides: list[str] | None = None,
    tell: Tell = print,
    **manner: Any,
) -> dict[str, Any]:
    """Go on where the newest whole checkpoint is; from the start if there is none yet.

    A run that has all its epochs is left as it is.
    """
    run, config = reopen(path, overrides)
    summary = run.finished(config.epochs)
    if summary is not None:  # even if its device does not exist here
        tell(_finished(run, summary, config))
        return summary
    with joined(config, path) as me:
        return _continue(me, run, config, root, tell, **manner)


def train_or_resume(
    path: Path, config: Config, root: Path | None = None, tell: Tell = print, **manner: Any
) -> dict[str, Any]:
    """Begin the run, or go on with it if it is there: what a restarted job calls again."""
    with joined(config, path) as me:
        state = me.agree(_state(path, config) if me.first else "")
        if state == MISSING:
            return _begin(me, path, config, root, tell, **manner)
        run = RunFolder.open(path)
        summary = run.finished(config.epochs)
        if state == HALF or summary is None:
            return _continue(me, run, config, root, tell, **manner)
        if not me.first:
            return {}
        tell(_finished(run, summary, config))
        return summary


def _begin(
    me: process.Process,
    path: Path,
    config: Config,
    root: Path | None,
    tell: Tell,
    dry_run: bool = False,
    **manner: Any,
) -> dict[str, Any]:
    run = RunFolder(Path(me.agree(str(path))))
    if me.first:
        run.check_free()
    # The data set and the model come first: a run that cannot start leaves no folder behind.
    trainer = Trainer(config, run, me, progress.choose(me.first), root)
    if dry_run:
        kind = "which is there and holds nothing yet" if path.exists() else "a new folder"
        return _describe(trainer, tell, f"would train into {path}, {kind}")
    if me.first:
        run.create(config)
    me.wait()
    with run.locked(me):
        return trainer.fit(**manner)


def _continue(
    me: process.Process,
    run: RunFolder,
    config: Config,
    root: Path | None,
    tell: Tell,
    dry_run: bool = False,
    **manner: Any,
) -> dict[str, Any]:
    path, before = run.path, run.config()
    begun = bool(checkpoint.available(path))
    if not begun and (path / "summary.json").is_file():
        raise RunError(
            f"{path} was finished, and its checkpoints are not here: to continue it would be to "
            f"begin anew, over its metrics; {_anew(path)}"
        )
    view = progress.choose(me.first)
    trainer = Trainer(config, run, me, view, root)
    # Locked before the newest checkpoint is read: another process may be writing one.
    with contextlib.nullcontext() if dry_run else run.locked(me):
        say = tell if dry_run else view.say
        state = checkpoint.latest(path, say, aside=me.first and not dry_run) if begun else None
        told = ["no checkpoint yet: starting from the beginning"]
        if state is not None:
            trainer.restore(state)
            told = [trainer.whereabouts()]
        if config != before:
            changed = ", ".join(configs.differences(before, config))
            told.append(f"from here on with {changed}")
        if dry_run:
            return _describe(trainer, tell, *told, f"would go on in {path}")
        for text in told:
            view.say(text)
        me.wait()  # until the last one has read the folder
        if me.first:
            run.cut(0 if state is None else state["metrics_size"], view.say)
            run.restore_config(before, view.say)
            if config != before:
                if state is not None:  # so that the next resume keeps the change
                    run.save(state, config)
                run.write_config(config)
        me.wait()
        return trainer.fit(**manner)


def _describe(learner: Learner, tell: Tell, *lines: str) -> dict[str, Any]:
    """What a dry run says; nothing is written."""
    train, test = (len(tensors[0]) for tensors in learner.task.data)
    for text in (
        yaml.safe_dump(configs.to_dict(learner.config), sort_keys=False),
        f"device: {device_name(learner.process.device)}",
        f"data set: {train} train and {test} test {learner.task.samples}",
        f"steps: {len(learner.train_batches)} an epoch, {learner.total} in all",
        f"parameters: {sum(p.numel() for p in learner.model.parameters()):,}",
        *learner.notes(),
        *lines,
    ):
        tell(text)
    return {}


def reopen(path: Path, overrides: list[str] | None = None) -> tuple[RunFolder, Config]:
    """A run that is there, and its configuration as it would be from now on."""
    run = RunFolder.open(path)
    before = run.config()
    config = configs.change(before, overrides or [])
    for key in before.fixed:  # the saved state depends on these
        get = attrgetter(key)
        if get(before) != get(config):
            raise RunError(
                f"{key} cannot change in the middle of a run (it is {get(before)!r}): "
                "start a new one"
            )
    return run, config


def _anew(path: Path) -> str:
    return f"make it again with `gdeq train {path / 'config.yaml'} --out ANOTHER_FOLDER`"


def as_trained(config: Config, choice: dict[str, Any] | None) -> Config:
    """The settings that an adaptive run ended with, as fixed settings."""
    if not config.adapt.enabled or choice is None:
        return config
    used = {"gradient__refine": choice["refine"], "solver__max_iter": choice["max_iter"]}
    if not choice["refine"] and not config.solver.build().keeps_inverse:
        used["gradient__name"] = "jfb"  # as `Choice.gradient`
    return configs.replace(config, adapt__enabled=False, **used)


def trained(
    path: Path,
    root: Path | None = None,
    device: str | None = None,
    epoch: int | None = None,
    steps: int | None = None,
) -> Learner:
    """A finished run, ready to be tested: with its last weights, or a snapshot's.

    Its settings are those that the weights were made with.
    steps: of the solver at most, if not the run's own.
    """
    run = RunFolder.open(path)
    me = process.start(device or run.config().device, "--device ")
    file = path / ("weights.safetensors" if epoch is None else snapshots(path)[epoch])
    if not file.is_file():
        if (path / "summary.json").is_file() and not checkpoint.available(path):
            raise RunError(f"{path} is finished, but its {file.name} is not here: {_anew(path)}")
        raise RunError(
            f"{path} has no {file.name}: it is not finished; continue it with "
            f"`gdeq train --resume {path}`"
        )
    tensors, about = checkpoint.read_tensors(file)
    try:
        config = as_trained(configs.from_dict(about["config"]), about["choice"])
        if steps is not None:
            config = configs.replace(config, solver__max_iter=steps)
        # The weights in the file are averaged already.
        learner = Learner(configs.replace(config, ema=0.0), process.Process(me.device), root)
        checkpoint.load_weights(learner.model, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError) as problem:
        if isinstance(problem, LabError):
            raise
        raise RunError(f"{file} is of another model: {problem}") from problem
    learner.model.eval()
    learner.step = learner.total
    return learner


def evaluate(
    path: Path, root: Path | None = None, device: str | None = None, steps: int | None = None
) -> dict[str, float]:
    """Test metric and loss of a finished run; ``steps``: with so many of the solver at most."""
    learner = trained(path, root, device, steps=steps)
    if steps is not None and learner.total <= learner.config.pretrain_steps:
        raise RunError(f"{path} ended unrolled, without a solver: leave --steps out")
    with precision(learner.config, learner.process.device):
        return learner.evaluate()


def check_exact_tol(tol: float) -> None:
    if not 0 < tol < math.inf:
        raise ConfigError(f"--exact-tol must be above 0, got {tol:g}")


def measure_similarity(
    path: Path,
    epochs: list[int] | None = None,
    batches: int = 8,
    batch_size: int = 64,
    root: Path | None = None,
    device: str | None = None,
    exact_tol: float = 1e-4,
    tell: Tell = print,
) -> Iterator[dict[str, Any]]:
    """Compare the gradients on the run's snapshots, epoch by epoch, into ``similarity.jsonl``.

    An epoch is written once it is complete, in place of what an earlier call found for it; the
    records of the others stay.
    """
    check_exact_tol(exact_tol)
    run = RunFolder.open(path)
    if not os.access(path, os.W_OK):  # say so before minutes of work
        raise RunError(f"{path} may not be written to, and its similarity is kept there: copy it")
    found = snapshots(path)
    if not found:
        raise RunError(
            f"{path} holds no snapshots; train with snapshots=[1,10,20,50] (epochs) to have them"
        )
    chosen = list(dict.fromkeys(epochs)) if epochs else sorted(found)
    missing = [epoch for epoch in chosen if epoch not in found]
    if missing:
        raise RunError(f"no snapshot of epoch {missing[0]}; there are {sorted(found)}")
    for epoch in chosen:
        learner = trained(path, root, device, epoch)
        own = learner.config.solver.build()
        solvers = {name: solver_for(method, own) for name, method in METHODS.items()}
        replaced = [name for name, solver in solvers.items() if solver != own]
        if replaced and epoch == chosen[0]:
            tell(
                f"the run's solver, {type(own).__name__}, leaves no inverse to reuse: "
                f"for {', '.join(replaced)} it is solved by {solvers[replaced[0]]}"
            )
        samples = len(learner.task.data.train[0])
        if batch_size > samples:
            raise ConfigError(
                f"--batch-size {batch_size} is larger than the data set "
                f"({count(samples, 'sample')}): lower it"
            )
        source = learner.task.train_batches(batch_size, plain=True)
        records = []
        for record in similarity(learner, source, own, batches, epoch, exact_tol):
            records.append(record)
            yield record
        _keep_similarity(run, epoch, records, tell)


def _keep_similarity(run: RunFolder, epoch: int, records: list[dict[str, Any]], tell: Tell) -> None:
    name = "similarity.jsonl"
    before = read_metrics(run.path / name)
    others = [record for record in before if record.get("epoch") != epoch]
    if len(others) < len(before):
        if not any(record["solved"] for record in records):
            nothing = "no sample is solved to that, its earlier records"
            tell(f"epoch {epoch}: {nothing} in {name} are kept")
            return
        tell(f"epoch {epoch}: its earlier records in {name} are replaced")
    ordered = sorted([*others, *records], key=lambda record: record.get("epoch", 0))
    run.write(name, "".join(json.dumps(record) + "\n" for record in ordered))


def snapshots(path: Path) -> dict[int, str]:
    """Epoch → file name, of the weights kept on the way."""
    found = sorted((path / "snapshots").glob("epoch-*.safetensors"))
    numbers = {file.stem.removeprefix("epoch-"): f"snapshots/{file.name}" for file in found}
    return {int(number): name for number, name in numbers.items() if number.isdecimal()}


def compare(
    folder: Path,
    config: Config,
    pretrain_steps: int,
    seeds: int = 1,
    root: Path | None = None,
    tell: Tell = print,
    dry_run: bool = False,
) -> list[Path]:
    """The paper's Table 2: four gradients, without and with pre-training (0: without), else alike.

    Runs that are finished are kept, half ones go on: the same call continues a broken one.
    """
    table = _table(folder, config, pretrain_steps, seeds)
    states = {path: _state(path, wanted) for path, wanted in table.items()}  # before any begins
    if dry_run:
        with joined(config, folder) as me:
            learner = Learner(config, me, root)
            deeds = (f"{state}: would {DEEDS[state]} {path}" for path, state in states.items())
            _describe(learner, tell, *deeds)
        return []
    left = [path for path in table if states[path] != FINISHED]
    proceed = f"the same command: `gdeq compare ... --out {folder}`"
    for path, wanted in table.items():
        if path in left:
            more = path != left[-1]
            train_or_resume(path, wanted, root, tell, more=more, proceed=proceed)
        else:
            tell(f"{path.name}: finished before, kept")
    return list(table)


def default_pretraining(config: Config, root: Path | None) -> int:
    """A fifth of the steps."""
    me = process.Process(torch.device("cpu"))
    samples = len(registry.find(config.task)(config, me, root).data.train[0])
    return max(1, config.epochs * (samples // config.batch_size) // 5)


def _table(folder: Path, config: Config, pretrain_steps: int, seeds: int) -> dict[Path, Config]:
    """The runs of a comparison, in the order in which they are made."""
    paper = {"jfb": {"gradient__refine": 0}}  # the configured refinement is GDEQ's
    return {
        folder / f"{name}{'-pretrained' if steps else ''}-seed{seed}": configs.replace(
            config, gradient__name=name, pretrain_steps=steps, seed=seed, **paper.get(name, {})
        )
        for seed in range(config.seed, config.seed + seeds)
        for steps in sorted({0, pretrain_steps})
        for name in GRADIENTS
    }


def _state(path: Path, wanted: Config) -> str:
    """How far this run is: `MISSING`, `HALF` or `FINISHED`."""
    if not RunFolder(path).begun:
        RunFolder(path).check_free()
        return MISSING
    run = RunFolder.open(path)
    config = run.config()
    if config != wanted:
        raise RunError(
            f"{path} was made with other settings; choose another --out, or give it the settings "
            f"it has ({', '.join(configs.differences(config, wanted))})"
        )
    return HALF if run.finished(config.epochs) is None else FINISHED


def _finished(run: RunFolder, summary: dict[str, Any], config: Config) -> str:
    made = run.config()
    unused, wrong = ", ".join(configs.differences(made, config)), run.wrong(made)
    ignored = f"\nnot used, as no step is left: {unused}" if unused else ""
    ignored += f"\nwarning: config.yaml {wrong}; it is not used" if wrong else ""
    return (
        f"{run.path} is already finished: {count(summary['epochs'], 'epoch')}, test "
        f"{run.tested(summary)}; nothing is changed.  To train it for longer, raise epochs: "
        f"`gdeq train --resume {run.path} epochs={2 * summary['epochs']}`{ignored}"
    )
