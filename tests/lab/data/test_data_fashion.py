import gzip
import hashlib
import tracemalloc

import data_files
import pytest

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.fashion_mnist import OFFICIAL_MD5

pytestmark = pytest.mark.usefixtures("fashion")


def assert_whole(root):
    loaded = load("fashion-mnist", root)
    made = {name: gzip.decompress(data) for name, data in data_files.idx_files().items()}
    assert loaded.train_x.shape == (5, 1, 28, 28)
    assert loaded.test_x.shape == (2, 1, 28, 28)
    assert loaded.train_x.numpy().tobytes() == made["train-images-idx3-ubyte.gz"][16:]
    assert bytes(loaded.test_y.tolist()) == made["t10k-labels-idx1-ubyte.gz"][8:]
    assert len(loaded.classes) == 10
    loaded.train_x[0] = 0  # the tensors own their memory


def test_the_idx_files_in_the_root(tmp_path):
    folder = data_files.write_idx(tmp_path / "fashion-mnist")
    assert prepare("fashion-mnist", tmp_path) == folder
    assert_whole(tmp_path)


@pytest.mark.parametrize("below", ["", "data/fashion", "FashionMNIST/raw"])
def test_a_folder_as_source(below, tmp_path, visible):
    data_files.write_idx(tmp_path / "usb" / below)
    root = tmp_path / "data"
    assert prepare("fashion-mnist", root, tmp_path / "usb") == root / "fashion-mnist"
    assert visible(root / "fashion-mnist") == sorted(OFFICIAL_MD5)
    assert_whole(root)


def test_the_authors_files_are_downloaded(tmp_path, fashion, serve):
    server = serve(data_files.idx_files())
    fashion(url=server.url)
    prepare("fashion-mnist", tmp_path)
    assert_whole(tmp_path)
    assert len(server.asked) == 4


def test_nothing_found_lists_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"gdeq data fashion-mnist --from PATH") as caught:
        prepare("fashion-mnist", tmp_path)
    assert "the authors' files in http://127.0.0.1:9: no connection" in str(caught.value)


def test_a_wrong_bit_and_a_missing_file(tmp_path):
    folder = data_files.write_idx(tmp_path / "fashion-mnist")
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    data = bytearray(labels.read_bytes())
    data[-1] ^= 1
    labels.write_bytes(data)
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte has MD5 .*gdeq data fashion"):
        load("fashion-mnist", tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match=r"cannot read .*t10k-labels-idx1-ubyte\.gz: No such file"):
        load("fashion-mnist", tmp_path)


@pytest.mark.parametrize("name", OFFICIAL_MD5)
def test_a_file_that_claims_to_be_huge_takes_no_memory(tmp_path, fashion, name):
    """Even one whose sum is known."""
    folder = data_files.write_idx(tmp_path / "fashion-mnist")
    (folder / name).write_bytes(gzip.compress(bytes(300 * 2**20), 1))
    fashion(md5={n: hashlib.md5((folder / n).read_bytes()).hexdigest() for n in OFFICIAL_MD5})
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 48,000,000 bytes when unpacked"):
        load("fashion-mnist", tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    tracemalloc.stop()
