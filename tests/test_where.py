"""The time of a step by kind of kernel, from what a profiler saw."""

from types import SimpleNamespace

import pytest

from gdeq.lab.bench.where import tally


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_kernels_by_kind_and_the_gaps_between_them():
    events = [
        event("_dots", 1000, 1200),
        event("nvjet_tst", 1100, 1500),  # beside the first
        event("multi_tensor_apply_kernel", 1600, 1700),
        event("nvjet_tst", 1700, 1900),
        event("elementwise", 2000, 2050),
    ]
    found, lines = tally(events)
    assert found["kernels"] == 5
    assert found["whole_ms"] == pytest.approx(1.05)
    assert found["gaps_ms"] == pytest.approx(0.2)
    kinds = {"convolutions": 0.6, "solver": 0.2, "optimiser": 0.1, "other": 0.05}
    assert found["by_kind_ms"] == pytest.approx(kinds)
    assert list(found["by_kind_ms"]) == list(kinds)  # the longest first
    assert lines[0].split() == ["0.600", "ms", "2", "x", "nvjet_tst"]
