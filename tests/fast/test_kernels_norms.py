"""The kernels of normalisation, against PyTorch in double precision."""

import os
from dataclasses import replace

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch.nn.functional import group_norm, interpolate

from gdeq.fast.kernels import available, norms
from gdeq.fast.kernels.norms import (
    Source,
    block_end,
    block_end_for,
    block_end_plain,
    choose_tile,
    empty_channels_last,
    fuse,
    fuse_plain,
    norm_act,
    norm_act_plain,
    per_sample,
)
from pairs import pairs

# batch, channels, groups, height, width
SHAPES = [
    (2, 40, 2, 5, 3),  # groups of 20: not a power of two
    (1, 6, 3, 4, 4),  # three groups of two
    (3, 8, 8, 1, 5),  # a group is a channel; one row
    (2, 5, 1, 3, 1),  # one group, one column
    (2, 12, 4, 1, 1),  # one pixel
]
LAST = torch.channels_last
WHOLE, CHUNKS = 1 << 15, 1 << 7  # elements in a tile
# The others fit in a chunk: with that tile they would take the same way again.
TILED = [*((shape, WHOLE) for shape in SHAPES), (SHAPES[0], CHUNKS)]
FUSED = [((7, 5), WHOLE), ((7, 5), CHUNKS), ((1, 6), WHOLE)]


@pytest.fixture(autouse=True)
def kernels_run(device):
    if not available(device):
        pytest.skip("Triton does not run here")


@pytest.fixture(params=[WHOLE, CHUNKS], ids=["whole", "chunks"])
def tile(request, monkeypatch):
    for name, tuning in norms.TUNING.items():
        monkeypatch.setitem(norms.TUNING, name, replace(tuning, tile=request.param))


def channels_last(*shape, device, offset=0.0):
    x = torch.randn(*shape, device=device) + offset
    return x.to(memory_format=torch.channels_last)


def affine(channels, device):
    return 1 + 0.3 * torch.randn(channels, device=device), torch.randn(channels, device=device)


def exact_norm(x, groups, weight, bias, relu=False):
    wide = [None if t is None else t.double() for t in (weight, bias)]
    y = group_norm(x.double().contiguous(), groups, *wide, 1e-5)
    return y.relu() if relu else y


def close(found, expected, tolerance=1e-5):
    error = (found.double() - expected.double()).abs().max()
    assert error <= tolerance * (1 + expected.abs().max()), f"off by {error:.1e}"


# ---- norm_act


@pytest.mark.parametrize(("shape", "tile"), TILED, indirect=["tile"])
@pytest.mark.parametrize("relu", [False, True])
def test_norm_is_group_norm(shape, relu, tile, device):
    batch, channels, groups, height, width = shape
    x = channels_last(batch, channels, height, width, device=device, offset=2.0)
    weight, bias = affine(channels, device)
    found = norm_act(x, groups, weight, bias, relu=relu)
    close(found, exact_norm(x, groups, weight, bias, relu))
    close(norm_act_plain(x, groups, weight, bias, relu=relu), found)
    assert found.permute(0, 2, 3, 1).is_contiguous()


def test_norm_without_scale_and_shift(tile, device):
    x = channels_last(2, 6, 5, 4, device=device)
    close(norm_act(x, 3, None, None), exact_norm(x, 3, None, None))


def test_variance_survives_a_large_mean(tile, device):
    # E[x²] − mean² would be off by 0.5 here.
    x = channels_last(1, 8, 9, 9, device=device, offset=3000.0)
    close(norm_act(x, 2, None, None), exact_norm(x, 2, None, None), tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, tile, device):
    x = channels_last(2, 12, 5, 3, device=device).to(dtype)
    weight, bias = affine(12, device)
    exact = exact_norm(x, 3, weight, bias)
    assert norm_act(x, 3, weight, bias).dtype == dtype
    close(norm_act(x, 3, weight, bias), exact, tolerance=torch.finfo(dtype).eps / 2)
    close(norm_act(x, 3, weight, bias, dtype=torch.float32), exact)


SPLIT = [(2, 40, 2, 4, 4), (1, 10, 1, 1, 2), (2, 80, 4, 2, 8)]  # groups of 20, 10, 20 channels


