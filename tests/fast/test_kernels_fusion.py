"""The fusion of streams in kernels, against PyTorch in double precision."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import interpolate

from gdeq.fast.kernels.norms import Source, fuse, fusion
from gdeq.fast.kernels.norms.fusion import Fuse
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
)
from pairs import pairs

pytestmark = pytest.mark.usefixtures("kernels_run")


@pytest.fixture
def launches(monkeypatch):
    names = "fuse", "pyramid_backward", "sum_backward"
    return Launches(monkeypatch, fusion, *names)


def tiles(monkeypatch, number):
    for name in ("forward", "sum"):
        monkeypatch.setitem(fusion.TUNING, name, replace(fusion.TUNING[name], tile=number))


def sources_of(levels, channels, size, device, kinds="shared", dtype=torch.float32, beside=6):
    """kinds: of the vectors of each source, or of all."""
    made = []
    kinds = [kinds] * len(levels) if isinstance(kinds, str) else kinds
    for level, kind in zip(levels, kinds, strict=True):
        low = [-(-edge // 2**level) for edge in size]
        raw = channels_last(2, channels, *low, device=device, dtype=dtype, offset=3, beside=beside)
        each = 2 if kind == "each" else None
        vectors = (None, None) if kind == "none" else affine(channels, device, each, grad=True)
        made.append(Source(raw.detach().requires_grad_(), *vectors, level))
    return made


def exact_fuse(own, sources, groups, size):
    total = 0.0 if own is None else own.double()
    for source in sources:
        y = exact_norm(source.raw, groups, source.weight, source.bias)
        if source.levels:
            y = interpolate(y, scale_factor=float(2**source.levels))
        total = total + y[..., : size[0], : size[1]]
    return total


def tensors_of(own, sources):
    given = (own, *(t for s in sources for t in (s.raw, s.weight, s.bias)))
    return [t for t in given if t is not None]


LEVELS = [(1,), (0, 0), (1, 2, 3), (0, 1), (0, 0, 1, 2)]


@pytest.mark.parametrize(
    ("levels", "size", "tile"), pairs(LEVELS, [(7, 5), (1, 6)], [1 << 13, 1 << 7])
)
def test_any_fusion(levels, size, tile, device, launches, monkeypatch):
    """Odd sizes: most gradients are made of those of `norm_act`."""
    tiles(monkeypatch, tile)
    own = channels_last(2, 12, *size, device=device).requires_grad_()
    sources = sources_of(levels, 12, size, device)
    exact = exact_fuse(own, sources, 4, size)
    direction = clear(torch.randn_like(own), exact)
    exact = exact.relu()
    with torch.no_grad():
        close(fuse(own, sources, 4), exact)
    assert launches == ["fuse"] * (len(levels) <= 3)
    close(fuse_plain(own, sources, 4), exact)
    check(fuse(own, sources, 4), tensors_of(own, sources), exact, direction)
    assert ("sum_backward" in launches) == (levels == (0, 0))


PYRAMIDS = [  # levels, size, channels, groups
    ((1, 2, 3), (16, 16), 16, 4),
    ((0, 1, 2), (8, 8), 32, 4),
    ((0, 0, 1), (4, 4), 16, 2),
    ((0, 0, 0), (1, 2), 64, 4),
    ((2,), (16, 16), 4, 4),
    ((0, 2), (16, 8), 16, 4),
    ((0, 0), (4, 8), 28, 4),  # groups of 7
    ((0, 1, 2), (16, 16), 10, 2),
]


@pytest.mark.parametrize(
    ("fused", "kinds", "dtype"),
    pairs(PYRAMIDS, ["shared", "each", "mixed"], [torch.float32, torch.bfloat16]),
)
def test_pyramids(fused, kinds, dtype, device, launches):
    levels, size, channels, groups = fused
    own = channels_last(2, channels, *size, device=device, dtype=dtype).requires_grad_()
    each = ["each", "none", "each"][: len(levels)] if kinds == "mixed" else kinds
    sources = sources_of(levels, channels, size, device, each, dtype)
    exact = exact_fuse(own, sources, groups, size)
    direction = clear(torch.randn_like(own), exact)
    y = fuse(own, sources, groups)
    found = check(y, tensors_of(own, sources), exact.relu(), direction)
    assert launches == ["fuse", "pyramid_backward", "pyramid_backward"]
    (alone,) = torch.autograd.grad(y, sources[0].raw, direction)  # without own
    assert torch.equal(alone, found[1])


# channels, groups, size; the last goes to aligned tiles
SUMS = [(56, 4, (16, 8)), (112, 4, (4, 4)), (24, 2, (4, 8)), (24, 4, (8, 8)), (60, 4, (3, 5))]


@pytest.mark.parametrize(
    ("sizes", "dtype", "kinds", "tile"),
    pairs(SUMS, HALF, [("each",) * 2, ("shared",) * 2, ("each", "none")], [8192, 256]),
)
def test_sums_of_two_norms(sizes, dtype, kinds, tile, device, launches, monkeypatch):
    tiles(monkeypatch, tile)
    channels, groups, size = sizes
    sources = sources_of((0, 0), channels, size, device, kinds, dtype, beside=16)
    exact = exact_fuse(None, sources, groups, size)
    direction = clear(torch.randn_like(sources[0].raw), exact)
    packed = Fuse(groups, 1e-5, (0, 0)).packed(*(s.raw for s in sources))
    assert (packed is None) == (sizes == SUMS[-1])
    y = fuse(None, sources, groups)
    check(y, tensors_of(None, sources), exact.relu(), direction)
    assert launches == ["fuse", "sum_backward", "sum_backward"]


@pytest.mark.parametrize(("offset", "scale"), [(100.0, 1.0), (1000.0, 2.0)])
def test_a_mean_that_is_many_deviations(offset, scale, device):
    """Without the pivot the digits of the variance would be gone."""
    raws = [(scale * channels_last(3, 56, 16, 16, device=device) + offset).half() for _ in "12"]
    y = fuse(None, [Source(raw, None, None) for raw in raws], 4)
    close(y, sum(exact_norm(raw, 4) for raw in raws).relu(), 2e-3)


def test_what_is_no_pyramid(device):
    def takes(out, raws, levels, groups=2):
        return Fuse(groups, 1e-5, levels).pyramid(out, raws) is not None

    out = channels_last(1, 8, 8, 8, device=device)
    low = out[:, :, :4, :4]
    assert takes(out, [out, low], (0, 1))
    assert not takes(out, [low, out], (1, 0))  # the one before has not what the next needs
    assert not takes(out, [out[:, :, :1]], (1,))  # not of that resolution
    assert not takes(out[..., :6], [low[..., :3]], (1,))
    assert takes(out[:, :6], [out[:, :6]], (0,))  # groups of three
    assert not takes(out[:, :4], [low[:, :4], low[:, :4, :2, :2]], (1, 2))  # 16 numbers
    large = torch.empty(1, 8, 128, 128, device="meta")
    assert not takes(large, [large], (0,))


def test_other_resolutions_and_an_own_stream_have_no_packed_tiles(device):
    raw, low = (channels_last(2, 56, n, n, device=device, dtype=torch.bfloat16) for n in (8, 4))
    for own, sources in (
        (None, [Source(raw, None, None), Source(low, None, None, 1)]),
        (raw, [Source(raw, None, None), Source(raw, None, None)]),
    ):
        exact = exact_fuse(own, sources, 4, (8, 8)).relu()
        close(fuse(own, sources, 4), exact, 1e-2)


def test_gradients_of_some_and_twice(device):
    own = channels_last(2, 12, 4, 3, device=device)
    sources = sources_of((0, 0), 12, (4, 3), device)
    raw = sources[1].raw
    check_twice([lambda f=f: f(own, sources, 4) for f in (fuse, fuse_plain)], [raw], 1e-4)


def test_nothing_to_add(device):
    own = channels_last(2, 12, 4, 3, device=device)
    close(fuse(own, [], 4), own.relu())
