"""Triton's interpreter, which runs the kernels where there is no GPU, made quicker.

Its time is not numpy's but Python's, around each operation: types are made, compared and looked up
again and again.  Here this is done once, and no bit of a result changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from typing import Any

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


def make_quicker() -> None:
    if interpreter is None or os.environ.get("TRITON_INTERPRET") != "1":
        return  # the compiler, which shares the types, is left alone
    for change in (
        patch_once_a_launch,
        call_directly,
        check_what_is_told,
        make_types_once,
        broadcast_if_needed,
    ):
        with contextlib.suppress(AttributeError):  # another Triton goes about it in another way
            change()


def patch_once_a_launch() -> None:
    """What a launch has made of `triton.language` is not made again at each call in a kernel.

    Triton does so, at each call of one function by another, and finds everything as it wants it.
    """
    language, patch = interpreter.tl, interpreter._patch_lang
    patched: set[frozenset[str]] = set()  # in this launch

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        found = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(m.__name__ for m in found if m in (language, language.core))

    def patch_once(fn):
        names = languages(fn)
        if names in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not patched:  # the launch itself, which takes it back at its end
            scope.__class__ = Launch
        patched.add(names)
        return scope

    interpreter._patch_lang = patch_once


def call_directly() -> None:
    """Around each function of the language are one that looks for ``_semantic`` and one that gives
    it, made anew at each launch."""
    if not hasattr(interpreter, "_patch_builtin"):
        return
    language, semantic = interpreter.tl, interpreter.interpreter_semantic

    def direct(member):
        function = inspect.unwrap(member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    @functools.cache
    def calls(package):
        found = inspect.getmembers(package, language.core.is_builtin)
        return [(name, direct(member)) for name, member in found]

    def patch_builtin(package, builder, scope):
        for name, call in calls(package):
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin


def check_what_is_told() -> None:
    """Sums and products of integers are computed in 64 bits too, and what has overflown is told in
    debugging alone."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def make_types_once() -> None:
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    block, number_type = core.block_type, interpreter._get_np_dtype
    make_block, make_tensor = block.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}

    def known_block(kind, element_ty, shape):
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        # 4.0 is equal to 4, and is refused.
        key = (*sizes, *map(type, sizes), element_ty.name, getattr(element_ty, "address_space", 0))
        if key not in blocks:
            made = object.__new__(kind)
            make_block(made, element_ty, shape)
            blocks[key] = made
        return blocks[key]

    def tensor_of_type(self, handle, type):
        if not hasattr(type, "of_tensors"):
            make_tensor(self, handle, type)
            type.of_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        vars(self).update(type.of_tensors, handle=handle)

    def numpy_type(type):
        if not hasattr(type, "of_numpy"):
            type.of_numpy = number_type(type)
        return type.of_numpy

    block.__new__, block.__init__ = known_block, lambda *_, **__: None
    core.tensor.__init__ = tensor_of_type
    interpreter._get_np_dtype = numpy_type
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)
    for kind in (core.dtype, core.pointer_type, block):
        kind.__eq__ = _or_the_same(kind.__eq__)


def _or_the_same(equal):
    return lambda a, b: a is b or equal(a, b)


def broadcast_if_needed() -> None:
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def unless_alike(self, a, b):
        alike = a.type.is_block() == b.type.is_block()
        if alike and a.type.is_block():
            alike = a.type.shape.values == b.type.shape.values
        return (a, b) if alike else broadcast(self, a, b)

    semantic.broadcast_impl_value = unless_alike
