"""The end of a residual block in kernels, against PyTorch in double precision."""

import pytest
import torch

from gdeq.fast.kernels.norms import block_end, empty_channels_last, residual
from gdeq.fast.kernels.norms.residual import sizes_of, takes
from norm_cases import (
    Launches,
    affine,
    block_end_plain,
    channels_last,
    check,
    check_twice,
    close,
    exact_norm,
)
from pairs import pairs

pytestmark = pytest.mark.usefixtures("kernels_run")

SHAPES = [  # batch, channels, groups, height, width
    (2, 40, 2, 5, 3),  # groups of 20: not a power of two
    (1, 6, 3, 4, 4),  # three groups of two
    (3, 8, 8, 1, 5),  # a group is a channel; one row
    (2, 5, 1, 3, 1),  # one group, one column
]
PARTS = [(True, True), (False, True), (True, False), (False, False)]  # dropout, injection


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch, residual, "block_end", "block_end_backward")


def end_of(*arguments, **options):
    """For one reader."""
    (found,) = block_end(*arguments, **options)
    return found


def problem(shape, parts, each, device, dtype=torch.float32, offset=0.0):
    """y, mask, injection, z and the vectors; what is to be differentiated; the exact result."""
    (batch, channels, groups, height, width), (dropout, injected) = shape, parts
    y, injection, z = (
        channels_last(batch, channels, height, width, device=device, offset=o, dtype=dtype)
        .detach()
        .requires_grad_()
        for o in (offset, 0.0, 0.0)
    )
    mask = (torch.rand(batch, channels, device=device) > 0.3) * 1.5 if dropout else None
    size = (batch, channels) if each else (channels,)
    vectors = [torch.randn(size, device=device).requires_grad_() for _ in range(4)]
    maps = [y, mask, injection if injected else None, z]
    inputs = [t for t in (y, maps[2], z, *vectors) if t is not None]
    wide = [None if t is None else t.double() for t in (*maps, *vectors)]
    return maps, vectors, inputs, block_end_plain(*wide, groups)


@pytest.mark.parametrize(("shape", "parts", "each"), pairs(SHAPES, PARTS, [False, True]))
def test_any_groups(shape, parts, each, device, launches):
    """Without a kernel for all of it, by those of the norms."""
    maps, vectors, inputs, exact = problem(shape, parts, each, device)
    y = end_of(*maps, *vectors, shape[2])
    check(y, inputs, exact, torch.randn_like(maps[0]))
    with torch.no_grad():
        assert torch.equal(end_of(*maps, *vectors, shape[2]), y)
    assert not launches


def test_by_pytorch_alone(device):
    """So that `block_end_plain` may stand for it in the other tests."""
    y, injection, z = (channels_last(2, 6, 3, 4, device=device).double() for _ in range(3))
    mask, vectors = torch.rand(2, 6, device=device).double(), [affine(6, device) for _ in range(2)]
    branch = y * mask[:, :, None, None] + injection
    exact = exact_norm((z + exact_norm(branch, 3, *vectors[0])).relu(), 3, *vectors[1])
    close(block_end_plain(y, mask, injection, z, *vectors[0], *vectors[1], 3), exact, 1e-6)


# batch, channels, groups, height, width; groups that a program takes
HELD = [((2, 32, 8, 4, 8), 4), ((1, 32, 2, 2, 4), 1), ((3, 8, 2, 1, 1), 2), ((2, 8, 2, 2, 4), 2)]


@pytest.mark.parametrize(("sizes", "each", "parts"), pairs(HELD, [False, True], PARTS))
def test_pairs_of_bfloat16(sizes, each, parts, device, launches):
    shape, block = sizes
    # A large mean, so that a variance from squares alone would be wrong.
    maps, vectors, inputs, exact = problem(shape, parts, each, device, torch.bfloat16, offset=8.0)
    assert sizes_of("forward", maps[0], shape[2])["BLOCK"] == block
    y = end_of(*maps, *vectors, shape[2])
    direction = channels_last(*y.shape, device=device, dtype=torch.bfloat16)
    # Where a ReLU opens or closes by rounding, a gradient differs by more than a rounding.
    found = check(y, inputs, exact, direction, 5e-2)
    (alone,) = torch.autograd.grad(y, maps[0], direction.float())  # no other, and in another dtype
    assert torch.equal(alone, found[0])
    assert launches == ["block_end", *["block_end_backward"] * 3]


