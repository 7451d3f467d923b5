"""Language models: each gradient by the same recipe, explicit transformers, torchdeq, decoding.

    python benchmarks/language.py train --preset chars --seeds 3 --set optimizer.lr=1e-3
    python benchmarks/language.py train --device cuda --data DATA --epochs 32
    python benchmarks/language.py torchdeq --device cuda
    python benchmarks/language.py decode --run runs/RUN --data DATA --device cuda
    python benchmarks/language.py draw --run results/language/ptb

train: every row evaluates f equally often in the forward pass, and is tested by as many steps of
Picard and by 30.  "explicit" is the same module evaluated once; "explicit, 4 blocks" has about as
many parameters, and "explicit, 5 blocks, wide" as much arithmetic in a step as the first row.
"within a seed" is the difference from the first row with the same seed.
Finished runs are kept in --folder: the same command goes on where it was stopped.
torchdeq: one training step of the same cell in turns; both solve twelve steps of Broyden, forward
and backward.  decode: solver steps a token, from the last equilibrium and from zeros.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gdeq
from common import COLORS, ROOT, Report, interleave, parser, peak_memory, pyplot
from gdeq.lab.tasks.language import Language, continued
from gdeq.lab.training import config as configs
from gdeq.lab.training import runs
from gdeq.lab.training.folder import RunFolder
from gdeq.lab.training.learner import Learner
from gdeq.lab.training.precision import precision
from gdeq.lab.training.process import Process
from gdeq.models.transformer import Transformer

METRICS = ("bits_per_byte", "perplexity")
EXPLICIT = ["pretrain_steps=100000000", "pretrain_layers=1"]


def rows_of(config: Any) -> dict[str, list[str]]:
    """Settings of each row, beside those of the configuration."""
    steps = config.solver.max_iter + config.gradient.steps  # evaluations of f in the forward pass
    picard = ["solver=picard", f"solver.max_iter={steps}"]
    gdeq = [*picard, "gradient=gdeq"]
    return {
        "Unrolled, 4 steps": [],
        "JFB": ["gradient=jfb", *picard],
        "NPG, 4 terms": ["gradient=npg", *picard],
        "Implicit": ["gradient=implicit", "gradient.max_iter=12", "gradient.tol=1e-2", *picard],
        "GDEQ, Broyden": ["solver=broyden", f"solver.max_iter={steps}", "gradient=gdeq"],
        "GDEQ refine 1": [*gdeq, "gradient.refine=1"],
        "GDEQ refine 2": [*gdeq, "gradient.refine=2"],
        "explicit": EXPLICIT,
        "explicit, 4 blocks": [*EXPLICIT, "model.blocks=4", f"model.width={width_of(4, config)}"],
        "explicit, 5 blocks, wide": [*EXPLICIT, "model.blocks=5"],
    }


QUICK = [
    *("epochs=1", "batch_size=512", "window=8", "memory=8", "test_rows=64", "log_every=5"),
    *("model.width=16", "model.heads=2"),
]


def width_of(blocks: int, config: Any) -> int:
    """About as many parameters as the configuration's own: symbols · d + 12 blocks · d²."""
    symbols = {"ptb": 10_000, "wikitext2": 33_278}.get(config.data, 256)
    wanted = config.model
    total = symbols * wanted.width + 12 * wanted.blocks * wanted.width**2
    d = (math.sqrt(symbols**2 + 48 * blocks * total) - symbols) / (24 * blocks)
    return max(1, round(d / (2 * wanted.heads))) * 2 * wanted.heads


def trained(args: Any, report: Report) -> Iterator[dict[str, Any]]:
    """All rows of a seed, then of the next, so that a run that is cut short has whole seeds."""
    more = [f"device={args.device}", *(QUICK if args.quick else []), *args.set]
    more += [f"epochs={args.epochs}"] if args.epochs else []
    rows = rows_of(configs.load(args.preset, more))
    rows = {name: [*more, *rows[name]] for name in args.only or rows}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for seed in range(args.seed, args.seed + args.seeds):
        for name, settings in rows.items():
            found[name].append(run_of(args, name, settings, seed))
            told = ", ".join(f"{key} {value:.4g}" for key, value in found[name][-1].items())
            report(f"{name}, seed {seed}: {told}")
    pace = paces(args, rows)
    first = next(iter(found.values()))
    for name, those in found.items():
        key = next(key for key in those[0] if key.startswith(METRICS))
        within = [{key: a[key] - b[key]} for a, b in zip(those, first, strict=True)]
        told = {"row": name, "ms": pace[name], "within a seed": summed(within, key)}
        yield told | {key: summed(those, key) for key in those[0]}


