"""Sudoku, solved by iterating one small network to its equilibrium; judged by puzzles solved."""

from __future__ import annotations

import functools
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gdeq.lab.data.sets import data_root, find
from gdeq.lab.data.sudoku import Grids, SudokuBatches, read_csv, with_more_givens
from gdeq.lab.tasks.task import Data, Metric, Task
from gdeq.lab.training.settings import Config
from gdeq.options import check_choice, check_flag, check_integer, check_real, options

if TYPE_CHECKING:
    from gdeq.models.reasoner import Reasoner


@options
class ReasonerConfig:
    """Which network."""

    width: int = 384  # features per cell of the puzzle
    mix: str = "attention"  # how cells exchange information: attention, mixing
    heads: int = 6  # attention heads, in turn for rows, columns and boxes
    blocks: int = 3  # blocks in one evaluation of f
    segments: int = 4  # solves in a row, each with its own loss
    patience: int = 0  # keep a puzzle until it is solved, or for so many segments; 0: one step
    noise: float = 1.0  # size of the random state that a puzzle starts from in training

    def __post_init__(self) -> None:
        for name in ("width", "heads", "blocks", "segments"):
            check_integer(self, name, 1)
        check_integer(self, "patience", 0)
        check_real(self, "noise", 0.0)
        check_choice(self, "mix", ("attention", "mixing"))
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads, {self.heads}")


SHAPE = tuple(f"model.{name}" for name in ("mix", "width", "heads", "blocks"))


@options
class SudokuConfig(Config):
    """One training of a reasoner."""

    data: str = "sudoku"  # sudoku (`gdeq data sudoku`), or a folder with train.csv and test.csv
    revealed: tuple[int, ...] = (0, 17)  # cells given in addition to the puzzle's own: least, most
    symmetries: bool = True  # in training, relabel digits and move rows and columns
    test: str = "test"  # test, validation, hardest (without revealed cells)
    test_puzzles: int = 18_000  # puzzles, spread evenly over the numbers of revealed cells
    model: ReasonerConfig = field(default_factory=ReasonerConfig)
    fixed: ClassVar = (*Config.fixed, "data", *SHAPE)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "test", ("test", "validation", "hardest"))
        check_flag(self, "symmetries")
        check_integer(self, "test_puzzles", 1)
        least, *most = self.revealed
        if len(most) != 1 or not 0 <= least <= most[0] <= 81:
            raise ValueError(
                f"Config.revealed must be two numbers such as [0,17], got {self.revealed!r}"
            )


