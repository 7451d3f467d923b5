"""What is beside f and the solver in a training step, with each of its changes off in turn.

    PYTHONPATH=src python3 benchmarks/beside.py [--device cpu] [--steps all|ends|none]

Printed for each variant: head, loss and their backward alone, in a graph; how far the gradients of
the head and of z are from those of plain float32; and, as asked, the GDEQ step of `gdeq bench`.
On a CPU all variants are the same: a test of this script and nothing more.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels import classifier, loss
from gdeq.fast.kernels.norms import fusion_whole
from gdeq.gradients import GDEQ
from gdeq.lab.bench.steps import Setup, arithmetic, build, default_setup, in_graph, measure, ours
from gdeq.models import layers, mdeq, mdeq_fused

SWITCHES: dict[str, tuple[Any, str]] = {
    "zeros beside group norms": (layers, "group_rooms"),
    "shortcuts joined": (layers, "joined_shortcuts"),
    "images of 8 channels": (layers, "wide_images"),
    "weights beside the stem": (mdeq, "weights_beside"),
    "first f from what samples share": (mdeq_fused, "zero_start"),
    "whole sums of two norms": (fusion_whole, "masked"),
    "classifier": (classifier, "enabled"),
    "loss": (loss, "enabled"),
}


@contextlib.contextmanager
def without(names: list[str]) -> Iterator[None]:
    try:
        for name in names:
            setattr(*SWITCHES[name], False)
        yield
    finally:
        for name in names:
            setattr(*SWITCHES[name], True)


def head_step(
    setup: Setup, precision: str
) -> tuple[Callable[[], None], Callable[[], list[Tensor]]]:
    """Head, loss and backward, and the gradients that they have left."""
    model = build(setup, GDEQ(), fused="auto" if precision == "bf16" else False)
    images, labels = setup.draw()
    with torch.no_grad():
        start = model.deq.cell.initial_state(model.stem(images))  # type: ignore[operator, union-attr]
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(1)
    z = []
    for part in start:
        values = torch.randn(part.shape, device=part.device).to(torch.bfloat16).to(half)
        z.append(values.to(memory_format=torch.channels_last).requires_grad_())
    leaves = [*z, *model.head.parameters()]

    def work() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.clear_autocast_cache()
        with arithmetic(setup, precision):
            fast = layers.runs_as_kernels(z[0], half)
            with layers.made_ready(model.head, z[0]) if fast else contextlib.nullcontext():
                # Gradients of leaves are to arrive on the current stream.
                logits = model.head([part.view_as(part) for part in z])
                value = loss.cross_entropy(logits, labels)
        value.backward()

    def gradients() -> list[Tensor]:
        work()
        return [leaf.grad.float() for leaf in leaves if leaf.grad is not None]

    return work, gradients


def difference(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative one of all tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", choices=("all", "ends", "none"), default="ends")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    setup = default_setup(args.device)
    truth = head_step(setup, "float32")[1]()
    every = list(SWITCHES)
    variants = {"all off": every, "all on": []} | {f"without {name}": [name] for name in every}
    print(f"{'':34} head, µs    gradients off by    step, ms")
    for name, off in variants.items():
        with without(off):
            work, gradients = head_step(setup, setup.precision)
            error = difference(gradients(), truth)
            head = 1e3 * in_graph(setup, work, 1)
            wanted = args.steps == "all" or (args.steps == "ends" and name.startswith("all"))
            step = measure(setup, name, lambda: ours(setup, GDEQ()))["ms"] if wanted else None
        told = "" if step is None else f"{step:12.3f}"
        print(f"{name:34} {head:8.1f} {error:16.2e} {told}", flush=True)


if __name__ == "__main__":
    main()
