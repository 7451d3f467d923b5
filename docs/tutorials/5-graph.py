# %% [markdown]
# # A graph: one system, without a batch
#
# The first dimension of a state is the batch: samples are independent systems, each with its own
# residual and its own number of steps. The nodes of a graph are not independent, nor are the
# members of a set or the points of a grid. A graph is *one* system, however many nodes it has.

# %%
import warnings

import torch
from matplotlib import pyplot as plt
from torch import nn

import gdeq

torch.manual_seed(0)
side = torch.arange(60) // 30  # two communities of 30 nodes
chance = torch.where(side[:, None] == side[None, :], 0.25, 0.02)
adjacency = torch.triu(torch.rand(60, 60) < chance, diagonal=1).float()
adjacency = adjacency + adjacency.T + torch.eye(60)
degree = adjacency.sum(1)
# The largest eigenvalue of this matrix is 1.
spread = adjacency / (degree[:, None] * degree[None, :]).sqrt()

known = torch.tensor([0, 7, 35, 52])  # the only nodes whose community is given
features = torch.zeros(60, 2)
features[known, side[known]] = 1.0


# %% [markdown]
# ## The cell
#
# One evaluation passes messages along all edges. The fixed point is what remains after messages
# have travelled as far as they can, so no number of layers limits how far a node can see.


# %%
class Propagate(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.mix.weight)  # at first, messages are passed on unchanged

    def forward(self, z, x, spread):  # z and x are (nodes, width)
        return torch.tanh(0.8 * spread @ self.mix(z) + x)


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        # Without a bias, nodes without a label start at zero.
        self.read = nn.Linear(2, width, bias=False)
        self.judge = nn.Linear(width, 2, bias=False)
        self.deq = gdeq.DEQ(
            Propagate(width),
            gdeq.Broyden(max_iter=30, tol=1e-4),
            gdeq.GDEQ(refine=2),
            batched=False,
        )

    def forward(self, features, spread):
        return self.judge(self.deq(self.read(features), spread))


# %% [markdown]
# `batched=False` says that the state is one system, without a batch dimension. Further arguments,
# here `spread`, reach the cell unchanged.

# %%
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(40):
    score = model(features, spread)
    loss = nn.functional.cross_entropy(score[known], side[known])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

right = (score.argmax(1) == side).float().mean()
print(f"4 of 60 labels were given; {100 * right:.0f} % of the nodes are right")
print(model.deq.solution)
print(model.deq.solution.backward)

# %% [markdown]
# ## What goes wrong without it
#
# With the default, `batched=True`, every node counts as a sample of its own. The solve still ends,
# but the method assumes that ∂f/∂z has one block per node, and its gradient belongs to another
# model. The layer notices at its first call, and warns.


# %%
def gradient(method, batched):
    deq = gdeq.DEQ(model.deq.cell, gdeq.Broyden(60, 1e-6), method, batched=batched)
    model.zero_grad()
    model.judge(deq(x, spread))[known].square().sum().backward()
    return model.deq.cell.mix.weight.grad.clone()


x = model.read(features).detach()
exact = gradient(gdeq.Implicit(), batched=False)
errors = {}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for name, batched in {"one system": False, "60 samples": True}.items():
        found = gradient(gdeq.GDEQ(refine=1), batched)
        errors[name] = ((found - exact).norm() / exact.norm()).item()
        print(f"as {name}: relative error of the weight gradient {errors[name]:.2f}")
print(f"{told[0].category.__name__}: {told[0].message}")

# %%
with torch.no_grad():
    trust = model(features, spread).softmax(1)[:, 1]
angle = torch.rand(60, generator=torch.manual_seed(1)) * 6.28
radius = torch.rand(60, generator=torch.manual_seed(2)).sqrt()
place = torch.stack([radius * angle.cos() + 2.6 * side, radius * angle.sin()], dim=1)
for i, j in adjacency.triu(1).nonzero().tolist():
    plt.plot(*place[[i, j]].T, color="#7d8590", lw=0.3, zorder=0)
plt.scatter(*place.T, c=trust, cmap="coolwarm", s=22, vmin=0, vmax=1)
ring = {"facecolors": "none", "edgecolors": "C2", "s": 70}
plt.scatter(*place[known].T, **ring, label="label given")
plt.axis("off")
plt.legend(loc="lower center")

# %% [test]
assert right > 0.9, right
assert model.deq.solution.converged.all(), model.deq.solution
assert errors["one system"] < 0.7 < errors["60 samples"], errors

# %% [markdown]
# The colour is the model's prediction. Green rings mark the nodes whose label was given.
