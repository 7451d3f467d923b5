"""A convolution of constant maps against PyTorch's; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv2d

pytest.importorskip("triton")

from gdeq.fast.kernels import constant_maps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("outputs", "channels", "height", "width"),
    [(4, 12, 5, 3), (6, 700, 2, 4), (3, 8, 1, 1), (130, 2, 1, 1)],
)
def test_as_a_convolution(outputs, channels, height, width, dtype):
    torch.manual_seed(0)
    weight = torch.randn(outputs, channels, 3, 3).to(DEVICE, dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(channels, device=DEVICE).bfloat16().float()  # the interpreter rounds down
    assert constant_maps.takes(weight)
    found = constant_maps.convolved(weight, bias, height, width)
    maps = bias.relu().to(dtype).double().view(1, -1, 1, 1).expand(1, channels, height, width)
    expected = conv2d(maps, weight.double(), padding=1)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert found.permute(0, 2, 3, 1).is_contiguous()
    # (As above.)
    limit = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-5 * expected.abs().max()
    assert ((found.double() - expected).abs() <= limit).all()


def test_a_norm_without_a_bias_and_one_that_is_lost():
    weight = torch.ones(2, 4, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    assert not constant_maps.convolved(weight, None, 2, 2).any()
    bias = torch.tensor([1.0, torch.nan, -1.0, 2.0], device=DEVICE)
    assert constant_maps.convolved(weight, bias, 2, 2).isnan().all()


def test_other_kernels_and_orders_are_left_to_pytorch():
    assert not constant_maps.takes(torch.ones(2, 4, 1, 1))
    assert not constant_maps.takes(torch.ones(2, 4, 3, 3))
    assert not constant_maps.takes(torch.ones(2, 3, 3, 4, dtype=torch.float64).permute(0, 3, 1, 2))
