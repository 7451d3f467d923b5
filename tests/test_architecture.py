"""The examples of docs/architecture.md run as shown, each after those before it."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def test_new_parts_work_from_outside():
    torch.manual_seed(0)
    shown = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    parts = [text for text in shown if not text.startswith("# circles.py")]
    assert len(parts) == len(shown) - 1 == 4  # solver, gradient, engine, model; the task apart
    names: dict[str, object] = {}
    for text in parts:
        exec(text, names)
