"""A solve that keeps z as f is given it begins with the tensors of z0 as they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gdeq
from gdeq import GDEQ, JFB, Anderson, Broyden, nodes
from gdeq.fast import product
from gdeq.fast.kernels import choice
from gdeq.fixed_point import solve_and_attach
from gdeq.models.mdeq import mdeq
from gdeq.solution import Status
from gdeq.state import StateSpace

pytest.importorskip("triton")
from gdeq.fast.kernels import product as fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
HALF = torch.bfloat16
SHAPES = [(6, 5, 5), (40,)]
SOLVERS = [Broyden(4, 0.0), Broyden(4, 0.0, step_bits=8), Anderson(4, 0.0, memory=3)]


def start(adjacent, shapes=SHAPES, channels_last=False, batch=3):
    """A z0 of these tensors, in one piece of memory or not."""
    torch.manual_seed(0)
    sizes = [batch * torch.Size(shape).numel() for shape in shapes]
    buffer = torch.randn(sum(sizes), device=DEVICE).to(HALF)
    parts = buffer.split(sizes) if adjacent else [part.clone() for part in buffer.split(sizes)]
    found = [part.view(batch, *shape) for part, shape in zip(parts, shapes, strict=True)]
    if channels_last:  # the same memory, in another order
        n, (c, h, w) = batch, shapes[0]
        found[0] = found[0].view(n, h, w, c).permute(0, 3, 1, 2)
    return tuple(found)


def cosines(z):
    image, row = z
    return torch.cos(image) * 0.5 + row.mean(), torch.sin(row) + image.mean()


def solved(z0, solver, f=cosines):
    with choice.use("triton"):
        return gdeq.fixed_point(f, z0, solver, JFB())


def from_rows(z0, solver, monkeypatch, f=cosines):
    """The same, begun with a vector."""
    with monkeypatch.context() as patch:
        patch.setattr(product, "start_in_parts", lambda *given, **more: None)
        return solved(z0, solver, f)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: f"{type(s).__name__}{s.tol}")
@pytest.mark.parametrize(("adjacent", "channels_last"), [(True, False), (False, True)])
def test_it_is_the_same_solve_and_z0_stays(solver, adjacent, channels_last, monkeypatch):
    z0 = start(adjacent, channels_last=channels_last)
    before = [part.clone() for part in z0]
    found, expected = solved(z0, solver), from_rows(z0, solver, monkeypatch)
    for a, b in zip(found.z, expected.z, strict=True):
        assert torch.equal(a, b)
        assert not any(a.data_ptr() == part.data_ptr() for part in z0)
    assert torch.equal(found.trace, expected.trace)
    for part, was in zip(z0, before, strict=True):
        assert torch.equal(part, was)


def test_no_vector_is_made_of_it(monkeypatch):
    monkeypatch.setattr(StateSpace, "start", None)
    sweeps = []
    build = fused.Sweep.__init__

    def built(sweep, *arguments, **more):
        build(sweep, *arguments, **more)
        sweeps.append((sweep.z.untyped_storage().nbytes(), sweep.first.data_ptr()))

    monkeypatch.setattr(fused.Sweep, "__init__", built)
    z0 = start(adjacent=True)
    solved(z0, Broyden(3, 0.0))
    assert [nbytes for nbytes, _ in sweeps] == [4]
    assert sweeps[0][1] != z0[0].data_ptr()  # f might write there
    with choice.use("triton"):
        solve_and_attach(cosines, z0, Broyden(3, 0.0), JFB(), lend=True)
    assert sweeps[1] == (4, z0[0].data_ptr())


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_an_f_may_write_where_the_solve_began(form):
    """Into a buffer that it uses again, which was z0 too."""
    buffer = torch.zeros(2, 32, dtype=HALF, device=DEVICE)
    solver = Broyden(5, 0.0)
    with choice.use(form):
        expected = gdeq.solve(torch.cos, buffer.clone(), solver)
        found = gdeq.fixed_point(lambda z: torch.cos(z, out=buffer), buffer, solver, JFB())
    assert torch.equal(found.trace, expected.trace)


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_an_f_in_place_leaves_z0_as_it_was(form):
    z0 = torch.zeros(2, 32, dtype=HALF, device=DEVICE)
    with choice.use(form), pytest.raises(gdeq.StateError, match="in place"):
        gdeq.fixed_point(lambda z: z.add_(1), z0, Broyden(5, 0.0), JFB())
    assert bool((z0 == 0).all())


@pytest.mark.parametrize(
    ("solver", "dtypes"),
    [
        (Broyden(4, 1e-3), (HALF, HALF)),  # with a tolerance z has more digits
        (Broyden(4, 0.0), (torch.float32, torch.float32)),
        (Broyden(4, 0.0), (HALF, torch.float32)),
        (Broyden(4, 0.0, memory=2), (HALF, HALF)),  # in the readable form
        (Anderson(4, 0.0, mixing=0.5), (HALF, HALF)),
    ],
)
def test_where_z_is_a_vector(solver, dtypes):
    z0 = tuple(part.to(dtype) for part, dtype in zip(start(True), dtypes, strict=True))
    with choice.use("triton"):
        f = StateSpace(z0).vectorize(cosines)
        assert product.start_in_parts(f, z0, solver, share=True) is None
        assert gdeq.fixed_point(cosines, z0, solver, JFB()).residual.isfinite().all()
    with choice.use("plain"):
        assert product.start_in_parts(f, start(True), Broyden(4, 0.0), share=True) is None


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_sample_that_is_lost_goes_back_to_where_it_was(when, monkeypatch):
    """Also to z0 itself, which the first step leaves as it is."""

    def made():
        calls = []

        def f(z):
            calls.append(0)
            image, row = cosines(z)
            if len(calls) > when + 1:
                image = image.index_fill(0, torch.tensor([1], device=DEVICE), torch.nan)
            return image, row

        return f

    z0 = start(adjacent=True)
    found = solved(z0, Broyden(5, 0.0), made())
    expected = from_rows(z0, Broyden(5, 0.0), monkeypatch, made())
    assert found.codes.tolist()[1] == Status.NONFINITE
    for a, b, begin in zip(found.z, expected.z, z0, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1], begin[1]) == (when == 0)


def test_a_z0_with_gradients_is_only_read():
    z0 = tuple(part.requires_grad_() for part in start(adjacent=False))
    found = solved(z0, Broyden(3, 0.0))
    assert not any(part.requires_grad for part in found.z)  # f has no parameters


def test_the_zeros_of_mdeq_lie_in_one_piece():
    cell = mdeq("small").deq.cell
    for order in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 16, 8, 8).to(memory_format=order)
        parts = cell.initial_state(x)
        assert all(bool((part == 0).all()) for part in parts)
        whole = StateSpace(parts).as_parts(parts)
        assert whole.data_ptr() == parts[0].data_ptr()
        parts[0].add_(1)  # as tensors of their own
        assert bool((parts[1] == 0).all())


# -- what is returned ------------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(12, 12).to(DEVICE, HALF)

    def forward(self, z, x):
        return torch.tanh(0.4 * self.linear(z) + x)


def gradient_of(deq, x, work=lambda z: z):
    deq.cell.zero_grad()
    with choice.use("triton"):
        z = deq(x)
        work(z.square()).sum().backward()
    return z, deq.cell.linear.weight.grad.clone()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("gradient", [JFB(), GDEQ(), GDEQ(refine=1)], ids=str)
def test_z_is_lent_where_nobody_changes_it(gradient, recorded, monkeypatch):
    if recorded:
        monkeypatch.setattr(nodes, "recording", lambda device: True)
    x = torch.randn(4, 12, device=DEVICE).to(HALF)
    deq = gdeq.DEQ(Cell(), Broyden(5, 0.0), gradient)
    z, expected = gradient_of(deq, x)
    assert z.data_ptr() != deq.solution.z.data_ptr()
    deq.lends = True
    lent, found = gradient_of(deq, x)
    assert lent.data_ptr() == deq.solution.z.data_ptr()
    assert torch.equal(lent, z)
    assert torch.equal(found, expected)
    assert not deq.solution.z.requires_grad


@pytest.mark.parametrize("gradient", [JFB(), GDEQ()], ids=str)
def test_a_recorded_solve_makes_no_inverse_that_nobody_uses(gradient, monkeypatch):
    moves = []
    move = fused.Sweep._move
    monkeypatch.setattr(fused.Sweep, "_move", lambda *a, **k: moves.append(a[1]) or move(*a, **k))
    x = torch.randn(4, 12, device=DEVICE).to(HALF)
    deq = gdeq.DEQ(Cell(), Broyden(5, 0.0), gradient)
    gradient_of(deq, x)
    assert moves == [0, 1, 2, 3, 4, 5]
    assert deq.solution.inverse is not None
    moves.clear()
    monkeypatch.setattr(nodes, "recording", lambda device: True)
    gradient_of(deq, x)
    used = gradient.uses_inverse
    assert moves == ([0, 1, 2, 3, 4, 5] if used else [0, 1, 2, 3, 4])
    assert (deq.solution.inverse is not None) == used
