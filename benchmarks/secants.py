"""What solvers make of the same secants: steps to a residual, and how good their inverse is.

On a trained MDEQ, in float32: Broyden's method, Anderson's with few and with all differences, and
all secant equations at once with the least change of the Jacobian (type I; Anderson's is type II).
Then w = (I − J)⁻ᵀv at the equilibrium by each inverse estimate alone, beside an exact one and JFB.

    PYTHONPATH=src python3 benchmarks/secants.py --weights RUN/weights.safetensors --data DATA

Minutes on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import gdeq
from gdeq.lab import data as datasets
from gdeq.lab.data import Batches
from gdeq.models.mdeq import MDEQ, mdeq

Map = Callable[[Tensor], Tensor]  # (batch, d) -> (batch, d)
RIDGE = 1e-8  # beside columns of length one
LEVELS = (0.1, 0.01, 0.001)


def load(options: argparse.Namespace) -> tuple[MDEQ, Tensor, Tensor]:
    weights = load_file(options.weights)
    norm = "batch" if any(name.endswith("running_mean") for name in weights) else "group"
    model = mdeq(options.size, dropout=0.0, outer_norm=norm, fused=False)
    model.load_state_dict(weights)
    data = datasets.load("cifar10", options.data, torch.device("cpu"))
    batches = Batches(data.test_x, data.test_y, options.images, mean=data.mean, std=data.std)
    images, labels = next(iter(batches.epoch(0)))[1]
    return model.eval(), images, labels


def as_vectors(
    model: MDEQ, injection: Tensor
) -> tuple[Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]], Tensor]:
    """f of (batch, d), of this injection or another; a vector in its scales; and z = 0."""
    cell = model.deq.cell
    like = cell.initial_state(injection)  # type: ignore[operator, union-attr]
    sizes = [part[0].numel() for part in like]

    def split(z: Tensor) -> tuple[Tensor, ...]:
        parts = zip(z.split(sizes, dim=1), like, strict=True)
        return tuple(part.reshape(of.shape) for part, of in parts)

    def f(z: Tensor, x: Tensor = injection) -> Tensor:
        return torch.cat([part.flatten(1) for part in cell(split(z), x)], dim=1)  # type: ignore[operator]

    return f, split, torch.zeros(len(injection), sum(sizes))


def cotangent(model: MDEQ, parts: tuple[Tensor, ...], labels: Tensor) -> Tensor:  # (batch, d)
    """v: the gradient of each image's own loss."""
    parts = tuple(part.clone().requires_grad_() for part in parts)
    loss = torch.nn.functional.cross_entropy(model.head(parts), labels, reduction="sum")
    return torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, parts)], dim=1)


def relative(g: Tensor, z: Tensor) -> Tensor:  # (batch, d), (batch, d) -> (batch,)
    return g.norm(dim=1) / torch.maximum((g + z).norm(dim=1), z.norm(dim=1))


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    size = x.norm(dim=2, keepdim=True)
    return x / size, size


class Secants:
    """g(z + dz) ≈ g + dg for all differences that were seen, and −I elsewhere."""

    def __init__(self, first_type: bool) -> None:
        self.first_type = first_type
        self.dz: list[Tensor] = []
        self.dg: list[Tensor] = []

    def negative_inverse(self, x: Tensor, count: int, transposed: bool = False) -> Tensor:
        """−B⁻¹x = x − (ΔZ + ΔG)(LᵀΔG)⁻¹Lᵀx with L = ΔG (type II) or ΔZ (type I), in float64."""
        if count == 0:
            return x
        dz, dg = (torch.stack(parts[:count], 1).double() for parts in (self.dz, self.dg))
        left, right = (dz if self.first_type else dg), dz + dg
        columns, of_columns = unit_rows(dg)
        rows, of_rows = unit_rows(left)
        small = rows @ columns.mT + RIDGE * torch.eye(count, dtype=torch.float64)
        wide = x.double().unsqueeze(2)
        if transposed:
            inner = torch.linalg.solve(small.mT, (right @ wide) / of_columns) / of_rows
            return (wide - left.mT @ inner).squeeze(2).to(x.dtype)
        inner = torch.linalg.solve(small, rows @ wide) / of_columns
        return (wide - right.mT @ inner).squeeze(2).to(x.dtype)


def sweep(f: Map, z: Tensor, steps: int, first_type: bool) -> tuple[Tensor, Secants, Tensor]:
    """z, what was seen, and the residuals (steps, batch)."""
    seen, trace = Secants(first_type), []
    g = f(z) - z
    for count in range(steps):
        there = z + seen.negative_inverse(g, count)
        g_there = f(there) - there
        seen.dz.append(there - z)
        seen.dg.append(g_there - g)
        z, g = there, g_there
        trace.append(relative(g, z))
    return z, seen, torch.stack(trace)


def told(name: str, trace: Tensor, shown: list[int], began: float) -> None:
    means = ", ".join(f"{trace[n - 1].mean():.4f}" for n in shown if n <= len(trace))
    taken = [(trace > level).sum(0) + 1 for level in LEVELS]
    spans = ", ".join(f"{int(n.min())} to {int(n.max())}" for n in taken)
    print(f"{name:28s} {means:44s} {spans}   ({time.perf_counter() - began:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data")
    parser.add_argument("--size", default="large")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    model, images, labels = load(options)
    began = time.perf_counter()
    with torch.no_grad():
        f, split, zero = as_vectors(model, model.stem(images))
    shown = [4, 6, 9, 12, 18]
    print(
        f"mean residual after {shown} steps; steps to {LEVELS}, least to most of {len(images)} "
        f"images ({options.steps + 1}: not within {options.steps})"
    )
    for name, solver in {
        "Broyden": gdeq.Broyden(options.steps, tol=0.0),
        "Anderson, 5 differences": gdeq.Anderson(options.steps, tol=0.0),
    }.items():
        told(name, gdeq.solve(f, zero, solver).trace, shown, began)
    with torch.no_grad():
        _, second, trace = sweep(f, zero, options.steps, first_type=False)
        told("Anderson, all differences", trace, shown, began)
        _, first, trace = sweep(f, zero, options.steps, first_type=True)
        told("all differences, type I", trace, shown, began)

    found = gdeq.solve(f, zero, gdeq.Anderson(60, tol=1e-6, memory=12))
    z = found.z.clone().requires_grad_()
    out = f(z)

    def vjp(w: Tensor) -> Tensor:
        return torch.autograd.grad(out, z, w, retain_graph=True)[0]

    v = cotangent(model, split(found.z), labels)
    exact = gdeq.solve(lambda w: v + vjp(w), v, gdeq.Anderson(80, tol=1e-5, memory=12))
    print(
        f"equilibrium to {found.residual.max():.1e}, w to {exact.residual.max():.1e} "
        f"({time.perf_counter() - began:.0f} s).  Error of w, median and worst:"
    )

    def error(name: str, w: Tensor) -> None:
        apart = (w - exact.z).norm(dim=1) / exact.z.norm(dim=1)
        print(f"{name:28s} {apart.median():.4f} {apart.max():.4f}", flush=True)

    error("v itself (JFB)", v)
    for count in (6, 12, 18):
        solved = gdeq.solve(f, zero, gdeq.Broyden(count, tol=0.0))
        assert solved.inverse is not None
        error(f"Broyden, {count} steps", -solved.inverse.rmatvec(v))  # type: ignore[operator]
        error(f"Anderson, {count} steps", second.negative_inverse(v, count, transposed=True))
        error(f"type I, {count} steps", first.negative_inverse(v, count, transposed=True))


if __name__ == "__main__":
    main()
