"""The reasoner: what moves with the puzzle, and what its segments carry."""

import pytest
import torch

from gdeq import Picard, Unrolled
from gdeq.lab.data.sudoku import moved_cells
from gdeq.models.reasoner import Mixing, Reasoner, relations


@pytest.fixture(params=["attention", "mixing"])
def model(request):
    torch.manual_seed(0)
    made = Reasoner(width=12, heads=3, blocks=2, segments=2, mix=request.param)
    return made.double().eval()


def test_relations_are_the_shared_units():
    found = relations()
    assert torch.equal(found, found.T)
    assert found.diagonal().tolist() == [7] * 81
    # Beside itself a cell shares its row with 8 cells, its column with 8 and its box with 8.
    for bit in (1, 2, 4):
        assert ((found & bit) > 0).sum(1).tolist() == [9] * 81
    assert (found > 0).sum(1).tolist() == [21] * 81  # the 20 that Sudoku counts as peers


def test_the_answer_moves_with_the_rows_and_columns(model):
    puzzles = torch.randint(0, 10, (3, 81))
    cells = moved_cells(*(torch.rand(3, n) for n in (9, 3, 9, 3)), torch.zeros(3, 1))
    there = model(puzzles.gather(1, cells))
    here = model(puzzles).gather(2, cells[:, None, :, None].expand(3, 2, 81, 9))
    torch.testing.assert_close(there, here)


def test_segments_go_on_where_the_last_one_ended(model):
    puzzles = torch.randint(0, 10, (2, 81))
    model.deq.solver = Picard(max_iter=6, tol=0.0)
    model.test_segments = 1
    whole = model(puzzles)[:, 0]
    model.deq.solver, model.test_segments = Picard(max_iter=3, tol=0.0), 2
    torch.testing.assert_close(model(puzzles)[:, 1], whole)


def test_no_gradient_goes_from_a_segment_to_the_one_before(model):
    """Unrolled from z0, the last answer alone: as if its segment had started from a constant."""
    puzzles = torch.randint(0, 10, (2, 81))
    model.deq.solver, model.deq.gradient = None, Unrolled(2)
    model(puzzles)[:, 1].square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.test_segments = 1
    model(puzzles)
    z = model.deq.solution.z
    model.zero_grad()
    model(puzzles, z)[:, 0].square().sum().backward()
    for mine, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad)


def test_random_starts_in_training_alone(model):
    puzzles = torch.randint(0, 10, (2, 81))
    assert torch.equal(model(puzzles), model(puzzles))
    model.train()
    assert not torch.equal(model(puzzles), model(puzzles))


def test_a_cell_hears_its_own_units_alone():
    torch.manual_seed(0)
    h = torch.randn(1, 81, 6, dtype=torch.float64, requires_grad=True)
    Mixing(6, heads=1).double()(h)[0, 40].sum().backward()
    heard = h.grad[0].abs().sum(1) > 0
    assert torch.equal(heard, relations()[40] > 0)


def test_a_carried_state_goes_on_until_the_puzzle_is_solved():
    torch.manual_seed(0)
    model = Reasoner(width=12, heads=3, blocks=1, segments=1, mix="mixing", patience=3).double()
    model.deq.solver = Picard(max_iter=2, tol=0.0)
    puzzles = torch.randint(0, 10, (3, 81))
    with torch.no_grad():
        model(puzzles)
        assert model.carry.age.tolist() == [1, 1, 1]
        model.halt(torch.tensor([False, True, False]))
        before = model.carry.z.clone()
        model(puzzles)
        # Of the two that went on, two segments in one give the same; the other one began anew.
        again = model.deq(model.embed(puzzles), z0=before)
    torch.testing.assert_close(model.carry.z[[0, 2]], again[[0, 2]])
    assert not torch.allclose(model.carry.z[1], again[1])
    assert model.carry.age.tolist() == [2, 1, 2]
    model(puzzles)
    assert not model.carry.z.requires_grad
    model.halt(torch.zeros(3, dtype=torch.bool))
    assert model.carry.halted.tolist() == [True, False, True]  # they had their three segments


def test_a_test_follows_all_segments_and_carries_nothing():
    model = Reasoner(width=12, heads=3, blocks=1, segments=1, mix="mixing", patience=3).eval()
    assert model(torch.randint(0, 10, (2, 81))).shape == (2, 3, 81, 9)
    assert model.carry is None


def test_an_unknown_mix_is_named():
    with pytest.raises(ValueError, match="mix must be one of attention, mixing, got 'mlp'"):
        Reasoner(mix="mlp")
