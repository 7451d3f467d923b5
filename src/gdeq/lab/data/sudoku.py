"""Sudoku: minimal puzzles with 17 givens, and the hardest ones that are known.

Training follows recurrent relational networks (Palm et al. 2018): a minimal puzzle, up to 17 more
cells of its solution revealed, moved and relabelled by the symmetries of Sudoku.  The test is made
in the same way, once for all: 1,000 puzzles for each number of givens from 17 to 34.

The puzzles are Royle's 49,151 and the seven found since.  They are split by solution: grids that
may be the same up to symmetry are in one pool only, and none of the hardest puzzles' grids is in
training or validation.

A grid is 81 numbers, row by row; 0 is an empty cell.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from gdeq.lab.data.batches import Batches, Part, generator, rows, sent
from gdeq.lab.data.dataset import Pixels
from gdeq.lab.data.errors import DataError, reading
from gdeq.lab.data.recipe import Contents, Recipe

MINIMAL, HARDEST = "puzzles2_17_clue.csv", "puzzles5_forum_hardest_1905_11+.csv"
MD5 = {
    MINIMAL: "e3b5cf9f653b16247095dcc2198602d8",
    HARDEST: "a7de8287216f68c2399e250faafb120b",
}
HOME = "https://github.com/xiej2520/SudukoSolver (folder data)"


class Grids(NamedTuple):
    """Puzzles and their solutions, each (n, 81) in uint8."""

    puzzles: Pixels
    solutions: Pixels


class Pools(NamedTuple):
    """No two share a solution, up to symmetry, but test and hardest may."""

    train: Grids
    validation: Grids
    test: Grids
    hardest: Grids


@dataclass(frozen=True)
class Sudoku(Recipe[Pools]):
    """The fields are what the tests make smaller.

    validation, test: puzzles held out, about.
    """

    md5: Mapping[str, str] = field(default_factory=lambda: MD5)
    validation: int = 1000
    test: int = 4000
    size: int = 32_000_000

    name = "sudoku"
    title = "Sudoku"
    folder = "sudoku"
    wanted = frozenset(MD5)
    folders = ("sudoku",)
    archives = ("sudoku.tar.xz",)
    classes = tuple(map(str, range(1, 10)))
    terms = (
        "Royle's minimal puzzles are CC BY, as far as we know; no terms are stated for the hardest "
        "ones.  Use them for research, and do not pass them on"
    )
    advice = (
        f"the puzzles are at {HOME}; write each as a line `puzzle,solution` into {MINIMAL} and "
        f"{HARDEST}, and run: gdeq data sudoku --from FOLDER (or an archive of it)"
    )

    def arrays(self, contents: dict[str, Contents]) -> Pools:
        minimal, hardest = (read_table(bytes(contents[name]), name) for name in MD5)
        return split(minimal, hardest, self.validation, self.test)


# -- reading ---------------------------------------------------------------------------------------


def read_csv(path: Path) -> Grids:
    """A table of your own, such as Sudoku-Extreme's train.csv."""
    with reading(path):
        return read_table(path.read_bytes(), str(path))


