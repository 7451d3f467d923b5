# %% [markdown]
# # A DEQ transformer on text
#
# Any block can be a cell. Here, one transformer block is solved to its equilibrium and predicts the
# next character of a sonnet. A stack of blocks would need more parameters; the DEQ applies the same
# block as often as it takes.

# %%
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F

import gdeq

torch.manual_seed(0)
TEXT = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""
letters = sorted(set(TEXT))
codes = torch.tensor([letters.index(letter) for letter in TEXT])
print(f"{len(codes)} characters, {len(letters)} different ones")


# %% [markdown]
# ## The block
#
# The input x, the embedded text, is added at every evaluation. The block ends in a norm, which
# keeps z bounded and the equilibrium well behaved. The samples of a batch do not influence each
# other.
#
# f must stay the same function during a solve. For dropout, use `gdeq.VariationalDropout`, which
# keeps its mask during a solve, and leave the `dropout` of `nn.MultiheadAttention` at 0.


# %%
class Block(nn.Module):
    def __init__(self, width=48, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, z, x):  # both (batch, length, width)
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm1(x + z + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norm2(x + h + self.down(F.gelu(self.up(h))))


class Model(nn.Module):
    def __init__(self, width=48, length=32):
        super().__init__()
        self.letter = nn.Embedding(len(letters), width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.deq = gdeq.DEQ(Block(width), solver=gdeq.Broyden(max_iter=12, tol=1e-2))
        self.head = nn.Linear(width, len(letters))

    def forward(self, text):  # (batch, length)
        return self.head(self.deq(self.letter(text) + self.place[: text.shape[1]]))


# %% [markdown]
# ## Training
#
# `deq.solution` is the record of the last call. For a log, keep one or two of its numbers.

# %%
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses, residuals, errors = [], [], []
for _ in range(60):
    start = torch.randint(len(codes) - 33, (8,))
    batch = codes[start[:, None] + torch.arange(33)]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    residuals.append(model.deq.solution.residual.max().item())
    errors.append(model.deq.solution.backward.batch_error.item())
guess = torch.tensor(len(letters)).log()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; guessing gives {guess:.2f}")
print(model.deq.solution)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(6, 2.6))
left.plot(losses)
left.set(title="loss", xlabel="step", ylim=0)
right.semilogy(residuals, label="largest residual of z")
right.semilogy(errors, label="estimated gradient error")
right.set(title="what the record says", xlabel="step")
right.legend()
figure.tight_layout()

# %% [test]
assert losses[-1] < 0.8 * losses[0]
assert max(residuals) <= 0.0101
assert errors[-1] > errors[0]

# %% [markdown]
# The solver keeps the residual below its tolerance of 0.01. The error of the gradient grows while f
# becomes less contractive: watch it, and raise `refine` if it comes near 1.
#
# ## More steps when it counts
#
# The number of solver steps is not part of the model. Evaluate with more of them, and see how far
# the answer still moves.

# %%
model.eval()
text = codes[:32][None]
with torch.no_grad():
    few = model(text).softmax(-1)
    model.deq.solver = gdeq.Broyden(max_iter=60, tol=1e-5)
    many = model(text).softmax(-1)
solution = model.deq.solution
print(f"{solution.steps.item()} steps, residual {solution.residual.item():.0e}")
print(f"largest change of a probability: {(few - many).abs().max():.4f}")

# %% [markdown]
# To train such a model seriously, use `gdeq train chars`. It has checkpoints, mixed precision and a
# report ([command line](../guides/command-line.md)).
