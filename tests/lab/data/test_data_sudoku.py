"""Sudoku: reading, pools that share no solution, and batches by symmetry."""

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sudoku_grids import grids, table

from gdeq.lab.data import DataError, prepare
from gdeq.lab.data.recipe import LARGEST
from gdeq.lab.data.sets import SETS
from gdeq.lab.data.sudoku import (
    HARDEST,
    MINIMAL,
    Grids,
    Sudoku,
    SudokuBatches,
    check,
    read_table,
    signatures,
    split,
    with_more_givens,
)

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "sudoku.tar.xz"


@pytest.fixture(scope="module")
def some():
    return grids(40, givens=20)


@pytest.fixture
def files(some, tmp_path, monkeypatch):
    """A folder with two small tables, which the recipe knows."""
    folder = tmp_path / "given" / "sudoku"
    folder.mkdir(parents=True)
    parts = {MINIMAL: Grids(*(g[:30] for g in some)), HARDEST: Grids(*(g[30:] for g in some))}
    for name, part in parts.items():
        (folder / name).write_text(table(part))
    sums = {n: hashlib.md5((folder / n).read_bytes()).hexdigest() for n in parts}
    monkeypatch.setitem(SETS, "sudoku", Sudoku(md5=sums, validation=5, test=8))
    return folder


def batches(found, size=10, **options):
    tensors = tuple(torch.from_numpy(grid) for grid in found)
    options = {"revealed": (3, 9), "symmetries": True} | options
    return SudokuBatches(tensors, size, seed=5, **options)


@pytest.mark.parametrize("form", ["archive", "folder", "the folder above"])
def test_it_is_taken_from(form, files, tmp_path):
    source = {"folder": files, "the folder above": files.parent}.get(form)
    if source is None:
        source = tmp_path / "sudoku.tar.xz"
        with tarfile.open(source, "w:xz") as tar:
            tar.add(files, "sudoku")
    prepare("sudoku", tmp_path / "data", source)
    pools = SETS["sudoku"].load(tmp_path / "data")
    assert [len(pool.puzzles) for pool in pools] == [17, 5, 8, 10]


def test_without_a_copy_it_says_what_to_do(files, tmp_path):
    with pytest.raises(DataError, match="gdeq data sudoku --from FOLDER"):
        prepare("sudoku", tmp_path / "data")


def test_a_table_that_claims_to_be_huge_is_not_read(files, tmp_path):
    with (files / HARDEST).open("r+b") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(DataError, match="where at most 110,000,000 belong"):
        prepare("sudoku", tmp_path / "data", files)


def test_the_table_of_sudoku_extreme_is_read_too(some):
    lines = table(some, empty=".").splitlines()
    text = "\n".join(["source,question,answer,rating", *(f"here,{line},7" for line in lines)])
    for mine, theirs in zip(read_table(text.encode(), "extreme"), some, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:400], "puzzle 3: needs a puzzle and a solution of 81"),
        (lambda text: "1" * 200_000, "is not a table of puzzles and solutions"),
        (
            lambda text: text[:247] + ("1" if text[247] != "1" else "2") + text[248:],
            "puzzle 2: .*wrong",
        ),
        (lambda text: "", "holds no puzzles"),
    ],
)
def test_a_wrong_table_is_named(some, change, message):
    with pytest.raises(DataError, match=message):
        read_table(change(table(some)).encode(), "mine.csv")


def test_signatures_are_those_of_the_grid_and_not_of_its_form(some):
    moved = next(batches(some, 40, shuffle=False).epoch(3))[1][1].numpy().astype(np.uint8) + 1
    assert not (moved == some.solutions).all(1).any()
    both = signatures(np.concatenate([some.solutions, moved]))
    assert np.array_equal(both[:40], both[40:])
    assert len(set(both)) == 40


def test_no_pool_has_a_solution_of_another(some):
    """Each solution twice among the minimal puzzles; three are also solutions of the hardest."""
    twice = Grids(*(np.concatenate([g[:30], g[:30]]) for g in some))
    first = next(batches(some, 40, shuffle=False).epoch(0))[1]
    hardest = Grids(*(t.numpy().astype(np.uint8)[[3, 4, 9, 35]] + n for n, t in enumerate(first)))
    pools = split(twice, hardest, validation=10, test=20)
    kinds = np.split(
        signatures(np.concatenate([pool.solutions for pool in pools])),
        np.cumsum([len(pool.puzzles) for pool in pools])[:-1],
    )
    train, validation, test, hard = map(set, kinds)
    assert not train & (validation | test | hard)
    assert not validation & (test | hard)
    assert len(test & hard) == 3
    assert sum(len(pool.puzzles) for pool in pools[:3]) == 60


def test_the_test_has_as_many_puzzles_of_each_number_of_givens(some):
    found = with_more_givens(some, (0, 4), 100)
    check(found, "found")
    assert (found.puzzles > 0).sum(1).tolist() == [
        20 + more for more in range(5) for _ in range(20)
    ]
    assert np.array_equal(found.puzzles, with_more_givens(some, (0, 4), 100).puzzles)


def test_a_batch_is_valid_puzzles_with_more_givens(some):
    for _, (puzzles, digits) in batches(some).epoch(0):
        check(Grids(puzzles.numpy(), digits.numpy() + 1), "batch")
        givens = (puzzles > 0).sum(1)
        assert givens.min() >= 23
        assert givens.max() <= 29


def test_batches_depend_on_seed_epoch_and_number_alone(some):
    whole = list(batches(some).epoch(2))
    rest = list(batches(some).epoch(2, start=2))
    halves = [dict(batches(some, rank=r, world_size=2).epoch(2)) for r in (0, 1)]
    for index, batch in rest:
        assert all(map(torch.equal, batch, whole[index][1]))
    for index, batch in whole:
        parts = [torch.cat(pair) for pair in zip(*(half[index] for half in halves), strict=True)]
        assert all(map(torch.equal, batch, parts))
    assert not torch.equal(whole[0][1][0], next(batches(some).epoch(3))[1][0])


def test_only_free_places_take_a_new_puzzle(some):
    free = torch.arange(10) < 4
    plain, held = batches(some), batches(some, free=lambda: free)
    (_, first), (_, second) = list(plain.epoch(0))[:2]
    found = [batch for _, batch in held.epoch(0)][:2]
    for mine, one, two in zip(found[1], first, second, strict=True):
        assert torch.equal(mine[:4], two[:4])
        assert torch.equal(mine[4:], one[4:])
    for mine, one in zip(found[0], first, strict=True):  # before any was seen all are new
        assert torch.equal(mine, one)


@pytest.mark.skipif(not REAL.is_file(), reason="the archive is not beside the repository")
def test_the_real_ones(tmp_path):
    prepare("sudoku", tmp_path, REAL)
    pools = Sudoku().load(tmp_path)
    assert [len(pool.puzzles) for pool in pools] == [44_158, 1_000, 4_000, 48_765]
    assert {int(n) for pool in pools[:3] for n in (pool.puzzles > 0).sum(1)} == {17}
