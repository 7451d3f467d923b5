"""Inverse imaging: more steps than in training, the gradients, and deepinv's own DEQ beside ours.

    python benchmarks/imaging.py steps RUN [UNROLLED] --data DATA --device cuda
    python benchmarks/imaging.py gradients denoise --data DATA --device cuda --train 2000
    python benchmarks/imaging.py peer deblur --data DATA --device cuda --train 500

steps: PSNR and residual at up to ten times the steps of the training, of a trained run and of
another that was trained unrolled (``gdeq train ... pretrain_steps=1000000 pretrain_layers=N``), and
the picture.  gradients: the same training by each gradient.  peer: one iteration with one prox,
solved and differentiated by deepinv and by gdeq.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gdeq
from common import COLORS, Report, parser, peak_memory, pyplot, synchronize
from gdeq.lab.tasks.imaging import Imaging
from gdeq.lab.training import config as configs
from gdeq.lab.training import runs
from gdeq.lab.training.loop import Trainer
from gdeq.lab.training.precision import precision
from gdeq.lab.training.process import Process
from gdeq.models.proximal import Denoiser, psnr

TIMES = (0, 1, 2, 5, 10)  # of the training's steps


# -- more steps ------------------------------------------------------------------------------------


def steps_of(config: Any) -> int:
    """Evaluations of f in training, before the one that is differentiated."""
    if config.pretrain_steps:
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
def plain_steps(trainer: Trainer, many: int, most: int) -> list[dict[str, Any]]:
    """z ← f(z) from where every solve starts: mean PSNR and residual after each step."""
    model: Any = trainer.evaluated.eval()
    ratios: list[list[Tensor]] = [[] for _ in range(most + 1)]
    residuals: list[list[Tensor]] = [[] for _ in range(most + 1)]
    images = []  # of the first one
    for measured, truth in some_of(trainer.task, many):
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
def solved(trainer: Trainer, many: int, steps: int) -> dict[str, float]:
    """By the solver of the training, with so many steps."""
    model: Any = trainer.evaluated.eval()
    kind = type(trainer.config.solver.build())
    model.deq.solver = kind(max_iter=steps, tol=0.0, stop="whole")
    found, residual = [], []
    for measured, truth in some_of(trainer.task, many):
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
    for name, trainer in zip(names, trainers, strict=True):
        once = steps_of(trainer.config)
        with precision(trainer.config, trainer.process.device):
            trace = plain_steps(trainer, args.images, TIMES[-1] * once)
            if name == "DEQ":
                solver += [
                    {
                        "network": name,
                        "solver steps": n * once,
                        **solved(trainer, args.images, n * once),
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


def draw(trainer: Trainer, traces: dict[str, list[dict[str, Any]]]) -> Any:
    plt = pyplot()
    measured, truth = next(iter(trainer.task.test_batches(1).epoch()))[1]
    once = steps_of(trainer.config)
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
    task: Imaging, model: nn.Module, call: Any, count: int, tested: int
) -> dict[str, Any]:
    """PSNR after so many steps of Adam, milliseconds of a step, peak memory."""
    config, device = task.config, task.device
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.optimizer.lr, count, pct_start=0.1
    )
    batches = (
        batch
        for epoch in range(count)
        for _, batch in task.train_batches(config.batch_size).epoch(epoch)
    )

    def step() -> None:
        measured, truth = next(batches)
        optimizer.zero_grad(set_to_none=True)
        task.losses(call(measured), truth).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or 1e9)
        optimizer.step()
        schedule.step()

    with precision(config, device):
        memory = peak_memory(step, device)
        for _ in range(min(3, count - 1)):
            step()
        synchronize(device)
        # Of a CPU that others use too, the time that it spent on this.
        now = time.perf_counter if device.type == "cuda" else time.process_time
        started, done = now(), min(3, count - 1) + 1
        for _ in range(count - done):
            step()
        synchronize(device)
        seconds = now() - started
        model.eval()
        with torch.no_grad():
            found = [psnr(call(x), truth) for x, truth in some_of(task, tested)]
    return {
        "psnr": f"{torch.cat(found).mean().item():.2f}",
        "ms": 1e3 * seconds / max(1, count - done),
        "MiB": memory / 2**20,
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
            model.deq.warns = False
            if name == "Unrolled":
                model.deq.solver = None
                model.deq.gradient = gdeq.Unrolled(task.config.solver.max_iter)
            row = trained_and_tested(task, model, model, args.train, args.images)
            left = float("nan") if name == "Unrolled" else model.deq.solution.residual.mean().item()
            found.append({"gradient": name, "seed": seed, **row, "residual": left})
            report(str(found[-1]))
    report.table(found)
    report.csv(found, "-gradients")


class Prox(nn.Module):
    """The network as a denoiser of deepinv: it sees an image and a noise level."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.network = Denoiser(config.width, config.scales, config.blocks)

    def forward(self, v: Tensor, sigma: Any) -> Tensor:
        return self.network(v, torch.full_like(v, float(sigma)), v)


def peer(args: Any, report: Report) -> None:
    import deepinv as dinv  # noqa: PLC0415 (only this part needs it)

    from gdeq.models.deepinv import from_deepinv  # noqa: PLC0415

    task = task_of(args)
    config, device = task.config, task.device
    most, found = config.solver.max_iter, []
    kinds = {
        "deepinv, Picard backward": dinv.optim.DEQConfig(max_iter_backward=most),
        "deepinv, JFB": dinv.optim.DEQConfig(jacobian_free=True),
        "gdeq, Implicit": gdeq.Implicit(gdeq.Picard(most, 1e-5)),
        "gdeq, JFB": gdeq.JFB(),
        "gdeq, GDEQ refine 1": gdeq.GDEQ(refine=1),
    }
    for name, way in kinds.items():
        torch.manual_seed(args.seed)
        theirs = isinstance(way, dinv.optim.DEQConfig)
        pgd = dinv.optim.PGD(
            prior=dinv.optim.PnP(denoiser=Prox(config.model)),
            data_fidelity=dinv.optim.L2(),
            stepsize=config.model.step,
            sigma_denoiser=config.noise[0] / 255,
            max_iter=most,
            crit_conv="residual",
            thres_conv=1e-5,
            early_stop=False,
            unfold=True,
            trainable_params=["stepsize"],
            DEQ=way if theirs else None,
        ).to(device)
        solver = gdeq.Broyden(max_iter=most, tol=0.0, stop="whole")
        model = pgd if theirs else from_deepinv(pgd, solver, way)

        def call(measured: Tensor, model: nn.Module = model) -> Tensor:
            physics = dinv.physics.Denoising()
            if config.kind == "deblur":
                kernels = measured[:, 2:].roll((13, 13), (-2, -1))[..., :27, :27]
                size = (1, *measured.shape[-2:])
                physics = dinv.physics.BlurFFT(img_size=size, filter=kernels, device=device)
            out: Tensor = model(measured[:, :1], physics)
            return out

        row = {"way": name, **trained_and_tested(task, model, call, args.train, args.images)}
        found.append(row)
        report(str(row))
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
