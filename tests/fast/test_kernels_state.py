"""Joining and splitting a state in one launch, against `gdeq.state.StateSpace`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdeq
from gdeq.state import StateSpace

pytest.importorskip("triton")
from gdeq.fast.kernels import state as kernels
from gdeq.fast.layout import FastSpace
from sweeps import DEVICE, use

GRADIENTS = [gdeq.GDEQ(), gdeq.JFB(), gdeq.Implicit(gdeq.Broyden(5, 1e-9)), gdeq.NPG()]


def image(batch, channels, edge, dtype, last=True) -> Tensor:
    x = torch.randn(batch, channels, edge, edge, dtype=torch.float64, device=DEVICE).to(dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def states(dtype):
    return {
        "aligned": (image(3, 16, 4, dtype), image(3, 32, 2, dtype)),
        "odd": [image(2, 3, 5, dtype), {"v": image(2, 7, 1, dtype).flatten(1)}],
        "longer than a chunk": (image(2, 64, 6, dtype), image(2, 129, 5, dtype, last=False)),
        "one number": (image(1, 1, 1, dtype, last=False), image(1, 2, 2, dtype)),
        "eight": tuple(image(2, i + 2, 2, dtype, last=i % 2 == 0) for i in range(8)),
    }


@pytest.fixture
def launches(monkeypatch):
    """Which way each launch of the kernel went."""
    found, launch = [], kernels._launch

    def counted(rows, parts, joins, factor=None):
        found.append("join" if joins else "split")
        launch(rows, parts, joins, factor)

    monkeypatch.setattr(kernels, "_launch", counted)
    return found


def leaves_of(state) -> list[Tensor]:
    return StateSpace(state).leaves(state, "state", cast=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", states(torch.float32))
def test_values_are_those_of_the_reference(name, dtype, launches):
    z = states(dtype)[name]
    plain, space, tensors = StateSpace(z), FastSpace(z), leaves_of(z)
    factor = torch.rand(space.batch, dtype=space.dtype, device=DEVICE) + 0.5
    rows = plain.pack(z)
    flat = torch.randn_like(rows) * 1e3
    # The interpreter cuts off what bfloat16 cannot hold.
    slack = 2**-7 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    assert torch.equal(space.pack(z), rows)
    with torch.no_grad():
        assert torch.equal(space.join(tensors, factor=factor), rows * factor.unsqueeze(1))
        for given in (None, factor):
            parts, found = (s.split(flat, s.dtypes, given) for s in (plain, space))
            for a, b, like in zip(found, parts, tensors, strict=True):
                torch.testing.assert_close(a, b, rtol=slack, atol=0.0)
                assert a.dtype == dtype
                assert a.stride() == like.stride()
            assert len({a.untyped_storage().data_ptr() for a in found}) == 1
        size = space.norms(tensors)
    assert launches == ["join", "join", "split", "split"]
    assert (size is None) == (dtype == torch.float64)
    if size is not None:
        exact = torch.linalg.vector_norm(rows.double(), dim=1).to(space.dtype)
        torch.testing.assert_close(size, exact, rtol=1e-6, atol=0)


def test_tensors_that_are_not_dense_are_joined(launches):
    z = states(torch.float32)["aligned"]
    strange = (z[0].flip(2).transpose(2, 3), z[1].contiguous())
    assert torch.equal(FastSpace(z).pack(strange), StateSpace(z).pack(strange))
    assert launches == ["join"]


def test_parts_of_one_memory_in_another_order_are_joined():
    numbers = torch.arange(10.0, device=DEVICE)
    for z in ((numbers[6:].view(2, 2), numbers[:6].view(2, 3)), (numbers[:4].view(2, 2),) * 2):
        assert torch.equal(FastSpace(z).as_parts(list(z)), torch.cat([p.flatten() for p in z]))


@pytest.mark.parametrize(
    "z",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), torch.ones(2, 3).double()),
        (torch.ones(2, 3), torch.ones(2, 0)),
        (torch.ones(0, 3), torch.ones(0, 2)),
        tuple(torch.ones(2, 3) for _ in range(9)),
    ],
    ids=["single", "mixed", "empty part", "no samples", "nine parts"],
)
def test_what_the_kernels_do_not_take_is_plain(z, launches):
    space = FastSpace(z)
    again = leaves_of(space.unpack(space.pack(z)))
    assert [a.tolist() for a in again] == [b.tolist() for b in leaves_of(z)]
    assert not launches


def test_first_and_second_derivatives(launches):
    z = (image(2, 1, 2, torch.float64), image(2, 2, 1, torch.float64).flatten(1))
    space = FastSpace(z)
    inputs = [leaf.clone().requires_grad_() for leaf in leaves_of(z)]
    rows = torch.randn(space.batch, space.size, dtype=torch.float64, device=DEVICE)
    rows.requires_grad_()

    def joined(*parts: Tensor) -> Tensor:
        return space.join(parts) ** 3

    def taken_apart(flat: Tensor) -> list[Tensor]:
        return [part**3 for part in space.split(flat, space.dtypes)]

    torch.autograd.gradcheck(joined, inputs)
    torch.autograd.gradgradcheck(joined, inputs)
    torch.autograd.gradcheck(taken_apart, rows)
    torch.autograd.gradgradcheck(taken_apart, rows)
    assert launches


def test_a_part_without_a_gradient_counts_as_zero():
    z = states(torch.float64)["aligned"]
    space = FastSpace(z)
    flat = torch.randn(space.batch, space.size, dtype=torch.float64, device=DEVICE)
    flat.requires_grad_()
    (gradient,) = torch.autograd.grad(space.unpack(flat)[1].sum(), flat)
    first = z[0][0].numel()
    assert not gradient[:, :first].any()
    assert bool((gradient[:, first:] == 1).all())


# ---- in a solve


class Cell(torch.nn.Module):
    """A contractive map on two images, each of which sees the other."""

    def __init__(self, dtype=torch.float64) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.3, dtype=dtype, device=DEVICE))
        self.shift = torch.nn.Parameter(torch.tensor(0.7, dtype=dtype, device=DEVICE))

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = x.new_zeros(len(x), 2 * x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
        return torch.zeros_like(x), small.to(memory_format=torch.channels_last)

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        mean = z[1].mean((1, 2, 3), keepdim=True)
        return (
            torch.cos(self.scale * z[0] + mean) + x,
            torch.sin(self.scale * z[1] + self.shift + z[0].mean((1, 2, 3), keepdim=True)),
        )


def train(gradient, dtype=torch.float64, work=lambda z: z):
    torch.manual_seed(1)
    cell = Cell(dtype)
    deq = gdeq.DEQ(cell, gdeq.Broyden(4, 0.0), gradient)
    z = work(deq(image(2, 16, 4, dtype)))
    ((z[0] ** 2).sum() + (z[1] ** 3).sum()).backward()
    return [p.grad for p in cell.parameters()], z, deq.solution


@pytest.mark.parametrize(
    ("form", "gradient"),
    [*(("fast", g) for g in GRADIENTS), ("reference", gdeq.GDEQ()), ("reference", gdeq.JFB())],
    ids=repr,
)
def test_parts_of_the_output_may_be_changed_in_place_one_without_the_other(form, gradient):
    def in_place(z):
        kept = z[0] * z[0]  # needs z[0] as it is in the backward pass
        z[1].mul_(2).relu_()
        return kept, z[1]

    def out_of_place(z):
        return z[0] * z[0], torch.relu(z[1] * 2)

    with use(form):
        expected, _, untouched = train(gradient, work=out_of_place)
        found, z, solution = train(gradient, work=in_place)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(solution.z, untouched.z, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad
    assert not torch.equal(z[1], solution.z[1])


def test_a_step_moves_the_state_no_more_than_it_must(launches):
    with use("fast"):
        train(gdeq.GDEQ(), torch.bfloat16)
    # v of the loss; w for f.  z0 is taken as it lies, and what f is given is the record too.
    assert launches == ["join", "split"]


@pytest.mark.parametrize("form", ["fast", "reference"])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
def test_an_f_that_changes_a_part_of_z_in_place_is_told(form, gradient):
    z0 = states(torch.float64)["aligned"]
    weight = torch.ones((), device=DEVICE, requires_grad=True)
    with use(form), pytest.raises(gdeq.StateError, match="changed its argument z in place"):
        gdeq.fixed_point(lambda z: (z[0] * weight, z[1].relu_()), z0, gradient=gradient)
