"""A convolution whose weight's gradient is computed aside is `conv2d`: values, all derivatives."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import conv2d, pad

from gdeq.models import convolution as module
from gdeq.models import layers
from gdeq.models.convolution import Pairs, apart, convolution, pair, transposed


def problem(device, dtype=torch.float64, kernel=3):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6, dtype=dtype, device=device, requires_grad=True)
    v = torch.randn(3, 4, kernel, kernel, dtype=dtype, device=device, requires_grad=True)
    return x, v


def side_of(device):
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 1, 0), (3, 1, 1), (3, 2, 1)])
def test_values_and_derivatives_of_both_orders(device, kernel, stride, padding):
    x, v = problem(device, kernel=kernel)
    side = side_of(device)

    def ours(x, v):
        return apart(x, 2 * v, stride, padding, side)

    plain = conv2d(x, 2 * v, stride=stride, padding=padding)
    assert torch.equal(ours(x, v), plain)
    found = torch.autograd.grad(ours(x, v).sin().sum(), (x, v))
    wanted = torch.autograd.grad(plain.sin().sum(), (x, v))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (x, v))
    assert torch.autograd.gradgradcheck(ours, (x, v))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_two_places_at_once_are_the_same(device, there, back):
    x, v = problem(device)
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    side = side_of(device)

    def ours(x, v):
        weight = 2 * v
        with torch.no_grad():
            pairs = Pairs(
                pair(weight) if there else None, pair(transposed(weight)) if back else None
            )
        return apart(x, weight, 1, 1, side, pairs)

    plain = conv2d(x, 2 * v, padding=1)
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


def test_no_weight_gradient_is_computed_for_the_input_alone(device, monkeypatch):
    x, v = problem(device)
    asked = []
    real = module._backward

    def watched(*arguments):
        asked.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(module, "_backward", watched)
    y = apart(x, 2 * v, 1, 1, side_of(device))
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert asked == [0]
    y.sum().backward()
    assert sorted(asked[1:]) == [0, 1]


def test_an_input_without_gradient_gets_none(device):
    x, v = problem(device)
    y = apart(x.detach(), 2 * v, 1, 1, side_of(device))
    y.square().sum().backward()
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_recorded_in_a_graph_with_chains_on_streams():
    device = torch.device("cuda")
    x, _ = problem(device, torch.float32)
    weights = [torch.randn(4, 4, 3, 3, device=device, requires_grad=True) for _ in range(6)]

    def step(conv):
        y = x
        for weight in weights:
            y = conv(y, 0.3 * weight, 1, 1).tanh()
        return torch.autograd.grad(y.sum(), (x, *weights))

    wanted = step(conv2d_like)
    step(convolution)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step(convolution)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def conv2d_like(x, weight, stride, padding):
    return conv2d(x, weight, stride=stride, padding=padding)


def test_a_leaf_is_left_to_pytorch(device):
    x, v = problem(device)
    assert "Conv" in type(convolution(x, v).grad_fn).__name__  # and not our own function
    assert not isinstance(convolution(x, v).grad_fn, torch.autograd.function.BackwardCFunction)


@pytest.mark.parametrize(("size", "channels"), [(3, 3), (5, 1), (1, 2)])
def test_an_image_by_its_patches(size, channels, monkeypatch):
    """As the convolution of the image with zeros beside its channels."""
    conv = layers.conv(channels, 12, size)
    x = torch.randn(2, channels, 6, 7).bfloat16()
    for made in (x, x.contiguous(memory_format=torch.channels_last), x.float()):
        results = []
        for enabled in (False, True):
            monkeypatch.setattr(layers, "image_patches", enabled)
            leaf = conv.weight.detach().bfloat16().float().requires_grad_()
            wide = pad(leaf, (0, 0, 0, 0, 0, 8 - channels)).bfloat16()
            conv.ready = wide.contiguous(memory_format=torch.channels_last)
            seen = []

            def noted(*args, seen=seen):
                seen.append(args[0].shape[1])
                return convolution(*args)

            monkeypatch.setattr(layers, "convolution", noted)
            y = conv(made)
            assert seen == [8 * size**2 if enabled else 8]
            results.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
        exact = conv2d(x.double(), leaf.double(), padding=size // 2)
        for value in results[1][:1]:
            assert (value.double() - exact).abs().max() <= 0.01 * exact.abs().max()
        (expected,) = torch.autograd.grad(exact.sum(), leaf)
        for _, gradient in results:
            assert (gradient - expected).abs().max() <= 0.01 * expected.abs().max()


def test_an_image_whose_gradient_is_asked_for():
    conv = layers.conv(3, 12, 3)
    conv.ready = pad(conv.weight, (0, 0, 0, 0, 0, 5)).bfloat16()
    x = torch.randn(2, 3, 6, 6).requires_grad_()
    (found,) = torch.autograd.grad(conv(x).float().sum(), x)
    (expected,) = torch.autograd.grad(conv2d(x, conv.weight, padding=1).sum(), x)
    assert (found - expected).abs().max() <= 0.01 * expected.abs().max() + 1e-3


@pytest.mark.parametrize("settings", [{"stride": 2}, {"padding": (1, 0)}, {"dilation": 2}])
def test_other_convolutions_of_an_image_see_no_patches(settings):
    conv = layers.Conv2d(3, 12, 3, **({"padding": 1} | settings), bias=False)
    conv.ready = pad(conv.weight, (0, 0, 0, 0, 0, 5)).bfloat16()
    assert not conv._sees_patches(torch.randn(2, 3, 6, 6))


def test_forward_derivatives_of_an_image_see_no_patches():
    conv = layers.conv(3, 12, 3)
    conv.ready = pad(conv.weight, (0, 0, 0, 0, 0, 5)).bfloat16()
    x = torch.randn(2, 3, 6, 6)
    assert conv._sees_patches(x)
    with forward_ad.dual_level():
        assert not conv._sees_patches(forward_ad.make_dual(x, x))
