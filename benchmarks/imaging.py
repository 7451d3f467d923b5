"""Inverse imaging: more steps than in training, the gradients, and deepinv's own DEQ beside ours.

    python benchmarks/imaging.py steps RUN [UNROLLED] --data DATA --device cuda
    python benchmarks/imaging.py gradients denoise --data DATA --device cuda --train 2000
    python benchmarks/imaging.py peer deblur --data DATA --device cuda --train 250 --images 32 \\
        --set precision=tf32 batch_size=16 solver.tol=0

steps: PSNR and residual at up to ten times the steps of the training, of a trained run and of
another that was trained unrolled (``gdeq train ... pretrain_steps=1000000 pretrain_layers=N``), and
the picture.  gradients: the same training by each gradient.  peer: one iteration with one prox,
solved and differentiated by deepinv and by gdeq.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gdeq
from common import COLORS, Report, parser, peak_memory, pyplot, synchronize
from gdeq.context import eager
from gdeq.lab.tasks.imaging import Imaging
from gdeq.lab.training import config as configs
from gdeq.lab.training import runs
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.optimization import build_optimizer, learning_rate, set_rate
from gdeq.lab.training.precision import precision
from gdeq.lab.training.process import Process
from gdeq.models.proximal import psnr

TIMES = (0, 1, 2, 5, 10)  # of the training's steps


# -- more steps ------------------------------------------------------------------------------------


def steps_of(learner: Learner) -> int:
    """Evaluations of f in training, before the one that is differentiated."""
    config: Any = learner.config
    if config.pretrain_steps >= learner.total:  # unrolled to the end
        return config.pretrain_layers
    return config.solver.max_iter + config.gradient.steps * (config.gradient.name == "unrolled")


def some_of(task: Any, many: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many measurements of the test and their images, those of one size together."""
    for _, (measured, truth) in task.test_batches(min(many, 16)).epoch():
        yield measured[:many], truth[:many]
        many -= len(measured)
        if many <= 0:
            return


@torch.no_grad()
def plain_steps(learner: Learner, many: int, most: int) -> list[dict[str, Any]]:
    """z ← f(z) from where every solve starts: mean PSNR and residual after each step."""
    model: Any = learner.evaluated.eval()
    ratios: list[list[Tensor]] = [[] for _ in range(most + 1)]
    residuals: list[list[Tensor]] = [[] for _ in range(most + 1)]
    images = []  # of the first one
    for measured, truth in some_of(learner.task, many):
        inputs, cell = model.inputs(measured), model.deq.cell
        state = cell.initial_state(*inputs)
        for step in range(most + 1):
            new = cell(state, *inputs)
            parts = [_leaves(s) for s in (new, state)]
            pairs = [(a.flatten(1), b.flatten(1)) for a, b in zip(*parts, strict=True)]
            change = torch.stack([(a - b).square().sum(1) for a, b in pairs]).sum(0)
            size = torch.stack([a.square().sum(1) for a, _ in pairs]).sum(0)
            image = parts[1][0]
            ratios[step].append(psnr(image, truth))
            residuals[step].append((change / size).sqrt())
            if len(images) <= most:
                images.append(image[0, 0].float().cpu())
            state = new
    return [
        {
            "step": step,
            "psnr": torch.cat(ratios[step]).mean().item(),
            "residual": torch.cat(residuals[step]).mean().item(),
            "image": images[step],
        }
        for step in range(most + 1)
    ]


