"""Build the sdist and the wheel, and check what `make package` promises.

Built twice, they are equal byte for byte; `twine check` passes; they hold what they should and
nothing else; the citation and the changelog know their version; the wheel works in an environment
that has torch and nothing more.  On the page of a package registry the README has no files beside
it, so its links lead into the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
REPOSITORY = "https://github.com/gdeq/gdeq"
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")
EXAMPLE = """
import sys, torch, gdeq
deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z + x))
x = torch.randn(4, 8, requires_grad=True)
deq(x).sum().backward()
assert deq.solution.converged.all() and x.grad is not None
lab = {"numpy", "yaml", "typer", "matplotlib", "triton"} & set(sys.modules)
assert not lab - {"numpy", "triton"}, lab  # which torch may load by itself
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def build(source: Path, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def copy(folder: Path) -> Path:
    """What a build reads, in a place of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", copy_function=shutil.copyfile)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    readme = folder / "README.md"
    readme.write_text(LINK.sub(absolute, readme.read_text()))
    return folder


def absolute(link: re.Match[str]) -> str:
    image, title, target = link.groups()
    return f"{image}{title}({REPOSITORY}/{'raw' if image else 'blob'}/main/{target})"


def check_names(names: list[str], where: str) -> None:
    for wanted in ("gdeq/__init__.py", "gdeq/py.typed", "LICENSE", "gdeq/lab/report/templates/"):
        assert any(wanted in name for name in names), f"{where} lacks {wanted}"
    for name in names:
        unwanted = {"tests", "results", "benchmarks", "docs", "__pycache__"} & set(name.split("/"))
        assert not unwanted, f"{where} holds {name}"


def check_version(version: str) -> None:
    lines = {"CITATION.cff": f"\nversion: {version}\n", "CHANGELOG.md": f"\n## [{version}] - "}
    for name, line in lines.items():
        assert line in (ROOT / name).read_text(), f"{name} lacks {version}"


def main() -> None:
    work = ROOT / "build" / "package"
    first = build(copy(work / "source"), DIST)
    second = build(copy(work / "again"), work / "dist")
    assert first == second, "two builds differ"
    wheel, sdist = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
    held = zipfile.ZipFile(wheel)
    check_names(held.namelist(), "the wheel")
    (metadata,) = (name for name in held.namelist() if name.endswith("/METADATA"))
    assert not LINK.search(held.read(metadata).decode()), "the README has relative links"
    with tarfile.open(sdist) as archive:
        check_names(archive.getnames(), "the sdist")
    check_version(wheel.name.split("-")[1])
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    try_bare(wheel)
    print(f"{wheel.name} and {sdist.name}: as they should be")


def try_bare(wheel: Path) -> None:
    """The wheel in an environment of its own, which sees torch and what torch needs."""
    bare = ROOT / "build" / "package" / "bare"
    venv.create(bare, clear=True, with_pip=True)
    python = bare / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    (site,) = bare.glob("lib/python*/site-packages")
    needed = ["torch", "typing_extensions", "sympy", "mpmath", "filelock", "jinja2", "markupsafe"]
    needed += ["networkx", "fsspec", "torchgen", "functorch"]
    import torch  # noqa: PLC0415

    home = Path(torch.__file__).parents[1]
    for name in needed:
        for source in (home / name, home / f"{name}.py"):
            if source.exists():
                os.symlink(source, site / source.name)
    run(python, "-W", "ignore", "-c", EXAMPLE, cwd=bare)  # torch warns that NumPy is not there
    # Without the extra, the command says what to install.
    told = subprocess.run(
        [bare / "bin" / "gdeq", "train"], capture_output=True, text=True, cwd=bare, check=False
    )
    assert told.returncode != 0, "gdeq train must fail without its extra"
    assert "gdeq[train]" in told.stdout + told.stderr, told.stdout + told.stderr


if __name__ == "__main__":
    main()
