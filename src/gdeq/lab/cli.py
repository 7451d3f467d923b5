"""The command line: thin; the work is in `training`, `report` and `data`.

Each command imports what it needs: `gdeq --help` waits for none of it.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from gdeq import __version__
from gdeq.lab import data as datasets
from gdeq.lab import files
from gdeq.lab.tasks import registry
from gdeq.lab.training import config as configs
from gdeq.lab.training.config import Config
from gdeq.lab.training.stopping import Interrupted
from gdeq.options import count

app = typer.Typer(
    help="Train deep equilibrium models, compare their gradients and report the results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
paper = typer.Typer(
    help="Reproduce the paper's experiment on CIFAR-10.",
    no_args_is_help=True,
)
app.add_typer(paper, name="paper")
console = Console(highlight=False, markup=False, soft_wrap=True)

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
Root = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets (default: $GDEQ_DATA, else ./data)."),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, cuda or cuda:1 (default: that of the run's config.yaml)."),
]
ExactTol = Annotated[
    float,
    typer.Option(
        help="Residual that the equilibrium and the exact gradient must reach, above 0.  Samples "
        "that do not reach it are left out."
    ),
]
ROUGH = 1e-2  # above this, --exact-tol gives a warning
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, then exit.")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Options of `gdeq` itself."""
    if version:
        typer.echo(f"gdeq {__version__}")
        raise typer.Exit


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print errors that the user can mend as a sentence, not as a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (files.LabError, OSError, UnicodeError) as problem:
            said = str(problem)
            if isinstance(problem, OSError) and problem.strerror:
                said = f"{problem.filename or 'a file'}: {problem.strerror}"
                if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    said += "; change its permissions, or work on a copy of the folder"
            typer.secho(f"error: {files.shown(said)}", fg="red", err=True)
            raise typer.Exit(1) from problem
        except KeyboardInterrupt as stop:
            told = (str(stop), stop.number) if isinstance(stop, Interrupted) else ("interrupted", 2)
            typer.secho(files.shown(told[0]), err=True)
            raise typer.Exit(128 + told[1]) from stop

    # One line per paragraph, which the terminal wraps.
    run.__doc__ = re.sub(r"(?<=\S)\n *(?=\S)", " ", command.__doc__ or "")
    return run


def tell(text: str) -> None:
    """Print text without control characters and without wrapping."""
    console.print(files.shown(text))


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
        tell(json.dumps(summary, indent=1))
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
    training lower the residual and leave the metric unchanged.
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
    typer.echo(task.decoded([*start.tolist(), *(token for token, _ in made)]))
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