def _leaves(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


@torch.no_grad()
def solved(learner: Learner, many: int, steps: int) -> dict[str, float]:
    """By the solver of the training, with so many steps."""
    model: Any = learner.evaluated.eval()
    kind = type(learner.config.solver.build())
    model.deq.solver = kind(max_iter=steps, tol=0.0, stop="whole")
    found, residual = [], []
    for measured, truth in some_of(learner.task, many):
        found.append(psnr(model(measured), truth))
        residual.append(model.deq.solution.residual)
    return {
        "psnr": torch.cat(found).mean().item(),
        "least": torch.cat(found).min().item(),
        "residual": torch.cat(residual).mean().item(),
    }


def steps(args: Any, report: Report) -> None:
    trainers = [runs.trained(run, args.data, args.device) for run in args.what]
    names = ["DEQ", "unrolled"][: len(trainers)]
    lines, solver, traces = [], [], {}
    for name, learner in zip(names, trainers, strict=True):
        once = steps_of(learner)
        # In full precision: rounding would soon be all that a residual shows.
        full = configs.replace(learner.config, precision="float32")
        with precision(full, learner.process.device), eager():
            trace = plain_steps(learner, args.images, TIMES[-1] * once)
            if name == "DEQ":
                solver += [
                    {
                        "network": name,
                        "solver steps": n * once,
                        **solved(learner, args.images, n * once),
                    }
                    for n in TIMES[1:]
                ]
        traces[name] = trace
        lines += [
            {"network": name, "plain steps": n * once, **without_image(trace[n * once])}
            for n in TIMES
        ]
    report("z ← f(z), as a network that was unrolled is used:")
    report.table([shown(line) for line in lines])
    report.csv(lines)
    report("\nthe solver of the training, with more steps:")
    report.table([shown(line) for line in solver])
    report.csv(solver, "-solver")
    report.figure(draw(trainers[0], traces))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """With two digits of a dB."""
    return {k: f"{v:.2f}" if k in ("psnr", "least") else v for k, v in row.items()}


def without_image(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("psnr", "residual")}


def draw(learner: Learner, traces: dict[str, list[dict[str, Any]]]) -> Any:
    plt = pyplot()
    measured, truth = next(iter(learner.task.test_batches(1).epoch()))[1]
    once = steps_of(learner)
    images = {
        "measured": measured[0, 0].float().cpu(),
        "truth": truth[0, 0].float().cpu(),
        "DEQ, the training steps": traces["DEQ"][once]["image"],
        f"DEQ, {TIMES[-1]} times the steps": traces["DEQ"][-1]["image"],
    }
    if "unrolled" in traces:
        images[f"unrolled, {TIMES[-1]} times the steps"] = traces["unrolled"][-1]["image"]
    figure = plt.figure(figsize=(12, 6.2))
    grid = figure.add_gridspec(2, 2 * len(images), height_ratios=[1.15, 1])
    height, width = truth.shape[-2:]
    side = min(height, width, 160)
    top, left = (height - side) // 2, (width - side) // 2
    for number, (title, image) in enumerate(images.items()):
        axes = figure.add_subplot(grid[0, 2 * number : 2 * number + 2])
        axes.imshow(image[top : top + side, left : left + side], cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    half = len(images)
    left_axes, right_axes = (
        figure.add_subplot(grid[1, :half]),
        figure.add_subplot(grid[1, half:]),
    )
    for (name, trace), colour in zip(traces.items(), ("GDEQ", "Implicit"), strict=False):
        at = [row["step"] for row in trace]
        left_axes.semilogy(at, [row["residual"] for row in trace], color=COLORS[colour], label=name)
        right_axes.plot(at, [row["psnr"] for row in trace], color=COLORS[colour], label=name)
    for axes, title in ((left_axes, "residual"), (right_axes, "PSNR in dB")):
        axes.axvline(once, color="black", linestyle=":", linewidth=0.8)
        axes.set(xlabel="steps z ← f(z); dotted: as many as in training", ylabel=title)
        axes.legend()
    return figure


# -- trainings in one process ----------------------------------------------------------------------


def task_of(args: Any, *settings: str) -> Imaging:
    given = [f"data={args.images_of}"] if args.images_of else []
    config = configs.load(args.what[0], [*given, *args.set, *settings, f"device={args.device}"])
    return Imaging(config, Process(device=torch.device(args.device)), args.data)


def trained_and_tested(
    task: Imaging, layer: Any, inputs: Any, f: Any, count: int, tested: int, *, fast: bool
) -> dict[str, Any]:
    """PSNR and residual after so many steps, milliseconds of a step, its memory.

    layer: called with inputs(measured), to the image z; f(z, *inputs(measured)): its iteration.
    fast: on a GPU, the step is captured, and what is compiled runs compiled.
    """
    config, device = task.config, task.device
    optimizer = build_optimizer(config, layer)
    layer.warns = False
    batches = (
        batch
        for epoch in itertools.count()
        for _, batch in task.train_batches(config.batch_size).epoch(epoch)
    )

    def update(measured: Tensor, truth: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        task.losses(layer(*inputs(measured)), truth).mean().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), config.optimizer.clip or 1e9)
        optimizer.step()

    gpu = device.type == "cuda"
    work, made = gdeq.capture(update) if fast and gpu else update, 0

    def step() -> None:
        nonlocal made
        torch.clear_autocast_cache()  # its copies are of the weights before a step
        set_rate(optimizer, learning_rate(config, made, count))
        work(*next(batches))
        made += 1

    def steps_to(last: int) -> None:
        while made < last:
            step()

    with precision(config, device), contextlib.nullcontext() if fast else eager():
        steps_to(3)  # compiled
        memory = peak_memory(lambda: steps_to(5), device)  # recorded and replayed, if it is
        steps_to(min(20, count - 1))
        synchronize(device)
        # Of a CPU that others use too, the time that it spent on this.
        now = time.perf_counter if gpu else time.process_time
        started, before = now(), made
        steps_to(count)
        synchronize(device)
        seconds = now() - started
    layer.eval()
    found, residual = [], []
    with torch.no_grad(), precision(config, device), eager():  # not compiled for each size
        for measured, truth in some_of(task, tested):
            given = inputs(measured)
            z = layer(*given)
            found.append(psnr(z, truth))
            change = (f(z, *given) - z).flatten(1).norm(dim=1)
            residual.append(change / z.flatten(1).norm(dim=1))
    return {
        "psnr": f"{torch.cat(found).mean().item():.2f}",
        "ms": 1e3 * seconds / max(1, count - before),
        "MiB": memory / 2**20,
        "residual": torch.cat(residual).mean().item(),
    }


GRADIENTS = {
    "Unrolled": "gradient=unrolled gradient.damping=1.0",
    "Implicit": "gradient=implicit",
    "JFB": "gradient=jfb",
    "NPG": "gradient=npg",
    "GDEQ": "gradient=gdeq gradient.refine=0",
    "GDEQ, refine 1": "gradient=gdeq gradient.refine=1",
    "GDEQ, refine 2": "gradient=gdeq gradient.refine=2",
}


def gradients(args: Any, report: Report) -> None:
    found = []
    for seed in range(args.seed, args.seed + args.seeds):
        for name, settings in GRADIENTS.items():
            task = task_of(args, *settings.split(), f"seed={seed}")
            torch.manual_seed(seed)
            model: Any = task.model().to(task.device)
            deq = model.deq
            if name == "Unrolled":
                deq.solver, deq.gradient = None, gdeq.Unrolled(task.config.solver.max_iter)
            given = deq, model.inputs, deq.cell
            row = trained_and_tested(task, *given, args.train, args.images, fast=True)
            found.append({"gradient": name, "seed": seed, **row})
            report(str(found[-1]))
    report.table(found)
    report.csv(found, "-gradients")


class Prox(nn.Module):
    """The network as a denoiser of deepinv, which hands over an image and a noise level alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.given: tuple[Tensor, ...] = ()  # what else the network sees: noise level and Aᵀy

    def forward(self, v: Tensor, sigma: Any = None) -> Tensor:
        image: Tensor = self.network(v, *self.given)
        return image


def on_deepinv(model: Any, config: Any, **options: Any) -> tuple[Any, Any]:
    """The same iteration by deepinv, and what it is called with for a measurement."""
    import deepinv as dinv  # noqa: PLC0415 (only this part needs it)

    prox = Prox(model.deq.cell.prox)
    pgd = dinv.optim.PGD(
        prior=dinv.optim.PnP(denoiser=prox),
        data_fidelity=dinv.optim.L2(),
        stepsize=config.model.step,
        sigma_denoiser=1.0,  # which the network does not see: it knows the level of each image
        unfold=True,
        trainable_params=["stepsize"],
        **{"max_iter": config.solver.max_iter, **options},
    )

    def inputs(measured: Tensor) -> tuple[Tensor, Any]:
        y, _, *prox.given = model.inputs(measured)
        if config.kind == "denoise":
            return y, dinv.physics.Denoising()
        kernels = measured[:, 2:].roll((13, 13), (-2, -1))[..., :27, :27]
        size = (1, *y.shape[-2:])
        return y, dinv.physics.BlurFFT(img_size=size, filter=kernels, device=y.device)

    return pgd.to(next(model.parameters()).device), inputs


def peer(args: Any, report: Report) -> None:
    """By each library from the same weights, on the same batches, with the same optimiser."""
    from deepinv.optim import DEQConfig  # noqa: PLC0415 (only this part needs it)

    from gdeq.models.deepinv import Iteration, from_deepinv  # noqa: PLC0415

    task = task_of(args, "residual_weight=0")
    config, found = task.config, []
    most, solver, refined = config.solver.max_iter, config.solver.build(), gdeq.GDEQ(refine=1)
    both = f"Broyden {most}, refine 1"
    # As in its example; then with as many steps of Picard on both ways.
    example = {"DEQ": True, "max_iter": 20, "anderson_acceleration": True}
    twenty = {"DEQ": DEQConfig(max_iter_backward=20), "max_iter": 20}
    ways: list[tuple[str, str, Any]] = [
        ("deepinv", f"Picard {most}, Picard {most}", {"DEQ": DEQConfig(max_iter_backward=most)}),
        ("gdeq", both, refined),
        ("gdeq", f"{both}, thrice the steps", refined),
        ("deepinv", "Anderson 20, Picard 50", example),
        ("deepinv", "Picard 20, Picard 20", twenty),
        ("gdeq", f"{both}, as it is", refined),
        ("deepinv's PGD in gdeq", both, {}),
        ("deepinv", f"Picard {most}, JFB", {"DEQ": DEQConfig(jacobian_free=True)}),
        ("gdeq", f"Broyden {most}, JFB", gdeq.JFB()),
    ]
    for library, name, way in ways:
        torch.manual_seed(args.seed)
        model: Any = task.model().to(task.device)
        layer, f, inputs = model.deq, model.deq.cell, model.inputs
        if library == "gdeq":
            layer.solver, layer.gradient = solver, way
        else:
            layer, inputs = on_deepinv(model, config, **way)
            f = Iteration(layer)
        if library == "deepinv's PGD in gdeq":
            layer = from_deepinv(layer, solver, refined)
        fast = library == "gdeq" and not name.endswith("as it is")
        count = args.train * (3 if name.endswith("thrice the steps") else 1)
        row = trained_and_tested(task, layer, inputs, f, count, args.images, fast=fast)
        found.append({"library": library, "way": name, **row})
        report(str(found[-1]))
    report.table(found)
    report.csv(found, "-peer")


def main() -> None:
    wanted = parser("Inverse imaging.")
    wanted.add_argument("part", choices=("steps", "gradients", "peer"))
    wanted.add_argument("what", nargs="*", help="run folders (steps) or a preset")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--images-of", default=None, help="bsd, photos or a folder of pictures")
    wanted.add_argument("--set", nargs="*", default=[], help="settings, as `gdeq train` takes them")
    wanted.add_argument("--train", type=int, default=2000, help="training steps")
    wanted.add_argument("--seeds", type=int, default=1, help="how many")
    wanted.add_argument("--images", type=int, default=10_000, help="of the test, at most")
    args = wanted.parse_args()
    if args.quick:
        args.train, args.images = 4, 1
    report = Report("imaging", args)
    if args.part == "steps":
        args.what = [Path(run) for run in args.what]
        steps(args, report)
    else:
        args.what = args.what or ["denoise-photos"]
        (gradients if args.part == "gradients" else peer)(args, report)
    report.close()


if __name__ == "__main__":
    main()
