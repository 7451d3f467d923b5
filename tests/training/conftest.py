import pytest
import training_runs
from typer.testing import CliRunner

from gdeq import data as datasets
from gdeq.cli import app


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


@pytest.fixture(scope="session")
def reference(tmp_path_factory, zygote):
    """One uninterrupted run with everything that has a state."""
    folder = tmp_path_factory.mktemp("reference")
    code, said = zygote.run(folder / "log", "train", *training_runs.RICH, "--run", folder / "run")
    assert code == 0, said
    return folder / "run"