@app.command()
@plain_errors
def similarity(
    run: RunPath,
    epochs: Annotated[
        list[int] | None,
        typer.Option("--epoch", help="Epochs whose snapshots are used (default: all)."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Mini-batches per snapshot.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per mini-batch.")] = 64,
    exact_tol: ExactTol = 1e-4,
    data: Root = None,
    device: Device = None,
) -> None:
    """Compare each method's gradient with the exact one, as the paper's cosine figure does.

    Each method uses the run's solver, as in training; the exact gradient is that of the equilibrium
    itself.  Everything is computed in float32.  The results replace those of the same epochs in the
    run's similarity.jsonl.
    """
    from gdeq.lab.report.runs import read_run
    from gdeq.lab.report.similarity import Similarity, left_out
    from gdeq.lab.training import runs

    found: list[dict[str, Any]] = []
    began = time.monotonic()
    for record in runs.measure_similarity(
        run, epochs, batches, batch_size, data, device, exact_tol, tell
    ):
        mini = f"epoch {record['epoch']}: mini-batch {record['batch'] + 1} of {batches}"
        if record["method"] == "Implicit":  # the first record of each mini-batch
            tell(f"{mini} is solved, {time.monotonic() - began:.0f} s")
        found.append(record)
    if exact_tol > ROUGH:
        tell(f"warning: with --exact-tol {exact_tol:g} the exact gradient is a rough estimate")
    table = Similarity(read_run(run), "", found).table
    if table.rows:
        typer.echo(table.text())
    if lost := left_out(found):
        tell(
            f"warning: left out, since no equilibrium or no exact gradient at it was found to "
            f"{exact_tol:.1e} (--exact-tol): {', '.join(lost)}.  The others are easier"
        )
    if not any(record["solved"] for record in found):
        tell("no sample is left: raise --exact-tol (float32 reaches about 1e-6)")
        raise typer.Exit(1)
    tell(f"saved in {run / 'similarity.jsonl'}")


@app.command()
@plain_errors
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = Path(
        "report"
    ),
) -> None:
    """Write an HTML page about these runs, and its figures as PNG and CSV."""
    from gdeq.lab import report as reports

    page = reports.write(paths, out)
    typer.echo(reports.table(paths))
    tell(f"report: {page}")


@app.command()
@plain_errors
def bench(
    cell: Annotated[
        str, typer.Option(help="mdeq, or a plain cell: transformer, convolution or mlp.")
    ] = "mdeq",
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the MDEQ: small, tiny, large.", show_default="large; small on a CPU"
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Batch size.", show_default="128; 64 on a CPU")
    ] = None,
    side: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Height and width of an image, or tokens per sample of the transformer.",
            show_default="32; 8 on a CPU",
        ),
    ] = None,
    forward: Annotated[int, typer.Option(min=1, help="Broyden steps of the forward pass.")] = 18,
    backward: Annotated[int, typer.Option(min=1, help="Broyden steps of Implicit.")] = 20,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of gdeq: float32, tf32 or bf16.", show_default="bf16; float32 on a CPU"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Steps timed per gradient.", show_default="20; 10 on a CPU"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Precisions in which torchdeq runs: some of float32,tf32,bf16, or none.",
            show_default="all on a GPU, float32 on a CPU",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for step.txt and step.json, and kernels.txt on a GPU."),
    ] = None,
) -> None:
    """Time a training step with each gradient, and show where the time goes.

    The model is the paper's MDEQ-LARGE with a batch of 128 on a GPU, and a small MDEQ on a CPU.
    Inputs are random, so no data set is needed.  If torchdeq is installed, it is timed too, in each
    precision of --peers, and its fastest time is shown.

    --cell times a cell of plain PyTorch modules instead, with torch.compile and gdeq.capture on a
    GPU: a transformer block, a residual convolution block or an MLP.
    """
    from gdeq.lab import bench as benches
    from gdeq.lab.training import process

    if cell not in benches.CELLS:
        raise benches.BenchError(f"--cell must be one of {', '.join(benches.CELLS)}, got {cell!r}")
    wanted = benches.default_setup(device, cell)
    given: dict[str, Any] = {"size": size, "batch": batch, "side": side, "forward": forward}
    given |= {"backward": backward, "precision": precision, "rounds": rounds}
    wanted = replace(wanted, **{k: v for k, v in given.items() if v is not None})
    names = {"precision": wanted.precision, "model": {"size": wanted.size}}
    configs.from_dict(names)  # an error for one that does not exist
    chosen_peers = benches.read_peers(peers, wanted)
    process.start(wanted.device, "--device ")
    benches.run(wanted, peers=chosen_peers, out=out, tell=typer.echo)


@paper.command("run")
@plain_errors
def paper_run(
    out: Annotated[Path, typer.Option(help="Folder that holds the run folders.")] = Path(
        "runs/paper"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(help="A run, a group, or a pattern such as 'gdeq-*'. Repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for all runs. Repeatable.")
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, help="Mini-batches per comparison of gradients.")
    ] = 8,
    images: Annotated[int, typer.Option(min=1, help="Images per mini-batch.")] = 64,
    exact_tol: ExactTol = 1e-4,
    data: Root = None,
    dry_run: DryRun = False,
) -> None:
    """Make all runs behind the paper's tables, the most important first.

    After an interruption, give the same command again: finished runs are skipped and others are
    resumed.  After each run its gradients are compared.  Training times exclude tests and
    compilation.
    """
    from gdeq.lab.paper import plan, running

    chosen_runs = plan.chosen(only or [])
    plan.check_overrides(settings or [])
    journey = running.Journey(
        out,
        overrides=settings or [],
        root=data,
        measure=running.Measure(batches, images, exact_tol),
        tell=tell,
    )
    if dry_run:
        for line in journey.forecast(chosen_runs):
            tell(line)
        return
    try:
        journey.go(chosen_runs)
    finally:
        tell(journey.report(chosen_runs))


@paper.command("collect")
@plain_errors
def paper_collect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds the run folders.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write.", show_default="the same folder")
    ] = None,
) -> None:
    """Make the paper's tables and figures from the runs so far.

    Writes tables as CSV and Markdown, figures as PNG and CSV, and a page in report/.  Rows whose
    runs are missing are marked.
    """
    from gdeq.lab.paper import collecting

    made = collecting.collect(folder, out)
    typer.echo(made[1].read_text())
    typer.echo(collecting.progress(folder))
    tell(f"{len(made)} files in {out or folder}")


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
