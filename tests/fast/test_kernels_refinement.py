"""`gdeq.refinement.refine` in kernels: its w, when an earlier one is taken, its error."""

from __future__ import annotations

import pytest
import torch

import gdeq
from gdeq.fast.eight_bits import Scales
from gdeq.fast.product import ProductInverse
from gdeq.refinement import Refinement, minus_identity, refine
from problems import Wide, assert_near, paper_broyden, transposed_system

pytest.importorskip("triton")
from gdeq.fast.kernels import refinement
from oracles.rounding import rounded_to_eight_bits
from sweeps import DEVICE, FORMS, use

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def refined_by(form, inverse, v, vjp, how):
    """inverse: transposed."""
    with use(form), torch.no_grad():
        w = inverse.negative_matvec(v)
        if form == "oracle":
            return refine(w, v, vjp, inverse, how)
        return refinement.refined(inverse, w, v, vjp, how)


def times_each(matrices, x):  # (batch, d, d), (batch, d) -> (batch, d)
    return torch.einsum("bij,bj->bi", matrices, x)


def solved(form, radius, steps):
    """An inverse, transposed, and the adjoint systems at the solution."""
    problem = Wide(radius=radius).to(DEVICE)
    with use(form):
        solution = gdeq.solve(problem, problem.z0, gdeq.Broyden(steps, 0.0))
    systems = transposed_system(problem.dense_jacobian(solution.z))
    return solution.inverse.vectors.T, systems, problem.cotangent()


@pytest.mark.parametrize(
    ("times", "overshoot", "amplification"),
    [(1, 0.5, 9.0), (2, 5.0, 9.0), (4, 0.5, 9.0), (1, 5.0, 0.05), (4, 5.0, 0.05)],
)
def test_a_refinement_is_broyden_s_method_and_says_how_far_it_went(
    form, times, overshoot, amplification
):
    """The last step is bounded: by its factor, and by what the inverse makes of the residual."""
    inverse, systems, v = solved(form, 0.9, 8)
    how = Refinement(times, 1e-16, amplification, overshoot)
    w = refined_by(form, inverse, v, lambda u: u - times_each(systems, u), how)
    reused = -inverse.as_matrix()
    shortened = 0
    for A, P, right, found, error in zip(systems, reused, v, w.w, w.error, strict=True):

        def g(u, A=A, right=right):
            return right - A @ u

        before, known = paper_broyden(g, torch.zeros_like(right), times, inverse=-P)
        earlier, older = paper_broyden(g, torch.zeros_like(right), times - 1, inverse=-P)
        r, last_r = g(before), g(earlier)
        step, q = -known @ r, -older @ r
        best = (last_r @ (last_r - r)).abs() / (last_r - r).square().sum()
        share = (overshoot * best.clamp(min=1.0) * q.norm() / step.norm()).clamp(max=1.0)
        bound = amplification * r.norm() * before.norm() / right.norm()
        share = share * (bound / q.norm()).clamp(max=1.0)
        step = step * share
        assert_near(found, before + step, 1e-9)
        assert_near(error, step.norm() / found.norm(), 1e-9)
        shortened += int(share < 1)
    assert shortened == (0 if overshoot * amplification > 5 else len(v))


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("growth", [1e-3, 1e3])
def test_a_w_whose_residual_has_doubled_is_taken_back_if_it_is_long(form, at, growth):
    """From step ``at`` on, the residual of sample 1 is 2.1 times the one before, of 2 1.9 times."""
    inverse, systems, v = solved(form, 0.5, 8)
    times, seen, residuals = 4, [], []

    def vjp(u):
        seen.append(u)
        product = u - times_each(systems, u)
        if len(seen) >= at:
            for sample, factor in [(1, 2.1), (2, 1.9)]:
                r = v[sample] + product[sample] - u[sample]
                before = residuals[at - 2][sample].norm()
                product[sample] += r * (factor * before / r.norm() - 1)
        residuals.append(v + product - u)
        return product

    found = refined_by(form, inverse, v, vjp, Refinement(times, 1e-16, growth=growth))
    back = growth < 1  # every w is longer than that
    assert torch.equal(found.w[1], seen[at - 2][1]) == back
    assert torch.isinf(found.error[1]) == back
    assert not torch.equal(found.w[2], seen[at - 2][2])
    assert found.error[2] < 10
    assert len({u[1].norm().item() for u in seen}) == times  # it went on trying


