"""The page as a browser parses it, and the files beside it."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
from report_runs import make_run

from gdeq.lab import report
from gdeq.lab.report.style import CSS

VOID = {"meta", "br", "path", "use", "rect", "image"}


class Page(HTMLParser):
    """Elements, the cells of each table, ids; complains about tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.attributes = [], [], [], []
        self.tables, self.text = {}, ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for key, value in attrs if key == "id"]
        if tag == "table":
            self.table = self.tables.setdefault(dict(attrs).get("id", len(self.tables)), [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.table[-1][-1] += data


@pytest.fixture(scope="module")
def page(comparison):
    return Page(comparison[1].read_text())


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_headline_table_has_the_form_of_the_paper_s(page):
    top, below, *rows = page.tables["headline"]
    assert top[:3] == ["Method", "Speed-up", "Test accuracy (%), pre-training"]
    assert below == ["without", "with"]
    names = ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ tolerance 0.1"]
    assert [row[0] for row in rows] == names
    assert [row[1] for row in rows] == ["1.00×", "2.06×", "1.71×", "2.16×", "1.96×"]
    for row in rows[:4]:
        assert re.fullmatch(r"9\d\.\d\d ± \d\.\d\d2 seeds", row[2])
        assert re.fullmatch(r"9\d\.\d\d ± \d\.\d\d2 seeds", row[3])
    assert rows[3][4:] == ["100", "26.4 s", "0", "12"]
    assert rows[4][2].endswith("†epoch 6 of 12")
    assert rows[4][3] == "–"


def test_all_runs_are_listed_with_their_state(page, comparison):
    rows = page.tables["runs"][1:]
    assert {row[0] for row in rows} == {path.name for path in comparison[0]}
    assert [row[4] for row in rows].count("finished") == 16
    assert "in epoch 6 of 12" in [row[4] for row in rows]


def test_settings_that_differ_stand_above_the_settings(page, comparison):
    keys = {"seed", "pretrain_steps", "gradient.name", "gradient.tolerance"}
    assert set(page.tables["differences"][0][1:]) == keys
    assert page.tags.count("details") == len(comparison[0]) + 1
    assert "max_refine: null" in page.text
    assert ["torch", "2.5.0"] in page.tables["environment"]


def test_the_page_is_self_contained_and_fits_a_phone(page, comparison):
    text = comparison[1].read_text()
    assert "script" not in page.tags
    assert "://" not in text
    assert "@import" not in text
    assert not [key for key, _ in page.attributes if key == "src"]
    links = [value for key, value in page.attributes if key == "href"]
    assert links
    assert all((comparison[1].parent / link).is_file() for link in links)
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', text))
    assert used <= set(page.ids)


def test_each_figure_has_a_sentence_an_svg_a_png_and_its_data(page, comparison):
    names = {
        *("accuracy_time", "accuracy_epochs", "residual", "solver_steps", "backward_residual"),
        *("similarity_cosine", "similarity_error"),
    }
    folder = comparison[1].parent / "figures"
    assert {path.stem for path in folder.glob("*.png")} == names
    assert {path.stem for path in folder.glob("*.csv")} == names
    assert page.tags.count("figure") == page.tags.count("svg") == len(names)
    for name in names:
        assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for sentence in ("further left is faster", "where the run measured it", "middle half"):
        assert sentence in page.text


def test_vjps_of_a_similarity_are_medians_and_its_implicit_is_explained(tmp_path):
    path = make_run(tmp_path / "run", similarity=(1,))
    record = json.loads((path / "similarity.jsonl").read_text().splitlines()[0])
    many = [{**record, "method": "Implicit", "vjps": n} for n in (10, 11, 60)]
    (path / "similarity.jsonl").write_text("".join(json.dumps(r) + "\n" for r in many))
    page = Page(report.write([path], tmp_path / "out").read_text())
    (table,) = (t for t in page.tables.values() if "After epoch" in t[0])
    assert (table[0][2], table[1][2]) == ("VJPs, median", "11")
    assert "Implicit is here an exact backward solve (GMRES)" in page.text


def test_figures_tell_what_the_runs_hold(comparison):
    folder = comparison[1].parent / "figures"
    lines = read_csv(folder / "accuracy_time.csv")
    assert list(lines[0]) == ["method", "pretrain", "seed", "run", "seconds", "test_accuracy"]
    assert len([line for line in lines if line["run"] == "npg-seed1"]) == 12
    assert len([line for line in lines if line["run"] == "gdeq-adaptive"]) == 6
    # Not measured is no zero: JFB and plain GDEQ have no line.
    measured = {line["method"] for line in read_csv(folder / "backward_residual.csv")}
    assert measured == {"Implicit", "GDEQ tolerance 0.1"}
    cosines = read_csv(folder / "similarity_cosine.csv")
    assert {line["epoch"] for line in cosines} == {"1", "4", "12"}
    assert len(cosines) == 3 * 5 * 8


def test_tables_as_csv(comparison):
    table = read_csv(comparison[1].parent / "table.csv")
    assert [line["method"] for line in table][:4] == ["Implicit", "JFB", "NPG", "GDEQ"]
    assert float(table[3]["speedup"]) == pytest.approx(2.16)
    assert table[3]["seeds_pretrained"] == "2"
    assert table[4]["unfinished_without"] == "1"
    runs = read_csv(comparison[1].parent / "runs.csv")
    wanted = "gradient,pretrain,seed,epochs,test_accuracy,ms_per_step,train_seconds"
    assert ",".join(list(runs[0])[:7]) == wanted
    assert len(runs) == 17


def test_text_from_run_folders_stays_text(tmp_path):
    evil = "<script>alert(1)</script>"
    path = make_run(
        tmp_path / "<img src=x onerror=alert(1)>",
        '"><b>$x_2$</b>',
        epochs=2,
        data=evil,
        model__size=evil,
        device=evil,
        similarity=(1,),
    )
    similar = (path / "similarity.jsonl").read_text().replace("GDEQ refine 1", "</text>$<i>")
    (path / "similarity.jsonl").write_text(similar)
    page = Page(report.write([path], tmp_path / "out", title=evil).read_text())
    assert not {"script", "img", "b", "i"} & set(page.tags)
    assert "onerror" not in dict(page.attributes)
    assert evil in page.text
    assert "</text>$<i>" in page.text


def bold(paths, out):
    """What is best in the table; no figure is looked at."""
    with mock.patch.object(report.writer, "draw", return_value=(b"", "")):
        text = report.write(paths, out).read_text()
    table = re.search(r'<table id="headline">.*?</table>', text, re.DOTALL).group()
    return re.findall(r'class="best">([^<]*)<', table)


def ended(path, accuracy):
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"test_accuracy": accuracy}))
    return path


