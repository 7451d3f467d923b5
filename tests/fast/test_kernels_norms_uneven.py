"""Norms whose groups do not fill whole vectors, against PyTorch in double precision."""

import os
from functools import partial

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch.nn.functional import group_norm

from gdeq.fast.kernels import available
from gdeq.fast.kernels.norms import Source, fuse, norm_act, uneven, uneven_sum
from pairs import pairs

# channels, groups, zeros beside, size
ONE = [
    (14, 2, 2, (8, 16)),
    (28, 4, 4, (4, 8)),
    (56, 4, 0, (2, 4)),
    (112, 4, 0, (4, 4)),  # two programs a sample
    (24, 2, 0, (4, 4)),  # groups of 12, whole vectors only together
]
TWO = [(56, 4, (16, 8)), (112, 4, (4, 4)), (24, 2, (4, 8)), (24, 4, (8, 8))]
HALF = [torch.bfloat16, torch.float16]
AFFINE = ["none", "shared", "each"]


@pytest.fixture(autouse=True)
def kernels_run(device):
    if not available(device):
        pytest.skip("Triton does not run here")


@pytest.fixture
def launches(monkeypatch):
    """Of which kernels of `uneven` and `uneven_sum`."""
    found = []

    def counted(name, real, *args):
        found.append(name)
        return real(*args)

    for module, title in ((uneven, "launch"), (uneven_sum, "launch_sum")):
        for name in ("launch", "launch_backward"):
            told = title + name.removeprefix("launch")
            monkeypatch.setattr(module, name, partial(counted, told, getattr(module, name)))
    return found


def inside(channels, size, dtype, device, offset=0.0):
    """A slice from the ninth channel on of a map with 24 channels more."""
    whole = torch.randn(3, *size, channels + 24, device=device) + offset
    return whole.to(dtype).permute(0, 3, 1, 2)[:, 8 : 8 + channels]


def vectors(kind, channels, device):
    if kind == "none":
        return None, None
    shape = (3, channels) if kind == "each" else (channels,)
    return tuple(torch.randn(shape, device=device).requires_grad_() for _ in range(2))


def exact_norm(x, groups, weight, bias):
    y = group_norm(x.double().contiguous(), groups, None, None, 1e-5)
    if weight is not None:
        wide = [v.double().expand(3, -1)[..., None, None] for v in (weight, bias)]
        y = y * wide[0] + wide[1]
    return y


def close(found, expected, tolerance):
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * (1 + expected.abs().max()), f"off by {error:.1e}"


def where_clear(exact, direction):
    """The direction but for places where rounding may decide whether the ReLU passes."""
    clear = torch.where(exact.abs() > 0.05, direction, 0.0).to(direction.dtype)
    return clear.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind", "relu"), pairs(ONE, HALF, AFFINE, [False, True])
)
def test_one_norm(sizes, dtype, kind, relu, device, launches):
    channels, groups, room, size = sizes
    kind = "none" if room else kind
    x = inside(channels + room, size, dtype, device, offset=1.0)
    x[:, channels:] = 0
    x.requires_grad_()
    weight, bias = vectors(kind, channels, device)
    exact = exact_norm(x[:, :channels], groups, weight, bias)
    direction = torch.randn_like(x)
    direction[:, :channels] = where_clear(exact, direction[:, :channels])
    expected = torch.autograd.grad(
        exact.relu() if relu else exact,
        [x] if weight is None else [x, weight, bias],
        direction[:, :channels].double(),
    )
    y = norm_act(x, groups, weight, bias, relu=relu, room=room)
    found = torch.autograd.grad(y, [x] if weight is None else [x, weight, bias], direction)
    assert launches == ["launch", "launch_backward"]
    assert y.dtype == dtype
    for value, true in ((y, exact.relu() if relu else exact), (found[0], expected[0])):
        close(value[:, :channels], true[:, :channels], 2 * torch.finfo(dtype).eps)
        assert bool((value[:, channels:] == 0).all())
    for value, true in zip(found[1:], expected[1:], strict=True):
        close(value, true.double(), 1e-4)


@pytest.mark.parametrize(
    ("sizes", "dtype", "kinds", "relu"),
    pairs(TWO, HALF, [("each", "each"), ("shared", "shared"), ("each", "none")], [False, True]),
)
@pytest.mark.parametrize("chunk", [uneven_sum.CHUNKS[0], 256], ids=["large", "small"])
def test_the_sum_of_two(sizes, dtype, kinds, relu, chunk, device, launches, monkeypatch):
    monkeypatch.setattr(uneven_sum, "CHUNKS", (chunk, chunk))
    channels, groups, size = sizes
    raws = [inside(channels, size, dtype, device, 3.0).requires_grad_() for _ in range(2)]
    sources = [
        Source(raw, *vectors(kind, channels, device)) for raw, kind in zip(raws, kinds, strict=True)
    ]
    exact = sum(exact_norm(s.raw, groups, s.weight, s.bias) for s in sources)
    direction = where_clear(exact, torch.randn_like(raws[0]))
    inputs = [t for s in sources for t in (s.raw, s.weight, s.bias) if t is not None]
    target = exact.relu() if relu else exact
    expected = torch.autograd.grad(target, inputs, direction.double())
    y = fuse(None, sources, groups, relu=relu)
    found = torch.autograd.grad(y, inputs, direction)
    assert launches == ["launch_sum", "launch_sum_backward"]
    close(y, target, 2 * torch.finfo(dtype).eps)
    for value, true in zip(found, expected, strict=True):
        half = value.dtype == dtype
        close(value, true.double(), 2 * torch.finfo(dtype).eps if half else 1e-4)