@pytest.mark.parametrize("shape", SPLIT)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("each", [False, True], ids=["one norm", "one a sample"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_of_five_in_two_tiles(shape, relu, each, dtype, device, monkeypatch):
    batch, channels, groups, height, width = shape
    monkeypatch.setattr(norms.single, "launch", None)  # it would be called for other groups
    wide = channels_last(batch, channels + 12, height, width, device=device, offset=30.0)
    wide = wide.to(dtype)
    weight, bias = affine(channels, device)
    scales = weight.expand(batch, -1) * (1 + torch.arange(batch, device=device))[:, None]
    for x in (wide[:, 4 : 4 + channels], wide[:, :channels].contiguous(memory_format=LAST)):
        used = (scales, bias.expand(batch, -1)) if each else (weight, bias)
        found = norm_act(x, groups, *used, relu=relu)
        for i in range(batch):
            exact = exact_norm(x[i : i + 1], groups, scales[i] if each else weight, bias, relu)
            # Triton's interpreter cuts bfloat16 off where a GPU rounds.
            cut_off = dtype == torch.bfloat16 and not x.is_cuda
            close(found[i : i + 1], exact, tolerance=torch.finfo(dtype).eps / (1 if cut_off else 2))


def test_what_two_tiles_do_not_take(device):
    def takes(x, out=None, groups=2, weight=1):
        return norms.split.takes(x, x if out is None else out, groups, weight)

    x = channels_last(2, 40, 4, 4, device=device).to(torch.bfloat16)
    assert takes(x)
    assert takes(x.half())
    assert takes(x[:, 10:30])
    assert not takes(x[:, 11:31])  # pairs would begin in the middle of others
    odd = torch.zeros(2, 4, 4, 41, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    assert not takes(odd[:, :40, :, :1])  # strides of 41, also where there is one column
    assert not takes(odd[:, :40, :1])
    assert not takes(x[:, :, :3])
    assert not takes(x[:, :, ::2])
    assert not takes(x, weight=None)
    assert not takes(x, groups=8)  # groups of 5: half a pair
    assert not takes(x.float())
    assert not takes(x, x.float())
    assert not takes(x[:, :24])


def test_two_tiles_keep_what_the_gradient_needs(device, monkeypatch):
    x = channels_last(2, 40, 4, 4, device=device, offset=3.0).to(torch.bfloat16).requires_grad_()
    inputs = [x, *(v.requires_grad_() for v in affine(40, device))]
    along = channels_last(2, 40, 4, 4, device=device).to(torch.bfloat16)
    found = torch.autograd.grad(norm_act(x, 2, *inputs[1:], relu=True), inputs, along)
    exact = [v.detach().double().requires_grad_() for v in inputs]
    y = exact_norm(exact[0], 2, *exact[1:], relu=True)
    for ours, wanted in zip(found, torch.autograd.grad(y, exact, along.double()), strict=True):
        close(ours, wanted, tolerance=2.0**-7 if ours.dim() == 4 else 1e-5)


def exact_gradients(inputs, groups, relu, dy):
    exact = [v.detach().double().requires_grad_() for v in inputs]
    scale, shift = (v.expand(len(dy), -1)[..., None, None] for v in exact[1:])
    y = exact_norm(exact[0], groups, None, None) * scale + shift
    return torch.autograd.grad(y.relu() if relu else y, exact, dy.double())


HELD = [  # and how many groups a program takes
    ((2, 80, 4, 4, 4), 4),  # groups of 20 channels, 40 bytes
    ((2, 120, 6, 2, 4), 2),
    ((1, 60, 3, 2, 4), 1),
    ((1, 80, 2, 2, 2), 2),
    ((2, 160, 2, 1, 4), 1),
]


@pytest.mark.parametrize(("held", "relu", "each"), pairs(HELD, [False, True], [False, True]))
def test_gradients_of_groups_of_five(held, relu, each, device, monkeypatch):
    (batch, channels, groups, height, width), block = held
    monkeypatch.setattr(norms.single, "launch", None)  # it would be called for other groups
    assert norms.held.groups_of_program(height * width, channels // groups, groups) == block
    wide = channels_last(batch, channels + 12, height, width, device=device, offset=30.0)
    wide = wide.to(torch.bfloat16)
    vectors = [v.expand(batch, -1).clone() if each else v for v in affine(channels, device)]
    along = torch.randn_like(wide)
    for start in (0, 4):
        x, dy = (t[:, start : start + channels] for t in (wide, along))
        inputs = [v.detach().clone().requires_grad_() for v in (x, *vectors)]
        inputs[0] = x.detach().requires_grad_()  # a slice, as it lies
        y = norm_act(inputs[0], groups, *inputs[1:], relu=relu)
        found = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        for ours, wanted in zip(found, exact_gradients(inputs, groups, relu, dy), strict=True):
            # Triton's interpreter cuts off where a GPU rounds.
            rounding = 2.0 ** (-8 if x.is_cuda else -7)
            close(ours, wanted, tolerance=rounding if ours.dim() == 4 else 1e-4)
        again = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        (alone,) = torch.autograd.grad(y, inputs[:1], dy)
        assert torch.equal(alone, found[0])


def test_held_gradients_are_those_of_the_other_kernel(device, monkeypatch):
    x = channels_last(2, 80, 4, 4, device=device, offset=3.0).to(torch.bfloat16).requires_grad_()
    inputs = [x, *(v.requires_grad_() for v in affine(80, device))]
    along = channels_last(2, 80, 4, 4, device=device).to(torch.bfloat16)
    y = norm_act(x, 4, *inputs[1:], relu=True)
    found = torch.autograd.grad(y, inputs, along, retain_graph=True)
    monkeypatch.setattr(norms.held, "enabled", False)
    other = torch.autograd.grad(y, inputs, along)
    for ours, theirs in zip(found, other, strict=True):
        close(ours, theirs, tolerance=2.0**-7 if ours.dim() == 4 else 1e-5)


def test_what_is_not_held(device):
    x = channels_last(2, 40, 4, 4, device=device).to(torch.bfloat16)
    assert norms.held.takes(x, x, x, 2, x)
    assert not norms.held.takes(x.half(), x.half(), x.half(), 2, x)
    assert not norms.held.takes(x, x.contiguous(), x, 2, x)  # dy in another order
    assert not norms.held.takes(x, x.float(), x, 2, x)
    assert not norms.held.takes(x, x, x, 2, None)
    large = torch.empty(1, 64, 64, 20, dtype=x.dtype, device=device).permute(0, 3, 1, 2)
    assert not norms.held.takes(large, large, large, 1, x)


def test_nan_is_not_hidden(device):
    x = channels_last(2, 6, 4, 3, device=device)
    x[1, 0, 2, 2] = torch.nan
    norm = affine(6, device)
    for found in (
        norm_act(x, 3, *norm, relu=True),
        block_end(x, None, None, torch.zeros_like(x), *norm, *norm, 3),
        fuse(torch.zeros_like(x), [Source(x, *norm)], 3),
    ):
        assert bool(found[1, :2].isnan().all())  # the first group
        assert not bool(found[0].isnan().any())
    x = channels_last(2, 20, 2, 2, device=device).to(torch.bfloat16)
    x[1, 0, 1, 1] = torch.nan
    found = norm_act(x, 2, *affine(20, device), relu=True)
    assert bool(found[1, :10].isnan().all())
    assert int(found.isnan().sum()) == 40


def test_slices_are_read_and_written_in_place(tile, device):
    whole = channels_last(2, 20, 4, 5, device=device)
    part = whole[:, 7:15]
    target = torch.full_like(whole, 9.0)
    weight, bias = affine(8, device)
    found = norm_act(part, 2, weight, bias, out=target[:, 4:12])
    assert found.data_ptr() == target[:, 4:12].data_ptr()
    close(target[:, 4:12], exact_norm(part, 2, weight, bias))
    assert bool((target[:, :4] == 9).all())
    assert bool((target[:, 12:] == 9).all())


def test_slices_are_not_copied(device, monkeypatch):
    def refuse(*_):
        raise AssertionError("copied")

    part = channels_last(2, 20, 3, 5, device=device)[:, 7:15]
    out = empty_channels_last(part.shape, part.dtype, part.device)
    monkeypatch.setattr(norms.tensors, "empty_channels_last", refuse)
    norm_act(part, 2, *affine(8, device), out=out)
    with pytest.raises(AssertionError, match="copied"):
        norm_act(part.contiguous(), 2, *affine(8, device), out=out)


def test_other_orders_are_taken_too(device):
    x = torch.randn(2, 6, 4, 5, device=device)
    for order in (x, x.transpose(2, 3), x[:, :, ::2], x[:, ::2]):
        close(norm_act(order, 3, None, None), exact_norm(order, 3, None, None))


def test_what_kernels_cannot_take_goes_to_pytorch(device):
    x = torch.randn(2, 6, 4, 5, device=device, dtype=torch.float64)
    found = norm_act(x, 3, None, None)
    assert found.dtype == torch.float64
    close(found, exact_norm(x, 3, None, None), tolerance=1e-12)
    assert norm_act(torch.empty(0, 6, 4, 5, device=device), 3, None, None).shape == (0, 6, 4, 5)


def test_out_must_fit(device):
    x = channels_last(2, 6, 4, 5, device=device)
    with pytest.raises(ValueError, match="channels-last"):
        norm_act(x, 3, None, None, out=torch.empty(2, 6, 4, 5, device=device))
    with pytest.raises(ValueError, match="gradients"):
        norm_act(x.requires_grad_(), 3, None, None, out=torch.empty_like(x))


@pytest.mark.parametrize(("shape", "tile"), TILED, indirect=["tile"])
@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_pytorchs(shape, relu, tile, device):
    batch, channels, groups, height, width = shape
    x = channels_last(batch, channels, height, width, device=device).requires_grad_()
    weight, bias = (t.requires_grad_() for t in affine(channels, device))
    direction = torch.randn(batch, channels, height, width, device=device)
    inputs = (x, weight, bias)
    expected = torch.autograd.grad(
        exact_norm(x, groups, weight, bias, relu), inputs, direction.double()
    )
    found = torch.autograd.grad(norm_act(x, groups, weight, bias, relu=relu), inputs, direction)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    again = torch.autograd.grad(norm_act(x, groups, weight, bias, relu=relu), inputs, direction)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_gradients_of_some_inputs(device):
    whole = channels_last(2, 9, 3, 4, device=device).requires_grad_()
    weight, bias = affine(6, device)
    for norm in ((None, None), (weight, bias)):
        part = whole[:, 2:8]
        direction = torch.randn_like(part)
        (found,) = torch.autograd.grad(norm_act(part, 3, *norm), whole, direction)
        exact = exact_norm(whole[:, 2:8], 3, *norm)
        close(found, torch.autograd.grad(exact, whole, direction.double())[0])
    weight.requires_grad_()
    (found,) = torch.autograd.grad(norm_act(part.detach(), 3, weight, bias).sum(), weight)
    close(found, torch.autograd.grad(exact_norm(part, 3, weight, bias).sum(), weight)[0])


@pytest.mark.parametrize(
    ("channels", "groups", "room"), [(14, 2, 2), (28, 4, 4), (3, 1, 1), (7, 1, 1), (15, 3, 1)]
)
@pytest.mark.parametrize("relu", [False, True])
def test_zeros_beside_the_groups_stay_zeros(channels, groups, room, relu, tile, device):
    x = channels_last(2, channels + room + 3, 4, 5, device=device, offset=1.0)[:, 3:]
    x[:, channels:] = 0
    x.requires_grad_()
    direction = torch.randn(2, channels + room, 4, 5, device=device)
    exact = exact_norm(x[:, :channels], groups, None, None, relu)
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


# ---- slices


def sliced(x, sizes, relu, across=False):
    """A norm of the first slice, and a fusion of the second with something else."""
    one, two = norms.slices(x, sizes, across)
    other = Source(two.detach().flip(1), None, None)
    return norm_act(one, 2, None, None, relu=relu), fuse(None, [Source(two, None, None), other], 3)


@pytest.mark.parametrize("across", [False, True], ids=["one stream", "several"])
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


@pytest.mark.parametrize("across", [False, True], ids=["one stream", "several"])
def test_gradients_of_slices_that_are_elsewhere(across, device):
    x = channels_last(2, 10, 4, 4, device=device).requires_grad_()
    one, two = norms.slices(x, (4, 6), across)
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

    watched = norms.slices(x, (4, 6), across)
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
    assert [s.shape[1] for s in norms.slices(x.detach(), (4, 6))] == [4, 6]


def test_passes_that_overlap_leave_each_other_alone(device):
    """Two more begin, by a hook, when the first has written one of its two gradients."""
    x = channels_last(2, 10, 4, 4, device=device).requires_grad_()
    one, two = norms.slices(2 * x, (4, 6), True)
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
    results = []
    for split in (norms.slices, lambda x, sizes: x.split(sizes, dim=1)):
        one, two = split(x, (4, 6))
        y = norm_act(one, 2, None, None)[:, :2] * norm_act(two, 3, None, None)[:, :2]
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), x)])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-3)