class Puzzles(Task[SudokuConfig]):
    """A sample is a puzzle; its targets are the digits of all 81 cells."""

    name = "sudoku"
    settings = SudokuConfig
    presets: ClassVar = {
        # Puzzles of 44 to 64 givens: two to three minutes on two cores.
        "sudoku-easy": {
            "epochs": 1,
            "batch_size": 64,
            "revealed": [27, 47],
            "test_puzzles": 420,
            "model": {"width": 48, "heads": 3, "blocks": 1, "segments": 2},
            "solver": {"name": "picard", "max_iter": 3, "tol": 0.0},
            "gradient": {"name": "unrolled", "steps": 3, "damping": 1.0, "refine": 1},
            "optimizer": {"lr": 3e-3, "schedule": "onecycle", "warmup": 0.1, "clip": 1.0},
        },
        # A minute and a half on one H200, 1.0 M parameters.  Puzzles stay until they are solved, so
        # that most of the work goes into hard ones.
        "sudoku": {
            "epochs": 47,
            "batch_size": 256,
            "precision": "bf16",
            "ema": 0.999,
            "measure_every": 10,
            "log_every": 86,
            "test_every": 1000,
            "test": "validation",
            "test_puzzles": 4608,
            "model": {
                "mix": "mixing", "width": 192, "heads": 8, "blocks": 2, "segments": 1,
                "patience": 16,
            },
            "solver": {"name": "picard", "max_iter": 4, "tol": 0.0},
            "gradient": {"name": "unrolled", "steps": 4, "damping": 1.0, "refine": 1},
            "optimizer": {
                "name": "muon", "lr": 2e-2, "adam_lr": 2e-3, "weight_decay": 0.01,
                "schedule": "onecycle", "warmup": 0.05, "clip": 1.0,
            },
        },
    }  # fmt: skip
    metric = Metric("solved", "%", digits=2)
    samples = "puzzles"

    def load(self) -> Data:
        pools = self.pools()
        test = pools[self.config.test]
        if self.config.test != "hardest":
            test = with_more_givens(test, self.revealed, self.config.test_puzzles)
        return Data(self._tensors(pools["train"]), self._tensors(test))

    @property
    def revealed(self) -> tuple[int, int]:
        least, most = self.config.revealed
        return least, most

    def pools(self) -> dict[str, Grids]:
        if self.config.data == "sudoku":
            return _pools(data_root(self.root))
        folder = Path(self.config.data)
        return {name: read_csv(folder / f"{name}.csv") for name in ("train", self.config.test)}

    def _tensors(self, grids: Grids) -> tuple[Tensor, Tensor]:
        puzzles, solutions = (torch.from_numpy(grid).to(self.device) for grid in grids)
        return puzzles, solutions

    def model(self) -> Reasoner:
        from gdeq.models.reasoner import Reasoner  # noqa: PLC0415 (`gdeq --help` does not wait)

        config = self.config
        made = Reasoner(
            **vars(config.model), solver=config.solver.build(), gradient=config.gradient.build()
        )
        self.compile(made.get_submodule("deq.cell"))
        self.reasoner = made
        return made

    def losses(self, output: Tensor, *targets: Tensor) -> Tensor:
        """Of all segments and cells alike."""
        digits = targets[0][:, None].expand(output.shape[:3])
        return cross_entropy(output.movedim(3, 1), digits, reduction="none").mean((1, 2))

    def score(self, output: Tensor, *targets: Tensor) -> Tensor:
        """100 where the last segment has all cells right."""
        return 100.0 * right_cells(output, targets[0]).all(1)

    def loss(self, output: Tensor, *targets: Tensor) -> Tensor:
        if self.config.model.patience:
            self.reasoner.halt(right_cells(output, targets[0]).all(1))
        return super().loss(output, *targets)

    def state(self) -> list[Tensor]:
        """The puzzles that stay in the batch, and how far each is."""
        if not self.config.model.patience:
            return []
        return [*(self.reasoner.carry or ()), *(self.batches.kept or ())]

    def restore(self, state: list[Tensor]) -> None:
        from gdeq.models.reasoner import Carry  # noqa: PLC0415

        if state and self.config.model.patience:
            z, age, *kept = (tensor.to(self.device) for tensor in state)
            self.reasoner.carry, self.batches.kept = Carry(z, age), tuple(kept)

    def train_batches(self, size: int, plain: bool = False) -> SudokuBatches:
        symmetries = self.config.symmetries and not plain
        options: dict[str, Any] = {"seed": self.config.seed, "symmetries": symmetries}
        if self.config.model.patience and not plain:
            options["free"] = lambda: self.reasoner.carry and self.reasoner.carry.halted
        made = self._batches(self.data.train, size, revealed=self.revealed, **options)
        if not plain:
            self.batches = made
        return made

    def test_batches(self, size: int) -> SudokuBatches:
        return self._batches(self.data.test, size, shuffle=False, drop_last=False)

    def _batches(self, tensors: tuple[Tensor, ...], size: int, **options: Any) -> SudokuBatches:
        return SudokuBatches((tensors[0], tensors[1]), size, **options, **self.share())

    def injector(self, model: Any) -> nn.Module:
        embed: nn.Module = model.embed
        return embed


@functools.cache  # some seconds, and a comparison of runs asks again and again
def _pools(root: Path) -> dict[str, Grids]:
    pools: dict[str, Grids] = find("sudoku").load(root)._asdict()
    return pools


def right_cells(output: Tensor, digits: Tensor) -> Tensor:  # -> (b, 81)
    """Whether the last segment has each cell right."""
    return output[:, -1].argmax(2) == digits
