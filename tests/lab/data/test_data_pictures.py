"""Pictures: the recipe, folders, and batches of patches and of whole pictures."""

import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gdeq.lab.data import DataError, prepare
from gdeq.lab.data import bsd as module
from gdeq.lab.data.bsd import BSD, KERNELS, pack, read_kernels, unpack
from gdeq.lab.data.pictures import (
    PatchBatches,
    WholeBatches,
    held_out,
    pictures_of,
    read_folder,
)
from gdeq.lab.data.sets import SETS
from gdeq.lab.tasks.imaging import Imaging
from gdeq.lab.training import config as configs
from gdeq.lab.training.process import Process

REAL = Path(__file__).resolve().parents[3] / "data"
NAMES = {"Train400": ("a.png", "b.png"), "BSD68": ("c.png",), "Set12": ("d.png", "e.png")}


def image(height, width, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (height, width), np.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Five pictures and eight kernels, which the recipe knows."""
    given, sums = tmp_path / "given", {}
    for seed, (pool, names) in enumerate(NAMES.items()):
        (given / pool).mkdir(parents=True)
        images = [image(20 + n, 30, seed) for n in range(len(names))]
        for name, pixels in zip(names, images, strict=True):
            Image.fromarray(pixels).save(given / pool / name)
        sums[f"{pool}.bin"] = hashlib.md5(pack(images)).hexdigest()
    size = max(start + 8 * k * k for k, start in module.PLACES)
    content = bytearray(size)
    for k, start in module.PLACES:
        content[start : start + 8 * k * k] = np.full(k * k, 1 / k**2).tobytes()
    (given / KERNELS).write_bytes(content)
    sums[KERNELS] = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(SETS, "bsd", BSD(md5=sums, names=NAMES))
    return given


def test_pictures_are_taken_from_a_folder_and_kept_unpacked(folder, tmp_path):
    prepare("bsd", tmp_path / "data", folder)
    pools = SETS["bsd"].load(tmp_path / "data")
    assert [len(pool) for pool in pools[:3]] == [2, 1, 2]
    assert np.array_equal(pools.train[1], image(21, 30, 0))
    assert np.array_equal(pools.set12[0], image(20, 30, 2))
    assert [len(kernel) for kernel in pools.kernels] == [19, 17, 15, 27, 13, 21, 23, 23]
    again = prepare("bsd", tmp_path / "other", tmp_path / "data" / "bsd")
    assert sorted(path.name for path in again.iterdir()) == sorted(SETS["bsd"].md5)


def test_pictures_are_fetched_one_by_one(folder, tmp_path, serve, monkeypatch):
    published = {
        f"{module.HOMES[pool]}/{name}": (folder / pool / name).read_bytes()
        for pool, names in NAMES.items()
        for name in names
    }
    server = serve(published | {KERNELS: (folder / KERNELS).read_bytes()})
    sums = SETS["bsd"].md5
    made = BSD(md5=sums, names=NAMES, pictures=server.url, kernels=server.url)
    monkeypatch.setitem(SETS, "bsd", made)
    told = []
    prepare("bsd", tmp_path / "data", progress=lambda *what: told.append(what))
    assert len(made.load(tmp_path / "data").train) == 2
    assert ("downloading pictures", 5, 5) in told


def test_a_part_of_the_training_pictures_can_be_the_test(folder, tmp_path):
    prepare("bsd", tmp_path / "data", folder)
    config = configs.load("denoise", ["test=validation", "shrunk=[]"])
    task = Imaging(config, Process(torch.device("cpu")), tmp_path / "data")
    assert [len(task.train), len(task.test)] == [1, 1]
    assert np.array_equal(task.test[0], image(20, 30, 0))
    assert np.array_equal(task.train[0], image(21, 30, 0))


def test_a_changed_picture_is_refused(folder, tmp_path):
    Image.fromarray(image(20, 30, 9)).save(folder / "BSD68" / "c.png")
    with pytest.raises(DataError, match="BSD68 has MD5"):
        prepare("bsd", tmp_path / "data", folder)


def test_packed_pictures_are_the_same():
    images = [image(3, 5), image(4, 2, 1)]
    found = unpack(pack(images))
    assert len(found) == 2
    assert all(np.array_equal(found[n], images[n]) for n in range(2))
    with pytest.raises(DataError, match="not as many pixels"):
        unpack(pack(images)[:-1])


def test_some_pictures_are_held_out():
    images = [image(3, 5, number) for number in range(7)]
    train, held = held_out(pictures_of(images), every=3)
    assert [len(train), len(held)] == [4, 3]
    assert all(np.array_equal(held[n], images[3 * n]) for n in range(3))
    assert all(np.array_equal(train[n], images[m]) for n, m in enumerate((1, 2, 4, 5)))


def test_a_folder_without_pictures_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no pictures"):
        read_folder(tmp_path)
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "colour.png")
    assert read_folder(tmp_path)[0].shape == (4, 6)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_a_picture_of_more_than_8_bits_is_refused(tmp_path, kind):
    """Pillow makes white of everything above 255."""
    Image.fromarray(np.full((4, 6), 1000, kind)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match="more than 8 bits a pixel"):
        read_folder(tmp_path)


@pytest.mark.parametrize("edge", [9000, 20_000])
def test_a_picture_that_claims_to_be_huge_is_refused_before_it_is_read(tmp_path, edge):
    path = tmp_path / "huge.png"
    Image.fromarray(np.zeros((1, 1), np.uint8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = edge.to_bytes(4, "big") * 2  # width and height, in the header
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(DataError, match="has more than 67,108,864 pixels: make it smaller"):
        read_folder(tmp_path)


# -- batches ---------------------------------------------------------------------------------------

SOME = pictures_of([np.arange(20 * 30).reshape(20, 30).astype(np.uint8), image(17, 12)])


def noisy(clean, which, draw):
    return clean + 0.1 * draw(*clean.shape[1:])


def exactly(clean, which, draw):
    return clean


def patches(measure=exactly, **options):
    return PatchBatches(SOME, 6, measure, **{"patch": 5, "each": 9, "seed": 3} | options)


def test_a_patch_is_a_part_of_its_picture():
    found = set()
    for _, (measured, clean) in patches(plain=True).epoch():
        assert torch.equal(measured, clean)
        for patch in (255 * clean).round().byte().numpy()[:, 0]:
            places = [
                (number, row, column)
                for number in range(2)
                for row in range(SOME.sizes[number][0] - 4)
                for column in range(SOME.sizes[number][1] - 4)
                if np.array_equal(SOME[number][row : row + 5, column : column + 5], patch)
            ]
            assert places
            found.add(places[0])
    assert len(found) > 12  # of 18
    assert {number for number, *_ in found} == {0, 1}


def test_all_eight_symmetries_of_a_patch_come_about():
    square = pictures_of([image(5, 5)])
    batches = PatchBatches(square, 64, exactly, patch=5, each=64)
    _, (_, clean) = next(batches.epoch())
    seen = {patch.numpy().tobytes() for patch in (255 * clean).round().byte()}
    whole = torch.from_numpy(square[0])
    ways = {
        w.rot90(n).contiguous().numpy().tobytes() for n in range(4) for w in (whole, whole.flip(0))
    }
    assert seen == ways


def test_batches_depend_on_seed_epoch_and_number_alone():
    whole = list(patches(noisy).epoch(2))
    rest = list(patches(noisy).epoch(2, start=2))
    halves = [dict(patches(noisy, rank=r, world_size=2).epoch(2)) for r in (0, 1)]
    for index, batch in rest:
        assert all(map(torch.equal, batch, whole[index][1]))
    for index, batch in whole:
        parts = [torch.cat(pair) for pair in zip(*(half[index] for half in halves), strict=True)]
        assert all(map(torch.equal, batch, parts))
    assert not torch.equal(whole[0][1][0], next(patches(noisy).epoch(3))[1][0])
    assert not torch.equal(whole[0][1][0], whole[1][1][0])


def test_a_patch_must_fit():
    with pytest.raises(ValueError, match="patches of 13 pixels do not fit"):
        patches(patch=13)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_whole_pictures_come_once_each_with_those_of_their_size(size):
    pictures = pictures_of([image(6, 8, n) if n % 2 else image(8, 6, n) for n in range(5)])
    batches = WholeBatches(pictures, size, noisy, each=2)
    assert len(list(batches.epoch())) == len(batches)
    truths = [truth for _, (_, found) in batches.epoch() for truth in found]
    assert len(truths) == 10
    for n in range(5):
        wanted = torch.from_numpy(pictures[n]).float() / 255
        assert sum(t.shape[1:] == wanted.shape and torch.equal(t[0], wanted) for t in truths) == 2


def test_a_test_has_the_same_noise_each_time_whatever_the_batch():
    pictures = pictures_of([image(6, 8, n) for n in range(5)])
    found = [
        torch.cat([batch[0] for _, batch in WholeBatches(pictures, size, noisy).epoch()])
        for size in (2, 5, 5)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.skipif(not (REAL / "bsd").is_dir(), reason="run `gdeq data bsd` for this one")
def test_the_real_ones():
    pools = BSD().load(REAL)
    assert [len(pool) for pool in pools[:3]] == [400, 68, 12]
    assert {tuple(size) for size in pools.train.sizes} == {(180, 180)}
    for kernel in read_kernels((REAL / "bsd" / KERNELS).read_bytes()):
        assert abs(kernel.sum() - 1) < 1e-9
        assert kernel.min() >= 0
