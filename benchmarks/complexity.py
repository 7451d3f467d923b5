"""The paper's Table 1, measured: VJPs, time and peak memory of the backward pass alone.

The forward pass is made once; the backward pass is then repeated on its graph.  What the methods
iterate over is varied: K (Implicit's Broyden steps), k (NPG's steps, GDEQ's refinement), and for
GDEQ the number m of updates that the forward pass kept.  A least-squares slope over them shows what
grows.  With --mdeq it is the paper's model, on a GPU in bf16 and as CUDA graphs, as it is trained:

PYTHONPATH=src python3 benchmarks/complexity.py --device cuda --mdeq large --out results/cifar10

A graph cannot be cut where the backward pass begins, so its time is then that of both passes less
that of the forward pass alone, taken in turns.

Memory is counted from the start of the backward pass, so the graph of f and the inverse that GDEQ
reuses are not in it; the latter is listed by itself, as "held".
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdeq
from common import (
    COLORS,
    ConvCell,
    Report,
    interleave,
    parser,
    peak_memory,
    pyplot,
    quartiles,
    slope,
)
from gdeq.lab.bench.steps import Setup, arithmetic, build

MIB = 2**20
# The paper's claims, time and memory.
TABLE_1 = {
    "Implicit": ("O(K)", "O(1)"),
    "Implicit, memory 5": ("O(K)", "O(1)"),
    "NPG": ("O(k)", "O(1)"),
    "JFB": ("O(1)", "O(1)"),
    "GDEQ": ("O(1)", "O(1)"),
    "GDEQ(refine)": ("-", "-"),
    "GDEQ over m": ("O(1)", "O(1)"),
}


class Case:
    """A cell with its input; makes backward passes to its parameters."""

    def __init__(self, channels: int, size: int, batch: int, device: torch.device) -> None:
        cell = ConvCell(channels, size)
        cell.gain.fill_(0.2)
        x = cell.draw_input(batch).to(device)
        self.cell = cell.to(device)
        self.z0 = self.cell.initial_state(batch)
        self.v = torch.randn_like(self.z0)
        self.f: Callable[[Tensor], Tensor] = lambda z: self.cell(z, x)
        self.parameters = list(self.cell.parameters())

    def backward(
        self, gradient: gdeq.Gradient, steps: int, memory: int | None = None
    ) -> tuple[Callable[[], Any], gdeq.Solution]:
        """Solve once; the function returned runs the backward pass, as often as wanted."""
        solver = gdeq.Broyden(max_iter=steps, tol=0.0, memory=memory)
        solution = gdeq.fixed_point(self.f, self.z0, solver, gradient)

        def run() -> None:
            torch.autograd.grad(solution.z, self.parameters, self.v, retain_graph=True)

        return run, solution


class MdeqCase:
    """The paper's cell with its injection; makes passes to its parameters, on a GPU as graphs."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = build(setup, gdeq.JFB())
        images, _ = setup.draw()
        with torch.no_grad(), arithmetic(setup, setup.precision):
            self.x = self.model.stem(images).detach()
        z = self._solve(self.x, gdeq.JFB(), 2)
        self.v = tuple(torch.randn_like(part) for part in z)
        self.z0 = torch.cat([part.detach().float().flatten(1) for part in z], dim=1)
        self.parameters = list(self.model.deq.parameters())

    def _solve(self, x: Tensor, gradient: gdeq.Gradient, steps: int) -> tuple[Tensor, ...]:
        torch.clear_autocast_cache()
        deq = self.model.deq
        deq.solver, deq.gradient = gdeq.Broyden(max_iter=steps, tol=0.0), gradient
        with arithmetic(self.setup, self.setup.precision):
            return tuple(deq(x))

    def backward(
        self, gradient: gdeq.Gradient, steps: int
    ) -> tuple[Callable[[], Any], gdeq.Solution]:
        """Solve once; the function returned runs the backward pass, as often as wanted."""
        x = self.x.clone().requires_grad_()
        z = self._solve(x, gradient, steps)
        solution = self.model.deq.solution
        assert solution is not None

        def run() -> None:
            torch.autograd.grad(z, [x, *self.parameters], self.v, retain_graph=True)

        return run, solution

    def passes(self, gradient: gdeq.Gradient, steps: int) -> dict[str, Callable[[], Any]]:
        """Both, and the forward pass alone."""

        def forward(x: Tensor) -> None:
            self._solve(x.detach().requires_grad_(), gradient, steps)

        def both(x: Tensor) -> None:
            x = x.detach().requires_grad_()
            z = self._solve(x, gradient, steps)
            torch.autograd.grad(z, [x, *self.parameters], self.v)

        made = {"forward": forward, "both": both}
        return {name: partial(gdeq.capture(work), self.x) for name, work in made.items()}

    def seconds(
        self, gradient: gdeq.Gradient, steps: int, repeats: int, args: Any
    ) -> tuple[list[float], float | None]:
        """Of the backward pass, and of the forward pass where that was measured as well."""
        device = torch.device(args.device)
        if not self.setup.cuda:
            run, _ = self.backward(gradient, steps)
            return interleave({"": run}, repeats, device, clock=args.clock)[""], None
        passes = self.passes(gradient, steps)
        times = interleave(passes, repeats, device, warmup=6)
        pairs = zip(times["both"], times["forward"], strict=True)
        return [both - alone for both, alone in pairs], quartiles(times["forward"])[1]


