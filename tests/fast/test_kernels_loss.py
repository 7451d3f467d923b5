"""The kernel of the cross-entropy, against PyTorch in double precision."""

import pytest
import torch
from torch.nn import functional

from gdeq import engine
from gdeq.fast.kernels import loss
from gdeq.fast.kernels.loss import cross_entropy, cross_entropy_plain
from norm_cases import check_twice, close
from pairs import pairs

SHAPES = [(5, 10), (300, 3), (1, 1), (7, 40)]  # 300: more than a program takes at once


@pytest.fixture(autouse=True)
def kernels_are_chosen(kernels_run):
    with engine.use("fast"):
        yield


def problem(shape, soft, device, dtype=torch.float32):
    logits = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    if soft:
        return logits, torch.rand(shape, device=device)  # that do not add up to 1, too
    return logits, torch.randint(0, shape[1], shape[:1], device=device)


def exact(logits, labels, smoothing):
    labels = labels.double() if labels.is_floating_point() else labels
    value = functional.cross_entropy(logits.double(), labels, label_smoothing=smoothing)
    return value, *torch.autograd.grad(3 * value, logits)


@pytest.mark.parametrize(
    ("shape", "soft", "smoothing", "dtype"),
    pairs(SHAPES, [False, True], [0.0, 0.1], [torch.float32, torch.bfloat16]),
)
def test_value_and_gradient(shape, soft, smoothing, dtype, device):
    logits, labels = problem(shape, soft, device, dtype)
    assert loss._takes(logits, labels)
    truth = exact(logits, labels, smoothing)
    for function in (cross_entropy, cross_entropy_plain):
        value = function(logits, labels, smoothing)
        (gradient,) = torch.autograd.grad(3 * value, logits)
        assert value.dtype == torch.float32
        assert gradient.dtype == dtype
        close(value, truth[0], 1e-5)
        close(gradient, truth[1], 1e-5 if dtype == torch.float32 else 1e-2)


def test_large_and_infinite_logits(device):
    logits = torch.tensor([[1e4, 0.0, -1e4], [-torch.inf, 2.0, 1.0]], device=device)
    labels = torch.tensor([0, 1], device=device)
    truth = functional.cross_entropy(logits.double(), labels)
    close(cross_entropy(logits, labels), truth, 1e-6)
    logits[0, 0] = torch.nan
    assert bool(cross_entropy(logits, labels).isnan())


def test_other_orders(device):
    logits, labels = problem((5, 4), True, device)
    turned = logits.detach().t().contiguous().t().requires_grad_()
    value = cross_entropy(turned, labels.t().contiguous().t())
    truth = exact(logits, labels, 0.0)
    close(value, truth[0], 1e-5)
    close(torch.autograd.grad(3 * value, turned)[0], truth[1], 1e-5)


def test_what_goes_to_pytorch(device):
    logits, labels = problem((5, 4), True, device)
    assert not loss._takes(logits.double(), labels)
    assert not loss._takes(logits, labels.clone().requires_grad_())
    assert not loss._takes(logits, labels[:, 0].int())
    assert not loss._takes(logits[:, :, None], labels[:, :, None])
    wide = cross_entropy(logits.double(), labels.double())
    assert wide.dtype == torch.float64
    with engine.use("reference"):
        assert not loss._takes(logits, labels)


def test_second_derivatives(device):
    logits, labels = problem((5, 4), False, device)
    both = cross_entropy, cross_entropy_plain
    check_twice([lambda f=f: f(logits, labels, 0.1) for f in both], [logits])
