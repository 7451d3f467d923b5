"""Read the pickles of `cifar-10-batches-py` without running anything that they ask for.

A pickle may import and call any function: that is what makes it dangerous.  Here every global
becomes a `_Global` that knows its name and, when "called", makes one of the three things in which
NumPy writes a uint8 array.  Whatever else a file asks for is an error.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdeq.lab.data.dataset import Pixels
from gdeq.lab.data.errors import DataError, reading

_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_DTYPE = "numpy.dtype"
_ENCODE = "_codecs.encode"  # how Python 3 writes bytes in protocol 2
_ALLOWED = (*_RECONSTRUCT, _DTYPE, _ENCODE, "numpy.ndarray")


class _RefusedError(Exception):
    pass


@dataclass
class Array:
    """A uint8 array; empty until the pickle sets its state."""

    value: Pixels | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Byte) or not isinstance(data, bytes):
            raise _RefusedError("it holds an array of something other than bytes")
        flat = np.frombuffer(data, np.uint8)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Byte:
    """The dtype u1, the only one there is."""

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: nothing to choose for one byte."""


@dataclass(frozen=True)
class _Global:
    """A function or class that a pickle names."""

    name: str

    def __call__(self, *args: Any) -> Any:
        """The value that the real one would have returned."""
        if self.name in _RECONSTRUCT:
            return Array()
        if self.name == _DTYPE and args[0] in ("u1", b"u1", "|u1", b"|u1"):
            return _Byte()
        if self.name == _ENCODE and args[1:] in (("latin1",), ("latin-1",)):
            return args[0].encode("latin-1")
        raise _RefusedError(f"it calls {self.name}")

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError(f"it sets the state of {self.name}")


class _Reader(pickle._Unpickler):
    """Of the two in Python the one in Python: the other allocates whatever size a file claims."""

    def find_class(self, module: str, name: str) -> _Global:
        found = _Global(f"{module}.{name}")
        if found.name not in _ALLOWED:
            raise _RefusedError(f"it asks for {found.name}")
        return found

    def get_extension(self, code: int) -> None:
        raise _RefusedError("it asks for an extension")

    def persistent_load(self, pid: Any) -> None:
        raise _RefusedError("it asks for a persistent object")


def read_pickle(path: Path) -> Any:
    """What is stored in `path`: dicts, lists, tuples, text, bytes, numbers and `Array`."""
    with reading(path):
        data = path.read_bytes()
    try:
        return _Reader(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as error:
        raise DataError(
            f"{path} was not read: {error}; the official file holds nothing but numbers and names"
        ) from None
    except Exception as error:  # a damaged pickle fails in every way that there is
        raise DataError(f"{path} is cut short or not a pickle: copy it again") from error
