import pytest
import report_runs

from gdeq.lab import report


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """Four methods × pre-training × two seeds, and one run that was cut off; with its report."""
    folder = tmp_path_factory.mktemp("comparison")
    paths = report_runs.compared(folder / "runs")
    paths.append(
        report_runs.make_run(
            folder / "runs" / "gdeq-adaptive",
            gradient__tolerance=0.1,
            until=7,
            torn=True,
            seconds=0.11,
        )
    )
    return paths, report.write(paths, folder / "out", title="Four gradients")
