"""Prepare the pages of the site in build/docs, for `zensical build`.

Tutorials are scripts in percent format.  Each is executed, and becomes a page with its printed
output and figures, and a notebook.  Links that lead out of docs/ become links into the repository;
a broken link is an error.

`python docs/build.py --keep 7-capture`, on a machine with a GPU, runs this one tutorial and writes
what it prints to docs/tutorials/7-capture.gpu.txt, which later builds show.  It needs torch and
matplotlib only.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
STAGE = ROOT / "build" / "docs"
REPOSITORY = "https://github.com/gdeq/gdeq/blob/main/"
ON_GPU = ("7-capture",)  # tutorials that show what they print on a GPU
ALSO = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}  # pages from the root
MARK = re.compile(r"^# %%(.*)$", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass
class Cell:
    kind: str  # "markdown", "code", "test" (executed, not shown)
    text: str
    line: int = 0  # of the script, where the text begins
    printed: str = ""
    figures: list[bytes] = field(default_factory=list)  # PNG


def cells(script: Path) -> list[Cell]:
    """The cells of a script in percent format."""
    before, *parts = MARK.split(script.read_text())
    found, line = [], before.count("\n")
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        kind = mark.strip(" []") or "code"
        if kind not in ("markdown", "code", "test"):
            raise ValueError(
                f"{script.name}: a cell must be [markdown], [test] or code, not {mark}"
            )
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        blank = len(body) - len(body.lstrip("\n"))
        found.append(Cell(kind, text.strip("\n"), line + blank))
        line += body.count("\n")
    return found


def execute(script: Path) -> list[Cell]:
    """The cells with what they print and draw."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    grey = "#7d8590"  # read on white and on black
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), grey
    )
    style = {**colours, "figure.figsize": (5.2, 2.9), "figure.dpi": 150, "font.size": 9}
    style |= {"savefig.transparent": True, "legend.framealpha": 0.0, "axes.grid": True}
    style |= {"grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False}
    found, names = cells(script), {"__name__": "__main__"}  # as in a notebook: it is no file
    with mpl.rc_context(style):
        for cell in found:
            if cell.kind == "markdown":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * cell.line + cell.text, str(script), "exec"), names)
            cell.printed = printed.getvalue().rstrip()
            for number in pyplot.get_fignums():
                image = io.BytesIO()
                figure = pyplot.figure(number)
                figure.savefig(image, format="png", bbox_inches="tight", metadata={"Software": ""})
                cell.figures.append(image.getvalue())
            pyplot.close("all")
    return found


def printing(found: list[Cell]) -> list[Cell]:
    """The cells whose output the page shows."""
    return [cell for cell in found if cell.kind == "code" and cell.printed]


def keep(script: Path) -> None:
    """Run a tutorial on this machine's GPU, and keep what it prints."""
    import torch  # noqa: PLC0415

    if script.stem not in ON_GPU:
        sys.exit(f"--keep takes {' or '.join(ON_GPU)}, not {script.stem}")
    if not torch.cuda.is_available():
        sys.exit(f"--keep {script.stem} needs a GPU, and PyTorch sees none here")
    text = "\n---\n".join(cell.printed for cell in printing(execute(script))) + "\n"
    kept = script.with_suffix(".gpu.txt")
    kept.write_text(text)
    if "OUT" in os.environ:
        shutil.copy(kept, os.environ["OUT"])
    print(text)


def show_kept(script: Path, found: list[Cell]) -> None:
    """Replace the output by that of a GPU, and say at the top of the page where it comes from."""
    if script.stem not in ON_GPU:
        return
    kept = script.with_suffix(".gpu.txt")
    note = "This page was built on a CPU: its times say nothing about a GPU."
    if kept.exists():
        blocks, shown = kept.read_text().rstrip().split("\n---\n"), printing(found)
        if len(blocks) != len(shown):
            raise ValueError(
                f"{kept.name} has {len(blocks)} outputs and {script.name} makes {len(shown)}: "
                f"run `python docs/build.py --keep {script.stem}` on a GPU again"
            )
        for cell, block in zip(shown, blocks, strict=True):
            cell.printed = block
        note = f"The output on this page is from a run on one {blocks[0]}."
    found[0].text += f"\n\n> {note}"


