"""Kernels compile for a GPU, also where there is none: the interpreter takes more than Triton does.

`python tests/fast/test_compiled.py` prints what each kernel of a solve and its gradient takes:
registers, bytes on the stack (spills) and instructions, for the sizes of MDEQ-LARGE.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import gdeq

SIZES = [32 * 32 * 32, 64 * 16 * 16, 128 * 8 * 8, 256 * 4 * 4]
BF16, BATCH = torch.bfloat16, 16
SOLVERS = {
    "8 bits": gdeq.Broyden(18, 0.0, step_bits=8),
    "16 bits": gdeq.Broyden(18, 0.0),
    "8 bits, tolerance": gdeq.Broyden(18, 1e-3, step_bits=8),
    "16 bits, tolerance": gdeq.Broyden(18, 1e-3),
    "Anderson": gdeq.Anderson(18, 0.0),
}


def test_the_kernels_compile_for_a_gpu():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("they are compiled by all other tests")
    source = Path(gdeq.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(source)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, "8 bits, tolerance"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    names = {line.split()[0] for line in found.stdout.splitlines() if line.startswith("_")}
    expected = "_dots _step _dots_and_step _settle _dots_of _weights_of _apply _look _decide _go"
    refined = "_inner_products _combine _residuals"  # JFB with VJPs
    assert names == {*expected.split(), *refined.split(), "_move", "_squares"}


def compile_only(names: list[str]) -> None:
    """Run the host's code of each solve on a CPU, with launches that only compile for sm_90."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 (before gdeq.fast)
    from triton.runtime import driver  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

    made, run = {}, JITFunction.run

    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made.setdefault((self.__name__, kernel.hash), kernel)

    driver.set_active(Driver())
    JITFunction.run = compiled
    for name in names:
        made.clear()
        solve(SOLVERS[name], times=1 if len(names) == 1 else 2)
        print(f"\n{name}\n{'kernel':16} warps registers stack instructions")
        for (kernel, _), binary in made.items():
            print(f"{kernel:16} {binary.metadata.num_warps:5} {taken_by(binary.asm['cubin'])}")


def solve(solver: gdeq.solvers.base.Solver, times: int) -> None:
    from gdeq.fast.kernels import inverse, jfb, refinement  # noqa: PLC0415
    from gdeq.fast.kernels.sweep import Sweep  # noqa: PLC0415
    from gdeq.fast.layout import FastSpace  # noqa: PLC0415
    from gdeq.refinement import Refinement  # noqa: PLC0415
    from sweeps import start_at  # noqa: PLC0415

    d, precision = sum(SIZES), torch.finfo(BF16).eps
    z0 = torch.zeros(BATCH, d)
    sweep = Sweep(start_at(z0, solver, precision=precision, sizes=SIZES, given=BF16))
    fz = torch.zeros(BATCH * d, dtype=BF16)
    sweep.take(0, fz)
    sweep.take(1, fz)
    if solver.tol:
        sweep.prepare_repetition()
        sweep.judge_next(fz)
        sweep.go_on()
    of_one_chunk = torch.zeros(BATCH, 64)
    small = Sweep(start_at(of_one_chunk, solver, precision=precision, given=BF16))
    for t in range(2):
        small.take(t, torch.zeros(BATCH * 64, dtype=BF16))
    known = sweep.settle(1).inverse
    if known is not None:
        inverse.apply(known.T, z0.to(BF16), True)
        inverse.trusted(known.T, z0, 3.0)
        refinement.refined(known.T, z0, z0, lambda u: z0.to(BF16), Refinement(times, precision))
    tensors = [torch.zeros(BATCH, size, dtype=BF16) for size in SIZES]
    space, unit = FastSpace(tuple(tensors)), torch.ones(BATCH)
    space.norms(tensors)
    with torch.no_grad():
        space.split(space.join(tensors, factor=unit), space.dtypes, unit)
    jfb.refined(tensors, lambda u: tensors, space, unit, Refinement(times, precision))
    jfb.residual_norms(tensors, tensors, tensors, space, unit)


def taken_by(cubin: bytes) -> str:
    import triton  # noqa: PLC0415

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run(
            [tool, "--dump-resource-usage", "--dump-sass", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", listed).groups()
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", listed, re.M))
    return f"{registers:>9} {stack:>5} {instructions:12}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    compile_only(sys.argv[1:] or list(SOLVERS))