def run_of(args: Any, name: str, settings: list[str], seed: int) -> dict[str, float]:
    """Figures of one training; kept in its folder, and not made again by the same settings."""
    place = args.folder / f"{args.preset}-{name.replace(',', '').replace(' ', '-')}-seed{seed}"
    kept = place / f"figures-{'-'.join(map(str, args.steps))}.json"
    config = configs.load(
        args.preset, [*settings, f"test_every={args.epochs or 1}", f"seed={seed}"]
    )
    if not kept.is_file() or RunFolder.open(place).config() != config:
        shutil.rmtree(place, ignore_errors=True)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        told = runs.train(place, config, args.data)
        found = {"parameters": told["parameters"], **at_the_end(place)}
        if args.device == "cuda":
            found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
        for steps in args.steps:
            found |= tested(place, args, steps)
        kept.write_text(json.dumps(found))
    figures: dict[str, float] = json.loads(kept.read_text())
    return figures


def paces(args: Any, rows: dict[str, list[str]]) -> dict[str, float]:
    """Milliseconds of a training step, in turns; on a CPU those that the processor worked."""
    device = torch.device(args.device)
    steps: dict[str, Callable[[], None]] = {}
    for name, settings in rows.items():
        config = configs.load(args.preset, settings)
        learner = Learner(config, Process(device), args.data)
        batch = next(learner.train_batches.epoch(0))[1]
        steps[name] = partial(learner.one_step, *batch)
    clock = "wall" if device.type == "cuda" else "cpu"
    with precision(config, device):  # of all rows
        times = interleave(steps, 2 if args.quick else 20, device, warmup=12, clock=clock)
    return {name: 1e3 * statistics.fmean(each) for name, each in times.items()}


def at_the_end(place: Path) -> dict[str, float]:
    """Means over the last five log lines of the training."""
    records = [json.loads(line) for line in (place / "metrics.jsonl").open()]
    lines = [record for record in records if record["kind"] == "step"][-5:]
    found = {}
    for name in ("residual", "backward_residual", "batch_error"):
        known = [line[name] for line in lines if line[name] is not None]
        found[name] = statistics.fmean(known) if known else math.nan
    return found


def tested(place: Path, args: Any, steps: int) -> dict[str, float]:
    """The last weights with as many steps of Picard, whose iterates are causal."""
    learner = runs.trained(place, args.data, args.device)
    picard = {"solver__name": "picard", "solver__max_iter": steps, "solver__tol": 0.0}
    learner.config = configs.replace(learner.config, gradient__name="jfb", **picard)
    with precision(learner.config, learner.process.device):
        told = learner.evaluate()
    name = learner.task.metric.name
    return {f"{name}, {steps}": told[name], f"test residual, {steps}": told["residual"]}


def summed(those: list[dict[str, float]], key: str) -> float | str:
    """The mean, and a metric's standard deviation."""
    values = [each[key] for each in those]
    mean = statistics.fmean(values)
    if len(values) == 1 or not key.startswith(METRICS):
        return mean
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}"