def test_less_than_one_test_image_is_not_best(tmp_path):
    implicit = make_run(tmp_path / "i", "implicit")
    gdeq = ended(make_run(tmp_path / "g"), 90.0)
    # One of the 360 digits is 0.278 %.
    assert bold([ended(implicit, 90.2), gdeq], tmp_path / "out") == ["2.16×"]
    assert bold([ended(implicit, 90.0), gdeq], tmp_path / "out") == ["2.16×"]
    assert bold([ended(implicit, 90.0 + 100 / 360), gdeq], tmp_path / "out") == ["90.28", "2.16×"]


def test_speed_ups_that_are_equal_have_no_best(tmp_path):
    paths = [make_run(tmp_path / name, name, seconds=0.1) for name in ("implicit", "jfb")]
    assert "1.00×" not in bold(paths, tmp_path / "out")


def test_nothing_is_best_after_one_epoch(tmp_path):
    paths = [make_run(tmp_path / name, name, epochs=1) for name in ("implicit", "jfb")]
    assert bold(paths, tmp_path / "out") == []
    rows = Page((tmp_path / "out" / "report.html").read_text()).tables["headline"][2:]
    assert [row[1] for row in rows] == ["1.00×22 steps timed", "2.06×22 steps timed"]


def test_a_speed_up_over_few_steps_is_not_best(tmp_path):
    paths = [make_run(tmp_path / name, name, epochs=4) for name in ("implicit", "jfb")]
    assert not [text for text in bold(paths, tmp_path / "out") if "×" in text]
    paths = [make_run(tmp_path / f"{name}12", name) for name in ("implicit", "gdeq")]
    few = make_run(tmp_path / "few", gradient__refine=1, until=2)  # as fast as gdeq
    assert bold([*paths, few], tmp_path / "out").count("2.16×") == 1


def test_an_unfinished_run_beside_a_finished_one_is_named(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "half", seed=1, until=3)]
    page = Page(report.write(paths, tmp_path / "out").read_text())
    assert page.tables["headline"][2][2].endswith("1 run, 1 unfinished†")
    assert "† Not finished, the latest figure: half (epoch 3 of 12, not counted)." in page.text


def test_the_page_says_over_seeds_only_of_seeds(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    page = Page(report.write(paths, tmp_path / "out").read_text())
    assert "over seeds" not in page.text
    assert "deviation over runs, some of the same seed." in page.text


def test_a_wide_table_says_on_a_phone_that_it_scrolls(comparison):
    text = comparison[1].read_text()
    hint = '<p class="hint">scroll →</p><div class="scroll" tabindex="0"><table id='
    assert f'{hint}"headline"' in text
    assert f'{hint}"runs"' in text
    assert f'{hint}"environment"' not in text
    phone = CSS[CSS.index("max-width: 600px") :]
    assert ".hint { display: none; }" in CSS
    assert ".hint { display: block;" in phone
    assert "var(--shade), transparent) right / 22px 100% scroll" in CSS
    # Collapsed rules stay behind a sticky cell's background.
    assert "border-collapse: separate" in CSS


def test_out_may_name_the_page(tmp_path):
    path = make_run(tmp_path / "a", epochs=2, until=1)
    (path / "metrics.jsonl").unlink()  # nothing to draw
    found = report.write([str(path)], tmp_path / "deep" / "my page.html")
    assert found == tmp_path / "deep" / "my page.html"
    assert Page(found.read_text()).tables["runs"][1][4] == "not started"
    assert (tmp_path / "deep" / "table.csv").is_file()


def test_the_report_needs_no_training_code_and_no_early_matplotlib():
    for file in Path(report.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert not re.search(r"gdeq\.(training|data|models)", text), file
        assert not re.search(r"^(import|from) matplotlib", text, re.MULTILINE), file
