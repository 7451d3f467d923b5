"""`JFB(refine=k)`: GDEQ's refinement without an inverse, and its kernels on a state's tensors.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import gdeq
from gdeq import GDEQ, JFB, gradients, nodes
from gdeq.fast.kernels import choice
from gdeq.fast.product import no_inverse
from gdeq.models.mdeq import mdeq
from gdeq.operators import Refinement, safe_norms
from gdeq.solvers.base import noise_level
from gdeq.state import StateSpace
from problems import Wide, assert_near, transposed_system

pytest.importorskip("triton")
from gdeq.fast.kernels import refinement_parts as fused

# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16 = torch.bfloat16
RULES = gradients.refinement(1, 1e-3).rules


# --- what it is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_is_gdeq_of_a_solve_that_left_nothing(k):
    problem = Wide(radius=0.5)
    solution = gdeq.fixed_point(problem, problem.z0, gdeq.Broyden(30, 1e-10), JFB(refine=k))
    v = problem.cotangent()
    systems = transposed_system(problem.dense_jacobian(solution.z.detach()))
    bare = replace(solution, inverse=None, secants=None)
    with torch.no_grad():
        ours, theirs = (
            gradient.cotangent(v, lambda u: u - times_each(systems, u), bare)
            for gradient in (JFB(refine=k), GDEQ(refine=k))
        )
    assert torch.equal(ours.w, theirs.w)
    assert torch.equal(ours.error, theirs.error)
    assert ours.vjps == theirs.vjps == k
    (solution.z * v).sum().backward()
    assert_near(problem.shift.grad, ours.w, 1e-12)


def test_many_products_solve_the_adjoint_equation():
    problem = Wide(radius=0.4)
    solution = gdeq.fixed_point(problem, problem.z0, gdeq.Broyden(60, 1e-13), JFB(refine=40))
    v = problem.cotangent()
    systems = transposed_system(problem.dense_jacobian(solution.z.detach()))
    with torch.no_grad():
        found = JFB(refine=40).cotangent(v, lambda u: u - times_each(systems, u), solution)
    assert_near(found.w, torch.linalg.solve(systems, v), 1e-10)
    (solution.z * v).sum().backward()
    assert solution.backward.residual.max() < 1e-10


def test_what_it_asks_for():
    plain, refined = JFB(), JFB(refine=2)
    assert (plain.uses_vjp, plain.second_order) == (False, True)
    assert (refined.uses_vjp, refined.second_order) == (True, False)
    for gradient in (plain, refined):
        assert not gradient.uses_inverse
        assert not gradient.needs_inverse
    assert plain == JFB(refine=0)
    problem = Wide(radius=0.4)
    z = gdeq.fixed_point(problem, problem.z0, gdeq.Broyden(9, 0.0), refined).z
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(z.sum(), list(problem.parameters()), create_graph=True)


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("amplification", "overshoot"), [(3.0, 1.5), (3.0, 0.5), (0.125, 1.5)])
@pytest.mark.parametrize("growth", [5.0, 0.5])
@pytest.mark.parametrize("times", [1, 2, 3, 5, 7])
def test_decisions_by_the_gram_matrix_alone(times, growth, amplification, overshoot):
    """All in float64, where the plain form and `_decide` agree to all digits."""
    batch, d = 12, 40
    matrix = (0.7 * torch.randn(d, d, dtype=torch.float64) / d**0.5).to(DEVICE)
    v = torch.randn(batch, d, dtype=torch.float64, device=DEVICE)
    v[0], v[1, 3], v[2, 5] = 0.0, torch.inf, torch.nan
    v[10] = torch.eye(d, dtype=torch.float64)[0]
    how = Refinement(times, 1e-3, amplification, overshoot, 2.0, growth)

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
        expected, of_expected, long = gradients._refine(v, v, map_of(), no_inverse(v).T, how)
        found, of_found, length = decided(v, map_of(), how)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, equal_nan=True)
    told = torch.arange(batch, device=DEVICE) != (4 if times > 2 else batch)
    # (Sample 4 is solved by two, and a step by what rounding has left says nothing.)
    torch.testing.assert_close(of_found[told], of_expected[told].float(), rtol=1e-5, atol=1e-6)
    told = torch.isfinite(expected).all(1)
    torch.testing.assert_close(long[told], expected[told].norm(dim=1))
    torch.testing.assert_close(length[told], long[told].float(), rtol=1e-5, atol=1e-6)
    assert expected[3:].isfinite().all()
    assert torch.equal(found[1:3].nan_to_num(7.0), v[1:3].nan_to_num(7.0))


def decided(v, vjp, how):  # (batch, d) -> (batch, d), (batch,), (batch,)
    """The loop of `refined` with exact inner products."""
    batch, n = len(v), fused.VECTORS
    gram = v.new_full((batch, n, n), torch.nan)  # what is not written is not read
    weight, (error, length) = v.new_empty(batch, n), v.new_empty(2, batch, dtype=torch.float32)
    vectors, w = [v], v
    numbers = torch.finfo(torch.float32).eps, noise_level(how.precision)
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
            partial, gram, weight, error, length, 3, newest, *numbers,
            *how.rules,
            FIRST=newest == 1, LAST=newest == how.times,
            VECTORS=n, LANES=fused.LANES, CHUNKS=fused.CHUNKS, num_warps=1,
        )  # fmt: skip
        w = torch.zeros_like(v)
        for i, e in enumerate(vectors):
            c = weight[:, i : i + 1]
            w = w + torch.where(c != 0, c * e, 0.0)
    return w, error, length


SHAPES = ((3, 5, 7), (2100,), (33,))  # one in channels-last memory, one of two chunks


def space_of(batch, dtype):
    first, *others = (torch.zeros(batch, *shape, device=DEVICE, dtype=dtype) for shape in SHAPES)
    return StateSpace((first.to(memory_format=torch.channels_last), *others))


class Products:
    """Jᵀ on rows, and on tensors; ``change`` may spoil it for some samples."""

    def __init__(self, space, change):
        self.space, self.change, self.calls = space, change, 0
        source = torch.Generator().manual_seed(1)
        d = space.size
        self.matrix = (0.6 * torch.randn(d, d, generator=source) / d**0.5).to(DEVICE)

    def tensors(self, u):
        for leaf, dtype, last in zip(u, self.space.dtypes, self.space.channels_last, strict=True):
            assert leaf.dtype == dtype
            assert leaf.is_contiguous(
                memory_format=torch.channels_last if last else torch.contiguous_format
            )
        self.calls += 1
        with choice.use("plain"):
            u = self.space.join(u)
            return self.space.split(self.change(u @ self.matrix, u, self.calls), self.space.dtypes)

    def rows(self, u):
        return self.space.join(self.tensors(self.space.split(u, self.space.dtypes)))


def both_forms(space, v, change, times):
    """w of each form as rows in units of v, its error and its length."""
    how = Refinement(times, space.precision(), *RULES)
    plain = Products(space, change)
    with torch.no_grad(), choice.use("plain"):
        rows = space.join(v)
        unit = nodes._unit_of(safe_norms(rows)[0])
        rows = rows / unit[:, None]
        expected = gradients._refine(rows, rows, plain.rows, no_inverse(rows).T, how)
    with torch.no_grad(), choice.use("triton"):
        products = Products(space, change)
        found = fused.refined(v, products.tensors, space, unit, how)
        again = fused.refined(v, Products(space, change).tensors, space, unit, how)
    assert products.calls == plain.calls == times
    for a, b in zip(found, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    with choice.use("plain"):
        w = space.join(space.in_parts(found[0])) / unit[:, None]
    return rows, expected, (w, *found[1:])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_tensors_as_they_lie_are_refined_like_rows(times):
    batch = 9
    space = space_of(batch, BF16)
    rows = torch.randn(batch, space.size, device=DEVICE)
    rows[1], rows[2, 2200], rows[3, 0] = 0.0, torch.inf, torch.nan
    rows[4] *= 1e20
    rows[5] *= 1e-20
    with choice.use("plain"):
        v = space.split(rows, space.dtypes)

    def change(product, u, call):
        product[6] *= 30  # w runs away
        if call == 2:
            product[7, 9] = torch.nan
        product[8] = u[8]  # r does not change
        return product

    v, (expected, of_expected, long), (w, error, length) = both_forms(space, v, change, times)
    for i in range(batch):
        if i in (2, 3):
            torch.testing.assert_close(w[i], v[i], rtol=0, atol=0, equal_nan=True)
            assert torch.isinf(error[i])
            continue
        size = expected[i].norm()
        assert (w[i] - expected[i]).norm() <= 0.02 * size, i
        torch.testing.assert_close(error[i], of_expected[i], rtol=0.03, atol=0.0)
        torch.testing.assert_close(length[i], long[i], rtol=0.02, atol=0.0)
        torch.testing.assert_close(long[i], size)
    ran_away, taken_back = (6,) * (times > 1), (6, 7) if times > 1 else ()
    assert torch.isinf(error).nonzero().flatten().tolist() == sorted({2, 3, *taken_back})
    for i in ran_away:
        assert torch.equal(w[i], v[i])
    normal = [0, 4, 5]
    assert ((w - v)[normal].norm(dim=1) > 0.2 * v[normal].norm(dim=1)).all()


def test_one_sample_alone():
    space = space_of(1, BF16)
    with choice.use("plain"):
        v = space.split(torch.randn(1, space.size, device=DEVICE), space.dtypes)
    _, (expected, of_expected, _), (w, error, _) = both_forms(space, v, lambda x, *_: x, 2)
    assert (w - expected).norm() <= 0.02 * expected.norm()
    torch.testing.assert_close(error, of_expected, rtol=0.03, atol=0.0)


def test_what_is_taken():
    space = space_of(2, BF16)
    assert fused.takes(space, [BF16] * 9, fused.VECTORS - 1)
    assert not fused.takes(space, [BF16] * 9, fused.VECTORS)
    assert not fused.takes(space, [BF16, torch.float16], 1)
    assert not fused.takes(space_of(2, torch.float16), [torch.float16], 1)
    assert not fused.takes(space_of(2, torch.float32), [torch.float32] * 3, 1)
    empty = StateSpace((torch.zeros(2, 0, dtype=BF16), torch.zeros(2, 4, dtype=BF16)))
    assert not fused.takes(empty, [BF16], 1)


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

    def start(self, x):
        image = x.new_zeros(len(x), 4, 5, 5).to(memory_format=torch.channels_last)
        return image, x.new_zeros(len(x), 48)


class Single(Cell):
    def forward(self, z, x):
        return torch.tanh(self.a(z) + x)

    def start(self, x):
        return x.new_zeros(len(x), 48)


def backward(cell, gradient, in_parts, monkeypatch, of=None):
    """The gradients, the record of the pass, and what the nodes share after it."""
    links, given = [], nodes._refined_in_parts

    def noted(ctx, *rest):
        found = given(ctx, *rest) if in_parts else None
        assert (found is not None) == in_parts
        links.append(ctx.link)
        return found

    torch.manual_seed(1)
    x = torch.randn(5, 48, device=DEVICE, dtype=BF16)
    with monkeypatch.context() as patch, choice.use("triton"):
        patch.setattr(nodes, "_refined_in_parts", noted)
        deq = gdeq.DEQ(cell, solver=gdeq.Broyden(6, tol=0), gradient=gradient)
        z = deq(x, z0=cell.start(x))
        parts = z if isinstance(z, tuple) else (z,)
        # the sum's gradient is one number, expanded
        loss = parts[0].float().square().sum() + sum(part.sum() for part in parts)
        cell.zero_grad()
        loss.backward(inputs=None if of is None else of(cell))
    assert len(links) == 1
    found = [p.grad.clone() for p in cell.parameters() if p.grad is not None]
    return found, deq.solution.backward, links[0]


@pytest.mark.parametrize("kind", [Cell, Single])
@pytest.mark.parametrize("times", [1, 3])
def test_a_layer_s_gradients_are_those_of_the_rows(kind, times, monkeypatch):
    cell = kind()
    expected, of_expected, _ = backward(cell, JFB(refine=times), False, monkeypatch)
    found, record, link = backward(cell, JFB(refine=times), True, monkeypatch)
    bare, _, _ = backward_of_jfb(cell, monkeypatch)
    assert record.vjps == times
    assert record.gradient == "JFB"
    torch.testing.assert_close(record.error, of_expected.error, rtol=0.1, atol=0.01)
    torch.testing.assert_close(record.residual, of_expected.residual, rtol=0.1, atol=0.01)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(expected, bare, strict=True))
    assert apart > 0.1  # so it is seen whether it is refined
    assert (link.v, link.w, link.tensors, link.size, link.unit) == (None,) * 5


def test_an_mdeq_in_bf16_is_refined_so(monkeypatch):
    found, records = {}, {}
    given = nodes._refined_in_parts
    for in_parts in (False, True):
        taken = []

        def noted(*args, in_parts=in_parts, taken=taken):
            taken.append(given(*args) if in_parts else None)
            return taken[-1]

        monkeypatch.setattr(nodes, "_refined_in_parts", noted)
        torch.manual_seed(0)
        kind = {"dropout": 0.0, "fused": True}
        model = mdeq("tiny", solver=gdeq.Broyden(2, tol=0.0), gradient=JFB(refine=1), **kind)
        model.to(DEVICE, memory_format=torch.channels_last)
        images = torch.randn(2, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last)
        with choice.use("triton"), torch.autocast(DEVICE.type, BF16):
            model(images).float().square().sum().backward()
        assert [one is not None for one in taken] == [in_parts]
        found[in_parts] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        records[in_parts] = model.deq.solution.backward
    assert any(name.startswith("deq.") for name in found[True])
    assert any(name.startswith("stem.") for name in found[True])
    for name, expected in found[False].items():
        assert (found[True][name] - expected).norm() <= 0.02 * expected.norm(), name
    for one in ("error", "residual"):
        ours, theirs = (getattr(records[in_parts], one) for in_parts in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.005)


def backward_of_jfb(cell, monkeypatch):
    """Plain JFB's, by way of a gradient that asks for VJPs and is no JFB."""
    return backward(cell, gdeq.Measured(JFB()), False, monkeypatch)


