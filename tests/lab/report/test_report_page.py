"""The page as a browser parses it, and the files beside it."""

import base64
import csv
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from report_runs import changed_summary, make_run, other_task

from gdeq.lab import report

VOID = {"meta", "img"}


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
            self.table[-1][-1] += data.strip("\n")


@pytest.fixture(scope="module")
def page(comparison):
    return Page(comparison[1].read_text())


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_headline_table_has_the_form_of_the_paper_s(page):
    head, *rows = page.tables["headline"]
    assert head[:4] == ["Method", "Speed-up", "Test accuracy (%)", "… with pre-training"]
    assert head[4:] == ["ms / step", "VJPs / step", "Training time"]  # no empty column
    names = ["Implicit", "JFB", "NPG", "GDEQ", "GDEQ tolerance 0.1"]
    assert [row[0] for row in rows] == names
    assert [row[1] for row in rows] == ["1.00×", "2.06×", "1.71×", "2.16×", "1.96×"]
    for row in rows[:4]:
        assert re.fullmatch(r"9\d\.\d\d ± \d\.\d\d2 seeds", row[2])
        assert re.fullmatch(r"9\d\.\d\d ± \d\.\d\d2 seeds", row[3])
    assert rows[3][4:] == ["100", "0", "26.4 s"]
    assert rows[4][2].endswith("†epoch 6 of 12")
    assert rows[4][3] == "–"


def test_all_runs_are_listed_with_their_state(page, comparison):
    rows = page.tables["runs"][1:]
    assert {row[0] for row in rows} == {path.name for path in comparison[0]}
    assert [row[4] for row in rows].count("finished") == 16
    assert "epoch 6 of 12" in [row[4] for row in rows]


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
    sources = [value for key, value in page.attributes if key == "src"]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    links = [value for key, value in page.attributes if key == "href"]
    assert links
    assert all((comparison[1].parent / link).is_file() for link in links)
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert len(page.ids) == len(set(page.ids))


def test_each_figure_has_a_sentence_an_svg_a_png_and_its_data(page, comparison):
    names = {
        *("accuracy_time", "accuracy_epochs", "residual", "solver_steps", "backward_residual"),
        *("similarity_cosine", "similarity_error"),
    }
    folder = comparison[1].parent / "figures"
    assert {path.stem for path in folder.glob("*.png")} == names
    assert {path.stem for path in folder.glob("*.csv")} == names
    assert page.tags.count("figure") == page.tags.count("img") == len(names)
    for name in names:
        assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for sentence in ("further left is faster", "where the run measured", "middle half"):
        assert sentence in page.text


def test_vjps_of_a_similarity_are_medians_and_its_implicit_is_explained(tmp_path):
    path = make_run(tmp_path / "run", similarity=(1,))
    record = json.loads((path / "similarity.jsonl").read_text().splitlines()[0])
    many = [{**record, "method": "Implicit", "vjps": n} for n in (10, 11, 60)]
    (path / "similarity.jsonl").write_text("".join(json.dumps(r) + "\n" for r in many))
    page = Page(report.write([path], tmp_path / "out").read_text())
    (table,) = (t for t in page.tables.values() if "After epoch" in t[0])
    assert (table[0][2], table[1][2]) == ("VJPs, median", "11")
    assert "Implicit here is an exact backward solve (GMRES)" in page.text


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


def test_the_runs_as_csv(comparison):
    runs = read_csv(comparison[1].parent / "runs.csv")
    wanted = "gradient,pretrain,seed,epochs,test_accuracy,ms_per_step,train_seconds"
    assert ",".join(list(runs[0])[:7]) == wanted
    assert len(runs) == 17


def test_a_task_with_a_metric_of_its_own(tmp_path):
    paths = [other_task(tmp_path / name, name) for name in ("implicit", "gdeq")]
    page = Page(report.write(paths, tmp_path / "out").read_text())
    head, implicit, gdeq = page.tables["headline"]
    assert head[2] == "Test bits per character"
    assert "Speed and bits per character" in page.text
    assert "further left is faster, lower is better" in page.text
    assert gdeq[2] < implicit[2]  # by construction the better one
    assert (tmp_path / "out" / "figures" / "bits_per_character_time.csv").is_file()
    assert "test_bits_per_character" in read_csv(tmp_path / "out" / "runs.csv")[0]
    text = report.table(paths)
    assert "Test bits per character" in text.split("\n")[0]
    not_begun = make_run(tmp_path / "a", "implicit", data=None, task="chars", until=1)
    (not_begun / "metrics.jsonl").unlink()  # nothing tells that its metric is another
    half = report.table([not_begun, other_task(tmp_path / "half", finished=False)])
    assert "Test bits per character" in half
    assert re.search(r"2\.\d{3}† \(epoch 12 of 12\)", half)
    with pytest.raises(report.ReportError, match=r"images on digits \(digits\), chars \(half\)"):
        report.table([make_run(tmp_path / "digits"), tmp_path / "half"])
    with pytest.raises(report.ReportError, match=r"images on digits .*, images on cifar10"):
        report.table([tmp_path / "digits", make_run(tmp_path / "large", data="cifar10")])


@pytest.mark.parametrize(
    "told",
    [{"name": "x", "digits": "many"}, {"name": "x", "unit": None}, "x", 3, {"digits": 2}, []],
)
def test_a_damaged_metric_is_no_traceback(tmp_path, told):
    path = changed_summary(make_run(tmp_path / "run", epochs=2), metric=told, test_x=1.5)
    assert "GDEQ" in report.table([path])


def test_a_metric_does_not_choose_where_files_go(tmp_path):
    path = make_run(tmp_path / "run", epochs=2)
    changed_summary(path, **{"metric": {"name": "../../x<b>"}, "test_../../x<b>": 1.0})
    text = (path / "metrics.jsonl").read_text().replace("test_accuracy", "test_../../x<b>")
    (path / "metrics.jsonl").write_text(text)
    page = Page(report.write([path], tmp_path / "out").read_text())
    assert "b" not in page.tags
    assert (tmp_path / "out" / "figures" / "_x_b__time.png").is_file()


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
    assert not {"script", "b", "i"} & set(page.tags)
    assert "onerror" not in dict(page.attributes)
    assert evil in page.text
    assert "</text>$<i>" in page.text
    sources = [base64.b64decode(v.partition(",")[2]) for k, v in page.attributes if k == "src"]
    for source in sources:
        names = {
            element.tag.rpartition("}")[2] for element in ElementTree.fromstring(source).iter()
        }
        assert not {"script", "b", "i"} & names


def test_what_the_runs_show_stands_at_the_top_and_every_cell_knows_its_column(comparison, page):
    """On a phone a row is a card, with the head of the column before each value."""
    text = comparison[1].read_text()
    assert text.index('<p class="verdict">GDEQ takes the shortest steps') < text.index("<h2>")
    heads = [value for key, value in page.attributes if key == "data-head"]
    assert len(heads) == sum(len(row) for table in page.tables.values() for row in table[1:])
    assert "content: attr(data-head)" in text


def test_out_may_name_the_page(tmp_path):
    path = make_run(tmp_path / "a", epochs=2, until=1)
    (path / "metrics.jsonl").unlink()  # nothing to draw
    found = report.write([str(path)], tmp_path / "deep" / "my page.html")
    assert found == tmp_path / "deep" / "my page.html"
    assert Page(found.read_text()).tables["runs"][1][3] == "not started"
    assert (tmp_path / "deep" / "runs.csv").is_file()
