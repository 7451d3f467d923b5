import contextlib
import os
import pickle

import data_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdeq.lab.data import DataError
from gdeq.lab.data.pickles import Array, read_pickle

DATA = np.arange(12, dtype=np.uint8).reshape(3, 4)


def read(tmp_path, data):
    path = tmp_path / "data_batch_1"
    path.write_bytes(data)
    return read_pickle(path)


@pytest.mark.parametrize("fortran", [False, True])
def test_the_python_2_form(tmp_path, fortran):
    data = data_files.python2_pickle([1, 2, 3], DATA, fortran)
    stored = read(tmp_path, data)
    assert stored[b"batch_label"] == b"batch 1 of 5"
    assert stored[b"labels"] == [1, 2, 3]
    assert (stored[b"data"].value == DATA).all()
    if np.lib.NumpyVersion(np.__version__) < "3.0.0":  # the hand-made pickle is a real one
        real = pickle.loads(data, encoding="bytes")
        assert (real[b"data"] == DATA).all()
        assert real[b"labels"] == [1, 2, 3]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_copies_saved_again_by_python_3(tmp_path, protocol):
    stored = {
        b"labels": [0, 9, 300, -1],
        "data": DATA,
        "x": (1, (), (1, 2), None, True, b"y" * 300),
    }
    back = read(tmp_path, pickle.dumps(stored, protocol))
    assert back[b"labels"] == [0, 9, 300, -1]
    assert back["x"] == stored["x"]
    assert isinstance(back["data"], Array)
    assert (back["data"].value == DATA).all()


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    trace = tmp_path / "executed"
    data = pickle.dumps({"labels": [1], "data": Evil(trace)}, protocol)
    with pytest.raises(DataError, match="was not read: it"):
        read(tmp_path, data)
    assert not trace.exists()
    pickle.loads(data)
    assert trace.exists()  # it was malicious


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02cos\nsystem\nU\x02id\x85R.", "asks for posix.system|asks for os.system"),
        (b"(S'id'\nios\nsystem\n.", "asks for os.system"),
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "asks for builtins.eval"),
        (b"\x80\x02c__builtin__\neval\nU\x011\x85R.", "asks for __builtin__.eval"),
        (b"\x80\x02cnumpy\nload\nU\x011\x85R.", "asks for numpy.load"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0bf2py.os.sys\x93.", "asks for numpy.f2py.os.sys"),
        (b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.", "calls numpy.dtype"),
        (b"\x80\x02cnumpy\nndarray\nK\x01\x85R.", "calls numpy.ndarray"),
        (b"\x80\x02]]R.", "not a pickle"),
        (b"\x80\x02cnumpy\nndarray\n}b.", "sets the state of numpy.ndarray"),
        (b"\x80\x02}}U\x01xK\x01sb.", "not a pickle"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "not a pickle"),
        (b"\x80\x02\x82\x01.", "asks for an extension"),
        (b"\x80\x02U\x01xQ.", "asks for a persistent object"),
    ],
)
def test_everything_else_is_refused(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, data)


def test_an_array_of_objects_is_refused(tmp_path):
    data = pickle.dumps(np.array([{}, []], dtype=object), 2)
    with pytest.raises(DataError, match=r"calls numpy\.dtype"):
        read(tmp_path, data)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x80\x02", b"\x80\x02h\x07.", b"\x80\x02e.", b"0."]
)
def test_what_is_no_pickle(tmp_path, data):
    with pytest.raises(DataError, match=r"cut short or not a pickle|was not read"):
        read(tmp_path, data)


@given(cut=st.integers(0, 250), at=st.integers(0, 250), value=st.integers(0, 255))
def test_damage_gives_a_data_error_or_data(tmp_path_factory, cut, at, value):
    data = bytearray(data_files.python2_pickle([1, 2, 3], DATA))
    whole = len(data)
    data[at % whole] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(data)
    with contextlib.suppress(DataError):
        read_pickle(path)
    path.write_bytes(data_files.python2_pickle([1, 2, 3], DATA)[: cut % whole])
    with pytest.raises(DataError):
        read_pickle(path)