def measure_mdeq(case: MdeqCase, repeats: int, args: Any, report: Report) -> list[Any]:
    rows: list[Any] = []
    device = torch.device(args.device)
    for name, n, gradient, steps, _ in sweeps(args.quick):
        # What is kept of a forward pass is all its steps: m of them are m kept.
        forward = n if name == "GDEQ over m" else steps
        times, alone = case.seconds(gradient, forward, repeats, args)
        low, middle, high = quartiles(times)
        gc.collect()  # the graphs, and their memory
        run, solution = case.backward(gradient, forward)
        run()
        peak = peak_memory(run, device) / MIB
        inverse, cotangent = solution.inverse, solution.backward
        assert inverse is not None
        assert cotangent is not None
        held = sum(t.numel() * t.element_size() for t in inverse.vectors.stored) / MIB
        rows.append(
            {
                "method": name,
                "n": n,
                "VJPs": cotangent.vjps,
                "ms": 1e3 * middle,
                "ms_q1": 1e3 * low,
                "ms_q3": 1e3 * high,
                **({} if alone is None else {"ms_forward": 1e3 * alone}),
                "peak MiB": peak,
                "held MiB": held if name.startswith("GDEQ") else 0.0,
            }
        )
        print(f"{name} {n}: {1e3 * middle:.2f} ms", flush=True)
        report.csv(rows)  # of one that is cut short, that much is left
        del run, solution, inverse
    return rows


def sweeps(quick: bool) -> list[tuple[str, int, gdeq.Gradient, int, int | None]]:
    """(method, what is varied, gradient, forward steps, forward memory)."""
    iterations = (2, 4) if quick else (5, 10, 20, 40)
    terms = (2, 4) if quick else (2, 5, 10, 20)
    memories = (2, 4) if quick else (4, 8, 16, 32)
    forward = 4 if quick else 18
    made: list[tuple[str, int, gdeq.Gradient, int, int | None]] = []
    for n in iterations:
        made += [
            (name, n, _implicit(n, kept), forward, None)
            for name, kept in (("Implicit", None), ("Implicit, memory 5", 5))
        ]
    for n in terms:
        made += [
            ("NPG", n, gdeq.NPG(steps=n), forward, None),
            ("GDEQ(refine)", n, gdeq.GDEQ(refine=n), forward, None),
        ]
    # These iterate over nothing; they are measured as often, so that their slope is seen to be 0.
    for n in iterations:
        made += [("JFB", n, gdeq.JFB(), forward, None), ("GDEQ", n, gdeq.GDEQ(), forward, None)]
    made += [("GDEQ over m", m, gdeq.GDEQ(), max(memories), m) for m in memories]
    return made


def _implicit(steps: int, memory: int | None) -> gdeq.Implicit:
    solver = gdeq.Broyden(max_iter=steps, tol=0.0, memory=memory)
    return gdeq.Implicit(solver, double_backward=False)


def measure(case: Case, repeats: int, device: torch.device, args: Any) -> list[dict[str, Any]]:
    plan = sweeps(args.quick)
    runs: dict[str, Callable[[], Any]] = {}
    solutions: dict[str, gdeq.Solution] = {}
    for name, n, gradient, steps, memory in plan:
        key = f"{name} {n}"
        runs[key], solutions[key] = case.backward(gradient, steps, memory)
    times = interleave(runs, repeats, device, clock=args.clock)
    rows = []
    for name, n, _, _, _ in plan:
        key = f"{name} {n}"
        solution = solutions[key]
        inverse = solution.inverse
        assert inverse is not None
        assert solution.backward is not None
        low, middle, high = quartiles(times[key])
        held = sum(t.numel() * t.element_size() for t in inverse.vectors.stored)
        rows.append(
            {
                "method": name,
                "n": n,
                "VJPs": solution.backward.vjps,
                "ms": 1e3 * middle,
                "ms_q1": 1e3 * low,
                "ms_q3": 1e3 * high,
                "peak MiB": peak_memory(runs[key], device) / MIB,
                "held MiB": held / MIB if name.startswith("GDEQ") else 0.0,
            }
        )
    return rows