def read_table(content: bytes, name: str) -> Grids:
    """Lines ``puzzle,solution``, or Sudoku-Extreme's ``source,question,answer,rating``."""
    try:
        lines = list(csv.reader(io.StringIO(content.decode("ascii"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name} is not a table of puzzles and solutions: {error}") from error
    puzzle, solution = 0, 1
    if lines and {"question", "answer"} <= set(lines[0]):
        puzzle, solution = lines[0].index("question"), lines[0].index("answer")
        lines = lines[1:]
    for number, line in enumerate(lines, 1):
        if len(line) <= solution or {len(line[puzzle]), len(line[solution])} != {81}:
            raise DataError(
                f"{name}, puzzle {number}: needs a puzzle and a solution of 81 characters each"
            )
    found = Grids(*(_numbers([line[at] for line in lines]) for at in (puzzle, solution)))
    check(found, name)
    return found


def _numbers(texts: list[str]) -> Pixels:
    """An empty cell is 0 or a dot."""
    joined = "".join(texts).replace(".", "0").encode()
    return (np.frombuffer(joined, np.uint8) - ord("0")).reshape(-1, 81)


def check(grids: Grids, name: str) -> None:
    """Every solution follows the rules, and agrees with its puzzle."""
    puzzles, solutions = grids
    if not len(puzzles):
        raise DataError(f"{name} holds no puzzles")
    given = puzzles > 0
    right = ((puzzles == solutions) | ~given).all(1)
    seen = 1 << solutions.astype(np.int16)  # a bit for each digit
    for unit in units():
        right &= np.bitwise_or.reduce(seen[:, unit], axis=1) == 0b11_1111_1110
    if not right.all():
        raise DataError(f"{name}, puzzle {int((~right).argmax()) + 1}: the solution is wrong")


def units() -> NDArray[np.int64]:  # -> (27, 9)
    """The cells of each row, each column and each box."""
    grid = np.arange(81).reshape(9, 9)
    boxes = grid.reshape(3, 3, 3, 3).swapaxes(1, 2).reshape(9, 9)
    return np.concatenate([grid, grid.T, boxes])


# -- pools -----------------------------------------------------------------------------------------


def split(minimal: Grids, hardest: Grids, validation: int, test: int) -> Pools:
    """About so many puzzles for validation and for the test, whole kinds of solutions each."""
    kinds = signatures(np.concatenate([minimal.solutions, hardest.solutions]))
    own, forbidden = kinds[: len(minimal.solutions)], kinds[len(minimal.solutions) :]
    random = np.random.RandomState(0)  # its stream is frozen by NumPy's policy
    turn = random.permutation(kinds.max() + 1)[own]  # the same for all puzzles of a kind
    turn[np.isin(own, forbidden)] = -1  # these come first, into the test
    order = np.argsort(turn, kind="stable")
    ends = np.searchsorted(turn[order], turn[order[[test, test + validation]]])
    parts = [Grids(*(grids[part] for grids in minimal)) for part in np.split(order, ends)]
    if turn[order[ends[0]]] < 0:
        raise DataError("too many of the minimal puzzles have the solution of one of the hardest")
    return Pools(parts[2], parts[1], parts[0], hardest)


def with_more_givens(pool: Grids, revealed: tuple[int, int], total: int) -> Grids:
    """About ``total`` puzzles, as many with each number of revealed cells, fewest first."""
    random = np.random.RandomState(1)
    levels, made = range(revealed[0], revealed[1] + 1), []
    for more in levels:
        chosen = random.permutation(len(pool.puzzles))[: max(1, total // len(levels))]
        puzzles, solutions = pool.puzzles[chosen], pool.solutions[chosen]
        given = puzzles > 0
        rank = np.where(given, -1.0, random.random_sample(given.shape)).argsort(1).argsort(1)
        kept = rank < given.sum(1, keepdims=True) + more
        made.append((np.where(kept, solutions, 0).astype(np.uint8), solutions))
    return Grids(*(np.concatenate(parts) for parts in zip(*made, strict=True)))


def signatures(solutions: Pixels) -> NDArray[np.int64]:  # (n, 81) -> (n,)
    """A number for each solution: the same for grids that are the same up to symmetry.

    Two rows make a permutation of the digits, of a digit to the one below it, and so do two
    columns.  Its cycles stay as long as they are when digits are relabelled and columns change
    places.  Those of length 2 and 3 are counted, for all pairs of rows and of columns.  (Other
    grids may share a signature; then they share a pool.)
    """
    grids = torch.from_numpy(solutions.reshape(-1, 9, 9).astype(np.int64)) - 1
    sides = [_cycles(lines).numpy() for lines in (grids, grids.mT)]
    _, side = np.unique(np.concatenate(sides), axis=0, return_inverse=True)
    either = np.sort(side.reshape(2, -1), axis=0)  # a grid may be transposed
    _, kind = np.unique(either, axis=1, return_inverse=True)
    return kind.reshape(-1)


def _cycles(lines: Tensor) -> Tensor:  # (n, 9, 9) -> (n, 6)
    """For each band its pairs of lines, and for each two bands theirs, in any order."""
    places, digits = lines.argsort(2), torch.arange(9)
    found: list[list[Tensor]] = [[] for _ in range(6)]
    for i, j in combinations(range(9), 2):
        below = lines[:, j].gather(1, places[:, i])  # of digit d in line i, the one in line j
        twice = below.gather(1, below)
        pairs = (twice == digits).sum(1) // 2
        triples = (twice.gather(1, below) == digits).sum(1) // 3
        band, other = i // 3, j // 3
        found[band if band == other else 2 + band + other].append(4 * pairs + triples)
    numbers = [_one_number(torch.stack(codes, 1).sort(1).values) for codes in found]
    halves = torch.stack(numbers, 1).view(-1, 2, 3)  # bands may change places
    return halves.sort(2).values.flatten(1)


def _one_number(codes: Tensor) -> Tensor:  # (n, k) below 16 -> (n,)
    return (codes << 4 * torch.arange(codes.shape[1])).sum(1)


# -- batches ---------------------------------------------------------------------------------------


class SudokuBatches(Batches):
    """Puzzles (b, 81) in 0..9 and the digits of their solutions (b, 81) in 0..8, int64.

    revealed: at least and at most so many cells of the solution are given beside the puzzle's own.
    symmetries: relabel the digits, and move rows, columns, bands, stacks, or transpose.
    free: tells which places of the batch take a new puzzle, (b,) bool, where the others keep the
        one they have; None from it: all of them.

    The new puzzles of a batch are a function of (seed, epoch, index).
    """

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor],
        batch_size: int,
        *,
        revealed: tuple[int, int] = (0, 0),
        symmetries: bool = False,
        free: Callable[[], Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tensors, batch_size, **options)
        self.revealed, self.symmetries, self.free = revealed, symmetries, free
        self.kept: tuple[Tensor, ...] | None = None

    def _batch(self, part: Part) -> tuple[Tensor, ...]:
        puzzles, solutions = (rows(tensor, part.chosen).long() for tensor in self.tensors)
        if self.symmetries or self.revealed != (0, 0):
            source = generator(self.seed, part.epoch, part.index)
            drawn = torch.rand(part.count, 116, generator=source)
            drawn = sent(drawn[part.low : part.high], puzzles.device)
            reveal, keys, digits, *moves = drawn.split((1, 81, 9, 9, 3, 9, 3, 1), 1)
            puzzles = self._reveal(puzzles, solutions, reveal, keys)
            if self.symmetries:
                cells, labels = moved_cells(*moves), pad(digits.argsort(1) + 1, (1, 0))  # 0 stays 0
                puzzles, solutions = (
                    labels.gather(1, grids.gather(1, cells)) for grids in (puzzles, solutions)
                )
        made: tuple[Tensor, ...] = (puzzles, solutions - 1)
        free = self.free() if self.free is not None and self.kept is not None else None
        if free is not None and self.kept is not None:
            pairs = zip(made, self.kept, strict=True)
            made = tuple(torch.where(free[:, None], new, old) for new, old in pairs)
        self.kept = made
        return made

    def _reveal(self, puzzles: Tensor, solutions: Tensor, share: Tensor, keys: Tensor) -> Tensor:
        given, (least, most) = puzzles > 0, self.revealed
        wanted = given.sum(1, keepdim=True) + least + (share * (most - least + 1)).long()
        rank = torch.where(given, -1.0, keys).argsort(1).argsort(1)
        return torch.where(rank < wanted, solutions, 0)


def moved_cells(
    rows: Tensor, bands: Tensor, columns: Tensor, stacks: Tensor, transposed: Tensor
) -> Tensor:  # (b, 9), (b, 3), (b, 9), (b, 3), (b, 1) in [0, 1) -> (b, 81)
    """Where each cell comes from when the grid is moved by these random keys."""
    cells = 9 * _order(rows, bands)[:, :, None] + _order(columns, stacks)[:, None, :]
    return torch.where(transposed[:, :, None] < 0.5, cells, cells.mT).flatten(1)


def _order(keys: Tensor, of_bands: Tensor) -> Tensor:  # (b, 9), (b, 3) -> (b, 9)
    """The nine lines in an order that keeps each band together."""
    place = of_bands.argsort(1).argsort(1).repeat_interleave(3, 1)
    return (place + keys).argsort(1)
