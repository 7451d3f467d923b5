"""The reference leaves out no public name, and the way from torchdeq leaves out none of its own."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import gdeq
from gdeq import engine
from gdeq.holding import UNSTEADY
from test_tutorials import load

ROOT = Path(__file__).parents[1]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "gdeq"
NAMES = {name: getattr(gdeq, name) for name in gdeq.__all__} | {"engine.use": engine.use}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name):
    (found,) = doctest.DocTestFinder(recurse=False).find(NAMES[name], name, globs={}) or [None]
    assert found is not None
    assert found.examples
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert runner.run(found).failed == 0


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = {line.rsplit(".", 1)[1] for line in re.findall(r"^::: (\S+)", pages, re.MULTILINE)}
    assert set(gdeq.__all__) - shown == set()


def test_public_methods_have_docstrings():
    bare = [
        f"{name}.{method}"
        for name, value in NAMES.items()
        if inspect.isclass(value)
        for method, function in vars(value).items()
        if inspect.isfunction(function)
        and not method.startswith("_")
        and not inspect.getdoc(function)
    ]
    inherited = {
        "cotangent",
        "init",
        "propose",
        "learn",
        "inverse",
        "forward",
        "extra_repr",
        "unroll",
    }
    assert [method for method in bare if method.split(".")[1] not in inherited] == []


def test_docstrings_have_short_lines():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node, clean=False) or ""
                long = [line for line in text.splitlines() if len(line) > 100]
                assert long == [], path


def sentences() -> str:
    """All that the package can say, with what is filled in left out."""
    said = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                said.append(
                    "".join(getattr(part, "value", "") for part in node.values if is_text(part))
                )
            elif is_text(node):
                said.append(node.value)
    return "\n".join(said)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_troubleshooting_has_every_status_and_warning():
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\|.*?"([^"]+)"', page, re.MULTILINE)
    said = sentences()
    assert [sentence for sentence in quoted if sentence not in said] == []  # all can be seen
    statuses = {str(status) for status in gdeq.Status if status != gdeq.Status.RUNNING}
    assert {one for one in statuses if not any(map(one.startswith, quoted))} == set()
    for name in gdeq.__all__:
        assert not name.endswith("Warning") or f"`{name}`" in page
    for _, why in UNSTEADY:
        assert any(sentence in why for sentence in quoted), why


def test_the_table_has_every_name_of_torchdeq():
    pytest.importorskip("torchdeq")
    assert load("torchdeq_names").missing() == []


def test_the_ported_example_gives_what_torchdeq_gives():
    torchdeq = pytest.importorskip("torchdeq")
    text = (DOCS / "coming-from" / "torchdeq.md").read_text()
    theirs, ours = (
        re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("text", "python")
    )
    torch.manual_seed(0)
    cell = torch.nn.Bilinear(6, 6, 6).double()
    with torch.no_grad():
        cell.weight.mul_(0.2)
    results = []
    for code in (theirs, ours):
        names = {"torch": torch, "torchdeq": torchdeq, "gdeq": gdeq}
        names["cell"] = _Tanh(cell)
        exec(code, names)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
        z, _ = names["forward"](x)
        grads = torch.autograd.grad(z.square().sum(), [x, cell.weight])
        results.append([z, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class _Tanh(torch.nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, z, x):
        return torch.tanh(self.mix(z, x) + x)


def test_the_reference_shows_functions_where_a_module_has_the_same_name():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: gdeq\.(\w+)$", pages, re.MULTILINE)
    assert [name for name in shown if (SOURCE / f"{name}.py").exists()] == []
