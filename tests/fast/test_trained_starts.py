"""benchmarks/trained.py: a row starts from what it says, whichever engine computes it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from cells import differentiate
from gdeq import Broyden
from gdeq.engine import use
from problems import Wide, assert_near

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.usefixtures("kernels_run")
def test_the_start_of_a_refinement_is_that_of_the_reference_engine(monkeypatch, device):
    pytest.importorskip("numpy")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    rows = runpy.run_path(str(BENCHMARKS / "trained.py"))["rows"]
    problem = Wide(radius=0.9).to(device)
    found = {}
    for engine in ("reference", "fast"):
        with use(engine):
            for name, start, method in rows():
                found[engine, name, start] = differentiate(problem, Broyden(5, 0.0), method)[1]
    for name, start, _ in rows():
        assert_near(found["fast", name, start], found["reference", name, start], 1e-6, name)
    inverse, plain = (found["fast", "refine 2", start] for start in ("B^-T v", "v"))
    assert (inverse - plain).norm() > 0.01 * plain.norm()
