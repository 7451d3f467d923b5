"""What cannot be reported is said in a sentence."""

from pathlib import Path

import pytest
from report_runs import make_run

from gdeq.lab import files, report
from gdeq.lab.report import ReportError


def message(*arguments):
    with pytest.raises(ReportError) as caught:
        report.write(*arguments)
    return str(caught.value)


def test_what_is_no_run_is_told_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    out = Path("out")
    assert "no runs given" in message([], out)
    assert message([Path("nowhere")], out) == "nowhere does not exist"
    assert message([Path("file")], out) == "file is a file, not a run folder"
    assert message([Path("empty")], out) == "empty is not a run folder: it holds no config.yaml"
    assert message([Path("runs")], out).startswith("runs is not a run folder")
    assert "are inside it: `gdeq report runs/first`" in message([Path("runs")], out)
    assert not out.exists()
    assert report.write([Path("runs/first")], out) == Path("out/report.html")
    with pytest.raises(ReportError, match="no runs given"):
        report.table([])


@pytest.mark.parametrize(("text", "part"), [("a: [", "not valid YAML"), ("- 1", "no settings")])
def test_a_config_that_is_none(tmp_path, text, part):
    path = make_run(tmp_path / "a")
    (path / "config.yaml").write_text(text)
    assert part in message([path], tmp_path / "out")


def test_a_place_that_cannot_be_written(tmp_path):
    path = make_run(tmp_path / "a")
    (tmp_path / "file").write_text("x")
    text = message([path], tmp_path / "file" / "out")
    assert text.startswith("cannot write the report to")
    assert "Not a directory" in text
    assert "choose another folder" in text


def test_a_full_disk_keeps_the_earlier_page(tmp_path, monkeypatch):
    path = make_run(tmp_path / "a", epochs=2)
    page = tmp_path / "out" / "report.html"
    page.parent.mkdir()
    page.write_text("the earlier page")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    assert "No space left on device" in message([path], tmp_path / "out")
    assert page.read_text() == "the earlier page"
    assert not list(tmp_path.rglob("*.part"))
