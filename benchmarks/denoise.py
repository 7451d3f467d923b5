"""Denoising: how near a proximal iteration comes to published denoisers in a given time.

    python benchmarks/denoise.py --data DATA --device cuda --seconds 150

f is trained as a denoiser first, applied once, and then to its equilibrium (`gdeq train denoise`).
The pace of both kinds of steps is measured, and from it follows how many there are of each.  A
training that is lost in the first phase begins anew at half the rate.

One picture in 20 of BSD400 is held out.  The weights that are tested are those of the equilibrium
that restored these best.  They are rounded to half precision, as they are written.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gdeq
from common import Report, parser
from gdeq.context import eager
from gdeq.lab.tasks.imaging import Imaging
from gdeq.lab.training import checkpoint
from gdeq.lab.training import config as configs
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import arithmetic, precision
from gdeq.lab.training.process import Process
from gdeq.lab.training.recordings import wait_for
from gdeq.models.proximal import psnr
from imaging import TIMES, draw, plain_steps, solved, some_of, steps_of, without_image

LOOKS = 10  # at the validation pictures, in each phase
TESTS = 30.0  # seconds that they take
LOST = 20.0  # dB: the noisy pictures have more
ENDLESS = 10**9  # steps, while the pace is measured
QUICK = (
    *("model.width=8", "model.scales=2", "model.blocks=1", "precision=float32"),
    *("batch_size=4", "patch=32", "shrunk=[]"),
)


class Bench:
    """A learner, whose steps are recorded before its time begins."""

    def __init__(self, args: Any) -> None:
        settings = ["test=validation", *args.set, f"device={args.device}", f"seed={args.seed}"]
        config, self.root = configs.load("denoise", settings), args.data
        place = Process(torch.device(args.device))
        self.learner = Learner(config, place, self.root)
        self.gpus = [place.device] if place.device.type == "cuda" else []
        self.batches = self._batches()
        weights = self.learner.model.state_dict()
        self.first = {name: value.clone() for name, value in weights.items()}

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        for epoch in itertools.count():
            yield from (batch for _, batch in self.learner.train_batches.epoch(epoch))

    def plan(self, total: int, first: int) -> None:
        """So many steps, the first ones unrolled."""
        self.learner.total = total
        self.learner.config = configs.replace(self.learner.config, pretrain_steps=first)

    def restart(self, slower: bool = False) -> None:
        """From the first weights, in the same tensors: what was recorded stays good."""
        learner = self.learner
        if slower:
            rate = learner.config.optimizer.lr / 2
            learner.config = configs.replace(learner.config, optimizer__lr=rate)
        learner.model.load_state_dict(self.first)
        for kept in learner.optimizer.state.values():
            for value in kept.values():
                value.zero_()
        if learner.average is not None:
            learner.average.n_averaged.zero_()
        learner.step = 0
        learner.sums.clear()

    def steps_to(self, last: int) -> None:
        while self.learner.step < last:
            self.learner.one_step(*next(self.batches))

    def pace(self, unrolled: bool, seconds: float) -> float:
        """Seconds that a step of one phase takes."""
        some = self.learner.config.residual_every
        self.plan(ENDLESS, ENDLESS * unrolled)
        self.restart()
        self.steps_to(2 * some + 1)  # with a penalty and without, measured and not
        wait_for(self.gpus)
        began, before = time.perf_counter(), self.learner.step
        while self.learner.step == before or time.perf_counter() - began < seconds:
            self.steps_to(self.learner.step + some)
            wait_for(self.gpus)
        found = (time.perf_counter() - began) / (self.learner.step - before)
        self.learner.evaluate()  # the first one takes longer than others
        return found

    def look(self, began: float) -> dict[str, Any]:
        """What the steps since the last look were like, and the validation pictures now."""
        learner = self.learner
        found = learner.sums.read(learner.process, since_mark=True)
        learner.sums.mark()
        tested = learner.evaluate()
        return {
            "step": learner.step,
            "unrolled": int(learner.step <= learner.config.pretrain_steps),
            "seconds": time.perf_counter() - began,
            "training psnr": found["psnr"],
            "residual": found["residual"],
            "backward residual": found["backward_residual"],
            "validation psnr": tested["psnr"],
            "step size": learner.deq.cell.log_step.exp().item(),
        }


def train(bench: Bench, args: Any, report: Report) -> None:
    """Leaves the best weights in those that are tested."""
    learner = bench.learner
    once, solve = (bench.pace(unrolled, min(2.0, args.seconds / 20)) for unrolled in (True, False))
    report(f"{1e3 * once:.2f} ms a step unrolled, {1e3 * solve:.2f} ms a step solved")
    taken = time.perf_counter() - report.started
    seconds, share = min(args.seconds, args.within - taken - TESTS), args.share
    report(f"{taken:.0f} s until here, {seconds:.0f} s of training")
    later = round((1 - share) * seconds / solve)  # steps of the second phase
    bench.restart()
    rows, best, chosen, began = [], -math.inf, 0, time.perf_counter()
    kept = {name: value.clone() for name, value in learner.evaluated.state_dict().items()}
    for unrolled, until in ((True, share * seconds), (False, seconds)):
        pace, first = once if unrolled else solve, learner.step
        for more in range(LOOKS, 0, -1):
            now, step = time.perf_counter(), learner.step
            left = max(more, int((began + until - now) / pace))
            bench.plan(step + left + later * unrolled, step + left if unrolled else first)
            bench.steps_to(step + left // more)
            row = bench.look(began)
            rows.append(row)
            report(" ".join(f"{k}={v:.4g}" for k, v in row.items()))
            report.csv(rows, "-training")
            pace = (time.perf_counter() - now) / (learner.step - step)
            if not row["training psnr"] > LOST:
                report("the training was lost")
                if not unrolled:
                    break
                bench.restart(slower=True)
            elif unrolled or row["validation psnr"] > best:
                best = -math.inf if unrolled else row["validation psnr"]
                chosen = learner.step
                for name, value in learner.evaluated.state_dict().items():
                    kept[name].copy_(value)
    report(f"tested: the weights of step {chosen} of {learner.step}, {best:.3f} dB on validation")
    rounded = {n: v.half().to(v.dtype) if v.is_floating_point() else v for n, v in kept.items()}
    learner.evaluated.load_state_dict(rounded)


@torch.no_grad()
def turned(model: Any, tests: Any) -> float:
    """PSNR of the mean over the eight ways to turn and flip an image (self-ensemble)."""
    ratios = []
    for measured, truth in tests:
        total = torch.zeros_like(truth)
        for quarter, flipped in itertools.product(range(4), (False, True)):
            given = measured.rot90(quarter, (-2, -1))
            made = model(given.flip(-1) if flipped else given)
            total += (made.flip(-1) if flipped else made).rot90(-quarter, (-2, -1))
        ratios.append(psnr(total / 8, truth))
    return torch.cat(ratios).mean().item()


def evaluate(bench: Bench, most: int, report: Report) -> list[dict[str, Any]]:
    """Both test sets: by the solver, at the training's number of steps and at ten times that."""
    learner, rows = bench.learner, []
    model: Any = learner.evaluated.eval()
    once = steps_of(learner)
    for name in ("bsd68", "set12"):
        config: Any = configs.replace(learner.config, test=name)
        learner.task = Imaging(config, learner.process, bench.root)
        for steps in (once, 10 * once):
            rows.append({"set": name, "steps": steps, **solved(learner, most, steps)})
            report(str(rows[-1]))
        model.deq.solver = learner.config.solver.build()
        ratio = turned(model, some_of(learner.task, most))
        rows.append({"set": name, "steps": f"{once}, mean of eight turned", "psnr": ratio})
        report(str(rows[-1]))
    return rows


