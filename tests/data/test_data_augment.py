"""The batched code against one image at a time, done the slow and obvious way."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gdeq.data import Augment


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


@pytest.mark.parametrize("fill", ["zeros", "reflect"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("crop", [0, 1, 4])
def test_move(fill, flip, crop, device):
    augment = Augment(crop=crop, fill=fill, flip=flip)
    x = images(40)
    drawn = augment.draw(len(x), 7, 5, torch.Generator().manual_seed(1))
    moved = augment.move(x.to(device), drawn.to(device))
    assert moved.dtype == torch.uint8
    assert torch.equal(moved.cpu(), one_by_one(augment, x, drawn))


def test_zeros_may_be_wider_than_the_image():
    augment = Augment(crop=20)
    x = images(40) | 1
    drawn = augment.draw(len(x), 7, 5, torch.Generator().manual_seed(1))
    assert torch.equal(augment.move(x, drawn), one_by_one(augment, x, drawn))


def test_images_of_other_sizes_with_the_same_options():
    """What is kept from the first ones must not be used for the others."""
    augment = Augment(crop=2)
    for height, width in ((7, 5), (5, 7), (7, 5), (6, 6)):
        x = images(20, height, width)
        drawn = augment.draw(len(x), height, width, torch.Generator().manual_seed(2))
        assert torch.equal(augment.move(x, drawn), one_by_one(augment, x, drawn))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_cut(size, device):
    augment = Augment(crop=0, flip=False, cutout=size)
    x = torch.ones(50, 3, 7, 5, device=device)
    drawn = augment.draw(50, 7, 5, torch.Generator().manual_seed(1))
    cut = augment.cut(x, drawn.to(device)).cpu()
    for image, (*_, row, column) in zip(cut, drawn.tolist(), strict=True):
        expected = torch.ones(3, 7, 5)
        top, left = row - size // 2, column - size // 2
        expected[:, max(top, 0) : top + size, max(left, 0) : left + size] = 0
        assert torch.equal(image, expected)


def test_draws_cover_their_range_evenly():
    augment = Augment(crop=2, cutout=3)
    drawn = augment.draw(20_000, 7, 5, torch.Generator().manual_seed(0))
    for column, top in enumerate((5, 5, 2, 7, 5)):
        share = drawn[:, column].bincount() / len(drawn)
        assert len(share) == top
        assert torch.allclose(share, torch.full((top,), 1 / top), atol=0.015)
    correlation = torch.corrcoef(drawn.double().T)
    assert (correlation - torch.eye(5)).abs().max() < 0.03


def test_nothing_to_do_returns_the_same():
    augment = Augment(crop=0, flip=False)
    x = images()
    drawn = augment.draw(len(x), 7, 5, torch.Generator())
    assert augment.move(x, drawn) is x
    assert augment.cut(x, drawn) is x


def test_options_are_checked():
    with pytest.raises(TypeError, match="no option 'cutoff'; did you mean 'cutout'"):
        Augment(cutoff=3)
    with pytest.raises(ValueError, match=r"Augment.crop must be at least 0"):
        Augment(crop=-1)
    with pytest.raises(ValueError, match=r"Augment.fill must be 'zeros' or 'reflect'"):
        Augment(fill="mirror")
    with pytest.raises(TypeError, match=r"Augment.flip must be True or False"):
        Augment(flip=1)
    with pytest.raises(TypeError, match=r"Augment.cutout must be an integer"):
        Augment(cutout=1.5)
    with pytest.raises(AttributeError):
        Augment().crop = 3
