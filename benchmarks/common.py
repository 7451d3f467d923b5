"""What the benchmarks share: options, timing, memory, tables and figures."""

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
