"""One training step (forward, loss, backward to the parameters) beside torchdeq, in one process.

Both engines get the same f, the same start, 18 Broyden steps forward and 20 backward, none of them
stopping early: calls of f and passes back through f are counted and printed.  The engines take
turns, and a ratio is the median over the rounds of ours / torchdeq's.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchdeq
from torch import Tensor

import gdeq
from common import (
    ConvCell,
    MultiscaleCell,
    Report,
    TanhCell,
    interleave,
    parser,
    quartiles,
    ratio,
)

FORWARD, BACKWARD, UNROLL = 18, 20, 5


@dataclass
class Count:
    calls: int = 0  # of f
    passes: int = 0  # gradients taken back through an evaluation of f


class Case:
    """A cell with its input, and a loss that is not blind to any part of the state."""

    def __init__(self, name: str, cell: Any, batch: int, device: torch.device) -> None:
        self.name = name
        self.x = _to(cell.draw_input(batch), device)
        self.cell = cell.to(device)
        self.z0 = cell.initial_state(batch)
        self.target = [torch.randn_like(leaf) for leaf in _leaves(self.z0)]
        self.count: Count | None = None

    def f(self, *z: Tensor) -> Any:  # torchdeq passes the parts of a state one by one
        out = self.cell(z if isinstance(self.z0, tuple) else z[0], self.x)
        if self.count is not None:
            self.count.calls += 1
            first = _leaves(out)[0]
            if first.requires_grad:
                first.register_hook(self._passed)
        return out

    def _passed(self, grad: Tensor | None) -> None:
        if self.count is not None and grad is not None:
            self.count.passes += 1

    def finish(self, z: Any) -> None:
        loss = sum((a * b).sum() for a, b in zip(_leaves(z), self.target, strict=True))
        loss.backward()

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.cell.parameters()])

    def ours(self, gradient: gdeq.Gradient, tol: float = 0.0) -> Callable[[], None]:
        solver = gdeq.Broyden(max_iter=FORWARD, tol=tol)
        f = (lambda z: self.f(*z)) if isinstance(self.z0, tuple) else self.f

        def step() -> None:
            self.cell.zero_grad()
            self.finish(gdeq.fixed_point(f, self.z0, solver, gradient).z)

        return step

    def theirs(self, **options: Any) -> Callable[[], None]:
        # torchdeq swallows unknown names; `measure` checks by the counts that these took effect.
        deq = torchdeq.get_deq(
            core="sliced",
            f_solver="broyden",
            b_solver="broyden",
            f_max_iter=FORWARD,
            b_max_iter=BACKWARD,
            f_tol=0.0,
            b_tol=0.0,
            f_stop_mode="rel",
            b_stop_mode="rel",
            **options,
        )
        deq.train()

        def step() -> None:
            self.cell.zero_grad()
            z, _ = deq(self.f, self.z0)
            self.finish(z[-1])

        return step


def _leaves(z: Any) -> list[Tensor]:
    return list(z) if isinstance(z, (tuple, list)) else [z]


def _to(x: Any, device: torch.device) -> Any:
    return tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)


def steps(case: Case) -> tuple[dict[str, Callable[[], None]], dict[str, tuple[str, ...]]]:
    """All runs by name, and for each of ours the runs of torchdeq it stands beside."""
    implicit = gdeq.Broyden(max_iter=BACKWARD, tol=0.0)
    watched = gdeq.Broyden(max_iter=BACKWARD, tol=1e-30)
    runs = {
        "torchdeq Implicit": case.theirs(ift=True),
        "Implicit": case.ours(gdeq.Implicit(implicit)),
        "Implicit, no 2nd order": case.ours(gdeq.Implicit(implicit, double_backward=False)),
        # The hook saves torchdeq its second evaluation of f, but breaks when a layer is used twice.
        "torchdeq Implicit, hook": case.theirs(hook_ift=True),
        "Implicit, tol watched": case.ours(gdeq.Implicit(watched, double_backward=False), 1e-30),
        "torchdeq JFB": case.theirs(grad=1),
        "JFB": case.ours(gdeq.JFB()),
        "torchdeq unrolled": case.theirs(grad=UNROLL),
        "Unrolled": case.ours(gdeq.Unrolled(UNROLL)),
        "NPG": case.ours(gdeq.NPG(steps=5, damping=0.5)),
        "GDEQ": case.ours(gdeq.GDEQ()),
        "GDEQ(refine=2)": case.ours(gdeq.GDEQ(refine=2)),
    }
    both = ("torchdeq Implicit", "torchdeq Implicit, hook")
    beside = {
        "Implicit": both[:1],
        "Implicit, no 2nd order": both,
        "Implicit, tol watched": both,
        "JFB": ("torchdeq JFB",),
        "Unrolled": ("torchdeq unrolled",),
        "NPG": both[:1],
        "GDEQ": (*both, "torchdeq JFB"),
        "GDEQ(refine=2)": both[:1],
    }
    return runs, beside


def measure(
    case: Case, repeats: int, device: torch.device, clock: str, report: Report
) -> list[dict[str, Any]]:
    runs, beside = steps(case)
    counts: dict[str, Count] = {}
    gradients: dict[str, Tensor] = {}
    for name, run in runs.items():
        case.count = counts[name] = Count()
        run()
        gradients[name] = case.gradient()
    case.count = None

    times = interleave(runs, repeats, device, clock=clock)
    rows: list[dict[str, Any]] = []
    for name in runs:
        low, middle, high = quartiles(times[name])
        row: dict[str, Any] = {
            "method": name,
            "f calls": counts[name].calls,
            "back passes": counts[name].passes,
            "ms": f"{1e3 * middle:.2f}",
            "quartiles": f"{1e3 * low:.2f}-{1e3 * high:.2f}",
        }
        others = beside.get(name, ())
        row["ours/torchdeq"] = "  ".join(f"{ratio(times[name], times[o]):.2f}" for o in others)
        row["beside"] = " | ".join(o.removeprefix("torchdeq ") for o in others)
        if others:
            cosine = torch.cosine_similarity(gradients[name], gradients[others[0]], dim=0)
            row["1 - cos"] = f"{1 - cosine.item():.0e}"
        rows.append(row)
    report(f"\n{case.name}")
    report.table([{**dict.fromkeys(rows[1], ""), **row} for row in rows])

    like = [name for name in beside if "GDEQ" not in name and name != "NPG"]  # the same method
    for name in like:
        for other in beside[name]:
            found = ratio(times[name], times[other])
            if found > 1:
                report(f"SLOWER: {name} takes {found:.2f} of {other}")
    speedup = statistics.median(
        b / a for a, b in zip(times["GDEQ"], times["torchdeq Implicit"], strict=True)
    )
    verdict = "as asked" if speedup >= 2 else "LESS than the 2x asked"
    report(f"GDEQ is {speedup:.1f}x torchdeq's Implicit: {verdict}")
    return [{"case": case.name, **row} for row in rows]


def main() -> None:
    args = parser(__doc__.splitlines()[0])
    args.add_argument("--repeats", type=int, default=0, help="rounds per case; 0: by the case")
    args.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine in use"
    )
    options = args.parse_args()
    report = Report("engine", options)
    version = importlib.metadata.version("torchdeq")
    report(f"torchdeq {version}, float32, {options.clock} time")
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    if options.quick:
        cases = [
            ("dense, d=32, batch 4", TanhCell(32), 4, 3),
            ("multiscale, 8x8x8 + 8x4x4, batch 2", MultiscaleCell((8, 8), 8), 2, 3),
        ]
    else:
        cases = [
            ("dense, d=32, batch 4 (overhead alone)", TanhCell(32), 4, 60),
            ("dense, d=256, batch 32 (overhead dominates)", TanhCell(256), 32, 60),
            ("convolution, 32x16x16, batch 16 (f dominates)", ConvCell(32, 16), 16, 12),
            ("multiscale, 16x16x16 + 32x8x8, batch 16", MultiscaleCell((16, 32), 16), 16, 12),
        ]
    rows: list[dict[str, Any]] = []
    for name, cell, batch, repeats in cases:
        cell.gain.fill_(0.4 if isinstance(cell, TanhCell) else 0.2)
        case = Case(name, cell, batch, device)
        rows += measure(case, options.repeats or repeats, device, options.clock, report)
    report.csv(rows)
    report.close()


if __name__ == "__main__":
    main()
