"""Triton's interpreter, which runs the kernels where there is no GPU, made quicker."""

from __future__ import annotations

import inspect

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


def patch_once_a_launch() -> None:
    """What a launch has made of `triton.language` is not made again at each call in a kernel.

    Triton does so, at each call of one function by another, and finds everything as it wants it:
    a quarter of the time of a kernel, and no bit of its results.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another Triton goes about it in another way: slow, and right
    language, patch = interpreter.tl, interpreter._patch_lang
    patched: set[frozenset[str]] = set()  # in this launch

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(fn):
        found = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        names = frozenset(m.__name__ for m in found if m in (language, language.core))
        if names in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not patched:  # the launch itself, which takes it back at its end
            scope.__class__ = Launch
        patched.add(names)
        return scope

    interpreter._patch_lang = patch_once
