"""A convolution whose weight's gradient is computed aside is `conv2d`: values, all derivatives."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import conv2d, pad

from gdeq.fast.mdeq import convolution as module
from gdeq.fast.mdeq import stem_and_head
from gdeq.fast.mdeq.convolution import Pairs, apart, convolution, pair, transposed
from gdeq.fast.mdeq.stem_and_head import image_convolved


def problem(device, dtype=torch.float64, kernel=3):
    x = torch.randn(2, 4, 6, 6, dtype=dtype, device=device, requires_grad=True)
    v = torch.randn(3, 4, kernel, kernel, dtype=dtype, device=device, requires_grad=True)
    return x, v


def side_of(device):
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "there", "back"),
    [
        *((1, 1, 0, False, False), (3, 1, 1, False, False), (3, 2, 1, False, False)),
        *((3, 1, 1, True, False), (3, 1, 1, False, True), (3, 1, 1, True, True)),
    ],
)
def test_values_and_derivatives_of_both_orders(device, kernel, stride, padding, there, back):
    """there, back: for two places at once, and so the gradient."""
    x, v = problem(device, kernel=kernel)
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    side = side_of(device)

    def ours(x, v):
        weight = 2 * v
        with torch.no_grad():
            pairs = Pairs(
                pair(weight) if there else None, pair(transposed(weight)) if back else None
            )
        return apart(x, weight, stride, padding, side, pairs)

    plain = conv2d(x, 2 * v, stride=stride, padding=padding)
    torch.testing.assert_close(ours(x, v), plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(ours(x, v).sin().sum(), (x, v))
    wanted = torch.autograd.grad(plain.sin().sum(), (x, v))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (x, v))
    assert torch.autograd.gradgradcheck(ours, (x, v))


@pytest.mark.parametrize("width", [6, 5], ids=["pairs", "no pairs"])
def test_without_autograd_two_places_at_once_are_the_same(width, device):
    x = torch.randn(2, 15, 4, width, device=device, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last)
    weight = torch.randn(3, 15, 3, 3, device=device, dtype=torch.float64)
    alone = convolution(x, weight, padding=1)
    found = convolution(x, weight, padding=1, pairs=Pairs(pair(weight)))
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    if width % 2 == 0:  # else the layout is cuDNN's choice
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_no_gradient_is_computed_that_nobody_asks_for(device, monkeypatch):
    x, v = problem(device)
    asked = []
    real = module._backward
    monkeypatch.setattr(module, "_backward", lambda *a: asked.append(a[-1]) or real(*a))
    y = apart(x, 2 * v, 1, 1, side_of(device))
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert asked == [0]
    y.sum().backward()
    assert sorted(asked[1:]) == [0, 1]
    asked.clear()
    v.grad = None
    apart(x.detach(), 2 * v, 1, 1, side_of(device)).square().sum().backward()
    assert asked == [1]
    wanted = torch.autograd.grad(conv2d(x.detach(), 2 * v, padding=1).square().sum(), v)[0]
    torch.testing.assert_close(v.grad, wanted)


def test_the_second_derivative_of_a_product_reaches_the_weight(device):
    """As the exact Jacobian penalty needs it: the gradient of ‖Jᵀu‖² in the weight."""
    x, v = problem(device)

    def penalty(y):
        product = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]
        return torch.autograd.grad(product.square().sum(), v)[0]

    found = penalty(apart(x, 2 * v, 1, 1, side_of(device)))
    wanted = penalty(conv2d(x, 2 * v, padding=1))
    assert wanted.abs().max() > 1
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_recorded_in_a_graph_with_chains_on_streams(gpu):
    x, _ = problem(gpu, torch.float32)
    weights = [torch.randn(4, 4, 3, 3, device=gpu, requires_grad=True) for _ in range(6)]

    def step(conv):
        y = x
        for weight in weights:
            y = conv(y, 0.3 * weight, stride=1, padding=1).tanh()
        return torch.autograd.grad(y.sum(), (x, *weights))

    wanted = step(conv2d)
    step(convolution)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step(convolution)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_leaf_is_left_to_pytorch(device):
    x, v = problem(device)
    assert "Conv" in type(convolution(x, v).grad_fn).__name__  # and not our own function
    assert not isinstance(convolution(x, v).grad_fn, torch.autograd.function.BackwardCFunction)


# ---- images


@pytest.fixture
def inputs(monkeypatch):
    """The channels of what is convolved."""
    seen = []

    def noted(x, *rest):
        seen.append(x.shape[1])
        return convolution(x, *rest)

    monkeypatch.setattr(stem_and_head, "convolution", noted)
    return seen


@pytest.mark.parametrize(("size", "channels"), [(3, 3), (5, 1), (1, 2)])
@pytest.mark.parametrize("form", ["contiguous", "channels last", "float32"])
@pytest.mark.parametrize("asked", [False, True])
def test_an_image_by_its_patches(size, channels, form, asked, inputs, device):
    """As the convolution of the image with zeros beside its channels."""
    x = torch.randn(2, channels, 6, 7, device=device).bfloat16()
    if form == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    given = (x.float() if form == "float32" else x).requires_grad_(asked)
    leaf = torch.randn(12, channels, size, size, device=device).bfloat16().float().requires_grad_()
    wide = pad(leaf, (0, 0, 0, 0, 0, 8 - channels)).bfloat16()
    wide = wide.contiguous(memory_format=torch.channels_last)
    y = image_convolved(given, wide, 1, size // 2)
    assert inputs == [8 if asked else 8 * size**2]
    exact = conv2d(x.double(), leaf.double(), padding=size // 2)
    assert (y.double() - exact).abs().max() <= 0.01 * exact.abs().max()
    leaves = [leaf, given] if asked else [leaf]
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    truth = x.detach().double().requires_grad_()
    exact = conv2d(truth, leaf.double(), padding=size // 2)
    for a, b in zip(found, torch.autograd.grad(exact.sum(), (leaf, truth)), strict=False):
        assert (a.double() - b.double()).abs().max() <= 0.01 * b.abs().max()


@pytest.mark.parametrize("why", ["stride", "dtype", "forward derivative"])
def test_other_images_see_no_patches(why, inputs, device):
    x = torch.randn(2, 3, 6, 6, device=device)
    weight = torch.randn(12, 8, 3, 3, device=device)
    weight = weight if why == "dtype" else weight.bfloat16()
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x, x) if why == "forward derivative" else x
        image_convolved(given, weight, 2 if why == "stride" else 1, 1)
    assert inputs == [8]
