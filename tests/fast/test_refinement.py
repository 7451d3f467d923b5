"""`GDEQ(refine=k)`: Broyden's method on the adjoint equation, plain and as Triton kernels.

Which w it gives, when an earlier one is taken instead, and what it says of its error.  Without a
GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import gdeq
from gdeq import gradients
from gdeq.fast.kernels import choice
from gdeq.fast.product import ProductInverse
from gdeq.operators import Refinement
from problems import Wide, assert_near, paper_broyden, transposed_system

pytest.importorskip("triton")
from gdeq.fast.kernels import refinement

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter divides 0 by 0 aloud.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["plain", "triton"])
def form(request):
    return request.param


@pytest.mark.parametrize(
    ("times", "overshoot", "amplification"),
    [(1, 0.5, 9.0), (2, 5.0, 9.0), (4, 0.5, 9.0), (1, 5.0, 0.05), (4, 5.0, 0.05)],
)
def test_a_refinement_is_broyden_s_method_and_says_how_far_it_went(
    form, times, overshoot, amplification, monkeypatch
):
    """The last step is bounded: by its factor, and by what the inverse makes of the residual."""
    monkeypatch.setattr(gradients, "OVERSHOOT", overshoot)
    monkeypatch.setattr(gradients, "AMPLIFICATION", amplification)
    problem = Wide(radius=0.9).to(DEVICE)
    v = problem.cotangent()
    with choice.use(form):
        solution = gdeq.solve(problem, problem.z0, gdeq.Broyden(8, 0.0))
        systems = transposed_system(problem.dense_jacobian(solution.z))
        with torch.no_grad():
            w = gdeq.GDEQ(refine=times).cotangent(v, lambda u: u - times_each(systems, u), solution)
    with choice.use("plain"):  # of the same factors; in kernels, column by column, it is slow
        reused = -solution.inverse.as_matrix().mT
    shortened = 0
    for A, P, right, found, error in zip(systems, reused, v, w.w, w.error, strict=True):
        before, inverse = paper_broyden(
            lambda u, A=A, right=right: right - A @ u, torch.zeros_like(right), times, inverse=-P
        )
        earlier, older = paper_broyden(
            lambda u, A=A, right=right: right - A @ u,
            torch.zeros_like(right),
            times - 1,
            inverse=-P,
        )
        r, last_r = right - A @ before, right - A @ earlier
        step, q = -inverse @ r, -older @ r
        best = (last_r @ (last_r - r)).abs() / (last_r - r).square().sum()
        share = (overshoot * best.clamp(min=1.0) * q.norm() / step.norm()).clamp(max=1.0)
        bound = amplification * r.norm() * before.norm() / right.norm()
        share = share * (bound / q.norm()).clamp(max=1.0)
        step = step * share
        assert_near(found, before + step, 1e-9)
        assert_near(error, step.norm() / found.norm(), 1e-9)
        shortened += int(share < 1)
    assert shortened == (0 if overshoot * amplification > 5 else len(v))


@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("growth", [1e-3, 1e3])
def test_a_w_whose_residual_has_doubled_is_taken_back_if_it_is_long(form, at, growth, monkeypatch):
    """From step ``at`` on, the residual of sample 1 is 2.1 times the one before, of 2 1.9 times."""
    monkeypatch.setattr(gradients, "GROWTH", growth)
    problem = Wide(radius=0.5).to(DEVICE)
    v, times = problem.cotangent(), 4
    seen, residuals = [], []

    def vjp(u):
        seen.append(u)
        product = times_each(matrices.mT, u)
        if len(seen) >= at:
            for sample, factor in [(1, 2.1), (2, 1.9)]:
                r = v[sample] + product[sample] - u[sample]
                before = residuals[at - 2][sample].norm()
                product[sample] += r * (factor * before / r.norm() - 1)
        residuals.append(v + product - u)
        return product

    with choice.use(form):
        solution = gdeq.solve(problem, problem.z0, gdeq.Broyden(8, 0.0))
    matrices = problem.dense_jacobian(solution.z)
    with choice.use(form), torch.no_grad():
        found = gdeq.GDEQ(refine=times).cotangent(v, vjp, solution)
    back = growth < 1  # every w is longer than that
    assert torch.equal(found.w[1], seen[at - 2][1]) == back
    assert torch.isinf(found.error[1]) == back
    assert not torch.equal(found.w[2], seen[at - 2][2])
    assert found.error[2] < 10
    assert len({u[1].norm().item() for u in seen}) == times  # it went on trying


@pytest.mark.parametrize("times", [2, 4])
def test_how_long_a_refined_w_may_be(form, times, monkeypatch):
    """Where no residual is small enough: its length beside that of the w of smallest residual."""
    monkeypatch.setattr(gradients, "SETBACK", 0.0)
    problem = Wide(radius=0.9).to(DEVICE)
    v, seen = problem.cotangent(), []
    with choice.use(form):
        solution = gdeq.solve(problem, problem.z0, gdeq.Broyden(3, 0.0))
    systems = transposed_system(problem.dense_jacobian(solution.z))

    def vjp(u):
        seen.append(u)
        return u - times_each(systems, u)

    def refined():
        seen.clear()
        with choice.use(form), torch.no_grad():
            return gdeq.GDEQ(refine=times).cotangent(v, vjp, solution)

    free = refined()
    residuals = torch.stack([(v - times_each(systems, u)).norm(dim=1) for u in seen])
    kept = torch.stack(seen)[residuals.argmin(0), range(len(v))]
    longer, than_first = (free.w.norm(dim=1) / u.norm(dim=1) for u in (kept, seen[0]))
    assert longer.max() < gradients.GROWTH
    apart = (longer - than_first).abs().argmax()  # one that tells the two from each other
    assert (longer - than_first)[apart].abs() > 1e-3
    between = ((longer + than_first) / 2)[apart], longer.sort().values[-2:].mean()
    for growth in between:
        monkeypatch.setattr(gradients, "GROWTH", growth.item())
        found = refined()
        short = longer <= growth
        assert (found.error[~short] == torch.inf).all()
        assert_near(found.w[~short], kept[~short], 1e-12)
        assert torch.equal(found.error[short], free.error[short])
        assert torch.equal(found.w[short], free.w[short])
    assert 0 < short.sum() < len(v)


def test_a_long_w_is_reached(form):
    """J = 0.9: w is ten times as long as v, and its residual falls with each VJP."""
    v = torch.randn(3, 20, dtype=torch.float64, device=DEVICE)
    solution = SimpleNamespace(inverse=None, secants=None, precision=1e-16)
    with choice.use(form), torch.no_grad():
        for times in (1, 2):
            found = gdeq.GDEQ(refine=times).cotangent(v, lambda u: 0.9 * u, solution)
            assert ((found.w - 10 * v).norm(dim=1) <= 1e-11 * v.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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
    with choice.use(form), torch.no_grad():
        w, error = refined_by(inverse, v, lambda u: factor * u, 2)
    assert w[1].tolist() == [0.0] * 3
    assert error.tolist() == [0.0, torch.inf, 0.0]


def test_a_length_that_cancels_is_not_known():
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
    eye = torch.eye(d, device=DEVICE, dtype=torch.float64)
    exact = torch.linalg.solve(eye - 0.5 * eye.roll(32, 1), v.double().T).T
    for form in ("plain", "triton"):
        with choice.use(form), torch.no_grad():
            w, error = refined_by(inverse, v, lambda u: 0.5 * u.roll(32, 1), 2, 1.2e-7)
        off = (w - exact).norm(dim=1) / exact.norm(dim=1)
        assert ((error > 0) | (off < 1e-3)).all(), (form, error, off)
        assert (off[error < 1] < 10).all(), (form, error, off)


@pytest.mark.parametrize("times", [2, 5])
def test_a_w_is_not_judged_by_its_residual_alone(form, times):
    """Jᵀ moves each number one place and makes it longer: the series is right, its residual not."""
    d, batch = 9, 4
    factors = torch.linspace(1.3, 1.4, batch, dtype=torch.float64)
    move = torch.diag(torch.ones(d - 1, dtype=torch.float64), 1)
    move[0, 1] = 0.0  # the first place has nothing to do with the others
    transposed = (factors[:, None, None] * move).to(DEVICE)
    v = torch.zeros(batch, d, dtype=torch.float64, device=DEVICE)
    v[:, 0], v[:, times + 2] = 4.0, 1.0  # so the series has one term more than there are products

    def distance(w):
        return ((w - exact).norm(dim=1) / exact.norm(dim=1)).cpu()

    exact = torch.linalg.solve(torch.eye(d, device=DEVICE) - transposed, v)
    solution = SimpleNamespace(inverse=None, secants=None, precision=1e-16)
    with choice.use(form), torch.no_grad():
        found = gdeq.GDEQ(refine=times).cotangent(v, lambda u: times_each(transposed, u), solution)
    residual = (v + times_each(transposed, found.w) - found.w).norm(dim=1).cpu()
    assert_near(residual, factors ** (times + 1), 1e-12)  # v's own is the factor
    assert (distance(found.w) < 0.95 * distance(v)).all()


def refined_by(inverse, v, vjp, times, precision=1e-16):
    w = inverse.negative_matvec(v)
    found = gradients._refined(w, v, vjp, inverse, gradients.refinement(times, precision))
    return found.w, found.error


def times_each(matrices, x):  # (batch, d, d), (batch, d) -> (batch, d)
    return torch.einsum("bij,bj->bi", matrices, x)


def drawn_inverse(batch, count, d, dtype, store):
    """B⁻ᵀ of steps that no solve made; some factors are not kept, nor what only they would use."""
    steps = torch.randn(batch, count, d, dtype=dtype, device=DEVICE).to(store)
    keep = torch.rand(batch, count, device=DEVICE) < 0.8
    keep[0] = False
    gram = torch.einsum("bid,bjd->bij", steps.to(dtype), steps.to(dtype))
    steps[0], gram[0] = torch.nan, torch.nan
    return ProductInverse(steps, gram, keep, transposed=True)


REFINED = [
    (torch.float64, torch.float64, 1.0, 3.0, 1.5),
    (torch.float64, torch.float64, 1.0, 0.125, 0.5),  # which is a float32 too, as a kernel gets it
    (torch.float32, torch.float32, 1.0, 3.0, 1.5),
    (torch.float32, torch.bfloat16, 1.0, 3.0, 1.5),
    (torch.float32, torch.bfloat16, 1e-10, 0.1, 1.5),
    (torch.float32, torch.bfloat16, 1e25, 3.0, 1.5),  # squares overflow
    (torch.float32, torch.bfloat16, 1e-28, 3.0, 1.5),  # squares vanish
]


@pytest.mark.parametrize(
    ("dtype", "store", "scale", "amplification", "overshoot", "times"),
    [(*kind, 3) for kind in REFINED]
    + [(*kind, times) for kind in (REFINED if CUDA else REFINED[1:4:2]) for times in (1, 2)],
)
def test_a_fused_refinement_is_the_plain_one(
    dtype, store, scale, amplification, overshoot, times, monkeypatch
):
    growth = min(overshoot, amplification) / 2  # so that some are taken back
    monkeypatch.setattr(gradients, "AMPLIFICATION", amplification)
    monkeypatch.setattr(gradients, "OVERSHOOT", overshoot)
    monkeypatch.setattr(gradients, "GROWTH", growth)
    batch, d = 8, 1040  # two chunks
    inverse = drawn_inverse(batch, 6, d, dtype, store)
    matrix = (0.7 * torch.randn(d, d, dtype=dtype) / d**0.5).to(DEVICE)
    v = torch.randn(batch, d, dtype=dtype, device=DEVICE)
    v[0, d // 2 :] = 0.0
    v[1] = 0.0
    v *= scale

    def work():
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

        w = inverse.negative_matvec(v)
        how = Refinement(times, 1e-3, amplification, overshoot, gradients.SETBACK, growth)
        found = gradients._refined(w, v, vjp, inverse, how)
        assert len(calls) == times
        return found.w, found.error, found.length

    kept = [tensor.clone() for tensor in (inverse.steps, inverse.gram, inverse.keep, v)]
    launched = []
    fused_form = refinement.refined
    monkeypatch.setattr(
        refinement, "refined", lambda *args: launched.append(1) or fused_form(*args)
    )
    with torch.no_grad():
        with choice.use("plain"):
            expected, of_expected, long = work()
        assert not launched
        with choice.use("triton"):
            found, of_found, length = work()
        assert launched
    accuracy = 2e-5 if dtype == torch.float32 else 1e-13
    for i in range(batch):
        size = expected[i].double().norm().item() or 1.0
        assert ((found - expected)[i].double().norm() <= accuracy * size).item(), i
    assert expected.isfinite().all()
    torch.testing.assert_close(of_found, of_expected, rtol=10 * accuracy, atol=accuracy)
    torch.testing.assert_close(long, expected.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(length, long, rtol=10 * accuracy, atol=accuracy * scale)
    for before, after in zip(kept, (inverse.steps, inverse.gram, inverse.keep, v), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_what_is_differentiated_is_not_refined_in_kernels():
    inverse = drawn_inverse(2, 3, 20, torch.float64, torch.float64)
    v = torch.randn(2, 20, dtype=torch.float64, device=DEVICE)
    once, often = (Refinement(times, 1e-3, 3.0, 1.5, 2.0, 3.0) for times in (1, 126))
    with choice.use("triton"):
        assert inverse.refined(v, v, torch.zeros_like, once) is None
        with torch.no_grad():
            assert inverse.T.refined(v, v, torch.zeros_like, once) is None
            assert inverse.refined(v, v, torch.zeros_like, often) is None
            assert inverse.refined(v, v, torch.zeros_like, once) is not None


@pytest.mark.parametrize("store", [torch.float64, torch.float32])
def test_an_inverse_is_trusted_where_it_is_not_too_long(form, store):
    """For the others it is −I, and what it makes of x is x."""
    batch, d = 6, 1040
    torch.manual_seed(3)
    steps = (torch.randn(batch, 5, d, dtype=store) / d**0.5).to(DEVICE)
    steps[1, 3] *= 50.0
    steps[4, 0] *= 0.01
    gram = torch.einsum("bid,bjd->bij", steps, steps)
    keep = torch.ones(batch, 5, dtype=torch.bool, device=DEVICE)
    keep[4, 0] = False
    inverse = ProductInverse(steps, gram, keep, transposed=True)
    x = torch.randn(batch, d, dtype=store, device=DEVICE)
    x[1] += 30 * d**0.5 * steps[1, 3] / steps[1, 3].norm()  # along the long step
    x[5] = 0.0
    with choice.use("plain"), torch.no_grad():
        plain = inverse.negative_matvec(x)
    lengths = plain.norm(dim=1) / x.norm(dim=1)
    longest = lengths.nan_to_num(0.0).sort().values[-2:].mean().item()
    with choice.use(form), torch.no_grad():
        found, trusted = inverse.trusted(x, longest)
        after = trusted.negative_matvec(x)
    accuracy = 1e-12 if store == torch.float64 else 1e-5
    bad = int(lengths.nan_to_num(0.0).argmax())
    assert torch.equal(found[bad], x[bad])
    others = [i for i in range(batch) if i != bad]
    assert_near(found[others], plain[others], accuracy)
    assert_near(after, found, accuracy)