def beside(args: Any, _: Report) -> Iterator[dict[str, Any]]:
    """One training step without an optimiser, ours by the layer and torchdeq's, the same cell."""
    import torchdeq  # noqa: PLC0415 (an extra)

    device = torch.device(args.device)
    cuda, quick = device.type == "cuda", args.quick
    sizes = {"width": 16, "heads": 2, "memory": 8} if quick else {"width": 768, "heads": 12}
    rows, length = (2, 8) if quick else (32, 128)
    solver = gdeq.Broyden(max_iter=12, tol=0.0)
    model = Transformer(10_000, **sizes, rows=rows, solver=solver).to(device)
    peer = torchdeq.get_deq(
        core="sliced", ift=True, f_solver="broyden", f_max_iter=12, f_tol=0.0,
        b_solver="broyden", b_max_iter=12, b_tol=0.0,
    )  # fmt: skip
    if cuda:
        model.cell.compile(dynamic=False)
    tokens = torch.randint(10_000, (rows, length + 1), device=device)

    def step(solve: Callable[..., Tensor], tokens: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            model.zero_grad(set_to_none=True)
            x, context = model.inject(tokens[:, :-1]), model.context(tokens[:, :-1])
            z = solve(x, context)
            logits = torch.nn.functional.linear(z, model.embed.weight, model.bias)
            cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def theirs(x: Tensor, context: Any) -> Tensor:
        found: Tensor = peer(lambda z: model.cell(z, x, context), torch.zeros_like(x))[0][-1]
        return found

    def ours(gradient: gdeq.Gradient) -> Callable[..., Tensor]:
        def solve(x: Tensor, context: Any) -> Tensor:
            found: Tensor = model.deq(x, context, gradient=gradient)
            return found

        return solve

    implicit = gdeq.Implicit(gdeq.Broyden(max_iter=12, tol=0.0), double_backward=False)
    steps: dict[str, Callable[[Tensor], Any]] = {
        "gdeq Implicit": partial(step, ours(implicit)),
        "gdeq GDEQ(refine=1)": partial(step, ours(gdeq.GDEQ(refine=1))),
        "torchdeq Implicit": partial(step, theirs),
    }
    timed = {  # torchdeq runs as it is shipped
        name: partial(gdeq.capture(run) if cuda and name.startswith("gdeq") else run, tokens)
        for name, run in steps.items()
    }
    times = interleave(timed, 2 if quick else 20, device, warmup=5)
    for name, run in steps.items():
        seconds = statistics.median(times[name])
        # Not captured: a recording takes its memory before it is replayed.
        memory = peak_memory(partial(run, tokens), device)
        yield {
            "step": name,
            "ms": 1e3 * seconds,
            "tokens/s": f"{rows * length / seconds:,.0f}",
            "MiB": memory / 2**20,
        }


def decoded(args: Any, _: Report) -> Iterator[dict[str, Any]]:
    learner = runs.trained(args.run, args.data, args.device)
    task, model = learner.task, learner.model
    assert isinstance(task, Language)
    assert isinstance(model, Transformer)
    prompt = task.parts[1][:64].long()
    for tol in (1e-1, 3e-2, 1e-2):
        model.deq.solver = gdeq.Picard(max_iter=50, tol=tol, stop="whole")
        with precision(learner.config, learner.process.device):
            steps = [
                [taken for _, taken in continued(model, prompt, args.tokens, 1.0, args.seed, reuse)]
                for reuse in (True, False)
            ]
        last, zeros = map(statistics.fmean, steps)
        yield {"residual": tol, "from the last token": last, "from zeros": zeros}


def draw(run: Path) -> Any:
    """Perplexity and residual along one training."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    steps = [record for record in records if record["kind"] == "step"]
    ends = [r for r in records if r["kind"] == "epoch" and r["test_perplexity"] is not None]
    per_epoch = ends[-1]["step"] / ends[-1]["epoch"]
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    at = [record["step"] / per_epoch for record in steps]
    left.semilogy(at, [r["perplexity"] for r in steps], color=COLORS["other"], label="training")
    tested = [record["test_perplexity"] for record in ends]
    left.semilogy(
        [r["epoch"] for r in ends],
        tested,
        "o-",
        color=COLORS["GDEQ"],
        label="test, averaged weights",
    )
    for anchor, name in ((57.1, "DEQ-TrellisNet, 24 M"),):
        left.axhline(anchor, color=COLORS["JFB"], linewidth=0.8, linestyle="--")
        left.text(ends[-1]["epoch"], anchor * 0.97, name, ha="right", va="top", fontsize=8)
    left.set(title="perplexity", xlabel="epoch", ylim=(30, 1000))
    left.legend()
    right.plot(at, [record["residual"] for record in steps], color=COLORS["GDEQ"])
    right.set(title="forward residual after 12 evaluations of f", xlabel="epoch", ylim=(0, None))
    figure.tight_layout()
    return figure


def main() -> None:
    wanted = parser("Language models by each gradient, beside torchdeq, and their decoding.")
    wanted.add_argument("what", choices=["train", "torchdeq", "decode", "draw"])
    wanted.add_argument("--preset", default="ptb")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--epochs", type=int, default=0, help="0: as the preset says")
    wanted.add_argument("--seeds", type=int, default=1, help="runs of each row")
    wanted.add_argument("--only", nargs="+", help="some rows, by name")
    wanted.add_argument("--steps", nargs="+", type=int, default=[8, 30], help="of the test")
    wanted.add_argument("--set", nargs="+", default=[], help="settings for all rows, key=value")
    wanted.add_argument("--folder", type=Path, default=ROOT / "runs" / "language")
    wanted.add_argument("--run", type=Path, help="a finished run, to decode or draw")
    wanted.add_argument("--tokens", type=int, default=200, help="to decode")
    wanted.set_defaults(out=ROOT / "results" / "language")
    args = wanted.parse_args()
    if args.quick:
        args.tokens, args.out = 10, ROOT / "runs" / "quick"
    report = Report(f"language-{args.what}", args)
    if args.what == "draw":
        report.figure(draw(args.run))
        return
    rows = {"train": trained, "torchdeq": beside, "decode": decoded}[args.what]
    report.table(list(rows(args, report)))
    report.close()


if __name__ == "__main__":
    main()