def summarize(rows: list[dict[str, Any]], state: float, report: Report) -> None:
    report("\nn is K, k or m: what the method iterates over (JFB and GDEQ: nothing, n repeats)")
    report.table(
        [
            {
                "method": row["method"],
                "n": row["n"],
                "VJPs": row["VJPs"],
                "ms": f"{row['ms']:.2f}",
                "quartiles": f"{row['ms_q1']:.2f}-{row['ms_q3']:.2f}",
                "peak MiB": f"{row['peak MiB']:.2f}",
                "held MiB": f"{row['held MiB']:.2f}",
            }
            for row in rows
        ]
    )
    report(
        "\nLeast squares a + b·n; memory in units of one state "
        f"(batch x d, {state:.2f} MiB).  'paper': its Table 1."
    )
    table = []
    for name, (time, memory) in TABLE_1.items():
        mine = [row for row in rows if row["method"] == name]
        n = [float(row["n"]) for row in mine]
        vjps = slope(n, [float(row["VJPs"]) for row in mine])
        ms = slope(n, [row["ms"] for row in mine])
        peak = slope(n, [row["peak MiB"] / state for row in mine])
        held = slope(n, [row["held MiB"] / state for row in mine])
        table.append(
            {
                "method": name,
                "VJPs": _fit(*vjps),
                "ms": _fit(*ms),
                "paper: time": time,
                "peak / state": _fit(*peak),
                "held / state": _fit(*held),
                "paper: memory": memory,
            }
        )
    report.table(table)


def _fit(a: float, b: float) -> str:
    return f"{a:.1f} {'-' if b < 0 else '+'} {abs(b):.2f} n"


def draw(rows: list[dict[str, Any]], report: Report) -> None:
    plt = pyplot()
    looks = {
        "Implicit": (COLORS["Implicit"], "D", "-", "Implicit over K"),
        "Implicit, memory 5": (COLORS["GMRES"], "s", "-", "Implicit over K, Broyden(memory=5)"),
        "NPG": (COLORS["NPG"], "^", "-", "NPG over k"),
        "GDEQ(refine)": (COLORS["other"], "o", "-", "GDEQ(refine=k) over k"),
        "GDEQ": (COLORS["GDEQ"], "o", "-", "GDEQ"),
        "JFB": (COLORS["JFB"], "x", "--", "JFB"),
    }
    panels = {"VJPs": "VJPs", "ms": "time of the backward pass, ms", "peak MiB": "peak memory, MiB"}
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.8))
    for axis, (column, title) in zip(axes[:3], panels.items(), strict=True):
        for name, (color, marker, style, label) in looks.items():
            mine = [row for row in rows if row["method"] == name]
            x, y = [row["n"] for row in mine], [row[column] for row in mine]
            axis.plot(x, y, color=color, marker=marker, linestyle=style, label=label)
        axis.set_title(title)
        axis.set_xlabel("iterations of the method: K, k")
        axis.set_ylim(bottom=0)
    mine = [row for row in rows if row["method"] == "GDEQ over m"]
    x = [row["n"] for row in mine]
    axis = axes[3]
    held, peak = [row["held MiB"] for row in mine], [row["peak MiB"] for row in mine]
    axis.plot(x, held, color=COLORS["Neumann"], marker="s", label="held since the forward pass")
    axis.plot(x, peak, color=COLORS["GDEQ"], marker="o", label="peak of the backward pass")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left")
    axis.set_title("GDEQ: memory, MiB")
    axis.set_xlabel("forward memory m")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(looks))
    report.figure(figure)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=0, help="rounds; 0: by the size")
    options.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine in use"
    )
    options.add_argument("--mdeq", choices=("small", "tiny", "large"), help="instead: this MDEQ")
    args: argparse.Namespace = options.parse_args()
    report = Report("table1" if args.mdeq else "complexity", args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    repeats = args.repeats or (2 if args.quick else 10)
    if args.mdeq:
        cuda = device.type == "cuda"
        torch.backends.cudnn.benchmark = cuda  # as in training
        batch, side = (128, 32) if cuda and not args.quick else (4, 8)
        precision = "bf16" if cuda else "float32"
        setup = Setup(args.mdeq, batch, side, precision=precision, device=args.device)
        big = MdeqCase(setup)
        state = big.z0.numel() * big.z0.element_size() / MIB
        report(
            f"MDEQ-{args.mdeq.upper()}, images {side}x{side}, batch {batch}, {precision}, "
            f"{'CUDA graphs' if cuda else 'eager'}, {args.clock} time"
        )
        rows = measure_mdeq(big, repeats, args, report)
    else:
        channels, size, batch = (8, 8, 2) if args.quick else (16, 16, 8)
        if device.type == "cuda" and not args.quick:
            channels, size, batch = 64, 32, 64  # fill the chip, or it measures launches
        case = Case(channels, size, batch, device)
        state = case.z0.numel() * case.z0.element_size() / MIB
        report(
            f"residual convolution block, state {channels}x{size}x{size}, batch {batch}, float32, "
            f"{args.clock} time"
        )
        rows = measure(case, repeats, device, args)
    summarize(rows, state, report)
    report.csv(rows)
    draw(rows, report)
    report.close()


if __name__ == "__main__":
    main()
