"""What the benchmarks share: cells, timing, memory, tables and figures."""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its own start and stop

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "core"


# Command line


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a smoke run of seconds, tiny sizes")
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    made.add_argument("--seed", type=int, default=0, help="first random seed")
    made.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for CSV, PNG and text output"
    )
    return made


class Report:
    """Prints, and keeps what was printed for results/."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        if args.threads or args.quick:  # more threads are no use at tiny sizes
            torch.set_num_threads(args.threads or 1)
        torch.backends.cudnn.allow_tf32 = False  # float32 shall mean float32 on every device
        # A smoke run must not overwrite the figures of record; git ignores runs/.
        self.folder = ROOT / "runs" / "quick" if args.quick and args.out == RESULTS else args.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.lines: list[str] = []
        device = torch.device(args.device)
        named = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        )
        command = " ".join([Path(sys.executable).name, *sys.argv])
        self(f"{name}: {command}")
        self(
            f"torch {torch.__version__}, python {platform.python_version()}, device {device} "
            f"({named or platform.machine()}), {torch.get_num_threads()} threads"
        )
        self.started = time.perf_counter()

    def __call__(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)

    def table(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows as aligned columns."""
        if not rows:
            return
        columns = list(rows[0])
        cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
        widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
        self("  ".join(c.rjust(w) for c, w in zip(columns, widths, strict=True)))
        for line in cells:
            self("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))

    def csv(self, rows: Sequence[dict[str, Any]], suffix: str = "") -> None:
        path = self.folder / f"{self.name}{suffix}.csv"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                )

    def figure(self, figure: Any) -> None:
        figure.savefig(self.folder / f"{self.name}.png", dpi=130)

    def close(self) -> None:
        self(f"\ntook {time.perf_counter() - self.started:.0f} s; results in {self.folder.name}/")
        (self.folder / f"{self.name}.txt").write_text("\n".join(self.lines) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


# Cells: f(z, x).  `gain` scales what depends on z, and with it the spectral radius at z*.


class TanhCell(nn.Module):
    """tanh(gain · Wz + x): one dense layer."""

    gain: Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / d**0.5)
        self.register_buffer("gain", torch.tensor(0.9))
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

    gain: Tensor

    def __init__(self, channels: int, size: int, groups: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(groups, channels) for _ in range(3))
        self.register_buffer("gain", torch.tensor(1.0))
        self.shape = (channels, size, size)

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

    gain: Tensor

    def __init__(self, channels: Sequence[int], size: int, groups: int = 4) -> None:
        super().__init__()
        sizes = [size >> i for i in range(len(channels))]
        self.blocks = nn.ModuleList(
            ConvCell(c, s, groups) for c, s in zip(channels, sizes, strict=True)
        )
        self.fuse = nn.ModuleList(
            nn.ModuleList(_path(a, b, i - j, groups) for j, a in enumerate(channels))
            for i, b in enumerate(channels)
        )
        self.post = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, c, 1, bias=False), nn.GroupNorm(groups, c)) for c in channels
        )
        self.register_buffer("gain", torch.tensor(1.0))
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


# Measuring


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    runs: dict[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    *,
    warmup: int = 2,
    clock: str = "wall",
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns (A B C A B C ...): a busy machine then slows all alike.

    Each is started after the device is idle and the collector has run, so none pays for another.
    clock: "cpu" takes the time that this process computed, on all its threads.
    """
    now = time.process_time if clock == "cpu" else time.perf_counter
    for _ in range(warmup):
        for run in runs.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, run in runs.items():
                gc.collect(0)
                synchronize(device)
                start = now()
                run()
                synchronize(device)
                times[name].append(now() - start)
    finally:
        if collecting:
            gc.enable()
    return times


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """a/b, the median over the rounds: neighbours in time share the state of the machine."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def peak_memory(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that ``run`` holds at its worst, above what was held when it started.

    CUDA: the caching allocator's own maximum.  CPU: the profiler sees every allocation and release
    that torch's allocator makes, temporaries inside of operators included (a TorchDispatchMode
    would see only the tensors that operators return), and the running sum has a maximum.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profiler:
        run()
    # `profiler.events()` shows only what no operator claimed; the raw events hold all.
    raw = profiler.profiler.kineto_results.events()
    changes = [event for event in raw if event.name() == "[memory]"]
    held = worst = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        worst = max(worst, held)
    return worst


# Figures: colour-blind safe (Okabe and Ito), ours in the strongest line.

COLORS = {
    "GDEQ": "#0072B2",
    "Implicit": "#D55E00",
    "GMRES": "#E69F00",
    "NPG": "#009E73",
    "Neumann": "#CC79A7",
    "JFB": "#555555",
    "other": "#56B4E9",
}


def pyplot() -> Any:
    import matplotlib as mpl  # noqa: PLC0415 (only those who draw need it)

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "lines.linewidth": 1.4,
            "lines.markersize": 4,
            "figure.constrained_layout.use": True,
        }
    )
    return plt
