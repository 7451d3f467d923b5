import http.server
import sys
import threading

import data_files
import pytest

from gdeq.lab.data.cifar10 import CIFAR10
from gdeq.lab.data.sets import SETS

NOWHERE = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # nothing listens on the discard port
NO_PROGRAM = ("gdeq-no-such-program",)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setattr("gdeq.lab.data.fetch.RETRIES", 0)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("GDEQ_DATA", raising=False)


@pytest.fixture
def cifar10(monkeypatch):
    """Make "cifar10" a set of 18 images that nothing outside can supply; returns a changer."""

    def change(**options):
        standard = {"md5": data_files.md5s(), "url": NOWHERE, "npm": NO_PROGRAM}
        standard["pickle_md5"] = data_files.pickle_md5s()
        recipe = CIFAR10(**standard | options)
        monkeypatch.setitem(SETS, "cifar10", recipe)
        return recipe

    change()
    return change


@pytest.fixture
def fake_program(tmp_path):
    """A command that copies a file to where it is run, as `npm pack` does."""

    def make(file):
        code = f"import shutil; shutil.copy({str(file)!r}, '.')"
        return (sys.executable, "-c", code)

    return make


def visible(root):
    """What a user sees in a folder."""
    return sorted(p.name for p in root.iterdir() if p.name != ".gdeq.lock")


@pytest.fixture(name="visible")
def visible_fixture():
    return visible


class Server:
    """Serves `files` by name; `script` says how each request goes wrong, one entry a request."""

    def __init__(self, files):
        self.files, self.script, self.asked, self.length = files, [], [], True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, request):
        self.asked.append(request.path)
        fault = self.script.pop(0) if self.script else None
        if isinstance(fault, tuple):
            request.send_error(*fault)
            return
        body = self.files[request.path.removeprefix("/")]
        request.send_response(200)
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[:fault])

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def serve():
    started = []

    def start(files):
        started.append(Server(files))
        return started[-1]

    yield start
    for server in started:
        server.close()
