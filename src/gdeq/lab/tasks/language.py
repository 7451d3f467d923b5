"""Language models by words and by bytes: a DEQ transformer that reads on where it stopped.

A batch holds the next window of each of ``batch_size`` texts, which are equal parts of the training
text; what the model remembers goes from window to window, and into checkpoints.  The test text is
read in the same way, in ``test_rows`` parts, and every token of it but the first counts once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gdeq.lab.data.batches import Batches, generator
from gdeq.lab.data.sets import data_root, find
from gdeq.lab.data.text import END, Text
from gdeq.lab.tasks.task import Data, Metric, Task
from gdeq.lab.training.settings import Config, ConfigError
from gdeq.options import check_choice, check_integer, check_real, options

if TYPE_CHECKING:
    from gdeq.models.transformer import Transformer

NOTHING = -100  # a target that does not count, after the end of a text
# One GPU.  Twelve evaluations of f, the last four with autograd, and a penalty that holds f to its
# equilibrium.  GDEQ(refine=2) without a penalty lost it within two epochs.
_GPU: dict[str, Any] = {
    "epochs": 32,
    "batch_size": 32,
    "window": 128,
    "memory": 128,
    "test_rows": 8,
    "precision": "bf16",
    "ema": 0.999,
    "measure_every": 10,
    "log_every": 50,
    "test_every": 8,
    "snapshots": [],
    "residual_weight": 1.0,
    "residual_every": 2,
    "model": {"width": 768, "heads": 12, "dropout": 0.2, "embedding": 0.1, "outer": 0.35},
    "solver": {"name": "picard", "max_iter": 8, "tol": 0.0},
    "gradient": {"name": "unrolled", "steps": 4, "damping": 1.0},
    "optimizer": {
        "lr": 4e-4, "weight_decay": 0.1, "schedule": "onecycle", "warmup": 0.05, "clip": 0.5,
    },
}  # fmt: skip

# As much dropout as small texts want.  On Penn Treebank the tuned Mogrifier (24 M, wide and tied)
# takes 0.73 of the input, 0.72 of the output and 0.3 to 0.4 inside, TrellisNet (400 features) 0.45,
# 0.45, 0.28 and a tenth of the words; scripts for Transformer-XL take 0.2 of attention.
_WORDS = _GPU | {
    "epochs": 200,
    "ema": 0.9995,
    "test_every": 20,
    "model": {
        "width": 768, "heads": 12,
        "dropout": 0.3, "attention": 0.2, "embedding": 0.1, "outer": 0.6,
    },
}  # fmt: skip


@options
class TransformerConfig:
    """Which transformer."""

    width: int = 128  # features per token
    heads: int = 4  # attention heads
    blocks: int = 1  # transformer blocks in one evaluation of f
    dropout: float = 0.0  # share of features dropped in f; one mask per solve
    attention: float = 0.0  # share of the earlier tokens that a token does not see
    embedding: float = 0.0  # share of the vocabulary dropped from a batch
    outer: float = 0.0  # share of features dropped from embedding and equilibrium

    def __post_init__(self) -> None:
        for name in ("width", "heads", "blocks"):
            check_integer(self, name, 1)
        for name in ("dropout", "attention", "embedding", "outer"):
            check_real(self, name, 0.0, 0.99)
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of 2 heads, {2 * self.heads}")


@options
class LanguageConfig(Config):
    """One training of a language model; ``batch_size`` texts are read side by side."""

    data: str = "python"  # bytes: python (its help texts), enwik8; words: ptb, wikitext2
    window: int = 64  # tokens per sample
    memory: int = 64  # earlier tokens that are attended to
    test: str = "test"  # text to test on: test, validation
    test_rows: int = 4  # parts of that text that are read side by side
    model: TransformerConfig = field(default_factory=TransformerConfig)
    fixed: ClassVar = (
        *(*Config.fixed, "data", "window", "memory"),
        *("model.width", "model.heads", "model.blocks"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("window", 1), ("memory", 0), ("test_rows", 1)):
            check_integer(self, name, least)
        check_choice(self, "test", ("test", "validation"))


class Language(Task[LanguageConfig]):
    """A sample is a window of a text; the target of a token is the one after it."""

    settings = LanguageConfig
    samples = "windows"
    texts: ClassVar[tuple[str, ...]]  # that it reads

    def load(self) -> Data:
        config = self.config
        if config.data not in self.texts:
            raise ConfigError(f"data must be {' or '.join(self.texts)}, got {config.data!r}")
        if self.process.world_size > 1:
            raise ConfigError(
                f"{self.name} is trained by one process: its memory is not exchanged; start it "
                "without torchrun"
            )
        text = self._text()
        self.symbols, self.words = text.symbols, text.words
        parts = text.train, getattr(text, config.test)
        self.parts = train, test = tuple(torch.from_numpy(part).to(self.device) for part in parts)
        try:
            return Data(
                in_rows(train, config.batch_size, config.window),
                in_rows(test, config.test_rows, config.window, whole=True),
            )
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem

    def _text(self) -> Text:
        if self.config.data == "python":
            return python_help()
        text: Text = find(self.config.data).load(data_root(self.root))
        return text

    def model(self) -> Transformer:
        from gdeq.models.transformer import Transformer  # noqa: PLC0415 (`--help` does not wait)

        config = self.config
        made = Transformer(
            self.symbols,
            **vars(config.model),
            memory=config.memory,
            rows=config.batch_size,
            solver=config.solver.build(),
            gradient=config.gradient.build(),
        )
        self.compile(made.cell)
        return made

    def losses(self, output: Tensor, *targets: Tensor) -> Tensor:
        """Nats a token: their mean over all samples is that over all tokens which count."""
        wanted, share = targets
        nats = cross_entropy(
            output.flatten(0, 1), wanted.long().flatten(), reduction="none", ignore_index=NOTHING
        )
        return nats.view(wanted.shape).sum(1) * share

    def advance(self, model: Any) -> None:
        model.advance()

    def train_batches(self, size: int, plain: bool = False) -> Windows:
        return Windows(self.parts[0], size, self.config.window, self.config.seed)

    def test_batches(self, size: int) -> Batches:
        return Batches(self.data.test, self.config.test_rows, shuffle=False)

    def encoded(self, text: str) -> Tensor:  # -> (n,)
        """Its tokens."""
        if self.words is None:
            return torch.tensor(list(text.encode()), dtype=torch.long, device=self.device)
        numbers = {word: number for number, word in enumerate(self.words)}
        found = [numbers.get(word, numbers["<unk>"]) for word in text.split()]
        return torch.tensor(found, dtype=torch.long, device=self.device)

    def decoded(self, tokens: list[int]) -> str:
        if self.words is None:
            return bytes(tokens).decode(errors="replace")
        return " ".join(self.words[token] for token in tokens).replace(f" {END} ", "\n")

    def notes(self) -> Iterator[str]:
        train, test = map(len, self.parts)
        yield (
            f"{train:,} tokens to learn from, {test:,} of the {self.config.test} text, "
            f"{self.symbols:,} different ones"
        )

    @classmethod
    def title_of(cls, config: LanguageConfig) -> str:
        return config.data


class Words(Language):
    """Judged by perplexity."""

    name = "words"
    texts = ("ptb", "wikitext2")
    presets: ClassVar = {
        "ptb": _WORDS | {"data": "ptb"},
        "wikitext2": _WORDS | {"data": "wikitext2", "epochs": 90},
    }
    metric = Metric("perplexity", digits=2, higher_is_better=False, exponential=True)

    def model(self) -> Transformer:
        """Each word begins as likely as it is frequent, which z would else learn first."""
        made = super().model()
        counts = torch.bincount(self.parts[0].long(), minlength=self.symbols)
        with torch.no_grad():
            made.bias.copy_((counts + 1).log())
        return made


class Bytes(Language):
    """Judged by bits per byte."""

    name = "bytes"
    texts = ("python", "enwik8")
    presets: ClassVar = {
        # Two minutes on two cores.
        "chars": {
            "epochs": 1,
            "batch_size": 16,
            "residual_weight": 1.0,
            "solver": {"name": "picard", "max_iter": 4, "tol": 0.0},
            "gradient": {"name": "unrolled", "steps": 4, "damping": 1.0},
            "optimizer": {"lr": 2e-3, "schedule": "onecycle", "warmup": 0.1, "clip": 1.0},
        },
        "enwik8": _GPU
        | {
            "data": "enwik8",
            "epochs": 1,
            "test_every": 1,
            "window": 256,
            "memory": 256,
            "test_rows": 32,
            "model": {"width": 1024, "heads": 16, "dropout": 0.05},
        },
    }
    metric = Metric("bits_per_byte", digits=3, higher_is_better=False)

    def score(self, output: Tensor, *targets: Tensor) -> Tensor:
        return self.losses(output, *targets) / math.log(2)

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        one, two = baselines(*self.parts)
        yield (
            f"bits per byte of that text by counts of the training text: {one:.3f} by single "
            f"bytes, {two:.3f} by pairs"
        )


class Windows(Batches):
    """The windows of a text, which each epoch but the first begins to read at another place.

    So a token is not always seen at the same place of a window.
    """

    def __init__(self, text: Tensor, rows: int, window: int, seed: int) -> None:
        super().__init__(in_rows(text, rows, window), rows, seed=seed, shuffle=False)
        self.text, self.window = text, window

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        first = torch.randint(len(self.text), (), generator=generator(self.seed, epoch))
        turned = self.text.roll(-int(first)) if epoch else self.text
        windows = in_rows(turned, self.batch_size, self.window)
        return Batches(windows, self.batch_size, shuffle=False).epoch(epoch, start)


@torch.no_grad()
def continued(
    model: Transformer, prompt: Tensor, many: int, temperature: float, seed: int, reuse: bool = True
) -> Iterator[tuple[int, int]]:
    """One token after another, each with the solver steps that it took.

    prompt: (n,).  reuse: a solve starts from the equilibrium of the token before, not from zeros.
    """
    source = torch.Generator(prompt.device).manual_seed(seed)
    deq = model.eval().deq  # a new text
    logits = model(prompt[None])
    for _ in range(many):
        model.advance()
        assert deq.solution is not None
        shares = (logits[0, -1].float() / temperature).softmax(0)
        token = torch.multinomial(shares, 1, generator=source)
        z0 = deq.solution.z[:, -1:] if reuse else None
        logits = model(token[None], z0=z0)
        yield int(token), int(deq.solution.steps)


def in_rows(
    text: Tensor, rows: int, window: int, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # (n,) -> (samples, window), (samples, window), (samples,)
    """Windows of a text in so many equal parts: first the first of each, then the second of each.

    With their targets and the share of a token in the mean.  whole: none is left out; targets
    after the end of the text are `NOTHING`.
    """
    pairs = len(text) - 1
    steps = -(-pairs // (rows * window)) if whole else pairs // (rows * window)
    if steps < 1:
        raise ValueError(
            f"the text has {len(text):,} tokens, too few for {rows} rows of {window}: lower "
            "batch_size (or test_rows), or window"
        )
    x, y, size = text[:-1], text[1:], rows * steps * window
    if whole:
        y = y.long()
        x, y = torch.cat([x, x.new_zeros(size)]), torch.cat([y, y.new_full((size,), NOTHING)])
    x, y = (
        part[:size].view(rows, steps, window).transpose(0, 1).reshape(-1, window) for part in (x, y)
    )
    share = len(x) / min(pairs, size)
    return x, y, torch.full((len(x),), share, device=text.device)


def python_help() -> Text:
    """The texts of Python's ``help()``: some 460 kB of English about programming."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    ends = [len(text) * part // 20 for part in (18, 19)]
    train, validation, test = np.split(np.frombuffer(text, np.uint8).copy(), ends)
    return Text(train, validation, test)


def baselines(train: Tensor, test: Tensor) -> tuple[float, float]:
    """Bits per byte by single bytes and by pairs, each counted once more than seen."""
    train, test = train.long(), test.long()
    pairs = torch.bincount(256 * train[:-1] + train[1:], minlength=2**16).view(256, 256).double()
    found = []
    for counts in (pairs.sum(0).expand_as(pairs), pairs):
        share = (counts + 1) / (counts.sum(1, keepdim=True) + 256)
        found.append(-share[test[:-1], test[1:]].log2().mean().item())
    return found[0], found[1]
