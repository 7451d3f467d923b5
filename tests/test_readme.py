"""What the README and the site show runs as it stands there, and both stay readable."""

import csv
import hashlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import gdeq

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README, GUIDES = ROOT / "README.md", DOCS / "guides"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", CHANGELOG, *sorted(DOCS.rglob("*.md"))]
TEXTS = [path for folder in (DOCS, ROOT / "src") for path in sorted(folder.rglob("*.py"))]
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    found = [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]
    return [textwrap.dedent(text) for text in found]


def block(page: Path, about: str) -> str:
    (found,) = (text for text in blocks(page, "python") if about in text)
    return found


class Dropping(torch.nn.Module):
    """With a dropout mask in it: another mask is another f."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(3, 3), gdeq.VariationalDropout(0.5)

    def forward(self, z, x):
        return self.dropout(torch.tanh(0.5 * self.linear(z) + x))


def test_the_example_prints_what_is_shown(capsys):
    exec(block(README, "class Cell"), {})
    shown, printed = blocks(README, "text")[0], capsys.readouterr().out
    number = re.compile(r"\d\.\de-\d\d")  # the last digits may differ by machine
    assert number.sub("#", printed) == number.sub("#", shown)
    for told, seen in zip(number.findall(shown), number.findall(printed), strict=True):
        assert float(seen) == pytest.approx(float(told), rel=0.1)


def test_the_front_page_shows_the_same_example():
    page = DOCS / "index.md"
    assert block(page, "class Cell") == block(README, "class Cell")
    assert blocks(page, "text")[0] == blocks(README, "text")[0]
    assert page.read_text().split("\n\n")[1] == README.read_text().split("\n\n")[1]  # the pitch


def test_the_table_of_compatibility_is_up_to_date():
    script = ROOT / "benchmarks" / "compatibility.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0


class Physics:
    """A stand-in for that of deepinv."""

    def A(self, x):  # noqa: N802
        return 0.5 * x

    A_adjoint = A


PIECES = {
    README: ["Anderson(max_iter"],
    DOCS / "index.md": ["class Cell"],
    GUIDES / "states.md": ["class TwoScales", "sol = "],
    GUIDES / "solvers.md": ["for kind in", "Unrolled("],
    GUIDES / "gradients.md": ["def weight_gradient"],
    GUIDES / "precision.md": ["torch.autocast"],
    GUIDES / "serving.md": ["gdeq.fixed_steps"],
    GUIDES / "stability.md": ["gdeq.steady"],
    DOCS / "coming-from" / "locuslab.md": ["gdeq.DEQ"],
    DOCS / "coming-from" / "deepinv.md": ["class ProximalGradient"],
    DOCS / "coming-from" / "recursive.md": ["class Recursion"],
    DOCS / "coming-from" / "torchdeq.md": ["def forward(x)", "deq.trajectory"],
}


@pytest.mark.parametrize(
    ("page", "about"),
    [(page, about) for page, abouts in PIECES.items() for about in abouts],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_short_pieces_run(page, about):
    f = Dropping().eval()
    names = {"torch": torch, "gdeq": gdeq, "cell": f, "f": f, "deq": gdeq.DEQ(f), "model": f}
    names |= {"y": torch.randn(4, 3), "physics": Physics(), "denoiser": torch.tanh}
    x = torch.randn(4, 3)
    if "Recursion" in about:
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        names |= {"net": net}
        x = torch.randn(4, 64)
    if "autocast" in about:
        names["model"] = gdeq.DEQ(f, gdeq.Broyden(20, 1e-2))
    exec(block(page, about), names | {"x": x, "z0": torch.zeros(4, 3)})


def test_a_recursion_is_the_loop_it_replaces():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    names = {"torch": torch, "gdeq": gdeq, "net": net, "x": torch.randn(4, 64)}
    exec(block(DOCS / "coming-from" / "recursive.md", "class Recursion"), names)
    cell, z = names["deq"].cell, names["deq"].cell.initial_state(names["x"])
    with torch.no_grad():
        for _ in range(6):
            z = cell(z, names["x"])
    torch.testing.assert_close(names["deq"](names["x"])["answer"], z["answer"])


def test_the_penalty_is_on_the_f_that_was_solved():
    deq = gdeq.DEQ(Dropping(), gdeq.Broyden(50, 1e-6))
    names = {"gdeq": gdeq, "deq": deq, "x": torch.randn(8, 3)}
    exec(block(GUIDES / "stability.md", "residual_penalty"), names)
    assert names["penalty"].item() < 1e-9
    names["loss"].backward()
    assert deq.cell.linear.weight.grad.norm() > 0


@pytest.mark.parametrize(("hopeless", "told"), [(0, ""), (1, "31 of 32 samples converged")])
def test_serving_tells_which_samples_failed(hopeless, told, capsys):
    endless = (torch.arange(32) < hopeless).float()[:, None]  # z + 1 + z² has no fixed point
    deq = gdeq.DEQ(lambda z, x: 0.5 * z + 1 + endless * (0.5 * z + z * z))
    exec(
        block(GUIDES / "serving.md", "deq.eval()"),
        {"torch": torch, "gdeq": gdeq, "deq": deq, "x": torch.zeros(32, 3)},
    )
    assert told in capsys.readouterr().out
    assert bool(deq.solution.converged.all()) == (not told)


def test_the_captured_step_trains():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    cell = torch.nn.Linear(4, 4)
    with torch.no_grad():
        cell.weight.mul_(0.3)
    deq = gdeq.DEQ(lambda z, x: torch.tanh(cell(z) + x))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), deq, torch.nn.Linear(4, 2)).to(device)
    cell.to(device)
    x = torch.randn(16, 4, device=device)
    y = (x[:, 0] > 0).long()
    names = {"torch": torch, "gdeq": gdeq, "model": model}
    exec(block(GUIDES / "speed.md", "@gdeq.capture"), names)
    if device == "cpu":
        with pytest.warns(gdeq.CaptureWarning, match="runs without a CUDA graph") as told:
            losses = [names["step"](x, y).item() for _ in range(31)]
        assert len(told) == 1
    else:
        losses = [names["step"](x, y).item() for _ in range(31)]
    assert losses[-1] < losses[0]


def test_commands_exist():
    cli = pytest.importorskip("gdeq.lab.cli")
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    known |= {group.name for group in cli.app.registered_groups}
    shell = "\n".join(text for page in PAGES for text in blocks(page, "sh"))
    assert set(re.findall(r"^gdeq (\w+)", shell, re.MULTILINE)) <= known
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", shell, re.MULTILINE)) <= set(targets)


def test_the_guide_has_every_preset():
    presets = pytest.importorskip("gdeq.lab.tasks.registry").presets()
    page = (GUIDES / "command-line.md").read_text()
    shown = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(shown))) == set(presets)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_short_lines(page):
    prose = BLOCK.sub("", page.read_text())
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize(
    "page", [*PAGES, *TEXTS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_no_page_names_a_commit(page):
    hashes = r"(?<![\w./-])(?:[0-9a-f]{7,12}|[0-9a-f]{40})(?![\w/-]|\.\w)"  # 32 are an MD5
    words = re.findall(hashes, BLOCK.sub("", page.read_text()))
    found = [word for word in words if re.search(r"\d", word) and re.search(r"[a-f]", word)]
    assert page == CHANGELOG or found == []


def test_the_readme_and_its_picture_have_the_figures_of_the_tables():
    sources = [ROOT / "results" / "bench" / "beside-torchdeq.csv"]
    sources += [ROOT / "results" / "core" / "gradients.csv"]
    speed, errors = (list(csv.DictReader(path.read_text().splitlines())) for path in sources)
    text = README.read_text()
    for row in speed:
        name = row["model"].split(" (")[0]
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name}, "))
        for library in ("gdeq", "torchdeq JFB"):
            assert f"| {float(row[library]):.3g} |" in line
    found = {
        row["method"]: float(row["median"])
        for row in errors
        if (row["dtype"], row["solved by"]) == ("float64", "Broyden, 1e-06")
    }
    assert f"a median error of {found['GDEQ, refine 1']:.2f} and" in text
    assert f"`JFB` has {found['JFB']:.2f} and" in text
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    picture = (DOCS / "overview.png").read_bytes()
    assert digest.encode() in picture, "run benchmarks/picture.py"


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 1300
