import struct

import data_files
import numpy as np
import pytest

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.fashion_mnist import OFFICIAL_MD5, parse_idx

pytestmark = pytest.mark.usefixtures("fashion")


def assert_whole(root):
    loaded = load("fashion-mnist", root)
    made = data_files.idx_files()
    assert loaded.train_x.shape == (5, 1, 28, 28)
    assert loaded.test_x.shape == (2, 1, 28, 28)
    assert loaded.train_x.numpy().tobytes() == made["train-images-idx3-ubyte"][16:]
    assert bytes(loaded.test_y.tolist()) == made["t10k-labels-idx1-ubyte"][8:]
    assert len(loaded.classes) == 10
    loaded.train_x[0] = 0  # the tensors own their memory


@pytest.mark.parametrize("packed", [False, True])
def test_the_idx_files_in_the_root(packed, tmp_path):
    folder = data_files.write_idx(tmp_path / "fashion-mnist", packed)
    assert prepare("fashion-mnist", tmp_path) == folder
    assert_whole(tmp_path)


def test_the_debian_folder_is_read_where_it_is(tmp_path, fashion):
    debian = data_files.write_idx(tmp_path / "usr", packed=True)
    fashion(debian=debian)
    assert prepare("fashion-mnist", tmp_path / "data") == debian
    assert not (tmp_path / "data").exists()
    assert_whole(tmp_path / "data")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "usr/share/datasets/fashion-mnist", "FashionMNIST/raw"])
def test_a_folder_as_source(packed, below, tmp_path, visible):
    data_files.write_idx(tmp_path / "usb" / below, packed)
    root = tmp_path / "data"
    assert prepare("fashion-mnist", root, tmp_path / "usb") == root / "fashion-mnist"
    assert visible(root / "fashion-mnist") == sorted(OFFICIAL_MD5)
    assert_whole(root)


def test_a_debian_package_as_source(tmp_path, visible):
    deb = data_files.write_deb(tmp_path / "dataset-fashion-mnist_1_all.deb")
    prepare("fashion-mnist", tmp_path / "data", deb)
    assert_whole(tmp_path / "data")
    assert visible(tmp_path / "data") == ["fashion-mnist"]


def test_apt_is_the_last_way(tmp_path, fashion, fake_program):
    deb = data_files.write_deb(tmp_path / "dataset-fashion-mnist_1_all.deb")
    fashion(apt=fake_program(deb))
    prepare("fashion-mnist", tmp_path / "data")
    assert_whole(tmp_path / "data")


def test_nothing_found_lists_what_to_do(tmp_path):
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist") as caught:
        prepare("fashion-mnist", tmp_path)
    assert "gdeq-no-such-program is not installed" in str(caught.value)
    assert "gdeq data fashion-mnist --from PATH" in str(caught.value)


@pytest.mark.parametrize("keep", [30, 100, 300])
def test_a_truncated_package(tmp_path, keep):
    deb = data_files.write_deb(tmp_path / "f.deb")
    deb.write_bytes(deb.read_bytes()[:keep])
    with pytest.raises(DataError, match="cut short"):
        prepare("fashion-mnist", tmp_path / "data", deb)


def test_packages_of_other_kinds(tmp_path):
    other = tmp_path / "other.deb"
    other.write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match="is not a Debian package"):
        prepare("fashion-mnist", tmp_path / "data", other)
    zstd = data_files.write_deb(tmp_path / "z.deb", "data.tar.zst")
    with pytest.raises(DataError, match=r"dpkg -x .*z.deb FOLDER"):
        prepare("fashion-mnist", tmp_path / "data", zstd)


def test_a_truncated_gz_and_a_wrong_bit(tmp_path):
    folder = data_files.write_idx(tmp_path / "fashion-mnist", packed=True)
    images = folder / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"cut short or damaged.*gdeq data fashion-mnist"):
        load("fashion-mnist", tmp_path)
    data_files.write_idx(folder, packed=False)
    plain = bytearray((folder / "t10k-labels-idx1-ubyte").read_bytes())
    plain[-1] ^= 1
    (folder / "t10k-labels-idx1-ubyte").write_bytes(plain)
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte has MD5"):
        load("fashion-mnist", tmp_path)


def test_idx_headers(tmp_path):
    name = "train-images-idx3-ubyte"
    good = struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 2, 2) + bytes(range(8))
    assert (parse_idx(good, name, tmp_path) == np.arange(8).reshape(2, 2, 2)).all()
    with pytest.raises(DataError, match=r"announces \(2, 2, 2\) and holds 7"):
        parse_idx(good[:-1], name, tmp_path)
    with pytest.raises(DataError, match="not an idx file of labels"):
        parse_idx(good, "train-labels-idx1-ubyte", tmp_path)
    for bad in (b"", good[:10], b"\0\0\x0d" + good[3:]):
        with pytest.raises(DataError, match="not an idx file of images"):
            parse_idx(bad, name, tmp_path)