def test_second_derivatives(device):
    x = channels_last(2, 6, 3, 2, device=device).requires_grad_()
    weight, bias = (t.requires_grad_() for t in affine(6, device))
    direction = torch.randn_like(x)
    results = []
    for y in (norm_act(x, 3, weight, bias, relu=True), exact_norm(x, 3, weight, bias, True)):
        first = torch.autograd.grad(y, (x, weight), direction.to(y.dtype), create_graph=True)
        size = sum(g.double().square().sum() for g in first)
        results.append(torch.autograd.grad(size, (x, weight, bias), allow_unused=True))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, tolerance=1e-4)


# ---- scale and shift for each sample


@pytest.mark.parametrize("spread", [False, True], ids=["own", "shared"])
def test_scale_and_shift_for_each_sample(spread, tile, device):
    x = channels_last(3, 6, 5, 4, device=device).requires_grad_()
    weight, bias = (torch.randn(3, 6, device=device).requires_grad_() for _ in range(2))
    if spread:  # all samples in the same memory
        weight, bias = (t.detach()[0].expand(3, 6).requires_grad_() for t in (weight, bias))
    direction = torch.randn(3, 6, 5, 4, device=device)
    unit = exact_norm(x, 3, None, None)
    exact = (unit * weight[..., None, None].double() + bias[..., None, None]).relu()
    expected = torch.autograd.grad(exact, (x, weight, bias), direction.double())
    for function in (norm_act, norm_act_plain):
        y = function(x, 3, weight, bias, relu=True)
        close(y.detach(), exact.detach())
        for a, b in zip(
            torch.autograd.grad(y, (x, weight, bias), direction), expected, strict=True
        ):
            close(a, b)


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


