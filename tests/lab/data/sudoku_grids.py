"""Sudoku grids made on the spot."""

import numpy as np

from gdeq.lab.data.sudoku import Grids, units

PEERS = [
    sorted({c for unit in units() if cell in unit for c in unit} - {cell}) for cell in range(81)
]


def grids(many, givens=30, seed=0):
    """Solutions drawn at random, and as many of their cells as puzzles."""
    random = np.random.RandomState(seed)
    solutions = np.array([_filled(random) for _ in range(many)], np.uint8)
    hidden = random.random_sample(solutions.shape).argsort(1).argsort(1) >= givens
    return Grids(np.where(hidden, 0, solutions).astype(np.uint8), solutions)


def _filled(random):
    """By the cell with the fewest digits left, with a new try where there is none."""
    while True:
        left = [set(range(1, 10)) for _ in range(81)]
        grid = np.zeros(81, np.uint8)
        while (grid == 0).any():
            empty = np.flatnonzero(grid == 0)
            cell = min(empty, key=lambda c: (len(left[c]), random.random_sample()))
            if not left[cell]:
                break
            grid[cell] = random.choice(sorted(left[cell]))
            for peer in PEERS[cell]:
                left[peer].discard(grid[cell])
        else:
            return grid


def table(found, empty="0"):
    """As lines of puzzle and solution."""
    lines = [
        ",".join("".join(map(str, grid)) for grid in pair) for pair in zip(*found, strict=True)
    ]
    return "\n".join(lines).replace("0", empty) + "\n"
