"""Kernels compiled side by side: for a GPU that need not be there, in a process of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:  # of an H100 that nobody has to have
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=None):
        return 0

triton.runtime.driver.set_active(Driver())
from gdeq.fast.kernels import compiling, device, norms
from gdeq.fast.kernels.norms import group_norm, tensors
tensors.available = lambda device: True
launch, kernel = JITFunction.run, group_norm._norm_kernel
model = torch.nn.BatchNorm2d(8)
before = {name: t.clone() for name, t in model.state_dict().items()}

def step():
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    norms.norm_act(x, 2, model.weight, model.bias).sum().backward()
    model(x)  # moves its statistics
    with torch.no_grad():
        model.weight.mul_(2)
    other = lambda: norms.norm_act(x[:, :4].detach(), 2, None, None)
    thread = threading.Thread(target=other)  # as the backward pass is, on a GPU
    thread.start()
    thread.join()

# Compiled, and nothing has changed.
torch.manual_seed(3)
model.weight.grad = gradient = torch.ones(8)
assert compiling.compile_ahead(step, model) == 3
assert JITFunction.run is launch
known = [k for cache in kernel.device_caches.values() for k in cache[0].values()]
assert len(known) == 2 and all(k.asm["cubin"] for k in known)
assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
assert model.weight.grad is gradient and model.bias.grad is None
assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
assert compiling.compile_ahead(step, model) == 0

# An error leaves launches as they were.
def fails():
    step()
    raise KeyError("mine")

try:
    compiling.compile_ahead(fails, model)
except KeyError:
    assert JITFunction.run is launch
    assert torch.equal(model.weight, before["weight"])
else:
    raise AssertionError

# Without Triton nothing is done.
compiling.triton_is_there = lambda: False
assert compiling.compile_ahead(lambda: 1 / 0) == 0
"""


def test_compile_ahead(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
