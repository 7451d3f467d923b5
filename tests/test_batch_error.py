"""The record's figure for the batch: the larger of error and residual, weighted by ‖w‖."""

import pytest
import torch

import gdeq
from gdeq.fast.kernels import choice
from gdeq.solution import BackwardRecord

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRADIENTS = {
    "GDEQ-1": gdeq.GDEQ(refine=1),
    "GDEQ-3": gdeq.GDEQ(refine=3),
    "JFB-2": gdeq.JFB(refine=2),
    "tolerance": gdeq.GDEQ(tolerance=1e-2, max_refine=3),
    "NPG": gdeq.NPG(),
    "Implicit": gdeq.Implicit(),
    "measured": gdeq.Measured(gdeq.JFB()),
    "measured-GDEQ": gdeq.Measured(gdeq.GDEQ()),
}


def record_of(gradient, form="plain", dtype=F64, scales=(1.0, 1e-3, 10.0, 1.0)):
    """A backward pass whose samples have very different losses, and its w.

    Because x is added after all, its gradient is w.
    """
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=F64)
    matrix = (0.8 * matrix / torch.linalg.matrix_norm(matrix, 2)).to(DEVICE, dtype)
    x = torch.randn(4, 12, dtype=dtype).to(DEVICE).requires_grad_()
    v = torch.randn(4, 12, dtype=dtype) * torch.tensor(scales, dtype=dtype).unsqueeze(1)
    v = v.to(DEVICE)
    with choice.use(form):
        solution = gdeq.fixed_point(
            lambda z: torch.tanh(z) @ matrix.T + x,
            torch.zeros_like(x),
            gdeq.Broyden(6, 0.0),
            gradient,
        )
        solution.z.backward(v)
    return solution.backward, x.grad


@pytest.mark.parametrize("form", ["off", "plain", "triton"])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_the_length_of_w(gradient, form):
    record, w = record_of(gradient, form)
    torch.testing.assert_close(record.length, w.norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_the_length_of_a_w_whose_square_is_out_of_range(gradient, scale):
    record, w = record_of(gradient, dtype=torch.float32, scales=(scale, 1.0, scale, 0.0))
    assert record.length[3] == 0
    torch.testing.assert_close(record.length, w.double().norm(dim=1).float(), rtol=1e-5, atol=0)
    assert torch.isfinite(record.batch_error)


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_the_figure_of_the_batch_by_hand(gradient):
    record, w = record_of(gradient)
    total = weights = largest = 0.0
    for i in range(4):
        known = [x[i].item() for x in (record.error, record.residual) if x is not None]
        weight = w[i].norm().item()
        total, weights = total + weight * max(known), weights + weight
        largest = max(largest, *known)
    assert record.batch_error.item() == pytest.approx(total / weights)
    assert f"{total / weights:.1e} (at most {largest:.1e})" in str(record)


@pytest.mark.parametrize("gradient", [gdeq.JFB(), gdeq.GDEQ()], ids=str)
def test_nothing_is_known_of_a_w_that_needs_no_product(gradient):
    record, _ = record_of(gradient)
    assert record.sample_error is None
    assert record.batch_error is None
    assert record.length is None  # nobody asks for it: no pass over w
    assert "not measured" in str(record)


def made(error, residual, length):
    given = (None if x is None else torch.tensor(x) for x in (error, residual, length))
    return BackwardRecord(**dict(zip(("error", "residual", "length"), given, strict=True)))


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("error", "residual", "length", "expected"),
    [
        ([0.1, 0.4], [0.3, 0.2], [1.0, 3.0], 0.375),
        ([0.1, 0.4], None, [1.0, 3.0], 0.325),
        (None, [0.3, 0.2], [1.0, 3.0], 0.225),
        ([0.1, 0.4], [0.3, 0.2], None, 0.35),
        ([INFINITY, 0.4], [0.9, 0.2], [1.0, 3.0], 0.525),  # the residual says what is known
        ([INFINITY, 0.4], None, [1.0, 3.0], INFINITY),
        ([INFINITY, 0.4], None, [0.0, 3.0], 0.4),  # no share in the gradient
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.5, 0.5], None, [3e38, 3e38], 0.5),
        ([], [], [], 0.0),
    ],
)
def test_figures_of_a_batch(error, residual, length, expected):
    assert made(error, residual, length).batch_error.item() == pytest.approx(expected)


def test_a_few_samples_that_make_up_the_gradient_are_seen():
    """Two of nine have long w and a large error: the median says that all is well."""
    record = made([0.2] * 7 + [0.9] * 2, [0.1] * 7 + [40.0, 60.0], [1.0] * 7 + [300.0, 200.0])
    record.done = True
    assert record.residual.median() < 0.2
    assert record.batch_error > 1
    assert "error about 4.7e+01 (at most 6.0e+01)" in str(record)
