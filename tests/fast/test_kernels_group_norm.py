"""Group normalisation in kernels, and gradients of slices, against PyTorch in double precision."""

from dataclasses import replace

import pytest
import torch

from gdeq.fast.kernels.norms import (
    Source,
    block_end,
    empty_channels_last,
    fuse,
    group_norm,
    norm_act,
    norm_act_plain,
    per_sample,
    slices,
    tensors,
)
from gdeq.fast.kernels.norms.group_norm import NormAct, groups_in_sectors, in_fives
from gdeq.fast.kernels.norms.tensors import aligned_tile, packed_tile
from norm_cases import (
    HALF,
    Launches,
    affine,
    channels_last,
    check,
    check_twice,
    clear,
    close,
    exact_norm,
    fuse_plain,
    rounding,
)
from pairs import pairs

pytestmark = pytest.mark.usefixtures("kernels_run")

SHAPES = [  # batch, channels, groups, height, width
    (2, 40, 2, 5, 3),  # groups of 20: not a power of two
    (1, 6, 3, 4, 4),  # three groups of two
    (3, 8, 8, 1, 5),  # a group is a channel; one row
    (2, 5, 1, 3, 1),  # one group, one column
    (2, 12, 4, 1, 1),  # one pixel
]
CHUNKS = 1 << 7  # numbers in a tile: the first shape goes by in chunks


@pytest.fixture(params=[None, CHUNKS], ids=["whole", "chunks"])
def tile(request, monkeypatch):
    if request.param:
        for name, tuning in group_norm.TUNING.items():
            monkeypatch.setitem(group_norm.TUNING, name, replace(tuning, tile=request.param))


@pytest.fixture
def launches(monkeypatch):
    names = "norm", "norm_backward", "fives", "fives_backward"
    return Launches(monkeypatch, group_norm, *names)


def inputs_of(x, *vectors):
    return [t for t in (x, *vectors) if t is not None]


@pytest.mark.parametrize(
    ("shape", "kind", "relu"), pairs(SHAPES, ["none", "shared", "each", "spread"], [False, True])
)
def test_any_groups(shape, kind, relu, tile, device, launches):
    batch, channels, groups, height, width = shape
    x = channels_last(batch, channels, height, width, device=device, offset=2.0).requires_grad_()
    vectors = (None, None)
    if kind != "none":
        vectors = affine(channels, device, batch if kind == "each" else None, grad=True)
    if kind == "spread":  # one memory for all samples
        vectors = [v.detach().expand(batch, -1).requires_grad_() for v in vectors]
    exact = exact_norm(x, groups, *vectors, relu)
    y = norm_act(x, groups, *vectors, relu=relu)
    assert y.permute(0, 2, 3, 1).is_contiguous()
    check(y, inputs_of(x, *vectors), exact, torch.randn_like(exact).float())
    assert launches == ["norm", "norm_backward", "norm_backward"]
    close(norm_act_plain(x, groups, *vectors, relu=relu), exact)
    with torch.no_grad():
        assert torch.equal(norm_act(x, groups, *vectors, relu=relu), y)


PACKED = [  # channels, groups, zeros beside, size, numbers in a tile
    (14, 2, 2, (8, 16), 512),
    (28, 4, 4, (4, 8), 16384),
    (56, 4, 0, (2, 4), 16384),
    (112, 4, 0, (4, 4), 16384),  # two programs a sample
    (24, 2, 0, (4, 4), 16384),  # groups of 12, whole vectors only together
    (56, 4, 0, (5, 3), 256),
]


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind", "relu"), pairs(PACKED, HALF, ["none", "shared", "each"], [0, 1])
)
def test_groups_that_fill_vectors_together(sizes, dtype, kind, relu, device, launches, monkeypatch):
    channels, groups, room, size, tile = sizes
    small = replace(group_norm.TUNING["packed"], tile=tile)
    monkeypatch.setitem(group_norm.TUNING, "packed", small)
    x = channels_last(3, channels + room, *size, device=device, dtype=dtype, offset=1, beside=16)
    x[:, channels:] = 0
    x.requires_grad_()
    vectors = (None, None)
    if not room and kind != "none":
        vectors = affine(channels, device, 3 if kind == "each" else None, grad=True)
    exact = exact_norm(x[:, :channels], groups, *vectors)
    direction = torch.randn_like(x)
    direction[:, :channels] = clear(direction[:, :channels], exact)
    exact = torch.nn.functional.pad(exact.relu() if relu else exact, (0, 0, 0, 0, 0, room))
    operation = NormAct(groups, 1e-5, bool(relu), room)
    assert operation.tile("forward", x).unit == 8
    y = norm_act(x, groups, *vectors, relu=bool(relu), room=room)
    found = check(y, inputs_of(x, *vectors), exact, direction)
    assert launches == ["norm", "norm_backward", "norm_backward"]
    for values in (y, found[0]):
        assert bool((values[:, channels:] == 0).all())


