"""What k products with Jᵀ buy: ways to spend them on w = (I − Jᵀ)⁻¹v, and when a w is taken back.

On a trained MDEQ, in float32: the error of w, its residual and the error of the gradient of f's
parameters by GDEQ's refinement, by the least residual in the same space (GMRES; with one more step
by its residual, Anderson's) and by NPG; and what the refinement's last step says of its error.

    PYTHONPATH=src python3 benchmarks/vjps.py --weights RUN/weights.safetensors --data DATA

Without --weights: random tanh maps, some with no stable equilibrium, and the rules by which a
refined w could be taken back for the one of smallest residual on the way.

Minutes on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import gdeq
from gdeq import gradients
from gdeq.gradients import GDEQ, GROWTH, NPG, dot, norm
from secants import as_vectors, cotangent, load  # beside this file

Map = Callable[[Tensor], Tensor]  # (batch, d) -> (batch, d)
MOST = 6  # VJPs


def refined(v: Tensor, vjp: Map, times: int, inverse: Map) -> tuple[list[Tensor], list[Tensor]]:
    """`gradients._refine` without any rule: w before and after each VJP, and their residuals."""
    w = step = inverse(v)
    found, residuals, factors = [w], [], []
    for _ in range(times):
        r = v + vjp(w) - w
        residuals.append(norm(r))
        q = inverse(r)
        for s, share, after in factors:
            q = q + after * (share * dot(s, q))
        squared = dot(step, step)
        after = q * (squared / (squared - dot(step, q)))
        factors.append((step, 1 / squared, after))
        w, step = w + after, after
        found.append(w)
    return found, residuals


def by_rule(v: Tensor, ws: list[Tensor], residuals: list[Tensor], growth: float) -> Tensor:
    """As `gradients._refine` takes w back: its residual has doubled and it is this much longer.

    growth: 0 is the rule until commit 63c1e8e, by the residual alone; infinite: never.
    """
    least, at = torch.stack(residuals).min(0)
    kept = torch.stack(ws)[at, torch.arange(len(v))]
    before, last = ws[-2], ws[-1] - ws[-2]
    bound = gradients.AMPLIFICATION * residuals[-1] * (norm(before) / norm(v))
    w = before + torch.clamp(bound / norm(last), max=1.0)[:, None] * last
    taken = (residuals[-1] <= gradients.SETBACK * least) | (norm(w) <= growth * norm(kept))
    return torch.where(taken[:, None], w, kept)


def on_a_model(options: argparse.Namespace) -> None:
    model, images, labels = load(options)
    with torch.no_grad():
        injection = model.stem(images)
    f, split, zero = as_vectors(model, injection)
    solver = gdeq.Anderson(120, tol=1e-5)
    if options.steps:
        solver = gdeq.Anderson(options.steps, tol=0.0)
    found = gdeq.solve(f, zero, solver)
    z = found.z.clone().requires_grad_()
    out = f(z)

    def vjp(w: Tensor) -> Tensor:
        return torch.autograd.grad(out, z, w, retain_graph=True)[0]

    v = cotangent(model, split(found.z), labels)
    exact = gdeq.solve(lambda w: v + vjp(w), v, gdeq.Anderson(150, tol=1e-5, memory=20))
    print(
        f"{len(images)} images, forward residual at most {found.residual.max():.1e}, w to "
        f"{exact.residual.max():.1e}; |w|/|v| {(norm(exact.z) / norm(v)).median():.2f}, at most "
        f"{(norm(exact.z) / norm(v)).max():.2f}\n"
        "                        VJPs  error of w: median, worst   residual: median   gradient: "
        "error, cosine   last step / w: median, largest error / that",
        flush=True,
    )
    parameters = [p for p in model.deq.cell.parameters() if p.requires_grad]
    outside = injection.clone().requires_grad_()
    again = f(found.z, outside)

    def gradient(w: Tensor) -> Tensor:
        found = torch.autograd.grad(again, [*parameters, outside], w, retain_graph=True)
        return torch.cat([g.double().flatten() for g in found])

    truth = gradient(exact.z)

    def tell(name: str, vjps: int, w: Tensor, last: Tensor | None = None) -> None:
        apart = norm(w - exact.z) / norm(exact.z)
        residual = norm(v + vjp(w) - w) / norm(v)
        g = gradient(w)
        cosine, error = g @ truth / (g.norm() * truth.norm()), (g - truth).norm() / truth.norm()
        print(
            f"{name:24s}{vjps:3d}{apart.median():10.3f}{apart.max():8.3f}"
            f"{residual.median():20.3f}{error:19.3f}{cosine:9.4f}"
            + (f"{last.median():15.3f}{(apart / last).max():10.2f}" if last is not None else ""),
            flush=True,
        )

    solution = SimpleNamespace(inverse=None, secants=None, precision=found.precision)
    tell("JFB", 0, v)
    for k in range(1, MOST + 1):
        own = GDEQ(refine=k).cotangent(v, vjp, solution)  # type: ignore[arg-type]
        tell("GDEQ, refine", k, own.w, own.error)
    for k in range(1, MOST + 1):  # as it was before: taken back where the residual has doubled
        ws, residuals = refined(v, vjp, k, lambda x: x)
        tell("judged by residual", k, by_rule(v, ws, residuals, 0.0))
    own = GDEQ(tolerance=0.1, max_refine=5).cotangent(v, vjp, solution)  # type: ignore[arg-type]
    tell("GDEQ, tolerance 0.1", own.vjps, own.w)
    for k in range(1, MOST):
        least = gdeq.Implicit(gdeq.GMRES(max_iter=k, tol=0.0)).cotangent(v, vjp, solution)  # type: ignore[arg-type]
        tell("least residual", least.vjps, least.w)
        # GMRES knows that residual without another VJP.
        tell("and a step by it", least.vjps, v + vjp(least.w))
    for k in (3, 5):
        own = NPG(steps=k, damping=0.5).cotangent(v, vjp, solution)  # type: ignore[arg-type]
        tell(f"NPG ({k}, 0.5)", own.vjps, own.w)


def on_random_maps(samples: int = 640, d: int = 30) -> None:
    torch.manual_seed(0)
    print("error of w: median, 0.9 of the samples, worst; samples with more than 2, more than 10")
    for radius in (0.95, 1.5, 2.5):
        matrix = torch.randn(samples, d, d, dtype=torch.float64)
        matrix *= (radius / torch.linalg.eigvals(matrix).abs().amax(1))[:, None, None]
        shift = torch.randn(samples, d, dtype=torch.float64)

        def f(z: Tensor, matrix: Tensor = matrix, shift: Tensor = shift) -> Tensor:
            return torch.tanh(torch.einsum("nij,nj->ni", matrix, z) + shift)

        solved = gdeq.solve(f, torch.zeros_like(shift), gdeq.Broyden(12, tol=0.0))
        jacobian = (1 - f(solved.z) ** 2)[:, :, None] * matrix
        v = torch.randn_like(shift)
        exact = torch.linalg.solve(torch.eye(d, dtype=torch.float64) - jacobian.mT, v)
        inverse = solved.inverse
        assert inverse is not None
        print(f"spectral radius {radius} of the matrix, 12 Broyden steps, {samples} samples")
        for start, apply in {
            "from -I": lambda x: x,
            "from the inverse": lambda x, inverse=inverse: -inverse.rmatvec(x),
        }.items():
            for k in (1, 2, 3, 4, 6, 8, 12):
                ws, residuals = refined(
                    v, lambda w, j=jacobian: torch.einsum("nij,ni->nj", j, w), k, apply
                )
                told = []
                for name, growth in {"never": torch.inf, "residual": 0.0, "both": GROWTH}.items():
                    w = by_rule(v, ws, residuals, growth)
                    e = norm(w - exact) / norm(exact)
                    told.append(
                        f"{name} {e.median():.3f} {e.quantile(0.9):.2f} {e.max():6.1f} "
                        f"{int((e > 2).sum()):3d} {int((e > 10).sum()):3d}"
                    )
                print(f"  {start:17s}{k} VJPs: " + "   |   ".join(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--size", default="large")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--steps", type=int, default=0, help="Anderson's; 0: to 1e-5")
    options = parser.parse_args()
    if options.weights:
        on_a_model(options)
    else:
        on_random_maps()


if __name__ == "__main__":
    main()
