import pytest


@pytest.fixture(params=["oracle", "fast"])
def form(request):
    """An engine that is compared with the reference (`sweeps.use`)."""
    return request.param