@pytest.mark.parametrize(
    ("channels", "groups", "room"), [(14, 2, 2), (28, 4, 4), (3, 1, 1), (7, 1, 1), (15, 3, 1)]
)
@pytest.mark.parametrize("relu", [False, True])
def test_zeros_beside_the_groups_stay_zeros(channels, groups, room, relu, tile, device):
    x = channels_last(2, channels + room, 4, 5, device=device, offset=1.0, beside=6)
    x[:, channels:] = 0
    x.requires_grad_()
    direction = torch.randn(2, channels + room, 4, 5, device=device)
    exact = exact_norm(x[:, :channels], groups, relu=relu)
    (expected,) = torch.autograd.grad(exact, x, direction[:, :channels].double())
    for function in (norm_act, norm_act_plain):
        out = torch.full((2, 4, 5, channels + room), torch.nan, device=device).permute(0, 3, 1, 2)
        with torch.no_grad():
            function(x, groups, None, None, relu=relu, out=out, room=room)
        y = function(x, groups, None, None, relu=relu, room=room)
        (found,) = torch.autograd.grad(y, x, direction)
        for values, truth in ((out, exact), (y, exact), (found, expected[:, :channels])):
            assert bool((values[:, channels:] == 0).all())
            close(values[:, :channels], truth, 1e-4)


def test_room_there_is_not(device):
    x = channels_last(2, 8, 3, 3, device=device)
    with pytest.raises(ValueError, match="no room for 2 channels beside 6"):
        norm_act(x, 3, None, None, room=2)  # of groups of two, no column is to spare
    with pytest.raises(ValueError, match="no room for 1"):
        norm_act(x, 1, *affine(7, device), room=1)


FIVES = [  # and how many groups a program takes backward
    ((2, 80, 4, 4, 4), 4),  # groups of 20 channels, 40 bytes
    ((2, 120, 6, 2, 4), 2),
    ((1, 60, 3, 2, 4), 1),
    ((1, 80, 2, 2, 2), 2),
    ((2, 160, 2, 1, 4), 1),
    ((1, 10, 1, 1, 2), 1),
]


