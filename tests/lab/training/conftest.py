import pytest
import training_runs
from training_fixtures import few_images, gdeq, trainer, zygote

__all__ = ["few_images", "gdeq", "reference", "trainer", "zygote"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory, zygote):
    """One uninterrupted run with everything that has a state."""
    folder = tmp_path_factory.mktemp("reference")
    zygote.ok(folder / "log", "train", *training_runs.RICH, "--out", folder / "run")
    return folder / "run"
