from dataclasses import replace

import pytest

from gdeq.fast.kernels import available, norms, weights


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """All groups in one program: the interpreter's time goes by programs."""
    if not available(device):
        pytest.skip("Triton does not run here")
    if device.type == "cpu":
        tables = [weights.TUNING, *(getattr(m, "TUNING", {}) for m in vars(norms).values())]
        for table in tables:
            for name, tuning in list(table.items()):
                few = {"run_bytes": 1 << 20} if hasattr(tuning, "run_bytes") else {}
                few |= {"rows": 256} if table is weights.TUNING else {}
                monkeypatch.setitem(table, name, replace(tuning, **few))


@pytest.fixture
def gpu(device):
    """For what a CPU does not have: streams and graphs."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