@pytest.mark.parametrize("parts", PARTS)
def test_of_all_numbers_together_pairs_lose_a_rounding(parts, device):
    shape = (2, 32, 8, 4, 8)
    maps, vectors, inputs, exact = problem(shape, parts, True, device, torch.bfloat16)
    direction = channels_last(2, 32, 4, 8, device=device, dtype=torch.bfloat16)
    y = end_of(*maps, *vectors, 8)
    found = [y, *torch.autograd.grad(y, inputs, direction)]
    truth = [exact, *torch.autograd.grad(exact, inputs, direction.double())]
    for a, b in zip(found, truth, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.double().norm()


def test_what_kernels_take(device):
    y = channels_last(1, 8, 2, 4, device=device, dtype=torch.bfloat16)

    def taken(maps, groups=2, kernel="backward"):
        return takes(kernel, maps, groups)

    assert taken([y, None, y])
    assert not taken([y, None, y.float()])
    assert not taken([y.half(), y.half()])
    assert not taken([y, None, y.contiguous()])  # in another order
    assert not taken([y], 4)  # groups of two
    assert not taken([y[:, 1:7]], 1)  # six channels
    assert not taken([y[..., :3]])  # six pixels
    large = empty_channels_last((1, 16, 32, 32), torch.bfloat16, y.device)
    assert not taken([large], 1)
    assert taken([large], 1, "forward")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.float16, 2e-3)]
)
def test_other_precisions(dtype, tolerance, device):
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=dtype) for _ in range(2))
    vectors = [torch.randn(8, device=device).to(dtype) for _ in range(4)]
    wide = [t.double() for t in (y, z, *vectors)]
    exact = block_end_plain(wide[0], None, None, *wide[1:], 2)
    found = end_of(y, None, None, z, *vectors, 2)
    assert found.dtype == dtype
    close(found, exact, tolerance)


def test_a_pair_hides_no_nan(device):
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=torch.bfloat16) for _ in range(2))
    z[0, 1, 1, 2] = float("nan")
    vectors = [torch.ones(8, device=device) for _ in range(4)]
    lost = end_of(y, None, None, z, *vectors, 2).isnan()
    assert bool(lost[0, :4].all())  # its group
    assert int(lost.sum()) == 4 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read", [(1,), (0, 2), (0, 1, 2), (0, 1, 2, 3)], ids=str)
def test_several_readers(read, dtype, device, launches):
    """Gradients from all readers are added, from those alone that have one."""
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=dtype) for _ in range(2))
    y, z = y.requires_grad_(), z.requires_grad_()
    vectors = [torch.randn(8, device=device).requires_grad_() for _ in range(4)]
    directions = [channels_last(2, 8, 2, 4, device=device, dtype=dtype) for _ in read]
    arguments = (y, None, None, z, *vectors, 2, 1e-5)
    inputs = [y, z, *vectors]
    results = block_end(*arguments, readers=max(read) + 1)
    alone = end_of(*arguments)
    assert len({result.data_ptr() for result in results}) == 1
    assert all(torch.equal(result, alone) or max(read) == 3 for result in results)
    found = torch.autograd.grad([results[i] for i in read], inputs, directions, retain_graph=True)
    held = dtype == torch.bfloat16 and max(read) < residual.MOST_READERS
    assert launches.count("block_end_backward") == held
    total = sum(direction.float() for direction in directions).to(dtype)
    expected = torch.autograd.grad(alone, inputs, total, retain_graph=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 5e-2 if dtype == torch.bfloat16 else 1e-5)
    with torch.no_grad():
        results = block_end(*arguments, readers=3)
        assert all(result is results[0] for result in results)
        assert torch.equal(results[0], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_some_and_twice(dtype, device):
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=dtype) for _ in range(2))
    norm, near = affine(8, device), 1e-4 if dtype == torch.float32 else 5e-2
    y.requires_grad_()
    both = end_of, block_end_plain
    check_twice([lambda f=f: f(y, None, None, z, *norm, *norm, 2) for f in both], [y], near)
    mask = torch.rand(2, 8, device=device, requires_grad=True)  # of which kernels have no gradient
    found, plain = (
        torch.autograd.grad(function(y, mask, None, z, *norm, *norm, 2).sin().sum(), mask)[0]
        for function in (end_of, block_end_plain)
    )
    close(found, plain, near)
