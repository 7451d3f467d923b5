"""Streams apart from each other, with a pool that gives 32 of them in turn, as PyTorch's does."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from gdeq.fast import streams

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    numbers = itertools.cycle(range(1, streams.POOL + 1))

    def take(_device):
        return SimpleNamespace(cuda_stream=next(numbers))

    monkeypatch.setattr(torch.cuda, "Stream", take)
    monkeypatch.setattr(streams, "_families", {})
    monkeypatch.setattr(streams, "_of_all", {})
    return take


def numbers_of(*taken):
    return [stream.cuda_stream for stream in taken]


@pytest.mark.parametrize("asked", [0, 5, 20, 26, 31])
def test_no_two_of_one_computation_are_the_same(asked, pool):
    main = streams.new_main(GPU)
    for _ in range(asked):  # by others
        pool(GPU)
    sides = [streams.beside(main, GPU) for _ in range(6)]
    weights = streams.for_all(GPU, 6)
    taken = numbers_of(main, *sides, *weights)
    assert len(set(taken)) == len(taken)


def test_of_too_many_one_is_given_twice():
    main = streams.new_main(GPU)
    taken = numbers_of(main, *(streams.beside(main, GPU) for _ in range(40)))
    assert len(set(taken)) == streams.POOL
