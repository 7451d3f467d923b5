"""The sizes that the house is held to: lines, frames, files of a step, places, tracked results.

.venv/bin/python benchmarks/sizes.py            the table; exit status 1 if a must is missed
.venv/bin/python benchmarks/sizes.py --list     and what was counted, name by name
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gdeq

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gdeq"
ASIDE = ("fast", "models", "lab", "cli.py", "__main__.py")  # no part of the core
# What a branch asks about that chooses between implementations.
BACKEND = re.compile(r"is_cuda|device\.type|is_available|triton|fused|kernels")


class Size(NamedTuple):
    """What was counted, and how many there may be."""

    name: str
    found: list[str]
    must: int
    count: int


def lines_of(files: list[Path]) -> tuple[list[str], int]:
    counts = {file: len(file.read_text().splitlines()) for file in files}
    listed = [f"{count:6d} {file.relative_to(ROOT)}" for file, count in counts.items()]
    return sorted(listed, reverse=True), sum(counts.values())


def core_files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    return [file for file in files if file.relative_to(SOURCE).parts[0] not in ASIDE]


class Cell(nn.Module):
    """tanh(Wz + x), which calls ``seen`` each time."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = seen

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.seen()
        return torch.tanh(0.3 * self.linear(z) + x)


def training_step(seen: Callable[[], None]) -> Callable[[], None]:
    """One step of the reference engine: a solve, a loss, a backward pass."""
    deq = gdeq.DEQ(Cell(seen), gdeq.Broyden(max_iter=6), gdeq.GDEQ(refine=1))
    x = torch.randn(4, 8)
    return lambda: deq(x).square().mean().backward()


def frames() -> list[str]:
    """From `DEQ.forward`, which is the first, to the call of the cell, which is not counted."""
    stacks: list[list[str]] = []

    def seen() -> None:
        # Above this frame: the cell's forward, and two of PyTorch's own for calling a module.
        stacks.append(list(_up_to(sys._getframe(4), inspect.unwrap(gdeq.DEQ.forward).__code__)))

    step = training_step(seen)
    step()  # the first call of a layer also checks its cell
    stacks.clear()
    step()
    return stacks[0]


def _up_to(frame: FrameType | None, code: Any) -> Iterator[str]:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        yield f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
        if frame.f_code is code:
            return
        frame = frame.f_back


def files_of_a_step() -> list[str]:
    """Files of gdeq whose functions run in a training step on the CPU, the laboratory aside."""
    step = training_step(lambda: None)
    step()  # what is imported late is there now
    found: set[Path] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        found.add(Path(frame.f_code.co_filename))

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    own = (path.relative_to(SOURCE) for path in found if path.is_relative_to(SOURCE))
    return sorted(str(path) for path in own if path.parts[0] != "lab")


def backend_choices() -> list[str]:
    """Modules of the core that reach for gdeq.fast, and branches of models on what they run on.

    A model may ask gdeq.fast for a runner: what that returns is gdeq.fast's choice.
    """
    found = [str(file.relative_to(SOURCE)) for file in core_files() if _imports_fast(file)]
    for file in sorted((SOURCE / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            checks = isinstance(node, ast.FunctionDef) and node.name != "__post_init__"
            if checks and any(map(_asks_for_backend, ast.walk(node))):
                found.append(f"{file.relative_to(SOURCE)}: {node.name}")
    return found


def _imports_fast(file: Path) -> bool:
    """At its head or in a function; `gdeq/__init__.py` only exports."""
    if file.name == "__init__.py":
        return False
    nodes = ast.walk(ast.parse(file.read_text()))
    return any(
        (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gdeq.fast"))
        or (
            isinstance(node, ast.Import) and any(n.name.startswith("gdeq.fast") for n in node.names)
        )
        for node in nodes
    )


def _asks_for_backend(node: ast.AST) -> bool:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return bool(BACKEND.search(ast.unparse(node.test)))
    return False


def tracked_results() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def sizes() -> list[Size]:
    core, core_lines = lines_of(core_files())
    source, source_lines = lines_of(sorted((ROOT / "src").rglob("*.py")))
    tests, test_lines = lines_of(sorted((ROOT / "tests").rglob("*.py")))
    counted = [
        ("frames from DEQ.forward to the first f", frames(), 8),
        ("files a CPU training step touches", files_of_a_step(), 12),
        ("places that choose a backend", backend_choices(), 1),
        ("tracked files under results/", tracked_results(), 150),
    ]
    return [
        Size("lines of the core", core, 2_900, core_lines),
        Size("lines of src/", source, 16_500, source_lines),
        Size("lines of tests/", tests, 17_000, test_lines),
        *(Size(name, found, must, len(found)) for name, found, must in counted),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="what was counted, name by name")
    listing = parser.parse_args().list
    found = sizes()
    print(f"{'':40s} {'now':>7s} {'must':>8s}")
    for size in found:
        missed = "" if size.count <= size.must else "  missed"
        print(f"{size.name:40s} {size.count:7,d} ≤ {size.must:6,d}{missed}")
        if listing:
            print("".join(f"    {line}\n" for line in size.found))
    sys.exit(any(size.count > size.must for size in found))


if __name__ == "__main__":
    main()
