"""The official archive over HTTP, from a server on this machine."""

import http.server
import threading

import data_files
import pytest

from gdeq.lab.data import DataError, load, prepare
from gdeq.lab.data.fetch import download

ARCHIVE = "cifar-10-binary.tar.gz"
PART = ".gdeq-cifar-10-binary.tar.gz.part"


class Server:
    """Serves `body`; `script` says how each request goes wrong, one entry per request."""

    def __init__(self):
        self.body = b""
        self.script = []
        self.ranges = True
        self.length = True
        self.asked = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/{ARCHIVE}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, request):
        asked = request.headers.get("Range")
        self.asked.append(asked)
        fault = self.script.pop(0) if self.script else None
        if isinstance(fault, tuple):
            request.send_error(*fault)
            return
        start = int(asked[6:-1]) if asked and self.ranges else 0
        if start >= len(self.body):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.body)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if self.length:
            request.send_header("Content-Length", str(len(self.body) - start))
        request.end_headers()
        stop = len(self.body) if fault is None else start + fault
        request.wfile.write(self.body[start:stop])

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(tmp_path):
    made = Server()
    folder = data_files.write_binary(tmp_path / "published" / "cifar-10-batches-bin")
    archive = data_files.tar(tmp_path / "published" / ARCHIVE, folder, "cifar-10-batches-bin/")
    made.body = archive.read_bytes()
    yield made
    made.close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


def quiet(what, done, total):
    pass


def test_download_and_prepare(server, cifar10, root, visible):
    cifar10(url=server.url)
    told = []
    prepare("cifar10", root, progress=lambda *args: told.append(args))
    assert len(load("cifar10", root).train_x) == 15
    assert visible(root) == ["cifar-10-batches-bin"]
    size = len(server.body)
    assert (f"downloading {ARCHIVE}", size, size) in told
    assert ("checked", 6, 6) in told


def test_a_broken_connection_is_taken_up_again(server, cifar10, root):
    cifar10(url=server.url)
    server.script = [1000, 500, None]
    prepare("cifar10", root)
    assert server.asked == [None, "bytes=1000-", "bytes=1500-"]
    assert len(load("cifar10", root).train_x) == 15


def test_half_a_download_is_no_data_set_and_the_next_run_goes_on(server, cifar10, root, visible):
    cifar10(url=server.url)
    server.script = [1000, 0, 0]
    with pytest.raises(DataError, match=r"the connection ended after 1,000 of [\d,]+ bytes"):
        prepare("cifar10", root)
    assert visible(root) == [PART]
    with pytest.raises(DataError, match="gdeq data cifar10"):
        load("cifar10", root)
    server.script, server.asked = [], []
    prepare("cifar10", root)
    assert server.asked == ["bytes=1000-"]
    assert visible(root) == ["cifar-10-batches-bin"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.ranges = False
    part = tmp_path / "part"
    part.write_bytes(b"z" * 700)
    assert download(server.url, part, quiet).read_bytes() == server.body


def test_a_part_that_is_already_whole(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(server.body)
    assert download(server.url, part, quiet).read_bytes() == server.body
    assert len(server.asked) == 1


def test_a_part_that_is_longer_than_the_file_starts_over(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(server.body + b"more")
    assert download(server.url, part, quiet).read_bytes() == server.body


def test_no_length_given(server, tmp_path):
    server.length = False
    told = []
    got = download(server.url, tmp_path / "part", lambda *args: told.append(args))
    assert got.read_bytes() == server.body
    assert told[-1][1:] == (len(server.body), None)


def test_a_wrong_beginning_is_found_by_its_contents_and_not_kept(server, cifar10, root, visible):
    """A part of another file: the length is right in the end, the archive is not."""
    cifar10(url=server.url)
    root.mkdir()
    (root / PART).write_bytes(b"x" * 900)
    with pytest.raises(DataError, match=r"the official archive .* is not an archive"):
        prepare("cifar10", root)
    assert visible(root) == []
    prepare("cifar10", root)
    assert server.asked == ["bytes=900-", None]


def test_wrong_contents(server, cifar10, root, visible):
    cifar10(url=server.url, md5=data_files.md5s() | {"data_batch_2": "0" * 32})
    with pytest.raises(DataError, match=r"data_batch_2 has MD5 .*, the official one has 000"):
        prepare("cifar10", root)
    assert visible(root) == []


def test_the_server_says_no(server, cifar10, root):
    cifar10(url=server.url)
    server.script = [(404, "Not Found")]
    with pytest.raises(DataError, match="the server answered 404 Not Found"):
        prepare("cifar10", root)
    assert len(server.asked) == 1


def test_no_connection(tmp_path):
    with pytest.raises(DataError, match=r"no connection .*refused"):
        download("http://127.0.0.1:9/x", tmp_path / "part", quiet)
    assert list(tmp_path.iterdir()) == []
