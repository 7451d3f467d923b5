"""One training step (forward, loss, backward to the parameters) beside torchdeq, in one process.

Both engines get the same f, the same start, 18 Broyden steps forward and 20 backward, none of them
stopping early: calls of f and passes back through f are counted and printed.  The engines take
turns, and a ratio is the median over the rounds of ours / torchdeq's.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import gdeq
from common import Report, interleave, parser, quartiles, ratio
from gdeq.lab.bench.steps import torchdeq_engine

FORWARD, BACKWARD, UNROLL = 18, 20, 5


# -- cells: f(z, x), in which `gain` scales what depends on z, and with it the spectral radius at z*


class TanhCell(nn.Module):
    """tanh(gain · Wz + x): one dense layer."""

    gain = 0.4

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / d**0.5)
        self.d = d

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.gain * z @ self.weight.T + x)

    def initial_state(self, batch: int) -> Tensor:
        return self.weight.new_zeros(batch, self.d)

    def draw_input(self, batch: int) -> Tensor:
        return torch.randn(batch, self.d)


class ConvCell(nn.Module):
    """A residual block as in MDEQ: conv-norm-relu, conv-norm, add, relu, norm.

    The input enters before the first norm, else that norm would undo the gain.
    """

    def __init__(self, channels: int, size: int, groups: int = 4, gain: float = 0.2) -> None:
        super().__init__()
        self.gain, self.shape = gain, (channels, size, size)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(groups, channels) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = self.gain * z + x
        h = torch.relu(self.norm1(self.conv1(z)))
        h = self.norm2(self.conv2(h))
        return self.norm3(torch.relu(z + h))

    def initial_state(self, batch: int) -> Tensor:
        return self.conv1.weight.new_zeros(batch, *self.shape)

    def draw_input(self, batch: int) -> Tensor:
        return torch.randn(batch, *self.shape)


class MultiscaleCell(nn.Module):
    """MDEQ in small: a residual block per scale, then every scale hears every other one."""

    gain = 0.2

    def __init__(self, channels: Sequence[int], size: int, groups: int = 4) -> None:
        super().__init__()
        sizes = [size >> i for i in range(len(channels))]
        self.blocks = nn.ModuleList(
            ConvCell(c, s, groups, gain=1.0) for c, s in zip(channels, sizes, strict=True)
        )
        self.fuse = nn.ModuleList(
            nn.ModuleList(_path(a, b, i - j, groups) for j, a in enumerate(channels))
            for i, b in enumerate(channels)
        )
        self.post = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, c, 1, bias=False), nn.GroupNorm(groups, c)) for c in channels
        )
        self.shapes = [(c, s, s) for c, s in zip(channels, sizes, strict=True)]

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h = [b(self.gain * s, u) for b, s, u in zip(self.blocks, z, x, strict=True)]
        mixed = [sum(path(s) for path, s in zip(row, h, strict=True)) for row in self.fuse]
        return tuple(post(torch.relu(m)) for post, m in zip(self.post, mixed, strict=True))

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        zero = self.post[0][0].weight.new_zeros
        return tuple(zero(batch, *shape) for shape in self.shapes)

    def draw_input(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, *shape) for shape in self.shapes)


def _path(a: int, b: int, down: int, groups: int) -> nn.Module:
    """From one scale to another: strided convolutions down, a 1×1 convolution and upsampling up."""
    if down == 0:
        return nn.Identity()
    if down < 0:
        return nn.Sequential(
            nn.Conv2d(a, b, 1, bias=False),
            nn.GroupNorm(groups, b),
            nn.Upsample(scale_factor=2**-down, mode="nearest"),
        )
    steps: list[nn.Module] = []
    for i in range(down):
        c = b if i == down - 1 else a
        steps += [nn.Conv2d(a, c, 3, stride=2, padding=1, bias=False), nn.GroupNorm(groups, c)]
        steps += [nn.ReLU()] if i < down - 1 else []
    return nn.Sequential(*steps)


# -- steps ----------------------------------------------------------------------------------------


@dataclass
class Count:
    calls: int = 0  # of f
    passes: int = 0  # gradients taken back through an evaluation of f


class Case:
    """A cell with its input, and a loss that is not blind to any part of the state."""

    def __init__(self, name: str, cell: Any, batch: int, device: torch.device) -> None:
        self.name = name
        self.x = tree_map(lambda part: part.to(device), cell.draw_input(batch))
        self.cell = cell.to(device)
        self.z0 = cell.initial_state(batch)
        self.target = [torch.randn_like(leaf) for leaf in tree_leaves(self.z0)]
        self.count: Count | None = None

    def f(self, *z: Tensor) -> Any:  # torchdeq passes the parts of a state one by one
        out = self.cell(z if isinstance(self.z0, tuple) else z[0], self.x)
        if self.count is not None:
            self.count.calls += 1
            first = tree_leaves(out)[0]
            if first.requires_grad:
                first.register_hook(self._passed)
        return out

    def _passed(self, grad: Tensor | None) -> None:
        if self.count is not None and grad is not None:
            self.count.passes += 1

    def finish(self, z: Any) -> None:
        loss = sum((a * b).sum() for a, b in zip(tree_leaves(z), self.target, strict=True))
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
        # torchdeq swallows unknown names; `measure` shows by the counts that these took effect.
        deq = torchdeq_engine(FORWARD, BACKWARD, **options)

        def step() -> None:
            self.cell.zero_grad()
            z, _ = deq(self.f, self.z0)
            self.finish(z[-1])

        return step


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
        case = Case(name, cell, batch, device)
        rows += measure(case, options.repeats or repeats, device, options.clock, report)
    report.csv(rows)
    report.close()


if __name__ == "__main__":
    main()
