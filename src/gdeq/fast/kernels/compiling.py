"""Compile all kernels of a step side by side, before the first step runs.

Triton compiles a kernel when it is first launched, one after another.  `compile_ahead` runs a step
whose kernels are not launched: each is handed to a pool of threads, and the next follows at once.
The compiler releases Python's lock for most of its work, so that the step takes about as long as
its kernels' Python is read, and the real one finds them all in the cache.

The step's results are garbage: kernels leave their outputs as they found them.  So it must not

- read a value of the device on the host and act on it (neither does a step that `gdeq.capture`
  records: a solver with tol=0, or one that stops by ``stop="whole"`` on the device);
- check values once and remember the outcome;
- move anything that is needed later, but for what `compile_ahead` puts back: parameters, buffers
  and gradients of the modules that it is given, and the random generators.  Leave the optimiser's
  step out: it has no kernels of ours.

    compile_ahead(lambda: loss(model(images), labels).backward(), model)
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from gdeq.context import hidden
from gdeq.fast.kernels.device import triton_is_there

THREADS = min(16, os.cpu_count() or 1)


def compile_ahead(step: Callable[[], Any], *modules: nn.Module) -> int:
    """Compile the kernels that the step launches; how many were new.  See above for what it may do.

    modules: whose parameters, buffers and gradients are afterwards what they were before.  Where
    there is no Triton, or one that cannot compile aside, nothing is done.
    """
    if not _can_compile_aside():
        return 0
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    kept = [(t, t.detach().clone(), t.grad) for t in tensors]
    for tensor, _, _ in kept:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices), hidden(), compiling() as compiled:
            step()
    finally:
        with torch.no_grad():
            for tensor, value, gradient in kept:
                tensor.grad = gradient
                tensor.copy_(value)
    return len(compiled)


def _can_compile_aside() -> bool:
    if not triton_is_there() or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    try:
        from triton.runtime import _async_compile  # noqa: F401, PLC0415 (Triton 3.4 and later)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def compiling() -> Iterator[list[Any]]:
    """While open, launches of Triton kernels, in any thread, compile instead; at the end all are
    compiled, or the first error is raised.  Yields the list of those that were not known."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    launch, lock = JITFunction.run, threading.Lock()
    compiled: list[Any] = []

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # The backward pass on a GPU runs in a thread of its own, which has another context.
        with lock:
            outer = active_mode.set(mode)
            try:
                return launch(self, *args, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(outer)

    with ThreadPoolExecutor(THREADS) as pool:
        mode = AsyncCompileMode(pool)
        JITFunction.run = compile_instead
        try:
            yield compiled
        finally:
            JITFunction.run = launch
            waiting = list(mode.future_kernels.values())
            mode.__exit__(None, None, None)  # waits for all
            compiled += [future.kernel for future in waiting]
            list(pool.map(_make_launcher, compiled))


def _make_launcher(kernel: Any) -> None:
    """Up to Triton 3.6 each signature has a launcher in C, which the first launch would compile;
    from now on it is in the cache on disk."""
    from triton.runtime import driver  # noqa: PLC0415

    make = getattr(driver.active, "launcher_cls", None)
    if make is not None:
        make(kernel.src, kernel.metadata)