@pytest.mark.parametrize("times", [2, 4])
def test_how_long_a_refined_w_may_be(form, times):
    """Where no residual is small enough: its length beside that of the w of smallest residual."""
    inverse, systems, v = solved(form, 0.9, 3)
    seen = []

    def vjp(u):
        seen.append(u)
        return u - times_each(systems, u)

    def refined(growth):
        seen.clear()
        how = Refinement(times, 1e-16, setback=0.0, growth=growth)
        return refined_by(form, inverse, v, vjp, how)

    free = refined(5.0)
    residuals = torch.stack([(v - times_each(systems, u)).norm(dim=1) for u in seen])
    kept = torch.stack(seen)[residuals.argmin(0), range(len(v))]
    longer, than_first = (free.w.norm(dim=1) / u.norm(dim=1) for u in (kept, seen[0]))
    assert longer.max() < 5.0
    apart = (longer - than_first).abs().argmax()  # one that tells the two from each other
    assert (longer - than_first)[apart].abs() > 1e-3
    for growth in (((longer + than_first) / 2)[apart], longer.sort().values[-2:].mean()):
        found = refined(growth.item())
        short = longer <= growth
        assert (found.error[~short] == torch.inf).all()
        assert_near(found.w[~short], kept[~short], 1e-12)
        assert torch.equal(found.error[short], free.error[short])
        assert torch.equal(found.w[short], free.w[short])
    assert 0 < short.sum() < len(v)


def test_a_long_w_is_reached():
    """J = 0.9: w is ten times as long as v, and its residual falls with each VJP."""
    v = torch.randn(3, 20, dtype=F64, device=DEVICE)
    for times in (1, 2):
        found = refine(v, v, lambda u: 0.9 * u, minus_identity(v), Refinement(times, 1e-16))
        assert ((found.w - 10 * v).norm(dim=1) <= 1e-11 * v.norm(dim=1)).all()


@pytest.mark.parametrize("times", [2, 5])
def test_a_w_is_not_judged_by_its_residual_alone(times):
    """Jᵀ moves each number one place and makes it longer: the series is right, its residual not."""
    d, batch = 9, 4
    factors = torch.linspace(1.3, 1.4, batch, dtype=F64)
    move = torch.diag(torch.ones(d - 1, dtype=F64), 1)
    move[0, 1] = 0.0  # the first place has nothing to do with the others
    transposed = (factors[:, None, None] * move).to(DEVICE)
    v = torch.zeros(batch, d, dtype=F64, device=DEVICE)
    v[:, 0], v[:, times + 2] = 4.0, 1.0  # so the series has one term more than there are products
    exact = torch.linalg.solve(torch.eye(d, device=DEVICE) - transposed, v)

    def distance(w):
        return ((w - exact).norm(dim=1) / exact.norm(dim=1)).cpu()

    how = Refinement(times, 1e-16)
    found = refine(v, v, lambda u: times_each(transposed, u), minus_identity(v), how)
    residual = (v + times_each(transposed, found.w) - found.w).norm(dim=1).cpu()
    assert_near(residual, factors ** (times + 1), 1e-12)  # v's own is the factor
    assert (distance(found.w) < 0.95 * distance(v)).all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_no_step_is_no_error_only_where_nothing_is_left(form, dtype):
    """Sample 0 is solved at once; the inverse leaves nothing of sample 1, and sample 2 is 0."""
    v = torch.eye(3, dtype=dtype, device=DEVICE)
    v[2] = 0.0
    steps = torch.zeros(3, 2, 3, dtype=dtype, device=DEVICE)
    steps[1, 0, 1], steps[1, 1, 1] = 1.0, -1.0  # I − e eᵀ
    gram = torch.einsum("bid,bjd->bij", steps, steps)
    keep = torch.zeros(3, 2, dtype=torch.bool, device=DEVICE)
    keep[1, 0] = True
    inverse = ProductInverse(steps, gram, keep, transposed=True)
    factor = torch.tensor([0.0, 0.3, 0.3], dtype=dtype, device=DEVICE).unsqueeze(1)
    found = refined_by(form, inverse, v, lambda u: factor * u, Refinement(2, 1e-16))
    assert found.w[1].tolist() == [0.0] * 3
    assert found.error.tolist() == [0.0, torch.inf, 0.0]


def test_a_length_that_cancels_is_not_known(form):
    """A stored step 1e12 long, where v is zero: inner products in float32 say nothing there."""
    batch, d = 12, 64
    torch.manual_seed(0)
    steps = torch.zeros(batch, 3, d)
    steps[:, ::2, :32], steps[:, 1, 32:] = torch.randn(batch, 2, 32), 1e12 * torch.randn(batch, 32)
    v = torch.zeros(batch, d, device=DEVICE)
    v[:, :32] = torch.randn(batch, 32)
    steps = steps.to(DEVICE)
    gram = torch.einsum("bid,bjd->bij", steps, steps)
    keep = torch.ones(batch, 3, dtype=torch.bool, device=DEVICE)
    inverse = ProductInverse(steps, gram, keep, transposed=True)
    eye = torch.eye(d, device=DEVICE, dtype=F64)
    exact = torch.linalg.solve(eye - 0.5 * eye.roll(32, 1), v.double().T).T
    found = refined_by(form, inverse, v, lambda u: 0.5 * u.roll(32, 1), Refinement(2, 1.2e-7))
    error, off = found.error, (found.w - exact).norm(dim=1) / exact.norm(dim=1)
    assert ((error > 0) | (off < 1e-3)).all(), (error, off)
    assert (off[error < 1] < 10).all(), (error, off)


