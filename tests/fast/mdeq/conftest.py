import pytest

from gdeq.fast.kernels import weights
from norm_cases import one_program_a_sample


@pytest.fixture(autouse=True)
def few_programs(device, kernels_run, monkeypatch):
    """All groups in one program: the interpreter's time goes by programs."""
    if device.type == "cpu":
        monkeypatch.setattr(weights, "ROWS", 256)
        one_program_a_sample(monkeypatch)
