import hashlib
import sys

import data_files
import pytest

from gdeq.lab.data.cifar10 import CIFAR10
from gdeq.lab.data.fashion_mnist import FashionMNIST
from gdeq.lab.data.sets import SETS

NOWHERE = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # nothing listens on the discard port
NO_PROGRAM = ("gdeq-no-such-program",)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("GDEQ_DATA", raising=False)


@pytest.fixture
def cifar10(monkeypatch):
    """Make "cifar10" a set of 18 images that nothing outside can supply; returns a changer."""

    def change(**options):
        recipe = CIFAR10(**{"md5": data_files.md5s(), "url": NOWHERE, "npm": NO_PROGRAM} | options)
        monkeypatch.setitem(SETS, "cifar10", recipe)
        return recipe

    change()
    return change


@pytest.fixture
def fashion(monkeypatch, tmp_path):
    def change(**options):
        sums = {n: hashlib.md5(d).hexdigest() for n, d in data_files.idx_files().items()}
        standard = {"md5": sums, "debian": tmp_path / "no-debian", "apt": NO_PROGRAM}
        recipe = FashionMNIST(**standard | options)
        monkeypatch.setitem(SETS, "fashion-mnist", recipe)
        return recipe

    change()
    return change


@pytest.fixture
def fake_program(tmp_path):
    """A command that copies a file to where it is run, as `npm pack` does."""

    def make(file):
        code = f"import shutil; shutil.copy({str(file)!r}, '.')"
        return (sys.executable, "-c", code)

    return make


def visible(root):
    """What a user sees in a folder."""
    return sorted(p.name for p in root.iterdir() if p.name != ".gdeq.lock")


@pytest.fixture(name="visible")
def visible_fixture():
    return visible
