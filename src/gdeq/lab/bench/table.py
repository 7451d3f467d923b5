"""`gdeq bench`: run it all and print the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gdeq.lab.bench.steps import (
    PEERS,
    Step,
    cell_times,
    measure,
    measure_in_turns,
    ours,
    theirs,
    torchdeq_is_there,
)
from gdeq.lab.bench.subjects import Setup
from gdeq.lab.bench.where import profile, roofline
from gdeq.lab.files import LabError
from gdeq.lab.training.precision import slow_on_a_cpu
from gdeq.options import count

PRECISIONS = ("float32", "tf32", "bf16")


class BenchError(LabError):
    """What was asked for cannot be measured."""


def read_peers(text: str | None, setup: Setup) -> tuple[str, ...]:
    """The precisions in ``--peers``; left out, all on a GPU and float32 alone on a CPU."""
    if text is None:
        return PRECISIONS if setup.cuda else ("float32",)
    names = [name.strip() for name in text.split(",")]
    if names in ([""], ["none"]):
        return ()
    wrong = [name for name in names if name not in PRECISIONS]
    if wrong:
        raise BenchError(
            f"--peers: {wrong[0]!r} is no precision; write some of {','.join(PRECISIONS)} with "
            "commas between them, or none"
        )
    return tuple(dict.fromkeys(names))


def caution(setup: Setup, peers: tuple[str, ...]) -> str | None:
    """A warning to print before the first step, since an illegal instruction gives no message."""
    options = {"--precision": setup.precision == "bf16", "--peers": "bf16" in peers}
    asked = [option for option, given in options.items() if given]
    if setup.cuda or not asked:
        return None
    return slow_on_a_cpu(f"float32 for {' and '.join(asked)}")


def run(
    setup: Setup,
    peers: tuple[str, ...] | None = None,
    out: Path | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every gradient, torchdeq where it is installed, and on a GPU where the time goes.

    peers: the precisions in which torchdeq is tried (as `read_peers` has them); its best counts.
    out: the folder for what is told (`step.txt`), the numbers and the kernels of a step.
    """
    if peers is None:
        peers = read_peers(None, setup)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    warning = caution(setup, peers)
    if warning is not None:
        tell(warning)
    told: list[str] = []
    found: dict[str, Any] = {"setup": asdict(setup)}

    def note(line: str) -> None:
        tell(line)
        told.append(line)

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # for all alike
    try:
        _measure(setup, peers, out, found, note)
    finally:
        torch.backends.cudnn.benchmark = before
        if out is not None:
            (out / "step.txt").write_text("\n".join(told) + "\n")
            (out / "step.json").write_text(json.dumps(found, indent=1))
    return found


def _measure(
    setup: Setup,
    peers: tuple[str, ...],
    out: Path | None,
    found: dict[str, Any],
    note: Callable[[str], None],
) -> None:
    """Fills ``found``, row by row."""
    found["device"] = torch.cuda.get_device_name(setup.device) if setup.cuda else "CPU"
    found["rows"] = []
    half = setup.cuda and setup.precision == "bf16"
    note(
        f"{setup.title}, {count(setup.forward, 'Broyden step')} forward, {setup.backward} backward "
        f"for Implicit, {setup.precision}"
        f"{f' (steps kept in {setup.step_bits} bits)' if half else ''}, "
        f"{'group norm, no dropout, ' if setup.cell == 'mdeq' else ''}SGD; {found['device']}, "
        f"torch {torch.__version__}"
    )

    def add(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        peak = "" if row["peak_gib"] is None else f"   peak {row['peak_gib']:5.2f} GiB"
        note(f"  {row['name']:30s} {row['ms']:9.2f} ms{peak}")

    makes: dict[str, Callable[[], Step]] = {
        f"gdeq: {name}": partial(ours, setup, gradient)
        for name, gradient in setup.gradients().items()
    }
    if torchdeq_is_there():
        for precision in peers:
            for label, settings in PEERS.items():
                title = f"torchdeq: {label}, {precision}"
                makes[title] = partial(theirs, setup, precision, **settings)
    elif peers:
        note("  (torchdeq is not installed: pip install torchdeq==0.1.0 to have it beside)")
    if not setup.cuda:
        for row in measure_in_turns(setup, makes):
            add(row)
    for name, make in makes.items() if setup.cuda else ():
        try:
            row, step = measure(setup, name, make)
        except Exception as problem:
            if not name.startswith("torchdeq"):
                raise
            found.setdefault("failed", {})[name] = repr(problem)
            note(f"  {name:30s}    failed: {repr(problem).splitlines()[0][:100]}")
            continue
        add(row)
        if name == "gdeq: gdeq":
            found["profile"] = profile(setup, step, out)
        del step
    found["cell"] = cell_times(setup)
    found["roofline"] = roofline(setup, found["cell"]["f"])
    for line in lines(setup, found):
        note(line)


def scaled(amount: float) -> str:
    """With the prefix that leaves one to three digits before the point."""
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.1f} {prefix}"
        amount /= 1000
    return f"{amount:.1f} T"


def lines(setup: Setup, found: dict[str, Any]) -> list[str]:
    """The table, from what was measured."""
    rows = {row["name"]: row for row in found["rows"]}
    cell, roof = found["cell"], found["roofline"]
    told = [
        "",
        f"f{' in a graph' if setup.cuda else ''} {cell['f']:.3f} ms, a VJP {cell['vjp']:.3f} ms; "
        f"f is {scaled(1e9 * roof['f_gflop'])}FLOP, which take {roof['arithmetic_ms']:.3f} ms at "
        f"the {scaled(1e12 * roof['tflop_per_s'])}FLOP/s of a large matrix product, and moves at "
        f"least {scaled(1e6 * roof['f_mbyte'])}B, {roof['traffic_ms']:.3f} ms at "
        f"{scaled(1e12 * roof['tbyte_per_s'])}B/s",
    ]
    if "gdeq: gdeq" not in rows:
        return told
    mine = rows["gdeq: gdeq"]["ms"]
    # One evaluation per solver step, the first one, and two for the VJP.  Without recorded steps
    # there is one more, with autograd.
    evaluations = setup.forward + (3 if setup.cuda else 4)
    told.append(
        f"GDEQ step {mine:.2f} ms, f {cell['f']:.3f} ms, "
        f"GDEQ step ÷ ({evaluations} evaluations × f): {mine / (evaluations * cell['f']):.3f}"
    )
    reserved = rows["gdeq: gdeq"].get("reserved_gib")
    if reserved is not None:
        told.append(f"of the GDEQ step PyTorch's allocator holds {reserved:.2f} GiB")
    for name in ("gdeq: implicit", "gdeq: jfb", "gdeq: npg", "gdeq: gdeq refine 1"):
        if name in rows:
            told.append(f"{name[6:]:14s} {rows[name]['ms'] / mine:6.2f} × the GDEQ step")
    for label in ("implicit", "jfb"):
        those = [row for name, row in rows.items() if name.startswith(f"torchdeq: {label}")]
        if those:
            best = min(those, key=lambda row: row["ms"])
            told.append(f"{best['name']}: {best['ms'] / mine:.2f} × the GDEQ step")
    if "profile" in found:
        shown = found["profile"]
        told.append(
            f"a profiled GDEQ step: {shown['whole_ms']:.2f} ms for {shown['kernels']} kernels, "
            f"with {shown['gaps_ms']:.2f} ms in which none runs (kernels.txt of --out lists them)"
        )
    return told
