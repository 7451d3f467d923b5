"""The paper's Table 1, measured: VJPs, time and peak memory of the backward pass alone.

The forward pass is made once; the backward pass is then repeated on its graph.  What the methods
iterate over is varied: K (Implicit's Broyden steps), k (NPG's steps, GDEQ's refinement), and for
GDEQ the number m of updates that the forward pass kept.  A least-squares line over them shows what
grows.  By default f is a small convolution; with --mdeq it is the paper's model, on a GPU in bf16
and as CUDA graphs, as it is trained:

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
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import gdeq
from common import COLORS, Report, interleave, parser, peak_memory, pyplot, quartiles
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
    """A DEQ with its input; makes passes to its parameters, on a GPU as graphs."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = build(setup, gdeq.JFB())
        inputs, _ = setup.draw()
        with torch.no_grad(), arithmetic(setup, setup.precision):
            self.x = self.model.stem(inputs).detach()
        z = self.solve(self.x, gdeq.JFB(), 2)
        self.v = [torch.randn_like(part) for part in z]
        self.state = sum(4 * part.numel() for part in z) / MIB  # solvers keep it in float32
        self.parameters = list(self.model.deq.parameters())

    def solve(self, x: Tensor, gradient: gdeq.Gradient, steps: int) -> list[Tensor]:
        torch.clear_autocast_cache()
        deq = self.model.deq
        deq.solver, deq.gradient = gdeq.Broyden(max_iter=steps, tol=0.0), gradient
        with arithmetic(self.setup, self.setup.precision):
            return tree_leaves(deq(x))

    def backward(
        self, gradient: gdeq.Gradient, steps: int
    ) -> tuple[Callable[[], Any], gdeq.Solution]:
        """Solve once; the function returned runs the backward pass, as often as wanted."""
        x = self.x.clone().requires_grad_()
        z = self.solve(x, gradient, steps)
        solution = self.model.deq.solution
        assert solution is not None

        def run() -> None:
            torch.autograd.grad(z, [x, *self.parameters], self.v, retain_graph=True)

        return run, solution

    def passes(self, gradient: gdeq.Gradient, steps: int) -> dict[str, Callable[[], Any]]:
        """Both, and the forward pass alone."""

        def forward(x: Tensor) -> None:
            self.solve(x.detach().requires_grad_(), gradient, steps)

        def both(x: Tensor) -> None:
            x = x.detach().requires_grad_()
            z = self.solve(x, gradient, steps)
            torch.autograd.grad(z, [x, *self.parameters], self.v)

        made = {"forward": forward, "both": both}
        return {name: partial(gdeq.capture(work), self.x) for name, work in made.items()}

    def seconds(
        self, gradient: gdeq.Gradient, steps: int, repeats: int, clock: str
    ) -> tuple[list[float], float | None]:
        """Of the backward pass, and of the forward pass where that was measured as well."""
        device = torch.device(self.setup.device)
        if not self.setup.cuda:
            run, _ = self.backward(gradient, steps)
            return interleave({"": run}, repeats, device, clock=clock)[""], None
        times = interleave(self.passes(gradient, steps), repeats, device, warmup=6)
        pairs = zip(times["both"], times["forward"], strict=True)
        return [both - alone for both, alone in pairs], quartiles(times["forward"])[1]


class Point(NamedTuple):
    """What is measured: a method, n of what it iterates over, the steps of the forward pass."""

    method: str
    n: int
    gradient: gdeq.Gradient
    forward: int


def measure(case: Case, repeats: int, args: Any, report: Report) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for point in sweeps(args.quick):
        times, alone = case.seconds(point.gradient, point.forward, repeats, args.clock)
        low, middle, high = quartiles(times)
        gc.collect()  # the graphs, and their memory
        run, solution = case.backward(point.gradient, point.forward)
        run()
        peak = peak_memory(run, torch.device(args.device)) / MIB
        inverse, cotangent = solution.inverse, solution.backward
        assert inverse is not None
        assert cotangent is not None
        held = sum(t.numel() * t.element_size() for t in inverse.vectors.stored) / MIB
        rows.append(
            {
                "method": point.method,
                "n": point.n,
                "VJPs": cotangent.vjps,
                "ms": 1e3 * middle,
                "ms_q1": 1e3 * low,
                "ms_q3": 1e3 * high,
                **({} if alone is None else {"ms_forward": 1e3 * alone}),
                "peak MiB": peak,
                "held MiB": held if point.method.startswith("GDEQ") else 0.0,
            }
        )
        print(f"{point.method} {point.n}: {1e3 * middle:.2f} ms", flush=True)
        report.csv(rows)  # of one that is cut short, that much is left
        del run, solution, inverse
    return rows


