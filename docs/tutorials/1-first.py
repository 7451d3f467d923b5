# %% [markdown]
# # Your first DEQ in five minutes
#
# A deep equilibrium model has one layer that acts like an infinite stack of identical ones. You
# write the layer as a cell f(z, x). The model's output is the z that the cell leaves unchanged:
# z = f(z, x). `gdeq.DEQ` finds it, and gives you gradients.
#
# We separate two half-moons, for which a linear model is not enough.

# %%
import torch
from matplotlib import pyplot as plt
from torch import nn

import gdeq

torch.manual_seed(0)

label = torch.arange(200) % 2
angle = torch.pi * torch.rand(200)
across = angle.cos() + label
up = (1 - 2 * label) * angle.sin() + label / 2
points = torch.stack([across, up], dim=1)
points += 0.08 * torch.randn_like(points)


# %% [markdown]
# ## The cell
#
# A cell takes the state z and the input x and returns the next z, of the same shape. It is an
# ordinary module.


# %%
class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + x)


# %% [markdown]
# ## The model
#
# Wrap the cell in `gdeq.DEQ` and use it like any other layer. Here z starts as zeros of
# the shape of x.

# %%
model = nn.Sequential(
    nn.Linear(2, 32),
    gdeq.DEQ(Cell(32)),
    nn.Linear(32, 2),
)
deq = model[1]
print(deq)

# %% [markdown]
# ## Training
#
# The training loop is an ordinary one. After each call, `deq.solution` is the record of the solve.
# We note how many solver steps the slowest point needed.

# %%
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, steps = [], []
for _ in range(25):
    loss = nn.functional.cross_entropy(model(points), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    steps.append(deq.solution.steps.max().item())

right = (model(points).argmax(1) == label).float().mean().item()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
print(f"{100 * right:.0f} % of the points are right")

# %% [test]
assert losses[-1] < 0.3 < losses[0]
assert deq.solution.converged.all()
assert right > 0.9

# %% [markdown]
# ## Look at the record
#
# Print the record whenever you are unsure. The first line says whether the solve found a fixed
# point. The second says what the backward pass cost, and estimates the error of the gradient.

# %%
print(deq.solution)
loss = nn.functional.cross_entropy(model(points), label)
loss.backward()
print(deq.solution.backward)

# %% [markdown]
# The model's depth is not fixed: the solver takes as many steps as it needs, up to its
# `max_iter` of 18.

# %%
across, up = torch.linspace(-1.5, 2.5, 80), torch.linspace(-1.2, 1.7, 80)
grid = torch.cartesian_prod(across, up)
with torch.no_grad():
    score = model(grid).softmax(1)[:, 1].reshape(80, 80).T

figure, (left, right_side) = plt.subplots(1, 2, figsize=(6, 3))
left.contourf(across, up, score, levels=11, cmap="coolwarm")
left.scatter(*points.T, c=label, cmap="coolwarm", s=14, edgecolors="white", lw=0.5)
left.set(title="what the model has learned", xticks=[], yticks=[])
left.grid(False)
right_side.plot(steps)
right_side.set(title="solver steps of the slowest point", xlabel="epoch", ylim=0)
figure.tight_layout()

# %% [markdown]
# ## Where next
#
# - [What the record tells you](2-record.py), and what to do about a cell that does not converge
# - [Which gradient](../guides/gradients.md) to use; the default is `GDEQ(refine=1)`
# - [Which solver](../guides/solvers.md); the default is `Broyden(max_iter=18, tol=1e-3)`
