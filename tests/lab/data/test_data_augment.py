"""The batched code against one image at a time, done the slow and obvious way."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from gdeq.lab.data import Augment


def images(count=6, height=7, width=5, channels=2):
    made = torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator())
    return made.to(torch.uint8)


def one_by_one(augment, x, drawn):
    """Pad, crop, flip."""
    out = []
    for image, (top, left, flip, *_) in zip(x, drawn.tolist(), strict=True):
        mode = {"zeros": "constant", "reflect": "reflect"}[augment.fill]
        padded = F.pad(image.float()[None], (augment.crop,) * 4, mode=mode)[0]
        piece = padded[:, top : top + x.shape[2], left : left + x.shape[3]]
        out.append(piece.flip(-1) if flip and augment.flip else piece)
    return torch.stack(out).to(torch.uint8)


@pytest.mark.parametrize(
    ("fill", "crop"),
    [
        *((fill, crop) for fill in ("zeros", "reflect") for crop in (0, 1, 4)),
        ("zeros", 20),  # wider than the image
    ],
)
@pytest.mark.parametrize("flip", [False, True])
def test_move(fill, crop, flip, device):
    augment = Augment(crop=crop, fill=fill, flip=flip)
    x = images(40) | 1  # nothing in it looks like padding
    drawn = augment.draw(len(x), 7, 5, torch.Generator().manual_seed(1))
    moved = augment.move(x.to(device), drawn.to(device))
    assert moved.dtype == torch.uint8
    assert torch.equal(moved.cpu(), one_by_one(augment, x, drawn))


def test_images_of_other_sizes_with_the_same_options():
    """What is kept from the first ones must not be used for the others."""
    augment = Augment(crop=2, flip=True)
    for height, width in ((7, 5), (5, 7), (7, 5), (6, 6)):
        x = images(20, height, width)
        drawn = augment.draw(len(x), height, width, torch.Generator().manual_seed(2))
        assert torch.equal(augment.move(x, drawn), one_by_one(augment, x, drawn))


def test_draws_cover_their_range_evenly():
    drawn = Augment(crop=2).draw(20_000, 7, 5, torch.Generator().manual_seed(0))
    for column, top in enumerate((5, 5, 2)):
        share = drawn[:, column].bincount() / len(drawn)
        assert len(share) == top
        assert torch.allclose(share, torch.full((top,), 1 / top), atol=0.015)
    correlation = torch.corrcoef(drawn.double().T)
    assert (correlation - torch.eye(3)).abs().max() < 0.03


def test_the_draws_of_a_seed_are_fixed():
    """A change here makes every recorded run unrepeatable."""
    moves, edges = [[4, 0, 1], [4, 3, 1], [3, 4, 1]], [[1, 5, 0, 3], [0, 5, 0, 5], [2, 7, 2, 5]]
    for cutmix, mixed in ((0.0, [[]] * 3), (0.5, edges)):
        drawn = Augment(crop=2, cutmix=cutmix).draw(3, 7, 5, torch.Generator().manual_seed(0))
        assert drawn[:, :3].tolist() == moves
        assert drawn[:, 3:].tolist() == mixed


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    cutmix=st.floats(0.01, 1),
    seed=st.integers(0, 99),
)
def test_rectangles_lie_in_the_image(height, width, cutmix, seed):
    drawn = Augment(cutmix=cutmix).draw(50, height, width, torch.Generator().manual_seed(seed))
    top, bottom, left, right = drawn[:, 3:].T
    for first, end, size in ((top, bottom, height), (left, right, width)):
        assert (first >= 0).all()
        assert (first <= end).all()
        assert (end <= size).all()


@pytest.mark.parametrize("cutmix", [0.25, 1.0])
def test_rectangles_are_as_often_and_as_large_as_published(cutmix):
    drawn = Augment(cutmix=cutmix).draw(40_000, 64, 64, torch.Generator().manual_seed(0))
    top, bottom, left, right = drawn[:, 3:].T
    area = (bottom - top) * (right - left) / 64**2
    assert (area > 0).double().mean() == pytest.approx(cutmix, abs=0.01)
    # Of a side s the border leaves s − s²/4; over s with the density 2s that squared is
    expected = 2 * (1 / 4 - 1 / 10 + 1 / 96)
    assert area[area > 0].mean() == pytest.approx(expected, abs=0.01)
    for first, end in ((top, bottom), (left, right)):
        middle = (first + end)[area > 0].double().mean() / 2
        assert middle == pytest.approx(32, abs=0.5)


def test_mix(device):
    augment = Augment(cutmix=0.7)
    x, y = torch.randn(51, 3, 7, 5), torch.randint(0, 4, (51,))
    drawn = augment.draw(51, 7, 5, torch.Generator().manual_seed(1))
    images, labels = augment.mix(x.to(device), y.to(device), 4, drawn.to(device))
    assert (images.shape, labels.shape) == ((50, 3, 7, 5), (50, 4))
    areas = set()
    for n, (top, bottom, left, right) in enumerate(drawn[:50, 3:].tolist()):
        expected, share = x[n].clone(), torch.zeros(4, dtype=torch.float64)
        expected[:, top:bottom, left:right] = x[n + 1, :, top:bottom, left:right]
        assert torch.equal(images[n].cpu(), expected)
        area = (bottom - top) * (right - left)
        share[y[n]] += 1 - area / 35
        share[y[n + 1]] += area / 35
        torch.testing.assert_close(labels[n].cpu().double(), share, rtol=0, atol=1e-7)
        areas.add(area)
    assert len(areas) > 10
    assert 0 in areas


def test_nothing_to_do_returns_the_same():
    augment = Augment()
    x = images()
    drawn = augment.draw(len(x), 7, 5, torch.Generator())
    assert augment.move(x, drawn) is x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutmixx": 3}, "no option 'cutmixx'; did you mean 'cutmix'"),
        ({"crop": -1}, "Augment.crop must be at least 0"),
        ({"fill": "mirror"}, "Augment.fill must be 'zeros' or 'reflect'"),
        ({"flip": 1}, "Augment.flip must be True or False"),
        ({"crop": 1.5}, "Augment.crop must be an integer"),
        ({"cutmix": 2}, "Augment.cutmix must be at least 0 and at most 1, got 2"),
        ({"cutmix": True}, "Augment.cutmix must be a number, got True"),
        ({"alternate": 1}, "Augment.alternate must be True or False"),
        ({"alternate": True}, "Augment.alternate .* flip=false flips none: set augment.flip"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Augment(**options)
