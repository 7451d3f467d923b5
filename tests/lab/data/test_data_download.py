"""The official files over HTTP, from a server on this machine."""

import hashlib

import data_files
import pytest

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.fetch import download

ARCHIVE = "cifar-10-binary.tar.gz"


@pytest.fixture
def server(tmp_path, serve, cifar10):
    """Serves the archive from which "cifar10" is then made; `change` as `cifar10`."""
    folder = data_files.write_binary(tmp_path / "published" / "cifar-10-batches-bin")
    archive = data_files.tar(tmp_path / "published" / ARCHIVE, folder, "cifar-10-batches-bin/")
    made = serve({ARCHIVE: archive.read_bytes()})
    made.body = archive.read_bytes()
    made.md5 = hashlib.md5(made.body).hexdigest()
    made.change = lambda **options: cifar10(
        **{"url": f"{made.url}/{ARCHIVE}", "url_md5": made.md5} | options
    )
    made.change()
    return made


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


def test_download_and_prepare(server, root, visible):
    told = []
    prepare("cifar10", root, progress=lambda *args: told.append(args))
    assert len(load("cifar10", root).train_x) == 15
    assert visible(root) == ["cifar-10-batches-bin"]
    size = len(server.body)
    assert (f"downloading {ARCHIVE}", size, size) in told
    assert ("checked", 6, 6) in told


def test_a_broken_connection_is_tried_again(server, root, monkeypatch):
    monkeypatch.setattr("gdeq.lab.data.fetch.RETRIES", 2)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.script = [1000, 500, None]
    prepare("cifar10", root)
    assert len(server.asked) == 3
    assert len(load("cifar10", root).train_x) == 15


def test_no_length_given(server, tmp_path):
    server.length = False
    told = []
    found = download(
        f"{server.url}/{ARCHIVE}", server.md5, tmp_path, lambda *args: told.append(args)
    )
    assert found.read_bytes() == server.body
    assert {total for _, _, total in told} == {None}


@pytest.mark.parametrize(
    ("script", "change", "message"),
    [
        ([1000], {}, r"the connection broke .*1000 bytes read"),
        ([(404, "Not Found")], {}, "the server answered 404 Not Found"),
        ([], {"url_md5": "0" * 32}, f"{ARCHIVE} is not the official file: MD5 hash of downloaded"),
        (
            [],
            {"md5": data_files.md5s() | {"data_batch_2.bin": "0" * 32}},
            r"data_batch_2 has MD5 .*, the official one has 000",
        ),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_no_data_set(
    server, root, visible, script, change, message
):
    server.script = script
    server.change(**change)
    with pytest.raises(DataError, match=message):
        prepare("cifar10", root)
    assert len(server.asked) == 1
    assert visible(root) == []
    with pytest.raises(DataError, match="gdeq data cifar10"):
        load("cifar10", root)


def test_no_connection(tmp_path):
    with pytest.raises(DataError, match=r"no connection .*refused"):
        download("http://127.0.0.1:9/x", "0" * 32, tmp_path, lambda *args: None)
    assert list(tmp_path.iterdir()) == []
