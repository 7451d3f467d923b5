"""Triton, or what stands in for it where it is not installed: there the plain functions remain."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda f: f) if function is None else function


__all__ = ["jit", "tl", "triton"]
