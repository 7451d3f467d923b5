# %% [markdown]
# # An inverse problem with a two-part state
#
# Iterative reconstruction is a fixed-point iteration, so a DEQ can learn its parameters from
# examples. We restore blurred, noisy signals by total variation, with the primal–dual method of
# Chambolle and Pock: its state has two parts, the signal and a dual variable. What is learned is
# how strongly to smooth.

# %%
import torch
from matplotlib import pyplot as plt
from torch import nn

import gdeq

torch.manual_seed(0)
n = 48
kernel = torch.exp(-0.5 * (torch.arange(-4, 5) / 1.5) ** 2)
blur = torch.zeros(n, n)
for i in range(n):
    for j, weight in enumerate(kernel / kernel.sum()):
        blur[i, min(max(i + j - 4, 0), n - 1)] += weight


def signals(count):
    """Piecewise constant signals, and their blurred, noisy measurements."""
    edges = torch.rand(count, n) < 0.08
    levels = torch.randn(count, n)
    number = edges.cumsum(1)
    truth = levels.gather(1, number)
    return truth, truth @ blur.T + 0.05 * torch.randn(count, n)


# %% [markdown]
# ## The iteration as a cell
#
# The state is a tuple of tensors of different shapes, each `(batch, ...)`. `initial_state` says
# where a solve starts. One evaluation takes a gradient step for the signal and a projected step for
# the dual variable.


# %%
class PrimalDual(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_strength = nn.Parameter(torch.tensor(-6.0))

    def initial_state(self, measured):
        return measured, torch.zeros(len(measured), n - 1)

    def forward(self, z, measured):
        signal, dual = z
        step = 0.45
        slope = (signal @ blur.T - measured) @ blur
        spread = nn.functional.pad(-dual, (0, 1)) + nn.functional.pad(dual, (1, 0))
        new = signal - step * (slope + spread)
        jump = (2 * new - signal).diff(dim=1)
        strength = self.log_strength.exp()
        return new, (dual + step * jump).clamp(-strength, strength)


# %% [markdown]
# ## Learning the strength
#
# The gradient goes through the solution, not through the hundreds of iterations. `Anderson` suits
# this slow, monotone iteration. `Implicit` is exact, which is cheap here: z has 95 numbers.

# %%
deq = gdeq.DEQ(
    PrimalDual(),
    solver=gdeq.Anderson(max_iter=200, tol=1e-4, memory=8),
    gradient=gdeq.Implicit(gdeq.GMRES(max_iter=60, tol=1e-4)),
)
optimizer = torch.optim.Adam(deq.parameters(), lr=0.4)
truth, measured = signals(8)
history = []
for _ in range(10):
    restored, _ = deq(measured)
    loss = (restored - truth).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append((deq.cell.log_strength.exp().item(), loss.item()))
print(f"strength {history[0][0]:.4f} -> {history[-1][0]:.4f}")
print(f"mean squared error {history[0][1]:.4f} -> {history[-1][1]:.4f}")
print(str(deq.solution).splitlines()[0])

# %% [markdown]
# `solution.parts` has the residual of each part of the state. A sample has converged only when
# every part has.

# %%
print("largest residual of the signal and of the dual:")
print([f"{part:.0e}" for part in deq.solution.parts.max(0).values.tolist()])

# %%
truth, measured = signals(1)
with torch.no_grad():
    restored, _ = deq(measured)
plt.plot(truth[0], label="truth", color="C2")
plt.plot(measured[0], label="measured", color="C0", lw=0.8)
plt.plot(restored[0], label="restored", color="C1")
plt.legend()
plt.xlabel("position")

# %% [test]
assert history[-1][1] < history[0][1]
assert deq.solution.residual.max() < 1e-2

# %% [markdown]
# To go further, put a network into the cell in place of total variation. If you use deepinv, see
# [coming from deepinv](../coming-from/deepinv.md).
