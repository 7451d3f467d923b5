"""Language models: each gradient by the same recipe, explicit transformers, torchdeq, decoding.

    python benchmarks/language.py train --device cuda --data DATA --epochs 32
    python benchmarks/language.py torchdeq --device cuda
    python benchmarks/language.py decode --run runs/RUN --data DATA --device cuda
    python benchmarks/language.py draw --run results/language/ptb

train: all rows have about the same number of parameters and of passes over the text.  "explicit" is
the same module evaluated once; "explicit, 4 blocks" is narrower and deeper.
torchdeq: one training step of the same cell in turns; both solve twelve steps of Broyden, forward
and backward.  decode: solver steps a token, from the last equilibrium and from zeros.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
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
from gdeq.lab.training.precision import precision
from gdeq.models.transformer import Transformer

# As many evaluations of f in the forward pass as the preset's 8 and 4.
PICARD = ["solver=picard", "solver.max_iter=12"]
BROYDEN = ["solver=broyden", "solver.max_iter=12", "gradient=gdeq"]
EXPLICIT = ["pretrain_steps=100000000", "pretrain_layers=1"]
ROWS = {
    "Unrolled, 4 steps": [],
    "JFB": ["gradient=jfb", *PICARD],
    "NPG": ["gradient=npg", *PICARD],
    "Implicit": ["gradient=implicit", "gradient.max_iter=12", "gradient.tol=1e-2", *PICARD],
    "GDEQ": BROYDEN,
    "GDEQ refine 1": [*BROYDEN, "gradient.refine=1"],
    "GDEQ refine 2": [*BROYDEN, "gradient.refine=2"],
    "explicit": EXPLICIT,
    "explicit, 4 blocks": EXPLICIT,
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


def trained(args: Any) -> Iterator[dict[str, Any]]:
    more = [f"device={args.device}", *(QUICK if args.quick else [])]
    more += [f"epochs={args.epochs}"] if args.epochs else []
    for name, settings in ROWS.items():
        if args.only and name not in args.only:
            continue
        given = [*more, *settings, f"test_every={args.epochs or 1}"]
        if name == "explicit, 4 blocks":
            width = width_of(4, configs.load(args.preset, more))
            given += ["model.blocks=4", f"model.width={width}"]
        scores = []
        for seed in range(args.seed, args.seed + args.seeds):
            place = args.folder / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            shutil.rmtree(place, ignore_errors=True)
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            config = configs.load(args.preset, [*given, f"seed={seed}"])
            told = runs.train(place, config, args.data)
            scores.append(told[f"test_{told['metric']['name']}"])
        last = [json.loads(line) for line in (place / "metrics.jsonl").open()][-1]
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else math.nan
        yield {
            "gradient": name,
            told["metric"]["name"]: f"{statistics.fmean(scores):.2f}",
            "spread": f"{max(scores) - min(scores):.2f}",
            "residual": last["residual"],
            "batch error": math.nan if last["batch_error"] is None else last["batch_error"],
            "ms": told["ms_per_step"],
            "tokens/s": f"{1e3 * config.batch_size * config.window / told['ms_per_step']:,.0f}",
            "GiB": peak,
            "parameters": f"{told['parameters'] / 1e6:.1f} M",
        }


def beside(args: Any) -> Iterator[dict[str, Any]]:
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

    def ours(gradient: gdeq.Gradient) -> Callable[[], Any]:
        def solve(x: Tensor, context: Any) -> Tensor:
            found: Tensor = model.deq(x, context, gradient=gradient)
            return found

        done = gdeq.capture(lambda tokens: step(solve, tokens)) if cuda else None
        return lambda: done(tokens) if done else step(solve, tokens)

    implicit = gdeq.Implicit(gdeq.Broyden(max_iter=12, tol=0.0), double_backward=False)
    steps = {
        "gdeq Implicit": ours(implicit),
        "gdeq GDEQ(refine=1)": ours(gdeq.GDEQ(refine=1)),
        "torchdeq Implicit": lambda: step(theirs, tokens),
    }
    times = interleave(steps, 2 if quick else 20, device, warmup=5)
    for name, run in steps.items():
        seconds = statistics.median(times[name])
        yield {
            "step": name,
            "ms": 1e3 * seconds,
            "tokens/s": f"{rows * length / seconds:,.0f}",
            "MiB": peak_memory(run, device) / 2**20,
        }


def decoded(args: Any) -> Iterator[dict[str, Any]]:
    trainer = runs.trained(args.run, args.data, args.device)
    task, model = trainer.task, trainer.model
    assert isinstance(task, Language)
    assert isinstance(model, Transformer)
    prompt = task.parts[1][:64].long()
    for tol in (1e-1, 3e-2, 1e-2):
        model.deq.solver = gdeq.Picard(max_iter=50, tol=tol, stop="whole")
        with precision(trainer.config, trainer.process.device):
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
        left.text(0, anchor * 0.97, name, va="top", fontsize=8)
    left.set(title="perplexity", xlabel="epoch", ylim=(35, 1000))
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
    wanted.add_argument("--only", nargs="+", choices=list(ROWS), help="some rows")
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
    found = list({"train": trained, "torchdeq": beside, "decode": decoded}[args.what](args))
    report.table(found)
    report.csv(found)
    report.close()


if __name__ == "__main__":
    main()
