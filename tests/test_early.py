"""What is announced as ready before the rest."""

import torch

from gdeq.early import announced, ready


def test_tensors_in_the_announced_part_are_ready():
    buffer = torch.zeros(100)
    with announced(buffer, 40, "event"):
        assert ready([buffer[40:60].view(4, 5), buffer[60:]]) == "event"
        assert ready([buffer[40:60].view(4, 5).mT]) == "event"


def test_the_first_part_is_not():
    buffer = torch.zeros(100)
    with announced(buffer, 40, "event"):
        assert ready([buffer[:40], buffer[40:]]) is None
        assert ready([buffer[39:]]) is None


def test_what_was_computed_from_it_is_not():
    buffer = torch.zeros(100)
    with announced(buffer, 40, "event"):
        assert ready([buffer[40:].clone()]) is None
        assert ready([buffer[40:] * 2]) is None
        assert ready([]) is None


def test_only_during_the_call_and_the_innermost_one():
    one, other = torch.zeros(10), torch.zeros(10)
    with announced(one, 0, "outer"):
        with announced(other, 0, "inner"):
            assert ready([other]) == "inner"
            assert ready([one]) is None
        assert ready([one]) == "outer"
    assert ready([one]) is None


def test_nothing_to_announce():
    buffer = torch.zeros(10)
    with announced(buffer, 0, None):
        assert ready([buffer]) is None
