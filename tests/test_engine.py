"""The seam: which engine is chosen, and that an engine of one's own takes part."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import gdeq
from cells import SOLVER, Cell, data
from engines import skip_where_kernels_do_not_run
from gdeq import engine
from gdeq.context import hidden, host_may_look
from gdeq.engine import REFERENCE, Reference, power_of_two


def test_which_engine_is_chosen(device):
    skip_where_kernels_do_not_run(device)
    z0 = torch.zeros(2, 3, device=device)

    def chosen():
        return type(gdeq.solve(torch.cos, z0).engine).__name__

    usual = "Reference" if device.type == "cpu" else "FastEngine"
    assert chosen() == usual
    with engine.use("fast"):
        assert chosen() == "FastEngine"
        assert engine.runs_fast(z0.device)
        with engine.use("reference"):  # the inner one counts
            assert chosen() == "Reference"
            assert not engine.runs_fast(z0.device)
        assert chosen() == "FastEngine"
    with pytest.raises(KeyError), engine.use("fast"):
        raise KeyError
    assert chosen() == usual
    with pytest.raises(ValueError, match="engine must be 'auto', 'fast' or 'reference', got 'x'"), \
            engine.use("x"):  # fmt: skip
        pass


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ("quick", ValueError, "'auto', 'fast' or 'reference', got 'quick'"),
        (engine.Reference, TypeError, r"write Reference\(\)"),
        (object(), TypeError, "a name or an Engine object"),
    ],
)
def test_what_is_no_engine(wrong, kind, message):
    with pytest.raises(kind, match=message), engine.use(wrong):
        pass


def test_the_fast_engine_says_where_it_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with engine.use("fast"), pytest.raises(ValueError, match=r"needs a GPU with Triton; .* cpu"):
        gdeq.solve(lambda z: 0.5 * z, torch.zeros(1, 2))


def test_the_reference_needs_nothing_of_the_fast_engine():
    program = """
import sys, torch, gdeq
w = torch.full((3, 3), 0.1, requires_grad=True)
deq = gdeq.DEQ(lambda z, x: torch.tanh(z @ w + x))
deq(torch.ones(2, 3)).sum().backward()
assert w.grad.norm() > 0
loaded = [name for name in sys.modules if name.startswith(("gdeq.fast", "gdeq.lab", "triton"))]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("gradient", [gdeq.GDEQ(), gdeq.GDEQ(tolerance=1e-3), gdeq.Implicit()])
def test_an_engine_of_ones_own(device, gradient):
    class Counting(Reference):
        def __init__(self):
            self.calls = []

        def solve(self, *args):
            self.calls.append("solve")
            return super().solve(*args)

        def iterate(self, *args):
            self.calls.append("iterate")
            return super().iterate(*args)

        def adjoint(self, *args):
            self.calls.append("adjoint")
            return super().adjoint(*args)

    mine, cell, x = Counting(), Cell().to(device), data(device, 3, 4)
    found = []
    for each in (mine, REFERENCE):
        cell.zero_grad()
        with engine.use(each):
            z = gdeq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), SOLVER, gradient).z
        z.sum().backward()  # outside: the engine of the solve goes on
        found.append([p.grad for p in cell.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert mine.calls == ["solve", "adjoint", *["iterate"] * isinstance(gradient, gdeq.Implicit)]


def test_a_gradient_that_said_it_needs_no_vjp_gets_none():
    class Greedy(gdeq.Gradient):
        needs = gdeq.JFB().needs

        def cotangent(self, v, vjp, solution):
            return vjp(v)

    x = torch.ones(2, 3, requires_grad=True)
    z = gdeq.fixed_point(lambda z: 0.5 * z + x, torch.zeros(2, 3), gradient=Greedy()).z
    with pytest.raises(RuntimeError, match=r"asked for a VJP although its needs.vjp is False"):
        z.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_are_powers_of_two_whose_inverse_is_normal(dtype):
    info = torch.finfo(dtype)
    size = torch.tensor(
        [0.0, 1.0, 1.9, 2.0, 3e-5, info.max, info.tiny, torch.inf, torch.nan], dtype=dtype
    )
    unit = power_of_two(size)
    assert unit[:4].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert unit[-2:].tolist() == [1.0, 1.0]
    assert (unit.frexp().mantissa == 0.5).all()
    for one in (unit, 1 / unit):
        assert (one >= info.tiny).all()
        assert (one <= info.max).all()
    ratio = size[4:7] / unit[4:7]
    assert ((ratio >= 0.5) & (ratio < 4)).all()


def test_the_host_may_look_unless_work_is_recorded():
    cpu = torch.device("cpu")
    assert host_may_look(cpu)
    with hidden():
        assert host_may_look(cpu)  # there is nothing to record there
        assert not host_may_look(torch.device("cuda"))
    if torch.cuda.is_available():
        assert host_may_look(torch.device("cuda"))
