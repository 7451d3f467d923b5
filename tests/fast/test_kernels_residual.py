"""The end of a residual block in kernels, against PyTorch in double precision."""

from dataclasses import replace

import pytest
import torch

from gdeq.fast.kernels import available
from gdeq.fast.kernels.norms import block_end, block_end_for, empty_channels_last, residual
from gdeq.fast.kernels.norms.residual import pair_sizes, takes_pairs
from norm_cases import Launches, affine, block_end_plain, channels_last, check, close, exact_norm
from pairs import pairs

SHAPES = [  # batch, channels, groups, height, width
    (2, 40, 2, 5, 3),  # groups of 20: not a power of two
    (1, 6, 3, 4, 4),  # three groups of two
    (3, 8, 8, 1, 5),  # a group is a channel; one row
    (2, 5, 1, 3, 1),  # one group, one column
]
PARTS = [(True, True), (False, True), (True, False), (False, False)]  # dropout, injection


@pytest.fixture(autouse=True)
def kernels_run(device):
    if not available(device):
        pytest.skip("Triton does not run here")


@pytest.fixture
def launches(monkeypatch):
    names = "block_end", "block_end_backward", "pairs", "pairs_backward"
    return Launches(monkeypatch, residual, *names)


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


@pytest.mark.parametrize(
    ("shape", "parts", "each", "tile"),
    [
        *pairs(SHAPES, PARTS, [False, True], [1 << 15]),
        *((SHAPES[0], PARTS[i], bool(i), 1 << 7) for i in range(2)),  # by in chunks
    ],
)
def test_any_groups(shape, parts, each, tile, device, launches, monkeypatch):
    for name in ("forward", "backward"):
        tuning = replace(residual.TUNING[name], tile=tile)
        monkeypatch.setitem(residual.TUNING, name, tuning)
    maps, vectors, inputs, exact = problem(shape, parts, each, device)
    y = block_end(*maps, *vectors, shape[2])
    check(y, inputs, exact, torch.randn_like(maps[0]))
    assert launches == ["block_end", "block_end_backward", "block_end_backward"]
    with torch.no_grad():
        assert torch.equal(block_end(*maps, *vectors, shape[2]), y)


def test_by_pytorch_alone(device):
    """So that `block_end_plain` may stand for it in the other tests."""
    y, injection, z = (channels_last(2, 6, 3, 4, device=device).double() for _ in range(3))
    mask, vectors = torch.rand(2, 6, device=device).double(), [affine(6, device) for _ in range(2)]
    branch = y * mask[:, :, None, None] + injection
    exact = exact_norm((z + exact_norm(branch, 3, *vectors[0])).relu(), 3, *vectors[1])
    close(block_end_plain(y, mask, injection, z, *vectors[0], *vectors[1], 3), exact, 1e-6)


# batch, channels, groups, height, width; groups that a program takes
HELD = [((2, 32, 8, 4, 8), 4), ((1, 32, 2, 2, 4), 1), ((3, 8, 2, 1, 1), 2), ((2, 8, 2, 2, 4), 2)]


@pytest.mark.parametrize(
    ("sizes", "each", "parts", "beside"), pairs(HELD, [False, True], PARTS, [0, 8])
)
def test_pairs_of_bfloat16(sizes, each, parts, beside, device, launches):
    shape, block = sizes
    # A large mean, so that a variance from squares alone would be wrong.
    maps, vectors, inputs, exact = problem(shape, parts, each, device, torch.bfloat16, offset=8.0)
    assert pair_sizes("pairs", maps[0], shape[2])["BLOCK"] == block
    with torch.no_grad():  # into a part of something larger
        memory = (shape[0], shape[1] + beside, *shape[3:])
        whole = empty_channels_last(memory, torch.bfloat16, maps[0].device).fill_(7.0)
        out = whole[:, beside // 2 : beside // 2 + shape[1]]
        block_end(*maps, *vectors, shape[2], out=out)
        assert int((whole == 7).sum()) >= beside * whole[:, 0].numel()
    y = block_end(*maps, *vectors, shape[2])
    assert torch.equal(out, y)
    direction = channels_last(*y.shape, device=device, dtype=torch.bfloat16)
    # Where a ReLU opens or closes by rounding, a gradient differs by more than a rounding.
    found = check(y, inputs, exact, direction, 5e-2)
    assert launches == ["pairs", "pairs", "pairs_backward", "pairs_backward"]
    (alone,) = torch.autograd.grad(y, maps[0], direction)  # without that of z and the injection
    assert torch.equal(alone, found[0])


@pytest.mark.parametrize("parts", PARTS)
def test_pairs_are_as_exact_as_the_other_kernel(parts, device, launches, monkeypatch):
    shape = (2, 32, 8, 4, 8)
    maps, vectors, inputs, exact = problem(shape, parts, True, device, torch.bfloat16)
    direction = channels_last(2, 32, 4, 8, device=device, dtype=torch.bfloat16)
    truth = [exact, *torch.autograd.grad(exact, inputs, direction.double())]
    errors = []
    for taken in (True, False):
        if not taken:
            monkeypatch.setattr(residual, "takes_pairs", lambda *_: False)
        y = block_end(*maps, *vectors, 8)
        found = [y, *torch.autograd.grad(y, inputs, direction)]
        pairs = zip(found, truth, strict=True)
        errors.append([(a.double() - b).norm().item() for a, b in pairs])
    assert launches == ["pairs", "pairs_backward", "block_end", "block_end_backward"]
    for ours, theirs, value in zip(*errors, truth, strict=True):
        assert ours <= 1.1 * theirs + 1e-4 * (1 + value.norm().item())


def test_what_is_left_to_the_other_kernel(device):
    y = channels_last(1, 8, 2, 4, device=device, dtype=torch.bfloat16)

    def takes(maps, groups=2, kernel="pairs backward"):
        return takes_pairs(kernel, maps, groups)

    assert takes([y, None, y, y])
    assert not takes([y, None, y.float(), y])
    assert not takes([y.half(), y.half()])
    assert not takes([y, None, y, y.contiguous()])  # in another order
    assert not takes([y], 4)  # groups of two
    assert not takes([y[:, 1:7]], 1)  # six channels
    assert not takes([y[..., :3]])  # six pixels
    large = empty_channels_last((1, 16, 32, 32), torch.bfloat16, y.device)
    assert not takes([large], 1)
    assert takes([large], 1, "pairs")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.float16, 2e-3)]
)
def test_other_precisions(dtype, tolerance, device, launches):
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=dtype) for _ in range(2))
    vectors = [torch.randn(8, device=device).to(dtype) for _ in range(4)]
    wide = [t.double() for t in (y, z, *vectors)]
    exact = block_end_plain(wide[0], None, None, *wide[1:], 2)
    close(block_end(y, None, None, z, *vectors, 2), exact, tolerance)
    assert launches == ([] if dtype == torch.float64 else ["block_end"])


