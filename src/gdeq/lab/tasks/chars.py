"""Character-level language modelling with a small DEQ, on the help texts that ship with Python.

The state is one vector a character, (batch, length, width); f is a causal convolution.  Each
evaluation looks a few characters further back, so that its equilibrium sees the whole window with
the weights of one layer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad

from gdeq import DEQ
from gdeq.lab.tasks.task import Data, Metric, Task
from gdeq.lab.training.settings import Config
from gdeq.options import check_integer, options


@options
class CharConfig(Config):
    """One training of a language model."""

    width: int = 64  # features of a character
    window: int = 64  # characters of a sample
    reach: int = 4  # characters that one evaluation of f looks at
    fixed: ClassVar = (*Config.fixed, "width", "window", "reach")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "window", "reach"):
            check_integer(self, name, 1)


class Cell(nn.Module):
    """z ← norm(x + W gelu(causal convolution of z))."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.look = nn.Conv1d(width, 2 * width, reach)
        self.narrow = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (b, t, d), (b, t, d) -> (b, t, d)
        seen = self.look(pad(z.mT, (self.reach - 1, 0))).mT
        return self.norm(x + self.narrow(gelu(seen)))


class Reader(nn.Module):
    """Characters (b, t) to logits of the next ones (b, t, symbols)."""

    def __init__(self, symbols: int, config: CharConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, config.width)
        cell = Cell(config.width, config.reach)
        self.deq = DEQ(cell, config.solver.build(), config.gradient.build())
        self.predict = nn.Linear(config.width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        return self.predict(self.deq(self.embed(text)))


class Chars(Task[CharConfig]):
    """Windows of a text; the target of a character is the one after it."""

    name = "chars"
    settings = CharConfig
    presets: ClassVar = {
        # A minute on two cores.
        "chars": {
            "epochs": 2,
            "batch_size": 32,
            "residual_weight": 1.0,
            "solver": {"max_iter": 8, "tol": 1e-2},
            "gradient": {"refine": 1},
            "optimizer": {"lr": 3e-3, "schedule": "onecycle", "warmup": 0.1, "clip": 1.0},
        },
    }
    metric = Metric("bits_per_character", digits=3, higher_is_better=False)
    samples = "windows"

    def load(self) -> Data:
        self.text = encoded(corpus()).to(self.device)
        self.symbols = int(self.text.max()) + 1
        self.split = len(self.text) * 9 // 10
        return Data(self._windows(self.text[: self.split]), self._windows(self.text[self.split :]))

    def _windows(self, text: Tensor) -> tuple[Tensor, Tensor]:
        many = (len(text) - 1) // self.config.window
        shape = many, self.config.window
        used = many * self.config.window
        return text[:used].view(shape), text[1 : used + 1].view(shape)

    def model(self) -> Reader:
        return Reader(self.symbols, self.config)

    def losses(self, output: Tensor, *targets: Tensor) -> Tensor:
        return cross_entropy(output.mT, targets[0], reduction="none").mean(1)

    def score(self, output: Tensor, *targets: Tensor) -> Tensor:
        return self.losses(output, *targets) / math.log(2)

    def notes(self) -> Iterator[str]:
        one, two = baselines(self.text, self.split, self.symbols)
        yield (
            f"bits per character of the test text by counts of the training text: {one:.3f} by "
            f"single characters, {two:.3f} by pairs"
        )


def corpus() -> str:
    """The texts of Python's ``help()``, some 460 kB of English about programming."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def encoded(text: str) -> Tensor:
    """Each character as its number among those of the text."""
    numbers = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[symbol] for symbol in text])


def baselines(text: Tensor, split: int, symbols: int) -> tuple[float, float]:
    """Bits per character by single characters and by pairs, each counted once more than seen."""
    before, after = text[:-1], text[1:]
    pairs = torch.zeros(symbols, symbols, dtype=torch.float64, device=text.device)
    ones = torch.ones((), dtype=torch.float64, device=text.device)
    pairs.index_put_((before[: split - 1], after[: split - 1]), ones, accumulate=True)
    single = pairs.sum(0)
    found = []
    for counts, seen in ((single.expand_as(pairs), symbols), (pairs, symbols)):
        share = (counts + 1) / (counts.sum(1, keepdim=True) + seen)
        bits = -share[before[split:], after[split:]].log2()
        found.append(bits.mean().item())
    return found[0], found[1]
