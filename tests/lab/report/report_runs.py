"""Run folders made of formulas: what training would leave behind, in milliseconds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

SECONDS = {"implicit": 0.216, "jfb": 0.105, "npg": 0.126, "gdeq": 0.100}
FINAL = {"implicit": 97.2, "jfb": 96.4, "npg": 97.6, "gdeq": 97.9}


def config(gradient: str = "gdeq", **changes: Any) -> dict[str, Any]:
    """As `gdeq.lab.training` writes it; ``solver__max_iter`` stands for ``solver.max_iter``."""
    own = {"refine": 0, "tolerance": None, "max_refine": None, "max_iter": 20, "tol": 1e-6}
    made: dict[str, Any] = {
        **{"data": "digits", "epochs": 12, "batch_size": 64, "seed": 0, "device": "auto"},
        **{"precision": "float32", "pretrain_steps": 0, "pretrain_layers": 5},
        "model": {"size": "small", "weight_norm": True},
        "solver": {"name": "broyden", "max_iter": 18, "tol": 0.001, "memory": None},
        "gradient": {"name": gradient, **own, "solver": "broyden", "steps": 5, "damping": 0.5},
        "optimizer": {"name": "adam", "lr": 0.001},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        place[last] = value
    return made


def make_run(
    path: Path,
    gradient: str = "gdeq",
    *,
    until: int | None = None,
    torn: bool = False,
    similarity: tuple[int, ...] = (),
    device: str = "CPU (x86_64, 2 threads)",
    seconds: float | None = None,
    turns: list[float] | None = None,
    **changes: Any,
) -> Path:
    """A run folder.

    until: stops it after so many epochs, without a summary.
    turns: milliseconds per step, as if timed with others.
    """
    settings = config(gradient, **changes)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    environment = {"gdeq": "0.1.0", "revision": "abc1234", "torch": "2.5.0", "cuda": None}
    (path / "environment.json").write_text(json.dumps(environment | {"device": device}))
    draw = random.Random(str((gradient, settings["seed"], settings["pretrain_steps"])))
    per_step = seconds or SECONDS.get(gradient, 0.15)
    lines = _metrics(settings, until or settings["epochs"], per_step, draw)
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    (path / "metrics.jsonl").write_text(text[: -len(text) // 400] if torn else text)
    last = lines[-1]
    if until is None:
        summary = {
            **{"test_accuracy": last["test_accuracy"], "train_seconds": last["seconds"]},
            **{"epochs": settings["epochs"], "steps": last["step"], "ms_per_step": 1e3 * per_step},
            **{"device": device, "parameters": 123456, "processes": 1},
        }
        (path / "summary.json").write_text(json.dumps(summary))
    if turns:
        told = {"session": "one", "ms": turns, "evals": 9.5, "vjps": 3, "waited": 0.01}
        (path / "timing.json").write_text(json.dumps(told))
    if similarity:
        records = [json.dumps(r) for epoch in similarity for r in _similarity(epoch, draw)]
        (path / "similarity.jsonl").write_text("\n".join(records) + "\n")
    return path


def _metrics(
    settings: dict[str, Any], epochs: int, per_step: float, draw: random.Random
) -> list[dict[str, Any]]:
    name = settings["gradient"]["name"]
    top = FINAL.get(name, 95.0) + (0.4 if settings["pretrain_steps"] else 0.0)
    measured = name == "implicit" or settings["gradient"]["tolerance"] is not None
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        residual = 2e-4 * math.exp(0.1 * epoch) * draw.uniform(0.8, 1.2)
        for step in range(22 * (epoch - 1) + 2, 22 * epoch + 1, 2):
            spread = draw.uniform(0.7, 1.4)
            solver = {"residual": residual * spread, "solver_steps": 9 + 0.4 * epoch + spread}
            backward = {"backward_residual": 3e-6 * spread if measured else None}
            told = {"loss": 2.0 / step, "ms": 1e3 * per_step * spread, "lr": 1e-3}
            lines.append(
                {"kind": "step", "step": step, "epoch": epoch, **solver, **backward, **told}
            )
        accuracy = top - 70 * math.exp(-0.8 * epoch) + draw.gauss(0, 0.15)
        end = {"kind": "epoch", "epoch": epoch, "step": 22 * epoch, "test_accuracy": accuracy}
        lines.append(end | {"seconds": 22 * epoch * per_step, "test_loss": 0.2})
    return lines


def _similarity(epoch: int, draw: random.Random) -> list[dict[str, Any]]:
    errors = {"JFB": 0.55, "GDEQ": 0.5, "GDEQ refine 1": 0.16, "GDEQ refine 2": 0.05, "NPG": 0.1}
    products = {"GDEQ refine 1": 1, "GDEQ refine 2": 2, "NPG": 4}
    records = []
    for batch in range(8):
        for method, error in errors.items():
            off = error * draw.uniform(0.7, 1.3) * (1 + 0.01 * epoch)
            told = {"epoch": epoch, "batch": batch, "method": method, "cosine": 1 - off**2 / 2}
            told |= {"vjps": products.get(method, 0), "relative_error": off}
            exact = {"exact_residual": 3e-7 * draw.uniform(0.5, 1.0)}
            records.append(told | {"adjoint_residual": off * 1.1} | exact)
    return records


def compared(folder: Path, seeds: int = 2) -> list[Path]:
    """What `gdeq compare` leaves: four methods, without and with pre-training."""
    paths = []
    for seed in range(seeds):
        for steps in (0, 50):
            for name in SECONDS:
                path = folder / f"{name}{'-pretrained' if steps else ''}-seed{seed}"
                measured = (1, 4, 12) if name == "gdeq" and not steps and not seed else ()
                paths.append(
                    make_run(path, name, seed=seed, pretrain_steps=steps, similarity=measured)
                )
    return paths


def changed_summary(path: Path, **changes: Any) -> Path:
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | changes))
    return path


def other_task(path: Path, gradient: str = "gdeq", finished: bool = True) -> Path:
    """A run that is judged by bits per character, of which fewer are better."""
    make_run(path, gradient, data=None, task="chars")
    key = "test_bits_per_character"
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "test_accuracy" in line:
            line[key] = 2 + (100 - line.pop("test_accuracy")) / 30
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metric = {"name": "bits_per_character", "unit": "", "digits": 3, "higher_is_better": False}
    told = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps(told | {"metric": metric}))
    changed_summary(path, **{key: lines[-1][key]}, metric=metric)
    if not finished:
        (path / "summary.json").unlink()
    return path
