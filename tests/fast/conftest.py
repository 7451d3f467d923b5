"""Without a GPU the kernels run in Triton's interpreter."""

import pytest

from gdeq.fast.kernels import available


@pytest.fixture(params=["oracle", "fast"])
def form(request):
    """An engine that is compared with the reference (`sweeps.use`)."""
    return request.param


@pytest.fixture
def kernels_run(device):
    if not available(device):
        pytest.skip("Triton does not run here")


@pytest.fixture
def gpu(device):
    """For what a CPU does not have: streams and graphs."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
