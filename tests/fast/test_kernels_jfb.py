"""`JFB(refine=k)`: a refinement without an inverse, and its kernels on a state's tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import gdeq
from gdeq import JFB
from gdeq.engine import power_of_two
from gdeq.operators import norm
from gdeq.refinement import Refinement, minus_identity, refine
from gdeq.solvers.base import noise_level
from problems import Wide

pytest.importorskip("triton")
from gdeq.fast.kernels import jfb as fused
from gdeq.fast.layout import FastSpace
from gdeq.state import StateSpace
from sweeps import DEVICE, use

BF16, F64 = torch.bfloat16, torch.float64


# --- what it is -----------------------------------------------------------------------------------


def test_what_it_asks_for():
    plain, refined = JFB(), JFB(refine=2)
    assert (plain.needs.vjp, plain.second_order) == (False, True)
    assert (refined.needs.vjp, refined.second_order) == (True, False)
    assert not plain.needs.inverse
    assert not refined.needs.inverse
    assert plain == JFB(refine=0)
    problem = Wide(radius=0.4)
    z = gdeq.fixed_point(problem, problem.z0, gdeq.Broyden(9, 0.0), refined).z
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(z.sum(), list(problem.parameters()), create_graph=True)


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "growth", "amplification", "overshoot"),
    [
        (1, 5.0, 3.0, 1.5),
        (1, 0.5, 0.125, 1.5),
        (2, 0.5, 3.0, 1.5),
        (2, 5.0, 3.0, 0.5),
        (3, 5.0, 0.125, 1.5),
        (3, 0.5, 3.0, 0.5),
        (5, 5.0, 3.0, 1.5),
        (7, 0.5, 3.0, 1.5),
        (7, 5.0, 3.0, 0.5),
    ],
)
def test_decisions_by_the_gram_matrix_alone(times, growth, amplification, overshoot):
    """All in float64, where the reference and `_decide` agree to all digits."""
    batch, d = 12, 40
    matrix = (0.7 * torch.randn(d, d, dtype=F64) / d**0.5).to(DEVICE)
    v = torch.randn(batch, d, dtype=F64, device=DEVICE)
    v[0], v[1, 3], v[2, 5] = 0.0, torch.inf, torch.nan
    v[10] = torch.eye(d, dtype=F64)[0]
    how = Refinement(times, 1e-3, amplification, overshoot, growth=growth)

    def map_of():
        calls = []

        def vjp(u):
            calls.append(u)
            product = u @ matrix
            product[3] = u[3]  # r does not change
            product[4] = 0.9 * u[4]
            product[5] *= 30.0
            product[6] = 0.0  # solved at once
            product[7, 3] = torch.nan
            product[10] = 1.5 * u[10].roll(1)  # after three, a larger residual of a short w
            if len(calls) == 2:
                product[8, d - 1] = torch.inf
            if len(calls) == times:
                product[9, 0] = torch.nan
            return product

        return vjp

    with torch.no_grad():
        expected = refine(v, v, map_of(), minus_identity(v).T, how)
        # As in the kernels, whose numbers are float32
        found, error, length = decided(v, map_of(), how)
    w = expected.w
    torch.testing.assert_close(found, w, rtol=1e-8, atol=1e-9, equal_nan=True)
    told = torch.arange(batch, device=DEVICE) != (4 if times > 2 else batch)
    # (Sample 4 is solved by two, and a step by what rounding has left says nothing.)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(error[told], expected.error[told].float(), **close)
    told = torch.isfinite(w).all(1)
    torch.testing.assert_close(expected.length[told], w[told].norm(dim=1))
    torch.testing.assert_close(length[told], expected.length[told].float(), **close)
    assert w[3:].isfinite().all()
    assert torch.equal(found[1:3].nan_to_num(7.0), v[1:3].nan_to_num(7.0))


def decided(v, vjp, how):  # (batch, d) -> (batch, d), (batch,), (batch,)
    """The loop of `refined` with exact inner products."""
    batch, n = len(v), fused.VECTORS
    gram = v.new_full((batch, n, n), torch.nan)  # what is not written is not read
    weight, (error, length) = v.new_empty(batch, n), v.new_empty(2, batch, dtype=torch.float32)
    vectors, w = [v], v
    numbers = torch.finfo(torch.float32).eps, noise_level(how.precision)
    rules = how.amplification, how.overshoot, how.setback, how.growth
    for newest in range(1, how.times + 1):
        vectors.append(vjp(w))
        partial = v.new_full((batch, 3, n), torch.nan)
        share = v.new_tensor([0.5, 0.25, 0.25])
        for i in range(newest + 1):
            dots = torch.linalg.vecdot(vectors[newest], vectors[i])
            partial[:, :, i] = dots[:, None] * share
        if newest == 1:
            partial[:, :, 2] = torch.linalg.vecdot(v, v)[:, None] * share
        fused._decide[(batch,)](
            partial, gram, weight, error, length, 3, newest, *numbers, *rules,
            FIRST=newest == 1, LAST=newest == how.times,
            VECTORS=n, LANES=fused.LANES, CHUNKS=fused.CHUNKS, num_warps=1,
        )  # fmt: skip
        w = torch.zeros_like(v)
        for i, e in enumerate(vectors):
            c = weight[:, i : i + 1]
            w = w + torch.where(c != 0, c * e, 0.0)
    return w, error, length


def space_of(batch, dtype):
    """One tensor in channels-last memory, one of two chunks."""
    shapes = (3, 5, 7), (2100,), (33,)
    first, *others = (torch.zeros(batch, *shape, device=DEVICE, dtype=dtype) for shape in shapes)
    return FastSpace((first.to(memory_format=torch.channels_last), *others))


class Products:
    """Jᵀ on rows, and on tensors; ``change`` may spoil it for some samples."""

    def __init__(self, space, change):
        self.space, self.change, self.calls = space, change, 0
        source, d = torch.Generator().manual_seed(1), space.size
        self.matrix = (0.6 * torch.randn(d, d, generator=source) / d**0.5).to(DEVICE)

    def tensors(self, u):
        for leaf, dtype, last in zip(u, self.space.dtypes, self.space.channels_last, strict=True):
            assert leaf.dtype == dtype
            order = torch.channels_last if last else torch.contiguous_format
            assert leaf.is_contiguous(memory_format=order)
        self.calls += 1
        u = StateSpace.join(self.space, u)
        product = self.change(u @ self.matrix, u, self.calls)
        return StateSpace.split(self.space, product, self.space.dtypes)

    def rows(self, u):
        u = StateSpace.split(self.space, u, self.space.dtypes)
        return StateSpace.join(self.space, self.tensors(u))


def both_forms(space, v, change, times):
    """v and w as rows in units of v: that of the reference, and that of the kernels."""
    how = Refinement(times, torch.finfo(space.dtypes[0]).eps)
    plain, products = Products(space, change), Products(space, change)
    with torch.no_grad():
        rows = StateSpace.join(space, v)
        unit = power_of_two(norm(rows.double()).float())
        rows = rows / unit[:, None]
        expected = refine(rows, rows, plain.rows, minus_identity(rows).T, how)
        found = fused.refined(v, products.tensors, space, unit, how)
        again = fused.refined(v, Products(space, change).tensors, space, unit, how)
    assert products.calls == plain.calls == times
    for name in ("w", "error", "length"):
        a, b = getattr(found, name), getattr(again, name)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    w = StateSpace.join(space, space.in_parts(found.w)) / unit[:, None]
    return rows, expected, replace(found, w=w)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_tensors_as_they_lie_are_refined_like_rows(times):
    batch = 9
    space = space_of(batch, BF16)
    rows = torch.randn(batch, space.size, device=DEVICE)
    rows[1], rows[2, 2200], rows[3, 0] = 0.0, torch.inf, torch.nan
    rows[4] *= 1e20
    rows[5] *= 1e-20
    v = StateSpace.split(space, rows, space.dtypes)

    def change(product, u, call):
        product[6] *= 30  # w runs away
        if call == 2:
            product[7, 9] = torch.nan
        product[8] = u[8]  # r does not change
        return product

    v, expected, found = both_forms(space, v, change, times)
    w, error = found.w, found.error
    for i in range(batch):
        if i in (2, 3):
            torch.testing.assert_close(w[i], v[i], rtol=0, atol=0, equal_nan=True)
            assert torch.isinf(error[i])
            continue
        size = expected.w[i].norm()
        assert (w[i] - expected.w[i]).norm() <= 0.02 * size, i
        torch.testing.assert_close(error[i], expected.error[i], rtol=0.03, atol=0.0)
        torch.testing.assert_close(found.length[i], expected.length[i], rtol=0.02, atol=0.0)
    back = {6, 7} if times > 1 else set()
    assert torch.isinf(error).nonzero().flatten().tolist() == sorted({2, 3} | back)
    if times > 1:
        assert torch.equal(w[6], v[6])
    normal = [0, 4, 5]
    assert ((w - v)[normal].norm(dim=1) > 0.2 * v[normal].norm(dim=1)).all()


def test_what_is_taken():
    space, v = space_of(1, BF16), None
    assert fused.takes(space, [BF16] * 9, fused.VECTORS - 1)
    assert not fused.takes(space, [BF16] * 9, fused.VECTORS)
    assert not fused.takes(space, [BF16, torch.float16], 1)
    assert not fused.takes(space_of(2, torch.float32), [torch.float32] * 3, 1)
    empty = FastSpace((torch.zeros(2, 0, dtype=BF16), torch.zeros(2, 4, dtype=BF16)))
    assert not fused.takes(empty, [BF16], 1)
    v = StateSpace.split(space, torch.randn(1, space.size, device=DEVICE), space.dtypes)
    _, expected, found = both_forms(space, v, lambda x, *_: x, 2)  # one sample alone
    assert (found.w - expected.w).norm() <= 0.02 * expected.w.norm()


# --- in a layer -----------------------------------------------------------------------------------


class Cell(nn.Module):
    """Two tensors, one of them an image in channels-last memory."""

    def __init__(self, dtype=BF16):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(4, 4, 3, padding=1)
        self.a, self.b = nn.Linear(48, 48), nn.Linear(4, 48)
        for weight in (self.image.weight, self.a.weight):
            nn.init.normal_(weight, std=0.1)
        self.to(DEVICE, dtype)

    def forward(self, z, x):
        seen = z[1].mean(1)[:, None, None, None]
        image = torch.tanh(self.image(z[0]) + seen + x[:, :4, None, None])
        image = image.contiguous(memory_format=torch.channels_last)
        return image, torch.tanh(self.a(z[1]) + self.b(z[0].mean((2, 3))) + x)

    def initial_state(self, x):
        image = x.new_zeros(len(x), 4, 5, 5).to(memory_format=torch.channels_last)
        return image, x.new_zeros(len(x), 48)


class Single(Cell):
    def forward(self, z, x):
        return torch.tanh(self.a(z) + x)

    def initial_state(self, x):
        return x.new_zeros(len(x), 48)


class Own(JFB):
    pass


def backward(cell, gradient, monkeypatch, fuses=True, of=None):
    """The gradients, the record of the pass, and what the kernels were given and made."""
    made, given = [], fused.refined

    def noted(v, vjp, space, *rest):
        found = given(v, vjp, space, *rest)
        w = space.in_parts(found.w)
        made.append([StateSpace.join(space, part) for part in (v, w, vjp(w))])
        return found

    torch.manual_seed(1)
    x = torch.randn(5, 48, device=DEVICE, dtype=BF16)
    with monkeypatch.context() as patch, use("fast"):
        patch.setattr(fused, "refined", noted)
        if not fuses:
            patch.setattr(fused, "takes", lambda *_: False)
        deq = gdeq.DEQ(cell, gdeq.Broyden(4, tol=0), gradient)
        z = deq(x)
        parts = z if isinstance(z, tuple) else (z,)
        # the sum's gradient is one number, expanded
        loss = parts[0].float().square().sum() + sum(part.sum() for part in parts)
        cell.zero_grad()
        loss.backward(inputs=None if of is None else of(cell))
    found = [p.grad.clone() for p in cell.parameters() if p.grad is not None]
    return found, deq.solution.backward, made


@pytest.mark.parametrize(("kind", "times"), [(Cell, 1), (Single, 3)])
def test_a_layer_s_gradients_are_those_of_the_rows(kind, times, monkeypatch):
    cell = kind()
    expected, of_expected, made = backward(cell, JFB(refine=times), monkeypatch, fuses=False)
    assert not made
    found, record, made = backward(cell, JFB(refine=times), monkeypatch)
    assert len(made) == 1
    bare, _, _ = backward(cell, gdeq.Measured(JFB()), monkeypatch)
    assert record.vjps == times
    assert record.gradient == "JFB"
    torch.testing.assert_close(record.error, of_expected.error, rtol=0.1, atol=0.01)
    torch.testing.assert_close(record.residual, of_expected.residual, rtol=0.1, atol=0.01)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(expected, bare, strict=True))
    assert apart > 0.1  # so it is seen whether it is refined
    # The residual is that of the w that was used.
    ((v, w, product),) = made
    residual = (v - w + product).norm(dim=1) / v.norm(dim=1)
    torch.testing.assert_close(record.residual, residual, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(record.length, w.norm(dim=1), rtol=1e-2, atol=0.0)


def test_nothing_is_kept_where_the_pass_does_not_come_to_z(monkeypatch):
    forgotten, forget = [], gdeq.engine.Link.forget

    def noted(link):
        forgotten.append(link.adjoint is not None)
        forget(link)
        assert link.adjoint is None

    class Apart(Cell):
        def forward(self, z, x):
            image, row = super().forward(z, x)
            return image, row + self.b.bias

    monkeypatch.setattr(gdeq.engine.Link, "forget", noted)
    of = lambda cell: [cell.b.bias]  # noqa: E731
    _, record, made = backward(Apart(), JFB(refine=1), monkeypatch, of=of)
    assert made
    assert forgotten == [True]
    assert record.residual is None


@pytest.mark.parametrize("gradient", [Own(refine=1), gdeq.Measured(JFB()), JFB(refine=8)], ids=str)
def test_others_keep_the_rows(gradient, monkeypatch):
    found, _, made = backward(Single(), gradient, monkeypatch)
    assert not made
    assert all(g.isfinite().all() for g in found)
