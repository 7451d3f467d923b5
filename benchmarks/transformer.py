"""A small transformer as the cell, trained with each gradient: losses, and the largest gradients.

The gradient of a batch is ruined by one sample whose w is far off: medians of errors do not show
that, a training does.  The task is to reverse a sequence; its cell is a post-norm block.

    python benchmarks/transformer.py --seeds 3 --out results/core
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gdeq

LETTERS, LENGTH, WIDTH, BATCH = 10, 12, 32, 64
GRADIENTS = {
    "JFB": gdeq.JFB(),
    "GDEQ": gdeq.Measured(gdeq.GDEQ()),
    "GDEQ refine 1": gdeq.GDEQ(refine=1),
    "GDEQ refine 2": gdeq.GDEQ(refine=2),
    "GDEQ refine 3": gdeq.GDEQ(refine=3),
    "Implicit": gdeq.Implicit(gdeq.GMRES(max_iter=30, tol=1e-4), double_backward=False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        seen, _ = self.attention(z, z, z, need_weights=False)
        z = self.norms[0](z + x + seen)
        return self.norms[1](z + self.mlp(z))


class Reversing(nn.Module):
    def __init__(self, gradient: gdeq.Gradient) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.deq = gdeq.DEQ(Block(), gradient=gradient)
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.deq(self.letters(text) + self.places))


def train(gradient: gdeq.Gradient, seed: int, steps: int) -> tuple[float, float, float]:
    """Mean loss of the last ten steps; median and largest norm of the cell's gradient."""
    torch.manual_seed(seed)
    model = Reversing(gradient)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses, norms = [], []
    for _ in range(steps):
        text = torch.randint(0, LETTERS, (BATCH, LENGTH))
        loss = cross_entropy(model(text).flatten(0, 1), text.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(torch.cat([p.grad.flatten() for p in model.deq.parameters()]).norm().item())
    return statistics.mean(losses[-10:]), statistics.median(norms), max(norms)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"torch {torch.__version__}, {options.steps} steps; loss of the last ten, chance 2.303"
    ]
    lines.append(f"{'gradient':14s} seed   loss   gradient: median   largest")
    print("\n".join(lines), flush=True)
    for seed in range(options.seeds):
        for name, gradient in GRADIENTS.items():
            loss, middle, most = train(gradient, seed, options.steps)
            lines.append(f"{name:14s} {seed:4d}  {loss:.3f}  {middle:16.3f}  {most:8.2f}")
            print(lines[-1], flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "transformer.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
