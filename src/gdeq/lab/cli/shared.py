"""What all commands share: the app, common options, and how errors are told."""

from __future__ import annotations

import errno
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gdeq import __version__
from gdeq.lab import files
from gdeq.lab.training.stopping import Interrupted

app = typer.Typer(
    help="Train deep equilibrium models, compare their gradients and report the results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, markup=False, soft_wrap=True)

Root = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets (default: $GDEQ_DATA, else ./data)."),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, cuda or cuda:1 (default: that of the run's config.yaml)."),
]
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
