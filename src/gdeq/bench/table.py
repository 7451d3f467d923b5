"""`gdeq bench`: run it all and print the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gdeq.bench.steps import PEERS, Setup, cell_times, measure, ours, theirs, torchdeq_is_there
from gdeq.bench.where import profile, roofline


def run(
    setup: Setup,
    names: tuple[str, ...] = ("gdeq", "jfb", "npg", "implicit"),
    peers: tuple[str, ...] = ("float32", "tf32", "bf16"),
    out: Path | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every gradient, torchdeq where it is installed, and on a GPU where the time goes.

    peers: the precisions in which torchdeq is tried; its best counts.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # for all alike
    try:
        return _run(setup, names, peers, out, tell)
    finally:
        torch.backends.cudnn.benchmark = before


def _run(
    setup: Setup,
    names: tuple[str, ...],
    peers: tuple[str, ...],
    out: Path | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    chip = torch.cuda.get_device_name(setup.device) if setup.cuda else "CPU"
    tell(
        f"MDEQ-{setup.size.upper()}, batch {setup.batch} of {setup.side}×{setup.side}, "
        f"{setup.forward} Broyden steps forward, {setup.backward} backward for Implicit, "
        f"{setup.precision}, {chip}, torch {torch.__version__}"
    )
    found: dict[str, Any] = {"setup": asdict(setup), "device": chip, "rows": []}

    def keep() -> None:
        if out is not None:
            (out / "step.json").write_text(json.dumps(found, indent=1))

    def add(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        peak = "" if row["peak_gib"] is None else f"   peak {row['peak_gib']:5.2f} GiB"
        tell(f"  {row['name']:30s} {row['ms']:9.2f} ms{peak}")
        keep()

    gradients = setup.gradients()
    for name in names:
        made: list[Any] = []

        def make(name: str = name, made: list[Any] = made) -> Any:
            made.append(ours(setup, gradients[name]))
            return made[0]

        add(measure(setup, f"gdeq: {name}", make))
        if name == "gdeq" and setup.cuda:
            found["profile"] = profile(setup, made[0], out)
        made.clear()
    if torchdeq_is_there():
        for precision in peers:
            for label, settings in PEERS.items():
                title = f"torchdeq: {label}, {precision}"

                def make_peer(
                    precision: str = precision, settings: dict[str, Any] = settings
                ) -> Any:
                    return theirs(setup, precision, **settings)

                add(measure(setup, title, make_peer, max(3, setup.rounds // 2)))
    elif peers:
        tell("  (torchdeq is not installed: pip install torchdeq to have it beside)")
    found["cell"] = cell_times(setup)
    found["roofline"] = roofline(setup, found["cell"]["f"])
    keep()
    for line in lines(setup, found):
        tell(line)
    return found


def lines(setup: Setup, found: dict[str, Any]) -> list[str]:
    """The table, from what was measured."""
    rows = {row["name"]: row for row in found["rows"]}
    cell, roof = found["cell"], found["roofline"]
    told = [
        "",
        f"f in a graph {cell['f']:.3f} ms, a VJP {cell['vjp']:.3f} ms; f is "
        f"{roof['f_gflop']:.1f} GFLOP, which take {roof['arithmetic_ms']:.3f} ms at the "
        f"{roof['tflop_per_s']:.0f} TFLOP/s of a large matrix product, and moves at least "
        f"{roof['f_mbyte']:.0f} MB, {roof['traffic_ms']:.3f} ms at {roof['tbyte_per_s']:.2f} TB/s",
    ]
    if "gdeq: gdeq" not in rows:
        return told
    mine = rows["gdeq: gdeq"]["ms"]
    # The first evaluation, one a step, the one with autograd, and its VJP as two.
    evaluations = setup.forward + 4
    told.append(
        f"GDEQ step ÷ ({evaluations} evaluations × f): {mine / (evaluations * cell['f']):.2f}"
    )
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
        phases = ", ".join(f"{k} {v:.2f}" for k, v in shown["by_phase_ms"].items())
        kinds = ", ".join(f"{k} {v:.2f}" for k, v in shown["by_kind_ms"].items())
        told += [
            f"where the {shown['whole_ms']:.2f} ms of a profiled GDEQ step go, in ms: {phases}; "
            f"gaps {shown['gaps_ms']:.2f}",
            f"by kernel (those side by side counted each): {kinds}; {shown['kernels']} kernels",
        ]
    return told
