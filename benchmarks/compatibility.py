"""What works with which part of PyTorch: a table whose rows are tests.

.venv/bin/python benchmarks/compatibility.py            run the tests, write docs/compatibility.md
.venv/bin/python benchmarks/compatibility.py --check    exit status 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"


class Row(NamedTuple):
    feature: str
    works: str
    test: str  # a file, and a name in it: what pytest -k finds


ROWS = (
    Row("`torch.func.grad`, `vjp`, `jacrev`", "yes, every gradient", "functional: approximate"),
    Row("`vmap` over parameters, per-sample gradients", "yes, every solver and gradient; a solve "
        "makes all `max_iter` steps, and converged samples freeze", "functional: every_transform"),
    Row("`torch.func.functional_call`", "yes, dropout masks and normalised weights stay fixed "
        "during a solve", "functional: dropout"),
    Row("forward mode: `jvp`, `jacfwd`, dual numbers", "`Implicit` (one tangent solve), `JFB` and "
        "`Unrolled`; others raise an error", "functional: jvp or jacfwd or forward"),
    Row("`hessian`, other second derivatives", "`Implicit`; `JFB` and `Unrolled` give those of "
        "their approximation; others raise an error", "functional: hessian or second_derivatives"),
    Row("`create_graph=True`", "`Implicit`, `JFB` and `Unrolled`; others raise an error",
        "second_order: "),
    Row("`autograd.functional.jacobian(vectorize=True)`", "yes, but rows are solved one by one",
        "functional: vectorize"),
    Row("`torch.export`", "yes, every solver and any batch size; the program is for inference and "
        "does not need gdeq", "export: exported_model and not onnx"),
    Row("ONNX", "the same, by `torch.onnx.export`", "export: onnx"),
    Row("`torch.jit.trace`, `script`", "no, raise an error: a trace would keep the number of steps "
        "of its example", "export: trace or script"),
    Row("`torch.compile(model)`", "yes, except for the solve, which runs uncompiled; compile the "
        "cell with `deq.cell.compile()`", "compile: "),
    Row("`torch.compile(model, fullgraph=True)`", "after `gdeq.fixed_steps(model)`: inference, and "
        "training with `GDEQ()`, `JFB` or `Unrolled`; others raise an error", "export: graph"),
    Row("checkpointing in a cell", "with `use_reentrant=False`; with `True`, a `DEQ` takes only "
        "gradients without VJPs (`JFB()`, `GDEQ()`, `Unrolled` after a solve), and others raise an "
        "error", "adjoint: reentrant"),
    Row("meta device, `FakeTensorMode`", "yes, shapes of states and gradients", "export: shapes"),
    Row("dataclass and NamedTuple states", "NamedTuples as they are; dataclasses after "
        "`torch.export.register_dataclass`", "state: dataclass or round_trip"),
    Row("inputs by keyword, tuples and dicts of tensors", "yes, a solve starts from zeros like "
        "them", "layer: named_and_nested"),
    Row("train and eval mode", "`DEQ(cell, eval_solver=...)`; for one call "
        "`deq(x, solver=..., gradient=...)`", "layer: one_for_evaluation"),
    Row("weight and spectral norm", "`gdeq.apply_norm(module, norm, where)`, once per solve; "
        "`gdeq.remove_norm`", "holding: norm"),
    Row("dropout", "`gdeq.VariationalDropout`, of channels or `shared` along dimensions; "
        "`gdeq.steady(cell)` puts it in place", "holding: dropout or mask or steady"),
    Row("starts of zeros and noise", "`deq(x, z0=gdeq.mixed_start(z0, share=0.5))`",
        "layer: zeros_and_noise"),
    Row("`copy.deepcopy`, `pickle`, `state_dict`", "yes, without the record of the last call",
        "layer: copies or state_dict"),
    Row("DDP, FSDP2", "yes; a cell that is sharded on its own stops its solves on all processes "
        "together", "distributed: "),
    Row("intermediate states", "`deq.trajectory(x, at=[6, 12])`, each with the layer's gradient",
        "fixed_point: way or trajectory"),
    Row("autocast", "yes, the solver's algebra stays in float32", "precision: "),
)  # fmt: skip

HEAD = """# Compatibility

What works with which part of PyTorch. Each row is covered by tests;
`python benchmarks/compatibility.py` runs them and writes this page. If something cannot work, an
error says why and what to do.

`make test` runs with PyTorch 2.13. The tests outside the kernels were also run with 2.8, the oldest
version that works, and with 2.11.

Under a transform of `torch.func`, `deq.solution` is None. If you need the record, call
`gdeq.fixed_point`, whose result can be used inside the transform.

| part of PyTorch | works | tests |
|---|---|---|
"""


def passes(row: Row) -> bool:
    name, _, chosen = row.test.partition(": ")
    words = [sys.executable, "-m", "pytest", "-q", f"tests/test_{name}.py"]
    words += ["-k", chosen] if chosen else []
    return subprocess.run(words, check=False, cwd=ROOT).returncode == 0


def page() -> str:
    lines = []
    for row in ROWS:
        name, _, chosen = row.test.partition(": ")
        where = f"test_{name}.py" + (f" -k '{chosen}'" if chosen else "")
        lines.append(f"| {row.feature} | {row.works} | `{where}` |\n")
    return HEAD + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the page, run nothing")
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != page())
    failed = [row.feature for row in ROWS if not passes(row)]
    if failed:
        sys.exit("not as the table says: " + ", ".join(failed))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
