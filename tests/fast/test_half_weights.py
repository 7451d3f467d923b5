"""Copies of weights for autocast: made once a solve, the same bits, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from gdeq import DEQ, GDEQ, Broyden

pytest.importorskip("triton")
from gdeq.fast import half_weights
from sweeps import DEVICE, use

BF16 = torch.bfloat16


class Twice(nn.Linear):
    """A layer of someone else's."""

    def forward(self, x):
        return 2 * super().forward(x)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.own = nn.Linear(8, 8), Twice(8, 8, bias=False)
        self.conv, self.norm = nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.LayerNorm(8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.one.weight
        self.dtypes = []

    def forward(self, z, x):
        self.dtypes.append(self.one.weight.dtype)
        y = torch.tanh(self.one(z)) + self.again(z) + self.own(z)
        return self.norm(x + 0.3 * self.conv(y.unsqueeze(1)).squeeze(1))


def trained(cell, x):
    """z and the gradients of one step."""
    deq = DEQ(cell, Broyden(6, tol=0.0), GDEQ())
    with use("fast"), torch.autocast(DEVICE.type, BF16):
        z = deq(x)
    z.square().sum().backward()
    return [z.detach(), *(p.grad for p in cell.parameters())]


def test_a_step_has_the_same_bits_and_the_cell_is_as_before(monkeypatch):
    x = torch.randn(3, 8, device=DEVICE)
    torch.manual_seed(1)
    cell = Cell().to(DEVICE)
    made = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: made.append(len(a[0])) or copy(*a))
    found = trained(cell, x)
    assert made == [5]  # once: two linear layers with biases and a convolution
    assert set(cell.dtypes) == {torch.float32}  # who reads a parameter sees the parameter
    assert not any("forward" in vars(m) or "half_weights" in vars(m) for m in cell.modules())
    cell.zero_grad()
    monkeypatch.setattr(half_weights, "FORWARD", {})
    expected = trained(cell, x)
    assert made == [5]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_autocast_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    with use("fast"):
        DEQ(Cell().to(DEVICE), Broyden(2, tol=0.0))(torch.randn(3, 8, device=DEVICE))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def test_a_compiled_cell_is_compiled_once_for_all_solves():
    cell, counter = Compiled().to(DEVICE), CompileCounter()
    cell.compile(backend=counter)
    deq = DEQ(cell, Broyden(3, tol=0.0))
    seen = []
    for _ in range(3):
        with use("fast"), torch.autocast(DEVICE.type, BF16):
            deq(torch.randn(3, 8, device=DEVICE)).sum().backward()
        seen.append(counter.frame_count)
    assert seen == [2, 2, 2]  # with autograd and without


def test_weights_that_a_hook_makes_are_left_alone():
    with pytest.warns(FutureWarning):
        made = nn.utils.weight_norm(nn.Linear(4, 4))
    changed, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    changed.register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(0.5))
    found = half_weights.HalfWeights(nn.ModuleList([made, changed, plain]), torch.bfloat16).layers
    assert [layer for layer, _ in found] == [plain]


def test_a_part_in_full_precision_stays_so():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad(), half_weights.HalfWeights(layer, torch.bfloat16).used():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
