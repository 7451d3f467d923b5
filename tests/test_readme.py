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
    (shown,) = (b for b in blocks("python") if "sol = " in b and "class " not in b)
    x, W = torch.randn(2, 3), 0.1 * torch.randn(3, 3)
    f = lambda z, x: torch.tanh(z @ W.T + x)  # noqa: E731
    names = {"gdeq": gdeq, "cell": f, "f": f, "x": x, "z0": torch.zeros(2, 3)}
    exec(shown, names)
    assert names["sol"].converged.all()
    assert names["deq"](x).shape == x.shape


def test_the_penalty_is_on_the_f_that_was_solved():
    """With a dropout mask in it: another one would leave a residual."""

    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(3, 3), gdeq.VariationalDropout(0.5)

        def forward(self, z, x):
            return self.dropout(torch.tanh(0.5 * self.linear(z) + x))

    (shown,) = (b for b in blocks("python") if "residual_penalty" in b)
    deq = gdeq.DEQ(Cell(), gdeq.Broyden(50, 1e-6))
    names = {"gdeq": gdeq, "deq": deq, "x": torch.randn(8, 3)}
    exec(shown, names)
    assert names["penalty"].item() < 1e-9
    names["loss"].backward()
    assert deq.cell.linear.weight.grad.norm() > 0


def test_the_recorded_step_trains():
    (shown,) = (b for b in blocks("python") if "gdeq.capture" in b)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    cell = torch.nn.Linear(4, 4)
    with torch.no_grad():
        cell.weight.mul_(0.3)
    deq = gdeq.DEQ(lambda z, x: torch.tanh(cell(z) + x))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), deq, torch.nn.Linear(4, 2))
    cell.to(device)
    x = torch.randn(16, 4, device=device)
    y = (x[:, 0] > 0).long()
    names = {"torch": torch, "gdeq": gdeq, "model": model, "batches": [(x, y)] * 31}
    with torch.no_grad():
        first = torch.nn.functional.cross_entropy(model.to(device)(x), y)
    if device == "cpu":  # what it says of a CPU: it runs as it is, and one warning says why
        with pytest.warns(gdeq.CaptureWarning, match="runs without a CUDA graph") as told:
            exec(shown, names)
        assert len(told) == 1
    else:
        exec(shown, names)
    assert names["loss"] < first


def test_commands_exist():
    cli = pytest.importorskip("gdeq.lab.cli")
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    known |= {group.name for group in cli.app.registered_groups}
    shell = "\n".join(blocks("sh"))
    assert set(re.findall(r"^gdeq (\w+)", shell, re.MULTILINE)) <= known
    targets = re.findall(r"^(\w+):", MAKEFILE.read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", shell, re.MULTILINE)) <= set(targets)


def test_files_it_names_exist():
    for path in re.findall(r"\]\(([\w./-]+)\)", README.read_text()):
        assert (README.parent / path).exists(), path


@pytest.mark.filterwarnings("ignore:narrow=True has no effect")  # as it says of a CPU
def test_serving_tells_which_samples_did_not_get_there(capsys):
    (shown,) = (b for b in blocks("python") if "deq.narrow" in b)
    for hopeless, told in ((0, ""), (1, "31 of 32 samples converged")):
        endless = (torch.arange(32) < hopeless).float()[
            :, None
        ]  # f(z) = z + 1 + z² has no solution
        deq = gdeq.DEQ(lambda z, x, e=endless: 0.5 * z + 1 + e * (0.5 * z + z * z))
        exec(shown, {"torch": torch, "gdeq": gdeq, "deq": deq, "x": torch.zeros(32, 3)})
        assert told in capsys.readouterr().out
        assert bool(deq.solution.converged.all()) == (not told)
