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


def test_the_output_of_a_gpu_is_shown_where_it_was_kept(tmp_path):
    site = load("build")
    script = tmp_path / "7-capture.py"
    cells = "# %% [markdown]\n# # Title\n# %%\nprint(1)\n# %% [test]\nprint(0)\n# %%\nprint(2)"
    script.write_text(cells)
    found = site.execute(script)
    site.show_kept(script, found)
    assert "built on a CPU" in site.page("7-capture", found, tmp_path)

    script.with_suffix(".gpu.txt").write_text("NVIDIA\n---\nfast\n")
    found = site.execute(script)
    site.show_kept(script, found)
    text = site.page("7-capture", found, tmp_path)
    assert "run on one NVIDIA." in text
    assert "```text\nfast\n```" in text
    assert "CPU" not in text

    script.with_suffix(".gpu.txt").write_text("NVIDIA\n")
    with pytest.raises(ValueError, match="on a GPU again"):
        site.show_kept(script, site.execute(script))


def test_without_a_gpu_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sees none"):
        load("build").keep(DOCS / "tutorials" / "7-capture.py")