def test_the_residual_is_that_of_the_w_that_was_used(monkeypatch):
    cell, seen = Cell(), []
    given = fused.refined

    def noted(v, vjp, space, unit, how):
        w, error, length = given(v, vjp, space, unit, how)
        with choice.use("plain"):
            joined = [space.join(part) for part in (v, space.in_parts(w), vjp(space.in_parts(w)))]
        seen.append(joined)
        return w, error, length

    monkeypatch.setattr(fused, "refined", noted)
    _, record, _ = backward(cell, JFB(refine=1), True, monkeypatch)
    ((v, w, product),) = seen
    expected = (v - w + product).norm(dim=1) / v.norm(dim=1)
    torch.testing.assert_close(record.residual, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(record.length, w.norm(dim=1), rtol=1e-2, atol=0.0)


def test_nothing_is_kept_where_the_pass_does_not_come_to_z(monkeypatch):
    class Apart(Cell):
        def forward(self, z, x):
            image, row = super().forward(z, x)
            return image, row + self.b.bias

    cell = Apart()
    links = []
    forget = nodes._Link.forget

    def noted(link):
        links.append(link.tensors is not None)
        forget(link)

    monkeypatch.setattr(nodes._Link, "forget", noted)
    _, record, link = backward(
        cell, JFB(refine=1), True, monkeypatch, of=lambda cell: [cell.b.bias]
    )
    assert links == [True]
    assert link.tensors is None
    assert record.residual is None


def test_others_keep_the_rows(monkeypatch):
    class Own(JFB):
        pass

    seen, given = [], nodes._refined_in_parts
    monkeypatch.setattr(
        nodes, "_refined_in_parts", lambda *args: seen.append(given(*args)) or seen[-1]
    )
    x = torch.randn(2, 48, device=DEVICE, dtype=BF16)
    cell = Single()
    for gradient in (Own(refine=1), gdeq.Measured(JFB()), JFB(refine=fused.VECTORS)):
        with choice.use("triton"):
            deq = gdeq.DEQ(cell, solver=gdeq.Broyden(2, tol=0), gradient=gradient)
            deq(x, z0=cell.start(x)).sum().backward()
    assert seen == [None] * 3


def times_each(matrices, x):  # (batch, d, d), (batch, d) -> (batch, d)
    return torch.einsum("bij,bj->bi", matrices, x)