# ---- block_end


@pytest.mark.parametrize(("dropout", "injected"), [(True, True), (False, False)])
@pytest.mark.parametrize(("shape", "tile"), TILED, indirect=["tile"])
def test_block_end(shape, dropout, injected, tile, device):
    batch, channels, groups, height, width = shape
    y, injection, z = (
        channels_last(batch, channels, height, width, device=device) for _ in range(3)
    )
    mask = torch.rand(batch, channels, device=device) + 0.5 if dropout else None
    first, second = affine(channels, device), affine(channels, device)
    given = injection if injected else None
    found = block_end(y, mask, given, z, *first, *second, groups)
    branch = y.double() * mask[:, :, None, None] if dropout else y.double()
    branch = branch + injection if injected else branch
    total = (z + exact_norm(branch, groups, *first)).relu()
    exact = exact_norm(total, groups, *second)
    # Few pixels may leave a group with little variance, and ε alone to divide by.
    tolerance = 1e-5 if height * width > 1 else 1e-3
    close(found, exact, tolerance)
    close(block_end_plain(y, mask, given, z, *first, *second, groups), exact, tolerance)
    with torch.enable_grad():
        composed = block_end(y.requires_grad_(), mask, given, z, *first, *second, groups)
    assert composed.requires_grad
    close(composed.detach(), exact, tolerance)


