"""Whole runs: start, resume, evaluate, compare.  What the command line calls."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from gdeq import Gradient, Solver
from gdeq.lab.files import LabError
from gdeq.lab.tasks import registry
from gdeq.lab.training import checkpoint, process, progress
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import Config, ConfigError
from gdeq.lab.training.folder import RunError, RunFolder, device_name, read_metrics
from gdeq.lab.training.loop import Trainer
from gdeq.lab.training.precision import precision
from gdeq.lab.training.similarity import methods_for, similarity, solver_for
from gdeq.lab.training.stopping import Interrupted, TrainingError
from gdeq.options import count

GRADIENTS = ("implicit", "jfb", "npg", "gdeq")
MISSING, HALF, FINISHED = "missing", "half", "finished"  # the runs of a comparison
DEEDS = {MISSING: "train into", HALF: "go on with", FINISHED: "keep"}


@contextlib.contextmanager
def joined(config: Config, path: Path) -> Iterator[process.Process]:
    """The group of processes while a run lasts; that one of them is lost is told in a sentence."""
    me = start_on(config.device, timeout=config.timeout_seconds)
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


def fit(trainer: Trainer, more: bool = False, proceed: str | None = None) -> dict[str, Any]:
    """Train to the end.

    more: other runs come after it, which a signal stops even where this one came to its end.
    proceed: what one who stopped it is told to continue with (None: `gdeq train --resume`).
    """
    trainer.proceed = proceed
    summary = trainer.fit()
    if more and trainer.asked_to_stop:
        raise Interrupted(
            trainer.stop.caught or signal.SIGTERM,
            f"stopped after {trainer.run.path}, which is finished; the same command goes on "
            "with the rest",
        )
    return summary


def train(path: Path, config: Config, root: Path | None = None, **manner: Any) -> dict[str, Any]:
    """A new run in a new folder.  manner: options of `fit`, for all three."""
    with joined(config, path) as me:
        return _begin(me, path, config, root, **manner)


def resume(
    path: Path,
    root: Path | None = None,
    overrides: list[str] | None = None,
    tell: Callable[[str], None] = print,
    **manner: Any,
) -> dict[str, Any]:
    """Go on where the newest whole checkpoint is; from the start if there is none yet.

    A run that has all its epochs is left as it is.
    """
    run, config = reopen(path, overrides)
    summary = run.finished(config.epochs)
    if summary is not None:  # also where its device is not
        tell(_finished(run, summary, config))
        return summary
    with joined(config, path) as me:
        return _continue(me, run, config, root, **manner)


def train_or_resume(
    path: Path,
    config: Config,
    root: Path | None = None,
    tell: Callable[[str], None] = print,
    **manner: Any,
) -> dict[str, Any]:
    """Begin the run, or go on with it if it is there: what a restarted job calls again."""
    with joined(config, path) as me:
        state = me.agree(_state(path, config) if me.first else "")
        if state == MISSING:
            return _begin(me, path, config, root, **manner)
        run = RunFolder.open(path)
        summary = run.finished(config.epochs) if state == FINISHED else None
        if summary is None:
            return _continue(me, run, config, root, **manner)
        if me.first:
            tell(_finished(run, summary, config))
        return summary if me.first else {}


def _begin(
    me: process.Process, path: Path, config: Config, root: Path | None, **manner: Any
) -> dict[str, Any]:
    path = Path(me.agree(str(path)))
    if me.first:
        RunFolder.check_free(path)
    # The data set and the model come first: a run that cannot start leaves no folder behind.
    trainer = Trainer(config, RunFolder(path), me, progress.choose(me.first), root)
    if me.first:
        trainer.run = RunFolder.create(path, config)
    me.wait()
    return fit(trainer, **manner)


def _continue(
    me: process.Process,
    run: RunFolder,
    config: Config,
    root: Path | None,
    **manner: Any,
) -> dict[str, Any]:
    path, before = run.path, run.config()
    _check_continuable(path)
    view = progress.choose(me.first)
    trainer = Trainer(config, run, me, view, root)
    trainer.lock()  # before the newest checkpoint is read: another process may be writing one
    state = None
    if checkpoint.available(path):
        state = checkpoint.latest(path, view.say)
        trainer.restore(state)
        view.say(trainer.whereabouts())
    else:
        view.say("no checkpoint yet: starting from the beginning")
        if me.first:
            run.cut(0)
    if me.first:
        run.restore_config(before, view.say)
        if config != before:
            view.say(_changed(run, config))
            if state is not None:  # the next resume goes on with the same
                checkpoint.save(path, state["step"], state, configs.to_dict(config))
            run.write_config(config)
    me.wait()
    return fit(trainer, **manner)


def reopen(path: Path, overrides: list[str] | None = None) -> tuple[RunFolder, Config]:
    """A run that is there, and its configuration as it would be from now on."""
    run = RunFolder.open(path)
    before = run.config()
    config = configs.change(before, overrides or [])
    for key in before.fixed:  # what the saved state depends on
        get = attrgetter(key)
        if get(before) != get(config):
            raise RunError(
                f"{key} cannot change in the middle of a run (it is {get(before)!r}): "
                "start a new one"
            )
    return run, config


def _check_continuable(path: Path) -> None:
    """Of a run that was finished, what is left without its checkpoints must not be overwritten."""
    if (path / "summary.json").is_file() and not checkpoint.available(path):
        raise RunError(
            f"{path} was finished, and its checkpoints are not here: to continue it would be to "
            f"begin anew, over its metrics; {_anew(path)}"
        )


def _anew(path: Path) -> str:
    return f"make it again with `gdeq train {path / 'config.yaml'} --out ANOTHER_FOLDER`"


def as_trained(config: Config, choice: dict[str, Any] | None) -> Config:
    """Where it was adapted, with what was in use at last in place of the adapting."""
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
) -> Trainer:
    """A finished run, ready to be tested: with its last weights, or a snapshot's.

    Its settings are those that the weights were made with.
    steps: of the solver at most, if not the run's own.
    """
    run = RunFolder.open(path)
    me = start_on(device or run.config().device, "--device ")
    file = path / ("weights.safetensors" if epoch is None else snapshots(path)[epoch])
    if not file.is_file():
        if (path / "summary.json").is_file() and not checkpoint.available(path):
            raise RunError(f"{path} is finished, but its {file.name} is not here: {_anew(path)}")
        raise RunError(
            f"{path} has no {file.name}: it is not finished; continue it with "
            f"`gdeq train --resume {path}`"
        )
    tensors, about = checkpoint.read_tensors(file)
    alone, silent = process.Process(me.device), progress.Silent()
    try:
        config = as_trained(configs.from_dict(about["config"]), about["choice"])
        if steps is not None:
            config = configs.replace(config, solver__max_iter=steps)
        # What is in the file was averaged already.
        trainer = Trainer(configs.replace(config, ema=0.0), run, alone, silent, root)
        checkpoint.load_weights(trainer.model, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError) as problem:
        if isinstance(problem, LabError):
            raise
        raise RunError(f"{file} is of another model: {problem}") from problem
    trainer.model.eval()
    trainer.step = trainer.total
    return trainer


def evaluate(
    path: Path, root: Path | None = None, device: str | None = None, steps: int | None = None
) -> dict[str, float]:
    """Test metric and loss of a finished run; ``steps``: with so many of the solver at most."""
    trainer = trained(path, root, device, steps=steps)
    if steps is not None and trainer.total <= trainer.config.pretrain_steps:
        raise RunError(f"{path} ended unrolled, without a solver: leave --steps out")
    with precision(trainer.config, trainer.process.device):
        return trainer.evaluate()


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
    tell: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:
    """Compare the gradients on the run's snapshots, epoch by epoch, into ``similarity.jsonl``.

    An epoch is written once it is complete, in place of what an earlier call found for it; the
    records of the others stay.
    """
    check_exact_tol(exact_tol)
    run = RunFolder.open(path)
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
        trainer = trained(path, root, device, epoch)
        own, methods = trainer.config.solver.build(), methods_for(trainer.config)
        if epoch == chosen[0]:
            _tell_replaced(own, methods, tell)
        samples = len(trainer.task.data.train[0])
        if batch_size > samples:
            raise ConfigError(
                f"--batch-size {batch_size} is larger than the data set "
                f"({count(samples, 'sample')}): lower it"
            )
        source = trainer.task.train_batches(batch_size, plain=True)
        records = []
        for record in similarity(trainer, source, own, batches, epoch, exact_tol, methods):
            records.append(record)
            yield record
        _keep_similarity(run, epoch, records, tell)


def _tell_replaced(own: Solver, methods: dict[str, Gradient], tell: Callable[[str], None]) -> None:
    others = {name: solver_for(method, own) for name, method in methods.items()}
    replaced = [name for name, solver in others.items() if solver != own]
    if replaced:
        tell(
            f"the run's solver, {type(own).__name__}, leaves no inverse to reuse: "
            f"for {', '.join(replaced)} it is solved by {others[replaced[0]]}"
        )


def _keep_similarity(
    run: RunFolder, epoch: int, records: list[dict[str, Any]], tell: Callable[[str], None]
) -> None:
    name = "similarity.jsonl"
    before = read_metrics(run.path / name)
    others = [record for record in before if record.get("epoch") != epoch]
    found = any(record["solved"] or record["solved_here"] for record in records)
    if not found and len(others) < len(before):
        tell(f"epoch {epoch}: no sample is solved to that, its earlier records in {name} are kept")
        return
    if len(others) < len(before):
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
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """The paper's Table 2: four gradients, without and with pre-training (0: without), else alike.

    Runs that are finished are kept, half ones go on: the same call continues a broken one.
    """
    table = _table(folder, config, pretrain_steps, seeds)
    states = {path: _state(path, wanted) for path, wanted in table.items()}  # before any begins
    left = [path for path in table if states[path] != FINISHED]
    proceed = f"the same command: `gdeq compare ... --out {folder}`"
    for path, wanted in table.items():
        if states[path] == FINISHED:
            tell(f"{path.name}: finished before, kept")
            continue
        more = path != left[-1]
        if states[path] == HALF:
            resume(path, root, tell=tell, more=more, proceed=proceed)
        else:
            train(path, wanted, root, more=more, proceed=proceed)
    return list(table)


def default_pretraining(config: Config, root: Path | None) -> int:
    """A fifth of the steps."""
    me = process.Process(torch.device("cpu"))
    samples = len(registry.find(config.task)(config, me, root).data.train[0])
    return max(1, config.epochs * (samples // config.batch_size) // 5)


# -- dry runs: the checks that the command itself makes, and what it would do ---------------------


def forecast_train(
    path: Path, config: Config, root: Path | None = None, auto: bool = False
) -> list[str]:
    if auto and _state(path, config) != MISSING:
        return forecast_resume(RunFolder.open(path), config, root)
    RunFolder.check_free(path)
    kind = "which is there and holds nothing yet" if path.exists() else "a new folder"
    return [*_prepared(config, path, root)[1], f"would train into {path}, {kind}"]


def forecast_resume(run: RunFolder, config: Config, root: Path | None = None) -> list[str]:
    summary = run.finished(config.epochs)
    if summary is not None:
        return [_finished(run, summary, config)]
    changed = [_changed(run, config)] if config != run.config() else []
    trainer, lines = _prepared(config, run.path, root)
    return [*changed, *lines, *_restored(trainer)]


def forecast_compare(
    folder: Path, config: Config, pretrain_steps: int, seeds: int = 1, root: Path | None = None
) -> list[str]:
    lines = _prepared(config, folder, root)[1]
    for path, wanted in _table(folder, config, pretrain_steps, seeds).items():
        state = _state(path, wanted)
        lines.append(f"{state}: would {DEEDS[state]} {path}")
        if state == HALF:
            lines += _restored(_prepared(wanted, path, root)[0])
    return lines


def _prepared(config: Config, path: Path, root: Path | None) -> tuple[Trainer, list[str]]:
    """The trainer that a run would have, and what there is to say of it."""
    try:
        me = start_on(config.device)
        made = Trainer(config, RunFolder(path), me, progress.Silent(), root)
    finally:
        process.stop()
    train, test = (len(tensors[0]) for tensors in made.task.data)
    return made, [
        f"device: {device_name(me.device)}",
        f"data set: {train} train and {test} test {made.task.samples}",
        f"steps: {len(made.train_batches)} an epoch, {made.total} in all",
        f"parameters: {sum(p.numel() for p in made.model.parameters()):,}",
        *made.notes(),
    ]


def _restored(trainer: Trainer) -> list[str]:
    """Where it would go on; nothing is written."""
    path = trainer.run.path
    lines: list[str] = []
    if not checkpoint.available(path):
        _check_continuable(path)
        return [f"{path} has no checkpoint yet: would begin at its start"]
    state = checkpoint.latest(path, lines.append)
    with trainer.fitting():
        trainer.take_over(state)  # `restore` would go on to write in the folder
    at = f"at step {trainer.step} of {trainer.total}"
    told = f"would go on in {path} from checkpoint step-{trainer.step:09d}.ckpt, {at}"
    return [*lines, told]


# -- what they share -------------------------------------------------------------------------------


def _table(folder: Path, config: Config, pretrain_steps: int, seeds: int) -> dict[Path, Config]:
    """The runs of a comparison, in the order in which they are made."""
    paper = {"jfb": {"gradient__refine": 0}}  # the settings are GDEQ's
    return {
        folder / f"{name}{'-pretrained' if steps else ''}-seed{seed}": configs.replace(
            config, gradient__name=name, pretrain_steps=steps, seed=seed, **paper.get(name, {})
        )
        for seed in range(config.seed, config.seed + seeds)
        for steps in sorted({0, pretrain_steps})
        for name in GRADIENTS
    }


def _state(path: Path, wanted: Config) -> str:
    """How far this run of a comparison is."""
    if not (path / "config.yaml").is_file() and not checkpoint.available(path):
        RunFolder.check_free(path)
        return MISSING
    run = RunFolder.open(path)
    config = run.config()
    if config != wanted:
        raise RunError(
            f"{path} was made with other settings; choose another --out, or give it the settings "
            f"it has ({', '.join(configs.differences(config, wanted))})"
        )
    return HALF if run.finished(config.epochs) is None else FINISHED


def _changed(run: RunFolder, config: Config) -> str:
    return f"from here on with {', '.join(configs.differences(run.config(), config))}"


def _finished(run: RunFolder, summary: dict[str, Any], config: Config) -> str:
    unused = ", ".join(configs.differences(run.config(), config))
    ignored = f"\nnot used, as no step is left: {unused}" if unused else ""
    return (
        f"{run.path} is already finished: {count(summary['epochs'], 'epoch')}, test "
        f"{run.tested(summary)}; nothing is changed.  To train it for longer, raise epochs: "
        f"`gdeq train --resume {run.path} epochs={2 * summary['epochs']}`{ignored}"
    )


def start_on(device: str, option: str = "device=", timeout: float = 600.0) -> process.Process:
    """`process.start`; where it fails, the advice is in terms of this command's own option."""
    try:
        return process.start(device, timeout)
    except process.DeviceError as problem:
        said = str(problem).replace("device=", option)
        advice = f"{option}cpu"
        raise process.DeviceError(said if advice in said else f"{said}; use {advice}") from problem
