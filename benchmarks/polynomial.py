"""Is there a better w in the vectors that a few VJPs give?

    PYTHONPATH=src python3 benchmarks/polynomial.py --weights RUN/weights.safetensors --data DATA

w = (I − Jᵀ)⁻¹v is exact; k VJPs give v, Jᵀv, ..., (Jᵀ)ᵏv.  On a trained MDEQ in float32, at the z
of a few and of many Broyden steps: the errors of w by JFB, `GDEQ(refine=k)` from JFB and Neumann's
series, and those of the combination of these vectors that is nearest to w in the mean of one half
of the images: one for all numbers, one for each scale, one for each channel.  Errors are of the
other half, for which nothing was fitted: what a rule could do that is the same for all images.

A minute on a CPU.
"""

from __future__ import annotations

import argparse
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import gdeq
from gdeq.gradients import GDEQ, norm
from secants import as_vectors, cotangent, load  # beside this file

VJPS = 3


def fitted(vectors: list[Tensor], w: Tensor, seen: int, blocks: list[slice]) -> Tensor:
    """Of the first ``seen`` samples, each as long as any other; blocks have coefficients each."""
    size = 1 / norm(w)[:seen, None]
    found = torch.empty_like(w)
    for block in blocks:
        columns = [(x[:seen] * size)[:, block].flatten() for x in vectors]
        wanted = (w[:seen] * size)[:, block].flatten()
        solution = torch.linalg.lstsq(torch.stack(columns, 1).double(), wanted.double()).solution
        pairs = zip(solution.float(), vectors, strict=True)
        found[:, block] = sum(share * x[:, block] for share, x in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="large")
    parser.add_argument("--images", type=int, default=32)
    options = parser.parse_args()
    model, images, labels = load(options)
    with torch.no_grad():
        injection = model.stem(images)
    f, split, zero = as_vectors(model, injection)
    seen = len(zero) // 2
    shapes = [part.shape[1:] for part in split(zero)]
    ends = [0, *accumulate(shape.numel() for shape in shapes)]
    scales = [slice(begin, end) for begin, end in pairwise(ends)]
    channels = [
        slice(begin + i * shape[1:].numel(), begin + (i + 1) * shape[1:].numel())
        for begin, shape in zip(ends, shapes, strict=False)
        for i in range(shape[0])
    ]
    for steps in (6, 18):
        solution = gdeq.solve(f, zero, gdeq.Broyden(steps, tol=0.0))
        z = solution.z.clone().requires_grad_()
        out = f(z)

        def vjp(u: Tensor, out: Tensor = out, z: Tensor = z) -> Tensor:
            return torch.autograd.grad(out, z, u, retain_graph=True)[0]

        v = cotangent(model, split(solution.z), labels)
        exact = gdeq.solve(
            lambda u, v=v, vjp=vjp: v + vjp(u), v, gdeq.Anderson(200, tol=1e-4, memory=20)
        )
        print(
            f"\n{steps} steps, residual {solution.residual.median():.3f}; w to "
            f"{exact.residual.max():.1e}; {len(zero) - seen} images: median error, most; cosine, "
            "least"
        )

        def tell(name: str, w: Tensor, exact: Tensor = exact.z) -> None:
            error = (norm(w - exact) / norm(exact))[seen:]
            cosine = ((w * exact).sum(1) / (norm(w) * norm(exact)))[seen:]
            print(
                f"  {name:26s}{error.median():8.3f}{error.max():8.3f}"
                f"{cosine.median():8.3f}{cosine.min():8.3f}",
                flush=True,
            )

        none = SimpleNamespace(inverse=None, secants=None, precision=1e-7)
        vectors, series = [v], v
        tell("JFB", v)
        for k in range(1, VJPS + 1):
            vectors.append(vjp(vectors[-1]))
            series = v + vjp(series)
            tell(f"refine {k}", GDEQ(refine=k).cotangent(v, vjp, none).w)  # type: ignore[arg-type]
            tell(f"Neumann {k}", series)
            tell(f"fitted {k}", fitted(vectors, exact.z, seen, [slice(None)]))
            tell(f"fitted {k}, each scale", fitted(vectors, exact.z, seen, scales))
            tell(f"fitted {k}, each channel", fitted(vectors, exact.z, seen, channels))


if __name__ == "__main__":
    main()