@pytest.mark.parametrize(("dropout", "injected"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each sample"])
@pytest.mark.parametrize(
    ("shape", "tile"), [case for case in TILED if case[0] != SHAPES[4]], indirect=["tile"]
)
def test_block_end_gradients(shape, each, dropout, injected, tile, device):
    batch, channels, groups, height, width = shape
    y, injection, z = (
        channels_last(batch, channels, height, width, device=device).requires_grad_()
        for _ in range(3)
    )
    mask = (torch.rand(batch, channels, device=device) > 0.3) * 1.5 if dropout else None
    size = (batch, channels) if each else (channels,)
    vectors = [torch.randn(size, device=device).requires_grad_() for _ in range(4)]
    direction = torch.randn(batch, channels, height, width, device=device)
    given = injection if injected else None
    inputs = [t for t in (y, given, z, *vectors) if t is not None]
    found = torch.autograd.grad(
        block_end(y, mask, given, z, *vectors, groups), inputs, direction, retain_graph=True
    )
    wide = [None if t is None else t.double() for t in (y, mask, given, z, *vectors)]
    exact = block_end_plain(*wide, groups)
    expected = torch.autograd.grad(exact, inputs, direction.double())
    for a, b, leaf in zip(found, expected, inputs, strict=True):
        assert a.shape == leaf.shape
        close(a, b, 1e-4)
    again = torch.autograd.grad(block_end(y, mask, given, z, *vectors, groups), inputs, direction)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


PARTS = [(True, True), (False, True), (True, False)]  # dropout, injection
# batch, channels, groups, height, width; groups that a program takes
HELD_BLOCKS = [((2, 32, 8, 4, 8), 4), ((1, 32, 2, 2, 4), 1), ((3, 8, 2, 1, 1), 2)]


@pytest.mark.parametrize(("sizes", "each", "parts"), pairs(HELD_BLOCKS, [False, True], PARTS))
def test_held_block_end_gradients_are_those_of_the_other_kernel(
    sizes, each, parts, device, monkeypatch
):
    (shape, block), (dropout, injected) = sizes, parts
    batch, channels, groups, height, width = shape
    held = norms.held_block
    assert held.groups_of_program(height * width, channels // groups, groups) == block
    y, injection, z, direction = (
        channels_last(batch, channels, height, width, device=device).bfloat16() for _ in range(4)
    )
    mask = (torch.rand(batch, channels, device=device) > 0.3) * 1.5 if dropout else None
    size = (batch, channels) if each else (channels,)
    vectors = [torch.randn(size, device=device).requires_grad_() for _ in range(4)]
    given = injection if injected else None
    inputs = [t.requires_grad_() for t in (y, given, z) if t is not None]
    launches = []
    real = held.launch
    monkeypatch.setattr(held, "launch", lambda *args: launches.append(real(*args)))
    results = []
    for enabled in (False, True):
        monkeypatch.setattr(held, "enabled", enabled)
        out = block_end(y, mask, given, z, *vectors, groups)
        results.append(torch.autograd.grad(out, [*inputs, *vectors], direction, retain_graph=True))
        (alone,) = torch.autograd.grad(out, y, direction)  # without that of z and the injection
        assert torch.equal(alone, results[-1][0])
    assert len(launches) == 2
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == expected.dtype
        # Rounded once: where the sums differ in the last place, so may the rounding.
        close(found, expected, 1e-2 if found.dtype == torch.bfloat16 else 1e-4)
    wide = [None if t is None else t.double() for t in (y, mask, given, z, *vectors)]
    exact = torch.autograd.grad(
        block_end_plain(*wide, groups), [*inputs, *vectors], direction.double()
    )
    for found, expected, truth in zip(results[1], results[0], exact, strict=True):
        error, other = ((x.double() - truth).norm() for x in (found, expected))
        assert error <= 1.1 * other + 1e-4 * (1 + truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)], ids=str)
def test_block_end_for_several_readers(read, dtype, device, monkeypatch):
    """Gradients from all readers are added, from those alone that have one."""
    y, z = (channels_last(2, 8, 2, 4, device=device).to(dtype).requires_grad_() for _ in range(2))
    vectors = [torch.randn(8, device=device).requires_grad_() for _ in range(4)]
    directions = [channels_last(2, 8, 2, 4, device=device).to(dtype) for _ in read]
    arguments = (y, None, None, z, *vectors, 2, 1e-5)
    inputs = [y, z, *vectors]
    launches = []
    held = norms.held_block
    real = held.launch
    monkeypatch.setattr(held, "launch", lambda *args: launches.append(real(*args)))
    results = block_end_for(4, *arguments)
    alone = block_end(*arguments)
    assert len({result.data_ptr() for result in results}) == 1
    assert all(torch.equal(result, alone) for result in results)
    found = torch.autograd.grad([results[i] for i in read], inputs, directions, retain_graph=True)
    assert len(launches) == (dtype == torch.bfloat16 and len(read) <= held.MOST_DOUTS)
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


def test_block_end_for_several_readers_without_autograd(device):
    y, z = (channels_last(1, 8, 2, 2, device=device) for _ in range(2))
    arguments = (y, None, None, z, *affine(8, device), *affine(8, device), 2, 1e-5)
    results = block_end_for(3, *arguments)
    assert all(result is results[0] for result in results)
    assert torch.equal(results[0], block_end(*arguments))


# batch, channels, groups, height, width; groups that a program takes
HELD_ENDS = [*HELD_BLOCKS, ((1, 16, 4, 32, 32), 4)]


@pytest.mark.parametrize(("sizes", "each", "parts"), pairs(HELD_ENDS, [False, True], PARTS))
def test_a_held_block_end_is_that_of_the_other_kernel(sizes, each, parts, device, monkeypatch):
    (shape, block), (dropout, injected) = sizes, parts
    batch, channels, groups, height, width = shape
    held = norms.held_block_forward
    sizes = height * width, channels // groups, groups
    assert norms.held_block.groups_of_program(*sizes, held.MOST) == block
    # A large mean, so that a variance from squares alone would be wrong.
    y, injection, z = (
        channels_last(batch, channels, height, width, device=device, offset=offset).bfloat16()
        for offset in (8.0, 0.0, 0.0)
    )
    mask = (torch.rand(batch, channels, device=device) > 0.3) * 1.5 if dropout else None
    size = (batch, channels) if each else (channels,)
    vectors = [torch.randn(size, device=device) for _ in range(4)]
    given = injection if injected else None
    maps = [y, mask, given, z]
    launches = []
    real = held.launch
    monkeypatch.setattr(held, "launch", lambda *args: launches.append(real(*args)))
    results = []
    for enabled in (False, True):
        monkeypatch.setattr(held, "enabled", enabled)
        # Into a part of something larger.
        whole = empty_channels_last((batch, channels + 8, height, width), y.dtype, y.device)
        out = whole.fill_(7.0)[:, 4:-4]
        stats = torch.empty(4, batch, groups, device=device)
        norms.residual.BlockEnd(groups, 1e-5).launch(maps, vectors, out, stats)
        assert (whole[:, :4] == 7).all()
        assert (whole[:, -4:] == 7).all()
        results.append((out, stats))
        assert torch.equal(block_end(*maps, *vectors, groups), out)  # without statistics
    assert len(launches) == 2
    (expected, others), (found, stats) = results
    close(stats, others, 1e-4)
    # Rounded once: where the sums differ in the last place, so may the rounding.
    close(found, expected, 1e-2)
    wide = [None if t is None else t.double() for t in (*maps, *vectors)]
    exact = block_end_plain(*wide, groups)
    error, other = ((x.double() - exact).norm() for x in (found, expected))
    assert error <= 1.02 * other + 1e-6 * exact.norm()


def test_a_held_block_end_hides_no_nan(device):
    y, z = (channels_last(2, 8, 2, 4, device=device).bfloat16() for _ in range(2))
    z[0, 1, 1, 2] = float("nan")
    vectors = [torch.ones(8, device=device) for _ in range(4)]
    assert norms.held_block_forward.takes([y, None, z, y], 2)
    found = block_end(y, None, None, z, *vectors, 2)
    assert found[0, :4].isnan().all()  # its group
    assert not found[0, 4:].isnan().any()
    assert not found[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_a_block_end_in_other_precisions_is_not_held(dtype, device, monkeypatch):
    monkeypatch.setattr(norms.held_block_forward, "launch", None)
    y, z = (channels_last(2, 8, 2, 4, device=device).to(dtype) for _ in range(2))
    vectors = [torch.randn(8, device=device, dtype=torch.float32).to(dtype) for _ in range(4)]
    found = block_end(y, None, None, z, *vectors, 2)
    wide = [t.double() for t in (y, z, *vectors)]
    exact = block_end_plain(wide[0], None, None, *wide[1:], 2)
    close(found, exact, {torch.float16: 2e-3, torch.float64: 1e-12}.get(dtype, 1e-5))


def test_what_is_not_held_of_a_block_end(device):
    y = channels_last(1, 8, 2, 4, device=device).bfloat16()
    takes = norms.held_block.takes
    assert takes([y, None, y, y, y, None, None], 2)
    assert not takes([y, None, y.float(), y, y, None, None], 2)
    assert not takes([y, None, y, y.contiguous(), y, None, None], 2)  # in another order
    assert not takes([y, None, y, y, y, None, None], 4)  # groups of two
    assert not takes([y[:, 1:7], None, y, y, y, None, None], 1)  # six channels
    assert not takes([y[..., :3], None, y, y, y, None, None], 2)  # six pixels
    large = empty_channels_last((1, 16, 32, 32), torch.bfloat16, y.device)
    assert not takes([large], 1)


def test_block_end_gradients_of_some_and_twice(device):
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


def test_block_end_mixes_precisions(device):
    y = channels_last(2, 8, 3, 4, device=device).bfloat16()
    z = channels_last(2, 8, 3, 4, device=device)
    norm = affine(8, device)
    whole = empty_channels_last((2, 12, 3, 4), torch.float32, y.device).zero_()
    found = block_end(y, None, None, z, *norm, *norm, 4, out=whole[:, 4:])
    close(found, block_end_plain(y.double(), None, None, z, *norm, *norm, 4))
    assert block_end(y, None, None, z, *norm, *norm, 4).dtype == torch.bfloat16
    assert bool((whole[:, :4] == 0).all())


# ---- fuse


def sources_of(levels, channels, height, width, device):
    made = []
    for level in levels:
        low = [-(-edge // 2**level) for edge in (height, width)]
        raw = channels_last(2, channels + 3, *low, device=device)[:, 3:]
        made.append(Source(raw, *affine(channels, device), level))
    return made


def exact_fuse(own, sources, groups):
    total = own.double()
    for source in sources:
        y = exact_norm(source.raw, groups, source.weight, source.bias)
        if source.levels:
            y = interpolate(y, scale_factor=float(2**source.levels))
        total = total + y[..., : own.shape[2], : own.shape[3]]
    return total.relu()


@pytest.mark.parametrize("levels", [(1,), (0, 0), (1, 2, 3), (0, 0, 1, 2)])
@pytest.mark.parametrize(("size", "tile"), FUSED, indirect=["tile"])
def test_fuse(levels, size, tile, device):
    own = channels_last(2, 12, *size, device=device)
    sources = sources_of(levels, 12, *size, device)
    found = fuse(own, sources, 4)
    exact = exact_fuse(own, sources, 4)
    close(found, exact)
    close(fuse_plain(own, sources, 4), exact)
    close(fuse(own.requires_grad_(), sources, 4).detach(), exact)


@pytest.mark.parametrize("levels", [(1,), (0, 0), (1, 2, 3), (0, 1), (0, 0, 1, 2)])
@pytest.mark.parametrize(("size", "tile"), FUSED, indirect=["tile"])
@pytest.mark.parametrize("relu", [True, False])
def test_fuse_gradients(levels, size, relu, tile, device):
    own = channels_last(2, 12, *size, device=device).requires_grad_()
    sources = [
        replace(s, raw=s.raw.requires_grad_(), weight=s.weight.requires_grad_(),
                bias=s.bias.requires_grad_())
        for s in sources_of(levels, 12, *size, device)
    ]  # fmt: skip
    inputs = [own, *(t for s in sources for t in (s.raw, s.weight, s.bias))]
    direction = torch.randn(2, 12, *size, device=device)
    found = torch.autograd.grad(fuse(own, sources, 4, relu=relu), inputs, direction)
    wide = [Source(s.raw.double(), s.weight.double(), s.bias.double(), s.levels) for s in sources]
    exact = fuse_plain(own.double(), wide, 4, relu=relu)
    expected = torch.autograd.grad(exact, inputs, direction.double())
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-4)


def test_fuse_without_own_and_without_scale(tile, device):
    size = (3, 4)
    one, other = (s.raw.requires_grad_() for s in sources_of((0, 0), 12, *size, device))
    weight, bias = (torch.randn(2, 12, device=device).requires_grad_() for _ in range(2))
    sources = [Source(one, weight, bias), Source(other, None, None)]
    exact = exact_norm(one, 4, None, None) * weight[..., None, None] + bias[..., None, None]
    exact = (exact + exact_norm(other, 4, None, None)).relu()
    direction = torch.randn(2, 12, *size, device=device)
    inputs = (one, other, weight, bias)
    expected = torch.autograd.grad(exact, inputs, direction.double())
    for function in (fuse, fuse_plain):
        with torch.no_grad():
            close(function(None, sources, 4), exact)
        found = torch.autograd.grad(function(None, sources, 4), inputs, direction)
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-4)


WHOLE_FUSIONS = [  # levels, size, channels, groups
    ((1, 2, 3), (8, 16), 16, 4),
    ((0, 1, 2), (8, 4), 32, 4),
    ((0, 0, 1), (2, 2), 8, 4),
    ((0, 0, 0), (1, 2), 64, 4),
    ((2,), (4, 4), 4, 4),
    ((0, 2), (4, 8), 16, 4),
    ((1, 2), (8, 8), 4, 2),  # tiles of fewer numbers than a warp has threads
    ((0, 1), (4, 4), 4, 2),
    ((0, 0), (4, 8), 28, 4),  # groups of 7
    ((0, 1, 2), (4, 4), 10, 2),
]


@pytest.mark.parametrize(
    ("fusion", "each", "dtype"),
    pairs(WHOLE_FUSIONS, [False, True], [torch.float32, torch.bfloat16]),
)
def test_whole_fuse_gradients_are_those_of_the_other_kernel(
    fusion, each, dtype, device, monkeypatch
):
    levels, size, channels, groups = fusion
    whole = norms.fusion_whole
    own = channels_last(2, channels, *size, device=device).to(dtype).requires_grad_()
    sources = []
    for i, source in enumerate(sources_of(levels, channels, *size, device)):
        shape = (2, channels) if each else (channels,)
        affine = [None, None]
        if i != 1 or len(levels) == 2:
            affine = [torch.randn(shape, device=device).requires_grad_() for _ in range(2)]
        sources.append(Source(source.raw.to(dtype).requires_grad_(), *affine, source.levels))
    tensors = [own, *(t for s in sources for t in (s.raw, s.weight, s.bias))]
    inputs = [t for t in tensors if t is not None]
    direction = torch.randn(2, channels, *size, device=device).to(dtype)
    launches = []
    if device.type == "cpu":
        monkeypatch.setattr(whole, "LEAST", 0)  # small tiles too: right in the interpreter
    elif not whole.takes(own, [s.raw for s in sources], levels, groups):
        pytest.skip("left to the other kernel")
    real = whole.launch
    monkeypatch.setattr(whole, "launch", lambda *args: launches.append(real(*args)))
    for relu in (True, False):
        results = []
        for enabled in (False, True):
            monkeypatch.setattr(whole, "enabled", enabled)
            y = fuse(own, sources, groups, relu=relu)
            results.append(torch.autograd.grad(y, inputs, direction, retain_graph=True))
            (alone,) = torch.autograd.grad(y, sources[0].raw, direction)  # without own
            assert torch.equal(alone, results[-1][1])
        for found, expected in zip(results[1], results[0], strict=True):
            assert found.dtype == expected.dtype
            close(found, expected, 1e-2 if found.dtype == torch.bfloat16 else 1e-5)
    assert len(launches) == 4


def test_what_is_not_fused_whole(device, monkeypatch):
    out = channels_last(1, 8, 4, 8, device=device)
    low, takes = out[:, :, :2, :4], norms.fusion_whole.takes
    assert takes(out, [out, low], (0, 1), 2)
    assert not takes(out, [low, out], (1, 0), 2)  # the one before has not what the next needs
    assert not takes(out, [out[:, :, :1]], (1,), 2)  # not of that resolution
    assert not takes(out[..., :6], [low[..., :3]], (1,), 2)
    assert takes(out[:, :6], [out[:, :6]], (0,), 2)  # groups of three
    monkeypatch.setattr(norms.fusion_whole, "masked", False)
    assert not takes(out[:, :6], [out[:, :6]], (0,), 2)
    assert not takes(torch.empty(1, 8, 128, 128), [], (), 2)


def test_fuse_gradients_of_some_and_twice(device):
    own = channels_last(2, 12, 4, 3, device=device)
    sources = sources_of((0, 1), 12, 4, 3, device)
    raw = sources[1].raw.requires_grad_()
    results = []
    for function in (fuse, fuse_plain):
        y = function(own, sources, 4)
        (first,) = torch.autograd.grad(y, raw, torch.ones_like(y), create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), raw)])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-4)
    with pytest.raises(ValueError, match="gradients"):
        fuse(own, sources, 4, out=torch.empty_like(own))