def sweeps(quick: bool) -> list[Point]:
    iterations = (2, 4) if quick else (5, 10, 20, 40)
    terms = (2, 4) if quick else (2, 5, 10, 20)
    memories = (2, 4) if quick else (4, 8, 16, 32)
    forward = 4 if quick else 18
    made: list[Point] = []
    for n in iterations:
        made += [
            Point("Implicit", n, _implicit(n, None), forward),
            Point("Implicit, memory 5", n, _implicit(n, 5), forward),
        ]
    for n in terms:
        made += [
            Point("NPG", n, gdeq.NPG(steps=n), forward),
            Point("GDEQ(refine)", n, gdeq.GDEQ(refine=n), forward),
        ]
    # These iterate over nothing; they are measured as often, so that their slope is seen to be 0.
    for n in iterations:
        made += [
            Point("JFB", n, gdeq.JFB(), forward),
            Point("GDEQ", n, gdeq.GDEQ(), forward),
        ]
    # What is kept of a forward pass is all its steps: m of them are m kept.
    return made + [Point("GDEQ over m", m, gdeq.GDEQ(), m) for m in memories]


def _implicit(steps: int, memory: int | None) -> gdeq.Implicit:
    solver = gdeq.Broyden(max_iter=steps, tol=0.0, memory=memory)
    return gdeq.Implicit(solver, double_backward=False)


def summarize(rows: list[dict[str, Any]], state: float, report: Report) -> None:
    report("\nn is K, k or m: what the method iterates over (JFB and GDEQ: nothing, n repeats)")
    report.table(
        [
            {name: row[name] for name in ("method", "n", "VJPs")}
            | {
                "ms": f"{row['ms']:.2f}",
                "quartiles": f"{row['ms_q1']:.2f}-{row['ms_q3']:.2f}",
                **{name: f"{row[name]:.2f}" for name in ("peak MiB", "held MiB")},
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
        table.append(
            {
                "method": name,
                "VJPs": _fit(mine, "VJPs", 1.0),
                "ms": _fit(mine, "ms", 1.0),
                "paper: time": time,
                "peak / state": _fit(mine, "peak MiB", state),
                "held / state": _fit(mine, "held MiB", state),
                "paper: memory": memory,
            }
        )
    report.table(table)


def _fit(rows: list[dict[str, Any]], column: str, unit: float) -> str:
    """The least-squares line of a column over n."""
    b, a = linear_regression([row["n"] for row in rows], [row[column] / unit for row in rows])
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
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--repeats", type=int, default=0, help="rounds; 0: by the size")
    made.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine in use"
    )
    made.add_argument("--mdeq", choices=("small", "tiny", "large"), help="instead: this MDEQ")
    args: argparse.Namespace = made.parse_args()
    report = Report("table1" if args.mdeq else "complexity", args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    repeats = args.repeats or (2 if args.quick else 10)
    cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = cuda  # as in training
    big = cuda and not args.quick  # fill the chip, or it measures launches
    precision = "bf16" if cuda else "float32"
    options: dict[str, Any] = {"precision": precision, "device": args.device}
    if args.mdeq:
        batch, side = (128, 32) if big else (4, 8)
        setup = Setup(args.mdeq, batch, side, **options)
    else:
        batch, side, width = (64, 32, 64) if big else (2, 8, 8) if args.quick else (8, 16, 16)
        setup = Setup(cell="convolution", batch=batch, side=side, width=width, **options)
    report(f"{setup.title}, {precision}, {'CUDA graphs' if cuda else 'eager'}, {args.clock} time")
    case = Case(setup)
    rows = measure(case, repeats, args, report)
    summarize(rows, case.state, report)
    report.csv(rows)
    draw(rows, report)
    report.close()


if __name__ == "__main__":
    main()
