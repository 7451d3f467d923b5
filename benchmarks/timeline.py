"""The kernels of a recorded GDEQ or JFB step in the order of their start, one line each.

    PYTHONPATH=src python3 benchmarks/timeline.py [--gradient jfb] [--solve] [--batch 128]

Start, duration and end in µs from the begin of the step, the stream that the graph has given it,
the kernel and its grid.  Of steps that follow each other, as in a training: the third is shown.
Without --solve the iterates in between are one line each: what its two kernels and f take.  First
come the times of a step with and without a wait for the host after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gdeq.gradients import GDEQ, JFB
from gdeq.lab.bench.steps import default_setup, milliseconds, ours

STEPS = 4


def kernels_of(work: Any) -> list[dict[str, Any]]:
    """Of the third of STEPS calls."""
    from torch.profiler import ProfilerActivity  # noqa: PLC0415

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(STEPS):
            work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memset", "gpu_memcpy")
    events = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    each = len(events) // STEPS
    return events[2 * each : 3 * each]


def waited(work: Any, rounds: int) -> float:
    """Milliseconds with a wait after each: the launch of the graph is in some of them."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient", choices=("gdeq", "jfb"), default="gdeq")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--solve", action="store_true", help="also the kernels of each iterate")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a time line is of a GPU, and there is none")
    torch.backends.cudnn.benchmark = True
    setup = replace(default_setup("cuda"), batch=args.batch)
    step, batch = ours(setup, GDEQ() if args.gradient == "gdeq" else JFB()), setup.draw()

    def work() -> None:
        step(*batch)

    in_line = statistics.median(milliseconds(setup, work, 40))
    print(f"a step takes {in_line:.3f} ms in line, {waited(work, 20):.3f} with a wait after each")
    events = kernels_of(work)
    origin = events[0]["ts"]
    passes = [e for e in events if e["name"].startswith("_dots") and e["name"] != "_dots_of"]
    first, last = passes[0]["ts"], passes[-1]["ts"]
    moved = [e for e in events if e["name"].startswith("_step")]
    for event in events:
        name, start, took = event["name"], event["ts"] - origin, event["dur"]
        if args.solve or not first <= event["ts"] < last:
            where, stream = event["args"].get("grid", ""), event["args"].get("stream", "")
            print(f"{start:9.1f} {took:7.1f} {start + took:9.1f}  {stream:>5}  {name[:80]} {where}")
        elif name.startswith("_step"):
            i = moved.index(event)
            ended = passes[i]["ts"] + passes[i]["dur"]
            of_f = passes[i + 1]["ts"] - event["ts"] - took
            gap = event["ts"] - ended
            each = f"_dots {passes[i]['dur']:.1f}, gap {gap:.1f}, _step {took:.1f}, f {of_f:.1f}"
            print(f"{start:9.1f}  {each}")


if __name__ == "__main__":
    main()