def page(name: str, found: list[Cell], folder: Path) -> str:
    """Markdown, with figures written beside it."""
    lines, figures = [], 0
    for cell in found:
        if cell.kind == "test":
            continue
        lines.append(cell.text if cell.kind == "markdown" else f"```python\n{cell.text}\n```")
        if cell.printed and cell.kind == "code":
            lines.append(f"```text\n{cell.printed}\n```")
        for image in cell.figures:
            figures += 1
            (folder / f"{name}-{figures}.png").write_bytes(image)
            lines.append(f"![Figure {figures} of this tutorial]({name}-{figures}.png)")
    lines.append(f"[Download this page as a notebook]({name}.ipynb), or")
    lines[-1] += f" [read the script]({REPOSITORY}docs/tutorials/{name}.py)."
    return "\n\n".join(lines) + "\n"


def notebook(found: list[Cell]) -> dict[str, Any]:
    """The same for Jupyter, version 4 of its format."""
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cell for cell in found if cell.kind != "test"):
        one: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        one |= {"cell_type": cell.kind, "source": cell.text}
        if cell.kind == "code":
            outputs: list[dict[str, Any]] = []
            if cell.printed:
                text = cell.printed + "\n"
                outputs.append({"output_type": "stream", "name": "stdout", "text": text})
            for image in cell.figures:
                data = {"image/png": base64.b64encode(image).decode()}
                outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
            one |= {"execution_count": None, "outputs": outputs}
        made.append(one)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def tutorials() -> list[Path]:
    return sorted((DOCS / "tutorials").glob("[0-9]*.py"))


def relink(text: str, source: Path, staged: Path) -> str:
    """Lead every link of a page at ``source`` to where its target is on the site."""

    def lead(match: re.Match[str]) -> str:
        image, title, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"https?:|mailto:", target):
            return match[0]
        file = (source.parent / path).resolve()
        anchor = f"#{anchor}" if anchor else ""
        known = file.relative_to(ROOT).as_posix()
        if not file.exists() and not (staged.parent / path).exists():  # figures are beside the page
            raise FileNotFoundError(f"{source.relative_to(ROOT)} links to {target}")
        if known.startswith("docs/"):
            place = STAGE / file.relative_to(DOCS)
            place = place.with_suffix(".md") if file in tutorials() else place
        elif known in ALSO:
            place = STAGE / ALSO[known]
        elif image:
            place = STAGE / "assets" / known.replace("/", "-")
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)
        else:
            return f"[{title}]({REPOSITORY}{known}{anchor})"
        link = f"({os.path.relpath(place, staged.parent)}{anchor})"
        shown = f"![{title}]{link}" if image else title  # a figure leads to itself, at full size
        return f"[{shown}]{link}"

    parts = CODE.split(text)
    return "".join(part if i % 2 else LINK.sub(lead, part) for i, part in enumerate(parts))


def stage(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(relink(source.read_text(), source, place))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--keep", metavar="TUTORIAL", help="keep its output from this GPU, and stop"
    )
    if name := parser.parse_args().keep:
        keep(DOCS / "tutorials" / f"{name}.py")
        return
    # Tensors are small here, and on a busy machine several threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(STAGE, ignore_errors=True)
    for source in sorted(DOCS.rglob("*")):
        place = STAGE / source.relative_to(DOCS)
        if source.suffix == ".md":
            stage(source, place)
        elif source.suffix in (".png", ".css", ".svg"):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
    for name, place in ALSO.items():
        stage(ROOT / name, STAGE / place)
    folder = STAGE / "tutorials"
    folder.mkdir(exist_ok=True)
    for script in tutorials():
        began = time.perf_counter()
        found = execute(script)
        show_kept(script, found)
        (folder / f"{script.stem}.ipynb").write_text(json.dumps(notebook(found), indent=1))
        place = folder / f"{script.stem}.md"
        place.write_text(relink(page(script.stem, found, folder), script, place))
        print(f"{script.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
