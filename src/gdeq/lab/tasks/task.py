"""`Task`: what a training needs to know about data, model, loss and metric.

A task of your own is a file with one subclass:

    class Spirals(Task[Config]):
        metric = Metric("accuracy", "%", digits=1)

        def load(self) -> Data: ...
        def model(self) -> nn.Module: ...
        def losses(self, output, labels): ...
        def score(self, output, labels): ...

``gdeq train spirals.py epochs=5`` trains it, with all that the other tasks have: checkpoints,
resume, several processes, CUDA graphs, adaptive budgets, comparisons and the report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn

from gdeq.lab.data.batches import Batches
from gdeq.lab.metric import Metric
from gdeq.lab.training.process import Process
from gdeq.lab.training.settings import Config, ConfigError

__all__ = ["Data", "Metric", "Task"]
C = TypeVar("C", bound=Config)


class Data(NamedTuple):
    """Tensors whose first dimension counts the samples: the model's input, then its targets.

    Examples:
        >>> import torch
        >>> from gdeq.lab.tasks import Data
        >>> points, labels = torch.randn(99, 2), torch.zeros(99)
        >>> data = Data(train=(points[:90], labels[:90]), test=(points[90:], labels[90:]))
        >>> len(data.train[0])
        90
    """

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


def per_sample(values: Tensor, rule: str) -> Tensor:  # (batch,)
    if values.dim() != 1:
        raise ConfigError(
            f"{rule} per sample, shape (batch,), got {tuple(values.shape)}; leave out .mean() "
            "(reduction='none')"
        )
    return values


class Task(ABC, Generic[C]):
    """Base of all tasks.  Override `load`, `model` and `losses`; the rest has defaults.

    settings: the class of its settings: `Config`, or a subclass that adds some.
    presets: settings by name.  A task's file runs with its first preset by default.
    """

    name: ClassVar[str]  # as in the run's config.yaml; the registry sets it
    settings: ClassVar[type[Config]] = Config
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    metric: ClassVar[Metric] = Metric("loss", digits=4, higher_is_better=False)
    samples: ClassVar[str] = "samples"  # what they are called

    def __init__(self, config: C, process: Process, root: Path | None = None) -> None:
        """root: the folder of the data sets, where the user named one."""
        self.config, self.process, self.root = config, process, root
        self.device = process.device
        self.data = self.load()

    @abstractmethod
    def load(self) -> Data:
        """Return all samples, on ``self.device``."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model, which is called with a batch's first tensor and has its DEQ as ``deq``.

        The training sets the solver and the gradient of ``deq`` before each step.
        """

    @abstractmethod
    def losses(self, output: Any, *targets: Tensor) -> Tensor:  # -> (batch,)
        """Return the loss of each sample."""

    def loss(self, output: Any, *targets: Tensor) -> Tensor:  # -> ()
        """What a training step minimises."""
        return per_sample(self.losses(output, *targets), "losses() must return one loss").mean()

    def score(self, output: Any, *targets: Tensor) -> Tensor:  # -> (batch,)
        """Each sample's part of the metric."""
        return self.losses(output, *targets)

    def advance(self, model: Any) -> None:
        """Called after each batch of a training or a test, for a model that keeps something."""

    def state(self) -> list[Tensor]:
        """What else a training step leaves for the next one, in this process; for a resume."""
        return []

    def restore(self, state: list[Tensor]) -> None:
        """Take over what `state` gave, on any device."""

    def train_batches(self, size: int, plain: bool = False) -> Batches:
        """plain: without random changes to the samples, if the task makes any."""
        return Batches(self.data.train, size, seed=self.config.seed, **self.share())

    def test_batches(self, size: int) -> Batches:
        """Every sample once."""
        return Batches(self.data.test, size, shuffle=False, drop_last=False, **self.share())

    def share(self) -> dict[str, Any]:
        """The part of each batch that belongs to this process."""
        return {"rank": self.process.rank, "world_size": self.process.world_size}

    def injector(self, model: Any) -> nn.Module | None:
        """The module that computes the DEQ's x; None where the model calls ``deq(x)`` itself."""
        return None

    def notes(self) -> Iterator[str]:
        """Lines to print before the first step."""
        yield from ()

    def compile(self, module: nn.Module) -> None:
        """On a GPU, compile a module so that every gradient can go back through it."""
        if self.device.type != "cuda":
            return
        # Products with Jᵀ pass through f's graph more than once, so its buffers must stay.
        torch._functorch.config.donated_buffer = False
        module.compile(dynamic=False)

    @classmethod
    def title_of(cls, config: C) -> str:
        """For the progress bar and the name of a run folder."""
        return Path(cls.name).stem
