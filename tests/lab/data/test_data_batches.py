import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdeq.lab.data import Augment, Batches, ImageBatches

MEAN, STD = (0.3, 0.6), (0.2, 0.5)
AUGMENT = Augment(crop=2, flip=True)
MIXED = replace(AUGMENT, cutmix=0.6, alternate=True)


def data(count=23, device="cpu"):
    """Each image holds its own number, so that a batch shows what is in it."""
    x = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 6, 6)
    return x.contiguous().to(device), torch.arange(count).to(device)


def varied(count=23, device="cpu"):
    x = torch.randint(0, 256, (count, 2, 6, 6), generator=torch.Generator().manual_seed(5))
    return x.to(torch.uint8).to(device), torch.arange(count).to(device)


def make(count=23, batch_size=5, source=data, device="cpu", **options):
    x, y = source(count, device)
    return ImageBatches(x, y, batch_size, **{"mean": MEAN, "std": STD, "classes": count} | options)


def order(batches, epoch=0, start=0):
    return [labels.tolist() for _, (_, labels) in batches.epoch(epoch, start)]


def flat(lists):
    return [item for part in lists for item in part]


def same(a, b):
    return all(
        i == j and torch.equal(x, v) and torch.equal(y, w)
        for (i, (x, y)), (j, (v, w)) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_normalised(device, channels_last):
    options = {"source": varied, "device": device, "channels_last": channels_last}
    index, (images, labels) = next(iter(make(**options, shuffle=False).epoch()))
    mixed, shares = next(make(**options, augment=MIXED, classes=30).epoch())[1]
    x, _ = varied()
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    assert index == 0
    torch.testing.assert_close(images.cpu(), (x[:5] / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert images.dtype == mixed.dtype == shares.dtype == torch.float32
    assert shares.shape == (5, 30)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for batch in (images, mixed):
        assert batch.is_contiguous(memory_format=layout)
        assert batch.device.type == labels.device.type == device.type


def test_an_epoch_is_a_permutation():
    batches = make(batch_size=5, drop_last=False)
    seen = order(batches, 0)
    assert [len(part) for part in seen] == [5, 5, 5, 5, 3]
    assert len(batches) == 5
    assert sorted(flat(seen)) == list(range(23))
    assert flat(seen) != list(range(23))
    assert flat(order(make(shuffle=False, drop_last=False), 7)) == list(range(23))
    assert [len(part) for part in order(make(batch_size=5))] == [5] * len(make(batch_size=5))
    assert len(make(batch_size=5)) == len(make(count=20, batch_size=5, drop_last=False)) == 4


def test_orders_depend_on_seed_and_epoch_alone():
    first = order(make(seed=1), 2)
    torch.manual_seed(99)
    batches = make(seed=1, augment=AUGMENT)
    order(batches, 0)
    assert order(batches, 2) == first
    assert order(make(seed=1), 3) != first
    assert order(make(seed=2), 2) != first
    # (seed, epoch) is not (seed + epoch)
    assert order(make(seed=2), 1) != first


def test_the_order_of_a_seed_is_fixed():
    """A change here makes every recorded run unrepeatable."""
    assert order(make(count=8, batch_size=8, seed=0), 0) == [[2, 4, 7, 1, 6, 0, 5, 3]]


def test_the_augmented_batches_of_a_seed_are_fixed():
    """A change here makes every recorded run unrepeatable."""
    batches, seen = make(source=varied, augment=AUGMENT, seed=1), hashlib.sha256()
    for epoch in range(2):
        for _, (images, labels) in batches.epoch(epoch):
            assert labels.dtype == torch.int64
            seen.update(images.numpy().tobytes() + labels.numpy().tobytes())
    assert seen.hexdigest()[:16] == "3a4125f9bd209188"


@pytest.mark.parametrize("augment", [AUGMENT, MIXED])
@pytest.mark.parametrize("drop_last", [False, True])
def test_resuming_inside_an_epoch_is_exact(device, drop_last, augment):
    options = {"source": varied, "device": device, "augment": augment, "drop_last": drop_last}
    whole = list(make(**options).epoch(4))
    for start in range(len(whole) + 1):
        assert same(whole[start:], list(make(**options).epoch(4, start=start)))


def test_augmentation_depends_on_the_batch():
    x = torch.arange(72, dtype=torch.uint8).reshape(1, 2, 6, 6).expand(20, -1, -1, -1).contiguous()
    batches = ImageBatches(x, torch.zeros(20).long(), 5, mean=MEAN, std=STD, augment=AUGMENT)
    seen = [images for epoch in range(3) for _, (images, _) in batches.epoch(epoch)]
    assert len({images.numpy().tobytes() for images in seen}) == len(seen)


def test_augmented_images_are_moved_then_normalised():
    """A white image: padding is black."""
    x = torch.full((64, 2, 6, 6), 255, dtype=torch.uint8)
    y = torch.zeros(64, dtype=torch.int64)
    batches = ImageBatches(x, y, 64, mean=MEAN, std=STD, augment=AUGMENT)
    ((_, (images, _)),) = batches.epoch()
    for channel in range(2):
        levels = images[:, channel].unique().tolist()
        black, white = -MEAN[channel] / STD[channel], (1 - MEAN[channel]) / STD[channel]
        assert levels == pytest.approx([black, white], rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("augment", [None, AUGMENT, MIXED])
def test_ranks_share_the_batch_of_one_process(world_size, augment, device):
    options = {"batch_size": 12, "count": 50, "source": varied, "device": device}
    options |= {"augment": augment, "seed": 3}
    alone = list(make(**options).epoch(1))
    ranks = [
        list(make(**options, rank=rank, world_size=world_size).epoch(1))
        for rank in range(world_size)
    ]
    for step, (index, (images, labels)) in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        assert [part[0] for part in parts] == [index] * world_size
        assert {len(part[1][1]) for part in parts} == {12 // world_size}
        assert torch.equal(torch.cat([part[1][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1][1] for part in parts]), labels)


@given(
    count=st.integers(2, 40),
    batch_size=st.integers(2, 9),
    cutmix=st.floats(0.01, 1),
    shuffle=st.booleans(),
)
def test_shares_are_those_of_the_pixels(count, batch_size, cutmix, shuffle):
    """Each image holds its own number: its pixels say how much of which image there is."""
    augment = Augment(cutmix=cutmix)
    options = {"count": count, "batch_size": batch_size, "shuffle": shuffle, "drop_last": False}
    own = order(make(**options), 2)
    for index, (images, labels) in make(**options, augment=augment).epoch(2):
        numbers = ((images[:, 0] * STD[0] + MEAN[0]) * 255).round().long().flatten(1)
        counted = torch.stack([image.bincount(minlength=count) for image in numbers])
        torch.testing.assert_close(labels, counted / 36, rtol=0, atol=1e-7)
        torch.testing.assert_close(labels.sum(1), torch.ones(len(labels)), rtol=0, atol=1e-7)
        following = own[index][1:] + own[index][:1]
        for shares, pair in zip(labels, zip(own[index], following, strict=True), strict=True):
            assert set(shares.nonzero().flatten().tolist()) <= set(pair)


def test_mixed_images_are_finished_ones():
    """Crop and flip are those without cutmix, of an image and of the one that follows."""
    options = {"source": varied, "seed": 4}
    plain = list(make(**options, augment=AUGMENT).epoch(1))
    mixed = list(make(**options, augment=replace(AUGMENT, cutmix=0.6)).epoch(1))
    changed = 0
    for (_, (images, _)), (_, (found, _)) in zip(plain, mixed, strict=True):
        own, following = found == images, found == images.roll(-1, dims=0)
        assert (own | following).all()
        changed += int((~own).any(dim=(1, 2, 3)).sum())
    assert 4 < changed < 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("augment", [AUGMENT, MIXED])
def test_batches_on_a_gpu_ask_the_host_nothing(augment):
    batches = make(source=varied, device="cuda", augment=augment)
    list(batches.epoch(0))  # looks for what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(batches.epoch(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def flipped(epoch, count=64, **options):
    """Of each sample, whether it is flipped in this epoch; its left half is black."""
    x, y = torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(count)
    x[..., 2:] = 255
    batches = ImageBatches(x, y, mean=(0.5,), std=(0.5,), drop_last=False, **options)
    found = torch.zeros(count, dtype=torch.bool)
    for _, (images, labels) in batches.epoch(epoch):
        found[labels] = images[:, 0, 0, 0] > 0
    return found


def test_alternate_flips_every_image_in_every_second_epoch():
    augment = Augment(flip=True, alternate=True)
    first = flipped(0, batch_size=10, augment=augment)
    assert 16 < first.sum() < 48
    for epoch in range(1, 5):
        assert torch.equal(flipped(epoch, batch_size=10, augment=augment), first ^ bool(epoch % 2))
    # Of the seed, the sample and the epoch alone.
    assert torch.equal(flipped(2, batch_size=7, shuffle=False, augment=augment), first)
    assert not torch.equal(flipped(0, batch_size=10, seed=1, augment=augment), first)
    coins = [flipped(epoch, batch_size=10, augment=Augment(flip=True)) for epoch in (0, 1)]
    assert not torch.equal(*coins)
    assert not torch.equal(coins[0], ~coins[1])


@given(
    count=st.integers(1, 40),
    per_rank=st.integers(1, 7),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_evaluation_sees_every_sample_once(count, per_rank, world_size, shuffle):
    options = {"count": count, "batch_size": per_rank * world_size, "world_size": world_size}
    seen = []
    for rank in range(world_size):
        batches = make(**options, rank=rank, shuffle=shuffle, drop_last=False)
        parts = order(batches)
        assert all(1 <= len(part) <= per_rank for part in parts)
        assert len(parts) in (len(batches) - 1, len(batches))
        seen += flat(parts)
    assert sorted(seen) == list(range(count))


def test_the_data_is_not_changed():
    x, y = varied()
    before = x.clone()
    batches = ImageBatches(x, y, 23, mean=MEAN, std=STD, augment=AUGMENT, shuffle=False)
    for _, (images, _) in batches.epoch():
        images.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "multiple of their number 4: try 8 or 12"),
        ({"batch_size": 3, "world_size": 4}, "number 4: try 4"),
        ({"batch_size": 24}, r"larger than the data set \(23 samples\): lower batch_size"),
        ({"batch_size": 1, "augment": MIXED}, "cutmix takes pixels .* batch_size is 1"),
        ({"augment": Augment(crop=6, fill="reflect")}, "crop=6 with fill='reflect' .*6×6"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_batches_of_any_tensors():
    """As many as there are, of any kind; the same order as that of images."""
    _, y = data()
    made = Batches((y, 2 * y, y[:, None].double()), 5, seed=3)
    for (index, batch), expected in zip(made.epoch(1), order(make(seed=3), 1), strict=True):
        assert [tensor.flatten().tolist() for tensor in batch] == [
            expected,
            [2 * n for n in expected],
            expected,
        ]
        assert 0 <= index < len(made) == 4
    with pytest.raises(ValueError, match="one row a sample, these have 23, 22"):
        Batches((y, y[1:]), 5)
    with pytest.raises(ValueError, match="the data set is empty"):
        Batches((y[:0],), 5)