@pytest.mark.parametrize(
    ("sizes", "relu", "each", "dtype", "beside"),
    pairs(FIVES, [False, True], [False, True], HALF, [0, 12]),
)
def test_groups_of_five(sizes, relu, each, dtype, beside, device, launches):
    (batch, channels, groups, height, width), block = sizes
    assert groups_in_sectors(height * width, channels // groups, groups) == block
    shape = (batch, channels, height, width)
    x, direction = (
        channels_last(*shape, device=device, offset=offset, dtype=dtype, beside=beside)
        for offset in (30.0, 0.0)
    )
    x.requires_grad_()
    vectors = affine(channels, device, batch if each else None, grad=True)
    exact = exact_norm(x, groups, *vectors, relu)
    y = norm_act(x, groups, *vectors, relu=relu)
    close(y, exact, rounding(y))  # rounded once
    check(y, [x, *vectors], exact, direction)
    backward = "fives_backward" if dtype == torch.bfloat16 else "norm_backward"
    assert launches == ["fives", backward, backward]
    (alone,) = torch.autograd.grad(y, x, direction, retain_graph=True)
    assert torch.equal(alone, torch.autograd.grad(y, [x, *vectors], direction)[0])


def test_which_maps_which_tiles_take(device):
    def made(channels, size=(8, 8), dtype=torch.bfloat16):
        return channels_last(3, channels, *size, device=device, dtype=dtype, beside=16)

    def packed(x, groups, room=0):
        tile = packed_tile(group_norm.TUNING["packed"], [x], groups, room)
        return tile is not None and tile.unit > 1

    assert packed(made(56), 4)
    assert packed(made(16), 2, 2)
    assert not packed(made(16), 2)  # groups of 8
    assert not packed(made(56, dtype=torch.float32), 4)
    assert not packed(made(56, size=(1, 1)), 4)  # less than a warp
    assert not packed(made(14), 2)  # never whole vectors
    assert not packed(made(64)[:, 4:60], 4)  # begins within one
    assert not packed(made(57)[:, :56], 4)  # so do its pixels
    assert not packed(made(36), 3)  # 12 channels a group: two fill vectors, and three are no pairs
    assert not packed(made(480), 4)  # 120 channels a group: whole vectors
    assert not packed(made(200), 2)  # more columns than are held
    assert not packed_tile(group_norm.TUNING["packed"], [made(56), made(64)[:, 4:60]], 4)
    shifted = torch.empty(3 * 4000, dtype=torch.bfloat16, device=device)
    assert not packed(shifted.as_strided((3, 56, 8, 8), (64 * 56 + 4, 1, 448, 56)), 4)

    def fives(x, groups=2):
        return in_fives([x], groups)

    x = channels_last(2, 40, 4, 4, device=device, dtype=torch.bfloat16)
    assert fives(x)
    assert fives(x.half())
    assert fives(x[:, 10:30])
    assert not fives(x[:, 11:31])  # pairs would begin in the middle of others
    odd = torch.zeros(2, 4, 4, 41, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    assert not fives(odd[:, :40, :, :1])  # strides of 41, also where there is one column
    assert not fives(odd[:, :40, :1])
    assert not fives(x[:, :, :3])
    assert not fives(x[:, :, ::2])
    assert not fives(x, groups=8)  # groups of 5: half a pair
    assert not fives(x.float())
    assert not fives(x[:, :24])
    assert not in_fives([x, x.contiguous()], 2)  # the gradient in another order
    large = empty_channels_last((1, 20, 64, 64), x.dtype, x.device)
    assert not fives(large, 1)


@pytest.mark.parametrize(
    ("channels", "edge", "groups"),
    [(160, 32, 8), (320, 16, 8), (640, 8, 8), (1280, 4, 8), (32, 32, 8), (32, 32, 4), (64, 16, 8)],
)
def test_the_published_sizes_are_read_once(channels, edge, groups):
    x = torch.empty(1, channels, edge, edge, dtype=torch.bfloat16, device="meta")
    tile = aligned_tile(group_norm.TUNING["forward"], x, groups)
    assert tile.rows == tile.pixels == edge * edge
    assert tile.block * (channels // groups) * 2 >= 32  # bytes: one sector of memory
    assert 1 <= tile.warps <= 16


# ---- values


@pytest.mark.parametrize("offset", [100.0, 3000.0])
def test_variance_survives_a_large_mean(offset, tile, device):
    # E[x²] − mean² would be off by 0.5 here.
    x = channels_last(1, 8, 9, 9, device=device, offset=offset)
    close(norm_act(x, 2, None, None), exact_norm(x, 2), 1e-3)
    half = channels_last(3, 56, 8, 8, device=device, offset=100.0, dtype=torch.float16)
    close(norm_act(half, 4, None, None), exact_norm(half, 4), 2e-3)


def test_a_first_chunk_unlike_the_others(device, monkeypatch):
    """The pivot is its mean: far from that of all, but not so far that digits are lost."""
    small = replace(group_norm.TUNING["forward"], tile=512)
    monkeypatch.setitem(group_norm.TUNING, "forward", small)
    x = channels_last(1, 8, 16, 16, device=device)
    x.add_(1000)[:, :, 0] -= 2000
    close(norm_act(x, 2, None, None), exact_norm(x, 2), 1e-3)


@pytest.mark.parametrize("value", [100.0, 3e4])
def test_a_group_of_one_number_is_zeros(value, device):
    x = torch.full((3, 8, 8, 56), value, device=device).half().permute(0, 3, 1, 2)
    assert bool((norm_act(x, 4, None, None) == 0).all())
    assert bool((norm_act(x.float(), 4, None, None) == 0).all())


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_rounded_once(dtype, tile, device):
    x = channels_last(2, 12, 5, 3, device=device, dtype=dtype)
    vectors = affine(12, device)
    exact = exact_norm(x, 3, *vectors)
    assert norm_act(x, 3, *vectors).dtype == dtype
    close(norm_act(x, 3, *vectors), exact, rounding(x))
    close(norm_act(x, 3, *vectors, dtype=torch.float32), exact)


@pytest.mark.parametrize(
    ("channels", "groups", "dtype"),
    [(6, 3, torch.float32), (20, 2, torch.bfloat16), (56, 4, torch.bfloat16)],
)
def test_nan_is_not_hidden(channels, groups, dtype, device):
    x = channels_last(2, channels, 4, 4, device=device, dtype=dtype)
    x[1, 0, 2, 2] = torch.nan
    vectors = affine(channels, device)
    for found in (
        norm_act(x, groups, *vectors, relu=True),
        *block_end(x, None, None, torch.zeros_like(x), *vectors, *vectors, groups),
        fuse(torch.zeros_like(x), [Source(x, *vectors)], groups),
        fuse(None, [Source(x, None, None)] * 2, groups),
    ):
        lost = found.isnan()
        assert bool(lost[1, : channels // groups].all())  # the first group
        assert int(lost.sum()) == 16 * channels // groups


# ---- memory


def test_slices_are_read_and_written_in_place(tile, device, monkeypatch):
    whole = channels_last(2, 20, 4, 5, device=device)
    part, target, vectors = whole[:, 7:15], torch.full_like(whole, 9.0), affine(8, device)

    def refuse(*_):
        raise AssertionError("copied")

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "empty_channels_last", refuse)
        found = norm_act(part, 2, *vectors, out=target[:, 4:12])
        with pytest.raises(AssertionError, match="copied"):
            norm_act(part.contiguous(), 2, *vectors, out=target[:, 4:12])
    assert found.data_ptr() == target[:, 4:12].data_ptr()
    close(target[:, 4:12], exact_norm(part, 2, *vectors))
    assert bool((target[:, :4] == 9).all())
    assert bool((target[:, 12:] == 9).all())


def test_other_orders_and_what_kernels_cannot_take(device):
    x = torch.randn(2, 6, 4, 5, device=device)
    for order in (x, x.transpose(2, 3), x[:, :, ::2], x[:, ::2]):
        close(norm_act(order, 3, None, None), exact_norm(order, 3))
    found = norm_act(x.double(), 3, None, None)
    assert found.dtype == torch.float64
    close(found, exact_norm(x, 3), 1e-12)
    assert norm_act(torch.empty(0, 6, 4, 5, device=device), 3, None, None).shape == (0, 6, 4, 5)


def test_out_must_fit(device):
    x = channels_last(2, 6, 4, 5, device=device)
    with pytest.raises(ValueError, match="channels-last"):
        norm_act(x, 3, None, None, out=torch.empty(2, 6, 4, 5, device=device))
    with pytest.raises(ValueError, match="gradients"):
        norm_act(x.requires_grad_(), 3, None, None, out=torch.empty_like(x))


# ---- gradients


def test_gradients_of_some_inputs(device):
    whole = channels_last(2, 9, 3, 4, device=device).requires_grad_()
    weight, bias = affine(6, device)
    for vectors in ((None, None), (weight, bias)):
        part = whole[:, 2:8]
        direction = torch.randn_like(part)
        (found,) = torch.autograd.grad(norm_act(part, 3, *vectors), whole, direction)
        exact = exact_norm(whole[:, 2:8], 3, *vectors)
        close(found, torch.autograd.grad(exact, whole, direction.double())[0])
    weight.requires_grad_()
    (found,) = torch.autograd.grad(norm_act(part.detach(), 3, weight, bias).sum(), weight)
    close(found, torch.autograd.grad(exact_norm(part, 3, weight, bias).sum(), weight)[0])


def test_second_derivatives(device):
    x = channels_last(2, 6, 3, 2, device=device).requires_grad_()
    weight, bias = affine(6, device, grad=True)
    both = [lambda f=f: f(x, 3, weight, bias, relu=True) for f in (norm_act, exact_norm)]
    check_twice(both, [x, weight], 1e-4)


def test_per_sample_sums_over_the_batch(device):
    vectors = [torch.randn(n, device=device, requires_grad=True) for n in (3, 5, 1)]
    spread = per_sample(vectors, 4)
    assert [tuple(s.shape) for s in spread] == [(4, 3), (4, 5), (4, 1)]
    assert all(s.data_ptr() == v.data_ptr() for s, v in zip(spread, vectors, strict=True))
    directions = [torch.randn_like(s) for s in spread]
    found = torch.autograd.grad(spread, vectors, directions)
    for a, b in zip(found, directions, strict=True):
        close(a, b.sum(0))
    vectors[1].requires_grad_(False)
    sum(s.sum() for s in per_sample(vectors, 2)).backward()
    assert vectors[1].grad is None
    assert bool((vectors[0].grad == 2).all())


# ---- slices

ACROSS = pytest.mark.parametrize("across", [False, True], ids=["one stream", "several"])


def sliced(x, sizes, relu, across=False):
    """A norm of the first slice, and a fusion of the second with something else."""
    one, two = slices(x, sizes, across)
    other = Source(two.detach().flip(1), None, None)
    return norm_act(one, 2, None, None, relu=relu), fuse(None, [Source(two, None, None), other], 3)


@ACROSS
def test_gradients_of_slices_are_written_beside_each_other(across, device, monkeypatch):
    x = channels_last(2, 10, 4, 4, device=device).requires_grad_()
    directions = [torch.randn(2, c, 4, 4, device=device) for c in (4, 6)]
    plain = x.split((4, 6), dim=1)
    other = Source(plain[1].detach().flip(1), None, None)
    expected = [norm_act_plain(plain[0], 2, None, None, relu=True)]
    expected.append(fuse_plain(None, [Source(plain[1], None, None), other], 3))
    (truth,) = torch.autograd.grad(expected, x, directions)
    copies, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda *a, **k: copies.append(a) or cat(*a, **k))
    outs = sliced(x, (4, 6), True, across)
    found = [torch.autograd.grad(outs, x, directions, retain_graph=True)[0] for _ in range(2)]
    assert not copies
    # Unless it is given, a second pass has memory of its own.
    assert (found[0].data_ptr() == found[1].data_ptr()) == across
    assert found[0].permute(0, 2, 3, 1).is_contiguous()
    for gradient in found:
        close(gradient, truth, 1e-4)


@ACROSS
def test_gradients_of_slices_that_are_elsewhere(across, device):
    x = channels_last(2, 10, 4, 4, device=device).requires_grad_()
    one, two = slices(x, (4, 6), across)
    y = norm_act(one, 2, None, None) + norm_act(one, 1, None, None)  # its gradient is a sum
    weight = torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
    total = (y * weight).sum() + two.sin().sum()
    first, both = x[:, :4], norm_act_plain
    exact = both(first, 2, None, None) + both(first, 1, None, None)
    exact = (exact * weight).sum() + x[:, 4:].sin().sum()
    (expected,) = torch.autograd.grad(exact, x)
    close(torch.autograd.grad(total, x, retain_graph=True)[0], expected, 1e-4)

    def twice(e):  # in other memory that looks the same
        return torch.empty_strided(e.shape, e.stride(), device=e.device).copy_(2 * e)

    watched = slices(x, (4, 6), across)
    watched[0].register_hook(twice)
    outs = [norm_act(part, 2, None, None) for part in watched]
    plain = [norm_act_plain(part, 2, None, None) for part in x.split((4, 6), dim=1)]
    direction = torch.randn(2, 10, 4, 4, device=device).split((4, 6), dim=1)
    doubled = [2 * direction[0], direction[1]]
    (found,) = torch.autograd.grad(outs, x, direction)
    close(found, torch.autograd.grad(plain, x, doubled)[0], 1e-4)
    # Passes that end at a slice leave each other's gradients alone.
    part = norm_act(one, 2, None, None)
    alone = [torch.autograd.grad(part, one, s * weight, retain_graph=True)[0] for s in (1.0, 2.0)]
    close(2 * alone[0], alone[1])
    assert alone[0].data_ptr() != alone[1].data_ptr()
    before = alone[0].clone()
    for _ in range(3):
        close(torch.autograd.grad(total, x, retain_graph=True)[0], expected, 1e-4)
    assert torch.equal(alone[0], before)
    assert [s.shape[1] for s in slices(x.detach(), (4, 6))] == [4, 6]


def test_passes_that_overlap_leave_each_other_alone(device):
    """Two more begin, by a hook, when the first has written one of its two gradients."""
    x = channels_last(2, 10, 4, 4, device=device).requires_grad_()
    one, two = slices(2 * x, (4, 6), True)
    outs = norm_act(one, 2, None, None), norm_act(two, 3, None, None)
    directions = [torch.randn(2, c, 4, 4, device=device) for c in (4, 6)]
    (expected,) = torch.autograd.grad(outs, x, directions, retain_graph=True)
    inner = []

    def meanwhile(_gradient):
        if not inner:
            inner.append(None)
            for factor in (2.0, 3.0):
                more = [factor * d for d in directions]
                inner.append(torch.autograd.grad(outs, x, more, retain_graph=True)[0].clone())

    for part in (one, two):
        part.register_hook(meanwhile)
    (found,) = torch.autograd.grad(outs, x, directions, retain_graph=True)
    close(found, expected, 1e-6)
    close(inner[1], 2 * expected, 1e-6)
    close(inner[2], 3 * expected, 1e-6)


def test_slices_have_second_derivatives(device):
    x = channels_last(1, 10, 2, 3, device=device).requires_grad_()

    def product(parts):
        one, two = parts
        return (norm_act(one, 2, None, None)[:, :2] * norm_act(two, 3, None, None)[:, :2]).sin()

    both = [lambda: product(slices(x, (4, 6))), lambda: product(x.split((4, 6), dim=1))]
    check_twice(both, [x], 1e-3)