def drawn_inverse(batch, count, d, dtype, store):
    """B⁻ᵀ of steps that no solve made; some factors are not kept, nor what only they would use."""
    steps = torch.randn(batch, count, d, dtype=dtype)
    scales = None
    if store == torch.int8:
        made = [rounded_to_eight_bits(steps[:, j], (d,), 512) for j in range(count)]
        steps = torch.stack([whole for whole, _ in made], 1)
        scales = Scales(torch.stack([scale for _, scale in made], 1).to(DEVICE), (d,), 512)
    steps = steps.to(DEVICE, store)
    wide = steps.to(dtype) * (scales.spread() if scales else 1)
    keep = torch.rand(batch, count, device=DEVICE) < 0.8
    keep[0] = False
    gram = torch.einsum("bid,bjd->bij", wide, wide)
    gram[0] = torch.nan
    if scales is None:
        steps[0] = torch.nan
    else:
        scales.values[0] = torch.inf
    return ProductInverse(steps, gram, keep, transposed=True, scales=scales)


REFINED = [
    (F64, F64, 1.0, 3.0, 1.5),
    (F64, F64, 1.0, 0.125, 0.5),  # which is a float32 too, as a kernel gets it
    (F32, F32, 1.0, 3.0, 1.5),
    (F32, BF16, 1.0, 3.0, 1.5),
    (F32, torch.int8, 1.0, 3.0, 1.5),
    (F32, BF16, 1e-10, 0.1, 1.5),
    (F32, BF16, 1e25, 3.0, 1.5),  # squares overflow
    (F32, BF16, 1e-28, 3.0, 1.5),  # squares vanish
]


@pytest.mark.parametrize(
    ("dtype", "store", "scale", "amplification", "overshoot", "times"),
    [(*kind, 3) for kind in REFINED]
    + [(*kind, times) for kind in REFINED[1:5:3] for times in (1, 2)],
)
def test_the_kernels_refine_as_the_reference(dtype, store, scale, amplification, overshoot, times):
    growth = min(overshoot, amplification) / 2  # so that some are taken back
    batch, d = 8, 1040  # two chunks
    inverse = drawn_inverse(batch, 6, d, dtype, store)
    matrix = (0.7 * torch.randn(d, d, dtype=dtype) / d**0.5).to(DEVICE)
    v = torch.randn(batch, d, dtype=dtype, device=DEVICE)
    v[0, d // 2 :] = 0.0
    v[1] = 0.0
    v *= scale

    def work(form):
        calls = []

        def vjp(u):
            calls.append(u)
            product = u @ matrix
            # q is as long as the step along it, nearly: no update that is not rounding
            product[0] = (1 - 100 * torch.finfo(dtype).eps) * u[0] + u[0].roll(d // 2)
            product[2] = u[2]  # r does not change
            product[3] *= 30.0
            product[4, 3] = torch.nan
            if len(calls) == 2:
                product[5, d - 1] = torch.inf
            if len(calls) == times:
                product[6, 0] = torch.nan
            return product

        how = Refinement(times, 1e-3, amplification, overshoot, growth=growth)
        found = refined_by(form, inverse, v, vjp, how)
        assert len(calls) == times
        return found

    given = inverse.steps, inverse.gram, inverse.keep, v
    before = [tensor.clone() for tensor in given]
    expected, found = (work(form) for form in FORMS)
    accuracy = 2e-5 if dtype == F32 else 1e-13
    for i in range(batch):
        size = expected.w[i].double().norm().item() or 1.0
        assert ((found.w - expected.w)[i].double().norm() <= accuracy * size).item(), i
    assert expected.w.isfinite().all()
    torch.testing.assert_close(found.error, expected.error, rtol=10 * accuracy, atol=accuracy)
    torch.testing.assert_close(expected.length, expected.w.norm(dim=1), rtol=1e-5, atol=0)
    near = {"rtol": 10 * accuracy, "atol": accuracy * scale}
    torch.testing.assert_close(found.length, expected.length, **near)
    for was, now in zip(before, given, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)


class Derived(gdeq.GDEQ):
    pass


@pytest.mark.parametrize(
    ("gradient", "launched"),
    [
        (gdeq.GDEQ(refine=1), True),
        (gdeq.GDEQ(refine=5), False),  # more vectors than a program holds
        (gdeq.GDEQ(tolerance=0.5), False),
        (Derived(refine=1), False),  # it may do more
        (gdeq.Measured(gdeq.GDEQ(refine=1)), False),
    ],
    ids=repr,
)
def test_where_kernels_refine(gradient, launched, monkeypatch):
    calls, given = [], refinement.refined
    monkeypatch.setattr(refinement, "refined", lambda *args: calls.append(1) or given(*args))
    monkeypatch.setattr(refinement, "MOST_VECTORS", 8)
    weight = torch.full((6,), 0.5, device=DEVICE, dtype=BF16, requires_grad=True)
    with use("fast"):
        z0 = torch.zeros(2, 6, device=DEVICE, dtype=BF16)
        found = gdeq.fixed_point(
            lambda z: torch.tanh(weight * z + 1), z0, gdeq.Broyden(3, 0.0), gradient
        )
        found.z.float().sum().backward()
    assert weight.grad.isfinite().all()
    assert bool(calls) == launched
