"""Read the pickles of `cifar-10-batches-py` without unpickling.

A pickle is a program for a small stack machine; what makes it dangerous is that the machine may
import and call anything.  This one has no instruction that does either: a global becomes a `Name`,
and a "call" is looked up among the three forms in which NumPy writes a uint8 array.  Whatever else
a file asks for is an error.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdeq.lab.data.dataset import Pixels
from gdeq.lab.data.errors import DataError, reading


class Name(NamedTuple):
    """A global, by name alone."""

    module: str
    name: str


@dataclass
class Array:
    """A uint8 array; empty until its BUILD instruction."""

    value: Pixels | None = None


class _Byte:
    """The dtype u1, the only one there is."""


class _RefusedError(Exception):
    pass


_RECONSTRUCT = (
    Name("numpy.core.multiarray", "_reconstruct"),
    Name("numpy._core.multiarray", "_reconstruct"),
)
_DTYPE = Name("numpy", "dtype")
_ENCODE = Name("_codecs", "encode")  # how Python 3 writes bytes in protocol 2
_ALLOWED = (*_RECONSTRUCT, Name("numpy", "ndarray"), _DTYPE, _ENCODE)

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONSTRUCTORS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(path: Path) -> Any:
    """What is stored in `path`: dicts, lists, tuples, text, bytes, numbers and `Array`."""
    with reading(path):
        data = path.read_bytes()
    try:
        return _run(data)
    except _RefusedError as error:
        raise DataError(
            f"{path} was not read: {error}; the official file holds nothing but numbers and names"
        ) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{path} is cut short or not a pickle: copy it again") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        op = opcode.name
        if op in ("PROTO", "FRAME"):
            pass
        elif op in _VALUES:
            stack.append(arg)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _CONSTRUCTORS:
            stack.append(_CONSTRUCTORS[op]())
        elif op in ("BINSTRING", "SHORT_BINSTRING"):
            stack.append(arg.encode("latin-1"))  # Python 2 text: the bytes themselves
        elif op in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif op == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif op in _TUPLES:
            count = _TUPLES[op]
            stack[-count:] = [tuple(stack[-count:])]
        elif op == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif op == "APPENDS":
            items = _since_mark(stack)
            stack[-1].extend(items)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif op == "SETITEMS":
            items = _since_mark(stack)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op == "GLOBAL":
            stack.append(_named(*arg.split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(_named(module, name))
        elif op == "REDUCE":
            args, name = stack.pop(), stack.pop()
            stack.append(_described(name, args))
        elif op == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif op == "STOP":
            (result,) = stack
            return result
        else:
            raise _RefusedError(f"it holds the instruction {op}")
    raise ValueError("no STOP")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while at >= 0 and stack[at] is not _MARK:
        at -= 1
    if at < 0:
        raise ValueError("no mark")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _named(module: Any, name: Any) -> Name:
    found = Name(module, name)
    if found not in _ALLOWED:
        raise _RefusedError(f"it asks for {module}.{name}")
    return found


def _described(name: Any, args: tuple[Any, ...]) -> Any:
    """The value that a call would have returned."""
    if name in _RECONSTRUCT:
        return Array()
    if name == _DTYPE and args[0] in ("u1", b"u1", "|u1", b"|u1"):
        return _Byte()
    if name == _ENCODE and len(args) == 2 and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    raise _RefusedError(f"it calls {name!r}")


def _fill(thing: Any, state: Any) -> None:
    if isinstance(thing, _Byte):
        return  # byte order and alignment: nothing to choose for one byte
    if not isinstance(thing, Array):
        raise _RefusedError(f"it sets the state of a {type(thing).__name__}")
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _Byte) or not isinstance(data, bytes):
        raise _RefusedError("it holds an array of something other than bytes")
    flat = np.frombuffer(data, np.uint8)
    thing.value = flat.reshape(shape, order="F" if fortran else "C")
