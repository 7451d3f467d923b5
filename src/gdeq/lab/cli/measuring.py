"""Commands that measure and report: similarity, report, bench, paper."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gdeq.lab.cli.shared import Device, DryRun, Root, RunPath, app, plain_errors, tell
from gdeq.lab.training import config as configs

paper = typer.Typer(
    help="Reproduce the paper's experiment on CIFAR-10.",
    no_args_is_help=True,
)
app.add_typer(paper, name="paper")
ExactTol = Annotated[
    float,
    typer.Option(
        help="Residual that the equilibrium and the exact gradient must reach, above 0.  Samples "
        "that do not reach it are left out."
    ),
]
ROUGH = 1e-2  # above this, --exact-tol gives a warning


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
        batches=batches,
        images=images,
        exact_tol=exact_tol,
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
