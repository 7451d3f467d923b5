import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path += [str(Path(__file__).parents[1] / name) for name in ("training", "report")]

import training_runs

from gdeq import data as datasets
from gdeq.cli import app


@pytest.fixture(scope="session")
def gdeq():
    """The command line in this process: gdeq("paper", "run", ...) -> exit code, all output."""

    def call(*args):
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return call


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(datasets, "load", training_runs.few)