def pictures(bench: Bench, report: Report) -> None:
    """Four of Set12, noisy, true and restored, and the figure of `imaging.py steps`."""
    learner = bench.learner
    model: Any = learner.evaluated.eval()
    once, many = steps_of(learner), 4
    learner.task = Imaging(
        configs.replace(learner.config, test="set12"), learner.process, bench.root
    )
    measured, truth = next(some_of(learner.task, many))
    kept = {"noisy": measured[:, :1], "true": truth}
    with torch.no_grad():
        for steps in (once, 10 * once):
            model.deq.solver = replace(learner.config.solver.build(), max_iter=steps)
            kept[f"restored, {steps} steps"] = model(measured)
    inputs = model.inputs(measured)
    radius = gdeq.spectral_radius(lambda z: model.deq.cell(z, *inputs), model.deq.solution.z, 30)
    report(f"spectral radius of {len(radius)} pictures: {radius.tolist()}")
    grey = {n: (255 * v).clamp(0, 255).round().byte().cpu().numpy() for n, v in kept.items()}
    np.savez_compressed(report.folder / "denoise-images.npz", **grey)  # type: ignore[arg-type]
    trace = plain_steps(learner, many, TIMES[-1] * once)
    report.csv([{"step": row["step"], **without_image(row)} for row in trace], "-steps")
    report.figure(draw(learner, {"DEQ": trace}))


def write_weights(bench: Bench, report: Report) -> None:
    """In half precision, with the settings."""
    weights = bench.learner.evaluated.state_dict()
    small = {n: v.half() if v.is_floating_point() else v for n, v in weights.items()}
    about = {"config": configs.to_dict(bench.learner.config), "choice": None}
    (report.folder / "denoise.safetensors").write_bytes(checkpoint.pack(small, about))


def main() -> None:
    wanted = parser("Denoising in a given time.")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--seconds", type=float, default=150.0, help="of training, at most")
    wanted.add_argument("--within", type=float, default=1e9, help="seconds for all, tests included")
    wanted.add_argument("--share", type=float, default=0.6, help="of the time, with f applied once")
    wanted.add_argument("--images", type=int, default=10_000, help="of each test, at most")
    wanted.add_argument("--set", nargs="*", default=[], help="settings, as `gdeq train` takes them")
    args = wanted.parse_args()
    if args.quick:
        args.seconds, args.images, args.set = 4.0, 1, [*QUICK, *args.set]
    report = Report("denoise", args)
    bench = Bench(args)
    device = bench.learner.process.device
    parameters = sum(p.numel() for p in bench.learner.model.parameters())
    report(f"{parameters / 1e6:.2f} M parameters")
    with precision(bench.learner.config, device):
        train(bench, args, report)
    if bench.gpus:
        report(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    write_weights(bench, report)
    with eager(), arithmetic("tf32", device.type):
        rows = evaluate(bench, args.images, report)
    report.csv(rows)
    report.table(rows)
    with eager(), arithmetic("float32", device.type):
        pictures(bench, report)
    report.close()


if __name__ == "__main__":
    main()
