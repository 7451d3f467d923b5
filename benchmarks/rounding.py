"""What the precisions of z and of the stored steps do to a solve and its gradient.

    PYTHONPATH=src python3 benchmarks/rounding.py --weights RUN/weights.safetensors --data DATA

On a trained MDEQ with f in bfloat16: 18 Broyden steps with z in float32 or bfloat16, and with the
steps kept in bfloat16 or 8 bits, in the order that they have on a GPU (all channels of a pixel,
then the next pixel).  Then, with f in float32 at the z that was found: its residual, its distance
from the fixed point, the factors kept, and the error of w by JFB, GDEQ and GDEQ with one and two
VJPs; beside these what one and two VJPs make without the inverse.

A minute on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import gdeq
from gdeq.fast.product import PlainSweep
from gdeq.gradients import GDEQ, norm
from secants import as_vectors, cotangent, load  # beside this file

STEPS = 18
HALF = torch.finfo(torch.bfloat16).eps


class InFloat32(PlainSweep):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.rounded = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="large")
    parser.add_argument("--images", type=int, default=16)
    options = parser.parse_args()
    model, images, labels = load(options)
    with torch.no_grad():
        injection = model.stem(images)
    in_order, split_in_order, zero = as_vectors(model, injection)
    batch = len(zero)
    parts = split_in_order(zero)
    sizes = [part[0].numel() for part in parts]

    def split(z: Tensor) -> tuple[Tensor, ...]:
        """From channels last."""
        found = zip(z.split(sizes, dim=1), parts, strict=True)
        return tuple(
            piece.view(batch, like.shape[2], like.shape[3], -1).permute(0, 3, 1, 2)
            for piece, like in found
        )

    def f(z: Tensor) -> Tensor:
        rows = torch.cat([part.flatten(1) for part in split(z)], dim=1)
        return channels_last(split_in_order(in_order(rows)))

    def channels_last(state: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part.permute(0, 2, 3, 1).flatten(1) for part in state], dim=1)

    fixed = gdeq.solve(f, zero, gdeq.Anderson(120, tol=1e-5))
    print(f"{batch} images; the fixed point to {fixed.residual.max():.1e}")
    print(
        "z         steps    residual: median, most   from z*  kept   error of w, median (most): "
        "JFB, GDEQ, refine 1 and 2; without the inverse, refine 1 and 2"
    )

    def in_half(z: Tensor) -> Tensor:  # in parts: (batch·d,) -> (batch·d,)
        pieces = z.split([batch * size for size in sizes])
        rows = torch.cat([piece.view(batch, -1) for piece in pieces], dim=1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = f(rows.float()).to(torch.bfloat16)
        return torch.cat([piece.reshape(-1) for piece in found.split(sizes, dim=1)])

    for kind, of_z in ((InFloat32, "float32"), (PlainSweep, "bfloat16")):
        for bits in (16, 8):
            solver = gdeq.Broyden(STEPS, tol=0.0, step_bits=bits)
            sweep = kind(zero.clone(), sizes, torch.bfloat16, solver, HALF, STEPS, None)
            for t in range(STEPS + 1):
                sweep.take(t, in_half(sweep.parts))
            settled = sweep.settle(STEPS)
            assert settled.z is not None
            z = settled.z.clone().requires_grad_()
            out = f(z)

            def vjp(u: Tensor, out: Tensor = out, z: Tensor = z) -> Tensor:
                return torch.autograd.grad(out, z, u, retain_graph=True)[0]

            own = tuple(part.contiguous() for part in split(settled.z))
            v = channels_last(split_in_order(cotangent(model, own, labels)))
            exact = gdeq.solve(
                lambda u, v=v, vjp=vjp: v + vjp(u), v, gdeq.Anderson(150, tol=1e-5, memory=20)
            ).z
            with_it = SimpleNamespace(
                inverse=SimpleNamespace(vectors=settled.inverse), secants=None, precision=HALF
            )
            without = SimpleNamespace(inverse=None, secants=None, precision=HALF)
            found = [v]
            for record, times in ((with_it, (0, 1, 2)), (without, (1, 2))):
                for k in times:
                    found.append(GDEQ(refine=k).cotangent(v, vjp, record).w)  # type: ignore[arg-type]
            errors = [norm(w - exact) / norm(exact) for w in found]
            residual = norm(out.detach() - settled.z) / norm(settled.z)
            away = norm(settled.z - fixed.z) / norm(fixed.z)
            print(
                f"{of_z:10s}{bits:2d} bits{residual.median():14.4f}{residual.max():9.4f}"
                f"{away.median():14.4f}{sweep.keep.sum(1).float().mean():6.1f}   "
                + "".join(f"  {error.median():.4f} ({error.max():.2f})" for error in errors),
                flush=True,
            )


if __name__ == "__main__":
    main()
