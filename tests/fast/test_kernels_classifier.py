"""The kernel of the classifier, against PyTorch in double precision."""

import pytest
import torch
from torch.nn.functional import linear

from gdeq.fast.kernels import classifier
from gdeq.fast.kernels.classifier import classify, classify_plain
from norm_cases import check_twice, close

pytestmark = pytest.mark.usefixtures("kernels_run")

SHAPES = [  # batch, channels, height, width, classes
    (3, 40, 2, 3, 10),
    (130, 5, 1, 1, 3),  # more samples than a program takes at once
    (2, 700, 5, 4, 17),  # more channels, pixels and classes
    (1, 1, 1, 2, 1),
]


def problem(shape, device, dtype=torch.float32):
    batch, channels, height, width, classes = shape
    y = torch.randn(batch, channels, height, width, device=device).to(dtype)
    y = y.to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(classes, channels, device=device).requires_grad_()
    bias = torch.randn(classes, device=device).requires_grad_()
    return (y, weight, bias), torch.randn(batch, classes, device=device).to(dtype)


def exact(inputs, direction):
    y, weight, bias = inputs
    logits = linear(y.double().mean(dim=(2, 3)), weight.double(), bias.double())
    return [logits, *torch.autograd.grad(logits, inputs, direction.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype, device):
    inputs, direction = problem(shape, device, dtype)
    truth = exact(inputs, direction)
    assert classifier.takes(*inputs)
    for function in (classify, classify_plain):
        logits = function(*inputs)
        found = [logits, *torch.autograd.grad(logits, inputs, direction)]
        with torch.no_grad():
            assert torch.equal(function(*inputs), logits)
        for value, expected, like in zip(found, truth, (inputs[0], *inputs), strict=True):
            assert value.dtype == like.dtype
            close(value, expected, 1e-5 if value.dtype == torch.float32 else 1e-2)


def test_other_orders_and_slices(device):
    (y, weight, bias), direction = problem((2, 6, 3, 4, 5), device)
    truth = exact((y, weight, bias), direction)
    wide = torch.cat([y, y], dim=1).detach().to(memory_format=torch.channels_last)
    for same in (y.detach().contiguous(), wide[:, 6:]):
        close(classify(same, weight, bias), truth[0], 1e-5)


def test_what_goes_to_pytorch(device):
    inputs, direction = problem((2, 6, 3, 4, 5), device)
    assert not classifier.takes(*(t.double() for t in inputs))
    many = torch.zeros(65, 6, device=device)
    assert not classifier.takes(inputs[0], many, many[:, 0])
    wide = [t.double() for t in inputs]
    close(classify_plain(*wide), exact(inputs, direction)[0], 1e-12)


def test_second_derivatives(device):
    inputs, _ = problem((2, 6, 3, 4, 5), device)
    check_twice([lambda f=f: f(*inputs).sin() for f in (classify, classify_plain)], inputs)
