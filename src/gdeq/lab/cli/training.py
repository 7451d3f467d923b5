"""Commands that train, and use what was trained: train, evaluate, sample, compare; and data."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from gdeq.lab import data as datasets
from gdeq.lab import files
from gdeq.lab.cli.shared import Device, DryRun, Root, RunPath, app, console, plain_errors, tell
from gdeq.lab.tasks import registry
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import Config
from gdeq.options import count

PRESETS = registry.presets()
Source = Annotated[
    str | None,
    typer.Argument(
        help=f"A preset ({', '.join(PRESETS)}), a YAML file, or a .py file with your own task.",
        show_default="digits",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]...",
        help="Settings, such as epochs=5 optimizer.lr=0.01; `gdeq train --help` lists them.",
        show_default=False,
    ),
]
KEYS: list[str] = []
for _task, _title in {
    "images": "Settings and their defaults, which a preset may change:",
    "bytes": "Language models (chars, ptb, ...) have these in place of data, model and augment:",
    "sudoku": "sudoku has these instead:",
    "imaging": "imaging has these instead:",
}.items():
    _own = [line for line in configs.help_lines(registry.TASKS[_task].settings) if line not in KEYS]
    KEYS += [_title, "", *_own, ""]


@app.command(epilog="\n".join(escape(line) for line in KEYS))
@plain_errors
def train(
    source: Source = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|auto",
            help="Continue this run from its last checkpoint.  auto: continue the run in --out, or "
            "start it if there is none, so that a restarted job continues where it was.",
        ),
    ] = None,
    data: Root = None,
    dry_run: DryRun = False,
) -> None:
    """Train a deep equilibrium model.

    gdeq train                                   digits, a minute on a CPU

    gdeq train chars                             a language model, two minutes

    gdeq train cifar10-fast gradient=implicit    a setting changed

    gdeq train my_task.py epochs=3               your own data and model

    gdeq train --resume runs/NAME                continue an interrupted run

    torchrun --nproc-per-node 4 -m gdeq train cifar10-fast    several GPUs
    """
    from gdeq.lab.training import runs
    from gdeq.lab.training.folder import RunFolder

    if resume is not None and str(resume) != "auto":
        if out is not None:
            raise configs.ConfigError("--resume continues in the run's own folder: leave --out out")
        if source in PRESETS or re.fullmatch(r"[^=]*\.(yaml|yml|py)", source or ""):
            raise configs.ConfigError(
                f"--resume takes no preset and no file, since it uses the run's own configuration: "
                f"leave {source} out (settings such as epochs=5 may follow)"
            )
        # With --resume the first argument, if there is one, is a setting.
        overrides = [*([] if source is None else [source]), *(settings or [])]
        path, summary = resume, runs.resume(resume, data, overrides, tell, dry_run=dry_run)
    else:
        config = chosen(source, settings)
        if resume is not None and out is None:
            raise configs.ConfigError("--resume auto needs --out DIR, the run to start or continue")
        if resume is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            raise configs.ConfigError(
                "torchrun restarted this command, which would start a second run: add --out DIR "
                "--resume auto, and it continues the first one"
            )
        path = out or Path("runs") / default_name(config)
        make = runs.train_or_resume if resume else runs.train
        summary = make(path, config, data, tell, dry_run=dry_run)
    if summary and not dry_run:  # the first process alone has one
        tell(
            f"test {RunFolder.tested(summary)}, {summary['train_seconds']:.0f} s of training, "
            f"{summary['ms_per_step']:.1f} ms a step, {summary['parameters']:,} parameters"
        )
        tell(f"run folder: {path}   (gdeq report {path})")


@app.command()
@plain_errors
def evaluate(
    run: RunPath,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=10**9,
            help="Maximum number of solver steps (default: the run's own).  Repeatable.",
        ),
    ] = None,
    data: Root = None,
    device: Device = None,
) -> None:
    """Test a finished run.

    Prints its metric, loss and residual.  If f has an equilibrium, more solver steps than in
    training lower the residual and leave the metric unchanged.  A solve ends before, where it meets
    the run's solver.tol; then --steps changes nothing.
    """
    from gdeq.lab.training import runs
    from gdeq.lab.training.folder import RunFolder

    task = registry.find(RunFolder.open(run).config().task)
    for number in steps or (None,):
        found = runs.evaluate(run, data, device, number)
        told = "" if number is None else f" with {count(number, 'solver step')}"
        tell(
            f"{run}{told}: test {task.metric.text(found[task.metric.name])}, loss "
            f"{found['loss']:.4f}, {found['samples']:.0f} {task.samples}, residual "
            f"{found['residual']:.1e}"
        )


@app.command()
@plain_errors
def sample(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="Words or bytes to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Lower it to draw likely tokens more often.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    tol: Annotated[float, typer.Option(min=0.0, help="Tolerance of each solve.")] = 1e-2,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps of each solve.")] = 50,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start each solve from zeros, not from the last token's z."),
    ] = False,
    data: Root = None,
    device: Device = None,
) -> None:
    """Continue a text with a trained language model."""
    from gdeq import Picard
    from gdeq.lab.tasks.language import Language, continued
    from gdeq.lab.training import runs
    from gdeq.lab.training.precision import precision

    learner = runs.trained(run, data, device)
    task = learner.task
    model: Any = learner.model
    if not isinstance(task, Language):
        raise configs.ConfigError(f"{run} is not a language model: its task is {task.name}")
    start = task.encoded(prompt)
    if not len(start):
        raise configs.ConfigError("--prompt is empty: write at least one word")
    learner.set_phase(learner.total - 1)
    solved = learner.deq.solver is not None  # else it is evaluated once
    if solved:
        learner.deq.solver = Picard(max_iter=steps, tol=tol, stop="whole")
    with precision(learner.config, learner.process.device):
        made = list(continued(model, start, tokens, temperature, seed, solved and not fresh))
    typer.echo(files.shown(task.decoded([*start.tolist(), *(token for token, _ in made)])))
    mean = statistics.mean(taken for _, taken in made)
    tell(f"{mean:.1f} solver steps per token, to a residual of {tol:g}")


@app.command()
@plain_errors
def compare(
    source: Source = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs and the report.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method, each with its seed.")] = 1,
    pretraining: Annotated[
        bool, typer.Option(help="Also train each method with pre-training, in a second column.")
    ] = True,
    data: Root = None,
    dry_run: DryRun = False,
) -> None:
    """Compare Implicit, JFB, NPG and GDEQ, as the paper's Table 2 does.

    Trains with each of them by the same recipe, without and with pre-training.  Then prints a table
    and writes a report page.  After an interruption, give the same command again to continue.

    The length of the pre-training is pretrain_steps (default: a fifth of all steps).
    """
    from gdeq.lab import report as reports
    from gdeq.lab.training import runs, timing

    config = chosen(source, settings, runs.GRADIENTS)
    place = out or Path("runs") / f"compare-{title_of(config)}"
    pretrain = 0
    if pretraining:
        pretrain = config.pretrain_steps or runs.default_pretraining(config, data)
    paths = runs.compare(place, config, pretrain, seeds, data, tell, dry_run)
    if dry_run:
        return
    timing.time_runs(paths[: len(runs.GRADIENTS)], data, tell)
    page = reports.write(paths, place)
    typer.echo(reports.table(paths))
    tell(f"report: {page}")


@app.command("data")
@plain_errors
def get_data(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(datasets.NAMES)}.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Take it from this archive or folder.")
    ] = None,
    data: Root = None,
) -> None:
    """Find or download a data set, and check its files."""
    from rich.progress import Progress

    if terms := datasets.terms(name):
        typer.echo(terms)
    with Progress(console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def move(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        place = datasets.prepare(name, data, source, move)
    own = name == "digits"
    tell(f"{name} comes with scikit-learn" if own else f"{name} is ready: {place}")


def chosen(source: str | None, settings: list[str] | None, gradients: Sequence[str] = ()) -> Config:
    """The configuration that the arguments ask for.  Without a preset, the first is a setting."""
    if source is None or "=" in source:  # gdeq train epochs=3
        first = [] if source is None else [source]
        return configs.load("digits", [*first, *(settings or [])], gradients)
    return configs.load(source, settings, gradients)


def default_name(config: Config) -> str:
    adaptive, pretrained = config.adapt.enabled, config.pretrain_steps > 0
    kind = f"{config.gradient.name}{'-adaptive' * adaptive}{'-pretrained' * pretrained}"
    return f"{title_of(config)}-{kind}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def title_of(config: Config) -> str:
    return registry.find(config.task).title_of(config).replace(" ", "-")
