# %% [markdown]
# # Capture and compile on a GPU
#
# A DEQ evaluates a small network many times in each step. On a GPU, launching the kernels can take
# longer than running them. Two remedies work together: `torch.compile` makes each evaluation of the
# cell cheaper, and `gdeq.capture` records a whole training step as one CUDA graph: the solve, the
# backward pass and the optimiser. On a CPU, the script below uses a smaller model, and the captured
# step runs eagerly.

# %%
import time
import warnings

import torch
from torch import nn

import gdeq

torch.manual_seed(0)
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
width, batch = (1024, 512) if gpu else (32, 16)
print(torch.cuda.get_device_name() if gpu else "a CPU")


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, z, x):
        return self.norm(x + 0.5 * self.outer(torch.relu(self.inner(z))))


def make_step(compile_cell):
    torch.manual_seed(0)
    cell = Cell(width).to(device)
    if compile_cell:
        cell.compile()  # in place: names in state_dict do not change
    deq = gdeq.DEQ(cell, solver=gdeq.Broyden(max_iter=18, tol=0))
    optimizer = torch.optim.SGD(deq.parameters(), lr=1e-3, fused=gpu)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(deq(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


# %% [markdown]
# ## Timing
#
# `tol=0` makes exactly `max_iter` steps, so that nothing waits for the device. With a tolerance, a
# captured solve still ends early.

# %%
x = torch.randn(batch, width, device=device)
y = torch.randn(batch, width, device=device)


def milliseconds(step, calls=50 if gpu else 2):
    for _ in range(6 if gpu else 1):  # compilation, and the calls before a recording
        step(x, y)
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        step(x, y)
    if gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / calls


with warnings.catch_warnings():
    if not gpu:
        warnings.simplefilter("ignore", gdeq.CaptureWarning)  # on a CPU it says so once
    eager = make_step(False)
    print(f"eager                 {milliseconds(eager):7.2f} ms a step")
    captured = gdeq.capture(make_step(False))
    print(f"captured              {milliseconds(captured):7.2f} ms a step")
    if gpu:
        compiled = gdeq.capture(make_step(True))
        print(f"compiled and captured {milliseconds(compiled):7.2f} ms a step")

# %% [markdown]
# ## The same numbers
#
# A captured step computes what the eager step computes. Train both from the same weights and
# compare the losses.

# %%
eager, captured = make_step(False), gdeq.capture(make_step(False))
with warnings.catch_warnings():
    if not gpu:
        warnings.simplefilter("ignore", gdeq.CaptureWarning)
    pairs = [(eager(x, y).item(), captured(x, y).item()) for _ in range(6)]
for number, (one, other) in enumerate(pairs):
    print(f"step {number}: eager {one:.5f}, captured {other:.5f}")

# %% [test]
assert all(abs(one - other) < 0.02 * one for one, other in pairs)
assert pairs[-1][0] < pairs[0][0]

# %% [markdown]
# ## Rules
#
# - A graph repeats only what the device did. Print, count and log outside the step.
# - Pass whatever changes as a tensor, including the learning rate:
#   `lr=torch.tensor(0.1, device="cuda")`.
# - Keep shapes fixed. A smaller last batch runs eagerly, with one warning.
# - After you change the solver or the gradient, call `step.reset()`.
#
# See also [speed on a GPU](../guides/speed.md). `gdeq bench` measures your own machine.
