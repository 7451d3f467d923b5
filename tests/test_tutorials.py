"""Every tutorial runs as it stands, and what it claims holds (its cells marked [test])."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
NEEDS = {"9-trainers": ["pytorch_lightning", "transformers", "accelerate"]}


def load(name: str):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "script", sorted((DOCS / "tutorials").glob("[0-9]*.py")), ids=lambda p: p.stem
)
def test_tutorials_run(script, tmp_path):
    pytest.importorskip("matplotlib")
    for package in NEEDS.get(script.stem, []):
        pytest.importorskip(package)
    site = load("build")
    with torch.random.fork_rng():
        found = site.execute(script)
    assert {"markdown", "code", "test"} <= {cell.kind for cell in found}
    text = site.page(script.stem, found, tmp_path)
    assert text.startswith("# ")
    shown = json.dumps(site.notebook(found))
    assert "assert" not in shown
    assert text.count("![") == len(list(tmp_path.glob("*.png"))) == shown.count("image/png")