def test_a_pair_hides_no_nan(device):
    y, z = (channels_last(2, 8, 2, 4, device=device, dtype=torch.bfloat16) for _ in range(2))
    z[0, 1, 1, 2] = float("nan")
    vectors = [torch.ones(8, device=device) for _ in range(4)]
    lost = block_end(y, None, None, z, *vectors, 2).isnan()
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
    results = block_end_for(4, *arguments)
    alone = block_end(*arguments)
    assert len({result.data_ptr() for result in results}) == 1
    assert all(torch.equal(result, alone) for result in results)
    found = torch.autograd.grad([results[i] for i in read], inputs, directions, retain_graph=True)
    held = dtype == torch.bfloat16 and len(read) <= residual.MOST_READERS
    assert launches[-1] == ("pairs_backward" if held else "block_end_backward")
    total = sum(direction.float() for direction in directions).to(dtype)
    expected = torch.autograd.grad(alone, inputs, total, retain_graph=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 5e-2 if dtype == torch.bfloat16 else 1e-5)
    if dtype == torch.float32:
        twice = []
        for outs, given in (([results[i] for i in read], directions), ([alone], [total])):
            (first,) = torch.autograd.grad(outs, y, given, create_graph=True)
            twice.append(torch.autograd.grad(first.square().sum(), z)[0])
        close(*twice, 1e-4)


def test_several_readers_without_autograd(device):
    y, z = (channels_last(1, 8, 2, 2, device=device) for _ in range(2))
    arguments = (y, None, None, z, *affine(8, device), *affine(8, device), 2, 1e-5)
    results = block_end_for(3, *arguments)
    assert all(result is results[0] for result in results)
    assert torch.equal(results[0], block_end(*arguments))


def test_gradients_of_some_and_twice(device):
    y, z = (channels_last(2, 6, 3, 4, device=device) for _ in range(2))
    norm = affine(6, device)
    y.requires_grad_()
    direction = torch.randn_like(y)
    results = []
    for function in (block_end, block_end_plain):
        (first,) = torch.autograd.grad(
            function(y, None, None, z, *norm, *norm, 3), y, direction, create_graph=True
        )
        results.append([first, *torch.autograd.grad(first.square().sum(), y)])
        (alone,) = torch.autograd.grad(function(y, None, None, z, *norm, *norm, 3), y, direction)
        close(alone, first)
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-4)
    mask = torch.rand(2, 6, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(block_end(y, mask, None, z, *norm, *norm, 3).sin().sum(), mask)
    plain = block_end_plain(y, mask, None, z, *norm, *norm, 3).sin().sum()
    close(found, torch.autograd.grad(plain, mask)[0], 1e-4)
    with pytest.raises(ValueError, match="gradients"):
        block_end(y, None, None, z, *norm, *norm, 3, out=torch.empty_like(z))


def test_mixed_precisions(device):
    y = channels_last(2, 8, 3, 4, device=device).bfloat16()
    z = channels_last(2, 8, 3, 4, device=device)
    norm = affine(8, device)
    whole = empty_channels_last((2, 12, 3, 4), torch.float32, y.device).zero_()
    found = block_end(y, None, None, z, *norm, *norm, 4, out=whole[:, 4:])
    close(found, block_end_plain(y.double(), None, None, z, *norm, *norm, 4))
    assert block_end(y, None, None, z, *norm, *norm, 4).dtype == torch.bfloat16
    assert bool((whole[:, :4] == 0).all())
