from itertools import combinations, product

import pytest

from pairs import pairs


@pytest.mark.parametrize("sizes", [(2, 3), (4, 2, 2), (5, 2, 2, 2), (4, 2, 3, 2)])
def test_any_two_values_meet(sizes):
    choices = [[(i, value) for value in range(size)] for i, size in enumerate(sizes)]
    rows = pairs(*choices)
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(product(*choices))
    for one, other in combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(choices[one], choices[other]))
    assert {value for row in rows for value in row} == {v for values in choices for v in values}
