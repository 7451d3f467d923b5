"""The command line in this process, a few images in place of data sets, and runs to look at."""

import pytest
import torch
import training_runs
from typer.testing import CliRunner

from gdeq.lab import data as datasets
from gdeq.lab.cli import app
from gdeq.lab.training import config as configs
from gdeq.lab.training import folder, loop, process, progress

ALONE = process.Process(torch.device("cpu"))


@pytest.fixture(scope="session")
def zygote():
    made = training_runs.Zygote()
    yield made
    made.close()


class CommandLine:
    """In this process: gdeq("train", "epochs=1") -> exit code, all output."""

    def __call__(self, *args):
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    def ok(self, *args):
        """What a command said that came to its end."""
        code, said = self(*args)
        assert code == 0, said
        return said

    def refused(self, *args):
        """What a command said that could not, in a sentence."""
        code, said = self(*args)
        assert (code, "Traceback" in said) == (1, False), said
        return said


@pytest.fixture(scope="session")
def gdeq():
    return CommandLine()


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(datasets, "load", training_runs.few)


@pytest.fixture
def trainer(tmp_path, few_images):
    """trainer("epochs=3") -> a `Trainer` of the small digits.

    me: the process, if it is not alone on the CPU.
    """

    def make(*given, me=ALONE):
        config = configs.load("digits", [*training_runs.TINY, *given])
        return loop.Trainer(config, folder.RunFolder(tmp_path), me, progress.Silent(), None)

    return make


@pytest.fixture(scope="session")
def reference(tmp_path_factory, zygote):
    """One uninterrupted run with everything that has a state."""
    folder = tmp_path_factory.mktemp("reference")
    zygote.ok(folder / "log", "train", *training_runs.RICH, "--out", folder / "run")
    return folder / "run"