def test_a_first_chunk_unlike_the_others(device, launches, monkeypatch):
    """The pivot is its mean: far from that of all, but not so far that digits are lost."""
    monkeypatch.setattr(uneven_sum, "CHUNKS", (512, 512))
    raws = [inside(56, (16, 16), torch.float16, device) for _ in range(2)]
    for raw in raws:
        raw.add_(1000)[:, :, 0] -= 2000
    y = fuse(None, [Source(raw, None, None) for raw in raws], 4, relu=False)
    exact = sum(exact_norm(raw, 4, None, None) for raw in raws)
    assert launches == ["launch_sum"]
    close(y, exact, 1e-3)


def test_a_large_mean(device, launches):
    raws = [inside(56, (8, 8), torch.float16, device, offset=100.0) for _ in range(2)]
    y = fuse(None, [Source(raw, None, None) for raw in raws], 4, relu=False)
    close(y, sum(exact_norm(raw, 4, None, None) for raw in raws), 2e-3)
    close(norm_act(raws[0], 4, None, None), exact_norm(raws[0], 4, None, None), 2e-3)
    assert launches == ["launch_sum", "launch"]


def test_what_is_not_finite_stays_in_its_group(device, launches):
    x = inside(56, (8, 8), torch.bfloat16, device)
    x[1, 20, 3, 3] = torch.nan
    other = inside(56, (8, 8), torch.bfloat16, device)
    one = norm_act(x, 4, None, None, relu=True)
    two = fuse(None, [Source(other, None, None), Source(x, None, None)], 4)
    assert launches == ["launch", "launch_sum"]
    for y in (one, two):
        lost = y.isnan()
        assert bool(lost[1, 14:28].all())
        assert int(lost.sum()) == 14 * 64


def test_what_is_left_to_the_others(device):
    def takes(x, groups, room=0):
        return uneven.takes([x], groups, room)

    def made(channels, size=(8, 8), dtype=torch.bfloat16):
        return inside(channels, size, dtype, device)

    assert takes(made(56), 4)
    assert takes(made(16), 2, 2)
    assert not takes(made(16), 2)  # groups of 8
    assert not takes(made(56, dtype=torch.float32), 4)
    assert not takes(made(56, size=(8, 6)), 4)
    assert not takes(made(56, size=(1, 1)), 4)  # less than a warp
    assert not takes(made(14), 2)  # never whole vectors
    assert not takes(made(64)[:, 4:60], 4)  # begins within one
    assert not takes(made(36), 3)  # 12 channels a group: two fill vectors, and three are no pairs
    assert not takes(made(120), 16, 8)  # zeros beside the last of two programs
    shifted = torch.empty(3 * 4000, dtype=torch.bfloat16, device=device)
    assert not takes(shifted.as_strided((3, 56, 8, 8), (64 * 56 + 4, 1, 448, 56)), 4)
    assert not uneven.takes([made(56), made(56, size=(16, 16))], 4)
    assert not takes(made(57)[:, :56], 4)  # so do its pixels
    assert not uneven.takes([made(56), made(64)[:, 4:60]], 4)
    assert not takes(made(480), 4)  # 120 channels a group: whole vectors
    assert not takes(made(240), 2)
    assert not takes(made(200), 2)  # more columns than are held
    assert uneven.takes_one([made(56)], 4, 0)
    assert not uneven.takes_one([made(56, size=(32, 32))], 4, 0)
    assert uneven_sum.takes([made(56, size=(32, 32))], 4)
    assert not uneven_sum.takes([made(56, size=(64, 64))], 4)  # too many chunks


def test_other_resolutions_and_an_own_stream_go_to_the_others(device, launches):
    raw = inside(56, (8, 8), torch.bfloat16, device)
    low, own = (
        inside(56, (4, 4), torch.bfloat16, device),
        inside(56, (8, 8), torch.bfloat16, device),
    )
    raw.requires_grad_()
    for first, sources in (
        (None, [Source(raw, None, None), Source(low, None, None, 1)]),
        (own, [Source(raw, None, None), Source(raw, None, None)]),
    ):
        y = fuse(first, sources, 4)
        torch.autograd.grad(y, raw, torch.ones_like(y))
    assert launches == []


def test_a_mean_that_is_many_deviations(device, launches):
    """Without the pivot the digits of the variance would be gone."""
    raws = [2 * inside(56, (16, 16), torch.float32, device) + 1000 for _ in range(2)]
    raws = [raw.half() for raw in raws]
    y = fuse(None, [Source(raw, None, None) for raw in raws], 4, relu=False)
    exact = sum(exact_norm(raw, 4, None, None) for raw in raws)
    assert launches == ["launch_sum"]
    close(y, exact, 2e-3)


@pytest.mark.parametrize("value", [100.0, 3e4])
def test_a_group_of_one_number_is_zeros(value, device, launches):
    x = torch.full((3, 8, 8, 56), value, device=device).half().permute(0, 3, 1, 2)
    assert bool((norm_act(x, 4, None, None) == 0).all())
    y = fuse(None, [Source(x, None, None), Source(x, None, None)], 4, relu=False)
    assert bool((y == 0).all())
    assert launches == ["launch", "launch_sum"]