def test_fuse_of_nothing_and_without_relu(device):
    own = channels_last(2, 12, 4, 3, device=device)
    close(fuse(own, [], 4), own.relu())
    sources = sources_of((1,), 12, 4, 3, device)
    out = torch.empty_like(own)
    assert fuse(own, sources, 4, relu=False, out=out) is out
    close(out.relu(), exact_fuse(own, sources, 4))
    assert bool((out < 0).any())


# ---- sizes of tiles


@pytest.mark.parametrize("kernel", norms.TUNING)
def test_which_shapes_are_taken_in_chunks(kernel):
    """So that nothing is left out of `TILED` and `FUSED`."""
    tuning = replace(norms.TUNING[kernel], tile=CHUNKS)

    def in_chunks(channels, groups, height, width):
        pixels = height * width
        return choose_tile(tuning, pixels, channels, groups, 4).pixels < pixels

    assert [shape for shape in SHAPES if in_chunks(*shape[1:])] == SHAPES[:1]
    assert [size for size in [(7, 5), (1, 6)] if in_chunks(12, 4, *size)] == [(7, 5)]
    if kernel.startswith("norm"):  # what else these tests give to `tile`
        assert in_chunks(6, 3, 5, 4)
        assert in_chunks(8, 2, 4, 5)


@pytest.mark.parametrize(
    ("channels", "edge", "groups"),
    [(160, 32, 8), (320, 16, 8), (640, 8, 8), (1280, 4, 8), (32, 32, 8), (32, 32, 4), (64, 16, 8)],
)
def test_the_published_sizes_are_read_once(channels, edge, groups):
    tile = choose_tile(norms.TUNING["norm"], edge * edge, channels, groups, 2)
    assert tile.pixels == edge * edge
    assert tile.group_block * (channels // groups) * 2 >= 32  # bytes: one sector of memory
    assert 1 <= tile.warps <= 16
