"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest
import torch

import gdeq

README = Path(__file__).parents[1] / "README.md"
MAKEFILE = README.with_name("Makefile")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("shown", [b for b in blocks("python") if "class " in b])
def test_examples_run(shown, capsys):
    exec(shown, {"torch": torch, "gdeq": gdeq})
    if "print(" in shown:
        assert "32 of 32 samples converged" in capsys.readouterr().out


def test_lines_about_the_three_choices_run():
    (shown,) = (b for b in blocks("python") if "class " not in b)
    x, W = torch.randn(2, 3), 0.1 * torch.randn(3, 3)
    f = lambda z, x: torch.tanh(z @ W.T + x)  # noqa: E731
    names = {"gdeq": gdeq, "cell": f, "f": f, "x": x, "z0": torch.zeros(2, 3)}
    exec(shown, names)
    assert names["sol"].converged.all()
    assert names["deq"](x).shape == x.shape


def test_commands_exist():
    cli = pytest.importorskip("gdeq.cli")
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    shell = "\n".join(blocks("sh"))
    assert set(re.findall(r"^gdeq (\w+)", shell, re.MULTILINE)) <= known
    targets = re.findall(r"^(\w+):", MAKEFILE.read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", shell, re.MULTILINE)) <= set(targets)


def test_files_it_names_exist():
    for path in re.findall(r"\]\(([\w./-]+)\)", README.read_text()):
        assert (README.parent / path).exists(), path
