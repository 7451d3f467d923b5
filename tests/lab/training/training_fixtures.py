"""What the tests of `gdeq train` and of `gdeq paper` both use; see their conftest.py."""

import pytest
import training_runs
from typer.testing import CliRunner

from gdeq.lab import data as datasets
from gdeq.lab.cli import app

__all__ = ["few_images", "gdeq", "zygote"]


@pytest.fixture(scope="session")
def zygote():
    made = training_runs.Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def gdeq():
    """The command line in this process: gdeq("train", "epochs=1") -> exit code, all output."""

    def call(*args):
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return call


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(datasets, "load", training_runs.few)
